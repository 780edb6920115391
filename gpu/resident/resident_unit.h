// One unit of a resident region: what the manager knows of it, and what there is to read and to
// write. Touches no memory of the buffer: whoever owns it does, for many units at once.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gpu/buffer_memory.h"
#include "gpu/resident/cache_books.h"
#include "gpu/resident/resident_layout.h"
#include "gpu/resident/unit_segments.h"
#include "gpu/resident/unit_version.h"

namespace wavekv::resident {

// Not thread-safe. Numbers that were read are hints: those that cannot be are counted, and what was
// known before stays.
class ResidentUnit {
 public:
  // Offsets from the start of the buffer.
  ResidentUnit(const UnitLayout& layout, uint64_t unit_offset, uint64_t state_offset);

  // A round, in this order. Read takes a reading of the state that began after all that earlier
  // rounds and publications gave out was written; false: the round ends here, nothing is new.
  bool Read(const gpu::HeadState& state);
  // The part of the log that was not heard yet, if there is any, into memory of the unit; Hear
  // takes a reading that began after it was read.
  bool has_news() const { return seen_.log_settled != log_read_; }
  void AppendLogReads(std::vector<ByteRead>* reads);
  void Hear(const gpu::HeadState& later);
  // Likewise of the table, if it is wanted.
  bool wants_table() const { return books_->wants_table(); }
  ByteRead TableRead();
  void HearTable();
  // What is to be written, entries before words.
  void EndRound(std::vector<BufferEntry>* entries, std::vector<BufferWord>* words);

  // Whether no step can read the area that the next version gets.
  bool area_is_free() const { return area_epoch_ == kNoEpoch; }
  uint32_t next_area() const { return static_cast<uint32_t>((published_ + 1) % kAreas); }
  UnitSegments* segments() { return segments_.get(); }
  uint64_t unit_offset() const { return unit_offset_; }
  uint64_t state_offset() const { return state_offset_; }
  // The word that publishes `version`, whose bytes are in place; Commit follows once it is stored,
  // and says what must be written then.
  BufferWord PublishedWord() const;
  void Commit(const UnitVersion& version, std::vector<BufferEntry>* entries);

  // Starts over with a version and `token_count` tokens, while no step is under way, as `state`
  // says. `segments` are those that the version was planned with. Gives out what is to be written
  // once the version's bytes and rows are in place, the word that publishes it last.
  void Restart(const gpu::HeadState& state, std::unique_ptr<UnitSegments> segments,
               const UnitVersion& version, uint64_t token_count, std::vector<BufferEntry>* entries,
               std::vector<BufferWord>* words);

  // Ends the unit: what keeps the rows of all its segments.
  std::unique_ptr<UnitSegments> TakeSegments() { return std::move(segments_); }

  // As last read.
  uint64_t appended() const { return seen_.appended_settled; }
  uint64_t steady_first() const { return steady_first_; }
  uint64_t hits() const { return seen_.hits; }
  uint64_t misses() const { return seen_.misses; }
  uint64_t overflows() const { return seen_.overflows; }
  uint64_t violations() const { return violations_ + books_->violations(); }
  uint64_t log_losses() const { return log_losses_; }

 private:
  static constexpr uint64_t kNoEpoch = ~uint64_t{0};
  static constexpr uint64_t kNextReading = kNoEpoch - 1;

  // Takes a counter that never runs back and stays below `most`.
  void Advance(uint64_t read, uint64_t most, uint64_t* seen);
  // What is only counted.
  void AdvanceCounters(const gpu::HeadState& state);
  // Whether the entries from log_read_ on were still there when they were read.
  bool LogWasThere(const gpu::HeadState& later);
  uint64_t CheckedFreeHead(const gpu::HeadState& later);
  // Where word `offset` of the state lies.
  uint64_t Word(uint64_t offset) const { return state_offset_ + offset; }

  const UnitLayout layout_;
  const uint64_t unit_offset_;
  const uint64_t state_offset_;
  std::unique_ptr<UnitSegments> segments_;
  std::unique_ptr<CacheBooks> books_;
  gpu::HeadState seen_ = {};
  uint64_t log_read_ = 0;
  std::vector<gpu::BlockUse> log_;  // What was read of it ...
  bool log_fits_ = true;            // ... unless more was written than it holds.
  std::vector<int32_t> table_;
  uint64_t published_ = 0;  // Versions.
  uint64_t steady_first_ = 0;
  uint64_t uses_max_ = 0;  // Entries that a step may write.
  // The replaced version's, of the area that the next one gets: what must be completed first.
  uint64_t area_epoch_ = kNoEpoch;
  uint64_t violations_ = 0;
  uint64_t log_losses_ = 0;
};

}  // namespace wavekv::resident
