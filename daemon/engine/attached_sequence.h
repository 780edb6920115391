// A sequence whose engine attends on the device: what its steps append is copied out, and what is
// built of it is shown to them (docs/decisions/015-resident-region.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "daemon/engine/resident_terms.h"
#include "daemon/engine/resident_view.h"
#include "daemon/engine/sequence.h"
#include "storage/base/mutex.h"

namespace wavekv {

// From Load until it is closed its sequence takes writes from nobody else. Thread-safe: rounds and
// writes come one after another, each as long as its transfers take; state() waits for none.
class AttachedSequence {
 public:
  // BeginAttachment has let `client` have `sequence`.
  AttachedSequence(std::shared_ptr<Sequence> sequence, std::unique_ptr<ResidentSequence> resident,
                   ResidentWindows windows, ClientId client);
  ~AttachedSequence();  // Closed.
  AttachedSequence(const AttachedSequence&) = delete;
  AttachedSequence& operator=(const AttachedSequence&) = delete;

  SequenceId id() const { return sequence_->id(); }
  ClientId client() const { return client_; }
  ResidentPlace place() const { return place_; }
  ResidentWindows windows();
  const std::shared_ptr<ResidentProcess>& process() const { return process_; }

  // Shows the sequence as it is. When it fails, the attachment is closed.
  absl::Status Load();

  // Looks what steps have done, stores what they appended and shows what was built since. What
  // fails closes the attachment. Returns whether anything moved.
  bool Round();

  // As the sequence's, which is shown anew; an attachment that cannot show it is closed.
  // FailedPrecondition: a step is under way.
  absl::StatusOr<InsertOutcome> Insert(Generation generation, const RowBatch& batch,
                                       ThreadPool* pool);
  absl::StatusOr<Generation> Truncate(Generation generation, uint64_t token_count);

  // Stores what steps have appended, if that can be done, and ends the attachment. The first
  // reason stands. Returns why something could not be stored.
  absl::Status Close(const absl::Status& why);

  bool open() const;
  ResidentState state() const;

 private:
  absl::Status LoadLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  // Of a round: all rows that are in place, or only what is worth a transfer.
  enum class Copy { kAll, kBatches };
  absl::StatusOr<bool> CopyOut(Copy copy) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  absl::Status CopyRows(uint32_t layer, uint64_t end) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  absl::StatusOr<bool> Publish() ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  absl::Status PrepareWrite() ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  // The sequence was written.
  void ShowWritten(Generation generation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  void CloseLocked(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  void NoteState() ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);
  absl::StatusOr<ResidentLayer> View(uint32_t layer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(work_mutex_);

  // What the region holds of one layer.
  struct Shown {
    uint64_t token_count = 0;   // Stored in the sequence, too.
    uint64_t polled_count = 0;  // In place at the last look.
    uint64_t version = 0;
    uint64_t steady_first = 0;
    uint64_t refused_version = 0;  // That the region had no numbers for, at the last look.
  };

  const std::shared_ptr<Sequence> sequence_;
  const ClientId client_;
  const ResidentPlace place_;
  const std::shared_ptr<ResidentProcess> process_ = std::make_shared<ResidentProcess>();

  Mutex work_mutex_ ABSL_ACQUIRED_BEFORE(state_mutex_);  // Held during transfers.
  std::unique_ptr<ResidentSequence> resident_ ABSL_GUARDED_BY(work_mutex_);  // Null once closed.
  ResidentWindows windows_ ABSL_GUARDED_BY(work_mutex_);                     // None once closed.
  std::vector<Shown> layers_ ABSL_GUARDED_BY(work_mutex_);
  Generation generation_ ABSL_GUARDED_BY(work_mutex_);
  std::vector<std::byte> keys_ ABSL_GUARDED_BY(work_mutex_);  // Of one transfer.
  std::vector<std::byte> values_ ABSL_GUARDED_BY(work_mutex_);

  mutable Mutex state_mutex_;
  ResidentState state_ ABSL_GUARDED_BY(state_mutex_);
};

}  // namespace wavekv
