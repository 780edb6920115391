// Tokens per second of a model's decode attention on the resident path: all layers of a token in
// one CUDA graph, Llama-3-8B's shape, the KV cache in host memory.
//
//   bench_gpu_decode [--batch=4] [--tokens=122880] [--layers=32] [--hits=0.9] [--steps=50]
//                    [--full=FILE] [--seed=N] [--out=FILE]
//
// Layers have index copies, caches and tables of their own and share the rows in host memory, which
// a step reads at random. Attention alone: a model's other kernels are not there. `--full` names
// the output of full_attention.py on the same machine. Last line: JSON.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <string>

#include "bench/gpu/attend_bench.h"
#include "storage/base/status_macros.h"

namespace wavekv::bench {
namespace {

struct Options {
  AttendOptions attend{.batch = 4, .layers = 32};
  double hits = 0.9;
  std::string full, out;
};

absl::Status Run(const Options& options) {
  AttendBench bench(options.attend);
  WAVEKV_RETURN_IF_ERROR(bench.Prepare());
  WAVEKV_ASSIGN_OR_RETURN(nlohmann::json row, bench.RunForced(options.hits));
  const auto tokens_per_s = [&](double step_us) {
    return options.attend.batch * 1e6 / (step_us * options.attend.layers);
  };
  row["tokens_per_s"] = tokens_per_s(row["step_us"]);
  const double full = FullUs(options.full, options.attend.batch, options.attend.tokens);
  if (full > 0) {
    row["full_us"] = full;
    row["speedup"] = full / double(row["step_us"]);
    row["full_tokens_per_s"] = tokens_per_s(full);
  }
  if (!options.out.empty()) std::ofstream(options.out) << row.dump(1) << "\n";
  std::printf("%s\n", row.dump().c_str());
  return absl::OkStatus();
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("A model's decode attention on the resident path.");
  app.add_option("--batch", options.attend.batch)->check(CLI::PositiveNumber);
  app.add_option("--tokens", options.attend.tokens)->check(CLI::PositiveNumber);
  app.add_option("--steps", options.attend.steps)->check(CLI::PositiveNumber);
  app.add_option("--layers", options.attend.layers)->check(CLI::PositiveNumber);
  app.add_option("--seed", options.attend.seed);
  app.add_option("--hits", options.hits)->check(CLI::Range(0.0, 1.0));
  app.add_option("--full", options.full);
  app.add_option("--out", options.out);
  CLI11_PARSE(app, argc, argv);
  return ReportRun("bench_gpu_decode", [&] { return Run(options); });
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
