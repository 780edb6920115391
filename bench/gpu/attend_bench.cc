#include "bench/gpu/attend_bench.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <thread>
#include <utility>

#include "bench/gpu/attend_replay.h"
#include "index/zone/select_zones.h"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kSampledUnits = 8;

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

}  // namespace

class AttendBench::Graph {
 public:
  ~Graph() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (captured != nullptr) cudaGraphDestroy(captured);
  }

  cudaGraph_t captured = nullptr;
  cudaGraphExec_t executable = nullptr;
};

absl::Status AttendBench::Prepare() {
  trace_ = {options_.seed, units(), options_.tokens, kBenchGroup, kBenchDim};
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&start_));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&end_));
  const size_t elements = size_t{units()} * options_.tokens * kBenchDim;
  WAVEKV_ASSIGN_OR_RETURN(pool_, gpu::PinnedArray<char>::Make(PoolBytes(units(), options_.tokens)));
  {
    WAVEKV_ASSIGN_OR_RETURN(auto rows, gpu::DeviceArray<uint16_t>::Make(2 * elements));
    WAVEKV_RETURN_IF_ERROR(MakeTraceRows(trace_, rows.data(), rows.data() + elements, nullptr));
    const auto retrieve = [this](uint32_t clusters) {
      ZoneBudget budget;
      if (options_.retrieve_ratio > 0) budget.value = options_.retrieve_ratio;
      return UnsketchedRetrievalCount(budget, options_.retrieve_ratio == 0, clusters);
    };
    WAVEKV_ASSIGN_OR_RETURN(built_, BuildLayer(units(), options_.tokens, retrieve, rows.data(),
                                               rows.data() + elements, pool_.data()));
  }
  return PrepareLayers();
}

