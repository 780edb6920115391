// The answer steps of a run over a resident region, as an engine on a GPU takes them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session.h"
#include "tests/integration/token_engine.h"
#include "tests/mock_decoder/world.h"

namespace wavekv::mock {

// Not thread-safe.
class ResidentRun {
 public:
  // Both outlive it.
  ResidentRun(const World& world, integration::TokenEngine* engine)
      : world_(world), engine_(engine) {}

  // `sequence` has its index and takes the place of the one before.
  absl::Status Attach(client::Sequence* sequence);
  // The token that asks for fact `i`, appended to every layer and attended for: what came out.
  absl::StatusOr<StepOutput> Step(uint32_t i);
  // The same question with a wrong token: key and value of other positions.
  absl::Status Speculate(uint32_t i, uint64_t key_position, uint64_t value_position);
  // Takes back what was speculated.
  absl::Status Truncate(uint64_t token_count);
  // What the steps since Attach asked of the block cache; nothing else is counted.
  absl::StatusOr<client::StepCounters> Detach();

 private:
  absl::StatusOr<StepOutput> Run(uint32_t i, uint64_t key_position, uint64_t value_position);

  const World& world_;
  integration::TokenEngine* const engine_;
  client::Sequence* sequence_ = nullptr;
};

}  // namespace wavekv::mock
