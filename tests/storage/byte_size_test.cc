#include "storage/base/byte_size.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace wavekv {
namespace {

struct Row {
  std::string text;
  uint64_t bytes;
};

TEST(ByteSizeTest, Parses) {
  for (const Row& row : std::vector<Row>{{"0", 0},
                                         {"17", 17},
                                         {"64KiB", 64ull << 10},
                                         {"8GiB", 8ull << 30},
                                         {"3MiB", 3ull << 20},
                                         {"2TiB", 2ull << 40},
                                         {"18446744073709551615", ~0ull}}) {
    const absl::StatusOr<uint64_t> bytes = ParseByteSize(row.text);
    ASSERT_TRUE(bytes.ok()) << row.text;
    EXPECT_EQ(*bytes, row.bytes);
    ByteSize flag;
    std::string error;
    EXPECT_TRUE(AbslParseFlag(AbslUnparseFlag({*bytes}), &flag, &error)) << error;
    EXPECT_EQ(flag.bytes, row.bytes);
  }
}

TEST(ByteSizeTest, RefusesWhatIsNoSize) {
  for (const std::string text : {"", "GiB", "-1", "+1", " 1", "1.5GiB", "8GB", "8gib", "8 GiB",
                                 "16777216TiB", "18446744073709551616"}) {
    EXPECT_TRUE(absl::IsInvalidArgument(ParseByteSize(text).status())) << text;
    ByteSize flag;
    std::string error;
    EXPECT_FALSE(AbslParseFlag(text, &flag, &error)) << text;
    EXPECT_THAT(error, testing::HasSubstr("\"" + text + "\"")) << "quoted";
  }
}

}  // namespace
}  // namespace wavekv
