// Doing again what a trace says, on a sequence of its own.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/admin.h"
#include "client/cli/replay_report.h"
#include "client/session.h"
#include "storage/trace/trace_reader.h"

namespace wavekv::client {

struct ReplayOptions {
  std::string file;
  bool accept_cut = false;                  // A file without its end is replayed as far as it goes.
  std::optional<Budget> budget;             // In place of the recorded ones.
  std::optional<uint32_t> sketch_clusters;  // Likewise, whatever the budget.
  std::vector<uint32_t> layers;             // Of the trace; empty: all.
  uint64_t steps = 0;                       // Of each layer at most; 0: all.
  uint64_t compare_every = 1;               // Every so many steps of a layer are compared; 0: none.
  uint64_t max_tokens = 0;                  // Of the sequence; 0: as recorded.
};

// Replays a trace through the SDK. The sequence holds the chosen layers only, renumbered from 0 on,
// and is dropped when this object goes.
class Replayer {
 public:
  // Opens the file and makes the sequence. InvalidArgument: no trace, a layer that it does not
  // hold. DataLoss: a damaged one. `session` and `admin` must outlive the replayer.
  static absl::StatusOr<std::unique_ptr<Replayer>> Create(const ReplayOptions& options,
                                                          Session* session, Admin* admin);

  // Until the trace's end, or `stop`, after which the report says so. Called once. `bytes_done`,
  // which others may read, is how far it has come in the file.
  absl::Status Run(std::stop_token stop, std::atomic<uint64_t>* bytes_done);

  const TraceSequence& trace() const { return reader_->sequence(); }
  const ReplayReport& report() const { return report_; }
  uint64_t sequence_id() const { return sequence_->id(); }
  uint64_t bytes_total() const { return reader_->file_bytes(); }

 private:
  Replayer(const ReplayOptions& options, std::unique_ptr<TraceReader> reader, Admin* admin);

  // The options of a sequence of the chosen layers.
  absl::StatusOr<SequenceOptions> PlanSequence();
  absl::Status Apply(TraceRows& rows);
  absl::Status Apply(const TraceStep& step);
  absl::Status Apply(const TraceBuild& build);
  absl::Status Apply(const TraceTruncate& truncate);
  absl::Status Apply(const TraceEnd&) { return InsertAppended(); }

  // Rows that a step should have appended, and no step did.
  absl::Status InsertAppended();
  absl::Status Insert(uint32_t layer, const TraceRows& rows);
  // What had been built when the recording began, once all that was stored is there.
  absl::Status BuildStored();
  Budget BudgetOf(const TraceBudget& recorded) const;
  // Exact attention, and the daemon's own look at the same queries.
  absl::Status Compare(uint32_t layer, const TraceStep& step, const Budget& budget,
                       const Attention& answer, LayerReport* report);
  bool has_all_steps() const;

  const ReplayOptions options_;
  const std::unique_ptr<TraceReader> reader_;
  Admin* const admin_;
  std::unique_ptr<Sequence> sequence_;
  std::map<uint32_t, uint32_t> layers_;     // Recorded number -> the sequence's.
  std::map<uint32_t, TraceRows> appended_;  // By the recorded number: for the layer's next step.
  uint64_t generation_ = 0;                 // Of the trace.
  bool stored_done_ = false;
  ReplayReport report_;
};

}  // namespace wavekv::client
