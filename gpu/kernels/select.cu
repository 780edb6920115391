// Selection: ranks clusters by what estimating them would cost, keeps the best, and finds where
// their blocks lie.
//
// One CTA serves a unit, or a thread block cluster of up to eight where a unit has many clusters.
// Keys (the ranks' bits, which order like the ranks) stay in shared memory. They are counted in
// bins as they are made; the bins of all CTAs are added up through distributed shared memory. The
// few keys of the bin that the threshold is in are compared with each other; a bin of many is cut
// into bins first. Equal keys go in order of their cluster, and the lists are written in order of
// the cluster: nothing depends on timing.
#include <cooperative_groups.h>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/segments.cuh"
#include "gpu/kernels/select.cuh"

namespace wavekv::gpu {
namespace {

namespace cg = cooperative_groups;

constexpr int kSelectWarps = kSelectThreads / 32;
static_assert(kSelectWarps == 32, "a warp scans the warps' totals");
constexpr uint32_t kBinBits = 11;
constexpr uint32_t kBins = 1 << kBinBits;
static_assert(kBins == 2 * kSelectThreads, "a thread has two bins");
// The first bins: 32 an octave, of ranks from 2^-52 to 2^12. The lowest bin and the highest hold
// what lies beyond, too.
constexpr int kFirstShift = 23 - 5;
constexpr uint32_t kFirstKey = (127u - 52) << 23;
// So many keys are compared with each other.
constexpr uint32_t kFewKeys = 512;
static_assert(kFewKeys <= kSelectThreads && kFewKeys <= kBins);

// Two counts, each below 2^16, in one word: keys above and at the threshold, or hits and misses.
__device__ uint32_t PackCounts(uint32_t low, uint32_t high) { return low | high << 16; }
__device__ uint32_t LowCount(uint32_t packed) { return packed & 0xffff; }
__device__ uint32_t HighCount(uint32_t packed) { return packed >> 16; }

struct SelectShared {
  HeadDescriptor head;
  HeadState state;
  uint32_t histograms[2][kBins];  // One is counted in while the other is made empty again.
  uint32_t summed[kBins];         // Over all CTAs of the cluster; later the first clusters chosen.
  uint32_t scan[kSelectWarps];
  uint32_t exchanged[2];  // Packed counts of this CTA that the others read.
  float mass[kGroupMax];  // log2 of all mass, the steady zone included.
  uint32_t few_count;     // Keys, of all CTAs, that are compared with each other.
  uint32_t threshold;     // Found among them.
  uint32_t bin;           // Found: the bin the threshold is in, ...
  uint32_t above;         // ... how many keys lie above (in higher bins, or among few keys), ...
  uint32_t inside;        // ... and how many in it.
};

static_assert(kHeadWords <= kSelectThreads);
constexpr int kStateWords = sizeof(HeadState) / sizeof(uint64_t);
static_assert(sizeof(HeadState) % sizeof(uint64_t) == 0);

__device__ uint32_t InclusiveScan(uint32_t value) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t left = __shfl_up_sync(kFullWarp, value, step);
    if (lane >= step) value += left;
  }
  return value;
}

// Exclusive prefix sum over the CTA; `total` gets the sum.
__device__ uint32_t ScanThreads(uint32_t value, SelectShared* shared, uint32_t* total) {
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t inclusive = InclusiveScan(value);
  if (lane == 31) shared->scan[warp] = inclusive;
  __syncthreads();
  const uint32_t warps = InclusiveScan(shared->scan[lane]);
  *total = __shfl_sync(kFullWarp, warps, 31);
  const uint32_t others = __shfl_sync(kFullWarp, warps, (warp + 31) % 32);
  __syncthreads();
  return (warp == 0 ? 0 : others) + inclusive - value;
}

// A retrieved cluster and its blocks.
struct Located {
  uint32_t cluster = 0;
  uint32_t size = 0;
  uint32_t first_block = 0;
  uint32_t blocks = 0;
  const char* keys = nullptr;  // Of its first row, in the pool.
  const char* values = nullptr;
  int32_t slots[kClusterBlocksMax];  // -1: not cached.
  uint32_t hits = 0;

