#include "storage/base/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace wavekv {

namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kPrefetchBytesMax = size_t{64} << 10;  // A small part of a second-level cache.

}  // namespace

void PrefetchStreamed(const void* source, size_t bytes) {
  const auto* const begin = static_cast<const std::byte*>(source);
  // To the second level: the first has room for fewer requests.
  for (size_t at = 0; at < std::min(bytes, kPrefetchBytesMax); at += kLineBytes) {
    __builtin_prefetch(begin + at, 0, 2);
  }
  asm volatile("");  // Or GCC, where it sees through, drops calls of what only prefetches.
}

#if defined(__SSE2__)

namespace {

// Half a line that is streamed costs more than it saves; of a few lines the ends are too much.
constexpr size_t kStreamedBytesMin = 4 * kLineBytes;

}  // namespace

void StreamCopy(void* target, const void* source, size_t bytes) {
  auto* to = static_cast<std::byte*>(target);
  const auto* from = static_cast<const std::byte*>(source);
  if (bytes >= kStreamedBytesMin) {
    const size_t before = -reinterpret_cast<uintptr_t>(to) % kLineBytes;
    std::memcpy(to, from, before);
    to += before, from += before, bytes -= before;
    for (; bytes >= kLineBytes; to += kLineBytes, from += kLineBytes, bytes -= kLineBytes) {
      auto* const line = reinterpret_cast<__m128i*>(to);
      const auto* const read = reinterpret_cast<const __m128i*>(from);
      const __m128i a = _mm_loadu_si128(read), b = _mm_loadu_si128(read + 1);
      const __m128i c = _mm_loadu_si128(read + 2), d = _mm_loadu_si128(read + 3);
      _mm_stream_si128(line, a);
      _mm_stream_si128(line + 1, b);
      _mm_stream_si128(line + 2, c);
      _mm_stream_si128(line + 3, d);
    }
  }
  if (bytes > 0) std::memcpy(to, from, bytes);
}

void StreamFence() { _mm_sfence(); }

#else

void StreamCopy(void* target, const void* source, size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);
}

void StreamFence() {}

#endif

}  // namespace wavekv
