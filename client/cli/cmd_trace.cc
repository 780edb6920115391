// record and replay: a sequence's life into a file, and again from it.

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cli/commands.h"
#include "client/cli/json.h"
#include "client/cli/replay.h"
#include "client/cli/stoppable.h"
#include "client/cli/text.h"
#include "client/cli/trace_sink.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;

std::string LayersText(const TraceSequence& trace) {
  uint64_t tokens = 0;
  for (const TraceLayer& layer : trace.layers) tokens = std::max(tokens, layer.token_count);
  return absl::StrCat(CountText(trace.layers.size()), " of ", CountText(trace.shape.layer_count),
                      " layers, ", CountText(tokens), " tokens stored");
}

absl::Status PartialLeft(const absl::Status& why, const std::string& file) {
  return absl::Status(why.code(),
                      absl::StrCat(why.message(), "; what had come is in ", PartialTracePath(file),
                                   ", cut (wavekv replay --partial)"));
}

void PrintRecorded(const CommandOptions& options, uint64_t sequence_id, const std::string& file,
                   const TraceSink& sink) {
  const TraceWriter& writer = *sink.writer();
  const std::string end(TraceEndReasonName(*sink.end()));
  if (options.json) {
    absl::PrintF("%s\n", DumpJson({{"id", std::to_string(sequence_id)},
                                   {"sequence_id", sequence_id},
                                   {"file", file},
                                   {"bytes", writer.bytes_written()},
                                   {"layers", writer.sequence().layers.size()},
                                   {"steps", writer.step_count()},
                                   {"end", end}}));
    return;
  }
  absl::PrintF("Sequence %d: %s, %s steps of layers; %s in %s (%s).\n", sequence_id,
               LayersText(writer.sequence()), CountText(writer.step_count()),
               BytesText(writer.bytes_written()), file, end);
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ParseLayers(const std::string& text) {
  std::vector<uint32_t> layers;
  for (const absl::string_view part : absl::StrSplit(text, ',')) {
    const std::vector<absl::string_view> ends = absl::StrSplit(part, absl::MaxSplits('-', 1));
    uint32_t first = 0;
    uint32_t last = 0;
    if (!absl::SimpleAtoi(ends.front(), &first) || !absl::SimpleAtoi(ends.back(), &last) ||
        first > last || last >= kLayersMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("layers \"", text, "\": expected numbers and ranges such as 0,5-9"));
    }
    for (uint32_t layer = first; layer <= last; ++layer) layers.push_back(layer);
  }
  return layers;
}

absl::Status RunRecord(const CommandOptions& options, const RecordCommand& command) {
  if (::access(command.file.c_str(), F_OK) == 0) {
    return absl::AlreadyExistsError(absl::StrCat(
        "--out: ", command.file, " is there already; remove it or choose another name"));
  }
  TraceSink sink(command.file);
  std::atomic<uint64_t> bytes{0};
  std::optional<milliseconds> limit;
  if (command.duration_s > 0) limit = milliseconds(static_cast<int64_t>(command.duration_s * 1000));
  const bool shown = ::isatty(STDERR_FILENO) == 1;
  const absl::Status recorded = RunStoppable(
      limit,
      [&] {
        if (shown) {
          absl::FPrintF(stderr, "\rRecording %d: %s, q ends it\x1b[K", command.sequence_id,
                        BytesText(bytes.load()));
        }
      },
      [&](std::stop_token stop) -> absl::Status {
        WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
        return admin->RecordSequence(command.sequence_id,
                                     {.layers = command.layers, .steps = command.steps}, stop,
                                     [&](std::string_view records) {
                                       bytes.fetch_add(records.size());
                                       return sink.Take(records);
                                     });
      });
  if (shown) absl::FPrintF(stderr, "\r\x1b[K");
  if (!recorded.ok()) {
    return sink.writer() == nullptr ? recorded : PartialLeft(recorded, command.file);
  }
  WAVEKV_RETURN_IF_ERROR(sink.Stop());
  PrintRecorded(options, command.sequence_id, command.file, sink);
  return absl::OkStatus();
}

absl::Status RunReplay(const CommandOptions& options, const ReplayOptions& replay) {
  std::atomic<uint64_t> bytes_done{0};
  std::atomic<uint64_t> bytes_total{0};
  ReplayReport report;
  TraceSequence trace;
  const bool shown = ::isatty(STDERR_FILENO) == 1;
  const absl::Status status = RunStoppable(
      std::nullopt,
      [&] {
        if (!shown || bytes_total.load() == 0) return;
        absl::FPrintF(stderr, "\rReplaying: %s, q ends it\x1b[K",
                      ShareText(static_cast<double>(bytes_done.load()), bytes_total.load()));
      },
      [&](std::stop_token stop) -> absl::Status {
        WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Session> session,
                                Session::Connect(options.client));
        WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Admin> admin, Admin::Connect(options.client));
        WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Replayer> replayer,
                                Replayer::Create(replay, session.get(), admin.get()));
        bytes_total.store(replayer->bytes_total());
        WAVEKV_RETURN_IF_ERROR(replayer->Run(stop, &bytes_done));
        report = replayer->report();
        trace = replayer->trace();
        return absl::OkStatus();
      });
  if (shown) absl::FPrintF(stderr, "\r\x1b[K");
  WAVEKV_RETURN_IF_ERROR(status);
  if (options.json) {
    Json json = {{"file", replay.file},
                 {"recorded_sequence_id", trace.sequence_id},
                 {"recorded_by", trace.daemon_version},
                 {"model_id", trace.shape.model_id}};
    json.update(ToJson(report));
    absl::PrintF("%s\n", DumpJson(json));
  } else {
    absl::PrintF("%s: %s%s\n\n%s", replay.file,
                 trace.shape.model_id.empty() ? "" : Printable(trace.shape.model_id) + ", ",
                 LayersText(trace), ReplayText(report));
  }
  if (report.stopped) return absl::CancelledError("the replay was stopped before its end");
  return absl::OkStatus();
}

}  // namespace wavekv::client
