// A sketch of a segment's tokens: what each key and value differs by from its cluster's stored
// mean, in 4 bits a dim. docs/decisions/011-token-sketch.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wavekv {

inline constexpr uint32_t kSketchBits = 4;
// A code stands for (code - kSketchCodeMiddle) steps: symmetric, without a zero.
inline constexpr uint32_t kSketchCodeMax = (1u << kSketchBits) - 1;
inline constexpr float kSketchCodeMiddle = kSketchCodeMax / 2.0f;

// Bytes of the codes of one row: byte b holds dim b in its low half and dim b + SketchRowBytes(dim)
// in its high half, so that each half of a row is a run of consecutive dims.
constexpr size_t SketchRowBytes(uint32_t dim) { return (size_t{dim} + 1) / 2; }

// One code per dim and one step per row, rows in the order of the segment's payload:
// difference[r][j] = steps[r] * (code[r][j] - kSketchCodeMiddle).
struct RowCodes {
  std::vector<uint8_t> codes;   // [row_count, SketchRowBytes(dim)]
  std::vector<uint16_t> steps;  // [row_count] bf16, at least 0, finite
};

// Empty (no codes, no errors) when the segment has none.
struct TokenSketch {
  RowCodes keys;
  RowCodes values;
  // [cluster_count] largest |key - sketched key| of the cluster, rounded up.
  std::vector<float> key_errors;

  bool empty() const { return key_errors.empty(); }
  uint64_t bytes() const;
};

// Appends the codes of one row of differences [dim], all finite; returns |difference - sketched
// difference|.
double AppendCodes(const float* difference, uint32_t dim, RowCodes* codes);

}  // namespace wavekv
