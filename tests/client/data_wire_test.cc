// The SDK's reading of replies that came over shared memory: whole values or Internal, whatever the
// bytes.
#include "client/data_wire.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>
#include <random>
#include <vector>

#include "proto/shm/replies.h"

namespace wavekv::client {
namespace {

using Bytes = std::vector<std::byte>;

ModelShape Shape() {
  return {.layer_count = 1,
          .query_head_count = 4,
          .kv_head_count = 2,
          .key_dim = 32,
          .value_dim = 48,
          .dtype = DType::kBF16,
          .softmax_scale = 1};
}

uint64_t FreshSeed() {
  const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
  const uint64_t seed =
      wanted == nullptr ? std::random_device()() : std::strtoull(wanted, nullptr, 10);
  std::cout << "WAVEKV_TEST_SEED=" << seed << std::endl;
  return seed;
}

shm::WireEstimateReply AddEstimation(shm::ReplyWriter* writer) {
  const std::vector<float> out(4 * 48, 1.5f);
  const std::vector<float> lse(4, -2.0f);
  return {.generation = 3,
          .version = 4,
          .out = writer->Add(out.data(), out.size()),
          .lse = writer->Add(lse.data(), lse.size()),
          .lse_lower = writer->Add(lse.data(), lse.size()),
          .lse_upper = writer->Add(lse.data(), lse.size()),
          .counters = {.steady_tokens = 9, .error_budget_capped = 7}};
}

Bytes EstimateReply() {
  Bytes bytes(8192);
  shm::ReplyWriter writer(bytes);
  const uint64_t at = writer.Reserve(sizeof(shm::WireEstimateReply));
  writer.Put(at, AddEstimation(&writer));
  bytes.resize(writer.used());
  return bytes;
}

// One result that stands, one that failed.
Bytes AttendReply() {
  Bytes bytes(8192);
  shm::ReplyWriter writer(bytes);
  writer.Reserve(sizeof(shm::WireAttendReply) + 2 * sizeof(shm::WireAttendResult));
  shm::WireAttendReply head;
  head.result_count = 2;
  writer.Put(0, head);
  const std::vector<float> out(4 * 48, 0.25f);
  const std::vector<float> lse(4, 1.0f);
  writer.Put(sizeof head, shm::WireAttendResult{.generation = 5,
                                                .version = 6,
                                                .token_count = 7,
                                                .out = writer.Add(out.data(), out.size()),
                                                .lse = writer.Add(lse.data(), lse.size()),
                                                .counters = {.retrieved_tokens = 8}});
  writer.Put(sizeof head + sizeof(shm::WireAttendResult),
             shm::WireAttendResult{.code = static_cast<uint64_t>(absl::StatusCode::kNotFound),
                                   .text = writer.AddText("no such sequence")});
  bytes.resize(writer.used());
  return bytes;
}

Bytes QueryReply() {
  Bytes bytes(32 << 10);
  shm::ReplyWriter writer(bytes);
  writer.Reserve(sizeof(shm::WireQueryReply) + 2 * sizeof(shm::WireHeadZones));
  shm::WireQueryReply reply{
      .generation = 1, .version = 2, .token_count = 3, .step = 4, .head_count = 2};
  reply.estimation = AddEstimation(&writer);
  writer.Put(0, reply);
  for (uint64_t head = 0; head < 2; ++head) {
    const shm::WireCluster cluster{.segment_idx = 1, .cluster_idx = 2, .size = 3};
    const std::vector<uint64_t> positions = {0, 1, 2, 3, 4};
    const Bytes keys(5 * 64);
    const Bytes values(5 * 96);
    writer.Put(
        sizeof reply + head * sizeof(shm::WireHeadZones),
        shm::WireHeadZones{.kv_head = head,
                           .steady_tokens = 2,
                           .retrieved = writer.Add(&cluster, 1),
                           .inline_keys = writer.Add(keys.data(), keys.size()),
                           .inline_values = writer.Add(values.data(), values.size()),
                           .inline_positions = writer.Add(positions.data(), positions.size())});
  }
  bytes.resize(writer.used());
  return bytes;
}

std::vector<absl::StatusOr<Attention>> ReadAttend(const Bytes& bytes, absl::Status* whole) {
  const ModelShape shape = Shape();
  std::vector<absl::StatusOr<Attention>> results;
  *whole = ReadAttendReply(
      bytes, 2, [&shape](size_t) -> const ModelShape& { return shape; },
      [&results](size_t i, absl::StatusOr<Attention> result) {
        EXPECT_EQ(i, results.size());
        results.push_back(std::move(result));
      });
  return results;
}

TEST(DataWireTest, AttendComesBack) {
  absl::Status whole;
  const auto results = ReadAttend(AttendReply(), &whole);
  ASSERT_TRUE(whole.ok()) << whole;
  ASSERT_EQ(results.size(), 2u);
  ASSERT_TRUE(results[0].ok()) << results[0].status();
  EXPECT_EQ(results[0]->out, std::vector<float>(4 * 48, 0.25f));
  EXPECT_EQ(results[0]->lse, std::vector<float>(4, 1.0f));
  EXPECT_EQ(results[0]->generation, 5u);
  EXPECT_EQ(results[0]->token_count, 7u);
  EXPECT_EQ(results[0]->counters.retrieved_tokens, 8u);
  EXPECT_EQ(results[1].status(), absl::NotFoundError("no such sequence"));
}

TEST(DataWireTest, EstimateAndQueryComeBack) {
  const auto estimation = ReadEstimateReply(EstimateReply(), Shape());
  ASSERT_TRUE(estimation.ok()) << estimation.status();
  EXPECT_EQ(estimation->out, std::vector<float>(4 * 48, 1.5f));
  EXPECT_EQ(estimation->counters.error_budget_capped, 7u);
  const auto query = ReadQueryReply(QueryReply(), Shape());
  ASSERT_TRUE(query.ok()) << query.status();
  ASSERT_EQ(query->heads.size(), 2u);
  EXPECT_EQ(query->heads[1].retrieved[0].size, 3u);
  EXPECT_EQ(query->heads[1].inline_positions, (std::vector<uint64_t>{0, 1, 2, 3, 4}));
  EXPECT_EQ(query->heads[1].inline_values.size(), 5u * 96);
  EXPECT_EQ(query->step, 4u);
}

// A reply of another shape never comes back as data.
TEST(DataWireTest, AnotherShapeIsInternal) {
  ModelShape wider = Shape();
  wider.value_dim = 64;
  EXPECT_EQ(ReadEstimateReply(EstimateReply(), wider).status().code(), absl::StatusCode::kInternal);
  ModelShape more_heads = Shape();
  more_heads.kv_head_count = 4;
  EXPECT_EQ(ReadQueryReply(QueryReply(), more_heads).status().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(ReadInsertReply(Bytes(8)).status().code(), absl::StatusCode::kInternal);
}

// Damaged in a few bytes, or cut: a value of the right size, or an error. The sanitizers watch.
TEST(DataWireTest, DamagedRepliesAreRefusedOrWhole) {
  std::mt19937_64 random(FreshSeed());
  const Bytes good[] = {AttendReply(), EstimateReply(), QueryReply()};
  for (int i = 0; i < 30'000; ++i) {
    const size_t which = random() % 3;
    Bytes bytes = good[which];
    for (uint64_t change = 0; change <= random() % 4; ++change) {
      bytes[random() % std::min<size_t>(bytes.size(), 800)] = static_cast<std::byte>(random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    if (which == 0) {
      absl::Status whole;
      for (const auto& result : ReadAttend(bytes, &whole)) {
        if (result.ok()) {
          ASSERT_EQ(result->out.size(), 4u * 48);
        }
      }
    } else if (which == 1) {
      const auto estimation = ReadEstimateReply(bytes, Shape());
      if (estimation.ok()) {
        ASSERT_EQ(estimation->lse_upper.size(), 4u);
      } else {
        ASSERT_EQ(estimation.status().code(), absl::StatusCode::kInternal);
      }
    } else {
      const auto query = ReadQueryReply(bytes, Shape());
      if (query.ok()) {
        ASSERT_EQ(query->heads.size(), 2u);
      } else {
        ASSERT_EQ(query.status().code(), absl::StatusCode::kInternal);
      }
    }
  }
}

}  // namespace
}  // namespace wavekv::client
