#include "storage/base/crc32c.h"

#include <array>
#include <cstring>

namespace wavekv {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Reflected.

// tables[k][b]: the checksum of the byte b followed by k zero bytes ("slicing by 8").
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte) {
    for (size_t k = 1; k < tables.size(); ++k) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}

constexpr Tables kTables = MakeTables();

uint64_t Load64(const std::byte* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t Crc32cX86(std::span<const std::byte> bytes,
                                                     uint32_t crc) {
  uint64_t state = ~crc;
  const std::byte* next = bytes.data();
  const std::byte* const end = next + bytes.size();
  for (; end - next >= 8; next += 8) state = __builtin_ia32_crc32di(state, Load64(next));
  auto low = static_cast<uint32_t>(state);
  for (; next != end; ++next) low = __builtin_ia32_crc32qi(low, static_cast<uint8_t>(*next));
  return ~low;
}
#endif

}  // namespace

uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc) {
  uint32_t state = ~crc;
  const std::byte* next = bytes.data();
  const std::byte* const end = next + bytes.size();
  for (; end - next >= 8; next += 8) {
    const uint64_t word = Load64(next) ^ state;
    state = 0;
    for (size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xff];
  }
  for (; next != end; ++next) {
    state = (state >> 8) ^ kTables[0][(state ^ static_cast<uint32_t>(*next)) & 0xff];
  }
  return ~state;
}

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  static const bool has_instruction = __builtin_cpu_supports("sse4.2");
  if (has_instruction) return Crc32cX86(bytes, crc);
#endif
  return Crc32cPortable(bytes, crc);
}

}  // namespace wavekv
