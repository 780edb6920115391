#include "gpu/wavebufferd/options.h"

#include <cstdlib>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
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
  if (options.backend != "host") {
    return FlagError("backend", absl::StrCat("'", options.backend, "'"),
                     "one that this build has: host");
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

std::string DefaultWavebufferdAddress() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const std::string base = runtime != nullptr && runtime[0] == '/' ? runtime : "/run";
  return absl::StrCat("unix:", base, "/wavekv/wavebufferd.sock");
}

absl::StatusOr<uint64_t> ParseByteCount(absl::string_view text) {
  constexpr std::pair<absl::string_view, int> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  absl::string_view digits = text;
  int shift = 0;
  for (const auto& [suffix, unit_shift] : kUnits) {
    if (absl::ConsumeSuffix(&digits, suffix)) {
      shift = unit_shift;
      break;
    }
  }
  uint64_t count = 0;
  const bool plain = !digits.empty() && absl::ascii_isdigit(static_cast<unsigned char>(digits[0]));
  if (!plain || !absl::SimpleAtoi(digits, &count) ||
      count > (std::numeric_limits<uint64_t>::max() >> shift)) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text,
                     "' is no size; expected bytes, or a whole number of KiB, MiB, GiB or TiB such "
                     "as 8GiB"));
  }
  return count << shift;
}

}  // namespace wavekv
