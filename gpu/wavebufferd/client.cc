#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/buffer_client.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/address.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"
#include "wavekv/v1/wavebuffer.grpc.pb.h"

namespace wavekv {
namespace {

constexpr auto kCallTimeout = std::chrono::seconds(3);

class GrpcBufferClient : public BufferClient {
 public:
  explicit GrpcBufferClient(std::string address) : address_(std::move(address)) {}

  const std::string& address() const override { return address_; }

  absl::StatusOr<BufferLease> Attach(const std::string& manager_name) override {
    v1::AttachManagerRequest request;
    request.set_protocol_version_min(kProtocolVersionMin);
    request.set_protocol_version_max(kProtocolVersionMax);
    request.set_manager_name(manager_name);
    request.set_pid(::getpid());
    v1::AttachManagerReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&Stub::AttachManager, request, &reply));
    BufferLease lease;
    lease.secret = reply.secret();
    lease.lease_ms = static_cast<int64_t>(reply.lease_ms());
    lease.device_uuid = reply.device_uuid();
    lease.backend = reply.backend();
    lease.bytes_max = reply.bytes_max();
    lease.descriptor_socket = reply.descriptor_socket();
    return lease;
  }

  absl::Status Heartbeat(const std::string& secret) override {
    v1::ManagerHeartbeatRequest request;
    request.set_secret(secret);
    v1::ManagerHeartbeatReply reply;
    return Call(&Stub::ManagerHeartbeat, request, &reply);
  }

  absl::StatusOr<BufferGrant> Allocate(const std::string& secret, const std::string& tenant,
                                       uint64_t bytes) override {
    v1::AllocateRequest request;
    request.set_secret(secret);
    request.set_tenant(tenant);
    request.set_bytes(bytes);
    v1::AllocateReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&Stub::Allocate, request, &reply));
    return BufferGrant{reply.allocation_id(), reply.manager_ticket(), reply.bytes()};
  }

  absl::StatusOr<std::string> IssueTicket(const std::string& secret, uint64_t allocation_id,
                                          int64_t client_uid) override {
    v1::IssueTicketRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    request.set_client_uid(client_uid);
    v1::IssueTicketReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&Stub::IssueTicket, request, &reply));
    return reply.client_ticket();
  }

  absl::Status Seal(const std::string& secret, uint64_t allocation_id) override {
    v1::SealRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    v1::SealReply reply;
    return Call(&Stub::Seal, request, &reply);
  }

  absl::Status Release(const std::string& secret, uint64_t allocation_id) override {
    v1::ReleaseRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    v1::ReleaseReply reply;
    return Call(&Stub::Release, request, &reply);
  }

  absl::StatusOr<BufferStats> Stats() override {
    v1::GetBufferStatsReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&Stub::GetBufferStats, v1::GetBufferStatsRequest(), &reply));
    return BufferStats{reply.bytes_max(), reply.bytes_used(), reply.pinned()};
  }

 private:
  using Stub = v1::WaveBuffer::Stub;

  template <class Request, class Reply>
  absl::Status Call(grpc::Status (Stub::*method)(grpc::ClientContext*, const Request&, Reply*),
                    const Request& request, Reply* reply) {
    const std::shared_ptr<Stub> stub = Connected();
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    const absl::Status status = FromGrpcStatus((stub.get()->*method)(&context, request, reply));
    if (status.ok()) return status;
    auto code = status.code();
    // A wavebufferd that does not answer is as good as none.
    if (absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status)) {
      code = absl::StatusCode::kUnavailable;
      Disconnect(stub);
    }
    return absl::Status(code, absl::StrCat("wavebufferd at ", address_, ": ", status.message()));
  }

  std::shared_ptr<Stub> Connected() {
    MutexLock lock(&mutex_);
    if (stub_ == nullptr) {
      grpc::ChannelArguments arguments;
      // With a connection of its own: not one that another channel has given up for a while.
      arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
      stub_ = v1::WaveBuffer::NewStub(
          grpc::CreateCustomChannel(address_, grpc::InsecureChannelCredentials(), arguments));
    }
    return stub_;
  }

  // gRPC backs off for seconds after a failure, and a wavebufferd that is restarted is back in
  // less. Our callers pace themselves, so each of them may try anew.
  void Disconnect(const std::shared_ptr<Stub>& failed) {
    MutexLock lock(&mutex_);
    if (stub_ == failed) stub_.reset();
  }

  const std::string address_;
  Mutex mutex_;
  std::shared_ptr<Stub> stub_ ABSL_GUARDED_BY(mutex_);  // Null: connect at the next call.
};

}  // namespace

absl::StatusOr<std::unique_ptr<BufferClient>> CreateBufferClient(const std::string& address) {
  WAVEKV_ASSIGN_OR_RETURN(const Address parsed, ParseAddress(address));
  if (!parsed.is_unix) {
    return absl::InvalidArgumentError(
        absl::StrCat("wavebufferd's address is '", address,
                     "', expected unix:/path: descriptors cannot be passed over a network"));
  }
  return std::make_unique<GrpcBufferClient>(parsed.ToString());
}

}  // namespace wavekv
