#include "index/cluster/spherical_kmeans.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "index/cluster/centroid_panels.h"
#include "index/simd/assign.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

// Panels that a near pass compares a point with, of 16 centroids each.
constexpr uint32_t kNearPanels = 4;
// With fewer panels than this, near passes would save little.
constexpr uint32_t kPanelsMin = 12;
// Near passes between two full ones, at most; one that moves this share of the points is the last.
constexpr uint32_t kNearPasses = 4;
constexpr double kNearSettledShare = 0.01;
// A full pass that moves no more than this share of the points ends the training.
constexpr double kSettledShare = 0.002;
// Points are told apart by centroids, and so likeness of centroids means something, when points are
// closer to theirs than to the best of as many random directions by this factor.
constexpr double kStructureMin = 1.25;

// Points that a near pass compares with all centroids: those served worst.
constexpr double kMisfitShare = 0.125;

// Points of a full pass between two pauses.
constexpr uint32_t kPiecePoints = 1152;

// What a point gains, as a share of its length, when it moves to an empty cluster: above rounding,
// so that equal points stay together.
constexpr double kLeastGain = 1e-5;

double Dot(const float* a, const float* b, uint32_t dim) {
  double sum = 0;
  for (uint32_t j = 0; j < dim; ++j) sum += double{a[j]} * b[j];
  return sum;
}

// Scales to length 1; leaves a vector without length alone.
void Normalise(const simd::Kernels& kernels, float* x, uint32_t dim) {
  const double squares = Dot(x, x, dim);
  if (squares > 0) kernels.scale(x, dim, static_cast<float>(1 / std::sqrt(squares)));
}

class Training {
 public:
  Training(const simd::Kernels& kernels, const KMeansInput& input)
      : kernels_(kernels),
        input_(input),
        panel_count_(static_cast<uint32_t>(simd::PanelCount(input.centroid_count))),
        centroids_(input.initial_centroids.begin(), input.initial_centroids.end()),
        panels_(size_t{panel_count_} * simd::kPanelCentroids * input.dim),
        all_(panel_count_),
        order_(input.centroid_count),
        labels_(input.point_count, 0),
        dots_(input.point_count),
        call_slots_(input.point_count),
        call_dots_(input.point_count),
        first_(input.centroid_count + 1, 0),
        members_(input.point_count) {
    std::iota(order_.begin(), order_.end(), uint16_t{0});
    std::iota(all_.begin(), all_.end(), uint16_t{0});
    for (uint32_t c = 0; c < input.centroid_count; ++c) {
      Normalise(kernels_, &centroids_[size_t{c} * input.dim], input.dim);
    }
  }

  std::vector<uint32_t> TakeLabels() { return std::move(labels_); }

  // Whether points lie much closer to their centroids than chance would have it. AssignToAll came
  // before.
  bool HasStructure() const {
    double dots = 0, lengths = 0;
    for (uint32_t i = 0; i < input_.point_count; ++i) {
      dots += dots_[i];
      lengths += Length(i);
    }
    const double by_chance = std::sqrt(2 * std::log(input_.centroid_count) / input_.dim);
    return dots >= kStructureMin * by_chance * lengths;
  }

  // Compares every point with every centroid; returns how many changed their label.
  uint32_t AssignToAll() {
    simd::PackPanels(centroids_.data(), order_, input_.dim, panels_.data());
    for (uint32_t first = 0; first < input_.point_count; first += kPiecePoints) {
      Pause();
      kernels_.nearest_in_panels(Point(first), std::min(kPiecePoints, input_.point_count - first),
                                 input_.dim, panels_.data(), all_.data(), all_.size(),
                                 &call_slots_[first], &call_dots_[first]);
    }
    uint32_t changed = 0;
    for (uint32_t i = 0; i < input_.point_count; ++i) changed += SetLabel(i, i);
    return changed;
  }

  // Groups the centroids as they stand for the near passes that follow.
  void GroupCentroids() {
    Pause();
    order_ = OrderByLikeness(kernels_, centroids_, input_.centroid_count, input_.dim);
    simd::PackPanels(centroids_.data(), order_, input_.dim, panels_.data());
    near_ = NearestPanels(kernels_, centroids_, input_.centroid_count, input_.dim, panels_,
                          panel_count_, kNearPanels);
  }

