#include "client/connection.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "grpc/grpc.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "proto/rpc/address.h"
#include "proto/rpc/metadata.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/random.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using std::chrono::system_clock;

constexpr milliseconds kProbeDeadline{250};
constexpr milliseconds kReconnectWait{200};
constexpr milliseconds kChannelDeadline{1000};  // To open the data plane; calls use gRPC else.
constexpr milliseconds kCloseDeadline{500};
constexpr milliseconds kRetryInterval{250};  // Of the heartbeat while the daemon is away.
// gRPC names it the least backoff, and takes it for the time that a connection attempt may last.
constexpr int kConnectTimeoutMs = 5000;
constexpr int kBackoffMinMs = 50;
constexpr int kBackoffMaxMs = 500;
// A reply is bounded by the largest inline Query: steady zone and retrieved rows of one layer.
constexpr int kReplyBytesMax = 256 << 20;
constexpr size_t kClientNameBytesMax = 128;

// Holds gRPC's library up until the process ends. Its shutdown, which the last channel to go would
// run, now and then waits 10 s for a poller of its own (seen with 1.51 on a busy machine).
void KeepGrpcUp() {
  static const bool kept = [] {
    grpc_init();
    return true;
  }();
  (void)kept;
}

grpc::ChannelArguments ChannelArgs() {
  grpc::ChannelArguments args;
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kBackoffMinMs);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kBackoffMaxMs);
  // A connection of our own: sessions of one process must not queue behind each other.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  args.SetMaxReceiveMessageSize(kReplyBytesMax);
  args.SetMaxSendMessageSize(-1);  // The daemon's limit holds; Insert keeps under it.
  args.SetUserAgentPrefix("wavekv-client/" WAVEKV_VERSION);
  return args;
}

absl::Status CheckOptions(const ClientOptions& options) {
  if (options.client_name.size() > kClientNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("client_name has ", options.client_name.size(),
                                                   " bytes, at most ", kClientNameBytesMax,
                                                   " are allowed"));
  }
  if (options.deadline.count() <= 0 || options.build_deadline.count() <= 0) {
    return absl::InvalidArgumentError("deadline and build_deadline must be longer than 0 ms");
  }
  if (options.lease.count() < 0) return absl::InvalidArgumentError("lease must not be negative");
  return absl::OkStatus();
}

// Bytes from outside: everything of the reply is checked before it is kept.
absl::StatusOr<std::shared_ptr<const Attachment>> FromReply(const v1::AttachReply& reply) {
  if (reply.protocol_version() < kProtocolVersionMin ||
      reply.protocol_version() > kProtocolVersionMax) {
    return absl::FailedPreconditionError(
        absl::StrCat("the daemon (", reply.daemon_version(), ") chose protocol version ",
                     reply.protocol_version(), "; this client (", WAVEKV_VERSION, ") speaks ",
                     kProtocolVersionMin, " to ", kProtocolVersionMax));
  }
  if (reply.secret().size() != kSecretBytes || reply.epoch() == 0 || reply.lease_ms() == 0) {
    return absl::InternalError(absl::StrCat("the daemon's Attach reply is malformed: a secret of ",
                                            reply.secret().size(), " bytes, epoch ", reply.epoch(),
                                            ", lease ", reply.lease_ms(), " ms; expected ",
                                            kSecretBytes, " bytes and numbers above 0"));
  }
  auto attachment = std::make_shared<Attachment>();
  attachment->secret = reply.secret();
  attachment->epoch = reply.epoch();
  // A lease beyond a day is as good as a day, and arithmetic on it stays in range.
  attachment->lease = milliseconds(std::min<uint64_t>(reply.lease_ms(), 24 * 3600 * 1000));
  attachment->data_socket = reply.data_socket();
  attachment->info = {.tenant = reply.tenant(),
                      .daemon_version = reply.daemon_version(),
                      .epoch = reply.epoch(),
                      .message_bytes_max = reply.limits().message_bytes_max(),
                      .tenant_bytes_max = reply.limits().tenant_bytes_max(),
                      .batch_max = reply.limits().batch_max()};
  return attachment;
}

}  // namespace

