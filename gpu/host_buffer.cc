#include <atomic>
#include <cstring>
#include <utility>

#include "gpu/buffer_memory.h"

namespace wavekv {
namespace {

template <class T>
void StoreWhole(std::byte* target, T value) {
  std::atomic_ref<T>(*reinterpret_cast<T*>(target)).store(value, std::memory_order_release);
}

template <class T>
void LoadWhole(std::byte* source, std::byte* target) {
  const T value = std::atomic_ref<T>(*reinterpret_cast<T*>(source)).load(std::memory_order_acquire);
  std::memcpy(target, &value, sizeof(value));
}

// Whole words where they are aligned. Whoever writes there meanwhile is another thread or process.
void LoadBytes(std::byte* source, std::byte* target, uint64_t bytes) {
  while (bytes > 0) {
    const bool word =
        bytes >= sizeof(uint64_t) && reinterpret_cast<uintptr_t>(source) % sizeof(uint64_t) == 0;
    const uint64_t step = word ? sizeof(uint64_t) : 1;
    word ? LoadWhole<uint64_t>(source, target) : LoadWhole<std::byte>(source, target);
    source += step;
    target += step;
    bytes -= step;
  }
}

class HostBuffer : public BufferMemory {
 public:
  explicit HostBuffer(Mapping mapping) : mapping_(std::move(mapping)) {}

  uint64_t bytes() const override { return mapping_.bytes(); }

  absl::Status Write(std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word) override {
    for (const ByteCopy& copy : copies) {
      std::memcpy(mapping_.data() + copy.offset, copy.source, copy.bytes);
    }
    if (word.has_value()) StoreWhole(mapping_.data() + word->offset, word->value);
    return absl::OkStatus();
  }

  absl::Status Zero(uint64_t offset, uint64_t bytes) override {
    // Words that were stored before are seen before any of the zeroes.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::memset(mapping_.data() + offset, 0, bytes);
    return absl::OkStatus();
  }

  absl::Status Scatter(std::span<const BufferEntry> entries,
                       std::span<const BufferWord> words) override {
    for (const BufferEntry& entry : entries) {
      StoreWhole(mapping_.data() + entry.offset, entry.value);
    }
    for (const BufferWord& word : words) StoreWhole(mapping_.data() + word.offset, word.value);
    return absl::OkStatus();
  }

  absl::Status Read(std::span<const ByteRead> pieces) override {
    // What was stored before is seen by others before anything is read.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    for (const ByteRead& piece : pieces) {
      LoadBytes(mapping_.data() + piece.offset, piece.target, piece.bytes);
    }
    return absl::OkStatus();
  }

 private:
  const Mapping mapping_;
};

}  // namespace

std::unique_ptr<BufferMemory> MapHostBuffer(Mapping mapping) {
  return std::make_unique<HostBuffer>(std::move(mapping));
}

}  // namespace wavekv
