#include "storage/base/unique_fd.h"

#include <fcntl.h>
#include <unistd.h>

#include <utility>

#include "gtest/gtest.h"

namespace wavekv {
namespace {

bool IsOpen(int fd) { return ::fcntl(fd, F_GETFD) >= 0; }
int OpenNull() { return ::open("/dev/null", O_RDONLY | O_CLOEXEC); }

TEST(UniqueFdTest, ClosesExactlyOnce) {
  int raw;
  {
    const UniqueFd fd(OpenNull());
    raw = fd.get();
    EXPECT_TRUE(IsOpen(raw));
  }
  EXPECT_FALSE(IsOpen(raw));
}

TEST(UniqueFdTest, MovingHandsItOver) {
  UniqueFd first(OpenNull());
  const int raw = first.get();
  UniqueFd second(std::move(first));
  EXPECT_FALSE(first.valid());
  EXPECT_EQ(second.get(), raw);
  UniqueFd third(OpenNull());
  const int replaced = third.get();
  third = std::move(second);
  EXPECT_FALSE(IsOpen(replaced)) << "the one it held before is closed";
  EXPECT_EQ(third.get(), raw);
  EXPECT_TRUE(IsOpen(raw));
  UniqueFd& alias = third;
  third = std::move(alias);
  EXPECT_TRUE(IsOpen(raw)) << "moving to itself changes nothing";
}

TEST(UniqueFdTest, ReleaseKeepsItOpen) {
  UniqueFd fd(OpenNull());
  const int raw = fd.release();
  EXPECT_FALSE(fd.valid());
  EXPECT_TRUE(IsOpen(raw));
  fd.reset(raw);
  fd.reset();
  EXPECT_FALSE(IsOpen(raw));
}

}  // namespace
}  // namespace wavekv
