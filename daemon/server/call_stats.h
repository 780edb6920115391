// Counts of calls by RPC and code, and latencies. Lock-free.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "absl/status/status.h"
#include "storage/base/latency_histogram.h"

namespace wavekv {

// The RPCs of wavekv.v1.WaveKV in the order of the proto; a test compares the two.
enum class Rpc : uint8_t {
  kAttach,
  kHeartbeat,
  kDetach,
  kCreateSequence,
  kInsert,
  kBuildIndex,
  kPlanIndex,
  kGiveLabels,
  kQuery,
  kEstimate,
  kAttend,
  kDecode,
  kForkSequence,
  kTruncateSequence,
  kDropSequence,
  kPin,
  kSetTtl,
  kAttachResident,
  kResidentStatus,
  kDetachResident,
  kGetStats,
  kListSequences,
  kDescribeIndex,
  kExplain,
  kSampleRecall,
  kRecordSequence,
};
inline constexpr size_t kRpcCount = 26;

// "Attach", as the proto spells it.
std::string_view RpcName(Rpc rpc);

inline constexpr size_t kStatusCodeCount = 17;

// Thread-safe.
class CallStats {
 public:
  // A call has ended (of a stream: the whole stream).
  void CountCall(Rpc rpc, absl::StatusCode code);
  // One answer took this long from its request's arrival, waiting for a worker included: of a
  // unary call, or of one message of a Decode stream.
  void RecordLatency(Rpc rpc, double latency_us);

  uint64_t Calls(Rpc rpc, absl::StatusCode code) const;
  uint64_t Calls(Rpc rpc) const;  // All codes.
  const LatencyHistogram& latency(Rpc rpc) const { return latencies_[static_cast<size_t>(rpc)]; }

 private:
  std::array<std::array<std::atomic<uint64_t>, kStatusCodeCount>, kRpcCount> calls_{};
  std::array<LatencyHistogram, kRpcCount> latencies_;
};

}  // namespace wavekv
