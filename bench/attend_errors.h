// How far answers over layer 0 of an AttendWorld are from exact attention in double.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/attend_world.h"

namespace wavekv::bench {

// |answer - exact| / |exact| of every sampled (step, query head).
struct AttendErrors {
  std::vector<double> full;            // The exact kernels.
  std::vector<double> ours;            // Default budgets.
  std::vector<double> retrieval_only;  // The same without the estimation zone.
  // The zones of the paper on the same clusters: 1.8 % retrieved, ranked by the summed softmax of
  // the centroids' scores without the clusters' sizes; the next 23.2 % estimated; the rest dropped.
  std::vector<double> paper;
};

// Samples `samples` steps, spread over the world's.
AttendErrors MeasureErrors(AttendWorld* world, uint32_t samples);

}  // namespace wavekv::bench
