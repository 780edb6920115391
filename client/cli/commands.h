// The subcommands of `wavekv`. Each connects, asks, prints to standard output (text, or JSON) and
// returns; progress goes to standard error.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/admin.h"
#include "client/cli/replay.h"
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

struct RecordCommand {
  uint64_t sequence_id = 0;
  std::string file;
  std::vector<uint32_t> layers;  // Empty: all.
  uint64_t steps = 0;            // Of each layer; 0: no such end.
  double duration_s = 0;         // 0: no such end.
};

// Records until the steps or the time are over, the sequence or the daemon ends, or somebody has
// had enough (SIGINT, SIGTERM, q), all of which end the file as it should be. After an error what
// has come stays as FILE.partial. AlreadyExists: the file is there.
absl::Status RunRecord(const CommandOptions& options, const RecordCommand& command);
// Cancelled, after printing what there is: stopped before the trace's end.
absl::Status RunReplay(const CommandOptions& options, const ReplayOptions& replay);

// "0,5-9": numbers and ranges. InvalidArgument quotes the text.
absl::StatusOr<std::vector<uint32_t>> ParseLayers(const std::string& text);

// "ratio=0.02", "clusters=8", "coverage=0.9" or "error=0.05". InvalidArgument quotes the text.
absl::StatusOr<Budget> ParseBudget(const std::string& text);

}  // namespace wavekv::client
