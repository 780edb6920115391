// Bad requests: a clear status that names what was expected and found, and a sequence left as it
// was.
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "daemon/engine/sequence_memory.h"
#include "gmock/gmock.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {
namespace {

using ::testing::HasSubstr;

class RefusalTest : public EngineTest {};

struct SpecCase {
  const char* what;
  std::function<void(SequenceSpec*)> spoil;
  const char* text;
};

TEST_F(RefusalTest, Specs) {
  const std::vector<SpecCase> cases = {
      {"no layers", [](SequenceSpec* s) { s->shape.layer_count = 0; }, "layer_count is 0"},
      {"2^31 layers", [](SequenceSpec* s) { s->shape.layer_count = 1u << 31; }, "layer_count"},
      {"heads that do not divide", [](SequenceSpec* s) { s->shape.query_head_count = 5; },
       "query_head_count is 5"},
      {"a dim too small", [](SequenceSpec* s) { s->shape.key_dim = 16; }, "key_dim is 16"},
      {"a dim too large", [](SequenceSpec* s) { s->shape.value_dim = 512; }, "value_dim is 512"},
      {"a NaN scale", [](SequenceSpec* s) { s->shape.softmax_scale = NAN; }, "softmax_scale"},
      {"no tokens", [](SequenceSpec* s) { s->max_tokens = 0; }, "max_tokens is 0"},
      {"too many tokens", [](SequenceSpec* s) { s->max_tokens = 1ull << 40; }, "--tokens_max"},
      {"a head range beyond the model",
       [](SequenceSpec* s) {
         s->first_kv_head = 7;
         s->total_kv_head_count = 8;
       },
       "KV heads 7 to 8, expected below 8"},
      {"a stretch that is no power of two", [](SequenceSpec* s) { s->index.segment_tokens = 3000; },
       "segment_tokens is 3000"},
      {"a stretch too long", [](SequenceSpec* s) { s->index.segment_tokens = 1u << 17; },
       "segment_tokens is 131072"},
      {"a small segment that does not divide",
       [](SequenceSpec* s) { s->index.small_segment_tokens = 300; }, "small_segment_tokens is 300"},
      {"clusters of nothing", [](SequenceSpec* s) { s->index.tokens_per_cluster = 0; },
       "tokens_per_cluster is 0"},
      {"endless iterations", [](SequenceSpec* s) { s->index.kmeans_iterations = 1u << 30; },
       "kmeans_iterations"},
      {"a ratio above 1", [](SequenceSpec* s) { s->index.budget.value = 1.5; }, "1.5"},
      {"a budget for a layer that is not there",
       [](SequenceSpec* s) {
         s->index.layer_budgets = {{2, ZoneBudget()}};
       },
       "layer 2"},
      {"a budget twice",
       [](SequenceSpec* s) {
         s->index.layer_budgets = {{1, ZoneBudget()}, {1, ZoneBudget()}};
       },
       "at most once"},
      {"a dense layer that is not there", [](SequenceSpec* s) { s->index.dense_layers = {9}; },
       "layer 9"},
      {"a label too long", [](SequenceSpec* s) { s->label = std::string(129, 'x'); },
       "label has 129 bytes"},
      {"a wave buffer that is not there", [](SequenceSpec* s) { s->attach_wave_buffer = true; },
       "--wave_buffer"},
  };
  for (const SpecCase& c : cases) {
    SequenceSpec spec = spec_;
    c.spoil(&spec);
    const absl::Status status = engine_->CreateSequence(kTenant, kOwner, spec).status();
    EXPECT_EQ(status.code(), absl::string_view(c.what) == "a wave buffer that is not there"
                                 ? absl::StatusCode::kFailedPrecondition
                                 : absl::StatusCode::kInvalidArgument)
        << c.what;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text)) << c.what;
  }
  EXPECT_EQ(pool_->Usage().reserved_bytes, 0u);
}

struct InsertCase {
  const char* what;
  std::function<void(ChunkBuffers*)> spoil;
  absl::StatusCode code;
  const char* text;
};

