#include "gpu/resident/cache_books.h"

#include <algorithm>
#include <map>
#include <utility>

#include "storage/base/check.h"

namespace wavekv::resident {
namespace {

// While few are missed, so many slots are on offer. While many are, this share of all and one more,
// and as much again for each further step of a round, up to half of all, as long as the blocks in
// those slots are worth less than what is missed.
constexpr uint64_t kOfferedMin = 8;
constexpr uint64_t kOfferedShare = 8;
constexpr uint64_t kOfferedMaxShare = 2;
// A round has as many steps at most, whatever its region says.
constexpr uint64_t kRoundStepsMax = 1024;

}  // namespace

CacheBooks::CacheBooks(uint32_t slot_count, uint64_t free_tail)
    : slots_(slot_count), free_tail_(free_tail), policy_(MakeLrfuBlockCachePolicy(slot_count)) {
  for (uint32_t slot = 0; slot < slot_count; ++slot) idle_.push_back(slot);
}

void CacheBooks::Read(uint64_t started, uint64_t completed) {
  round_steps_ = completed > completed_ ? std::min(completed - completed_, kRoundStepsMax) : 1;
  completed_ = completed;
  for (const uint32_t idx : doubtful_) {
    Slot& slot = slots_[idx];
    if (slot.epoch == kUnknown) slot.epoch = started;
    if (completed >= slot.epoch) slot.judged = true;
  }
}

void CacheBooks::Hear(const gpu::BlockUse& use, OwnerOfBlock owner_of) {
  const uint32_t block = use.block & ~gpu::kMissBit;
  const bool missed = (use.block & gpu::kMissBit) != 0;
  const std::optional<BlockOwner> owner = owner_of(block);
  if (!std::exchange(heard_, true)) ++round_;
  if (!owner.has_value()) ++violations_;
  if (owner.has_value() && owner->live) {
    (void)policy_->Lookup({owner->segment_uid, block}, round_);
  }
  if (missed) ++missed_;
  if (missed && use.slot >= 0) HearClaim(use, owner_of);
}

void CacheBooks::HearOld(const gpu::BlockUse& use, OwnerOfBlock owner_of) {
  if (!owner_of(use.block & ~gpu::kMissBit).has_value()) ++violations_;
  if ((use.block & gpu::kMissBit) == 0) return;
  ++missed_;
  if (use.slot >= 0) HearClaim(use, owner_of);
}

void CacheBooks::HearClaim(const gpu::BlockUse& use, OwnerOfBlock owner_of) {
  const auto idx = static_cast<uint32_t>(use.slot);
  if (idx >= slots_.size() || use.place >= free_tail_) {
    ++violations_;
    return;
  }
  // Of an earlier offer, or in doubt: the table will say.
  if (slots_[idx].is != SlotIs::kOffered || slots_[idx].place != use.place) return;
  --offered_count_;
  const uint32_t block = use.block & ~gpu::kMissBit;
  const std::optional<BlockOwner> owner = owner_of(block);
  if (owner.has_value() && owner->live) return Adopt(idx, block, owner->segment_uid);
  // Of a step that still saw a version with that block.
  if (owner.has_value()) Clear(block);
  TakeBack(idx);
}

void CacheBooks::Adopt(uint32_t slot, uint32_t block, uint64_t segment_uid) {
  const BlockKey key{segment_uid, block};
  if (policy_->Adopt(key, slot)) {
    slots_[slot].is = SlotIs::kFilled;
    slots_[slot].block = block;
    return;
  }
  // No step claims for a block that is in the table: whatever this is, the block starts over.
  ++violations_;
  Clear(block);
  if (const std::optional<uint32_t> other = policy_->Erase(key)) TakeBack(*other);
  TakeBack(slot);
}

void CacheBooks::TakeBack(uint32_t slot) {
  slots_[slot].is = SlotIs::kIdle;
  idle_.push_back(slot);
}

void CacheBooks::HearNothing(uint64_t free_head) {
  for (uint32_t idx = 0; idx < slots_.size(); ++idx) {
    Slot& slot = slots_[idx];
    if (slot.is != SlotIs::kOffered || slot.place >= free_head) continue;
    slot.is = SlotIs::kInDoubt;
    slot.epoch = kUnknown;
    slot.judged = false;
    doubtful_.push_back(idx);
    --offered_count_;
  }
}

bool CacheBooks::wants_table() const {
  return std::any_of(doubtful_.begin(), doubtful_.end(),
                     [this](uint32_t idx) { return slots_[idx].judged; });
}

void CacheBooks::ReadTable(std::span<const int32_t> table, OwnerOfBlock owner_of) {
  std::map<uint32_t, std::vector<uint32_t>> named;  // Slot -> blocks
  for (const uint32_t idx : doubtful_) {
    if (slots_[idx].judged) named[idx];
  }
  for (uint32_t block = 0; block < table.size(); ++block) {
    const auto found = table[block] < 0 ? named.end() : named.find(table[block]);
    if (found != named.end()) found->second.push_back(block);
  }
  std::erase_if(doubtful_, [this](uint32_t idx) { return slots_[idx].judged; });
  for (const auto& [slot, blocks] : named) Judge(slot, blocks, owner_of);
}

void CacheBooks::Judge(uint32_t slot, std::span<const uint32_t> blocks, OwnerOfBlock owner_of) {
  BlockKey believed;
  uint32_t live_count = 0;
  for (const uint32_t block : blocks) {
    const std::optional<BlockOwner> owner = owner_of(block);
    if (!owner.has_value() || !owner->live) continue;
    ++live_count;
    believed = {owner->segment_uid, block};
  }
  if (live_count > 1) ++violations_;
  for (const uint32_t block : blocks) {
    if (live_count != 1 || block != believed.block) Clear(block);
  }
  if (live_count != 1) return TakeBack(slot);
  Adopt(slot, believed.block, believed.segment_uid);
}

void CacheBooks::Leave(uint64_t segment_uid, uint32_t first, uint32_t count) {
  for (uint32_t idx = 0; idx < slots_.size(); ++idx) {
    const Slot& slot = slots_[idx];
    if (slot.is != SlotIs::kFilled || slot.block < first || slot.block - first >= count) continue;
    Clear(slot.block);
    TakeBack(idx);
  }
  policy_->EraseSegment(segment_uid);
}

void CacheBooks::Offer() {
  demand_ = std::max(std::exchange(missed_, 0), demand_ - demand_ / 8);
  for (const uint32_t idx : std::exchange(idle_, {})) OfferSlot(idx, gpu::kNoBlock);
  const uint64_t slots = slots_.size();
  const uint64_t usual = slots / kOfferedShare + 1, least = std::min(kOfferedMin, usual);
  const uint64_t most = std::min(usual * round_steps_, slots / kOfferedMaxShare);
  const uint64_t wanted = std::min(std::max(least, demand_ + demand_ / 2), most);
  for (uint64_t there = offered_count_ + doubtful_.size(); there < wanted; ++there) {
    const std::optional<SlotOfBlock> worst =
        there < usual ? policy_->Evict(round_ - 1) : policy_->EvictWorse(round_ - 1);
    if (!worst.has_value()) break;
    WAVEKV_CHECK(slots_[worst->slot].is == SlotIs::kFilled, "the policy knows filled slots only");
    OfferSlot(worst->slot, worst->key.block);
  }
  heard_ = false;
}

void CacheBooks::OfferSlot(uint32_t slot, uint32_t block) {
  slots_[slot].is = SlotIs::kOffered;
  slots_[slot].place = free_tail_++;
  writes_.offered.push_back({slots_[slot].place, slot, block});
  ++offered_count_;
}

CacheBooks::Writes CacheBooks::TakeWrites() { return std::exchange(writes_, {}); }

}  // namespace wavekv::resident
