#include "bench/gpu/cache_keeper.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

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
    const auto slot_count = std::max<uint32_t>(
        1, static_cast<uint32_t>(std::ceil(cache_ratio_ * built_.block_counts[i])));
    unit.books = std::make_unique<resident::CacheBooks>(slot_count, /*free_tail=*/0);
    states[i].free_head = states[i].free_seen = states[i].free_tail = 0;
    unit.log_read = states[i].log_end;
    WAVEKV_RETURN_IF_ERROR(CopyAll(&arrays_.state[i], &states[i], 1));
    WAVEKV_RETURN_IF_ERROR(Offer(i));
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

  std::vector<BlockKey>& uses = unit.uses.emplace_back();
  uint32_t hits = 0;
  for (const gpu::BlockUse& use : std::span(log).first(fresh)) {
    uses.push_back({uint64_t{idx} + 1, use.block & ~gpu::kMissBit});
    hits += (use.block & gpu::kMissBit) == 0 ? 1 : 0;
    unit.books->Hear(use, [idx](uint32_t) {
      return resident::BlockOwner{.segment_uid = uint64_t{idx} + 1, .live = true};
    });
  }
  unit.hits.push_back(hits);
  unit.books->Read(/*started=*/unit.uses.size(), /*completed=*/unit.uses.size());
  if (unit.books->violations() > 0) {
    return absl::InternalError(
        absl::StrCat("unit ", idx, " logged ", unit.books->violations(), " uses that cannot be"));
  }
  return Offer(idx);
}

// The table is the step's alone: it takes out what an offer names, and enters what it fills.
absl::Status CacheKeeper::Offer(uint32_t idx) {
  const size_t capacity = built_.shape.blocks;
  Unit& unit = units_[idx];
  unit.books->Offer();
  const resident::CacheBooks::Writes writes = unit.books->TakeWrites();
  if (writes.offered.empty()) return absl::OkStatus();
  std::vector<gpu::FreeSlot> offers;
  for (const auto& offered : writes.offered) offers.push_back({offered.slot, offered.block});
  gpu::FreeSlot* const ring = arrays_.free_slots + idx * capacity;
  const size_t first = writes.offered.front().place % capacity;
  const size_t straight = std::min(offers.size(), capacity - first);
  WAVEKV_RETURN_IF_ERROR(CopyAll(ring + first, offers.data(), straight));
  WAVEKV_RETURN_IF_ERROR(CopyAll(ring, offers.data() + straight, offers.size() - straight));
  const uint64_t free_tail = unit.books->free_tail();
  return CopyAll(&arrays_.state[idx].free_tail, &free_tail, 1);
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
    sum += ReplayBelady(unit.uses, first_step, unit.books->slot_count());
  }
  return sum;
}

}  // namespace wavekv::bench
