#include "storage/base/random.h"

#include <set>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(RandomTest, SecretsAreLongAndDiffer) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) {
    const std::string secret = RandomSecret();
    EXPECT_EQ(secret.size(), kSecretBytes);
    EXPECT_TRUE(seen.insert(secret).second);
  }
  EXPECT_NE(RandomU64(), RandomU64());
}

TEST(RandomTest, FillsEveryByteOfALongBuffer) {
  // getrandom(2) may return less than asked above 256 bytes.
  std::vector<std::byte> bytes(1 << 16, std::byte{0});
  RandomBytes(bytes);
  for (size_t begin = 0; begin < bytes.size(); begin += 64) {
    bool any = false;
    for (size_t i = 0; i < 64; ++i) any = any || bytes[begin + i] != std::byte{0};
    EXPECT_TRUE(any) << "64 zero bytes at " << begin;
  }
}

TEST(RandomTest, SecretsAreComparedWhole) {
  EXPECT_TRUE(SecretsEqual("", ""));
  EXPECT_TRUE(SecretsEqual("abc", "abc"));
  EXPECT_FALSE(SecretsEqual("abc", "abd"));
  EXPECT_FALSE(SecretsEqual("abc", "xbc"));
  EXPECT_FALSE(SecretsEqual("abc", "ab"));
  EXPECT_FALSE(SecretsEqual("", "a"));
}

}  // namespace
}  // namespace wavekv
