#include "daemon/server/wire_replies.h"

#include <utility>
#include <vector>

#include "proto/rpc/status_conversion.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// [heads] f32
void FillPerHead(const std::vector<float>& values, v1::Tensor* tensor) {
  FillWireTensor(DType::kF32, std::vector<int64_t>{static_cast<int64_t>(values.size())},
                 values.data(), tensor);
}

// [heads, dim] f32
void FillPerHead(const std::vector<float>& values, size_t head_count, v1::Tensor* tensor) {
  const size_t dim = head_count == 0 ? 0 : values.size() / head_count;
  WAVEKV_CHECK(dim * head_count == values.size(), "an output does not divide into its heads");
  FillWireTensor(DType::kF32,
                 std::vector<int64_t>{static_cast<int64_t>(head_count), static_cast<int64_t>(dim)},
                 values.data(), tensor);
}

void FillInlineRows(const std::vector<std::byte>& rows, size_t row_count, DType dtype, uint32_t dim,
                    v1::Tensor* tensor) {
  WAVEKV_CHECK(rows.size() == row_count * dim * DTypeBytes(dtype),
               "inline rows do not have the bytes of their positions");
  FillWireTensor(dtype, std::vector<int64_t>{static_cast<int64_t>(row_count), dim}, rows.data(),
                 tensor);
}

void FillHead(const HeadZones& head, const ModelShape& shape, v1::HeadZones* wire) {
  wire->set_kv_head(head.kv_head);
  wire->set_steady_tokens(head.steady_tokens);
  for (const RetrievedCluster& cluster : head.retrieved) {
    v1::ClusterRef* ref = wire->add_retrieved();
    ref->set_segment_idx(cluster.segment_idx);
    ref->set_cluster_idx(cluster.cluster_idx);
    ref->set_size(cluster.size);
    ref->set_first_block(cluster.first_block);
    ref->set_estimated_mass(cluster.estimated_mass);
  }
  for (const StagedRows& rows : head.staged) {
    v1::StagedRows* staged = wire->add_staged();
    staged->set_key_offset(rows.key_offset);
    staged->set_value_offset(rows.value_offset);
    staged->set_row_count(rows.row_count);
    staged->set_cache_hit(rows.cache_hit);
  }
  if (head.inline_positions.empty()) return;
  const size_t rows = head.inline_positions.size();
  FillInlineRows(head.inline_keys, rows, shape.dtype, shape.key_dim, wire->mutable_inline_keys());
  FillInlineRows(head.inline_values, rows, shape.dtype, shape.value_dim,
                 wire->mutable_inline_values());
  wire->mutable_inline_positions()->Assign(head.inline_positions.begin(),
                                           head.inline_positions.end());
}

void FillHistogram(const Histogram& histogram, v1::Histogram* wire) {
  wire->mutable_edges()->Assign(histogram.edges.begin(), histogram.edges.end());
  wire->mutable_counts()->Assign(histogram.counts.begin(), histogram.counts.end());
}

}  // namespace

void FillCounters(const StepCounters& counters, v1::StepCounters* wire) {
  wire->set_steady_tokens(counters.steady_tokens);
  wire->set_retrieved_clusters(counters.retrieved_clusters);
  wire->set_retrieved_tokens(counters.retrieved_tokens);
  wire->set_estimated_clusters(counters.estimated_clusters);
  wire->set_sketched_clusters(counters.sketched_clusters);
  wire->set_ignored_clusters(counters.ignored_clusters);
  wire->set_moved_to_estimation(counters.moved_to_estimation);
  wire->set_kv_bytes_read(counters.kv_bytes_read);
  wire->set_kv_bytes_full(counters.kv_bytes_full);
  wire->set_cache_hit_blocks(counters.cache_hit_blocks);
  wire->set_cache_miss_blocks(counters.cache_miss_blocks);
  wire->set_error_budget_met(counters.error_budget_met);
  wire->set_error_budget_capped(counters.error_budget_capped);
}

