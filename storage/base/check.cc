#include "storage/base/check.h"

#include <cstdio>
#include <cstdlib>

namespace wavekv {

void CheckFailed(const char* condition, const char* file, int line, const char* message) {
  std::fprintf(stderr, "CHECK failed: %s at %s:%d: %s\n", condition, file, line, message);
  std::abort();
}

}  // namespace wavekv
