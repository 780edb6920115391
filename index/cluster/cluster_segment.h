// Builds one head's segment: partition, payload in cluster order, index arrays.
#pragma once

#include <cstddef>
#include <vector>

#include "absl/status/statusor.h"
#include "index/backend/compute_backend.h"
#include "index/cluster/split.h"
#include "index/segment.h"
#include "index/simd/kernels.h"

namespace wavekv {

// ComputeBackend::ClusterSegment on the CPU, in the caller's thread.
absl::StatusOr<SegmentHead> ClusterSegmentOnCpu(const simd::Kernels& kernels,
                                                const ClusterInput& input,
                                                const ClusterOptions& options, std::byte* keys_out,
                                                std::byte* values_out);

// The second half of it: lays the payload out in the order of `clusters`, which hold each token
// once, summarises them, and makes the tokens' sketch when `sketch`.
SegmentHead SummariseClusters(const simd::Kernels& kernels, const ClusterInput& input,
                              const std::vector<ClusterMembers>& clusters, bool sketch,
                              std::byte* keys_out, std::byte* values_out);

}  // namespace wavekv
