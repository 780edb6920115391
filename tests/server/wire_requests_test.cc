// What arrives from outside is judged before the engine sees it.

#include "daemon/server/wire_requests.h"

#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/rpc/tensor_wire.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

v1::CreateSequenceRequest ValidCreate() {
  v1::CreateSequenceRequest request;
  v1::ModelShape* shape = request.mutable_shape();
  shape->set_layer_count(2);
  shape->set_query_head_count(4);
  shape->set_kv_head_count(2);
  shape->set_key_dim(64);
  shape->set_value_dim(32);
  shape->set_dtype(v1::DTYPE_F16);
  shape->set_softmax_scale(0.125f);
  request.set_max_tokens(4096);
  return request;
}

struct CreateRow {
  std::string error;  // Names the field; empty: fine.
  std::function<void(v1::CreateSequenceRequest*)> change;
};

TEST(ParseSequenceSpecTest, RefusesByName) {
  using Request = v1::CreateSequenceRequest;
  const std::vector<CreateRow> rows = {
      {"", [](Request*) {}},
      {"shape", [](Request* r) { r->clear_shape(); }},
      {"logit_soft_cap is 30", [](Request* r) { r->mutable_shape()->set_logit_soft_cap(30); }},
      {"logit_soft_cap", [](Request* r) { r->mutable_shape()->set_logit_soft_cap(NAN); }},
      {"sliding_window is 4096", [](Request* r) { r->mutable_shape()->set_sliding_window(4096); }},
      {"dtype is 0", [](Request* r) { r->mutable_shape()->clear_dtype(); }},
      {"dtype is 9", [](Request* r) { r->mutable_shape()->set_dtype(static_cast<v1::DType>(9)); }},
      {"layer_count is 0", [](Request* r) { r->mutable_shape()->set_layer_count(0); }},
      {"layer_count", [](Request* r) { r->mutable_shape()->set_layer_count(1u << 31); }},
      // -2 on a signed client.
      {"query_head_count", [](Request* r) { r->mutable_shape()->set_query_head_count(~1u); }},
      {"query_head_count", [](Request* r) { r->mutable_shape()->set_query_head_count(3); }},
      {"key_dim is 16", [](Request* r) { r->mutable_shape()->set_key_dim(16); }},
      {"softmax_scale", [](Request* r) { r->mutable_shape()->set_softmax_scale(0); }},
      {"softmax_scale", [](Request* r) { r->mutable_shape()->set_softmax_scale(NAN); }},
      {"model_id", [](Request* r) { r->mutable_shape()->set_model_id(std::string(257, 'm')); }},
      {"label has 129", [](Request* r) { r->set_label(std::string(129, 'l')); }},
      {"", [](Request* r) { r->set_label(std::string(128, 'l')); }},
      {"index.budget has no kind", [](Request* r) { r->mutable_index()->mutable_budget(); }},
      {"layer_budgets[layer 7] has no budget",
       [](Request* r) { r->mutable_index()->add_layer_budgets()->set_layer(7); }},
      {"layer_budgets has 1025",
       [](Request* r) {
         for (int i = 0; i < 1025; ++i) r->mutable_index()->add_layer_budgets();
       }},
      {"dense_layers has 1025",
       [](Request* r) {
         for (int i = 0; i < 1025; ++i) r->mutable_index()->add_dense_layers(0);
       }},
  };
  for (const CreateRow& row : rows) {
    Request request = ValidCreate();
    row.change(&request);
    const absl::Status status = ParseSequenceSpec(request).status();
    if (row.error.empty()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.error;
      EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
    }
  }
}

TEST(ParseSequenceSpecTest, ZeroMeansTheDefaultAndTheRestIsTaken) {
  v1::CreateSequenceRequest request = ValidCreate();
  request.mutable_heads()->set_first_kv_head(2);
  request.mutable_heads()->set_total_kv_head_count(8);
  request.mutable_index()->set_tokens_per_cluster(32);
  v1::LayerBudget* layer = request.mutable_index()->add_layer_budgets();
  layer->set_layer(1);
  layer->mutable_budget()->set_coverage(0.9);
  layer->mutable_budget()->set_clusters_max(50);
  layer->mutable_budget()->set_estimate_ratio(0);
  request.mutable_index()->add_dense_layers(0);
  request.set_attach_wave_buffer(true);
  const absl::StatusOr<SequenceSpec> spec = ParseSequenceSpec(request);
  ASSERT_TRUE(spec.ok()) << spec.status();
  EXPECT_EQ(spec->shape.dtype, DType::kF16);
  EXPECT_EQ(spec->shape.value_dim, 32u);
  EXPECT_EQ(spec->first_kv_head, 2u);
  EXPECT_EQ(spec->total_kv_head_count, 8u);
  EXPECT_EQ(spec->index.segment_tokens, 8192u);
  EXPECT_EQ(spec->index.tokens_per_cluster, 32u);
  EXPECT_EQ(spec->index.budget.kind, BudgetKind::kRatio);
  EXPECT_EQ(spec->index.budget.value, kDefaultRetrievalRatio);
  ASSERT_EQ(spec->index.layer_budgets.size(), 1u);
  EXPECT_EQ(spec->index.layer_budgets[0].first, 1u);
  EXPECT_EQ(spec->index.layer_budgets[0].second.kind, BudgetKind::kCoverage);
  EXPECT_EQ(spec->index.layer_budgets[0].second.clusters_max, 50u);
  EXPECT_EQ(spec->index.layer_budgets[0].second.estimate_ratio, 0.0);
  EXPECT_EQ(spec->index.dense_layers, std::vector<uint32_t>{0});
  EXPECT_TRUE(spec->attach_wave_buffer);
}

