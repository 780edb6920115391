// Several users on one UNIX socket of a real wavekvd (row 13 of the list of faults): each its own
// tenant, or the one that --tenant_map names, and no more of them than --uids_max.

#include <grp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/create_channel_posix.h"
#include "gtest/gtest.h"
#include "storage/base/check.h"
#include "storage/base/unique_fd.h"
#include "tests/server/daemon_process.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

// Uids that no account has; the map names the last two.
constexpr uid_t kAnn = 4001;
constexpr uid_t kBob = 4002;
constexpr uid_t kCarol = 4003;
constexpr uid_t kDave = 4004;

// A socket that a process of `uid` has connected to `path`: the kernel remembers who connects, not
// who uses the connection. `error` is connect's errno.
UniqueFd ConnectAs(uid_t uid, const std::string& path, int* error) {
  UniqueFd connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  WAVEKV_CHECK(connection.valid(), "no socket");
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof address.sun_path - 1);
  const pid_t child = fork();
  WAVEKV_CHECK(child >= 0, "no process");
  if (child == 0) {
    const bool changed = setgroups(0, nullptr) == 0 && setresgid(uid, uid, uid) == 0 &&
                         setresuid(uid, uid, uid) == 0;
    const bool connected =
        changed &&
        connect(connection.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    _exit(connected ? 0 : errno);
  }
  int status = 0;
  WAVEKV_CHECK(waitpid(child, &status, 0) == child, "the child is lost");
  *error = WEXITSTATUS(status);
  return connection;
}

class TenantsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (geteuid() != 0) GTEST_SKIP() << "only root can become somebody else";
    ASSERT_EQ(chmod(directory_.path().c_str(), 0755), 0);
  }

  void Start(std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--listen=unix:" + path_, "--pool_bytes=64MiB"});
    daemon_ = std::make_unique<DaemonProcess>(flags);
    ASSERT_TRUE(daemon_->WaitReady()) << daemon_->log();
  }

  std::unique_ptr<TestClient> ClientOf(uid_t uid) {
    int error = 0;
    UniqueFd connection = ConnectAs(uid, path_, &error);
    EXPECT_EQ(error, 0) << std::strerror(error);
    return std::make_unique<TestClient>(std::move(connection));
  }

  const TempDir directory_;
  const std::string path_ = directory_.path() + "/s";
  std::unique_ptr<DaemonProcess> daemon_;
};

std::vector<uint64_t> Listed(const TestClient& client) {
  v1::ListSequencesReply reply;
  EXPECT_TRUE(client.stub()->ListSequences(client.Context().get(), {}, &reply).ok());
  std::vector<uint64_t> ids;
  for (const v1::SequenceInfo& sequence : reply.sequences()) ids.push_back(sequence.sequence_id());
  return ids;
}

grpc::Status Attend(const TestClient& client, const v1::SequenceRef& sequence, v1::Tensor* out) {
  v1::AttendRequest request;
  *request.add_items()->mutable_sequence() = sequence;
  *request.mutable_items(0)->mutable_queries() = TestQueries(1);
  v1::AttendReply reply;
  const grpc::Status status = client.stub()->Attend(client.Context().get(), request, &reply);
  if (!status.ok()) return status;
  const v1::AttendResult& result = reply.results(0);
  *out = result.out();
  return {static_cast<grpc::StatusCode>(result.error_code()), result.error_message()};
}

