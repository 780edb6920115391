#include "proto/shm/requests.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "proto/shm/request_layout.h"
#include "tests/shm/seed.h"

namespace wavekv::shm {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;
using Bytes = std::vector<std::byte>;

// A tensor with its memory.
struct OwnedTensor {
  OwnedTensor(DType dtype, std::vector<int64_t> extents, uint64_t seed)
      : shape(std::move(extents)) {
    size_t bytes = DTypeBytes(dtype);
    for (const int64_t extent : shape) bytes *= static_cast<size_t>(extent);
    data.resize(bytes);
    std::mt19937_64 random(seed);
    for (std::byte& byte : data) byte = static_cast<std::byte>(random());
    ref = {.dtype = dtype, .shape = shape, .data = data};
  }
  OwnedTensor(const OwnedTensor&) = delete;

  std::vector<int64_t> shape;
  Bytes data;
  TensorRef ref;
};

void ExpectSame(const TensorRef& found, const TensorRef& expected) {
  EXPECT_EQ(found.dtype, expected.dtype);
  EXPECT_EQ(found.layout, expected.layout);
  EXPECT_THAT(found.shape, ElementsAreArray(expected.shape));
  EXPECT_THAT(found.data, ElementsAreArray(expected.data));
}

class RequestsTest : public ::testing::Test {
 protected:
  AttendItemRequest Item(uint64_t id) {
    AttendItemRequest item;
    item.query = {.sequence_id = id, .generation = 2, .layer = 3, .queries = queries_.ref};
    item.query.budget = BudgetRef{.kind = BudgetRefKind::kCoverage,
                                  .value = 0.75,
                                  .estimate_ratio = 0.5,
                                  .clusters_max = 9,
                                  .sketch_clusters = 4};
    item.append_keys = keys_.ref;
    item.append_values = values_.ref;
    item.append_position = 77;
    item.exact = true;
    return item;
  }
  static Bytes Encoded(const std::vector<AttendItemRequest>& items) {
    Bytes bytes(AttendBytes(items));
    EncodeAttend(items, bytes);
    return bytes;
  }

