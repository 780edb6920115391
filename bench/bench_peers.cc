// The wave index against other vector indexes: how much of the attention's mass they cover and how
// far their answers are off, for the same queries and as many bytes read.
//
//   bench_peers [--json] [--tokens=131072] [--heads=1] [--samples=16] [--seed=1] ...
//
// Topic-structured keys, groups of 4 query heads, dim 128, bf16. Ours reads what its default budget
// asks for; each peer may read as much. Everybody attends over the first 4 and the last 64 tokens.
// A peer attends exactly over what it found and drops the rest; ours estimates it. `mass_covered`
// is the share of the tokens that are told apart: read exactly or, ours, from their sketch. The
// flat index has no goal: reading all keys to find the best is half of the cache, so what it finds
// with the finding left out is a bound, not a peer.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/built_head.h"
#include "bench/exact_attention.h"
#include "bench/machine.h"
#include "bench/or_die.h"
#include "bench/peers.h"
#include "bench/topic_data.h"
#include "index/backend/cpu_backend.h"
#include "storage/base/dtype.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kDim = 128, kGroup = 4;
constexpr uint64_t kRowBytes = kDim * 2;

struct Options {
  uint32_t tokens = 131072;
  uint32_t heads = 1;
  uint32_t samples = 16;
  uint64_t seed = 1;
};

// Of every (KV head, step, query head); bytes of every (KV head, step).
struct Quality {
  std::vector<double> mass_covered;
  std::vector<double> rel_error;
  std::vector<double> bytes_read;
};

// One KV head's tokens as stored, and as floats.
struct HeadData {
  std::vector<std::byte> stored_keys, stored_values;  // [tokens, kDim] bf16
  std::vector<float> keys, values;                    // The same numbers.
  std::vector<float> queries;                         // [samples, kGroup, kDim]
};

HeadData MakeHead(const Options& options, uint32_t kv_head) {
  HeadData head;
  std::vector<float> topics;
  const auto store = [](const std::vector<float>& rows, std::vector<std::byte>* to) {
    const size_t at = to->size();
    to->resize(at + rows.size() * 2);
    ConvertFromFloat(DType::kBF16, rows.data(), rows.size(), to->data() + at);
  };
  for (uint32_t first = 0; first < options.tokens; first += kTopicStretchTokens) {
    const uint32_t count = std::min(kTopicStretchTokens, options.tokens - first);
    const TopicStretchId id = {options.seed, 0, kv_head, first / kTopicStretchTokens};
    const TopicStretch stretch = MakeTopicStretch(id, count, kDim);
    topics.insert(topics.end(), stretch.topics.begin(), stretch.topics.end());
    store(stretch.keys, &head.stored_keys);
    store(MakeTopicValues(id, count, kDim), &head.stored_values);
  }
  head.keys = ToFloats(head.stored_keys);
  head.values = ToFloats(head.stored_values);
  head.queries =
      WalkTopicQueries({options.seed, 0, kv_head}, topics, options.samples, kGroup, kDim);
  return head;
}

// The tokens [begin, end), which all attend over, and those found between them: their mass, and
// attention over them alone.
struct Covered {
  double mass = 0;
  std::vector<float> out;
};

Covered Cover(const ExactAnswer& exact, std::span<const float> values,
              std::span<const uint32_t> found, uint32_t found_offset) {
  std::vector<double> out(kDim, 0);
  double mass = 0;
  const auto add = [&](size_t token) {
    mass += exact.weights[token];
    for (uint32_t j = 0; j < kDim; ++j) out[j] += exact.weights[token] * values[token * kDim + j];
  };
  const size_t tokens = exact.weights.size();
  for (size_t i = 0; i < kSinkTokens; ++i) add(i);
  for (size_t i = tokens - kWindowTokens; i < tokens; ++i) add(i);
  for (const uint32_t token : found) add(size_t{token} + found_offset);
  Covered covered = {mass, std::vector<float>(kDim)};
  for (uint32_t j = 0; j < kDim; ++j) covered.out[j] = static_cast<float>(out[j] / mass);
  return covered;
}

