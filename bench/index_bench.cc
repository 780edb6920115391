// Time of the CPU backend's verbs on one thread, beside the error of what they compute.
//
//   index_bench [--tokens=131072] [--dim=64] [--group=4]
//
// Times are CPU time of the thread, the best of several runs over data larger than the caches.
#include <time.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "index/backend/cpu_backend.h"
#include "storage/base/check.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kSegmentTokens = 8192;
constexpr int kRuns = 7;

double ThreadMs() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) * 1e3 + static_cast<double>(now.tv_nsec) / 1e6;
}

double BestMs(const std::function<void()>& work) {
  double best = 1e300;
  for (int run = 0; run < kRuns; ++run) {
    const double start = ThreadMs();
    work();
    best = std::min(best, ThreadMs() - start);
  }
  return best;
}

std::vector<std::byte> Rows(std::mt19937_64& random, uint32_t tokens, uint32_t dim, bool topics) {
  std::normal_distribution<float> normal;
  std::vector<float> rows(size_t{tokens} * dim), centres(size_t{256} * dim);
  for (float& x : centres) x = normal(random);
  size_t topic = 0;
  for (uint32_t i = 0; i < tokens; ++i) {
    if (i % 4 == 0) topic = random() % 256;
    for (uint32_t j = 0; j < dim; ++j) {
      rows[size_t{i} * dim + j] =
          topics ? centres[topic * dim + j] + 0.5f * normal(random) : normal(random);
    }
  }
  std::vector<std::byte> stored(rows.size() * 2);
  ConvertFromFloat(DType::kBF16, rows.data(), rows.size(), stored.data());
  return stored;
}

uint32_t Option(int argc, char** argv, const char* name, uint32_t value) {
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], name, std::strlen(name)) == 0) {
      value = static_cast<uint32_t>(std::strtoul(argv[i] + std::strlen(name), nullptr, 10));
    }
  }
  return value;
}

double RelativeError(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(a[i] - b[i], 2);
    norm += std::pow(b[i], 2);
  }
  return std::sqrt(difference / norm);
}

}  // namespace

int Main(int argc, char** argv) {
  const uint32_t tokens = Option(argc, argv, "--tokens=", 131072) / kSegmentTokens * kSegmentTokens;
  const uint32_t dim = Option(argc, argv, "--dim=", 64);
  const uint32_t group = Option(argc, argv, "--group=", 4);
  auto backend = CreateCpuBackend();
  std::mt19937_64 random(std::random_device{}());
  const std::vector<std::byte> keys = Rows(random, tokens, dim, true);
  const std::vector<std::byte> values = Rows(random, tokens, dim, false);
  std::vector<std::byte> sorted_keys(keys.size()), sorted_values(values.size());
  std::vector<SegmentHead> heads;
  double build_ms = 1e300;
  for (uint32_t first = 0; first < tokens; first += kSegmentTokens) {
    const size_t at = size_t{first} * dim * 2;
    const ClusterInput input{first, kSegmentTokens, dim, dim, DType::kBF16, &keys[at], &values[at]};
    const double start = ThreadMs();
    auto head =
        backend->ClusterSegment(input, ClusterOptions{}, &sorted_keys[at], &sorted_values[at]);
    build_ms = std::min(build_ms, ThreadMs() - start);
    WAVEKV_CHECK(head.ok(), "clustering");
    heads.push_back(*std::move(head));
  }
  std::vector<const SegmentHead*> index;
  for (const SegmentHead& head : heads) index.push_back(&head);

  std::normal_distribution<float> normal;
  std::vector<float> queries(size_t{group} * dim);
  for (float& x : queries) x = normal(random);
  const GroupQuery query{queries, group, dim, dim, DType::kBF16, 1 / std::sqrt(float(dim))};
  PartialAttention exact, retrieved;
  ClusterScores scores;
  EstimatedAttention estimate;
  ZonePlan plan;
  const std::vector<RowRun> rows = {{sorted_keys.data(), sorted_values.data(), tokens}};
  const std::vector<float> no_steady(group, -HUGE_VALF);
  bool ok = true;
  const double full_ms = BestMs([&] { ok &= backend->AttendRows(rows, query, &exact).ok(); });
  const double rank_ms =
      BestMs([&] { ok &= backend->RankClusters(index, query, no_steady, &scores).ok(); });
  const double select_ms =
      BestMs([&] { plan = *backend->SelectZones(index, query, scores, no_steady, ZoneBudget{}); });
  const double attend_ms =
      BestMs([&] { ok &= backend->AttendClusters(index, plan.retrieved, query, &retrieved).ok(); });
  const auto estimate_with = [&](bool bounds) {
    return BestMs([&] {
      ok &= backend->EstimateClusters(index, plan.estimated, query, scores, bounds, &estimate).ok();
    });
  };
  const double bounds_ms = estimate_with(true), estimate_ms = estimate_with(false);
  WAVEKV_CHECK(ok, "attention");
  MergePartial(estimate.attention, &retrieved);
  const double payload_mb = static_cast<double>(keys.size() + values.size()) / 1e6;
  std::printf("level %s, %u tokens, dim %u, bf16, group of %u, %u clusters\n",
              backend->Caps().isa.c_str(), tokens, dim, group, scores.cluster_count);
  std::printf("cluster one segment of 8192: %8.2f ms\n", build_ms);
  std::printf("exact attention:             %8.3f ms (%.1f GB/s)\n", full_ms, payload_mb / full_ms);
  std::printf(
      "rank / select / retrieved / estimate: %.3f / %.3f / %.3f / %.3f ms, bounds +%.3f ms\n",
      rank_ms, select_ms, attend_ms, estimate_ms, bounds_ms - estimate_ms);
  std::printf("all zones: %.3f ms, %.1f times faster than exact; relative error %.4f\n",
              rank_ms + select_ms + attend_ms + estimate_ms,
              full_ms / (rank_ms + select_ms + attend_ms + estimate_ms),
              RelativeError(retrieved.out, exact.out));
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
