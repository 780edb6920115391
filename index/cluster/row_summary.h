// What a segment keeps of the rows of each cluster: the mean in 8 bits, and how far the rows are
// from it.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/token_sketch.h"

namespace wavekv {

// What one cluster's rows have in common. The stored mean is center + scale * codes.
struct RowSummary {
  std::vector<int8_t> codes;  // [dim], -127 to 127
  float scale = 0;
  float radius = 0;          // Largest distance of a row from the stored mean, rounded up.
  float delta = 0;           // Distance of the exact mean from the stored one, rounded up.
  float deviation_norm = 0;  // Distance of the stored mean from the center, rounded up.
  double mean_square = 0;    // Mean squared distance of a row from the stored mean.
  float sketch_error = 0;    // Largest distance of a row from its sketch, if it has one.
};

// Summarises clusters of one segment's rows. Borrows the rows.
class RowSummariser {
 public:
  // `rows` [row_count, dim], at least one, in the order of clusters.
  RowSummariser(std::span<const float> rows, uint32_t dim);

  // Rows [first_row, first_row + row_count); adds to dim_squares, and the rows' codes to `sketch`
  // unless that is null.
  RowSummary Summarise(uint32_t first_row, uint32_t row_count, RowCodes* sketch);

  const std::vector<float>& center() const { return center_; }  // [dim] the mean row
  float center_norm() const;                                    // Rounded up.
  float row_norm_max() const;                                   // Rounded down.
  // [dim] sum of the squared distances from stored means, of the clusters summarised so far.
  const std::vector<double>& dim_squares() const { return dim_squares_; }

 private:
  const std::span<const float> rows_;
  const uint32_t dim_;
  std::vector<float> center_;
  std::vector<double> dim_squares_;
  std::vector<double> mean_, stored_;  // [dim] scratch of Summarise
  std::vector<float> differences_;     // [dim] likewise
};

}  // namespace wavekv
