#include "gpu/resident/index_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "gpu/resident/resident_plan.h"
#include "tests/gpu/resident/test_sequence.h"

namespace wavekv::resident {
namespace {

class IndexCopyTest : public ::testing::TestWithParam<uint32_t> {
 protected:
  IndexCopyTest() {
    tokens_.Append(700);
    tokens_.Cluster(0, 650);
    view_ = tokens_.View(0, 10);
  }
  const ResidentSegment& segment() const { return view_.heads[0][0]; }
  SegmentNumbers Numbers() const {
    const SegmentHead& head = *segment().head;
    return {3, 48, (head.cluster_count + 15) / 16 * 16, 1000, head.first_block.back()};
  }

  TestSequence tokens_{SmallShape(GetParam(), DType::kBF16, 1), GetParam()};
  ResidentLayer view_;
};

INSTANTIATE_TEST_SUITE_P(Dims, IndexCopyTest, ::testing::Values(64u, 128u, 256u));

// The very numbers of the index: nothing is rounded on the way.
TEST_P(IndexCopyTest, StoredMeansAreTheSame) {
  const SegmentHead& head = *segment().head;
  const IndexCopy copy(segment(), Numbers());
  const uint32_t dim = GetParam();
  ASSERT_GT(head.cluster_count, 16u);
  ASSERT_EQ(copy.centroids.size(), size_t{Numbers().cluster_count} * dim);
  for (uint32_t c = 0; c < head.cluster_count; ++c) {
    const std::vector<double> centroid = StoredCentroid(head, c), value = StoredValueMean(head, c);
    for (uint32_t d = 0; d < dim; ++d) {
      const size_t at = size_t{c} * dim + d;
      ASSERT_EQ(copy.means[d] + double{copy.centroid_scales[c]} * copy.centroids[at], centroid[d]);
      ASSERT_EQ(copy.means[dim + d] + double{copy.value_scales[c]} * copy.value_means[at],
                value[d]);
    }
    ASSERT_EQ(copy.key_spreads[c], head.key_spreads[c]);
    ASSERT_EQ(copy.value_spreads[c], head.value_spreads[c]);
    ASSERT_EQ(copy.first_row[c], head.first_row[c]);
    ASSERT_EQ(copy.first_block[c], 1000 + head.first_block[c]);
  }
  EXPECT_TRUE(std::equal(head.spread_shares.begin(), head.spread_shares.end(),
                         copy.means.begin() + 2 * dim));
  EXPECT_EQ(copy.entry.window, segment().window);
  EXPECT_EQ(copy.entry.token_count, 650u);
}

TEST_P(IndexCopyTest, PaddingIsFiniteAndNamesItsSegment) {
  const IndexCopy copy(segment(), Numbers());
  for (uint32_t c = 0; c < Numbers().cluster_count; ++c) {
    EXPECT_EQ(copy.cluster_segment[c], 3u);
    EXPECT_TRUE(std::isfinite(copy.centroid_scales[c]) && std::isfinite(copy.value_scales[c]) &&
                std::isfinite(copy.key_spreads[c]) && std::isfinite(copy.value_spreads[c]));
  }
  EXPECT_TRUE(std::all_of(copy.block_slots.begin(), copy.block_slots.end(),
                          [](int32_t slot) { return slot == -1; }));
}

// Every byte of the segment's numbers is written, once, and no byte of anybody else's.
TEST_P(IndexCopyTest, CopiesGoToTheirNumbersAlone) {
  const UnitLayout layout = PlanResident(tokens_.shape(), 4096, {}).value().unit;
  const IndexCopy copy(segment(), Numbers());
  std::vector<ByteCopy> copies;
  constexpr uint64_t kUnit = 8192;
  copy.AppendCopies(layout, kUnit, &copies);
  std::vector<int> written(kUnit + layout.unit_bytes);
  for (const ByteCopy& piece : copies) {
    ASSERT_LE(piece.offset + piece.bytes, written.size());
    for (uint64_t i = 0; i < piece.bytes; ++i) ++written[piece.offset + i];
  }
  const uint64_t clusters = Numbers().cluster_count, blocks = Numbers().block_count;
  const uint64_t dim = GetParam();
  struct Range {
    uint64_t array, first, count, bytes;
  };
  const Range ranges[] = {
      {layout.segments_offset, 3, 1, sizeof(SegmentEntry)},
      {layout.means_offset, 3, 1, 3 * dim * 4},
      {layout.centroids_offset, 48, clusters, dim},
      {layout.value_means_offset, 48, clusters, dim},
      {layout.centroid_scales_offset, 48, clusters, 4},
      {layout.value_scales_offset, 48, clusters, 4},
      {layout.key_spreads_offset, 48, clusters, 4},
      {layout.value_spreads_offset, 48, clusters, 4},
      {layout.cluster_segment_offset, 48, clusters, 2},
      {layout.first_row_offset, 48, clusters, 4},
      {layout.first_block_offset, 48, clusters, 4},
      {layout.block_slots_offset, 1000, blocks, 4},
  };
  for (const Range& range : ranges) {
    const uint64_t begin = kUnit + range.array + range.first * range.bytes;
    for (uint64_t i = 0; i < range.count * range.bytes; ++i) --written[begin + i];
  }
  EXPECT_TRUE(std::all_of(written.begin(), written.end(), [](int count) { return count == 0; }));
}

}  // namespace
}  // namespace wavekv::resident
