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
constexpr uint32_t kSelectSharedMax = 190 * 1024;  // Leaves room for the static part.

StepKernels FindKernels(const StepShape& shape) {
  const uint32_t tiles = shape.group <= 8 ? 1 : 2;
  const bool bf16 = shape.element == Element::kBF16;
  switch (shape.head_dim) {
    case 64:
      return bf16 ? KernelsFor<__nv_bfloat16, 64>(tiles) : KernelsFor<__half, 64>(tiles);
    case 128:
      return bf16 ? KernelsFor<__nv_bfloat16, 128>(tiles) : KernelsFor<__half, 128>(tiles);
    default:
      return bf16 ? KernelsFor<__nv_bfloat16, 256>(tiles) : KernelsFor<__half, 256>(tiles);
  }
}

struct Launch {
  dim3 grid;
  int threads = 0;
  size_t shared_bytes = 0;
  uint32_t cluster = 1;
};

absl::Status LaunchKernel(const void* kernel, const Launch& launch, Step step, uint32_t first_unit,
                          GpuStream stream) {
  std::array<cudaLaunchAttribute, 1> attributes;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {launch.cluster, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = launch.grid;
  config.blockDim = dim3(launch.threads);
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = launch.cluster > 1 ? 1 : 0;
  void* arguments[] = {&step, &first_unit};
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
  visit(&workspace->chunk_mass, units * shape.chunk_capacity * shape.group);
  visit(&workspace->cluster_mass, units * shape.group);
  visit(&workspace->retrieved, units * shape.retrieve_capacity);
  visit(&workspace->blocks, units * kClusterBlocksMax * shape.retrieve_capacity);
  visit(&workspace->counts, units);
  visit(&workspace->partial_out, partials * shape.head_dim);
  visit(&workspace->partial_mass, partials);
}

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
  if (uint64_t{shape.chunk_capacity} * kChunkClusters < shape.cluster_capacity) {
    return refuse("chunk_capacity", shape.chunk_capacity, "at least cluster_capacity / 256");
  }
  if (shape.chunk_capacity > 0 && shape.segment_capacity == 0) {
    return refuse("segment_capacity", 0, "at least 1");
  }
  if (shape.retrieve_capacity > kRetrieveMax) {
    return refuse("retrieve_capacity", shape.retrieve_capacity, "at most 16383");
  }
  StepSplits widest;
  widest.select = kSelectCtasMax;
  if (SelectSharedBytes(shape, widest) > kSelectSharedMax) {
    return refuse("chunk_capacity", shape.chunk_capacity, "at most 1520");
  }
  return absl::OkStatus();
}

StepSplits PlanSplits(const StepShape& shape, uint32_t sm_count) {
  const uint32_t units = shape.batch * shape.kv_heads;
  // CTAs of a unit so that about `waves` of them are on each multiprocessor.
  const auto share = [&](double waves, uint32_t most) {
    const auto ctas = static_cast<uint32_t>(waves * sm_count / units + 0.999);
    return std::clamp(ctas, 1u, most);
  };
  StepSplits splits;
  splits.steady = share(0.5, 8);
  // A few warps keep the bus busy; more would only hold registers while they wait.
  splits.misses = share(0.5, 16);
  splits.hits = share(2, 16);
  splits.estimate = std::min(share(4, 32), std::max(1u, shape.chunk_capacity));
  // Exchanges between CTAs cost more than a thread's ranking of a few clusters.
  const uint32_t select = CeilDivide(shape.chunk_capacity * kChunkClusters, 16 * kSelectThreads);
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

absl::Status LaunchBegin(const Step& step, UnitRange units, GpuStream stream) {
  return LaunchKernel(FindKernels(step.shape).begin,
                      {.grid = dim3(units.count), .threads = kBeginThreads}, step, units.first,
                      stream);
}

absl::Status LaunchRank(const Step& step, UnitRange units, GpuStream stream) {
  const dim3 grid(step.splits.steady + step.shape.chunk_capacity, units.count);
  return LaunchKernel(FindKernels(step.shape).rank, {.grid = grid, .threads = kStepThreads}, step,
                      units.first, stream);
}

absl::Status LaunchSelect(const Step& step, UnitRange units, GpuStream stream) {
  const auto* kernel = reinterpret_cast<const void*>(&SelectKernel);
  const size_t shared_bytes = SelectSharedBytes(step.shape, step.splits);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
  return LaunchKernel(kernel,
                      {.grid = dim3(step.splits.select, units.count),
                       .threads = kSelectThreads,
                       .shared_bytes = shared_bytes,
                       .cluster = step.splits.select},
                      step, units.first, stream);
}

absl::Status LaunchAttend(const Step& step, UnitRange units, GpuStream stream) {
  const StepSplits& splits = step.splits;
  if (PartialCount(splits) > kPartialsMax) {
    return absl::InvalidArgumentError(absl::StrCat("splits make ", PartialCount(splits),
                                                   " partial results of a unit; allowed: at most ",
                                                   kPartialsMax));
  }
  const dim3 grid(units.count, splits.misses + splits.hits + splits.estimate);
  return LaunchKernel(FindKernels(step.shape).attend, {.grid = grid, .threads = kStepThreads}, step,
                      units.first, stream);
}

absl::Status LaunchStep(const Step& step, const StepPipeline& pipeline, GpuStream stream) {
  const uint32_t units = step.shape.batch * step.shape.kv_heads;
  const uint32_t ahead = pipeline.side == nullptr ? 0 : std::min(pipeline.first_units, units);
  WAVEKV_RETURN_IF_ERROR(LaunchBegin(step, {0, units}, stream));
  if (ahead == 0 || ahead == units) {
    WAVEKV_RETURN_IF_ERROR(LaunchRank(step, {0, units}, stream));
    WAVEKV_RETURN_IF_ERROR(LaunchSelect(step, {0, units}, stream));
    return LaunchAttend(step, {0, units}, stream);
  }
  const UnitRange first = {0, ahead}, rest = {ahead, units - ahead};
  WAVEKV_RETURN_IF_ERROR(LaunchRank(step, first, stream));
  WAVEKV_RETURN_IF_ERROR(LaunchSelect(step, first, stream));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(pipeline.selected, stream));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(pipeline.side, pipeline.selected));
  WAVEKV_RETURN_IF_ERROR(LaunchAttend(step, first, pipeline.side));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(pipeline.attended, pipeline.side));
  WAVEKV_RETURN_IF_ERROR(LaunchRank(step, rest, stream));
  WAVEKV_RETURN_IF_ERROR(LaunchSelect(step, rest, stream));
  WAVEKV_RETURN_IF_ERROR(LaunchAttend(step, rest, stream));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(stream, pipeline.attended));
  return absl::OkStatus();
}

}  // namespace wavekv::gpu
