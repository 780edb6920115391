// The daemon's end of a channel. The client may write anything into the memory at any time: each
// submission is copied once, and what is used is the copy, checked.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/shm/channel_layout.h"
#include "proto/shm/waiting.h"
#include "storage/base/shared_memory.h"
#include "storage/base/unique_fd.h"

namespace wavekv::shm {

// One submission, checked: both spans lie in the arena. Their bytes may still change.
struct Submission {
  uint32_t number = 0;  // Modulo 2^32.
  uint64_t verb = 0;
  std::span<const std::byte> request;
  std::span<std::byte> reply;  // Where the answer goes; may be empty.
  TimePoint deadline;
};

struct Completion {
  absl::StatusCode code = absl::StatusCode::kOk;
  uint64_t reply_bytes = 0;
  uint64_t reply_bytes_needed = 0;  // Above 0: it did not fit.
};

// Next and Complete belong to one thread; Stop to any.
class ServerChannel {
 public:
  // Makes the memory, zeroed, and forbids every change of its size. `slots` outlives the channel.
  static absl::StatusOr<std::unique_ptr<ServerChannel>> Create(const std::string& name,
                                                               const ChannelGeometry& geometry,
                                                               SpinSlots* slots);

  // For the client: of its size for ever, and writable. Once; the channel keeps the mapping alone.
  UniqueFd TakeFd() { return std::move(fd_); }

  // Waits for the next submission. Empty: stopped. InvalidArgument: the client broke the ring, and
  // nothing after can be believed. A submission whose descriptor is wrong is answered here and not
  // returned.
  absl::StatusOr<std::optional<Submission>> Next();
  // Answers the submission that Next returned last.
  void Complete(const Submission& submission, const Completion& completion);

  // Next returns nothing from now on, and at once; within a second where the client works against
  // it.
  void Stop();
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

 private:
  ServerChannel(UniqueFd fd, Mapping mapping, const ChannelGeometry& geometry, SpinSlots* slots);

  ChannelHeader& header() const;
  // Waits until there are submissions beyond next_; false when stopped.
  bool WaitForTail();
  // Copies entry next_ and checks the copy.
  absl::StatusOr<Submission> Read();
  void CompleteEntry(uint32_t number, const Completion& completion);

  UniqueFd fd_;
  const Mapping mapping_;
  const ChannelGeometry geometry_;
  AdaptiveSpin spin_;
  uint32_t next_ = 0;  // Number of the submission to read.
  std::atomic<bool> stopped_{false};
};

}  // namespace wavekv::shm
