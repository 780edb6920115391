#include <cuda_runtime.h>

#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/resolve.h"

namespace wavekv::gpu {
namespace {

constexpr int kResolveThreads = 128;
static_assert(kHeadWords <= kResolveThreads);

// The host polls: it hears of what has changed only, as each word crosses the bus.
__device__ void Report(const Resolve& resolve, uint32_t unit, uint32_t outcome) {
  const uint32_t reported = resolve.reported[unit];
  // What went wrong stays until the entry is another: the host does not look after every token.
  const bool failed = static_cast<ResolveCode>(reported & 0xff) > ResolveCode::kOk;
  if (reported == outcome || (failed && reported >> 8 == outcome >> 8)) return;
  resolve.reported[unit] = outcome;
  *const_cast<volatile uint32_t*>(resolve.outcomes + unit) = outcome;
}

// A CTA a unit: one thread resolves the head, all of them its segments.
__global__ void __launch_bounds__(kResolveThreads)
    ResolveKernel(const __grid_constant__ Resolve resolve) {
  __shared__ HeadDescriptor head;
  __shared__ SegmentSource source;
  const ResolveShape& shape = resolve.shape;
  const uint32_t unit = blockIdx.x, kv_head = unit % shape.kv_heads;
  const uint32_t layer = unit / shape.kv_heads / resolve.batch;
  const ResolveEntry& entry = resolve.entries[unit / shape.kv_heads % resolve.batch];
  SegmentCopy* segments = resolve.segments + size_t{unit} * shape.segment_capacity;
  if (threadIdx.x == 0) {
    const ResolvedHead resolved = ResolveHead(entry, shape, layer * shape.kv_heads + kv_head);
    head = resolved.head;
    head.segments = segments;
    source = resolved.segments;
    Report(resolve, unit, PackOutcome(entry.tag, resolved.code));
  }
  __syncthreads();
  for (uint32_t i = threadIdx.x; i < source.count; i += kResolveThreads) {
    segments[i] = DescribeSegment(source, entry, shape.head_dim, i);
  }
  if (threadIdx.x < kHeadWords) {
    reinterpret_cast<uint64_t*>(resolve.heads + unit)[threadIdx.x] =
        reinterpret_cast<const uint64_t*>(&head)[threadIdx.x];
  }
}

__global__ void SetEntryKernel(ResolveEntry* target, const __grid_constant__ ResolveEntry entry) {
  *target = entry;
}

}  // namespace

absl::Status LaunchResolve(const Resolve& resolve, GpuStream stream) {
  ResolveKernel<<<UnitCount(resolve), kResolveThreads, 0, stream>>>(resolve);
  return CudaStatus(cudaGetLastError(), "ResolveKernel");
}

absl::Status LaunchSetEntry(ResolveEntry* entries, uint32_t index, const ResolveEntry& entry,
                            GpuStream stream) {
  SetEntryKernel<<<1, 1, 0, stream>>>(entries + index, entry);
  return CudaStatus(cudaGetLastError(), "SetEntryKernel");
}

}  // namespace wavekv::gpu
