// Prefill: any chunking gives the same index, bit for bit; every head comes back as itself.
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

class PrefillTest : public EngineTest {};

// FAULTS 16, in three ways: 4,096 tokens in one shot, as 1500 + 1500 + 1096, and one by one.
TEST_F(PrefillTest, ChunkingChangesNothing) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 4096, seed);
  std::vector<std::string> prints;
  for (const std::vector<uint64_t>& chunks :
       {std::vector<uint64_t>{4096}, std::vector<uint64_t>{1500, 1500, 1096},
        std::vector<uint64_t>(4096, 1)}) {
    const SequenceRef sequence = Create(spec_);
    uint64_t position = 0;
    for (const uint64_t chunk : chunks) {
      Insert(sequence, data, position, chunk);
      position += chunk;
    }
    Build(sequence);
    const SequenceStatus status = StatusOf(sequence);
    EXPECT_EQ(status.token_count, 4096u);
    // Three stretches, and a rest of 960 tokens up to the local window.
    EXPECT_EQ(status.clustered_tokens, 4096u - 64 - 4);
    prints.push_back(Fingerprint(sequence, seed));
  }
  EXPECT_TRUE(prints[1] == prints[0]) << "in chunks";
  EXPECT_TRUE(prints[2] == prints[0]) << "token by token";
}

TEST_F(PrefillTest, OrderOfLayersChangesNothing) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2500, seed);
  const SequenceRef together = Create(spec_);
  Insert(together, data, 0, 2500);
  const SequenceRef apart = Create(spec_);
  for (const uint32_t layer : {1u, 0u}) {
    const ChunkBuffers buffers(data, apart, {layer}, 0, 2500);
    const auto inserted = engine_->Insert(kTenant, buffers.chunk);
    ASSERT_TRUE(inserted.ok()) << inserted.status();
    EXPECT_EQ(inserted->token_count, layer == 1 ? 0u : 2500u) << "what every layer holds";
  }
  Build(together);
  Build(apart);
  EXPECT_TRUE(Fingerprint(apart, seed) == Fingerprint(together, seed));
}

TEST_F(PrefillTest, BothLayoutsGiveTheSame) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1300, seed);
  const SequenceRef nhd = Create(spec_);
  Insert(nhd, data, 0, 1300, Layout::kNHD);
  const SequenceRef hnd = Create(spec_);
  Insert(hnd, data, 0, 700, Layout::kHND);
  Insert(hnd, data, 700, 600, Layout::kHND);
  Build(nhd);
  Build(hnd);
  EXPECT_TRUE(Fingerprint(nhd, seed) == Fingerprint(hnd, seed));
}

// FAULTS 12 and 15: layer, position and head are written into every row, and each row that comes
// back is compared with what its position was given, steady or clustered, in both layouts.
TEST_F(PrefillTest, RowsComeBackAsThemselves) {
  const uint64_t seed = FreshSeed();
  constexpr uint64_t kTokens = 1700;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    spec_.shape.dtype = dtype;
    TokenData data(shape(), kTokens, seed);
    for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
      for (uint64_t position = 0; position < kTokens; ++position) {
        for (uint32_t head = 0; head < shape().kv_head_count; ++head) {
          std::vector<float> code(shape().value_dim);
          code[0] = static_cast<float>(layer + 1);
          code[1] = static_cast<float>(position % 128);
          code[2] = static_cast<float>(position / 128);
          code[3] = static_cast<float>(head + 1);
          data.SetValue(layer, position, head, code);
        }
      }
    }
    for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
      const SequenceRef sequence = Create(spec_);
      Insert(sequence, data, 0, 900, layout);
      Insert(sequence, data, 900, kTokens - 900, layout);
      Build(sequence);
      for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
        const QueryBuffers buffers(shape(), sequence, layer, RandomQueries(shape(), seed));
        LayerQuery query = buffers.query;
        query.budget = ZoneBudget{.kind = BudgetKind::kRatio, .value = 1.0};
        const auto all = engine_->Query(kTenant, query, {.inline_rows = true});
        ASSERT_TRUE(all.ok()) << all.status();
        ASSERT_EQ(all->heads.size(), shape().kv_head_count);
        for (const HeadZones& zones : all->heads) {
          ASSERT_EQ(zones.inline_positions.size(), kTokens);
          std::vector<bool> seen(kTokens, false);
          for (size_t row = 0; row < kTokens; ++row) {
            const uint64_t position = zones.inline_positions[row];
            ASSERT_LT(position, kTokens);
            ASSERT_FALSE(seen[position]) << position;
            seen[position] = true;
            ASSERT_EQ(std::memcmp(zones.inline_keys.data() + row * shape().key_bytes(),
                                  data.Key(layer, position, zones.kv_head), shape().key_bytes()),
                      0)
                << "key at layer " << layer << " position " << position;
            ASSERT_EQ(
                std::memcmp(zones.inline_values.data() + row * shape().value_bytes(),
                            data.Value(layer, position, zones.kv_head), shape().value_bytes()),
                0)
                << "value at layer " << layer << " position " << position;
          }
        }
      }
      ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
    }
  }
}

TEST_F(PrefillTest, SameRangeSameBytesIsANoOp) {
  const uint64_t seed = FreshSeed();
  TokenData data(shape(), 1600, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1500);
  Build(sequence);
  const std::string before = Fingerprint(sequence, seed);
  Insert(sequence, data, 0, 1500);   // All of it, most of it clustered.
  Insert(sequence, data, 200, 900);  // A part within.
  Insert(sequence, data, 1499, 1);   // The last token.
  EXPECT_TRUE(Fingerprint(sequence, seed) == before);
  Insert(sequence, data, 1400, 200);  // An overlap, then 100 new tokens.
  EXPECT_EQ(StatusOf(sequence).token_count, 1600u);
  const SequenceRef fresh = Create(spec_);
  Insert(fresh, data, 0, 1600);
  Build(sequence);
  Build(fresh);
  EXPECT_TRUE(Fingerprint(sequence, seed) == Fingerprint(fresh, seed));
}

TEST_F(PrefillTest, SameRangeOtherBytesIsAborted) {
  const uint64_t seed = FreshSeed();
  TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 1500);
  Build(sequence);
  const std::string before = Fingerprint(sequence, seed);
  // A clustered key, an exact value, and the sink; the first that differs is named.
  struct Row {
    uint64_t position;
    uint32_t layer;
    uint32_t head;
    bool key;
  };
  for (const Row& row : {Row{700, 1, 1, true}, Row{1470, 0, 1, false}, Row{2, 1, 0, true}}) {
    TokenData other = data;
    std::byte* const bytes = row.key ? other.Key(row.layer, row.position, row.head)
                                     : other.Value(row.layer, row.position, row.head);
    bytes[0] ^= std::byte{1};
    const absl::Status status = TryInsert(sequence, other, 0, 1500).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_NE(std::string(status.message())
                  .find(absl::StrCat("layer ", row.layer, ", position ", row.position, ", KV head ",
                                     row.head)),
              std::string::npos)
        << status;
    EXPECT_TRUE(Fingerprint(sequence, seed) == before);
  }
}

}  // namespace
}  // namespace wavekv::testing
