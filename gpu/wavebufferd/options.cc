#include "gpu/wavebufferd/options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "proto/rpc/address.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

absl::Status FlagError(absl::string_view flag, absl::string_view found,
                       absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", found, ", expected ", expected));
}

}  // namespace

absl::Status ValidateWavebufferdOptions(const WavebufferdOptions& options) {
  const bool cuda = options.backend == "cuda";
  if (!cuda && options.backend != "host") {
    return FlagError("backend", absl::StrCat("'", options.backend, "'"), "host or cuda");
  }
  if (options.device < 0 || options.device > kDeviceMax) {
    return FlagError("device", absl::StrCat(options.device), absl::StrCat("0 to ", kDeviceMax));
  }
  if (!cuda && options.device != 0) {
    return FlagError("device", absl::StrCat(options.device), "none without --backend=cuda");
  }
  WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(options.listen));
  if (!address.is_unix) {
    return FlagError("listen", options.listen,
                     "unix:/path: descriptors cannot be passed over a network");
  }
  if (options.bytes_max < kBytesMaxMin) {
    return FlagError("bytes_max", absl::StrCat(options.bytes_max, " bytes"),
                     absl::StrCat("at least ", kBytesMaxMin));
  }
  if (options.lease_ms < kLeaseMsMin || options.lease_ms > kLeaseMsMax) {
    return FlagError("lease_ms", absl::StrCat(options.lease_ms),
                     absl::StrCat(kLeaseMsMin, " to ", kLeaseMsMax));
  }
  if (options.threads_max < kThreadsMin || options.threads_max > kThreadsMax) {
    return FlagError("threads_max", absl::StrCat(options.threads_max),
                     absl::StrCat(kThreadsMin, " to ", kThreadsMax));
  }
  return absl::OkStatus();
}

}  // namespace wavekv
