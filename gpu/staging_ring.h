// Space for the rows of steps, which are freed in the order they were staged.
#pragma once

#include <cstdint>
#include <deque>

namespace wavekv {

// Offsets only; the memory is the caller's. Not thread-safe.
class StagingRing {
 public:
  explicit StagingRing(uint64_t bytes) : bytes_(bytes) {}

  struct Piece {
    uint64_t begin = 0;
    uint64_t bytes = 0;
  };
  // The largest contiguous piece that is free now.
  Piece Largest() const;

  // Takes the first `bytes` of Largest() for `step`, which is above every earlier one, and returns
  // where they begin. Zero bytes take nothing.
  uint64_t Take(uint64_t step, uint64_t bytes);

  // Frees what steps up to `completed_step` took.
  void Release(uint64_t completed_step);

  uint64_t bytes() const { return bytes_; }
  uint64_t bytes_used() const;                         // Of steps not released.
  uint64_t high_water() const { return high_water_; }  // No byte from here on was ever taken.

 private:
  struct Taken {
    uint64_t step;
    uint64_t begin;
    uint64_t end;
  };
  bool Wrapped() const { return !pieces_.empty() && pieces_.back().end <= pieces_.front().begin; }

  const uint64_t bytes_;
  uint64_t high_water_ = 0;
  std::deque<Taken> pieces_;  // Oldest first.
};

}  // namespace wavekv
