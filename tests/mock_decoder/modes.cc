#include "tests/mock_decoder/modes.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <optional>

#include "absl/strings/str_cat.h"
#include "storage/base/cpuset.h"
#include "storage/base/status_macros.h"
#include "storage/base/thread_pool.h"
#include "tests/integration/daemons.h"
#include "tests/mock_decoder/stopwatch.h"

namespace wavekv::mock {
namespace {

std::string ModeName(Mode mode) {
  switch (mode) {
    case Mode::kExact:
      return "exact";
    case Mode::kWaveKv:
      return "wavekv";
    case Mode::kCompare:
      return "compare";
  }
  return "unknown";
}

uint32_t CountFound(const std::vector<bool>& found) {
  return static_cast<uint32_t>(std::count(found.begin(), found.end(), true));
}

std::vector<bool> Both(std::vector<bool> a, const std::vector<bool>& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] = a[i] && b[i];
  return a;
}

// Which facts the run found; a forked run's last ones must be found by parent and child.
std::vector<bool> FoundBySdk(const World& world, const SdkRun& run) {
  const std::vector<bool> found = FoundFacts(world, run.outputs);
  if (run.parent_outputs.empty()) return found;
  std::vector<StepOutput> outputs = run.outputs;
  std::copy(run.parent_outputs.begin(), run.parent_outputs.end(),
            outputs.end() - static_cast<std::ptrdiff_t>(run.parent_outputs.size()));
  return Both(found, FoundFacts(world, outputs));
}

void ReportErrors(const World& world, const SdkRun& run, const ExactAnswers& exact,
                  Report* report) {
  std::vector<double> errors = RelativeErrors(world, run.outputs, exact.outputs);
  if (!run.parent_outputs.empty()) {
    const std::vector<StepOutput> last(
        exact.outputs.end() - static_cast<std::ptrdiff_t>(run.parent_outputs.size()),
        exact.outputs.end());
    const std::vector<double> parents = RelativeErrors(world, run.parent_outputs, last);
    errors.insert(errors.end(), parents.begin(), parents.end());
  }
  report->max_rel_error = *std::max_element(errors.begin(), errors.end());
  report->mean_rel_error =
      std::accumulate(errors.begin(), errors.end(), 0.0) / static_cast<double>(errors.size());
}

void ReportSdkRun(const World& world, const SdkRun& run, Report* report) {
  report->needles_planted_steady = run.planted_steady;
  if (!run.steady_outputs.empty()) {
    report->needles_found_steady_only = CountFound(FoundFacts(world, run.steady_outputs));
  }
  const client::StepCounters& counters = run.counters;
  if (counters.kv_bytes_full > 0) {
    report->kv_bytes_read_ratio =
        static_cast<double>(counters.kv_bytes_read) / static_cast<double>(counters.kv_bytes_full);
  }
  const uint64_t blocks = counters.cache_hit_blocks + counters.cache_miss_blocks;
  if (run.has_wave_buffer && blocks > 0) {
    report->hit_ratio =
        static_cast<double>(counters.cache_hit_blocks) / static_cast<double>(blocks);
  }
  report->seconds_prefill = run.seconds_prefill;
  report->seconds_build = run.seconds_build;
  report->seconds_decode = run.seconds_decode;
}

// What a daemon needs to hold the context, its index and what a fork copies, with room to spare.
uint64_t PoolBytes(const World& world, const SdkRunOptions& sdk) {
  const uint64_t payload_bytes = world.config().model.layer_count * world.context().token_count() *
                                 2 * world.context().token_bytes();
  const uint64_t sequence_bytes = payload_bytes + payload_bytes / 2 + (64ull << 20);
  return sdk.fork ? 2 * sequence_bytes : sequence_bytes;
}

absl::StatusOr<SdkRun> RunSdk(const World& world, const RunOptions& options) {
  SdkRunOptions sdk = options.sdk;
  sdk.steady_only = options.mode == Mode::kCompare;
  std::unique_ptr<integration::Daemons> daemons;
  if (sdk.address.empty()) {
    integration::DaemonOptions daemon_options;
    daemon_options.pool_bytes = PoolBytes(world, sdk);
    WAVEKV_ASSIGN_OR_RETURN(daemons, integration::Daemons::Start(daemon_options));
    sdk.address = daemons->address();
  }
  return RunThroughSdk(world, sdk);
}

}  // namespace

absl::StatusOr<Report> RunMode(const RunOptions& options) {
  ThreadPool pool(UsableCpuCount() - 1, "mock_decoder");
  Report report;
  report.mode = ModeName(options.mode);
  report.world = options.world;
  report.needles_asked = options.world.needle_count;
  Stopwatch world_time;
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<World> world, World::Create(options.world, &pool));
  report.seconds_world = world_time.Seconds();

  // In mode wavekv every needle counts as one that exact attention finds: that is how it was
  // planted.
  std::vector<bool> wanted(world->facts().size(), true);
  std::optional<ExactAnswers> exact;
  if (options.mode != Mode::kWaveKv) {
    Stopwatch exact_time;
    exact = world->AnswerExactly(&pool);
    report.seconds_exact = exact_time.Seconds();
    report.needle_mass_min = exact->needle_mass_min;
    report.logit_std = exact->logit_std;
    wanted = FoundFacts(*world, exact->outputs);
    report.needles_found_exact = CountFound(wanted);
  }
  std::vector<bool> found = wanted;
  if (options.mode == Mode::kExact) {
    wanted.assign(wanted.size(), true);
  } else {
    WAVEKV_ASSIGN_OR_RETURN(const SdkRun run, RunSdk(*world, options));
    found = FoundBySdk(*world, run);
    ReportSdkRun(*world, run, &report);
    if (exact.has_value()) ReportErrors(*world, run, *exact, &report);
  }
  report.needles_found = CountFound(found);
  for (size_t i = 0; i < found.size(); ++i) {
    if (wanted[i] && !found[i]) report.missed_positions.push_back(world->facts()[i].position);
  }
  return report;
}

}  // namespace wavekv::mock
