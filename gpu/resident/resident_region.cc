#include "gpu/resident/resident_region.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gpu/buffer_layout.h"
#include "gpu/resident/closing_region.h"
#include "gpu/resident/resident_unit.h"
#include "storage/base/check.h"
#include "storage/base/log.h"
#include "storage/base/mutex.h"
#include "storage/base/status_macros.h"

namespace wavekv::resident {
namespace {

// Write may put zeroes between copies that ascend, where other segments' numbers lie.
void KeepApart(std::vector<ByteCopy>* copies) {
  std::sort(copies->begin(), copies->end(),
            [](const ByteCopy& a, const ByteCopy& b) { return a.offset > b.offset; });
}

class ResidentRegion : public ResidentSequence {
 public:
  ResidentRegion(std::shared_ptr<TenantBuffer> buffer, const RegionPlace& place,
                 const ResidentHeader& header, std::shared_ptr<ThreadPool> helpers);
  ~ResidentRegion() override { Close(nullptr); }

  absl::Status WriteHeader();

  ResidentPlace place() const override { return {place_.offset, place_.bytes}; }
  absl::Status Load(uint32_t layer, const ResidentLayer& view) override;
  absl::StatusOr<bool> Publish(uint32_t layer, const ResidentLayer& view) override;
  absl::StatusOr<std::vector<uint64_t>> Poll() override;
  absl::Status ReadRows(uint32_t layer, uint64_t first, uint32_t count, std::byte* keys,
                        std::byte* values) override;
  absl::StatusOr<bool> Drained() override;
  void Close(std::function<bool()> engine_is_gone) override;
  ResidentCounters counters() const override;

