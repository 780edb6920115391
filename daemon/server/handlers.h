// What each unary RPC does: parse, ask the engine, fill the reply. No gRPC in here.
#pragma once

#include "absl/status/status.h"
#include "daemon/server/service_core.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

// The only one whose scope has no lease yet.
absl::Status HandleAttach(ServiceCore& core, const CallScope& scope,
                          const v1::AttachRequest& request, v1::AttachReply* reply);
absl::Status HandleHeartbeat(ServiceCore& core, const CallScope& scope,
                             const v1::HeartbeatRequest& request, v1::HeartbeatReply* reply);
absl::Status HandleDetach(ServiceCore& core, const CallScope& scope,
                          const v1::DetachRequest& request, v1::DetachReply* reply);
absl::Status HandleCreateSequence(ServiceCore& core, const CallScope& scope,
                                  const v1::CreateSequenceRequest& request,
                                  v1::CreateSequenceReply* reply);
absl::Status HandlePlanIndex(ServiceCore& core, const CallScope& scope,
                             const v1::PlanIndexRequest& request, v1::PlanIndexReply* reply);
absl::Status HandleGiveLabels(ServiceCore& core, const CallScope& scope,
                              const v1::GiveLabelsRequest& request, v1::GiveLabelsReply* reply);
absl::Status HandleQuery(ServiceCore& core, const CallScope& scope, const v1::QueryRequest& request,
                         v1::QueryReply* reply);
absl::Status HandleEstimate(ServiceCore& core, const CallScope& scope,
                            const v1::EstimateRequest& request, v1::EstimateReply* reply);
// Also each message of a Decode stream.
absl::Status HandleAttend(ServiceCore& core, const CallScope& scope,
                          const v1::AttendRequest& request, v1::AttendReply* reply);
absl::Status HandleForkSequence(ServiceCore& core, const CallScope& scope,
                                const v1::ForkSequenceRequest& request,
                                v1::ForkSequenceReply* reply);
absl::Status HandleTruncateSequence(ServiceCore& core, const CallScope& scope,
                                    const v1::TruncateSequenceRequest& request,
                                    v1::TruncateSequenceReply* reply);
absl::Status HandleDropSequence(ServiceCore& core, const CallScope& scope,
                                const v1::DropSequenceRequest& request,
                                v1::DropSequenceReply* reply);
absl::Status HandlePin(ServiceCore& core, const CallScope& scope, const v1::PinRequest& request,
                       v1::PinReply* reply);
absl::Status HandleSetTtl(ServiceCore& core, const CallScope& scope,
                          const v1::SetTtlRequest& request, v1::SetTtlReply* reply);
absl::Status HandleAttachResident(ServiceCore& core, const CallScope& scope,
                                  const v1::AttachResidentRequest& request,
                                  v1::AttachResidentReply* reply);
absl::Status HandleResidentStatus(ServiceCore& core, const CallScope& scope,
                                  const v1::ResidentStatusRequest& request,
                                  v1::ResidentStatusReply* reply);
absl::Status HandleDetachResident(ServiceCore& core, const CallScope& scope,
                                  const v1::DetachResidentRequest& request,
                                  v1::DetachResidentReply* reply);
absl::Status HandleGetStats(ServiceCore& core, const CallScope& scope,
                            const v1::GetStatsRequest& request, v1::GetStatsReply* reply);
absl::Status HandleListSequences(ServiceCore& core, const CallScope& scope,
                                 const v1::ListSequencesRequest& request,
                                 v1::ListSequencesReply* reply);
absl::Status HandleDescribeIndex(ServiceCore& core, const CallScope& scope,
                                 const v1::DescribeIndexRequest& request,
                                 v1::DescribeIndexReply* reply);
absl::Status HandleExplain(ServiceCore& core, const CallScope& scope,
                           const v1::ExplainRequest& request, v1::ExplainReply* reply);
absl::Status HandleSampleRecall(ServiceCore& core, const CallScope& scope,
                                const v1::SampleRecallRequest& request,
                                v1::SampleRecallReply* reply);

}  // namespace wavekv
