#include "storage/base/check.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "storage/base/line_writer.h"

namespace wavekv {
namespace {

// For a reader that is behind. Longer, and a process that must end would hold up its peers.
constexpr std::chrono::seconds kReaderPatience(1);

}  // namespace

void CheckFailed(const char* condition, const char* file, int line, const char* message) {
  char text[kLineBytesMax];
  const int size = std::snprintf(text, sizeof(text), "CHECK failed: %s at %s:%d: %s\n", condition,
                                 file, line, message);
  if (size > 0 && WaitForRoom(STDERR_FILENO, kReaderPatience)) {
    const size_t count = std::min(static_cast<size_t>(size), sizeof(text) - 1);
    WriteWithoutWaiting(STDERR_FILENO, {text, count});
  }
  std::abort();
}

}  // namespace wavekv