 private:
  uint32_t unit_count() const { return header_.layer_count * header_.kv_head_count; }
  uint64_t row_bytes() const { return uint64_t{header_.head_dim} * 2; }
  std::span<ResidentUnit> UnitsOf(uint32_t layer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::span(units_).subspan(size_t{layer} * header_.kv_head_count, header_.kv_head_count);
  }
  absl::Status CheckOpen(uint32_t layer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::vector<gpu::HeadState>> States() {
    return ReadStates(memory_, place_.offset, header_, 0, unit_count());
  }

  absl::Status CheckDrained(uint32_t layer, std::span<const gpu::HeadState> states) const;
  absl::Status CheckPublishable(uint32_t layer, const ResidentLayer& view)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AppendSteadyRows(const ResidentUnit& unit, const ResidentLayer& view, uint32_t kv_head,
                        std::vector<ByteCopy>* copies) const;
  absl::Status HearLogs(std::span<ResidentUnit* const> active)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HearTables(std::span<ResidentUnit* const> active);
  absl::Status EndRounds(std::span<ResidentUnit* const> active);
  // Units have nothing in common: fn(0) ... fn(count - 1) on several threads.
  void ForEach(size_t count, const std::function<void(size_t)>& fn);

  const std::shared_ptr<TenantBuffer> buffer_;
  BufferMemory& memory_;
  const RegionPlace place_;
  const ResidentHeader header_;
  const std::shared_ptr<ThreadPool> helpers_;  // May be null.
  mutable Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<ResidentUnit> units_ ABSL_GUARDED_BY(mutex_);
};

ResidentRegion::ResidentRegion(std::shared_ptr<TenantBuffer> buffer, const RegionPlace& place,
                               const ResidentHeader& header, std::shared_ptr<ThreadPool> helpers)
    : buffer_(std::move(buffer)),
      memory_(buffer_->memory()),
      place_(place),
      header_(header),
      helpers_(std::move(helpers)) {
  for (uint32_t unit = 0; unit < unit_count(); ++unit) {
    units_.emplace_back(header.unit,
                        place.offset + header.units_offset + unit * header.unit.unit_bytes,
                        place.offset + header.states_offset + unit * sizeof(gpu::HeadState));
  }
}

absl::Status ResidentRegion::WriteHeader() {
  const ByteCopy copy{reinterpret_cast<const std::byte*>(&header_), place_.offset, sizeof(header_)};
  return memory_.Write({&copy, 1},
                       BufferWord{place_.offset + offsetof(ResidentHeader, state), kRegionOpen});
}

absl::Status ResidentRegion::CheckOpen(uint32_t layer) const {
  WAVEKV_CHECK(layer < header_.layer_count, "layer is one of the sequence's");
  if (!closed_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the resident region of sequence ", header_.sequence_id, " is closed; attach it again"));
}

absl::Status ResidentRegion::CheckDrained(uint32_t layer,
                                          std::span<const gpu::HeadState> states) const {
  for (const gpu::HeadState& state : states) {
    if (state.started == state.completed_epoch) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", header_.sequence_id, " layer ", layer, ": steps up to ",
                     state.started, " have started, up to ", state.completed_epoch,
                     " are completed; wait for the stream first"));
  }
  return absl::OkStatus();
}

// The rows of view.steady: first tokens, then the ring from steady_first on.
void ResidentRegion::AppendSteadyRows(const ResidentUnit& unit, const ResidentLayer& view,
                                      uint32_t kv_head, std::vector<ByteCopy>* copies) const {
  const UnitLayout& layout = header_.unit;
  const uint64_t sinks = unit.unit_offset() + layout.sink_offset;
  const uint64_t ring = unit.unit_offset() + layout.ring_offset;
  uint64_t row = 0;  // Of all steady ones.
  for (const RowRun& run : view.steady[kv_head]) {
    for (uint32_t done = 0; done < run.row_count;) {
      const bool sink = row < view.sink_count;
      const uint64_t at =
          sink ? row : (view.steady_first + row - view.sink_count) % layout.ring_rows;
      const uint64_t room = sink ? view.sink_count - at : layout.ring_rows - at;
      const uint64_t count = std::min<uint64_t>(run.row_count - done, room);
      const uint64_t keys_at = (sink ? sinks : ring) + at * row_bytes();
      const uint64_t values_at =
          keys_at + uint64_t{sink ? kSinkRows : layout.ring_rows} * row_bytes();
      copies->push_back({run.keys + done * row_bytes(), keys_at, count * row_bytes()});
      copies->push_back({run.values + done * row_bytes(), values_at, count * row_bytes()});
      done += static_cast<uint32_t>(count);
      row += count;
    }
  }
  WAVEKV_CHECK(row == view.sink_count + view.token_count - view.steady_first,
               "a view to be loaded has all exact rows");
}

absl::Status ResidentRegion::Load(uint32_t layer, const ResidentLayer& view) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen(layer));
  const std::span<ResidentUnit> units = UnitsOf(layer);
  const uint32_t first_unit = layer * header_.kv_head_count;
  WAVEKV_ASSIGN_OR_RETURN(
      const std::vector<gpu::HeadState> states,
      ReadStates(memory_, place_.offset, header_, first_unit, header_.kv_head_count));
  WAVEKV_RETURN_IF_ERROR(CheckDrained(layer, states));
  std::vector<std::unique_ptr<UnitSegments>> segments;
  std::vector<UnitVersion> versions;
  for (uint32_t head = 0; head < units.size(); ++head) {
    segments.push_back(std::make_unique<UnitSegments>(header_.unit));
    WAVEKV_ASSIGN_OR_RETURN(UnitVersion version,
                            PlanUnitVersion(header_.unit, view, head, segments.back().get()));
    versions.push_back(std::move(version));
  }
  std::vector<ByteCopy> copies;
  for (uint32_t head = 0; head < units.size(); ++head) {
    AppendVersion(header_.unit, units[head].unit_offset(), units[head].next_area(), versions[head],
                  &copies);
    AppendSteadyRows(units[head], view, head, &copies);
  }
  KeepApart(&copies);
  WAVEKV_RETURN_IF_ERROR(memory_.Write(copies));
  std::vector<BufferEntry> entries;
  std::vector<BufferWord> words;
  for (uint32_t head = 0; head < units.size(); ++head) {
    units[head].Restart(states[head], std::move(segments[head]), versions[head], view.token_count,
                        &entries, &words);
  }
  return memory_.Scatter(entries, words);
}

