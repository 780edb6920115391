#include "tests/integration/resident_engine.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/driver/device.h"
#include "storage/base/status_macros.h"

namespace wavekv::integration {
namespace {

constexpr std::chrono::seconds kPatience(60);
// What the fake driver adds to a host address to make it a device's (tests/gpu/driver).
constexpr uint64_t kDeviceBit = uint64_t{1} << 60;

absl::StatusOr<std::shared_ptr<const CudaDevice>> OpenDevice(const std::string& uuid) {
  WAVEKV_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Identity identity,
                          CudaDevice::FindByUuid(*driver, uuid));
  return CudaDevice::Open(std::move(driver), identity, CudaDevice::Waiting::kAsItIs);
}

std::span<const std::byte> BytesOf(const client::Tensor& tensor) {
  return {static_cast<const std::byte*>(tensor.data), tensor.bytes()};
}

}  // namespace

ModelShape ResidentShape() {
  ModelShape shape;
  shape.layer_count = 2;
  shape.query_head_count = 4;
  shape.kv_head_count = 2;
  shape.key_dim = 64;
  shape.value_dim = 64;
  shape.dtype = DType::kBF16;
  shape.softmax_scale = 0.125f;
  shape.model_id = "integration";
  return shape;
}

client::SequenceOptions ResidentSequenceOptions(uint64_t max_tokens) {
  client::SequenceOptions options;
  options.shape = ResidentShape();
  options.index.segment_tokens = kResidentSegmentTokens;
  options.index.small_segment_tokens = kResidentSmallSegmentTokens;
  options.index.budget = client::Budget::Ratio(1.0);
  options.max_tokens = max_tokens;
  options.label = "resident";
  return options;
}

client::ResidentOptions ResidentRegionOptions() { return {.cache_ratio = 0.5, .ring_rows = 512}; }

absl::StatusOr<std::unique_ptr<client::Sequence>> CreateResidentSequence(client::Session& session,
                                                                         HostCache* cache,
                                                                         uint64_t token_count,
                                                                         uint64_t max_tokens) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<client::Sequence> sequence,
                          session.CreateSequence(ResidentSequenceOptions(max_tokens)));
  const HostCache::Chunk chunk = cache->Slice(0, token_count, 0, ResidentShape().layer_count);
  WAVEKV_RETURN_IF_ERROR(sequence->Insert(0, chunk.layers, chunk.keys, chunk.values));
  WAVEKV_RETURN_IF_ERROR(sequence->BuildIndex().status());
  return sequence;
}

absl::StatusOr<std::unique_ptr<ResidentEngine>> ResidentEngine::Attach(
    client::Sequence* sequence, const client::ResidentOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(client::ResidentAttachment attachment, sequence->AttachResident(options));
  std::unique_ptr<ResidentEngine> engine(new ResidentEngine(sequence, std::move(attachment)));
  WAVEKV_RETURN_IF_ERROR(engine->Map());
  return engine;
}

absl::Status ResidentEngine::Map() {
  WAVEKV_ASSIGN_OR_RETURN(auto device, OpenDevice(attachment_.device_uuid));
  WAVEKV_ASSIGN_OR_RETURN(buffer_,
                          client::MappingCache(std::move(device)).Buffer(attachment_, kPatience));
  std::vector<std::span<const std::byte>> windows;
  for (const client::PoolWindow& window : attachment_.windows) {
    WAVEKV_ASSIGN_OR_RETURN(Mapping mapped,
                            Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadOnly));
    windows.emplace_back(mapped.data(), mapped.bytes());
    windows_.push_back(std::move(mapped));
  }
  auto* const buffer = reinterpret_cast<std::byte*>(buffer_->address() & ~kDeviceBit);
  step_ = std::make_unique<resident::ReferenceStep>(
      buffer + attachment_.region_offset, std::move(windows), attachment_.shape.group_size(),
      attachment_.shape.softmax_scale);
  return absl::OkStatus();
}

absl::Status ResidentEngine::WaitForRoom() {
  while (token_count_ >= steady_first_ + attachment_.ring_rows) {
    WAVEKV_ASSIGN_OR_RETURN(const client::ResidentState state,
                            sequence_->ResidentStatus(steady_first_, kPatience));
    WAVEKV_RETURN_IF_ERROR(state.attached);
    if (state.steady_first <= steady_first_) {
      return absl::FailedPreconditionError(absl::StrCat(
          "the ring stays full: ", token_count_, " tokens, clustered up to ", state.steady_first));
    }
    steady_first_ = state.steady_first;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<resident::StepResult>> ResidentEngine::Step(
    HostCache* cache, std::span<const float> queries) {
  WAVEKV_RETURN_IF_ERROR(WaitForRoom());
  std::vector<resident::StepResult> results;
  for (uint32_t layer = 0; layer < ResidentShape().layer_count; ++layer) {
    const HostCache::Chunk token = cache->Slice(token_count_, 1, layer, 1);
    results.push_back(step_->Run(layer, queries, BytesOf(token.keys), BytesOf(token.values)));
  }
  ++token_count_;
  return results;
}

absl::StatusOr<std::vector<resident::StepResult>> ResidentEngine::Step(const TokenRows& rows) {
  WAVEKV_RETURN_IF_ERROR(WaitForRoom());
  const ModelShape& shape = attachment_.shape;
  const size_t query_bytes = shape.query_head_count * shape.key_bytes();
  const size_t key_bytes = shape.kv_head_count * shape.key_bytes();
  std::vector<float> queries(size_t{shape.query_head_count} * shape.key_dim);
  std::vector<resident::StepResult> results;
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    ConvertToFloat(shape.dtype, rows.queries.data() + layer * query_bytes, queries.size(),
                   queries.data());
    results.push_back(step_->Run(layer, queries, rows.keys.subspan(layer * key_bytes, key_bytes),
                                 rows.values.subspan(layer * key_bytes, key_bytes)));
  }
  ++token_count_;
  return results;
}

void ResidentEngine::BeginStep() { step_->Begin(0); }

resident::StepResult ResidentEngine::EndStep(std::span<const float> queries) {
  step_->Select(queries);
  return step_->Attend();
}

namespace {

class ReferenceEngine : public TokenEngine {
 public:
  absl::Status Attach(client::Sequence* sequence, const client::ResidentOptions& options) override {
    WAVEKV_ASSIGN_OR_RETURN(engine_, ResidentEngine::Attach(sequence, options));
    return absl::OkStatus();
  }

  absl::StatusOr<TokenAnswer> Step(const TokenRows& rows) override {
    WAVEKV_ASSIGN_OR_RETURN(const auto results, engine_->Step(rows));
    TokenAnswer answer;
    for (const resident::StepResult& result : results) {
      for (const resident::StepHead& head : result.heads) {
        if (head.is == resident::StepHead::Is::kAttended && !head.overflowed) continue;
        return absl::AbortedError(head.overflowed ? "the token found no room"
                                                  : "a head was attended over nothing");
      }
      answer.out.insert(answer.out.end(), result.out.begin(), result.out.end());
      answer.lse.insert(answer.lse.end(), result.lse.begin(), result.lse.end());
    }
    return answer;
  }

  absl::Status NoteStored(uint64_t token_count) override {
    engine_->SetTokenCount(token_count);
    return absl::OkStatus();
  }

 private:
  std::unique_ptr<ResidentEngine> engine_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TokenEngine>> MakeReferenceEngine(const ModelShape& /*shape*/,
                                                                 uint64_t /*max_tokens*/,
                                                                 uint32_t /*retrieve_clusters*/) {
  return std::make_unique<ReferenceEngine>();
}

}  // namespace wavekv::integration
