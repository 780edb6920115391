// Brings host memory to a device by DMA, and back, for many threads: gathered into pinned staging
// memory by several threads, moved by one transfer where the targets allow it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/buffer_memory.h"
#include "gpu/driver/device.h"
#include "gpu/transfer_plan.h"
#include "storage/base/mutex.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

struct DeviceCopierOptions {
  uint64_t staging_bytes = uint64_t{4} << 20;  // Pinned, of each lane.
  uint32_t lanes_max = 4;                      // Calls that move bytes at once; others wait.
  int gather_threads = 0;                      // Beside the caller.
};

// Thread-safe. Each call has a lane to itself (a stream and its staging memory, made when first
// needed) and ends when its bytes are in place.
class DeviceCopier {
 public:
  DeviceCopier(std::shared_ptr<const CudaDevice> device, const DeviceCopierOptions& options);
  // Options for the CPUs that this process may use.
  static DeviceCopierOptions OptionsForThisMachine();

  // BufferMemory's calls on the mapping that begins at `base`.
  absl::Status Write(cuda::DevicePointer base, std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word);
  absl::Status Zero(cuda::DevicePointer base, uint64_t offset, uint64_t bytes);
  absl::Status Scatter(cuda::DevicePointer base, std::span<const BufferEntry> entries,
                       std::span<const BufferWord> words);
  absl::Status Read(cuda::DevicePointer base, std::span<const ByteRead> pieces);

  const std::shared_ptr<const CudaDevice>& device() const { return device_; }

 private:
  struct Lane {
    std::unique_ptr<DeviceStream> stream;
    std::unique_ptr<PinnedMemory> staging;
  };
  absl::StatusOr<std::unique_ptr<Lane>> Borrow();
  absl::StatusOr<std::unique_ptr<Lane>> MakeLane() const;
  void Return(std::unique_ptr<Lane> lane);
  // Queues work on a lane of its own and waits for it. What was queued before a failure may still
  // use the staging memory: it is waited for, too.
  absl::Status OnLane(absl::FunctionRef<absl::Status(const Lane&)> queue);
  void Gather(const TransferBatch& batch, std::byte* staging);
  absl::Status WriteThrough(const Lane& lane, cuda::DevicePointer base,
                            std::span<const ByteCopy> copies,
                            const std::optional<BufferWord>& word);
  static absl::Status ScatterThrough(const Lane& lane, cuda::DevicePointer base,
                                     std::span<const BufferEntry> entries,
                                     std::span<const BufferWord> words);
  static absl::Status ReadThrough(const Lane& lane, cuda::DevicePointer base,
                                  std::span<const ByteRead> pieces);

  const std::shared_ptr<const CudaDevice> device_;
  const DeviceCopierOptions options_;
  ThreadPool gatherers_;
  Mutex mutex_;
  CondVar returned_;
  std::vector<std::unique_ptr<Lane>> idle_ ABSL_GUARDED_BY(mutex_);
  uint32_t lane_count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace wavekv
