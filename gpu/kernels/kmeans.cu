#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "absl/strings/str_cat.h"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/kmeans.cuh"

namespace wavekv::gpu {
namespace {

template <typename T, int kDim>
absl::Status Launch(const KMeansTask* tasks, const KMeansShape& shape, GpuStream stream) {
  using Assign = Assigner<T, kDim>;
  const auto assign = &KMeansAssignKernel<T, kDim>;
  constexpr int kSharedBytes = sizeof(typename Assign::Shared);
  WAVEKV_CUDA_RETURN_IF_ERROR(
      cudaFuncSetAttribute(assign, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
  const dim3 assign_grid((shape.token_count_max + Assign::kTokens - 1) / Assign::kTokens,
                         shape.task_count);
  const dim3 update_grid(kUpdateCtas, shape.task_count);
  KMeansInitKernel<T, kDim><<<shape.task_count, kInitThreads, 0, stream>>>(tasks);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  for (uint32_t i = 0; i < shape.iterations; ++i) {
    assign<<<assign_grid, kAssignThreads, kSharedBytes, stream>>>(tasks);
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
    if (i + 1 == shape.iterations) break;
    KMeansUpdateKernel<T, kDim><<<update_grid, kUpdateThreads, 0, stream>>>(tasks);
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGetLastError());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status LaunchKMeans(const KMeansTask* tasks, const KMeansShape& shape, GpuStream stream) {
  if (shape.task_count == 0) return absl::OkStatus();
  if (shape.task_count > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("task_count is ", shape.task_count, "; allowed: at most 65535"));
  }
  if (shape.token_count_max > kSegmentTokensMax) {
    return absl::InvalidArgumentError(absl::StrCat("token_count_max is ", shape.token_count_max,
                                                   "; allowed: at most ", kSegmentTokensMax));
  }
  const bool bf16 = shape.element == Element::kBF16;
  switch (shape.head_dim) {
    case 64:
      return bf16 ? Launch<__nv_bfloat16, 64>(tasks, shape, stream)
                  : Launch<__half, 64>(tasks, shape, stream);
    case 128:
      return bf16 ? Launch<__nv_bfloat16, 128>(tasks, shape, stream)
                  : Launch<__half, 128>(tasks, shape, stream);
    case 256:
      return bf16 ? Launch<__nv_bfloat16, 256>(tasks, shape, stream)
                  : Launch<__half, 256>(tasks, shape, stream);
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("head_dim is ", shape.head_dim, "; allowed: 64, 128 or 256"));
  }
}

}  // namespace wavekv::gpu
