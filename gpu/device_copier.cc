#include "gpu/device_copier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "gpu/buffer_layout.h"
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
  return absl::OkStatus();
}

// Entries that follow one another go in one transfer.
absl::Status DeviceCopier::ScatterThrough(const Lane& lane, cuda::DevicePointer base,
                                          std::span<const BufferEntry> entries,
                                          std::span<const BufferWord> words) {
  constexpr uint64_t kEntryBytes = sizeof(BufferEntry::value);
  const size_t staged_max = lane.staging->bytes() / kEntryBytes;
  std::byte* const staging = lane.staging->data();
  for (size_t first = 0; first < entries.size(); first += staged_max) {
    if (first > 0)
      WAVEKV_RETURN_IF_ERROR(lane.stream->Synchronise());  // The staging memory is read.
    const auto batch = entries.subspan(first, std::min(staged_max, entries.size() - first));
    for (size_t begin = 0, i = 0; i < batch.size(); ++i) {
      std::memcpy(staging + i * kEntryBytes, &batch[i].value, kEntryBytes);
      const bool goes_on =
          i + 1 < batch.size() && batch[i + 1].offset == batch[i].offset + kEntryBytes;
      if (goes_on) continue;
      WAVEKV_RETURN_IF_ERROR(lane.stream->CopyIn(base + batch[begin].offset,
                                                 staging + begin * kEntryBytes,
                                                 (i + 1 - begin) * kEntryBytes));
      begin = i + 1;
    }
  }
  for (const BufferWord& word : words) {
    WAVEKV_RETURN_IF_ERROR(lane.stream->StoreWord(base + word.offset, word.value));
  }
  return absl::OkStatus();
}

absl::Status DeviceCopier::ReadThrough(const Lane& lane, cuda::DevicePointer base,
                                       std::span<const ByteRead> pieces) {
  std::byte* const staging = lane.staging->data();
  std::vector<ByteRead> staged;  // In the order of their places in the staging memory.
  uint64_t used = 0;
  const auto unload = [&] {
    WAVEKV_RETURN_IF_ERROR(lane.stream->Synchronise());
    const std::byte* from = staging;
    for (const ByteRead& piece : staged) {
      std::memcpy(piece.target, from, piece.bytes);
      from += AlignUp(piece.bytes, kRowAlignBytes);
    }
    staged.clear();
    used = 0;
    return absl::OkStatus();
  };
  for (const ByteRead& piece : pieces) {
    for (uint64_t done = 0; done < piece.bytes;) {
      if (used >= lane.staging->bytes()) WAVEKV_RETURN_IF_ERROR(unload());
      const uint64_t bytes = std::min(piece.bytes - done, lane.staging->bytes() - used);
      WAVEKV_RETURN_IF_ERROR(
          lane.stream->CopyOut(staging + used, base + piece.offset + done, bytes));
      staged.push_back({piece.offset + done, piece.target + done, bytes});
      used += AlignUp(bytes, kRowAlignBytes);
      done += bytes;
    }
  }
  return unload();
}

absl::Status DeviceCopier::OnLane(absl::FunctionRef<absl::Status(const Lane&)> queue) {
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Lane> lane, Borrow());
  absl::Status status = queue(*lane);
  status.Update(lane->stream->Synchronise());
  Return(std::move(lane));
  return status;
}

absl::Status DeviceCopier::Write(cuda::DevicePointer base, std::span<const ByteCopy> copies,
                                 const std::optional<BufferWord>& word) {
  return OnLane([&](const Lane& lane) { return WriteThrough(lane, base, copies, word); });
}

absl::Status DeviceCopier::Zero(cuda::DevicePointer base, uint64_t offset, uint64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  return OnLane([&](const Lane& lane) { return lane.stream->Zero(base + offset, bytes); });
}

absl::Status DeviceCopier::Scatter(cuda::DevicePointer base, std::span<const BufferEntry> entries,
                                   std::span<const BufferWord> words) {
  return OnLane([&](const Lane& lane) { return ScatterThrough(lane, base, entries, words); });
}

absl::Status DeviceCopier::Read(cuda::DevicePointer base, std::span<const ByteRead> pieces) {
  return OnLane([&](const Lane& lane) { return ReadThrough(lane, base, pieces); });
}

}  // namespace wavekv
