#include "tests/storage/largest_allocation.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace {

std::atomic<size_t> largest = 0;

}  // namespace

void* operator new(size_t bytes) {
  for (size_t seen = largest; seen < bytes;) {
    if (largest.compare_exchange_weak(seen, bytes)) break;
  }
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace wavekv {

size_t TakeLargestAllocation() { return largest.exchange(0); }

}  // namespace wavekv
