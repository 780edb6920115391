#include "proto/shm/server_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::shm {
namespace {

// Only a client that writes to the futex to hide a wake-up makes a sleep last so long.
constexpr std::chrono::seconds kSleepMax(1);

// One load of each word: what is checked is what is used, whatever the client writes meanwhile.
SubmissionEntry CopyEntry(SubmissionEntry* shared) {
  SubmissionEntry copy;
  static_assert(sizeof copy % sizeof(uint64_t) == 0);
  uint64_t words[sizeof copy / sizeof(uint64_t)];
  auto* const source = reinterpret_cast<uint64_t*>(shared);
  for (size_t i = 0; i < std::size(words); ++i) {
    words[i] = std::atomic_ref<uint64_t>(source[i]).load(std::memory_order_relaxed);
  }
  std::memcpy(&copy, words, sizeof copy);
  return copy;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerChannel>> ServerChannel::Create(
    const std::string& name, const ChannelGeometry& geometry, SpinSlots* slots) {
  WAVEKV_ASSIGN_OR_RETURN(UniqueFd fd, CreateMemfd(name, geometry.channel_bytes));
  WAVEKV_ASSIGN_OR_RETURN(Mapping mapping,
                          Mapping::Map(fd.get(), geometry.channel_bytes, Mapping::kReadWrite));
  WAVEKV_RETURN_IF_ERROR(SealSize(fd.get()));
  const ChannelHeader header = HeaderOf(geometry);
  std::memcpy(mapping.data(), &header, sizeof header);
  return std::unique_ptr<ServerChannel>(
      new ServerChannel(std::move(fd), std::move(mapping), geometry, slots));
}

ServerChannel::ServerChannel(UniqueFd fd, Mapping mapping, const ChannelGeometry& geometry,
                             SpinSlots* slots)
    : fd_(std::move(fd)), mapping_(std::move(mapping)), geometry_(geometry), spin_(slots) {}

ChannelHeader& ServerChannel::header() const {
  return *reinterpret_cast<ChannelHeader*>(mapping_.data());
}

bool ServerChannel::WaitForTail() {
  const auto tail = AtomicWord(header().tail);
  const auto ready = [&] { return tail.load(std::memory_order_acquire) != next_ || stopped(); };
  if (ready()) return !stopped();
  if (!spin_.Spin(ready)) {
    const auto sleeps = AtomicWord(header().daemon_sleeps);
    while (!ready()) {
      // The client stores the tail, then looks here; we store here, then look at the tail. In one
      // total order one of us sees the other.
      sleeps.store(1, std::memory_order_seq_cst);
      if (tail.load(std::memory_order_seq_cst) == next_ && !stopped()) {
        FutexWait(&header().tail, next_, kSleepMax);
      }
    }
    sleeps.store(0, std::memory_order_relaxed);
  }
  return !stopped();
}

absl::StatusOr<std::optional<Submission>> ServerChannel::Next() {
  while (WaitForTail()) {
    const uint32_t tail = AtomicWord(header().tail).load(std::memory_order_acquire);
    if (tail - next_ > geometry_.ring_entries) {
      return absl::InvalidArgumentError(
          absl::StrCat("the submission ring's tail is ", tail, " with ", next_,
                       " submissions answered, in a ring of ", geometry_.ring_entries));
    }
    absl::StatusOr<Submission> submission = Read();
    if (submission.ok()) return std::optional<Submission>(*std::move(submission));
    CompleteEntry(next_, {.code = submission.status().code()});
    ++next_;
  }
  return std::optional<Submission>();
}

absl::StatusOr<Submission> ServerChannel::Read() {
  auto* const ring =
      reinterpret_cast<SubmissionEntry*>(mapping_.data() + geometry_.submissions_offset);
  const SubmissionEntry entry = CopyEntry(&ring[next_ % geometry_.ring_entries]);
  if (!geometry_.InArena(entry.request_offset, entry.request_bytes) ||
      !geometry_.InArena(entry.reply_offset, entry.reply_bytes_max)) {
    return absl::InvalidArgumentError("a submission names memory outside the arena");
  }
  return Submission{.number = next_,
                    .verb = entry.verb,
                    .request = {mapping_.data() + entry.request_offset, entry.request_bytes},
                    .reply = {mapping_.data() + entry.reply_offset, entry.reply_bytes_max},
                    .deadline = FromMonotonicNs(entry.deadline_ns)};
}

void ServerChannel::Complete(const Submission& submission, const Completion& completion) {
  CompleteEntry(submission.number, completion);
  ++next_;
}

void ServerChannel::CompleteEntry(uint32_t number, const Completion& completion) {
  auto* const ring =
      reinterpret_cast<CompletionEntry*>(mapping_.data() + geometry_.completions_offset);
  CompletionEntry& entry = ring[number % geometry_.ring_entries];
  AtomicWord(entry.code).store(static_cast<uint32_t>(completion.code), std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(entry.reply_bytes)
      .store(completion.reply_bytes, std::memory_order_relaxed);
  std::atomic_ref<uint64_t>(entry.reply_bytes_needed)
      .store(completion.reply_bytes_needed, std::memory_order_relaxed);
  // Release: the reply is in place before the client sees that it is done.
  const uint32_t before = AtomicWord(entry.state).exchange(kDone, std::memory_order_acq_rel);
  if (before != kPending) FutexWake(&entry.state);
}

void ServerChannel::Stop() {
  stopped_.store(true, std::memory_order_seq_cst);
  // Nobody submits any more. Another value keeps a thread that is about to sleep awake.
  AtomicWord(header().tail).fetch_add(1, std::memory_order_seq_cst);
  FutexWake(&header().tail);
}

}  // namespace wavekv::shm
