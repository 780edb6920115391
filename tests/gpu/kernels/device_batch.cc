#include "tests/gpu/kernels/device_batch.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include "storage/base/status_macros.h"

namespace wavekv::gpu {
namespace {

template <typename T>
absl::Status CopyTo(DeviceArray<T>* target, const std::vector<T>& source) {
  WAVEKV_ASSIGN_OR_RETURN(*target, DeviceArray<T>::Copy(source));
  return absl::OkStatus();
}

void Append(const std::vector<float>& from, std::vector<float>* to) {
  to->insert(to->end(), from.begin(), from.end());
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceHead>> DeviceHead::Make(const HeadProblem& head,
                                                             const CacheSpec& cache,
                                                             std::mt19937_64& random) {
  auto made = std::make_unique<DeviceHead>();
  WAVEKV_RETURN_IF_ERROR(made->UploadIndex(head));
  WAVEKV_RETURN_IF_ERROR(made->UploadPool(head));
  WAVEKV_RETURN_IF_ERROR(made->UploadCache(head, cache, random));
  return made;
}

absl::Status DeviceHead::UploadIndex(const HeadProblem& head) {
  WAVEKV_RETURN_IF_ERROR(CopyTo(&sink_keys_, head.sink_keys));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&sink_values_, head.sink_values));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&steady_keys_, head.steady_keys));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&steady_values_, head.steady_values));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&centroids_, head.centroids));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&value_means_, head.value_means));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&centroid_scales_, head.centroid_scales));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&value_scales_, head.value_scales));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&key_spreads_, head.key_spreads));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&value_spreads_, head.value_spreads));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&sizes_, head.sizes));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&cluster_segment_, head.cluster_segment));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&first_row_, head.first_row));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&first_block_, head.first_block));
  HeadDescriptor& d = descriptor_;
  d.sink_keys = sink_keys_.data();
  d.sink_values = sink_values_.data();
  d.steady_keys = steady_keys_.data();
  d.steady_values = steady_values_.data();
  d.centroids = centroids_.data();
  d.value_means = value_means_.data();
  d.centroid_scales = centroid_scales_.data();
  d.value_scales = value_scales_.data();
  d.key_spreads = key_spreads_.data();
  d.value_spreads = value_spreads_.data();
  d.sizes = sizes_.data();
  d.cluster_segment = cluster_segment_.data();
  d.first_row = first_row_.data();
  d.first_block = first_block_.data();
  d.steady_first = head.spec.steady_first;
  d.steady_capacity = head.spec.steady_capacity;
  d.sink_count = head.spec.sinks;
  d.cluster_count = head.cluster_count();
  d.segment_count = static_cast<uint32_t>(head.segments.size());
  d.block_count = head.block_count;
  d.retrieve_count = std::min(head.spec.retrieve, head.real_clusters);
  d.value_scale_max = 0;
  for (uint32_t c = 0; c < head.cluster_count(); ++c) {
    if (head.sizes[c] > 0) d.value_scale_max = std::max(d.value_scale_max, head.value_scales[c]);
  }
  return absl::OkStatus();
}

absl::Status DeviceHead::UploadPool(const HeadProblem& head) {
  size_t rows = 0;
  std::vector<float> means;
  for (const SegmentArrays& segment : head.segments) {
    rows += segment.keys.size() + segment.values.size();
    Append(segment.key_mean, &means);
    Append(segment.value_mean, &means);
    Append(segment.spread_share, &means);
  }
  WAVEKV_RETURN_IF_ERROR(CopyTo(&means_, means));
  WAVEKV_ASSIGN_OR_RETURN(pool_, PinnedArray<uint16_t>::Make(rows));
  std::vector<SegmentCopy> copies;
  uint16_t* at = pool_.data();
  const float* mean = means_.data();
  for (const SegmentArrays& segment : head.segments) {
    SegmentCopy copy;
    copy.keys = at;
    at = std::copy(segment.keys.begin(), segment.keys.end(), at);
    copy.values = at;
    at = std::copy(segment.values.begin(), segment.values.end(), at);
    copy.key_mean = mean;
    copy.value_mean = mean + head.dim;
    copy.spread_share = mean + 2 * head.dim;
    copy.row_count = static_cast<uint32_t>(segment.keys.size() / head.dim);
    mean += 3 * head.dim;
    copies.push_back(copy);
  }
  WAVEKV_RETURN_IF_ERROR(CopyTo(&segments_, copies));
  descriptor_.segments = segments_.data();
  return absl::OkStatus();
}

