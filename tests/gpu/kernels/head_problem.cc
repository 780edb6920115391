#include "tests/gpu/kernels/head_problem.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "storage/base/dtype.h"

namespace wavekv::gpu {
namespace {

DType TypeOf(Element element) { return element == Element::kBF16 ? DType::kBF16 : DType::kF16; }

std::vector<uint16_t> RandomRows(std::mt19937_64& random, Element element, size_t count) {
  std::normal_distribution<float> normal;
  std::vector<uint16_t> rows(count);
  for (uint16_t& x : rows) x = ToBits(element, normal(random));
  return rows;
}

std::vector<float> MeanOfRows(Element element, const std::vector<uint16_t>& rows, size_t first,
                              size_t count, uint32_t dim) {
  std::vector<double> sum(dim);
  for (size_t i = first; i < first + count; ++i) {
    for (uint32_t d = 0; d < dim; ++d) sum[d] += FromBits(element, rows[i * dim + d]);
  }
  std::vector<float> mean(dim);
  for (uint32_t d = 0; d < dim; ++d) mean[d] = static_cast<float>(sum[d] / count);
  return mean;
}

// Appends (row - mean) as bytes and returns their scale.
float Quantise(const std::vector<float>& row, const std::vector<float>& mean,
               std::vector<int8_t>* bytes) {
  float largest = 0;
  for (size_t d = 0; d < row.size(); ++d) largest = std::max(largest, std::abs(row[d] - mean[d]));
  const float scale = largest / 127;
  for (size_t d = 0; d < row.size(); ++d) {
    const float whole = scale > 0 ? std::round((row[d] - mean[d]) / scale) : 0;
    bytes->push_back(static_cast<int8_t>(std::clamp(whole, -127.0f, 127.0f)));
  }
  return scale;
}

double SquaredSpread(const HeadProblem& head, const std::vector<uint16_t>& rows, size_t first,
                     size_t count, uint32_t cluster, bool values, std::vector<double>* per_dim) {
  double sum = 0;
  for (size_t i = first; i < first + count; ++i) {
    for (uint32_t d = 0; d < head.dim; ++d) {
      const double stored = values ? head.ValueMean(cluster, d) : head.Centroid(cluster, d);
      const double off = FromBits(head.element, rows[i * head.dim + d]) - stored;
      sum += off * off;
      if (per_dim != nullptr) (*per_dim)[d] += off * off;
    }
  }
  return sum / count;
}

void AddPadding(HeadProblem* head, uint16_t segment) {
  while (head->sizes.size() % kClusterPad != 0) {
    head->centroids.insert(head->centroids.end(), head->dim, 0);
    head->value_means.insert(head->value_means.end(), head->dim, 0);
    head->centroid_scales.push_back(0);
    head->value_scales.push_back(0);
    head->key_spreads.push_back(0);
    head->value_spreads.push_back(0);
    head->sizes.push_back(0);
    head->cluster_segment.push_back(segment);
    head->first_row.push_back(0);
    head->first_block.push_back(0);
  }
}

// A segment without tokens, its clusters without sizes, and rubbish that is finite in all the rest.
void AddStaleSegment(std::mt19937_64& random, HeadProblem* head) {
  const auto number = static_cast<uint16_t>(head->segments.size());
  std::normal_distribution<float> normal(0, 100);
  SegmentArrays& segment = head->segments.emplace_back();
  for (auto* mean : {&segment.key_mean, &segment.value_mean, &segment.spread_share}) {
    mean->resize(head->dim);
    for (float& x : *mean) x = normal(random);
  }
  for (uint32_t i = 0; i < head->spec.stale_clusters; ++i) {
    for (auto* bytes : {&head->centroids, &head->value_means}) {
      for (uint32_t d = 0; d < head->dim; ++d) bytes->push_back(static_cast<int8_t>(random()));
    }
    for (auto* floats :
         {&head->centroid_scales, &head->value_scales, &head->key_spreads, &head->value_spreads}) {
      floats->push_back(std::abs(normal(random)));
    }
    head->sizes.push_back(0);
    head->cluster_segment.push_back(number);
    head->first_row.push_back(static_cast<uint32_t>(random()));
    head->first_block.push_back(static_cast<uint32_t>(random()));
  }
}

// Rows around random centres, one run a cluster; returns the cluster sizes.
std::vector<uint16_t> FillSegment(std::mt19937_64& random, const HeadProblem& head, uint32_t tokens,
                                  SegmentArrays* segment) {
  std::normal_distribution<float> normal;
  std::vector<float> offset(head.dim), centre(head.dim);
  for (float& x : offset) x = normal(random);
  std::vector<uint16_t> sizes;
  for (uint32_t done = 0; done < tokens;) {
    const uint32_t size =
        std::min<uint32_t>(tokens - done, 1 + random() % head.spec.cluster_tokens_max);
    for (float& x : centre) x = normal(random);
    for (uint32_t i = 0; i < size; ++i) {
      for (uint32_t d = 0; d < head.dim; ++d) {
        const float noise = head.spec.spread ? 0.5f * normal(random) : 0;
        segment->keys.push_back(ToBits(head.element, centre[d] + noise + offset[d]));
        segment->values.push_back(ToBits(head.element, normal(random) + 0.3f * offset[d]));
      }
    }
    sizes.push_back(static_cast<uint16_t>(size));
    done += size;
  }
  segment->key_mean = MeanOfRows(head.element, segment->keys, 0, tokens, head.dim);
  segment->value_mean = MeanOfRows(head.element, segment->values, 0, tokens, head.dim);
  return sizes;
}

void AddSegment(std::mt19937_64& random, uint32_t tokens, HeadProblem* head) {
  const auto number = static_cast<uint16_t>(head->segments.size());
  SegmentArrays& segment = head->segments.emplace_back();
  segment.first_cluster = head->cluster_count();
  uint32_t row = 0;
  std::vector<double> per_dim(head->dim);
  for (const uint16_t size : FillSegment(random, *head, tokens, &segment)) {
    const uint32_t cluster = head->cluster_count();
    head->sizes.push_back(size);
    head->cluster_segment.push_back(number);
    head->first_row.push_back(row);
    head->first_block.push_back(head->block_count);
    head->centroid_scales.push_back(
        Quantise(MeanOfRows(head->element, segment.keys, row, size, head->dim), segment.key_mean,
                 &head->centroids));
    head->value_scales.push_back(
        Quantise(MeanOfRows(head->element, segment.values, row, size, head->dim),
                 segment.value_mean, &head->value_means));
    head->key_spreads.push_back(static_cast<float>(
        SquaredSpread(*head, segment.keys, row, size, cluster, false, &per_dim)));
    head->value_spreads.push_back(static_cast<float>(
        std::sqrt(SquaredSpread(*head, segment.values, row, size, cluster, true, nullptr) / size)));
    row += size;
    head->block_count += (size + kBlockRows - 1) / kBlockRows;
    ++head->real_clusters;
  }
  double total = 0;
  for (const double x : per_dim) total += x;
  for (const double x : per_dim) {
    segment.spread_share.push_back(static_cast<float>(total > 0 ? x / total : 0));
  }
  AddPadding(head, number);
}

}  // namespace

uint16_t ToBits(Element element, float x) {
  uint16_t bits;
  ConvertFromFloat(TypeOf(element), &x, 1, &bits);
  return bits;
}

float FromBits(Element element, uint16_t bits) {
  float x;
  ConvertToFloat(TypeOf(element), &bits, 1, &x);
  return x;
}

float RoundTo(Element element, float x) { return FromBits(element, ToBits(element, x)); }

double HeadProblem::Centroid(uint32_t cluster, uint32_t d) const {
  // Needed while the segment is being made, too.
  return double{segments[cluster_segment[cluster]].key_mean[d]} +
         double{centroid_scales[cluster]} * centroids[size_t{cluster} * dim + d];
}

double HeadProblem::ValueMean(uint32_t cluster, uint32_t d) const {
  return double{segments[cluster_segment[cluster]].value_mean[d]} +
         double{value_scales[cluster]} * value_means[size_t{cluster} * dim + d];
}

HeadProblem MakeHead(std::mt19937_64& random, Element element, uint32_t dim, const HeadSpec& spec) {
  HeadProblem head;
  head.element = element;
  head.dim = dim;
  head.spec = spec;
  head.sink_keys = RandomRows(random, element, size_t{spec.sinks} * dim);
  head.sink_values = RandomRows(random, element, size_t{spec.sinks} * dim);
  // Rows outside of the zone are as random: reading one shows.
  head.steady_keys = RandomRows(random, element, size_t{spec.steady_capacity} * dim);
  head.steady_values = RandomRows(random, element, size_t{spec.steady_capacity} * dim);
  for (const uint32_t tokens : spec.segment_tokens) {
    if (spec.stale_clusters > 0) AddStaleSegment(random, &head);
    AddSegment(random, tokens, &head);
  }
  return head;
}

void AppendToRing(HeadProblem* head, uint64_t position, const std::vector<uint16_t>& key,
                  const std::vector<uint16_t>& value) {
  const size_t row = position % head->spec.steady_capacity * head->dim;
  std::copy(key.begin(), key.end(), head->steady_keys.begin() + row);
  std::copy(value.begin(), value.end(), head->steady_values.begin() + row);
}

StepOracle::StepOracle(const HeadProblem& head, std::vector<double> queries, uint32_t group,
                       double scale, uint64_t steady_end)
    : head_(head),
      queries_(std::move(queries)),
      group_(group),
      scale_(scale),
      steady_end_(steady_end) {}

double StepOracle::Logit(uint32_t g, uint32_t cluster) const {
  double dot = 0;
  for (uint32_t d = 0; d < head_.dim; ++d) {
    dot += queries_[g * head_.dim + d] * head_.Centroid(cluster, d);
  }
  return scale_ * dot;
}

double StepOracle::Deviation(uint32_t g, uint32_t cluster) const {
  const SegmentArrays& segment = head_.segments[head_.cluster_segment[cluster]];
  double seen = 0;
  for (uint32_t d = 0; d < head_.dim; ++d) {
    seen += std::pow(queries_[g * head_.dim + d], 2) * segment.spread_share[d];
  }
  return scale_ * std::sqrt(seen * head_.key_spreads[cluster]);
}

double StepOracle::LogMass(uint32_t g, uint32_t cluster) const {
  const double log_size = std::log(head_.sizes[cluster]), s = Deviation(g, cluster);
  const double reached = std::sqrt(2 * log_size);
  const double normal = s <= reached ? s * s / 2 : s * reached - log_size;
  return Logit(g, cluster) + log_size + std::min(normal, s) / 2;
}

double StepOracle::Dot(uint32_t g, const uint16_t* row) const {
  double dot = 0;
  for (uint32_t d = 0; d < head_.dim; ++d) {
    dot += queries_[g * head_.dim + d] * FromBits(head_.element, row[d]);
  }
  return scale_ * dot;
}

std::vector<std::pair<const uint16_t*, const uint16_t*>> StepOracle::SteadyRows() const {
  std::vector<std::pair<const uint16_t*, const uint16_t*>> rows;
  for (uint32_t i = 0; i < head_.spec.sinks; ++i) {
    rows.emplace_back(&head_.sink_keys[i * head_.dim], &head_.sink_values[i * head_.dim]);
  }
  for (uint64_t p = head_.spec.steady_first; p < steady_end_; ++p) {
    const size_t row = p % head_.spec.steady_capacity * head_.dim;
    rows.emplace_back(&head_.steady_keys[row], &head_.steady_values[row]);
  }
  return rows;
}

std::vector<double> StepOracle::Ranks(bool by_mass) const {
  constexpr double kVarianceMax = 64;
  const auto rows = SteadyRows();
  std::vector<double> ranks(head_.cluster_count());
  for (uint32_t c = 0; c < head_.cluster_count(); ++c) ranks[c] = head_.sizes[c] == 0 ? -1 : 0;
  for (uint32_t g = 0; g < group_; ++g) {
    std::vector<double> logits(head_.cluster_count());
    double largest = -HUGE_VAL, total = 0;
    for (uint32_t c = 0; c < head_.cluster_count(); ++c) {
      if (head_.sizes[c] == 0) continue;
      logits[c] = LogMass(g, c);
      largest = std::max(largest, logits[c]);
    }
    for (uint32_t c = 0; c < head_.cluster_count(); ++c) {
      if (head_.sizes[c] != 0) total += std::exp(logits[c] - largest);
    }
    if (!by_mass) {
      for (const auto& [key, value] : rows) total += std::exp(Dot(g, key) - largest);
    }
    for (uint32_t c = 0; c < head_.cluster_count(); ++c) {
      if (head_.sizes[c] == 0) continue;
      const double share = std::exp(logits[c] - largest) / total;
      const double v = std::min(std::pow(Deviation(g, c), 2), kVarianceMax);
      const double tail = std::exp(0.375 * v - 0.5 * std::min(0.5 * v, std::sqrt(v)));
      const double grown = v * (1 + v * (0.5 + v / 6));
      const double misjudged = tail * head_.value_spreads[c] * std::sqrt(grown / (1 + grown));
      ranks[c] += by_mass ? share : share * misjudged;
    }
  }
  return ranks;
}

StepOracle::Output StepOracle::Attend(const std::vector<uint32_t>& retrieved) const {
  const uint32_t dim = head_.dim;
  std::vector<bool> is_retrieved(head_.cluster_count());
  for (const uint32_t c : retrieved) is_retrieved[c] = true;
  auto rows = SteadyRows();
  for (const uint32_t c : retrieved) {
    const SegmentArrays& segment = head_.segments[head_.cluster_segment[c]];
    for (uint32_t i = 0; i < head_.sizes[c]; ++i) {
      const size_t row = size_t{head_.first_row[c]} + i;
      rows.emplace_back(&segment.keys[row * dim], &segment.values[row * dim]);
    }
  }
  Output output{std::vector<double>(size_t{group_} * dim), std::vector<double>(group_)};
  for (uint32_t g = 0; g < group_; ++g) {
    std::vector<double> logits;
    for (const auto& [key, value] : rows) logits.push_back(Dot(g, key));
    for (uint32_t c = 0; c < head_.cluster_count(); ++c) {
      if (head_.sizes[c] == 0 || is_retrieved[c]) continue;
      logits.push_back(LogMass(g, c));
    }
    const double largest =
        logits.empty() ? -HUGE_VAL : *std::max_element(logits.begin(), logits.end());
    double total = 0;
    for (double& x : logits) total += x = std::exp(x - largest);
    output.lse[g] = largest + std::log(total);
    if (logits.empty()) output.lse[g] = -HUGE_VAL;
    double* out = &output.out[size_t{g} * dim];
    size_t at = 0;
    for (const auto& [key, value] : rows) {
      const double weight = logits[at++] / total;
      for (uint32_t d = 0; d < dim; ++d) out[d] += weight * FromBits(head_.element, value[d]);
    }
    for (uint32_t c = 0; c < head_.cluster_count(); ++c) {
      if (head_.sizes[c] == 0 || is_retrieved[c]) continue;
      const double weight = logits[at++] / total;
      for (uint32_t d = 0; d < dim; ++d) out[d] += weight * head_.ValueMean(c, d);
    }
  }
  return output;
}

}  // namespace wavekv::gpu