// FAULTS 12, 20 and 32 among them.
TEST_F(RefusalTest, Inserts) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 2000, seed);
  const SequenceRef sequence = Filled(data, 1500);
  const std::string before = Fingerprint(sequence, seed);
  using Code = absl::StatusCode;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float inf = std::numeric_limits<float>::infinity();
  const auto poison = [&](ChunkBuffers* b, bool keys, size_t row, uint32_t dim, float value) {
    std::vector<std::byte>& bytes = keys ? b->keys : b->values;
    ConvertFromFloat(shape().dtype, &value, 1, bytes.data() + (row * dim + 5) * 2);
  };
  // Chunks of 100 tokens from position 1500 on, both layers.
  const std::vector<InsertCase> cases = {
      {"a gap", [](ChunkBuffers* b) { b->chunk.first_position = 1501; }, Code::kFailedPrecondition,
       "expected position 1500, found 1501"},
      {"beyond max_tokens", [](ChunkBuffers* b) { b->chunk.first_position = 8150; },
       Code::kResourceExhausted, "max_tokens of 8192"},
      {"a position near 2^64", [](ChunkBuffers* b) { b->chunk.first_position = UINT64_MAX - 5; },
       Code::kInvalidArgument, "first_position"},
      {"no generation", [](ChunkBuffers* b) { b->chunk.sequence.generation = Generation(0); },
       Code::kInvalidArgument, "must name the generation"},
      {"a stale generation", [](ChunkBuffers* b) { b->chunk.sequence.generation = Generation(9); },
       Code::kFailedPrecondition, "names generation 9, the sequence is at generation 1"},
      {"an unknown sequence", [](ChunkBuffers* b) { b->chunk.sequence.id = SequenceId(77); },
       Code::kNotFound, "no sequence 77"},
      {"no layer", [](ChunkBuffers* b) { b->chunk.layers = {}; }, Code::kInvalidArgument,
       "names no layer"},
      {"a layer that is not there",
       [](ChunkBuffers* b) {
         b->layers[1] = 2;
         b->chunk.layers = b->layers;
       },
       Code::kInvalidArgument, "layer is 2, expected less than 2"},
      {"a layer twice",
       [](ChunkBuffers* b) {
         b->layers[1] = 0;
         b->chunk.layers = b->layers;
       },
       Code::kInvalidArgument, "layer 0 twice"},
      {"another dtype", [](ChunkBuffers* b) { b->chunk.keys.dtype = DType::kF16; },
       Code::kInvalidArgument, "keys have dtype f16, expected bf16"},
      {"HND labelled NHD", [](ChunkBuffers* b) { b->chunk.keys.layout = Layout::kHND; },
       Code::kInvalidArgument, "keys have shape [2, 100, 2, 32], expected"},
      {"a dim too few",
       [](ChunkBuffers* b) {
         b->value_shape.pop_back();
         b->chunk.values.shape = b->value_shape;
       },
       Code::kInvalidArgument, "values have shape [2, 100, 2]"},
      {"the key's dim for a value", [](ChunkBuffers* b) { b->value_shape[3] = 32; },
       Code::kInvalidArgument, "values have shape [2, 100, 2, 32]"},
      {"no tokens", [](ChunkBuffers* b) { b->key_shape[1] = 0; }, Code::kInvalidArgument,
       "keys have shape [2, 0, 2, 32]"},
      {"2^31 tokens", [](ChunkBuffers* b) { b->key_shape[1] = int64_t{1} << 31; },
       Code::kInvalidArgument, "keys have 25600 bytes"},
      {"2^62 tokens", [](ChunkBuffers* b) { b->key_shape[1] = int64_t{1} << 62; },
       Code::kInvalidArgument, "keys have shape"},
      {"negative heads", [](ChunkBuffers* b) { b->key_shape[2] = -2; }, Code::kInvalidArgument,
       "keys have shape [2, 100, -2, 32]"},
      {"fewer bytes than the shape says",
       [](ChunkBuffers* b) { b->chunk.values.data = b->chunk.values.data.subspan(2); },
       Code::kInvalidArgument, "bytes, expected 38400"},
      {"more values than keys",
       [](ChunkBuffers* b) {
         b->key_shape[1] = 50;
         b->chunk.keys.data = b->chunk.keys.data.first(b->keys.size() / 2);
       },
       Code::kInvalidArgument, "values hold 100 tokens, expected 50"},
      // Row (layer 1, token 33, head 1) of [2, 100, 2].
      {"a NaN key", [&](ChunkBuffers* b) { poison(b, true, 200 + 66 + 1, 32, nan); },
       Code::kInvalidArgument,
       "keys hold a NaN or an infinity at layer 1, position 1533, KV head 1"},
      {"an infinite key", [&](ChunkBuffers* b) { poison(b, true, 66, 32, inf); },
       Code::kInvalidArgument,
       "keys hold a NaN or an infinity at layer 0, position 1533, KV head 0"},
      {"an infinite value", [&](ChunkBuffers* b) { poison(b, false, 399, 48, -inf); },
       Code::kInvalidArgument,
       "values hold a NaN or an infinity at layer 1, position 1599, KV head 1"},
  };
  for (const InsertCase& c : cases) {
    ChunkBuffers buffers(data, sequence, {0, 1}, 1500, 100);
    c.spoil(&buffers);
    const absl::Status status = engine_->Insert(kTenant, buffers.chunk).status();
    EXPECT_EQ(status.code(), c.code) << c.what << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.text)) << c.what;
    EXPECT_EQ(StatusOf(sequence).token_count, 1500u) << c.what;
  }
  EXPECT_TRUE(Fingerprint(sequence, seed) == before);
  Insert(sequence, data, 1500, 100);  // And it goes on.
}