  __device__ uint32_t misses() const { return blocks - hits; }
};

class Selector {
 public:
  // All threads of the CTA call it.
  __device__ Selector(const Step& step, SelectShared* shared, uint32_t* keys)
      : step_(step),
        unit_(blockIdx.y),
        group_(step.shape.group),
        logits_(step.workspace.logits + size_t{unit_} * group_ * step.shape.cluster_capacity),
        shared_(shared),
        head_(shared->head),
        keys_(keys),
        cluster_(cg::this_cluster()),
        rank_(cluster_.block_rank()),
        ctas_(cluster_.num_blocks()) {
    // Nothing here waits for anything else: the loads are in flight together.
    if (threadIdx.x < kHeadWords) {
      reinterpret_cast<uint64_t*>(&shared_->head)[threadIdx.x] =
          reinterpret_cast<const uint64_t*>(step.workspace.heads + unit_)[threadIdx.x];
    }
    SumMass();
    ClearBins(0);
    ClearBins(1);
    if (threadIdx.x == 0) shared_->few_count = 0;
    __syncthreads();
    // Equal shares of the clusters, in whole tiles.
    const uint32_t tiles = head_.cluster_count / kClusterPad;
    first_ = tiles * rank_ / ctas_ * kClusterPad;
    count_ = tiles * (rank_ + 1) / ctas_ * kClusterPad - first_;
    wanted_ = min(head_.retrieve_count, step.shape.retrieve_capacity);
  }

  // All CTAs of the cluster call it.
  __device__ void Run() {
    if (head_.state != nullptr && threadIdx.x < kStateWords) {
      reinterpret_cast<uint64_t*>(&shared_->state)[threadIdx.x] =
          reinterpret_cast<const uint64_t*>(head_.state)[threadIdx.x];
    }
    if (wanted_ == 0) {
      __syncthreads();
      if (rank_ == 0) Publish(0, 0);
      return;
    }
    MakeKeys();
    FindThreshold();
    Choose();
  }

 private:
  static constexpr uint32_t kTurns = 2;  // Of four clusters of a thread, whose loads are in flight.

  __device__ void ClearBins(int histogram) {
    reinterpret_cast<uint2*>(shared_->histograms[histogram])[threadIdx.x] = {0, 0};
  }

  // Waits for the other CTAs, if there are any.
  __device__ void SyncCluster() { ctas_ > 1 ? cluster_.sync() : __syncthreads(); }

  // The mass of all clusters for each head, and of all that a step attends over. The last warps do
  // it: the first load what the others wait for.
  __device__ void SumMass() {
    const uint32_t warp = kSelectWarps - 1 - threadIdx.x / 32, lane = threadIdx.x % 32;
    const uint32_t partials =
        step_.splits.steady + step_.splits.misses + step_.splits.hits + step_.splits.estimate;
    const PartialMass* stretches =
        step_.workspace.rank_mass + size_t{unit_} * step_.splits.rank * group_;
    const PartialMass* steady = step_.workspace.partial_mass + size_t{unit_} * partials * group_;
    for (uint32_t head = warp; head < group_; head += kSelectWarps) {
      float max = kLogFloor, sum = 0;
      const auto add = [&](const PartialMass& mass) {
        const float largest = fmaxf(max, mass.max);
        sum = sum * Exp2(max - largest) + mass.sum * Exp2(mass.max - largest);
        max = largest;
      };
      // Asked for before the clusters' masses are in.
      PartialMass first_steady = {kLogFloor, 0};
      if (lane < step_.splits.steady) first_steady = steady[lane * group_ + head];
#pragma unroll 8
      for (uint32_t i = lane; i < step_.splits.rank; i += 32) add(stretches[i * group_ + head]);
      float largest = WarpMax(max);
      const float clusters = largest + __log2f(WarpSum(sum * Exp2(max - largest)));
      add(first_steady);
      for (uint32_t i = lane + 32; i < step_.splits.steady; i += 32) add(steady[i * group_ + head]);
      largest = WarpMax(max);
      const float all = largest + __log2f(WarpSum(sum * Exp2(max - largest)));
      if (lane == 0) {
        shared_->mass[head] = step_.shape.rank_by_mass ? clusters : all;
        if (rank_ == 0) step_.workspace.cluster_mass[size_t{unit_} * group_ + head] = clusters;
      }
    }
  }

