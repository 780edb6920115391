#include "client/gpu/key_labeller.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "client/gpu/device_guard.h"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/kmeans.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// Clustered at the same time: more would fill no GPU better, and each has a workspace.
constexpr size_t kTasksAtATime = 128;

class Event {
 public:
  ~Event() {
    if (event_ != nullptr) (void)cudaEventDestroy(event_);
  }
  Event() = default;
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  absl::Status Create() {
    // Who waits for it lets the CPU go.
    return gpu::CudaStatus(
        cudaEventCreateWithFlags(&event_, cudaEventDisableTiming | cudaEventBlockingSync),
        "cudaEventCreateWithFlags");
  }
  cudaEvent_t get() const { return event_; }
  // Whether the device has come so far, or failed on the way. That it has not is no error, and CUDA
  // would keep it as the last one for whoever launches next.
  bool Passed() const {
    if (cudaEventQuery(event_) != cudaErrorNotReady) return true;
    (void)cudaGetLastError();
    return false;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Makes `array` hold `size` elements at least.
template <typename Array>
absl::Status Grow(size_t size, Array* array) {
  if (array->size() >= size) return absl::OkStatus();
  *array = Array();  // Not both at a time.
  WAVEKV_ASSIGN_OR_RETURN(*array, Array::Make(size));
  return absl::OkStatus();
}

// What a launch works with, on one device.
struct Block {
  int device = 0;
  gpu::DeviceArray<gpu::KMeansTask> tasks;
  gpu::DeviceArray<float> means, offsets;
  gpu::DeviceArray<uint16_t> centroids, labels;
  gpu::PinnedArray<gpu::KMeansTask> host_tasks;
  gpu::PinnedArray<uint16_t> host_labels;
  Event done;  // Its labels are in host_labels.
};

}  // namespace

struct KeyLabeller::Impl {
  Impl(uint32_t heads, uint32_t dim, DType keys_dtype)
      : kv_head_count(heads), head_dim(dim), dtype(keys_dtype) {}

  // A block of the device that no kernel uses any more, of any size.
  absl::StatusOr<std::unique_ptr<Block>> Acquire(int device);
  void Release(std::unique_ptr<Block> block);
  // Makes room in the block for so many tasks and labels.
  absl::Status Reserve(size_t task_count, size_t label_count, Block* block) const;
  absl::Status Queue(const DeviceKeys& keys, std::span<const PlannedSegment> segments,
                     CudaStream stream, Block* block) const;

  const uint32_t kv_head_count;
  const uint32_t head_dim;
  const DType dtype;  // kBF16 or kF16.
  Mutex mutex;
  std::vector<std::unique_ptr<Block>> free ABSL_GUARDED_BY(mutex);
  size_t lent ABSL_GUARDED_BY(mutex) = 0;
};

struct KeyLabels::Impl {
  Impl(std::shared_ptr<KeyLabeller::Impl> labeller_impl, std::vector<PlannedSegment> taken)
      : labeller(std::move(labeller_impl)), segments(std::move(taken)) {}
  ~Impl() {
    if (block != nullptr) labeller->Release(std::move(block));
  }

  const std::shared_ptr<KeyLabeller::Impl> labeller;
  const std::vector<PlannedSegment> segments;
  std::unique_ptr<Block> block;  // Null without segments.
};

KeyLabels::KeyLabels(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KeyLabels::~KeyLabels() = default;

size_t KeyLabels::segment_count() const { return impl_->segments.size(); }

bool KeyLabels::Ready() const { return impl_->block == nullptr || impl_->block->done.Passed(); }

absl::StatusOr<std::vector<SegmentLabels>> KeyLabels::Wait() const {
  std::vector<SegmentLabels> labels;
  if (impl_->block == nullptr) return labels;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventSynchronize(impl_->block->done.get()));
  std::span<const uint16_t> left = impl_->block->host_labels.span();
  for (const PlannedSegment& segment : impl_->segments) {
    const size_t count = size_t{impl_->labeller->kv_head_count} * segment.token_count;
    labels.push_back({segment.first_position, segment.token_count, left.first(count)});
    left = left.subspan(count);
  }
  return labels;
}

absl::StatusOr<std::unique_ptr<Block>> KeyLabeller::Impl::Acquire(int device) {
  {
    MutexLock lock(&mutex);
    if (lent == kLaunchesMax) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "the labels of ", kLaunchesMax, " launches are held; take those and let go of them"));
    }
    for (auto block = free.begin(); block != free.end(); ++block) {
      // One whose labels were let go of before they came is not to be had yet.
      if ((*block)->device != device || !(*block)->done.Passed()) continue;
      std::unique_ptr<Block> found = std::move(*block);
      free.erase(block);
      ++lent;
      return found;
    }
    ++lent;
  }
  auto block = std::make_unique<Block>();
  block->device = device;
  const absl::Status created = block->done.Create();
  if (created.ok()) return block;
  MutexLock lock(&mutex);
  --lent;
  return created;
}

void KeyLabeller::Impl::Release(std::unique_ptr<Block> block) {
  MutexLock lock(&mutex);
  --lent;
  free.push_back(std::move(block));
}

absl::Status KeyLabeller::Impl::Reserve(size_t task_count, size_t label_count, Block* block) const {
  const size_t at_a_time = std::min(task_count, kTasksAtATime);
  WAVEKV_RETURN_IF_ERROR(Grow(task_count, &block->tasks));
  WAVEKV_RETURN_IF_ERROR(Grow(task_count, &block->host_tasks));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * head_dim, &block->means));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * gpu::kCentroidsMax, &block->offsets));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * gpu::kCentroidsMax * head_dim, &block->centroids));
  WAVEKV_RETURN_IF_ERROR(Grow(label_count, &block->labels));
  return Grow(label_count, &block->host_labels);
}