absl::Status AttendBench::PrepareLayers() {
  const size_t bytes = LayerBytes(built_.shape);
  bases_ = {built_.memory.data()};
  for (uint32_t l = 1; l < options_.layers; ++l) {
    copies_.emplace_back();
    WAVEKV_ASSIGN_OR_RETURN(copies_.back(), gpu::DeviceArray<char>::Make(bytes));
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(copies_.back().data(), bases_[0], bytes, cudaMemcpyDefault));
    bases_.push_back(copies_.back().data());
  }
  std::vector<gpu::SequenceDescriptor> live;
  for (void* base : bases_) {
    WAVEKV_RETURN_IF_ERROR(DescribeLayer(built_, base, pool_.data()));
    const LayerArrays layer = LayOutLayer(built_.shape, base);
    for (uint32_t s = 0; s < options_.batch; ++s)
      live.push_back({2, 0, layer.heads + s * kBenchKvHeads});
  }
  WAVEKV_ASSIGN_OR_RETURN(live_, gpu::DeviceArray<gpu::SequenceDescriptor>::Copy(live));

  gpu::Step step;
  step.shape = {.batch = options_.batch,
                .kv_heads = kBenchKvHeads,
                .group = kBenchGroup,
                .head_dim = kBenchDim,
                .scale = 1 / std::sqrt(static_cast<float>(kBenchDim)),
                .cluster_capacity = built_.shape.clusters,
                .segment_capacity = built_.shape.segments,
                .retrieve_capacity = built_.shape.retrieve};
  WAVEKV_RETURN_IF_ERROR(gpu::ValidateShape(step.shape));
  int sm_count = 0;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaDeviceGetAttribute(&sm_count, cudaDevAttrMultiProcessorCount, 0));
  step.splits = gpu::PlanSplits(step.shape, sm_count);
  uint32_t* const planned[] = {&step.splits.steady, &step.splits.rank, &step.splits.misses,
                               &step.splits.hits, &step.splits.estimate};
  for (size_t i = 0; i < std::min(std::size(planned), options_.splits.size()); ++i) {
    if (options_.splits[i] > 0) *planned[i] = static_cast<uint32_t>(options_.splits[i]);
  }
  WAVEKV_ASSIGN_OR_RETURN(
      workspace_, gpu::DeviceArray<char>::Make(gpu::WorkspaceBytes(step.shape, step.splits)));
  step.workspace = gpu::LayOutWorkspace(step.shape, step.splits, workspace_.data());
  const size_t layers = options_.layers, head_rows = size_t{units()} * kBenchGroup;
  WAVEKV_ASSIGN_OR_RETURN(queries_,
                          gpu::DeviceArray<uint16_t>::Make(layers * head_rows * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(out_, gpu::DeviceArray<uint16_t>::Make(layers * head_rows * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(lse_, gpu::DeviceArray<float>::Make(layers * head_rows));
  WAVEKV_ASSIGN_OR_RETURN(new_rows_, gpu::DeviceArray<uint16_t>::Make(units() * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(query_state_, gpu::DeviceArray<float>::Make(
                                            layers * units() * (kBenchGroup + 1) * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(saved_slots_,
                          gpu::DeviceArray<int32_t>::Make(layers * units() * built_.shape.blocks));
  WAVEKV_ASSIGN_OR_RETURN(saved_states_, gpu::DeviceArray<gpu::HeadState>::Make(layers * units()));
  for (uint32_t l = 0; l < options_.layers; ++l) {
    step.inputs = {.live = live_.data() + size_t{l} * options_.batch,
                   .queries = queries_.data() + l * head_rows * kBenchDim,
                   .new_keys = new_rows_.data(),
                   .new_values = new_rows_.data(),
                   .out = out_.data() + l * head_rows * kBenchDim,
                   .lse = lse_.data() + l * head_rows};
    steps_.push_back(step);
  }
  return absl::OkStatus();
}

absl::Status AttendBench::CaptureLayer(const gpu::Step& step, const Stages& stages) {
  WAVEKV_RETURN_IF_ERROR(gpu::LaunchBegin(step, stream_));
  if (stages.rank) WAVEKV_RETURN_IF_ERROR(gpu::LaunchRank(step, stream_));
  if (stages.select) WAVEKV_RETURN_IF_ERROR(gpu::LaunchSelect(step, stream_));
  if (stages.attend) WAVEKV_RETURN_IF_ERROR(gpu::LaunchAttend(step, stream_));
  return absl::OkStatus();
}

absl::Status AttendBench::ResetTables() {
  const size_t slots = size_t{units()} * built_.shape.blocks;
  for (uint32_t l = 0; l < options_.layers; ++l) {
    const LayerArrays layer = LayOutLayer(built_.shape, bases_[l]);
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(layer.block_slots, saved_slots_.data() + l * slots,
                                                slots * sizeof(int32_t), cudaMemcpyDeviceToDevice,
                                                stream_));
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(layer.state, saved_states_.data() + size_t{l} * units(),
                        units() * sizeof(gpu::HeadState), cudaMemcpyDeviceToDevice, stream_));
  }
  return absl::OkStatus();
}

absl::Status AttendBench::AdvanceQueries() {
  const size_t head_rows = size_t{units()} * kBenchGroup;
  for (uint32_t l = 0; l < options_.layers; ++l) {
    WAVEKV_RETURN_IF_ERROR(AdvanceTraceQueries(
        trace_, l, step_idx_,
        query_state_.data() + size_t{l} * units() * (kBenchGroup + 1) * kBenchDim,
        queries_.data() + l * head_rows * kBenchDim, stream_));
  }
  ++step_idx_;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<AttendBench::Graph>> AttendBench::Capture(const Stages& stages) {
  auto graph = std::make_unique<Graph>();
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (const gpu::Step& step : steps_) WAVEKV_RETURN_IF_ERROR(CaptureLayer(step, stages));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(stream_, &graph->captured));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&graph->executable, graph->captured, 0));
  return graph;
}

absl::StatusOr<double> AttendBench::Launch(const Graph& graph) {
  WAVEKV_RETURN_IF_ERROR(AdvanceQueries());
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(start_, stream_));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(graph.executable, stream_));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(end_, stream_));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
  float ms = 0;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, start_, end_));
  return ms * 1e3;
}

absl::StatusOr<AttendBench::Timed> AttendBench::TimeForced(const Stages& stages, uint32_t steps) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Graph> graph, Capture(stages));
  constexpr uint32_t kWarmUp = 3;
  std::vector<double> times;
  for (uint32_t i = 0; i < kWarmUp + steps; ++i) {
    WAVEKV_RETURN_IF_ERROR(ResetTables());
    WAVEKV_ASSIGN_OR_RETURN(const double us, Launch(*graph));
    if (i >= kWarmUp) times.push_back(us / options_.layers);
  }
  Timed timed;
  timed.median_us = Median(times);
  if (stages.attend) WAVEKV_RETURN_IF_ERROR(CountBlocks(&timed));
  return timed;
}

