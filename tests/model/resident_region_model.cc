#include "tests/model/resident_region_model.h"

#include <string>

namespace wavekv::testing {
namespace {

constexpr uint8_t kHalf = 0xff;
constexpr uint8_t kCommonSegment = 0xfe;
constexpr uint8_t kNoSlot = 0xff;
constexpr uint8_t kWrongBlock = 1, kWrongVersion = 2;

std::string Named(const char* action, size_t number) {
  return std::string(action) + " " + std::to_string(number);
}

}  // namespace

ResidentRegionModel::State ResidentRegionModel::Initial() const {
  State state = {};
  for (uint8_t i = 0; i < kSlots; ++i) Offer(i, 0, &state);
  state.numbers[0] = {NumberIs::kLive, 1, 0, 0};
  state.numbers[kCommon] = {NumberIs::kLive, kCommonSegment, 0, 0};
  state.areas[0] = {AreaIs::kCurrent, 1, 0, 0};
  return state;
}

void ResidentRegionModel::Next(const State& state, Moves<State>* moves) const {
  StepMoves(state, moves);
  ReadMoves(state, moves);
  LogMoves(state, moves);
  SlotMoves(state, moves);
  NumberMoves(state, moves);
  VersionMoves(state, moves);
}

void ResidentRegionModel::StepMoves(const State& state, Moves<State>* moves) const {
  State next = state;
  switch (state.phase) {
    case Phase::kIdle:
      if (state.completed == kStepsMax) return;
      next.started = state.completed + 1;
      next.phase = Phase::kStarted;
      moves->Add("a step begins", next);
      return;
    case Phase::kStarted:
      next.area = state.current;
      next.version = state.areas[state.current].version;
      next.number = state.areas[state.current].number;
      next.phase = Phase::kDescribed;
      moves->Add("the step reads its area", next);
      return;
    case Phase::kDescribed:
      for (Slot& slot : next.slots) slot.seen |= slot.is == SlotIs::kOffered && !slot.taken;
      next.phase = Phase::kSawOffers;
      moves->Add("the step sees what is on offer", next);
      return;
    case Phase::kSawOffers:
      for (uint8_t i = 0; i < kSlots && rules_.steps_clear_before_they_look; ++i) {
        Slot& slot = next.slots[i];
        // The manager may have changed its mind about the slot, but not about the offer.
        if (!slot.seen || slot.leaves == 0) continue;
        if (next.table[slot.leaves - 1] == i + 1) next.table[slot.leaves - 1] = 0;
        slot.leaves = 0;
      }
      next.phase = Phase::kCleared;
      moves->Add("the step clears what the offers held", next);
      return;
    case Phase::kCleared:
      next.slot_plus_1 = state.table[state.number];
      next.phase = Phase::kResolved;
      if (next.slot_plus_1 != 0) Log(state.number, kNoSlot, &next);
      moves->Add("the step looks its block up", next);
      if (next.slot_plus_1 != 0) return;
      for (uint8_t i = 0; i < kSlots; ++i) {
        if (!CanClaim(state.slots[i])) continue;
        State taken = next;
        taken.slots[i].taken = true;
        taken.slots[i].content = kHalf;
        taken.slot_plus_1 = i + 1;
        taken.claims = true;
        taken.phase = Phase::kTaken;
        moves->Add(Named("the step takes slot", i), taken);
      }
      return;
    case Phase::kTaken:
      next.table[state.number] = state.slot_plus_1;
      Log(state.number, state.slot_plus_1 - 1, &next);
      next.phase = Phase::kResolved;
      moves->Add("the step enters what it took", next);
      return;
    case Phase::kResolved:
      next.phase = Phase::kBoth;
      moves->Add("the step does without its other block", next);
      if (state.table[kCommon] != 0) return;
      for (uint8_t i = 0; i < kSlots; ++i) {
        if (!CanClaim(state.slots[i])) continue;
        State claimed = next;
        claimed.slots[i].taken = true;
        claimed.slots[i].content = kHalf;
        claimed.common_slot_plus_1 = i + 1;
        claimed.table[kCommon] = i + 1;
        Log(kCommon, i, &claimed);
        moves->Add(Named("the step claims for its other block slot", i), claimed);
      }
      return;
    case Phase::kBoth:
      if (state.areas[state.area].version != state.version) next.broken = kWrongVersion;
      if (state.claims) {
        next.slots[state.slot_plus_1 - 1].content = state.version;
      } else if (state.slot_plus_1 != 0 &&
                 state.slots[state.slot_plus_1 - 1].content != state.version) {
        next.broken = kWrongBlock;
      }
      if (state.common_slot_plus_1 != 0) {
        next.slots[state.common_slot_plus_1 - 1].content = kCommonSegment;
      }
      next.log_settled = state.log_end;
      next.completed = state.started;
      next.phase = Phase::kIdle;
      next.area = next.version = next.number = next.slot_plus_1 = next.common_slot_plus_1 = 0;
      next.claims = false;
      moves->Add("the step reads its blocks and completes", next);
      return;
  }
}

bool ResidentRegionModel::CanClaim(const Slot& slot) const {
  return slot.is == SlotIs::kOffered && !slot.taken &&
         (slot.seen || !rules_.steps_claim_what_they_cleared);
}

void ResidentRegionModel::Log(uint8_t number, uint8_t slot, State* state) {
  state->entry_number = number;
  state->entry_slot = slot;
  state->entry_place = slot == kNoSlot ? 0 : state->slots[slot].place;
  ++state->log_end;
}

// The manager reads the head's state; how far the log goes may be what it was at the last reading.
void ResidentRegionModel::ReadMoves(const State& state, Moves<State>* moves) const {
  const auto read = [&](uint8_t log, const char* action) {
    State next = state;
    next.log_seen = log;
    next.log_there = state.log_settled;
    for (Number& number : next.numbers) {
      if (number.is == NumberIs::kPassed) {
        number.is = NumberIs::kRead;
        number.log_mark = log;
      } else if (number.is == NumberIs::kRetiring &&
                 (!rules_.number_waits_for_completed || state.completed >= number.epoch)) {
        number.is = rules_.log_is_of_the_next_reading ? NumberIs::kPassed : NumberIs::kRead;
        number.log_mark = log;
      }
    }
    moves->Add(action, next);
  };
  read(state.log_settled, "the manager reads the state");
  if (state.log_there != state.log_settled) read(state.log_there, "the manager reads a torn state");
}

void ResidentRegionModel::LogMoves(const State& state, Moves<State>* moves) const {
  if (state.log_read == state.log_seen) return;
  State next = state;
  next.log_read = state.log_seen;
  const bool lapped = state.log_end > state.log_read + 1;
  if (lapped && rules_.lapped_log_is_noticed) {
    for (Slot& slot : next.slots) {
      if (slot.is != SlotIs::kOffered || !slot.taken) continue;
      slot.is = SlotIs::kInDoubt;
      slot.epoch = state.started;
    }
    moves->Add("the manager finds the log lapped", next);
    return;
  }
  if (state.entry_slot == kNoSlot) {
    moves->Add("the manager hears of a hit", next);
    return;
  }
  Slot& slot = next.slots[state.entry_slot];
  if (slot.is == SlotIs::kOffered &&
      (!rules_.claims_name_their_place || slot.place == state.entry_place)) {
    slot.number_plus_1 = state.entry_number + 1;
    slot.is = SlotIs::kFilled;
    if (state.numbers[state.entry_number].is != NumberIs::kLive) {
      if (rules_.late_claim_leaves_the_table) next.table[state.entry_number] = 0;
      TakeBack(state.entry_slot, &next);
    }
  }
  moves->Add(Named("the manager hears of a claim of slot", state.entry_slot), next);
}

void ResidentRegionModel::TakeBack(uint8_t slot, State* state) {
  state->slots[slot].is = SlotIs::kIdle;
  state->slots[slot].number_plus_1 = state->slots[slot].epoch = 0;
}

void ResidentRegionModel::Offer(uint8_t slot, uint8_t leaves, State* state) {
  Slot& offered = state->slots[slot];
  offered.is = SlotIs::kOffered;
  offered.number_plus_1 = offered.epoch = 0;
  offered.taken = offered.seen = false;
  offered.leaves = leaves;
  offered.place = ++state->offers;
}

void ResidentRegionModel::SlotMoves(const State& state, Moves<State>* moves) const {
  for (uint8_t i = 0; i < kSlots; ++i) {
    const Slot& slot = state.slots[i];
    State next = state;
    Slot& after = next.slots[i];
    switch (slot.is) {
      case SlotIs::kOffered:
        break;
      case SlotIs::kFilled:
        Offer(i, slot.number_plus_1, &next);
        moves->Add(Named("the manager offers, with its block, slot", i), next);
        break;
      case SlotIs::kIdle:
        Offer(i, 0, &next);
        moves->Add(Named("the manager offers slot", i), next);
        break;
      case SlotIs::kInDoubt: {
        if (rules_.doubt_waits_for_completed && state.completed < slot.epoch) break;
        // One that is not in the table may have been, until its block left the index.
        bool adopted = false;
        for (uint8_t number = 0; number <= kNumbers; ++number) {
          if (state.table[number] != i + 1) continue;
          if (state.numbers[number].is == NumberIs::kLive) {
            after.is = SlotIs::kFilled;
            after.number_plus_1 = number + 1;
            after.epoch = 0;
            adopted = true;
          } else {
            next.table[number] = 0;
          }
        }
        if (!adopted) TakeBack(i, &next);
        moves->Add(Named("the manager reads the table back for slot", i), next);
        break;
      }
    }
  }
}

void ResidentRegionModel::NumberMoves(const State& state, Moves<State>* moves) const {
  bool doubts = false;
  for (const Slot& slot : state.slots) doubts |= slot.is == SlotIs::kInDoubt;
  for (uint8_t i = 0; i < kNumbers; ++i) {
    if (state.numbers[i].is != NumberIs::kRead) continue;
    if (rules_.number_waits_for_log && state.log_read < state.numbers[i].log_mark) continue;
    if (rules_.number_waits_for_doubts && doubts) continue;
    State next = state;
    next.numbers[i] = {};
    moves->Add(Named("the manager frees number", i), next);
  }
}

void ResidentRegionModel::VersionMoves(const State& state, Moves<State>* moves) const {
  const Area& current = state.areas[state.current];
  const uint8_t other = 1 - state.current;
  State next = state;
  if (state.areas[other].is == AreaIs::kRetiring) {
    if (state.completed < state.areas[other].epoch) return;
    next.areas[other] = {};
    moves->Add("the manager frees the other area", next);
    return;
  }
  if (current.version == kVersionsMax) return;
  for (uint8_t number = 0; number < kNumbers; ++number) {
    next = state;
    if (state.numbers[number].is == NumberIs::kFree) {
      next.numbers[number].is = NumberIs::kCopied;
      next.table[number] = 0;  // The new segment's blocks begin without entries.
      moves->Add(Named("the manager copies the next version's index, with number", number), next);
    }
    if (state.numbers[number].is != NumberIs::kCopied) continue;
    const uint8_t version = current.version + 1;
    next.numbers[number] = {NumberIs::kLive, version, 0, 0};
    next.areas[other] = {AreaIs::kCurrent, version, number, 0};
    next.current = other;
    // The old version's segment leaves.
    next.areas[state.current].is = AreaIs::kRetiring;
    next.areas[state.current].epoch = state.started;
    next.numbers[current.number].is = NumberIs::kRetiring;
    next.numbers[current.number].epoch = state.started;
    for (uint8_t i = 0; i < kSlots; ++i) {
      const Slot& slot = state.slots[i];
      if (slot.is != SlotIs::kFilled || slot.number_plus_1 != current.number + 1) continue;
      next.table[current.number] = 0;
      TakeBack(i, &next);
    }
    moves->Add(Named("the manager publishes the next version, with number", number), next);
  }
}

const char* ResidentRegionModel::Violation(const State& state) const {
  if (state.broken == kWrongBlock) return "a step read another block than it asked for";
  if (state.broken == kWrongVersion) return "a step's version was replaced under it";
  for (uint8_t i = 0; i < kSlots; ++i) {
    const uint8_t filled = state.slots[i].number_plus_1;
    if (filled != 0 && state.table[filled - 1] != i + 1) return "a filled slot that nobody finds";
    if (state.slots[i].is != SlotIs::kOffered || state.slots[i].taken) continue;
    for (uint8_t number = 0; number <= kNumbers; ++number) {
      if (state.table[number] != i + 1 || state.slots[i].leaves == number + 1) continue;
      return "the table names a slot that nobody fills";
    }
  }
  for (uint8_t number = 0; number < kNumbers; ++number) {
    const uint8_t entry = state.table[number];
    if (state.numbers[number].is != NumberIs::kFree || entry == 0) continue;
    if (state.slots[entry - 1].leaves != number + 1) return "the block of a free number is cached";
  }
  return nullptr;
}

}  // namespace wavekv::testing
