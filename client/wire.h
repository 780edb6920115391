// Between the SDK's values and wavekv.v1 messages. Replies are checked: sizes and shapes that do
// not fit the sequence are Internal, and never reach the caller as data. Internal to the SDK.
#pragma once

#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "proto/shm/requests.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv::client {

void ToWire(const Budget& budget, v1::Budget* target);
// An unset budget leaves the field unset.
template <class Message>
void SetBudget(const std::optional<Budget>& budget, Message* message) {
  if (budget.has_value()) ToWire(*budget, message->mutable_budget());
}
void ToWire(const SequenceOptions& options, v1::CreateSequenceRequest* request);
// Copies the tensor's bytes.
void ToWire(const shm::TensorRef& tensor, v1::Tensor* target);
void ToWire(const Tensor& tensor, v1::Tensor* target);
void ToWire(const shm::AttendItemRequest& item, v1::AttendItem* target);
// Of a QueryRequest or an EstimateRequest: the fields that they share.
void ToWire(const shm::LayerQueryRequest& query, v1::QueryRequest* target);
void ToWire(const shm::LayerQueryRequest& query, v1::EstimateRequest* target);
// dtype, layout and shape [layers, tokens, ...] without the bytes.
void DescribeTensor(const Tensor& tensor, std::span<const int64_t> shape, v1::Tensor* target);

StepCounters FromWire(const v1::StepCounters& counters);
absl::StatusOr<ModelShape> FromWire(const v1::ModelShape& shape);
absl::StatusOr<Attention> FromWire(const v1::AttendResult& result, const ModelShape& shape);
absl::StatusOr<Estimation> FromWire(const v1::EstimateReply& reply, const ModelShape& shape);
absl::StatusOr<QueryResult> FromWire(const v1::QueryReply& reply, const ModelShape& shape);

}  // namespace wavekv::client
