// Nothing that a client can send stops the daemon or changes a sequence (rows 29 and 32 of the list
// of faults).

#include <cstdlib>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "google/protobuf/descriptor.h"
#include "gtest/gtest.h"
#include "proto/rpc/status_conversion.h"
#include "proto/rpc/tensor_wire.h"
#include "tests/server/raw_call.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kTokens = 64;

class BadInputTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(client_.Attach().ok());
    sequence_ = client_.Create(512);
    ASSERT_TRUE(client_.Insert(sequence_, 0, kTokens).ok());
  }

  // The next good chunk goes in where it should: nothing has changed.
  void ExpectUnchanged() {
    const std::unique_ptr<grpc::ClientContext> context = client_.Context();
    v1::InsertReply reply;
    const auto writer = client_.stub()->Insert(context.get(), &reply);
    // The last stored token again: same range, same bytes.
    writer->Write(TestChunk(sequence_, kTokens - 1, 1));
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    EXPECT_EQ(reply.token_count(), kTokens);
  }

  grpc::Status Send(const v1::InsertRequest& request) {
    const std::unique_ptr<grpc::ClientContext> context = client_.Context();
    v1::InsertReply reply;
    const auto writer = client_.stub()->Insert(context.get(), &reply);
    writer->Write(request);
    writer->WritesDone();
    return writer->Finish();
  }

  TestServer server_;
  TestClient client_{server_.address()};
  v1::SequenceRef sequence_;
};

struct InsertRow {
  std::string error;
  grpc::StatusCode code;
  std::function<void(v1::InsertRequest*)> change;
};

TEST_F(BadInputTest, InsertIsRefusedWhole) {
  using Request = v1::InsertRequest;
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const auto set_float = [](v1::Tensor* tensor, size_t index, float value) {
    tensor->mutable_data()->replace(index * sizeof value, sizeof value,
                                    reinterpret_cast<const char*>(&value), sizeof value);
  };
  const std::vector<InsertRow> rows = {
      {"sequence_id", kInvalid, [](Request* r) { r->clear_sequence(); }},
      {"", grpc::StatusCode::NOT_FOUND,
       [](Request* r) { r->mutable_sequence()->set_sequence_id(77); }},
      {"generation", kInvalid, [](Request* r) { r->mutable_sequence()->set_generation(0); }},
      {"generation", grpc::StatusCode::FAILED_PRECONDITION,
       [](Request* r) { r->mutable_sequence()->set_generation(9); }},
      {"expected", grpc::StatusCode::FAILED_PRECONDITION,
       [](Request* r) { r->set_first_position(kTokens + 1); }},  // A gap.
      {"", grpc::StatusCode::ABORTED,
       [](Request* r) { r->set_first_position(kTokens - 4); }},  // Other bytes.
      {"", kInvalid,
       [](Request* r) { r->set_first_position(std::numeric_limits<uint64_t>::max() - 1); }},
      {"layer", kInvalid, [](Request* r) { r->clear_layers(); }},
      {"layer", kInvalid, [](Request* r) { r->set_layers(1, 2); }},
      {"layer", kInvalid, [](Request* r) { r->set_layers(1, 0); }},  // Twice the same.
      {"keys", kInvalid, [](Request* r) { r->clear_keys(); }},
      {"values", kInvalid, [](Request* r) { r->clear_values(); }},
      {"keys", kInvalid, [](Request* r) { r->mutable_keys()->set_dtype(v1::DTYPE_BF16); }},
      {"keys", kInvalid, [](Request* r) { r->mutable_keys()->mutable_data()->pop_back(); }},
      {"negative", kInvalid, [](Request* r) { r->mutable_keys()->set_shape(1, -4); }},
      {"expected", kInvalid, [](Request* r) { r->mutable_keys()->set_shape(1, 1ll << 31); }},
      {"2^63", kInvalid, [](Request* r) { r->mutable_keys()->set_shape(1, 1ll << 61); }},
      {"dimensions", kInvalid,
       [](Request* r) {
         for (int i = 0; i < 100; ++i) r->mutable_keys()->add_shape(1);
       }},
      // Packed as the other layout: [layers, heads, tokens, dim] with 4 tokens and 2 heads.
      {"shape", kInvalid, [](Request* r) { r->mutable_keys()->set_layout(v1::LAYOUT_HND); }},
      {"keys", kInvalid, [&](Request* r) { set_float(r->mutable_keys(), 40, NAN); }},
      {"values", kInvalid,
       [&](Request* r) {
         set_float(r->mutable_values(), 1, std::numeric_limits<float>::infinity());
       }},
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    v1::InsertRequest request = TestChunk(sequence_, kTokens, 4);
    rows[i].change(&request);
    const grpc::Status status = Send(request);
    EXPECT_EQ(status.error_code(), rows[i].code) << "row " << i << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(rows[i].error)) << "row " << i;
  }
  ExpectUnchanged();
}

