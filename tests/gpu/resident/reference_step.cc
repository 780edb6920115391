#include "tests/gpu/resident/reference_step.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

#include "storage/base/check.h"
#include "storage/base/dtype.h"

namespace wavekv::resident {
namespace {

constexpr double kNothing = -std::numeric_limits<double>::infinity();

template <class T>
T LoadWhole(T* word) {
  return std::atomic_ref<T>(*word).load(std::memory_order_acquire);
}

template <class T>
void StoreWhole(T* word, T value) {
  std::atomic_ref<T>(*word).store(value, std::memory_order_release);
}

template <class T>
T* ArrayAt(std::byte* base, uint64_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

uint64_t StepHead::hits() const {
  return static_cast<uint64_t>(
      std::count_if(blocks.begin(), blocks.end(), [](const StepBlock& b) { return b.hit; }));
}

// Softmax over logits as they come: sum of exp(logit - max) and of the values with these weights.
struct ReferenceStep::Attention {
  double max = kNothing;
  double sum = 0;
  std::vector<double> out;

  // Returns the factor of the new value.
  double Add(double logit) {
    const double larger = std::max(max, logit);
    const double factor = max == kNothing ? 0 : std::exp(max - larger);
    for (double& x : out) x *= factor;
    const double weight = std::exp(logit - larger);
    sum = sum * factor + weight;
    max = larger;
    return weight;
  }
};

ReferenceStep::ReferenceStep(std::byte* region, std::vector<std::span<const std::byte>> windows,
                             uint32_t group, double scale)
    : region_(region),
      header_(*reinterpret_cast<const ResidentHeader*>(region)),
      windows_(std::move(windows)),
      group_(group),
      scale_(scale) {
  WAVEKV_CHECK(header_.magic == kResidentMagic && header_.version == kResidentVersion,
               "a step runs over a resident region");
}

double ReferenceStep::Element(const std::byte* row, uint32_t dim) const {
  uint16_t bits;
  std::memcpy(&bits, row + dim * sizeof(bits), sizeof(bits));
  const bool bf16 = header_.element == static_cast<uint32_t>(gpu::Element::kBF16);
  return bf16 ? BF16ToFloat(bits) : F16ToFloat(bits);
}

const uint16_t* ReferenceStep::Sizes(const Unit& unit) const {
  return ArrayAt<uint16_t>(unit.base, layout().sizes_offset) +
         size_t{unit.area} * layout().cluster_capacity;
}

bool ReferenceStep::Fits(const Unit& unit) const {
  const PublishedHead& published = unit.published;
  return published.cluster_count <= layout().cluster_capacity &&
         published.cluster_count % gpu::kClusterPad == 0 &&
         published.segment_count <= layout().segment_capacity &&
         published.sink_count <= kSinkRows && published.retrieve_count <= gpu::kRetrieveMax;
}

bool ReferenceStep::HeaderIsThere() const {
  const auto* const expected = reinterpret_cast<const uint64_t*>(&header_);
  auto* const found = ArrayAt<uint64_t>(region_, 0);
  constexpr size_t kWords = offsetof(ResidentHeader, state) / sizeof(uint64_t);
  for (size_t i = 0; i < kWords; ++i) {
    if (LoadWhole(&found[i]) != expected[i]) return false;
  }
  return true;
}

void ReferenceStep::Begin(uint32_t layer, std::span<const std::byte> keys,
                          std::span<const std::byte> values) {
  WAVEKV_CHECK(layer < header_.layer_count, "layer is one of the sequence's");
  units_.assign(header_.kv_head_count, {});
  if (!HeaderIsThere()) {
    for (Unit& unit : units_) unit.head.is = StepHead::Is::kRefused;
    return;
  }
  for (uint32_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    const uint32_t number = layer * header_.kv_head_count + i;
    unit.base = region_ + header_.units_offset + number * layout().unit_bytes;
    unit.state = ArrayAt<gpu::HeadState>(region_, header_.states_offset) + number;
    unit.started = LoadWhole(&unit.state->completed_epoch) + 1;
    StoreWhole(&unit.state->started, unit.started);
  }
  // Whoever takes something away looks at `started` afterwards: one of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool open =
      LoadWhole(ArrayAt<uint64_t>(region_, offsetof(ResidentHeader, state))) == kRegionOpen;
  for (uint32_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    const uint64_t published = LoadWhole(&unit.state->published);
    unit.log_end = LoadWhole(&unit.state->log_end);
    if (!open || published == 0) {
      unit.head.is = StepHead::Is::kClosed;
      continue;
    }
    unit.area = static_cast<uint32_t>(published % kAreas);
    unit.published = ArrayAt<PublishedHead>(unit.base, layout().published_offset)[unit.area];
    unit.head.version = unit.published.version;
    unit.head.steady_first = unit.published.steady_first;
    if (!Fits(unit)) {
      unit.head.is = StepHead::Is::kRefused;
      unit.published = {};
      continue;
    }
    if (!keys.empty()) Append(&keys[i * row_bytes()], &values[i * row_bytes()], &unit);
    unit.head.appended = LoadWhole(&unit.state->appended);
    SeeOffers(&unit);
  }
}

void ReferenceStep::Append(const std::byte* key, const std::byte* value, Unit* unit) const {
  const uint64_t position = LoadWhole(&unit->state->appended);
  const uint64_t oldest = unit->published.steady_first / gpu::kBlockRows * gpu::kBlockRows;
  if (position < oldest || position - oldest >= layout().ring_rows) {
    unit->head.overflowed = true;
    StoreWhole(&unit->state->overflows, LoadWhole(&unit->state->overflows) + 1);
    return;
  }
  std::byte* const rows = unit->base + layout().ring_offset;
  const uint64_t row = position % layout().ring_rows;
  std::memcpy(rows + row * row_bytes(), key, row_bytes());
  std::memcpy(rows + (layout().ring_rows + row) * row_bytes(), value, row_bytes());
  StoreWhole(&unit->state->appended, position + 1);
}

void ReferenceStep::Rank(std::span<const float> queries) {
  WAVEKV_CHECK(queries.size() == units_.size() * group_ * header_.head_dim,
               "every query head asks");
  queries_.assign(queries.begin(), queries.end());
  for (uint32_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    if (unit.head.is != StepHead::Is::kAttended) continue;
    const size_t of_unit = size_t{group_} * header_.head_dim;
    Score(queries.subspan(i * of_unit, of_unit), &unit);
    Choose(&unit);
    LookUp(&unit);
  }
}

void ReferenceStep::Claim() {
  for (Unit& unit : units_) {
    if (unit.head.is == StepHead::Is::kAttended) ClaimMissing(&unit);
  }
}

void ReferenceStep::Score(std::span<const float> queries, Unit* unit) const {
  const uint32_t dim = header_.head_dim, count = unit->published.cluster_count;
  const uint16_t* const sizes = Sizes(*unit);
  const auto* codes = ArrayAt<int8_t>(unit->base, layout().centroids_offset);
  const auto* scales = ArrayAt<float>(unit->base, layout().centroid_scales_offset);
  const auto* segments = ArrayAt<uint16_t>(unit->base, layout().cluster_segment_offset);
  const auto* means = ArrayAt<float>(unit->base, layout().means_offset);
  unit->logits.assign(size_t{group_} * count, kNothing);
  for (uint32_t c = 0; c < count; ++c) {
    if (sizes[c] == 0 || segments[c] >= unit->published.segment_count) continue;
    const float* mean = means + size_t{segments[c]} * 3 * dim;
    for (uint32_t g = 0; g < group_; ++g) {
      double dot = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        const double centroid = mean[d] + double{scales[c]} * codes[size_t{c} * dim + d];
        dot += queries[g * dim + d] * centroid;
      }
      unit->logits[size_t{g} * count + c] = scale_ * dot + std::log(sizes[c]);
    }
  }
}

void ReferenceStep::Choose(Unit* unit) const {
  const uint32_t count = unit->published.cluster_count;
  std::vector<double> ranks(count, -1);
  for (uint32_t g = 0; g < group_; ++g) {
    const double* logits = &unit->logits[size_t{g} * count];
    const double largest = count == 0 ? 0 : *std::max_element(logits, logits + count);
    double total = 0;
    for (uint32_t c = 0; c < count; ++c) total += std::exp(logits[c] - largest);
    for (uint32_t c = 0; c < count; ++c) {
      if (logits[c] == kNothing) continue;
      ranks[c] = std::max(ranks[c], 0.0) + std::exp(logits[c] - largest) / total;
    }
  }
  std::vector<uint32_t>& chosen = unit->head.retrieved;
  for (uint32_t c = 0; c < count; ++c) {
    if (ranks[c] >= 0) chosen.push_back(c);
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [&](uint32_t a, uint32_t b) { return ranks[a] > ranks[b]; });
  chosen.resize(std::min<size_t>(chosen.size(), unit->published.retrieve_count));
  std::sort(chosen.begin(), chosen.end());
  for (const uint32_t c : chosen) {
    for (uint32_t g = 0; g < group_; ++g) unit->logits[size_t{g} * count + c] = kNothing;
  }
}

void ReferenceStep::Log(const gpu::BlockUse& use, Unit* unit) const {
  auto* const entry = ArrayAt<uint64_t>(unit->base, layout().log_offset) +
                      unit->log_end++ % layout().log_capacity * (sizeof(use) / sizeof(uint64_t));
  uint64_t words[sizeof(use) / sizeof(uint64_t)];
  std::memcpy(words, &use, sizeof(use));
  for (size_t i = 0; i < std::size(words); ++i) StoreWhole(entry + i, words[i]);
}

// Takes what the slots on offer held out of the table.
void ReferenceStep::SeeOffers(Unit* unit) const {
  gpu::HeadState* const state = unit->state;
  const uint64_t tail = LoadWhole(&state->free_tail), seen = LoadWhole(&state->free_seen);
  const uint64_t count = std::min<uint64_t>(tail - seen, layout().slot_count);
  auto* const ring = ArrayAt<gpu::FreeSlot>(unit->base, layout().free_slots_offset);
  auto* const table = ArrayAt<int32_t>(unit->base, layout().block_slots_offset);
  for (uint64_t place = seen; place < seen + count; ++place) {
    gpu::FreeSlot& offer = ring[place % layout().slot_count];
    const uint32_t slot = LoadWhole(&offer.slot), block = LoadWhole(&offer.block);
    if (block >= layout().block_capacity) continue;
    if (LoadWhole(&table[block]) == static_cast<int32_t>(slot)) StoreWhole(&table[block], -1);
  }
  StoreWhole(&state->free_seen, tail);
}

// The slot at `place` of the ring of free slots becomes the block's; -1 if it is no slot.
int32_t ReferenceStep::TakeSlot(uint32_t block, uint64_t place, Unit* unit) const {
  auto* const ring = ArrayAt<gpu::FreeSlot>(unit->base, layout().free_slots_offset);
  const uint32_t slot = LoadWhole(&ring[place % layout().slot_count].slot);
  if (slot >= layout().slot_count || block >= layout().block_capacity) return -1;
  auto* const table = ArrayAt<int32_t>(unit->base, layout().block_slots_offset);
  StoreWhole(&table[block], static_cast<int32_t>(slot));
  return static_cast<int32_t>(slot);
}

void ReferenceStep::LookUp(Unit* unit) const {
  auto* const table = ArrayAt<int32_t>(unit->base, layout().block_slots_offset);
  const auto* first_rows = ArrayAt<uint32_t>(unit->base, layout().first_row_offset);
  const auto* first_blocks = ArrayAt<uint32_t>(unit->base, layout().first_block_offset);
  const auto* segments = ArrayAt<uint16_t>(unit->base, layout().cluster_segment_offset);
  const uint16_t* const sizes = Sizes(*unit);
  for (const uint32_t c : unit->head.retrieved) {
    const uint32_t blocks =
        std::min((sizes[c] + gpu::kBlockRows - 1) / gpu::kBlockRows, gpu::kClusterBlocksMax);
    for (uint32_t j = 0; j < blocks; ++j) {
      StepBlock found;
      found.block = first_blocks[c] + j;
      found.segment = segments[c];
      found.first_row = first_rows[c] + j * gpu::kBlockRows;
      const uint32_t rows = std::min(gpu::kBlockRows, sizes[c] - j * gpu::kBlockRows);
      found.keys.resize(rows * row_bytes());
      found.values.resize(rows * row_bytes());
      if (found.block < layout().block_capacity) found.slot = LoadWhole(&table[found.block]);
      found.hit = found.slot >= 0 && static_cast<uint32_t>(found.slot) < layout().slot_count;
      unit->head.blocks.push_back(std::move(found));
    }
  }
}

void ReferenceStep::ClaimMissing(Unit* unit) const {
  gpu::HeadState* const state = unit->state;
  const uint64_t free_head = LoadWhole(&state->free_head);
  const uint64_t free_count =
      std::min<uint64_t>(LoadWhole(&state->free_seen) - free_head, layout().slot_count);
  uint64_t misses = 0;
  for (StepBlock& found : unit->head.blocks) {
    if (found.hit) {
      Log({found.block, found.slot, gpu::kNoPlace}, unit);
      continue;
    }
    const uint64_t place = free_head + misses;
    found.slot = misses++ < free_count ? TakeSlot(found.block, place, unit) : -1;
    Log({found.block | gpu::kMissBit, found.slot, found.slot < 0 ? gpu::kNoPlace : place}, unit);
  }
  StoreWhole(&state->free_head, free_head + std::min(misses, free_count));
  StoreWhole(&state->log_end, unit->log_end);
  StoreWhole(&state->hits, LoadWhole(&state->hits) + unit->head.blocks.size() - misses);
  StoreWhole(&state->misses, LoadWhole(&state->misses) + misses);
}

// Brings the block's rows: from its slot, or from the pool and into the slot that was claimed. A
// hit's bytes are whatever lies there.
bool ReferenceStep::ReadBlock(const Unit& unit, StepBlock* block) const {
  const size_t bytes = block->keys.size();
  std::byte* const slot =
      block->slot < 0 ? nullptr
                      : unit.base + layout().slots_offset +
                            static_cast<uint64_t>(block->slot) * 2 * gpu::kBlockRows * row_bytes();
  std::byte* const slot_values = slot == nullptr ? nullptr : slot + gpu::kBlockRows * row_bytes();
  if (block->hit) {
    std::memcpy(block->keys.data(), slot, bytes);
    std::memcpy(block->values.data(), slot_values, bytes);
    return true;
  }
  const SegmentEntry& entry =
      ArrayAt<SegmentEntry>(unit.base, layout().segments_offset)[block->segment];
  if (entry.window >= windows_.size()) return false;
  const std::span<const std::byte> window = windows_[entry.window];
  const uint64_t at = block->first_row * row_bytes();
  for (const uint64_t offset : {entry.keys_offset, entry.values_offset}) {
    if (offset > window.size() || at + bytes > window.size() - offset) return false;
  }
  std::memcpy(block->keys.data(), &window[entry.keys_offset + at], bytes);
  std::memcpy(block->values.data(), &window[entry.values_offset + at], bytes);
  if (slot == nullptr) return true;
  std::memcpy(slot, block->keys.data(), bytes);
  std::memcpy(slot_values, block->values.data(), bytes);
  return true;
}

void ReferenceStep::CollectSteadyRows(Unit* unit) const {
  StepHead& head = unit->head;
  const auto append = [&](const std::byte* keys, uint64_t rows_of_half, uint64_t row) {
    const std::byte* values = keys + rows_of_half * row_bytes();
    head.steady_keys.insert(head.steady_keys.end(), keys + row * row_bytes(),
                            keys + (row + 1) * row_bytes());
    head.steady_values.insert(head.steady_values.end(), values + row * row_bytes(),
                              values + (row + 1) * row_bytes());
  };
  for (uint32_t row = 0; row < unit->published.sink_count; ++row) {
    append(unit->base + layout().sink_offset, kSinkRows, row);
  }
  const uint64_t end =
      std::min(head.appended, head.steady_first + layout().ring_rows);  // A hostile count ends.
  for (uint64_t position = head.steady_first; position < end; ++position) {
    append(unit->base + layout().ring_offset, layout().ring_rows, position % layout().ring_rows);
  }
}

void ReferenceStep::Estimate(const Unit& unit, uint32_t query_head, Attention* attention) const {
  const uint32_t dim = header_.head_dim, count = unit.published.cluster_count;
  const auto* codes = ArrayAt<int8_t>(unit.base, layout().value_means_offset);
  const auto* scales = ArrayAt<float>(unit.base, layout().value_scales_offset);
  const auto* segments = ArrayAt<uint16_t>(unit.base, layout().cluster_segment_offset);
  const auto* means = ArrayAt<float>(unit.base, layout().means_offset);
  for (uint32_t c = 0; c < count; ++c) {
    const double logit = unit.logits[size_t{query_head} * count + c];
    if (logit == kNothing) continue;
    const double weight = attention->Add(logit);
    const float* mean = means + (size_t{segments[c]} * 3 + 1) * dim;
    for (uint32_t d = 0; d < dim; ++d) {
      attention->out[d] += weight * (mean[d] + double{scales[c]} * codes[size_t{c} * dim + d]);
    }
  }
}

void ReferenceStep::Complete(const Unit& unit) const {
  if (unit.state == nullptr) return;  // There was no region any more.
  if (unit.head.is == StepHead::Is::kAttended) {
    StoreWhole(&unit.state->appended_settled, LoadWhole(&unit.state->appended));
    StoreWhole(&unit.state->log_settled, unit.log_end);
  }
  StoreWhole(&unit.state->completed_epoch, unit.started);
}

StepResult ReferenceStep::Attend() {
  const uint32_t dim = header_.head_dim;
  StepResult result;
  for (uint32_t i = 0; i < units_.size(); ++i) {
    Unit& unit = units_[i];
    if (unit.head.is == StepHead::Is::kAttended) CollectSteadyRows(&unit);
    for (StepBlock& block : unit.head.blocks) {
      if (!ReadBlock(unit, &block)) unit.head.is = StepHead::Is::kRefused;
    }
    for (uint32_t g = 0; g < group_; ++g) {
      const float* query = &queries_[(size_t{i} * group_ + g) * dim];
      Attention attention{.out = std::vector<double>(dim)};
      const auto attend = [&](const std::vector<std::byte>& keys,
                              const std::vector<std::byte>& values) {
        for (size_t at = 0; at < keys.size(); at += row_bytes()) {
          double dot = 0;
          for (uint32_t d = 0; d < dim; ++d) dot += query[d] * Element(&keys[at], d);
          const double weight = attention.Add(scale_ * dot);
          for (uint32_t d = 0; d < dim; ++d) {
            attention.out[d] += weight * Element(&values[at], d);
          }
        }
      };
      if (unit.head.is == StepHead::Is::kAttended) {
        attend(unit.head.steady_keys, unit.head.steady_values);
        for (const StepBlock& block : unit.head.blocks) attend(block.keys, block.values);
        Estimate(unit, g, &attention);
      }
      for (const double x : attention.out) {
        result.out.push_back(attention.sum > 0 ? x / attention.sum : 0);
      }
      result.lse.push_back(attention.sum > 0 ? attention.max + std::log(attention.sum) : kNothing);
    }
    Complete(unit);
    result.heads.push_back(std::move(unit.head));
  }
  units_.clear();
  return result;
}

}  // namespace wavekv::resident
