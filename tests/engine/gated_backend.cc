#include "tests/engine/gated_backend.h"

#include <chrono>
#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv::testing {
namespace {

constexpr std::chrono::seconds kWaitMax(60);

class GatedBackend : public ComputeBackend {
 public:
  explicit GatedBackend(std::shared_ptr<BuildGate> gate)
      : gate_(std::move(gate)), cpu_(CreateCpuBackend()) {}

  BackendCaps Caps() const override { return cpu_->Caps(); }
  absl::StatusOr<SegmentHead> ClusterSegment(const ClusterInput& input,
                                             const ClusterOptions& options, std::byte* keys_out,
                                             std::byte* values_out) override {
    WAVEKV_RETURN_IF_ERROR(gate_->Enter());
    return cpu_->ClusterSegment(input, options, keys_out, values_out);
  }
  absl::Status RankClusters(HeadIndex index, const GroupQuery& query,
                            std::span<const float> steady_lse, ClusterScores* scores) override {
    return cpu_->RankClusters(index, query, steady_lse, scores);
  }
  absl::StatusOr<ZonePlan> SelectZones(HeadIndex index, const GroupQuery& query,
                                       const ClusterScores& scores,
                                       std::span<const float> steady_lse,
                                       const ZoneBudget& budget) override {
    return cpu_->SelectZones(index, query, scores, steady_lse, budget);
  }
  absl::Status AttendRows(std::span<const RowRun> rows, const GroupQuery& query,
                          PartialAttention* result) override {
    gate_->EnterStep();
    return cpu_->AttendRows(rows, query, result);
  }
  absl::Status AttendClusters(HeadIndex index, std::span<const uint32_t> clusters,
                              const GroupQuery& query, PartialAttention* result) override {
    return cpu_->AttendClusters(index, clusters, query, result);
  }
  absl::Status SketchClusters(HeadIndex index, std::span<const uint32_t> clusters,
                              const GroupQuery& query, const ClusterScores& scores, bool bounds,
                              EstimatedAttention* result) override {
    return cpu_->SketchClusters(index, clusters, query, scores, bounds, result);
  }
  absl::Status EstimateClusters(HeadIndex index, std::span<const uint32_t> clusters,
                                const GroupQuery& query, const ClusterScores& scores, bool bounds,
                                EstimatedAttention* result) override {
    return cpu_->EstimateClusters(index, clusters, query, scores, bounds, result);
  }

 private:
  const std::shared_ptr<BuildGate> gate_;
  const std::unique_ptr<ComputeBackend> cpu_;
};

}  // namespace

void BuildGate::Allow(uint64_t count) {
  MutexLock lock(&mutex_);
  allowed_ += count;
  changed_.NotifyAll();
}

void BuildGate::Fail(bool fail) {
  MutexLock lock(&mutex_);
  fail_ = fail;
}

bool BuildGate::WaitForWaiter() {
  MutexLock lock(&mutex_);
  return WaitUntilAny(&waiting_);
}

bool BuildGate::WaitForCall() {
  MutexLock lock(&mutex_);
  return WaitUntilAny(&calls_);
}

bool BuildGate::WaitForHeldStep() {
  MutexLock lock(&mutex_);
  return WaitUntilAny(&held_steps_);
}

bool BuildGate::WaitUntilAny(const uint64_t* count) {
  const auto deadline = std::chrono::steady_clock::now() + kWaitMax;
  while (*count == 0) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    changed_.WaitFor(&mutex_, kWaitMax);
  }
  return true;
}

void BuildGate::HoldSteps(bool hold) {
  MutexLock lock(&mutex_);
  hold_steps_ = hold;
  changed_.NotifyAll();
}

void BuildGate::EnterStep() {
  MutexLock lock(&mutex_);
  ++held_steps_;
  changed_.NotifyAll();
  while (hold_steps_) changed_.Wait(&mutex_);
  --held_steps_;
}

uint64_t BuildGate::calls() const {
  MutexLock lock(&mutex_);
  return calls_;
}

absl::Status BuildGate::Enter() {
  MutexLock lock(&mutex_);
  ++waiting_;
  changed_.NotifyAll();
  while (allowed_ == 0) changed_.Wait(&mutex_);
  --waiting_;
  --allowed_;
  ++calls_;
  changed_.NotifyAll();
  return fail_ ? absl::InternalError("the test's backend fails") : absl::OkStatus();
}

std::unique_ptr<ComputeBackend> CreateGatedBackend(std::shared_ptr<BuildGate> gate) {
  return std::make_unique<GatedBackend>(std::move(gate));
}

}  // namespace wavekv::testing
