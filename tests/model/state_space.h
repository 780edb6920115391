// A small explicit-state model checker: walks every interleaving of a model's actions.
//
// A model is a struct with
//   using State = ...;                   plain data without padding that matters, compared by bytes
//   State Initial() const;
//   void Next(const State&, Moves<State>*) const;   every action that is possible, one at a time
//   const char* Violation(const State&) const;      what is broken in it; nullptr: nothing
//   bool MayEnd(const State&) const;                it is fine that nothing can happen any more
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace wavekv::testing {

template <class State>
class Moves {
 public:
  void Add(std::string action, const State& state) {
    moves_.emplace_back(std::move(action), state);
  }
  const std::vector<std::pair<std::string, State>>& all() const { return moves_; }

 private:
  std::vector<std::pair<std::string, State>> moves_;
};

struct Exploration {
  size_t state_count = 0;
  std::string problem;             // Empty: none. The first found, by the fewest actions.
  std::vector<std::string> trace;  // The actions that lead to it.
};

// Breadth first, until a problem is found or every state was seen.
template <class Model>
Exploration Explore(const Model& model) {
  using State = typename Model::State;
  static_assert(std::is_trivially_copyable_v<State>);
  const auto bytes_of = [](const State& state) {
    return std::string(reinterpret_cast<const char*>(&state), sizeof state);
  };
  struct Origin {
    std::string from;
    std::string action;
  };
  std::unordered_map<std::string, Origin> seen;
  std::deque<State> waiting = {model.Initial()};
  seen.emplace(bytes_of(waiting.front()), Origin());
  Exploration result;
  const auto found = [&](const State& state, std::string problem) {
    result.problem = std::move(problem);
    for (std::string at = bytes_of(state); !seen.at(at).action.empty(); at = seen.at(at).from) {
      result.trace.push_back(seen.at(at).action);
    }
    std::reverse(result.trace.begin(), result.trace.end());
  };
  while (!waiting.empty() && result.problem.empty()) {
    const State state = waiting.front();
    waiting.pop_front();
    if (const char* const violation = model.Violation(state)) {
      found(state, violation);
      break;
    }
    Moves<State> moves;
    model.Next(state, &moves);
    if (moves.all().empty() && !model.MayEnd(state)) found(state, "nothing can happen any more");
    for (const auto& [action, next] : moves.all()) {
      if (seen.emplace(bytes_of(next), Origin{bytes_of(state), action}).second) {
        waiting.push_back(next);
      }
    }
  }
  result.state_count = seen.size();
  return result;
}

}  // namespace wavekv::testing
