// An engine that attends over an attached sequence: its kernels' steps in C++, over the memory of
// the fake driver, which a process can read and write as its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/mapping_cache.h"
#include "client/session.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/resident/reference_step.h"
#include "tests/integration/host_cache.h"
#include "tests/integration/token_engine.h"

namespace wavekv::integration {

// bf16, keys and values of 64, two layers; segments of 1,024 tokens and small ones of 256, so that
// a few hundred tokens make several versions. All clusters are retrieved: a step is exact.
ModelShape ResidentShape();
inline constexpr uint32_t kResidentSegmentTokens = 1024;
inline constexpr uint32_t kResidentSmallSegmentTokens = 256;
client::SequenceOptions ResidentSequenceOptions(uint64_t max_tokens);
// A ring of 512 tokens.
client::ResidentOptions ResidentRegionOptions();

// A sequence of the cache's first tokens, its index built.
absl::StatusOr<std::unique_ptr<client::Sequence>> CreateResidentSequence(client::Session& session,
                                                                         HostCache* cache,
                                                                         uint64_t token_count,
                                                                         uint64_t max_tokens);

class ResidentEngine {
 public:
  // Attaches `sequence`, which outlives the engine.
  static absl::StatusOr<std::unique_ptr<ResidentEngine>> Attach(
      client::Sequence* sequence, const client::ResidentOptions& options = ResidentRegionOptions());

  // Appends the next token of the cache to every layer, once the ring has room, and attends.
  // Returns one result for each layer. Errors: of asking for room; FailedPrecondition when there is
  // none for a minute.
  absl::StatusOr<std::vector<resident::StepResult>> Step(HostCache* cache,
                                                         std::span<const float> queries);
  // Likewise, of any shape: `rows` with queries for each layer.
  absl::StatusOr<std::vector<resident::StepResult>> Step(const TokenRows& rows);
  // What lies between the phases of a step: a step of the first layer has begun and is not over.
  void BeginStep();
  resident::StepResult EndStep(std::span<const float> queries);

  // The sequence was truncated or inserted to.
  void SetTokenCount(uint64_t token_count) {
    token_count_ = token_count;
    steady_first_ = 0;  // It may be less than it was: to be asked for.
  }
  uint64_t token_count() const { return token_count_; }
  const client::ResidentAttachment& attachment() const { return attachment_; }

 private:
  ResidentEngine(client::Sequence* sequence, client::ResidentAttachment attachment)
      : sequence_(sequence),
        attachment_(std::move(attachment)),
        token_count_(attachment_.token_count) {}
  absl::Status Map();
  absl::Status WaitForRoom();

  client::Sequence* const sequence_;
  const client::ResidentAttachment attachment_;
  std::shared_ptr<const client::MappedBuffer> buffer_;
  std::vector<Mapping> windows_;
  std::unique_ptr<resident::ReferenceStep> step_;
  uint64_t token_count_;
  uint64_t steady_first_ = 0;  // As last heard.
};

// The engine above as a token engine, over the fake driver. A MakeTokenEngine.
absl::StatusOr<std::unique_ptr<TokenEngine>> MakeReferenceEngine(const ModelShape& shape,
                                                                 uint64_t max_tokens,
                                                                 uint32_t retrieve_clusters);

}  // namespace wavekv::integration
