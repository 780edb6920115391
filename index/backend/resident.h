// What the engine asks of a wave buffer whose client attends on the device itself: show it the
// index, hear what it appended. Implemented in gpu/resident; docs/decisions/015-resident-region.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "index/segment.h"

namespace wavekv {

struct ResidentOptions {
  double cache_ratio = 0.05;  // Of the payload of max_tokens, for the block cache.
  uint32_t ring_rows = 2304;  // Exact tokens of a unit; multiple of 256.
  // How the index is cut: a segment, and the small ones that become one in the end.
  uint32_t segment_tokens = 8192;
  uint32_t small_segment_tokens = 1024;
};

// A segment of one KV head and where its rows lie for the client.
struct ResidentSegment {
  const SegmentHead* head = nullptr;  // Lives as long as `owner`.
  std::shared_ptr<const void> owner;
  uint32_t window = 0;  // Index in the attachment's windows.
  uint64_t keys_offset = 0;
  uint64_t values_offset = 0;
};

// One layer as a version shows it: consistent, of one moment.
struct ResidentLayer {
  uint64_t version = 0;
  uint64_t token_count = 0;
  uint64_t steady_first = 0;                        // Segments cover [sink_count, steady_first).
  uint32_t sink_count = 0;                          // First tokens.
  uint32_t retrieve_count = 0;                      // Clusters of a head that a step retrieves.
  std::vector<std::vector<ResidentSegment>> heads;  // [kv_heads] in order of position
  // [kv_heads] exact rows in order of position: sink_count first ones, then [steady_first,
  // token_count). Only Load looks at them.
  std::vector<std::vector<RowRun>> steady;
  std::vector<std::shared_ptr<const void>> steady_owners;
};

struct ResidentCounters {
  uint64_t hit_blocks = 0;
  uint64_t miss_blocks = 0;
  uint64_t overflows = 0;   // Appends that found the ring full.
  uint64_t violations = 0;  // Numbers in the region that cannot be.
  uint64_t log_losses = 0;  // Rounds in which the log had lapped the manager.
};

// Where a client finds the region.
struct ResidentPlace {
  uint64_t region_offset = 0;  // From the start of the tenant's buffer.
  uint64_t region_bytes = 0;
};

// One attached sequence. Thread-safe; calls on one layer come one after another. What the memory
// says when it fails is Unavailable and lasts.
class ResidentSequence {
 public:
  // The region is closed, and given back as soon as no kernel can touch it.
  virtual ~ResidentSequence() = default;

  virtual ResidentPlace place() const = 0;

  // Shows the layer from scratch: index, first tokens, ring, and how many tokens there are.
  // FailedPrecondition: steps are under way, or more exact tokens than the ring holds.
  // ResourceExhausted: the index does not fit the region.
  virtual absl::Status Load(uint32_t layer, const ResidentLayer& view) = 0;

  // Publishes a newer version of the index; what the engine appended stays. False: the area is
  // still read by steps of an earlier version, try again after a Poll. Errors as Load's second and
  // third; the version that is there stays.
  virtual absl::StatusOr<bool> Publish(uint32_t layer, const ResidentLayer& view) = 0;

  // One round: reads the states and the log, keeps the cache's books, offers slots. Returns how
  // many tokens of each layer are in place, [layers].
  virtual absl::StatusOr<std::vector<uint64_t>> Poll() = 0;

  // Copies appended rows of positions [first, first + count) out, which Poll has announced, to
  // keys and values [count, kv_heads, dim].
  virtual absl::Status ReadRows(uint32_t layer, uint64_t first, uint32_t count, std::byte* keys,
                                std::byte* values) = 0;

  // Whether no step is under way, by a fresh look.
  virtual absl::StatusOr<bool> Drained() = 0;

  // From now on steps attend over nothing. `engine_is_gone`, called from any thread until it
  // says true, tells whether the client's process is dead. Idempotent.
  virtual void Close(std::function<bool()> engine_is_gone) = 0;

  virtual ResidentCounters counters() const = 0;
};

}  // namespace wavekv
