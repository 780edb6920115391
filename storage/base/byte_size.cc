#include "storage/base/byte_size.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace wavekv {

absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text) {
  constexpr std::pair<absl::string_view, int> kUnits[] = {
      {"KiB", 10}, {"MiB", 20}, {"GiB", 30}, {"TiB", 40}};
  absl::string_view digits = text;
  int shift = 0;
  for (const auto& [suffix, unit_shift] : kUnits) {
    if (absl::ConsumeSuffix(&digits, suffix)) {
      shift = unit_shift;
      break;
    }
  }
  uint64_t count = 0;
  // SimpleAtoi would take blanks and signs, too.
  const bool plain = std::all_of(digits.begin(), digits.end(), absl::ascii_isdigit);
  if (!plain || !absl::SimpleAtoi(digits, &count) ||
      count > (std::numeric_limits<uint64_t>::max() >> shift)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", text,
        "\" is no size; expected bytes, or a whole number of KiB, MiB, GiB or TiB such as 8GiB"));
  }
  return count << shift;
}

bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error) {
  const absl::StatusOr<uint64_t> bytes = ParseByteSize(text);
  if (!bytes.ok()) {
    *error = std::string(bytes.status().message());
    return false;
  }
  size->bytes = *bytes;
  return true;
}

std::string AbslUnparseFlag(ByteSize size) { return absl::StrCat(size.bytes); }

}  // namespace wavekv
