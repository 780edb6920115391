// Faults that other stores answered wrongly and silently (FAULTS rows 12, 13, 15 - 18), tried
// through the SDK on a real daemon.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <set>

#include "sys/stat.h"
#include "tests/integration/raw_client.h"
#include "tests/integration/sdk_test.h"
#include "tests/mock_decoder/counter_random.h"

namespace wavekv::integration {
namespace {

class FaultsAnswersTest : public SdkTest {
 protected:
  void SetUp() override { Start({.wave_buffer = false}); }

  // What names a slot of the cache: exact in every dtype up to 2^8 tokens of 2 layers and heads.
  static float SlotCode(uint32_t layer, uint64_t position, uint32_t kv_head, uint32_t d) {
    return static_cast<float>((d == 0 ? position : d == 1 ? kv_head : layer) + 1);
  }
};

// Row 12: a permuted layout read as the other one. All keys are equal, so that attention answers
// the mean of the values: the head's code, in both layouts.
TEST_F(FaultsAnswersTest, BothLayoutsComeBackRight) {
  const auto code = [](uint32_t layer, uint64_t, uint32_t kv_head, uint32_t) {
    return static_cast<float>(100 * layer + 10 * kv_head + 1);
  };
  HostCache cache(
      Shape(), 96, [](auto...) { return 0.0f; }, code);
  const std::vector<float> queries = RandomQueries(Shape(), 1);
  for (const client::Layout layout : {client::Layout::kNHD, client::Layout::kHND}) {
    auto sequence = Create(Shape(), 128);
    ASSERT_OK(sequence.status());
    const HostCache::Chunk chunk = cache.Slice(0, 96, 0, 2, layout);
    ASSERT_OK((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values));
    for (uint32_t layer = 0; layer < 2; ++layer) {
      const auto attention = Attend(**sequence, layer, QueryTensor(Shape(), queries));
      ASSERT_OK(attention.status());
      for (uint32_t head = 0; head < 4; ++head) {
        EXPECT_NEAR(attention->out[head * 32], code(layer, 0, head / 2, 0), 1e-3)
            << "layer " << layer << " head " << head << " layout " << static_cast<int>(layout);
      }
    }
  }
}

struct MislabelledRow {
  std::string what;
  std::function<void(HostCache::Chunk*)> spoil;
  std::string named;  // In the error's text.
};

// Row 12: what can be known to be another layout, shape or dtype is refused, and nothing of it is
// stored.
TEST_F(FaultsAnswersTest, RefusesWhatIsLabelledWrong) {
  HostCache cache = HostCache::Random(Shape(), 96, 12);
  const MislabelledRow rows[] = {
      {"HND bytes labelled NHD",
       [](HostCache::Chunk* chunk) { chunk->keys.layout = client::Layout::kNHD; },
       "keys: expected shape [layers=2, tokens>0, kv_heads=2, key_dim=64] (NHD), found [2, 2, 96, "
       "64]"},
      {"16-bit elements for a 32-bit sequence",
       [](HostCache::Chunk* chunk) { chunk->keys.dtype = DType::kBF16; },
       "keys: expected dtype f32 as the sequence stores, found bf16"},
      {"heads and dim folded together",
       [](HostCache::Chunk* chunk) {
         chunk->keys.shape = {2, 96, 128};
       },
       "keys: expected shape [layers=2, kv_heads=2, tokens>0, key_dim=64] (HND), found [2, 96, "
       "128]"},
      {"a layer too few", [](HostCache::Chunk* chunk) { chunk->layers.pop_back(); },
       "keys: expected shape [layers=1, kv_heads=2, tokens>0, key_dim=64] (HND), found [2, 2, 96, "
       "64]"},
      {"a layer that is not there", [](HostCache::Chunk* chunk) { chunk->layers[1] = 2; },
       "layer: expected 0 ... 1, found 2"},
      {"values as wide as keys", [](HostCache::Chunk* chunk) { chunk->values.shape.back() = 64; },
       "values: expected shape [layers=2, kv_heads=2, tokens>0, value_dim=32] (HND), found [2, 2, "
       "96, 64]"},
  };
  auto sequence = Create(Shape(), 128);
  ASSERT_OK(sequence.status());
  for (const MislabelledRow& row : rows) {
    HostCache::Chunk chunk = cache.Slice(0, 96, 0, 2, client::Layout::kHND);
    row.spoil(&chunk);
    // Bytes enough for every lie about them.
    std::vector<std::byte> bytes(4 << 20);
    chunk.keys.data = chunk.values.data = bytes.data();
    const absl::Status status = (*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.what << ": " << status;
    EXPECT_NE(status.message().find(row.named), absl::string_view::npos) << status.ToString();
    EXPECT_EQ((*sequence)->token_count(), 0u) << row.what;
  }
  // The position that is expected next is still the first.
  const HostCache::Chunk chunk = cache.All();
  EXPECT_TRUE((*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values).ok());
}

// Row 13: the same tokens under two models have different keys and must stay apart.
TEST_F(FaultsAnswersTest, ModelsAreNeverShared) {
  ModelShape other = Shape();
  other.model_id = "another RoPE";
  HostCache first_cache = HostCache::Random(Shape(), 300, 131);
  HostCache second_cache = HostCache::Random(other, 300, 132);
  const auto first = CreateFilled(&first_cache);
  const auto second = CreateFilled(&second_cache);
  const std::vector<float> queries = RandomQueries(Shape(), 13);
  const auto a = Attend(*first, 0, QueryTensor(Shape(), queries));
  const auto b = Attend(*second, 0, QueryTensor(Shape(), queries));
  ASSERT_OK(a.status());
  ASSERT_OK(b.status());
  EXPECT_LT(RelativeError(a->out, first_cache.Attend(0, queries, 300).out), 1e-4);
  EXPECT_LT(RelativeError(b->out, second_cache.Attend(0, queries, 300).out), 1e-4);
}

// Row 15: every slot holds a code that names its layer, position and head; each must come back as
// itself, clustered or not.
TEST_F(FaultsAnswersTest, EverySlotComesBackAsItself) {
  constexpr uint64_t kTokens = 2500;
  const auto key = [](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
    return mock::GaussFromWord(mock::StreamKey({layer, position, head, d}));
  };
  HostCache cache(Shape(), kTokens, key, SlotCode);
  const auto sequence = CreateFilled(&cache);
  const std::vector<float> queries = RandomQueries(Shape(), 15);
  client::QueryOptions everything;
  everything.budget = client::Budget::Ratio(1.0);
  everything.inline_rows = true;
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const auto result = sequence->Query(layer, QueryTensor(Shape(), queries), everything);
    ASSERT_OK(result.status());
    ASSERT_EQ(result->heads.size(), 2u);
    for (const client::HeadZones& head : result->heads) {
      EXPECT_FALSE(head.retrieved.empty());
      ASSERT_EQ(head.inline_positions.size(), kTokens);
      ASSERT_EQ(head.inline_keys.size(), kTokens * 64 * 4);
      ASSERT_EQ(head.inline_values.size(), kTokens * 32 * 4);
      std::set<uint64_t> seen;
      for (size_t row = 0; row < kTokens; ++row) {
        const uint64_t position = head.inline_positions[row];
        seen.insert(position);
        float keys[64];
        float values[32];
        std::memcpy(keys, head.inline_keys.data() + row * sizeof(keys), sizeof(keys));
        std::memcpy(values, head.inline_values.data() + row * sizeof(values), sizeof(values));
        for (uint32_t d = 0; d < 64; ++d) {
          ASSERT_EQ(keys[d], cache.Key(layer, position, head.kv_head, d)) << position;
        }
        for (uint32_t d = 0; d < 32; ++d) {
          ASSERT_EQ(values[d], SlotCode(layer, position, head.kv_head, d)) << position;
        }
      }
      EXPECT_EQ(seen.size(), kTokens);
    }
  }
}

// Row 16: chunked prefill. One shot, uneven chunks, layer by layer and token by token must give the
// same index: same counts, same clusters, same bits of the answer.
TEST_F(FaultsAnswersTest, ChunkingLeavesNoTrace) {
  constexpr uint64_t kTokens = 4096;
  HostCache cache = HostCache::Random(Shape(DType::kBF16), kTokens, 16);
  const ModelShape& shape = cache.shape();
  const auto insert_all = [&](const std::vector<uint64_t>& counts, bool by_layer) {
    auto sequence = Create(shape, kTokens);
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    uint64_t first = 0;
    for (const uint64_t count : counts) {
      for (uint32_t layer = 0; layer < 2; layer += by_layer ? 1 : 2) {
        const HostCache::Chunk chunk = cache.Slice(first, count, layer, by_layer ? 1 : 2);
        const absl::Status status =
            (*sequence)->Insert(first, chunk.layers, chunk.keys, chunk.values);
        EXPECT_TRUE(status.ok()) << status;
      }
      first += count;
    }
    EXPECT_EQ(first, kTokens);
    EXPECT_TRUE((*sequence)->BuildIndex().ok());
    return std::move(sequence).value();
  };
  const auto one_shot = insert_all({kTokens}, false);
  const std::unique_ptr<client::Sequence> others[] = {
      insert_all({1500, 1500, 1096}, false),
      insert_all({1096, 2999, 1}, true),
      insert_all(std::vector<uint64_t>(kTokens, 1), false),
  };
  const std::vector<float> queries = RandomQueries(shape, 16, 2.0f);
  for (uint32_t layer = 0; layer < 2; ++layer) {
    const auto expected = Attend(*one_shot, layer, QueryTensor(shape, queries));
    const auto expected_zones = one_shot->Query(layer, QueryTensor(shape, queries));
    ASSERT_OK(expected.status());
    ASSERT_OK(expected_zones.status());
    EXPECT_GT(expected->counters.estimated_clusters, 0u);
    for (const auto& other : others) {
      const auto found = Attend(*other, layer, QueryTensor(shape, queries));
      const auto zones = other->Query(layer, QueryTensor(shape, queries));
      ASSERT_OK(found.status());
      ASSERT_OK(zones.status());
      EXPECT_EQ(found->out, expected->out);
      EXPECT_EQ(found->lse, expected->lse);
      EXPECT_EQ(found->token_count, kTokens);
      for (size_t head = 0; head < 2; ++head) {
        const auto& a = zones->heads[head].retrieved;
        const auto& b = expected_zones->heads[head].retrieved;
        ASSERT_EQ(a.size(), b.size());
        for (size_t i = 0; i < a.size(); ++i) {
          EXPECT_EQ(a[i].segment_idx, b[i].segment_idx);
          EXPECT_EQ(a[i].cluster_idx, b[i].cluster_idx);
          EXPECT_EQ(a[i].size, b[i].size);
        }
      }
    }
  }
}

// Row 17: four fifths of the keys want to be one cluster. It is split, a budget of one cluster is
// kept, and what the budget does not take is estimated, not dropped.
TEST_F(FaultsAnswersTest, SkewedKeysAreSplitAndNothingIsDropped) {
  constexpr uint64_t kTokens = 4096;
  const auto key = [](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
    const float noise = mock::GaussFromWord(mock::StreamKey({17, layer, position, head, d}));
    return position % 5 != 0 ? 4.0f + 0.01f * noise : noise;
  };
  const auto value = [](uint32_t layer, uint64_t position, uint32_t head, uint32_t d) {
    return mock::GaussFromWord(mock::StreamKey({18, layer, position, head, d}));
  };
  HostCache cache(Shape(), kTokens, key, value);
  const auto sequence = CreateFilled(&cache);
  const std::vector<float> queries(4 * 64, 0.25f);
  client::AttendOptions all;
  all.budget = client::Budget::Ratio(1.0);
  client::AttendOptions one;
  one.budget = client::Budget::Clusters(1);
  const auto full = Attend(*sequence, 0, QueryTensor(Shape(), queries), all);
  const auto narrow = Attend(*sequence, 0, QueryTensor(Shape(), queries), one);
  ASSERT_OK(full.status());
  ASSERT_OK(narrow.status());
  EXPECT_EQ(narrow->counters.retrieved_clusters, 2u);  // One per KV head.
  EXPECT_LE(narrow->counters.retrieved_tokens, 2u * 32);
  EXPECT_EQ(narrow->counters.retrieved_clusters + narrow->counters.estimated_clusters,
            full->counters.retrieved_clusters);
  EXPECT_EQ(narrow->counters.ignored_clusters, 0u);
  // The estimate stands for four fifths of the tokens: the mass is all there.
  const HostCache::Exact exact = cache.Attend(0, queries, kTokens);
  for (uint32_t head = 0; head < 4; ++head) {
    EXPECT_NEAR(narrow->lse[head], exact.lse[head], 0.05) << head;
  }
  // A cap that cuts off what coverage asks for is counted.
  client::AttendOptions capped;
  capped.budget = client::Budget::Coverage(0.99);
  capped.budget->clusters_max = 1;
  const auto moved = Attend(*sequence, 0, QueryTensor(Shape(), queries), capped);
  ASSERT_OK(moved.status());
  EXPECT_EQ(moved->counters.retrieved_clusters, 2u);
  EXPECT_GT(moved->counters.moved_to_estimation, 0u);
}

// Row 18: fewer clusters than asked for. Nothing stale is read: the answer is the exact one.
TEST_F(FaultsAnswersTest, AskingForMoreClustersThanThereAre) {
  constexpr uint64_t kTokens = 1500;
  HostCache cache = HostCache::Random(Shape(), kTokens, 18);
  const auto sequence = CreateFilled(&cache);
  const std::vector<float> queries = RandomQueries(Shape(), 18, 2.0f);
  client::AttendOptions many;
  many.budget = client::Budget::Clusters(1'000'000);
  const auto attention = Attend(*sequence, 1, QueryTensor(Shape(), queries), many);
  ASSERT_OK(attention.status());
  EXPECT_GT(attention->counters.retrieved_clusters, 0u);
  EXPECT_EQ(attention->counters.estimated_clusters, 0u);
  EXPECT_EQ(attention->counters.retrieved_tokens + attention->counters.steady_tokens, 2 * kTokens);
  EXPECT_LT(RelativeError(attention->out, cache.Attend(1, queries, kTokens).out), 1e-4);
}

// Row 13: tenants. Over TCP a tenant is its token's; another's sequence does not exist for it.
TEST(FaultsTenantsTest, AnotherTenantsSequenceIsNotThere) {
  const TempDir directory;
  const std::string tokens = directory.path() + "/tokens";
  std::ofstream(tokens) << "token-of-the-first-tenant first\ntoken-of-the-second-tenant second\n";
  ASSERT_EQ(chmod(tokens.c_str(), 0600), 0);
  auto daemons =
      Daemons::Start({.wave_buffer = false,
                      .wavekvd_flags = {"--listen_tcp=127.0.0.1:0", "--token_file=" + tokens}});
  ASSERT_OK(daemons.status());
  const std::string address = (*daemons)->tcp_address();
  ASSERT_NE(address, "");

  client::ClientOptions options;
  options.address = address;
  options.token = "token-of-the-first-tenant";
  auto session = client::Session::Connect(options);
  ASSERT_OK(session.status());
  EXPECT_EQ((*session)->info().tenant, "first");
  client::SequenceOptions sequence_options;
  sequence_options.shape.layer_count = 1;
  sequence_options.shape.query_head_count = sequence_options.shape.kv_head_count = 1;
  sequence_options.shape.key_dim = sequence_options.shape.value_dim = 32;
  sequence_options.shape.dtype = DType::kF32;
  sequence_options.shape.softmax_scale = 1;
  sequence_options.max_tokens = 16;
  sequence_options.attach_wave_buffer = (*session)->info().has_wave_buffer;
  auto sequence = (*session)->CreateSequence(sequence_options);
  ASSERT_OK(sequence.status());

  auto other = RawClient::Attach(address, "token-of-the-second-tenant");
  ASSERT_OK(other.status());
  v1::SequenceRef foreign;
  foreign.set_sequence_id((*sequence)->id());
  foreign.set_generation((*sequence)->generation());
  v1::SequenceRef unknown = foreign;
  unknown.set_sequence_id(foreign.sequence_id() + 1'000'000);
  const absl::Status foreign_drop = (*other)->Drop(foreign);
  const absl::Status unknown_drop = (*other)->Drop(unknown);
  EXPECT_EQ(foreign_drop.code(), absl::StatusCode::kNotFound) << foreign_drop;
  EXPECT_EQ(unknown_drop.code(), absl::StatusCode::kNotFound) << unknown_drop;
  // It is there for its owner.
  const std::vector<float> query(32, 1.0f);
  EXPECT_TRUE((*sequence)->Attend(0, {DType::kF32, {1, 32}, query.data()}).ok());
  // And nobody comes in without a token.
  EXPECT_EQ(RawClient::Attach(address).status().code(), absl::StatusCode::kUnauthenticated);
}

}  // namespace
}  // namespace wavekv::integration
