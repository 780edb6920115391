// How one Insert becomes messages: pieces on token boundaries, each gathered into its request with
// one copy. Pure functions, internal to the SDK.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/types.h"
#include "client/validation.h"

namespace wavekv::client {

// Layers [first_layer, first_layer + layer_count) of the call's list, tokens likewise.
struct InsertPiece {
  uint32_t first_layer = 0;
  uint32_t layer_count = 0;
  uint64_t first_token = 0;
  uint64_t token_count = 0;

  friend bool operator==(const InsertPiece&, const InsertPiece&) = default;
};

// Cuts `extent` into pieces of at most `payload_bytes_max`, `token_bytes` being K and V of one
// token in one layer. All layers stay together when one token of all of them fits, so that a broken
// stream leaves the layers level; otherwise groups of layers follow one another. ResourceExhausted
// when a single token of a single layer does not fit, naming --message_bytes_max.
absl::StatusOr<std::vector<InsertPiece>> PlanInsert(const InsertExtent& extent, size_t token_bytes,
                                                    size_t payload_bytes_max);

// Replaces `target` by the piece's rows of `source` (checked by CheckInsert), in the layout of
// `source`: [layer_count, token_count, heads, dim] or, HND, [layer_count, heads, token_count, dim].
void GatherPiece(const Tensor& source, const InsertExtent& extent, const InsertPiece& piece,
                 std::string* target);
// The same into memory that has room for them.
void GatherPiece(const Tensor& source, const InsertExtent& extent, const InsertPiece& piece,
                 std::byte* target);

}  // namespace wavekv::client
