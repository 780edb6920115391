#include "daemon/server/unary_call.h"

#include <chrono>

#include "absl/strings/str_cat.h"

namespace wavekv {

double NowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

absl::Status CheckReplyBytes(size_t bytes, const ServerOptions& options) {
  if (bytes <= options.message_bytes_max) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("the reply has ", bytes, " bytes, over the limit of ", options.message_bytes_max,
                   "; ask for less at once, or raise --message_bytes_max of wavekvd"));
}

absl::Status Overloaded(const absl::Status& queued) {
  return absl::ResourceExhaustedError(
      absl::StrCat("too many calls wait for a worker: ", queued.message(),
                   "; send less at once, or raise --worker_threads of wavekvd"));
}

}  // namespace wavekv