// The NaN's place is named in the other layout too.
TEST_F(RefusalTest, PoisonIsNamedInBothLayouts) {
  const TokenData data(shape(), 100, FreshSeed());
  const SequenceRef sequence = Create(spec_);
  ChunkBuffers buffers(data, sequence, {1}, 0, 100, Layout::kHND);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  // Row (head 1, token 42) of [2, 100].
  ConvertFromFloat(shape().dtype, &nan, 1, buffers.values.data() + (142 * 48 + 7) * 2);
  const absl::Status status = engine_->Insert(kTenant, buffers.chunk).status();
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("layer 1, position 42, KV head 1, element 7"));
}

// FAULTS 20: among 4,096 keys, and nothing of the chunk is in.
TEST_F(RefusalTest, OnePoisonedKeyAmongMany) {
  const uint64_t seed = FreshSeed();
  TokenData data(shape(), 4096, seed);
  const SequenceRef sequence = Create(spec_);
  std::vector<float> key(shape().key_dim, 1.0f);
  key[3] = std::numeric_limits<float>::infinity();
  data.SetKey(1, 4000, 1, key);
  const absl::Status status = TryInsert(sequence, data, 0, 4096).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("layer 1, position 4000, KV head 1"));
  EXPECT_EQ(StatusOf(sequence).token_count, 0u);
  const TokenData good(shape(), 4096, seed);
  Insert(sequence, good, 0, 4096);
  Build(sequence);
}

struct QueryCase {
  const char* what;
  std::function<void(QueryBuffers*)> spoil;
  absl::StatusCode code;
  const char* text;
};

TEST_F(RefusalTest, Queries) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef sequence = Filled(data, 1500);
  const std::string before = Fingerprint(sequence, seed);
  using Code = absl::StatusCode;
  const std::vector<QueryCase> cases = {
      {"a layer that is not there", [](QueryBuffers* b) { b->query.layer = 2; },
       Code::kInvalidArgument, "layer is 2"},
      {"an unknown sequence", [](QueryBuffers* b) { b->query.sequence.id = SequenceId(1); },
       Code::kNotFound, "no sequence 1"},
      {"a stale generation", [](QueryBuffers* b) { b->query.sequence.generation = Generation(5); },
       Code::kFailedPrecondition, "generation 5"},
      {"a head too few", [](QueryBuffers* b) { b->tensor_shape[0] = 3; }, Code::kInvalidArgument,
       "queries have shape [3, 32], expected"},
      {"bytes missing",
       [](QueryBuffers* b) { b->query.queries.data = b->query.queries.data.first(100); },
       Code::kInvalidArgument, "queries have 100 bytes, expected 512"},
      {"a NaN", [](QueryBuffers* b) { b->vectors[3 * 32] = NAN; }, Code::kInvalidArgument,
       "query head 3"},
      {"a ratio that is no share",
       [](QueryBuffers* b) {
         b->query.budget = ZoneBudget{BudgetKind::kRatio, -0.5};
       },
       Code::kInvalidArgument, "-0.5"},
  };
  for (const QueryCase& c : cases) {
    QueryBuffers buffers(shape(), sequence, 0, RandomQueries(shape(), seed));
    c.spoil(&buffers);
    const ChunkBuffers token(data, sequence, {0}, 1499, 1);
    AttendStep step;
    step.query = buffers.query;
    const auto outcomes = engine_->Attend(kTenant, std::span(&step, 1));
    ASSERT_TRUE(outcomes.ok());
    for (const absl::Status& status :
         {outcomes->front().status, engine_->Query(kTenant, buffers.query, QueryOptions()).status(),
          engine_->Estimate(kTenant, buffers.query).status(),
          engine_->Explain(kTenant, buffers.query, 0, 10).status()}) {
      EXPECT_EQ(status.code(), c.code) << c.what << ": " << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.text)) << c.what;
    }
  }
  EXPECT_TRUE(Fingerprint(sequence, seed) == before);
}

