// Keeps a manager's lease on a wavebufferd, and notices when it leaves and comes back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/buffer_client.h"
#include "storage/base/mutex.h"

namespace wavekv {

// One life of the lease. Allocations of an earlier generation are gone.
struct BufferSession {
  uint64_t generation = 0;  // From 1.
  BufferLease lease;
};

// Thread-safe.
class BufferLink {
 public:
  // Attaches once, in the caller; a wavebufferd that is away is tried again every `heartbeat_ms`.
  // Any other refusal is returned.
  static absl::StatusOr<std::unique_ptr<BufferLink>> Connect(std::unique_ptr<BufferClient> client,
                                                             std::string manager_name,
                                                             uint32_t heartbeat_ms);
  ~BufferLink();
  BufferLink(const BufferLink&) = delete;
  BufferLink& operator=(const BufferLink&) = delete;

  // Unavailable, naming the address: wavebufferd is away.
  absl::StatusOr<BufferSession> Session() const;
  // A call was answered NotFound: attach again soon, unless that has happened since.
  void Expire(uint64_t generation);

  BufferClient& client() { return *client_; }
  // As of the last heartbeat.
  BufferStats stats() const;
  // What was last granted; empty when nothing ever was.
  BufferLease last_lease() const;

 private:
  BufferLink(std::unique_ptr<BufferClient> client, std::string manager_name, uint32_t heartbeat_ms);
  void Run();
  // One heartbeat, or one attempt to attach. Returns what went wrong.
  absl::Status Beat();
  void NoteAttached(const BufferLease& lease);
  void NoteAway(const absl::Status& why);

  const std::unique_ptr<BufferClient> client_;
  const std::string manager_name_;
  const uint32_t heartbeat_ms_;

  mutable Mutex mutex_;
  CondVar wake_;
  BufferSession session_ ABSL_GUARDED_BY(mutex_);
  bool attached_ ABSL_GUARDED_BY(mutex_) = false;   // session_ is good, as far as we know.
  bool reachable_ ABSL_GUARDED_BY(mutex_) = false;  // The last call was answered.
  absl::Status away_ ABSL_GUARDED_BY(mutex_);       // Why not.
  BufferStats stats_ ABSL_GUARDED_BY(mutex_);
  bool expired_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace wavekv
