// How long things took, in a few buckets. Lock-free.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace wavekv {

// A fixed-bucket histogram of microseconds. Thread-safe.
class LatencyHistogram {
 public:
  static constexpr std::array<double, 14> kEdgesUs = {50,  100,   250, 500, 1e3,   2.5e3, 5e3,
                                                      1e4, 2.5e4, 5e4, 1e5, 2.5e5, 1e6,   1e7};

  struct Snapshot {
    std::array<uint64_t, kEdgesUs.size() + 1> counts{};  // The last one: over every edge.
    uint64_t count = 0;
    double sum_us = 0;
  };

  void Record(double latency_us);
  Snapshot Read() const;

 private:
  std::array<std::atomic<uint64_t>, kEdgesUs.size() + 1> counts_{};
  std::atomic<uint64_t> sum_ns_{0};
};

}  // namespace wavekv
