// Index building: spherical k-means of segments, ours against faiss::Clustering with 10 iterations,
// and the whole of ClusterSegment, with k-means and from given labels; time and quality, in one
// run.
//
//   bench_build [--json] [--tokens=8192] [--dim=128] [--segments=8] [--keys=TRACE ...]
//
// Every segment is fresh data. Ours builds as the engine does, a segment on each thread. FAISS
// takes the best of its ways: a segment on each thread, or one after the other with threads inside
// it, in OpenMP or in BLAS. Its time is that of the training alone; ours includes the labels. The
// cosine is that between a point and the direction of the sum of its cluster, mean over points.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <set>
#include <vector>

#include "bench/faiss_kmeans.h"
#include "bench/machine.h"
#include "bench/recorded_layers.h"
#include "bench/topic_data.h"
#include "index/backend/cpu_backend.h"
#include "index/cluster/partition.h"
#include "index/cluster/spherical_kmeans.h"
#include "storage/base/check.h"
#include "storage/base/cpuset.h"

namespace wavekv::bench {
namespace {

constexpr double kSpeedupGoal = 2.5, kSpeedupStretch = 5, kCosineGoal = 0.998;
constexpr uint32_t kIterations = 10;
constexpr uint32_t kTokensPerCluster = 16;

struct BuildOptions {
  uint32_t tokens = 8192, dim = 128, segments = 8, rounds = 3, threads = 0;
  uint64_t seed = 1;
  std::vector<std::string> key_files;
  bool json = false;
};

// One head's tokens.
struct Segment {
  uint32_t count = 0, dim = 0, clusters = 0;
  std::vector<std::byte> keys;  // [count, dim] bf16
  std::vector<float> points;    // The same, centred as the index centres them.
  std::vector<float> initial;   // [clusters, dim]
};

Segment MakeSegment(std::vector<float> keys, uint32_t dim) {
  Segment segment;
  segment.dim = dim;
  segment.count = static_cast<uint32_t>(keys.size() / dim);
  segment.clusters = (segment.count + kTokensPerCluster - 1) / kTokensPerCluster;
  segment.keys.resize(keys.size() * 2);
  ConvertFromFloat(DType::kBF16, keys.data(), keys.size(), segment.keys.data());
  ConvertToFloat(DType::kBF16, segment.keys.data(), keys.size(), keys.data());
  segment.points = CentreKeys(keys, segment.count, dim);
  segment.initial = EvenlySpaced(segment.points, segment.count, dim, segment.clusters);
  return segment;
}

// Whole segments of each head.
void AddSegmentsOf(const RecordedLayer& layer, uint32_t tokens, std::vector<Segment>* segments) {
  const size_t size = size_t{tokens} * layer.key_dim;
  for (uint32_t head = 0; head < layer.kv_heads; ++head) {
    const std::vector<float> keys = layer.Keys(head);
    for (auto first = keys.begin(); keys.end() - first >= static_cast<ptrdiff_t>(size);
         first += static_cast<ptrdiff_t>(size)) {
      segments->push_back(
          MakeSegment({first, first + static_cast<ptrdiff_t>(size)}, layer.key_dim));
    }
  }
}

std::vector<Segment> MakeSegments(const BuildOptions& options) {
  std::vector<Segment> segments;
  for (const std::string& path : options.key_files) {
    for (const RecordedLayer& layer : ReadLayers(path, {})) {
      // A recording shorter than a segment is one.
      AddSegmentsOf(layer, std::min(options.tokens, layer.token_count), &segments);
    }
  }
  for (uint32_t s = 0; options.key_files.empty() && s < options.segments; ++s) {
    segments.push_back(MakeSegment(
        MakeTopicStretch({options.seed, 0, 0, s}, options.tokens, options.dim).keys, options.dim));
  }
  return segments;
}

double CosineOf(const Segment& segment, std::span<const uint32_t> labels) {
  const uint32_t dim = segment.dim;
  std::vector<double> sums(size_t{segment.clusters} * dim, 0);
  for (size_t at = 0; at < segment.points.size(); ++at) {
    sums[labels[at / dim] * dim + at % dim] += segment.points[at];
  }
  double total = 0;
  for (uint32_t i = 0; i < segment.count; ++i) {
    double xy = 0, xx = 0, yy = 0;
    for (uint32_t j = 0; j < dim; ++j) {
      const double x = segment.points[size_t{i} * dim + j], y = sums[size_t{labels[i]} * dim + j];
      xy += x * y;
      xx += x * x;
      yy += y * y;
    }
    total += xx > 0 && yy > 0 ? xy / std::sqrt(xx * yy) : 0;
  }
  return total / segment.count;
}

// Clusters that have points.
size_t CountOf(std::span<const uint32_t> labels) {
  return std::set<uint32_t>(labels.begin(), labels.end()).size();
}

// A way of building all segments; the milliseconds that one takes.
struct Way {
  std::string name;
  std::function<void()> run;
  std::vector<double> ms;
};

class BuildBench {
 public:
  explicit BuildBench(const BuildOptions& options)
      : options_(options),
        threads_(options.threads != 0 ? options.threads
                                      : static_cast<uint32_t>(std::max(UsableCpuCount(), 1))),
        segments_(MakeSegments(options)),
        pool_(static_cast<int>(threads_) - 1, "bench"),
        backend_(CreateCpuBackend()),
        results_(segments_.size()),
        faiss_centroids_(segments_.size()) {
    ways_.push_back({"ours", [this] { OnEachThread([this](size_t s) { RunOurs(s); }); }});
    ways_.push_back({"segment", [this] { OnEachThread([this](size_t s) { RunSegment(s, {}); }); }});
    ways_.push_back(
        {"segment, labels given", [this] { OnEachThread([this](size_t s) { RunLabelled(s); }); }});
    ways_.push_back({"faiss, a segment on each thread", [this] {
                       OnEachThread([this](size_t s) {
                         SetFaissThreads(1, 1);
                         RunFaiss(s);
                       });
                     }});
    const int all = static_cast<int>(threads_);
    for (const auto& [omp, blas] : {std::pair{1, 1}, {1, all}, {all, 1}, {all, all}}) {
      ways_.push_back({"faiss, OpenMP " + std::to_string(omp) + ", BLAS " + std::to_string(blas),
                       [this, omp = omp, blas = blas] {
                         SetFaissThreads(omp, blas);
                         for (size_t s = 0; s < segments_.size(); ++s) RunFaiss(s);
                       }});
    }
  }

