// How often a block cache has what decode steps ask for: each policy against the best that is
// possible, on a trace of drifting queries or on a recording.
//
//   bench_cache [--json] [--tokens=122880] [--heads=4] [--steps=1000] [--ratio=0.018] ...
//   bench_cache [--json] --trace=RECORDING [--ratio=0.018]
//
// Without a recording: topic-structured keys with a mean of their head, groups of 4 query heads,
// dim 128, bf16. `ratio` of the clusters is retrieved at each step; 0: as many as a resident step
// retrieves by default. The first tenth of the steps fills the caches and is not counted.
//
// Rows of `rows`: all heads share a cache of 5 or 20 % of their blocks of 8 tokens, as in a wave
// buffer in host memory. Rows of `offered_rows`: each head has one of its own whose slots the steps
// fill, as on a GPU, with a round of the manager after every step or after every eighth.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "bench/block_trace.h"
#include "bench/built_head.h"
#include "bench/machine.h"
#include "bench/offered_cache.h"
#include "bench/or_die.h"
#include "bench/recorded_layers.h"
#include "bench/topic_data.h"
#include "index/backend/cpu_backend.h"
#include "index/zone/select_zones.h"
#include "storage/base/cpuset.h"
#include "storage/base/dtype.h"
#include "storage/base/thread_pool.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kBlockTokens = 8;
constexpr double kHitGoal = 0.9;  // Of the best possible, at the smallest cache.
constexpr double kCacheRatios[] = {0.05, 0.2};
constexpr uint32_t kStepsPerRound[] = {1, 8};

struct Options {
  uint32_t tokens = 122880;
  uint32_t heads = 4;
  uint32_t steps = 1000;
  double ratio = 0.018;
  uint64_t seed = 1;
  std::string trace;
};

// A KV head's tokens and the queries that were asked of them.
struct HeadTrace {
  BuiltHead head;
  uint32_t dim = 0, group = 0, tokens = 0;
  DType dtype = DType::kBF16;
  float scale = 0;
  std::vector<std::vector<float>> queries;  // Of each step [group, dim].
};

HeadTrace MakeHead(ComputeBackend& backend, const Options& options, uint32_t kv_head) {
  constexpr uint32_t kDim = 128, kGroup = 4;
  std::mt19937_64 random(options.seed * 1000003 + kv_head);
  std::normal_distribution<float> normal;
  std::vector<float> mean(kDim), topics;
  for (float& x : mean) x = normal(random);
  std::vector<std::byte> keys, values;
  const auto store = [](const std::vector<float>& rows, std::vector<std::byte>* to) {
    const size_t at = to->size();
    to->resize(at + rows.size() * 2);
    ConvertFromFloat(DType::kBF16, rows.data(), rows.size(), to->data() + at);
  };
  for (uint32_t first = 0; first < options.tokens; first += kTopicStretchTokens) {
    const uint32_t count = std::min(kTopicStretchTokens, options.tokens - first);
    const TopicStretchId id = {options.seed, 0, kv_head, first / kTopicStretchTokens};
    TopicStretch stretch = MakeTopicStretch(id, count, kDim);
    topics.insert(topics.end(), stretch.topics.begin(), stretch.topics.end());
    for (size_t i = 0; i < stretch.keys.size(); ++i) stretch.keys[i] += mean[i % kDim];
    store(stretch.keys, &keys);
    store(MakeTopicValues(id, count, kDim), &values);
  }
  const std::vector<float> queries =
      DriftTopicQueries({options.seed, 0, kv_head}, topics, options.steps, kGroup, kDim);
  HeadTrace trace = {.head = BuildHead(backend, keys, values, kDim, DType::kBF16),
                     .dim = kDim,
                     .group = kGroup,
                     .tokens = options.tokens,
                     .scale = 1 / std::sqrt(static_cast<float>(kDim))};
  for (size_t at = 0; at < queries.size(); at += kGroup * kDim) {
    trace.queries.emplace_back(queries.begin() + at, queries.begin() + at + kGroup * kDim);
  }
  return trace;
}

