#include "storage/block_cache_counts.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace wavekv {

double FadingCounts::Add(double count) const {
  const double once = Once(), larger = std::max(once, count);
  return larger + std::log2(1 + std::exp2(std::min(once, count) - larger));
}

double* CountHistory::Renew(const BlockKey& key) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return nullptr;
  Unlink(found->second);
  PushNewest(found->second);
  return &entries_[found->second].count;
}

void CountHistory::Put(const BlockKey& key, double count) {
  if (keys_max_ == 0) return;
  uint32_t idx;
  if (by_key_.size() == keys_max_) {
    idx = oldest_;
    by_key_.erase(entries_[idx].key);
    Unlink(idx);
  } else if (!unused_.empty()) {
    idx = unused_.back();
    unused_.pop_back();
  } else {
    idx = static_cast<uint32_t>(entries_.size());
    entries_.emplace_back();
  }
  entries_[idx].key = key;
  entries_[idx].count = count;
  PushNewest(idx);
  by_key_.emplace(key, idx);
}

double CountHistory::Take(const BlockKey& key, double otherwise) {
  const auto found = by_key_.find(key);
  if (found == by_key_.end()) return otherwise;
  const uint32_t idx = found->second;
  by_key_.erase(found);
  Unlink(idx);
  unused_.push_back(idx);
  return entries_[idx].count;
}

void CountHistory::PushNewest(uint32_t idx) {
  entries_[idx].older = newest_;
  entries_[idx].newer = kNone;
  (newest_ == kNone ? oldest_ : entries_[newest_].newer) = idx;
  newest_ = idx;
}

void CountHistory::Unlink(uint32_t idx) {
  const Entry& gone = entries_[idx];
  (gone.older == kNone ? oldest_ : entries_[gone.older].newer) = gone.newer;
  (gone.newer == kNone ? newest_ : entries_[gone.newer].older) = gone.older;
}

LeastCountedSlots::LeastCountedSlots(const std::vector<double>* counts)
    : counts_(*counts), places_(counts->size(), kNowhere) {
  heap_.reserve(counts->size());
}

void LeastCountedSlots::Insert(uint32_t slot) {
  heap_.emplace_back();
  Up(heap_.size() - 1, {counts_[slot], slot});
}

void LeastCountedSlots::Erase(uint32_t slot) {
  const size_t at = std::exchange(places_[slot], kNowhere);
  const Entry last = heap_.back();
  heap_.pop_back();
  if (at == heap_.size()) return;
  last < heap_[at] ? Up(at, last) : Down(at, last);
}

uint32_t LeastCountedSlots::Least() {
  for (;;) {
    const Entry& top = heap_.front();
    const double count = counts_[top.slot];
    if (top.count == count) return top.slot;
    Down(0, {count, top.slot});
  }
}

uint32_t LeastCountedSlots::TakeLeast() {
  const uint32_t least = Least();
  Erase(least);
  return least;
}

void LeastCountedSlots::Place(size_t at, const Entry& entry) {
  heap_[at] = entry;
  places_[entry.slot] = static_cast<uint32_t>(at);
}

void LeastCountedSlots::Up(size_t at, const Entry& entry) {
  while (at > 0 && entry < heap_[(at - 1) / 2]) {
    Place(at, heap_[(at - 1) / 2]);
    at = (at - 1) / 2;
  }
  Place(at, entry);
}

void LeastCountedSlots::Down(size_t at, const Entry& entry) {
  for (size_t child; (child = 2 * at + 1) < heap_.size(); at = child) {
    if (child + 1 < heap_.size() && heap_[child + 1] < heap_[child]) ++child;
    if (entry < heap_[child]) break;
    Place(at, heap_[child]);
  }
  Place(at, entry);
}

}  // namespace wavekv
