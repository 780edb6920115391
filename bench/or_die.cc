#include "bench/or_die.h"

#include <cstdio>
#include <cstdlib>

namespace wavekv::bench {

void OrDie(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "error: %s\n", status.ToString().c_str());
  std::exit(1);
}

}  // namespace wavekv::bench