// The index is that of the prefill: of what the first query saw.
HeadTrace RecordedHead(ComputeBackend& backend, const RecordedLayer& layer, uint32_t kv_head) {
  const uint32_t tokens = layer.queries.front().token_count;
  const size_t bytes = size_t{tokens} * layer.key_dim * DTypeBytes(layer.dtype);
  const size_t group_floats = size_t{layer.group_size()} * layer.key_dim;
  HeadTrace trace = {
      .head = BuildHead(backend, std::span(layer.keys[kv_head]).first(bytes),
                        std::span(layer.values[kv_head]).first(bytes), layer.key_dim, layer.dtype),
      .dim = layer.key_dim,
      .group = layer.group_size(),
      .tokens = tokens,
      .dtype = layer.dtype,
      .scale = layer.scale};
  for (const RecordedQuery& query : layer.queries) {
    const float* const first = &query.queries[kv_head * group_floats];
    trace.queries.emplace_back(first, first + group_floats);
  }
  return trace;
}

uint32_t RetrievalCount(const HeadTrace& trace, double ratio) {
  const ZoneBudget budget = ratio > 0 ? ZoneBudget{.value = ratio} : ZoneBudget();
  return UnsketchedRetrievalCount(budget, /*sketch=*/ratio == 0, ClusterCount(trace.head.index));
}

// The blocks that each step retrieves.
BlockTrace BlocksOf(ComputeBackend& backend, const HeadTrace& trace, double ratio) {
  const ZoneBudget budget = {.kind = BudgetKind::kClusters,
                             .value = static_cast<double>(RetrievalCount(trace, ratio))};
  BlockTrace blocks;
  for (const std::vector<float>& queries : trace.queries) {
    const GroupQuery query = {queries, trace.group, trace.dim, trace.dim, trace.dtype, trace.scale};
    PartialAttention steady;
    ClusterScores scores;
    OrDie(backend.AttendRows(trace.head.steady, query, &steady));
    OrDie(backend.RankClusters(trace.head.index, query, steady.lse, &scores));
    const ZonePlan zones =
        OrDie(backend.SelectZones(trace.head.index, query, scores, steady.lse, budget));
    blocks.emplace_back();
    for (const uint32_t cluster : zones.retrieved) {
      const uint32_t rows = ClusterRows(trace.head.index, cluster).row_count;
      for (uint32_t i = 0; i * kBlockTokens < rows; ++i) blocks.back().push_back({cluster + 1, i});
    }
  }
  return blocks;
}

// All blocks of a head, of which few are ever asked for.
uint32_t BlockCount(const HeadTrace& trace) {
  uint32_t count = 0;
  for (uint32_t cluster = 0; cluster < ClusterCount(trace.head.index); ++cluster) {
    const uint32_t rows = ClusterRows(trace.head.index, cluster).row_count;
    count += (rows + kBlockTokens - 1) / kBlockTokens;
  }
  return count;
}

std::vector<HeadTrace> ReadHeads(ComputeBackend& backend, const std::string& path) {
  std::vector<HeadTrace> heads;
  for (const RecordedLayer& layer : ReadLayers(path, {})) {
    for (uint32_t kv_head = 0; kv_head < layer.kv_heads; ++kv_head) {
      heads.push_back(RecordedHead(backend, layer, kv_head));
    }
  }
  return heads;
}

std::vector<HeadTrace> MakeHeads(ComputeBackend& backend, const Options& options,
                                 ThreadPool* pool) {
  std::vector<HeadTrace> heads(options.heads);
  pool->ParallelFor(options.heads, [&](size_t head) {
    heads[head] = MakeHead(backend, options, static_cast<uint32_t>(head));
  });
  return heads;
}

// All heads' blocks, step by step: a sequence has one cache.
BlockTrace Together(std::span<const BlockTrace> heads) {
  BlockTrace together(heads[0].size());
  for (size_t step = 0; step < together.size(); ++step) {
    for (size_t head = 0; head < heads.size(); ++head) {
      for (const BlockKey& key : heads[head][step]) {
        together[step].push_back({key.segment_uid * heads.size() + head, key.block});
      }
    }
  }
  return together;
}

