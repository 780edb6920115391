#include <atomic>
#include <cstring>
#include <utility>

#include "gpu/buffer_memory.h"

namespace wavekv {
namespace {

class HostBuffer : public BufferMemory {
 public:
  explicit HostBuffer(Mapping mapping) : mapping_(std::move(mapping)) {}

  uint64_t bytes() const override { return mapping_.bytes(); }

  absl::Status Write(std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word) override {
    for (const ByteCopy& copy : copies) {
      std::memcpy(mapping_.data() + copy.offset, copy.source, copy.bytes);
    }
    if (word.has_value()) {
      auto* target = reinterpret_cast<uint64_t*>(mapping_.data() + word->offset);
      std::atomic_ref<uint64_t>(*target).store(word->value, std::memory_order_release);
    }
    return absl::OkStatus();
  }

  absl::Status Zero(uint64_t offset, uint64_t bytes) override {
    // Words that were stored before are seen before any of the zeroes.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    std::memset(mapping_.data() + offset, 0, bytes);
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