absl::Status KeyLabeller::Impl::Queue(const DeviceKeys& keys,
                                      std::span<const PlannedSegment> segments, CudaStream stream,
                                      Block* block) const {
  size_t label_count = 0;
  for (const PlannedSegment& segment : segments) {
    label_count += size_t{kv_head_count} * segment.token_count;
  }
  const size_t task_count = segments.size() * kv_head_count;
  WAVEKV_RETURN_IF_ERROR(Reserve(task_count, label_count, block));
  const auto* data = static_cast<const uint16_t*>(keys.data);  // Elements have 16 bits.
  uint16_t* labels = block->labels.data();
  size_t task = 0;
  for (const PlannedSegment& segment : segments) {
    const uint64_t row = segment.first_position - keys.first_position;
    for (uint32_t head = 0; head < kv_head_count; ++head, ++task) {
      const size_t place = task % kTasksAtATime;
      block->host_tasks.span()[task] = {
          .keys = data + head * keys.head_stride + row * keys.token_stride,
          .key_stride = static_cast<uint32_t>(keys.token_stride),
          .token_count = segment.token_count,
          .centroid_count = segment.cluster_count,
          .mean = block->means.data() + place * head_dim,
          .centroids = block->centroids.data() + place * gpu::kCentroidsMax * head_dim,
          .offsets = block->offsets.data() + place * gpu::kCentroidsMax,
          .labels = labels};
      labels += segment.token_count;
    }
  }
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(block->tasks.data(), block->host_tasks.data(),
                                              task_count * sizeof(gpu::KMeansTask),
                                              cudaMemcpyHostToDevice, stream));
  for (size_t first = 0; first < task_count; first += kTasksAtATime) {
    gpu::KMeansShape shape{
        .task_count = static_cast<uint32_t>(std::min(kTasksAtATime, task_count - first)),
        .head_dim = head_dim,
        .element = dtype == DType::kBF16 ? gpu::Element::kBF16 : gpu::Element::kF16};
    for (size_t i = first; i < first + shape.task_count; ++i) {
      shape.token_count_max =
          std::max(shape.token_count_max, block->host_tasks.span()[i].token_count);
    }
    WAVEKV_RETURN_IF_ERROR(gpu::LaunchKMeans(block->tasks.data() + first, shape, stream));
  }
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(block->host_labels.data(), block->labels.data(),
                                              label_count * sizeof(uint16_t),
                                              cudaMemcpyDeviceToHost, stream));
  return gpu::CudaStatus(cudaEventRecord(block->done.get(), stream), "cudaEventRecord");
}

KeyLabeller::KeyLabeller(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
KeyLabeller::~KeyLabeller() = default;

absl::StatusOr<std::unique_ptr<KeyLabeller>> KeyLabeller::Create(uint32_t kv_head_count,
                                                                 uint32_t head_dim, DType dtype) {
  if (head_dim != 64 && head_dim != 128 && head_dim != 256) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", head_dim, ", expected 64, 128 or 256"));
  }
  if (dtype != DType::kBF16 && dtype != DType::kF16) {
    const std::string_view name = DTypeName(dtype);
    return absl::InvalidArgumentError(absl::StrCat(
        "dtype is ", absl::string_view(name.data(), name.size()), ", expected bf16 or f16"));
  }
  if (kv_head_count == 0) return absl::InvalidArgumentError("kv_heads is 0, expected 1 or more");
  return std::unique_ptr<KeyLabeller>(
      new KeyLabeller(std::make_shared<Impl>(kv_head_count, head_dim, dtype)));
}

uint32_t KeyLabeller::kv_head_count() const { return impl_->kv_head_count; }
uint32_t KeyLabeller::head_dim() const { return impl_->head_dim; }
DType KeyLabeller::dtype() const { return impl_->dtype; }

bool KeyLabeller::Takes(const PlannedSegment& segment) {
  return segment.cluster_count >= 1 && segment.cluster_count <= segment.token_count &&
         segment.token_count <= gpu::kSegmentTokensMax &&
         segment.cluster_count <= gpu::kCentroidsMax;
}

absl::StatusOr<std::unique_ptr<KeyLabels>> KeyLabeller::Launch(
    const DeviceKeys& keys, std::span<const PlannedSegment> segments, CudaStream stream) {
  if (keys.head_stride % 8 != 0 || keys.token_stride % 8 != 0 || keys.token_stride > UINT32_MAX ||
      reinterpret_cast<uintptr_t>(keys.data) % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys: strides of ", keys.head_stride, " (heads) and ", keys.token_stride,
                     " (tokens) elements, expected multiples of 8, and data aligned to 16 bytes"));
  }
  std::vector<PlannedSegment> taken;
  for (const PlannedSegment& segment : segments) {
    const uint64_t offset = segment.first_position - keys.first_position;
    if (Takes(segment) && segment.first_position >= keys.first_position &&
        segment.token_count <= keys.token_count &&
        offset <= keys.token_count - segment.token_count) {
      taken.push_back(segment);
    }
  }
  auto labels = std::make_unique<KeyLabels::Impl>(impl_, std::move(taken));
  if (!labels->segments.empty()) {
    const DeviceGuard guard(keys.device);
    WAVEKV_RETURN_IF_ERROR(guard.status());
    WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Block> block, impl_->Acquire(keys.device));
    const absl::Status queued = impl_->Queue(keys, labels->segments, stream, block.get());
    if (!queued.ok()) {
      // Freed, which waits for what was queued.
      MutexLock lock(&impl_->mutex);
      --impl_->lent;
      return queued;
    }
    labels->block = std::move(block);
  }
  return std::unique_ptr<KeyLabels>(new KeyLabels(std::move(labels)));
}

}  // namespace wavekv::client
