// What becomes of lone far keys, and what their remedies cost: the numbers of
// docs/decisions/003-outliers.md.
//
//   outlier_study [--real=TRACE] [--long] [--only=VARIANT] [--seed=N]
//
// For each data set and variant of the index: needles found at the default budget, attention mass
// covered by the exact zones, output error against exact attention, and bytes read.
// Synthetic data, or with --real that of a model alone (outlier_data.h). --long adds contexts of
// 131,072 tokens. --only keeps the variants whose name contains it.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "bench/outlier_data.h"
#include "index/backend/cpu_backend.h"
#include "index/cluster/cluster_segment.h"
#include "index/cluster/partition.h"
#include "index/simd/kernels.h"
#include "index/zone/cluster_mass.h"
#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kSegmentTokens = 8192;

enum class Rank { kSumSized, kSumUnsized, kMaxSized, kMaxUnsized, kSumUpper };

struct Variant {
  std::string name;
  ClusterOptions options;
  double radius_factor = 0;    // Clusters wider than this times the median are split.
  double singleton_ratio = 0;  // Share of the tokens that become clusters of one.
  Rank rank = Rank::kSumSized;
};

struct Index {
  std::vector<std::vector<std::byte>> payload;
  std::vector<SegmentHead> heads;
  std::vector<const SegmentHead*> segments;
  std::vector<uint32_t> cluster_of;  // [tokens] flat; unset for steady tokens.
};

std::vector<double> MeanOf(const DataSet& data, uint32_t first, const ClusterMembers& members) {
  std::vector<double> mean(data.dim, 0);
  for (const uint32_t m : members) {
    for (uint32_t j = 0; j < data.dim; ++j) {
      mean[j] += data.keys[size_t{first + m} * data.dim + j] / static_cast<double>(members.size());
    }
  }
  return mean;
}

double SquaredDistance(const DataSet& data, uint32_t token, const std::vector<double>& mean) {
  double sum = 0;
  for (uint32_t j = 0; j < data.dim; ++j) {
    sum += std::pow(data.keys[size_t{token} * data.dim + j] - mean[j], 2);
  }
  return sum;
}

double RadiusOf(const DataSet& data, uint32_t first, const ClusterMembers& members) {
  const std::vector<double> mean = MeanOf(data, first, members);
  double largest = 0;
  for (const uint32_t m : members) {
    largest = std::max(largest, SquaredDistance(data, first + m, mean));
  }
  return std::sqrt(largest);
}

// The tokens farthest from their cluster's mean become clusters of one.
std::vector<ClusterMembers> SetApart(const DataSet& data, uint32_t first, double ratio,
                                     std::vector<ClusterMembers> clusters) {
  std::vector<std::pair<double, uint32_t>> distances;
  for (const ClusterMembers& members : clusters) {
    const std::vector<double> mean = MeanOf(data, first, members);
    for (const uint32_t m : members) {
      distances.emplace_back(-SquaredDistance(data, first + m, mean), m);
    }
  }
  std::sort(distances.begin(), distances.end());
  std::vector<bool> apart(distances.size(), false);
  distances.resize(static_cast<size_t>(ratio * static_cast<double>(distances.size())));
  for (const auto& [distance, m] : distances) apart[m] = true;
  for (ClusterMembers& members : clusters) {
    std::erase_if(members, [&](uint32_t m) { return apart[m]; });
  }
  std::erase_if(clusters, [](const ClusterMembers& members) { return members.empty(); });
  for (const auto& [distance, m] : distances) clusters.push_back({m});
  return clusters;
}

std::vector<ClusterMembers> LimitRadius(const DataSet& data, uint32_t first, uint32_t count,
                                        double factor, std::vector<ClusterMembers> clusters) {
  std::vector<double> radii;
  for (const ClusterMembers& members : clusters) radii.push_back(RadiusOf(data, first, members));
  std::vector<double> sorted = radii;
  std::nth_element(sorted.begin(), sorted.begin() + static_cast<ptrdiff_t>(sorted.size() / 2),
                   sorted.end());
  const double limit = factor * sorted[sorted.size() / 2];
  const std::span<const float> points(&data.keys[size_t{first} * data.dim],
                                      size_t{count} * data.dim);
  std::vector<ClusterMembers> done;
  while (!clusters.empty()) {
    ClusterMembers members = std::move(clusters.back());
    clusters.pop_back();
    if (members.size() == 1 || RadiusOf(data, first, members) <= limit) {
      done.push_back(std::move(members));
      continue;
    }
    const auto size = static_cast<uint32_t>(members.size());
    for (ClusterMembers& part : SplitCluster(points, data.dim, std::move(members), size - 1)) {
      clusters.push_back(std::move(part));
    }
  }
  return done;
}

