#include "storage/base/crc32c.h"

#include <cstdlib>
#include <iostream>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

uint64_t FreshSeed() {
  const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
  const uint64_t seed =
      wanted == nullptr ? std::random_device()() : std::strtoull(wanted, nullptr, 10);
  std::cout << "seed " << seed << std::endl;
  return seed;
}

std::span<const std::byte> Bytes(const std::string& text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

// The check value of the catalogue of CRCs, and the examples of RFC 3720, B.4.
TEST(Crc32cTest, KnownValues) {
  std::string ascending(32, '\0');
  for (size_t i = 0; i < ascending.size(); ++i) ascending[i] = static_cast<char>(i);
  const struct {
    std::string text;
    uint32_t crc;
  } rows[] = {
      {"", 0},
      {"123456789", 0xe3069283},
      {std::string(32, '\0'), 0x8a9136aa},
      {std::string(32, '\xff'), 0x62a8ab43},
      {ascending, 0x46dd794e},
  };
  for (const auto& row : rows) {
    EXPECT_EQ(Crc32c(Bytes(row.text)), row.crc) << row.text.size() << " bytes";
    EXPECT_EQ(Crc32cPortable(Bytes(row.text)), row.crc) << row.text.size() << " bytes";
  }
}

TEST(Crc32cTest, BothWaysAgreeOnEveryLengthAndInPieces) {
  std::mt19937_64 random(FreshSeed());
  std::vector<std::byte> bytes(300);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  for (size_t length = 0; length <= bytes.size(); ++length) {
    const size_t begin = random() % (bytes.size() - length + 1);
    const std::span<const std::byte> piece = std::span(bytes).subspan(begin, length);
    const uint32_t whole = Crc32c(piece);
    ASSERT_EQ(Crc32cPortable(piece), whole) << length << " bytes";
    const size_t split = random() % (length + 1);
    ASSERT_EQ(Crc32c(piece.subspan(split), Crc32c(piece.first(split))), whole);
    ASSERT_EQ(Crc32cPortable(piece.subspan(split), Crc32cPortable(piece.first(split))), whole);
  }
}

}  // namespace
}  // namespace wavekv
