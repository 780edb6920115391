#include "daemon/engine/resident_sync.h"

#include <algorithm>
#include <utility>

namespace wavekv {
namespace {

constexpr std::chrono::milliseconds kFastest(1);
constexpr std::chrono::milliseconds kSlowest(32);
constexpr std::chrono::milliseconds kSweepEvery(1000);

}  // namespace

ResidentSync::ResidentSync(std::function<size_t()> sweep) : sweep_(std::move(sweep)) {}

ResidentSync::~ResidentSync() {
  std::thread thread;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    thread.swap(thread_);
  }
  wake_.NotifyAll();
  if (thread.joinable()) thread.join();
}

void ResidentSync::Add(std::shared_ptr<AttachedSequence> attached) {
  std::shared_ptr<AttachedSequence> earlier;
  {
    MutexLock lock(&mutex_);
    earlier = std::exchange(attachments_[attached->id()], attached);
    sweep_due_ = true;
    if (!thread_.joinable() && !stopping_) thread_ = std::thread([this] { Run(); });
  }
  if (earlier != nullptr) Retire(earlier, absl::AbortedError("it was attached anew"));
  wake_.NotifyAll();
}

std::shared_ptr<AttachedSequence> ResidentSync::Find(SequenceId id) const {
  MutexLock lock(&mutex_);
  const auto found = attachments_.find(id);
  return found == attachments_.end() ? nullptr : found->second;
}

void ResidentSync::Remove(SequenceId id, const absl::Status& why) {
  std::shared_ptr<AttachedSequence> removed;
  {
    MutexLock lock(&mutex_);
    const auto found = attachments_.find(id);
    if (found == attachments_.end()) return;
    removed = std::move(found->second);
    attachments_.erase(found);
  }
  Retire(removed, why);
}

void ResidentSync::Retire(const std::shared_ptr<AttachedSequence>& attached,
                          const absl::Status& why) {
  (void)attached->Close(why);  // Nobody asks any more what could not be stored.
  MutexLock lock(&mutex_);
  retired_ += attached->state().counters;
  moved_.NotifyAll();
}

void ResidentSync::CloseOf(ClientId client, const absl::Status& why) {
  std::vector<std::shared_ptr<AttachedSequence>> open;
  {
    MutexLock lock(&mutex_);
    open = OpenLocked();
  }
  for (const auto& attached : open) {
    if (attached->client() == client) (void)attached->Close(why);
  }
  MutexLock lock(&mutex_);
  moved_.NotifyAll();
}

std::vector<std::shared_ptr<AttachedSequence>> ResidentSync::OpenLocked() const {
  std::vector<std::shared_ptr<AttachedSequence>> open;
  for (const auto& [id, attached] : attachments_) {
    if (attached->open()) open.push_back(attached);
  }
  return open;
}

ResidentState ResidentSync::Wait(const AttachedSequence& attached, uint64_t above,
                                 std::chrono::milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(&mutex_);
  ++waiting_;
  wake_.NotifyAll();
  ResidentState state = attached.state();
  while (state.attached.ok() && state.steady_first <= above) {
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left <= left.zero()) break;
    moved_.WaitFor(&mutex_, left);
    state = attached.state();
  }
  --waiting_;
  return state;
}

void ResidentSync::Notify() {
  MutexLock lock(&mutex_);
  moved_.NotifyAll();
}

ResidentStats ResidentSync::Stats() const {
  MutexLock lock(&mutex_);
  ResidentStats stats;
  stats.counters = retired_;
  stats.rounds = rounds_.Read();
  for (const auto& [id, attached] : attachments_) {
    const ResidentState state = attached->state();
    stats.counters += state.counters;
    if (state.attached.ok()) ++stats.attached;
  }
  return stats;
}

void ResidentSync::Run() {
  std::chrono::milliseconds pause = kFastest;
  auto swept_at = std::chrono::steady_clock::now();
  for (;;) {
    std::vector<std::shared_ptr<AttachedSequence>> open;
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && (open = OpenLocked()).empty() && !sweep_due_) wake_.Wait(&mutex_);
      if (stopping_) return;
    }
    bool moved = false;
    const bool some_open = !open.empty();
    const auto begin = std::chrono::steady_clock::now();
    for (const auto& attached : open) moved |= attached->Round();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    if (some_open) rounds_.Record(took.count());
    open.clear();
    bool sweep_due = true;
    if (const auto now = std::chrono::steady_clock::now(); now - swept_at >= kSweepEvery) {
      swept_at = now;
      sweep_due = sweep_() > 0 || some_open;
    }
    MutexLock lock(&mutex_);
    sweep_due_ = sweep_due;
    if (moved) moved_.NotifyAll();
    pause = moved || waiting_ > 0 ? kFastest : std::min(2 * pause, kSlowest);
    if (!stopping_) wake_.WaitFor(&mutex_, some_open ? pause : kSweepEvery);
  }
}

}  // namespace wavekv
