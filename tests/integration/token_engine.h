// What decodes a sequence over its resident region, a token at a time: kernels on a GPU
// (device_engine.h), or the same steps in C++ over the fake driver's memory (resident_engine.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/session.h"

namespace wavekv::integration {

// A token of every layer, in the sequence's dtype, dense.
struct TokenRows {
  std::span<const std::byte> queries;  // [layers, query_heads, dim]
  std::span<const std::byte> keys;     // [layers, kv_heads, dim]
  std::span<const std::byte> values;   // [layers, kv_heads, dim]
};

struct TokenAnswer {
  std::vector<float> out;  // [layers, query_heads, dim]
  std::vector<float> lse;  // [layers, query_heads] natural log
};

// Not thread-safe. Detached by whoever owns the sequence: no step is under way between calls.
class TokenEngine {
 public:
  virtual ~TokenEngine() = default;

  // Attaches `sequence`, which outlives the engine, in place of the one before. Errors: of
  // AttachResident, and of opening what it grants.
  virtual absl::Status Attach(client::Sequence* sequence,
                              const client::ResidentOptions& options) = 0;
  // Appends the token to every layer, once the ring has room, and attends. Errors: of asking the
  // daemon for room; FailedPrecondition when there is none for a minute; Aborted when the token was
  // attended over nothing, as it is once the attachment has ended.
  virtual absl::StatusOr<TokenAnswer> Step(const TokenRows& rows) = 0;
  // The sequence was truncated, or inserted to, and has so many tokens now.
  virtual absl::Status NoteStored(uint64_t token_count) = 0;
};

// An engine for sequences of `shape` of up to `max_tokens` tokens, of which a step of a head
// retrieves `retrieve_clusters` at most (0: what the default budget asks for).
using MakeTokenEngine = std::function<absl::StatusOr<std::unique_ptr<TokenEngine>>(
    const ModelShape& shape, uint64_t max_tokens, uint32_t retrieve_clusters)>;

}  // namespace wavekv::integration
