// The subcommands of `wavekv`. Each connects, asks, prints to standard output (text, or JSON) and
// returns; progress goes to standard error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/admin.h"
#include "client/types.h"

namespace wavekv::client {

// What every command is told.
struct CommandOptions {
  ClientOptions client;
  bool json = false;
};

absl::Status RunStatus(const CommandOptions& options);
absl::Status RunSequences(const CommandOptions& options);
absl::Status RunIndex(const CommandOptions& options, uint64_t sequence_id,
                      std::optional<uint32_t> layer, std::optional<uint32_t> kv_head);
absl::Status RunExplain(const CommandOptions& options, uint64_t sequence_id,
                        const ExplainOptions& explain);
absl::Status RunRecall(const CommandOptions& options, uint64_t sequence_id,
                       const std::vector<uint32_t>& layers, const std::optional<Budget>& budget);
// Until `count` ticks (0: for ever), q, ctrl-C or an error.
absl::Status RunTop(const CommandOptions& options, uint64_t count, double interval_s);
// FailedPrecondition, after printing, when a check failed.
absl::Status RunDoctor(const CommandOptions& options);
absl::Status RunBuild(const CommandOptions& options, uint64_t sequence_id);
absl::Status RunDrop(const CommandOptions& options, uint64_t sequence_id);

// "ratio=0.02", "clusters=8", "coverage=0.9" or "error=0.05". InvalidArgument quotes the text.
absl::StatusOr<Budget> ParseBudget(const std::string& text);

}  // namespace wavekv::client
