// The protocol of the block cache on a device (docs/decisions/013-resident-path.md): the steps of
// an engine read it while wavekvd, the manager, fills, publishes and takes back slots, and replaces
// the version of the index. Every access to shared memory is an action of its own.
#pragma once

#include <array>
#include <cstdint>

#include "tests/model/state_space.h"

namespace wavekv::testing {

class BlockCacheModel {
 public:
  static constexpr uint8_t kSlots = 2, kBlocks = 2, kAreas = 2, kStepsMax = 3, kVersionsMax = 2;

  // What the two sides keep to; a rule that is left out must be found out.
  struct Rules {
    bool step_starts_before_it_reads = true;
    bool filled_before_published = true;
    bool looks_at_started_after_unpublishing = true;
    bool slot_waits_for_completed = true;
    bool unpublishes_in_every_area = true;
    bool area_waits_for_completed = true;
  };

  enum class SlotIs : uint8_t { kFree, kFilling, kPublished, kUnpublished, kRetiring, kOffered };
  enum class Phase : uint8_t { kIdle, kStarted, kDescribed, kResolved };
  enum class AreaIs : uint8_t { kFree, kWritten, kCurrent, kReplaced, kRetiring };

  struct Slot {
    SlotIs is;
    uint8_t block;        // The manager's record: 1.., 0: none.
    uint8_t content;      // What lies in it: a block, 0: none, kHalf: being written.
    uint8_t epoch;        // The last step that may read it.
    uint8_t claimed_for;  // The device's log: a block; 0: none.
  };
  struct Area {
    AreaIs is;
    uint8_t version;
    uint8_t epoch;
    std::array<uint8_t, kBlocks + 1> slot_of;  // The table: block -> slot + 1; 0: not cached.
  };
  struct State {
    std::array<Slot, kSlots> slots;
    std::array<Area, kAreas> areas;
    uint8_t current;  // The descriptor's area.
    uint8_t started, completed;
    Phase phase;
    uint8_t area, version, want, slot_plus_1;  // Of the step under way.
    bool claims;                               // It fills the slot that it resolved to.
    bool engine_lives, manager_lives, reaped;
    uint8_t broken;
  };

  explicit BlockCacheModel(const Rules& rules) : rules_(rules) {}

  State Initial() const;
  void Next(const State& state, Moves<State>* moves) const;
  const char* Violation(const State& state) const;
  bool MayEnd(const State& state) const;

 private:
  void StepMoves(const State& state, Moves<State>* moves) const;
  void Unpublish(uint8_t slot, State* state) const;
  void SlotMoves(const State& state, Moves<State>* moves) const;
  void VersionMoves(const State& state, Moves<State>* moves) const;

  const Rules rules_;
};

}  // namespace wavekv::testing
