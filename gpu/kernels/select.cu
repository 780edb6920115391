// Selection: ranks clusters by what estimating them would cost, keeps the best, and finds where
// their blocks lie.
//
// One CTA serves a unit, or a thread block cluster of up to eight where a unit has many clusters.
// Keys (the ranks' bits, which order like the ranks) stay in shared memory; the threshold is found
// by radix selection over three digits, with one exchange of histograms through distributed shared
// memory for each. Equal keys go in order of their cluster, and the lists are written in order of
// the cluster: nothing depends on timing.
#include <cooperative_groups.h>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/select.cuh"

namespace wavekv::gpu {
namespace {

namespace cg = cooperative_groups;

constexpr int kSelectWarps = kSelectThreads / 32;
static_assert(kSelectWarps == 32, "a warp scans the warps' totals");
constexpr int kDigits = 3;
constexpr int kBins = 2048;

// A key's digits of 11, 11 and 10 bits, the highest first.
__device__ constexpr int DigitShift(int digit) { return digit == 0 ? 21 : digit == 1 ? 10 : 0; }
__device__ constexpr int DigitBits(int digit) { return digit == 2 ? 10 : 11; }

// Two counts, each below 2^16, in one word: keys above and at the threshold, or hits and misses.
__device__ uint32_t PackCounts(uint32_t low, uint32_t high) { return low | high << 16; }
__device__ uint32_t LowCount(uint32_t packed) { return packed & 0xffff; }
__device__ uint32_t HighCount(uint32_t packed) { return packed >> 16; }

struct SelectShared {
  uint32_t histogram[kDigits][kBins];
  uint32_t summed[kBins];  // Over all CTAs of the cluster.
  uint32_t scan[kSelectWarps];
  uint32_t exchanged[2];  // Packed counts of this CTA that the others read.
  float mass[kGroupMax];  // log2 of all mass, the steady zone included.
  uint32_t digit;         // Found: the bin the threshold is in ...
  uint32_t above;         // ... and how many keys lie in higher bins.
};

__device__ uint32_t InclusiveScan(uint32_t value) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t left = __shfl_up_sync(kFullWarp, value, step);
    if (lane >= step) value += left;
  }
  return value;
}

// Exclusive prefix sum over the CTA of one value a warp (`value` of any lane of it, the same in
// all); `total` gets the sum.
__device__ uint32_t ScanWarps(uint32_t value, SelectShared* shared, uint32_t* total) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (lane == 0) shared->scan[warp] = value;
  __syncthreads();
  const uint32_t inclusive = InclusiveScan(shared->scan[lane]);
  *total = __shfl_sync(kFullWarp, inclusive, 31);
  const uint32_t before = __shfl_sync(kFullWarp, inclusive, warp) - value;
  __syncthreads();
  return before;
}

// Likewise of one value a thread.
__device__ uint32_t ScanThreads(uint32_t value, SelectShared* shared, uint32_t* total) {
  const uint32_t inclusive = InclusiveScan(value);
  const uint32_t before = ScanWarps(__shfl_sync(kFullWarp, inclusive, 31), shared, total);
  return before + inclusive - value;
}

// What estimating a cluster is expected to do to the output, for one query head: see RankClusters
// of the CPU backend (docs/decisions/006-ranking-and-floor.md).
__device__ float Misjudged(float share, float reach_squared, float key_spread, float value_spread) {
  constexpr float kVarianceMax = 4, kSixth = 1.0f / 6;
  const float v = fminf(reach_squared * key_spread, kVarianceMax);
  return share * value_spread * sqrtf(v * (1 + v * (0.5f + v * kSixth)));
}

// A retrieved cluster and its blocks.
struct Located {
  uint32_t cluster = 0;
  uint32_t size = 0;
  uint32_t first_block = 0;
  uint32_t blocks = 0;
  int32_t slots[kClusterBlocksMax];  // -1: not cached.
  uint32_t hits = 0;

  __device__ uint32_t misses() const { return blocks - hits; }
};

class Selector {
 public:
  __device__ Selector(const Step& step, uint32_t unit, SelectShared* shared, uint32_t* keys)
      : step_(step),
        head_(step.workspace.heads[unit]),
        unit_(unit),
        group_(step.shape.group),
        logits_(step.workspace.logits + size_t{unit} * group_ * step.shape.cluster_capacity),
        shared_(shared),
        keys_(keys),
        cluster_(cg::this_cluster()),
        rank_(cluster_.block_rank()),
        ctas_(cluster_.num_blocks()) {
    chunk_begin_ = head_.chunk_count * rank_ / ctas_;
    chunk_end_ = head_.chunk_count * (rank_ + 1) / ctas_;
    if (chunk_begin_ < chunk_end_) {
      const ClusterChunk last = head_.chunks[chunk_end_ - 1];
      first_ = head_.chunks[chunk_begin_].first_cluster;
      count_ = last.first_cluster + last.cluster_count - first_;
    }
    wanted_ = min(head_.retrieve_count, step.shape.retrieve_capacity);
  }

