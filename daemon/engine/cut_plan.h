// Where segments are cut: pure functions of token counts and BuildIndex calls, never of timing
// (docs/decisions/004-segments-and-versions.md).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace wavekv {

inline constexpr uint64_t kSinkTokens = 4;       // First tokens, exact for ever.
inline constexpr uint64_t kLocalTokens = 64;     // Last tokens, always exact.
inline constexpr uint64_t kRollbackTokens = 64;  // Truncating by this many dissolves no segment
                                                 // that an append has cut.

// Token positions [begin, end).
struct TokenRange {
  uint64_t begin = 0;
  uint64_t end = 0;

  uint64_t size() const { return end - begin; }
  friend bool operator==(const TokenRange&, const TokenRange&) = default;
};

struct CutRules {
  uint64_t segment_tokens = 8192;        // A stretch: boundaries are multiples of it.
  uint64_t small_segment_tokens = 1024;  // Divides segment_tokens.
};

// Segments of one layer, planned or there: consecutive ranges, the first begins at kSinkTokens.
// No range crosses a stretch boundary, and one that ends on a boundary fills its stretch.
using PlannedRanges = std::vector<TokenRange>;

// End of the last range, kSinkTokens when there is none.
uint64_t PlannedEnd(std::span<const TokenRange> planned);

// Adds `range`, which begins where `planned` ends or where one of its ranges begins: it replaces
// all from there on.
void ApplyCut(const TokenRange& range, PlannedRanges* planned);

// What to cut, in order, once the layer holds token_count tokens. Stretches with kLocalTokens +
// kRollbackTokens behind them become one segment each, replacing the small ones in them. `decoding`
// (there was a BuildIndex): what has left the local window becomes small segments.
std::vector<TokenRange> CutsAfterAppend(const CutRules& rules, bool decoding,
                                        std::span<const TokenRange> planned, uint64_t token_count);

// What BuildIndex cuts at token_count: every stretch that ends kLocalTokens before the last token
// or earlier, then the rest up to the local window as one segment if it has small_segment_tokens or
// more (a shorter one holds no segment). What is cut so already is left out.
std::vector<TokenRange> CutsForBuild(const CutRules& rules, std::span<const TokenRange> planned,
                                     uint64_t token_count);

// Whether a segment of this range stays when only token_count tokens do.
bool StaysWith(const TokenRange& range, uint64_t token_count);

// Whether the range may be cut later on, with these planned: true for all that CutsAfterAppend and
// CutsForBuild will answer. False for any range that crosses a stretch boundary, begins before
// kSinkTokens, or is shorter than every segment; or that ends before `planned` does, or where it
// does and is not several of its ranges: a cut that ends no later replaces some by one.
bool MayBeCut(const CutRules& rules, std::span<const TokenRange> planned, const TokenRange& range);

// How many of the ranges, from the front, stay when only token_count tokens do.
size_t RangesKept(std::span<const TokenRange> planned, uint64_t token_count);

}  // namespace wavekv
