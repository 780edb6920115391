// top: the daemon's work, live.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <optional>

#include "absl/strings/str_format.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "client/cli/overview.h"
#include "client/cli/terminal.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr uint32_t kSequencesMax = 1000;
constexpr size_t kHeaderRows = 8;

}  // namespace

absl::Status RunTop(const CommandOptions& options, uint64_t count, double interval_s) {
  const milliseconds interval(std::max<int64_t>(1, static_cast<int64_t>(interval_s * 1000)));
  LiveTerminal terminal;  // Before the session's threads: they inherit its signal mask.
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
  std::optional<Snapshot> before;
  steady_clock::time_point taken;
  for (uint64_t tick = 0; count == 0 || tick < count; ++tick) {
    if (tick > 0 && !terminal.Wait(interval)) break;
    Snapshot now;
    WAVEKV_ASSIGN_OR_RETURN(now.stats, admin->GetStats());
    WAVEKV_ASSIGN_OR_RETURN(now.sequences, admin->ListSequences(kSequencesMax));
    const steady_clock::time_point at = steady_clock::now();
    const uint64_t elapsed_ms =
        static_cast<uint64_t>(std::chrono::duration_cast<milliseconds>(at - taken).count());
    if (options.json) {
      Json sequences = Json::array();
      for (const SequenceSummary& sequence : now.sequences) sequences.push_back(ToJson(sequence));
      Json json = {{"tick", tick}, {"interval_ms", before.has_value() ? elapsed_ms : 0}};
      json.update({{"stats", ToJson(now.stats)}, {"sequences", std::move(sequences)}});
      absl::PrintF("%s\n", DumpJson(json));
    } else {
      const size_t rows = terminal.rows();
      const std::string text =
          TopText(options.client.address, before.has_value() ? &*before : nullptr, now, elapsed_ms,
                  rows > kHeaderRows + 1 ? rows - kHeaderRows : 1);
      absl::PrintF("%s%s%s", terminal.redraws() ? "\x1b[H\x1b[2J" : "", text,
                   terminal.redraws() ? "q quits\n" : "\n");
    }
    std::fflush(stdout);
    before = std::move(now);
    taken = at;
  }
  return absl::OkStatus();
}

}  // namespace wavekv::client