// Of the last layer of the last step.
absl::Status AttendBench::CountBlocks(Timed* timed) {
  const gpu::Step& step = steps_.back();
  std::vector<gpu::UnitCounts> counts(units());
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(counts.data(), step.workspace.counts,
                                         units() * sizeof(gpu::UnitCounts), cudaMemcpyDefault));
  const size_t capacity = size_t{gpu::kClusterBlocksMax} * step.shape.retrieve_capacity;
  std::vector<gpu::BlockRef> blocks(units() * capacity);
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(blocks.data(), step.workspace.blocks,
                                         blocks.size() * sizeof(gpu::BlockRef), cudaMemcpyDefault));
  double hits = 0, misses = 0;
  for (uint32_t unit = 0; unit < units(); ++unit) {
    const gpu::BlockRef* list = blocks.data() + unit * capacity;
    hits += counts[unit].hits;
    misses += counts[unit].misses;
    for (uint32_t i = 0; i < counts[unit].hits; ++i) timed->hit_rows += list[i].row_count;
    for (uint32_t i = 0; i < counts[unit].misses; ++i) {
      timed->miss_rows += list[capacity - 1 - i].row_count;
    }
  }
  timed->hit_ratio = hits + misses > 0 ? hits / (hits + misses) : 1;
  return absl::OkStatus();
}