// A context with metadata and deadline, listed among the running ones while it lives.
class Connection::RunningCall {
 public:
  RunningCall(Connection* connection, const Attachment& attachment, TimePoint deadline)
      : connection_(connection) {
    connection_->Prepare(attachment, deadline, &context_);
    MutexLock lock(&connection_->mutex_);
    connection_->running_.insert(&context_);
    if (connection_->stopping_) context_.TryCancel();
  }
  ~RunningCall() {
    MutexLock lock(&connection_->mutex_);
    connection_->running_.erase(&context_);
  }
  grpc::ClientContext* context() { return &context_; }
  // The daemon says that our secret or epoch is no longer good.
  bool Refused(const grpc::Status& status) const {
    return status.error_code() == grpc::StatusCode::UNAUTHENTICATED ||
           (!status.ok() && context_.GetServerTrailingMetadata().contains(kStaleEpochKey));
  }

 private:
  Connection* const connection_;
  grpc::ClientContext context_;
};

absl::StatusOr<std::shared_ptr<Connection>> Connection::Open(ClientOptions options) {
  WAVEKV_RETURN_IF_ERROR(CheckOptions(options));
  if (options.address.empty()) options.address = DefaultAddress();
  WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(options.address));
  options.address = address.ToString();
  KeepGrpcUp();
  std::shared_ptr<grpc::Channel> channel =
      grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), ChannelArgs());
  const milliseconds deadline = options.deadline;
  std::shared_ptr<Connection> connection(new Connection(std::move(options), std::move(channel)),
                                         [](const Connection* last) {
                                           if (!last->forked()) delete last;
                                         });
  WAVEKV_RETURN_IF_ERROR(connection->EnsureAttached(system_clock::now() + deadline).status());
  connection->heartbeat_thread_ = std::thread([raw = connection.get()] { raw->HeartbeatLoop(); });
  return connection;
}

Connection::Connection(ClientOptions options, std::shared_ptr<grpc::Channel> channel)
    : options_(std::move(options)),
      channel_(std::move(channel)),
      stub_(v1::WaveKV::NewStub(channel_)) {}

Connection::~Connection() { Close(); }

absl::Status Connection::Closed(const char* name) const {
  return absl::FailedPreconditionError(
      forked()
          ? absl::StrCat(name, ": the session belongs to process ", process_,
                         ", of which this one is a fork; connect in a process that is started anew "
                         "(multiprocessing: spawn)")
          : absl::StrCat(name, ": the session has been closed"));
}

void Connection::Close() {
  if (forked() || closed_.exchange(true, std::memory_order_acq_rel)) return;
  std::shared_ptr<const Attachment> attachment;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    if (attached_) attachment = attachment_;
    changed_.NotifyAll();
  }
  CancelRunning();
  if (heartbeat_thread_.joinable()) heartbeat_thread_.join();
  DropChannel(nullptr, "the session has been closed");
  if (attachment == nullptr) return;
  grpc::ClientContext context;
  Prepare(*attachment, system_clock::now() + kCloseDeadline, &context);
  v1::DetachReply reply;
  stub_->Detach(&context, v1::DetachRequest(), &reply);
}

std::shared_ptr<const Attachment> Connection::attachment() const {
  MutexLock lock(&mutex_);
  return attachment_;
}

absl::Status Connection::Run(const CallOptions& call, Attempt attempt) {
  const TimePoint deadline = system_clock::now() + call.deadline;
  // The last part of the deadline is kept to find out who is silent, this call or the daemon.
  const TimePoint call_deadline = deadline - std::min(kProbeDeadline, call.deadline / 10);
  absl::Status lost;
  for (int round = 0; round < 2; ++round) {
    if (closed()) return Closed(call.name);
    NudgeChannel(call_deadline);
    WAVEKV_ASSIGN_OR_RETURN(const std::shared_ptr<const Attachment> attachment,
                            EnsureAttached(call_deadline));
    if (call.epoch != 0 && call.epoch != attachment->epoch) {
      return absl::FailedPreconditionError(absl::StrCat(
          call.name, ": the daemon at ", options_.address, " was restarted (epoch ", call.epoch,
          " has become ", attachment->epoch,
          ") and the sequence is gone; the session has attached again: create the sequence anew"));
    }
    if (suspect_.load(std::memory_order_relaxed)) {
      WAVEKV_RETURN_IF_ERROR(Probe(call.name, attachment, call_deadline));
    }
    RunningCall running(this, *attachment, call_deadline);
    const grpc::Status status = attempt(*stub_, running.context(), *attachment);
    if (status.ok()) return absl::OkStatus();
    if (running.Refused(status)) {
      Invalidate(attachment);
    } else {
      const absl::Status verdict = Judge(call, status, attachment, deadline);
      // A connection that broke may have been the daemon's restart; the heartbeat has found out.
      const bool restarted = absl::IsUnavailable(verdict) && !IsCurrent(attachment);
      if (!restarted) return verdict;
    }
    lost = FromGrpcStatus(status);
  }
  return lost;
}

