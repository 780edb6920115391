// The gRPC service of one identity: a uid's connections, or all TCP connections.
#pragma once

#include "daemon/server/call_guard.h"
#include "daemon/server/service_core.h"
#include "daemon/server/unary_call.h"
#include "grpcpp/grpcpp.h"
#include "wavekv/v1/wavekv.grpc.pb.h"

namespace wavekv {

class WaveKVService final : public v1::WaveKV::CallbackService {
 public:
  // `core` must outlive the service.
  WaveKVService(ServiceCore* core, CallGuard::Identify identify);

  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* context,
                                   const v1::AttachRequest* request,
                                   v1::AttachReply* reply) override;
  grpc::ServerUnaryReactor* Heartbeat(grpc::CallbackServerContext* context,
                                      const v1::HeartbeatRequest* request,
                                      v1::HeartbeatReply* reply) override;
  grpc::ServerUnaryReactor* Detach(grpc::CallbackServerContext* context,
                                   const v1::DetachRequest* request,
                                   v1::DetachReply* reply) override;
  grpc::ServerUnaryReactor* CreateSequence(grpc::CallbackServerContext* context,
                                           const v1::CreateSequenceRequest* request,
                                           v1::CreateSequenceReply* reply) override;
  grpc::ServerReadReactor<v1::InsertRequest>* Insert(grpc::CallbackServerContext* context,
                                                     v1::InsertReply* reply) override;
  grpc::ServerWriteReactor<v1::BuildIndexProgress>* BuildIndex(
      grpc::CallbackServerContext* context, const v1::BuildIndexRequest* request) override;
  grpc::ServerUnaryReactor* PlanIndex(grpc::CallbackServerContext* context,
                                      const v1::PlanIndexRequest* request,
                                      v1::PlanIndexReply* reply) override;
  grpc::ServerUnaryReactor* GiveLabels(grpc::CallbackServerContext* context,
                                       const v1::GiveLabelsRequest* request,
                                       v1::GiveLabelsReply* reply) override;
  grpc::ServerUnaryReactor* Query(grpc::CallbackServerContext* context,
                                  const v1::QueryRequest* request, v1::QueryReply* reply) override;
  grpc::ServerUnaryReactor* Estimate(grpc::CallbackServerContext* context,
                                     const v1::EstimateRequest* request,
                                     v1::EstimateReply* reply) override;
  grpc::ServerUnaryReactor* Attend(grpc::CallbackServerContext* context,
                                   const v1::AttendRequest* request,
                                   v1::AttendReply* reply) override;
  grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>* Decode(
      grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* ForkSequence(grpc::CallbackServerContext* context,
                                         const v1::ForkSequenceRequest* request,
                                         v1::ForkSequenceReply* reply) override;
  grpc::ServerUnaryReactor* TruncateSequence(grpc::CallbackServerContext* context,
                                             const v1::TruncateSequenceRequest* request,
                                             v1::TruncateSequenceReply* reply) override;
  grpc::ServerUnaryReactor* DropSequence(grpc::CallbackServerContext* context,
                                         const v1::DropSequenceRequest* request,
                                         v1::DropSequenceReply* reply) override;
  grpc::ServerUnaryReactor* Pin(grpc::CallbackServerContext* context, const v1::PinRequest* request,
                                v1::PinReply* reply) override;
  grpc::ServerUnaryReactor* SetTtl(grpc::CallbackServerContext* context,
                                   const v1::SetTtlRequest* request,
                                   v1::SetTtlReply* reply) override;
  grpc::ServerUnaryReactor* AttachResident(grpc::CallbackServerContext* context,
                                           const v1::AttachResidentRequest* request,
                                           v1::AttachResidentReply* reply) override;
  grpc::ServerUnaryReactor* ResidentStatus(grpc::CallbackServerContext* context,
                                           const v1::ResidentStatusRequest* request,
                                           v1::ResidentStatusReply* reply) override;
  grpc::ServerUnaryReactor* DetachResident(grpc::CallbackServerContext* context,
                                           const v1::DetachResidentRequest* request,
                                           v1::DetachResidentReply* reply) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetStatsRequest* request,
                                     v1::GetStatsReply* reply) override;
  grpc::ServerUnaryReactor* ListSequences(grpc::CallbackServerContext* context,
                                          const v1::ListSequencesRequest* request,
                                          v1::ListSequencesReply* reply) override;
  grpc::ServerUnaryReactor* DescribeIndex(grpc::CallbackServerContext* context,
                                          const v1::DescribeIndexRequest* request,
                                          v1::DescribeIndexReply* reply) override;
  grpc::ServerUnaryReactor* Explain(grpc::CallbackServerContext* context,
                                    const v1::ExplainRequest* request,
                                    v1::ExplainReply* reply) override;
  grpc::ServerUnaryReactor* SampleRecall(grpc::CallbackServerContext* context,
                                         const v1::SampleRecallRequest* request,
                                         v1::SampleRecallReply* reply) override;
  grpc::ServerWriteReactor<v1::RecordSequenceReply>* RecordSequence(
      grpc::CallbackServerContext* context, const v1::RecordSequenceRequest* request) override;

 private:
  // A call with a lease.
  template <class Request, class Reply>
  grpc::ServerUnaryReactor* Unary(Rpc rpc, Lane lane, grpc::CallbackServerContext* context,
                                  const Request* request, Reply* reply,
                                  absl::Status (*handler)(ServiceCore&, const CallScope&,
                                                          const Request&, Reply*));

  ServiceCore* const core_;
  const CallGuard guard_;
};

}  // namespace wavekv
