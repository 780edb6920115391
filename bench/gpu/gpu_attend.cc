// Time of a decode step of the resident path, with the KV cache in host memory: one layer of
// Llama-3-8B's shape (32 query heads, 8 KV heads, dim 128, bf16), at forced hit ratios.
//
//   bench_gpu_attend [--batch=8] [--tokens=122880] [--hits=1,0.95,0.9,0.8] [--steps=50]
//   [--layers=8]
//                    [--full=FILE] [--seed=N] [--out=FILE]
//                    [--splits=STEADY,RANK,MISSES,HITS,ESTIMATE]   (0: as planned)
//
// All layers are distinct memory, rotated so that nothing lives in the L2, and stand in one CUDA
// graph: its device time over their number is the time of a step. A step begins with its token's
// append. Before each step the block table is set back, so that the share of blocks in the cache is
// the forced one. `--full` names the output of full_attention.py on the same machine. Last line:
// JSON.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "bench/gpu/attend_replay.h"
#include "bench/gpu/bench_index.h"
#include "bench/gpu/topic_trace.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/step_launch.h"
#include "nlohmann/json.hpp"
#include "storage/base/dtype.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kKvHeads = 8, kGroup = 4;
constexpr double kRetrieveRatio = 0.018;
constexpr uint32_t kSampledUnits = 8;

struct Options {
  uint32_t batch = 8, tokens = 122880, steps = 50, layers = 8;
  std::vector<double> hits = {1.0, 0.95, 0.9, 0.8};
  std::string full, out;
  uint64_t seed = std::random_device{}();
  std::vector<double> splits;
};

double Median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Everything of one row's shape on the device.
class AttendBench {
 public:
  explicit AttendBench(const Options& options) : options_(options) {}

  absl::Status Prepare();
  absl::StatusOr<nlohmann::json> RunForced(double hit_ratio);

 private:
  struct Stages {
    bool rank = true, select = true, attend = true;
  };
  struct Timed {
    double median_us = 0;  // Of one layer.
    double hit_ratio = 0;
    double miss_rows = 0, hit_rows = 0;  // Of one layer and step.
  };

  absl::Status PrepareLayers();
  absl::Status CaptureLayer(const gpu::Step& step, const Stages& stages);
  absl::StatusOr<Timed> Time(const Stages& stages, uint32_t steps);
  absl::Status ResetTables();
  absl::Status AdvanceQueries();
  absl::Status CountBlocks(Timed* timed);
  absl::Status SampleErrors(double* replay_error, double* exact_error);
  uint32_t units() const { return options_.batch * kKvHeads; }

  const Options& options_;
  TraceShape trace_;
  gpu::PinnedArray<char> pool_;
  BuiltLayer built_;
  std::vector<gpu::DeviceArray<char>> copies_;  // Layers 1 on; layer 0 is built_.memory.
  std::vector<void*> bases_;
  std::vector<gpu::Step> steps_;
  gpu::DeviceArray<gpu::SequenceDescriptor> live_;
  gpu::DeviceArray<char> workspace_;
  gpu::DeviceArray<uint16_t> queries_, new_rows_, out_;
  gpu::DeviceArray<float> lse_, query_state_;
  gpu::DeviceArray<int32_t> saved_slots_;
  gpu::DeviceArray<gpu::HeadState> saved_states_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t start_ = nullptr, end_ = nullptr;
  uint32_t step_idx_ = 0;
};

