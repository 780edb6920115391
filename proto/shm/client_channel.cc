#include "proto/shm/client_channel.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/status_macros.h"

namespace wavekv::shm {
namespace {

using std::chrono::steady_clock;

// A sleeper looks this often whether the daemon is still there.
constexpr std::chrono::milliseconds kLookInterval(20);
constexpr uint64_t kRequestBytesMax = uint64_t{1} << 40;  // So that sums do not overflow.

}  // namespace

absl::StatusOr<std::shared_ptr<ClientChannel>> ClientChannel::Connect(
    const std::string& socket_path, const Hello& hello, std::chrono::milliseconds timeout,
    SpinSlots* slots) {
  WAVEKV_ASSIGN_OR_RETURN(FdSocket socket, FdSocket::Connect(socket_path, timeout));
  WAVEKV_RETURN_IF_ERROR(socket.Send(EncodeHello(hello), -1, timeout));
  WAVEKV_ASSIGN_OR_RETURN(const FdMessage reply, socket.Receive(kDescriptorReplyBytesMax, timeout));
  WAVEKV_RETURN_IF_ERROR(DecodeDescriptorReply(reply.bytes));
  if (!reply.fd.valid()) return absl::DataLossError("channel: OK without a descriptor");
  WAVEKV_RETURN_IF_ERROR(CheckSizeSealed(reply.fd.get()));
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t bytes, FileBytes(reply.fd.get()));
  if (bytes < sizeof(ChannelHeader)) return absl::DataLossError("channel: no room for a header");
  WAVEKV_ASSIGN_OR_RETURN(Mapping mapping,
                          Mapping::Map(reply.fd.get(), bytes, Mapping::kReadWrite));
  ChannelHeader header;
  std::memcpy(&header, mapping.data(), sizeof header);
  WAVEKV_ASSIGN_OR_RETURN(const ChannelGeometry geometry, ReadHeader(header, bytes));
  return std::shared_ptr<ClientChannel>(
      new ClientChannel(std::move(socket), std::move(mapping), geometry, slots));
}

ClientChannel::ClientChannel(FdSocket socket, Mapping mapping, const ChannelGeometry& geometry,
                             SpinSlots* slots)
    : socket_(std::move(socket)),
      mapping_(std::move(mapping)),
      geometry_(geometry),
      spin_(slots),
      arena_(geometry.arena_offset, geometry.arena_bytes),
      entries_(geometry.ring_entries) {}

ClientChannel::~ClientChannel() = default;

ChannelHeader& ClientChannel::header() const {
  return *reinterpret_cast<ChannelHeader*>(mapping_.data());
}

CompletionEntry& ClientChannel::CompletionOf(uint32_t number) const {
  auto* const ring =
      reinterpret_cast<CompletionEntry*>(mapping_.data() + geometry_.completions_offset);
  return ring[number % geometry_.ring_entries];
}

CallState ClientChannel::Begin(uint64_t request_bytes, uint64_t reply_bytes, TimePoint deadline,
                               Call* call, Room room) {
  if (request_bytes > kRequestBytesMax || reply_bytes > kRequestBytesMax)
    return CallState::kTooLarge;
  const uint64_t reply_at = ArenaRounded(request_bytes);
  const uint64_t bytes = reply_at + ArenaRounded(reply_bytes);
  if (bytes > geometry_.arena_bytes) return CallState::kTooLarge;
  *call = Call();
  call->cancel_epoch_ = cancel_epoch_.load(std::memory_order_relaxed);
  MutexLock lock(&mutex_);
  std::optional<uint64_t> offset = arena_.Allocate(bytes);
  while (!offset.has_value()) {
    const CallState waited = WaitForRoomLocked(deadline, call->cancel_epoch_, room);
    if (waited != CallState::kAnswered) return waited;
    offset = arena_.Allocate(bytes);
  }
  call->channel_ = this;
  call->base_ = mapping_.data() + *offset;
  call->offset_ = *offset;
  call->bytes_ = bytes;
  call->request_bytes_ = request_bytes;
  call->reply_at_ = reply_at;
  call->reply_bytes_max_ = reply_bytes;
  return CallState::kAnswered;
}

