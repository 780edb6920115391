// PlanIndex and GiveLabels of the SDK against a programmable daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/client/sequence_test.h"

namespace wavekv::client {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

class LabelCallsTest : public SequenceTest {
 protected:
  LabelCallsTest() : SequenceTest(uint64_t{1} << 20) {}
};

TEST_F(LabelCallsTest, APlanComesBackAsItIs) {
  daemon_.on_plan_index = [&](const v1::PlanIndexRequest& request, v1::PlanIndexReply* reply) {
    EXPECT_EQ(request.sequence().sequence_id(), sequence_->id());
    EXPECT_EQ(request.layer(), 1u);
    EXPECT_EQ(request.token_count(), 9000u);
    reply->set_generation(request.sequence().generation());
    v1::PlannedSegment* segment = reply->add_segments();
    segment->set_first_position(4);
    segment->set_token_count(8188);
    segment->set_cluster_count(512);
    return grpc::Status::OK;
  };
  const auto plan = sequence_->PlanIndex(1, 9000);
  ASSERT_TRUE(plan.ok()) << plan.status();
  ASSERT_EQ(plan->size(), 1u);
  EXPECT_EQ(plan->front().first_position, 4u);
  EXPECT_EQ(plan->front().token_count, 8188u);
  EXPECT_EQ(plan->front().cluster_count, 512u);
  EXPECT_TRUE(absl::IsInvalidArgument(sequence_->PlanIndex(2).status()));
}

TEST_F(LabelCallsTest, AMalformedPlanIsInternal) {
  struct Row {
    uint64_t first, tokens, clusters;
  };
  for (const Row& row : std::vector<Row>{{4, 0, 0},
                                         {4, 100, 0},
                                         {4, 100, 101},
                                         {(1 << 20) - 99, 100, 7},
                                         {~uint64_t{0}, 100, 7},
                                         {50, 100, 7}}) {  // Overlaps the one before it.
    daemon_.on_plan_index = [&](const v1::PlanIndexRequest& request, v1::PlanIndexReply* reply) {
      reply->set_generation(request.sequence().generation());
      for (const Row& sent : {Row{0, 60, 4}, row}) {
        v1::PlannedSegment* segment = reply->add_segments();
        segment->set_first_position(sent.first);
        segment->set_token_count(static_cast<uint32_t>(sent.tokens));
        segment->set_cluster_count(static_cast<uint32_t>(sent.clusters));
      }
      return grpc::Status::OK;
    };
    EXPECT_TRUE(absl::IsInternal(sequence_->PlanIndex(0).status())) << row.first;
  }
}

TEST_F(LabelCallsTest, LabelsGoInMessagesOfAMegabyteAndKeepTheirOrder) {
  std::vector<std::vector<uint64_t>> messages;
  uint64_t next = 0;
  daemon_.on_give_labels = [&](const v1::GiveLabelsRequest& request, v1::GiveLabelsReply* reply) {
    EXPECT_EQ(request.layer(), 1u);
    messages.emplace_back();
    for (const v1::SegmentLabels& segment : request.segments()) {
      messages.back().push_back(segment.first_position());
      EXPECT_EQ(segment.labels().size(), 4 * segment.token_count());
      EXPECT_EQ(segment.labels()[2], static_cast<char>(next++));
    }
    reply->set_generation(request.sequence().generation());
    reply->set_kept(static_cast<uint32_t>(request.segments_size()) - 1);
    return grpc::Status::OK;
  };
  std::vector<std::vector<uint16_t>> labels;
  std::vector<SegmentLabels> segments;
  for (const uint32_t tokens : {100000u, 100000u, 100000u, 250000u, 20000u}) {
    labels.emplace_back(2 * tokens, 0)[1] = static_cast<uint16_t>(segments.size());
    segments.push_back({100000 * segments.size(), tokens, labels.back()});
  }
  const auto kept = sequence_->GiveLabels(1, segments);
  ASSERT_TRUE(kept.ok()) << kept.status();
  // 4 bytes a token; the daemon takes messages of 1 MiB.
  EXPECT_THAT(messages, ElementsAre(ElementsAre(0, 100000), ElementsAre(200000),
                                    ElementsAre(300000), ElementsAre(400000)));
  EXPECT_EQ(*kept, 1u);
  EXPECT_EQ(sequence_->GiveLabels(1, {}).value(), 0u) << "nothing is sent";
  EXPECT_EQ(messages.size(), 4u);
}

TEST_F(LabelCallsTest, WhatCannotBeIsNotSent) {
  const std::vector<uint16_t> labels(2 * 100);
  bool sent = false;
  daemon_.on_give_labels = [&](const v1::GiveLabelsRequest&, v1::GiveLabelsReply*) {
    sent = true;
    return grpc::Status::OK;
  };
  for (const SegmentLabels& segment : std::vector<SegmentLabels>{
           {0, 0, {}}, {0, 99, labels}, {0, 100, std::span(labels).first(100)}}) {
    const auto refused = sequence_->GiveLabels(0, {&segment, 1});
    EXPECT_TRUE(absl::IsInvalidArgument(refused.status())) << refused.status();
  }
  const SegmentLabels good = {0, 100, labels};
  EXPECT_TRUE(absl::IsInvalidArgument(sequence_->GiveLabels(2, {&good, 1}).status()));
  EXPECT_FALSE(sent);
}

TEST_F(LabelCallsTest, WrongRepliesAreInternalAndOlderDaemonsAreNamed) {
  const std::vector<uint16_t> labels(2 * 100);
  const SegmentLabels one = {0, 100, labels};
  EXPECT_TRUE(absl::IsUnimplemented(sequence_->PlanIndex(0).status()));
  const auto older = sequence_->GiveLabels(0, {&one, 1});
  EXPECT_TRUE(absl::IsUnimplemented(older.status()));
  EXPECT_THAT(std::string(older.status().message()), HasSubstr("update wavekvd"));
  for (const bool generation : {true, false}) {
    daemon_.on_give_labels = [&](const v1::GiveLabelsRequest& request, v1::GiveLabelsReply* reply) {
      reply->set_generation(request.sequence().generation() + (generation ? 1 : 0));
      reply->set_kept(2);
      return grpc::Status::OK;
    };
    EXPECT_TRUE(absl::IsInternal(sequence_->GiveLabels(0, {&one, 1}).status()));
  }
}

}  // namespace
}  // namespace wavekv::client
