// Numbers of bytes as flags write them: 4096, 64KiB, 8GiB.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace wavekv {

// The type of a flag that is a size: ABSL_FLAG(wavekv::ByteSize, pool_bytes, ...).
struct ByteSize {
  uint64_t bytes = 0;
};

// Reads plain bytes or a whole number of KiB, MiB, GiB or TiB. InvalidArgument quotes the text and
// says what was expected.
absl::StatusOr<uint64_t> ParseByteSize(absl::string_view text);

// What absl/flags calls.
bool AbslParseFlag(absl::string_view text, ByteSize* size, std::string* error);
std::string AbslUnparseFlag(ByteSize size);

}  // namespace wavekv
