#include "daemon/server/wavekv_service.h"

#include <utility>

#include "daemon/server/build_stream.h"
#include "daemon/server/decode_stream.h"
#include "daemon/server/handlers.h"
#include "daemon/server/insert_stream.h"
#include "daemon/server/record_stream.h"

namespace wavekv {

WaveKVService::WaveKVService(ServiceCore* core, CallGuard::Identify identify)
    : core_(core), guard_(core, std::move(identify)) {}

template <class Request, class Reply>
grpc::ServerUnaryReactor* WaveKVService::Unary(
    Rpc rpc, Lane lane, grpc::CallbackServerContext* context, const Request* request, Reply* reply,
    absl::Status (*handler)(ServiceCore&, const CallScope&, const Request&, Reply*)) {
  auto* call = new UnaryCall<Request, Reply>(core_, rpc, context, request, reply, handler);
  call->Start(guard_.Authenticate(context), lane);
  return call;
}

grpc::ServerUnaryReactor* WaveKVService::Attach(grpc::CallbackServerContext* context,
                                                const v1::AttachRequest* request,
                                                v1::AttachReply* reply) {
  auto* call = new UnaryCall<v1::AttachRequest, v1::AttachReply>(core_, Rpc::kAttach, context,
                                                                 request, reply, HandleAttach);
  call->Start(guard_.Admit(context), Lane::kSlow);  // Asks wavebufferd.
  return call;
}

grpc::ServerReadReactor<v1::InsertRequest>* WaveKVService::Insert(
    grpc::CallbackServerContext* context, v1::InsertReply* reply) {
  auto* stream = new InsertStream(core_, context, reply);
  stream->Start(guard_.Authenticate(context));
  return stream;
}

grpc::ServerWriteReactor<v1::BuildIndexProgress>* WaveKVService::BuildIndex(
    grpc::CallbackServerContext* context, const v1::BuildIndexRequest* request) {
  auto* stream = new BuildStream(core_, context, request);
  stream->Start(guard_.Authenticate(context));
  return stream;
}

grpc::ServerWriteReactor<v1::RecordSequenceReply>* WaveKVService::RecordSequence(
    grpc::CallbackServerContext* context, const v1::RecordSequenceRequest* request) {
  auto* stream = new RecordStream(core_, context, request);
  stream->Start(guard_.Authenticate(context));
  return stream;
}

grpc::ServerBidiReactor<v1::AttendRequest, v1::AttendReply>* WaveKVService::Decode(
    grpc::CallbackServerContext* context) {
  auto* stream = new DecodeStream(core_, context);
  stream->Start(guard_.Authenticate(context));
  return stream;
}

grpc::ServerUnaryReactor* WaveKVService::Heartbeat(grpc::CallbackServerContext* context,
                                                   const v1::HeartbeatRequest* request,
                                                   v1::HeartbeatReply* reply) {
  // A plain one tells that the daemon lives and waits for nobody, wavebufferd included.
  const Lane lane = request->with_wave_buffers() ? Lane::kSlow : Lane::kInline;
  return Unary(Rpc::kHeartbeat, lane, context, request, reply, HandleHeartbeat);
}

grpc::ServerUnaryReactor* WaveKVService::Detach(grpc::CallbackServerContext* context,
                                                const v1::DetachRequest* request,
                                                v1::DetachReply* reply) {
  return Unary(Rpc::kDetach, Lane::kStep, context, request, reply, HandleDetach);
}

grpc::ServerUnaryReactor* WaveKVService::CreateSequence(grpc::CallbackServerContext* context,
                                                        const v1::CreateSequenceRequest* request,
                                                        v1::CreateSequenceReply* reply) {
  // The first sequence with a wave buffer asks wavebufferd for it.
  const Lane lane = request->attach_wave_buffer() ? Lane::kSlow : Lane::kStep;
  return Unary(Rpc::kCreateSequence, lane, context, request, reply, HandleCreateSequence);
}

grpc::ServerUnaryReactor* WaveKVService::PlanIndex(grpc::CallbackServerContext* context,
                                                   const v1::PlanIndexRequest* request,
                                                   v1::PlanIndexReply* reply) {
  return Unary(Rpc::kPlanIndex, Lane::kStep, context, request, reply, HandlePlanIndex);
}

grpc::ServerUnaryReactor* WaveKVService::GiveLabels(grpc::CallbackServerContext* context,
                                                    const v1::GiveLabelsRequest* request,
                                                    v1::GiveLabelsReply* reply) {
  // A message of labels takes a millisecond or two to check.
  return Unary(Rpc::kGiveLabels, Lane::kSlow, context, request, reply, HandleGiveLabels);
}

grpc::ServerUnaryReactor* WaveKVService::Query(grpc::CallbackServerContext* context,
                                               const v1::QueryRequest* request,
                                               v1::QueryReply* reply) {
  return Unary(Rpc::kQuery, Lane::kStep, context, request, reply, HandleQuery);
}

grpc::ServerUnaryReactor* WaveKVService::Estimate(grpc::CallbackServerContext* context,
                                                  const v1::EstimateRequest* request,
                                                  v1::EstimateReply* reply) {
  return Unary(Rpc::kEstimate, Lane::kStep, context, request, reply, HandleEstimate);
}

grpc::ServerUnaryReactor* WaveKVService::Attend(grpc::CallbackServerContext* context,
                                                const v1::AttendRequest* request,
                                                v1::AttendReply* reply) {
  return Unary(Rpc::kAttend, Lane::kStep, context, request, reply, HandleAttend);
}

grpc::ServerUnaryReactor* WaveKVService::ForkSequence(grpc::CallbackServerContext* context,
                                                      const v1::ForkSequenceRequest* request,
                                                      v1::ForkSequenceReply* reply) {
  return Unary(Rpc::kForkSequence, Lane::kStep, context, request, reply, HandleForkSequence);
}

grpc::ServerUnaryReactor* WaveKVService::TruncateSequence(
    grpc::CallbackServerContext* context, const v1::TruncateSequenceRequest* request,
    v1::TruncateSequenceReply* reply) {
  return Unary(Rpc::kTruncateSequence, Lane::kStep, context, request, reply,
               HandleTruncateSequence);
}

grpc::ServerUnaryReactor* WaveKVService::DropSequence(grpc::CallbackServerContext* context,
                                                      const v1::DropSequenceRequest* request,
                                                      v1::DropSequenceReply* reply) {
  return Unary(Rpc::kDropSequence, Lane::kStep, context, request, reply, HandleDropSequence);
}

grpc::ServerUnaryReactor* WaveKVService::Pin(grpc::CallbackServerContext* context,
                                             const v1::PinRequest* request, v1::PinReply* reply) {
  return Unary(Rpc::kPin, Lane::kStep, context, request, reply, HandlePin);
}

grpc::ServerUnaryReactor* WaveKVService::SetTtl(grpc::CallbackServerContext* context,
                                                const v1::SetTtlRequest* request,
                                                v1::SetTtlReply* reply) {
  return Unary(Rpc::kSetTtl, Lane::kStep, context, request, reply, HandleSetTtl);
}

grpc::ServerUnaryReactor* WaveKVService::AttachResident(grpc::CallbackServerContext* context,
                                                        const v1::AttachResidentRequest* request,
                                                        v1::AttachResidentReply* reply) {
  return Unary(Rpc::kAttachResident, Lane::kSlow, context, request, reply, HandleAttachResident);
}

grpc::ServerUnaryReactor* WaveKVService::ResidentStatus(grpc::CallbackServerContext* context,
                                                        const v1::ResidentStatusRequest* request,
                                                        v1::ResidentStatusReply* reply) {
  const Lane lane = request->wait_ms() == 0 ? Lane::kStep : Lane::kWait;
  return Unary(Rpc::kResidentStatus, lane, context, request, reply, HandleResidentStatus);
}

grpc::ServerUnaryReactor* WaveKVService::DetachResident(grpc::CallbackServerContext* context,
                                                        const v1::DetachResidentRequest* request,
                                                        v1::DetachResidentReply* reply) {
  return Unary(Rpc::kDetachResident, Lane::kSlow, context, request, reply, HandleDetachResident);
}

grpc::ServerUnaryReactor* WaveKVService::GetStats(grpc::CallbackServerContext* context,
                                                  const v1::GetStatsRequest* request,
                                                  v1::GetStatsReply* reply) {
  return Unary(Rpc::kGetStats, Lane::kStep, context, request, reply, HandleGetStats);
}

grpc::ServerUnaryReactor* WaveKVService::ListSequences(grpc::CallbackServerContext* context,
                                                       const v1::ListSequencesRequest* request,
                                                       v1::ListSequencesReply* reply) {
  return Unary(Rpc::kListSequences, Lane::kStep, context, request, reply, HandleListSequences);
}

grpc::ServerUnaryReactor* WaveKVService::DescribeIndex(grpc::CallbackServerContext* context,
                                                       const v1::DescribeIndexRequest* request,
                                                       v1::DescribeIndexReply* reply) {
  return Unary(Rpc::kDescribeIndex, Lane::kStep, context, request, reply, HandleDescribeIndex);
}

grpc::ServerUnaryReactor* WaveKVService::Explain(grpc::CallbackServerContext* context,
                                                 const v1::ExplainRequest* request,
                                                 v1::ExplainReply* reply) {
  return Unary(Rpc::kExplain, Lane::kSlow, context, request, reply, HandleExplain);
}

grpc::ServerUnaryReactor* WaveKVService::SampleRecall(grpc::CallbackServerContext* context,
                                                      const v1::SampleRecallRequest* request,
                                                      v1::SampleRecallReply* reply) {
  return Unary(Rpc::kSampleRecall, Lane::kSlow, context, request, reply, HandleSampleRecall);
}

}  // namespace wavekv