TEST_F(BadInputTest, AStreamThatSaysNothingOrChangesItsMindIsRefused) {
  {
    const std::unique_ptr<grpc::ClientContext> context = client_.Context();
    v1::InsertReply reply;
    const auto writer = client_.stub()->Insert(context.get(), &reply);
    writer->WritesDone();
    const grpc::Status status = writer->Finish();
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(status.error_message(), HasSubstr("first message"));
  }
  const v1::SequenceRef other = client_.Create(512);
  const std::unique_ptr<grpc::ClientContext> context = client_.Context();
  v1::InsertReply reply;
  const auto writer = client_.stub()->Insert(context.get(), &reply);
  writer->Write(TestChunk(sequence_, kTokens, 1));
  writer->Write(TestChunk(other, 0, 1));
  writer->WritesDone();
  const grpc::Status status = writer->Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("one stream inserts into one sequence"));
}

TEST_F(BadInputTest, QueriesAreJudged) {
  struct Row {
    std::string why;
    std::function<void(v1::QueryRequest*)> change;
  };
  const float nan = NAN;
  for (const Row& row : std::vector<Row>{
           {"no queries", [](v1::QueryRequest* r) { r->clear_queries(); }},
           {"layer", [](v1::QueryRequest* r) { r->set_layer(2); }},
           {"heads", [](v1::QueryRequest* r) { r->mutable_queries()->set_shape(0, 2); }},
           {"rank",
            [](v1::QueryRequest* r) {
              r->mutable_queries()->clear_shape();
              r->mutable_queries()->add_shape(128);
            }},
           {"NaN",
            [&](v1::QueryRequest* r) {
              r->mutable_queries()->mutable_data()->replace(0, 4,
                                                            reinterpret_cast<const char*>(&nan), 4);
            }},
           {"ratio", [](v1::QueryRequest* r) { r->mutable_budget()->set_ratio(1.5); }},
           {"ratio", [](v1::QueryRequest* r) { r->mutable_budget()->set_ratio(NAN); }},
           {"coverage", [](v1::QueryRequest* r) { r->mutable_budget()->set_coverage(-1); }},
           {"error", [](v1::QueryRequest* r) { r->mutable_budget()->set_error(-0.1); }},
           {"estimate_ratio",
            [](v1::QueryRequest* r) {
              r->mutable_budget()->set_clusters(1);
              r->mutable_budget()->set_estimate_ratio(2);
            }},
       }) {
    v1::QueryRequest request;
    *request.mutable_sequence() = sequence_;
    *request.mutable_queries() = TestQueries(1);
    row.change(&request);
    v1::QueryReply reply;
    const grpc::Status status = client_.stub()->Query(client_.Context().get(), request, &reply);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT)
        << row.why << ": " << status.error_message();
  }
  ExpectUnchanged();
}

