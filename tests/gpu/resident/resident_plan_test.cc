#include "gpu/resident/resident_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpu/kernels/resolve_head.h"
#include "tests/gpu/resident/test_sequence.h"

namespace wavekv::resident {
namespace {

using ::testing::HasSubstr;

// [begin, end) of every array of a unit, in order.
std::vector<std::pair<uint64_t, uint64_t>> Arrays(const UnitLayout& unit, uint64_t dim) {
  const uint64_t clusters = unit.cluster_capacity, segments = unit.segment_capacity;
  const std::pair<uint64_t, uint64_t> sizes[] = {
      {unit.published_offset, 2 * sizeof(PublishedHead)},
      {unit.sizes_offset, 2 * clusters * 2},
      {unit.segments_offset, segments * sizeof(SegmentEntry)},
      {unit.means_offset, segments * 3 * dim * 4},
      {unit.centroids_offset, clusters * dim},
      {unit.value_means_offset, clusters * dim},
      {unit.centroid_scales_offset, clusters * 4},
      {unit.value_scales_offset, clusters * 4},
      {unit.key_spreads_offset, clusters * 4},
      {unit.value_spreads_offset, clusters * 4},
      {unit.cluster_segment_offset, clusters * 2},
      {unit.first_row_offset, clusters * 4},
      {unit.first_block_offset, clusters * 4},
      {unit.block_slots_offset, uint64_t{unit.block_capacity} * 4},
      {unit.sink_offset, 2 * kSinkRows * dim * 2},
      {unit.ring_offset, 2 * unit.ring_rows * dim * 2},
      {unit.slots_offset, uint64_t{unit.slot_count} * 2 * 8 * dim * 2},
      {unit.free_slots_offset, uint64_t{unit.slot_count} * sizeof(gpu::FreeSlot)},
      {unit.log_offset, uint64_t{unit.log_capacity} * sizeof(gpu::BlockUse)},
  };
  std::vector<std::pair<uint64_t, uint64_t>> arrays;
  for (const auto& [offset, bytes] : sizes) arrays.emplace_back(offset, offset + bytes);
  return arrays;
}

TEST(ResidentPlanTest, ArraysLieOneAfterAnotherInsideTheRegion) {
  for (const uint32_t dim : {64u, 128u, 256u}) {
    for (const uint64_t tokens : {1u, 100u, 8192u, 131'072u, 1'048'576u, 3'000'000u}) {
      SCOPED_TRACE(testing::Message() << dim << " dims, " << tokens << " tokens");
      ModelShape shape = SmallShape(dim);
      const auto header = PlanResident(shape, tokens, {});
      ASSERT_TRUE(header.ok()) << header.status();
      const UnitLayout& unit = header->unit;
      uint64_t end = 0;
      for (const auto& [begin, array_end] : Arrays(unit, dim)) {
        EXPECT_EQ(begin % kAlignBytes, 0u);
        EXPECT_GE(begin, end);
        EXPECT_LT(begin, array_end);
        end = array_end;
      }
      EXPECT_LE(end, unit.unit_bytes);
      EXPECT_GE(header->states_offset, sizeof(ResidentHeader));
      EXPECT_GE(header->units_offset, header->states_offset + 4 * sizeof(gpu::HeadState));
      EXPECT_EQ(header->region_bytes, header->units_offset + 4 * unit.unit_bytes);
    }
  }
}

TEST(ResidentPlanTest, CapacitiesSuffice) {
  ResidentOptions options;
  options.cache_ratio = 0.05;
  const UnitLayout unit = PlanResident(SmallShape(128), 131'072, options).value().unit;
  // 1 cluster for 16 tokens and 2 outliers for 100, padded, and what two more stretches take.
  EXPECT_GE(unit.cluster_capacity, (131'072 + 2 * 8192) * 0.0825 + 16 * unit.segment_capacity);
  EXPECT_EQ(unit.cluster_capacity % gpu::kClusterPad, 0u);
  EXPECT_GE(unit.segment_capacity, 131'072 / 8192 + 16);
  EXPECT_GE(unit.block_capacity, 131'072 / 8 + unit.cluster_capacity);
  EXPECT_EQ(unit.slot_count, 819u);
  EXPECT_TRUE(std::has_single_bit(unit.log_capacity));
  // The default budget's 112 + 0.5 % of the clusters, all of four blocks, four times.
  EXPECT_GE(unit.log_capacity, 4 * 4 * (112 + 8192 / 200));
  EXPECT_EQ(unit.ring_rows, 2304u);
}

TEST(ResidentPlanTest, WhatAStepCannotDoIsRefusedByName) {
  struct Row {
    const char* says;
    std::function<void(ModelShape*, uint64_t*, ResidentOptions*)> change;
  };
  const Row rows[] = {
      {"dtype is f32", [](ModelShape* s, uint64_t*, ResidentOptions*) { s->dtype = DType::kF32; }},
      {"key_dim is 96",
       [](ModelShape* s, uint64_t*, ResidentOptions*) { s->key_dim = s->value_dim = 96; }},
      {"value_dim is 64, allowed: key_dim, 128",
       [](ModelShape* s, uint64_t*, ResidentOptions*) { s->key_dim = 128; }},
      {"query heads of a KV head is 17",
       [](ModelShape* s, uint64_t*, ResidentOptions*) { s->query_head_count = 34; }},
      {"layer_count", [](ModelShape* s, uint64_t*, ResidentOptions*) { s->layer_count = 0; }},
      {"max_tokens is 0", [](ModelShape*, uint64_t* t, ResidentOptions*) { *t = 0; }},
      {"max_tokens", [](ModelShape*, uint64_t* t, ResidentOptions*) { *t = 4'000'000; }},
      // Products with it would overflow.
      {"max_tokens", [](ModelShape*, uint64_t* t, ResidentOptions*) { *t = ~uint64_t{0}; }},
      {"ring_rows is 100", [](ModelShape*, uint64_t*, ResidentOptions* o) { o->ring_rows = 100; }},
      {"ring_rows is 0", [](ModelShape*, uint64_t*, ResidentOptions* o) { o->ring_rows = 0; }},
      {"ring_rows is 4294967040",
       [](ModelShape*, uint64_t*, ResidentOptions* o) { o->ring_rows = 0u - 256; }},
      {"cache_ratio is 1.5",
       [](ModelShape*, uint64_t*, ResidentOptions* o) { o->cache_ratio = 1.5; }},
      {"cache_ratio is nan",
       [](ModelShape*, uint64_t*, ResidentOptions* o) { o->cache_ratio = std::nan(""); }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.says);
    ModelShape shape = SmallShape();
    uint64_t tokens = 4096;
    ResidentOptions options;
    row.change(&shape, &tokens, &options);
    const auto header = PlanResident(shape, tokens, options);
    EXPECT_TRUE(absl::IsInvalidArgument(header.status())) << header.status();
    EXPECT_THAT(std::string(header.status().message()), HasSubstr(row.says));
  }
}

// The kernel's own checks take every header that is planned.
TEST(ResidentPlanTest, AStepFindsTheHeaderSound) {
  for (const uint64_t tokens : {1u, 131'072u, 3'000'000u}) {
    ModelShape shape = SmallShape(128, DType::kF16, 80);
    ResidentHeader header = PlanResident(shape, tokens, {}).value();
    header.sequence_id = 17;
    gpu::ResolveShape step;
    step.layer_count = 80;
    step.kv_heads = 2;
    step.head_dim = 128;
    step.element = gpu::Element::kF16;
    gpu::ResolveEntry entry = {};
    entry.region_bytes = header.region_bytes;
    entry.sequence_id = 17;
    EXPECT_TRUE(gpu::HeaderIsSound(header, entry, step)) << tokens;
  }
}

}  // namespace
}  // namespace wavekv::resident
