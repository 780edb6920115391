// How time and memory grow with the length and the number of sequences.
//
//   bench_scale [--json] [--tokens-max=1048576] [--total-max=2097152] [--seed=1] ...
//
// A row for each case: so many sequences of so many tokens of topic-structured keys, 32 / 8 heads
// of 128, bf16. Every sequence holds the same tokens in memory of its own. Short and few ones have
// several layers that are attended in turn, so that nothing lives in a cache. A step is one layer
// of all sequences, in one call. A case that does not fit into memory is left out and named.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/machine.h"
#include "bench/or_die.h"
#include "bench/topic_data.h"
#include "daemon/engine/engine.h"
#include "index/backend/cpu_backend.h"
#include "storage/base/check.h"
#include "storage/base/cpuset.h"
#include "storage/base/memory_probe.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kQueryHeads = 32, kKvHeads = 8, kDim = 128;
constexpr uint32_t kGroup = kQueryHeads / kKvHeads;
constexpr uint32_t kUncachedTokens = 131072;  // Of all layers and sequences together, at least.
constexpr uint32_t kSteps = 32;               // Queries that are asked in turn.
constexpr double kMemoryGoal = 1.15;
const TenantId kTenant("bench");

struct Case {
  uint32_t tokens = 0;
  uint32_t sequences = 0;
  uint32_t layers() const { return std::max<uint32_t>(1, kUncachedTokens / (tokens * sequences)); }
  uint64_t all_tokens() const { return uint64_t{tokens} * sequences * layers(); }
};

ModelShape Shape(uint32_t layers) {
  return {layers,
          kQueryHeads,
          kKvHeads,
          kDim,
          kDim,
          DType::kBF16,
          1 / std::sqrt(static_cast<float>(kDim)),
          "bench"};
}

// The longest case's tokens, as an insert takes them; shorter cases take the first of them.
class Prompt {
 public:
  Prompt(uint32_t tokens, uint64_t seed, ThreadPool* pool) : seed_(seed) {
    const uint32_t stretches = (tokens + kTopicStretchTokens - 1) / kTopicStretchTokens;
    for (uint32_t i = 0; i < stretches; ++i) {
      AddStretch(i, std::min(kTopicStretchTokens, tokens - i * kTopicStretchTokens), pool);
    }
  }

  // One layer of a sequence.
  void InsertInto(Engine* engine, SequenceRef sequence, uint32_t layer, uint32_t tokens) const {
    for (uint32_t i = 0; i * kTopicStretchTokens < tokens; ++i) {
      const uint32_t first = i * kTopicStretchTokens;
      const uint32_t count = std::min(kTopicStretchTokens, tokens - first);
      const int64_t shape[] = {1, count, kKvHeads, kDim};
      const size_t bytes = size_t{count} * kKvHeads * kDim * 2;
      const auto rows = [&](const std::vector<std::byte>& all) {
        return TensorView{DType::kBF16, shape, Layout::kNHD, std::span(all).first(bytes)};
      };
      OrDie(engine->Insert(kTenant, {sequence, first, std::span(&layer, 1),
                                     rows(stretches_[i].keys), rows(stretches_[i].values)}));
    }
  }