TEST_F(BadInputTest, LabelsAreRefusedWhole) {
  struct Row {
    std::string error;
    grpc::StatusCode code;
    std::function<void(v1::GiveLabelsRequest*)> change;
  };
  using Request = v1::GiveLabelsRequest;
  constexpr auto kInvalid = grpc::StatusCode::INVALID_ARGUMENT;
  const v1::SequenceRef sequence = client_.Create(4096);
  const auto give = [&](const Request& request, v1::GiveLabelsReply* reply) {
    return client_.stub()->GiveLabels(client_.Context().get(), request, reply);
  };
  for (const Row& row : std::vector<Row>{
           {"sequence_id", kInvalid, [](Request* r) { r->clear_sequence(); }},
           {"generation", kInvalid, [](Request* r) { r->mutable_sequence()->set_generation(0); }},
           {"generation", grpc::StatusCode::FAILED_PRECONDITION,
            [](Request* r) { r->mutable_sequence()->set_generation(9); }},
           {"", grpc::StatusCode::NOT_FOUND,
            [](Request* r) { r->mutable_sequence()->set_sequence_id(77); }},
           {"layer", kInvalid, [](Request* r) { r->set_layer(2); }},
           {"layer", kInvalid, [](Request* r) { r->set_layer(~0u); }},
           {"bytes", kInvalid, [](Request* r) { r->mutable_segments(1)->clear_labels(); }},
           {"bytes", kInvalid,
            [](Request* r) { r->mutable_segments(1)->mutable_labels()->pop_back(); }},
           {"bytes", kInvalid, [](Request* r) { r->mutable_segments(1)->set_token_count(1); }},
           {"tokens", kInvalid, [](Request* r) { r->mutable_segments(1)->set_token_count(0); }},
           {"max_tokens", kInvalid,
            [](Request* r) { r->mutable_segments(1)->set_token_count(~0u); }},
           {"max_tokens", kInvalid,
            [](Request* r) { r->mutable_segments(1)->set_first_position(~uint64_t{0}); }},
           {"has label 255", kInvalid,
            [](Request* r) { r->mutable_segments(1)->mutable_labels()->at(4000) = '\xff'; }},
       }) {
    Request request;
    *request.mutable_sequence() = sequence;
    for (const auto& [first, tokens] : {std::pair(4u, 1020u), std::pair(1024u, 1024u)}) {
      v1::SegmentLabels* segment = request.add_segments();
      segment->set_first_position(first);
      segment->set_token_count(tokens);
      segment->set_labels(std::string(2 * 2 * tokens, '\0'));
    }
    row.change(&request);
    v1::GiveLabelsReply reply;
    const grpc::Status status = give(request, &reply);
    EXPECT_EQ(status.error_code(), row.code) << row.error << ": " << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(row.error));
  }
  EXPECT_EQ(server_.engine()->Stats().builds.segments_given, 0u);
  v1::GiveLabelsRequest none;
  *none.mutable_sequence() = sequence;
  v1::GiveLabelsReply reply;
  EXPECT_TRUE(give(none, &reply).ok());
  EXPECT_EQ(reply.kept(), 0u);
}

TEST_F(BadInputTest, ReservationsBeyondTheLimitsAreRefusedNow) {
  struct Row {
    uint64_t max_tokens;
    grpc::StatusCode code;
  };
  for (const Row& row : {Row{0, grpc::StatusCode::INVALID_ARGUMENT},
                         Row{1u << 20, grpc::StatusCode::RESOURCE_EXHAUSTED},
                         Row{1ull << 31, grpc::StatusCode::INVALID_ARGUMENT},
                         Row{~0ull, grpc::StatusCode::INVALID_ARGUMENT}}) {
    v1::CreateSequenceRequest request;
    *request.mutable_shape() = TestShape();
    request.set_max_tokens(row.max_tokens);
    v1::CreateSequenceReply reply;
    const grpc::Status status =
        client_.stub()->CreateSequence(client_.Context().get(), request, &reply);
    EXPECT_EQ(status.error_code(), row.code) << row.max_tokens << ": " << status.error_message();
  }
  for (int i = 1; i < 64; ++i) client_.Create(16);
  v1::CreateSequenceRequest request;
  *request.mutable_shape() = TestShape();
  request.set_max_tokens(16);
  v1::CreateSequenceReply reply;
  const grpc::Status status =
      client_.stub()->CreateSequence(client_.Context().get(), request, &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
}

// Noise, and valid messages with some bytes changed, at every method.
TEST_F(BadInputTest, RandomBytesAtEveryMethodGetAStatus) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const google::protobuf::ServiceDescriptor* service =
      v1::AttachRequest::descriptor()->file()->FindServiceByName("WaveKV");
  // By luck the bytes are a good Drop or Truncate now and then: they name another sequence.
  const std::string valid = TestChunk(client_.Create(512), kTokens, 1).SerializeAsString();
  for (int round = 0; round < 30; ++round) {
    for (int i = 0; i < service->method_count(); ++i) {
      const std::string name = service->method(i)->name();
      if (name == "Detach") continue;  // Any bytes are a good Detach; it would end the client.
      std::string bytes = valid.substr(0, random() % 200);
      for (char& byte : bytes) {
        if (random() % 4 == 0) byte = static_cast<char>(random());
      }
      v1::DropSequenceRequest named;
      if (named.ParseFromString(bytes) && named.sequence().sequence_id() == sequence_.sequence_id())
        continue;
      const RawReply reply =
          RawCall(client_.channel(), "/wavekv.v1.WaveKV/" + name, bytes, client_.Context());
      EXPECT_NE(reply.status.error_code(), grpc::StatusCode::DEADLINE_EXCEEDED) << name;
      EXPECT_NE(reply.status.error_code(), grpc::StatusCode::UNAVAILABLE) << name;
    }
  }
  ExpectUnchanged();
}

