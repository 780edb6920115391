// The handlers of leases, and of what makes, reads and ends sequences.

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/dataplane/data_plane.h"
#include "daemon/server/handlers.h"
#include "daemon/server/tenant_scope.h"
#include "daemon/server/wire_replies.h"
#include "daemon/server/wire_requests.h"
#include "proto/rpc/protocol_version.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

void FillLimits(const ServiceCore& core, const TenantId& tenant, v1::Limits* limits) {
  const ServerOptions& options = core.options;
  limits->set_message_bytes_max(options.message_bytes_max);
  limits->set_tenant_bytes_max(options.tenant_bytes_max);
  limits->set_sequences_max(options.sequences_max);
  limits->set_tokens_max(options.tokens_max);
  limits->set_batch_max(options.batch_max);
  for (const TenantUsage& usage : core.engine->Stats().tenants) {
    if (usage.tenant == tenant) limits->set_tenant_bytes_reserved(usage.usage.reserved_bytes);
  }
}

// Into the reply of Attach or Heartbeat. Nothing over TCP: there is no way to pass a descriptor.
template <class Reply>
void FillWaveBuffers(const ServiceCore& core, const Caller& caller, Reply* reply) {
  if (caller.uid < 0) return;
  for (const WaveBufferAccess& access : core.engine->WaveBuffers(caller.tenant, caller.uid)) {
    FillWaveBuffer(access, reply->add_wave_buffers());
  }
}

}  // namespace

absl::Status HandleAttach(ServiceCore& core, const CallScope& scope,
                          const v1::AttachRequest& request, v1::AttachReply* reply) {
  const Caller& caller = scope.caller;
  WAVEKV_ASSIGN_OR_RETURN(
      const uint32_t version,
      NegotiateProtocolVersion(request.protocol_version_min(), request.protocol_version_max()));
  WAVEKV_ASSIGN_OR_RETURN(
      const ClientRegistry::Lease lease,
      core.registry.Attach(caller.tenant, request.client_name(), request.lease_ms()));
  Log(LogLevel::kInfo, "client_attached",
      {{"client", lease.client.value()},
       {"tenant", caller.tenant},
       {"name", request.client_name()},
       {"lease_ms", lease.lease_ms}});
  reply->set_protocol_version(version);
  reply->set_secret(lease.secret);
  reply->set_epoch(core.options.epoch);
  reply->set_lease_ms(lease.lease_ms);
  FillLimits(core, caller.tenant, reply->mutable_limits());
  reply->set_tenant(caller.tenant);
  // Over TCP there is no way to pass a descriptor.
  if (caller.uid >= 0 && core.data_plane != nullptr) {
    reply->set_data_socket(core.data_plane->path());
  }
  FillWaveBuffers(core, caller, reply);
  reply->set_daemon_version(WAVEKV_VERSION);
  return absl::OkStatus();
}

absl::Status HandleHeartbeat(ServiceCore& core, const CallScope& scope,
                             const v1::HeartbeatRequest& request, v1::HeartbeatReply* reply) {
  reply->set_lease_ms(core.registry.LeaseMs(scope.client()));
  if (request.with_wave_buffers()) FillWaveBuffers(core, scope.caller, reply);
  return absl::OkStatus();
}

absl::Status HandleDetach(ServiceCore& core, const CallScope& scope,
                          const v1::DetachRequest& /*request*/, v1::DetachReply* reply) {
  core.registry.Detach(scope.client());
  // A call of this client that still runs may make one more sequence: the reaper releases the
  // owner again once none does.
  reply->set_sequences_dropped(core.engine->ReleaseOwner(scope.client()));
  return absl::OkStatus();
}

absl::Status HandleCreateSequence(ServiceCore& core, const CallScope& scope,
                                  const v1::CreateSequenceRequest& request,
                                  v1::CreateSequenceReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceSpec spec, ParseSequenceSpec(request));
  WAVEKV_ASSIGN_OR_RETURN(const SequenceStatus status,
                          core.engine->CreateSequence(scope.caller.tenant, scope.client(), spec));
  reply->set_sequence_id(status.id.value());
  reply->set_generation(status.generation.value());
  reply->set_reserved_bytes(status.reserved_bytes);
  return absl::OkStatus();
}

absl::Status HandlePlanIndex(ServiceCore& core, const CallScope& scope,
                             const v1::PlanIndexRequest& request, v1::PlanIndexReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_ASSIGN_OR_RETURN(const IndexPlan plan,
                          core.engine->PlanIndex(scope.caller.tenant, sequence, request.layer(),
                                                 request.token_count()));
  FillPlan(plan, reply);
  return absl::OkStatus();
}

