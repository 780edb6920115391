#include "client/insert_plan.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "storage/base/stream_copy.h"

namespace wavekv::client {

absl::StatusOr<std::vector<InsertPiece>> PlanInsert(const InsertExtent& extent, size_t token_bytes,
                                                    size_t payload_bytes_max) {
  if (token_bytes > payload_bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("one token of one layer is ", token_bytes, " bytes; a message takes at most ",
                     payload_bytes_max, " (raise the daemon's --message_bytes_max)"));
  }
  const uint32_t layers_max =
      static_cast<uint32_t>(std::min<size_t>(extent.layers, payload_bytes_max / token_bytes));
  std::vector<InsertPiece> pieces;
  for (uint32_t layer = 0; layer < extent.layers; layer += layers_max) {
    const uint32_t layer_count = std::min(layers_max, extent.layers - layer);
    const uint64_t tokens_max = payload_bytes_max / (token_bytes * layer_count);
    for (uint64_t token = 0; token < extent.tokens; token += tokens_max) {
      pieces.push_back({.first_layer = layer,
                        .layer_count = layer_count,
                        .first_token = token,
                        .token_count = std::min(tokens_max, extent.tokens - token)});
    }
  }
  return pieces;
}

namespace {

// Calls append(bytes, count) for each contiguous part of the piece, in order.
template <class Append>
void ForEachPart(const Tensor& source, const InsertExtent& extent, const InsertPiece& piece,
                 Append append) {
  // Both layouts are [layers, outer, tokens, row]: NHD has one outer slice per layer.
  const size_t dim = static_cast<size_t>(source.shape.back());
  const size_t heads = static_cast<size_t>(
      source.shape[source.shape.size() - (source.layout == Layout::kNHD ? 2 : 3)]);
  const bool head_major = source.layout == Layout::kHND;
  const size_t outer = head_major ? heads : 1;
  const size_t row_bytes = DTypeBytes(source.dtype) * dim * (head_major ? 1 : heads);
  const auto* const data = static_cast<const std::byte*>(source.data);

  for (uint32_t layer = 0; layer < piece.layer_count; ++layer) {
    for (size_t slice = 0; slice < outer; ++slice) {
      const size_t first_row =
          ((piece.first_layer + layer) * outer + slice) * extent.tokens + piece.first_token;
      append(data + first_row * row_bytes, piece.token_count * row_bytes);
    }
  }
}

}  // namespace

void GatherPiece(const Tensor& source, const InsertExtent& extent, const InsertPiece& piece,
                 std::string* target) {
  target->clear();
  target->reserve(piece.layer_count * piece.token_count *
                  (source.bytes() / (extent.layers * extent.tokens)));
  ForEachPart(source, extent, piece, [target](const std::byte* bytes, size_t count) {
    target->append(reinterpret_cast<const char*>(bytes), count);
  });
}

void GatherPiece(const Tensor& source, const InsertExtent& extent, const InsertPiece& piece,
                 std::byte* target) {
  ForEachPart(source, extent, piece, [&target](const std::byte* bytes, size_t count) {
    StreamCopy(target, bytes, count);
    target += count;
  });
  StreamFence();
}

}  // namespace wavekv::client
