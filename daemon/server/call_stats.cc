#include "daemon/server/call_stats.h"

#include <iterator>

namespace wavekv {
namespace {

constexpr std::string_view kRpcNames[] = {
    "Attach",       "Heartbeat",        "Detach",         "CreateSequence",
    "Insert",       "BuildIndex",       "PlanIndex",      "GiveLabels",
    "Query",        "Estimate",         "Attend",         "Decode",
    "ForkSequence", "TruncateSequence", "DropSequence",   "Pin",
    "SetTtl",       "AttachResident",   "ResidentStatus", "DetachResident",
    "GetStats",     "ListSequences",    "DescribeIndex",  "Explain",
    "SampleRecall", "RecordSequence",
};
static_assert(std::size(kRpcNames) == kRpcCount);

}  // namespace

std::string_view RpcName(Rpc rpc) { return kRpcNames[static_cast<size_t>(rpc)]; }

void CallStats::CountCall(Rpc rpc, absl::StatusCode code) {
  size_t column = static_cast<size_t>(code);
  if (column >= kStatusCodeCount) column = static_cast<size_t>(absl::StatusCode::kUnknown);
  calls_[static_cast<size_t>(rpc)][column].fetch_add(1, std::memory_order_relaxed);
}

void CallStats::RecordLatency(Rpc rpc, double latency_us) {
  latencies_[static_cast<size_t>(rpc)].Record(latency_us);
}

uint64_t CallStats::Calls(Rpc rpc, absl::StatusCode code) const {
  return calls_[static_cast<size_t>(rpc)][static_cast<size_t>(code)].load(
      std::memory_order_relaxed);
}

uint64_t CallStats::Calls(Rpc rpc) const {
  uint64_t sum = 0;
  for (const std::atomic<uint64_t>& count : calls_[static_cast<size_t>(rpc)]) {
    sum += count.load(std::memory_order_relaxed);
  }
  return sum;
}

}  // namespace wavekv
