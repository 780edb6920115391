// The handlers of what operators and dashboards read.

#include <algorithm>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "daemon/dataplane/data_plane.h"
#include "daemon/server/handlers.h"
#include "daemon/server/process_status.h"
#include "daemon/server/tenant_scope.h"
#include "daemon/server/wire_replies.h"
#include "daemon/server/wire_requests.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint32_t kPageSizeDefault = 100;
constexpr uint32_t kPageSizeMax = 1000;
constexpr uint32_t kExplainTopDefault = 20;
constexpr uint32_t kExplainTopMax = 1000;

// The tenant whose things `caller` may list: empty (all) for an administrator.
TenantId VisibleTenant(const Caller& caller) { return caller.admin ? TenantId() : caller.tenant; }

// Bytes of the wave indexes of each tenant that `caller` may see.
absl::flat_hash_map<TenantId, uint64_t> IndexBytes(const ServiceCore& core, const Caller& caller) {
  absl::flat_hash_map<TenantId, uint64_t> bytes;
  SequenceId after;
  for (;;) {
    const std::vector<SequenceStatus> page =
        core.engine->ListSequences(VisibleTenant(caller), after, kPageSizeMax);
    for (const SequenceStatus& status : page) bytes[status.tenant] += status.index_bytes;
    if (page.size() < kPageSizeMax) return bytes;
    after = page.back().id;
  }
}

void FillTenants(const ServiceCore& core, const Caller& caller, const EngineStats& stats,
                 v1::GetStatsReply* reply) {
  const absl::flat_hash_map<TenantId, uint64_t> index_bytes = IndexBytes(core, caller);
  const std::map<TenantId, uint32_t> clients = core.registry.CountByTenant();
  std::vector<TenantUsage> usages = stats.tenants;
  // A tenant that holds nothing has a row when it has clients; the caller's is always there.
  const auto add = [&](const TenantId& tenant) {
    if (std::any_of(usages.begin(), usages.end(),
                    [&](const TenantUsage& usage) { return usage.tenant == tenant; })) {
      return;
    }
    usages.push_back({.tenant = tenant, .bytes_max = core.options.tenant_bytes_max, .usage = {}});
  };
  add(caller.tenant);
  for (const auto& [tenant, count] : clients) add(tenant);
  for (const TenantUsage& usage : usages) {
    if (!caller.admin && usage.tenant != caller.tenant) continue;
    v1::TenantStats* tenant = reply->add_tenants();
    tenant->set_tenant(usage.tenant);
    tenant->set_bytes_max(usage.bytes_max);
    tenant->set_reserved_bytes(usage.usage.reserved_bytes);
    tenant->set_payload_bytes(usage.usage.payload_bytes);
    const auto attached = clients.find(usage.tenant);
    if (attached != clients.end()) tenant->set_clients(attached->second);
    const auto index = index_bytes.find(usage.tenant);
    if (index != index_bytes.end()) tenant->set_index_bytes(index->second);
    for (const auto& [name, count] : stats.sequences) {
      if (name == usage.tenant) tenant->set_sequences(count);
    }
  }
}

void FillProcess(v1::GetStatsReply* reply) {
  const ProcessStatus process = ReadProcessStatus();
  reply->set_rss_bytes(process.rss_bytes);
  reply->set_memory_available_bytes(process.memory_available_bytes);
  reply->set_cgroup_limit_bytes(process.cgroup_limit_bytes);
  reply->set_memlock_limit_bytes(process.memlock_limit_bytes);
  reply->set_threads(process.thread_count);
  reply->set_cgroup_version(process.cgroup_version);
  reply->set_huge_page_bytes(process.huge_page_bytes);
  reply->set_huge_pages_total(process.huge_pages_total);
  reply->set_huge_pages_free(process.huge_pages_free);
  reply->set_shmem_huge_pages(process.shmem_huge_pages);
  reply->set_numa_nodes(process.numa_node_count);
}

}  // namespace

TenantId TenantFor(const Engine& engine, const Caller& caller, const SequenceRef& sequence) {
  if (!caller.admin || sequence.id.value() == 0) return caller.tenant;
  const std::vector<SequenceStatus> found =
      engine.ListSequences(TenantId(), SequenceId(sequence.id.value() - 1), 1);
  const bool known = !found.empty() && found.front().id == sequence.id;
  return known ? found.front().tenant : caller.tenant;
}

