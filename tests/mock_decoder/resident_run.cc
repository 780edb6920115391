#include "tests/mock_decoder/resident_run.h"

#include <cstddef>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::mock {

absl::Status ResidentRun::Attach(client::Sequence* sequence) {
  sequence_ = sequence;
  return engine_->Attach(sequence, {});
}

absl::StatusOr<StepOutput> ResidentRun::Step(uint32_t i) {
  const uint64_t position = world_.facts()[i].ask_position;
  return Run(i, position, position);
}

absl::Status ResidentRun::Speculate(uint32_t i, uint64_t key_position, uint64_t value_position) {
  return Run(i, key_position, value_position).status();
}

absl::Status ResidentRun::Truncate(uint64_t token_count) {
  WAVEKV_RETURN_IF_ERROR(sequence_->Truncate(token_count));
  return engine_->NoteStored(token_count);
}

absl::StatusOr<StepOutput> ResidentRun::Run(uint32_t i, uint64_t key_position,
                                            uint64_t value_position) {
  const Context& context = world_.context();
  std::vector<std::byte> queries, keys, values;
  for (uint32_t layer = 0; layer < world_.config().model.layer_count; ++layer) {
    const std::vector<std::byte> asked = world_.QueryBytes(layer, i);
    queries.insert(queries.end(), asked.begin(), asked.end());
    const std::byte* const key = context.Keys(layer, key_position);
    keys.insert(keys.end(), key, key + context.token_bytes());
    const std::byte* const value = context.Values(layer, value_position);
    values.insert(values.end(), value, value + context.token_bytes());
  }
  absl::StatusOr<integration::TokenAnswer> answer =
      engine_->Step({.queries = queries, .keys = keys, .values = values});
  if (answer.ok()) return std::move(answer->out);
  // Why it is attended to no more is the daemon's to say.
  const absl::StatusOr<client::ResidentState> state = sequence_->ResidentStatus();
  if (!state.ok() || state->attached.ok()) return answer.status();
  return absl::Status(state->attached.code(),
                      absl::StrCat(answer.status().message(), "; ", state->attached.message()));
}

absl::StatusOr<client::StepCounters> ResidentRun::Detach() {
  WAVEKV_RETURN_IF_ERROR(sequence_->DetachResident());
  WAVEKV_ASSIGN_OR_RETURN(const client::ResidentState state, sequence_->ResidentStatus());
  client::StepCounters counters;
  counters.cache_hit_blocks = state.hit_blocks;
  counters.cache_miss_blocks = state.miss_blocks;
  return counters;
}

}  // namespace wavekv::mock