CallState ClientChannel::Submit(uint64_t verb, TimePoint deadline, Call* call, Room room) {
  {
    MutexLock lock(&mutex_);
    ReapLocked();
    while (entries_[tail_ % geometry_.ring_entries].busy) {
      const CallState waited = WaitForRoomLocked(deadline, call->cancel_epoch_, room);
      if (waited != CallState::kAnswered) return waited;
    }
    entries_[tail_ % geometry_.ring_entries] = {
        .busy = true, .offset = call->offset_, .bytes = call->bytes_};
    call->number_ = tail_;
    call->under_way_ = true;
    WriteSubmission(verb, deadline, *call);
    // The store publishes the entry; its place in the total order is explained in
    // ServerChannel::WaitForTail.
    AtomicWord(header().tail).store(++tail_, std::memory_order_seq_cst);
  }
  if (AtomicWord(header().daemon_sleeps).load(std::memory_order_seq_cst) != 0) {
    FutexWake(&header().tail);
  }
  return CallState::kAnswered;
}

void ClientChannel::WriteSubmission(uint64_t verb, TimePoint deadline, const Call& call) {
  CompletionEntry& completion = CompletionOf(call.number_);
  AtomicWord(completion.state).store(kPending, std::memory_order_relaxed);
  auto* const ring =
      reinterpret_cast<SubmissionEntry*>(mapping_.data() + geometry_.submissions_offset);
  ring[call.number_ % geometry_.ring_entries] = {.verb = verb,
                                                 .request_offset = call.offset_,
                                                 .request_bytes = call.request_bytes_,
                                                 .reply_offset = call.offset_ + call.reply_at_,
                                                 .reply_bytes_max = call.reply_bytes_max_,
                                                 .deadline_ns = ToMonotonicNs(deadline)};
}

CallState ClientChannel::Wait(TimePoint deadline, Call* call) {
  WAVEKV_CHECK(call->under_way_, "waiting for a call that was not submitted");
  CompletionEntry& entry = CompletionOf(call->number_);
  const bool spun =
      spin_.Spin([&] { return AtomicWord(entry.state).load(std::memory_order_acquire) == kDone; });
  if (!spun) {
    const CallState slept = Sleep(deadline, *call);
    if (slept != CallState::kAnswered) return slept;
  }
  const uint32_t code = AtomicWord(entry.code).load(std::memory_order_relaxed);
  call->reply_bytes_ = std::atomic_ref<uint64_t>(entry.reply_bytes).load(std::memory_order_relaxed);
  call->reply_bytes_needed_ =
      std::atomic_ref<uint64_t>(entry.reply_bytes_needed).load(std::memory_order_relaxed);
  call->code_ = code <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)
                    ? static_cast<absl::StatusCode>(code)
                    : absl::StatusCode::kUnknown;
  {
    MutexLock lock(&mutex_);
    entries_[call->number_ % geometry_.ring_entries].busy = false;
    call->under_way_ = false;
    NotifyRoomLocked();
  }
  if (call->reply_bytes_ > call->reply_bytes_max_) {
    gone_.store(true, std::memory_order_relaxed);  // No daemon of ours says so.
    return CallState::kGone;
  }
  return CallState::kAnswered;
}

CallState ClientChannel::Sleep(TimePoint deadline, const Call& call) {
  CompletionEntry& entry = CompletionOf(call.number_);
  const auto state = AtomicWord(entry.state);
  for (;;) {
    uint32_t expected = kPending;
    state.compare_exchange_strong(expected, kPendingSleeper, std::memory_order_acq_rel);
    if (expected == kDone) return CallState::kAnswered;
    if (cancel_epoch_.load(std::memory_order_relaxed) != call.cancel_epoch_) {
      return CallState::kCancelled;
    }
    const auto left = deadline - steady_clock::now();
    if (left <= left.zero()) return CallState::kTimedOut;
    FutexWait(&entry.state, kPendingSleeper,
              std::min<std::chrono::nanoseconds>(left, kLookInterval));
    if (state.load(std::memory_order_acquire) == kDone) return CallState::kAnswered;
    if (IsGone()) {
      // It may have answered before it went.
      return state.load(std::memory_order_acquire) == kDone ? CallState::kAnswered
                                                            : CallState::kGone;
    }
  }
}

