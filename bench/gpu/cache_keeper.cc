#include "bench/gpu/cache_keeper.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr double kMissesDecay = 0.9;  // A step back.
constexpr uint32_t kOfferedMin = 16;

template <class T>
absl::Status CopyAll(T* target, const T* source, size_t count) {
  return gpu::CudaStatus(cudaMemcpy(target, source, count * sizeof(T), cudaMemcpyDefault),
                         "cudaMemcpy");
}

}  // namespace

CacheKeeper::CacheKeeper(const BuiltLayer& built, void* base, double cache_ratio)
    : built_(built), arrays_(LayOutLayer(built.shape, base)), cache_ratio_(cache_ratio) {}

absl::Status CacheKeeper::Reset() {
  const LayerShape& shape = built_.shape;
  units_.clear();
  units_.resize(shape.units);
  std::vector<gpu::HeadState> states(shape.units);
  WAVEKV_RETURN_IF_ERROR(CopyAll(states.data(), arrays_.state, shape.units));
  for (uint32_t i = 0; i < shape.units; ++i) {
    Unit& unit = units_[i];
    unit.slot_count = std::max<uint32_t>(
        1, static_cast<uint32_t>(std::ceil(cache_ratio_ * built_.block_counts[i])));
    unit.policy = MakeLrfuBlockCachePolicy(unit.slot_count);
    std::vector<gpu::FreeSlot> offers;
    for (uint32_t slot = 0; slot < unit.slot_count; ++slot) offers.push_back({slot, gpu::kNoBlock});
    states[i].free_head = states[i].free_seen = states[i].free_tail = 0;
    unit.log_read = states[i].log_end;
    WAVEKV_RETURN_IF_ERROR(CopyAll(&arrays_.state[i], &states[i], 1));
    WAVEKV_RETURN_IF_ERROR(Offer(i, offers));
  }
  const std::vector<int32_t> empty(size_t{shape.units} * shape.blocks, -1);
  return CopyAll(arrays_.block_slots, empty.data(), empty.size());
}

absl::Status CacheKeeper::Round() {
  std::vector<gpu::HeadState> states(built_.shape.units);
  WAVEKV_RETURN_IF_ERROR(CopyAll(states.data(), arrays_.state, states.size()));
  for (uint32_t i = 0; i < states.size(); ++i) WAVEKV_RETURN_IF_ERROR(RoundOf(i, states[i]));
  return absl::OkStatus();
}

absl::Status CacheKeeper::RoundOf(uint32_t idx, const gpu::HeadState& state) {
  const LayerShape& shape = built_.shape;
  Unit& unit = units_[idx];
  const uint64_t log_capacity = 2 * shape.blocks;
  const uint64_t fresh = state.log_end - unit.log_read;
  if (fresh > log_capacity) {
    return absl::InternalError(
        absl::StrCat("a step logged ", fresh, " blocks, room for ", log_capacity));
  }
  std::vector<gpu::BlockUse> log(log_capacity);
  const gpu::BlockUse* const device_log = arrays_.log + log_capacity * idx;
  const uint64_t first = unit.log_read % log_capacity;
  const uint64_t straight = std::min(fresh, log_capacity - first);
  WAVEKV_RETURN_IF_ERROR(CopyAll(log.data(), device_log + first, straight));
  WAVEKV_RETURN_IF_ERROR(CopyAll(log.data() + straight, device_log, fresh - straight));
  unit.log_read = state.log_end;

  const uint64_t step = unit.uses.size() + 1;
  std::vector<BlockKey>& uses = unit.uses.emplace_back();
  uint32_t hits = 0;
  for (const gpu::BlockUse& use : std::span(log).first(fresh)) {
    const BlockKey key = {uint64_t{idx} + 1, use.block & ~gpu::kMissBit};
    uses.push_back(key);
    (void)unit.policy->Lookup(key, step);
    const bool hit = (use.block & gpu::kMissBit) == 0;
    hits += hit ? 1 : 0;
    if (hit || use.slot < 0) continue;
    if (!unit.policy->Adopt(key, static_cast<uint32_t>(use.slot))) {
      return absl::InternalError(absl::StrCat("block ", key.block, " is cached twice"));
    }
  }
  unit.hits.push_back(hits);
  unit.misses = std::max<double>(unit.misses * kMissesDecay, fresh - hits);
  const auto wanted = std::min<uint32_t>(
      std::max<uint32_t>(kOfferedMin, static_cast<uint32_t>(unit.misses)), unit.slot_count / 2);
  std::vector<gpu::FreeSlot> offers;
  while (unit.free_tail + offers.size() - state.free_head < wanted) {
    const std::optional<SlotOfBlock> worst = unit.policy->Evict(step);
    if (!worst.has_value()) break;
    offers.push_back({worst->slot, worst->key.block});
  }
  return Offer(idx, offers);
}

// The table is the step's alone: it takes out what an offer names, and enters what it fills.
absl::Status CacheKeeper::Offer(uint32_t idx, const std::vector<gpu::FreeSlot>& offers) {
  const size_t capacity = built_.shape.blocks;
  Unit& unit = units_[idx];
  gpu::FreeSlot* const ring = arrays_.free_slots + idx * capacity;
  const size_t first = unit.free_tail % capacity;
  const size_t straight = std::min(offers.size(), capacity - first);
  WAVEKV_RETURN_IF_ERROR(CopyAll(ring + first, offers.data(), straight));
  WAVEKV_RETURN_IF_ERROR(CopyAll(ring, offers.data() + straight, offers.size() - straight));
  unit.free_tail += offers.size();
  return CopyAll(&arrays_.state[idx].free_tail, &unit.free_tail, 1);
}

CacheHits CacheKeeper::Hits(uint32_t first_step) const {
  CacheHits sum;
  for (const Unit& unit : units_) {
    for (size_t step = first_step; step < unit.uses.size(); ++step) {
      sum.lookups += unit.uses[step].size();
      sum.hits += unit.hits[step];
    }
  }
  return sum;
}

CacheHits CacheKeeper::BeladyHits(uint32_t first_step) const {
  CacheHits sum;
  for (const Unit& unit : units_) {
    const CacheHits hits = ReplayBelady(unit.uses, first_step, unit.slot_count);
    sum.lookups += hits.lookups;
    sum.hits += hits.hits;
  }
  return sum;
}

}  // namespace wavekv::bench
