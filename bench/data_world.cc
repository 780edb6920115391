#include "bench/data_world.h"

#include <cmath>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {

absl::StatusOr<std::unique_ptr<DataWorld>> DataWorld::Start(uint64_t pool_bytes) {
  std::unique_ptr<DataWorld> world(new DataWorld());
  WAVEKV_ASSIGN_OR_RETURN(world->daemons_, integration::Daemons::Start(
                                               {.wave_buffer = false, .pool_bytes = pool_bytes}));
  client::ClientOptions options;
  options.address = world->daemons_->address();
  options.client_name = "bench";
  WAVEKV_ASSIGN_OR_RETURN(world->shared_, client::Session::Connect(options));
  options.shared_memory = false;
  WAVEKV_ASSIGN_OR_RETURN(world->grpc_, client::Session::Connect(options));
  const client::ClientInfo info = world->shared_->info();
  if (!info.shared_memory) {
    return absl::FailedPreconditionError(
        absl::StrCat("no shared-memory data plane: ", info.shared_memory_absent));
  }
  return world;
}

ModelShape DataShape() {
  ModelShape shape;
  shape.layer_count = 1;
  shape.query_head_count = 32;
  shape.kv_head_count = 8;
  shape.key_dim = 128;
  shape.value_dim = 128;
  shape.dtype = DType::kBF16;
  shape.softmax_scale = 1.0f / std::sqrt(128.0f);
  shape.model_id = "bench";
  return shape;
}

std::vector<uint16_t> RandomBF16(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint16_t> numbers(count);
  for (uint16_t& number : numbers) number = FloatToBF16(normal(random));
  return numbers;
}

}  // namespace wavekv::bench
