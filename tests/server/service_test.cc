// Every RPC over a real connection: the life of a sequence, leases, epochs, what operators read.

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "grpcpp/health_check_service_interface.h"
#include "gtest/gtest.h"
#include "proto/rpc/metadata.h"
#include "proto/rpc/tensor_wire.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

// Exact f32 attention against double: rounding of a few hundred terms.
constexpr double kExactTolerance = 1e-4;

class ServiceTest : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_TRUE(client_.Attach().ok()); }

  v1::AttendReply Attend(const v1::AttendRequest& request) {
    v1::AttendReply reply;
    const grpc::Status status = client_.stub()->Attend(client_.Context().get(), request, &reply);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return reply;
  }

  TestServer server_;
  TestClient client_{server_.address()};
};

v1::AttendRequest OneItem(const v1::SequenceRef& sequence, uint32_t layer, bool exact) {
  v1::AttendRequest request;
  v1::AttendItem* item = request.add_items();
  *item->mutable_sequence() = sequence;
  item->set_layer(layer);
  *item->mutable_queries() = TestQueries(layer);
  item->set_exact(exact);
  return request;
}

double MaxDifference(const v1::Tensor& out, const std::vector<double>& expected) {
  EXPECT_EQ(out.data().size(), expected.size() * sizeof(float));
  double worst = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    float value = 0;
    std::memcpy(&value, out.data().data() + i * sizeof value, sizeof value);
    worst = std::max(worst, std::abs(value - expected[i]));
  }
  return worst;
}

