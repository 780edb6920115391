// Byte counts for people.
#pragma once

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace wavekv {

// "1.50 GiB (1610612736 bytes)"; below 1 KiB just "17 bytes".
inline std::string BytesText(uint64_t bytes) {
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " bytes");
  double scaled = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; scaled >= 1024 && unit < 5; ++unit) scaled /= 1024;
  return absl::StrFormat("%.2f %s (%d bytes)", scaled, kUnits[unit], bytes);
}

}  // namespace wavekv
