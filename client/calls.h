// Calls that go over shared memory where there is a data plane, over gRPC otherwise, and calls that
// more than one public class makes. Internal to the SDK.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/insert_plan.h"
#include "client/types.h"
#include "proto/shm/requests.h"

namespace wavekv::client {

// Attend of checked items. Calls take(i, result) once for each item, in order, or returns an error
// of the whole. `shape_of(i)` is the shape of the i-th item's sequence.
absl::Status RunAttend(Connection& connection, uint64_t epoch,
                       std::span<const shm::AttendItemRequest> items,
                       absl::FunctionRef<const ModelShape&(size_t)> shape_of,
                       absl::FunctionRef<void(size_t, absl::StatusOr<Attention>)> take);

// `reply_bytes_hint` is what replies took lately; it is kept up to date.
absl::StatusOr<QueryResult> RunQuery(Connection& connection, uint64_t epoch,
                                     const shm::QueryRequest& request, const ModelShape& shape,
                                     std::atomic<uint64_t>* reply_bytes_hint);
absl::StatusOr<Estimation> RunEstimate(Connection& connection, uint64_t epoch,
                                       const shm::LayerQueryRequest& request,
                                       const ModelShape& shape);

// One Insert of checked tensors. `chunk` describes all of it; its tensors' data is read through
// `keys` and `values`.
struct InsertCall {
  uint64_t sequence_id = 0;
  uint64_t generation = 0;
  uint64_t first_position = 0;
  std::span<const uint32_t> layers;
  const Tensor* keys = nullptr;
  const Tensor* values = nullptr;
  InsertExtent extent;
};
// Returns the sequence's generation.
absl::StatusOr<uint64_t> RunInsert(Connection& connection, uint64_t epoch, const InsertCall& call,
                                   const ModelShape& shape);

// BuildIndex to its end; `progress` may be null. Internal when the stream ends before it is done or
// is of another generation than the request.
absl::StatusOr<BuildResult> RunBuild(Connection& connection, uint64_t epoch,
                                     const v1::BuildIndexRequest& request,
                                     const std::function<void(const BuildProgress&)>& progress);

}  // namespace wavekv::client