void FillResidentCounters(const ResidentCounters& counters, v1::ResidentCounters* wire) {
  wire->set_hit_blocks(counters.hit_blocks);
  wire->set_miss_blocks(counters.miss_blocks);
  wire->set_overflows(counters.overflows);
  wire->set_violations(counters.violations);
  wire->set_log_losses(counters.log_losses);
}

void FillWaveBuffer(const WaveBufferAccess& access, v1::WaveBufferInfo* info) {
  info->set_device_uuid(access.device_uuid);
  info->set_backend(access.backend);
  info->set_socket(access.socket);
  info->set_ticket(access.ticket);
  info->set_buffer_bytes(access.buffer_bytes);
}

void FillShape(const ModelShape& shape, v1::ModelShape* wire) {
  wire->set_layer_count(shape.layer_count);
  wire->set_query_head_count(shape.query_head_count);
  wire->set_kv_head_count(shape.kv_head_count);
  wire->set_key_dim(shape.key_dim);
  wire->set_value_dim(shape.value_dim);
  wire->set_dtype(ToWireDType(shape.dtype));
  wire->set_softmax_scale(shape.softmax_scale);
  wire->set_model_id(shape.model_id);
}

void FillEstimate(const EstimateOutcome& outcome, v1::EstimateReply* reply) {
  reply->set_generation(outcome.generation.value());
  reply->set_version(outcome.version);
  FillPerHead(outcome.out, outcome.lse.size(), reply->mutable_out());
  FillPerHead(outcome.lse, reply->mutable_lse());
  FillPerHead(outcome.lse_lower, reply->mutable_lse_lower());
  FillPerHead(outcome.lse_upper, reply->mutable_lse_upper());
  FillCounters(outcome.counters, reply->mutable_counters());
}

void FillQuery(QueryOutcome&& outcome, const ModelShape& shape, v1::QueryReply* reply) {
  reply->set_generation(outcome.generation.value());
  reply->set_version(outcome.version);
  reply->set_token_count(outcome.token_count);
  reply->set_step(outcome.step);
  for (HeadZones& head : outcome.heads) {
    FillHead(head, shape, reply->add_heads());
    head = HeadZones();  // Rows may be large: do not hold them twice.
  }
  FillCounters(outcome.counters, reply->mutable_counters());
  FillEstimate(outcome.estimation, reply->mutable_estimation());
}

void FillAttendError(const absl::Status& status, v1::AttendResult* result) {
  const grpc::Status wire = ToGrpcStatus(status);
  result->set_error_code(static_cast<uint32_t>(wire.error_code()));
  result->set_error_message(wire.error_message());
}

void FillAttend(const AttendOutcome& outcome, v1::AttendResult* result) {
  if (!outcome.status.ok()) {
    FillAttendError(outcome.status, result);
    return;
  }
  result->set_generation(outcome.generation.value());
  result->set_version(outcome.version);
  result->set_token_count(outcome.token_count);
  FillPerHead(outcome.out, outcome.lse.size(), result->mutable_out());
  FillPerHead(outcome.lse, result->mutable_lse());
  FillCounters(outcome.counters, result->mutable_counters());
}

void FillSequence(const SequenceStatus& status, const std::string& client_name,
                  v1::SequenceInfo* info) {
  info->set_sequence_id(status.id.value());
  info->set_generation(status.generation.value());
  info->set_tenant(status.tenant);
  info->set_label(status.label);
  info->set_model_id(status.shape.model_id);
  info->set_token_count(status.token_count);
  info->set_max_tokens(status.max_tokens);
  info->set_clustered_tokens(status.clustered_tokens);
  info->set_version(status.version);
  info->set_reserved_bytes(status.reserved_bytes);
  info->set_payload_bytes(status.payload_bytes);
  info->set_index_bytes(status.index_bytes);
  info->set_idle_ms(status.idle_ms);
  info->set_pinned(status.pinned);
  info->set_ttl_ms(status.ttl_ms);
  FillShape(status.shape, info->mutable_shape());
  FillCounters(status.counters, info->mutable_counters());
  info->set_client_name(client_name);
  info->set_wave_buffer(status.wave_buffer);
  info->set_attached(status.attached);
}

