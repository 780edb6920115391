#include "bench/offered_cache.h"

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "gpu/kernels/step_layout.h"
#include "gpu/resident/cache_books.h"

namespace wavekv::bench {
namespace {

// The trace's blocks with the numbers that a unit gives them.
std::vector<std::vector<uint32_t>> Numbered(const BlockTrace& trace, uint32_t* block_count) {
  absl::flat_hash_map<BlockKey, uint32_t> numbers;
  std::vector<std::vector<uint32_t>> steps;
  for (const std::vector<BlockKey>& keys : trace) {
    std::vector<uint32_t>& blocks = steps.emplace_back();
    for (const BlockKey& key : keys) {
      blocks.push_back(numbers.try_emplace(key, numbers.size()).first->second);
    }
  }
  *block_count = static_cast<uint32_t>(numbers.size());
  return steps;
}

std::optional<resident::BlockOwner> OwnerOf(uint32_t) {
  return resident::BlockOwner{.segment_uid = 1, .live = true};
}

// What the device holds of a unit's cache.
class OfferedCache {
 public:
  OfferedCache(uint32_t block_count, const OfferedOptions& options)
      : heard_max_(size_t{gpu::kClusterBlocksMax} * options.clusters_per_step),
        table_(block_count, -1),
        books_(options.slots, /*free_tail=*/0) {}

  // Returns the hits.
  uint64_t Step(const std::vector<uint32_t>& blocks) {
    ++completed_;
    for (; seen_ < offers_.size(); ++seen_) {
      const resident::CacheBooks::Offered& offer = offers_[seen_];
      if (offer.block != gpu::kNoBlock && table_[offer.block] == static_cast<int32_t>(offer.slot)) {
        table_[offer.block] = -1;
      }
    }
    uint64_t hits = 0;
    for (const uint32_t block : blocks) {
      gpu::BlockUse use = {.block = block, .slot = table_[block], .place = gpu::kNoPlace};
      if (use.slot >= 0) {
        ++hits;
      } else {
        use.block |= gpu::kMissBit;
        if (taken_ < offers_.size()) {
          use.place = taken_;
          use.slot = static_cast<int32_t>(offers_[taken_++].slot);
          table_[block] = use.slot;
        }
      }
      log_.push_back(use);
    }
    return hits;
  }

  void Round() {
    books_.Read(/*started=*/completed_, completed_);
    const size_t old_count = log_.size() - std::min(log_.size(), heard_max_);
    for (size_t i = 0; i < log_.size(); ++i) {
      i < old_count ? books_.HearOld(log_[i], OwnerOf) : books_.Hear(log_[i], OwnerOf);
    }
    log_.clear();
    books_.Offer();
    for (const auto& offer : books_.TakeWrites().offered) offers_.push_back(offer);
  }

 private:
  const size_t heard_max_;
  std::vector<int32_t> table_;
  std::vector<resident::CacheBooks::Offered> offers_;  // All there ever were.
  size_t seen_ = 0, taken_ = 0;                        // Of offers_.
  uint64_t completed_ = 0;                             // Steps.
  std::vector<gpu::BlockUse> log_;
  resident::CacheBooks books_;
};

}  // namespace

CacheHits ReplayOffered(const BlockTrace& trace, const OfferedOptions& options) {
  uint32_t block_count = 0;
  std::vector<std::vector<uint32_t>> steps = Numbered(trace, &block_count);
  OfferedCache cache(block_count, options);
  std::mt19937_64 random(options.seed);
  CacheHits result;
  cache.Round();
  for (size_t step = 0; step < steps.size(); ++step) {
    std::shuffle(steps[step].begin(), steps[step].end(), random);
    const uint64_t hits = cache.Step(steps[step]);
    if (step >= options.first_counted) {
      result.lookups += steps[step].size();
      result.hits += hits;
    }
    if ((step + 1) % options.steps_per_round == 0) cache.Round();
  }
  return result;
}

}  // namespace wavekv::bench
