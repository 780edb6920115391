#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "gpu/kernels/begin.cuh"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/partials.cuh"
#include "gpu/kernels/select.cuh"
#include "gpu/kernels/step_kernels.cuh"
#include "gpu/kernels/step_launch.h"
#include "storage/base/status_macros.h"

namespace wavekv::gpu {
namespace {

constexpr size_t kAlignment = 256;
constexpr uint32_t kRankSplitsMax = 128;
constexpr uint32_t kMissWarpsMax = 256;            // Of all units.
constexpr uint32_t kSelectSharedMax = 190 * 1024;  // Leaves room for the static part.

StepKernels FindKernels(const StepShape& shape) {
  const bool bf16 = shape.element == Element::kBF16;
  switch (shape.head_dim) {
    case 64:
      return bf16 ? KernelsFor<__nv_bfloat16, 64>(shape.group)
                  : KernelsFor<__half, 64>(shape.group);
    case 128:
      return bf16 ? KernelsFor<__nv_bfloat16, 128>(shape.group)
                  : KernelsFor<__half, 128>(shape.group);
    default:
      return bf16 ? KernelsFor<__nv_bfloat16, 256>(shape.group)
                  : KernelsFor<__half, 256>(shape.group);
  }
}

struct Launch {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  uint32_t cluster = 1;
};

absl::Status LaunchKernel(const void* kernel, const Launch& launch, Step step, GpuStream stream) {
  std::array<cudaLaunchAttribute, 1> attributes;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {launch.cluster, 1, 1};
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(launch.shared_bytes)));
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = launch.cluster > 1 ? 1 : 0;
  void* arguments[] = {&step};
  return CudaStatus(cudaLaunchKernelExC(&config, kernel, arguments), "cudaLaunchKernelExC");
}

uint32_t RoundUpToPowerOfTwo(uint32_t x) {
  uint32_t power = 1;
  while (power < x) power *= 2;
  return power;
}

uint32_t CeilDivide(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

// Calls visit(&array, count) for each array of a workspace, in order.
template <typename Visit>
void VisitArrays(const StepShape& shape, const StepSplits& splits, StepWorkspace* workspace,
                 Visit visit) {
  const size_t units = size_t{shape.batch} * shape.kv_heads;
  const size_t partials = units * PartialCount(splits) * shape.group;
  visit(&workspace->heads, units);
  visit(&workspace->query_bytes, units * 2 * kGroupMax * shape.head_dim);
  visit(&workspace->query_scales, units * kGroupMax);
  visit(&workspace->views, units * shape.segment_capacity * shape.group);
  visit(&workspace->logits, units * shape.group * shape.cluster_capacity);
  visit(&workspace->ranks, units * shape.group * shape.cluster_capacity);
  visit(&workspace->rank_mass, units * splits.rank * shape.group);
  visit(&workspace->cluster_mass, units * shape.group);
  visit(&workspace->retrieved, units * shape.retrieve_capacity);
  visit(&workspace->blocks, units * kClusterBlocksMax * shape.retrieve_capacity);
  visit(&workspace->counts, units);
  visit(&workspace->partial_out, partials * shape.head_dim);
  visit(&workspace->partial_mass, partials);
}

uint32_t Units(const StepShape& shape) { return shape.batch * shape.kv_heads; }

}  // namespace

absl::Status ValidateShape(const StepShape& shape) {
  const auto refuse = [](const char* field, uint64_t found, const char* allowed) {
    return absl::InvalidArgumentError(absl::StrCat(field, " is ", found, "; allowed: ", allowed));
  };
  if (shape.batch == 0) return refuse("batch", shape.batch, "at least 1");
  if (shape.kv_heads == 0) return refuse("kv_heads", shape.kv_heads, "at least 1");
  if (uint64_t{shape.batch} * shape.kv_heads > 65535) {
    return refuse("batch * kv_heads", uint64_t{shape.batch} * shape.kv_heads, "at most 65535");
  }
  if (shape.group == 0 || shape.group > kGroupMax) return refuse("group", shape.group, "1 to 16");
  if (shape.head_dim != 64 && shape.head_dim != 128 && shape.head_dim != 256) {
    return refuse("head_dim", shape.head_dim, "64, 128 or 256");
  }
  if (shape.cluster_capacity % kClusterPad != 0) {
    return refuse("cluster_capacity", shape.cluster_capacity, "a multiple of 16");
  }
  if (shape.cluster_capacity > 0 && shape.segment_capacity == 0) {
    return refuse("segment_capacity", shape.segment_capacity,
                  "at least 1 where there are clusters");
  }
  if (shape.retrieve_capacity > kRetrieveMax) {
    return refuse("retrieve_capacity", shape.retrieve_capacity, "at most 16383");
  }
  StepSplits widest;
  widest.select = kSelectCtasMax;
  if (SelectSharedBytes(shape, widest) > kSelectSharedMax) {
    return refuse("cluster_capacity", shape.cluster_capacity, "at most 389120");
  }
  return absl::OkStatus();
}