  // Queries [kSteps, kQueryHeads, kDim], in bf16, over the topics of the first `tokens`.
  std::vector<std::byte> Queries(uint32_t tokens) const {
    const size_t topics =
        size_t{(tokens + kTopicStretchTokens - 1) / kTopicStretchTokens} * kTopicCount * kDim;
    constexpr size_t kGroupFloats = size_t{kGroup} * kDim;
    std::vector<float> queries(size_t{kSteps} * kQueryHeads * kDim);
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      const std::vector<float> walk = WalkTopicQueries(
          {seed_, 0, head}, std::span(topics_[head]).first(topics), kSteps, kGroup, kDim);
      for (size_t step = 0; step < kSteps; ++step) {
        std::copy_n(&walk[step * kGroupFloats], kGroupFloats,
                    &queries[(step * kKvHeads + head) * kGroupFloats]);
      }
    }
    std::vector<std::byte> stored(queries.size() * 2);
    ConvertFromFloat(DType::kBF16, queries.data(), queries.size(), stored.data());
    return stored;
  }

 private:
  struct Stretch {
    std::vector<std::byte> keys, values;  // [tokens, kKvHeads, kDim] bf16
  };

  void AddStretch(uint32_t stretch, uint32_t tokens, ThreadPool* pool) {
    const size_t bytes = size_t{tokens} * kKvHeads * kDim * 2;
    stretches_.push_back({std::vector<std::byte>(bytes), std::vector<std::byte>(bytes)});
    pool->ParallelFor(kKvHeads, [&](size_t head) {
      const TopicStretchId id = {seed_, 0, static_cast<uint32_t>(head), stretch};
      const auto store = [&](const std::vector<float>& rows, std::vector<std::byte>* to) {
        for (size_t i = 0; i < tokens; ++i) {
          ConvertFromFloat(DType::kBF16, &rows[i * kDim], kDim,
                           to->data() + (i * kKvHeads + head) * kDim * 2);
        }
      };
      const TopicStretch made = MakeTopicStretch(id, tokens, kDim);
      store(made.keys, &stretches_.back().keys);
      store(MakeTopicValues(id, tokens, kDim), &stretches_.back().values);
      topics_[head].insert(topics_[head].end(), made.topics.begin(), made.topics.end());
    });
  }

  const uint64_t seed_;
  std::vector<Stretch> stretches_;
  std::vector<float> topics_[kKvHeads];  // [.., kDim]
};

std::unique_ptr<Engine> NewEngine(uint32_t threads) {
  EngineOptions options;
  options.epoch = 1;
  options.compute_threads = threads;
  options.build_threads = threads;
  return OrDie(Engine::Create(options, BlockPool::Create({uint64_t{1} << 40, 0}),
                              CreateCpuBackend(), nullptr));
}

// A step of one layer of every sequence.
StepCounters AttendAll(Engine* engine, std::span<const SequenceRef> sequences, uint32_t layer,
                       std::span<const std::byte> queries) {
  const int64_t shape[] = {kQueryHeads, kDim};
  std::vector<AttendStep> steps(sequences.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    steps[i].query.sequence = sequences[i];
    steps[i].query.layer = layer;
    steps[i].query.queries = {DType::kBF16, shape, Layout::kNHD, queries};
  }
  StepCounters counters;
  for (const AttendOutcome& outcome : OrDie(engine->Attend(kTenant, steps))) {
    OrDie(outcome.status);
    counters += outcome.counters;
  }
  return counters;
}

nlohmann::ordered_json MeasureCase(const Case& c, const Prompt& prompt, uint32_t threads,
                                   uint32_t rounds) {
  const uint64_t resident_before = ReadMemoryReport().resident_bytes;
  const std::unique_ptr<Engine> engine = NewEngine(threads);
  std::vector<SequenceRef> sequences;
  const double build_start = NowUs();
  for (uint32_t i = 0; i < c.sequences; ++i) {
    SequenceSpec spec;
    spec.shape = Shape(c.layers());
    spec.max_tokens = c.tokens;
    const SequenceStatus made = OrDie(engine->CreateSequence(kTenant, ClientId(), spec));
    sequences.push_back({made.id, made.generation});
    for (uint32_t layer = 0; layer < c.layers(); ++layer) {
      prompt.InsertInto(engine.get(), sequences.back(), layer, c.tokens);
    }
  }
  for (const SequenceRef& sequence : sequences) {
    OrDie(engine->BuildIndex(kTenant, sequence, [](const BuildProgress&) { return true; }));
  }
  const double build_ms = (NowUs() - build_start) / 1e3;
  const std::vector<std::byte> queries = prompt.Queries(c.tokens);
  std::vector<double> us;
  StepCounters counters;
  for (uint32_t round = 0; round <= rounds; ++round) {
    if (round == 1) us.clear();  // The first round warms up.
    for (uint32_t layer = 0; layer < c.layers(); ++layer) {
      const size_t bytes = queries.size() / kSteps;
      const double start = NowUs();
      counters += AttendAll(engine.get(), sequences, layer,
                            std::span(queries).subspan(round % kSteps * bytes, bytes));
      us.push_back(NowUs() - start);
    }
  }
  const uint64_t resident = ReadMemoryReport().resident_bytes - resident_before;
  const uint64_t payload = c.all_tokens() * kKvHeads * kDim * 2 * 2;
  const uint64_t index = engine->Stats().index_bytes;
  nlohmann::ordered_json row;
  row["tokens"] = c.tokens;
  row["sequences"] = c.sequences;
  row["layers"] = c.layers();
  row["attend_us"] = Median(us);
  row["build_ms"] = build_ms / c.layers();
  row["rss_bytes"] = resident;
  row["payload_bytes"] = payload;
  row["index_bytes"] = index;
  row["memory_ratio"] = static_cast<double>(resident) / static_cast<double>(payload + index);
  row["kv_bytes_read_ratio"] =
      static_cast<double>(counters.kv_bytes_read) / static_cast<double>(counters.kv_bytes_full);
  return row;
}