absl::Status DeviceHead::UploadCache(const HeadProblem& head, const CacheSpec& cache,
                                     std::mt19937_64& random) {
  std::uniform_real_distribution<double> uniform;
  std::vector<uint32_t> order(2 * head.block_count);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), random);
  const auto slot_count = static_cast<uint32_t>(order.size());
  const size_t row = head.dim;
  std::vector<uint16_t> slots(size_t{slot_count} * 2 * kBlockRows * row);
  std::vector<int32_t> table(head.block_count, -1);
  uint32_t misses = 0;
  for (uint32_t c = 0; c < head.cluster_count(); ++c) {
    const SegmentArrays& segment = head.segments[head.cluster_segment[c]];
    for (uint32_t first = 0, block = head.first_block[c]; first < head.sizes[c];
         first += kBlockRows, ++block) {
      if (uniform(random) >= cache.cached) {
        ++misses;
        if (cache.hostile) table[block] = random() % 2 == 0 ? -7 : static_cast<int32_t>(slot_count);
        continue;
      }
      table[block] = static_cast<int32_t>(order.back());
      order.pop_back();
      uint16_t* slot = &slots[size_t(table[block]) * 2 * kBlockRows * row];
      const size_t rows = std::min<size_t>(kBlockRows, head.sizes[c] - first);
      const size_t from = (size_t{head.first_row[c]} + first) * row;
      std::copy_n(segment.keys.begin() + from, rows * row, slot);
      std::copy_n(segment.values.begin() + from, rows * row, slot + kBlockRows * row);
    }
  }
  const size_t free_count = std::min<size_t>(order.size(), cache.free_per_miss * misses);
  HeadState state = {};
  state.appended = head.spec.steady_first + head.spec.steady;
  state.free_head = 0xfffffff0u;  // Passes 2^32 within the test.
  state.free_seen = state.free_head;
  state.free_tail = state.free_head + free_count;
  std::vector<FreeSlot> free_slots(slot_count);
  for (size_t i = 0; i < free_count; ++i) {
    free_slots[(state.free_head + i) % slot_count] = {order[i], kNoBlock};
  }
  if (cache.hostile && free_count > 0) {
    free_slots[(state.free_tail - 1) % slot_count] = {slot_count + 5, head.block_count + 1};
  }
  WAVEKV_RETURN_IF_ERROR(CopyTo(&slots_, slots));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&block_slots_, table));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&free_slots_, free_slots));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&log_, std::vector<BlockUse>(4 * head.block_count + 1)));
  WAVEKV_RETURN_IF_ERROR(CopyTo(&state_, std::vector<HeadState>{state}));
  HeadDescriptor& d = descriptor_;
  d.block_slots = block_slots_.data();
  d.slots = slots_.data();
  d.free_slots = free_slots_.data();
  d.log = log_.data();
  d.state = state_.data();
  d.slot_count = slot_count;
  d.free_capacity = static_cast<uint32_t>(free_slots.size());
  d.log_capacity = static_cast<uint32_t>(log_.size());
  return absl::OkStatus();
}

absl::StatusOr<HeadState> DeviceHead::State() const {
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<HeadState> state, state_.Download());
  return state[0];
}

absl::Status DeviceHead::OfferCached(double share, std::mt19937_64& random) {
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<int32_t> table, BlockSlots());
  WAVEKV_ASSIGN_OR_RETURN(std::vector<FreeSlot> ring, FreeSlots());
  WAVEKV_ASSIGN_OR_RETURN(HeadState state, State());
  std::vector<FreeSlot> offers;
  for (uint32_t block = 0; block < table.size(); ++block) {
    if (table[block] >= 0) offers.push_back({static_cast<uint32_t>(table[block]), block});
  }
  std::shuffle(offers.begin(), offers.end(), random);
  offers.resize(static_cast<size_t>(share * static_cast<double>(offers.size())));
  for (const FreeSlot& offer : offers) ring[state.free_tail++ % ring.size()] = offer;
  WAVEKV_RETURN_IF_ERROR(free_slots_.Upload(ring));
  return state_.Upload({&state, 1});
}

