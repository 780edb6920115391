#include "tests/engine/engine_fixture.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <random>
#include <thread>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace wavekv::testing {
namespace {

constexpr uint64_t kTopics = 24;

uint64_t Mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15u + b + 0x7f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::vector<float> NormalVector(uint64_t seed, size_t dim, float scale) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> vector(dim);
  for (float& x : vector) x = normal(random);
  return vector;
}

// The same topics for keys and queries, whatever the seed.
std::vector<float> TopicVector(uint64_t layer, uint64_t kv_head, uint64_t topic, size_t dim) {
  return NormalVector(Mix(Mix(layer, kv_head), topic), dim, 1.0f);
}

std::vector<int64_t> ChunkShape(size_t layers, uint64_t tokens, uint32_t heads, uint32_t dim,
                                Layout layout) {
  const auto n = static_cast<int64_t>(tokens);
  const auto h = static_cast<int64_t>(heads);
  return layout == Layout::kNHD ? std::vector<int64_t>{static_cast<int64_t>(layers), n, h, dim}
                                : std::vector<int64_t>{static_cast<int64_t>(layers), h, n, dim};
}

void AppendRaw(const void* data, size_t bytes, std::string* target) {
  target->append(static_cast<const char*>(data), bytes);
}

template <class T>
void AppendAll(const std::vector<T>& values, std::string* target) {
  absl::StrAppend(target, "|", values.size(), "|");
  AppendRaw(values.data(), values.size() * sizeof(T), target);
}

}  // namespace

uint64_t FreshSeed() {
  uint64_t seed = std::random_device()();
  const char* const fixed = std::getenv("WAVEKV_TEST_SEED");
  if (fixed != nullptr && !absl::SimpleAtoi(fixed, &seed)) ADD_FAILURE() << "WAVEKV_TEST_SEED";
  std::cout << "WAVEKV_TEST_SEED=" << seed << std::endl;
  return seed;
}

SequenceSpec SmallSpec(uint64_t max_tokens) {
  SequenceSpec spec;
  spec.shape.layer_count = 2;
  spec.shape.query_head_count = 4;
  spec.shape.kv_head_count = 2;
  spec.shape.key_dim = 32;
  spec.shape.value_dim = 48;
  spec.shape.dtype = DType::kBF16;
  spec.shape.softmax_scale = 1.0f / std::sqrt(32.0f);
  spec.shape.model_id = "test";
  spec.index.segment_tokens = 1024;
  spec.index.small_segment_tokens = 256;
  spec.max_tokens = max_tokens;
  return spec;
}

TokenData::TokenData(const ModelShape& shape, uint64_t token_count, uint64_t seed)
    : shape_(shape), token_count_(token_count) {
  const size_t rows = shape.layer_count * token_count * shape.kv_head_count;
  keys_.resize(rows * shape.key_bytes());
  values_.resize(rows * shape.value_bytes());
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    for (uint32_t head = 0; head < shape.kv_head_count; ++head) {
      std::vector<std::vector<float>> topics;
      for (uint64_t topic = 0; topic < kTopics; ++topic) {
        topics.push_back(TopicVector(layer, head, topic, shape.key_dim));
      }
      for (uint64_t position = 0; position < token_count; ++position) {
        const uint64_t row_seed = Mix(Mix(Mix(seed, layer), head), position);
        std::vector<float> key = NormalVector(row_seed, shape.key_dim, kKeyNoise);
        const std::vector<float>& topic = topics[row_seed % kTopics];
        for (size_t i = 0; i < key.size(); ++i) key[i] += topic[i];
        SetKey(layer, position, head, key);
        SetValue(layer, position, head, NormalVector(row_seed + 1, shape.value_dim, 1.0f));
      }
    }
  }
}

