// The modes of the mock decoder, from options to report.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "tests/mock_decoder/report.h"
#include "tests/mock_decoder/sdk_run.h"
#include "tests/mock_decoder/world.h"

namespace wavekv::mock {

enum class Mode {
  kExact,    // Own attention over every token; no daemon.
  kWaveKv,   // Through the SDK.
  kCompare,  // Both, and the steady zone alone; errors against exact.
};

struct RunOptions {
  Mode mode = Mode::kCompare;
  WorldConfig world;
  SdkRunOptions sdk;  // An empty address: a wavekvd and a wavebufferd of our own, for this run.
  // Of that wavebufferd, host or cuda; empty: as DaemonOptions has it.
  std::string backend;
  bool real_gpu = false;  // Likewise.
  // Makes the engine of `sdk`, which attends over a resident region; none: another path.
  integration::MakeTokenEngine make_engine;
};

// Runs one mode. Fails with a status when something did not work at all; missed needles are in the
// report.
absl::StatusOr<Report> RunMode(const RunOptions& options);

}  // namespace wavekv::mock
