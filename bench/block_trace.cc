#include "bench/block_trace.h"

#include <limits>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"

namespace wavekv::bench {
namespace {

constexpr size_t kNever = std::numeric_limits<size_t>::max();

// For every block of every step the next step that asks for it.
std::vector<std::vector<size_t>> NextUses(const BlockTrace& trace) {
  std::vector<std::vector<size_t>> next(trace.size());
  absl::flat_hash_map<BlockKey, size_t> seen;
  for (size_t step = trace.size(); step-- > 0;) {
    next[step].resize(trace[step].size(), kNever);
    for (size_t i = 0; i < trace[step].size(); ++i) {
      const auto [place, is_new] = seen.try_emplace(trace[step][i], step);
      if (!is_new) next[step][i] = std::exchange(place->second, step);
    }
  }
  return next;
}

}  // namespace

CacheHits Replay(const BlockTrace& trace, size_t first_counted, BlockCachePolicy* policy) {
  CacheHits result;
  std::vector<BlockKey> missed;
  for (size_t step = 0; step < trace.size(); ++step) {
    missed.clear();
    for (const BlockKey& key : trace[step]) {
      const bool hit = policy->Lookup(key, step + 1).has_value();
      if (!hit) missed.push_back(key);
      if (step < first_counted) continue;
      ++result.lookups;
      result.hits += hit ? 1 : 0;
    }
    for (const BlockKey& key : missed) {
      if (const auto slot = policy->Admit(key, step + 1)) policy->Publish(*slot);
    }
  }
  return result;
}

CacheHits ReplayBelady(const BlockTrace& trace, size_t first_counted, uint32_t slots) {
  const std::vector<std::vector<size_t>> next = NextUses(trace);
  CacheHits result;
  absl::flat_hash_map<BlockKey, size_t> next_use;                          // Of the cached blocks.
  std::set<std::pair<size_t, std::pair<uint64_t, uint32_t>>> by_next_use;  // The same.
  const auto entry = [](size_t use, const BlockKey& key) {
    return std::pair(use, std::pair(key.segment_uid, key.block));
  };
  for (size_t step = 0; step < trace.size(); ++step) {
    for (size_t i = 0; i < trace[step].size(); ++i) {
      const BlockKey& key = trace[step][i];
      const auto cached = next_use.find(key);
      if (step >= first_counted) {
        ++result.lookups;
        result.hits += cached != next_use.end() ? 1 : 0;
      }
      if (cached == next_use.end()) continue;
      by_next_use.erase(entry(cached->second, key));
      next_use.erase(cached);
    }
    // All of the step's blocks are in hand now: the best of them and of the others stay.
    for (size_t i = 0; i < trace[step].size(); ++i) {
      if (next[step][i] == kNever) continue;
      next_use.emplace(trace[step][i], next[step][i]);
      by_next_use.insert(entry(next[step][i], trace[step][i]));
    }
    while (next_use.size() > slots) {
      const auto last = std::prev(by_next_use.end());
      next_use.erase(BlockKey{last->second.first, last->second.second});
      by_next_use.erase(last);
    }
  }
  return result;
}

}  // namespace wavekv::bench
