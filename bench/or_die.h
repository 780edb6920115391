// What a benchmark does about an error: it says so and ends.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace wavekv::bench {

// Prints "error: ..." and ends the process with 1 unless it is OK.
void OrDie(const absl::Status& status);
template <class T>
T OrDie(absl::StatusOr<T> result) {
  OrDie(result.status());
  return *std::move(result);
}

}  // namespace wavekv::bench