  // Compares every point with the centroids about its own, and the worst-served with all; returns
  // how many changed their label. MoveCentroids and, not long ago, GroupCentroids came before.
  uint32_t AssignToNear() {
    Pause();
    simd::PackPanels(centroids_.data(), order_, input_.dim, panels_.data());
    uint32_t changed = 0;
    for (uint32_t c = 0; c < input_.centroid_count; ++c) {
      const uint32_t count = first_[c + 1] - first_[c];
      if (count == 0) continue;
      const uint32_t* members = &members_[first_[c]];
      Gather(count, [members](uint32_t i) { return members[i]; });
      kernels_.nearest_in_panels(gathered_.data(), count, input_.dim, panels_.data(),
                                 &near_[size_t{c} * kNearPanels], kNearPanels, call_slots_.data(),
                                 call_dots_.data());
      for (uint32_t i = 0; i < count; ++i) changed += SetLabel(members[i], i);
    }
    return changed + AssignMisfits();
  }

  // Moves each centroid to the direction of its points' sum; one without points to the point of the
  // largest cluster that lies farthest from its centroid.
  void MoveCentroids() {
    Pause();
    SortByLabel();
    std::vector<uint32_t> sizes(input_.centroid_count);
    for (uint32_t c = 0; c < input_.centroid_count; ++c) {
      sizes[c] = first_[c + 1] - first_[c];
      if (sizes[c] == 0) continue;
      float* centroid = &centroids_[size_t{c} * input_.dim];
      std::copy_n(Point(members_[first_[c]]), input_.dim, centroid);
      for (uint32_t i = first_[c] + 1; i < first_[c + 1]; ++i) {
        const float* point = Point(members_[i]);
        for (uint32_t j = 0; j < input_.dim; ++j) centroid[j] += point[j];
      }
      Normalise(kernels_, centroid, input_.dim);
    }
    for (uint32_t c = 0; c < input_.centroid_count; ++c) {
      if (sizes[c] != 0) continue;
      const uint32_t seed = Reseed(c, &sizes);
      dots_[seed] = static_cast<float>(Length(seed));  // The next one takes another.
    }
  }

  // Gives each centroid that has no points at the end those of the largest cluster that are nearer
  // to the worst-served of them than to their centroid.
  void FillEmpty() {
    SortByLabel();
    std::vector<uint32_t> sizes(input_.centroid_count);
    for (uint32_t c = 0; c < input_.centroid_count; ++c) sizes[c] = first_[c + 1] - first_[c];
    for (uint32_t c = 0; c < input_.centroid_count; ++c) {
      if (first_[c + 1] != first_[c]) continue;
      const uint32_t from = labels_[Reseed(c, &sizes)];
      for (uint32_t m = first_[from]; m < first_[from + 1]; ++m) {
        const uint32_t i = members_[m];
        const double dot = Dot(Point(i), &centroids_[size_t{c} * input_.dim], input_.dim);
        if (labels_[i] != from || dot <= dots_[i] + kLeastGain * Length(i)) continue;
        labels_[i] = c;
        dots_[i] = static_cast<float>(dot);
      }
    }
  }

 private:
  void Pause() const {
    if (input_.pause) input_.pause();
  }

  // Compares the points farthest from their centroids with all: what does not belong where it is
  // rarely finds a better place near by.
  uint32_t AssignMisfits() {
    Pause();
    std::vector<std::pair<double, uint32_t>> cosines;
    cosines.reserve(input_.point_count);
    for (uint32_t i = 0; i < input_.point_count; ++i) {
      const double length = Length(i);
      cosines.emplace_back(length > 0 ? dots_[i] / length : 1, i);
    }
    const auto count = static_cast<uint32_t>(input_.point_count * kMisfitShare);
    std::nth_element(cosines.begin(), cosines.begin() + count, cosines.end());
    Gather(count, [&](uint32_t i) { return cosines[i].second; });
    kernels_.nearest_in_panels(gathered_.data(), count, input_.dim, panels_.data(), all_.data(),
                               all_.size(), call_slots_.data(), call_dots_.data());
    uint32_t changed = 0;
    for (uint32_t i = 0; i < count; ++i) changed += SetLabel(cosines[i].second, i);
    return changed;
  }

  // Copies the points point_of(0), ..., point_of(count - 1) one after the other.
  template <typename PointOf>
  void Gather(uint32_t count, const PointOf& point_of) {
    gathered_.resize(size_t{count} * input_.dim);
    for (uint32_t i = 0; i < count; ++i) {
      std::copy_n(Point(point_of(i)), input_.dim, &gathered_[size_t{i} * input_.dim]);
    }
  }

