#include "gpu/wavebufferd/service.h"

#include <utility>

#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"

namespace wavekv {

WaveBufferService::WaveBufferService(BufferTable* table, const DeviceMemory* memory,
                                     std::string descriptor_socket)
    : table_(table),
      memory_(memory),
      descriptor_socket_(std::move(descriptor_socket)),
      started_ms_(RealClock()->NowMs()) {}

grpc::Status WaveBufferService::AttachManager(grpc::ServerContext* /*context*/,
                                              const v1::AttachManagerRequest* request,
                                              v1::AttachManagerReply* reply) {
  const absl::StatusOr<uint32_t> version =
      NegotiateProtocolVersion(request->protocol_version_min(), request->protocol_version_max());
  if (!version.ok()) return ToGrpcStatus(version.status());
  absl::StatusOr<std::string> secret =
      table_->AttachManager(request->manager_name(), request->pid());
  if (!secret.ok()) return ToGrpcStatus(secret.status());
  reply->set_protocol_version(*version);
  reply->set_secret(*std::move(secret));
  reply->set_lease_ms(static_cast<uint64_t>(table_->options().lease_ms));
  reply->set_device_uuid(memory_->device_uuid());
  reply->set_backend(memory_->backend());
  reply->set_bytes_max(table_->options().bytes_max);
  reply->set_descriptor_socket(descriptor_socket_);
  return grpc::Status::OK;
}

grpc::Status WaveBufferService::ManagerHeartbeat(grpc::ServerContext* /*context*/,
                                                 const v1::ManagerHeartbeatRequest* request,
                                                 v1::ManagerHeartbeatReply* /*reply*/) {
  return ToGrpcStatus(table_->Heartbeat(request->secret()));
}

grpc::Status WaveBufferService::Allocate(grpc::ServerContext* /*context*/,
                                         const v1::AllocateRequest* request,
                                         v1::AllocateReply* reply) {
  absl::StatusOr<AllocationGrant> grant =
      table_->Allocate(request->secret(), request->tenant(), request->bytes());
  if (!grant.ok()) return ToGrpcStatus(grant.status());
  reply->set_allocation_id(grant->id);
  reply->set_manager_ticket(std::move(grant->manager_ticket));
  reply->set_bytes(grant->bytes);
  return grpc::Status::OK;
}

grpc::Status WaveBufferService::IssueTicket(grpc::ServerContext* /*context*/,
                                            const v1::IssueTicketRequest* request,
                                            v1::IssueTicketReply* reply) {
  absl::StatusOr<std::string> ticket =
      table_->IssueTicket(request->secret(), request->allocation_id(), request->client_uid());
  if (!ticket.ok()) return ToGrpcStatus(ticket.status());
  reply->set_client_ticket(*std::move(ticket));
  return grpc::Status::OK;
}

grpc::Status WaveBufferService::Seal(grpc::ServerContext* /*context*/,
                                     const v1::SealRequest* request, v1::SealReply* /*reply*/) {
  return ToGrpcStatus(table_->Seal(request->secret(), request->allocation_id()));
}

grpc::Status WaveBufferService::Release(grpc::ServerContext* /*context*/,
                                        const v1::ReleaseRequest* request,
                                        v1::ReleaseReply* /*reply*/) {
  return ToGrpcStatus(table_->Release(request->secret(), request->allocation_id()));
}

grpc::Status WaveBufferService::GetBufferStats(grpc::ServerContext* /*context*/,
                                               const v1::GetBufferStatsRequest* /*request*/,
                                               v1::GetBufferStatsReply* reply) {
  const BufferUsage usage = table_->Usage();
  reply->set_version(WAVEKV_VERSION);
  reply->set_backend(memory_->backend());
  reply->set_device_uuid(memory_->device_uuid());
  reply->set_bytes_max(usage.bytes_max);
  reply->set_bytes_used(usage.bytes_used);
  reply->set_allocations(usage.allocations);
  reply->set_managers(usage.managers);
  reply->set_wiped_bytes(usage.wiped_bytes);
  reply->set_pinned(memory_->pinned());
  reply->set_uptime_ms(static_cast<uint64_t>(RealClock()->NowMs() - started_ms_));
  reply->set_lingering_bytes(usage.lingering_bytes);
  reply->set_context_bytes(usage.overhead_bytes);
  return grpc::Status::OK;
}

}  // namespace wavekv
