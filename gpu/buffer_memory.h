// The bytes of one tenant's wave buffer as wavekvd writes them, wherever they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "absl/status/status.h"
#include "storage/base/shared_memory.h"

namespace wavekv {

// Bytes of ours and where they go, from the start of the buffer.
struct ByteCopy {
  const std::byte* source = nullptr;
  uint64_t offset = 0;
  uint64_t bytes = 0;
};

// A naturally aligned 64-bit word that readers load whole.
struct BufferWord {
  uint64_t offset = 0;
  uint64_t value = 0;
};

// A naturally aligned 32-bit entry of an array that another party writes, too.
struct BufferEntry {
  uint64_t offset = 0;
  uint32_t value = 0;
};

// Bytes of the buffer and where they go.
struct ByteRead {
  uint64_t offset = 0;
  std::byte* target = nullptr;
  uint64_t bytes = 0;
};

// Thread-safe. Every call ends when its bytes are in place, and keeps the order of the calls:
// whoever sees a word sees what was written before it. Host memory never fails; a device's failure
// is Unavailable and lasts. Only what others write there (docs/decisions/015-resident-region.md) is
// ever read back, and what is read is a hint.
class BufferMemory {
 public:
  virtual ~BufferMemory() = default;

  virtual uint64_t bytes() const = 0;
  // Copies, then stores `word` where there is one. Between copies that lie less than
  // kRowAlignBytes apart and ascend, zeroes may be written.
  virtual absl::Status Write(std::span<const ByteCopy> copies,
                             const std::optional<BufferWord>& word = std::nullopt) = 0;
  virtual absl::Status Zero(uint64_t offset, uint64_t bytes) = 0;
  // Stores the entries, then the words; each whole, and nothing between them.
  virtual absl::Status Scatter(std::span<const BufferEntry> entries,
                               std::span<const BufferWord> words) = 0;
  // Copies out what is there after all calls before this one. An aligned 64-bit word is read whole;
  // two words may be of different moments.
  virtual absl::Status Read(std::span<const ByteRead> pieces) = 0;

  absl::Status Store(uint64_t offset, uint64_t value) {
    return Write({}, BufferWord{offset, value});
  }
};

// Over a zeroed, writable mapping of a host backend's descriptor.
std::unique_ptr<BufferMemory> MapHostBuffer(Mapping mapping);

}  // namespace wavekv