const std::byte* TokenData::Key(uint32_t layer, uint64_t position, uint32_t head) const {
  return keys_.data() +
         ((layer * token_count_ + position) * shape_.kv_head_count + head) * shape_.key_bytes();
}
const std::byte* TokenData::Value(uint32_t layer, uint64_t position, uint32_t head) const {
  return values_.data() +
         ((layer * token_count_ + position) * shape_.kv_head_count + head) * shape_.value_bytes();
}
std::byte* TokenData::Key(uint32_t layer, uint64_t position, uint32_t head) {
  return const_cast<std::byte*>(std::as_const(*this).Key(layer, position, head));
}
std::byte* TokenData::Value(uint32_t layer, uint64_t position, uint32_t head) {
  return const_cast<std::byte*>(std::as_const(*this).Value(layer, position, head));
}
void TokenData::SetKey(uint32_t layer, uint64_t position, uint32_t head,
                       const std::vector<float>& key) {
  ConvertFromFloat(shape_.dtype, key.data(), key.size(), Key(layer, position, head));
}
void TokenData::SetValue(uint32_t layer, uint64_t position, uint32_t head,
                         const std::vector<float>& value) {
  ConvertFromFloat(shape_.dtype, value.data(), value.size(), Value(layer, position, head));
}

std::vector<float> RandomQueries(const ModelShape& shape, uint64_t seed) {
  std::vector<float> queries;
  for (uint32_t head = 0; head < shape.query_head_count; ++head) {
    const uint64_t head_seed = Mix(seed, head);
    std::vector<float> query = NormalVector(head_seed, shape.key_dim, 0.3f);
    const std::vector<float> topic =
        TopicVector(head_seed % shape.layer_count, head / shape.group_size(), head_seed % kTopics,
                    shape.key_dim);
    for (size_t i = 0; i < query.size(); ++i) query[i] += topic[i];
    queries.insert(queries.end(), query.begin(), query.end());
  }
  return queries;
}

ChunkBuffers::ChunkBuffers(const TokenData& data, SequenceRef sequence,
                           std::vector<uint32_t> layer_list, uint64_t first, uint64_t count,
                           Layout layout)
    : layers(std::move(layer_list)) {
  const ModelShape& shape = data.shape();
  key_shape = ChunkShape(layers.size(), count, shape.kv_head_count, shape.key_dim, layout);
  value_shape = ChunkShape(layers.size(), count, shape.kv_head_count, shape.value_dim, layout);
  const auto append = [&](uint32_t layer, uint64_t position, uint32_t head) {
    const std::byte* key = data.Key(layer, position, head);
    const std::byte* value = data.Value(layer, position, head);
    keys.insert(keys.end(), key, key + shape.key_bytes());
    values.insert(values.end(), value, value + shape.value_bytes());
  };
  for (const uint32_t layer : layers) {
    const uint64_t rows = count * shape.kv_head_count;
    for (uint64_t row = 0; row < rows; ++row) {
      if (layout == Layout::kNHD) {
        append(layer, first + row / shape.kv_head_count,
               static_cast<uint32_t>(row % shape.kv_head_count));
      } else {
        append(layer, first + row % count, static_cast<uint32_t>(row / count));
      }
    }
  }
  chunk.sequence = sequence;
  chunk.first_position = first;
  chunk.layers = layers;
  chunk.keys = {shape.dtype, key_shape, layout, keys};
  chunk.values = {shape.dtype, value_shape, layout, values};
}

QueryBuffers::QueryBuffers(const ModelShape& shape, SequenceRef sequence, uint32_t layer,
                           std::vector<float> query_vectors)
    : vectors(std::move(query_vectors)), tensor_shape{shape.query_head_count, shape.key_dim} {
  query.sequence = sequence;
  query.layer = layer;
  query.queries = {DType::kF32, tensor_shape, Layout::kNHD, std::as_bytes(std::span(vectors))};
}

OracleAnswer ExactOracle(const TokenData& data, uint32_t layer, uint64_t token_count,
                         const std::vector<float>& queries) {
  const ModelShape& shape = data.shape();
  OracleAnswer answer;
  std::vector<float> key(shape.key_dim);
  std::vector<float> value(shape.value_dim);
  for (uint32_t head = 0; head < shape.query_head_count; ++head) {
    const uint32_t kv_head = head / shape.group_size();
    std::vector<double> logits(token_count);
    double logit_max = -INFINITY;
    for (uint64_t position = 0; position < token_count; ++position) {
      ConvertToFloat(shape.dtype, data.Key(layer, position, kv_head), key.size(), key.data());
      double dot = 0;
      for (uint32_t i = 0; i < shape.key_dim; ++i) {
        dot += double{queries[head * shape.key_dim + i]} * double{key[i]};
      }
      logits[position] = dot * shape.softmax_scale;
      logit_max = std::max(logit_max, logits[position]);
    }
    std::vector<double> out(shape.value_dim);
    double mass = 0;
    for (uint64_t position = 0; position < token_count; ++position) {
      const double weight = std::exp(logits[position] - logit_max);
      ConvertToFloat(shape.dtype, data.Value(layer, position, kv_head), value.size(), value.data());
      for (uint32_t i = 0; i < shape.value_dim; ++i) out[i] += weight * double{value[i]};
      mass += weight;
    }
    for (double& x : out) x = mass > 0 ? x / mass : 0;
    answer.out.insert(answer.out.end(), out.begin(), out.end());
    answer.lse.push_back(logit_max + std::log(mass));
  }
  return answer;
}