absl::Status AttendBench::Prepare() {
  trace_ = {options_.seed, units(), options_.tokens, kGroup, kBenchDim};
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&start_));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventCreate(&end_));
  const size_t elements = size_t{units()} * options_.tokens * kBenchDim;
  WAVEKV_ASSIGN_OR_RETURN(pool_, gpu::PinnedArray<char>::Make(PoolBytes(units(), options_.tokens)));
  {
    WAVEKV_ASSIGN_OR_RETURN(auto rows, gpu::DeviceArray<uint16_t>::Make(2 * elements));
    WAVEKV_RETURN_IF_ERROR(MakeTraceRows(trace_, rows.data(), rows.data() + elements, nullptr));
    WAVEKV_ASSIGN_OR_RETURN(built_, BuildLayer(units(), options_.tokens, kRetrieveRatio,
                                               rows.data(), rows.data() + elements, pool_.data()));
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
      live.push_back({2, 0, layer.heads + s * kKvHeads});
  }
  WAVEKV_ASSIGN_OR_RETURN(live_, gpu::DeviceArray<gpu::SequenceDescriptor>::Copy(live));

  gpu::Step step;
  step.shape = {.batch = options_.batch,
                .kv_heads = kKvHeads,
                .group = kGroup,
                .head_dim = kBenchDim,
                .scale = 1 / std::sqrt(static_cast<float>(kBenchDim)),
                .cluster_capacity = built_.shape.clusters,
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
  const size_t layers = options_.layers, head_rows = size_t{units()} * kGroup;
  WAVEKV_ASSIGN_OR_RETURN(queries_,
                          gpu::DeviceArray<uint16_t>::Make(layers * head_rows * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(out_, gpu::DeviceArray<uint16_t>::Make(layers * head_rows * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(lse_, gpu::DeviceArray<float>::Make(layers * head_rows));
  WAVEKV_ASSIGN_OR_RETURN(new_rows_, gpu::DeviceArray<uint16_t>::Make(units() * kBenchDim));
  WAVEKV_ASSIGN_OR_RETURN(
      query_state_, gpu::DeviceArray<float>::Make(layers * units() * (kGroup + 1) * kBenchDim));
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
  const size_t head_rows = size_t{units()} * kGroup;
  for (uint32_t l = 0; l < options_.layers; ++l) {
    WAVEKV_RETURN_IF_ERROR(AdvanceTraceQueries(
        trace_, l, step_idx_, query_state_.data() + size_t{l} * units() * (kGroup + 1) * kBenchDim,
        queries_.data() + l * head_rows * kBenchDim, stream_));
  }
  ++step_idx_;
  return absl::OkStatus();
}

absl::StatusOr<AttendBench::Timed> AttendBench::Time(const Stages& stages, uint32_t steps) {
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
  for (const gpu::Step& step : steps_) WAVEKV_RETURN_IF_ERROR(CaptureLayer(step, stages));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamEndCapture(stream_, &graph));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphInstantiate(&executable, graph, 0));
  constexpr uint32_t kWarmUp = 3;
  std::vector<double> times;
  Timed timed;
  for (uint32_t i = 0; i < kWarmUp + steps; ++i) {
    WAVEKV_RETURN_IF_ERROR(ResetTables());
    WAVEKV_RETURN_IF_ERROR(AdvanceQueries());
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(start_, stream_));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphLaunch(executable, stream_));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventRecord(end_, stream_));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
    float ms = 0;
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaEventElapsedTime(&ms, start_, end_));
    if (i >= kWarmUp) times.push_back(ms * 1e3 / options_.layers);
  }
  timed.median_us = Median(times);
  if (stages.attend) WAVEKV_RETURN_IF_ERROR(CountBlocks(&timed));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphExecDestroy(executable));
  WAVEKV_CUDA_RETURN_IF_ERROR(cudaGraphDestroy(graph));
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

