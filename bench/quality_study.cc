// The numbers of docs/index_quality.md: how good an index and a budget are on a real model's keys,
// values and queries, against the bytes that they read.
//
//   quality_study TRACE [--prefill=N] [--steps=N] [--queries=N] [--layers=0,3,6] [--drift=N]
//
// Prints one JSON object: "rows", a point of a curve each (quality_questions.h), of steps that
// follow a prefill of N tokens; and "drift", the error by decoded tokens after a short prefill of
// the index that grew with them, and of one that was built whole. Every answer is compared with
// exact attention over the same tokens.
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "bench/machine.h"
#include "bench/quality_questions.h"
#include "bench/recorded_layers.h"
#include "bench/studied_head.h"
#include "index/backend/cpu_backend.h"
#include "nlohmann/json.hpp"
#include "storage/base/check.h"
#include "storage/base/thread_pool.h"

namespace wavekv::bench {
namespace {

constexpr uint64_t kDriftBinTokens = 512;
constexpr uint64_t kRestTokensMin = 256;

struct Options {
  std::string recording;
  uint64_t prefill = 6600;
  uint64_t drift = 2048;
  uint64_t steps = 512;   // Of those that follow the prefill, these are studied,
  uint32_t queries = 16;  // this many of them for each head.
  std::vector<uint32_t> layers;
};

// Outcomes of one policy, gathered.
struct Tally {
  std::vector<double> errors, covered;
  uint64_t bytes_read = 0, bytes_full = 0, answers = 0, met = 0, capped = 0, retrieved = 0;
  double index_ratio = 0;  // Of the last head.

  void Add(const Outcome& outcome) {
    errors.insert(errors.end(), outcome.errors.begin(), outcome.errors.end());
    covered.insert(covered.end(), outcome.covered.begin(), outcome.covered.end());
    bytes_read += outcome.bytes_read;
    bytes_full += outcome.bytes_full;
    ++answers;
    met += outcome.met ? 1 : 0;
    capped += outcome.capped ? 1 : 0;
    retrieved += outcome.retrieved;
  }

  void Add(const Tally& other) {
    errors.insert(errors.end(), other.errors.begin(), other.errors.end());
    covered.insert(covered.end(), other.covered.begin(), other.covered.end());
    bytes_read += other.bytes_read;
    bytes_full += other.bytes_full;
    answers += other.answers;
    met += other.met;
    capped += other.capped;
    retrieved += other.retrieved;
    index_ratio = other.index_ratio;
  }

  nlohmann::ordered_json Json() const {
    const auto share = [this](uint64_t count) {
      return answers == 0 ? 0 : static_cast<double>(count) / static_cast<double>(answers);
    };
    return {{"bytes", static_cast<double>(bytes_read) / static_cast<double>(bytes_full)},
            {"covered", Mean(covered)},
            {"error_mean", Mean(errors)},
            {"error_p99", Quantile(errors, 0.99)},
            {"retrieved", share(retrieved)},
            {"met", share(met)},
            {"capped", share(capped)},
            {"index_ratio", index_ratio}};
  }
};

using Tallies = std::vector<Tally>;

// One KV head of one layer.
struct HeadId {
  const RecordedLayer* layer = nullptr;
  uint32_t kv_head = 0;
};

std::vector<HeadId> HeadsOf(const std::vector<RecordedLayer>& layers) {
  std::vector<HeadId> heads;
  for (const RecordedLayer& layer : layers) {
    for (uint32_t h = 0; h < layer.kv_heads; ++h) heads.push_back({&layer, h});
  }
  return heads;
}

// `count` of the queries that see more than `after` and at most `up_to` tokens, evenly spaced.
std::vector<const RecordedQuery*> SampleQueries(const RecordedLayer& layer, uint64_t after,
                                                uint64_t up_to, uint32_t count) {
  std::vector<const RecordedQuery*> between, sample;
  for (const RecordedQuery& query : layer.queries) {
    if (query.token_count > after && query.token_count <= up_to) between.push_back(&query);
  }
  const size_t wanted = std::min<size_t>(count, between.size());
  for (size_t i = 0; i < wanted; ++i) sample.push_back(between[i * between.size() / wanted]);
  return sample;
}

// Adds what `tally_of` finds for each head, in the order of heads.
Tallies OverHeads(ThreadPool* pool, const std::vector<HeadId>& heads,
                  const std::function<Tallies(const HeadId&)>& tally_of) {
  std::vector<Tallies> found(heads.size());
  pool->ParallelFor(heads.size(), [&](size_t i) { found[i] = tally_of(heads[i]); });
  Tallies sum(found.at(0).size());
  for (const Tallies& tallies : found) {
    for (size_t i = 0; i < tallies.size(); ++i) sum[i].Add(tallies[i]);
  }
  return sum;
}

Tallies AskHead(ComputeBackend* backend, const Options& options, const QuestionSet& set,
                const HeadId& id) {
  StudiedHead head(backend, *id.layer, id.kv_head, set.options);
  // As the engine cuts, but that no part of the prefill is too short to be indexed.
  PlannedRanges ranges;
  for (const TokenRange& cut :
       CutsForBuild({set.segment_tokens, kRestTokensMin}, {}, options.prefill)) {
    ApplyCut(cut, &ranges);
  }
  head.Index(ranges);
  std::vector<Policy> policies;
  for (const Question& question : set.questions) policies.push_back(question.policy);
  Tallies tallies(policies.size());
  for (const RecordedQuery* query : SampleQueries(
           *id.layer, options.prefill, options.prefill + options.steps, options.queries)) {
    const std::vector<Outcome> outcomes = head.Answer(*query, policies);
    for (size_t i = 0; i < outcomes.size(); ++i) tallies[i].Add(outcomes[i]);
  }
  for (Tally& tally : tallies) tally.index_ratio = head.index_ratio();
  return tallies;
}

nlohmann::ordered_json AskAll(ComputeBackend* backend, ThreadPool* pool, const Options& options,
                              const std::vector<HeadId>& heads) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const QuestionSet& set : AllQuestions()) {
    const Tallies tallies = OverHeads(
        pool, heads, [&](const HeadId& id) { return AskHead(backend, options, set, id); });
    for (size_t i = 0; i < tallies.size(); ++i) {
      const Question& question = set.questions[i];
      nlohmann::ordered_json row = {{"question", question.question},
                                    {"series", question.series},
                                    {"setting", question.setting}};
      row.update(tallies[i].Json());
      rows.push_back(std::move(row));
    }
    std::fprintf(stderr, "%s: %zu points\n", set.questions.back().question.c_str(),
                 set.questions.size());
  }
  return rows;
}