TEST_F(TenantsTest, UsersHaveNothingOfEachOther) {
  Start({"--socket_mode=666"});
  const auto ann = ClientOf(kAnn);
  const auto bob = ClientOf(kBob);
  ASSERT_TRUE(ann->Attach().ok());
  ASSERT_TRUE(bob->Attach().ok());
  EXPECT_EQ(ann->attached().tenant(), "uid:4001");
  EXPECT_EQ(bob->attached().tenant(), "uid:4002");
  // The same tokens under two tenants are two sequences.
  const v1::SequenceRef hers = ann->Create(64);
  const v1::SequenceRef his = bob->Create(64);
  ASSERT_TRUE(ann->Insert(hers, 0, 32).ok());
  ASSERT_TRUE(bob->Insert(his, 0, 16).ok());
  EXPECT_THAT(Listed(*ann), testing::ElementsAre(hers.sequence_id()));
  EXPECT_THAT(Listed(*bob), testing::ElementsAre(his.sequence_id()));

  v1::Tensor out;
  EXPECT_TRUE(Attend(*ann, hers, &out).ok());
  EXPECT_EQ(Attend(*bob, hers, &out).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(bob->Insert(hers, 32, 1).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(bob->Build(hers).error_code(), grpc::StatusCode::NOT_FOUND);
  v1::DropSequenceRequest drop;
  *drop.mutable_sequence() = hers;
  v1::DropSequenceReply dropped;
  EXPECT_EQ(bob->stub()->DropSequence(bob->Context().get(), drop, &dropped).error_code(),
            grpc::StatusCode::NOT_FOUND);
  // Nor does her secret help: it is her connections' only.
  const auto stolen = bob->Context(ann->attached().secret(), ann->attached().epoch());
  v1::HeartbeatReply beat;
  EXPECT_EQ(bob->stub()->Heartbeat(stolen.get(), {}, &beat).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_TRUE(Attend(*ann, hers, &out).ok()) << "undisturbed";

  // Root runs this daemon and is its administrator: sees both, and of both no more than that.
  TestClient root("unix:" + path_);
  ASSERT_TRUE(root.Attach().ok());
  EXPECT_THAT(Listed(root), testing::UnorderedElementsAre(hers.sequence_id(), his.sequence_id()));
  EXPECT_EQ(Attend(root, hers, &out).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(TenantsTest, TheMapMakesOneTenantOfSeveralUsers) {
  Start({"--socket_mode=666", "--tenant_map=4003=team,4004=team"});
  const auto ann = ClientOf(kAnn);
  const auto carol = ClientOf(kCarol);
  const auto dave = ClientOf(kDave);
  for (const auto* client : {&ann, &carol, &dave}) ASSERT_TRUE((*client)->Attach().ok());
  EXPECT_EQ(ann->attached().tenant(), "uid:4001");
  EXPECT_EQ(carol->attached().tenant(), "team");
  EXPECT_EQ(dave->attached().tenant(), "team");
  const v1::SequenceRef sequence = carol->Create(64);
  ASSERT_TRUE(carol->Insert(sequence, 0, 32).ok());
  v1::Tensor hers;
  v1::Tensor his;
  ASSERT_TRUE(Attend(*carol, sequence, &hers).ok());
  ASSERT_TRUE(Attend(*dave, sequence, &his).ok());
  EXPECT_EQ(hers.data(), his.data());
  EXPECT_EQ(Attend(*ann, sequence, &his).error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(TenantsTest, OneUserTooManyIsTurnedAway) {
  Start({"--socket_mode=666", "--uids_max=2"});
  const auto ann = ClientOf(kAnn);
  const auto bob = ClientOf(kBob);
  ASSERT_TRUE(ann->Attach().ok());
  ASSERT_TRUE(bob->Attach().ok());
  const auto carol = ClientOf(kCarol);
  EXPECT_EQ(carol->Attach().error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_TRUE(daemon_->WaitFor("uid 4003 is the first beyond --uids_max=2")) << daemon_->log();
  // Those who are in stay in, and may come again.
  EXPECT_TRUE(ClientOf(kAnn)->Attach().ok());
  const v1::SequenceRef sequence = bob->Create(64);
  EXPECT_TRUE(bob->Insert(sequence, 0, 32).ok());
}

TEST_F(TenantsTest, TheModeOfTheSocketKeepsOthersOut) {
  Start({});
  int error = 0;
  ConnectAs(kAnn, path_, &error);
  EXPECT_EQ(error, EACCES);
}

}  // namespace
}  // namespace wavekv
