#include "client/admin_wire.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "client/wire.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

ResidentStats FromWire(const v1::ResidentCounters& counters) {
  return {.hit_blocks = counters.hit_blocks(),
          .miss_blocks = counters.miss_blocks(),
          .overflows = counters.overflows(),
          .violations = counters.violations(),
          .log_losses = counters.log_losses()};
}

absl::StatusOr<Histogram> HistogramFromWire(const v1::Histogram& histogram, const char* name) {
  const int bins = histogram.counts_size();
  if (histogram.edges_size() != (bins == 0 ? 0 : bins + 1)) {
    return absl::InternalError(absl::StrCat("the daemon's reply is malformed: histogram of ", name,
                                            " with ", histogram.edges_size(), " edges and ", bins,
                                            " bins"));
  }
  return Histogram{.edges = {histogram.edges().begin(), histogram.edges().end()},
                   .counts = {histogram.counts().begin(), histogram.counts().end()}};
}

}  // namespace

DaemonStats FromWire(const v1::GetStatsReply& reply) {
  DaemonStats stats{.daemon_version = reply.daemon_version(),
                    .epoch = reply.epoch(),
                    .uptime_ms = reply.uptime_ms(),
                    .pool_bytes_max = reply.pool_bytes_max(),
                    .pool_reserved_bytes = reply.pool_reserved_bytes(),
                    .pool_payload_bytes = reply.pool_payload_bytes(),
                    .pool_allocated_bytes = reply.pool_allocated_bytes(),
                    .index_bytes = reply.index_bytes(),
                    .rss_bytes = reply.rss_bytes(),
                    .memory_available_bytes = reply.memory_available_bytes(),
                    .cgroup_limit_bytes = reply.cgroup_limit_bytes(),
                    .memlock_limit_bytes = reply.memlock_limit_bytes(),
                    .threads = reply.threads(),
                    .counters = FromWire(reply.counters()),
                    .calls = {reply.calls().begin(), reply.calls().end()},
                    .isa = reply.isa(),
                    .build_queue = reply.build_queue(),
                    .cgroup_version = reply.cgroup_version(),
                    .data_channels = reply.data_channels(),
                    .huge_page_bytes = reply.huge_page_bytes(),
                    .huge_pages_total = reply.huge_pages_total(),
                    .huge_pages_free = reply.huge_pages_free(),
                    .shmem_huge_pages = reply.shmem_huge_pages(),
                    .numa_nodes = reply.numa_nodes(),
                    .recordings = reply.recordings(),
                    .recording_queued_bytes = reply.recording_queued_bytes(),
                    .residents = FromWire(reply.resident_counters())};
  stats.residents.sequences = reply.resident_sequences();
  for (const v1::TenantStats& tenant : reply.tenants()) {
    stats.tenants.push_back({.tenant = tenant.tenant(),
                             .bytes_max = tenant.bytes_max(),
                             .reserved_bytes = tenant.reserved_bytes(),
                             .payload_bytes = tenant.payload_bytes(),
                             .index_bytes = tenant.index_bytes(),
                             .sequences = tenant.sequences(),
                             .clients = tenant.clients()});
  }
  for (const v1::WaveBufferStats& buffer : reply.wave_buffers()) {
    stats.wave_buffers.push_back({.device_uuid = buffer.device_uuid(),
                                  .backend = buffer.backend(),
                                  .connected = buffer.connected(),
                                  .bytes_max = buffer.bytes_max(),
                                  .bytes_used = buffer.bytes_used(),
                                  .cache_hit_blocks = buffer.cache_hit_blocks(),
                                  .cache_miss_blocks = buffer.cache_miss_blocks(),
                                  .admitted_blocks = buffer.admitted_blocks(),
                                  .pinned = buffer.pinned()});
  }
  return stats;
}

