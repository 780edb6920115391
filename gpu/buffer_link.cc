#include "gpu/buffer_link.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// It may pass by itself: the process is away, or the places of dead managers are not free yet.
bool IsTransient(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsResourceExhausted(status) ||
         absl::IsNotFound(status);
}

}  // namespace

absl::StatusOr<std::unique_ptr<BufferLink>> BufferLink::Connect(
    std::unique_ptr<BufferClient> client, std::string manager_name, uint32_t heartbeat_ms) {
  std::unique_ptr<BufferLink> link(
      new BufferLink(std::move(client), std::move(manager_name), heartbeat_ms));
  const absl::Status status = link->Beat();
  if (!status.ok() && !IsTransient(status)) return status;
  link->thread_ = std::thread([raw = link.get()] { raw->Run(); });
  return link;
}

BufferLink::BufferLink(std::unique_ptr<BufferClient> client, std::string manager_name,
                       uint32_t heartbeat_ms)
    : client_(std::move(client)),
      manager_name_(std::move(manager_name)),
      heartbeat_ms_(heartbeat_ms),
      away_(absl::UnavailableError("not attached yet")) {}

BufferLink::~BufferLink() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  if (thread_.joinable()) thread_.join();
}

absl::StatusOr<BufferSession> BufferLink::Session() const {
  MutexLock lock(&mutex_);
  if (attached_ && reachable_) return session_;
  return absl::UnavailableError(absl::StrCat("the wave buffer is away (wavebufferd at ",
                                             client_->address(), "): ", away_.message()));
}

void BufferLink::Expire(uint64_t generation) {
  {
    MutexLock lock(&mutex_);
    if (session_.generation != generation || !attached_) return;
    attached_ = false;
    away_ = absl::UnavailableError("it forgot this manager; attaching again");
    expired_ = true;
  }
  wake_.NotifyAll();
}

BufferStats BufferLink::stats() const {
  MutexLock lock(&mutex_);
  return stats_;
}

BufferLease BufferLink::last_lease() const {
  MutexLock lock(&mutex_);
  return session_.lease;
}

void BufferLink::Run() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_ && !expired_) {
        wake_.WaitFor(&mutex_, std::chrono::milliseconds(heartbeat_ms_));
      }
      if (stopping_) return;
      expired_ = false;
    }
    (void)Beat();  // Noted by itself; the next beat tries again.
  }
}

absl::Status BufferLink::Beat() {
  bool attached;
  std::string secret;
  {
    MutexLock lock(&mutex_);
    attached = attached_;
    secret = session_.lease.secret;
  }
  absl::Status status = attached ? client_->Heartbeat(secret) : absl::OkStatus();
  if (!attached || absl::IsNotFound(status)) {
    absl::StatusOr<BufferLease> lease = client_->Attach(manager_name_);
    status = lease.status();
    if (status.ok()) NoteAttached(*lease);
  }
  BufferStats stats;
  if (status.ok()) {
    const absl::StatusOr<BufferStats> answer = client_->Stats();
    status = answer.status();
    if (answer.ok()) stats = *answer;
  }
  if (!status.ok()) {
    NoteAway(status);
    return status;
  }
  MutexLock lock(&mutex_);
  stats_ = stats;
  reachable_ = true;
  return absl::OkStatus();
}

void BufferLink::NoteAttached(const BufferLease& lease) {
  {
    MutexLock lock(&mutex_);
    session_ = {session_.generation + 1, lease};
    attached_ = true;
  }
  Log(LogLevel::kInfo, "wave_buffer_attached",
      {{"address", client_->address()},
       {"backend", lease.backend},
       {"device_uuid", lease.device_uuid},
       {"bytes_max", lease.bytes_max}});
}

void BufferLink::NoteAway(const absl::Status& why) {
  {
    MutexLock lock(&mutex_);
    if (absl::IsNotFound(why)) attached_ = false;
    const bool known = !reachable_ && away_.message() == why.message();
    reachable_ = false;
    away_ = why;
    if (known) return;
  }
  Log(LogLevel::kWarning, "wave_buffer_away", {{"address", client_->address()}, {"error", why}});
}

}  // namespace wavekv
