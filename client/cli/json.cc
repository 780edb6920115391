#include "client/cli/json.h"

#include <string>

#include "client/cli/step_ratios.h"

namespace wavekv::client {

std::string DumpJson(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

Json ToJson(const StepCounters& counters) {
  return {{"steady_tokens", counters.steady_tokens},
          {"retrieved_clusters", counters.retrieved_clusters},
          {"retrieved_tokens", counters.retrieved_tokens},
          {"estimated_clusters", counters.estimated_clusters},
          {"sketched_clusters", counters.sketched_clusters},
          {"ignored_clusters", counters.ignored_clusters},
          {"moved_to_estimation", counters.moved_to_estimation},
          {"kv_bytes_read", counters.kv_bytes_read},
          {"kv_bytes_full", counters.kv_bytes_full},
          {"kv_bytes_read_ratio", KvBytesReadRatio(counters)},
          {"cache_hit_blocks", counters.cache_hit_blocks},
          {"cache_miss_blocks", counters.cache_miss_blocks},
          {"hit_ratio", HitRatio(counters)},
          {"error_budget_met", counters.error_budget_met},
          {"error_budget_capped", counters.error_budget_capped}};
}

Json ToJson(const DaemonStats& stats) {
  Json tenants = Json::array();
  for (const TenantStats& tenant : stats.tenants) {
    tenants.push_back({{"tenant", tenant.tenant},
                       {"bytes_max", tenant.bytes_max},
                       {"reserved_bytes", tenant.reserved_bytes},
                       {"payload_bytes", tenant.payload_bytes},
                       {"index_bytes", tenant.index_bytes},
                       {"sequences", tenant.sequences},
                       {"clients", tenant.clients}});
  }
  Json buffers = Json::array();
  for (const WaveBufferStats& buffer : stats.wave_buffers) {
    buffers.push_back({{"device_uuid", buffer.device_uuid},
                       {"backend", buffer.backend},
                       {"connected", buffer.connected},
                       {"bytes_max", buffer.bytes_max},
                       {"bytes_used", buffer.bytes_used},
                       {"cache_hit_blocks", buffer.cache_hit_blocks},
                       {"cache_miss_blocks", buffer.cache_miss_blocks},
                       {"admitted_blocks", buffer.admitted_blocks},
                       {"pinned", buffer.pinned}});
  }
  return {{"daemon_version", stats.daemon_version},
          {"epoch", stats.epoch},
          {"uptime_ms", stats.uptime_ms},
          {"isa", stats.isa},
          {"pool_bytes_max", stats.pool_bytes_max},
          {"pool_reserved_bytes", stats.pool_reserved_bytes},
          {"pool_payload_bytes", stats.pool_payload_bytes},
          {"pool_allocated_bytes", stats.pool_allocated_bytes},
          {"index_bytes", stats.index_bytes},
          {"build_queue", stats.build_queue},
          {"rss_bytes", stats.rss_bytes},
          {"memory_available_bytes", stats.memory_available_bytes},
          {"cgroup_version", stats.cgroup_version},
          {"data_channels", stats.data_channels},
          {"cgroup_limit_bytes", stats.cgroup_limit_bytes},
          {"memlock_limit_bytes", stats.memlock_limit_bytes},
          {"huge_page_bytes", stats.huge_page_bytes},
          {"huge_pages_total", stats.huge_pages_total},
          {"huge_pages_free", stats.huge_pages_free},
          {"shmem_huge_pages", stats.shmem_huge_pages},
          {"numa_nodes", stats.numa_nodes},
          {"recordings", stats.recordings},
          {"recording_queued_bytes", stats.recording_queued_bytes},
          {"residents",
           {{"sequences", stats.residents.sequences},
            {"hit_blocks", stats.residents.hit_blocks},
            {"miss_blocks", stats.residents.miss_blocks},
            {"overflows", stats.residents.overflows},
            {"violations", stats.residents.violations},
            {"log_losses", stats.residents.log_losses}}},
          {"threads", stats.threads},
          {"tenants", std::move(tenants)},
          {"wave_buffers", std::move(buffers)},
          {"counters", ToJson(stats.counters)},
          {"calls", stats.calls}};
}

Json ToJson(const SequenceSummary& sequence) {
  const ModelShape& shape = sequence.shape;
  return {{"id", std::to_string(sequence.id)},
          {"sequence_id", sequence.id},
          {"generation", sequence.generation},
          {"version", sequence.version},
          {"tenant", sequence.tenant},
          {"client_name", sequence.client_name},
          {"label", sequence.label},
          {"model_id", shape.model_id},
          {"shape",
           {{"layer_count", shape.layer_count},
            {"query_head_count", shape.query_head_count},
            {"kv_head_count", shape.kv_head_count},
            {"key_dim", shape.key_dim},
            {"value_dim", shape.value_dim},
            {"dtype", DTypeName(shape.dtype)},
            {"softmax_scale", shape.softmax_scale}}},
          {"token_count", sequence.token_count},
          {"clustered_tokens", sequence.clustered_tokens},
          {"max_tokens", sequence.max_tokens},
          {"reserved_bytes", sequence.reserved_bytes},
          {"payload_bytes", sequence.payload_bytes},
          {"index_bytes", sequence.index_bytes},
          {"idle_ms", sequence.idle_ms},
          {"ttl_ms", sequence.ttl_ms},
          {"pinned", sequence.pinned},
          {"wave_buffer", sequence.wave_buffer},
          {"attached", sequence.attached},
          {"counters", ToJson(sequence.counters)}};
}

Json ToJson(const Histogram& histogram) {
  return {{"edges", histogram.edges}, {"counts", histogram.counts}};
}

Json ToJson(const IndexDescription& description) {
  Json segments = Json::array();
  for (const SegmentSummary& segment : description.segments) {
    segments.push_back({{"first_position", segment.first_position},
                        {"token_count", segment.token_count},
                        {"layer", segment.layer},
                        {"kv_head", segment.kv_head},
                        {"cluster_count", segment.cluster_count},
                        {"singleton_count", segment.singleton_count},
                        {"size_max", segment.size_max},
                        {"radius_mean", segment.radius_mean},
                        {"radius_max", segment.radius_max},
                        {"index_bytes", segment.index_bytes},
                        {"payload_bytes", segment.payload_bytes},
                        {"given_labels", segment.given_labels}});
  }
  return {{"generation", description.generation},
          {"version", description.version},
          {"token_count", description.token_count},
          {"steady_tokens", description.steady_tokens},
          {"index_count", description.index_count},
          {"building", description.building},
          {"cluster_count", description.cluster_count},
          {"imbalance", description.imbalance},
          {"index_bytes", description.index_bytes},
          {"payload_bytes", description.payload_bytes},
          {"pool_bytes", description.pool_bytes},
          {"sizes", ToJson(description.sizes)},
          {"radii", ToJson(description.radii)},
          {"segments", std::move(segments)},
          {"segments_left_off", description.segments_left_off}};
}

Json ToJson(const Explanation& explanation) {
  Json clusters = Json::array();
  for (const ExplainedCluster& cluster : explanation.clusters) {
    clusters.push_back({{"rank", cluster.rank},
                        {"segment_idx", cluster.segment_idx},
                        {"cluster_idx", cluster.cluster_idx},
                        {"size", cluster.size},
                        {"radius", cluster.radius},
                        {"logit_max", cluster.logit_max},
                        {"expected_error", cluster.expected_error},
                        {"estimated_mass", cluster.estimated_mass},
                        {"true_mass", cluster.true_mass},
                        {"zone", cluster.zone},
                        {"positions", cluster.positions}});
  }
  return {{"generation", explanation.generation},
          {"version", explanation.version},
          {"ranked_by", explanation.ranked_by},
          {"budget", explanation.budget},
          {"cluster_count", explanation.cluster_count},
          {"retrieval_count", explanation.retrieval_count},
          {"steady_mass", explanation.steady_mass},
          {"retrieval_mass", explanation.retrieval_mass},
          {"estimation_mass", explanation.estimation_mass},
          {"clusters", std::move(clusters)}};
}

Json ToJson(const RecallSample& sample) {
  Json layers = Json::array();
  for (const LayerRecall& layer : sample.layers) {
    layers.push_back({{"layer", layer.layer},
                      {"sampled", layer.sampled},
                      {"mass_covered_mean", layer.mass_covered_mean},
                      {"mass_covered_min", layer.mass_covered_min},
                      {"rel_error_mean", layer.rel_error_mean},
                      {"rel_error_max", layer.rel_error_max},
                      {"kv_bytes_read_ratio", layer.kv_bytes_read_ratio}});
  }
  return {{"generation", sample.generation},
          {"version", sample.version},
          {"layers", std::move(layers)}};
}

}  // namespace wavekv::client
