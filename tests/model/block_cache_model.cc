#include "tests/model/block_cache_model.h"

#include <string>

namespace wavekv::testing {
namespace {

constexpr uint8_t kHalf = 0xff;
constexpr uint8_t kWrongBlock = 1, kWrongVersion = 2;

std::string Named(const char* action, size_t number) {
  return std::string(action) + " " + std::to_string(number);
}

}  // namespace

BlockCacheModel::State BlockCacheModel::Initial() const {
  State state = {};
  state.areas[0].is = AreaIs::kCurrent;
  state.engine_lives = state.manager_lives = true;
  return state;
}

void BlockCacheModel::Next(const State& state, Moves<State>* moves) const {
  if (state.engine_lives) {
    StepMoves(state, moves);
    State next = state;
    next.engine_lives = false;
    moves->Add("the engine dies", next);
  }
  if (!state.manager_lives) return;
  if (!state.engine_lives) {
    if (state.reaped) return;
    // The process is gone, and with it what its kernels did: no epoch is waited for.
    State next = state;
    next.reaped = true;
    for (Slot& slot : next.slots) slot = {};
    moves->Add("the manager reaps the region", next);
    return;
  }
  SlotMoves(state, moves);
  VersionMoves(state, moves);
  State next = state;
  next.manager_lives = false;
  moves->Add("the manager dies", next);
}

// A step: begins, reads the descriptor, resolves one block, reads it. It waits for nobody.
void BlockCacheModel::StepMoves(const State& state, Moves<State>* moves) const {
  State next = state;
  switch (state.phase) {
    case Phase::kIdle:
      if (state.completed == kStepsMax) return;
      if (rules_.step_starts_before_it_reads) ++next.started;
      next.phase = Phase::kStarted;
      moves->Add("a step begins", next);
      return;
    case Phase::kStarted:
      next.area = state.current;
      next.version = state.areas[state.current].version;
      next.phase = Phase::kDescribed;
      for (uint8_t block = 1; block <= kBlocks; ++block) {
        next.want = block;
        moves->Add(Named("the step reads the descriptor and wants block", block), next);
      }
      return;
    case Phase::kDescribed: {
      next.slot_plus_1 = state.areas[state.area].slot_of[state.want];
      next.phase = Phase::kResolved;
      next.claims = false;
      if (!rules_.step_starts_before_it_reads) ++next.started;
      moves->Add("the step reads the table", next);
      if (next.slot_plus_1 != 0) return;
      // A miss comes from the pool; it may be written into a slot that the manager offers.
      for (uint8_t i = 0; i < kSlots; ++i) {
        const Slot& slot = state.slots[i];
        if (slot.is != SlotIs::kOffered || slot.claimed_for != 0) continue;
        State claimed = next;
        claimed.slots[i].content = kHalf;
        claimed.slots[i].claimed_for = state.want;
        claimed.areas[state.area].slot_of[state.want] = i + 1;
        claimed.slot_plus_1 = i + 1;
        claimed.claims = true;
        moves->Add(Named("the step claims slot", i), claimed);
      }
      return;
    }
    case Phase::kResolved:
      if (state.areas[state.area].version != state.version) next.broken = kWrongVersion;
      if (state.claims) {
        next.slots[state.slot_plus_1 - 1].content = state.want;
      } else if (state.slot_plus_1 != 0 &&
                 state.slots[state.slot_plus_1 - 1].content != state.want) {
        next.broken = kWrongBlock;
      }
      next.completed = state.completed + 1;
      next.phase = Phase::kIdle;
      next.area = next.version = next.want = next.slot_plus_1 = 0;
      next.claims = false;
      moves->Add("the step reads its block and completes", next);
      return;
  }
}

void BlockCacheModel::Unpublish(uint8_t slot, State* state) const {
  const uint8_t block = state->slots[slot].block;
  for (Area& area : state->areas) {
    if (!rules_.unpublishes_in_every_area && area.is != AreaIs::kCurrent) continue;
    if (area.slot_of[block] == slot + 1) area.slot_of[block] = 0;
  }
  state->slots[slot].block = 0;
}

void BlockCacheModel::SlotMoves(const State& state, Moves<State>* moves) const {
  const auto publish = [&](uint8_t slot, uint8_t block, State* next) {
    next->slots[slot].is = SlotIs::kPublished;
    next->slots[slot].block = block;
    for (Area& area : next->areas) {
      if (area.is == AreaIs::kCurrent || area.is == AreaIs::kWritten)
        area.slot_of[block] = slot + 1;
    }
  };
  const auto known = [&](uint8_t block) {
    for (const Slot& slot : state.slots) {
      if (slot.block == block) return true;
    }
    return false;
  };
  for (uint8_t i = 0; i < kSlots; ++i) {
    const Slot& slot = state.slots[i];
    State next = state;
    Slot& after = next.slots[i];
    switch (slot.is) {
      case SlotIs::kFree:
        after.is = SlotIs::kOffered;
        moves->Add(Named("the manager offers slot", i), next);
        for (uint8_t block = 1; block <= kBlocks; ++block) {
          if (known(block)) continue;
          next = state;
          after = {SlotIs::kFilling, block, kHalf, 0, 0};
          if (!rules_.filled_before_published) publish(i, block, &next);
          if (!rules_.filled_before_published) after.is = SlotIs::kFilling;
          moves->Add(Named("the manager begins to fill slot", i), next);
        }
        break;
      case SlotIs::kFilling:
        after.content = slot.block;
        publish(i, slot.block, &next);
        moves->Add(Named("the manager fills and publishes slot", i), next);
        break;
      case SlotIs::kOffered:
        if (slot.claimed_for == 0) break;
        after.claimed_for = 0;
        if (known(slot.claimed_for)) {
          // It is cached twice: one of the slots is in the table, both are taken back in time.
          after.is = SlotIs::kPublished;
          after.block = slot.claimed_for;
        } else {
          publish(i, slot.claimed_for, &next);
        }
        moves->Add(Named("the manager takes the claim of slot", i), next);
        break;
      case SlotIs::kPublished:
        after.is = SlotIs::kUnpublished;
        if (rules_.looks_at_started_after_unpublishing) {
          Unpublish(i, &next);
        } else {
          after.epoch = state.started;
        }
        moves->Add(Named("the manager begins to take back slot", i), next);
        break;
      case SlotIs::kUnpublished:
        after.is = SlotIs::kRetiring;
        if (rules_.looks_at_started_after_unpublishing) {
          after.epoch = state.started;
        } else {
          Unpublish(i, &next);
        }
        moves->Add(Named("the manager goes on to take back slot", i), next);
        break;
      case SlotIs::kRetiring:
        if (rules_.slot_waits_for_completed && state.completed < slot.epoch) break;
        after = {};
        after.content = slot.content;
        moves->Add(Named("the manager frees slot", i), next);
        break;
    }
  }
}

void BlockCacheModel::VersionMoves(const State& state, Moves<State>* moves) const {
  const Area& current = state.areas[state.current];
  for (uint8_t i = 0; i < kAreas; ++i) {
    const Area& area = state.areas[i];
    State next = state;
    Area& after = next.areas[i];
    switch (area.is) {
      case AreaIs::kFree:
        if (current.version == kVersionsMax) break;
        after = {AreaIs::kWritten, static_cast<uint8_t>(current.version + 1), 0, current.slot_of};
        moves->Add(Named("the manager writes the next version into area", i), next);
        break;
      case AreaIs::kWritten:
        next.areas[state.current].is = AreaIs::kReplaced;
        after.is = AreaIs::kCurrent;
        next.current = i;
        moves->Add(Named("the manager publishes area", i), next);
        break;
      case AreaIs::kCurrent:
        break;
      case AreaIs::kReplaced:
        after.is = AreaIs::kRetiring;
        after.epoch = state.started;
        moves->Add(Named("the manager looks which step has started, for area", i), next);
        break;
      case AreaIs::kRetiring:
        if (rules_.area_waits_for_completed && state.completed < area.epoch) break;
        after = {};
        after.version = area.version;
        moves->Add(Named("the manager frees area", i), next);
        break;
    }
  }
}

const char* BlockCacheModel::Violation(const State& state) const {
  if (state.broken == kWrongBlock) return "a step read another block than it asked for";
  if (state.broken == kWrongVersion) return "a step's version was replaced under it";
  if (state.reaped) {
    for (const Slot& slot : state.slots) {
      if (slot.content != 0) return "a reaped region keeps a tenant's rows";
    }
  }
  return nullptr;
}

bool BlockCacheModel::MayEnd(const State& state) const {
  // Whoever is left has nothing to do: no step of a living engine is stuck.
  return !state.engine_lives || (!state.manager_lives && state.completed == kStepsMax);
}

}  // namespace wavekv::testing
