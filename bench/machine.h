// What a benchmark says of the machine it ran on, and what the machine can do at best.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "storage/base/thread_pool.h"

namespace wavekv::bench {

// The processor's name, as the kernel gives it.
std::string CpuName();

// The commit that was built: what the environment variable WAVEKV_COMMIT says, else "unknown".
std::string CommitName();

// GB/s at which all threads of `pool` and the caller read `memory` together, once through. `memory`
// is much larger than the caches.
double ReadGbps(ThreadPool* pool, std::span<const std::byte> memory);

double Median(std::vector<double> x);
// The smallest number that at least `share` of `x` do not exceed.
double Quantile(std::vector<double> x, double share);
double Mean(std::span<const double> x);

// Microseconds since some moment.
double NowUs();

}  // namespace wavekv::bench
