// What the engine's tests share: a small model, random tokens, an engine on a fake clock, calls
// without ceremony, and an oracle in float64.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "gtest/gtest.h"
#include "index/backend/compute_backend.h"
#include "storage/base/clock.h"
#include "storage/block_pool.h"

namespace wavekv::testing {

inline constexpr char kTenant[] = "uid:1000";
inline constexpr ClientId kOwner(7);

// A fresh seed, printed; WAVEKV_TEST_SEED repeats one.
uint64_t FreshSeed();

// 2 layers, 4 query heads, 2 KV heads, key dim 32, value dim 48, bf16; stretches of 1,024 tokens
// and small segments of 256.
SequenceSpec SmallSpec(uint64_t max_tokens);

// Standard deviation of a key around its topic, each dimension.
inline constexpr float kKeyNoise = 0.4f;

// K and V of the first token_count positions of every layer, dtype of the shape. Keys gather around
// a few topics, values are random. K and V of a position depend on the seed and the position only,
// so that data of another length holds the same tokens.
class TokenData {
 public:
  TokenData(const ModelShape& shape, uint64_t token_count, uint64_t seed);

  uint64_t token_count() const { return token_count_; }
  const ModelShape& shape() const { return shape_; }
  // Row of one token, in storage bytes; may be overwritten by a test.
  std::byte* Key(uint32_t layer, uint64_t position, uint32_t head);
  std::byte* Value(uint32_t layer, uint64_t position, uint32_t head);
  const std::byte* Key(uint32_t layer, uint64_t position, uint32_t head) const;
  const std::byte* Value(uint32_t layer, uint64_t position, uint32_t head) const;
  void SetKey(uint32_t layer, uint64_t position, uint32_t head, const std::vector<float>& key);
  void SetValue(uint32_t layer, uint64_t position, uint32_t head, const std::vector<float>& value);

 private:
  ModelShape shape_;
  uint64_t token_count_;
  std::vector<std::byte> keys_;    // [layers, tokens, heads, key_dim]
  std::vector<std::byte> values_;  // [layers, tokens, heads, value_dim]
};

// Random query vectors [query_heads, key_dim], drawn near the topics.
std::vector<float> RandomQueries(const ModelShape& shape, uint64_t seed);

// An Insert's tensors with the memory behind them. Not movable once `chunk` was taken.
struct ChunkBuffers {
  ChunkBuffers(const TokenData& data, SequenceRef sequence, std::vector<uint32_t> layer_list,
               uint64_t first, uint64_t count, Layout layout = Layout::kNHD);
  ChunkBuffers(const ChunkBuffers&) = delete;

  std::vector<uint32_t> layers;
  std::vector<int64_t> key_shape;
  std::vector<int64_t> value_shape;
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  InsertChunk chunk;
};

// A LayerQuery over float vectors, and the memory behind it.
struct QueryBuffers {
  QueryBuffers(const ModelShape& shape, SequenceRef sequence, uint32_t layer,
               std::vector<float> query_vectors);
  QueryBuffers(const QueryBuffers&) = delete;

  std::vector<float> vectors;
  std::vector<int64_t> tensor_shape;
  LayerQuery query;
};

// Attention of query vectors [query_heads, key_dim] over the first `token_count` tokens.
struct OracleAnswer {
  std::vector<double> out;  // [query_heads, value_dim]
  std::vector<double> lse;  // [query_heads]
};
OracleAnswer ExactOracle(const TokenData& data, uint32_t layer, uint64_t token_count,
                         const std::vector<float>& queries);

// Largest |found - expected| over the norm of the expected row, over query heads.
double RelativeError(const ModelShape& shape, const std::vector<float>& found,
                     const std::vector<double>& expected);

class EngineTest : public ::testing::Test {
 protected:
  EngineTest();

  // Replaces the engine; before any sequence exists. Without a backend: the CPU's.
  void StartEngine(EngineOptions options, uint64_t pool_bytes,
                   std::unique_ptr<Stager> stager = nullptr,
                   std::unique_ptr<ComputeBackend> backend = nullptr);

  SequenceRef Create(const SequenceSpec& spec, const TenantId& tenant = kTenant,
                     ClientId owner = kOwner);
  absl::StatusOr<InsertOutcome> TryInsert(SequenceRef sequence, const TokenData& data,
                                          uint64_t first, uint64_t count,
                                          Layout layout = Layout::kNHD);
  // All layers at once.
  void Insert(SequenceRef sequence, const TokenData& data, uint64_t first, uint64_t count,
              Layout layout = Layout::kNHD);
  BuildProgress Build(SequenceRef sequence);
  // A sequence that holds the first token_count tokens of the data, its index built.
  SequenceRef Filled(const SequenceSpec& spec, const TokenData& data, uint64_t token_count);
  SequenceRef Filled(const TokenData& data, uint64_t token_count) {
    return Filled(spec_, data, token_count);
  }
  // Returns once nothing is built in the background.
  void WaitIdle(SequenceRef sequence);
  AttendOutcome Attend(SequenceRef sequence, uint32_t layer, const std::vector<float>& queries,
                       bool exact = false, std::optional<ZoneBudget> budget = std::nullopt);
  // Attend that appends token `position` of the data first.
  AttendOutcome Decode(SequenceRef sequence, const TokenData& data, uint32_t layer,
                       uint64_t position, const std::vector<float>& queries);
  SequenceStatus StatusOf(SequenceRef sequence);

  // Everything of the index and of answers that a caller can see, as bytes: segments, clusters,
  // stored rows with their positions, outputs. Equal for equal indexes only.
  std::string Fingerprint(SequenceRef sequence, uint64_t seed);

  const ModelShape& shape() const { return spec_.shape; }

  FakeClock clock_;
  SequenceSpec spec_ = SmallSpec(8192);
  std::shared_ptr<BlockPool> pool_;
  std::unique_ptr<Engine> engine_;
};

}  // namespace wavekv::testing
