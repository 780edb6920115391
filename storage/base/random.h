// Randomness from the kernel, for secrets and epochs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/strings/string_view.h"

namespace wavekv {

inline constexpr size_t kSecretBytes = 16;

// Fills `bytes` from getrandom(2); aborts when the kernel has none to give.
void RandomBytes(std::span<std::byte> bytes);

// 16 random bytes, unguessable.
std::string RandomSecret();

uint64_t RandomU64();

// Equality whose time does not depend on where the first difference is.
bool SecretsEqual(absl::string_view a, absl::string_view b);

}  // namespace wavekv
