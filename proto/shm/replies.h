// Replies in a channel's arena: writing them within bounds, and reading them back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "proto/shm/channel_layout.h"
#include "proto/shm/reply_layout.h"
#include "storage/base/check.h"

namespace wavekv::shm {

// An error's text is cut behind this many bytes.
inline constexpr size_t kErrorTextBytesMax = 1024;

// What to ask Begin for.
uint64_t AttendReplyBytes(uint64_t item_count, uint64_t query_heads, uint64_t value_dim);
uint64_t EstimateReplyBytes(uint64_t query_heads, uint64_t value_dim);
uint64_t InsertReplyBytes();

// Lays records and runs into a reply. What does not fit is not written, but counted. The memory
// may be written by others meanwhile; it is never read.
class ReplyWriter {
 public:
  explicit ReplyWriter(std::span<std::byte> target) : target_(target) {}

  // Room for `bytes`, aligned to kArenaAlignment. Returns its offset.
  uint64_t Reserve(uint64_t bytes);
  template <class Record>
  void Put(uint64_t offset, const Record& record) {
    PutBytes(offset, &record, sizeof record);
  }
  // A run of `count` elements at `data`.
  template <class Element>
  WireRun Add(const Element* data, size_t count) {
    const uint64_t bytes = count * sizeof(Element);
    const WireRun run{Reserve(bytes), bytes};
    PutBytes(run.offset, data, bytes);
    return run;
  }
  WireRun AddText(absl::string_view text);
  // As AddText, in room that was reserved.
  WireRun PutText(uint64_t offset, absl::string_view text);
  // A run that was reserved, to be written by others; null where it does not fit.
  std::byte* Place(const WireRun& run) const {
    return Fits(run.offset, run.bytes) ? target_.data() + run.offset : nullptr;
  }

  bool fits() const { return used_ <= target_.size(); }
  uint64_t room() const { return target_.size(); }
  uint64_t used() const { return used_; }

 private:
  bool Fits(uint64_t offset, uint64_t bytes) const {
    return offset <= target_.size() && target_.size() - offset >= bytes;
  }
  void PutBytes(uint64_t offset, const void* data, uint64_t bytes) {
    if (bytes == 0 || !Fits(offset, bytes)) return;
    std::memcpy(target_.data() + offset, data, bytes);
  }

  const std::span<std::byte> target_;
  uint64_t used_ = 0;
};

// Reads a reply. Every error is Internal: the daemon's reply is malformed.
class ReplyReader {
 public:
  explicit ReplyReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  template <class Record>
  absl::StatusOr<Record> Get(uint64_t offset) const {
    if (offset > bytes_.size() || bytes_.size() - offset < sizeof(Record)) {
      return OutOfBounds(offset, sizeof(Record));
    }
    Record record;
    std::memcpy(&record, bytes_.data() + offset, sizeof record);
    return record;
  }
  absl::StatusOr<std::span<const std::byte>> Run(const WireRun& run) const;
  // The run's bytes, aligned to kArenaAlignment as every run of ours is; null unless there are
  // exactly `bytes`, all inside the reply.
  const std::byte* Find(const WireRun& run, uint64_t bytes) const {
    const bool inside = run.bytes == bytes && run.offset <= bytes_.size() &&
                        bytes_.size() - run.offset >= bytes && run.offset % kArenaAlignment == 0;
    return inside ? bytes_.data() + run.offset : nullptr;
  }
  // A run of exactly `count` elements, copied to `target`.
  absl::Status Copy(const WireRun& run, uint64_t count, uint64_t element_bytes, void* target,
                    absl::string_view name) const;

 private:
  absl::Status OutOfBounds(uint64_t offset, uint64_t bytes) const;

  const std::span<const std::byte> bytes_;
};

}  // namespace wavekv::shm