// The default budget's answers for each bin of decoded tokens: [2 bin] by the index that grew,
// [2 bin + 1] by one built whole where the bin begins.
Tallies DriftOf(ComputeBackend* backend, const Options& options, const HeadId& id) {
  const Policy policy;
  const CutRules rules;
  StudiedHead grown(backend, *id.layer, id.kv_head, {});
  StudiedHead whole(backend, *id.layer, id.kv_head, {});
  PlannedRanges ranges;
  for (const TokenRange& cut : CutsForBuild(rules, {}, options.drift)) ApplyCut(cut, &ranges);
  Tallies tallies;
  for (uint64_t begin = options.drift; begin + kDriftBinTokens <= id.layer->token_count;
       begin += kDriftBinTokens) {
    PlannedRanges whole_ranges;
    for (const TokenRange& cut : CutsForBuild(rules, {}, begin)) ApplyCut(cut, &whole_ranges);
    whole.Index(whole_ranges);
    tallies.resize(tallies.size() + 2);
    for (const RecordedQuery* query :
         SampleQueries(*id.layer, begin, begin + kDriftBinTokens, options.queries)) {
      for (const TokenRange& cut : CutsAfterAppend(rules, true, ranges, query->token_count)) {
        ApplyCut(cut, &ranges);
      }
      grown.Index(ranges);
      tallies[tallies.size() - 2].Add(grown.Answer(*query, {&policy, 1})[0]);
      tallies[tallies.size() - 1].Add(whole.Answer(*query, {&policy, 1})[0]);
    }
  }
  return tallies;
}

nlohmann::ordered_json StudyDrift(ComputeBackend* backend, ThreadPool* pool, const Options& options,
                                  const std::vector<HeadId>& heads) {
  const Tallies tallies =
      OverHeads(pool, heads, [&](const HeadId& id) { return DriftOf(backend, options, id); });
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (size_t i = 0; i < tallies.size(); ++i) {
    nlohmann::ordered_json row = {{"series", i % 2 == 0 ? "grown" : "built whole"},
                                  {"decoded", i / 2 * kDriftBinTokens}};
    row.update(tallies[i].Json());
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("Quality of the index on a recorded model, against bytes read");
  app.add_option("recording", options.recording)->required();
  app.add_option("--prefill", options.prefill, "Tokens indexed before the steps that are studied")
      ->check(CLI::Range(2048, 1 << 20));
  app.add_option("--steps", options.steps, "Steps after the prefill that are sampled");
  app.add_option("--drift", options.drift, "Tokens prefilled where the index grows; 0: no drift");
  app.add_option("--queries", options.queries, "Samples for each head")->check(CLI::Range(1, 4096));
  app.add_option("--layers", options.layers, "Layers; all of the recording by default")
      ->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  const std::vector<RecordedLayer> layers = ReadLayers(options.recording, options.layers);
  const std::vector<HeadId> heads = HeadsOf(layers);
  WAVEKV_CHECK(!heads.empty(), "none of these layers is in the recording");
  const auto backend = CreateCpuBackend();
  ThreadPool pool(static_cast<int>(std::thread::hardware_concurrency()) - 1, "study");
  nlohmann::ordered_json report = {
      {"recording", options.recording}, {"prefill", options.prefill}, {"heads", heads.size()},
      {"queries", options.queries},     {"cpu", CpuName()},           {"commit", CommitName()}};
  report["rows"] = AskAll(backend.get(), &pool, options, heads);
  if (options.drift > 0) report["drift"] = StudyDrift(backend.get(), &pool, options, heads);
  std::cout << report.dump() << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
