#include "storage/base/file_lock.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace wavekv {
namespace {

class FileLockTest : public testing::Test {
 protected:
  FileLockTest() {
    char name[] = "/tmp/wavekv-lock-XXXXXX";
    directory_ = ::mkdtemp(name);
    path_ = directory_ + "/lock";
  }
  ~FileLockTest() override { std::filesystem::remove_all(directory_); }

  std::string directory_;
  std::string path_;
};

TEST_F(FileLockTest, SecondHolderIsRefusedAndTheFirstNamed) {
  auto first = FileLock::Acquire(path_);
  ASSERT_TRUE(first.ok()) << first.status();
  const auto second = FileLock::Acquire(path_);
  EXPECT_EQ(second.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_NE(second.status().message().find(absl::StrCat("process ", ::getpid())),
            absl::string_view::npos)
      << second.status();
  EXPECT_NE(second.status().message().find(path_), absl::string_view::npos);
}

TEST_F(FileLockTest, ReleaseLetsTheNextIn) {
  std::optional<FileLock> held;
  for (int round = 0; round < 3; ++round) {
    auto lock = FileLock::Acquire(path_);
    ASSERT_TRUE(lock.ok()) << lock.status();
    held.emplace(*std::move(lock));
    EXPECT_FALSE(FileLock::Acquire(path_).ok()) << "moving a lock must not release it";
    held.reset();
  }
  EXPECT_EQ(std::filesystem::file_size(path_), 0u) << "a free lock names no holder";
}

TEST_F(FileLockTest, KilledHolderLeavesNoLock) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const auto lock = FileLock::Acquire(path_);
    const char result = lock.ok() ? 'y' : 'n';
    if (::write(ready[1], &result, 1) != 1) ::_exit(1);
    while (true) ::pause();
  }
  char result = 0;
  ASSERT_EQ(::read(ready[0], &result, 1), 1);
  EXPECT_EQ(result, 'y');
  const auto refused = FileLock::Acquire(path_);
  EXPECT_NE(refused.status().message().find(absl::StrCat("process ", child)),
            absl::string_view::npos)
      << refused.status();
  ::kill(child, SIGKILL);
  ASSERT_EQ(::waitpid(child, nullptr, 0), child);
  EXPECT_TRUE(FileLock::Acquire(path_).ok());
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST_F(FileLockTest, LinksAreNotFollowed) {
  std::filesystem::create_symlink("/tmp/elsewhere", path_);
  EXPECT_FALSE(FileLock::Acquire(path_).ok());
}

TEST_F(FileLockTest, MissingDirectoryIsNamed) {
  const auto lock = FileLock::Acquire(directory_ + "/none/lock");
  EXPECT_EQ(lock.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(lock.status().message().find("/none/lock"), absl::string_view::npos);
}

}  // namespace
}  // namespace wavekv