absl::StatusOr<std::unique_ptr<DeviceBatch>> DeviceBatch::Make(const StepShape& shape,
                                                               std::span<const HeadProblem> heads,
                                                               const std::vector<bool>& present,
                                                               const CacheSpec& cache,
                                                               std::mt19937_64& random) {
  auto batch = std::make_unique<DeviceBatch>();
  std::vector<HeadDescriptor> descriptors;
  for (const HeadProblem& head : heads) {
    WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<DeviceHead> made,
                            DeviceHead::Make(head, cache, random));
    descriptors.push_back(made->descriptor());
    batch->heads_.push_back(std::move(made));
  }
  WAVEKV_RETURN_IF_ERROR(CopyTo(&batch->descriptors_, descriptors));
  for (uint32_t s = 0; s < shape.batch; ++s) {
    batch->live_host_.push_back(
        {2, 0, present[s] ? batch->descriptors_.data() + s * shape.kv_heads : nullptr});
  }
  WAVEKV_RETURN_IF_ERROR(CopyTo(&batch->live_, batch->live_host_));
  const size_t units = heads.size();
  const size_t row_elements = units * shape.group * shape.head_dim;
  WAVEKV_ASSIGN_OR_RETURN(batch->queries_, DeviceArray<uint16_t>::Make(row_elements));
  WAVEKV_ASSIGN_OR_RETURN(batch->out_, DeviceArray<uint16_t>::Make(row_elements));
  WAVEKV_ASSIGN_OR_RETURN(batch->new_keys_, DeviceArray<uint16_t>::Make(units * shape.head_dim));
  WAVEKV_ASSIGN_OR_RETURN(batch->new_values_, DeviceArray<uint16_t>::Make(units * shape.head_dim));
  WAVEKV_ASSIGN_OR_RETURN(batch->lse_, DeviceArray<float>::Make(units * shape.group));
  Step& step = batch->step_;
  step.shape = shape;
  int sm_count = 0;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
  step.splits = PlanSplits(shape, sm_count);
  WAVEKV_ASSIGN_OR_RETURN(batch->workspace_,
                          DeviceArray<char>::Make(WorkspaceBytes(shape, step.splits)));
  step.workspace = LayOutWorkspace(shape, step.splits, batch->workspace_.data());
  step.inputs = {batch->live_.data(), batch->queries_.data(), nullptr, nullptr,
                 batch->out_.data(),  batch->lse_.data()};
  return batch;
}

absl::Status DeviceBatch::SetInputs(const std::vector<uint16_t>& queries,
                                    const std::vector<uint16_t>& keys,
                                    const std::vector<uint16_t>& values) {
  WAVEKV_RETURN_IF_ERROR(queries_.Upload(queries));
  step_.inputs.new_keys = keys.empty() ? nullptr : new_keys_.data();
  step_.inputs.new_values = keys.empty() ? nullptr : new_values_.data();
  if (keys.empty()) return absl::OkStatus();
  WAVEKV_RETURN_IF_ERROR(new_keys_.Upload(keys));
  return new_values_.Upload(values);
}

absl::Status DeviceBatch::SetVersion(uint32_t sequence, uint32_t version) {
  live_host_[sequence].version = version;
  return live_.Upload(live_host_);
}

absl::Status DeviceBatch::Execute(bool graph) {
  cudaStream_t stream;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  if (graph) {
    cudaGraph_t captured;
    cudaGraphExec_t executable;
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    WAVEKV_RETURN_IF_ERROR(LaunchStep(step_, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(stream, &captured));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&executable, captured, 0));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(executable, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphExecDestroy(executable));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphDestroy(captured));
  } else {
    WAVEKV_RETURN_IF_ERROR(LaunchStep(step_, stream));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream));
  }
  return CudaStatus(cudaStreamDestroy(stream), "cudaStreamDestroy");
}

absl::StatusOr<StepResults> DeviceBatch::Run(bool graph) {
  WAVEKV_RETURN_IF_ERROR(out_.Upload(std::vector<uint16_t>(out_.size(), 0x7fff)));
  WAVEKV_RETURN_IF_ERROR(
      lse_.Upload(std::vector<float>(lse_.size(), std::numeric_limits<float>::quiet_NaN())));
  WAVEKV_RETURN_IF_ERROR(Execute(graph));
  StepResults results;
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<uint16_t> bits, out_.Download());
  for (const uint16_t x : bits) results.out.push_back(FromBits(step_.shape.element, x));
  WAVEKV_ASSIGN_OR_RETURN(results.lse, lse_.Download());
  const size_t units = heads_.size();
  results.counts.resize(units);
  results.blocks.resize(units * kClusterBlocksMax * step_.shape.retrieve_capacity);
  std::vector<uint32_t> lists(units * step_.shape.retrieve_capacity);
  const auto download = [](auto* target, const auto* source) {
    return CudaStatus(cudaMemcpy(target->data(), source, target->size() * sizeof(*target->data()),
                                 cudaMemcpyDefault),
                      "cudaMemcpy");
  };
  WAVEKV_RETURN_IF_ERROR(download(&results.counts, step_.workspace.counts));
  WAVEKV_RETURN_IF_ERROR(download(&results.blocks, step_.workspace.blocks));
  WAVEKV_RETURN_IF_ERROR(download(&lists, step_.workspace.retrieved));
  for (size_t unit = 0; unit < units; ++unit) {
    const auto first = lists.begin() + unit * step_.shape.retrieve_capacity;
    results.retrieved.emplace_back(first, first + results.counts[unit].retrieved);
  }
  return results;
}

}  // namespace wavekv::gpu
