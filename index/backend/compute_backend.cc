#include "index/backend/compute_backend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "index/zone/round_outwards.h"
#include "storage/base/check.h"

namespace wavekv {

uint32_t ClusterCountFor(uint32_t token_count, uint32_t tokens_per_cluster) {
  return (token_count + tokens_per_cluster - 1) / tokens_per_cluster;
}

void MergePartial(const PartialAttention& b, PartialAttention* a) {
  WAVEKV_CHECK(a->lse.size() == b.lse.size() && a->out.size() == b.out.size(),
               "partial attentions of one shape");
  const size_t heads = a->lse.size();
  if (heads == 0) return;
  const size_t value_dim = a->out.size() / heads;
  for (size_t g = 0; g < heads; ++g) {
    if (b.lse[g] == -std::numeric_limits<float>::infinity()) continue;
    if (a->lse[g] == -std::numeric_limits<float>::infinity()) {
      std::copy_n(b.out.begin() + static_cast<ptrdiff_t>(g * value_dim), value_dim,
                  a->out.begin() + static_cast<ptrdiff_t>(g * value_dim));
      a->lse[g] = b.lse[g];
      continue;
    }
    const double top = std::max(a->lse[g], b.lse[g]);
    const double weight_a = std::exp(a->lse[g] - top);
    const double weight_b = std::exp(b.lse[g] - top);
    const double total = weight_a + weight_b;
    const auto share_a = static_cast<float>(weight_a / total);
    const auto share_b = static_cast<float>(weight_b / total);
    for (size_t j = g * value_dim; j < (g + 1) * value_dim; ++j) {
      a->out[j] = share_a * a->out[j] + share_b * b.out[j];
    }
    a->lse[g] = static_cast<float>(top + std::log(total));
  }
}

namespace {

double LogAddExp(double a, double b) {
  const double top = std::max(a, b);
  if (std::isinf(top)) return top;
  return top + std::log(std::exp(a - top) + std::exp(b - top));
}

}  // namespace

void MergeEstimated(const EstimatedAttention& b, EstimatedAttention* a) {
  WAVEKV_CHECK(
      a->lse_lower.size() == b.lse_lower.size() && a->lse_upper.size() == b.lse_upper.size(),
      "both parts of the estimation zone have bounds or neither");
  MergePartial(b.attention, &a->attention);
  for (size_t g = 0; g < a->lse_lower.size(); ++g) {
    a->lse_lower[g] = RoundDown(LogAddExp(a->lse_lower[g], b.lse_lower[g]));
    a->lse_upper[g] = RoundUp(LogAddExp(a->lse_upper[g], b.lse_upper[g]));
  }
  a->bytes_read += b.bytes_read;
}

RowRun RowsOf(const SegmentHead& segment, size_t first, uint32_t count) {
  const size_t element = DTypeBytes(segment.payload_dtype);
  return {segment.keys + first * segment.key_dim * element,
          segment.values + first * segment.value_dim * element, count};
}

RowRun ClusterRows(HeadIndex index, uint32_t cluster) {
  const ClusterAddress address = LocateCluster(index, cluster);
  const SegmentHead& segment = *index[address.segment_idx];
  const uint32_t row = segment.first_row[address.cluster_idx];
  return RowsOf(segment, row, segment.first_row[address.cluster_idx + 1] - row);
}

uint32_t ClusterCount(HeadIndex index) {
  uint32_t count = 0;
  for (const SegmentHead* segment : index) count += segment->cluster_count;
  return count;
}

ClusterAddress LocateCluster(HeadIndex index, uint32_t cluster) {
  uint32_t rest = cluster;
  for (uint32_t s = 0; s < index.size(); ++s) {
    if (rest < index[s]->cluster_count) return {s, rest};
    rest -= index[s]->cluster_count;
  }
  WAVEKV_CHECK(false, "a flat cluster index below ClusterCount");
  return {};
}

}  // namespace wavekv
