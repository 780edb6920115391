#include "tests/engine/fake_stager.h"

#include <algorithm>
#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv::testing {

class FakeStager : public Stager {
 public:
  explicit FakeStager(std::shared_ptr<FakeBuffer> buffer) : buffer_(std::move(buffer)) {}

  absl::StatusOr<WaveBufferAccess> Access(const TenantId& tenant, int64_t client_uid) override {
    MutexLock lock(&buffer_->mutex_);
    WAVEKV_RETURN_IF_ERROR(buffer_->status_);
    WaveBufferAccess access;
    access.device_uuid = "host";
    access.ticket = tenant + "/" + std::to_string(client_uid);
    return access;
  }

  absl::Status AttachSequence(const TenantId&, SequenceId sequence, const ModelShape& shape,
                              uint64_t max_tokens) override {
    MutexLock lock(&buffer_->mutex_);
    WAVEKV_RETURN_IF_ERROR(buffer_->status_);
    buffer_->regions_[sequence] = {shape, max_tokens};
    return absl::OkStatus();
  }

  void DetachSequence(SequenceId sequence) override {
    MutexLock lock(&buffer_->mutex_);
    buffer_->regions_.erase(sequence);
  }

  absl::StatusOr<StagedStep> Stage(SequenceId sequence, uint32_t, uint64_t completed_step,
                                   std::span<const StageHead> heads) override {
    MutexLock lock(&buffer_->mutex_);
    WAVEKV_RETURN_IF_ERROR(buffer_->status_);
    const auto region = buffer_->regions_.find(sequence);
    if (region == buffer_->regions_.end()) return absl::FailedPreconditionError("not attached");
    buffer_->last_completed_step_ = completed_step;
    StagedStep step;
    step.step = ++buffer_->step_;
    for (const StageHead& head : heads) {
      StagedHead staged;
      staged.kv_head = head.kv_head;
      for (const StageRun& run : head.steady) {
        staged.steady.push_back(Copy(region->second.shape, run.rows, 0, run.rows.row_count));
      }
      for (const StageRun& run : head.retrieved) {
        if (staged.retrieved_runs >= buffer_->runs_max_) break;
        ++staged.retrieved_runs;
        for (uint32_t row = 0; row < run.rows.row_count; row += kBlockTokens) {
          StagedSpan span = Copy(region->second.shape, run.rows, row,
                                 std::min(kBlockTokens, run.rows.row_count - row));
          span.cache_hit = !Admit(run, row);
          ++(span.cache_hit ? step.hit_blocks : step.miss_blocks);
          staged.retrieved.push_back(span);
        }
      }
      step.heads.push_back(std::move(staged));
    }
    return step;
  }

  absl::StatusOr<StageCounters> Touch(SequenceId, uint32_t,
                                      std::span<const StageHead> heads) override {
    MutexLock lock(&buffer_->mutex_);
    WAVEKV_RETURN_IF_ERROR(buffer_->status_);
    ++buffer_->touches_;
    StageCounters counters;
    for (const StageHead& head : heads) {
      for (const StageRun& run : head.retrieved) {
        for (uint32_t row = 0; row < run.rows.row_count; row += kBlockTokens) {
          ++(Admit(run, row) ? counters.miss_blocks : counters.hit_blocks);
        }
      }
    }
    return counters;
  }

  absl::StatusOr<std::unique_ptr<ResidentSequence>> AttachResident(
      const TenantId&, SequenceId sequence, const ModelShape& shape, uint64_t,
      const ResidentOptions& options) override {
    MutexLock lock(&buffer_->mutex_);
    WAVEKV_RETURN_IF_ERROR(buffer_->status_);
    auto region = std::make_shared<FakeRegion>(shape, options);
    buffer_->residents_[sequence] = region;
    return CreateFakeResident(std::move(region));
  }

  size_t Sweep() override { return 0; }
  std::vector<WaveBufferStatus> Status() const override {
    MutexLock lock(&buffer_->mutex_);
    WaveBufferStatus status;
    status.device_uuid = "host";
    status.connected = buffer_->status_.ok();
    return {status};
  }

 private:
  StagedSpan Copy(const ModelShape& shape, const RowRun& rows, uint32_t first, uint32_t count)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(buffer_->mutex_) {
    std::vector<std::byte>& bytes = buffer_->bytes_;
    StagedSpan span;
    span.row_count = count;
    const std::byte* const keys = rows.keys + first * shape.key_bytes();
    const std::byte* const values = rows.values + first * shape.value_bytes();
    span.key_offset = bytes.size();
    bytes.insert(bytes.end(), keys, keys + count * shape.key_bytes());
    span.value_offset = bytes.size();
    bytes.insert(bytes.end(), values, values + count * shape.value_bytes());
    return span;
  }

  // Returns whether the block was not there yet.
  bool Admit(const StageRun& run, uint32_t row) ABSL_EXCLUSIVE_LOCKS_REQUIRED(buffer_->mutex_) {
    return buffer_->cached_.emplace(run.segment_uid, run.first_block + row / kBlockTokens).second;
  }

  const std::shared_ptr<FakeBuffer> buffer_;
};

void FakeBuffer::SetRunsMax(uint32_t runs_max) {
  MutexLock lock(&mutex_);
  runs_max_ = runs_max;
}

void FakeBuffer::SetStatus(absl::Status status) {
  MutexLock lock(&mutex_);
  status_ = std::move(status);
}

std::map<SequenceId, FakeBuffer::Region> FakeBuffer::regions() const {
  MutexLock lock(&mutex_);
  return regions_;
}

std::vector<std::byte> FakeBuffer::bytes() const {
  MutexLock lock(&mutex_);
  return bytes_;
}

uint64_t FakeBuffer::touches() const {
  MutexLock lock(&mutex_);
  return touches_;
}

std::shared_ptr<FakeRegion> FakeBuffer::resident(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto found = residents_.find(sequence);
  return found == residents_.end() ? nullptr : found->second;
}

uint64_t FakeBuffer::last_completed_step() const {
  MutexLock lock(&mutex_);
  return last_completed_step_;
}

std::unique_ptr<Stager> CreateFakeStager(std::shared_ptr<FakeBuffer> buffer) {
  return std::make_unique<FakeStager>(std::move(buffer));
}

}  // namespace wavekv::testing
