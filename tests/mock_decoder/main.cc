// mock_decoder: finds planted needles in a long context with exact attention, with WaveKV through
// its public SDK, and with both. See --help.

#include <cstdint>
#include <cstdio>
#include <map>
#include <optional>
#include <string>

#include "CLI/CLI.hpp"
#include "client/cli/progress.h"
#include "tests/integration/device_engine.h"
#include "tests/mock_decoder/modes.h"

namespace wavekv::mock {
namespace {

constexpr char kDescription[] =
    "A deterministic decoder that hides facts in a long context and asks for them.\n"
    "Exit code: 0 when no needle was missed that exact attention finds (in mode wavekv: when "
    "every\n"
    "needle was found), 1 when one was, 2 when the run itself failed.";

int Main(int argc, char** argv) {
  RunOptions options;
  bool json = false;
  const std::map<std::string, Mode> modes = {
      {"exact", Mode::kExact}, {"wavekv", Mode::kWaveKv}, {"compare", Mode::kCompare}};
  const std::map<std::string, DType> dtypes = {
      {"bf16", DType::kBF16}, {"f16", DType::kF16}, {"f32", DType::kF32}};

  CLI::App app(kDescription);
  app.add_option("--mode", options.mode, "exact, wavekv or compare")
      ->transform(CLI::CheckedTransformer(modes))
      ->default_str("compare");
  app.add_option("--tokens", options.world.token_count, "Tokens of the prefill")
      ->capture_default_str();
  app.add_option("--needles", options.world.needle_count, "Facts to hide and ask for")
      ->capture_default_str();
  app.add_option("--seed", options.world.model.seed, "Of weights, tokens and needles")
      ->capture_default_str();
  app.add_option("--layers", options.world.model.layer_count, "At least 4")->capture_default_str();
  app.add_option("--dtype", options.world.model.dtype, "bf16, f16 or f32")
      ->transform(CLI::CheckedTransformer(dtypes))
      ->default_str("bf16");
  app.add_option("--address", options.sdk.address,
                 "Of wavekvd, such as unix:/run/wavekv/wavekvd.sock; without it the run starts a "
                 "wavekvd and a wavebufferd of its own and stops them");
  app.add_option("--backend", options.backend,
                 "Of the wavebufferd that the run starts. With cuda this process' own kernels "
                 "decode over a resident region on the GPU, with --staged as on the host")
      ->check(CLI::IsMember({"host", "cuda"}))
      ->default_str("host");
  app.add_option("--chunk-tokens", options.sdk.chunk_tokens, "Tokens of one Insert")
      ->capture_default_str()
      ->check(CLI::Range(1, 1 << 20));
  app.add_option("--sketch-clusters", options.sdk.sketch_clusters,
                 "Clusters estimated from their sketch; without it the daemon's default")
      ->check(CLI::Range(0, 4096));
  app.add_option("--ratio", options.sdk.retrieval_ratio,
                 "Share of the clusters to retrieve; without it the daemon's default budget")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--preempt-at", options.sdk.preempt_at,
                 "Drop the sequence before this decode step, prefill it again and go on");
  app.add_flag("--abort-prefill", options.sdk.abort_prefill,
               "Drop the sequence in the middle of the prefill and start again");
  app.add_flag("--fork", options.sdk.fork,
               "Let a fork answer from the middle on; the parent must answer too");
  app.add_flag("--truncate", options.sdk.truncate,
               "Append wrong tokens before every step and truncate them away");
  app.add_flag("--staged", options.sdk.staged,
               "Attend in this process over what wavekvd staged in the wave buffer");
  app.add_flag("--json", json, "The last line of output is one JSON object");
  CLI11_PARSE(app, argc, argv);
  options.real_gpu = options.backend == "cuda";
  if (options.real_gpu && !options.sdk.staged) options.make_engine = integration::MakeDeviceEngine;

  std::string work;
  std::optional<client::ProgressBar> bar;
  options.sdk.progress = [&](const std::string& next, uint64_t done, uint64_t total) {
    if (next != work) bar.emplace(next);
    work = next;
    bar->Update(done, total);
    if (done == total) {  // The line is complete; what comes next begins one of its own.
      bar.reset();
      work.clear();
    }
  };
  const absl::StatusOr<Report> report = RunMode(options);
  if (!report.ok()) {
    std::fprintf(stderr, "mock_decoder: %s\n", report.status().ToString().c_str());
    return 2;
  }
  std::fputs(json ? (report->ToJson() + "\n").c_str() : report->ToText().c_str(), stdout);
  return report->missed_positions.empty() ? 0 : 1;
}

}  // namespace
}  // namespace wavekv::mock

int main(int argc, char** argv) { return wavekv::mock::Main(argc, argv); }
