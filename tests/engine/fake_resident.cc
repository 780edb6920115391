#include "tests/engine/fake_resident.h"

#include <algorithm>
#include <utility>

#include "storage/base/status_macros.h"

namespace wavekv::testing {

FakeRegion::FakeRegion(const ModelShape& shape, const ResidentOptions& options)
    : shape_(shape), options_(options), layers_(shape.layer_count), rows_(shape.layer_count) {}

void FakeRegion::Append(uint32_t layer, std::vector<std::byte> keys,
                        std::vector<std::byte> values) {
  MutexLock lock(&mutex_);
  Layer& state = layers_[layer];
  Check(state.token_count - state.shown.steady_first < options_.ring_rows, "the ring is full");
  ++state.token_count;
  rows_[layer].push_back({std::move(keys), std::move(values)});
}

void FakeRegion::SetStepping(bool stepping) {
  MutexLock lock(&mutex_);
  stepping_ = stepping;
}

void FakeRegion::SetStatus(absl::Status status) {
  MutexLock lock(&mutex_);
  status_ = std::move(status);
}

void FakeRegion::SetLoadStatus(absl::Status status) {
  MutexLock lock(&mutex_);
  load_status_ = std::move(status);
}

void FakeRegion::SetPublishStatus(absl::Status status) {
  MutexLock lock(&mutex_);
  publish_status_ = std::move(status);
}

void FakeRegion::SetBusy(bool busy) {
  MutexLock lock(&mutex_);
  busy_ = busy;
}

FakeRegion::Layer FakeRegion::layer(uint32_t layer) const {
  MutexLock lock(&mutex_);
  return layers_[layer];
}

std::string FakeRegion::complaints() const {
  MutexLock lock(&mutex_);
  return complaints_;
}

std::function<bool()> FakeRegion::engine_is_gone() const {
  MutexLock lock(&mutex_);
  return engine_is_gone_;
}

void FakeRegion::Check(bool good, const std::string& complaint) {
  if (!good) complaints_ += complaint + "; ";
}

void FakeRegion::CheckView(const ResidentLayer& view) {
  Check(view.heads.size() == shape_.kv_head_count, "not one list of segments for each head");
  for (const auto& head : view.heads) {
    uint64_t end = view.sink_count;
    for (const ResidentSegment& segment : head) {
      Check(segment.head->first_position == end, "segments do not join");
      end = segment.head->end_position();
    }
    Check(end == view.steady_first, "segments do not end where the ring begins");
  }
}

class FakeResident : public ResidentSequence {
 public:
  explicit FakeResident(std::shared_ptr<FakeRegion> region) : region_(std::move(region)) {}

  ResidentPlace place() const override { return {4096, 8192}; }

  absl::Status Load(uint32_t layer, const ResidentLayer& view) override {
    MutexLock lock(&region_->mutex_);
    WAVEKV_RETURN_IF_ERROR(region_->status_);
    WAVEKV_RETURN_IF_ERROR(region_->load_status_);
    region_->CheckView(view);
    if (region_->stepping_) return absl::FailedPreconditionError("steps are under way");
    if (view.token_count - view.steady_first > region_->options_.ring_rows) {
      return absl::FailedPreconditionError("more exact tokens than the ring holds");
    }
    for (const auto& runs : view.steady) {
      uint64_t rows = 0;
      for (const RowRun& run : runs) rows += run.row_count;
      region_->Check(rows == view.sink_count + view.token_count - view.steady_first,
                     "exact rows are missing");
    }
    FakeRegion::Layer& state = region_->layers_[layer];
    state.shown = view;
    state.token_count = view.token_count;
    ++state.loads;
    region_->rows_[layer].clear();
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Publish(uint32_t layer, const ResidentLayer& view) override {
    MutexLock lock(&region_->mutex_);
    WAVEKV_RETURN_IF_ERROR(region_->status_);
    region_->CheckView(view);
    FakeRegion::Layer& state = region_->layers_[layer];
    region_->Check(view.version > state.shown.version, "no newer version");
    region_->Check(view.steady_first >= state.shown.steady_first, "the ring grows backwards");
    region_->Check(view.steady_first <= state.token_count, "clustered what is not there");
    WAVEKV_RETURN_IF_ERROR(region_->publish_status_);
    if (region_->busy_) return false;
    state.shown = view;
    ++state.publications;
    return true;
  }

  absl::StatusOr<std::vector<uint64_t>> Poll() override {
    MutexLock lock(&region_->mutex_);
    WAVEKV_RETURN_IF_ERROR(region_->status_);
    std::vector<uint64_t> counts;
    for (const FakeRegion::Layer& layer : region_->layers_) counts.push_back(layer.token_count);
    return counts;
  }

  absl::Status ReadRows(uint32_t layer, uint64_t first, uint32_t count, std::byte* keys,
                        std::byte* values) override {
    MutexLock lock(&region_->mutex_);
    WAVEKV_RETURN_IF_ERROR(region_->status_);
    const FakeRegion::Layer& state = region_->layers_[layer];
    const auto& rows = region_->rows_[layer];
    const uint64_t begin = state.token_count - rows.size();
    if (first < begin || first + count > state.token_count) {
      region_->Check(false, "rows that nobody appended");
      return absl::InvalidArgumentError("no such rows");
    }
    for (uint64_t i = first - begin; i < first - begin + count; ++i) {
      keys = std::copy(rows[i].keys.begin(), rows[i].keys.end(), keys);
      values = std::copy(rows[i].values.begin(), rows[i].values.end(), values);
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Drained() override {
    MutexLock lock(&region_->mutex_);
    WAVEKV_RETURN_IF_ERROR(region_->status_);
    return !region_->stepping_;
  }

  void Close(std::function<bool()> engine_is_gone) override {
    MutexLock lock(&region_->mutex_);
    region_->engine_is_gone_ = std::move(engine_is_gone);
  }

  // One miss for each publication, so that sums can be told.
  ResidentCounters counters() const override {
    MutexLock lock(&region_->mutex_);
    ResidentCounters counters;
    for (const FakeRegion::Layer& layer : region_->layers_) {
      counters.miss_blocks += layer.publications;
    }
    return counters;
  }

 private:
  const std::shared_ptr<FakeRegion> region_;
};

std::unique_ptr<ResidentSequence> CreateFakeResident(std::shared_ptr<FakeRegion> region) {
  return std::make_unique<FakeResident>(std::move(region));
}

}  // namespace wavekv::testing
