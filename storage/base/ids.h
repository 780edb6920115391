// Strong types for the identities that cross rooms.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <string>

namespace wavekv {

template <class Tag, class Int>
class StrongId {
 public:
  constexpr StrongId() = default;
  constexpr explicit StrongId(Int value) : value_(value) {}
  constexpr Int value() const { return value_; }
  friend constexpr auto operator<=>(StrongId, StrongId) = default;

  template <typename H>
  friend H AbslHashValue(H h, StrongId id) {
    return H::combine(std::move(h), id.value_);
  }

 private:
  Int value_ = 0;
};

// Unique over the daemon's life and, through the epoch in its upper half, over restarts.
using SequenceId = StrongId<struct SequenceIdTag, uint64_t>;
// A lease holder; 0 is nobody.
using ClientId = StrongId<struct ClientIdTag, uint64_t>;
// Counts truncations; starts at 1. 0 in a request means "any".
using Generation = StrongId<struct GenerationTag, uint64_t>;

// Who owns memory and sequences: "uid:1000", or the name that belongs to a token.
using TenantId = std::string;

}  // namespace wavekv