absl::Status HandleGiveLabels(ServiceCore& core, const CallScope& scope,
                              const v1::GiveLabelsRequest& request, v1::GiveLabelsReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_ASSIGN_OR_RETURN(const LabelOutcome outcome,
                          core.engine->GiveLabels(scope.caller.tenant, sequence, request.layer(),
                                                  ParseLabels(request)));
  reply->set_generation(outcome.generation.value());
  reply->set_kept(outcome.kept_count);
  return absl::OkStatus();
}

absl::Status HandleQuery(ServiceCore& core, const CallScope& scope, const v1::QueryRequest& request,
                         v1::QueryReply* reply) {
  const TenantId& tenant = scope.caller.tenant;
  WAVEKV_ASSIGN_OR_RETURN(const LayerQuery query, ParseQuery(request));
  WAVEKV_ASSIGN_OR_RETURN(QueryOutcome outcome,
                          core.engine->Query(tenant, query,
                                             {.inline_rows = request.inline_(),
                                              .completed_step = request.completed_step()}));
  ModelShape shape;
  if (request.inline_()) {
    WAVEKV_ASSIGN_OR_RETURN(const SequenceStatus status,
                            core.engine->GetSequence(tenant, query.sequence));
    shape = status.shape;
  }
  FillQuery(std::move(outcome), shape, reply);
  return absl::OkStatus();
}

absl::Status HandleEstimate(ServiceCore& core, const CallScope& scope,
                            const v1::EstimateRequest& request, v1::EstimateReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const LayerQuery query, ParseEstimate(request));
  WAVEKV_ASSIGN_OR_RETURN(const EstimateOutcome outcome,
                          core.engine->Estimate(scope.caller.tenant, query));
  FillEstimate(outcome, reply);
  return absl::OkStatus();
}

absl::Status HandleAttend(ServiceCore& core, const CallScope& scope,
                          const v1::AttendRequest& request, v1::AttendReply* reply) {
  const int item_count = request.items_size();
  if (item_count == 0 || static_cast<uint32_t>(item_count) > core.options.batch_max) {
    return absl::InvalidArgumentError(
        absl::StrCat("items has ", item_count, " entries, expected 1 to ", core.options.batch_max));
  }
  // An item that cannot be read fails alone.
  std::vector<AttendStep> steps;
  std::vector<v1::AttendResult*> results;
  for (const v1::AttendItem& item : request.items()) {
    v1::AttendResult* result = reply->add_results();
    absl::StatusOr<AttendStep> step = ParseAttendItem(item);
    if (!step.ok()) {
      FillAttendError(step.status(), result);
      continue;
    }
    steps.push_back(*std::move(step));
    results.push_back(result);
  }
  if (steps.empty()) return absl::OkStatus();
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<AttendOutcome> outcomes,
                          core.engine->Attend(scope.caller.tenant, steps));
  for (size_t i = 0; i < outcomes.size(); ++i) FillAttend(outcomes[i], results[i]);
  return absl::OkStatus();
}

absl::Status HandleForkSequence(ServiceCore& core, const CallScope& scope,
                                const v1::ForkSequenceRequest& request,
                                v1::ForkSequenceReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef parent,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_RETURN_IF_ERROR(CheckLabel(request.label()));
  WAVEKV_ASSIGN_OR_RETURN(
      const SequenceStatus status,
      core.engine->ForkSequence(scope.caller.tenant, scope.client(), parent, request.token_count(),
                                request.max_tokens(), request.label()));
  reply->set_sequence_id(status.id.value());
  reply->set_generation(status.generation.value());
  reply->set_token_count(status.token_count);
  return absl::OkStatus();
}

absl::Status HandleTruncateSequence(ServiceCore& core, const CallScope& scope,
                                    const v1::TruncateSequenceRequest& request,
                                    v1::TruncateSequenceReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_ASSIGN_OR_RETURN(
      const SequenceStatus status,
      core.engine->TruncateSequence(scope.caller.tenant, sequence, request.token_count()));
  reply->set_generation(status.generation.value());
  reply->set_token_count(status.token_count);
  return absl::OkStatus();
}

absl::Status HandleDropSequence(ServiceCore& core, const CallScope& scope,
                                const v1::DropSequenceRequest& request,
                                v1::DropSequenceReply* /*reply*/) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  return core.engine->DropSequence(TenantFor(*core.engine, scope.caller, sequence), sequence);
}

absl::Status HandlePin(ServiceCore& core, const CallScope& scope, const v1::PinRequest& request,
                       v1::PinReply* /*reply*/) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  return core.engine->Pin(TenantFor(*core.engine, scope.caller, sequence), sequence,
                          request.pinned());
}

absl::Status HandleSetTtl(ServiceCore& core, const CallScope& scope,
                          const v1::SetTtlRequest& request, v1::SetTtlReply* /*reply*/) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  return core.engine->SetTtl(TenantFor(*core.engine, scope.caller, sequence), sequence,
                             request.ttl_ms());
}

}  // namespace wavekv
