#include "storage/base/line_writer.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <termios.h>
#include <unistd.h>

#include <chrono>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "storage/base/check.h"
#include "storage/base/unique_fd.h"
#include "tests/unread_pipe.h"

namespace wavekv {
namespace {

// Lines of many lengths, each with its number.
std::string Line(int i) {
  return absl::StrCat(i, ":", std::string(static_cast<size_t>(i * 37 % 900), 'a'), "\n");
}

// Writes lines to `fd`; when one is refused, takes what is there at `read_end`. What came out in
// the end is what was accepted, byte by byte.
void ExpectWholeLines(int fd, int read_end) {
  constexpr int kLines = 2000;
  LineWriter writer(fd);
  std::string accepted;
  std::string read;
  const auto take = [&] {
    pollfd ready = {read_end, POLLIN, 0};
    ASSERT_GT(poll(&ready, 1, 60'000), 0) << "what was accepted never came";
    read += UnreadPipe::Drain(read_end);
  };
  int refused = 0;
  for (int i = 0; i < kLines; ++i) {
    if (writer.Write(Line(i))) {
      accepted += Line(i);
      continue;
    }
    ++refused;
    while (!WaitForRoom(fd, std::chrono::seconds(0))) ASSERT_NO_FATAL_FAILURE(take());
  }
  EXPECT_GT(refused, 0);
  while (read.size() < accepted.size()) {
    writer.Write("");  // Finishes what was begun.
    ASSERT_NO_FATAL_FAILURE(take());
  }
  EXPECT_TRUE(read == accepted);
  EXPECT_EQ(fcntl(fd, F_GETFL) & O_NONBLOCK, 0) << "the description is others', too";
}

TEST(LineWriterTest, AFullPipeTakesNothingAndNobodyWaits) {
  UnreadPipe pipe;
  LineWriter writer(pipe.write_end());
  for (const size_t spare : {0, 1, 9}) {
    pipe.Fill(spare);
    EXPECT_FALSE(writer.Write("ten bytes\n"));
    EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling(spare)) << "nothing of it";
    EXPECT_TRUE(writer.Write("ten bytes\n"));
    EXPECT_EQ(pipe.Drain(), "ten bytes\n");
  }
  pipe.Fill(10);
  EXPECT_TRUE(writer.Write("ten bytes\n"));
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling(10) + "ten bytes\n");
}

TEST(LineWriterTest, LinesOfAPipeAreWhole) {
  UnreadPipe pipe;
  ExpectWholeLines(pipe.write_end(), pipe.read_end());
}

TEST(LineWriterTest, LinesOfASocketAreWhole) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  const UniqueFd reader(ends[0]);
  const UniqueFd writer(ends[1]);
  ExpectWholeLines(writer.get(), reader.get());
}

// Whoever has no descriptor left, no /proc, or another user's pipe.
TEST(LineWriterTest, WithoutADescriptorOfItsOwnItWaitsForNobodyEither) {
  UnreadPipe pipe;
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit none = {1, limit.rlim_max};  // Number 0 is stdin; poll needs one.
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  ASSERT_LT(open("/dev/null", O_RDONLY | O_CLOEXEC), 0);
  LineWriter writer(pipe.write_end());
  pipe.Fill();
  EXPECT_FALSE(writer.Write("line\n"));
  EXPECT_EQ(pipe.Drain(), UnreadPipe::Filling());
  EXPECT_TRUE(writer.Write("line\n"));
  EXPECT_EQ(pipe.Drain(), "line\n");
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
}

TEST(LineWriterTest, WhatCannotBeWrittenIsSaid) {
  const auto before = signal(SIGPIPE, SIG_IGN);
  UnreadPipe gone;
  gone.CloseReadEnd();
  EXPECT_FALSE(LineWriter(gone.write_end()).Write("line\n"));
  signal(SIGPIPE, before);

  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends), 0);
  close(ends[0]);
  const UniqueFd socket(ends[1]);
  EXPECT_FALSE(LineWriter(socket.get()).Write("line\n")) << "and no SIGPIPE has ended this";

  const UniqueFd full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(full.valid());
  EXPECT_FALSE(LineWriter(full.get()).Write("line\n"));
  EXPECT_FALSE(LineWriter(-1).Write("line\n")) << "closed";

  const UniqueFd null(open("/dev/null", O_WRONLY | O_CLOEXEC));
  ASSERT_TRUE(null.valid());
  EXPECT_TRUE(LineWriter(null.get()).Write("line\n"));
}

// A file as large as it may be takes the first bytes of a line: the others come before any other
// line's.
TEST(LineWriterTest, ALineThatWasTakenInPartIsFinishedFirst) {
  std::string path = testing::TempDir() + "line_writer_XXXXXX";
  const UniqueFd file(mkostemp(path.data(), O_CLOEXEC));
  ASSERT_TRUE(file.valid());
  unlink(path.c_str());
  const auto before = signal(SIGXFSZ, SIG_IGN);
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &limit), 0);
  const rlimit few = {8, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &few), 0);
  LineWriter writer(file.get());
  EXPECT_TRUE(writer.Write("first\n"));
  EXPECT_TRUE(writer.Write("second\n"));
  EXPECT_FALSE(writer.Write("third\n"));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &limit), 0);
  signal(SIGXFSZ, before);
  EXPECT_TRUE(writer.Write("fourth\n"));
  char text[64];
  const ssize_t count = pread(file.get(), text, sizeof(text), 0);
  ASSERT_GT(count, 0);
  EXPECT_EQ(std::string(text, static_cast<size_t>(count)), "first\nsecond\nfourth\n");
}

// A terminal whose screen stands still.
TEST(LineWriterTest, LinesOfATerminalAreWhole) {
  const UniqueFd screen(posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC));
  if (!screen.valid()) GTEST_SKIP() << "no terminals here";
  ASSERT_EQ(grantpt(screen.get()), 0);
  ASSERT_EQ(unlockpt(screen.get()), 0);
  char name[64];
  ASSERT_EQ(ptsname_r(screen.get(), name, sizeof(name)), 0);
  const UniqueFd terminal(open(name, O_RDWR | O_NOCTTY | O_CLOEXEC));
  ASSERT_TRUE(terminal.valid());
  termios mode{};
  ASSERT_EQ(tcgetattr(terminal.get(), &mode), 0);
  cfmakeraw(&mode);
  ASSERT_EQ(tcsetattr(terminal.get(), TCSANOW, &mode), 0);
  ExpectWholeLines(terminal.get(), screen.get());
}

TEST(WaitForRoomTest, EndsWithRoomOrWithTheTime) {
  UnreadPipe pipe;
  EXPECT_TRUE(WaitForRoom(pipe.write_end(), std::chrono::seconds(0)));
  pipe.Fill();
  EXPECT_FALSE(WaitForRoom(pipe.write_end(), std::chrono::seconds(0)));
  std::thread reader([&pipe] { pipe.Drain(); });
  EXPECT_TRUE(WaitForRoom(pipe.write_end(), std::chrono::seconds(60)));
  reader.join();
}

// Our own bug must end the process, whoever reads what it says.
TEST(CheckDeathTest, EndsAProcessWhoseStderrIsFull) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        UnreadPipe pipe;
        pipe.Fill();
        const StderrTo unread(pipe.write_end());
        CheckFailed("condition", "file", 1, "message");
      },
      testing::KilledBySignal(SIGABRT), "");
}

}  // namespace
}  // namespace wavekv