void ClientChannel::CancelCalls() {
  cancel_epoch_.fetch_add(1, std::memory_order_relaxed);
  for (uint32_t i = 0; i < geometry_.ring_entries; ++i) FutexWake(&CompletionOf(i).state);
  MutexLock lock(&mutex_);
  NotifyRoomLocked();
}

bool ClientChannel::IsGone() {
  if (gone_.load(std::memory_order_relaxed)) return true;
  // The daemon says nothing after the handshake: whatever there is to read is the end.
  pollfd entry{socket_.fd(), POLLIN | POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) != 1) return false;
  gone_.store(true, std::memory_order_relaxed);
  return true;
}

void ClientChannel::ReapLocked() {
  if (abandoned_count_ == 0) return;
  for (uint32_t i = 0; i < geometry_.ring_entries; ++i) {
    Entry& entry = entries_[i];
    if (!entry.abandoned ||
        AtomicWord(CompletionOf(i).state).load(std::memory_order_acquire) != kDone) {
      continue;
    }
    arena_.Free(entry.offset, entry.bytes);
    entry = Entry();
    --abandoned_count_;
  }
}

CallState ClientChannel::WaitForRoomLocked(TimePoint deadline, uint32_t cancel_epoch, Room room) {
  const uint64_t free_before = arena_.free_bytes();
  ReapLocked();
  if (arena_.free_bytes() != free_before) return CallState::kAnswered;
  if (cancel_epoch_.load(std::memory_order_relaxed) != cancel_epoch) return CallState::kCancelled;
  const auto left = deadline - steady_clock::now();
  if (left <= left.zero()) return CallState::kTimedOut;
  if (room == Room::kNow) return CallState::kFull;
  ++room_waiters_;
  room_.WaitFor(&mutex_, std::min<std::chrono::nanoseconds>(left, kLookInterval));
  --room_waiters_;
  return IsGone() ? CallState::kGone : CallState::kAnswered;
}

void ClientChannel::NotifyRoomLocked() {
  if (room_waiters_ > 0) room_.NotifyAll();
}

void ClientChannel::Release(Call* call) {
  MutexLock lock(&mutex_);
  if (call->under_way_) {
    entries_[call->number_ % geometry_.ring_entries].abandoned = true;
    ++abandoned_count_;
    return;
  }
  arena_.Free(call->offset_, call->bytes_);
  NotifyRoomLocked();
}

absl::Status ClientChannel::Call::status() const {
  if (code_ == absl::StatusCode::kOk) return absl::OkStatus();
  return absl::Status(
      code_, absl::string_view(reinterpret_cast<const char*>(reply().data()), reply().size()));
}

void ClientChannel::Call::Swap(Call& other) noexcept {
  std::swap(channel_, other.channel_);
  std::swap(base_, other.base_);
  std::swap(offset_, other.offset_);
  std::swap(bytes_, other.bytes_);
  std::swap(request_bytes_, other.request_bytes_);
  std::swap(reply_at_, other.reply_at_);
  std::swap(reply_bytes_max_, other.reply_bytes_max_);
  std::swap(number_, other.number_);
  std::swap(cancel_epoch_, other.cancel_epoch_);
  std::swap(under_way_, other.under_way_);
  std::swap(code_, other.code_);
  std::swap(reply_bytes_, other.reply_bytes_);
  std::swap(reply_bytes_needed_, other.reply_bytes_needed_);
}

}  // namespace wavekv::shm
