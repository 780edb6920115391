#include "tests/model/steady_ring_model.h"

#include <algorithm>
#include <string>

namespace wavekv::testing {
namespace {

constexpr uint8_t kWrongRow = 1, kWrongIndex = 2;

}  // namespace

SteadyRingModel::State SteadyRingModel::Initial() const {
  State state = {};
  state.engine_lives = state.manager_lives = true;
  return state;
}

void SteadyRingModel::Next(const State& state, Moves<State>* moves) const {
  if (state.engine_lives) {
    EngineMoves(state, moves);
    State next = state;
    next.engine_lives = false;
    moves->Add("the engine dies", next);
  }
  if (state.manager_lives) {
    ManagerMoves(state, moves);
    State next = state;
    next.manager_lives = false;
    moves->Add("the manager dies", next);
  }
}

// The host decides before it submits: nothing in a step waits.
bool SteadyRingModel::MaySubmit(const State& state) const {
  if (state.submitted == kTokensMax || state.phase != 0) return false;
  if (state.submitted < kRows) return true;
  // What the index covers was copied before.
  return !rules_.append_waits_for_index || state.submitted - kRows < state.covered;
}

void SteadyRingModel::EngineMoves(const State& state, Moves<State>* moves) const {
  State next = state;
  if (MaySubmit(state)) {
    next.phase = 1;
    next.step_position = state.submitted;
    next.step_generation = state.generation;
    next.true_generation[state.submitted] = state.generation + 1;
    ++next.submitted;
    moves->Add("the engine submits a step", next);
    next = state;
  }
  switch (state.phase) {
    case 1:
      next.ring_generation[state.step_position % kRows] = state.step_generation + 1;
      next.ring_position[state.step_position % kRows] = state.step_position;
      next.appended = state.step_position + 1;
      next.phase = 2;
      moves->Add("the step appends its token", next);
      break;
    case 2:
      next.step_covered = state.covered;
      next.phase = 3;
      moves->Add("the step reads the descriptor", next);
      break;
    case 3:
      for (uint8_t at = state.step_covered; at <= state.step_position; ++at) {
        if (state.ring_position[at % kRows] != at ||
            state.ring_generation[at % kRows] != state.true_generation[at]) {
          next.broken = kWrongRow;
        }
      }
      next.phase = next.step_position = next.step_generation = next.step_covered = 0;
      moves->Add("the step attends and completes", next);
      break;
    default:
      break;
  }
  const bool drained = state.phase == 0;
  if (!state.manager_lives || state.truncates == kTruncatesMax || state.submitted == 0 ||
      (rules_.truncate_drains && !drained)) {
    return;
  }
  // The call to the daemon, which does it between two of the manager's actions.
  next = state;
  const uint8_t kept = state.submitted - 1;
  next.submitted = kept;
  next.appended = std::min(state.appended, kept);
  next.copied = std::min(state.copied, kept);
  next.covered = std::min(state.covered, kept);
  ++next.generation;
  ++next.truncates;
  moves->Add("the last token is truncated", next);
}

void SteadyRingModel::ManagerMoves(const State& state, Moves<State>* moves) const {
  State next = state;
  switch (state.copy) {
    case 0:
      if (state.copied == state.appended) break;
      next.copy = 1;
      next.copy_position = state.copied;
      next.copy_generation = state.generation;
      moves->Add("the manager begins to copy a row", next);
      break;
    case 1:
      next.copy = 2;
      next.copy_row = state.ring_generation[state.copy_position % kRows];
      moves->Add("the row is read", next);
      break;
    default:
      if (!rules_.copy_checks_generation || state.copy_generation == state.generation) {
        next.copied_generation[state.copy_position] = state.copy_row;
        next.copied = state.copy_position + 1;
      }
      next.copy = next.copy_position = next.copy_generation = next.copy_row = 0;
      moves->Add("the copy ends", next);
      break;
  }
  const uint8_t indexed_max = rules_.index_is_of_copied_rows ? state.copied : state.appended;
  if (state.covered >= indexed_max) return;
  next = state;
  ++next.covered;
  if (state.copied_generation[state.covered] != state.true_generation[state.covered]) {
    next.broken = kWrongIndex;
  }
  moves->Add("the manager publishes an index of one token more", next);
}

const char* SteadyRingModel::Violation(const State& state) const {
  if (state.broken == kWrongRow) return "a step attended over a row that is not its token's";
  if (state.broken == kWrongIndex) return "an index was built of rows that are not the tokens'";
  return nullptr;
}

bool SteadyRingModel::MayEnd(const State& state) const {
  // A full ring waits for the manager; when that is dead, the engine's deadline ends it.
  return !state.engine_lives || !state.manager_lives ||
         (state.submitted == kTokensMax && state.covered == kTokensMax &&
          state.truncates == kTruncatesMax);
}

}  // namespace wavekv::testing
