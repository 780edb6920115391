// Memory that will be read soon, requested before it is: what a step reads lies in many short runs,
// and a processor's own guesses end with each run and with each page.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>

namespace wavekv {

// Requests the lines of the `size` bytes at `data`; a hint, without any other effect.
inline void FetchBytes(const void* data, size_t size) {
  constexpr size_t kLineBytes = 64;
  constexpr int kForReading = 0, kIntoSecondLevel = 2;
  const auto* const bytes = static_cast<const std::byte*>(data);
  for (size_t at = 0; at < size; at += kLineBytes) {
    __builtin_prefetch(bytes + at, kForReading, kIntoSecondLevel);
  }
  // The last line, where the first does not begin with one.
  if (size > 0) __builtin_prefetch(bytes + size - 1, kForReading, kIntoSecondLevel);
  // Or GCC takes this for a function without any effect and drops calls of it.
  asm volatile("");
}

// Requests one line of each page of the `size` bytes at `data`, for the sake of its address. Where
// pages lie anywhere their translation takes longer than the bytes do, and a request for a line
// waits for it as a read does; of requests that follow each other closely, several are translated
// at the same time.
inline void FetchPages(const void* data, size_t size) {
  constexpr size_t kPageBytes = 4096;
  constexpr int kForReading = 0, kIntoFirstLevel = 3;
  const auto* const bytes = static_cast<const std::byte*>(data);
  for (size_t at = 0; at < size; at += kPageBytes) {
    __builtin_prefetch(bytes + at, kForReading, kIntoFirstLevel);
  }
  if (size > 0) __builtin_prefetch(bytes + size - 1, kForReading, kIntoFirstLevel);
  asm volatile("");
}

// Calls fetch(item) for the items of a list, so many ahead of a reader. Borrows the items.
template <class Item, class Fetch>
class FetchAhead {
 public:
  FetchAhead(std::span<const Item> items, size_t ahead, Fetch fetch)
      : items_(items), fetch_(std::move(fetch)) {
    for (size_t i = 0; i < ahead; ++i) Next();
  }

  // The next item, if there is one, as the reader goes on by one.
  void Next() {
    if (next_ < items_.size()) fetch_(items_[next_++]);
  }

 private:
  const std::span<const Item> items_;
  Fetch fetch_;
  size_t next_ = 0;
};

// Calls fetch(data, size) for the bytes of runs in order, so far ahead of a reader. bytes_of(item)
// is a std::span<const std::byte>. Borrows the items.
template <class Item, class BytesOf, class Fetch>
class FetchBytesAhead {
 public:
  FetchBytesAhead(std::span<const Item> items, size_t ahead_bytes, BytesOf bytes_of, Fetch fetch)
      : items_(items), bytes_of_(std::move(bytes_of)), fetch_(std::move(fetch)) {
    Next(ahead_bytes);
  }

  // The next `count` bytes, as far as there are any, as the reader goes on by as many.
  void Next(size_t count) {
    while (count > 0 && item_ < items_.size()) {
      const std::span<const std::byte> rest = bytes_of_(items_[item_]).subspan(done_);
      const size_t here = std::min(count, rest.size());
      fetch_(rest.data(), here);
      count -= here;
      done_ += here;
      if (here < rest.size()) return;
      ++item_;
      done_ = 0;
    }
  }

 private:
  const std::span<const Item> items_;
  const BytesOf bytes_of_;
  const Fetch fetch_;
  size_t item_ = 0;
  size_t done_ = 0;  // Bytes of the item.
};

}  // namespace wavekv
