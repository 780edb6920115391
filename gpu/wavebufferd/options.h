// What an operator can set about wavebufferd; checked once, immutable after start.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace wavekv {

struct WavebufferdOptions {
  std::string backend = "host";  // Or "cuda".
  int device = 0;                // Of the cuda backend: the ordinal among those it sees.
  std::string listen;            // "unix:/path"
  uint64_t bytes_max = 0;
  int64_t lease_ms = 10'000;
  uint32_t threads_max = 8;  // Of gRPC.
};

inline constexpr int kDeviceMax = 1023;
inline constexpr int64_t kLeaseMsMin = 100;
inline constexpr int64_t kLeaseMsMax = 3'600'000;
inline constexpr uint32_t kThreadsMin = 4;
inline constexpr uint32_t kThreadsMax = 256;
inline constexpr uint64_t kBytesMaxMin = uint64_t{1} << 20;

// InvalidArgument names the flag, what was found and what is allowed.
absl::Status ValidateWavebufferdOptions(const WavebufferdOptions& options);

}  // namespace wavekv
