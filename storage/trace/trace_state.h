// What must hold of the records of one trace, each and one after another. Who writes and who reads
// asks the same object.
#pragma once

#include <cstdint>
#include <map>

#include "absl/status/status.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

// InvalidArgument naming the field, what was found and what is allowed.
absl::Status ValidateTraceSequence(const TraceSequence& sequence);

// Not thread-safe.
class TraceState {
 public:
  // `sequence` is valid and must outlive the state.
  explicit TraceState(const TraceSequence& sequence);

  // Takes the next record, or refuses it with InvalidArgument and stays as it was. The sizes of a
  // record's tensors fit the sequence's shape afterwards; rows follow each other without gaps up to
  // max_tokens; layers are those of the trace; stored rows come before everything else, and all of
  // them; no step sees more tokens than there are, unless a truncate has overtaken it.
  absl::Status Admit(const TraceRecord& record);

  // Tokens of a layer of the trace so far.
  uint64_t token_count(uint32_t layer) const { return layers_.at(layer).token_count; }
  uint64_t step_count() const { return step_count_; }
  uint64_t generation() const { return generation_; }
  bool ended() const { return ended_; }

 private:
  struct Layer {
    uint64_t token_count = 0;
    uint64_t stored = 0;  // Tokens that were there when the recording began.
  };

  absl::Status CheckLayer(uint32_t layer) const;
  absl::Status CheckGeneration(uint64_t generation) const;
  // Everything that was stored is there.
  absl::Status CheckStored() const;
  absl::Status AdmitRecord(const TraceRows& rows);
  absl::Status AdmitRecord(const TraceStep& step);
  absl::Status AdmitRecord(const TraceBuild& build);
  absl::Status AdmitRecord(const TraceTruncate& truncate);
  absl::Status AdmitRecord(const TraceEnd& end);

  const TraceSequence& sequence_;
  std::map<uint32_t, Layer> layers_;
  uint64_t generation_;
  bool stored_done_ = false;  // A record came that is no stored rows.
  uint64_t step_count_ = 0;
  bool ended_ = false;
};

}  // namespace wavekv