  OwnedTensor queries_{DType::kBF16, {4, 32}, 1};
  OwnedTensor keys_{DType::kF16, {2, 32}, 2};
  OwnedTensor values_{DType::kF16, {2, 48}, 3};
};

TEST_F(RequestsTest, AttendComesBack) {
  AttendItemRequest plain;
  plain.query = {.sequence_id = 6, .generation = 0, .layer = 0, .queries = queries_.ref};
  const Bytes bytes = Encoded({Item(5), plain});
  AttendItems items;
  ASSERT_TRUE(DecodeAttend(bytes, 2, &items).ok());
  ASSERT_EQ(items.size(), 2u);
  ASSERT_TRUE(items[0].ok()) << items[0].status();
  const AttendItemRequest& first = *items[0];
  EXPECT_EQ(first.query.sequence_id, 5u);
  EXPECT_EQ(first.query.generation, 2u);
  EXPECT_EQ(first.query.layer, 3u);
  ASSERT_TRUE(first.query.budget.has_value());
  EXPECT_EQ(first.query.budget->kind, BudgetRefKind::kCoverage);
  EXPECT_EQ(first.query.budget->value, 0.75);
  EXPECT_EQ(first.query.budget->estimate_ratio, 0.5);
  EXPECT_EQ(first.query.budget->clusters_max, 9u);
  EXPECT_EQ(first.query.budget->sketch_clusters, 4u);
  ExpectSame(first.query.queries, queries_.ref);
  ExpectSame(first.append_keys.value(), keys_.ref);
  ExpectSame(first.append_values.value(), values_.ref);
  EXPECT_EQ(first.append_position, 77u);
  EXPECT_TRUE(first.exact);
  ASSERT_TRUE(items[1].ok()) << items[1].status();
  EXPECT_FALSE(items[1]->query.budget.has_value());
  EXPECT_FALSE(items[1]->append_keys.has_value());
  EXPECT_FALSE(items[1]->exact);
}

TEST_F(RequestsTest, QueryAndEstimateComeBack) {
  QueryRequest query{.query = Item(5).query, .inline_rows = true, .completed_step = 11};
  Bytes bytes(QueryBytes(query));
  EncodeQuery(query, bytes);
  const QueryRequest read = DecodeQuery(bytes).value();
  EXPECT_TRUE(read.inline_rows);
  EXPECT_EQ(read.completed_step, 11u);
  ExpectSame(read.query.queries, queries_.ref);

  bytes.assign(EstimateBytes(query.query), std::byte{0xee});
  EncodeEstimate(query.query, bytes);
  ExpectSame(DecodeEstimate(bytes).value().queries, queries_.ref);
}

TEST_F(RequestsTest, InsertComesBackWithItsRowsInPlace) {
  OwnedTensor keys(DType::kF32, {2, 3, 2, 32}, 4);
  OwnedTensor values(DType::kF32, {2, 2, 3, 48}, 5);
  values.ref.layout = TensorLayout::kHND;
  const uint32_t layers[] = {4, 1};
  const InsertRequest request{.sequence_id = 8,
                              .generation = 9,
                              .first_position = 1000,
                              .layers = layers,
                              .keys = keys.ref,
                              .values = values.ref};
  const InsertPlaces places = PlaceInsert(request);
  Bytes bytes(places.bytes);
  EncodeInsert(request, bytes);
  const Bytes head(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(std::min<size_t>(
                                                      bytes.size(), kInsertHeadBytesMax)));
  const InsertRequest read = DecodeInsert(head, bytes).value();
  EXPECT_EQ(read.sequence_id, 8u);
  EXPECT_EQ(read.first_position, 1000u);
  EXPECT_THAT(read.layers, ElementsAreArray(layers));
  ExpectSame(read.keys, keys.ref);
  ExpectSame(read.values, values.ref);
  EXPECT_EQ(read.keys.data.data(), bytes.data() + places.keys_offset);
  EXPECT_EQ(read.values.data.data(), bytes.data() + places.values_offset);
}

// Each row breaks one field of a good request.
TEST_F(RequestsTest, ADecoderNamesWhatIsWrong) {
  struct Row {
    const char* what;
    std::function<void(WireAttendItem*)> damage;
    const char* message;
  };
  const Row rows[] = {
      {"no sequence", [](WireAttendItem* w) { w->query.sequence_id = 0; }, "sequence_id"},
      {"an unknown flag", [](WireAttendItem* w) { w->query.flags = 8; }, "flags are 8"},
      {"an unknown budget", [](WireAttendItem* w) { w->query.budget.kind = 9; }, "budget has no"},
      {"no queries", [](WireAttendItem* w) { w->query.queries = {}; }, "queries is missing"},
      {"an unknown dtype", [](WireAttendItem* w) { w->query.queries.dtype = 4; }, "dtype is 4"},
      {"an unknown layout", [](WireAttendItem* w) { w->query.queries.layout = 3; }, "layout is 3"},
      {"too many axes", [](WireAttendItem* w) { w->query.queries.rank = 5; }, "5 dimensions"},
      {"a negative axis", [](WireAttendItem* w) { w->query.queries.shape[0] = -4; }, "negative"},
      {"an overflowing shape",
       [](WireAttendItem* w) {
         w->query.queries.shape[0] = INT64_MAX;
         w->query.queries.shape[1] = INT64_MAX;
       },
       "more than 2^63"},
      {"fewer bytes than the shape", [](WireAttendItem* w) { w->query.queries.bytes -= 2; },
       "data has 254 bytes, expected 256"},
      {"data past the end", [](WireAttendItem* w) { w->query.queries.offset = 1 << 20; },
       "pass the end"},
      {"data far past the end",
       [](WireAttendItem* w) { w->query.queries.offset = UINT64_MAX - 10; }, "pass the end"},
      {"keys without values", [](WireAttendItem* w) { w->append_values = {}; }, "come together"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.what);
    Bytes bytes = Encoded({Item(5), Item(6)});
    WireAttendItem wire;
    std::memcpy(&wire, bytes.data() + sizeof(WireAttend), sizeof wire);
    row.damage(&wire);
    std::memcpy(bytes.data() + sizeof(WireAttend), &wire, sizeof wire);
    AttendItems items;
    ASSERT_TRUE(DecodeAttend(bytes, 2, &items).ok());
    EXPECT_EQ(items[0].status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(items[0].status().message()), HasSubstr(row.message));
    EXPECT_TRUE(items[1].ok()) << "the other item stands: " << items[1].status();
  }
}

TEST_F(RequestsTest, CountsAreBoundedBeforeAnythingIsRead) {
  Bytes bytes = Encoded({Item(5)});
  AttendItems items;
  for (const uint32_t count : {0u, 3u, 0x7fffffffu, 0xffffffffu}) {
    std::memcpy(bytes.data(), &count, sizeof count);
    EXPECT_EQ(DecodeAttend(bytes, 2, &items).code(), absl::StatusCode::kInvalidArgument) << count;
  }
  // Allowed, but the request is too short for them.
  const uint32_t count = 64;
  std::memcpy(bytes.data(), &count, sizeof count);
  EXPECT_EQ(DecodeAttend(bytes, 64, &items).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(items.empty());
}

// Whatever the bytes: an error, or views that lie inside them. The sanitizers watch the rest.
class RequestFuzzTest : public RequestsTest {
 protected:
  static void ExpectInside(const TensorRef& tensor, const Bytes& bytes) {
    ASSERT_LE(tensor.shape.size(), kRequestRankMax);
    if (tensor.data.empty()) return;
    ASSERT_GE(tensor.data.data(), bytes.data());
    ASSERT_LE(tensor.data.data() + tensor.data.size(), bytes.data() + bytes.size());
    volatile std::byte last = tensor.data.back();
    (void)last;
  }
  static void DecodeAll(const Bytes& bytes) {
    AttendItems items;
    if (DecodeAttend(bytes, 16, &items).ok()) {
      for (const auto& item : items) {
        if (!item.ok()) continue;
        ExpectInside(item->query.queries, bytes);
        if (item->append_keys.has_value()) ExpectInside(*item->append_keys, bytes);
      }
    }
    const auto query = DecodeQuery(bytes);
    if (query.ok()) ExpectInside(query->query.queries, bytes);
    const auto estimate = DecodeEstimate(bytes);
    if (estimate.ok()) ExpectInside(estimate->queries, bytes);
    const Bytes head(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(std::min<size_t>(
                                                        bytes.size(), kInsertHeadBytesMax)));
    const auto insert = DecodeInsert(head, bytes);
    if (insert.ok()) {
      ExpectInside(insert->keys, bytes);
      ExpectInside(insert->values, bytes);
      for (const uint32_t layer : insert->layers) {
        volatile uint32_t read = layer;
        (void)read;
      }
    }
  }
};

TEST_F(RequestFuzzTest, RandomBytes) {
  std::mt19937_64 random(FreshSeed());
  for (int i = 0; i < 20'000; ++i) {
    Bytes bytes(random() % 700);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    DecodeAll(bytes);
  }
}

TEST_F(RequestFuzzTest, DamagedRequests) {
  std::mt19937_64 random(FreshSeed());
  OwnedTensor keys(DType::kF32, {1, 1, 2, 32}, 4);
  const uint32_t layers[] = {0};
  const InsertRequest insert{
      .sequence_id = 8, .layers = layers, .keys = keys.ref, .values = keys.ref};
  std::vector<Bytes> good = {Encoded({Item(5), Item(6)}), Bytes(PlaceInsert(insert).bytes),
                             Bytes(EstimateBytes(Item(5).query))};
  EncodeInsert(insert, good[1]);
  EncodeEstimate(Item(5).query, good[2]);
  for (int i = 0; i < 40'000; ++i) {
    Bytes bytes = good[random() % good.size()];
    const int changes = 1 + static_cast<int>(random() % 6);
    for (int change = 0; change < changes; ++change) {
      const size_t at = random() % std::min<size_t>(bytes.size(), 600);
      bytes[at] = static_cast<std::byte>(random() % 4 == 0 ? 0xff : random());
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    DecodeAll(bytes);
  }
}

}  // namespace
}  // namespace wavekv::shm
