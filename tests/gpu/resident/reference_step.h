// A decode step over a resident region in plain C++: what the kernels of docs/decisions/010 and 015
// do with the memory that they share with the manager, word for word, with float64 arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/resident/resident_layout.h"

namespace wavekv::resident {

// A block that a step attended over, as it found it.
struct StepBlock {
  uint32_t block = 0;      // Number in the unit.
  uint32_t segment = 0;    // Entry ...
  uint32_t first_row = 0;  // ... and row of it that the block begins with.
  int32_t slot = -1;       // Where it lay, or where it was stored.
  bool hit = false;
  std::vector<std::byte> keys;    // [1 to kBlockRows, head_dim] element
  std::vector<std::byte> values;  // likewise
};

// What happened in one unit.
struct StepHead {
  enum class Is : uint8_t {
    kAttended,
    kClosed,   // The region is, or the unit was never loaded: attention over nothing.
    kRefused,  // Something in the region does not fit: likewise.
  };
  Is is = Is::kAttended;
  uint64_t version = 0;
  uint64_t steady_first = 0;
  uint64_t appended = 0;    // Positions [steady_first, appended) were attended from the ring.
  bool overflowed = false;  // The new token found no room and was dropped.
  std::vector<uint32_t> retrieved;  // Clusters, ascending.
  std::vector<StepBlock> blocks;    // Of the retrieved clusters, in that order.
  // First tokens, then the ring's rows in order of position, [count, head_dim] element.
  std::vector<std::byte> steady_keys, steady_values;

  uint64_t hits() const;
};

struct StepResult {
  std::vector<double> out;      // [kv_heads * group, head_dim]
  std::vector<double> lse;      // [kv_heads * group] natural log; -inf over nothing
  std::vector<StepHead> heads;  // [kv_heads]
};

// Steps of one engine, one layer at a time, in three phases between which the manager may do what
// it likes. Words that the manager writes or reads are loaded and stored whole (std::atomic_ref).
// No number of the region is followed without a check. Not thread-safe: an engine's steps follow
// one another.
class ReferenceStep {
 public:
  // `region` is the beginning of a region, mapped writable, whose header is written; `windows` are
  // the attachment's, mapped, in its order. Both outlive the step. `group` query heads share a KV
  // head, `scale` multiplies q.k.
  ReferenceStep(std::byte* region, std::vector<std::span<const std::byte>> windows, uint32_t group,
                double scale);

  // Says that a step starts, takes in what is published, and appends a token: keys and values
  // [kv_heads, head_dim] element; none where both are empty.
  void Begin(uint32_t layer, std::span<const std::byte> keys = {},
             std::span<const std::byte> values = {});
  // Ranks clusters by their share of the mass, summed over the group, takes the best and looks
  // their blocks up. `queries` [kv_heads * group, head_dim].
  void Rank(std::span<const float> queries);
  // Claims slots for the blocks that are missing, and logs all of them.
  void Claim();
  void Select(std::span<const float> queries) {
    Rank(queries);
    Claim();
  }
  // Reads the rows, stores the missing ones in their slots, attends, settles, completes.
  StepResult Attend();

  StepResult Run(uint32_t layer, std::span<const float> queries,
                 std::span<const std::byte> keys = {}, std::span<const std::byte> values = {}) {
    Begin(layer, keys, values);
    Select(queries);
    return Attend();
  }

 private:
  // A unit's part of the step under way.
  struct Unit {
    std::byte* base = nullptr;
    gpu::HeadState* state = nullptr;
    uint32_t area = 0;
    PublishedHead published = {};
    uint64_t started = 0;
    uint64_t log_end = 0;
    std::vector<double> logits;  // [group, cluster_count] size included; -inf: padding, retrieved
    StepHead head;
  };
  struct Attention;

  const UnitLayout& layout() const { return header_.unit; }
  size_t row_bytes() const { return size_t{header_.head_dim} * 2; }
  bool HeaderIsThere() const;
  double Element(const std::byte* row, uint32_t dim) const;
  const uint16_t* Sizes(const Unit& unit) const;
  bool Fits(const Unit& unit) const;
  void Append(const std::byte* key, const std::byte* value, Unit* unit) const;
  void Score(std::span<const float> queries, Unit* unit) const;
  void Choose(Unit* unit) const;
  void SeeOffers(Unit* unit) const;
  void LookUp(Unit* unit) const;
  void ClaimMissing(Unit* unit) const;
  int32_t TakeSlot(uint32_t block, uint64_t place, Unit* unit) const;
  void Log(const gpu::BlockUse& use, Unit* unit) const;
  bool ReadBlock(const Unit& unit, StepBlock* block) const;
  void CollectSteadyRows(Unit* unit) const;
  void Estimate(const Unit& unit, uint32_t query_head, Attention* attention) const;
  void Complete(const Unit& unit) const;

  std::byte* const region_;
  const ResidentHeader header_;  // As it was: a region that is closed may be wiped at any time.
  const std::vector<std::span<const std::byte>> windows_;
  const uint32_t group_;
  const double scale_;
  std::vector<float> queries_;  // [kv_heads * group, head_dim] of the step under way
  std::vector<Unit> units_;     // [kv_heads] likewise
};

}  // namespace wavekv::resident