absl::Status HandleGetStats(ServiceCore& core, const CallScope& scope,
                            const v1::GetStatsRequest& /*request*/, v1::GetStatsReply* reply) {
  const EngineStats stats = core.engine->Stats();
  reply->set_daemon_version(WAVEKV_VERSION);
  reply->set_epoch(core.options.epoch);
  reply->set_uptime_ms(static_cast<uint64_t>(core.clock->NowMs() - core.start_ms));
  reply->set_pool_bytes_max(stats.pool.bytes_max);
  reply->set_pool_reserved_bytes(stats.pool.reserved_bytes);
  reply->set_pool_payload_bytes(stats.pool.payload_bytes);
  reply->set_pool_allocated_bytes(stats.pool.allocated_bytes);
  reply->set_index_bytes(stats.index_bytes);
  FillProcess(reply);
  if (core.data_plane != nullptr) reply->set_data_channels(core.data_plane->channel_count());
  reply->set_resident_sequences(stats.residents.attached);
  FillResidentCounters(stats.residents.counters, reply->mutable_resident_counters());
  FillTenants(core, scope.caller, stats, reply);
  for (const WaveBufferStatus& status : stats.wave_buffers) {
    v1::WaveBufferStats* wave_buffer = reply->add_wave_buffers();
    wave_buffer->set_device_uuid(status.device_uuid);
    wave_buffer->set_backend(status.backend);
    wave_buffer->set_connected(status.connected);
    wave_buffer->set_bytes_max(status.bytes_max);
    wave_buffer->set_bytes_used(status.bytes_used);
    wave_buffer->set_cache_hit_blocks(status.hit_blocks);
    wave_buffer->set_cache_miss_blocks(status.miss_blocks);
    wave_buffer->set_admitted_blocks(status.admitted_blocks);
    wave_buffer->set_pinned(status.pinned);
  }
  FillCounters(stats.counters, reply->mutable_counters());
  for (size_t i = 0; i < kRpcCount; ++i) {
    const Rpc rpc = static_cast<Rpc>(i);
    (*reply->mutable_calls())[std::string(RpcName(rpc))] = core.stats.Calls(rpc);
  }
  reply->set_isa(stats.backend.isa);
  reply->set_build_queue(stats.build_queue);
  reply->set_recordings(stats.recordings);
  reply->set_recording_queued_bytes(stats.recording_queued_bytes);
  return absl::OkStatus();
}

absl::Status HandleListSequences(ServiceCore& core, const CallScope& scope,
                                 const v1::ListSequencesRequest& request,
                                 v1::ListSequencesReply* reply) {
  const uint32_t page_size = request.page_size() == 0 ? kPageSizeDefault : request.page_size();
  if (page_size > kPageSizeMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("page_size is ", page_size, ", expected at most ", kPageSizeMax));
  }
  // The token is the last id of the page before.
  uint64_t after = 0;
  if (!request.page_token().empty() && !absl::SimpleAtoi(request.page_token(), &after)) {
    return absl::InvalidArgumentError("page_token is none that ListSequences has returned");
  }
  const std::vector<SequenceStatus> sequences =
      core.engine->ListSequences(VisibleTenant(scope.caller), SequenceId(after), page_size);
  for (const SequenceStatus& status : sequences) {
    FillSequence(status, core.registry.NameOf(status.owner), reply->add_sequences());
  }
  if (sequences.size() == page_size) {
    reply->set_next_page_token(absl::StrCat(sequences.back().id.value()));
  }
  return absl::OkStatus();
}

absl::Status HandleDescribeIndex(ServiceCore& core, const CallScope& scope,
                                 const v1::DescribeIndexRequest& request,
                                 v1::DescribeIndexReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const SequenceRef sequence,
                          ParseSequenceRef(request.has_sequence(), request.sequence()));
  std::optional<uint32_t> layer;
  std::optional<uint32_t> kv_head;
  if (request.has_layer()) layer = request.layer();
  if (request.has_kv_head()) kv_head = request.kv_head();
  WAVEKV_ASSIGN_OR_RETURN(
      const IndexDescription description,
      core.engine->DescribeIndex(TenantFor(*core.engine, scope.caller, sequence), sequence, layer,
                                 kv_head));
  FillDescription(description, reply);
  return absl::OkStatus();
}

absl::Status HandleExplain(ServiceCore& core, const CallScope& scope,
                           const v1::ExplainRequest& request, v1::ExplainReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const LayerQuery query, ParseExplain(request));
  const uint32_t top = request.top() == 0 ? kExplainTopDefault : request.top();
  if (top > kExplainTopMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("top is ", top, ", expected at most ", kExplainTopMax));
  }
  WAVEKV_ASSIGN_OR_RETURN(
      const Explanation explanation,
      core.engine->Explain(TenantFor(*core.engine, scope.caller, query.sequence), query,
                           request.kv_head(), top));
  FillExplanation(explanation, reply);
  return absl::OkStatus();
}

absl::Status HandleSampleRecall(ServiceCore& core, const CallScope& scope,
                                const v1::SampleRecallRequest& request,
                                v1::SampleRecallReply* reply) {
  WAVEKV_ASSIGN_OR_RETURN(const RecallRequest recall, ParseSampleRecall(request));
  WAVEKV_ASSIGN_OR_RETURN(
      const RecallSample sample,
      core.engine->SampleRecall(TenantFor(*core.engine, scope.caller, recall.sequence),
                                recall.sequence, recall.layers, recall.queries, recall.budget));
  FillRecall(sample, reply);
  return absl::OkStatus();
}

}  // namespace wavekv
