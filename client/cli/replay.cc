#include "client/cli/replay.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

using std::chrono::steady_clock;

Budget FromTrace(const TraceBudget& recorded) {
  Budget budget;
  switch (recorded.kind) {
    case TraceBudgetKind::kRatio:
      budget.kind = Budget::Kind::kRatio;
      break;
    case TraceBudgetKind::kClusters:
      budget.kind = Budget::Kind::kClusters;
      break;
    case TraceBudgetKind::kCoverage:
      budget.kind = Budget::Kind::kCoverage;
      break;
    case TraceBudgetKind::kError:
      budget.kind = Budget::Kind::kError;
      break;
  }
  budget.value = recorded.value;
  budget.clusters_max = recorded.clusters_max;
  budget.estimate_ratio = recorded.estimate_ratio;
  budget.sketch_clusters = recorded.sketch_clusters;
  return budget;
}

Tensor Rows(const ModelShape& shape, std::vector<int64_t> dims,
            const std::vector<std::byte>& data) {
  return {.dtype = shape.dtype, .shape = std::move(dims), .data = data.data()};
}

Tensor Queries(const ModelShape& shape, const std::vector<float>& queries) {
  return {.dtype = DType::kF32,
          .shape = {shape.query_head_count, shape.key_dim},
          .data = queries.data()};
}

}  // namespace

Replayer::Replayer(const ReplayOptions& options, std::unique_ptr<TraceReader> reader, Admin* admin)
    : options_(options), reader_(std::move(reader)), admin_(admin) {}

absl::StatusOr<std::unique_ptr<Replayer>> Replayer::Create(const ReplayOptions& options,
                                                           Session* session, Admin* admin) {
  absl::StatusOr<std::unique_ptr<TraceReader>> reader =
      TraceReader::Open(options.file, {.accept_cut = options.accept_cut});
  if (absl::IsNotFound(reader.status())) {  // NotFound is for what the daemon does not have.
    return absl::InvalidArgumentError(reader.status().message());
  }
  WAVEKV_RETURN_IF_ERROR(reader.status());
  std::unique_ptr<Replayer> replayer(new Replayer(options, *std::move(reader), admin));
  replayer->generation_ = replayer->trace().generation;
  WAVEKV_ASSIGN_OR_RETURN(const SequenceOptions sequence, replayer->PlanSequence());
  WAVEKV_ASSIGN_OR_RETURN(replayer->sequence_, session->CreateSequence(sequence));
  return replayer;
}

absl::StatusOr<SequenceOptions> Replayer::PlanSequence() {
  const TraceSequence& trace = reader_->sequence();
  std::vector<uint32_t> chosen = options_.layers;
  if (chosen.empty()) {
    for (const TraceLayer& held : trace.layers) chosen.push_back(held.layer);
  }
  std::sort(chosen.begin(), chosen.end());
  for (const uint32_t layer : chosen) {
    const bool held = std::any_of(trace.layers.begin(), trace.layers.end(),
                                  [&](const TraceLayer& known) { return known.layer == layer; });
    if (!held) {
      return absl::InvalidArgumentError(absl::StrCat("--layers: layer ", layer, " is none of the ",
                                                     trace.layers.size(), " layers of ",
                                                     options_.file));
    }
    layers_.emplace(layer, static_cast<uint32_t>(layers_.size()));
    report_.layers[layer];
  }
  SequenceOptions sequence;
  sequence.shape = trace.shape;
  sequence.shape.layer_count = static_cast<uint32_t>(layers_.size());
  sequence.first_kv_head = trace.first_kv_head;
  sequence.total_kv_head_count = trace.total_kv_head_count;
  sequence.index.segment_tokens = trace.segment_tokens;
  sequence.index.small_segment_tokens = trace.small_segment_tokens;
  sequence.index.tokens_per_cluster = trace.tokens_per_cluster;
  sequence.index.kmeans_iterations = trace.kmeans_iterations;
  sequence.index.sketch = trace.sketch;
  sequence.index.budget = BudgetOf(trace.budget);
  for (const uint32_t layer : trace.dense_layers) {
    if (layers_.contains(layer)) sequence.index.dense_layers.push_back(layers_.at(layer));
  }
  sequence.max_tokens = options_.max_tokens == 0 ? trace.max_tokens : options_.max_tokens;
  sequence.label = "replay";
  return sequence;
}

Budget Replayer::BudgetOf(const TraceBudget& recorded) const {
  Budget budget = options_.budget.value_or(FromTrace(recorded));
  if (options_.sketch_clusters.has_value()) budget.sketch_clusters = *options_.sketch_clusters;
  return budget;
}

absl::Status Replayer::Run(std::stop_token stop, std::atomic<uint64_t>* bytes_done) {
  while (!has_all_steps()) {
    if (stop.stop_requested()) {
      report_.stopped = true;
      return absl::OkStatus();
    }
    WAVEKV_ASSIGN_OR_RETURN(std::optional<TraceRecord> record, reader_->Next());
    bytes_done->store(reader_->bytes_read(), std::memory_order_relaxed);
    if (!record.has_value()) break;
    WAVEKV_RETURN_IF_ERROR(std::visit([this](auto& held) { return Apply(held); }, *record));
  }
  report_.cut = reader_->cut();
  return absl::OkStatus();
}

bool Replayer::has_all_steps() const {
  return options_.steps > 0 &&
         std::all_of(report_.layers.begin(), report_.layers.end(), [&](const auto& layer) {
           return layer.second.step_count() >= options_.steps;
         });
}