std::optional<absl::Status> Connection::RunLocal(CallOptions* call, Exchange exchange) {
  if (closed()) return Closed(call->name);
  std::shared_ptr<shm::ClientChannel> channel;
  std::shared_ptr<const Attachment> attachment;
  {
    MutexLock lock(&mutex_);
    // The rest, a call of an earlier epoch included, is told apart by Run.
    if (data_channel_ == nullptr || !attached_ || stopping_ ||
        (call->epoch != 0 && call->epoch != attachment_->epoch)) {
      return std::nullopt;
    }
    channel = data_channel_;
    attachment = attachment_;
  }
  if (suspect_.load(std::memory_order_relaxed)) return std::nullopt;
  const shm::TimePoint begin = steady_clock::now();
  const TimePoint until = system_clock::now() + call->deadline;
  absl::Status verdict;
  const shm::CallState state = exchange(
      *channel, begin + call->deadline - std::min(kProbeDeadline, call->deadline / 10), &verdict);
  switch (state) {
    case shm::CallState::kAnswered:
      if (absl::IsUnauthenticated(verdict)) {
        Invalidate(attachment);
        break;
      }
      if (!absl::IsUnavailable(verdict)) return verdict;
      return absl::UnavailableError(absl::StrCat(call->name, ": ", verdict.message()));
    case shm::CallState::kGone:
      DropChannel(channel, "the daemon closed it");
      break;
    case shm::CallState::kTooLarge:
    case shm::CallState::kFull:
      break;
    case shm::CallState::kCancelled:
      if (closed()) return Closed(call->name);
      return Silent(call->name);
    case shm::CallState::kTimedOut:
      return JudgeTimeout(*call, attachment, until);
  }
  const auto spent = std::chrono::ceil<milliseconds>(steady_clock::now() - begin);
  call->deadline = std::max(call->deadline - spent, milliseconds(1));
  return std::nullopt;
}

bool Connection::has_data_plane(std::string* absent) const {
  MutexLock lock(&mutex_);
  if (data_channel_ == nullptr) *absent = data_channel_absent_;
  return data_channel_ != nullptr;
}

absl::StatusOr<std::shared_ptr<shm::ClientChannel>> Connection::OpenChannel(
    const Attachment& attachment, TimePoint deadline) const {
  if (!options_.shared_memory) {
    return absl::FailedPreconditionError("ClientOptions::shared_memory is off");
  }
  if (attachment.data_socket.empty()) {
    return absl::FailedPreconditionError("the daemon offers none here");
  }
  const auto left = std::chrono::floor<milliseconds>(deadline - system_clock::now());
  return shm::ClientChannel::Connect(
      attachment.data_socket,
      {.version = shm::kChannelVersion, .epoch = attachment.epoch, .secret = attachment.secret},
      std::clamp(left, milliseconds(1), kChannelDeadline), shm::SpinSlots::OfProcess());
}

void Connection::KeepChannelLocked(
    const absl::StatusOr<std::shared_ptr<shm::ClientChannel>>& channel) {
  data_channel_ = channel.ok() ? *channel : nullptr;
  data_channel_absent_ = channel.ok() ? "" : std::string(channel.status().message());
}

void Connection::DropChannel(const std::shared_ptr<shm::ClientChannel>& channel, std::string why) {
  std::shared_ptr<shm::ClientChannel> dropped;  // Closed without the lock.
  MutexLock lock(&mutex_);
  if (channel != nullptr && data_channel_ != channel) return;
  dropped = std::move(data_channel_);
  data_channel_ = nullptr;
  data_channel_absent_ = std::move(why);
}

void Connection::RestoreChannel(const std::shared_ptr<const Attachment>& attachment,
                                TimePoint deadline) {
  std::string absent;
  if (!options_.shared_memory || attachment->data_socket.empty() || has_data_plane(&absent)) return;
  const auto channel = OpenChannel(*attachment, deadline);
  MutexLock lock(&mutex_);
  if (!stopping_ && attachment_ == attachment) KeepChannelLocked(channel);
}

