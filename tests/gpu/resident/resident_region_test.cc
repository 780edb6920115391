// The manager of a resident region against an engine whose steps are written in C++.
#include "gpu/resident/resident_region.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "tests/gpu/resident/region_harness.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {
namespace {

using ::testing::HasSubstr;

constexpr uint32_t kAllClusters = 100'000;

ResidentOptions SmallOptions(double cache_ratio = 0.1, uint32_t ring_rows = 256) {
  ResidentOptions options;
  options.cache_ratio = cache_ratio;
  options.ring_rows = ring_rows;
  return options;
}

// Loads all layers of `tokens`.
void LoadAll(TestSequence* tokens, ResidentSequence* manager, uint32_t retrieve_count) {
  for (uint32_t layer = 0; layer < tokens->shape().layer_count; ++layer) {
    const absl::Status status = manager->Load(layer, tokens->View(layer, retrieve_count));
    ASSERT_TRUE(status.ok()) << status;
  }
}

TEST(ResidentRegionTest, AllClustersRetrievedIsExactAttention) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const uint32_t dim : {64u, 128u, 256u}) {
      SCOPED_TRACE(testing::Message() << DTypeName(dtype) << " " << dim);
      TestSequence tokens(SmallShape(dim, dtype), dim);
      tokens.Append(1300);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        tokens.Cluster(layer, 700);
        tokens.Cluster(layer, 400);
      }
      RegionHarness harness(tokens.shape(), 2048, SmallOptions());
      LoadAll(&tokens, &harness.manager(), kAllClusters);
      ReferenceStep engine = harness.Engine(tokens);
      for (int step = 0; step < 3; ++step) {
        const uint32_t layer = step % 2;
        const std::vector<float> queries = tokens.Queries();
        const StepResult result = engine.Run(layer, queries);
        EXPECT_EQ(tokens.Check(layer, harness.region(), queries, result), "");
        EXPECT_EQ(tokens.CheckExact(layer, queries, result, tokens.token_count()), "");
        ASSERT_TRUE(harness.manager().Poll().ok());
      }
      EXPECT_EQ(harness.manager().counters().violations, 0u);
    }
  }
}

TEST(ResidentRegionTest, MissedBlocksAreHitsInTheNextStep) {
  TestSequence tokens(SmallShape(), 1);
  tokens.Append(2200);
  for (uint32_t layer = 0; layer < 2; ++layer) tokens.Cluster(layer, 2000);
  RegionHarness harness(tokens.shape(), 4096, SmallOptions(0.5));
  LoadAll(&tokens, &harness.manager(), 12);
  ReferenceStep engine = harness.Engine(tokens);
  const std::vector<float> queries = tokens.Queries();
  const StepResult cold = engine.Run(0, queries);
  EXPECT_EQ(tokens.Check(0, harness.region(), queries, cold), "");
  const StepResult warm = engine.Run(0, queries);
  EXPECT_EQ(tokens.Check(0, harness.region(), queries, warm), "");
  uint64_t blocks = 0;
  for (uint32_t head = 0; head < 2; ++head) {
    EXPECT_EQ(cold.heads[head].hits(), 0u);
    EXPECT_EQ(warm.heads[head].hits(), warm.heads[head].blocks.size());
    EXPECT_EQ(warm.heads[head].retrieved.size(), 12u);
    blocks += warm.heads[head].blocks.size();
  }
  ASSERT_TRUE(harness.manager().Poll().ok());
  const ResidentCounters counters = harness.manager().counters();
  EXPECT_EQ(counters.hit_blocks, blocks);
  EXPECT_EQ(counters.miss_blocks, blocks);
  EXPECT_EQ(counters.violations, 0u);
  EXPECT_EQ(counters.log_losses, 0u);
}

}  // namespace
}  // namespace wavekv::resident
