#include "proto/rpc/status_conversion.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace wavekv {

static_assert(static_cast<int>(absl::StatusCode::kUnauthenticated) ==
              static_cast<int>(grpc::StatusCode::UNAUTHENTICATED));
static_assert(static_cast<int>(absl::StatusCode::kCancelled) ==
              static_cast<int>(grpc::StatusCode::CANCELLED));

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  constexpr absl::string_view kCut = " ... (cut)";
  std::string message(status.message());
  if (message.size() > kStatusMessageBytesMax) {
    message.resize(kStatusMessageBytesMax - kCut.size());
    absl::StrAppend(&message, kCut);
  }
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message);
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  const int code = static_cast<int>(status.error_code());
  const bool known = code > 0 && code <= static_cast<int>(absl::StatusCode::kUnauthenticated);
  std::string message = status.error_message();
  if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
      absl::StrContains(message, "message larger than max")) {
    absl::StrAppend(&message, "; split the message, or raise --message_bytes_max of the daemon");
  }
  return absl::Status(known ? static_cast<absl::StatusCode>(code) : absl::StatusCode::kUnknown,
                      message);
}

}  // namespace wavekv
