// Calls that more than one public class makes. Internal to the SDK.
#pragma once

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/types.h"

namespace wavekv::client {

// Attend with as many results as items, or an error.
absl::Status RunAttend(Connection& connection, uint64_t epoch, const v1::AttendRequest& request,
                       v1::AttendReply* reply);

// BuildIndex to its end; `progress` may be null. Internal when the stream ends before it is done or
// is of another generation than the request.
absl::StatusOr<BuildResult> RunBuild(Connection& connection, uint64_t epoch,
                                     const v1::BuildIndexRequest& request,
                                     const std::function<void(const BuildProgress&)>& progress);

}  // namespace wavekv::client