  // Keys of this CTA's clusters; 0 for padding. Counts them in the first bins.
  __device__ void MakeKeys() {
    const size_t stride = step_.shape.cluster_capacity;
    const float* ranks = step_.workspace.ranks + size_t{unit_} * group_ * stride + first_;
    for (uint32_t base = 4 * threadIdx.x; base < count_; base += 4 * kTurns * kSelectThreads) {
      float sums[kTurns][4] = {};
      bool valid[kTurns][4];
#pragma unroll 4
      for (uint32_t g = 0; g < group_; ++g) {
        const float mass = shared_->mass[g];
        float4 four[kTurns];
#pragma unroll
        for (uint32_t u = 0; u < kTurns; ++u) {
          const uint32_t i = base + 4 * u * kSelectThreads;
          four[u] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
          if (i < count_) four[u] = *reinterpret_cast<const float4*>(ranks + g * stride + i);
        }
#pragma unroll
        for (uint32_t u = 0; u < kTurns; ++u) {
          const float rank[4] = {four[u].x, four[u].y, four[u].z, four[u].w};
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            valid[u][k] = rank[k] != -INFINITY;  // Of all heads or none.
            sums[u][k] += Exp2(rank[k] - mass);
          }
        }
      }
#pragma unroll
      for (uint32_t u = 0; u < kTurns; ++u) {
        const uint32_t i = base + 4 * u * kSelectThreads;
        if (i >= count_) break;
        uint32_t made[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          // NaN and negative numbers, which only a broken index gives, rank last.
          made[k] = valid[u][k] ? __float_as_uint(sums[u][k] > 0 ? sums[u][k] : 0) + 1 : 0;
          if (made[k] != 0) atomicAdd(&shared_->histograms[0][FirstBin(made[k])], 1);
        }
        *reinterpret_cast<uint4*>(keys_ + i) = {made[0], made[1], made[2], made[3]};
      }
    }
    SyncCluster();
  }

  static __device__ uint32_t FirstBin(uint32_t key) {
    return min((max(key, kFirstKey) - kFirstKey) >> kFirstShift, kBins - 1);
  }

  // Sets threshold_ and above_ so that the keys over threshold_ are above_, and those with wanted_
  // - above_ of the keys that equal it are wanted_.
  __device__ void FindThreshold() {
    uint32_t remaining = wanted_;
    above_ = 0;
    const uint32_t keys = FindBin(SumHistogram(0), remaining);
    if (keys < remaining) {
      // Fewer clusters than the descriptor promised: all of them.
      above_ = wanted_ = keys;
      return;
    }
    // The keys of [low, end) are those of the bin; real ones are at least 1.
    const uint32_t bin = shared_->bin;
    uint32_t low = bin == 0 ? 1 : kFirstKey + (bin << kFirstShift);
    uint64_t end =
        bin == kBins - 1 ? uint64_t{1} << 32 : uint64_t{kFirstKey} + ((bin + 1) << kFirstShift);
    for (int turn = 1;; ++turn) {
      above_ += shared_->above;
      remaining -= shared_->above;
      const uint32_t inside = shared_->inside;
      if (inside == remaining) {
        // They are all wanted: no key equals the threshold.
        above_ += remaining;
        threshold_ = low - 1;
        return;
      }
      const auto span = static_cast<uint32_t>(end - low);
      if (span == 1) {
        threshold_ = low;
        return;
      }
      if (inside <= kFewKeys) {
        PickAmongFew(low, span, remaining, turn % 2);
        return;
      }
      const int shift = max(0, 32 - __clz(span - 1) - static_cast<int>(kBinBits));
      if (turn > 1) ClearBins(turn % 2);
      __syncthreads();
      CountKeys(low, span, shift, turn % 2);
      FindBin(SumHistogram(turn % 2), remaining);
      low += shared_->bin << shift;
      end = min(end, uint64_t{low} + (1u << shift));
    }
  }

  // The `remaining`-th largest of the few keys in [low, low + span) becomes the threshold. All CTAs
  // get them in `histogram`, which is in no other use, and each finds it.
  __device__ void PickAmongFew(uint32_t low, uint32_t span, uint32_t remaining, int histogram) {
    uint32_t* few = shared_->histograms[histogram];
    for (uint32_t i = threadIdx.x; i < count_; i += kSelectThreads) {
      const uint32_t key = keys_[i];
      if (key - low >= span) continue;
      for (uint32_t cta = 0; cta < ctas_; ++cta) {
        const uint32_t at = atomicAdd(cluster_.map_shared_rank(&shared_->few_count, cta), 1);
        cluster_.map_shared_rank(few, cta)[at] = key;
      }
    }
    SyncCluster();
    const uint32_t count = shared_->few_count;
    if (threadIdx.x < count) {
      const uint32_t key = few[threadIdx.x];
      uint32_t above = 0, equal = 0;
      for (uint32_t i = 0; i < count; ++i) {
        above += few[i] > key;
        equal += few[i] == key;
      }
      // Of equal keys each says the same.
      if (above < remaining && remaining <= above + equal) {
        shared_->threshold = key;
        shared_->above = above;
      }
    }
    __syncthreads();
    threshold_ = shared_->threshold;
    above_ += shared_->above;
  }

  // Counts this CTA's keys in [low, low + span), 2^shift of them in a bin.
  __device__ void CountKeys(uint32_t low, uint32_t span, int shift, int histogram) {
    for (uint32_t i = threadIdx.x; i < count_; i += kSelectThreads) {
      const uint32_t above = keys_[i] - low;  // Keys under `low` wrap around to more than any span.
      if (above < span) atomicAdd(&shared_->histograms[histogram][above >> shift], 1);
    }
    SyncCluster();
  }

  // The histogram over all CTAs: each adds up a part and hands it to all.
  __device__ const uint32_t* SumHistogram(int histogram) {
    uint32_t* own = shared_->histograms[histogram];
    if (ctas_ == 1) return own;
    const uint32_t part = kBins / ctas_;
    for (uint32_t i = threadIdx.x; i < part; i += kSelectThreads) {
      const uint32_t bin = rank_ * part + i;
      uint32_t counts[kSelectCtasMax], sum = 0;
#pragma unroll
      for (uint32_t cta = 0; cta < kSelectCtasMax; ++cta) {
        counts[cta] = 0;
        if (cta < ctas_) counts[cta] = cluster_.map_shared_rank(own, cta)[bin];
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
    // Threads take bins from the highest down, so that a prefix sum counts what lies above.
    const uint32_t top = kBins - 1 - 2 * threadIdx.x;
    const uint2 pair = *reinterpret_cast<const uint2*>(counts + top - 1);
    uint32_t total;
    uint32_t above = ScanThreads(pair.x + pair.y, shared_, &total);
    const auto note = [&](uint32_t bin, uint32_t inside) {
      if (above >= remaining || remaining > above + inside) return;
      shared_->bin = bin;
      shared_->above = above;
      shared_->inside = inside;
    };
    note(top, pair.y);
    above += pair.y;
    note(top - 1, pair.x);
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

  // Writes the list of chosen clusters, and their blocks. A warp has 32 keys in a row, then 32
  // further on: the counts of all these rows, in order, are scanned.
  __device__ void Choose() {
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint32_t* rows = shared_->histograms[0];  // Packed counts; at most kBins of them.
    const uint32_t row_count = (count_ + kSelectThreads - 1) / kSelectThreads * kSelectWarps;
    for (uint32_t row = warp; row < row_count; row += kSelectWarps) {
      const uint32_t i = 32 * row + lane, key = i < count_ ? keys_[i] : 0;
      const uint32_t above = __popc(__ballot_sync(kFullWarp, key > threshold_));
      const uint32_t equal = __popc(__ballot_sync(kFullWarp, key != 0 && key == threshold_));
      if (lane == 0) rows[row] = PackCounts(above, equal);
    }
    __syncthreads();
    uint32_t own;
    {
      uint32_t* pair = rows + 2 * threadIdx.x;
      const bool mine = 2 * threadIdx.x < row_count;
      const uint32_t first = mine ? pair[0] : 0, second = mine ? pair[1] : 0;
      const uint32_t before = ScanThreads(first + second, shared_, &own);
      if (mine) {
        pair[0] = before;
        pair[1] = before + first;
      }
    }
    const uint32_t ties = wanted_ - above_;  // Of the keys at the threshold.
    // More equal keys than that make no difference, and might not fit in half a word.
    const uint32_t before_cta = BeforeThisCta(own, 0, ties);
    __syncthreads();
    const auto place = [&](uint32_t packed) {
      return LowCount(packed) + min(HighCount(packed), ties);
    };
    uint32_t* list = step_.workspace.retrieved + size_t{unit_} * step_.shape.retrieve_capacity;
    const uint32_t begin = place(before_cta);
    const uint32_t lower = (1u << lane) - 1;
    for (uint32_t row = warp; row < row_count; row += kSelectWarps) {
      const uint32_t i = 32 * row + lane, key = i < count_ ? keys_[i] : 0;
      const uint32_t above_bits = __ballot_sync(kFullWarp, key > threshold_);
      const uint32_t equal_bits = __ballot_sync(kFullWarp, key != 0 && key == threshold_);
      if ((above_bits | equal_bits) == 0) continue;
      const uint32_t mine = before_cta + rows[row] +
                            PackCounts(__popc(above_bits & lower), __popc(equal_bits & lower));
      const bool is_tie = equal_bits >> lane & 1;
      if ((above_bits >> lane & 1) || (is_tie && HighCount(mine) < ties)) {
        const uint32_t at = place(mine);
        list[at] = first_ + i;
        if (at - begin < kBins) shared_->summed[at - begin] = first_ + i;
      }
    }
    __syncthreads();
    Resolve(list, begin, place(before_cta + own));
  }

  // Cluster number i of the list.
  __device__ uint32_t Listed(const uint32_t* list, uint32_t begin, uint32_t i) const {
    return i - begin < kBins ? shared_->summed[i - begin] : list[i];
  }

  // Looks a cluster's blocks up in the table, while its segment is read.
  __device__ Located Locate(uint32_t c) const {
    Located located;
    located.cluster = c;
    located.size = __ldg(head_.sizes + c);
    located.first_block = __ldg(head_.first_block + c);
    const uint32_t row = __ldg(head_.first_row + c), s = __ldg(head_.cluster_segment + c);
    const uint32_t wanted = min(kClusterBlocksMax, (located.size + kBlockRows - 1) / kBlockRows);
#pragma unroll
    for (uint32_t j = 0; j < kClusterBlocksMax; ++j) {
      located.slots[j] = -1;
      if (j < wanted && located.first_block + j < head_.block_count) {
        located.slots[j] = head_.block_slots[located.first_block + j];
      }
    }
    const SegmentCopy& segment = SegmentOf(head_, s);
    if (HasRows(segment, row, located.size)) located.blocks = wanted;
    const size_t first_byte = row * RowBytes();
    located.keys = static_cast<const char*>(segment.keys) + first_byte;
    located.values = static_cast<const char*>(segment.values) + first_byte;
#pragma unroll
    for (uint32_t j = 0; j < kClusterBlocksMax; ++j) {
      // The table lies where a client can write: a slot that there is none of is a miss.
      const int32_t slot = j < located.blocks ? located.slots[j] : -1;
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
    if (begin + threadIdx.x < end) located = Locate(Listed(list, begin, begin + threadIdx.x));
    uint32_t at = 0;
    if (ctas_ > 1) {
      uint32_t own = PackCounts(located.hits, located.misses());
      for (uint32_t i = begin + kSelectThreads + threadIdx.x; i < end; i += kSelectThreads) {
        const Located more = Locate(Listed(list, begin, i));
        own += PackCounts(more.hits, more.misses());
      }
      uint32_t total;
      ScanThreads(own, shared_, &total);
      at = BeforeThisCta(total, 1, kRetrieveMax * kClusterBlocksMax);
    }
    for (uint32_t base = begin; base < end; base += kSelectThreads) {
      const uint32_t i = base + threadIdx.x;
      if (base > begin) located = i < end ? Locate(Listed(list, begin, i)) : Located{};
      uint32_t total;
      const uint32_t before =
          ScanThreads(PackCounts(located.hits, located.misses()), shared_, &total);
      if (i < end) WriteBlocks(located, at + before);
      at += total;
    }
    // Until here the other CTAs may read this CTA's shared memory, or the state. The last of them
    // knows how many there are.
    SyncCluster();
    if (rank_ + 1 == ctas_) Publish(LowCount(at), HighCount(at));
  }

  __device__ size_t RowBytes() const { return size_t{step_.shape.head_dim} * 2; }

  // Slots on offer that the step has seen; the counters lie where a client can write.
  __device__ uint32_t FreeSlots() const {
    return min(shared_->state.free_seen - shared_->state.free_head, uint64_t{head_.free_capacity});
  }

  // References to a cluster's blocks; `before` counts the hits and misses of those before it.
  __device__ void WriteBlocks(const Located& located, uint32_t before) {
    const size_t stride = step_.shape.cluster_capacity;
    const size_t block_bytes = kBlockRows * RowBytes();
    const uint32_t free_count = FreeSlots();
    const uint32_t capacity = kClusterBlocksMax * step_.shape.retrieve_capacity;
    BlockRef* blocks = step_.workspace.blocks + size_t{unit_} * capacity;
    uint32_t hit = LowCount(before), miss = HighCount(before);
#pragma unroll
    for (uint32_t j = 0; j < kClusterBlocksMax; ++j) {
      if (j >= located.blocks) break;
      const uint32_t rows = min(kBlockRows, located.size - j * kBlockRows);
      const uint32_t block = located.first_block + j;
      int32_t slot = located.slots[j];
      const uint64_t log_place = shared_->state.log_end + hit + miss;
      if (slot >= 0) {
        const char* keys = static_cast<const char*>(head_.slots) + slot * 2 * block_bytes;
        blocks[hit++] = {keys, keys + block_bytes, rows, -1};
        Log(log_place, {block, slot, kNoPlace});
      } else {
        const uint64_t place = shared_->state.free_head + miss;
        if (miss < free_count) slot = TakeSlot(place, block);
        blocks[capacity - 1 - miss++] = {located.keys + j * block_bytes,
                                         located.values + j * block_bytes, rows, slot};
        Log(log_place, {block | kMissBit, slot, slot < 0 ? kNoPlace : place});
      }
    }
    for (uint32_t g = 0; g < group_; ++g) logits_[g * stride + located.cluster] = -INFINITY;
  }

  // The free slot at `place` of the ring becomes `block`'s; -1 if it is no slot.
  __device__ int32_t TakeSlot(uint64_t place, uint32_t block) const {
    const uint32_t slot = head_.free_slots[place % head_.free_capacity].slot;
    if (slot >= head_.slot_count || block >= head_.block_count) return -1;
    head_.block_slots[block] = static_cast<int32_t>(slot);
    return static_cast<int32_t>(slot);
  }

  __device__ void Log(uint64_t log_place, const BlockUse& use) const {
    if (head_.log_capacity > 0) head_.log[log_place % head_.log_capacity] = use;
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
    head_.state->free_head = shared_->state.free_head + min(misses, FreeSlots());
    head_.state->log_end = shared_->state.log_end + hits + misses;
    head_.state->hits = shared_->state.hits + hits;
    head_.state->misses = shared_->state.misses + misses;
  }

  const Step& step_;
  const uint32_t unit_;
  const uint32_t group_;
  float* const logits_;
  SelectShared* const shared_;
  const HeadDescriptor& head_;
  uint32_t* const keys_;
  cg::cluster_group cluster_;
  const uint32_t rank_, ctas_;
  uint32_t first_, count_;  // Clusters of this CTA.
  uint32_t wanted_;
  uint32_t threshold_ = 0, above_ = 0;
};

}  // namespace

__global__ void __launch_bounds__(kSelectThreads) SelectKernel(const __grid_constant__ Step step) {
  __shared__ SelectShared shared;
  extern __shared__ __align__(16) uint32_t keys[];
  Selector(step, &shared, keys).Run();
}

}  // namespace wavekv::gpu
