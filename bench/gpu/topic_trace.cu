#include <cuda_bf16.h>

#include "bench/gpu/topic_trace.h"
#include "gpu/kernels/cuda_status.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kSegmentTokens = 8192;
constexpr uint32_t kTopics = 256;
constexpr uint32_t kTokensPerTopic = 4;
constexpr uint32_t kTopicSteps = 50;
constexpr float kNoise = 0.5f, kDecay = 0.98f, kShared = 0.8f, kTopicWeight = 0.2f, kScale = 3.5f;

enum Stream : uint64_t { kTopicRows, kTopicChoice, kKeyNoise, kHeadMean, kValues, kQuery, kTarget };

__device__ uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

__device__ uint64_t Hash(uint64_t seed, Stream stream, uint64_t a, uint64_t b = 0, uint64_t c = 0) {
  return Mix(Mix(Mix(Mix(seed * 16 + stream) ^ a) ^ b) ^ c);
}

// Two independent N(0, 1).
__device__ float2 Normals(uint64_t bits) {
  const float u = (static_cast<uint32_t>(bits) + 0.5f) * 0x1p-32f;
  const float v = static_cast<uint32_t>(bits >> 32) * 0x1p-32f;
  const float radius = sqrtf(-2 * __logf(fminf(u, 1 - 0x1p-24f)));
  float sine, cosine;
  __sincosf(6.283185307f * v, &sine, &cosine);
  return {radius * cosine, radius * sine};
}

__device__ float2 Topic(uint64_t seed, uint32_t unit, uint32_t segment, uint32_t topic,
                        uint32_t pair) {
  return Normals(Hash(seed, kTopicRows, unit, uint64_t{segment} * kTopics + topic, pair));
}

__global__ void RowsKernel(TraceShape shape, __nv_bfloat162* keys, __nv_bfloat162* values) {
  const uint32_t pairs = shape.head_dim / 2;
  const uint64_t count = uint64_t{shape.units} * shape.tokens * pairs;
  for (uint64_t i = blockIdx.x * uint64_t{blockDim.x} + threadIdx.x; i < count;
       i += uint64_t{gridDim.x} * blockDim.x) {
    const uint32_t pair = i % pairs, token = i / pairs % shape.tokens;
    const uint32_t unit = i / pairs / shape.tokens;
    const uint32_t topic = Hash(shape.seed, kTopicChoice, unit, token / kTokensPerTopic) % kTopics;
    const float2 centre = Topic(shape.seed, unit, token / kSegmentTokens, topic, pair);
    const float2 noise = Normals(Hash(shape.seed, kKeyNoise, i));
    const float2 mean = Normals(Hash(shape.seed, kHeadMean, unit, pair));
    const float2 value = Normals(Hash(shape.seed, kValues, i));
    keys[i] = __floats2bfloat162_rn(centre.x + kNoise * noise.x + mean.x,
                                    centre.y + kNoise * noise.y + mean.y);
    values[i] = __floats2bfloat162_rn(value.x, value.y);
  }
}

// One CTA a unit; state row 0 is shared by the group.
__global__ void QueriesKernel(TraceShape shape, uint32_t stream_idx, uint32_t step_idx,
                              float2* state, __nv_bfloat162* queries) {
  const uint32_t pairs = shape.head_dim / 2, unit = blockIdx.x;
  const uint64_t place = uint64_t{stream_idx} * shape.units + unit;
  // The last step at which the topic changed.
  uint32_t changed = step_idx;
  while (changed > 0 && Hash(shape.seed, kTarget, place, changed, 1) % kTopicSteps != 0) --changed;
  const uint64_t choice = Hash(shape.seed, kTarget, place, changed, 0);
  const uint32_t segments = (shape.tokens + kSegmentTokens - 1) / kSegmentTokens;
  const uint32_t segment = choice / kTopics % segments, topic = choice % kTopics;
  const float fresh = step_idx == 0 ? 1 : sqrtf(1 - kDecay * kDecay);
  const float decay = step_idx == 0 ? 0 : kDecay;
  for (uint32_t i = threadIdx.x; i < (shape.group + 1) * pairs; i += blockDim.x) {
    const float2 noise = Normals(Hash(shape.seed, kQuery, place, step_idx, i));
    float2& s = state[uint64_t{unit} * (shape.group + 1) * pairs + i];
    s = {decay * s.x + fresh * noise.x, decay * s.y + fresh * noise.y};
  }
  __syncthreads();
  const float common = sqrtf(kShared), own = sqrtf(1 - kShared);
  const float scale = kScale * rsqrtf(1 + kTopicWeight * kTopicWeight);
  const float2* unit_state = state + uint64_t{unit} * (shape.group + 1) * pairs;
  for (uint32_t i = threadIdx.x; i < shape.group * pairs; i += blockDim.x) {
    const uint32_t pair = i % pairs;
    const float2 a = unit_state[pair], b = unit_state[pairs + i];
    const float2 target = Topic(shape.seed, unit, segment, topic, pair);
    queries[uint64_t{unit} * shape.group * pairs + i] =
        __floats2bfloat162_rn(scale * (common * a.x + own * b.x + kTopicWeight * target.x),
                              scale * (common * a.y + own * b.y + kTopicWeight * target.y));
  }
}

}  // namespace

absl::Status MakeTraceRows(const TraceShape& shape, void* keys, void* values,
                           gpu::GpuStream stream) {
  RowsKernel<<<4096, 256, 0, stream>>>(shape, static_cast<__nv_bfloat162*>(keys),
                                       static_cast<__nv_bfloat162*>(values));
  return gpu::CudaStatus(cudaGetLastError(), "RowsKernel");
}

absl::Status AdvanceTraceQueries(const TraceShape& shape, uint32_t stream_idx, uint32_t step_idx,
                                 float* state, void* queries, gpu::GpuStream stream) {
  QueriesKernel<<<shape.units, 128, 0, stream>>>(shape, stream_idx, step_idx,
                                                 reinterpret_cast<float2*>(state),
                                                 static_cast<__nv_bfloat162*>(queries));
  return gpu::CudaStatus(cudaGetLastError(), "QueriesKernel");
}

}  // namespace wavekv::bench