absl::Status Connection::JudgeTimeout(const CallOptions& call,
                                      const std::shared_ptr<const Attachment>& attachment,
                                      TimePoint deadline) {
  WAVEKV_RETURN_IF_ERROR(Probe(call.name, attachment, deadline));
  return absl::DeadlineExceededError(absl::StrCat(
      call.name, ": no answer within ", call.deadline.count(), " ms, but the daemon at ",
      options_.address, " lives; is it overloaded, or the deadline too short?"));
}

absl::Status Connection::Judge(const CallOptions& call, const grpc::Status& status,
                               const std::shared_ptr<const Attachment>& attachment,
                               TimePoint deadline) {
  switch (status.error_code()) {
    case grpc::StatusCode::DEADLINE_EXCEEDED:
      return JudgeTimeout(call, attachment, deadline);
    case grpc::StatusCode::UNAVAILABLE:
      WAVEKV_RETURN_IF_ERROR(Probe(call.name, attachment, deadline));
      return absl::UnavailableError(absl::StrCat(call.name, ": ", status.error_message()));
    case grpc::StatusCode::CANCELLED:
      // By Close, or by the heartbeat after one deadline without an answer.
      if (closed()) return FromGrpcStatus(status);
      return Silent(call.name);
    default:
      return FromGrpcStatus(status);
  }
}

bool Connection::IsCurrent(const std::shared_ptr<const Attachment>& attachment) const {
  MutexLock lock(&mutex_);
  return attached_ && attachment_ == attachment;
}

absl::Status Connection::Silent(const char* name) const {
  return absl::UnavailableError(absl::StrCat(name, ": the daemon at ", options_.address,
                                             " does not answer (stopped, or overloaded?)"));
}

absl::Status Connection::Away(const char* name, absl::string_view why) const {
  return absl::UnavailableError(absl::StrCat(name, ": no daemon at ", options_.address, ": ", why,
                                             "; is wavekvd running, with this address?"));
}

absl::StatusOr<std::shared_ptr<const Attachment>> Connection::EnsureAttached(TimePoint deadline) {
  {
    MutexLock lock(&mutex_);
    while (attaching_ && !attached_) {
      const auto left = deadline - system_clock::now();
      if (left <= system_clock::duration::zero()) return Silent("Attach");
      changed_.WaitFor(&mutex_, left);
    }
    if (attached_) return attachment_;
    attaching_ = true;
  }
  absl::StatusOr<std::shared_ptr<const Attachment>> attached = Attach(deadline);
  const auto channel = attached.ok() ? OpenChannel(**attached, deadline)
                                     : absl::StatusOr<std::shared_ptr<shm::ClientChannel>>(nullptr);
  MutexLock lock(&mutex_);
  attaching_ = false;
  if (attached.ok()) {
    attachment_ = *attached;
    attached_ = true;
    KeepChannelLocked(channel);
  }
  changed_.NotifyAll();
  return attached;
}

absl::StatusOr<std::shared_ptr<const Attachment>> Connection::Attach(TimePoint deadline) {
  v1::AttachRequest request;
  request.set_protocol_version_min(kProtocolVersionMin);
  request.set_protocol_version_max(kProtocolVersionMax);
  request.set_client_name(options_.client_name);
  request.set_lease_ms(static_cast<uint64_t>(options_.lease.count()));
  RunningCall running(this, Attachment(), deadline);
  v1::AttachReply reply;
  const grpc::Status status = stub_->Attach(running.context(), request, &reply);
  if (status.ok()) {
    suspect_.store(false, std::memory_order_relaxed);
    NoteWaveBuffers(reply.wave_buffers());
    return FromReply(reply);
  }
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return Silent("Attach");
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return Away("Attach", status.error_message());
  }
  return FromGrpcStatus(status);
}

void Connection::Invalidate(const std::shared_ptr<const Attachment>& attachment) {
  MutexLock lock(&mutex_);
  if (attachment_ == attachment) attached_ = false;
}

void Connection::NoteWaveBuffers(
    const google::protobuf::RepeatedPtrField<v1::WaveBufferInfo>& buffers) {
  for (const v1::WaveBufferInfo& buffer : buffers) {
    const bool known = buffer.backend() == "host" || buffer.backend() == "cuda";
    if (!known || buffer.ticket().size() != kBufferTicketBytes) continue;
    MutexLock lock(&mutex_);
    buffer_access_ = {.socket = buffer.socket(),
                      .ticket = buffer.ticket(),
                      .bytes = buffer.buffer_bytes(),
                      .backend = buffer.backend(),
                      .device_uuid = buffer.device_uuid()};
    return;
  }
}

BufferAccess Connection::buffer_access() const {
  MutexLock lock(&mutex_);
  return buffer_access_;
}