nlohmann::ordered_json OfferedRow(std::span<const HeadTrace> heads,
                                  std::span<const BlockTrace> blocks, double cache_ratio,
                                  uint32_t steps_per_round, double ratio, uint64_t seed) {
  CacheHits offered, best;
  uint64_t slot_count = 0, step_blocks = 0;
  for (size_t head = 0; head < heads.size(); ++head) {
    const BlockTrace& trace = blocks[head];
    const size_t counted = trace.size() / 10;
    const auto slots = static_cast<uint32_t>(std::ceil(cache_ratio * BlockCount(heads[head])));
    offered += ReplayOffered(trace, {.slots = slots,
                                     .clusters_per_step = RetrievalCount(heads[head], ratio),
                                     .steps_per_round = steps_per_round,
                                     .first_counted = counted,
                                     .seed = seed + head});
    best += ReplayBelady(trace, counted, slots);
    slot_count += slots;
    for (const std::vector<BlockKey>& step : trace) step_blocks += step.size();
  }
  return {{"cache_ratio", cache_ratio},
          {"steps_per_round", steps_per_round},
          {"slots_per_head", slot_count / heads.size()},
          {"blocks_per_step", step_blocks / heads.size() / blocks[0].size()},
          {"hit_ratio", offered.ratio()},
          {"belady_hit_ratio", best.ratio()},
          {"of_belady", offered.ratio() / best.ratio()}};
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  bool json = false;
  CLI::App app("Block cache policies against the best possible");
  app.add_option("--trace", options.trace, "A recording; none: the generated one");
  app.add_option("--tokens", options.tokens)->check(CLI::Range(4096, 1 << 21));
  app.add_option("--heads", options.heads)->check(CLI::Range(1, 64));
  app.add_option("--steps", options.steps)->check(CLI::Range(10, 100000));
  app.add_option("--ratio", options.ratio, "Share of the clusters that a step retrieves")
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", options.seed);
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  const auto backend = CreateCpuBackend();
  ThreadPool pool(UsableCpuCount() - 1, "bench");
  const std::vector<HeadTrace> heads = options.trace.empty() ? MakeHeads(*backend, options, &pool)
                                                             : ReadHeads(*backend, options.trace);
  std::vector<BlockTrace> blocks(heads.size());
  uint64_t tokens = 0;
  pool.ParallelFor(heads.size(), [&](size_t head) {
    blocks[head] = BlocksOf(*backend, heads[head], options.ratio);
  });
  for (const HeadTrace& head : heads) tokens += head.tokens;
  const BlockTrace trace = Together(blocks);
  const size_t counted = trace.size() / 10;

  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  bool goal = true;
  for (const double cache_ratio : kCacheRatios) {
    const auto slots =
        static_cast<uint32_t>(cache_ratio * static_cast<double>(tokens) / kBlockTokens);
    const double lru = Replay(trace, counted, MakeLruBlockCachePolicy(slots).get()).ratio();
    const double lrfu = Replay(trace, counted, MakeLrfuBlockCachePolicy(slots).get()).ratio();
    const double best = ReplayBelady(trace, counted, slots).ratio();
    rows.push_back({{"cache_ratio", cache_ratio},
                    {"slots", slots},
                    {"lru_hit_ratio", lru},
                    {"lrfu_hit_ratio", lrfu},
                    {"belady_hit_ratio", best},
                    {"lrfu_of_belady", lrfu / best}});
    if (cache_ratio == kCacheRatios[0]) goal = lrfu >= kHitGoal * best;
  }
  nlohmann::ordered_json offered = nlohmann::ordered_json::array();
  for (const double cache_ratio : kCacheRatios) {
    for (const uint32_t steps_per_round : kStepsPerRound) {
      offered.push_back(
          OfferedRow(heads, blocks, cache_ratio, steps_per_round, options.ratio, options.seed));
    }
  }
  nlohmann::ordered_json report;
  report["workload"] = "cache";
  report["rows"] = std::move(rows);
  report["offered_rows"] = std::move(offered);
  report["goals"] = {{"lrfu_of_belady", goal}};
  report["trace"] = options.trace.empty() ? "drifting queries" : "recorded";
  report["tokens"] = heads[0].tokens;
  report["kv_heads"] = heads.size();
  report["steps"] = trace.size();
  report["ratio"] = options.ratio;
  report["seed"] = options.seed;
  report["commit"] = CommitName();
  std::cout << report.dump(json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
