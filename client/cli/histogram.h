// Histograms and bars drawn in text. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "client/admin.h"

namespace wavekv::client {

// A bar of `width` columns, `share` (0 ... 1, clamped) of it filled, in eighths of a column, padded
// with spaces. NaN is empty.
std::string Bar(double share, size_t width);

// One line per bin: the bin's range, a bar relative to the fullest bin, its count and share of the
// total. Leading and trailing empty bins are left out; a bin that is not empty shows at least an
// eighth of a column. Nothing counted: one line that says so. A single-value bin of whole numbers
// ([3, 4)) is labelled with the number when `whole` is set.
std::vector<std::string> RenderHistogram(const Histogram& histogram, bool whole, size_t width);

}  // namespace wavekv::client
