#include "client/gpu/key_labeller.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "client/gpu/device_guard.h"
#include "client/gpu/stream_mark.h"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/kmeans.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// Clustered at the same time: more would fill no GPU better, and each has a workspace.
constexpr size_t kTasksAtATime = 128;

size_t TokenCount(std::span<const PlannedSegment> segments) {
  size_t count = 0;
  for (const PlannedSegment& segment : segments) count += segment.token_count;
  return count;
}

// Makes `array` hold `size` elements at least.
template <typename Array>
absl::Status Grow(size_t size, Array* array) {
  if (array->size() >= size) return absl::OkStatus();
  *array = Array();  // Not both at a time.
  WAVEKV_ASSIGN_OR_RETURN(*array, Array::Make(size));
  return absl::OkStatus();
}

// What a launch works with, on one device.
struct Workspace {
  explicit Workspace(int on) : device(on) {}
  // The device may still read host_tasks and write host_labels. Where this fails it does no more.
  ~Workspace() { (void)done.Wait(); }

  const int device;
  gpu::DeviceArray<gpu::KMeansTask> tasks;
  gpu::DeviceArray<float> means, offsets;
  gpu::DeviceArray<uint16_t> centroids, labels;
  gpu::PinnedArray<gpu::KMeansTask> host_tasks;
  gpu::PinnedArray<uint16_t> host_labels;
  StreamMark done;  // Behind the last use of it: the labels are in host_labels.
};

using Workspaces = std::vector<std::unique_ptr<Workspace>>;

std::unique_ptr<Workspace> Take(Workspaces::iterator place, Workspaces* from) {
  std::unique_ptr<Workspace> taken = std::move(*place);
  from->erase(place);
  return taken;
}

}  // namespace

struct KeyLabeller::Impl {
  Impl(uint32_t heads, uint32_t dim, DType keys_dtype)
      : kv_head_count(heads), head_dim(dim), dtype(keys_dtype) {}

  // A workspace of the device that nothing on the device uses any more, of any size; it is lent.
  absl::StatusOr<std::unique_ptr<Workspace>> Acquire(int device);
  // Of labels that were let go of: as soon as its mark is reached it may be lent again.
  void Release(std::unique_ptr<Workspace> workspace);
  // Frees one that is lent and that nothing on the device uses.
  void Drop(std::unique_ptr<Workspace> workspace);
  // Makes room in the workspace for so many tasks and labels.
  absl::Status Reserve(size_t task_count, size_t label_count, Workspace* workspace) const;
  absl::Status Queue(const DeviceKeys& keys, std::span<const PlannedSegment> segments,
                     CudaStream stream, Workspace* workspace) const;

  const uint32_t kv_head_count;
  const uint32_t head_dim;
  const DType dtype;  // kBF16 or kF16.
  Mutex mutex;
  // Released ones. At most kLaunchesMax with those that are lent: each is of one launch.
  Workspaces idle ABSL_GUARDED_BY(mutex);
  size_t lent ABSL_GUARDED_BY(mutex) = 0;
};

struct KeyLabels::Impl {
  Impl(std::shared_ptr<KeyLabeller::Impl> labeller_impl, std::vector<PlannedSegment> taken)
      : labeller(std::move(labeller_impl)), segments(std::move(taken)) {}
  ~Impl() {
    if (workspace != nullptr) labeller->Release(std::move(workspace));
  }

  const std::shared_ptr<KeyLabeller::Impl> labeller;
  const std::vector<PlannedSegment> segments;
  std::unique_ptr<Workspace> workspace;  // Null without segments.
};

KeyLabels::KeyLabels(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
KeyLabels::~KeyLabels() = default;

size_t KeyLabels::segment_count() const { return impl_->segments.size(); }

bool KeyLabels::Ready() const {
  return impl_->workspace == nullptr || !impl_->workspace->done.Ahead();
}

absl::StatusOr<std::vector<SegmentLabels>> KeyLabels::Wait() const {
  std::vector<SegmentLabels> labels;
  if (impl_->workspace == nullptr) return labels;
  WAVEKV_RETURN_IF_ERROR(impl_->workspace->done.Wait());
  std::span<const uint16_t> left = impl_->workspace->host_labels.span();
  for (const PlannedSegment& segment : impl_->segments) {
    const size_t count = size_t{impl_->labeller->kv_head_count} * segment.token_count;
    labels.push_back({segment.first_position, segment.token_count, left.first(count)});
    left = left.subspan(count);
  }
  return labels;
}

absl::StatusOr<std::unique_ptr<Workspace>> KeyLabeller::Impl::Acquire(int device) {
  std::unique_ptr<Workspace> unneeded;  // Freed behind the lock.
  MutexLock lock(&mutex);
  const auto usable = std::ranges::find_if(idle, [&](const std::unique_ptr<Workspace>& one) {
    return one->device == device && one->done.Reached();
  });
  if (usable != idle.end()) {
    ++lent;
    return Take(usable, &idle);
  }
  if (lent + idle.size() == kLaunchesMax) {
    const auto elsewhere = std::ranges::find_if(
        idle, [](const std::unique_ptr<Workspace>& one) { return one->done.Reached(); });
    if (elsewhere == idle.end()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("the labels of ", lent, " launches are held, and the device has ",
                       idle.size(), " to make that were let go of; allowed: ", kLaunchesMax,
                       " in all. Take those that are held and let go of them"));
    }
    unneeded = Take(elsewhere, &idle);
  }
  ++lent;
  return std::make_unique<Workspace>(device);
}

