#include "daemon/engine/cut_plan.h"

#include <algorithm>

#include "storage/base/check.h"

namespace wavekv {
namespace {

// The segment that fills the stretch ending at `boundary`.
TokenRange Stretch(const CutRules& rules, uint64_t boundary) {
  return {std::max(boundary - rules.segment_tokens, kSinkTokens), boundary};
}

// First boundary whose stretch is not one segment yet.
uint64_t NextBoundary(const CutRules& rules, uint64_t planned_end) {
  return (planned_end / rules.segment_tokens + 1) * rules.segment_tokens;
}

}  // namespace

uint64_t PlannedEnd(std::span<const TokenRange> planned) {
  return planned.empty() ? kSinkTokens : planned.back().end;
}

void ApplyCut(const TokenRange& range, PlannedRanges* planned) {
  while (!planned->empty() && planned->back().begin >= range.begin) planned->pop_back();
  WAVEKV_CHECK(PlannedEnd(*planned) == range.begin, "a cut must join the segments before it");
  planned->push_back(range);
}

std::vector<TokenRange> CutsAfterAppend(const CutRules& rules, bool decoding,
                                        std::span<const TokenRange> planned, uint64_t token_count) {
  std::vector<TokenRange> cuts;
  constexpr uint64_t kept_exact = kLocalTokens + kRollbackTokens;
  if (token_count < kept_exact) return cuts;
  const uint64_t cuttable_end = token_count - kept_exact;
  uint64_t planned_end = PlannedEnd(planned);
  for (uint64_t boundary = NextBoundary(rules, planned_end); boundary <= cuttable_end;
       boundary += rules.segment_tokens) {
    cuts.push_back(Stretch(rules, boundary));
    planned_end = boundary;
  }
  if (!decoding) return cuts;
  // No small segment reaches the next boundary: it lies beyond cuttable_end.
  while (planned_end + rules.small_segment_tokens <= cuttable_end) {
    cuts.push_back({planned_end, planned_end + rules.small_segment_tokens});
    planned_end = cuts.back().end;
  }
  return cuts;
}

std::vector<TokenRange> CutsForBuild(const CutRules& rules, std::span<const TokenRange> planned,
                                     uint64_t token_count) {
  std::vector<TokenRange> cuts;
  if (token_count < kLocalTokens) return cuts;
  const uint64_t cuttable_end = token_count - kLocalTokens;
  uint64_t rest_begin = cuttable_end / rules.segment_tokens * rules.segment_tokens;
  for (uint64_t boundary = NextBoundary(rules, PlannedEnd(planned)); boundary <= rest_begin;
       boundary += rules.segment_tokens) {
    cuts.push_back(Stretch(rules, boundary));
  }
  rest_begin = std::max(rest_begin, kSinkTokens);
  const TokenRange rest = {rest_begin, cuttable_end};
  if (cuttable_end < rest_begin + rules.small_segment_tokens) return cuts;
  if (planned.empty() || planned.back() != rest) cuts.push_back(rest);
  return cuts;
}

bool StaysWith(const TokenRange& range, uint64_t token_count) {
  return range.end + kLocalTokens <= token_count;
}

bool MayBeCut(const CutRules& rules, std::span<const TokenRange> planned, const TokenRange& range) {
  if (range.begin < kSinkTokens || range.begin >= range.end) return false;
  // After a truncation what is left of a stretch may end where its small segments do.
  const uint64_t planned_end = PlannedEnd(planned);
  if (range.end < planned_end) return false;
  if (range.end == planned_end &&
      std::none_of(planned.begin(), planned.end(), [&](const TokenRange& first) {
        return first.begin == range.begin && first.end < planned_end;
      })) {
    return false;
  }
  // The first stretch is shorter by the sink.
  const uint64_t size_min =
      std::min(rules.small_segment_tokens, rules.segment_tokens - kSinkTokens);
  return range.size() >= size_min &&
         range.begin / rules.segment_tokens == (range.end - 1) / rules.segment_tokens;
}

size_t RangesKept(std::span<const TokenRange> planned, uint64_t token_count) {
  size_t kept = 0;
  while (kept < planned.size() && StaysWith(planned[kept], token_count)) ++kept;
  return kept;
}

}  // namespace wavekv