absl::Status Replayer::Insert(uint32_t layer, const TraceRows& rows) {
  const ModelShape& shape = sequence_->shape();
  const auto tokens = static_cast<int64_t>(rows.token_count);
  const uint32_t own_layers[] = {layers_.at(layer)};
  report_.tokens_inserted += rows.token_count;
  return sequence_->Insert(
      rows.first_position, own_layers,
      Rows(shape, {tokens, shape.kv_head_count, shape.key_dim}, rows.keys),
      Rows(shape, {tokens, shape.kv_head_count, shape.value_dim}, rows.values));
}

absl::Status Replayer::InsertAppended() {
  for (const auto& [layer, rows] : appended_) WAVEKV_RETURN_IF_ERROR(Insert(layer, rows));
  appended_.clear();
  return absl::OkStatus();
}

absl::Status Replayer::BuildStored() {
  if (std::exchange(stored_done_, true) || !trace().built) return absl::OkStatus();
  ++report_.builds;
  return sequence_->BuildIndex().status();
}

absl::Status Replayer::Apply(TraceRows& rows) {
  if (rows.origin != TraceRowsOrigin::kStored) WAVEKV_RETURN_IF_ERROR(BuildStored());
  if (!layers_.contains(rows.layer)) return absl::OkStatus();
  const auto waiting = appended_.find(rows.layer);
  if (waiting != appended_.end()) {
    WAVEKV_RETURN_IF_ERROR(Insert(rows.layer, waiting->second));
    appended_.erase(waiting);
  }
  if (rows.origin != TraceRowsOrigin::kAppend) return Insert(rows.layer, rows);
  appended_[rows.layer] = std::move(rows);
  return absl::OkStatus();
}

absl::Status Replayer::Apply(const TraceBuild& /*build*/) {
  WAVEKV_RETURN_IF_ERROR(BuildStored());
  WAVEKV_RETURN_IF_ERROR(InsertAppended());
  ++report_.builds;
  return sequence_->BuildIndex().status();
}

absl::Status Replayer::Apply(const TraceTruncate& truncate) {
  WAVEKV_RETURN_IF_ERROR(BuildStored());
  WAVEKV_RETURN_IF_ERROR(InsertAppended());
  ++report_.truncates;
  generation_ = truncate.generation;
  return sequence_->Truncate(truncate.token_count);
}

absl::Status Replayer::Apply(const TraceStep& step) {
  WAVEKV_RETURN_IF_ERROR(BuildStored());
  const auto own_layer = layers_.find(step.layer);
  if (own_layer == layers_.end()) return absl::OkStatus();
  LayerReport& report = report_.layers.at(step.layer);
  auto appended = appended_.extract(step.layer);
  uint64_t token_count = sequence_->token_count(own_layer->second);
  if (!appended.empty()) token_count = appended.mapped().first_position + 1;
  const bool enough = options_.steps > 0 && report.step_count() >= options_.steps;
  const bool overtaken = step.generation != generation_ || step.token_count != token_count;
  if (enough || overtaken) {
    if (overtaken) ++report_.overtaken;
    return appended.empty() ? absl::OkStatus() : Insert(step.layer, appended.mapped());
  }
  const ModelShape& shape = sequence_->shape();
  AttendOptions options;
  options.budget = BudgetOf(step.budget);
  if (!appended.empty()) {
    const TraceRows& rows = appended.mapped();
    options.append_keys = Rows(shape, {shape.kv_head_count, shape.key_dim}, rows.keys);
    options.append_values = Rows(shape, {shape.kv_head_count, shape.value_dim}, rows.values);
    ++report_.tokens_inserted;
  }
  const Tensor queries = Queries(shape, step.queries);
  const steady_clock::time_point begin = steady_clock::now();
  WAVEKV_ASSIGN_OR_RETURN(const Attention answer,
                          sequence_->Attend(own_layer->second, queries, options));
  const std::chrono::duration<double, std::micro> latency = steady_clock::now() - begin;
  const uint64_t number = report.step_count();
  report.AddStep(answer.counters, latency.count());
  // An exact answer is compared with our exact one, below.
  if (!step.out.empty() && !step.exact) {
    report.AddRecorded(RelativeErrors(answer.out, step.out, shape.query_head_count));
  }
  if (options_.compare_every == 0 || number % options_.compare_every != 0) return absl::OkStatus();
  return Compare(own_layer->second, step, *options.budget, answer, &report);
}

absl::Status Replayer::Compare(uint32_t layer, const TraceStep& step, const Budget& budget,
                               const Attention& answer, LayerReport* report) {
  const ModelShape& shape = sequence_->shape();
  WAVEKV_ASSIGN_OR_RETURN(const Attention exact,
                          sequence_->Attend(layer, Queries(shape, step.queries), {.exact = true}));
  if (step.exact) {
    report->AddRecorded(RelativeErrors(exact.out, step.out, shape.query_head_count));
  }
  // Of the queries that the layer has seen last: these.
  const uint32_t layers[] = {layer};
  WAVEKV_ASSIGN_OR_RETURN(const RecallSample sample,
                          admin_->SampleRecall(sequence_->id(), layers, budget));
  if (sample.layers.size() != 1 || !sample.layers.front().sampled) {
    return absl::InternalError(absl::StrCat("the daemon sampled ", sample.layers.size(),
                                            " layers, expected one that has seen a query"));
  }
  report->AddComparison(RelativeErrors(answer.out, exact.out, shape.query_head_count),
                        sample.layers.front().mass_covered_mean,
                        sample.layers.front().mass_covered_min);
  return absl::OkStatus();
}

}  // namespace wavekv::client
