// Hides facts in a context, so that exact attention just finds them.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "storage/base/thread_pool.h"
#include "tests/mock_decoder/context.h"
#include "tests/mock_decoder/model.h"

namespace wavekv::mock {

// The mass exact attention gives a needle's token, for the weakest query head of its group: enough
// for the digit to be plain, no more. One part in ten stays background.
inline constexpr double kNeedleMass = 0.9;

// Something to remember and the step that asks for it.
struct Fact {
  uint64_t position = 0;      // Where it is hidden, in the prefill.
  uint64_t ask_position = 0;  // Of the token that asks for it, after the prefill.
  uint32_t answer = 0;        // A token.
};

// Plants every fact in one (layer, KV head). Its value row becomes the code of the answer's digit.
// Its key row stays the background's plus a component along the mean of the group's queries, of
// just the length that gives it kNeedleMass against everything the asking step sees, the other
// needles included. `queries` holds [group, kHeadDim] per fact, one fact after the other.
void PlantFacts(const Model& model, uint32_t layer, uint32_t kv_head, std::span<const Fact> facts,
                std::span<const float> queries, Context* context, ThreadPool* pool);

}  // namespace wavekv::mock