// What the default budget does, and what it reads.
struct OurAnswer {
  PartialAttention attention;
  std::vector<double> mass_covered;  // [kGroup] tokens read exactly or from their sketch.
  uint64_t bytes_read = 0;           // The steady zone left aside.
};

// Each head's true mass of a cluster's tokens; `lse` [kGroup] of the whole attention.
void AddMass(const RowRun& rows, const GroupQuery& query, std::span<const float> lse,
             std::vector<double>* mass) {
  const std::vector<float> keys =
      ToFloats(std::span(rows.keys, static_cast<size_t>(rows.row_count) * kRowBytes));
  for (uint32_t g = 0; g < kGroup; ++g) {
    for (uint32_t i = 0; i < rows.row_count; ++i) {
      double score = 0;
      for (uint32_t j = 0; j < kDim; ++j) {
        score += double{query.queries[g * kDim + j]} * keys[i * kDim + j];
      }
      (*mass)[g] += std::exp(score * query.scale - lse[g]);
    }
  }
}

OurAnswer AttendOurWay(ComputeBackend& backend, const BuiltHead& head, const GroupQuery& query) {
  OurAnswer answer;
  PartialAttention exact, retrieved;
  EstimatedAttention sketched, estimated;
  ClusterScores scores;
  OrDie(backend.AttendRows(head.steady, query, &answer.attention));
  const std::vector<float> steady_lse = answer.attention.lse;
  OrDie(backend.RankClusters(head.index, query, steady_lse, &scores));
  const ZonePlan zones =
      OrDie(backend.SelectZones(head.index, query, scores, steady_lse, ZoneBudget()));
  OrDie(backend.AttendClusters(head.index, zones.retrieved, query, &retrieved));
  OrDie(backend.SketchClusters(head.index, zones.sketched, query, scores, false, &sketched));
  OrDie(backend.EstimateClusters(head.index, zones.estimated, query, scores, false, &estimated));
  for (const PartialAttention* part : {&retrieved, &sketched.attention, &estimated.attention}) {
    MergePartial(*part, &answer.attention);
  }
  answer.bytes_read = sketched.bytes_read + estimated.bytes_read;
  for (const SegmentHead& segment : head.segments) answer.bytes_read += segment.rank_read_bytes();
  for (const uint32_t cluster : zones.retrieved) {
    answer.bytes_read += ClusterRows(head.index, cluster).row_count * 2 * kRowBytes;
  }
  // Against the exact mass of everything.
  std::vector<RowRun> all = head.steady;
  for (uint32_t c = 0; c < ClusterCount(head.index); ++c) all.push_back(ClusterRows(head.index, c));
  OrDie(backend.AttendRows(all, query, &exact));
  answer.mass_covered.assign(kGroup, 0);
  for (const RowRun& rows : head.steady) AddMass(rows, query, exact.lse, &answer.mass_covered);
  for (const auto* zone : {&zones.retrieved, &zones.sketched}) {
    for (const uint32_t cluster : *zone) {
      AddMass(ClusterRows(head.index, cluster), query, exact.lse, &answer.mass_covered);
    }
  }
  return answer;
}

