#include "storage/base/daemon_main.h"

#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/byte_size.h"
#include "storage/base/log.h"

ABSL_FLAG(uint32_t, count, 1, "A number");
ABSL_FLAG(bool, loud, false, "A switch");
ABSL_FLAG(std::string, word, "", "A text");
ABSL_FLAG(wavekv::ByteSize, size, wavekv::ByteSize{}, "A size");

namespace wavekv {
namespace {

using ::testing::HasSubstr;

absl::Status Set(std::vector<const char*> arguments) {
  arguments.insert(arguments.begin(), "program");
  return SetFlags(static_cast<int>(arguments.size()), arguments.data());
}

class DaemonMainTest : public ::testing::Test {
 protected:
  std::string Path(const std::string& name) const {
    return ::testing::TempDir() + "daemon_main_" + std::to_string(::getpid()) + "_" + name;
  }
  std::string Write(const std::string& name, const std::string& text) const {
    std::ofstream(Path(name)) << text;
    return Path(name);
  }
  void TearDown() override {
    for (const char* name : {"flags", "inner", "loop"}) ::unlink(Path(name).c_str());
    SetLogSink(nullptr);
  }

  const absl::FlagSaver saved_;
};

TEST_F(DaemonMainTest, SetsEveryForm) {
  const absl::Status status =
      Set({"--count=3", "-word", "two words", "--loud", "--size=8KiB", "--noloud", "--word="});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(absl::GetFlag(FLAGS_count), 3u);
  EXPECT_EQ(absl::GetFlag(FLAGS_word), "");
  EXPECT_FALSE(absl::GetFlag(FLAGS_loud));
  EXPECT_EQ(absl::GetFlag(FLAGS_size).bytes, 8192u);
}

TEST_F(DaemonMainTest, ReadsFilesInTheirPlace) {
  const std::string inner = Write("inner", "--word=inner\n--count=5\n");
  const std::string outer = Write("flags", "# comment\n\n  --loud\n--flagfile=" + inner + "\n");
  ASSERT_TRUE(Set({"--word=before", ("--flagfile=" + outer).c_str(), "--count=7"}).ok());
  EXPECT_TRUE(absl::GetFlag(FLAGS_loud));
  EXPECT_EQ(absl::GetFlag(FLAGS_word), "inner");
  EXPECT_EQ(absl::GetFlag(FLAGS_count), 7u) << "the last one holds";
}

TEST_F(DaemonMainTest, RefusesByName) {
  const std::string loop = Path("loop");
  Write("loop", "--flagfile=" + loop + "\n");
  const std::string bare = Write("flags", "count=3\n");
  struct Row {
    std::string argument;
    std::string named;
  };
  for (const Row& row : std::vector<Row>{
           {"--no_such_flag=1", "--no_such_flag"},
           {"--nocount", "--nocount"},  // Only a switch can be switched off.
           {"--count=abc", "--count=abc"},
           {"--count=-1", "--count=-1"},
           {"--count=4294967296", "--count=4294967296"},
           {"--count", "has no value"},
           {"--loud=perhaps", "--loud=perhaps"},
           {"--size=8GB", "8GiB"},
           {"word", "unexpected argument 'word'"},
           {"--", "--"},
           {"-", "unexpected argument '-'"},
           {"--fromenv=count", "--fromenv"},  // Absl's own: would end the process on its own.
           {"--flagfile=/no/such/file", "/no/such/file"},
           {"--flagfile=" + bare, "\"count=3\" is no flag"},
           {"--flagfile=" + loop, "in a row"},
       }) {
    const absl::Status status = Set({row.argument.c_str()});
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.argument << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.named));
  }
}

TEST_F(DaemonMainTest, ExitCodesAndLastLines) {
  struct Row {
    const char* argument;
    absl::Status served;
    int exit_code;
    std::string line;
  };
  for (const Row& row : std::vector<Row>{
           {"--count=3", absl::OkStatus(), 0, "event=stopped"},
           {"--count=3", absl::InvalidArgumentError("no sense"), 2, "no sense"},
           {"--count=3", absl::UnavailableError("taken"), 1, "taken"},
           {"--count=x", absl::InternalError("must not be served"), 2, "--count=x"},
       }) {
    std::string last;
    SetLogSink([&last](absl::string_view line) { last = std::string(line); });
    char name[] = "program";
    std::string argument = row.argument;
    char* argv[] = {name, argument.data()};
    const int code = RunDaemon(
        2, argv, {"program", "", __FILE__, [&row](const sigset_t&) { return row.served; }});
    EXPECT_EQ(code, row.exit_code) << last;
    EXPECT_THAT(last, HasSubstr(row.line));
    EXPECT_THAT(last, HasSubstr(code == 0 ? "event=stopped" : "event=failed"));
  }
}

}  // namespace
}  // namespace wavekv