double RelativeError(const ModelShape& shape, const std::vector<float>& found,
                     const std::vector<double>& expected) {
  EXPECT_EQ(found.size(), expected.size());
  if (found.size() != expected.size()) return INFINITY;
  double worst = 0;
  for (size_t begin = 0; begin < expected.size(); begin += shape.value_dim) {
    double error = 0;
    double norm = 0;
    for (size_t i = begin; i < begin + shape.value_dim; ++i) {
      error += std::pow(double{found[i]} - expected[i], 2);
      norm += std::pow(expected[i], 2);
    }
    // NaN must not pass as small.
    const double relative = std::sqrt(error / norm);
    worst = std::isnan(relative) ? INFINITY : std::max(worst, relative);
  }
  return worst;
}

EngineTest::EngineTest() {
  StartEngine({.epoch = 3, .build_threads = 2, .compute_threads = 2}, uint64_t{256} << 20);
}

void EngineTest::StartEngine(EngineOptions options, uint64_t pool_bytes,
                             std::unique_ptr<Stager> stager,
                             std::unique_ptr<ComputeBackend> backend) {
  options.clock = &clock_;
  if (backend == nullptr) backend = CreateCpuBackend();
  engine_.reset();
  pool_ = BlockPool::Create({.bytes_max = pool_bytes});
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(options, pool_, std::move(backend), std::move(stager));
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
}

SequenceRef EngineTest::Create(const SequenceSpec& spec, const TenantId& tenant, ClientId owner) {
  const absl::StatusOr<SequenceStatus> created = engine_->CreateSequence(tenant, owner, spec);
  EXPECT_TRUE(created.ok()) << created.status();
  if (!created.ok()) return {};
  return {created->id, created->generation};
}

absl::StatusOr<InsertOutcome> EngineTest::TryInsert(SequenceRef sequence, const TokenData& data,
                                                    uint64_t first, uint64_t count, Layout layout) {
  std::vector<uint32_t> layers;
  for (uint32_t layer = 0; layer < data.shape().layer_count; ++layer) layers.push_back(layer);
  const ChunkBuffers buffers(data, sequence, layers, first, count, layout);
  return engine_->Insert(kTenant, buffers.chunk);
}

void EngineTest::Insert(SequenceRef sequence, const TokenData& data, uint64_t first, uint64_t count,
                        Layout layout) {
  const absl::StatusOr<InsertOutcome> inserted = TryInsert(sequence, data, first, count, layout);
  ASSERT_TRUE(inserted.ok()) << inserted.status();
  EXPECT_GE(inserted->token_count, first + count);
}

SequenceRef EngineTest::Filled(const SequenceSpec& spec, const TokenData& data,
                               uint64_t token_count) {
  const SequenceRef sequence = Create(spec);
  Insert(sequence, data, 0, token_count);
  Build(sequence);
  return sequence;
}

BuildProgress EngineTest::Build(SequenceRef sequence) {
  const absl::StatusOr<BuildProgress> built = engine_->BuildIndex(kTenant, sequence, nullptr);
  EXPECT_TRUE(built.ok()) << built.status();
  if (!built.ok()) return {};
  EXPECT_TRUE(built->done);
  EXPECT_EQ(built->tokens_done, built->tokens_total);
  return *built;
}

void EngineTest::WaitIdle(SequenceRef sequence) {
  for (;;) {
    const absl::StatusOr<IndexDescription> description =
        engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt);
    ASSERT_TRUE(description.ok()) << description.status();
    if (!description->building) return;
    std::this_thread::yield();
  }
}