  // All CTAs of the cluster call it.
  __device__ void Run() {
    for (int i = threadIdx.x; i < kDigits * kBins; i += kSelectThreads) {
      shared_->histogram[i / kBins][i % kBins] = 0;
    }
    SumMass();
    __syncthreads();
    if (wanted_ == 0) {
      if (rank_ == 0) Publish(0, 0);
      return;
    }
    MakeKeys();
    FindThreshold();
    Choose();
  }

 private:
  static constexpr uint32_t kChunkWarps = kChunkClusters / 32;          // Serve a chunk together.
  static constexpr uint32_t kChunkGroups = kSelectWarps / kChunkWarps;  // Chunks at a time,
  static constexpr uint32_t kChunkTurns = 4;                            // times these in flight.

  // Waits for the other CTAs, if there are any.
  __device__ void SyncCluster() { ctas_ > 1 ? cluster_.sync() : __syncthreads(); }

  // The mass of all clusters for each head, and of all that a step attends over.
  __device__ void SumMass() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t partials =
        step_.splits.steady + step_.splits.misses + step_.splits.hits + step_.splits.estimate;
    const PartialMass* chunks =
        step_.workspace.chunk_mass + size_t{unit_} * step_.shape.chunk_capacity * group_;
    const PartialMass* steady = step_.workspace.partial_mass + size_t{unit_} * partials * group_;
    for (uint32_t head = warp; head < group_; head += kSelectWarps) {
      float max = kLogFloor, sum = 0;
      const auto add = [&](const PartialMass& mass) {
        const float largest = fmaxf(max, mass.max);
        sum = sum * Exp2(max - largest) + mass.sum * Exp2(mass.max - largest);
        max = largest;
      };
#pragma unroll 4
      for (uint32_t i = lane; i < head_.chunk_count; i += 32) add(chunks[i * group_ + head]);
      float largest = WarpMax(max);
      const float clusters = largest + __log2f(WarpSum(sum * Exp2(max - largest)));
      for (uint32_t i = lane; i < step_.splits.steady; i += 32) add(steady[i * group_ + head]);
      largest = WarpMax(max);
      const float all = largest + __log2f(WarpSum(sum * Exp2(max - largest)));
      if (lane == 0) {
        shared_->mass[head] = step_.shape.rank_by_mass ? clusters : all;
        if (rank_ == 0) step_.workspace.cluster_mass[size_t{unit_} * group_ + head] = clusters;
      }
    }
  }

  // Keys of this CTA's clusters; 0 for padding. Counts their first digit.
  __device__ void MakeKeys() {
    const uint32_t place = threadIdx.x % kChunkClusters, mine = threadIdx.x / kChunkClusters;
    const size_t stride = step_.shape.cluster_capacity;
    const SegmentView* views =
        step_.workspace.views + size_t{unit_} * step_.shape.segment_capacity * group_;
    for (uint32_t base = chunk_begin_ + mine; base < chunk_end_;
         base += kChunkGroups * kChunkTurns) {
      uint32_t clusters[kChunkTurns], segments[kChunkTurns];
      bool valid[kChunkTurns];
      float key_spreads[kChunkTurns], value_spreads[kChunkTurns], ranks[kChunkTurns];
#pragma unroll
      for (uint32_t u = 0; u < kChunkTurns; ++u) {
        const uint32_t chunk_idx = base + u * kChunkGroups;
        const ClusterChunk chunk = head_.chunks[min(chunk_idx, chunk_end_ - 1)];
        valid[u] = chunk_idx < chunk_end_ && place < chunk.cluster_count;
        clusters[u] = chunk.first_cluster + (valid[u] ? place : 0);
        segments[u] = chunk.segment;
        ranks[u] = 0;
      }
#pragma unroll
      for (uint32_t u = 0; u < kChunkTurns; ++u) {
        key_spreads[u] = __ldg(head_.key_spreads + clusters[u]);
        value_spreads[u] = __ldg(head_.value_spreads + clusters[u]);
      }
#pragma unroll 4
      for (uint32_t g = 0; g < group_; ++g) {
#pragma unroll
        for (uint32_t u = 0; u < kChunkTurns; ++u) {
          const float logit = logits_[g * stride + clusters[u]];
          valid[u] = valid[u] && logit != -INFINITY;
          const float share = Exp2(logit - shared_->mass[g]);
          ranks[u] += step_.shape.rank_by_mass
                          ? share
                          : Misjudged(share, views[segments[u] * group_ + g].reach_squared,
                                      key_spreads[u], value_spreads[u]);
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kChunkTurns; ++u) {
        const bool in_chunk = base + u * kChunkGroups < chunk_end_ &&
                              place < head_.chunks[base + u * kChunkGroups].cluster_count;
        // NaN and negative numbers, which only a broken index gives, rank last.
        const uint32_t key = valid[u] ? __float_as_uint(ranks[u] > 0 ? ranks[u] : 0) + 1 : 0;
        if (in_chunk) keys_[clusters[u] - first_] = key;
        if (valid[u]) atomicAdd(&shared_->histogram[0][key >> DigitShift(0)], 1);
      }
    }
  }

  // Sets threshold_ to the wanted_-th largest key and above_ to the number of larger ones.
  __device__ void FindThreshold() {
    uint32_t prefix = 0, remaining = wanted_;
    for (int digit = 0; digit < kDigits; ++digit) {
      if (digit > 0) {
        const int known = DigitShift(digit) + DigitBits(digit);
        for (uint32_t i = threadIdx.x; i < count_; i += kSelectThreads) {
          const uint32_t key = keys_[i];
          if (key != 0 && key >> known == prefix >> known) {
            const uint32_t bin = (key >> DigitShift(digit)) & ((1u << DigitBits(digit)) - 1);
            atomicAdd(&shared_->histogram[digit][bin], 1);
          }
        }
      }
      SyncCluster();
      const uint32_t keys = FindBin(SumHistogram(digit), remaining);
      if (keys < remaining) {
        // Fewer clusters than the descriptor promised: all of them.
        threshold_ = 0;
        above_ = wanted_ = keys;
        return;
      }
      prefix |= shared_->digit << DigitShift(digit);
      remaining -= shared_->above;
      __syncthreads();
    }
    threshold_ = prefix;
    above_ = wanted_ - remaining;
  }

  // The histogram of a digit over all CTAs: each adds up a part and hands it to all.
  __device__ const uint32_t* SumHistogram(int digit) {
    if (ctas_ == 1) return shared_->histogram[digit];
    const uint32_t part = kBins / ctas_;
    for (uint32_t i = threadIdx.x; i < part; i += kSelectThreads) {
      const uint32_t bin = rank_ * part + i;
      uint32_t counts[kSelectCtasMax], sum = 0;
#pragma unroll
      for (uint32_t cta = 0; cta < kSelectCtasMax; ++cta) {
        counts[cta] = 0;
        if (cta < ctas_) {
          counts[cta] = cluster_.map_shared_rank(&shared_->histogram[digit][0], cta)[bin];
        }
      }
#pragma unroll
      for (uint32_t cta = 0; cta < kSelectCtasMax; ++cta) sum += counts[cta];
      for (uint32_t cta = 0; cta < ctas_; ++cta) {
        cluster_.map_shared_rank(&shared_->summed[0], cta)[bin] = sum;
      }
    }
    cluster_.sync();
    return shared_->summed;
  }

  // Finds the bin of the `remaining`-th largest key and returns how many keys `counts` counts.
  __device__ uint32_t FindBin(const uint32_t* counts, uint32_t remaining) {
    static_assert(kBins == 2 * kSelectThreads);
    // Threads take bins from the highest down, so that a prefix sum counts what lies above.
    const uint32_t top = kBins - 1 - 2 * threadIdx.x;
    const uint2 pair = *reinterpret_cast<const uint2*>(counts + top - 1);
    uint32_t total;
    uint32_t above = ScanThreads(pair.x + pair.y, shared_, &total);
    if (above < remaining && remaining <= above + pair.y) {
      shared_->digit = top;
      shared_->above = above;
    }
    above += pair.y;
    if (above < remaining && remaining <= above + pair.x) {
      shared_->digit = top - 1;
      shared_->above = above;
    }
    __syncthreads();
    return total;
  }

  // Packed counts of the CTAs before this one, the high one at most `high_max`; `own` is this
  // one's.
  __device__ uint32_t BeforeThisCta(uint32_t own, int slot, uint32_t high_max) {
    if (ctas_ == 1) return 0;
    if (threadIdx.x == 0) shared_->exchanged[slot] = own;
    cluster_.sync();
    uint32_t low = 0, high = 0;
    for (uint32_t cta = 0; cta < rank_; ++cta) {
      const uint32_t remote = cluster_.map_shared_rank(&shared_->exchanged[0], cta)[slot];
      low += LowCount(remote);
      high = min(high + HighCount(remote), high_max);
    }
    return PackCounts(low, high);
  }

  // Writes the list of chosen clusters, and their blocks. A warp has consecutive keys.
  __device__ void Choose() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t per_warp = (count_ + kSelectThreads - 1) / kSelectThreads * 32;
    const uint32_t begin = min(count_, warp * per_warp), end = min(count_, begin + per_warp);
    uint32_t above = 0, equal = 0;
    for (uint32_t base = begin; base < end; base += 32) {
      const uint32_t key = base + lane < end ? keys_[base + lane] : 0;
      above += __popc(__ballot_sync(kFullWarp, key > threshold_));
      equal += __popc(__ballot_sync(kFullWarp, key != 0 && key == threshold_));
    }
    uint32_t own;
    const uint32_t in_cta = ScanWarps(PackCounts(above, equal), shared_, &own);
    const uint32_t ties = wanted_ - above_;  // Of the keys at the threshold.
    // More equal keys than that make no difference, and might not fit in half a word.
    const uint32_t before_cta = BeforeThisCta(own, 0, ties);
    const auto place = [&](uint32_t packed) {
      return LowCount(packed) + min(HighCount(packed), ties);
    };
    uint32_t* list = step_.workspace.retrieved + size_t{unit_} * step_.shape.retrieve_capacity;
    uint32_t at = before_cta + in_cta;
    const uint32_t lower = (1u << lane) - 1;
    for (uint32_t base = begin; base < end; base += 32) {
      const uint32_t key = base + lane < end ? keys_[base + lane] : 0;
      const uint32_t above_bits = __ballot_sync(kFullWarp, key > threshold_);
      const uint32_t equal_bits = __ballot_sync(kFullWarp, key != 0 && key == threshold_);
      const uint32_t mine = at + PackCounts(__popc(above_bits & lower), __popc(equal_bits & lower));
      const bool is_tie = equal_bits >> lane & 1;
      if ((above_bits >> lane & 1) || (is_tie && HighCount(mine) < ties)) {
        list[place(mine)] = first_ + base + lane;
      }
      at += PackCounts(__popc(above_bits), __popc(equal_bits));
    }
    __syncthreads();
    Resolve(list, place(before_cta), place(before_cta + own));
  }

  // Looks a cluster's blocks up in the table.
  __device__ Located Locate(uint32_t c) const {
    Located located;
    located.cluster = c;
    located.size = head_.sizes[c];
    located.first_block = head_.first_block[c];
    located.blocks = min(kClusterBlocksMax, (located.size + kBlockRows - 1) / kBlockRows);
#pragma unroll
    for (uint32_t j = 0; j < kClusterBlocksMax; ++j) {
      int32_t slot = -1;
      if (j < located.blocks && located.first_block + j < head_.block_count) {
        slot = head_.block_slots[located.first_block + j];
      }
      // The table lies where a client can write: a slot that there is none of is a miss.
      const bool cached = slot >= 0 && static_cast<uint32_t>(slot) < head_.slot_count;
      located.slots[j] = cached ? slot : -1;
      located.hits += cached;
    }
    return located;
  }

  // Turns the clusters at [begin, end) of the list into lists of blocks to read, and takes them out
  // of the estimation zone.
  __device__ void Resolve(const uint32_t* list, uint32_t begin, uint32_t end) {
    // Nearly always each thread has one cluster at most.
    Located located;
    if (begin + threadIdx.x < end) located = Locate(list[begin + threadIdx.x]);
    uint32_t at = 0;
    if (ctas_ > 1) {
      uint32_t own = PackCounts(located.hits, located.misses());
      for (uint32_t i = begin + kSelectThreads + threadIdx.x; i < end; i += kSelectThreads) {
        const Located more = Locate(list[i]);
        own += PackCounts(more.hits, more.misses());
      }
      uint32_t total;
      ScanThreads(own, shared_, &total);
      at = BeforeThisCta(total, 1, kRetrieveMax * kClusterBlocksMax);
    }
    const HeadState state = *head_.state;
    for (uint32_t base = begin; base < end; base += kSelectThreads) {
      const uint32_t i = base + threadIdx.x;
      if (base > begin) located = i < end ? Locate(list[i]) : Located{};
      uint32_t total;
      const uint32_t before =
          ScanThreads(PackCounts(located.hits, located.misses()), shared_, &total);
      if (i < end) WriteBlocks(located, state, at + before);
      at += total;
    }
    // Until here the other CTAs may read the state, or this CTA's shared memory. The last of them
    // knows how many there are.
    SyncCluster();
    if (rank_ + 1 == ctas_) Publish(LowCount(at), HighCount(at));
  }

  // Free slots on offer; the counters lie where a client can write.
  __device__ uint32_t FreeSlots(const HeadState& state) const {
    return min(state.free_tail - state.free_head, uint64_t{head_.free_capacity});
  }

  // References to a cluster's blocks; `before` counts the hits and misses of those before it.
  __device__ void WriteBlocks(const Located& located, const HeadState& state, uint32_t before) {
    const uint32_t c = located.cluster;
    const size_t stride = step_.shape.cluster_capacity;
    const size_t row_bytes = size_t{step_.shape.head_dim} * 2;
    const SegmentCopy segment = head_.segments[head_.cluster_segment[c]];
    const size_t first_byte = head_.first_row[c] * row_bytes;
    const uint32_t free_count = FreeSlots(state);
    const uint32_t capacity = kClusterBlocksMax * step_.shape.retrieve_capacity;
    BlockRef* blocks = step_.workspace.blocks + size_t{unit_} * capacity;
    uint32_t hit = LowCount(before), miss = HighCount(before);
#pragma unroll
    for (uint32_t j = 0; j < kClusterBlocksMax; ++j) {
      if (j >= located.blocks) break;
      const uint32_t rows = min(kBlockRows, located.size - j * kBlockRows);
      const uint32_t block = located.first_block + j;
      int32_t slot = located.slots[j];
      const uint64_t log_place = state.log_end + hit + miss;
      if (slot >= 0) {
        const char* keys =
            static_cast<const char*>(head_.slots) + slot * 2 * kBlockRows * row_bytes;
        blocks[hit++] = {keys, keys + kBlockRows * row_bytes, rows, -1};
        Log(log_place, block, slot);
      } else {
        if (miss < free_count) slot = TakeSlot(state.free_head + miss, block);
        const size_t offset = first_byte + j * kBlockRows * row_bytes;
        blocks[capacity - 1 - miss++] = {static_cast<const char*>(segment.keys) + offset,
                                         static_cast<const char*>(segment.values) + offset, rows,
                                         slot};
        Log(log_place, block | kMissBit, slot);
      }
    }
    for (uint32_t g = 0; g < group_; ++g) logits_[g * stride + c] = -INFINITY;
  }

  // The free slot at `place` of the ring becomes `block`'s; -1 if it is no slot.
  __device__ int32_t TakeSlot(uint64_t place, uint32_t block) const {
    const uint32_t slot = head_.free_slots[place % head_.free_capacity];
    if (slot >= head_.slot_count || block >= head_.block_count) return -1;
    head_.block_slots[block] = static_cast<int32_t>(slot);
    return static_cast<int32_t>(slot);
  }

  __device__ void Log(uint64_t place, uint32_t block, int32_t slot) const {
    if (head_.log_capacity > 0) head_.log[place % head_.log_capacity] = {block, slot};
  }

  // Counts of the unit, and the state that the next step starts from. One CTA of the cluster calls
  // it when none reads the state any more.
  __device__ void Publish(uint32_t hits, uint32_t misses) {
    if (threadIdx.x != 0) return;
    UnitCounts* counts = step_.workspace.counts + unit_;
    counts->retrieved = wanted_;
    counts->hits = hits;
    counts->misses = misses;
    if (head_.state == nullptr) return;
    HeadState* state = head_.state;
    state->free_head += min(misses, FreeSlots(*state));
    state->log_end += hits + misses;
    state->hits += hits;
    state->misses += misses;
  }

  const Step& step_;
  const HeadDescriptor& head_;
  const uint32_t unit_;
  const uint32_t group_;
  float* const logits_;
  SelectShared* const shared_;
  uint32_t* const keys_;
  cg::cluster_group cluster_;
  const uint32_t rank_, ctas_;
  uint32_t chunk_begin_, chunk_end_;
  uint32_t first_ = 0, count_ = 0;  // Clusters of this CTA.
  uint32_t wanted_;
  uint32_t threshold_ = 0, above_ = 0;
};

}  // namespace

__global__ void __launch_bounds__(kSelectThreads)
    SelectKernel(const __grid_constant__ Step step, uint32_t first_unit) {
  __shared__ SelectShared shared;
  extern __shared__ uint32_t keys[];
  Selector(step, first_unit + blockIdx.y, &shared, keys).Run();
}

}  // namespace wavekv::gpu