// A step that is refused for its queries must not have appended its token.
TEST_F(RefusalTest, RefusedStepAppendsNothing) {
  const uint64_t seed = FreshSeed();
  spec_.shape.layer_count = 1;
  const TokenData data(shape(), 20, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 10);
  std::vector<float> queries = RandomQueries(shape(), seed);
  queries[40] = INFINITY;
  EXPECT_EQ(Decode(sequence, data, 0, 10, queries).status.code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StatusOf(sequence).token_count, 10u);

  const QueryBuffers good(shape(), sequence, 0, RandomQueries(shape(), seed));
  const ChunkBuffers token(data, sequence, {0}, 10, 1);
  const std::vector<int64_t> key_shape = {shape().kv_head_count, shape().key_dim};
  AttendStep half;
  half.query = good.query;
  half.append_position = 10;
  half.append_keys = TensorView{shape().dtype, key_shape, Layout::kNHD, token.keys};
  const auto no_values = engine_->Attend(kTenant, std::span(&half, 1));
  ASSERT_TRUE(no_values.ok());
  EXPECT_EQ(no_values->front().status.code(), absl::StatusCode::kInvalidArgument);
  half.append_values = half.append_keys;  // Of the key's dim.
  const auto wrong_values = engine_->Attend(kTenant, std::span(&half, 1));
  ASSERT_TRUE(wrong_values.ok());
  EXPECT_EQ(wrong_values->front().status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(StatusOf(sequence).token_count, 10u);
}

TEST_F(RefusalTest, ClosedSequence) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 100, seed);
  const SequenceRef sequence = Create(spec_);
  Insert(sequence, data, 0, 100);
  ASSERT_TRUE(engine_->DropSequence(kTenant, sequence).ok());
  const QueryBuffers buffers(shape(), sequence, 0, RandomQueries(shape(), seed));
  for (const absl::Status& status :
       {TryInsert(sequence, data, 0, 10).status(),
        engine_->BuildIndex(kTenant, sequence, nullptr).status(),
        engine_->Query(kTenant, buffers.query, QueryOptions()).status(),
        engine_->Estimate(kTenant, buffers.query).status(),
        engine_->ForkSequence(kTenant, kOwner, sequence, 0, 0, "").status(),
        engine_->TruncateSequence(kTenant, sequence, 1).status(),
        engine_->DropSequence(kTenant, sequence), engine_->Pin(kTenant, sequence, true),
        engine_->SetTtl(kTenant, sequence, 1), engine_->GetSequence(kTenant, sequence).status(),
        engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt).status(),
        engine_->SampleRecall(kTenant, sequence, {}, TensorView(), std::nullopt).status(),
        Attend(sequence, 0, RandomQueries(shape(), seed)).status}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
  // Ids are not used again.
  EXPECT_GT(Create(spec_).id, sequence.id);
}

