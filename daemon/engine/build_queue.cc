#include "daemon/engine/build_queue.h"

#include <utility>

#include "storage/base/check.h"

namespace wavekv {

void BuildQueue::Push(const TokenRange& range, std::shared_ptr<const SegmentLabels> labels) {
  while (!waiting_.empty() && waiting_.back()->range.begin >= range.begin) waiting_.pop_back();
  waiting_.push_back(std::make_shared<BuildJob>(range, ++last_ticket_, std::move(labels)));
}

std::shared_ptr<BuildJob> BuildQueue::Start() {
  if (running_ != nullptr || waiting_.empty()) return nullptr;
  running_ = std::move(waiting_.front());
  waiting_.pop_front();
  return running_;
}

void BuildQueue::Finish(bool again) {
  WAVEKV_CHECK(running_ != nullptr, "a job that finishes was running");
  const bool replaced = !waiting_.empty() && waiting_.front()->range.begin <= running_->range.begin;
  if (again && !replaced && !running_->cancelled) waiting_.push_front(std::move(running_));
  running_ = nullptr;
}

void BuildQueue::Truncate(uint64_t token_count) {
  const auto stays = [&](const BuildJob& job) { return StaysWith(job.range, token_count); };
  while (!waiting_.empty() && !stays(*waiting_.back())) waiting_.pop_back();
  if (running_ != nullptr && !stays(*running_)) running_->cancelled = true;
}

PlannedRanges BuildQueue::Planned(PlannedRanges published) const {
  if (running_ != nullptr && !running_->cancelled) ApplyCut(running_->range, &published);
  for (const auto& job : waiting_) ApplyCut(job->range, &published);
  return published;
}

std::vector<std::shared_ptr<const SegmentLabels>> BuildQueue::Labels() const {
  std::vector<std::shared_ptr<const SegmentLabels>> labels;
  if (running_ != nullptr && !running_->cancelled && running_->labels != nullptr) {
    labels.push_back(running_->labels);
  }
  for (const auto& job : waiting_) {
    if (job->labels != nullptr) labels.push_back(job->labels);
  }
  return labels;
}

bool BuildQueue::DoneUpTo(uint64_t ticket) const {
  if (running_ != nullptr) return running_->ticket > ticket;
  return waiting_.empty() || waiting_.front()->ticket > ticket;
}

uint64_t BuildQueue::PendingTokens(uint64_t ticket) const {
  uint64_t tokens = 0;
  if (running_ != nullptr && running_->ticket <= ticket) tokens += running_->range.size();
  for (const auto& job : waiting_) {
    if (job->ticket <= ticket) tokens += job->range.size();
  }
  return tokens;
}

}  // namespace wavekv
