// Attaching a sequence over gRPC: tickets for the block pool's windows, state, and refusals.
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/shared_memory.h"
#include "tests/engine/fake_stager.h"
#include "tests/server/test_server.h"

namespace wavekv {
namespace {

using ::testing::AnyOf;
using testing::FakeBuffer;
using testing::FakeRegion;
using ::testing::HasSubstr;

constexpr std::chrono::seconds kFetch(20);
constexpr uint64_t kInserted = 1400;

class ResidentServiceTest : public ::testing::Test {
 protected:
  static TestServerOptions WithStager(const std::shared_ptr<FakeBuffer>& buffer) {
    TestServerOptions options;
    options.stager = [buffer] { return testing::CreateFakeStager(buffer); };
    return options;
  }

  v1::SequenceRef Filled(TestClient* client) {
    const v1::SequenceRef sequence = client->Create(4000);
    EXPECT_TRUE(client->Insert(sequence, 0, kInserted).ok());
    EXPECT_TRUE(client->Build(sequence).ok());
    return sequence;
  }
  grpc::Status Attach(TestClient* client, const v1::SequenceRef& sequence,
                      v1::AttachResidentReply* reply, double cache_ratio = 0,
                      uint32_t ring_rows = 0) {
    v1::AttachResidentRequest request;
    *request.mutable_sequence() = sequence;
    request.set_cache_ratio(cache_ratio);
    request.set_ring_rows(ring_rows);
    return client->stub()->AttachResident(client->Context().get(), request, reply);
  }
  // Asks until `wanted` says yes of the reply, with a bound.
  template <class Wanted>
  v1::ResidentStatusReply WaitFor(TestClient* client, const v1::SequenceRef& sequence,
                                  Wanted wanted) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    v1::ResidentStatusReply reply;
    do {
      v1::ResidentStatusRequest request;
      *request.mutable_sequence() = sequence;
      request.set_steady_first_above(std::numeric_limits<uint64_t>::max());
      request.set_wait_ms(5);
      const grpc::Status status =
          client->stub()->ResidentStatus(client->Context().get(), request, &reply);
      EXPECT_TRUE(status.ok()) << status.error_message();
      if (!status.ok() || wanted(reply)) return reply;
    } while (std::chrono::steady_clock::now() < deadline);
    ADD_FAILURE() << "gave up waiting: " << reply.ShortDebugString();
    return reply;
  }
  // A step appends a token to every layer.
  void Step(FakeRegion* region, uint64_t position) {
    for (uint32_t layer = 0; layer < 2; ++layer) {
      std::vector<float> keys;
      std::vector<float> values;
      for (uint32_t head = 0; head < 2; ++head) {
        const std::vector<float> key = TestKey(layer, position, head);
        const std::vector<float> value = TestValue(layer, position, head);
        keys.insert(keys.end(), key.begin(), key.end());
        values.insert(values.end(), value.begin(), value.end());
      }
      const auto bytes = [](const std::vector<float>& floats) {
        const auto all = std::as_bytes(std::span(floats));
        return std::vector<std::byte>(all.begin(), all.end());
      };
      region->Append(layer, bytes(keys), bytes(values));
    }
  }

