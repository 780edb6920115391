// Assertions on our own invariants. A failed check is a bug of ours: it prints and aborts.
// Never use one on what a client, a file or another process sent.
#pragma once

namespace wavekv {

// Prints "CHECK failed: <condition> at <file>:<line>: <message>" to stderr and aborts.
[[noreturn]] void CheckFailed(const char* condition, const char* file, int line,
                              const char* message);

}  // namespace wavekv

#define WAVEKV_CHECK(condition, message)                              \
  do {                                                                \
    if (!(condition)) [[unlikely]] {                                  \
      ::wavekv::CheckFailed(#condition, __FILE__, __LINE__, message); \
    }                                                                 \
  } while (false)
