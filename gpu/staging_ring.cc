#include "gpu/staging_ring.h"

#include <algorithm>

#include "storage/base/check.h"

namespace wavekv {

StagingRing::Piece StagingRing::Largest() const {
  if (pieces_.empty()) return {0, bytes_};
  const uint64_t oldest = pieces_.front().begin;
  const uint64_t newest_end = pieces_.back().end;
  if (Wrapped()) return {newest_end, oldest - newest_end};
  const Piece behind{newest_end, bytes_ - newest_end};
  const Piece in_front{0, oldest};
  return behind.bytes >= in_front.bytes ? behind : in_front;
}

uint64_t StagingRing::Take(uint64_t step, uint64_t bytes) {
  WAVEKV_CHECK(pieces_.empty() || step > pieces_.back().step, "steps ascend");
  const Piece piece = Largest();
  WAVEKV_CHECK(bytes <= piece.bytes, "no more than the largest piece is taken");
  if (bytes == 0) return piece.begin;
  pieces_.push_back({step, piece.begin, piece.begin + bytes});
  high_water_ = std::max(high_water_, piece.begin + bytes);
  return piece.begin;
}

void StagingRing::Release(uint64_t completed_step) {
  while (!pieces_.empty() && pieces_.front().step <= completed_step) pieces_.pop_front();
}

uint64_t StagingRing::bytes_used() const {
  uint64_t sum = 0;
  for (const Taken& piece : pieces_) sum += piece.end - piece.begin;
  return sum;
}

}  // namespace wavekv