Index BuildIndex(const DataSet& data, const Variant& variant) {
  Index index;
  const simd::Kernels& kernels = simd::ActiveKernels();
  const size_t row_bytes = data.dim * DTypeBytes(data.dtype);
  const uint32_t end = data.tokens - kLocalTokens;
  std::vector<std::byte> keys(data.tokens * row_bytes), values(data.tokens * row_bytes);
  ConvertFromFloat(data.dtype, data.keys.data(), data.keys.size(), keys.data());
  ConvertFromFloat(data.dtype, data.values.data(), data.values.size(), values.data());
  index.cluster_of.assign(data.tokens, UINT32_MAX);
  uint32_t flat = 0;
  for (uint32_t first = kFirstTokens; first < end;) {
    const uint32_t last = std::min(end, first / kSegmentTokens * kSegmentTokens + kSegmentTokens);
    ClusterInput input{first,
                       last - first,
                       data.dim,
                       data.dim,
                       data.dtype,
                       keys.data() + first * row_bytes,
                       values.data() + first * row_bytes};
    std::vector<ClusterMembers> clusters =
        PartitionKeys(kernels,
                      std::span<const float>(&data.keys[size_t{first} * data.dim],
                                             size_t{last - first} * data.dim),
                      last - first, data.dim, variant.options);
    if (variant.radius_factor > 0) {
      clusters = LimitRadius(data, first, last - first, variant.radius_factor, std::move(clusters));
    }
    if (variant.singleton_ratio > 0) {
      clusters = SetApart(data, first, variant.singleton_ratio, std::move(clusters));
    }
    for (const ClusterMembers& members : clusters) {
      for (const uint32_t m : members) index.cluster_of[first + m] = flat;
      ++flat;
    }
    for (int i = 0; i < 2; ++i) index.payload.emplace_back((last - first) * row_bytes);
    index.heads.push_back(SummariseClusters(kernels, input, clusters, /*sketch=*/false,
                                            index.payload[index.payload.size() - 2].data(),
                                            index.payload.back().data()));
    first = last;
  }
  for (const SegmentHead& head : index.heads) index.segments.push_back(&head);
  return index;
}

void Rerank(const Index& index, const GroupQuery& query, Rank rank, ClusterScores* scores) {
  std::fill(scores->rank.begin(), scores->rank.end(), 0);
  const uint32_t n = scores->cluster_count;
  for (uint32_t g = 0; g < query.group_size; ++g) {
    const double reach =
        QueryReach(query.queries.subspan(size_t{g} * query.key_dim, query.key_dim), query.scale);
    std::vector<double> mass;
    for (const SegmentHead* segment : index.segments) {
      for (uint32_t c = 0; c < segment->cluster_count; ++c) {
        double x = scores->logits[size_t{g} * n + mass.size()];
        if (rank != Rank::kSumUnsized && rank != Rank::kMaxUnsized) x += LogSize(segment->sizes[c]);
        if (rank == Rank::kSumUpper) x += reach * segment->radii[c];
        mass.push_back(x);
      }
    }
    const double total = LogSumExp(mass);
    for (uint32_t c = 0; c < n; ++c) {
      const auto share = static_cast<float>(std::exp(mass[c] - total));
      const bool largest = rank == Rank::kMaxSized || rank == Rank::kMaxUnsized;
      scores->rank[c] = largest ? std::max(scores->rank[c], share) : scores->rank[c] + share;
    }
  }
}

struct Result {
  int needles = 0, found = 0;
  std::vector<double> needle_errors, errors, covered;
  double index_ratio = 0, read_ratio = 0, clusters_per_token = 0;
};

double Mean(const std::vector<double>& x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return x.empty() ? 0 : sum / static_cast<double>(x.size());
}
double Quantile(std::vector<double> x, double q) {
  if (x.empty()) return 0;
  std::sort(x.begin(), x.end());
  return x[static_cast<size_t>(q * static_cast<double>(x.size() - 1))];
}

