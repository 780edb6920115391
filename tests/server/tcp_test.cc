// Two tenants over TCP: tokens, foreign ids, administrators, ports.

#include <sys/stat.h>

#include <fstream>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr char kAlice[] = "alice-alice-alice";
constexpr char kBob[] = "bob-bob-bob-bob-bob";
constexpr char kRoot[] = "root-root-root-root";

TestServerOptions WithTokens(const TempDir& directory) {
  const std::string path = directory.path() + "/tokens";
  std::ofstream(path) << kAlice << " alice\n" << kBob << " bob\n" << kRoot << " ops admin\n";
  EXPECT_EQ(chmod(path.c_str(), 0600), 0);
  TestServerOptions options;
  options.server.listen_tcp = "127.0.0.1:0";
  options.server.token_file = path;
  return options;
}

class TcpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(alice_.Attach().ok());
    ASSERT_TRUE(bob_.Attach().ok());
    ASSERT_TRUE(root_.Attach().ok());
  }

  const TempDir directory_;
  TestServer server_{WithTokens(directory_)};
  const std::string address_ = server_.server()->tcp_address();
  TestClient alice_{address_, kAlice};
  TestClient bob_{address_, kBob};
  TestClient root_{address_, kRoot};
};

TEST_F(TcpTest, ATokenIsNeededForEveryCallAndNamesTheTenant) {
  EXPECT_EQ(alice_.attached().tenant(), "alice");
  EXPECT_EQ(bob_.attached().tenant(), "bob");
  for (const std::string token : {"", "alice", "alice-alice-alicf"}) {
    TestClient stranger(address_, token);
    const grpc::Status status = stranger.Attach();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::UNAUTHENTICATED);
    EXPECT_THAT(status.error_message(), HasSubstr("--token_file"));
    v1::GetStatsReply stats;
    EXPECT_EQ(stranger.stub()->GetStats(stranger.Context().get(), {}, &stats).error_code(),
              grpc::StatusCode::UNAUTHENTICATED);
  }
  // A stolen secret is worth nothing with another token.
  v1::HeartbeatReply reply;
  EXPECT_EQ(
      bob_.stub()
          ->Heartbeat(bob_.Context(alice_.attached().secret(), alice_.attached().epoch()).get(), {},
                      &reply)
          .error_code(),
      grpc::StatusCode::UNAUTHENTICATED);
}

struct ForeignRow {
  std::string rpc;
  std::function<grpc::Status(TestClient*, const v1::SequenceRef&)> call;
};

template <class Request, class Reply>
ForeignRow Row(std::string rpc,
               grpc::Status (v1::WaveKV::Stub::*method)(grpc::ClientContext*, const Request&,
                                                        Reply*),
               const std::function<void(Request*)>& fill = nullptr) {
  return {std::move(rpc), [method, fill](TestClient* client, const v1::SequenceRef& sequence) {
            Request request;
            *request.mutable_sequence() = sequence;
            if (fill) fill(&request);
            Reply reply;
            return (client->stub()->*method)(client->Context().get(), request, &reply);
          }};
}

std::vector<ForeignRow> EveryRpcWithASequence() {
  using Stub = v1::WaveKV::Stub;
  const auto queries = [](auto* request) { *request->mutable_queries() = TestQueries(0); };
  return {
      {"Insert", [](TestClient* c, const v1::SequenceRef& s) { return c->Insert(s, 100, 1); }},
      {"BuildIndex", [](TestClient* c, const v1::SequenceRef& s) { return c->Build(s); }},
      {"Attend",
       [](TestClient* c, const v1::SequenceRef& s) {
         v1::AttendRequest request;
         v1::AttendItem* item = request.add_items();
         *item->mutable_sequence() = s;
         *item->mutable_queries() = TestQueries(0);
         v1::AttendReply reply;
         const grpc::Status status = c->stub()->Attend(c->Context().get(), request, &reply);
         if (!status.ok()) return status;
         EXPECT_EQ(reply.results(0).out().data().size(),
                   reply.results(0).error_code() == 0 ? 4u * 48 * 4 : 0u);
         return grpc::Status(static_cast<grpc::StatusCode>(reply.results(0).error_code()),
                             reply.results(0).error_message());
       }},
      Row<v1::QueryRequest, v1::QueryReply>("Query", &Stub::Query, queries),
      Row<v1::EstimateRequest, v1::EstimateReply>("Estimate", &Stub::Estimate, queries),
      Row<v1::ForkSequenceRequest, v1::ForkSequenceReply>("ForkSequence", &Stub::ForkSequence),
      Row<v1::TruncateSequenceRequest, v1::TruncateSequenceReply>(
          "TruncateSequence", &Stub::TruncateSequence,
          [](v1::TruncateSequenceRequest* r) { r->set_token_count(100); }),
      Row<v1::PlanIndexRequest, v1::PlanIndexReply>("PlanIndex", &Stub::PlanIndex),
      Row<v1::GiveLabelsRequest, v1::GiveLabelsReply>("GiveLabels", &Stub::GiveLabels),
      Row<v1::PinRequest, v1::PinReply>("Pin", &Stub::Pin),
      Row<v1::SetTtlRequest, v1::SetTtlReply>("SetTtl", &Stub::SetTtl),
      Row<v1::AttachResidentRequest, v1::AttachResidentReply>("AttachResident",
                                                              &Stub::AttachResident),
      Row<v1::ResidentStatusRequest, v1::ResidentStatusReply>("ResidentStatus",
                                                              &Stub::ResidentStatus),
      Row<v1::DetachResidentRequest, v1::DetachResidentReply>("DetachResident",
                                                              &Stub::DetachResident),
      Row<v1::DescribeIndexRequest, v1::DescribeIndexReply>("DescribeIndex", &Stub::DescribeIndex),
      Row<v1::ExplainRequest, v1::ExplainReply>("Explain", &Stub::Explain, queries),
      Row<v1::SampleRecallRequest, v1::SampleRecallReply>("SampleRecall", &Stub::SampleRecall),
      Row<v1::DropSequenceRequest, v1::DropSequenceReply>("DropSequence", &Stub::DropSequence),
  };
}

