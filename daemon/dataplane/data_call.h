// One call of a channel: copy what must not change, decode, ask the engine, write the reply.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "daemon/dataplane/data_lease.h"
#include "daemon/dataplane/data_requests.h"
#include "daemon/engine/engine.h"
#include "proto/shm/replies.h"
#include "proto/shm/requests.h"
#include "proto/shm/server_channel.h"

namespace wavekv {

// Runs the calls of one channel, one after another. Not thread-safe.
class DataCaller {
 public:
  // Both must outlive the caller. `batch_max`: items of one Attend.
  DataCaller(Engine* engine, DataLease* lease, uint32_t batch_max)
      : engine_(engine), lease_(lease), batch_max_(batch_max) {}

  // Answers into the submission's reply. Never fails: what is wrong is the answer.
  shm::Completion Run(const shm::Submission& submission);

 private:
  absl::Status Dispatch(const shm::Submission& submission, shm::ReplyWriter* writer);
  absl::Status Insert(std::span<const std::byte> request, shm::ReplyWriter* writer);
  absl::Status Query(std::span<const std::byte> request, shm::ReplyWriter* writer);
  absl::Status Estimate(std::span<const std::byte> request, shm::ReplyWriter* writer);
  absl::Status Attend(std::span<const std::byte> request, shm::ReplyWriter* writer);
  // Bytes that the client cannot change any more; good until the next copy.
  std::span<const std::byte> Copy(std::span<const std::byte> shared);

  Engine* const engine_;
  DataLease* const lease_;
  const uint32_t batch_max_;
  // Used again from call to call.
  std::vector<std::byte> copy_;
  shm::AttendItems items_;
  std::vector<AttendStep> steps_;
  std::vector<size_t> step_items_;
  std::vector<AnswerRuns> answers_;  // One for each step.
};

}  // namespace wavekv
