#include "storage/base/stream_copy.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

namespace wavekv {
namespace {

// Every alignment of both ends, every length around those where it goes another way: what memcpy
// copies, and not a byte beside it.
TEST(StreamCopyTest, CopiesWhatMemcpyCopies) {
  constexpr size_t kRoom = 1024, kAround = 64;
  std::vector<std::byte> source(kRoom + kAround);
  for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 + 1);
  for (size_t to = 0; to < kAround; ++to) {
    for (const size_t from : {size_t{0}, size_t{1}, to}) {
      for (size_t bytes = 0; bytes < kRoom - kAround; bytes += bytes < 400 ? 1 : 61) {
        std::vector<std::byte> target(kRoom + 2 * kAround, std::byte{0xaa});
        std::vector<std::byte> expected = target;
        StreamCopy(&target[to + 1], &source[from], bytes);
        StreamFence();
        std::memcpy(&expected[to + 1], &source[from], bytes);
        ASSERT_EQ(target, expected) << bytes << " bytes from " << from << " to " << to + 1;
      }
    }
  }
}

// Whoever is told after the fence finds all of it.
TEST(StreamCopyTest, IsThereBeforeAnybodyIsTold) {
  constexpr size_t kWords = 2048;
  constexpr uint64_t kRounds = 2000;
  std::vector<uint64_t> shared(kWords);
  std::atomic<uint64_t> told{0}, read{0};
  std::thread writer([&] {
    std::vector<uint64_t> words(kWords);
    for (uint64_t round = 1; round <= kRounds; ++round) {
      std::iota(words.begin(), words.end(), round);
      StreamCopy(shared.data(), words.data(), kWords * sizeof(uint64_t));
      StreamFence();
      told.store(round, std::memory_order_release);
      while (read.load(std::memory_order_acquire) != round) std::this_thread::yield();
    }
  });
  uint64_t wrong = 0;
  for (uint64_t round = 1; round <= kRounds; ++round) {
    while (told.load(std::memory_order_acquire) != round) std::this_thread::yield();
    PrefetchStreamed(shared.data(), kWords * sizeof(uint64_t));
    for (size_t i = 0; i < kWords; ++i) wrong += shared[i] != round + i ? 1 : 0;
    read.store(round, std::memory_order_release);
  }
  writer.join();
  EXPECT_EQ(wrong, 0u);
}

}  // namespace
}  // namespace wavekv