// Promise 1 and row 13 of the list of faults.
TEST_F(TcpTest, AForeignSequenceIsNotFoundLikeOneThatNeverWas) {
  const v1::SequenceRef sequence = alice_.Create(512);
  ASSERT_TRUE(alice_.Insert(sequence, 0, 100).ok());
  v1::SequenceRef never = sequence;
  never.set_sequence_id(sequence.sequence_id() + 1000);
  for (const ForeignRow& row : EveryRpcWithASequence()) {
    const grpc::Status foreign = row.call(&bob_, sequence);
    EXPECT_EQ(foreign.error_code(), grpc::StatusCode::NOT_FOUND)
        << row.rpc << ": " << foreign.error_message();
    EXPECT_EQ(row.call(&bob_, never).error_code(), grpc::StatusCode::NOT_FOUND) << row.rpc;
  }
  // The owner is let in everywhere, in an order that ends with the drop.
  v1::SequenceRef current = sequence;
  for (const ForeignRow& row : EveryRpcWithASequence()) {
    const grpc::Status own = row.call(&alice_, current);
    if (row.rpc.find("Resident") != std::string::npos) {
      // Not over TCP, for nobody: the sequence is known, and refused by what it lacks.
      EXPECT_EQ(own.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << row.rpc;
      continue;
    }
    EXPECT_TRUE(own.ok()) << row.rpc << ": " << own.error_message();
    if (row.rpc == "TruncateSequence") current.set_generation(current.generation() + 1);
  }
}

TEST_F(TcpTest, OnlyAnAdministratorSeesAndEndsOthersSequencesAndNoneReadsThem) {
  const v1::SequenceRef sequence = alice_.Create(512);
  ASSERT_TRUE(alice_.Insert(sequence, 0, 100).ok());
  bob_.Create(512);

  const auto listed = [](TestClient* client) {
    v1::ListSequencesReply reply;
    EXPECT_TRUE(client->stub()->ListSequences(client->Context().get(), {}, &reply).ok());
    std::vector<std::string> tenants;
    for (const v1::SequenceInfo& info : reply.sequences()) tenants.push_back(info.tenant());
    return tenants;
  };
  EXPECT_THAT(listed(&alice_), ::testing::ElementsAre("alice"));
  EXPECT_THAT(listed(&bob_), ::testing::ElementsAre("bob"));
  EXPECT_THAT(listed(&root_), ::testing::ElementsAre("alice", "bob"));

  v1::GetStatsReply stats;
  ASSERT_TRUE(bob_.stub()->GetStats(bob_.Context().get(), {}, &stats).ok());
  ASSERT_EQ(stats.tenants_size(), 1);
  EXPECT_EQ(stats.tenants(0).tenant(), "bob");
  ASSERT_TRUE(root_.stub()->GetStats(root_.Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.tenants_size(), 3) << "alice, bob, and its own, which holds nothing";

  for (const ForeignRow& row : EveryRpcWithASequence()) {
    const bool inspects = row.rpc == "Pin" || row.rpc == "SetTtl" || row.rpc == "DescribeIndex" ||
                          row.rpc == "Explain" || row.rpc == "SampleRecall" ||
                          row.rpc == "DropSequence";
    const grpc::Status status = row.call(&root_, sequence);
    EXPECT_EQ(status.error_code(), inspects ? grpc::StatusCode::OK : grpc::StatusCode::NOT_FOUND)
        << row.rpc << ": " << status.error_message();
  }
}

// Row 30 of the list of faults, on a port.
TEST_F(TcpTest, ASecondServerOnThePortIsRefusedByName) {
  TestServerOptions options = WithTokens(directory_);
  ServerOptions second = options.server;
  second.listen = "unix:" + directory_.path() + "/second";
  second.listen_tcp = address_;
  second.epoch = 2;
  const absl::Status status = Server::Start(second, server_.engine()).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(address_));
  v1::HeartbeatReply reply;
  EXPECT_TRUE(alice_.stub()->Heartbeat(alice_.Context().get(), {}, &reply).ok());
}

}  // namespace
}  // namespace wavekv
