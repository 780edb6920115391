// How much of some memory the kernel has given pages for.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {

// Of the whole pages that [begin, begin + bytes) touches.
inline uint64_t ResidentBytes(const std::byte* begin, size_t bytes) {
  const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) / page * page;
  const uintptr_t length = reinterpret_cast<uintptr_t>(begin) + bytes - first;
  std::vector<unsigned char> pages((length + page - 1) / page);
  EXPECT_EQ(::mincore(reinterpret_cast<void*>(first), length, pages.data()), 0);
  uint64_t resident = 0;
  for (const unsigned char flags : pages) resident += (flags & 1) * page;
  return resident;
}

}  // namespace wavekv