TEST(ParseBudgetTest, KeepsTheKind) {
  v1::Budget wire;
  EXPECT_FALSE(ParseBudget(false, wire, "budget")->has_value());
  wire.set_clusters(7);
  EXPECT_EQ((*ParseBudget(true, wire, "budget"))->kind, BudgetKind::kClusters);
  EXPECT_EQ((*ParseBudget(true, wire, "budget"))->value, 7);
  wire.set_error(0.01);
  EXPECT_EQ((*ParseBudget(true, wire, "budget"))->kind, BudgetKind::kError);
  wire.set_ratio(0.5);
  EXPECT_EQ((*ParseBudget(true, wire, "budget"))->kind, BudgetKind::kRatio);
  EXPECT_EQ((*ParseBudget(true, wire, "budget"))->estimate_ratio, 1.0);
}

TEST(ParseAttendItemTest, NeedsASequenceAQueryAndBothHalvesOfAToken) {
  const std::vector<float> row(64);
  v1::AttendItem item;
  EXPECT_THAT(std::string(ParseAttendItem(item).status().message()), HasSubstr("sequence_id"));
  item.mutable_sequence()->set_sequence_id(1);
  EXPECT_THAT(std::string(ParseAttendItem(item).status().message()), HasSubstr("queries"));
  FillWireTensor(DType::kF32, std::vector<int64_t>{1, 64}, row.data(), item.mutable_queries());
  EXPECT_TRUE(ParseAttendItem(item).ok());
  *item.mutable_append_keys() = item.queries();
  EXPECT_THAT(std::string(ParseAttendItem(item).status().message()), HasSubstr("come together"));
  *item.mutable_append_values() = item.queries();
  const absl::StatusOr<AttendStep> step = ParseAttendItem(item);
  ASSERT_TRUE(step.ok());
  EXPECT_EQ(step->append_keys->shape[1], 64);
  item.mutable_append_values()->mutable_data()->pop_back();
  EXPECT_THAT(std::string(ParseAttendItem(item).status().message()), HasSubstr("append_values"));
}

TEST(ParseInsertChunkTest, BoundsLayersAndNeedsBothTensors) {
  v1::InsertRequest request;
  EXPECT_THAT(std::string(ParseInsertChunk(request).status().message()), HasSubstr("keys"));
  const std::vector<float> row(64);
  FillWireTensor(DType::kF32, std::vector<int64_t>{1, 1, 1, 64}, row.data(),
                 request.mutable_keys());
  EXPECT_THAT(std::string(ParseInsertChunk(request).status().message()), HasSubstr("values"));
  *request.mutable_values() = request.keys();
  request.mutable_keys()->set_layout(v1::LAYOUT_HND);
  const absl::StatusOr<InsertChunk> chunk = ParseInsertChunk(request);
  ASSERT_TRUE(chunk.ok());
  EXPECT_EQ(chunk->keys.layout, Layout::kHND);
  EXPECT_EQ(chunk->values.layout, Layout::kNHD);
  for (int i = 0; i < 1025; ++i) request.add_layers(0);
  EXPECT_THAT(std::string(ParseInsertChunk(request).status().message()), HasSubstr("1025"));
}

// Whatever protobuf lets through, the parsers answer with a status.
TEST(ParseAnythingTest, RandomBytesGetAStatus) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  int parsed = 0;
  const auto expect_judged = [](const absl::Status& status) {
    EXPECT_TRUE(status.ok() || absl::IsInvalidArgument(status)) << status;
  };
  for (int round = 0; round < 20000; ++round) {
    // Flips in a valid message reach deeper than noise.
    std::string bytes = ValidCreate().SerializeAsString();
    if (round % 2 == 0) bytes.resize(random() % 60);
    for (int flips = static_cast<int>(random() % 8); flips > 0 && !bytes.empty(); --flips) {
      bytes[random() % bytes.size()] = static_cast<char>(random());
    }
    v1::CreateSequenceRequest create;
    v1::InsertRequest insert;
    v1::AttendItem item;
    v1::SampleRecallRequest recall;
    if (create.ParseFromString(bytes)) expect_judged(ParseSequenceSpec(create).status()), ++parsed;
    if (insert.ParseFromString(bytes)) expect_judged(ParseInsertChunk(insert).status());
    if (item.ParseFromString(bytes)) expect_judged(ParseAttendItem(item).status());
    if (recall.ParseFromString(bytes)) expect_judged(ParseSampleRecall(recall).status());
  }
  EXPECT_GT(parsed, 1000);
}

}  // namespace
}  // namespace wavekv