  const std::shared_ptr<FakeBuffer> buffer_ = std::make_shared<FakeBuffer>();
};

TEST_F(ResidentServiceTest, AttachStepAndDetach) {
  TestServer server(WithStager(buffer_));
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = Filled(&client);
  v1::AttachResidentReply attached;
  const grpc::Status status = Attach(&client, sequence, &attached);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(attached.generation(), sequence.generation());
  EXPECT_EQ(attached.token_count(), kInserted);
  EXPECT_EQ(attached.ring_rows(), 2304u);
  EXPECT_EQ(attached.max_tokens(), 4000u);
  EXPECT_EQ(attached.region_offset(), 4096u);
  EXPECT_FALSE(attached.wave_buffer().ticket().empty());
  ASSERT_EQ(attached.windows_size(), 1);

  const v1::PoolWindow& window = attached.windows(0);
  const auto fd = FetchDescriptor(attached.window_socket(), window.ticket(), kFetch);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_TRUE(CheckSizeSealed(fd->get()).ok());
  EXPECT_FALSE(Mapping::Map(fd->get(), window.bytes(), Mapping::kReadWrite).ok());
  const auto mapped = Mapping::Map(fd->get(), window.bytes(), Mapping::kReadOnly);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  const std::shared_ptr<FakeRegion> region = buffer_->resident(SequenceId(sequence.sequence_id()));
  const ResidentSegment shown = region->layer(0).shown.heads[1].front();
  const std::vector<float> key =
      TestKey(0, shown.head->first_position + shown.head->row_to_offset[0], 1);
  EXPECT_EQ(0, std::memcmp(mapped->data() + shown.keys_offset, key.data(), 4 * key.size()));
  EXPECT_EQ(FetchDescriptor(attached.window_socket(), window.ticket(), kFetch).status().code(),
            absl::StatusCode::kNotFound)
      << "a ticket is good once";

  for (uint64_t position = kInserted; position < kInserted + 20; ++position) {
    Step(region.get(), position);
  }
  const v1::ResidentStatusReply state = WaitFor(
      &client, sequence, [](const auto& reply) { return reply.token_count() == kInserted + 20; });
  EXPECT_EQ(state.error_code(), 0u);
  EXPECT_GT(state.steady_first(), 0u);
  v1::GetStatsReply stats;
  ASSERT_TRUE(client.stub()->GetStats(client.Context().get(), {}, &stats).ok());
  EXPECT_EQ(stats.resident_sequences(), 1u);
  v1::AttachResidentReply second;
  EXPECT_EQ(Attach(&client, sequence, &second).error_code(), grpc::StatusCode::ABORTED);

  Step(region.get(), kInserted + 20);
  v1::DetachResidentRequest detach;
  *detach.mutable_sequence() = sequence;
  v1::DetachResidentReply detached;
  ASSERT_TRUE(client.stub()->DetachResident(client.Context().get(), detach, &detached).ok());
  EXPECT_EQ(detached.token_count(), kInserted + 21);
  EXPECT_EQ(client.stub()->DetachResident(client.Context().get(), detach, &detached).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  v1::ResidentStatusRequest ask;
  *ask.mutable_sequence() = sequence;
  v1::ResidentStatusReply after;
  ASSERT_TRUE(client.stub()->ResidentStatus(client.Context().get(), ask, &after).ok());
  EXPECT_EQ(after.error_code(), static_cast<uint32_t>(grpc::StatusCode::CANCELLED));
  EXPECT_THAT(after.error_message(), HasSubstr("detached"));
  EXPECT_EQ(region->complaints(), "");
}

TEST_F(ResidentServiceTest, TicketsOfAnAttachmentThatEndedAreWorthNothing) {
  TestServer server(WithStager(buffer_));
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = Filled(&client);
  v1::AttachResidentReply lost;
  ASSERT_TRUE(Attach(&client, sequence, &lost).ok());
  v1::AttachResidentReply attached;
  ASSERT_TRUE(Attach(&client, sequence, &attached).ok()) << "nobody came for the first";
  // Forgotten, or of an attachment that a round still had in hand when the next was made.
  EXPECT_THAT(
      FetchDescriptor(lost.window_socket(), lost.windows(0).ticket(), kFetch).status().code(),
      AnyOf(absl::StatusCode::kNotFound, absl::StatusCode::kFailedPrecondition));
  EXPECT_TRUE(FetchDescriptor(attached.window_socket(), attached.windows(0).ticket(), kFetch).ok());
  EXPECT_EQ(FetchDescriptor(attached.window_socket(), std::string(16, 'x'), kFetch).status().code(),
            absl::StatusCode::kNotFound);
}

struct Refusal {
  const char* what;
  double cache_ratio;
  uint32_t ring_rows;
  const char* text;
};

TEST_F(ResidentServiceTest, RefusedByName) {
  TestServer server(WithStager(buffer_));
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  const v1::SequenceRef sequence = Filled(&client);
  const Refusal rows[] = {
      {"no number", std::nan(""), 0, "cache_ratio"},
      {"more than all", 1.5, 0, "cache_ratio is 1.5"},
      {"less than nothing", -0.1, 0, "cache_ratio is -0.1"},
      {"a ring that is too small", 0, 1024, "ring_rows is 1024"},
  };
  for (const Refusal& row : rows) {
    SCOPED_TRACE(row.what);
    v1::AttachResidentReply reply;
    const grpc::Status status = Attach(&client, sequence, &reply, row.cache_ratio, row.ring_rows);
    EXPECT_EQ(status.error_code(), grpc::StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr(row.text));
  }
}

TEST_F(ResidentServiceTest, ADaemonWithoutAWaveBufferSaysSo) {
  TestServer server;
  TestClient client(server.address());
  ASSERT_TRUE(client.Attach().ok());
  v1::AttachResidentReply reply;
  const grpc::Status status = Attach(&client, client.Create(100), &reply);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("--wave_buffer"));
}

}  // namespace
}  // namespace wavekv