void Ask(ComputeBackend& backend, const DataSet& data, const Index& index, const Variant& variant,
         const Question& question, Result* result) {
  const size_t row_bytes = data.dim * DTypeBytes(data.dtype);
  const GroupQuery query{question.queries, data.group, data.dim,
                         data.dim,         data.dtype, 1 / std::sqrt(static_cast<float>(data.dim))};
  std::vector<std::byte> keys(kLocalTokens * row_bytes + kFirstTokens * row_bytes),
      values(keys.size());
  for (auto [from, to] : {std::pair{&data.keys, &keys}, std::pair{&data.values, &values}}) {
    ConvertFromFloat(data.dtype, from->data(), kFirstTokens * data.dim, to->data());
    ConvertFromFloat(data.dtype, from->data() + from->size() - kLocalTokens * data.dim,
                     kLocalTokens * data.dim, to->data() + kFirstTokens * row_bytes);
  }
  std::vector<RowRun> rows = {{keys.data(), values.data(), kFirstTokens + kLocalTokens}};
  PartialAttention output, part, exact;
  ClusterScores scores;
  ZoneBudget budget;
  budget.sketch_clusters = 0;
  EstimatedAttention estimate;
  bool ok = backend.AttendRows(rows, query, &output).ok();
  ok = ok && backend.RankClusters(index.segments, query, output.lse, &scores).ok();
  Rerank(index, query, variant.rank, &scores);
  const auto plan = backend.SelectZones(index.segments, query, scores, output.lse, budget);
  ok =
      ok && plan.ok() && backend.AttendClusters(index.segments, plan->retrieved, query, &part).ok();
  MergePartial(part, &output);
  const std::vector<float> exact_zones = output.lse;
  ok = ok &&
       backend.EstimateClusters(index.segments, plan->estimated, query, scores, false, &estimate)
           .ok();
  MergePartial(estimate.attention, &output);
  for (const SegmentHead* segment : index.segments)
    rows.push_back({segment->keys, segment->values, segment->token_count});
  ok = ok && backend.AttendRows(rows, query, &exact).ok();
  WAVEKV_CHECK(ok, "attention");
  const bool needle = question.needle >= 0;
  for (uint32_t g = 0; g < data.group; ++g) {
    double difference = 0, norm = 0;
    for (uint32_t j = g * data.dim; j < (g + 1) * data.dim; ++j) {
      difference += std::pow(output.out[j] - exact.out[j], 2);
      norm += std::pow(exact.out[j], 2);
    }
    (needle ? result->needle_errors : result->errors).push_back(std::sqrt(difference / norm));
    if (!needle) result->covered.push_back(std::exp(exact_zones[g] - exact.lse[g]));
  }
  size_t retrieved_rows = 0;
  for (const uint32_t cluster : plan->retrieved)
    retrieved_rows += ClusterRows(index.segments, cluster).row_count;
  result->read_ratio +=
      static_cast<double>(retrieved_rows + kFirstTokens + kLocalTokens) / data.tokens;
  if (needle) {
    ++result->needles;
    result->found += std::count(plan->retrieved.begin(), plan->retrieved.end(),
                                index.cluster_of[static_cast<size_t>(question.needle)]) > 0;
  }
}

void Study(const std::vector<DataSet>& data_sets, const std::string& title,
           const std::vector<Variant>& variants) {
  std::printf("\n%s\n%-22s %9s %8s %8s %8s %8s %8s %9s %9s\n", title.c_str(), "variant", "needles",
              "n.err", "n.max", "covered", "err", "p99", "tok/clus", "read %");
  auto backend = CreateCpuBackend();
  for (const Variant& variant : variants) {
    Result result;
    double tokens = 0, clusters = 0, index_bytes = 0, questions = 0;
    for (const DataSet& data : data_sets) {
      const Index index = BuildIndex(data, variant);
      for (const Question& question : data.questions)
        Ask(*backend, data, index, variant, question, &result);
      questions += static_cast<double>(data.questions.size());
      for (const SegmentHead* segment : index.segments) {
        tokens += segment->token_count;
        clusters += segment->cluster_count;
        index_bytes +=
            static_cast<double>(segment->rank_read_bytes() + segment->value_codes.size()) /
            (2.0 * data.dim * DTypeBytes(data.dtype));
      }
    }
    std::printf("%-22s %4d/%-4d %8.4f %8.4f %8.4f %8.4f %8.4f %9.2f %9.2f\n", variant.name.c_str(),
                result.found, result.needles, Mean(result.needle_errors),
                Quantile(result.needle_errors, 1), Mean(result.covered), Mean(result.errors),
                Quantile(result.errors, 0.99), tokens / clusters,
                100 * (index_bytes / tokens + result.read_ratio / questions));
    std::fflush(stdout);
  }
}

