// Who a caller is.

#include "daemon/server/identity.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/temp_dir.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr uid_t kDaemonUid = 500;

TEST(UidIdentitiesTest, NamesTenantsAndAdministrators) {
  const absl::StatusOr<UidIdentities> identities =
      UidIdentities::Create("1001=vllm,1002=vllm, 1003=team.a@host", kDaemonUid);
  ASSERT_TRUE(identities.ok()) << identities.status();
  struct Row {
    uid_t uid;
    std::string tenant;
    bool admin;
  };
  for (const Row& row : std::vector<Row>{{1000, "uid:1000", false},
                                         {1001, "vllm", false},
                                         {1002, "vllm", false},  // Two uids, one tenant.
                                         {1003, "team.a@host", false},
                                         {0, "uid:0", true},
                                         {kDaemonUid, "uid:500", true}}) {
    const Caller caller = identities->CallerOf(row.uid);
    EXPECT_EQ(caller.tenant, row.tenant);
    EXPECT_EQ(caller.admin, row.admin) << row.uid;
    EXPECT_EQ(caller.uid, static_cast<int64_t>(row.uid));
  }
}

TEST(UidIdentitiesTest, RefusesWhatItCannotRead) {
  for (const std::string map :
       {"vllm", "x=vllm", "-1=vllm", "1=", "1=a b", "1=a,1=b", "4294967296=vllm"}) {
    const absl::Status status = UidIdentities::Create(map, kDaemonUid).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << map << ": " << status;
  }
  EXPECT_TRUE(UidIdentities::Create("", kDaemonUid).ok());
}

constexpr char kTokens[] =
    "# a comment\n"
    "\n"
    "aaaaaaaaaaaaaaaa alice\n"
    "bbbbbbbbbbbbbbbb bob\tadmin\r\n";

TEST(TokenTableTest, KnowsItsTokens) {
  const absl::StatusOr<TokenTable> table = TokenTable::Parse(kTokens);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->size(), 2u);
  const absl::StatusOr<Caller> alice = table->CallerOf("Bearer aaaaaaaaaaaaaaaa");
  ASSERT_TRUE(alice.ok());
  EXPECT_EQ(alice->tenant, "alice");
  EXPECT_FALSE(alice->admin);
  EXPECT_EQ(alice->uid, -1);
  const absl::StatusOr<Caller> bob = table->CallerOf("Bearer bbbbbbbbbbbbbbbb");
  ASSERT_TRUE(bob.ok());
  EXPECT_TRUE(bob->admin);
  for (const std::string wrong :
       {"", "Bearer ", "aaaaaaaaaaaaaaaa", "Bearer aaaaaaaaaaaaaaa", "Bearer aaaaaaaaaaaaaaaab",
        "bearer aaaaaaaaaaaaaaaa", "Basic aaaaaaaaaaaaaaaa"}) {
    EXPECT_TRUE(absl::IsUnauthenticated(table->CallerOf(wrong).status())) << wrong;
  }
}

TEST(TokenTableTest, RefusesAFileItCannotReadWithoutQuotingASecret) {
  struct Row {
    std::string text;
    std::string error;
  };
  for (const Row& row : std::vector<Row>{
           {"secretsecretsecret", "line 1"},
           {"\nsecretsecretsecret a user", "line 2"},
           {"secretsecretsecret a admin x", "line 1"},
           {"secretsecret a", "12 bytes"},
           {"secretsecretsecret a\nsecretsecretsecret b", "given before"},
           {"secretsecretsecret a/b", "tenant name"},
       }) {
    const absl::Status status = TokenTable::Parse(row.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("secretsecret")));
  }
}

TEST(TokenTableTest, LoadsOnlyAPrivateFile) {
  const TempDir directory;
  const std::string path = directory.path() + "/tokens";
  std::ofstream(path) << kTokens;
  ASSERT_EQ(chmod(path.c_str(), 0644), 0);
  const absl::Status open = TokenTable::Load(path).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(open));
  EXPECT_THAT(std::string(open.message()), HasSubstr("chmod o-rwx"));
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  EXPECT_TRUE(TokenTable::Load(path).ok());
  std::ofstream(path) << "# nobody\n";
  EXPECT_TRUE(absl::IsInvalidArgument(TokenTable::Load(path).status()));
  EXPECT_TRUE(absl::IsNotFound(TokenTable::Load(path + ".missing").status()));
}

}  // namespace
}  // namespace wavekv
