// `wavekv`: what operators and researchers type. Exit codes: 0 fine, 1 error, 2 wrong usage.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iostream>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/commands.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;
constexpr std::streamsize kTokenBytesMax = 4096;

// What to do about an error; empty when its own text says it.
std::string Cure(const absl::Status& status) {
  if (absl::IsUnavailable(status)) {
    return "name the daemon's address with --address or WAVEKV_ADDRESS; `wavekv doctor` looks "
           "closer";
  }
  if (absl::IsNotFound(status)) return "`wavekv sequences` lists the sequences that are there";
  if (absl::IsUnauthenticated(status)) {
    return "over TCP, name the file with the token: --token_file";
  }
  return "";
}

int Report(const absl::Status& status, const CommandOptions& options) {
  if (status.ok()) return 0;
  const std::string cure = Cure(status);
  std::cerr << "wavekv: " << Printable(std::string(status.message())) << " [daemon "
            << options.client.address << "]" << (cure.empty() ? "" : "\n  → ") << cure << "\n";
  return kExitError;
}

// The token of $WAVEKV_TOKEN or of a file; never an argument, which others can see.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  if (path.empty()) {
    const char* const token = std::getenv("WAVEKV_TOKEN");
    return token == nullptr ? std::string() : std::string(token);
  }
  std::ifstream file(path);
  std::string token(kTokenBytesMax, '\0');
  if (!file.read(token.data(), kTokenBytesMax) && !file.eof()) {
    return absl::NotFoundError(absl::StrCat("--token_file: ", path, " cannot be read"));
  }
  token.resize(static_cast<size_t>(file.gcount()));
  return std::string(absl::StripAsciiWhitespace(token));
}

// Everything that the command line says; CLI11 writes into it.
struct Arguments {
  CommandOptions common;
  std::string token_file;
  double deadline_s = 30;
  uint64_t sequence_id = 0;
  std::optional<uint32_t> layer;
  std::optional<uint32_t> kv_head;
  std::vector<uint32_t> layers;
  ExplainOptions explain;
  std::string budget;
  RecordCommand record;
  ReplayOptions replay;
  std::string trace_layers;
  uint64_t top_count = 0;
  double top_interval_s = 1;
};

using Command = std::function<absl::Status(const Arguments&)>;

CLI::App* AddCommand(CLI::App& app, const std::string& name, const std::string& what,
                     Arguments& args, Command run, Command* chosen) {
  CLI::App* const command = app.add_subcommand(name, what);
  command->add_flag("--json", args.common.json, "Print JSON for programs");
  command->add_option("--address", args.common.client.address,
                      "The daemon: unix:/path or host:port [$WAVEKV_ADDRESS]");
  command->add_option("--token_file", args.token_file, "File with the token, for TCP");
  command->add_option("--deadline", args.deadline_s, "Seconds to wait for an answer")
      ->check(CLI::Range(0.01, 86400.0));
  command->callback([run = std::move(run), chosen] { *chosen = run; });
  return command;
}

CLI::App* AddSequenceCommand(CLI::App& app, const std::string& name, const std::string& what,
                             Arguments& args, Command run, Command* chosen) {
  CLI::App* const command = AddCommand(app, name, what, args, std::move(run), chosen);
  command->add_option("SEQ", args.sequence_id, "Id of the sequence")
      ->required()
      ->check([](const std::string& text) {
        uint64_t id = 0;
        return absl::SimpleAtoi(text, &id) && id > 0
                   ? std::string()
                   : absl::StrCat("'", text, "' is no id of a sequence; see: wavekv sequences");
      });
  return command;
}

void AddBudget(CLI::App* command, Arguments& args) {
  command
      ->add_option("--budget", args.budget,
                   "ratio=R, clusters=N, coverage=P or error=E; unset: the sequence's")
      ->check([](const std::string& text) {
        return std::string(ParseBudget(text).status().message());
      });
}

// The budget of --budget, which has been checked.
std::optional<Budget> BudgetOf(const Arguments& args) {
  if (args.budget.empty()) return std::nullopt;
  return ParseBudget(args.budget).value();
}

absl::Status Explain(const Arguments& args) {
  ExplainOptions options = args.explain;
  options.budget = BudgetOf(args);
  return RunExplain(args.common, args.sequence_id, options);
}

absl::Status Recall(const Arguments& args) {
  return RunRecall(args.common, args.sequence_id, args.layers, BudgetOf(args));
}

// The layers of --layers, which has been checked; empty: all.
std::vector<uint32_t> LayersOf(const Arguments& args) {
  return args.trace_layers.empty() ? std::vector<uint32_t>()
                                   : ParseLayers(args.trace_layers).value();
}

absl::Status Record(const Arguments& args) {
  RecordCommand command = args.record;
  command.layers = LayersOf(args);
  return RunRecord(args.common, command);
}

absl::Status Replay(const Arguments& args) {
  ReplayOptions options = args.replay;
  options.budget = BudgetOf(args);
  options.layers = LayersOf(args);
  return RunReplay(args.common, options);
}

void AddLayers(CLI::App* command, Arguments& args) {
  command->add_option("--layers", args.trace_layers, "Layers, as 0,5-9; unset: all")
      ->check([](const std::string& text) {
        return std::string(ParseLayers(text).status().message());
      });
}

