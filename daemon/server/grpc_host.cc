#include "daemon/server/grpc_host.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/server/wavekv_service.h"
#include "google/protobuf/stubs/logging.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/health_check_service_interface.h"
#include "grpcpp/resource_quota.h"
#include "grpcpp/server_posix.h"
#include "proto/rpc/address.h"
#include "proto/rpc/grpc_log.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Per connection; more wait at the client.
constexpr int kStreamsPerConnectionMax = 256;
// Bytes that one identity's unread messages may take before gRPC pushes back and then drops calls.
constexpr uint64_t kTransportBytesMin = 1ull << 30;
// Messages of the largest size that one identity can have on their way at once.
constexpr uint64_t kTransportMessagesMin = 8;
constexpr int kTcpKeepaliveMs = 30'000;

// Protobuf writes to stderr what it thinks of a hostile message: make it a line like others.
void LogProtobuf(google::protobuf::LogLevel /*level*/, const char* /*file*/, int /*line*/,
                 const std::string& message) {
  Log(LogLevel::kDebug, "protobuf", {{"message", message}});
}

// Health and reflection are plugins that gRPC collects in globals, before the first server.
void InitPluginsOnce() {
  static const bool initialised = [] {
    google::protobuf::SetLogHandler(LogProtobuf);
    TakeGrpcLog();
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
    return true;
  }();
  static_cast<void>(initialised);
}

// Reflection is a synchronous service: keep its threads to the one that polls.
void LimitThreads(grpc::ServerBuilder* builder) {
  using Option = grpc::ServerBuilder::SyncServerOption;
  builder->SetSyncServerOption(Option::NUM_CQS, 1);
  builder->SetSyncServerOption(Option::MIN_POLLERS, 1);
  builder->SetSyncServerOption(Option::MAX_POLLERS, 1);
}

}  // namespace

struct GrpcHost::Hosted {
  Hosted(ServiceCore* core, const std::string& name, CallGuard::Identify identify)
      : service(core, std::move(identify)), quota(name) {
    const uint64_t message_bytes = core->options.message_bytes_max;
    quota.Resize(std::max(kTransportBytesMin, kTransportMessagesMin * message_bytes));
  }

  void Configure(const ServerOptions& options, grpc::ServerBuilder* builder) {
    InitPluginsOnce();
    LimitThreads(builder);
    builder->RegisterService(&service);
    builder->SetResourceQuota(quota);
    builder->SetMaxReceiveMessageSize(static_cast<int>(options.message_bytes_max));
    builder->SetMaxSendMessageSize(-1);  // CheckReplyBytes refuses with a better text.
    builder->AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kStreamsPerConnectionMax);
  }

  WaveKVService service;
  grpc::ResourceQuota quota;
  std::unique_ptr<grpc::Server> server;  // Last: goes before what it serves.
};

GrpcHost::GrpcHost(ServiceCore* core, const UidIdentities* identities)
    : core_(core), identities_(identities) {}

GrpcHost::~GrpcHost() { Shutdown(); }

absl::Status GrpcHost::ServeConnection(UniqueFd connection, uid_t uid) {
  MutexLock lock(&mutex_);
  if (stopped_) return absl::UnavailableError("the daemon is shutting down");
  const auto found = by_uid_.find(uid);
  Hosted* hosted = found == by_uid_.end() ? nullptr : found->second.get();
  if (hosted == nullptr) {
    if (by_uid_.size() >= core_->options.uids_max) {
      return absl::ResourceExhaustedError(
          absl::StrCat("uid ", uid, " is the first beyond --uids_max=", core_->options.uids_max));
    }
    const Caller caller = identities_->CallerOf(uid);
    auto made =
        std::make_unique<Hosted>(core_, absl::StrCat("uid-", uid),
                                 [caller](const grpc::CallbackServerContext&) { return caller; });
    grpc::ServerBuilder builder;
    made->Configure(core_->options, &builder);
    made->server = builder.BuildAndStart();
    if (made->server == nullptr) {
      return absl::InternalError(absl::StrCat("gRPC made no server for uid ", uid));
    }
    hosted = made.get();
    by_uid_[uid] = std::move(made);
  }
  grpc::AddInsecureChannelFromFd(hosted->server.get(), connection.release());
  return absl::OkStatus();
}

absl::StatusOr<std::string> GrpcHost::ServeTcp(const std::string& address,
                                               const TokenTable* tokens) {
  WAVEKV_ASSIGN_OR_RETURN(Address bound, ParseAddress(address));
  auto made = std::make_unique<Hosted>(core_, "tcp", IdentifyByToken(tokens));
  grpc::ServerBuilder builder;
  made->Configure(core_->options, &builder);
  int port = 0;
  builder.AddListeningPort(bound.ToString(), grpc::InsecureServerCredentials(), &port);
  // Without this a second daemon would share the port, silently.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // A peer behind a broken network is noticed; a UNIX peer's death the kernel tells.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, kTcpKeepaliveMs);
  made->server = builder.BuildAndStart();
  if (made->server == nullptr || port == 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address,
                     ": the address is in use or not of this host; stop what uses it or choose "
                     "another --listen_tcp"));
  }
  bound.port = static_cast<uint16_t>(port);
  MutexLock lock(&mutex_);
  tcp_ = std::move(made);
  return bound.ToString();
}

void GrpcHost::SetNotServing() {
  MutexLock lock(&mutex_);
  const auto set = [](Hosted* hosted) {
    grpc::HealthCheckServiceInterface* health = hosted->server->GetHealthCheckService();
    if (health != nullptr) health->SetServingStatus(false);
  };
  for (const auto& [uid, hosted] : by_uid_) set(hosted.get());
  if (tcp_ != nullptr) set(tcp_.get());
}

void GrpcHost::Shutdown() {
  std::vector<std::unique_ptr<Hosted>> ending;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    for (auto& [uid, hosted] : by_uid_) ending.push_back(std::move(hosted));
    by_uid_.clear();
    if (tcp_ != nullptr) ending.push_back(std::move(tcp_));
  }
  const auto now = std::chrono::system_clock::now();
  for (const std::unique_ptr<Hosted>& hosted : ending) hosted->server->Shutdown(now);
}

}  // namespace wavekv
