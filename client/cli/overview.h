// The daemon's state as text, for `status`, `sequences` and `top`. Pure functions.
#pragma once

#include <string>
#include <vector>

#include "client/admin.h"

namespace wavekv::client {

// Several lines: the daemon, its pool, process, tenants, wave buffers and work since start.
std::string StatusText(const std::string& address, const DaemonStats& stats);

// A table, at most `rows_max` sequences, and a line that counts the others.
std::string SequencesText(const std::vector<SequenceSummary>& sequences, size_t rows_max);

// One screen of `top`: what happened between two snapshots `interval_ms` apart, and the sequences
// that did most in it. `before` may be empty (the first tick): then rates are left out.
struct Snapshot {
  DaemonStats stats;
  std::vector<SequenceSummary> sequences;
};
std::string TopText(const std::string& address, const Snapshot* before, const Snapshot& now,
                    uint64_t interval_ms, size_t rows_max);

}  // namespace wavekv::client