void AddTraceCommands(CLI::App& app, Arguments& args, Command* chosen) {
  CLI::App* const record = AddCommand(
      app, "record", "Record what happens to a sequence into a file", args, Record, chosen);
  record->add_option("--sequence", args.record.sequence_id, "Id of the sequence")
      ->required()
      ->check(CLI::PositiveNumber);
  record->add_option("--out", args.record.file, "The trace file to write")->required();
  AddLayers(record, args);
  record->add_option("--steps", args.record.steps, "End after so many steps of each layer");
  record->add_option("--duration", args.record.duration_s, "End after so many seconds")
      ->check(CLI::Range(0.0, 1e6));
  CLI::App* const replay = AddCommand(
      app, "replay", "Do again what a trace says, beside exact attention", args, Replay, chosen);
  replay->add_option("FILE", args.replay.file, "The trace file")->required();
  replay->add_flag("--partial", args.replay.accept_cut,
                   "Also a file that was cut, as far as it goes");
  AddBudget(replay, args);
  replay
      ->add_option("--sketch_clusters", args.replay.sketch_clusters,
                   "Clusters estimated from their sketch; unset: as recorded")
      ->check(CLI::Range(0u, kSketchClustersMax));
  AddLayers(replay, args);
  replay->add_option("--steps", args.replay.steps, "At most so many steps of each layer");
  replay->add_option("--compare_every", args.replay.compare_every,
                     "Compare every so many steps of a layer with exact attention; 0: none");
  replay->add_option("--max_tokens", args.replay.max_tokens,
                     "Reserve for so many tokens; 0: as recorded");
}

void AddCommands(CLI::App& app, Arguments& args, Command* chosen) {
  const auto run = [](absl::Status (*command)(const CommandOptions&)) {
    return [command](const Arguments& a) { return command(a.common); };
  };
  const auto run_on = [](absl::Status (*command)(const CommandOptions&, uint64_t)) {
    return [command](const Arguments& a) { return command(a.common, a.sequence_id); };
  };
  AddCommand(app, "status", "The daemon, its pool, tenants and wave buffers", args, run(RunStatus),
             chosen);
  AddCommand(app, "sequences", "The sequences that the daemon holds", args, run(RunSequences),
             chosen);
  CLI::App* const index = AddSequenceCommand(
      app, "index", "Segments, clusters, histograms and bytes of a sequence's index", args,
      [](const Arguments& a) { return RunIndex(a.common, a.sequence_id, a.layer, a.kv_head); },
      chosen);
  index->add_option("--layer", args.layer, "One layer; unset: all");
  index->add_option("--head", args.kv_head, "One KV head; unset: all");
  CLI::App* const explain = AddSequenceCommand(
      app, "explain", "Why the last query chose its clusters", args, Explain, chosen);
  explain->add_option("--layer", args.explain.layer, "The layer")->required();
  explain->add_option("--head", args.explain.kv_head, "The KV head")->required();
  explain->add_option("--top", args.explain.top, "Clusters to list; 0: the daemon's default");
  AddBudget(explain, args);
  CLI::App* const recall = AddSequenceCommand(
      app, "recall", "Exact attention beside the approximation, for the last queries", args, Recall,
      chosen);
  recall->add_option("--layer", args.layers, "These layers; unset: all");
  AddBudget(recall, args);
  CLI::App* const top = AddCommand(
      app, "top", "The daemon's work, live; q quits", args,
      [](const Arguments& a) { return RunTop(a.common, a.top_count, a.top_interval_s); }, chosen);
  top->add_option("--count", args.top_count, "Ticks; 0: until q or ctrl-C");
  top->add_option("--interval", args.top_interval_s, "Seconds between ticks")
      ->check(CLI::Range(0.01, 3600.0));
  AddCommand(app, "doctor", "Whether this machine and the daemon are fit, and the cures", args,
             run(RunDoctor), chosen);
  AddSequenceCommand(app, "build", "Cluster what a sequence has not clustered yet", args,
                     run_on(RunBuild), chosen);
  AddTraceCommands(app, args, chosen);
  AddSequenceCommand(app, "drop", "Drop a sequence and free its memory", args, run_on(RunDrop),
                     chosen);
}

int Main(int argc, char** argv) {
  CLI::App app("wavekv: inspect and steer a WaveKV daemon", "wavekv");
  app.set_version_flag("--version", std::string("wavekv " WAVEKV_VERSION));
  app.require_subcommand(1);
  Arguments args;
  args.common.client.address = DefaultAddress();
  args.common.client.client_name = "wavekv command";
  Command chosen;
  AddCommands(app, args, &chosen);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : kExitUsage;
  }
  const absl::StatusOr<std::string> token = ReadToken(args.token_file);
  if (!token.ok()) return Report(token.status(), args.common);
  args.common.client.token = *token;
  args.common.client.deadline =
      std::chrono::milliseconds(static_cast<int64_t>(args.deadline_s * 1000));
  return Report(chosen(args), args.common);
}

}  // namespace
}  // namespace wavekv::client

int main(int argc, char** argv) { return wavekv::client::Main(argc, argv); }
