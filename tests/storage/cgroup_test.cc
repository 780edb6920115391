#include "storage/base/cgroup.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/storage/fake_root.h"

namespace wavekv {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

TEST(CgroupTest, WalksFromTheGroupToTheRoot) {
  FakeRoot root;
  root.UseCgroupV1("memory", "/pods/a/b");
  const CgroupChain chain = FindCgroup(root.path(), "memory");
  EXPECT_EQ(chain.version, 1);
  const std::string mount = root.path() + "/sys/fs/cgroup/memory";
  EXPECT_THAT(chain.directories,
              ElementsAre(mount + "/pods/a/b", mount + "/pods/a", mount + "/pods", mount));
}

TEST(CgroupTest, VersionTwoServesEveryControllerThatVersionOneDoesNot) {
  FakeRoot root;
  root.UseCgroupV2("/user.slice");
  const CgroupChain chain = FindCgroup(root.path(), "cpu");
  EXPECT_EQ(chain.version, 2);
  const std::string mount = root.path() + "/sys/fs/cgroup";
  EXPECT_THAT(chain.directories, ElementsAre(mount + "/user.slice", mount));
}

TEST(CgroupTest, ContainersSeeAPartOfTheTree) {
  struct Row {
    const char* why;
    const char* group;
    const char* top;
    const char* below_mount;  // Innermost directory expected.
  };
  const Row rows[] = {
      {"container without a cgroup namespace", "/docker/abc", "/docker/abc", ""},
      {"a group made inside that container", "/docker/abc/inner", "/docker/abc", "/inner"},
      {"mount shows another branch", "/docker/abc", "/docker/xyz", ""},
      {"group outside the namespace", "/../sibling", "/", ""},
  };
  for (const Row& row : rows) {
    FakeRoot root;
    root.UseCgroupV1("memory", row.group, row.top);
    const CgroupChain chain = FindCgroup(root.path(), "memory");
    ASSERT_FALSE(chain.directories.empty()) << row.why;
    const std::string mount = root.path() + "/sys/fs/cgroup/memory";
    EXPECT_EQ(chain.directories.front(), mount + row.below_mount) << row.why;
    EXPECT_EQ(chain.directories.back(), mount) << row.why;
  }
}

TEST(CgroupTest, ControllersMountedTogetherAreFound) {
  FakeRoot root;
  root.UseCgroupV1("cpu,cpuacct", "/x");
  EXPECT_EQ(FindCgroup(root.path(), "cpu").version, 1);
  EXPECT_EQ(FindCgroup(root.path(), "cpuset").version, 0) << "a prefix is not the controller";
}

TEST(CgroupTest, NothingReadableMeansNoLimits) {
  FakeRoot root;
  EXPECT_EQ(FindCgroup(root.path(), "memory").version, 0);
  root.Write("/proc/self/cgroup", "nonsense\n::\n");
  root.Write("/proc/self/mountinfo", "short\n - \n");
  EXPECT_THAT(FindCgroup(root.path(), "memory").directories, IsEmpty());
}

TEST(CgroupTest, NumbersAreReadStrictly) {
  FakeRoot root;
  root.Write("/n", "42\n");
  root.Write("/max", "max\n");
  root.Write("/minus", "-1\n");
  EXPECT_EQ(ReadNumberFile(root.path() + "/n"), 42u);
  EXPECT_EQ(ReadNumberFile(root.path() + "/max"), std::nullopt);
  EXPECT_EQ(ReadNumberFile(root.path() + "/minus"), std::nullopt);
  EXPECT_EQ(ReadNumberFile(root.path() + "/none"), std::nullopt);
  EXPECT_EQ(FindKeyedNumber("ab 1\na 2\na 3\n", "a"), 2u);
  EXPECT_EQ(FindKeyedNumber("VmRSS:\t  7 kB\n", "VmRSS:"), 7u);
  EXPECT_EQ(FindKeyedNumber("MemTotal:   16 kB\n", "MemTotal:"), 16u);
  EXPECT_EQ(FindKeyedNumber("a\n", "a"), std::nullopt);
}

}  // namespace
}  // namespace wavekv
