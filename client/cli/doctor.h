// Whether this machine is fit to run and reach WaveKV: one check per line, each with its cure.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/admin.h"
#include "client/types.h"

namespace wavekv::client {

struct Check {
  enum class Verdict : uint8_t { kOk, kWarn, kFail };
  std::string name;
  Verdict verdict = Verdict::kOk;
  std::string found;
  std::string cure;  // Empty when all is well.
};

const char* VerdictName(Check::Verdict verdict);  // "OK", "WARN", "FAIL"

// Reads what the kernel tells about this machine. `root` is put before every path ("" outside
// of tests).
std::vector<Check> CheckMachine(const std::string& root);

// Connects to the daemon and reads its statistics.
std::vector<Check> CheckDaemon(const ClientOptions& options);

}  // namespace wavekv::client
