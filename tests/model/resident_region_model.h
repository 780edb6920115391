// The protocol of a resident region (docs/decisions/015-resident-region.md): only steps fill slots,
// numbers of blocks outlive the version that brought them, the log is all that the manager hears,
// and it may be lapped. Every version of the index is one segment of one block; beside it a step
// wants a block that all versions have.
#pragma once

#include <array>
#include <cstdint>

#include "tests/model/state_space.h"

namespace wavekv::testing {

class ResidentRegionModel {
 public:
  static constexpr uint8_t kSlots = 2, kAreas = 2, kStepsMax = 3, kVersionsMax = 3;
  static constexpr uint8_t kNumbers = 2;        // That versions take turns with ...
  static constexpr uint8_t kCommon = kNumbers;  // ... and the common block's.

  struct Rules {
    bool number_waits_for_completed = true;
    bool number_waits_for_log = true;
    bool number_waits_for_doubts = true;
    bool log_is_of_the_next_reading = true;
    bool late_claim_leaves_the_table = true;
    bool doubt_waits_for_completed = true;
    bool lapped_log_is_noticed = true;
    bool claims_name_their_place = true;
    bool steps_clear_before_they_look = true;
    bool steps_claim_what_they_cleared = true;
  };

  enum class SlotIs : uint8_t { kIdle, kOffered, kFilled, kInDoubt };
  enum class NumberIs : uint8_t { kFree, kCopied, kLive, kRetiring, kPassed, kRead };
  enum class AreaIs : uint8_t { kFree, kCurrent, kRetiring };
  enum class Phase : uint8_t {
    kIdle,
    kStarted,
    kDescribed,
    kSawOffers,
    kCleared,
    kTaken,
    kResolved,
    kBoth
  };

  struct Slot {
    SlotIs is;
    uint8_t number_plus_1;  // The manager's record of its block.
    uint8_t epoch;
    uint8_t place;    // Of its last offer, in the ring of free slots.
    uint8_t leaves;   // With that offer: the number + 1 of the block that it held; 0: none.
    bool seen;        // By a step, since it was offered.
    bool taken;       // On the device: claimed since it was offered.
    uint8_t content;  // A segment; 0: nothing, kHalf: being written.
  };
  struct Number {
    NumberIs is;
    uint8_t segment;
    uint8_t epoch;
    uint8_t log_mark;  // What must have been read before it is free.
  };
  struct Area {
    AreaIs is;
    uint8_t version;  // Also its segment.
    uint8_t number;
    uint8_t epoch;
  };
  struct State {
    std::array<Slot, kSlots> slots;
    std::array<Number, kNumbers + 1> numbers;
    std::array<Area, kAreas> areas;
    std::array<uint8_t, kNumbers + 1> table;  // Block -> slot + 1; 0: not cached.
    uint8_t current;
    uint8_t started, completed;
    // The log has room for one entry, the last; kNoSlot: a hit.
    uint8_t entry_number, entry_slot, entry_place;
    uint8_t log_end, log_settled;  // The engine's.
    uint8_t offers;
    uint8_t log_seen, log_there, log_read;  // The manager's: as of its reading, true then, done.
    Phase phase;                            // The step under way, as are the rest.
    uint8_t area, version, number, slot_plus_1;
    bool claims;
    uint8_t common_slot_plus_1;  // Claimed for the common block.
    uint8_t broken;
  };

  explicit ResidentRegionModel(const Rules& rules) : rules_(rules) {}

  State Initial() const;
  void Next(const State& state, Moves<State>* moves) const;
  const char* Violation(const State& state) const;
  bool MayEnd(const State& state) const { return state.completed == kStepsMax; }

 private:
  void StepMoves(const State& state, Moves<State>* moves) const;
  bool CanClaim(const Slot& slot) const;
  static void Log(uint8_t number, uint8_t slot, State* state);
  void ReadMoves(const State& state, Moves<State>* moves) const;
  void LogMoves(const State& state, Moves<State>* moves) const;
  static void TakeBack(uint8_t slot, State* state);
  static void Offer(uint8_t slot, uint8_t leaves, State* state);
  void SlotMoves(const State& state, Moves<State>* moves) const;
  void NumberMoves(const State& state, Moves<State>* moves) const;
  void VersionMoves(const State& state, Moves<State>* moves) const;

  const Rules rules_;
};

}  // namespace wavekv::testing
