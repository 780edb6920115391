#include "bench/gpu/attend_replay.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <numeric>
#include <utility>

#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr double kPaperRetrieved = 0.018, kPaperEstimated = 0.232;

template <typename T>
absl::StatusOr<std::vector<T>> Fetch(const T* source, size_t count) {
  std::vector<T> target(count);
  WAVEKV_CUDA_RETURN_IF_ERROR(
      cudaMemcpy(target.data(), source, count * sizeof(T), cudaMemcpyDefault));
  return target;
}

// Weighted sum of values, kept relative to the largest logit so far.
class Accumulator {
 public:
  explicit Accumulator(double* out) : out_(out) {}

  template <typename Value>
  void Add(double logit, double count, Value value) {
    if (logit > largest_) {
      const double factor = std::exp(largest_ - logit);
      for (uint32_t d = 0; d < kBenchDim; ++d) out_[d] *= factor;
      total_ *= factor;
      largest_ = logit;
    }
    const double weight = count * std::exp(logit - largest_);
    total_ += weight;
    for (uint32_t d = 0; d < kBenchDim; ++d) out_[d] += weight * value(d);
  }
  void Finish() {
    for (uint32_t d = 0; d < kBenchDim; ++d) out_[d] /= total_;
  }

 private:
  double* const out_;
  double largest_ = -HUGE_VAL, total_ = 0;
};

// One unit's arrays on the host.
struct UnitArrays {
  std::vector<int8_t> centroids, value_means;
  std::vector<float> centroid_scales, value_scales, key_spreads, means;
  std::vector<uint16_t> sizes, cluster_segment, sinks, ring;
  std::vector<uint32_t> first_row;
  uint64_t appended = 0;  // End of the exact tokens; more than were built with: appended ones.
};

