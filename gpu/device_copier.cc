#include "gpu/device_copier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "storage/base/cpuset.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr int kGatherThreadsMax = 8;  // More do not gather faster than PCIe takes it away.
constexpr uint64_t kGatherBytesMax = uint64_t{64} << 10;
constexpr uint64_t kGatherShareBytes = uint64_t{256} << 10;  // What is worth a thread.

}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<const CudaDevice> device,
                           const DeviceCopierOptions& options)
    : device_(std::move(device)),
      options_(options),
      gatherers_(options.gather_threads, "wave_gather") {}

DeviceCopierOptions DeviceCopier::OptionsForThisMachine() {
  DeviceCopierOptions options;
  options.gather_threads = std::clamp(UsableCpuCount() / 2, 1, kGatherThreadsMax) - 1;
  return options;
}

absl::StatusOr<std::unique_ptr<DeviceCopier::Lane>> DeviceCopier::MakeLane() const {
  auto lane = std::make_unique<Lane>();
  WAVEKV_ASSIGN_OR_RETURN(lane->stream, DeviceStream::Create(device_));
  WAVEKV_ASSIGN_OR_RETURN(lane->staging, PinnedMemory::Allocate(device_, options_.staging_bytes));
  return lane;
}

absl::StatusOr<std::unique_ptr<DeviceCopier::Lane>> DeviceCopier::Borrow() {
  {
    MutexLock lock(&mutex_);
    while (idle_.empty() && lane_count_ == options_.lanes_max) returned_.Wait(&mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Lane> lane = std::move(idle_.back());
      idle_.pop_back();
      return lane;
    }
    ++lane_count_;
  }
  absl::StatusOr<std::unique_ptr<Lane>> lane = MakeLane();
  if (!lane.ok()) {
    {
      MutexLock lock(&mutex_);
      --lane_count_;
    }
    returned_.NotifyAll();
  }
  return lane;
}

void DeviceCopier::Return(std::unique_ptr<Lane> lane) {
  {
    MutexLock lock(&mutex_);
    idle_.push_back(std::move(lane));
  }
  returned_.NotifyAll();
}

void DeviceCopier::Gather(const TransferBatch& batch, std::byte* staging) {
  const auto gather = [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const TransferBatch::Gather& piece = batch.gathers[i];
      if (piece.source == nullptr) {
        std::memset(staging + piece.staged_at, 0, piece.bytes);
      } else {
        std::memcpy(staging + piece.staged_at, piece.source, piece.bytes);
      }
    }
  };
  std::vector<size_t> ends;  // Of each thread's share.
  uint64_t share_bytes = 0;
  for (size_t i = 0; i < batch.gathers.size(); ++i) {
    share_bytes += batch.gathers[i].bytes;
    if (share_bytes < kGatherShareBytes && i + 1 < batch.gathers.size()) continue;
    ends.push_back(i + 1);
    share_bytes = 0;
  }
  gatherers_.ParallelFor(
      ends.size(), [&](size_t share) { gather(share == 0 ? 0 : ends[share - 1], ends[share]); });
}

absl::Status DeviceCopier::WriteThrough(const Lane& lane, cuda::DevicePointer base,
                                        std::span<const ByteCopy> copies,
                                        const std::optional<BufferWord>& word) {
  const std::vector<TransferBatch> batches =
      PlanTransfers(copies, lane.staging->bytes(), kGatherBytesMax);
  std::byte* const staging = lane.staging->data();
  for (size_t i = 0; i < batches.size(); ++i) {
    if (i > 0) WAVEKV_RETURN_IF_ERROR(lane.stream->Synchronise());  // The staging memory is read.
    Gather(batches[i], staging);
    for (const TransferBatch::Transfer& transfer : batches[i].transfers) {
      WAVEKV_RETURN_IF_ERROR(lane.stream->CopyIn(base + transfer.offset,
                                                 staging + transfer.staged_at, transfer.bytes));
    }
  }
  if (word.has_value()) {
    WAVEKV_RETURN_IF_ERROR(lane.stream->StoreWord(base + word->offset, word->value));
  }
  return lane.stream->Synchronise();
}

absl::Status DeviceCopier::Write(cuda::DevicePointer base, std::span<const ByteCopy> copies,
                                 const std::optional<BufferWord>& word) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Borrow());
  const absl::Status status = WriteThrough(*lane, base, copies, word);
  // What was queued before a failure may still read the staging memory.
  if (!status.ok()) (void)lane->stream->Synchronise();
  Return(std::move(lane));
  return status;
}

absl::Status DeviceCopier::Zero(cuda::DevicePointer base, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Borrow());
  absl::Status status = lane->stream->Zero(base + offset, bytes);
  if (status.ok()) status = lane->stream->Synchronise();
  Return(std::move(lane));
  return status;
}

}  // namespace wavekv
