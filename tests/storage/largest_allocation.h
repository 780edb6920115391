// Linked into a test, counts what the whole program asks operator new for.
#pragma once

#include <cstddef>

namespace wavekv {

// The largest single allocation since the last call.
size_t TakeLargestAllocation();

}  // namespace wavekv
