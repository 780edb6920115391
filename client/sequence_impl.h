// The state behind a Sequence, shared by session.cc (batches) and sequence.cc. Internal to the SDK.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/connection.h"
#include "client/session.h"
#include "client/step_ledger.h"
#include "proto/shm/requests.h"
#include "storage/base/mutex.h"

namespace wavekv::client {

// Thread-safe; holds no lock during an RPC.
struct Sequence::Impl {
  Impl(std::shared_ptr<Connection> connection, ModelShape shape, uint64_t id, uint64_t epoch,
       uint64_t generation);

  // The shape and bytes of a step's tensors, borrowed: they must outlive what PrepareAttend
  // returns.
  struct StepTensors {
    const Tensor& queries;
    const std::optional<Tensor>& append_keys;
    const std::optional<Tensor>& append_values;
  };
  // A step, checked, with its append position.
  absl::StatusOr<shm::AttendItemRequest> PrepareAttend(uint32_t layer, const StepTensors& tensors,
                                                       const std::optional<Budget>& budget,
                                                       bool exact) const;
  // Checks the result of `item`, and notes the layer's new token count.
  absl::StatusOr<Attention> TakeAttention(const shm::AttendItemRequest& item,
                                          absl::StatusOr<Attention> attention);
  absl::StatusOr<Attention> Attend(uint32_t layer, const Tensor& queries,
                                   const AttendOptions& options);
  // A query of one layer, checked. Borrows the tensor.
  absl::StatusOr<shm::LayerQueryRequest> PrepareQuery(uint32_t layer, const Tensor& queries,
                                                      const std::optional<Budget>& budget) const;
  // The attention of a query whose rows lie in the wave buffer.
  absl::StatusOr<Attention> AttendStep(const Tensor& queries, const QueryResult& query);
  // Query; the rows it staged may be read until `ticket` is finished.
  absl::StatusOr<QueryResult> Query(uint32_t layer, const Tensor& queries,
                                    const QueryOptions& options, const StepLedger::Ticket& ticket);
  absl::StatusOr<Estimation> Estimate(uint32_t layer, const Tensor& queries,
                                      const std::optional<Budget>& budget);
  absl::Status Insert(uint64_t first_position, std::span<const uint32_t> layers, const Tensor& keys,
                      const Tensor& values);

  // What a reply of AttachResident offers, with the descriptors of its windows.
  absl::StatusOr<ResidentAttachment> TakeAttachment(const v1::AttachResidentReply& reply,
                                                    uint64_t asked_generation) const;
  // Every layer holds so many tokens, a reply says. Internal: of another generation.
  absl::Status NoteStored(uint64_t asked_generation, uint64_t found_generation,
                          uint64_t token_count);

  void FillRef(v1::SequenceRef* ref) const;
  // The error of a call whose sequence belongs to an earlier life of the daemon.
  absl::Status Gone(const char* call) const;
  // Internal unless a reply's generation is the one that was asked for: no answer of another.
  absl::Status CheckGeneration(uint64_t sent, uint64_t found) const;
  Connection::CallOptions Call(const char* name) const;

  uint64_t TokenCount(uint32_t layer) const;
  // By a reply of `of_generation`; ignored when a truncate has come between.
  void RaiseTokenCount(uint32_t layer, uint64_t token_count, uint64_t of_generation);
  // After a truncate or a fork: no layer holds more.
  void CapTokenCounts(uint64_t token_count, uint64_t new_generation);

  const std::shared_ptr<Connection> connection;
  const ModelShape shape;
  const uint64_t id;
  const uint64_t epoch;  // Of the daemon that issued the id.
  std::atomic<uint64_t> generation;
  std::atomic<bool> owned{true};  // Drop when destroyed.
  uint64_t max_tokens = 0;        // Fixed once created.
  bool attach_wave_buffer = false;
  StepLedger steps;
  std::atomic<uint64_t> query_reply_bytes{0};  // Of late.

 private:
  mutable Mutex mutex_;
  std::vector<uint64_t> token_counts_ ABSL_GUARDED_BY(mutex_);  // By layer.
};

}  // namespace wavekv::client