TEST_F(ServiceTest, AttachTellsTheLimits) {
  const v1::AttachReply& reply = client_.attached();
  EXPECT_EQ(reply.protocol_version(), 1u);
  EXPECT_EQ(reply.secret().size(), 16u);
  EXPECT_EQ(reply.epoch(), 1u);
  EXPECT_EQ(reply.lease_ms(), 30'000u);
  EXPECT_EQ(reply.limits().message_bytes_max(), 64ull << 20);
  EXPECT_EQ(reply.limits().batch_max(), 16u);
  EXPECT_EQ(reply.tenant(), "uid:" + std::to_string(geteuid()));
  EXPECT_EQ(reply.daemon_version(), WAVEKV_VERSION);
  EXPECT_EQ("unix:" + reply.data_socket(), server_.address() + ".data");
  EXPECT_EQ(reply.wave_buffers_size(), 0);
}

TEST_F(ServiceTest, AttachRefusesForeignVersionsNamingBoth) {
  v1::AttachRequest request;
  request.set_protocol_version_min(7);
  request.set_protocol_version_max(9);
  v1::AttachReply reply;
  const grpc::Status status = client_.stub()->Attach(client_.Context("", 0).get(), request, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("7 to 9"));
  EXPECT_THAT(status.error_message(), HasSubstr("1 to 1"));
  EXPECT_EQ(reply.secret(), "");
}

TEST_F(ServiceTest, LifeOfASequence) {
  constexpr uint64_t kTokens = 3000;
  const v1::SequenceRef sequence = client_.Create(4096);
  ASSERT_NE(sequence.sequence_id(), 0u);
  EXPECT_EQ(sequence.sequence_id() >> 32, client_.attached().epoch());

  // Prefill in two streams, the second of several messages.
  ASSERT_TRUE(client_.Insert(sequence, 0, 1000).ok());
  v1::InsertReply inserted;
  const std::unique_ptr<grpc::ClientContext> context = client_.Context();
  const auto writer = client_.stub()->Insert(context.get(), &inserted);
  for (uint64_t first = 1000; first < kTokens; first += 500) {
    v1::InsertRequest chunk = TestChunk(sequence, first, 500);
    if (first != 1000) chunk.clear_sequence();  // Named by the first message.
    ASSERT_TRUE(writer->Write(chunk));
  }
  writer->WritesDone();
  const grpc::Status insert = writer->Finish();
  ASSERT_TRUE(insert.ok()) << insert.error_message();
  EXPECT_EQ(inserted.inserted_messages(), 4u);
  EXPECT_EQ(inserted.token_count(), kTokens);
  EXPECT_EQ(inserted.generation(), sequence.generation());

  v1::BuildIndexProgress built;
  const grpc::Status build = client_.Build(sequence, &built);
  ASSERT_TRUE(build.ok()) << build.error_message();
  EXPECT_TRUE(built.done());
  EXPECT_EQ(built.tokens_done(), built.tokens_total());

  for (uint32_t layer = 0; layer < 2; ++layer) {
    const v1::AttendReply exact = Attend(OneItem(sequence, layer, true));
    ASSERT_EQ(exact.results_size(), 1);
    ASSERT_EQ(exact.results(0).error_code(), 0u) << exact.results(0).error_message();
    EXPECT_EQ(exact.results(0).token_count(), kTokens);
    EXPECT_LT(
        MaxDifference(exact.results(0).out(), ExactAttention(layer, kTokens, TestQueries(layer))),
        kExactTolerance);
    const v1::AttendReply sparse = Attend(OneItem(sequence, layer, false));
    ASSERT_EQ(sparse.results(0).error_code(), 0u) << sparse.results(0).error_message();
    EXPECT_GT(sparse.results(0).counters().retrieved_clusters(), 0u);
    EXPECT_GT(sparse.results(0).counters().estimated_clusters(), 0u);
    EXPECT_LT(sparse.results(0).counters().kv_bytes_read(),
              sparse.results(0).counters().kv_bytes_full());
  }

  v1::DropSequenceRequest drop;
  *drop.mutable_sequence() = sequence;
  v1::DropSequenceReply dropped;
  EXPECT_TRUE(client_.stub()->DropSequence(client_.Context().get(), drop, &dropped).ok());
  EXPECT_EQ(client_.stub()->DropSequence(client_.Context().get(), drop, &dropped).error_code(),
            grpc::StatusCode::NOT_FOUND);
  EXPECT_TRUE(server_.BecomesEmpty());
}

TEST_F(ServiceTest, QueryAndEstimateCarryThePlan) {
  const v1::SequenceRef sequence = client_.Create(4096);
  ASSERT_TRUE(client_.Insert(sequence, 0, 2500).ok());
  ASSERT_TRUE(client_.Build(sequence).ok());

  v1::QueryRequest query;
  *query.mutable_sequence() = sequence;
  query.set_layer(1);
  *query.mutable_queries() = TestQueries(1);
  query.mutable_budget()->set_clusters(5);
  query.set_inline_(true);
  v1::QueryReply reply;
  const grpc::Status status = client_.stub()->Query(client_.Context().get(), query, &reply);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(reply.heads_size(), 2);
  EXPECT_EQ(reply.token_count(), 2500u);
  for (const v1::HeadZones& head : reply.heads()) {
    EXPECT_EQ(head.retrieved_size(), 5);
    uint64_t rows = head.steady_tokens();
    for (const v1::ClusterRef& cluster : head.retrieved()) rows += cluster.size();
    ASSERT_EQ(static_cast<uint64_t>(head.inline_positions_size()), rows);
    ASSERT_TRUE(CheckWireTensor(head.inline_keys(), "keys").ok());
    EXPECT_EQ(head.inline_keys().shape(0), static_cast<int64_t>(rows));
    EXPECT_EQ(head.inline_values().shape(1), 48);
    // Every row is the row of its position, in layer and head.
    for (int row = 0; row < head.inline_positions_size(); ++row) {
      const std::vector<float> key = TestKey(1, head.inline_positions(row), head.kv_head());
      const std::vector<float> value = TestValue(1, head.inline_positions(row), head.kv_head());
      ASSERT_EQ(std::memcmp(head.inline_keys().data().data() + row * 32 * 4, key.data(), 32 * 4),
                0);
      ASSERT_EQ(
          std::memcmp(head.inline_values().data().data() + row * 48 * 4, value.data(), 48 * 4), 0);
    }
  }
  EXPECT_EQ(reply.estimation().lse().shape(0), 4);

  v1::EstimateRequest estimate;
  *estimate.mutable_sequence() = sequence;
  estimate.set_layer(1);
  *estimate.mutable_queries() = TestQueries(1);
  v1::EstimateReply estimated;
  ASSERT_TRUE(client_.stub()->Estimate(client_.Context().get(), estimate, &estimated).ok());
  EXPECT_EQ(estimated.out().shape(1), 48);
  const auto* lower = reinterpret_cast<const float*>(estimated.lse_lower().data().data());
  const auto* upper = reinterpret_cast<const float*>(estimated.lse_upper().data().data());
  for (int head = 0; head < 4; ++head) EXPECT_LE(lower[head], upper[head]);
}

TEST_F(ServiceTest, ADecodeStreamAppendsAndAnswersStepByStep) {
  constexpr uint64_t kPrefill = 200;
  const v1::SequenceRef sequence = client_.Create(1024);
  ASSERT_TRUE(client_.Insert(sequence, 0, kPrefill).ok());
  const std::unique_ptr<grpc::ClientContext> context = client_.Context();
  const auto stream = client_.stub()->Decode(context.get());
  for (uint64_t position = kPrefill; position < kPrefill + 5; ++position) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      v1::AttendRequest request = OneItem(sequence, layer, true);
      v1::AttendItem* item = request.mutable_items(0);
      const v1::InsertRequest token = TestChunk(sequence, position, 1);
      const auto half = [&](const v1::Tensor& all, int64_t dim, v1::Tensor* out) {
        FillWireTensor(DType::kF32, std::vector<int64_t>{2, dim},
                       all.data().data() + layer * 2 * dim * 4, out);
      };
      half(token.keys(), 32, item->mutable_append_keys());
      half(token.values(), 48, item->mutable_append_values());
      item->set_append_position(position);
      ASSERT_TRUE(stream->Write(request));
      v1::AttendReply reply;
      ASSERT_TRUE(stream->Read(&reply));
      ASSERT_EQ(reply.results(0).error_code(), 0u) << reply.results(0).error_message();
      EXPECT_EQ(reply.results(0).token_count(), position + 1);
      EXPECT_LT(MaxDifference(reply.results(0).out(),
                              ExactAttention(layer, position + 1, TestQueries(layer))),
                kExactTolerance);
    }
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(ServiceTest, ABatchFailsByItem) {
  const v1::SequenceRef sequence = client_.Create(1024);
  ASSERT_TRUE(client_.Insert(sequence, 0, 100).ok());
  v1::AttendRequest request = OneItem(sequence, 0, true);
  *request.add_items() = request.items(0);
  request.mutable_items(1)->mutable_sequence()->set_sequence_id(12345);
  *request.add_items() = request.items(0);
  request.mutable_items(2)->mutable_queries()->mutable_data()->pop_back();
  *request.add_items() = request.items(0);
  request.mutable_items(3)->set_layer(1);
  request.mutable_items(3)->mutable_queries()->CopyFrom(TestQueries(1));
  const v1::AttendReply reply = Attend(request);
  ASSERT_EQ(reply.results_size(), 4);
  EXPECT_EQ(reply.results(0).error_code(), 0u);
  EXPECT_EQ(reply.results(1).error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(reply.results(2).error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(reply.results(2).error_message(), HasSubstr("queries"));
  EXPECT_EQ(reply.results(3).error_code(), 0u);
  EXPECT_LT(MaxDifference(reply.results(3).out(), ExactAttention(1, 100, TestQueries(1))),
            kExactTolerance);

  v1::AttendReply refused;
  EXPECT_EQ(client_.stub()->Attend(client_.Context().get(), {}, &refused).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  for (int i = 0; i < 16; ++i) *request.add_items() = request.items(0);
  const grpc::Status over = client_.stub()->Attend(client_.Context().get(), request, &refused);
  EXPECT_EQ(over.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(over.error_message(), HasSubstr("20 entries, expected 1 to 16"));
}

TEST_F(ServiceTest, ForkAndTruncate) {
  const v1::SequenceRef parent = client_.Create(1024);
  ASSERT_TRUE(client_.Insert(parent, 0, 300).ok());

  v1::ForkSequenceRequest fork;
  *fork.mutable_sequence() = parent;
  fork.set_token_count(200);
  fork.set_label("child");
  v1::ForkSequenceReply forked;
  const grpc::Status status = client_.stub()->ForkSequence(client_.Context().get(), fork, &forked);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(forked.token_count(), 200u);
  v1::SequenceRef child;
  child.set_sequence_id(forked.sequence_id());
  child.set_generation(forked.generation());
  const v1::AttendReply reply = Attend(OneItem(child, 0, true));
  EXPECT_LT(MaxDifference(reply.results(0).out(), ExactAttention(0, 200, TestQueries(0))),
            kExactTolerance);

  v1::TruncateSequenceRequest truncate;
  *truncate.mutable_sequence() = parent;
  truncate.set_token_count(100);
  v1::TruncateSequenceReply truncated;
  ASSERT_TRUE(client_.stub()->TruncateSequence(client_.Context().get(), truncate, &truncated).ok());
  EXPECT_EQ(truncated.token_count(), 100u);
  EXPECT_GT(truncated.generation(), parent.generation());
  // A late retry of the old generation is refused and becomes no data.
  const grpc::Status late = client_.Insert(parent, 100, 10);
  EXPECT_EQ(late.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(late.error_message(), HasSubstr("generation"));
}

TEST_F(ServiceTest, InspectionIsServed) {
  const v1::SequenceRef sequence = client_.Create(4096);
  ASSERT_TRUE(client_.Insert(sequence, 0, 2500).ok());
  ASSERT_TRUE(client_.Build(sequence).ok());
  for (uint32_t layer = 0; layer < 2; ++layer) Attend(OneItem(sequence, layer, false));

  v1::DescribeIndexRequest describe;
  *describe.mutable_sequence() = sequence;
  v1::DescribeIndexReply description;
  grpc::Status status =
      client_.stub()->DescribeIndex(client_.Context().get(), describe, &description);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(description.token_count(), 2500u);
  EXPECT_GT(description.cluster_count(), 0u);
  EXPECT_EQ(description.sizes().edges_size(), description.sizes().counts_size() + 1);

  v1::ExplainRequest explain;
  *explain.mutable_sequence() = sequence;
  explain.set_kv_head(1);
  explain.set_top(3);
  v1::ExplainReply explanation;
  status = client_.stub()->Explain(client_.Context().get(), explain, &explanation);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(explanation.clusters_size(), 3);
  EXPECT_NE(explanation.budget(), "");
  explain.set_top(1001);
  EXPECT_EQ(client_.stub()->Explain(client_.Context().get(), explain, &explanation).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);

  v1::SampleRecallRequest recall;
  *recall.mutable_sequence() = sequence;
  v1::SampleRecallReply sample;
  status = client_.stub()->SampleRecall(client_.Context().get(), recall, &sample);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(sample.layers_size(), 2);
  EXPECT_TRUE(sample.layers(0).sampled());
  EXPECT_GT(sample.layers(0).mass_covered_mean(), 0);
}

TEST_F(ServiceTest, StatsAndListsArePagedAndCounted) {
  std::vector<uint64_t> ids;
  for (int i = 0; i < 5; ++i) ids.push_back(client_.Create(64).sequence_id());

  std::vector<uint64_t> listed;
  v1::ListSequencesRequest request;
  request.set_page_size(2);
  int pages = 0;
  do {
    v1::ListSequencesReply page;
    const grpc::Status status =
        client_.stub()->ListSequences(client_.Context().get(), request, &page);
    ASSERT_TRUE(status.ok()) << status.error_message();
    for (const v1::SequenceInfo& info : page.sequences()) {
      listed.push_back(info.sequence_id());
      EXPECT_EQ(info.label(), "a label");
      EXPECT_EQ(info.client_name(), "test");
      EXPECT_EQ(info.model_id(), "test-model");
      EXPECT_EQ(info.shape().value_dim(), 48u);
      EXPECT_EQ(info.max_tokens(), 64u);
      EXPECT_GT(info.reserved_bytes(), 0u);
    }
    request.set_page_token(page.next_page_token());
    ++pages;
  } while (!request.page_token().empty());
  EXPECT_EQ(listed, ids);
  EXPECT_EQ(pages, 3);

  v1::ListSequencesReply page;
  request.set_page_token("no token of ours");
  EXPECT_EQ(client_.stub()->ListSequences(client_.Context().get(), request, &page).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);
  request.clear_page_token();
  request.set_page_size(1001);
  EXPECT_EQ(client_.stub()->ListSequences(client_.Context().get(), request, &page).error_code(),
            grpc::StatusCode::INVALID_ARGUMENT);

  v1::GetStatsReply stats;
  ASSERT_TRUE(client_.stub()->GetStats(client_.Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.pool_bytes_max(), 256ull << 20);
  EXPECT_GT(stats.pool_reserved_bytes(), 0u);
  EXPECT_GT(stats.rss_bytes(), 0u);
  EXPECT_GT(stats.memory_available_bytes(), 0u);
  EXPECT_GT(stats.threads(), 1u);
  EXPECT_NE(stats.isa(), "");
  EXPECT_THAT(stats.cgroup_version(), ::testing::AnyOf("v1", "v2", "none"));
  EXPECT_EQ(stats.calls().at("CreateSequence"), 5u);
  EXPECT_EQ(stats.calls().at("Attach"), 1u);
  EXPECT_EQ(stats.calls().size(), 26u);
  ASSERT_EQ(stats.tenants_size(), 1);
  EXPECT_EQ(stats.tenants(0).bytes_max(), 256ull << 20);
  EXPECT_EQ(stats.tenants(0).sequences(), 5u);
  EXPECT_EQ(stats.tenants(0).clients(), 1u);
}

// Row 2 of the list of faults: more builds than there are threads to wait for them.
TEST_F(ServiceTest, WaitingBuildsHoldUpNobody) {
  constexpr size_t kBuilds = 12;
  std::vector<v1::SequenceRef> sequences;
  for (size_t i = 0; i < kBuilds; ++i) {
    sequences.push_back(client_.Create(4096));
    ASSERT_TRUE(client_.Insert(sequences.back(), 0, 3000).ok());
  }
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::BuildIndexProgress>>> readers;
  for (const v1::SequenceRef& sequence : sequences) {
    v1::BuildIndexRequest request;
    *request.mutable_sequence() = sequence;
    contexts.push_back(client_.Context());
    readers.push_back(client_.stub()->BuildIndex(contexts.back().get(), request));
  }
  v1::GetStatsReply stats;
  EXPECT_TRUE(client_.stub()->GetStats(client_.Context().get(), {}, &stats).ok());
  EXPECT_LT(stats.calls().at("BuildIndex"), kBuilds) << "answered while builds still run";
  for (const auto& reader : readers) {
    v1::BuildIndexProgress progress;
    while (reader->Read(&progress)) {
    }
    EXPECT_TRUE(reader->Finish().ok());
    EXPECT_TRUE(progress.done());
  }
  ASSERT_TRUE(client_.stub()->GetStats(client_.Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.calls().at("BuildIndex"), kBuilds);
  EXPECT_GT(stats.tenants(0).index_bytes(), 0u);
}

TEST_F(ServiceTest, DetachAndLeasesGiveEverythingBack) {
  client_.Create(256);
  client_.Create(256);
  v1::HeartbeatReply heartbeat;
  ASSERT_TRUE(client_.stub()->Heartbeat(client_.Context().get(), {}, &heartbeat).ok());
  EXPECT_EQ(heartbeat.lease_ms(), 30'000u);
  v1::DetachReply detached;
  ASSERT_TRUE(client_.stub()->Detach(client_.Context().get(), {}, &detached).ok());
  EXPECT_EQ(detached.sequences_dropped(), 2u);
  EXPECT_TRUE(server_.BecomesEmpty());
  EXPECT_EQ(client_.stub()->Detach(client_.Context().get(), {}, &detached).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);

  TestClient silent(server_.address());
  ASSERT_TRUE(silent.Attach(100).ok());
  EXPECT_EQ(silent.attached().lease_ms(), 100u);
  silent.Create(256);
  EXPECT_TRUE(server_.BecomesEmpty()) << "the lease of a silent client ends";
  EXPECT_EQ(silent.stub()->Heartbeat(silent.Context().get(), {}, &heartbeat).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
}

TEST_F(ServiceTest, PinnedAndTimedSequencesOutliveTheirOwner) {
  const v1::SequenceRef pinned = client_.Create(256);
  const v1::SequenceRef timed = client_.Create(256);
  v1::PinRequest pin;
  *pin.mutable_sequence() = pinned;
  pin.set_pinned(true);
  v1::PinReply pin_reply;
  ASSERT_TRUE(client_.stub()->Pin(client_.Context().get(), pin, &pin_reply).ok());
  v1::SetTtlRequest ttl;
  *ttl.mutable_sequence() = timed;
  ttl.set_ttl_ms(50);
  v1::SetTtlReply ttl_reply;
  ASSERT_TRUE(client_.stub()->SetTtl(client_.Context().get(), ttl, &ttl_reply).ok());
  v1::DetachReply detached;
  ASSERT_TRUE(client_.stub()->Detach(client_.Context().get(), {}, &detached).ok());
  EXPECT_EQ(detached.sequences_dropped(), 0u);
  // The TTL ends one, the drop by another client of the tenant the other.
  TestClient next(server_.address());
  ASSERT_TRUE(next.Attach().ok());
  v1::DropSequenceRequest drop;
  *drop.mutable_sequence() = pinned;
  v1::DropSequenceReply dropped;
  EXPECT_TRUE(next.stub()->DropSequence(next.Context().get(), drop, &dropped).ok());
  EXPECT_TRUE(server_.BecomesEmpty());
}

TEST_F(ServiceTest, SecretsAndEpochsAreToldApart) {
  const std::string secret = client_.attached().secret();
  const uint64_t epoch = client_.attached().epoch();
  struct Row {
    std::string why;
    std::string secret;
    uint64_t epoch;
    grpc::StatusCode code;
    bool stale;
  };
  for (const Row& row : std::vector<Row>{
           {"right", secret, epoch, grpc::StatusCode::OK, false},
           {"no secret", "", epoch, grpc::StatusCode::UNAUTHENTICATED, false},
           {"no epoch", secret, 0, grpc::StatusCode::UNAUTHENTICATED, false},
           {"a guess", std::string(16, 'g'), epoch, grpc::StatusCode::UNAUTHENTICATED, false},
           {"short", "s", epoch, grpc::StatusCode::UNAUTHENTICATED, false},
           {"another life", secret, epoch + 1, grpc::StatusCode::FAILED_PRECONDITION, true},
       }) {
    const std::unique_ptr<grpc::ClientContext> context = client_.Context(row.secret, row.epoch);
    v1::HeartbeatReply reply;
    const grpc::Status status = client_.stub()->Heartbeat(context.get(), {}, &reply);
    EXPECT_EQ(status.error_code(), row.code) << row.why << ": " << status.error_message();
    EXPECT_EQ(context->GetServerTrailingMetadata().count(kStaleEpochKey), row.stale ? 1u : 0u)
        << row.why;
    // A stream is judged the same way.
    const std::unique_ptr<grpc::ClientContext> stream_context =
        client_.Context(row.secret, row.epoch);
    const auto stream = client_.stub()->Decode(stream_context.get());
    stream->WritesDone();
    EXPECT_EQ(stream->Finish().error_code(), row.code) << row.why;
    EXPECT_EQ(stream_context->GetServerTrailingMetadata().count(kStaleEpochKey),
              row.stale ? 1u : 0u);
  }
}

// Row 3 of the list of faults.
TEST_F(ServiceTest, AfterARestartTheOldEpochIsStaleAndOldIdsAreUnknown) {
  const v1::SequenceRef old = client_.Create(256);
  server_.Restart();
  std::unique_ptr<grpc::ClientContext> context;
  grpc::Status status(grpc::StatusCode::UNAVAILABLE, "not called yet");
  // The connection to the old server may break under the first call.
  for (int i = 0; i < 10 && status.error_code() == grpc::StatusCode::UNAVAILABLE; ++i) {
    context = client_.Context();
    v1::HeartbeatReply reply;
    status = client_.stub()->Heartbeat(context.get(), {}, &reply);
  }
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION) << status.error_message();
  EXPECT_EQ(context->GetServerTrailingMetadata().count(kStaleEpochKey), 1u);

  ASSERT_TRUE(client_.Attach().ok());
  const v1::SequenceRef fresh = client_.Create(256);
  EXPECT_NE(fresh.sequence_id(), old.sequence_id());
  EXPECT_EQ(client_.Insert(old, 0, 1).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace wavekv
