// Exact attention on the CPU.
#pragma once

#include <span>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"

namespace wavekv {

// ComputeBackend::AttendRows of a checked query. The result does not depend on how rows are cut
// into runs.
void AttendOnCpu(const simd::Kernels& kernels, std::span<const RowRun> rows,
                 const GroupQuery& query, PartialAttention* result);

// The rows of flat clusters, in their order; neighbours in memory are one run.
std::vector<RowRun> RowsOfClusters(HeadIndex index, std::span<const uint32_t> clusters);

}  // namespace wavekv