  // A round runs every way once; the first warms up.
  void Measure() {
    for (uint32_t round = 0; round <= options_.rounds; ++round) {
      for (Way& way : ways_) {
        const double start = NowUs();
        way.run();
        const double ms = (NowUs() - start) / 1e3 / static_cast<double>(segments_.size());
        if (round > 0) way.ms.push_back(ms);
        std::fprintf(stderr, "%-36s %8.2f ms a segment\n", way.name.c_str(), ms);
      }
    }
  }

  nlohmann::ordered_json Report() const {
    const Way& ours = ways_[0];
    const auto best =
        std::min_element(ways_.begin() + 3, ways_.end(),
                         [](const Way& a, const Way& b) { return Median(a.ms) < Median(b.ms); });
    double cosine_ours = 0, cosine_faiss = 0, full = 0, near = 0;
    size_t clusters = 0, clusters_faiss = 0;
    const auto segments = static_cast<double>(segments_.size());
    for (size_t s = 0; s < segments_.size(); ++s) {
      const std::vector<uint32_t>& labels = results_[s].labels;
      const Segment& segment = segments_[s];
      cosine_ours += CosineOf(segment, labels) / segments;
      const std::vector<uint32_t> faiss_labels =
          FaissLabels(segment.points, segment.dim, faiss_centroids_[s]);
      cosine_faiss += CosineOf(segment, faiss_labels) / segments;
      full += results_[s].full_passes / segments;
      near += results_[s].near_passes / segments;
      clusters += CountOf(labels);
      clusters_faiss += CountOf(faiss_labels);
    }
    const double faiss_ms = Median(best->ms), ours_ms = Median(ours.ms);
    nlohmann::ordered_json report;
    report["workload"] = "build";
    report["faiss_ms"] = faiss_ms;
    report["ours_ms"] = ours_ms;
    report["speedup"] = faiss_ms / ours_ms;
    report["cosine_faiss"] = cosine_faiss;
    report["cosine_ours"] = cosine_ours;
    report["cosine_ratio"] = cosine_ours / cosine_faiss;
    report["clusters"] = static_cast<double>(clusters) / segments;
    report["clusters_faiss"] = static_cast<double>(clusters_faiss) / segments;
    report["segment_ms"] = Median(ways_[1].ms);
    report["segment_given_ms"] = Median(ways_[2].ms);
    report["full_passes"] = full;
    report["near_passes"] = near;
    for (const Way& way : ways_) report["ways_ms"][way.name] = Median(way.ms);
    report["faiss_way"] = best->name;
    report["data"] = options_.key_files.empty() ? "topics" : "recorded keys";
    report["tokens"] = segments_[0].count;
    report["dim"] = segments_[0].dim;
    report["segments"] = segments_.size();
    report["threads"] = threads_;
    report["isa"] = backend_->Caps().isa;
    report["seed"] = options_.seed;
    report["cpu"] = CpuName();
    report["commit"] = CommitName();
    report["goals"] = {{"speedup", faiss_ms / ours_ms >= kSpeedupGoal},
                       {"speedup_stretch", faiss_ms / ours_ms >= kSpeedupStretch},
                       {"cosine", cosine_ours >= kCosineGoal * cosine_faiss}};
    return report;
  }

