// What the attention benchmarks attend over: an engine that holds one sequence of topic-structured
// keys, and queries that walk slowly over the topics.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "daemon/engine/engine.h"
#include "storage/base/thread_pool.h"

namespace wavekv::bench {

struct WorldOptions {
  uint32_t tokens = 131072;
  uint32_t layers = 4;
  uint32_t query_heads = 32;
  uint32_t kv_heads = 8;
  uint32_t dim = 128;
  uint32_t steps = 32;   // Queries of each layer.
  uint32_t threads = 0;  // 0: from the cpuset.
  uint64_t seed = 1;
};

class AttendWorld {
 public:
  // Makes the data, inserts it and builds the index; ends the process when that fails.
  explicit AttendWorld(const WorldOptions& options);

  // One step of one layer, in bf16.
  AttendOutcome Attend(uint32_t layer, uint32_t step, bool exact);
  AttendOutcome Attend(uint32_t layer, uint32_t step, const ZoneBudget& budget);

  const WorldOptions& options() const { return options_; }
  uint32_t group_size() const { return options_.query_heads / options_.kv_heads; }
  float scale() const { return shape_.softmax_scale; }
  // As many threads as the engine computes with, the caller included.
  ThreadPool* pool() { return &pool_; }
  int thread_count() const { return pool_.thread_count() + 1; }
  const Engine& engine() const { return *engine_; }

  // Rows of one KV head of layer 0, in order of position: [tokens, dim] bf16.
  std::span<const std::byte> keys(uint32_t kv_head) const { return HeadRows(keys_, kv_head); }
  std::span<const std::byte> values(uint32_t kv_head) const { return HeadRows(values_, kv_head); }
  // Some memory larger than the caches.
  std::span<const std::byte> memory() const { return keys_; }
  // What the engine reads of a step's queries: [query_heads, dim].
  std::span<const float> queries(uint32_t layer, uint32_t step) const;

 private:
  void Fill(uint32_t layer);
  std::span<const std::byte> HeadRows(const std::vector<std::byte>& rows, uint32_t kv_head) const;
  void WalkQueries(uint32_t layer, uint32_t kv_head, std::span<const float> topics);
  AttendOutcome Run(AttendStep step, uint32_t layer, uint32_t step_idx);

  const WorldOptions options_;
  ThreadPool pool_;
  ModelShape shape_;
  std::unique_ptr<Engine> engine_;
  SequenceRef sequence_;
  std::vector<std::byte> keys_, values_;                // Of layer 0: [kv_heads, tokens, dim]
  std::vector<std::vector<float>> queries_;             // [layers][steps, query_heads, dim]
  std::vector<std::vector<std::byte>> stored_queries_;  // The same in bf16.
};

}  // namespace wavekv::bench