// Of two rows of as many sequences the longer one takes less time a token.
bool GrowsSlowerThanTokens(const nlohmann::ordered_json& rows) {
  bool slower = true;
  for (const auto& a : rows) {
    for (const auto& b : rows) {
      if (a["sequences"] != b["sequences"] || a["tokens"] >= b["tokens"]) continue;
      slower &= b["attend_us"].get<double>() * a["tokens"].get<double>() <
                a["attend_us"].get<double>() * b["tokens"].get<double>();
    }
  }
  return slower;
}

std::vector<Case> Cases(uint32_t tokens_max, uint32_t total_max) {
  std::vector<Case> cases;
  for (uint32_t tokens = 16384; tokens <= tokens_max; tokens *= 4) {
    for (uint32_t sequences = 1; sequences <= 64; sequences *= 8) {
      if (uint64_t{tokens} * sequences <= total_max) cases.push_back({tokens, sequences});
    }
  }
  return cases;
}

// What a case takes at most: payload, index, and the tokens under way.
bool Fits(const Case& c) {
  const MemoryReport memory = ReadMemoryReport();
  const uint64_t free_bytes =
      std::min(memory.machine_available_bytes, memory.cgroup_free_bytes.value_or(UINT64_MAX));
  return c.all_tokens() * kKvHeads * kDim * 4 * 8 / 5 + (uint64_t{1} << 29) <= free_bytes;
}

}  // namespace

int Main(int argc, char** argv) {
  uint32_t tokens_max = 1 << 20, total_max = 1 << 21, threads = 0, rounds = 9;
  uint64_t seed = 1;
  bool json = false;
  CLI::App app("Attention, index building and memory by length and number of sequences");
  app.add_option("--tokens-max", tokens_max, "The longest sequence")
      ->check(CLI::Range(16384, 1 << 22));
  app.add_option("--total-max", total_max, "Tokens of all sequences of a case together")
      ->check(CLI::Range(16384, 1 << 24));
  app.add_option("--threads", threads, "0: as many as there are CPUs")
      ->check(CLI::Range(0, static_cast<int>(kEngineThreadsMax)));
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--seed", seed);
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  if (threads == 0) threads = static_cast<uint32_t>(UsableCpuCount());
  ThreadPool pool(static_cast<int>(threads) - 1, "bench");
  std::fprintf(stderr, "making %u tokens\n", std::min(tokens_max, total_max));
  const Prompt prompt(std::min(tokens_max, total_max), seed, &pool);

  nlohmann::ordered_json rows = nlohmann::ordered_json::array(), left_out = rows;
  double memory_ratio = 0;
  for (const Case& c : Cases(tokens_max, total_max)) {
    std::fprintf(stderr, "%u sequences of %u tokens\n", c.sequences, c.tokens);
    if (!Fits(c)) {
      left_out.push_back({{"tokens", c.tokens}, {"sequences", c.sequences}});
      continue;
    }
    rows.push_back(MeasureCase(c, prompt, threads, rounds));
    memory_ratio = std::max(memory_ratio, rows.back()["memory_ratio"].get<double>());
    std::fprintf(stderr, "  %s\n", rows.back().dump().c_str());
  }
  nlohmann::ordered_json report;
  report["workload"] = "scale";
  report["goals"] = {{"attend_us", GrowsSlowerThanTokens(rows)},
                     {"rss_bytes", memory_ratio <= kMemoryGoal}};
  report["rows"] = std::move(rows);
  report["left_out_for_memory"] = std::move(left_out);
  report["threads"] = threads;
  report["seed"] = seed;
  report["cpu"] = CpuName();
  report["commit"] = CommitName();
  std::cout << report.dump(json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
