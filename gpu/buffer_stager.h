// The stager over a wavebufferd: allocates one buffer per tenant, carves one region per sequence,
// and brings the rows of steps into it: by plain copies into host memory, by DMA into a GPU's.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "index/backend/stager.h"

namespace wavekv {

struct BufferStagerOptions {
  uint64_t tenant_buffer_bytes = uint64_t{256} << 20;  // --wave_buffer_bytes
  uint32_t regions_max = 1024;                         // Sequences of one tenant.
  // The block cache of a sequence: this share of the payload of its max_tokens ...
  double cache_ratio = 0.05;  // --wave_buffer_cache_ratio
  // ... but not less and not more than these. A maximum of 0: a quarter of the tenant's buffer, so
  // that a long sequence gets a smaller share rather than none.
  uint64_t cache_bytes_min = uint64_t{256} << 10;
  uint64_t cache_bytes_max = 0;
  // The staging area holds the rows of this many tokens of one layer, over all steps that the
  // client has not completed; a sequence of fewer tokens gets less.
  uint32_t staging_tokens = 8192;  // --wave_buffer_staging_tokens
  uint32_t heartbeat_ms = 500;
  std::string manager_name = "wavekvd";
};

// InvalidArgument names the field, what was found and what is allowed.
absl::Status ValidateBufferStagerOptions(const BufferStagerOptions& options);

// A stager for the wavebufferd at `address` ("unix:/path"). One that is away now is no error: calls
// answer Unavailable until it comes, and again whenever it leaves. FailedPrecondition: it is there
// and speaks another protocol.
absl::StatusOr<std::unique_ptr<Stager>> ConnectWaveBuffer(const std::string& address,
                                                          const BufferStagerOptions& options);

}  // namespace wavekv
