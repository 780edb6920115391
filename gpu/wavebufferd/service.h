// The gRPC service WaveBuffer over a BufferTable.
#pragma once

#include <string>

#include "gpu/buffer_table.h"
#include "gpu/device_memory.h"
#include "storage/base/clock.h"
#include "wavekv/v1/wavebuffer.grpc.pb.h"

namespace wavekv {

// Thread-safe. `table` and `memory` outlive the service.
class WaveBufferService final : public v1::WaveBuffer::Service {
 public:
  // `descriptor_socket` is the path that managers and clients take tickets to.
  WaveBufferService(BufferTable* table, const DeviceMemory* memory, std::string descriptor_socket);

  grpc::Status AttachManager(grpc::ServerContext* context, const v1::AttachManagerRequest* request,
                             v1::AttachManagerReply* reply) override;
  grpc::Status ManagerHeartbeat(grpc::ServerContext* context,
                                const v1::ManagerHeartbeatRequest* request,
                                v1::ManagerHeartbeatReply* reply) override;
  grpc::Status Allocate(grpc::ServerContext* context, const v1::AllocateRequest* request,
                        v1::AllocateReply* reply) override;
  grpc::Status IssueTicket(grpc::ServerContext* context, const v1::IssueTicketRequest* request,
                           v1::IssueTicketReply* reply) override;
  grpc::Status Seal(grpc::ServerContext* context, const v1::SealRequest* request,
                    v1::SealReply* reply) override;
  grpc::Status Release(grpc::ServerContext* context, const v1::ReleaseRequest* request,
                       v1::ReleaseReply* reply) override;
  grpc::Status GetBufferStats(grpc::ServerContext* context,
                              const v1::GetBufferStatsRequest* request,
                              v1::GetBufferStatsReply* reply) override;

 private:
  BufferTable* const table_;
  const DeviceMemory* const memory_;
  const std::string descriptor_socket_;
  const int64_t started_ms_;
};

}  // namespace wavekv
