// The handlers of sequences whose engines attend on the device.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/server/handlers.h"
#include "daemon/server/window_server.h"
#include "daemon/server/wire_replies.h"
#include "daemon/server/wire_requests.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint32_t kWaitMsMax = 1000;

absl::StatusOr<ResidentOptions> ParseRegion(const v1::AttachResidentRequest& request) {
  ResidentOptions options;
  // Also of no number.
  if (!(request.cache_ratio() >= 0 && request.cache_ratio() <= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("cache_ratio is ", request.cache_ratio(), ", expected 0 to 1"));
  }
  if (request.cache_ratio() > 0) options.cache_ratio = request.cache_ratio();
  if (request.ring_rows() > 0) options.ring_rows = request.ring_rows();
  return options;
}

}  // namespace

absl::Status HandleAttachResident(ServiceCore& core, const CallScope& scope,
                                  const v1::AttachResidentRequest& request,
                                  v1::AttachResidentReply* reply) {
  const Caller& caller = scope.caller;
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_ASSIGN_OR_RETURN(const ResidentOptions options, ParseRegion(request));
  // Another's sequence is unknown, whatever else stands in the way.
  WAVEKV_RETURN_IF_ERROR(core.engine->GetSequence(caller.tenant, sequence).status());
  if (caller.uid < 0) {
    return absl::FailedPreconditionError(
        "a sequence cannot be attached over TCP, where no descriptor can be passed; connect to the "
        "daemon's UNIX socket, or use Attend");
  }
  if (core.windows == nullptr) {
    return absl::FailedPreconditionError(
        "this daemon has no wave buffer; start wavebufferd --backend=cuda and name its socket in "
        "--wave_buffer, or use Attend");
  }
  WAVEKV_ASSIGN_OR_RETURN(
      const ResidentGrant grant,
      core.engine->AttachResident(caller.tenant, scope.client(), caller.uid, sequence, options));
  const std::vector<std::string> tickets = core.windows->Issue(caller.uid, grant);
  reply->set_generation(grant.sequence.generation.value());
  FillWaveBuffer(grant.buffer, reply->mutable_wave_buffer());
  reply->set_region_offset(grant.place.region_offset);
  reply->set_region_bytes(grant.place.region_bytes);
  reply->set_token_count(grant.sequence.token_count);
  reply->set_ring_rows(grant.ring_rows);
  reply->set_max_tokens(grant.sequence.max_tokens);
  reply->set_window_socket(core.windows->path());
  for (size_t i = 0; i < tickets.size(); ++i) {
    v1::PoolWindow* window = reply->add_windows();
    window->set_ticket(tickets[i]);
    window->set_bytes(grant.windows[i]->arena_bytes());
  }
  return absl::OkStatus();
}

absl::Status HandleResidentStatus(ServiceCore& core, const CallScope& scope,
                                  const v1::ResidentStatusRequest& request,
                                  v1::ResidentStatusReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  const std::chrono::milliseconds wait(std::min(request.wait_ms(), kWaitMsMax));
  WAVEKV_ASSIGN_OR_RETURN(const ResidentState state,
                          core.engine->ResidentStatus(scope.caller.tenant, sequence,
                                                      request.steady_first_above(), wait));
  reply->set_generation(state.generation.value());
  reply->set_error_code(static_cast<uint32_t>(state.attached.code()));
  reply->set_error_message(std::string(state.attached.message()));
  reply->set_token_count(state.token_count);
  reply->set_steady_first(state.steady_first);
  FillResidentCounters(state.counters, reply->mutable_counters());
  return absl::OkStatus();
}

absl::Status HandleDetachResident(ServiceCore& core, const CallScope& scope,
                                  const v1::DetachResidentRequest& request,
                                  v1::DetachResidentReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  WAVEKV_ASSIGN_OR_RETURN(
      const ResidentState state,
      core.engine->DetachResident(scope.caller.tenant, scope.client(), sequence));
  reply->set_generation(state.generation.value());
  reply->set_token_count(state.token_count);
  return absl::OkStatus();
}

}  // namespace wavekv
