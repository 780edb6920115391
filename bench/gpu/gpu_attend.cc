// Time of a decode step of the resident path, with the KV cache in host memory: one layer of
// Llama-3-8B's shape (32 query heads, 8 KV heads, dim 128, bf16), at forced hit ratios.
//
//   bench_gpu_attend [--batch=8] [--tokens=122880] [--hits=1,0.95,0.9,0.8] [--steps=50]
//   [--layers=8]
//                    [--full=FILE] [--seed=N] [--out=FILE]
//                    [--own=0.05,0.2] [--warm=200] [--retrieve=RATIO]
//                    [--splits=STEADY,RANK,MISSES,HITS,ESTIMATE]   (0: as planned)
//
// All layers are distinct memory, rotated so that nothing lives in the L2, and stand in one CUDA
// graph: its device time over their number is the time of a step. A step begins with its token's
// append. Before each step the block table is set back, so that the share of blocks in the cache is
// the forced one. `--own` rows, last, keep caches of these shares of the blocks between the steps,
// on the trace's drifting queries, and compare them with Belady's optimum. `--retrieve` is the
// share of the clusters that is retrieved, in place of the default budget. `--full` names the
// output of full_attention.py on the same machine. Last line: JSON.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>
#include <vector>

#include "bench/gpu/attend_bench.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

struct Options {
  AttendOptions attend;
  std::vector<double> hits = {1.0, 0.95, 0.9, 0.8};
  std::vector<double> own;
  std::string full, out;
};

// Adds what full attention takes, and prints the row.
void Finish(const Options& options, nlohmann::json* row) {
  const double full = FullUs(options.full, options.attend.batch, options.attend.tokens);
  if (full > 0) {
    (*row)["full_us"] = full;
    (*row)["speedup"] = full / double((*row)["step_us"]);
  }
  std::printf("%u x %u, %s hits %.3f: %.1f us, full %.1f\n", options.attend.batch,
              options.attend.tokens, (*row)["forced"] ? "forced" : "own",
              double((*row)["hit_ratio"]), double((*row)["step_us"]), full);
  std::fflush(stdout);
}

absl::Status Run(const Options& options) {
  AttendBench bench(options.attend);
  WAVEKV_RETURN_IF_ERROR(bench.Prepare());
  nlohmann::json rows = nlohmann::json::array();
  for (const double hits : options.hits) {
    WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, bench.RunForced(hits));
    Finish(options, &row);
    rows.push_back(std::move(row));
  }
  for (const double cache : options.own) {
    WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, bench.RunOwn(cache));
    Finish(options, &row);
    rows.push_back(std::move(row));
  }
  if (!options.out.empty()) std::ofstream(options.out) << rows.dump(1) << "\n";
  std::printf("%s\n", rows.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A decode step of the resident path.");
  app.add_option("--batch", options.attend.batch)->check(CLI::PositiveNumber);
  app.add_option("--tokens", options.attend.tokens)->check(CLI::PositiveNumber);
  app.add_option("--steps", options.attend.steps)->check(CLI::PositiveNumber);
  app.add_option("--warm", options.attend.warm_steps);
  app.add_option("--layers", options.attend.layers)->check(CLI::PositiveNumber);
  app.add_option("--retrieve", options.attend.retrieve_ratio)->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", options.attend.seed);
  app.add_option("--hits", options.hits)->delimiter(',')->check(CLI::Range(0.0, 1.0));
  app.add_option("--own", options.own)->delimiter(',')->check(CLI::Range(0.0, 1.0));
  app.add_option("--splits", options.attend.splits)->delimiter(',');
  app.add_option("--full", options.full);
  app.add_option("--out", options.out);
  CLI11_PARSE(app, argc, argv);
  return ReportRun("bench_gpu_attend", [&] { return Run(options); });
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
