// The client's end of a channel: places for calls in the arena, submission, and waiting for
// answers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/arena_allocator.h"
#include "proto/shm/channel_layout.h"
#include "proto/shm/handshake.h"
#include "proto/shm/waiting.h"
#include "storage/base/fd_socket.h"
#include "storage/base/mutex.h"
#include "storage/base/shared_memory.h"

namespace wavekv::shm {

// How far a call came.
enum class CallState {
  kAnswered,   // The daemon's status and reply are there.
  kTimedOut,   // No answer, or no room for the call, before the deadline.
  kGone,       // The daemon closed the channel, died, or broke it.
  kCancelled,  // By CancelCalls.
  kTooLarge,   // More than the whole arena.
  kFull,       // No room for the call at present, and it was not to wait.
};

// What a call does that finds no room. A thread that holds calls which it submitted and has not
// waited for must not wait: if several do, each waits for what the others hold.
enum class Room { kWait, kNow };

// Thread-safe: calls of several threads share the rings. The daemon answers in order of submission.
class ClientChannel {
 public:
  class Call;

  // Connects, says who we are, and maps what the daemon gives, once its seals show that it can
  // never shrink. Errors: the daemon's (Unauthenticated, FailedPrecondition ...); NotFound,
  // Unavailable or DeadlineExceeded when nobody answers; DataLoss for an answer that is none.
  static absl::StatusOr<std::shared_ptr<ClientChannel>> Connect(const std::string& socket_path,
                                                                const Hello& hello,
                                                                std::chrono::milliseconds timeout,
                                                                SpinSlots* slots);
  ~ClientChannel();
  ClientChannel(const ClientChannel&) = delete;
  ClientChannel& operator=(const ClientChannel&) = delete;

  // A place for a request of `request_bytes` and a reply of at most `reply_bytes`. Waits for room
  // in the arena until `deadline`, if `room` says so. kAnswered here means: there it is.
  CallState Begin(uint64_t request_bytes, uint64_t reply_bytes, TimePoint deadline, Call* call,
                  Room room = Room::kWait);
  // Hands the request, which is in place, to the daemon. Waits for room in the ring likewise; after
  // kFull the place stays and can be submitted later.
  CallState Submit(uint64_t verb, TimePoint deadline, Call* call, Room room = Room::kWait);
  // Waits for the answer of a submitted call. After anything but kAnswered the call is lost.
  CallState Wait(TimePoint deadline, Call* call);

  // Calls under way, in whichever thread, end as kCancelled.
  void CancelCalls();
  // Whether the daemon has closed the channel. One system call.
  bool IsGone();

  const ChannelGeometry& geometry() const { return geometry_; }

 private:
  // What the client knows of a ring entry.
  struct Entry {
    bool busy = false;       // Submitted, and its answer not taken.
    bool abandoned = false;  // Nobody waits for it any more; the place goes when it is answered.
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };

  ClientChannel(FdSocket socket, Mapping mapping, const ChannelGeometry& geometry,
                SpinSlots* slots);

  ChannelHeader& header() const;
  CompletionEntry& CompletionOf(uint32_t number) const;
  void WriteSubmission(uint64_t verb, TimePoint deadline, const Call& call)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes back the places of abandoned calls that were answered meanwhile.
  void ReapLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits a moment for room; anything but kAnswered ends the wait.
  CallState WaitForRoomLocked(TimePoint deadline, uint32_t cancel_epoch, Room room)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NotifyRoomLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CallState Sleep(TimePoint deadline, const Call& call);
  void Release(Call* call);

  FdSocket socket_;
  const Mapping mapping_;
  const ChannelGeometry geometry_;
  AdaptiveSpin spin_;
  std::atomic<bool> gone_{false};
  std::atomic<uint32_t> cancel_epoch_{0};

  Mutex mutex_;
  CondVar room_;
  ArenaAllocator arena_ ABSL_GUARDED_BY(mutex_);
  std::vector<Entry> entries_ ABSL_GUARDED_BY(mutex_);  // [ring_entries]
  uint32_t tail_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t room_waiters_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t abandoned_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

// One call's place, given back when this goes (if it is still under way: when it is answered).
// Movable; must not outlive its channel.
class ClientChannel::Call {
 public:
  Call() = default;
  ~Call() { Reset(); }
  Call(Call&& other) noexcept { Swap(other); }
  Call& operator=(Call&& other) noexcept {
    if (this != &other) {
      Reset();
      Swap(other);
    }
    return *this;
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // To be filled before Submit.
  std::span<std::byte> request() const { return {base_, request_bytes_}; }

  // Of an answered call. The bytes stay until the call goes.
  absl::StatusCode code() const { return code_; }
  std::span<const std::byte> reply() const { return {base_ + reply_at_, reply_bytes_}; }
  // Above 0: the reply did not fit, and this many bytes would do.
  uint64_t reply_bytes_needed() const { return reply_bytes_needed_; }
  // The daemon's verdict: OK, or its error with the text.
  absl::Status status() const;

 private:
  friend class ClientChannel;

  void Reset() {
    if (channel_ != nullptr) channel_->Release(this);
    channel_ = nullptr;
  }
  void Swap(Call& other) noexcept;

  ClientChannel* channel_ = nullptr;
  std::byte* base_ = nullptr;
  uint64_t offset_ = 0;  // In the channel.
  uint64_t bytes_ = 0;   // Of the place.
  uint64_t request_bytes_ = 0;
  uint64_t reply_at_ = 0;  // From base_.
  uint64_t reply_bytes_max_ = 0;
  uint32_t number_ = 0;
  uint32_t cancel_epoch_ = 0;
  bool under_way_ = false;
  absl::StatusCode code_ = absl::StatusCode::kUnknown;
  uint64_t reply_bytes_ = 0;
  uint64_t reply_bytes_needed_ = 0;
};

}  // namespace wavekv::shm