  // Lists each label's points, ascending.
  void SortByLabel() {
    std::fill(first_.begin(), first_.end(), 0);
    for (const uint32_t label : labels_) ++first_[label + 1];
    std::partial_sum(first_.begin(), first_.end(), first_.begin());
    std::vector<uint32_t> next(first_.begin(), first_.end() - 1);
    for (uint32_t i = 0; i < input_.point_count; ++i) members_[next[labels_[i]]++] = i;
  }

  double Length(uint32_t i) const { return std::sqrt(Dot(Point(i), Point(i), input_.dim)); }
  const float* Point(uint32_t i) const { return &input_.points[size_t{i} * input_.dim]; }

  // Takes over the call's answer number `answer`; returns whether it differs from the label so far.
  bool SetLabel(uint32_t point, uint32_t answer) {
    const uint32_t label = order_[call_slots_[answer]];
    const bool changed = labels_[point] != label;
    labels_[point] = label;
    dots_[point] = call_dots_[answer];
    return changed;
  }

  // Gives the centroid without points the place of the point of the largest cluster that is served
  // worst, and returns that point. `sizes` count what each centroid has to give.
  uint32_t Reseed(uint32_t empty, std::vector<uint32_t>* sizes) {
    const auto largest = std::max_element(sizes->begin(), sizes->end());
    const auto from = static_cast<uint32_t>(largest - sizes->begin());
    uint32_t farthest = members_[first_[from]];
    for (uint32_t m = first_[from]; m < first_[from + 1]; ++m) {
      const uint32_t i = members_[m];
      if (labels_[i] == from && (labels_[farthest] != from || dots_[i] < dots_[farthest])) {
        farthest = i;
      }
    }
    float* centroid = &centroids_[size_t{empty} * input_.dim];
    std::copy_n(Point(farthest), input_.dim, centroid);
    Normalise(kernels_, centroid, input_.dim);
    *largest = (*largest + 1) / 2;  // Never 0: what has no points here cannot give one.
    return farthest;
  }

  const simd::Kernels& kernels_;
  const KMeansInput& input_;
  const uint32_t panel_count_;
  std::vector<float> centroids_;      // [centroid_count, dim], of length 1 or 0.
  std::vector<float> panels_;         // The same in panels, in the order of order_.
  std::vector<uint16_t> all_;         // Every panel.
  std::vector<uint16_t> order_;       // Centroid of each slot.
  std::vector<uint16_t> near_;        // [centroid_count, kNearPanels]
  std::vector<uint32_t> labels_;      // [point_count]
  std::vector<float> dots_;           // [point_count] with the own centroid when assigned.
  std::vector<uint32_t> call_slots_;  // What one call of the loops returned.
  std::vector<float> call_dots_;
  std::vector<float> gathered_;    // Points of one call.
  std::vector<uint32_t> first_;    // [centroid_count + 1] into members_.
  std::vector<uint32_t> members_;  // Points by label.
};

}  // namespace

KMeansResult SphericalKMeans(const simd::Kernels& kernels, const KMeansInput& input) {
  WAVEKV_CHECK(input.centroid_count >= 1 && input.centroid_count <= input.point_count &&
                   input.centroid_count <= 65535,
               "one centroid at least, and no more than points or 16 bits");
  WAVEKV_CHECK(input.points.size() == size_t{input.point_count} * input.dim, "points shape");
  WAVEKV_CHECK(input.initial_centroids.size() == size_t{input.centroid_count} * input.dim,
               "initial centroids shape");
  const size_t panel_count = simd::PanelCount(input.centroid_count);
  Training training(kernels, input);
  KMeansResult result;
  training.AssignToAll();
  result.full_passes = 1;
  const bool near = panel_count >= kPanelsMin && training.HasStructure();
  const auto share = [&](double of) { return static_cast<uint32_t>(of * input.point_count); };
  for (uint32_t moves = 0; moves < input.iterations;) {
    // The last move allowed is for a full pass.
    const uint32_t near_max = near ? std::min(kNearPasses, input.iterations - moves - 1) : 0;
    for (uint32_t pass = 0; pass < near_max; ++pass) {
      training.MoveCentroids();
      ++moves;
      if (pass == 0) training.GroupCentroids();
      ++result.near_passes;
      if (training.AssignToNear() <= share(kNearSettledShare)) break;
    }
    training.MoveCentroids();
    ++moves;
    ++result.full_passes;
    if (training.AssignToAll() <= share(kSettledShare)) break;
  }
  training.FillEmpty();
  result.labels = training.TakeLabels();
  return result;
}

}  // namespace wavekv