std::vector<Variant> AllVariants() {
  std::vector<Variant> variants;
  const auto add = [&variants](const char* name, double excess, double ratio) -> Variant& {
    Variant variant;
    variant.name = name;
    variant.options.far_key_excess = excess;
    variant.options.far_cluster_ratio_max = ratio;
    variants.push_back(variant);
    return variants.back();
  };
  add("nothing", 1, 0);
  add("nothing, upper bound", 1, 0).rank = Rank::kSumUpper;
  add("radius limit 1.5 x", 1, 0).radius_factor = 1.5;
  add("farthest 1 % alone", 1, 0).singleton_ratio = 0.01;
  add("farthest 2 % alone", 1, 0).singleton_ratio = 0.02;
  add("farthest 4 % alone", 1, 0).singleton_ratio = 0.04;
  add("cut 0.6, 1 %", 0.6, 0.01);
  add("cut 0.4, 2 %", 0.4, 0.02);
  add("cut 1.0, 2 %", 1.0, 0.02);
  add("cut 0.6, 4 %", 0.6, 0.04);
  variants.push_back({"default: cut 0.6, 2 %", {}, 0, 0, Rank::kSumSized});
  variants.push_back({"default, no size", {}, 0, 0, Rank::kSumUnsized});
  variants.push_back({"default, max", {}, 0, 0, Rank::kMaxSized});
  variants.push_back({"default, max, no size", {}, 0, 0, Rank::kMaxUnsized});
  variants.push_back({"default, upper bound", {}, 0, 0, Rank::kSumUpper});
  return variants;
}

// The value of `--name=value` when `argument` is one.
const char* ValueOf(const char* argument, const char* name) {
  const size_t length = std::strlen(name);
  return std::strncmp(argument, name, length) == 0 ? argument + length : nullptr;
}

void StudyReal(std::mt19937_64& random, const std::vector<RecordedLayer>& layers,
               const std::vector<Variant>& variants) {
  for (const bool needle : {true, false}) {
    std::vector<DataSet> data;
    for (const RecordedLayer& layer : layers) {
      for (uint32_t head = 0; head < layer.kv_heads; ++head) {
        data.push_back(Real(random, layer, head, needle));
      }
    }
    Study(data, needle ? "real keys, one needle in each head" : "real keys, no needles", variants);
  }
}

}  // namespace

int Main(int argc, char** argv) {
  std::string real, only;
  uint64_t seed = std::random_device{}();
  std::vector<uint32_t> tokens_list = {4096, 32768};
  for (int i = 1; i < argc; ++i) {
    if (const char* value = ValueOf(argv[i], "--real=")) real = value;
    if (const char* value = ValueOf(argv[i], "--only=")) only = value;
    if (const char* value = ValueOf(argv[i], "--seed=")) seed = std::strtoull(value, nullptr, 10);
    if (std::strcmp(argv[i], "--long") == 0) tokens_list.push_back(131072);
  }
  std::mt19937_64 random(seed);
  std::printf("seed %llu, level %s\n", static_cast<unsigned long long>(seed),
              simd::ActiveKernels().isa);
  std::vector<Variant> variants = AllVariants();
  std::erase_if(variants, [&](const Variant& v) { return v.name.find(only) == std::string::npos; });
  if (!real.empty()) {
    StudyReal(random, ReadLayers(real, {}), variants);
    return 0;
  }
  for (const bool topics : {true, false}) {
    for (const uint32_t tokens : tokens_list) {
      for (const double query_length : {8.0, 13.5, 20.0}) {
        const std::vector<DataSet> data = {Synthetic(random, topics, tokens, query_length)};
        Study(data, data[0].name, variants);
      }
    }
  }
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