absl::Status ResidentRegion::CheckPublishable(uint32_t layer, const ResidentLayer& view) {
  for (const ResidentUnit& unit : UnitsOf(layer)) {
    if (view.steady_first >= unit.steady_first() && view.steady_first <= unit.appended()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", header_.sequence_id, " layer ", layer,
                     ": a version whose exact tokens begin at ", view.steady_first,
                     " cannot replace one where they begin at ", unit.steady_first(), " with ",
                     unit.appended(), " tokens on the device; load the layer anew"));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ResidentRegion::Publish(uint32_t layer, const ResidentLayer& view) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen(layer));
  const std::span<ResidentUnit> units = UnitsOf(layer);
  if (!std::all_of(units.begin(), units.end(), [](const auto& u) { return u.area_is_free(); })) {
    return false;
  }
  WAVEKV_RETURN_IF_ERROR(CheckPublishable(layer, view));
  std::vector<UnitVersion> versions;
  for (uint32_t head = 0; head < units.size(); ++head) {
    absl::StatusOr<UnitVersion> version =
        PlanUnitVersion(header_.unit, view, head, units[head].segments());
    if (!version.ok()) {
      for (uint32_t i = 0; i < head; ++i) units[i].segments()->Abandon(versions[i].segments);
      return version.status();
    }
    versions.push_back(*std::move(version));
  }
  std::vector<ByteCopy> copies;
  std::vector<BufferWord> words;
  for (uint32_t head = 0; head < units.size(); ++head) {
    AppendVersion(header_.unit, units[head].unit_offset(), units[head].next_area(), versions[head],
                  &copies);
    words.push_back(units[head].PublishedWord());
  }
  KeepApart(&copies);
  WAVEKV_RETURN_IF_ERROR(memory_.Write(copies));
  WAVEKV_RETURN_IF_ERROR(memory_.Scatter({}, words));
  // Only now: until the new version was seen, steps may enter blocks of the old one.
  std::vector<BufferEntry> entries;
  for (uint32_t head = 0; head < units.size(); ++head) {
    units[head].Commit(versions[head], &entries);
  }
  WAVEKV_RETURN_IF_ERROR(memory_.Scatter(entries, {}));
  return true;
}

absl::Status ResidentRegion::HearLogs(std::span<ResidentUnit* const> active) {
  std::vector<ResidentUnit*> telling;
  std::vector<ByteRead> logs;
  for (ResidentUnit* unit : active) {
    if (!unit->has_news()) continue;
    telling.push_back(unit);
    unit->AppendLogReads(&logs);
  }
  if (telling.empty()) return absl::OkStatus();
  WAVEKV_RETURN_IF_ERROR(memory_.Read(logs));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<gpu::HeadState> later, States());
  const ResidentUnit* const first = units_.data();
  ForEach(telling.size(), [&](size_t i) { telling[i]->Hear(later[telling[i] - first]); });
  return absl::OkStatus();
}

absl::Status ResidentRegion::HearTables(std::span<ResidentUnit* const> active) {
  std::vector<ByteRead> reads;
  std::vector<ResidentUnit*> wanting;
  for (ResidentUnit* unit : active) {
    if (!unit->wants_table()) continue;
    wanting.push_back(unit);
    reads.push_back(unit->TableRead());
  }
  if (reads.empty()) return absl::OkStatus();
  WAVEKV_RETURN_IF_ERROR(memory_.Read(reads));
  for (ResidentUnit* unit : wanting) unit->HearTable();
  return absl::OkStatus();
}

void ResidentRegion::ForEach(size_t count, const std::function<void(size_t)>& fn) {
  if (helpers_ != nullptr && count > 1) return helpers_->ParallelFor(count, fn);
  for (size_t i = 0; i < count; ++i) fn(i);
}

absl::Status ResidentRegion::EndRounds(std::span<ResidentUnit* const> active) {
  struct Writes {
    std::vector<BufferEntry> entries;
    std::vector<BufferWord> words;
  };
  std::vector<Writes> of_units(active.size());
  ForEach(active.size(),
          [&](size_t i) { active[i]->EndRound(&of_units[i].entries, &of_units[i].words); });
  Writes all;
  for (const Writes& writes : of_units) {
    all.entries.insert(all.entries.end(), writes.entries.begin(), writes.entries.end());
    all.words.insert(all.words.end(), writes.words.begin(), writes.words.end());
  }
  return all.entries.empty() ? absl::OkStatus() : memory_.Scatter(all.entries, all.words);
}

absl::StatusOr<std::vector<uint64_t>> ResidentRegion::Poll() {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen(0));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<gpu::HeadState> states, States());
  std::vector<ResidentUnit*> active;
  for (uint32_t unit = 0; unit < units_.size(); ++unit) {
    if (units_[unit].Read(states[unit])) active.push_back(&units_[unit]);
  }
  if (!active.empty()) {
    WAVEKV_RETURN_IF_ERROR(HearLogs(active));
    WAVEKV_RETURN_IF_ERROR(HearTables(active));
    WAVEKV_RETURN_IF_ERROR(EndRounds(active));
  }
  std::vector<uint64_t> appended;
  for (uint32_t layer = 0; layer < header_.layer_count; ++layer) {
    const std::span<ResidentUnit> units = UnitsOf(layer);
    const auto least =
        std::min_element(units.begin(), units.end(),
                         [](const auto& a, const auto& b) { return a.appended() < b.appended(); });
    appended.push_back(least->appended());
  }
  return appended;
}