absl::Status AttendBench::SampleErrors(double* replay_error, double* exact_error) {
  const gpu::Step& step = steps_.back();
  const uint32_t layer = options_.layers - 1;
  const size_t per_unit = size_t{kGroup} * kBenchDim;
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
  std::vector<double> replayed(sampled), exact(sampled);
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < sampled; ++i) {
    threads.emplace_back([&, i] {
      ReplayInput input;
      input.built = &built_;
      input.base = bases_[layer];
      input.pool = pool_.data();
      input.unit = i * units() / sampled;
      input.group = kGroup;
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
      replayed[i] = RelativeError(got, reference->replayed);
      exact[i] = RelativeError(got, reference->exact);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const absl::Status& status : statuses) WAVEKV_RETURN_IF_ERROR(status);
  *replay_error = *std::max_element(replayed.begin(), replayed.end());
  *exact_error = 0;
  for (const double e : exact) *exact_error += e / sampled;
  return absl::OkStatus();
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
  WAVEKV_ASSIGN_OR_RETURN(const Timed begin, Time({false, false, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed rank, Time({true, false, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed select, Time({true, true, false}, few));
  WAVEKV_ASSIGN_OR_RETURN(const Timed whole, Time({true, true, true}, options_.steps));
  double replay_error = 0, exact_error = 0;
  WAVEKV_RETURN_IF_ERROR(SampleErrors(&replay_error, &exact_error));
  double clusters = 0;
  for (const uint32_t count : built_.cluster_counts) clusters += count;
  // Centroids and value means, scales, spreads, sizes; logits and ranks written, logits read twice,
  // ranks once.
  const double index_bytes = clusters * (2 * kBenchDim + 4 * 4 + 2 * 3 + 5 * 4 * kGroup);
  const double row_bytes = 2.0 * 2 * kBenchDim;
  const double steady_rows = double(units()) * (kBenchSinks + kBenchWindow + 1);
  return nlohmann::json{{"batch", options_.batch},
                        {"tokens", options_.tokens},
                        {"hit_ratio", whole.hit_ratio},
                        {"forced", true},
                        {"forced_hit_ratio", hit_ratio},
                        {"trace", false},
                        {"step_us", whole.median_us},
                        {"breakdown_us",
                         {{"begin", begin.median_us},
                          {"rank", rank.median_us - begin.median_us},
                          {"select", select.median_us - rank.median_us},
                          {"attend", whole.median_us - select.median_us}}},
                        {"hbm_bytes", index_bytes + (whole.hit_rows + steady_rows) * row_bytes},
                        {"pcie_bytes", whole.miss_rows * row_bytes},
                        {"clusters_per_head", clusters / units()},
                        {"retrieved_per_head", built_.shape.retrieve},
                        {"rel_error", replay_error},
                        {"rel_error_exact", exact_error},
                        {"steps", options_.steps},
                        {"layers", options_.layers}};
}

// Full attention's time for a shape, from the file that full_attention.py wrote; 0 if it has none.
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

std::vector<double> ParseList(const std::string& text) {
  std::istringstream list(text);
  std::vector<double> values;
  for (std::string part; std::getline(list, part, ',');) values.push_back(std::stod(part));
  return values;
}

bool ParseOption(const std::string& argument, Options* options) {
  const size_t equals = argument.find('=');
  if (equals == std::string::npos) return false;
  const std::string name = argument.substr(0, equals), value = argument.substr(equals + 1);
  const auto number = [&] { return std::strtoull(value.c_str(), nullptr, 10); };
  if (name == "--batch")
    options->batch = number();
  else if (name == "--tokens")
    options->tokens = number();
  else if (name == "--steps")
    options->steps = number();
  else if (name == "--layers")
    options->layers = number();
  else if (name == "--seed")
    options->seed = number();
  else if (name == "--full")
    options->full = value;
  else if (name == "--out")
    options->out = value;
  else if (name == "--hits")
    options->hits = ParseList(value);
  else if (name == "--splits")
    options->splits = ParseList(value);
  else {
    return false;
  }
  return true;
}

absl::Status Run(const Options& options) {
  AttendBench bench(options);
  WAVEKV_RETURN_IF_ERROR(bench.Prepare());
  nlohmann::json rows = nlohmann::json::array();
  for (const double hits : options.hits) {
    WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, bench.RunForced(hits));
    const double full = FullUs(options.full, options.batch, options.tokens);
    if (full > 0) {
      row["full_us"] = full;
      row["speedup"] = full / double(row["step_us"]);
    }
    row["seed"] = options.seed;
    std::printf("%u x %u, hits %.3f: %.1f us, full %.1f; %s\n", options.batch, options.tokens,
                double(row["hit_ratio"]), double(row["step_us"]), full,
                row["breakdown_us"].dump().c_str());
    rows.push_back(std::move(row));
  }
  if (!options.out.empty()) std::ofstream(options.out) << rows.dump(1) << "\n";
  std::printf("%s\n", rows.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    if (!ParseOption(argv[i], &options)) {
      std::fprintf(stderr, "bench_gpu_attend: unknown option %s\n", argv[i]);
      return 2;
    }
  }
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "bench_gpu_attend: no CUDA device\n");
    return 1;
  }
  const absl::Status status = Run(options);
  if (!status.ok()) std::cerr << "bench_gpu_attend: " << status << "\n";
  return status.ok() ? 0 : 1;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