// As large as `bytes`, without taking memory: pages that are only read stay the kernel's.
RawReply SendLarge(TestClient* client, size_t bytes) {
  void* memory = std::calloc(bytes, 1);
  const grpc::Slice slice(memory, bytes, grpc::Slice::STATIC_SLICE);
  const grpc::ByteBuffer buffer(&slice, 1);
  RawReply reply =
      RawCall(client->channel(), "/wavekv.v1.WaveKV/Insert", buffer, client->Context());
  std::free(memory);
  return reply;
}

TEST_F(BadInputTest, MessagesOverTheLimitAreRefusedByNameAndOthersStream) {
  for (const size_t megabytes : {65, 600}) {
    const RawReply reply = SendLarge(&client_, megabytes << 20);
    EXPECT_EQ(reply.status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
    const std::string text(FromGrpcStatus(reply.status).message());
    EXPECT_THAT(text, HasSubstr(std::to_string(64 << 20))) << "the limit";
    EXPECT_THAT(text, HasSubstr("--message_bytes_max")) << "the flag";
  }
  ExpectUnchanged();
  // 1,280 bytes a token: messages under and over gRPC's own default of 4 MiB.
  const v1::SequenceRef sequence = client_.Create(8192);
  ASSERT_TRUE(client_.Insert(sequence, 0, 3050).ok());
  ASSERT_TRUE(client_.Insert(sequence, 3050, 3300).ok());
}

TEST(ReplySizeTest, AReplyOverTheLimitIsRefusedByNameAndOneOver4MiBArrives) {
  TestServerOptions options;
  options.server.message_bytes_max = 5u << 20;
  TestServer server(options);
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  // 640 inline bytes a token and layer, all of them exact: the layers are dense.
  v1::CreateSequenceRequest create;
  *create.mutable_shape() = TestShape();
  create.set_max_tokens(9000);
  create.mutable_index()->add_dense_layers(0);
  create.mutable_index()->add_dense_layers(1);
  v1::CreateSequenceReply created;
  ASSERT_TRUE(client.stub()->CreateSequence(client.Context().get(), create, &created).ok());
  v1::QueryRequest query;
  query.mutable_sequence()->set_sequence_id(created.sequence_id());
  query.mutable_sequence()->set_generation(created.generation());
  *query.mutable_queries() = TestQueries(1);
  query.set_inline_(true);
  for (const uint64_t first : {0, 3500, 7000}) {
    const uint64_t count = first == 7000 ? 2000 : 3500;
    const grpc::Status inserted = client.Insert(query.sequence(), first, count);
    ASSERT_TRUE(inserted.ok()) << inserted.error_message();
    v1::QueryReply reply;
    const grpc::Status status = client.stub()->Query(client.Context().get(), query, &reply);
    if (first < 7000) {
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_GT(reply.ByteSizeLong(), (first + count) * 640) << "over 4 MiB the second time";
    } else {
      EXPECT_EQ(status.error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
      EXPECT_THAT(status.error_message(), HasSubstr("--message_bytes_max"));
    }
  }
}

}  // namespace
}  // namespace wavekv
