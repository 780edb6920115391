#include "storage/base/bytes_text.h"

#include "gtest/gtest.h"

namespace wavekv {
namespace {

TEST(BytesTextTest, NamesTheUnitAndTheExactCount) {
  EXPECT_EQ(BytesText(0), "0 bytes");
  EXPECT_EQ(BytesText(1023), "1023 bytes");
  EXPECT_EQ(BytesText(1024), "1.00 KiB (1024 bytes)");
  EXPECT_EQ(BytesText(1610612736), "1.50 GiB (1610612736 bytes)");
  EXPECT_EQ(BytesText(~0ull), "16.00 EiB (18446744073709551615 bytes)");
}

}  // namespace
}  // namespace wavekv