void KeyLabeller::Impl::Release(std::unique_ptr<Workspace> workspace) {
  MutexLock lock(&mutex);
  --lent;
  idle.push_back(std::move(workspace));
}

void KeyLabeller::Impl::Drop(std::unique_ptr<Workspace> workspace) {
  workspace.reset();
  MutexLock lock(&mutex);
  --lent;
}

absl::Status KeyLabeller::Impl::Reserve(size_t task_count, size_t label_count,
                                        Workspace* workspace) const {
  const size_t at_a_time = std::min(task_count, kTasksAtATime);
  WAVEKV_RETURN_IF_ERROR(Grow(task_count, &workspace->tasks));
  WAVEKV_RETURN_IF_ERROR(Grow(task_count, &workspace->host_tasks));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * head_dim, &workspace->means));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * gpu::kCentroidsMax, &workspace->offsets));
  WAVEKV_RETURN_IF_ERROR(Grow(at_a_time * gpu::kCentroidsMax * head_dim, &workspace->centroids));
  WAVEKV_RETURN_IF_ERROR(Grow(label_count, &workspace->labels));
  return Grow(label_count, &workspace->host_labels);
}

absl::Status KeyLabeller::Impl::Queue(const DeviceKeys& keys,
                                      std::span<const PlannedSegment> segments, CudaStream stream,
                                      Workspace* workspace) const {
  const size_t task_count = segments.size() * kv_head_count;
  const size_t label_count = kv_head_count * TokenCount(segments);
  const auto* data = static_cast<const uint16_t*>(keys.data);  // Elements have 16 bits.
  uint16_t* labels = workspace->labels.data();
  size_t task = 0;
  for (const PlannedSegment& segment : segments) {
    const uint64_t row = segment.first_position - keys.first_position;
    for (uint32_t head = 0; head < kv_head_count; ++head, ++task) {
      const size_t place = task % kTasksAtATime;
      workspace->host_tasks.span()[task] = {
          .keys = data + head * keys.head_stride + row * keys.token_stride,
          .key_stride = static_cast<uint32_t>(keys.token_stride),
          .token_count = segment.token_count,
          .centroid_count = segment.cluster_count,
          .mean = workspace->means.data() + place * head_dim,
          .centroids = workspace->centroids.data() + place * gpu::kCentroidsMax * head_dim,
          .offsets = workspace->offsets.data() + place * gpu::kCentroidsMax,
          .labels = labels};
      labels += segment.token_count;
    }
  }
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(workspace->tasks.data(), workspace->host_tasks.data(),
                                              task_count * sizeof(gpu::KMeansTask),
                                              cudaMemcpyHostToDevice, stream));
  for (size_t first = 0; first < task_count; first += kTasksAtATime) {
    gpu::KMeansShape shape{
        .task_count = static_cast<uint32_t>(std::min(kTasksAtATime, task_count - first)),
        .head_dim = head_dim,
        .element = dtype == DType::kBF16 ? gpu::Element::kBF16 : gpu::Element::kF16};
    for (size_t i = first; i < first + shape.task_count; ++i) {
      shape.token_count_max =
          std::max(shape.token_count_max, workspace->host_tasks.span()[i].token_count);
    }
    WAVEKV_RETURN_IF_ERROR(gpu::LaunchKMeans(workspace->tasks.data() + first, shape, stream));
  }
  WAVEKV_CUDA_RETURN_IF_ERROR(
      cudaMemcpyAsync(workspace->host_labels.data(), workspace->labels.data(),
                      label_count * sizeof(uint16_t), cudaMemcpyDeviceToHost, stream));
  return workspace->done.Set(stream);
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
    WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Workspace> workspace, impl_->Acquire(keys.device));
    const size_t heads = impl_->kv_head_count;
    absl::Status status = impl_->Reserve(heads * labels->segments.size(),
                                         heads * TokenCount(labels->segments), workspace.get());
    if (status.ok()) {
      status = impl_->Queue(keys, labels->segments, stream, workspace.get());
      // No mark is behind what was queued. Where this fails, too, the device does no more.
      if (!status.ok()) (void)cudaStreamSynchronize(stream);
    }
    if (!status.ok()) {
      impl_->Drop(std::move(workspace));
      return status;
    }
    labels->workspace = std::move(workspace);
  }
  return std::unique_ptr<KeyLabels>(new KeyLabels(std::move(labels)));
}

}  // namespace wavekv::client