absl::StatusOr<AttendBench::Errors> AttendBench::SampleErrors() {
  const gpu::Step& step = steps_.back();
  const uint32_t layer = options_.layers - 1;
  const size_t per_unit = size_t{kBenchGroup} * kBenchDim;
  std::vector<uint16_t> queries(units() * per_unit), out(units() * per_unit);
  std::vector<gpu::UnitCounts> counts(units());
  std::vector<uint32_t> lists(size_t{units()} * step.shape.retrieve_capacity);
  const auto fetch = [](auto* to, const void* from) {
    return gpu::CudaStatus(
        cudaMemcpy(to->data(), from, to->size() * sizeof((*to)[0]), cudaMemcpyDefault),
        "cudaMemcpy");
  };
  WAVEKV_RETURN_IF_ERROR(fetch(&queries, step.inputs.queries));
  WAVEKV_RETURN_IF_ERROR(fetch(&out, step.inputs.out));
  WAVEKV_RETURN_IF_ERROR(fetch(&counts, step.workspace.counts));
  WAVEKV_RETURN_IF_ERROR(fetch(&lists, step.workspace.retrieved));
  const uint32_t sampled = std::min(kSampledUnits, units());
  std::vector<absl::Status> statuses(sampled);
  std::vector<Errors> found(sampled);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < sampled; ++i) {
    threads.emplace_back([&, i] {
      ReplayInput input;
      input.built = &built_;
      input.base = bases_[layer];
      input.pool = pool_.data();
      input.unit = i * units() / sampled;
      input.group = kBenchGroup;
      input.scale = step.shape.scale;
      std::vector<double> got;
      for (size_t k = 0; k < per_unit; ++k) {
        input.queries.push_back(BF16ToFloat(queries[input.unit * per_unit + k]));
        got.push_back(BF16ToFloat(out[input.unit * per_unit + k]));
      }
      const auto list = lists.begin() + size_t{input.unit} * step.shape.retrieve_capacity;
      input.retrieved.assign(list, list + counts[input.unit].retrieved);
      const absl::StatusOr<ReplayOutput> reference = Replay(input);
      statuses[i] = reference.status();
      if (!reference.ok()) return;
      found[i] = {RelativeError(got, reference->replayed), RelativeError(got, reference->exact),
                  RelativeError(reference->paper, reference->exact)};
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) WAVEKV_RETURN_IF_ERROR(status);
  Errors errors;
  for (const Errors& unit : found) {
    errors.replayed = std::max(errors.replayed, unit.replayed);
    errors.exact += unit.exact / sampled;
    errors.paper += unit.paper / sampled;
  }
  return errors;
}

absl::StatusOr<nlohmann::json> AttendBench::Row(const Timed& whole) {
  WAVEKV_ASSIGN_OR_RETURN(const Errors errors, SampleErrors());
  double clusters = 0;
  for (const uint32_t count : built_.cluster_counts) clusters += count;
  // Centroids and value means, scales, spreads, sizes; logits and ranks written, logits read twice,
  // ranks once.
  const double index_bytes = clusters * (2 * kBenchDim + 4 * 4 + 2 * 3 + 5 * 4 * kBenchGroup);
  const double row_bytes = 2.0 * 2 * kBenchDim;
  const double steady_rows = double(units()) * (kBenchSinks + kBenchWindow + 1);
  return nlohmann::json{{"batch", options_.batch},
                        {"tokens", options_.tokens},
                        {"hit_ratio", whole.hit_ratio},
                        {"step_us", whole.median_us},
                        {"hbm_bytes", index_bytes + (whole.hit_rows + steady_rows) * row_bytes},
                        {"pcie_bytes", whole.miss_rows * row_bytes},
                        {"clusters_per_head", clusters / units()},
                        {"retrieved_per_head", built_.shape.retrieve},
                        {"rel_error", errors.replayed},
                        {"rel_error_exact", errors.exact},
                        {"rel_error_paper", errors.paper},
                        {"seed", options_.seed},
                        {"steps", options_.steps},
                        {"layers", options_.layers}};
}

absl::StatusOr<nlohmann::json> AttendBench::RunForced(double hit_ratio) {
  const size_t slots = size_t{units()} * built_.shape.blocks;
  for (uint32_t l = 0; l < options_.layers; ++l) {
    WAVEKV_RETURN_IF_ERROR(ForceMisses(built_, bases_[l], hit_ratio, options_.seed + l));
    const LayerArrays layer = LayOutLayer(built_.shape, bases_[l]);
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(saved_slots_.data() + l * slots, layer.block_slots,
                                           slots * sizeof(int32_t), cudaMemcpyDefault));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemcpy(saved_states_.data() + size_t{l} * units(), layer.state,
                                           units() * sizeof(gpu::HeadState), cudaMemcpyDefault));
  }
  const uint32_t few = std::max(10u, options_.steps / 4);
  WAVEKV_ASSIGN_OR_RETURN(const Timed begin, TimeForced({false, false, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed rank, TimeForced({true, false, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed select, TimeForced({true, true, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed whole, TimeForced({true, true, true}, options_.steps));
  WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, Row(whole));
  row["forced"] = true;
  row["forced_hit_ratio"] = hit_ratio;
  row["trace"] = false;
  row["breakdown_us"] = {{"begin", begin.median_us},
                         {"rank", rank.median_us - begin.median_us},
                         {"select", select.median_us - rank.median_us},
                         {"attend", whole.median_us - select.median_us}};
  return row;
}

absl::StatusOr<nlohmann::json> AttendBench::RunOwn(double cache_ratio) {
  std::vector<std::unique_ptr<CacheKeeper>> keepers;
  for (void* base : bases_) {
    keepers.push_back(std::make_unique<CacheKeeper>(built_, base, cache_ratio));
    WAVEKV_RETURN_IF_ERROR(keepers.back()->Reset());
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Graph> graph, Capture({true, true, true}));
  // The layers' caches are independent; the steps are not timed while they are kept.
  const auto keep_all = [&]() -> absl::Status {
    std::vector<absl::Status> statuses(keepers.size());
    std::vector<std::thread> threads;
    for (size_t l = 0; l < keepers.size(); ++l) {
      threads.emplace_back([&, l] { statuses[l] = keepers[l]->Round(); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const absl::Status& status : statuses) WAVEKV_RETURN_IF_ERROR(status);
    // A copy from pageable memory may return before the device has it, and the graph's stream does
    // not wait for the default one.
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaDeviceSynchronize());
    return absl::OkStatus();
  };
  std::vector<double> times;
  Timed timed;
  for (uint32_t i = 0; i < options_.warm_steps + options_.steps; ++i) {
    WAVEKV_ASSIGN_OR_RETURN(const double us, Launch(*graph));
    if (i >= options_.warm_steps) times.push_back(us / options_.layers);
    WAVEKV_RETURN_IF_ERROR(keep_all());
  }
  timed.median_us = Median(times);
  WAVEKV_RETURN_IF_ERROR(CountBlocks(&timed));  // Rows of the last step; its ratio is one sample.
  CacheHits own, best;
  for (const auto& keeper : keepers) {
    const CacheHits hits = keeper->Hits(options_.warm_steps);
    own.hits += hits.hits;
    own.lookups += hits.lookups;
  }
  best = keepers.front()->BeladyHits(options_.warm_steps);
  timed.hit_ratio = own.ratio();
  WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, Row(timed));
  row["forced"] = false;
  row["trace"] = true;
  row["cache_ratio"] = cache_ratio;
  row["warm_steps"] = options_.warm_steps;
  row["belady_hit_ratio"] = best.ratio();
  row["hit_ratio_of_belady"] = keepers.front()->Hits(options_.warm_steps).ratio() / best.ratio();
  return row;
}

int ReportRun(const char* name, const std::function<absl::Status()>& run) {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::cerr << name << ": no CUDA device\n";
    return 1;
  }
  const absl::Status status = run();
  if (!status.ok()) std::cerr << name << ": " << status << "\n";
  return status.ok() ? 0 : 1;
}

double FullUs(const std::string& path, uint32_t batch, uint32_t tokens) {
  if (path.empty()) return 0;
  std::ifstream file(path);
  const nlohmann::json parsed = nlohmann::json::parse(file, nullptr, false);
  if (parsed.is_discarded()) return 0;
  for (const auto& row : parsed["rows"]) {
    if (row["batch"] == batch && row["tokens"] == tokens) return row["full_us"];
  }
  return 0;
}

}  // namespace wavekv::bench
