// Segments of one layer that are planned and not yet published, in order.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "daemon/engine/cut_plan.h"
#include "daemon/engine/segment_labels.h"

namespace wavekv {

// One segment to cluster. `cancelled` is set when its tokens are truncated or dropped.
struct BuildJob {
  BuildJob(TokenRange job_range, uint64_t job_ticket,
           std::shared_ptr<const SegmentLabels> job_labels)
      : range(job_range), ticket(job_ticket), labels(std::move(job_labels)) {}

  const TokenRange range;
  const uint64_t ticket;                              // Ascending within a layer.
  const std::shared_ptr<const SegmentLabels> labels;  // Of this range; null: by k-means.
  std::atomic<bool> cancelled = false;
};

// Not thread-safe: its layer's sequence guards it.
class BuildQueue {
 public:
  // Adds a job; those waiting that it covers are forgotten.
  void Push(const TokenRange& range, std::shared_ptr<const SegmentLabels> labels = nullptr);
  // The next job, now running, or null when there is none or one runs.
  std::shared_ptr<BuildJob> Start();
  // The running job is over: done, given up, or, with `again`, the next to start once more.
  void Finish(bool again);
  // Cancels jobs whose range does not stay with token_count tokens.
  void Truncate(uint64_t token_count);

  // `published` and what the jobs will make of it.
  PlannedRanges Planned(PlannedRanges published) const;
  // The labels of those jobs that have some.
  std::vector<std::shared_ptr<const SegmentLabels>> Labels() const;
  bool idle() const { return running_ == nullptr && waiting_.empty(); }
  bool running() const { return running_ != nullptr; }
  uint64_t last_ticket() const { return last_ticket_; }
  // Whether all jobs up to `ticket` are over.
  bool DoneUpTo(uint64_t ticket) const;
  // Tokens of the jobs up to `ticket` that are not over.
  uint64_t PendingTokens(uint64_t ticket) const;

 private:
  std::deque<std::shared_ptr<BuildJob>> waiting_;
  std::shared_ptr<BuildJob> running_;
  uint64_t last_ticket_ = 0;
};

}  // namespace wavekv