// FAULTS 13: the same tokens under two tenants and two models are two things, and a sequence of
// someone else cannot be told from one that never was.
TEST_F(RefusalTest, NothingIsSharedBetweenTenantsAndModels) {
  const uint64_t seed = FreshSeed();
  const TokenData data(shape(), 1500, seed);
  const SequenceRef mine = Filled(data, 1500);
  SequenceSpec other_model = spec_;
  other_model.shape.model_id = "test, other RoPE base";
  const SequenceRef model = Create(other_model);
  EXPECT_EQ(StatusOf(model).token_count, 0u) << "the same tokens are not there yet";
  const SequenceRef theirs = Create(spec_, "uid:2000", ClientId(8));
  const auto payload = [&](const TenantId& tenant) {
    for (const TenantUsage& usage : engine_->Stats().tenants) {
      if (usage.tenant == tenant) return usage.usage.allocated_bytes;
    }
    return uint64_t{0};
  };
  EXPECT_EQ(payload("uid:2000"), 0u);
  const ChunkBuffers buffers(data, theirs, {0, 1}, 0, 1500);
  ASSERT_TRUE(engine_->Insert("uid:2000", buffers.chunk).ok());
  EXPECT_GT(payload("uid:2000"), 0u);

  const QueryBuffers query(shape(), mine, 0, RandomQueries(shape(), seed));
  const SequenceRef never = {SequenceId(mine.id.value() + 1000), Generation(1)};
  const absl::Status foreign = engine_->Query("uid:2000", query.query, QueryOptions()).status();
  EXPECT_EQ(foreign.code(), absl::StatusCode::kNotFound);
  std::string expected(engine_->GetSequence("uid:2000", never).status().message());
  const std::string never_id = absl::StrCat(never.id.value());
  expected.replace(expected.find(never_id), never_id.size(), absl::StrCat(mine.id.value()));
  EXPECT_EQ(std::string(foreign.message()), expected);
  for (const absl::Status& status :
       {engine_->DropSequence("uid:2000", mine), engine_->Pin("uid:2000", mine, true),
        engine_->ForkSequence("uid:2000", ClientId(8), mine, 0, 0, "").status(),
        engine_->TruncateSequence("uid:2000", mine, 1).status(),
        engine_->BuildIndex("uid:2000", mine, nullptr).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound) << status;
  }
  EXPECT_EQ(engine_->ListSequences("uid:2000", SequenceId(0), 100).size(), 1u);
  EXPECT_EQ(engine_->ListSequences(kTenant, SequenceId(0), 100).size(), 2u);
  EXPECT_EQ(engine_->ListSequences("", SequenceId(0), 100).size(), 3u);
  EXPECT_EQ(engine_->ListSequences("", mine.id, 1).front().id, model.id) << "paged by id";
}

TEST_F(RefusalTest, EngineOptions) {
  struct Row {
    std::string named;
    std::function<void(EngineOptions*)> spoil;
  };
  for (const Row& row : std::vector<Row>{
           {"epoch", [](EngineOptions* o) { o->epoch = 0; }},
           {"build_queue_max", [](EngineOptions* o) { o->build_queue_max = 0; }},
           {"--batch_max is 0", [](EngineOptions* o) { o->batch_max = 0; }},
           {"--batch_max", [](EngineOptions* o) { o->batch_max = UINT32_MAX; }},
           {"--sequences_max is 0", [](EngineOptions* o) { o->sequences_max = 0; }},
           {"--sequences_max", [](EngineOptions* o) { o->sequences_max = UINT32_MAX; }},
           {"--tokens_max is 0", [](EngineOptions* o) { o->tokens_max = 0; }},
           // Beyond it the plan of a sequence's memory would overflow.
           {"--tokens_max", [](EngineOptions* o) { o->tokens_max = kTokensMax + 1; }},
           // A pool counts its threads in an int.
           {"--build_threads", [](EngineOptions* o) { o->build_threads = UINT32_MAX; }},
           {"--compute_threads", [](EngineOptions* o) { o->compute_threads = UINT32_MAX; }},
       }) {
    EngineOptions options = {.epoch = 1};
    row.spoil(&options);
    const absl::Status status =
        Engine::Create(options, pool_, CreateCpuBackend(), nullptr).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << row.named << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.named));
  }
  EXPECT_EQ(Engine::Create({.epoch = 1}, pool_, nullptr, nullptr).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace wavekv::testing