absl::StatusOr<UnitArrays> Download(const ReplayInput& input) {
  const LayerShape& shape = input.built->shape;
  const LayerArrays layer = LayOutLayer(shape, input.base);
  const size_t first = size_t{input.unit} * shape.clusters;
  const size_t clusters = input.built->cluster_counts[input.unit];
  UnitArrays unit;
  WAVEKV_ASSIGN_OR_RETURN(unit.centroids,
                          Fetch(layer.centroids + first * kBenchDim, clusters * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(unit.value_means,
                          Fetch(layer.value_means + first * kBenchDim, clusters * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(unit.centroid_scales, Fetch(layer.centroid_scales + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(unit.value_scales, Fetch(layer.value_scales + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(unit.key_spreads, Fetch(layer.key_spreads + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(unit.sizes, Fetch(layer.sizes + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(unit.cluster_segment, Fetch(layer.cluster_segment + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(unit.first_row, Fetch(layer.first_row + first, clusters));
  WAVEKV_ASSIGN_OR_RETURN(const auto states, Fetch(layer.state + input.unit, 1));
  unit.appended = states.front().appended;
  const size_t mean_floats = size_t{shape.segments} * 3 * kBenchDim;
  WAVEKV_ASSIGN_OR_RETURN(unit.means, Fetch(layer.means + input.unit * mean_floats, mean_floats));
  const size_t sinks = 2 * kBenchSinks * kBenchDim, ring = size_t{2} * kBenchRing * kBenchDim;
  WAVEKV_ASSIGN_OR_RETURN(unit.sinks, Fetch(layer.sinks + input.unit * sinks, sinks));
  WAVEKV_ASSIGN_OR_RETURN(unit.ring, Fetch(layer.ring + input.unit * ring, ring));
  return unit;
}

class Replayer {
 public:
  Replayer(const ReplayInput& input, UnitArrays arrays)
      : input_(input),
        arrays_(std::move(arrays)),
        scores_(size_t{input.group} * clusters()),
        retrieved_(clusters()),
        paper_(clusters(), PaperZone::kDropped) {
    for (const uint32_t c : input_.retrieved) retrieved_[c] = true;
    for (uint32_t g = 0; g < input_.group; ++g) {
      for (uint32_t c = 0; c < clusters(); ++c) {
        if (arrays_.sizes[c] > 0) scores_[size_t{g} * clusters() + c] = Score(g, c);
      }
    }
    ZoneAsThePaper();
  }

  void Head(uint32_t g, ReplayOutput* output) const {
    Accumulator replayed(&output->replayed[size_t{g} * kBenchDim]);
    Accumulator exact(&output->exact[size_t{g} * kBenchDim]);
    Accumulator paper(&output->paper[size_t{g} * kBenchDim]);
    const LayerShape& shape = input_.built->shape;
    for (uint32_t i = 0; i < kBenchSinks; ++i) {
      AddRow(g, &arrays_.sinks[i * kBenchDim], &arrays_.sinks[(kBenchSinks + i) * kBenchDim],
             {&replayed, &exact, &paper});
    }
    for (uint64_t token = shape.tokens - kBenchWindow; token < arrays_.appended; ++token) {
      const size_t row = token % kBenchRing;
      AddRow(g, &arrays_.ring[row * kBenchDim], &arrays_.ring[(kBenchRing + row) * kBenchDim],
             {&replayed, &exact, &paper});
    }
    const auto* keys = static_cast<const uint16_t*>(input_.pool);
    const uint16_t* values = keys + PoolBytes(shape.units, shape.tokens) / 4;
    for (uint32_t c = 0; c < clusters(); ++c) {
      const uint32_t size = arrays_.sizes[c];
      if (size == 0) continue;
      const bool rows_for_paper = paper_[c] == PaperZone::kRetrieved;
      const size_t first = size_t{input_.unit} * shape.clustered() +
                           size_t{arrays_.cluster_segment[c]} * kSegmentTokens +
                           arrays_.first_row[c];
      for (size_t row = first; row < first + size; ++row) {
        AddRow(g, keys + row * kBenchDim, values + row * kBenchDim,
               {retrieved_[c] ? &replayed : nullptr, &exact, rows_for_paper ? &paper : nullptr});
      }
      const double score = scores_[size_t{g} * clusters() + c];
      if (!retrieved_[c]) AddMean(c, score + Gain(g, c), &replayed);
      if (paper_[c] == PaperZone::kEstimated) AddMean(c, score, &paper);
    }
    replayed.Finish();
    exact.Finish();
    paper.Finish();
  }

 private:
  enum class PaperZone : uint8_t { kRetrieved, kEstimated, kDropped };

  uint32_t clusters() const { return static_cast<uint32_t>(arrays_.sizes.size()); }
  const float* Means(uint32_t c) const {
    return &arrays_.means[size_t{arrays_.cluster_segment[c]} * 3 * kBenchDim];
  }

  // Of the stored centroid.
  double Score(uint32_t g, uint32_t c) const {
    const float *q = &input_.queries[size_t{g} * kBenchDim], *mean = Means(c);
    double dot = 0;
    for (uint32_t d = 0; d < kBenchDim; ++d) {
      dot += q[d] * (mean[d] + double{arrays_.centroid_scales[c]} *
                                   arrays_.centroids[size_t{c} * kBenchDim + d]);
    }
    return input_.scale * dot;
  }

  // Half of what normal logits of the cluster's scatter would add to the log of its mass
  // (docs/decisions/009-index-arrays.md).
  double Gain(uint32_t g, uint32_t c) const {
    const float *q = &input_.queries[size_t{g} * kBenchDim], *share = Means(c) + 2 * kBenchDim;
    double seen = 0;
    for (uint32_t d = 0; d < kBenchDim; ++d) seen += double{q[d]} * q[d] * share[d];
    const double s = input_.scale * std::sqrt(seen * arrays_.key_spreads[c]);
    const double log_size = std::log(arrays_.sizes[c]), reached = std::sqrt(2 * log_size);
    return std::min(s <= reached ? s * s / 2 : s * reached - log_size, s) / 2;
  }

  // The paper's zones: clusters in order of their centroid's weight, whatever their size, summed
  // over the group; the best retrieved, the next estimated, the rest dropped.
  void ZoneAsThePaper() {
    std::vector<uint32_t> order;
    for (uint32_t c = 0; c < clusters(); ++c) {
      if (arrays_.sizes[c] > 0) order.push_back(c);
    }
    std::vector<double> rank(clusters());
    for (uint32_t g = 0; g < input_.group; ++g) {
      const double* scores = &scores_[size_t{g} * clusters()];
      double largest = -HUGE_VAL, total = 0;
      for (const uint32_t c : order) largest = std::max(largest, scores[c]);
      for (const uint32_t c : order) total += std::exp(scores[c] - largest);
      for (const uint32_t c : order) rank[c] += std::exp(scores[c] - largest) / total;
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](uint32_t a, uint32_t b) { return rank[a] > rank[b]; });
    const auto real = static_cast<double>(order.size());
    const auto retrieved = static_cast<size_t>(std::ceil(kPaperRetrieved * real));
    const auto estimated = static_cast<size_t>(std::ceil(kPaperEstimated * real));
    for (size_t i = 0; i < std::min(order.size(), retrieved + estimated); ++i) {
      paper_[order[i]] = i < retrieved ? PaperZone::kRetrieved : PaperZone::kEstimated;
    }
  }

  void AddRow(uint32_t g, const uint16_t* key, const uint16_t* value,
              std::initializer_list<Accumulator*> targets) const {
    double dot = 0;
    const float* q = &input_.queries[size_t{g} * kBenchDim];
    for (uint32_t d = 0; d < kBenchDim; ++d) dot += double{q[d]} * BF16ToFloat(key[d]);
    for (Accumulator* target : targets) {
      if (target == nullptr) continue;
      target->Add(input_.scale * dot, 1, [&](uint32_t d) { return BF16ToFloat(value[d]); });
    }
  }

  // The cluster as its size in tokens with its mean value.
  void AddMean(uint32_t c, double logit, Accumulator* target) const {
    target->Add(logit, arrays_.sizes[c], [&](uint32_t d) {
      return Means(c)[kBenchDim + d] +
             double{arrays_.value_scales[c]} * arrays_.value_means[size_t{c} * kBenchDim + d];
    });
  }

  static constexpr uint32_t kSegmentTokens = 8192;

  const ReplayInput& input_;
  const UnitArrays arrays_;
  std::vector<double> scores_;  // [group, clusters]
  std::vector<bool> retrieved_;
  std::vector<PaperZone> paper_;
};

}  // namespace

absl::StatusOr<ReplayOutput> Replay(const ReplayInput& input) {
  WAVEKV_ASSIGN_OR_RETURN(UnitArrays arrays, Download(input));
  ReplayOutput output;
  output.replayed.assign(size_t{input.group} * kBenchDim, 0);
  output.exact = output.paper = output.replayed;
  const Replayer replayer(input, std::move(arrays));
  for (uint32_t g = 0; g < input.group; ++g) replayer.Head(g, &output);
  return output;
}

double RelativeError(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  return std::sqrt(error / norm);
}

}  // namespace wavekv::bench
