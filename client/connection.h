// One client's line to a daemon: channel, lease, heartbeat, re-attach and deadlines. Session and
// Admin are thin callers of it. Internal to the SDK.
#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/staged_buffer.h"
#include "client/types.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "proto/shm/client_channel.h"
#include "storage/base/mutex.h"
#include "wavekv/v1/wavekv.grpc.pb.h"

namespace wavekv::client {

// What one Attach gave. Immutable; a re-attach makes a new one.
struct Attachment {
  std::string secret;
  uint64_t epoch = 0;  // Of the daemon process.
  std::chrono::milliseconds lease{0};
  std::string data_socket;  // Empty: the daemon offers none.
  ClientInfo info;
};

// Thread-safe; holds no lock during an RPC. Owned by a Session or Admin and, after Close, kept
// alive by the sequences that outlive it.
class Connection {
 public:
  // How a call is to be made.
  struct CallOptions {
    const char* name = "";  // Of the RPC, for error texts.
    std::chrono::milliseconds deadline{0};
    // The daemon life that the ids in the request belong to; 0: the request has no ids.
    uint64_t epoch = 0;
  };

  // Attaches within the options' deadline. InvalidArgument: the address or an option is malformed.
  // Unavailable: nobody answers there. FailedPrecondition: no protocol version in common.
  // Unauthenticated: the token is not known.
  static absl::StatusOr<std::shared_ptr<Connection>> Open(ClientOptions options);
  ~Connection();
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Cancels what is under way, ends the heartbeat and detaches (bounded, errors ignored: the lease
  // ends anyway). Later calls are FailedPrecondition. Idempotent.
  void Close();
  // True in a forked child, too: threads, sockets and rings are its parent's. There every call is
  // FailedPrecondition, Close and the destructor do nothing, and what the connection owns stays.
  bool closed() const { return closed_.load(std::memory_order_acquire) || forked(); }

  // Runs `attempt` (one whole RPC, unary or stream) with a context that carries secret, epoch and
  // deadline. When the daemon does not know us any more it attaches again and, if that gave the
  // epoch asked for, tries once more; so `attempt` must be repeatable. Errors: as the daemon gave
  // them; Unavailable when nobody answers at all, DeadlineExceeded when only this call does not
  // come back; FailedPrecondition when `epoch` belongs to an earlier life of the daemon.
  using Attempt =
      absl::FunctionRef<grpc::Status(v1::WaveKV::Stub&, grpc::ClientContext*, const Attachment&)>;
  absl::Status Run(const CallOptions& call, Attempt attempt);

  // Makes a call over the data plane: `exchange` says how far it came, and the daemon's verdict
  // when it was answered. Errors as Run's. Empty: there is no data plane, it has gone, or the call
  // is too large for it, so that it is to be made with Run, in what is left of `call`'s deadline.
  using Exchange = absl::FunctionRef<shm::CallState(shm::ClientChannel&, shm::TimePoint deadline,
                                                    absl::Status* verdict)>;
  std::optional<absl::Status> RunLocal(CallOptions* call, Exchange exchange);
  // Whether there is a data plane; if not, why not.
  bool has_data_plane(std::string* absent) const;

  const ClientOptions& options() const { return options_; }
  // The latest one, valid or not: a lost lease is found out by the next call.
  std::shared_ptr<const Attachment> attachment() const;

  // How to fetch the tenant's wave buffer in host memory, as last heard from the daemon.
  BufferAccess buffer_access() const;
  // Asks the daemon again, within one deadline.
  absl::StatusOr<BufferAccess> RefreshBufferAccess();
  StagedBufferCache& buffers() { return buffers_; }

 private:
  using TimePoint = std::chrono::system_clock::time_point;
  class RunningCall;

  Connection(ClientOptions options, std::shared_ptr<grpc::Channel> channel);

  bool forked() const { return ::getpid() != process_; }
  absl::Status Closed(const char* name) const;

  // The current attachment; attaches first when it is known to be lost. One caller attaches, the
  // others wait for it.
  absl::StatusOr<std::shared_ptr<const Attachment>> EnsureAttached(TimePoint deadline);
  absl::StatusOr<std::shared_ptr<const Attachment>> Attach(TimePoint deadline);
  // Marks `attachment` as lost, if it is still the current one.
  void Invalidate(const std::shared_ptr<const Attachment>& attachment);
  // Keeps the first usable wave buffer of a reply, and what is known when there is none.
  void NoteWaveBuffers(const google::protobuf::RepeatedPtrField<v1::WaveBufferInfo>& buffers);

  // A channel for an attachment, or why there is none.
  absl::StatusOr<std::shared_ptr<shm::ClientChannel>> OpenChannel(const Attachment& attachment,
                                                                  TimePoint deadline) const;
  void KeepChannelLocked(const absl::StatusOr<std::shared_ptr<shm::ClientChannel>>& channel)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Null: whichever there is.
  void DropChannel(const std::shared_ptr<shm::ClientChannel>& channel, std::string why);
  // The heartbeat's: tries again where a channel is missing that could be there.
  void RestoreChannel(const std::shared_ptr<const Attachment>& attachment, TimePoint deadline);

  void Prepare(const Attachment& attachment, TimePoint deadline,
               grpc::ClientContext* context) const;
  // Cuts gRPC's reconnect backoff short, so that a daemon that is back is found at once.
  void NudgeChannel(TimePoint deadline);
  // Of a call without an answer: DeadlineExceeded when the daemon answers others, or Unavailable.
  absl::Status JudgeTimeout(const CallOptions& call,
                            const std::shared_ptr<const Attachment>& attachment,
                            TimePoint deadline);
  // What a failed call means; asks with a heartbeat where its own status cannot tell.
  absl::Status Judge(const CallOptions& call, const grpc::Status& status,
                     const std::shared_ptr<const Attachment>& attachment, TimePoint deadline);
  // One short heartbeat: OK when anybody answers, Unavailable for the call `name` otherwise.
  absl::Status Probe(const char* name, const std::shared_ptr<const Attachment>& attachment,
                     TimePoint deadline);
  bool IsCurrent(const std::shared_ptr<const Attachment>& attachment) const;
  absl::Status Heartbeat(const std::shared_ptr<const Attachment>& attachment, TimePoint deadline);
  void HeartbeatLoop();
  // Cancels every RPC under way.
  void CancelRunning();
  absl::Status Silent(const char* name) const;
  absl::Status Away(const char* name, absl::string_view why) const;

  const pid_t process_ = ::getpid();
  const ClientOptions options_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::WaveKV::Stub> stub_;

  StagedBufferCache buffers_;

  std::atomic<bool> closed_{false};
  // Set when a call got no answer of any kind: the next one asks with a short probe first, so that
  // a stopped daemon costs one deadline and not one per call.
  std::atomic<bool> suspect_{false};

  mutable Mutex mutex_;
  CondVar changed_;
  std::shared_ptr<const Attachment> attachment_ ABSL_GUARDED_BY(mutex_);
  BufferAccess buffer_access_ ABSL_GUARDED_BY(mutex_);
  bool attached_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<shm::ClientChannel> data_channel_
      ABSL_GUARDED_BY(mutex_);                               // Of attachment_, or null.
  std::string data_channel_absent_ ABSL_GUARDED_BY(mutex_);  // Why it is null.
  bool attaching_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  // RPCs under way. Long ones (builds, inserts) are cancelled once the daemon has been silent for
  // one deadline; the heartbeat's own at Close.
  std::set<grpc::ClientContext*> running_ ABSL_GUARDED_BY(mutex_);
  std::thread heartbeat_thread_;
};

}  // namespace wavekv::client
