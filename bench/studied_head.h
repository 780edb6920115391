// One KV head of a recording under some index: answers by any policy, beside exact attention.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

#include "bench/recorded_layers.h"
#include "daemon/engine/cut_plan.h"
#include "index/backend/compute_backend.h"
#include "index/zone/zone_plan.h"

namespace wavekv::bench {

// By what clusters are ranked. All but the first are computed here, in double, from the index's
// logits.
enum class RankBy : uint8_t {
  kExpectedError,
  // The same with a share that gains no more from scatter than the estimate does.
  kEstimateGain,
  // Each head's share of the clusters' mass, with or without the clusters' sizes, its sum or its
  // largest over the group.
  kMassSum,
  kMassMax,
  kPlainSum,
  kPlainMax
};

struct Policy {
  RankBy rank = RankBy::kExpectedError;
  ZoneBudget budget;
  // As the paper estimates: size * exp(score) without a gain, no sketch, every value mean read.
  bool plain_estimate = false;
};

// What one policy did for one step of one KV head.
struct Outcome {
  std::vector<double> errors;   // [group_size] |output - exact| / |exact|
  std::vector<double> covered;  // [group_size] share of the mass looked at token by token
  uint64_t bytes_read = 0, bytes_full = 0;
  uint32_t retrieved = 0;
  bool met = false, capped = false;  // The error budget.
};

// Not thread-safe; the recording must outlive it.
class StudiedHead {
 public:
  StudiedHead(ComputeBackend* backend, const RecordedLayer& layer, uint32_t kv_head,
              const ClusterOptions& options);

  // Indexes these ranges of tokens; consecutive, the first begins at kSinkTokens. Those that are
  // indexed already are kept.
  void Index(std::span<const TokenRange> ranges);
  uint64_t indexed_end() const { return indexed_end_; }
  // Index bytes for each byte of the indexed tokens' payload.
  double index_ratio() const;

  // One step's answers, one for each policy. What is not indexed is the steady zone.
  std::vector<Outcome> Answer(const RecordedQuery& query, std::span<const Policy> policies);

 private:
  struct Segment {
    TokenRange range;
    std::vector<std::byte> keys, values;
    SegmentHead head;
  };
  struct Step;  // What all policies of a step share.

  Segment MakeSegment(const TokenRange& range);
  RowRun Rows(uint64_t begin, uint64_t end) const;
  Outcome AnswerBy(const Policy& policy, const Step& step);
  PartialAttention EstimatePlainly(std::span<const uint32_t> clusters, const Step& step) const;

  ComputeBackend* const backend_;
  const RecordedLayer& layer_;
  const uint32_t kv_head_;
  const ClusterOptions options_;
  std::deque<Segment> segments_;
  std::vector<const SegmentHead*> index_;
  uint64_t indexed_end_ = kSinkTokens;
};

}  // namespace wavekv::bench