StepSplits PlanSplits(const StepShape& shape, uint32_t sm_count) {
  const uint32_t units = Units(shape);
  // CTAs of a unit so that about `waves` of them are on each multiprocessor.
  const auto share = [&](double waves, uint32_t most) {
    const auto ctas = static_cast<uint32_t>(waves * sm_count / units + 0.999);
    return std::clamp(ctas, 1u, most);
  };
  StepSplits splits;
  splits.steady = share(0.3, 4);
  const uint32_t tiles = std::max(1u, shape.cluster_capacity / kClusterPad);
  // Five CTAs for each multiprocessor, the steady zone's among them, all at once.
  const uint32_t ranking = std::max(5 * sm_count / units, splits.steady + 1) - splits.steady;
  splits.rank = std::min({ranking, CeilDivide(tiles, kStepWarps), kRankSplitsMax});
  // 128 to 256 warps fill the bus; more get in each other's way. Where units are many each has a
  // CTA, but not all of its warps fetch; where they are few, as many as their blocks are worth.
  splits.misses = std::min(std::clamp(CeilDivide(sm_count, 4 * units), 1u, units < 8 ? 8u : 4u),
                           CeilDivide(shape.retrieve_capacity + 1, 32));
  splits.miss_warps = std::clamp(kMissWarpsMax / (units * splits.misses), 1u, uint32_t{kStepWarps});
  // Three CTAs for each multiprocessor, all at once, but some turns for each warp.
  const uint32_t ctas = std::clamp(3 * sm_count / 2 / units, 1u, 24u);
  splits.hits = std::min(ctas, CeilDivide(shape.retrieve_capacity + 1, 9));
  splits.estimate = std::min(ctas, CeilDivide(tiles, 8 * kStepWarps));
  // Exchanges between CTAs cost more than a thread's ranking of a few clusters.
  const uint32_t select = CeilDivide(shape.cluster_capacity, 16 * kSelectThreads);
  splits.select = std::min(RoundUpToPowerOfTwo(std::max(1u, select)), kSelectCtasMax);
  return splits;
}

size_t WorkspaceBytes(const StepShape& shape, const StepSplits& splits) {
  size_t bytes = 0;
  StepWorkspace none;
  VisitArrays(shape, splits, &none, [&](auto* array, size_t count) {
    bytes += (count * sizeof(**array) + kAlignment - 1) / kAlignment * kAlignment;
  });
  return bytes;
}

StepWorkspace LayOutWorkspace(const StepShape& shape, const StepSplits& splits, void* base) {
  StepWorkspace workspace;
  char* at = static_cast<char*>(base);
  VisitArrays(shape, splits, &workspace, [&](auto* array, size_t count) {
    *array = reinterpret_cast<std::remove_reference_t<decltype(*array)>>(at);
    at += (count * sizeof(**array) + kAlignment - 1) / kAlignment * kAlignment;
  });
  return workspace;
}

absl::Status LaunchBegin(const Step& step, GpuStream stream) {
  return LaunchKernel(FindKernels(step.shape).begin,
                      {.grid = dim3(Units(step.shape)), .threads = kBeginThreads}, step, stream);
}

absl::Status LaunchRank(const Step& step, GpuStream stream) {
  const StepKernels kernels = FindKernels(step.shape);
  return LaunchKernel(kernels.rank,
                      {.grid = dim3(step.splits.steady + step.splits.rank, Units(step.shape)),
                       .threads = kStepThreads,
                       .shared_bytes = kernels.rank_shared_bytes},
                      step, stream);
}

absl::Status LaunchSelect(const Step& step, GpuStream stream) {
  return LaunchKernel(reinterpret_cast<const void*>(&SelectKernel),
                      {.grid = dim3(step.splits.select, Units(step.shape)),
                       .threads = kSelectThreads,
                       .shared_bytes = SelectSharedBytes(step.shape, step.splits),
                       .cluster = step.splits.select},
                      step, stream);
}

absl::Status LaunchAttend(const Step& step, GpuStream stream) {
  const StepSplits& splits = step.splits;
  if (PartialCount(splits) > kPartialsMax) {
    return absl::InvalidArgumentError(absl::StrCat("splits make ", PartialCount(splits),
                                                   " partial results of a unit; allowed: at most ",
                                                   kPartialsMax));
  }
  const StepKernels kernels = FindKernels(step.shape);
  return LaunchKernel(
      kernels.attend,
      {.grid = dim3(Units(step.shape), splits.misses + splits.hits + splits.estimate),
       .threads = kStepThreads,
       .shared_bytes = kernels.attend_shared_bytes},
      step, stream);
}

absl::Status LaunchStep(const Step& step, GpuStream stream) {
  WAVEKV_RETURN_IF_ERROR(LaunchBegin(step, stream));
  WAVEKV_RETURN_IF_ERROR(LaunchRank(step, stream));
  WAVEKV_RETURN_IF_ERROR(LaunchSelect(step, stream));
  return LaunchAttend(step, stream);
}

}  // namespace wavekv::gpu