absl::StatusOr<SequenceSummary> FromWire(const v1::SequenceInfo& info) {
  SequenceSummary summary{.id = info.sequence_id(),
                          .generation = info.generation(),
                          .tenant = info.tenant(),
                          .label = info.label(),
                          .client_name = info.client_name(),
                          .token_count = info.token_count(),
                          .max_tokens = info.max_tokens(),
                          .clustered_tokens = info.clustered_tokens(),
                          .version = info.version(),
                          .reserved_bytes = info.reserved_bytes(),
                          .payload_bytes = info.payload_bytes(),
                          .index_bytes = info.index_bytes(),
                          .idle_ms = info.idle_ms(),
                          .ttl_ms = info.ttl_ms(),
                          .pinned = info.pinned(),
                          .wave_buffer = info.wave_buffer(),
                          .attached = info.attached(),
                          .counters = FromWire(info.counters())};
  WAVEKV_ASSIGN_OR_RETURN(summary.shape, FromWire(info.shape()));
  return summary;
}

absl::StatusOr<IndexDescription> FromWire(const v1::DescribeIndexReply& reply) {
  IndexDescription description{.generation = reply.generation(),
                               .version = reply.version(),
                               .token_count = reply.token_count(),
                               .steady_tokens = reply.steady_tokens(),
                               .index_count = reply.index_count(),
                               .segments_left_off = reply.segments_left_off(),
                               .imbalance = reply.imbalance(),
                               .cluster_count = reply.cluster_count(),
                               .index_bytes = reply.index_bytes(),
                               .payload_bytes = reply.payload_bytes(),
                               .pool_bytes = reply.pool_bytes(),
                               .building = reply.building()};
  WAVEKV_ASSIGN_OR_RETURN(description.sizes, HistogramFromWire(reply.sizes(), "sizes"));
  WAVEKV_ASSIGN_OR_RETURN(description.radii, HistogramFromWire(reply.radii(), "radii"));
  description.segments.reserve(static_cast<size_t>(reply.segments_size()));
  for (const v1::SegmentInfo& segment : reply.segments()) {
    description.segments.push_back({.first_position = segment.first_position(),
                                    .token_count = segment.token_count(),
                                    .layer = segment.layer(),
                                    .kv_head = segment.kv_head(),
                                    .cluster_count = segment.cluster_count(),
                                    .singleton_count = segment.singleton_count(),
                                    .size_max = segment.size_max(),
                                    .radius_mean = segment.radius_mean(),
                                    .radius_max = segment.radius_max(),
                                    .index_bytes = segment.index_bytes(),
                                    .payload_bytes = segment.payload_bytes(),
                                    .given_labels = segment.given_labels()});
  }
  return description;
}

Explanation FromWire(const v1::ExplainReply& reply) {
  Explanation explanation{.generation = reply.generation(),
                          .version = reply.version(),
                          .cluster_count = reply.cluster_count(),
                          .retrieval_count = reply.retrieval_count(),
                          .steady_mass = reply.steady_mass(),
                          .retrieval_mass = reply.retrieval_mass(),
                          .estimation_mass = reply.estimation_mass(),
                          .ranked_by = reply.ranked_by(),
                          .budget = reply.budget()};
  for (const v1::ExplainedCluster& cluster : reply.clusters()) {
    explanation.clusters.push_back(
        {.rank = cluster.rank(),
         .segment_idx = cluster.segment_idx(),
         .cluster_idx = cluster.cluster_idx(),
         .size = cluster.size(),
         .radius = cluster.radius(),
         .logit_max = cluster.logit_max(),
         .expected_error = cluster.expected_error(),
         .estimated_mass = cluster.estimated_mass(),
         .true_mass = cluster.true_mass(),
         .zone = cluster.zone(),
         .positions = {cluster.positions().begin(), cluster.positions().end()}});
  }
  return explanation;
}

RecallSample FromWire(const v1::SampleRecallReply& reply) {
  RecallSample sample{.generation = reply.generation(), .version = reply.version()};
  for (const v1::LayerRecall& layer : reply.layers()) {
    sample.layers.push_back({.layer = layer.layer(),
                             .mass_covered_mean = layer.mass_covered_mean(),
                             .mass_covered_min = layer.mass_covered_min(),
                             .rel_error_mean = layer.rel_error_mean(),
                             .rel_error_max = layer.rel_error_max(),
                             .kv_bytes_read_ratio = layer.kv_bytes_read_ratio(),
                             .sampled = layer.sampled()});
  }
  return sample;
}

}  // namespace wavekv::client
