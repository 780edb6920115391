#include "bench/machine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>

namespace wavekv::bench {
namespace {

constexpr size_t kPieceBytes = 1 << 20;
constexpr size_t kPrefetchBytes = 4096;

// Independent sums, so that nothing but memory is waited for.
uint64_t SumPiece(const std::byte* piece, size_t bytes) {
  constexpr size_t kStep = 16;
  uint64_t sums[kStep] = {};
  for (size_t at = 0; at + kStep * 8 <= bytes; at += kStep * 8) {
    __builtin_prefetch(piece + at + kPrefetchBytes);
    __builtin_prefetch(piece + at + kPrefetchBytes + 64);
    uint64_t words[kStep];
    std::memcpy(words, piece + at, sizeof(words));
    for (size_t i = 0; i < kStep; ++i) sums[i] += words[i];
  }
  uint64_t sum = 0;
  for (const uint64_t part : sums) sum += part;
  return sum;
}

}  // namespace

std::string CpuName() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    const size_t colon = line.find(": ");
    if (line.starts_with("model name") && colon != std::string::npos) return line.substr(colon + 2);
  }
  return "unknown";
}

std::string CommitName() {
  const char* commit = std::getenv("WAVEKV_COMMIT");
  return commit == nullptr ? "unknown" : commit;
}

double ReadGbps(ThreadPool* pool, std::span<const std::byte> memory) {
  const size_t pieces = memory.size() / kPieceBytes;
  std::atomic<uint64_t> total = 0;
  const double start = NowUs();
  pool->ParallelFor(pieces, [&](size_t piece) {
    total.fetch_add(SumPiece(memory.data() + piece * kPieceBytes, kPieceBytes),
                    std::memory_order_relaxed);
  });
  const double us = NowUs() - start;
  return static_cast<double>(pieces * kPieceBytes) / us / 1e3;
}

double Median(std::vector<double> x) { return Quantile(std::move(x), 0.5); }

double Quantile(std::vector<double> x, double share) {
  std::sort(x.begin(), x.end());
  const double rank = std::ceil(share * static_cast<double>(x.size()));
  return x[static_cast<size_t>(std::max(rank, 1.0)) - 1];
}

double Mean(std::span<const double> x) {
  double sum = 0;
  for (const double value : x) sum += value;
  return sum / static_cast<double>(x.size());
}

double NowUs() {
  return std::chrono::duration<double, std::micro>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace wavekv::bench
