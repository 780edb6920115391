#include "gpu/resident/unit_segments.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "gpu/resident/number_ranges.h"

namespace wavekv::resident {
namespace {

using ::testing::HasSubstr;

TEST(NumberRangesTest, RangesAreWholeUnitsAndComeBack) {
  NumberRanges ranges(100, 16);
  EXPECT_EQ(ranges.free_count(), 96u);
  EXPECT_EQ(ranges.Take(17), 0u);
  EXPECT_EQ(ranges.Take(1), 32u);
  EXPECT_EQ(ranges.Take(49), std::nullopt);
  EXPECT_EQ(ranges.Take(48), 48u);
  EXPECT_EQ(ranges.Take(1), std::nullopt);
  ranges.GiveBack(0, 17);
  EXPECT_EQ(ranges.Take(32), 0u);
  EXPECT_EQ(ranges.Take(0), 0u) << "none are always there";
  ranges.GiveBack(0, 0);
  EXPECT_EQ(ranges.free_count(), 0u);
}

constexpr uint32_t kBlocks = 8;  // Of each segment.

UnitLayout SmallLayout() {
  UnitLayout layout = {};
  layout.segment_capacity = 4;
  layout.cluster_capacity = 64;
  layout.block_capacity = 4 * kBlocks;
  return layout;
}

// A segment of 16 clusters; `segments` knows whether somebody keeps it.
struct Owned {
  explicit Owned(uint64_t uid) {
    head->uid = uid;
    head->cluster_count = 16;
    head->first_block.assign(17, kBlocks);
  }
  ResidentSegment Segment() const { return {head.get(), head, 0, 0, 0}; }
  std::shared_ptr<SegmentHead> head = std::make_shared<SegmentHead>();
};

class UnitSegmentsTest : public ::testing::Test {
 protected:
  // Publishes a version of these; what left.
  std::vector<PlacedSegment> Publish(const std::vector<const Owned*>& owned) {
    std::vector<ResidentSegment> all;
    for (const Owned* one : owned) all.push_back(one->Segment());
    const auto version = segments_.Plan(all);
    EXPECT_TRUE(version.ok()) << version.status();
    last_ = *version;
    return segments_.Commit(*version);
  }
  uint32_t FirstBlock(size_t i) const { return last_.segments[i].numbers.first_block; }

  UnitSegments segments_{SmallLayout()};
  UnitSegments::Version last_;
  const Owned a_{1}, b_{2}, c_{3}, d_{4}, e_{5};
};

TEST_F(UnitSegmentsTest, NumbersStayFromVersionToVersion) {
  EXPECT_TRUE(Publish({&a_, &b_}).empty());
  EXPECT_EQ(last_.fresh, (std::vector<size_t>{0, 1}));
  const SegmentNumbers b = last_.segments[1].numbers;
  const auto gone = Publish({&b_, &c_});
  ASSERT_EQ(gone.size(), 1u);
  EXPECT_EQ(gone[0].segment.head->uid, 1u);
  EXPECT_EQ(last_.fresh, (std::vector<size_t>{1}));
  EXPECT_EQ(last_.segments[0].numbers.first_block, b.first_block);
  EXPECT_EQ(last_.segments[0].numbers.first_cluster, b.first_cluster);
  EXPECT_EQ(last_.segments[0].numbers.entry, b.entry);
}

TEST_F(UnitSegmentsTest, BlocksKnowTheirSegment) {
  (void)Publish({&a_, &b_});
  const uint32_t a = FirstBlock(0), b = FirstBlock(1);
  EXPECT_EQ(segments_.OwnerOf(a)->segment_uid, 1u);
  EXPECT_EQ(segments_.OwnerOf(b + kBlocks - 1)->segment_uid, 2u);
  EXPECT_EQ(segments_.OwnerOf(2 * kBlocks), std::nullopt);
  EXPECT_EQ(segments_.OwnerOf(~0u), std::nullopt);
  (void)Publish({&b_});
  EXPECT_FALSE(segments_.OwnerOf(a)->live) << "steps of the old version may ask for it";
  EXPECT_TRUE(segments_.OwnerOf(b)->live);
}

// The life of numbers that left: epoch, the log as of the next reading, no doubts.
TEST_F(UnitSegmentsTest, NumbersAreFreeWhenNoStepCanClaimForThem) {
  (void)Publish({&a_, &b_});
  const uint32_t a = FirstBlock(0);
  std::weak_ptr<const void> rows = a_.head;
  const long held = rows.use_count();
  (void)Publish({&b_});
  last_ = {};
  segments_.Read(/*started=*/5, /*completed=*/4, /*log_settled=*/10);
  segments_.Release(10, false);
  EXPECT_TRUE(segments_.OwnerOf(a).has_value()) << "step 5 goes on";
  segments_.Read(6, 5, 11);
  segments_.Release(11, false);
  EXPECT_TRUE(segments_.OwnerOf(a).has_value()) << "this reading may be torn";
  segments_.Read(6, 5, 12);
  segments_.Release(11, false);
  EXPECT_TRUE(segments_.OwnerOf(a).has_value()) << "the log was not read so far";
  segments_.Release(12, true);
  EXPECT_TRUE(segments_.OwnerOf(a).has_value()) << "a claim may have been lost";
  EXPECT_TRUE(segments_.waits());
  segments_.Release(12, false);
  EXPECT_FALSE(segments_.OwnerOf(a).has_value());
  EXPECT_FALSE(segments_.waits());
  EXPECT_LT(rows.use_count(), held) << "its rows are let go";
}

TEST_F(UnitSegmentsTest, WhatDoesNotFitTakesNothing) {
  (void)Publish({&a_, &b_});
  const uint32_t free_before = segments_.free_clusters();
  const std::vector<ResidentSegment> many = {a_.Segment(), b_.Segment(), c_.Segment(), d_.Segment(),
                                             e_.Segment()};
  const auto refused = segments_.Plan(many);
  EXPECT_TRUE(absl::IsResourceExhausted(refused.status()));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("max_tokens"));
  EXPECT_EQ(segments_.free_clusters(), free_before);
  const auto planned = segments_.Plan(std::span(many).first(4));
  ASSERT_TRUE(planned.ok()) << planned.status();
  EXPECT_EQ(segments_.free_clusters(), 0u);
  segments_.Abandon(*planned);
  EXPECT_EQ(segments_.free_clusters(), free_before);
}

}  // namespace
}  // namespace wavekv::resident
