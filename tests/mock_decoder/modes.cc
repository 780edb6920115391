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

// Clusters of an index are at least this large on average, those of outliers included.
constexpr uint64_t kTokensPerClusterMin = 8;
constexpr uint32_t kRetrieveClustersMax = 16383;  // Of a head, by the kernels.

std::string PathName(const SdkRunOptions& sdk) {
  if (sdk.resident != nullptr) return "resident";
  return sdk.staged ? "staged" : "attend";
}

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
uint64_t PoolBytes(const RunOptions& options) {
  const uint64_t payload_bytes = options.world.model.layer_count * MaxTokens(options.world) *
                                 ShapeOf(options.world.model).token_bytes();
  const uint64_t sequence_bytes = payload_bytes + payload_bytes / 2 + (64ull << 20);
  return options.sdk.fork ? 2 * sequence_bytes : sequence_bytes;
}

// Clusters that a step must have room for; 0: what an engine has by default suits the budget.
uint32_t RetrieveClusters(const RunOptions& options) {
  if (!options.sdk.retrieval_ratio.has_value() && !options.sdk.sketch_clusters.has_value()) {
    return 0;
  }
  const client::Budget budget = BudgetOf(options.sdk);
  const double clusters = static_cast<double>(MaxTokens(options.world)) / kTokensPerClusterMin;
  return static_cast<uint32_t>(std::min(budget.value * clusters + budget.sketch_clusters + 1,
                                        static_cast<double>(kRetrieveClustersMax)));
}

// What a run attends with, made before the context is: that takes a while, this may fail.
struct Means {
  std::unique_ptr<integration::Daemons> daemons;
  std::unique_ptr<integration::TokenEngine> engine;
  SdkRunOptions sdk;
};

absl::StatusOr<Means> Provide(const RunOptions& options) {
  Means means;
  means.sdk = options.sdk;
  means.sdk.steady_only = options.mode == Mode::kCompare;
  if (options.make_engine) {
    auto engine = options.make_engine(ShapeOf(options.world.model), MaxTokens(options.world),
                                      RetrieveClusters(options));
    if (!engine.ok()) {
      return absl::Status(engine.status().code(),
                          absl::StrCat("--backend=cuda: ", engine.status().message(),
                                       " (--backend=host decodes without a GPU)"));
    }
    means.engine = *std::move(engine);
    means.sdk.resident = means.engine.get();
  }
  WAVEKV_RETURN_IF_ERROR(ValidateSdkRunOptions(means.sdk));
  if (means.sdk.address.empty()) {
    integration::DaemonOptions daemon_options;
    daemon_options.pool_bytes = PoolBytes(options);
    daemon_options.backend = options.backend;
    daemon_options.real_gpu = options.real_gpu;
    WAVEKV_ASSIGN_OR_RETURN(means.daemons, integration::Daemons::Start(daemon_options));
    means.sdk.address = means.daemons->address();
  }
  return means;
}

}  // namespace

absl::StatusOr<Report> RunMode(const RunOptions& options) {
  ThreadPool pool(UsableCpuCount() - 1, "mock_decoder");
  Report report;
  report.mode = ModeName(options.mode);
  report.world = options.world;
  report.needles_asked = options.world.needle_count;
  WAVEKV_RETURN_IF_ERROR(ValidateWorldConfig(options.world));
  std::optional<Means> means;
  if (options.mode != Mode::kExact) {
    WAVEKV_ASSIGN_OR_RETURN(means, Provide(options));
    report.path = PathName(means->sdk);
    if (means->daemons != nullptr) report.backend = means->daemons->backend();
  }
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
  if (!means.has_value()) {
    wanted.assign(wanted.size(), true);
  } else {
    WAVEKV_ASSIGN_OR_RETURN(const SdkRun run, RunThroughSdk(*world, means->sdk));
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
