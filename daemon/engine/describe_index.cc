#include <algorithm>
#include <cmath>

#include "daemon/engine/inspection.h"

namespace wavekv {
namespace {

constexpr size_t kBins = 16;

// Counts of values over kBins equal bins of [low, high].
Histogram MakeHistogram(const std::vector<double>& values, double low, double high) {
  Histogram histogram;
  for (size_t bin = 0; bin <= kBins; ++bin) {
    histogram.edges.push_back(low + (high - low) * static_cast<double>(bin) / kBins);
  }
  histogram.counts.resize(kBins);
  for (const double value : values) {
    const double place = high > low ? (value - low) / (high - low) * kBins : 0;
    const auto bin = static_cast<size_t>(std::clamp(place, 0.0, kBins - 1.0));
    ++histogram.counts[bin];
  }
  return histogram;
}

SegmentStatus DescribeSegment(const SegmentHead& head, const ModelShape& shape, uint32_t layer,
                              uint32_t kv_head) {
  SegmentStatus status;
  status.first_position = head.first_position;
  status.token_count = head.token_count;
  status.layer = layer;
  status.kv_head = kv_head;
  status.cluster_count = head.cluster_count;
  status.given_labels = head.given_labels;
  status.index_bytes = head.index_bytes();
  status.payload_bytes = head.token_count * (shape.key_bytes() + shape.value_bytes());
  for (uint32_t cluster = 0; cluster < head.cluster_count; ++cluster) {
    status.singleton_count += head.sizes[cluster] == 1 ? 1 : 0;
    status.size_max = std::max<uint32_t>(status.size_max, head.sizes[cluster]);
    status.radius_mean += head.radii[cluster];
    status.radius_max = std::max<double>(status.radius_max, head.radii[cluster]);
  }
  if (head.cluster_count > 0) status.radius_mean /= head.cluster_count;
  return status;
}

}  // namespace

IndexDescription DescribeLayers(std::span<const std::pair<uint32_t, LayerSnapshot>> layers,
                                std::optional<uint32_t> kv_head) {
  IndexDescription description;
  std::vector<double> sizes;
  std::vector<double> radii;
  for (const auto& [layer, snapshot] : layers) {
    const ModelShape& shape = *snapshot.shape;
    const uint32_t first = kv_head.value_or(0);
    const uint32_t end = kv_head.has_value() ? *kv_head + 1 : shape.kv_head_count;
    description.generation = snapshot.generation;
    description.version = std::max(description.version, snapshot.version->number());
    description.token_count = std::max(description.token_count, snapshot.token_count);
    description.index_count += end - first;
    description.steady_tokens += snapshot.steady_tokens() * (end - first);
    description.payload_bytes +=
        snapshot.token_count * (end - first) * (shape.key_bytes() + shape.value_bytes());
    const double head_share = static_cast<double>(end - first) / shape.kv_head_count;
    uint64_t pool_bytes =
        (snapshot.chunks->size() * kChunkTokens + kSinkTokens) * shape.token_bytes();
    for (const auto& segment : snapshot.version->segments()) {
      pool_bytes += segment->pool_bytes();
      for (uint32_t head = first; head < end; ++head) {
        const SegmentHead& index = segment->head(head);
        sizes.insert(sizes.end(), index.sizes.begin(), index.sizes.end());
        radii.insert(radii.end(), index.radii.begin(), index.radii.end());
        description.cluster_count += index.cluster_count;
        description.index_bytes += index.index_bytes();
        if (description.segments.size() < kSegmentsListedMax) {
          description.segments.push_back(DescribeSegment(index, shape, layer, head));
        } else {
          ++description.segments_left_off;
        }
      }
    }
    description.pool_bytes += static_cast<uint64_t>(static_cast<double>(pool_bytes) * head_share);
  }
  double sum = 0;
  double sum_of_squares = 0;
  for (const double size : sizes) {
    sum += size;
    sum_of_squares += size * size;
  }
  if (!sizes.empty()) {
    description.imbalance = sum_of_squares * static_cast<double>(sizes.size()) / (sum * sum);
  }
  description.sizes = MakeHistogram(sizes, 1, kClusterTokensMax + 1);
  const auto widest = std::max_element(radii.begin(), radii.end());
  description.radii = MakeHistogram(radii, 0, widest == radii.end() ? 1 : std::max(*widest, 1e-6));
  return description;
}

}  // namespace wavekv