AttendOutcome EngineTest::Attend(SequenceRef sequence, uint32_t layer,
                                 const std::vector<float>& queries, bool exact,
                                 std::optional<ZoneBudget> budget) {
  const QueryBuffers buffers(shape(), sequence, layer, queries);
  AttendStep step;
  step.query = buffers.query;
  step.query.budget = budget;
  step.exact = exact;
  const absl::StatusOr<std::vector<AttendOutcome>> outcomes =
      engine_->Attend(kTenant, std::span(&step, 1));
  EXPECT_TRUE(outcomes.ok()) << outcomes.status();
  return outcomes.ok() ? outcomes->front() : AttendOutcome{.status = outcomes.status()};
}

AttendOutcome EngineTest::Decode(SequenceRef sequence, const TokenData& data, uint32_t layer,
                                 uint64_t position, const std::vector<float>& queries) {
  const QueryBuffers buffers(shape(), sequence, layer, queries);
  const ChunkBuffers token(data, sequence, {layer}, position, 1);
  const std::vector<int64_t> key_shape = {shape().kv_head_count, shape().key_dim};
  const std::vector<int64_t> value_shape = {shape().kv_head_count, shape().value_dim};
  AttendStep step;
  step.query = buffers.query;
  step.append_keys = TensorView{shape().dtype, key_shape, Layout::kNHD, token.keys};
  step.append_values = TensorView{shape().dtype, value_shape, Layout::kNHD, token.values};
  step.append_position = position;
  const absl::StatusOr<std::vector<AttendOutcome>> outcomes =
      engine_->Attend(kTenant, std::span(&step, 1));
  EXPECT_TRUE(outcomes.ok()) << outcomes.status();
  return outcomes.ok() ? outcomes->front() : AttendOutcome{.status = outcomes.status()};
}

SequenceStatus EngineTest::StatusOf(SequenceRef sequence) {
  const absl::StatusOr<SequenceStatus> status = engine_->GetSequence(kTenant, sequence);
  EXPECT_TRUE(status.ok()) << status.status();
  return status.ok() ? *status : SequenceStatus();
}

std::string EngineTest::Fingerprint(SequenceRef sequence, uint64_t seed) {
  std::string print;
  const absl::StatusOr<IndexDescription> index =
      engine_->DescribeIndex(kTenant, sequence, std::nullopt, std::nullopt);
  EXPECT_TRUE(index.ok()) << index.status();
  if (!index.ok()) return print;
  for (const SegmentStatus& segment : index->segments) {
    absl::StrAppend(&print, "segment ", segment.layer, "/", segment.kv_head, " ",
                    segment.first_position, "+", segment.token_count, " ", segment.cluster_count,
                    " ", segment.singleton_count, " ", segment.size_max, " ", segment.index_bytes,
                    "\n");
    AppendRaw(&segment.radius_mean, sizeof(double), &print);
  }
  for (uint32_t layer = 0; layer < shape().layer_count; ++layer) {
    const std::vector<float> queries = RandomQueries(shape(), seed + layer);
    const QueryBuffers buffers(shape(), sequence, layer, queries);
    LayerQuery query = buffers.query;
    query.budget = ZoneBudget{.kind = BudgetKind::kRatio, .value = 1.0};
    const absl::StatusOr<QueryOutcome> all = engine_->Query(kTenant, query, {.inline_rows = true});
    EXPECT_TRUE(all.ok()) << all.status();
    if (!all.ok()) return print;
    for (const HeadZones& head : all->heads) {
      for (const RetrievedCluster& cluster : head.retrieved) {
        absl::StrAppend(&print, cluster.segment_idx, "/", cluster.cluster_idx, " ", cluster.size,
                        " ");
        AppendRaw(&cluster.estimated_mass, sizeof(float), &print);
      }
      AppendAll(head.inline_positions, &print);
      AppendAll(head.inline_keys, &print);
      AppendAll(head.inline_values, &print);
    }
    const AttendOutcome attended = Attend(sequence, layer, queries);
    EXPECT_TRUE(attended.status.ok()) << attended.status;
    AppendAll(attended.out, &print);
    AppendAll(attended.lse, &print);
  }
  return print;
}

}  // namespace wavekv::testing
