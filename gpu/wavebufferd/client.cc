#include <unistd.h>

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gpu/buffer_client.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/address.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"
#include "wavekv/v1/wavebuffer.grpc.pb.h"

namespace wavekv {
namespace {

constexpr auto kCallTimeout = std::chrono::seconds(3);
constexpr int kReconnectMinMs = 50;
constexpr int kReconnectMaxMs = 500;

class GrpcBufferClient : public BufferClient {
 public:
  GrpcBufferClient(std::string address, const std::shared_ptr<grpc::Channel>& channel)
      : address_(std::move(address)), stub_(v1::WaveBuffer::NewStub(channel)) {}

  const std::string& address() const override { return address_; }

  absl::StatusOr<BufferLease> Attach(const std::string& manager_name) override {
    v1::AttachManagerRequest request;
    request.set_protocol_version_min(kProtocolVersionMin);
    request.set_protocol_version_max(kProtocolVersionMax);
    request.set_manager_name(manager_name);
    request.set_pid(::getpid());
    v1::AttachManagerReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&v1::WaveBuffer::Stub::AttachManager, request, &reply));
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
    return Call(&v1::WaveBuffer::Stub::ManagerHeartbeat, request, &reply);
  }

  absl::StatusOr<BufferGrant> Allocate(const std::string& secret, const std::string& tenant,
                                       uint64_t bytes) override {
    v1::AllocateRequest request;
    request.set_secret(secret);
    request.set_tenant(tenant);
    request.set_bytes(bytes);
    v1::AllocateReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&v1::WaveBuffer::Stub::Allocate, request, &reply));
    return BufferGrant{reply.allocation_id(), reply.manager_ticket(), reply.bytes()};
  }

  absl::StatusOr<std::string> IssueTicket(const std::string& secret, uint64_t allocation_id,
                                          int64_t client_uid) override {
    v1::IssueTicketRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    request.set_client_uid(client_uid);
    v1::IssueTicketReply reply;
    WAVEKV_RETURN_IF_ERROR(Call(&v1::WaveBuffer::Stub::IssueTicket, request, &reply));
    return reply.client_ticket();
  }

  absl::Status Seal(const std::string& secret, uint64_t allocation_id) override {
    v1::SealRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    v1::SealReply reply;
    return Call(&v1::WaveBuffer::Stub::Seal, request, &reply);
  }

  absl::Status Release(const std::string& secret, uint64_t allocation_id) override {
    v1::ReleaseRequest request;
    request.set_secret(secret);
    request.set_allocation_id(allocation_id);
    v1::ReleaseReply reply;
    return Call(&v1::WaveBuffer::Stub::Release, request, &reply);
  }

  absl::StatusOr<BufferStats> Stats() override {
    v1::GetBufferStatsReply reply;
    WAVEKV_RETURN_IF_ERROR(
        Call(&v1::WaveBuffer::Stub::GetBufferStats, v1::GetBufferStatsRequest(), &reply));
    return BufferStats{reply.bytes_max(), reply.bytes_used(), reply.pinned()};
  }

 private:
  template <class Request, class Reply>
  absl::Status Call(grpc::Status (v1::WaveBuffer::Stub::*method)(grpc::ClientContext*,
                                                                 const Request&, Reply*),
                    const Request& request, Reply* reply) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + kCallTimeout);
    const absl::Status status = FromGrpcStatus((stub_.get()->*method)(&context, request, reply));
    if (status.ok()) return status;
    // A wavebufferd that does not answer is as good as none.
    const auto code =
        absl::IsDeadlineExceeded(status) ? absl::StatusCode::kUnavailable : status.code();
    return absl::Status(code, absl::StrCat("wavebufferd at ", address_, ": ", status.message()));
  }

  const std::string address_;
  const std::unique_ptr<v1::WaveBuffer::Stub> stub_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BufferClient>> CreateBufferClient(const std::string& address) {
  WAVEKV_ASSIGN_OR_RETURN(const Address parsed, ParseAddress(address));
  if (!parsed.is_unix) {
    return absl::InvalidArgumentError(
        absl::StrCat("wavebufferd's address is '", address,
                     "', expected unix:/path: descriptors cannot be passed over a network"));
  }
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMinMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kReconnectMinMs);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMaxMs);
  // A restarted wavebufferd must not be reached through another client's dead connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return std::make_unique<GrpcBufferClient>(
      parsed.ToString(),
      grpc::CreateCustomChannel(parsed.ToString(), grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace wavekv