void FillDescription(const IndexDescription& description, v1::DescribeIndexReply* reply) {
  reply->set_generation(description.generation.value());
  reply->set_version(description.version);
  reply->set_token_count(description.token_count);
  reply->set_steady_tokens(description.steady_tokens);
  reply->set_index_count(description.index_count);
  for (const SegmentStatus& segment : description.segments) {
    v1::SegmentInfo* info = reply->add_segments();
    info->set_first_position(segment.first_position);
    info->set_token_count(segment.token_count);
    info->set_layer(segment.layer);
    info->set_kv_head(segment.kv_head);
    info->set_cluster_count(segment.cluster_count);
    info->set_singleton_count(segment.singleton_count);
    info->set_index_bytes(segment.index_bytes);
    info->set_payload_bytes(segment.payload_bytes);
    info->set_size_max(segment.size_max);
    info->set_radius_mean(segment.radius_mean);
    info->set_radius_max(segment.radius_max);
    info->set_given_labels(segment.given_labels);
  }
  reply->set_segments_left_off(description.segments_left_off);
  FillHistogram(description.sizes, reply->mutable_sizes());
  FillHistogram(description.radii, reply->mutable_radii());
  reply->set_imbalance(description.imbalance);
  reply->set_cluster_count(description.cluster_count);
  reply->set_index_bytes(description.index_bytes);
  reply->set_payload_bytes(description.payload_bytes);
  reply->set_pool_bytes(description.pool_bytes);
  reply->set_building(description.building);
}

void FillPlan(const IndexPlan& plan, v1::PlanIndexReply* reply) {
  reply->set_generation(plan.generation.value());
  for (const PlannedSegment& segment : plan.segments) {
    v1::PlannedSegment* wire = reply->add_segments();
    wire->set_first_position(segment.first_position);
    wire->set_token_count(segment.token_count);
    wire->set_cluster_count(segment.cluster_count);
  }
}

void FillExplanation(const Explanation& explanation, v1::ExplainReply* reply) {
  reply->set_generation(explanation.generation.value());
  reply->set_version(explanation.version);
  for (const ExplainedCluster& cluster : explanation.clusters) {
    v1::ExplainedCluster* wire = reply->add_clusters();
    wire->set_rank(cluster.rank);
    wire->set_segment_idx(cluster.segment_idx);
    wire->set_cluster_idx(cluster.cluster_idx);
    wire->set_size(cluster.size);
    wire->set_radius(cluster.radius);
    wire->set_logit_max(cluster.logit_max);
    wire->set_estimated_mass(cluster.estimated_mass);
    wire->set_expected_error(cluster.expected_error);
    wire->set_true_mass(cluster.true_mass);
    wire->set_zone(cluster.zone);
    wire->mutable_positions()->Assign(cluster.positions.begin(), cluster.positions.end());
  }
  reply->set_cluster_count(explanation.cluster_count);
  reply->set_retrieval_count(explanation.retrieval_count);
  reply->set_steady_mass(explanation.steady_mass);
  reply->set_retrieval_mass(explanation.retrieval_mass);
  reply->set_estimation_mass(explanation.estimation_mass);
  reply->set_ranked_by(explanation.ranked_by);
  reply->set_budget(explanation.budget);
}

void FillRecall(const RecallSample& sample, v1::SampleRecallReply* reply) {
  reply->set_generation(sample.generation.value());
  reply->set_version(sample.version);
  for (const LayerRecall& layer : sample.layers) {
    v1::LayerRecall* wire = reply->add_layers();
    wire->set_layer(layer.layer);
    wire->set_mass_covered_mean(layer.mass_covered_mean);
    wire->set_mass_covered_min(layer.mass_covered_min);
    wire->set_rel_error_mean(layer.rel_error_mean);
    wire->set_rel_error_max(layer.rel_error_max);
    wire->set_kv_bytes_read_ratio(layer.kv_bytes_read_ratio);
    wire->set_sampled(layer.sampled);
  }
}

}  // namespace wavekv