 private:
  void OnEachThread(const std::function<void(size_t)>& build) {
    pool_.ParallelFor(segments_.size(), build);
  }

  void RunOurs(size_t s) {
    const Segment& segment = segments_[s];
    results_[s] =
        SphericalKMeans(simd::ActiveKernels(), {segment.points, segment.initial, segment.count,
                                                segment.clusters, segment.dim, kIterations});
  }

  // As when a client has clustered the keys: the labels are those that ours found.
  void RunLabelled(size_t s) {
    const std::vector<uint32_t>& found = results_[s].labels;
    RunSegment(s, std::vector<uint16_t>(found.begin(), found.end()));
  }

  void RunSegment(size_t s, const std::vector<uint16_t>& labels) {
    const Segment& segment = segments_[s];
    std::vector<std::byte> keys(segment.keys.size()), values(segment.keys.size());
    const ClusterInput input = {0,
                                segment.count,
                                segment.dim,
                                segment.dim,
                                DType::kBF16,
                                segment.keys.data(),
                                segment.keys.data(),
                                labels};
    ClusterOptions options;
    options.tokens_per_cluster = kTokensPerCluster;
    options.iterations = kIterations;
    const auto head = backend_->ClusterSegment(input, options, keys.data(), values.data());
    WAVEKV_CHECK(head.ok(), "clustering");
  }

  void RunFaiss(size_t s) {
    const Segment& segment = segments_[s];
    faiss_centroids_[s] =
        TrainFaiss(segment.points, segment.dim, segment.clusters, kIterations, options_.seed + s);
  }

  const BuildOptions options_;
  const uint32_t threads_;
  const std::vector<Segment> segments_;
  ThreadPool pool_;
  const std::unique_ptr<ComputeBackend> backend_;
  std::vector<Way> ways_;
  std::vector<KMeansResult> results_;
  std::vector<std::vector<float>> faiss_centroids_;
};

}  // namespace

int Main(int argc, char** argv) {
  BuildOptions options;
  CLI::App app("Index building: ours against faiss::Clustering, time and quality");
  app.add_option("--tokens", options.tokens, "Of a segment")->check(CLI::Range(1024, 8192));
  app.add_option("--dim", options.dim)->check(CLI::Range(32, 256));
  app.add_option("--segments", options.segments)->check(CLI::Range(1, 1024));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(1, 1000));
  app.add_option("--threads", options.threads, "0: as many as there are CPUs")
      ->check(CLI::Range(0, 1024));
  app.add_option("--seed", options.seed);
  app.add_option("--keys", options.key_files,
                 "Keys of a trace that wavekv record wrote instead; may be given again")
      ->check(CLI::ExistingFile);
  app.add_flag("--json", options.json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  BuildBench bench(options);
  bench.Measure();
  std::cout << bench.Report().dump(options.json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