absl::Status ResidentRegion::ReadRows(uint32_t layer, uint64_t first, uint32_t count,
                                      std::byte* keys, std::byte* values) {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen(layer));
  const std::span<ResidentUnit> units = UnitsOf(layer);
  const uint32_t rows = header_.unit.ring_rows;
  for (const ResidentUnit& unit : units) {
    if (first >= unit.steady_first() && first <= unit.appended() &&
        count <= unit.appended() - first) {
      continue;
    }
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", header_.sequence_id, " layer ", layer, ": rows ", first, " to ", first + count,
        " were asked for, the ring has ", unit.steady_first(), " to ", unit.appended()));
  }
  std::vector<std::byte> staged(2 * units.size() * count * row_bytes());
  std::vector<ByteRead> reads;
  std::byte* target = staged.data();
  for (const ResidentUnit& unit : units) {
    for (uint64_t half = 0; half < 2; ++half) {
      for (uint32_t done = 0; done < count;) {
        const uint64_t at = (first + done) % rows;
        const auto length = static_cast<uint32_t>(std::min<uint64_t>(count - done, rows - at));
        reads.push_back(
            {unit.unit_offset() + header_.unit.ring_offset + (half * rows + at) * row_bytes(),
             target, length * row_bytes()});
        target += length * row_bytes();
        done += length;
      }
    }
  }
  WAVEKV_RETURN_IF_ERROR(memory_.Read(reads));
  const std::byte* source = staged.data();
  for (uint32_t head = 0; head < units.size(); ++head) {
    for (std::byte* out : {keys, values}) {
      for (uint64_t row = 0; row < count; ++row, source += row_bytes()) {
        std::memcpy(out + (row * units.size() + head) * row_bytes(), source, row_bytes());
      }
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> ResidentRegion::Drained() {
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckOpen(0));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<gpu::HeadState> states, States());
  return std::all_of(states.begin(), states.end(), [](const gpu::HeadState& state) {
    return state.started == state.completed_epoch;
  });
}

void ResidentRegion::Close(std::function<bool()> engine_is_gone) {
  MutexLock lock(&mutex_);
  if (closed_) return;
  closed_ = true;
  const absl::Status status =
      memory_.Store(place_.offset + offsetof(ResidentHeader, state), kRegionClosed);
  if (!status.ok()) {
    Log(LogLevel::kWarning, "region_not_closed",
        {{"sequence", header_.sequence_id}, {"bytes", place_.bytes}, {"error", status}});
  }
  // Steps under way may read rows of all versions that they could see.
  std::vector<std::shared_ptr<const void>> kept;
  for (ResidentUnit& unit : units_) kept.push_back(unit.TakeSegments());
  auto closing = std::make_shared<ClosingRegion>(memory_, place_, header_,
                                                 std::move(engine_is_gone), std::move(kept));
  buffer_->ReturnLater(place_, [closing] { return closing->TryWipe(); });
}

ResidentCounters ResidentRegion::counters() const {
  MutexLock lock(&mutex_);
  ResidentCounters counters;
  for (const ResidentUnit& unit : units_) {
    counters.hit_blocks += unit.hits();
    counters.miss_blocks += unit.misses();
    counters.overflows += unit.overflows();
    counters.violations += unit.violations();
    counters.log_losses += unit.log_losses();
  }
  return counters;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ResidentSequence>> CreateResidentRegion(
    std::shared_ptr<TenantBuffer> buffer, SequenceId sequence, const ModelShape& shape,
    uint64_t max_tokens, const ResidentOptions& options, std::shared_ptr<ThreadPool> helpers) {
  WAVEKV_ASSIGN_OR_RETURN(ResidentHeader header, PlanResident(shape, max_tokens, options));
  header.sequence_id = sequence.value();
  WAVEKV_ASSIGN_OR_RETURN(const RegionPlace place, buffer->Carve(header.region_bytes));
  auto region =
      std::make_unique<ResidentRegion>(std::move(buffer), place, header, std::move(helpers));
  WAVEKV_RETURN_IF_ERROR(region->WriteHeader());  // Or else it closes itself.
  return region;
}

}  // namespace wavekv::resident
