// The protocol of appended tokens (docs/decisions/013-resident-path.md): the engine's steps append
// to a ring on the device and attend over it; wavekvd, the manager, copies rows out, publishes the
// index that covers them, and truncates.
#pragma once

#include <array>
#include <cstdint>

#include "tests/model/state_space.h"

namespace wavekv::testing {

class SteadyRingModel {
 public:
  static constexpr uint8_t kRows = 2, kTokensMax = 4, kTruncatesMax = 2;

  struct Rules {
    bool append_waits_for_index = true;
    bool truncate_drains = true;
    bool copy_checks_generation = true;
    bool index_is_of_copied_rows = true;
  };

  struct State {
    // What is at a place: the generation under which it was appended plus 1; 0: nothing. A
    // position's token of another generation is another token.
    std::array<uint8_t, kRows> ring_generation, ring_position;
    std::array<uint8_t, kTokensMax> copied_generation, true_generation;
    uint8_t submitted;  // Tokens that the engine has submitted a step for.
    uint8_t appended;   // Tokens on the device.
    uint8_t copied, covered;
    uint8_t generation, truncates;
    // The step under way: 0: none, 1: submitted, 2: appended, 3: has read the descriptor.
    uint8_t phase, step_position, step_generation, step_covered;
    // The copy under way: 0: none, 1: begun, 2: has read its row.
    uint8_t copy, copy_position, copy_generation, copy_row;
    bool engine_lives, manager_lives;
    uint8_t broken;
  };

  explicit SteadyRingModel(const Rules& rules) : rules_(rules) {}

  State Initial() const;
  void Next(const State& state, Moves<State>* moves) const;
  const char* Violation(const State& state) const;
  bool MayEnd(const State& state) const;

 private:
  bool MaySubmit(const State& state) const;
  void EngineMoves(const State& state, Moves<State>* moves) const;
  void ManagerMoves(const State& state, Moves<State>* moves) const;

  const Rules rules_;
};

}  // namespace wavekv::testing
