// A decode through the public C++ SDK, as an inference engine does it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "tests/integration/token_engine.h"
#include "tests/mock_decoder/world.h"

namespace wavekv::mock {

// What long work is told of: its name, and how many of its tokens are done. From the run's thread.
using Progress = std::function<void(const std::string& work, uint64_t done, uint64_t total)>;

struct SdkRunOptions {
  std::string address;           // Of wavekvd, as ClientOptions takes it.
  uint64_t chunk_tokens = 2048;  // Of one Insert of the prefill ...
  uint32_t chunk_layers = 2;     // ... and its layers.
  bool steady_only = false;      // Ask each question a second time with Budget::SteadyOnly.
  // Retrieve this share of the clusters and estimate so many from their sketch; unset: as by
  // default.
  std::optional<double> retrieval_ratio;
  std::optional<uint32_t> sketch_clusters;
  bool staged = false;  // Attend in this process over rows staged in the wave buffer.
  // Attend in this process over a resident region, with this engine; null: not so.
  integration::TokenEngine* resident = nullptr;
  // Life of an engine's request, each at most once, in the middle of the decode:
  bool abort_prefill = false;          // Drop the sequence in mid-prefill and start again.
  std::optional<uint32_t> preempt_at;  // Drop it before this step, re-admit it, go on.
  bool fork = false;      // From the middle on a fork answers, and its parent answers too.
  bool truncate = false;  // Speculate before every step: append garbage, then truncate it away.
  Progress progress = [](const std::string&, uint64_t, uint64_t) {};  // Of "insert" and "index".
};

struct SdkRun {
  std::vector<StepOutput> outputs;         // One per fact, in asking order.
  std::vector<StepOutput> steady_outputs;  // Likewise; empty unless asked for.
  // With fork: the parent's answers to the last facts, which the child answered in `outputs`.
  std::vector<StepOutput> parent_outputs;
  uint32_t planted_steady = 0;  // Facts that lay in the steady zone of the step that asked.
  bool has_wave_buffer = false;
  client::StepCounters counters;  // Of the answer steps of `outputs`.
  double seconds_prefill = 0;
  double seconds_build = 0;
  double seconds_decode = 0;
};

// What a sequence of the run is made for.
ModelShape ShapeOf(const ModelConfig& model);
uint64_t MaxTokens(const WorldConfig& world);
client::Budget BudgetOf(const SdkRunOptions& options);

// InvalidArgument names options that do not go together.
absl::Status ValidateSdkRunOptions(const SdkRunOptions& options);

// Prefills, builds and asks every question. Fails with the SDK's status and where it happened.
absl::StatusOr<SdkRun> RunThroughSdk(const World& world, const SdkRunOptions& options);

}  // namespace wavekv::mock
