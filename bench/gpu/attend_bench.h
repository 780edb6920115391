// A decode step of the resident path over one layer of Llama-3-8B's shape (32 query heads, 8 KV
// heads, dim 128, bf16) with the KV cache in host memory, timed in a CUDA graph of several layers.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "bench/gpu/bench_index.h"
#include "bench/gpu/cache_keeper.h"
#include "bench/gpu/topic_trace.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/step_launch.h"
#include "nlohmann/json.hpp"

namespace wavekv::bench {

inline constexpr uint32_t kBenchKvHeads = 8, kBenchGroup = 4;

struct AttendOptions {
  uint32_t batch = 8, tokens = 122880, steps = 50, layers = 8;
  uint32_t warm_steps = 200;  // That fill a cache before it is measured at its own hit ratio.
  double retrieve_ratio = 0;  // Of the clusters; 0: what wavekvd's default budget retrieves.
  uint64_t seed = std::random_device{}();
  std::vector<double> splits;  // Steady, rank, misses, hits, estimate; 0: as planned.
};

// Everything of one row's shape on the device. All layers are distinct memory, rotated so that
// nothing lives in the L2: the graph's device time over their number is the time of a step. A step
// begins with its token's append. Errors are CUDA's, or a capacity that does not fit.
class AttendBench {
 public:
  explicit AttendBench(const AttendOptions& options) : options_(options) {}

  absl::Status Prepare();
  // A row at a forced hit ratio: before each step the block table is set back.
  absl::StatusOr<nlohmann::json> RunForced(double hit_ratio);
  // A row at the hit ratio that a cache of this share of the blocks has, kept between the steps.
  // It overwrites the slots that RunForced relies on: no forced row after one of these.
  absl::StatusOr<nlohmann::json> RunOwn(double cache_ratio);

 private:
  struct Stages {
    bool rank = true, select = true, attend = true;
  };
  struct Timed {
    double median_us = 0;  // Of one layer.
    double hit_ratio = 0;
    double miss_rows = 0, hit_rows = 0;  // Of one layer and step.
  };
  class Graph;

  absl::Status PrepareLayers();
  absl::Status CaptureLayer(const gpu::Step& step, const Stages& stages);
  absl::StatusOr<std::unique_ptr<Graph>> Capture(const Stages& stages);
  // One launch of the graph with the next queries: its device time in microseconds.
  absl::StatusOr<double> Launch(const Graph& graph);
  absl::StatusOr<Timed> TimeForced(const Stages& stages, uint32_t steps);
  absl::Status ResetTables();
  absl::Status AdvanceQueries();
  absl::Status CountBlocks(Timed* timed);
  struct Errors {
    double replayed = 0;          // The largest of the sampled units.
    double exact = 0, paper = 0;  // Against exact attention, ours and the paper's: means.
  };
  absl::StatusOr<Errors> SampleErrors();
  // What every row says.
  absl::StatusOr<nlohmann::json> Row(const Timed& whole);
  uint32_t units() const { return options_.batch * kBenchKvHeads; }

  const AttendOptions options_;
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

// Runs a benchmark's body where there is a device; what main returns.
int ReportRun(const char* name, const std::function<absl::Status()>& run);

// Full attention's time for a shape, from the file that full_attention.py wrote; 0 if it has none.
double FullUs(const std::string& path, uint32_t batch, uint32_t tokens);

}  // namespace wavekv::bench
