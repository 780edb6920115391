// A wavekvd of its own, and two sessions with it: over shared memory and over gRPC.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/session.h"
#include "tests/integration/daemons.h"

namespace wavekv::bench {

class DataWorld {
 public:
  // Fails when the first session does not get a channel: then there is nothing to measure.
  static absl::StatusOr<std::unique_ptr<DataWorld>> Start(uint64_t pool_bytes);

  client::Session& shared() { return *shared_; }
  client::Session& grpc() { return *grpc_; }

 private:
  DataWorld() = default;

  std::unique_ptr<integration::Daemons> daemons_;
  std::unique_ptr<client::Session> shared_;
  std::unique_ptr<client::Session> grpc_;
};

// One layer, 32 query heads, 8 KV heads, dims of 128, bf16.
ModelShape DataShape();

// `count` random bf16 numbers.
std::vector<uint16_t> RandomBF16(size_t count, uint64_t seed);

}  // namespace wavekv::bench
