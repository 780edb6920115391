// Bounds as floats: rounded away from what they bound.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

namespace wavekv {

// The float next to `value` on the side of `towards` (+-infinity); finite stays finite.
inline float RoundTowards(double value, float towards) {
  constexpr double kMax = std::numeric_limits<float>::max();
  if (std::isinf(value)) return static_cast<float>(value);
  return std::nextafter(static_cast<float>(std::clamp(value, -kMax, kMax)), towards);
}

inline float RoundDown(double value) {
  return RoundTowards(value, -std::numeric_limits<float>::infinity());
}

inline float RoundUp(double value) {
  return RoundTowards(value, std::numeric_limits<float>::infinity());
}

}  // namespace wavekv
