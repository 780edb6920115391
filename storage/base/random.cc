#include "storage/base/random.h"

#include <sys/random.h>

#include <cerrno>

#include "storage/base/check.h"

namespace wavekv {

void RandomBytes(std::span<std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::getrandom(bytes.data(), bytes.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    WAVEKV_CHECK(count > 0, "getrandom failed");
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

std::string RandomSecret() {
  std::string secret(kSecretBytes, '\0');
  RandomBytes(std::as_writable_bytes(std::span(secret)));
  return secret;
}

uint64_t RandomU64() {
  uint64_t value;
  RandomBytes(std::as_writable_bytes(std::span(&value, 1)));
  return value;
}

bool SecretsEqual(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

}  // namespace wavekv
