// Decode attention over a long sequence: default budgets against the exact kernels over everything,
// time and error, in one run.
//
//   bench_attend [--json] [--tokens=131072] [--seed=1] [--threads=0] ...
//
// Both sides go through Engine::Attend, one layer and one query at a time, in turn over the layers'
// copies, so that nothing is in a cache. Times are medians. Errors are against attention in double.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/attend_errors.h"
#include "bench/attend_world.h"
#include "bench/machine.h"

namespace wavekv::bench {
namespace {

constexpr double kSpeedupGoal = 8;
constexpr double kBandwidthGoal = 0.7;
constexpr double kErrorGoal = 0.7;

struct Times {
  std::vector<double> full_us, sparse_us, read_gbps;
  StepCounters counters;  // Of the sparse steps.
};

// In each round every layer is attended once in full and, with the next queries, a few times over
// its zones; memory is read in between. A first round warms up.
Times MeasureTimes(AttendWorld* world, uint32_t rounds) {
  constexpr uint32_t kSparsePerFull = 4;
  const WorldOptions& options = world->options();
  Times times;
  uint32_t step = 0;
  const auto timed = [&](uint32_t layer, bool exact, std::vector<double>* us) {
    const double start = NowUs();
    const AttendOutcome outcome = world->Attend(layer, step++ % options.steps, exact);
    us->push_back(NowUs() - start);
    return outcome.counters;
  };
  for (uint32_t round = 0; round <= rounds; ++round) {
    if (round == 1) times = Times();
    for (uint32_t layer = 0; layer < options.layers; ++layer) {
      timed(layer, true, &times.full_us);
    }
    for (uint32_t i = 0; i < kSparsePerFull * options.layers; ++i) {
      times.counters += timed(i % options.layers, false, &times.sparse_us);
    }
    times.read_gbps.push_back(ReadGbps(world->pool(), world->memory()));
  }
  return times;
}

nlohmann::ordered_json Report(AttendWorld* world, const Times& times, const AttendErrors& errors) {
  const WorldOptions& options = world->options();
  const double full_us = Median(times.full_us), sparse_us = Median(times.sparse_us);
  const double bytes = 4.0 * options.tokens * options.kv_heads * options.dim;
  const double full_gbps = bytes / full_us / 1e3;
  const double memory_gbps = Median(times.read_gbps);
  const double ours_mean = Mean(errors.ours), paper_mean = Mean(errors.paper);
  const double ours_p99 = Quantile(errors.ours, 0.99), paper_p99 = Quantile(errors.paper, 0.99);
  nlohmann::ordered_json report;
  report["workload"] = "attend";
  report["full_us"] = full_us;
  report["sparse_us"] = sparse_us;
  report["speedup"] = full_us / sparse_us;
  report["full_gbps"] = full_gbps;
  report["memory_gbps"] = memory_gbps;
  report["rel_error_mean"] = ours_mean;
  report["rel_error_p99"] = ours_p99;
  report["rel_error_retrieval_only"] = Mean(errors.retrieval_only);
  report["rel_error_paper_mean"] = paper_mean;
  report["rel_error_paper_p99"] = paper_p99;
  report["rel_error_full_max"] = Quantile(errors.full, 1);
  report["kv_bytes_read_ratio"] = static_cast<double>(times.counters.kv_bytes_read) /
                                  static_cast<double>(times.counters.kv_bytes_full);
  report["threads"] = world->thread_count();
  report["isa"] = world->engine().Stats().backend.isa;
  report["tokens"] = options.tokens;
  report["layers"] = options.layers;
  report["query_heads"] = options.query_heads;
  report["kv_heads"] = options.kv_heads;
  report["dim"] = options.dim;
  report["seed"] = options.seed;
  report["error_samples"] = errors.ours.size();
  report["cpu"] = CpuName();
  report["commit"] = CommitName();
  report["goals"] = {{"speedup", full_us / sparse_us >= kSpeedupGoal},
                     {"full_gbps", full_gbps >= kBandwidthGoal * memory_gbps},
                     {"rel_error_mean", ours_mean <= kErrorGoal * paper_mean},
                     {"rel_error_p99", ours_p99 <= kErrorGoal * paper_p99}};
  return report;
}

}  // namespace

int Main(int argc, char** argv) {
  WorldOptions options;
  uint32_t rounds = 9, samples = 8;
  bool json = false;
  CLI::App app("Decode attention: default budgets against exact, time and error");
  app.add_option("--tokens", options.tokens)->check(CLI::Range(1024, 1 << 21));
  app.add_option("--layers", options.layers, "Copies that are attended in turn")
      ->check(CLI::Range(1, 64));
  app.add_option("--query-heads", options.query_heads)->check(CLI::Range(1, 128));
  app.add_option("--kv-heads", options.kv_heads)->check(CLI::Range(1, 128));
  app.add_option("--dim", options.dim)->check(CLI::Range(32, 256));
  app.add_option("--threads", options.threads, "0: as many as there are CPUs");
  app.add_option("--seed", options.seed);
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--samples", samples, "Steps whose error is measured")->check(CLI::Range(1, 64));
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  AttendWorld world(options);
  std::fprintf(stderr, "measuring\n");
  const Times times = MeasureTimes(&world, rounds);
  std::fprintf(stderr, "comparing with attention in double\n");
  const nlohmann::ordered_json report = Report(&world, times, MeasureErrors(&world, samples));
  std::cout << report.dump(json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
