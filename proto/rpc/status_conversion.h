// absl::Status <-> grpc::Status. The 17 codes are numerically equal.
#pragma once

#include "absl/status/status.h"
#include "grpcpp/support/status.h"

namespace wavekv {

// A text longer than kStatusMessageBytesMax is cut, because gRPC carries it in a header of 8 KiB.
inline constexpr size_t kStatusMessageBytesMax = 2048;
grpc::Status ToGrpcStatus(const absl::Status& status);

// A code that Abseil does not know becomes Unknown. gRPC's own refusal of a large message, which
// says nothing of us, is completed with the flag to change.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace wavekv
