// status, sequences, doctor, build and drop.

#include <cstdio>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/doctor.h"
#include "client/cli/json.h"
#include "client/cli/overview.h"
#include "client/cli/progress.h"
#include "client/cli/text.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

absl::Status RunStatus(const CommandOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_ASSIGN_OR_RETURN(const DaemonStats stats, admin->GetStats());
  if (options.json) {
    Json json = {{"address", options.client.address}};
    json.update(ToJson(stats));
    absl::PrintF("%s\n", DumpJson(json));
    return absl::OkStatus();
  }
  absl::PrintF("%s", StatusText(options.client.address, stats));
  return absl::OkStatus();
}

absl::Status RunSequences(const CommandOptions& options) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<SequenceSummary> sequences, admin->ListSequences());
  if (options.json) {
    Json list = Json::array();
    for (const SequenceSummary& sequence : sequences) list.push_back(ToJson(sequence));
    absl::PrintF("%s\n", DumpJson({{"sequences", std::move(list)}}));
    return absl::OkStatus();
  }
  if (sequences.empty()) {
    absl::PrintF("No sequences.\n");
    return absl::OkStatus();
  }
  absl::PrintF("%s", SequencesText(sequences, sequences.size()));
  return absl::OkStatus();
}

absl::Status RunDoctor(const CommandOptions& options) {
  std::vector<Check> checks = CheckMachine("");
  for (Check& check : CheckDaemon(options.client)) checks.push_back(std::move(check));
  size_t failed = 0;
  Json list = Json::array();
  for (const Check& check : checks) {
    if (check.verdict == Check::Verdict::kFail) ++failed;
    if (options.json) {
      list.push_back({{"name", check.name},
                      {"verdict", VerdictName(check.verdict)},
                      {"found", check.found},
                      {"cure", check.cure}});
      continue;
    }
    absl::PrintF("%-4s  %-11s  %s\n", VerdictName(check.verdict), check.name, check.found);
    if (!check.cure.empty()) absl::PrintF("                   → %s\n", check.cure);
  }
  if (options.json) absl::PrintF("%s\n", DumpJson({{"checks", std::move(list)}}));
  if (failed == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(failed, " of ", checks.size(), " checks failed"));
}

absl::Status RunBuild(const CommandOptions& options, uint64_t sequence_id) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  uint64_t tokens = 0;
  absl::StatusOr<BuildResult> result;
  {
    ProgressBar bar(absl::StrCat("Building the index of ", sequence_id));
    result = admin->BuildIndex(sequence_id, [&](const BuildProgress& progress) {
      tokens = progress.tokens_total;
      bar.Update(progress.tokens_done, progress.tokens_total);
    });
  }
  WAVEKV_RETURN_IF_ERROR(result.status());
  if (options.json) {
    absl::PrintF("%s\n", DumpJson({{"id", std::to_string(sequence_id)},
                                   {"sequence_id", sequence_id},
                                   {"generation", result->generation},
                                   {"version", result->version},
                                   {"tokens", tokens}}));
    return absl::OkStatus();
  }
  absl::PrintF(
      "Sequence %d: the index is built, version %d; %s tokens were waiting, summed over layers.\n",
      sequence_id, result->version, CountText(tokens));
  return absl::OkStatus();
}

absl::Status RunDrop(const CommandOptions& options, uint64_t sequence_id) {
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  WAVEKV_RETURN_IF_ERROR(admin->DropSequence(sequence_id));
  if (options.json) {
    absl::PrintF("%s\n", DumpJson({{"id", std::to_string(sequence_id)},
                                   {"sequence_id", sequence_id},
                                   {"dropped", true}}));
    return absl::OkStatus();
  }
  absl::PrintF("Sequence %d is dropped.\n", sequence_id);
  return absl::OkStatus();
}

}  // namespace wavekv::client
