#include "gpu/resident/resident_unit.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

namespace wavekv::resident {
namespace {

constexpr uint32_t kEmptyEntry = ~uint32_t{0};  // Slot -1.
constexpr uint64_t kUnbounded = ~uint64_t{0};
constexpr uint64_t kLeapMax = uint64_t{1} << 32;  // Of a counter, from reading to reading.

}  // namespace

ResidentUnit::ResidentUnit(const UnitLayout& layout, uint64_t unit_offset, uint64_t state_offset)
    : layout_(layout),
      unit_offset_(unit_offset),
      state_offset_(state_offset),
      segments_(std::make_unique<UnitSegments>(layout)),
      books_(std::make_unique<CacheBooks>(layout.slot_count, 0)) {}

void ResidentUnit::Advance(uint64_t read, uint64_t most, uint64_t* seen) {
  if (read < *seen || read > most) {
    ++violations_;
  } else {
    *seen = read;
  }
}

void ResidentUnit::AdvanceCounters(const gpu::HeadState& state) {
  Advance(state.hits, seen_.hits + kLeapMax, &seen_.hits);
  Advance(state.misses, seen_.misses + kLeapMax, &seen_.misses);
  Advance(state.overflows, seen_.overflows + kLeapMax, &seen_.overflows);
}

bool ResidentUnit::Read(const gpu::HeadState& state) {
  // Not the epochs alone: the last reading may have been torn.
  const auto marks = [](const gpu::HeadState& s) {
    return std::tie(s.started, s.completed_epoch, s.appended_settled, s.log_settled, s.hits,
                    s.misses, s.overflows);
  };
  const bool moved = marks(state) != marks(seen_);
  const bool waits = books_->doubts() || segments_->waits() || !area_is_free();
  if (!moved && !waits) return false;
  Advance(state.started, kUnbounded, &seen_.started);
  Advance(state.completed_epoch, kUnbounded, &seen_.completed_epoch);
  Advance(state.appended_settled, RingEnd(layout_, steady_first_), &seen_.appended_settled);
  Advance(state.log_settled, kUnbounded, &seen_.log_settled);
  AdvanceCounters(state);
  books_->Read(seen_.started, seen_.completed_epoch);
  segments_->Read(seen_.started, seen_.completed_epoch, seen_.log_settled);
  if (area_epoch_ == kNextReading) area_epoch_ = seen_.started;
  if (!area_is_free() && seen_.completed_epoch >= area_epoch_) area_epoch_ = kNoEpoch;
  return true;
}

void ResidentUnit::AppendLogReads(std::vector<ByteRead>* reads) {
  const uint64_t count = seen_.log_settled - log_read_;
  log_fits_ = count <= layout_.log_capacity;
  log_.resize(log_fits_ ? count : 0);
  for (uint64_t done = 0; done < log_.size();) {
    const uint64_t place = (log_read_ + done) % layout_.log_capacity;
    const uint64_t length = std::min(log_.size() - done, layout_.log_capacity - place);
    reads->push_back({unit_offset_ + layout_.log_offset + place * sizeof(gpu::BlockUse),
                      reinterpret_cast<std::byte*>(&log_[done]), length * sizeof(gpu::BlockUse)});
    done += length;
  }
}

bool ResidentUnit::LogWasThere(const gpu::HeadState& later) {
  if (later.log_end < seen_.log_settled) {
    ++violations_;
    return false;
  }
  // A step writes its entries before it says how far the log goes.
  return log_fits_ && uses_max_ <= layout_.log_capacity &&
         later.log_end - log_read_ <= layout_.log_capacity - uses_max_;
}

uint64_t ResidentUnit::CheckedFreeHead(const gpu::HeadState& later) {
  Advance(later.free_head, books_->free_tail(), &seen_.free_head);
  return later.free_head == seen_.free_head ? later.free_head : books_->free_tail();
}

void ResidentUnit::Hear(const gpu::HeadState& later) {
  const auto owner_of = [this](uint32_t block) { return segments_->OwnerOf(block); };
  if (LogWasThere(later)) {
    // All uses of the last step at least.
    const size_t old_count = log_.size() - std::min<uint64_t>(log_.size(), uses_max_);
    for (size_t i = 0; i < log_.size(); ++i) {
      i < old_count ? books_->HearOld(log_[i], owner_of) : books_->Hear(log_[i], owner_of);
    }
  } else {
    ++log_losses_;
    books_->HearNothing(CheckedFreeHead(later));
  }
  log_read_ = seen_.log_settled;
}

ByteRead ResidentUnit::TableRead() {
  table_.resize(layout_.block_capacity);
  return {unit_offset_ + layout_.block_slots_offset, reinterpret_cast<std::byte*>(table_.data()),
          table_.size() * sizeof(int32_t)};
}

void ResidentUnit::HearTable() {
  books_->ReadTable(table_, [this](uint32_t block) { return segments_->OwnerOf(block); });
  table_ = {};
}

void ResidentUnit::EndRound(std::vector<BufferEntry>* entries, std::vector<BufferWord>* words) {
  segments_->Release(log_read_, books_->doubts());
  books_->Offer();
  const CacheBooks::Writes writes = books_->TakeWrites();
  for (const uint32_t block : writes.cleared) {
    entries->push_back(
        {unit_offset_ + layout_.block_slots_offset + block * sizeof(int32_t), kEmptyEntry});
  }
  for (const CacheBooks::Offered& offered : writes.offered) {
    const uint64_t place = offered.place % layout_.slot_count;
    const uint64_t at = unit_offset_ + layout_.free_slots_offset + place * sizeof(gpu::FreeSlot);
    entries->push_back({at + offsetof(gpu::FreeSlot, slot), offered.slot});
    entries->push_back({at + offsetof(gpu::FreeSlot, block), offered.block});
  }
  if (writes.offered.empty()) return;
  words->push_back({Word(offsetof(gpu::HeadState, free_tail)), books_->free_tail()});
}

BufferWord ResidentUnit::PublishedWord() const {
  return {Word(offsetof(gpu::HeadState, published)), published_ + 1};
}

void ResidentUnit::Commit(const UnitVersion& version, std::vector<BufferEntry>* entries) {
  for (const PlacedSegment& gone : segments_->Commit(version.segments)) {
    books_->Leave(gone.segment.head->uid, gone.numbers.first_block, gone.numbers.block_count);
  }
  for (const uint32_t block : books_->TakeWrites().cleared) {
    entries->push_back(
        {unit_offset_ + layout_.block_slots_offset + block * sizeof(int32_t), kEmptyEntry});
  }
  if (published_ > 0) area_epoch_ = kNextReading;
  ++published_;
  steady_first_ = version.published.steady_first;
  const uint64_t uses = uint64_t{gpu::kClusterBlocksMax} * version.published.retrieve_count;
  uses_max_ = std::max(uses_max_, uses);
}

void ResidentUnit::Restart(const gpu::HeadState& state, std::unique_ptr<UnitSegments> segments,
                           const UnitVersion& version, uint64_t token_count,
                           std::vector<BufferEntry>* entries, std::vector<BufferWord>* words) {
  AdvanceCounters(state);
  violations_ += books_->violations();
  const uint64_t free_tail = books_->free_tail();
  segments_ = std::move(segments);
  books_ = std::make_unique<CacheBooks>(layout_.slot_count, free_tail);
  // Whatever was there before, it counts from here on.
  seen_.started = state.started;
  seen_.completed_epoch = state.completed_epoch;
  log_read_ = seen_.log_settled;
  seen_.free_head = free_tail;
  seen_.appended_settled = token_count;
  const std::pair<size_t, uint64_t> fresh[] = {
      {offsetof(gpu::HeadState, appended), token_count},
      {offsetof(gpu::HeadState, appended_settled), token_count},
      {offsetof(gpu::HeadState, log_end), log_read_},
      {offsetof(gpu::HeadState, log_settled), log_read_},
      {offsetof(gpu::HeadState, free_head), free_tail},
      {offsetof(gpu::HeadState, free_seen), free_tail},
      {offsetof(gpu::HeadState, free_tail), free_tail},
  };
  for (const auto& [offset, value] : fresh) words->push_back({Word(offset), value});
  EndRound(entries, words);
  const BufferWord published = PublishedWord();
  words->push_back(published);
  Commit(version, entries);
  area_epoch_ = kNoEpoch;  // Nobody reads the other one.
}

}  // namespace wavekv::resident