void MeasureHead(const Options& options, uint32_t kv_head, std::map<std::string, Quality>* found) {
  std::fprintf(stderr, "KV head %u of %u: building the indexes\n", kv_head + 1, options.heads);
  const HeadData data = MakeHead(options, kv_head);
  const auto backend = CreateCpuBackend();
  const BuiltHead head =
      BuildHead(*backend, data.stored_keys, data.stored_values, kDim, DType::kBF16);
  const std::span<const float> clustered = std::span(data.keys).subspan(
      kSinkTokens * kDim, data.keys.size() - (kSinkTokens + kWindowTokens) * kDim);
  const std::unique_ptr<Peer> peers[] = {CreateIvfPeer(clustered, kDim),
                                         CreateHnswPeer(clustered, kDim),
                                         CreateFlatPeer(clustered, kDim)};
  std::fprintf(stderr, "asking\n");
  const double scale = 1 / std::sqrt(static_cast<double>(kDim));
  const auto steady_bytes = static_cast<double>((kSinkTokens + kWindowTokens) * 2 * kRowBytes);
  for (uint32_t sample = 0; sample < options.samples; ++sample) {
    const std::span<const float> queries =
        std::span(data.queries).subspan(sample * kGroup * kDim, kGroup * kDim);
    const GroupQuery query = {queries, kGroup, kDim, kDim, DType::kBF16, static_cast<float>(scale)};
    std::vector<ExactAnswer> exact;
    for (uint32_t g = 0; g < kGroup; ++g) {
      exact.push_back(
          ExactAttention(queries.subspan(g * kDim, kDim), data.keys, data.values, scale));
    }
    const OurAnswer ours = AttendOurWay(*backend, head, query);
    Quality& our_quality = (*found)["wave_index"];
    our_quality.bytes_read.push_back(static_cast<double>(ours.bytes_read) + steady_bytes);
    for (uint32_t g = 0; g < kGroup; ++g) {
      our_quality.mass_covered.push_back(ours.mass_covered[g]);
      our_quality.rel_error.push_back(
          RelativeError(std::span(ours.attention.out).subspan(g * kDim, kDim), exact[g].out));
    }
    for (const auto& peer : peers) {
      const Found result = peer->Search(queries, kGroup, {ours.bytes_read, kRowBytes});
      Quality& quality = (*found)[peer->name()];
      quality.bytes_read.push_back(static_cast<double>(result.bytes_read) + steady_bytes);
      for (uint32_t g = 0; g < kGroup; ++g) {
        const Covered covered = Cover(exact[g], data.values, result.tokens, kSinkTokens);
        quality.mass_covered.push_back(covered.mass);
        quality.rel_error.push_back(RelativeError(covered.out, exact[g].out));
      }
    }
  }
}

nlohmann::ordered_json Report(const Options& options, const std::map<std::string, Quality>& all) {
  const double full_bytes = 2.0 * kRowBytes * options.tokens;
  nlohmann::ordered_json report;
  report["workload"] = "peers";
  const Quality& ours = all.at("wave_index");
  bool mass = true, error = true;
  for (const auto& [name, quality] : all) {
    report[name] = {{"mass_covered", Mean(quality.mass_covered)},
                    {"rel_error_mean", Mean(quality.rel_error)},
                    {"rel_error_p99", Quantile(quality.rel_error, 0.99)},
                    {"kv_bytes_read_ratio", Mean(quality.bytes_read) / full_bytes}};
    if (&quality == &ours || name == kFoundForFree) continue;
    error &= Mean(ours.rel_error) < Mean(quality.rel_error);
    mass &= Mean(ours.mass_covered) > Mean(quality.mass_covered);
  }
  report["goals"] = {{"rel_error_mean", error}, {"mass_covered", mass}};
  report["tokens"] = options.tokens;
  report["kv_heads"] = options.heads;
  report["samples"] = options.samples;
  report["seed"] = options.seed;
  report["cpu"] = CpuName();
  report["commit"] = CommitName();
  return report;
}

}  // namespace

int Main(int argc, char** argv) {
  Options options;
  bool json = false;
  CLI::App app("The wave index against other indexes, at equal bytes");
  app.add_option("--tokens", options.tokens)->check(CLI::Range(4096, 1 << 20));
  app.add_option("--heads", options.heads, "KV heads, each with 4 query heads")
      ->check(CLI::Range(1, 64));
  app.add_option("--samples", options.samples, "Steps of each")->check(CLI::Range(1, 1000));
  app.add_option("--seed", options.seed);
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  std::map<std::string, Quality> found;
  for (uint32_t head = 0; head < options.heads; ++head) MeasureHead(options, head, &found);
  std::cout << Report(options, found).dump(json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
