// What a batch is made for, and what it refuses, without a device.
#include "client/gpu/resident_shape.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "client/gpu/token_ledger.h"
#include "gpu/resident/resident_plan.h"

namespace wavekv::client {
namespace {

using ::testing::HasSubstr;

ResidentModel Model() {
  return {.layer_count = 32,
          .kv_head_count = 8,
          .group_size = 4,
          .head_dim = 128,
          .softmax_scale = 0.125f,
          .batch = 2,
          .max_tokens = 131'072};
}

TEST(CompleteModelTest, CapacitiesFollowFromTheLength) {
  for (const uint64_t tokens : {1ull, 1000ull, 131'072ull, 1'048'576ull}) {
    ResidentModel model = Model();
    model.max_tokens = tokens;
    const auto complete = CompleteModel(model);
    ASSERT_TRUE(complete.ok()) << complete.status();
    EXPECT_GE(complete->cluster_capacity, tokens / 10);
    EXPECT_EQ(complete->cluster_capacity % gpu::kClusterPad, 0u);
    EXPECT_GE(complete->segment_capacity, tokens / 8192 + 1);
    // The default budget: 0.5 % of 16-token clusters, and 112 sketched ones.
    EXPECT_GE(complete->retrieve_capacity, tokens / 16 / 200 + 112);
  }
}

// Batch and daemon plan alike: what the one makes for a length takes the region that the other
// makes for it.
TEST(CompleteModelTest, CapacitiesTakeTheDaemonsRegions) {
  for (uint64_t tokens = 1; tokens < 3'000'000; tokens += 1 + tokens / 3) {
    ResidentModel model = Model();
    model.max_tokens = tokens;
    const auto complete = CompleteModel(model);
    ASSERT_TRUE(complete.ok()) << complete.status();
    const ModelShape shape = {.layer_count = model.layer_count,
                              .query_head_count = model.kv_head_count * model.group_size,
                              .kv_head_count = model.kv_head_count,
                              .key_dim = model.head_dim,
                              .value_dim = model.head_dim,
                              .dtype = model.dtype,
                              .softmax_scale = model.softmax_scale};
    auto header = resident::PlanResident(shape, tokens, {});
    ASSERT_TRUE(header.ok()) << header.status();
    header->sequence_id = 9;
    ResidentAttachment attachment;
    attachment.sequence = SequenceId(9);
    attachment.region_bytes = header->region_bytes;
    const absl::Status fits = CheckRegion(*complete, attachment, *header);
    ASSERT_TRUE(fits.ok()) << tokens << ": " << fits;
  }
}

TEST(CompleteModelTest, GivenCapacitiesStay) {
  ResidentModel model = Model();
  model.cluster_capacity = 160;
  model.segment_capacity = 3;
  model.retrieve_capacity = 7;
  const auto complete = CompleteModel(model);
  ASSERT_TRUE(complete.ok()) << complete.status();
  EXPECT_EQ(complete->cluster_capacity, 160u);
  EXPECT_EQ(complete->segment_capacity, 3u);
  EXPECT_EQ(complete->retrieve_capacity, 7u);
}

TEST(CompleteModelTest, NamesWhatCannotBe) {
  struct Row {
    const char* field;
    void (*change)(ResidentModel*);
  };
  const std::vector<Row> rows = {
      {"layer_count", [](ResidentModel* m) { m->layer_count = 0; }},
      {"layer_count", [](ResidentModel* m) { m->layer_count = 1025; }},
      {"kv_head_count", [](ResidentModel* m) { m->kv_head_count = 0; }},
      {"dtype", [](ResidentModel* m) { m->dtype = DType::kF32; }},
      {"max_tokens", [](ResidentModel* m) { m->max_tokens = 0; }},
      {"max_tokens", [](ResidentModel* m) { m->max_tokens = uint64_t{1} << 40; }},
      {"softmax_scale", [](ResidentModel* m) { m->softmax_scale = 0; }},
      {"segment_capacity", [](ResidentModel* m) { m->segment_capacity = 70'000; }},
  };
  for (const Row& row : rows) {
    ResidentModel model = Model();
    row.change(&model);
    const absl::Status status = CompleteModel(model).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.field;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(std::string("ResidentModel::") + row.field));
  }
}

TEST(CheckAttachmentTest, NamesWhatDiffers) {
  const ResidentModel model = CompleteModel(Model()).value();
  ResidentAttachment attachment;
  attachment.sequence = SequenceId(17);
  const ModelShape good = {.layer_count = 32,
                           .query_head_count = 32,
                           .kv_head_count = 8,
                           .key_dim = 128,
                           .value_dim = 128,
                           .dtype = DType::kBF16,
                           .softmax_scale = 0.125f};
  attachment.shape = good;
  EXPECT_TRUE(CheckAttachment(model, attachment).ok());
  struct Row {
    const char* field;
    void (*change)(ModelShape*);
  };
  const std::vector<Row> rows = {
      {"layer_count 31", [](ModelShape* s) { s->layer_count = 31; }},
      {"kv_head_count 4", [](ModelShape* s) { s->kv_head_count = 4; }},
      {"query_head_count 64", [](ModelShape* s) { s->query_head_count = 64; }},
      {"key_dim 64", [](ModelShape* s) { s->key_dim = 64; }},
      {"value_dim 64", [](ModelShape* s) { s->value_dim = 64; }},
      {"dtype f16", [](ModelShape* s) { s->dtype = DType::kF16; }},
      {"softmax_scale 1", [](ModelShape* s) { s->softmax_scale = 1; }},
  };
  for (const Row& row : rows) {
    attachment.shape = good;
    row.change(&attachment.shape);
    const absl::Status status = CheckAttachment(model, attachment);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.field;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr("sequence 17"), HasSubstr(row.field)));
  }
}

// A step appends position p while p minus the block that the ring begins with is below its rows:
// what the kernel checks.
TEST(TokenLedgerTest, GrantsWhatTheKernelTakes) {
  for (uint64_t steady_first = 0; steady_first < 40; ++steady_first) {
    constexpr uint32_t kRing = 16;
    TokenLedger ledger(steady_first + 3, steady_first, kRing, 1000);
    const uint64_t oldest = steady_first / gpu::kBlockRows * gpu::kBlockRows;
    while (ledger.Room() > 0) {
      ASSERT_LT(ledger.tokens() - oldest, kRing);
      const uint64_t room = ledger.Room();
      ledger.Submit();
      ASSERT_EQ(ledger.Room(), room - 1);
    }
    EXPECT_EQ(ledger.tokens() - oldest, kRing);
    ledger.NoteCovered(steady_first + gpu::kBlockRows);
    EXPECT_EQ(ledger.Room(), gpu::kBlockRows);
    ledger.NoteCovered(steady_first);  // Late news.
    EXPECT_EQ(ledger.Room(), gpu::kBlockRows);
    ledger.Reset(10, 4);
    EXPECT_EQ(ledger.tokens(), 10u);
    EXPECT_EQ(TokenLedger(40, 36, kRing, 43).Room(), 3u);  // What the daemon stores at most.
    EXPECT_EQ(TokenLedger(43, 36, kRing, 43).Room(), 0u);
    EXPECT_EQ(ledger.Room(), kRing - 10u);
  }
}

}  // namespace
}  // namespace wavekv::client
