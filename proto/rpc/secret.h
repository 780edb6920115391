// Comparison of secrets and tokens.
#pragma once

#include <cstddef>
#include <string_view>

namespace wavekv {

inline constexpr size_t kSecretBytes = 16;

// Compares in a time that depends on the lengths only, so that a guess learns nothing from it.
bool SecretsEqual(std::string_view a, std::string_view b);

}  // namespace wavekv
