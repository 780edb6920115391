#include "client/types.h"

#include <cstdlib>
#include <limits>

#include "proto/rpc/address.h"

namespace wavekv::client {

size_t Tensor::bytes() const {
  size_t total = DTypeBytes(dtype);
  for (const int64_t extent : shape) {
    if (extent <= 0) return 0;
    if (__builtin_mul_overflow(total, static_cast<size_t>(extent), &total)) {
      return std::numeric_limits<size_t>::max();
    }
  }
  return total;
}

std::string DefaultAddress() {
  const char* const address = std::getenv("WAVEKV_ADDRESS");
  if (address != nullptr && address[0] != '\0') return address;
  return DefaultAddressOf("wavekvd");
}

StepCounters& StepCounters::operator+=(const StepCounters& other) {
  steady_tokens += other.steady_tokens;
  retrieved_clusters += other.retrieved_clusters;
  retrieved_tokens += other.retrieved_tokens;
  estimated_clusters += other.estimated_clusters;
  sketched_clusters += other.sketched_clusters;
  ignored_clusters += other.ignored_clusters;
  moved_to_estimation += other.moved_to_estimation;
  kv_bytes_read += other.kv_bytes_read;
  kv_bytes_full += other.kv_bytes_full;
  cache_hit_blocks += other.cache_hit_blocks;
  cache_miss_blocks += other.cache_miss_blocks;
  error_budget_met += other.error_budget_met;
  error_budget_capped += other.error_budget_capped;
  return *this;
}

}  // namespace wavekv::client
