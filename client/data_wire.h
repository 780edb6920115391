// Between the SDK's values and the bytes of the shared-memory channel. Replies are checked as those
// over gRPC are. Internal to the SDK.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/types.h"
#include "proto/shm/requests.h"

namespace wavekv::client {

// Borrows the tensor's shape and bytes.
shm::TensorRef ToRef(const Tensor& tensor);
std::optional<shm::TensorRef> ToRef(const std::optional<Tensor>& tensor);
shm::BudgetRef ToRef(const Budget& budget);
std::optional<shm::BudgetRef> ToRef(const std::optional<Budget>& budget);
// Without the bytes, in another shape than the tensor's own, which is borrowed.
shm::TensorRef DescribeRef(const Tensor& tensor, std::span<const int64_t> shape);

// Calls take(i, result) for each of `item_count` results. Internal when the reply as a whole is
// malformed; `shape_of(i)` is the sequence's.
absl::Status ReadAttendReply(std::span<const std::byte> bytes, size_t item_count,
                             absl::FunctionRef<const ModelShape&(size_t)> shape_of,
                             absl::FunctionRef<void(size_t, absl::StatusOr<Attention>)> take);
absl::StatusOr<Estimation> ReadEstimateReply(std::span<const std::byte> bytes,
                                             const ModelShape& shape);
absl::StatusOr<QueryResult> ReadQueryReply(std::span<const std::byte> bytes,
                                           const ModelShape& shape);
// The sequence's generation.
absl::StatusOr<uint64_t> ReadInsertReply(std::span<const std::byte> bytes);

}  // namespace wavekv::client