absl::StatusOr<BufferAccess> Connection::RefreshBufferAccess() {
  const CallOptions call{.name = "Heartbeat", .deadline = options_.deadline};
  v1::HeartbeatRequest request;
  request.set_with_wave_buffers(true);
  v1::HeartbeatReply reply;
  WAVEKV_RETURN_IF_ERROR(
      Run(call, [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.Heartbeat(context, request, &reply);
      }));
  NoteWaveBuffers(reply.wave_buffers());
  return buffer_access();
}

void Connection::Prepare(const Attachment& attachment, TimePoint deadline,
                         grpc::ClientContext* context) const {
  context->set_deadline(deadline);
  if (!options_.token.empty()) {
    context->AddMetadata(kAuthorizationKey, kBearerPrefix + options_.token);
  }
  if (attachment.secret.empty()) return;
  context->AddMetadata(kSecretKey, attachment.secret);
  context->AddMetadata(kEpochKey, absl::StrCat(attachment.epoch));
}

void Connection::NudgeChannel(TimePoint deadline) {
  grpc_connectivity_state state = channel_->GetState(/*try_to_connect=*/true);
  if (state != GRPC_CHANNEL_TRANSIENT_FAILURE) return;
  grpc::experimental::ChannelResetConnectionBackoff(channel_.get());
  const TimePoint until = std::min<TimePoint>(deadline, system_clock::now() + kReconnectWait);
  // Through CONNECTING to READY or to the next failure.
  do {
    if (!channel_->WaitForStateChange(state, until)) return;
    state = channel_->GetState(/*try_to_connect=*/true);
  } while (state == GRPC_CHANNEL_IDLE || state == GRPC_CHANNEL_CONNECTING);
}

absl::Status Connection::Probe(const char* name,
                               const std::shared_ptr<const Attachment>& attachment,
                               TimePoint deadline) {
  const TimePoint until = std::min<TimePoint>(deadline, system_clock::now() + kProbeDeadline);
  const absl::Status status = Heartbeat(attachment, until);
  // Any other verdict of the daemon is a sign of life.
  const bool silent = absl::IsDeadlineExceeded(status) || absl::IsCancelled(status);
  const bool away = absl::IsUnavailable(status);
  suspect_.store(silent || away, std::memory_order_relaxed);
  if (silent) return Silent(name);
  return away ? Away(name, status.message()) : absl::OkStatus();
}

absl::Status Connection::Heartbeat(const std::shared_ptr<const Attachment>& attachment,
                                   TimePoint deadline) {
  RunningCall running(this, *attachment, deadline);
  v1::HeartbeatReply reply;
  const grpc::Status status = stub_->Heartbeat(running.context(), v1::HeartbeatRequest(), &reply);
  if (running.Refused(status)) Invalidate(attachment);
  return FromGrpcStatus(status);
}

void Connection::CancelRunning() {
  MutexLock lock(&mutex_);
  for (grpc::ClientContext* context : running_) context->TryCancel();
  if (data_channel_ != nullptr) data_channel_->CancelCalls();
}

void Connection::HeartbeatLoop() {
  milliseconds interval = attachment()->lease / 3;
  TimePoint last_answer = system_clock::now();
  while (true) {
    {
      MutexLock lock(&mutex_);
      const TimePoint until = system_clock::now() + interval;
      while (!stopping_) {
        const auto left = until - system_clock::now();
        if (left <= system_clock::duration::zero()) break;
        changed_.WaitFor(&mutex_, left);
      }
      if (stopping_) return;
    }
    const milliseconds regular = std::max(attachment()->lease / 3, milliseconds(1));
    const TimePoint deadline =
        system_clock::now() + std::min({regular, options_.deadline, milliseconds(10000)});
    NudgeChannel(deadline);
    absl::StatusOr<std::shared_ptr<const Attachment>> current = EnsureAttached(deadline);
    absl::Status status = current.status();
    if (status.ok()) status = Heartbeat(*current, deadline);
    if (status.ok()) {
      suspect_.store(false, std::memory_order_relaxed);
      RestoreChannel(*current, deadline);
    }
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) {
      last_answer = system_clock::now();
    } else if (system_clock::now() - last_answer >= options_.deadline) {
      suspect_.store(true, std::memory_order_relaxed);
      CancelRunning();
    }
    interval = status.ok() ? regular : std::min(regular, kRetryInterval);
  }
}

}  // namespace wavekv::client
