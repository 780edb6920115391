// What the mains of the daemons share: flags, signals, first and last log line, exit code.
#pragma once

#include <signal.h>

#include <functional>
#include <string>

#include "absl/status/status.h"

namespace wavekv {

struct DaemonProgram {
  std::string name;   // "wavekvd"
  std::string usage;  // What --help says first.
  std::string file;   // __FILE__ of the main, whose flags --help lists.
  // Serves until one of `signals` comes (see WaitForSignal). InvalidArgument: a flag makes no
  // sense.
  std::function<absl::Status(const sigset_t& signals)> serve;
};

// Reads the flags and serves, with SIGTERM and SIGINT blocked in every thread and SIGPIPE ignored.
// Returns the exit code: 0, 2 after InvalidArgument, 1 after any other error; the last log line is
// event=stopped or event=failed. --help and --version are answered on stdout with 0.
int RunDaemon(int argc, char** argv, const DaemonProgram& program);

// Waits for one of `signals`, which every thread has blocked, and returns it.
int WaitForSignal(const sigset_t& signals);

// Sets the flags of a command line, argv[0] excepted: --name=value, --name value, --name and
// --noname of a bool, and --flagfile=path of a file with a flag on each line (empty lines and
// comments after # are skipped). absl::ParseCommandLine would end the process where this returns
// InvalidArgument, naming the flag, its value and what was expected.
absl::Status SetFlags(int argc, const char* const* argv);

}  // namespace wavekv
