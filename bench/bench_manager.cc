// What a round of the manager costs: the thread of wavekvd that looks at every attached sequence
// (docs/decisions/015-resident-region.md), over plain memory, with steps that are played by hand.
//
//   bench_manager [--json] [--sequences=8] [--layers=4] [--steps=8] [--fresh=0.1] [--threads=0] ...
//
// Llama-3-8B's heads at 122,880 tokens, a cache of 5 %. Between two rounds every unit has so many
// steps; a step asks for the blocks of 148 clusters (1.8 %), `fresh` of them outside its working
// set, which is somewhat larger than the cache. The index itself is not written: steps and manager
// share only states, offers and logs. A row for the whole round, the time in the memory's own
// calls, and how many transfers a device would make of them; one for the policy alone.
#include <time.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "bench/machine.h"
#include "bench/or_die.h"
#include "gpu/resident/resident_layout.h"
#include "gpu/resident/resident_plan.h"
#include "gpu/resident/resident_region.h"
#include "gpu/tenant_buffer.h"
#include "storage/base/shared_memory.h"
#include "storage/base/thread_pool.h"
#include "storage/block_cache_policy.h"

namespace wavekv::bench {
namespace {

constexpr uint32_t kKvHeads = 8, kDim = 128, kTokens = 122880, kSinks = 4;
constexpr uint32_t kSegmentTokens = 8192, kClusterTokens = 16;
constexpr uint32_t kRetrieved = 148;       // Clusters of a step.
constexpr double kWorkingSetShare = 1.25;  // Of the cache.

// Microseconds of CPU time, all threads of the process.
double CpuUs() {
  timespec now;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) / 1e3;
}

struct Options {
  uint32_t sequences = 8, layers = 4, steps = 8, rounds = 40, threads = 0;
  double fresh = 0.1;
  uint64_t seed = 1;
  bool json = false;
};

// What the manager's calls to the memory cost, and what a device would make of them.
struct Traffic {
  double read_us = 0, write_us = 0;
  uint64_t calls = 0, transfers = 0;
};

// Keeps copies out while an index is loaded: nobody here reads one.
class CountingMemory : public BufferMemory {
 public:
  CountingMemory(std::unique_ptr<BufferMemory> memory, Traffic* traffic)
      : memory_(std::move(memory)), traffic_(*traffic) {}

  void set_loading(bool loading) { loading_ = loading; }
  uint64_t bytes() const override { return memory_->bytes(); }
  absl::Status Write(std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word) override {
    if (loading_) copies = {};
    return memory_->Write(copies, word);
  }
  absl::Status Zero(uint64_t, uint64_t) override { return absl::OkStatus(); }
  absl::Status Scatter(std::span<const BufferEntry> entries,
                       std::span<const BufferWord> words) override {
    const double begin = CpuUs();
    absl::Status status = memory_->Scatter(entries, words);
    traffic_.write_us += CpuUs() - begin;
    ++traffic_.calls;
    traffic_.transfers += words.size();
    for (size_t i = 0; i < entries.size(); ++i) {
      traffic_.transfers += i == 0 || entries[i].offset != entries[i - 1].offset + 4;
    }
    return status;
  }
  absl::Status Read(std::span<const ByteRead> pieces) override {
    const double begin = CpuUs();
    absl::Status status = memory_->Read(pieces);
    traffic_.read_us += CpuUs() - begin;
    ++traffic_.calls;
    traffic_.transfers += pieces.size();
    return status;
  }

 private:
  const std::unique_ptr<BufferMemory> memory_;
  Traffic& traffic_;
  bool loading_ = false;
};

// A head's index as the manager takes it: only how it is cut matters.
std::vector<std::unique_ptr<SegmentHead>> MakeSegments() {
  std::vector<std::unique_ptr<SegmentHead>> segments;
  for (uint32_t first = kSinks; first < kTokens; first += kSegmentTokens) {
    auto segment = std::make_unique<SegmentHead>();
    segment->uid = segments.size() + 1;
    segment->first_position = first;
    segment->token_count = std::min(kSegmentTokens, kTokens - first);
    segment->cluster_count = (segment->token_count + kClusterTokens - 1) / kClusterTokens;
    segment->key_dim = segment->value_dim = kDim;
    segment->key_mean.resize(kDim);
    segment->value_mean.resize(kDim);
    segment->spread_shares.resize(kDim);
    segment->key_codes.resize(KeyCodeCount(segment->cluster_count, kDim), kKeyCodeZero);
    segment->value_codes.resize(size_t{segment->cluster_count} * kDim);
    segment->first_row = segment->first_block = {0};
    for (uint32_t c = 0; c < segment->cluster_count; ++c) {
      // 12 to 20 tokens, 16 on average.
      const uint32_t end = c + 1 == segment->cluster_count
                               ? segment->token_count
                               : (c + 1) * kClusterTokens - (c % 9 < 4 ? c % 9 + 1 : 0);
      const uint32_t size = end - segment->first_row.back();
      segment->sizes.push_back(static_cast<uint16_t>(size));
      segment->first_row.push_back(end);
      segment->first_block.push_back(segment->first_block.back() + (size + 7) / 8);
    }
    for (auto* floats : {&segment->key_scales, &segment->value_scales, &segment->key_spreads,
                         &segment->value_spreads}) {
      floats->resize(segment->cluster_count);
    }
    segments.push_back(std::move(segment));
  }
  return segments;
}

// One unit's kernels: looks blocks up, takes offered slots, logs.
class UnitSteps {
 public:
  UnitSteps(const resident::UnitLayout& layout, std::byte* unit, gpu::HeadState* state,
            uint32_t block_count, uint64_t seed)
      : layout_(layout),
        log_(reinterpret_cast<gpu::BlockUse*>(unit + layout.log_offset)),
        offers_(reinterpret_cast<gpu::FreeSlot*>(unit + layout.free_slots_offset)),
        state_(state),
        random_(seed),
        table_(block_count, -1),
        used_(block_count) {
    working_set_.resize(static_cast<size_t>(kWorkingSetShare * layout.slot_count / 2));
    for (uint32_t& pair : working_set_) pair = AnyPair();
  }

  void Step(double fresh, uint64_t number) {
    state_->started = state_->completed_epoch + 1;
    for (; state_->free_seen < state_->free_tail; ++state_->free_seen) {
      const gpu::FreeSlot offer = offers_[state_->free_seen % layout_.slot_count];
      if (offer.block >= table_.size()) continue;
      int32_t& slot = table_[offer.block];
      if (slot == static_cast<int32_t>(offer.slot)) slot = -1;
    }
    std::bernoulli_distribution outside(fresh);
    std::vector<uint32_t> pairs(kRetrieved);
    for (uint32_t& pair : pairs) {
      pair = outside(random_) ? AnyPair() : working_set_[random_() % working_set_.size()];
    }
    std::sort(pairs.begin(), pairs.end());
    for (const uint32_t pair : pairs) {
      for (const uint32_t block : {pair, pair + 1}) {
        if (std::exchange(used_[block], number) != number) Use(block);
      }
    }
    working_set_[random_() % working_set_.size()] = AnyPair();  // It drifts.
    state_->log_settled = state_->log_end;
    state_->completed_epoch = state_->started;
  }

 private:
  uint32_t AnyPair() { return static_cast<uint32_t>(random_() % (table_.size() / 2) * 2); }
  void Use(uint32_t block) {
    gpu::BlockUse use = {block, table_[block], gpu::kNoPlace};
    if (use.slot >= 0) {
      ++state_->hits;
    } else {
      ++state_->misses;
      use.block |= gpu::kMissBit;
      if (state_->free_head < state_->free_seen) {
        use.place = state_->free_head++;
        use.slot = static_cast<int32_t>(offers_[use.place % layout_.slot_count].slot);
        table_[block] = use.slot;
      }
    }
    log_[state_->log_end++ % layout_.log_capacity] = use;
  }

  const resident::UnitLayout& layout_;
  gpu::BlockUse* const log_;
  gpu::FreeSlot* const offers_;
  gpu::HeadState* const state_;
  std::mt19937_64 random_;
  std::vector<int32_t> table_;
  std::vector<uint64_t> used_;         // Step that used a block last.
  std::vector<uint32_t> working_set_;  // Pairs of blocks: clusters.
};

// One attached sequence and the engine that steps over it.
class Attached {
 public:
  Attached(const Options& options, uint64_t number,
           const std::vector<std::unique_ptr<SegmentHead>>& segments,
           const std::shared_ptr<ThreadPool>& helpers, Traffic* traffic) {
    const ModelShape shape = {.layer_count = options.layers,
                              .query_head_count = 4 * kKvHeads,
                              .kv_head_count = kKvHeads,
                              .key_dim = kDim,
                              .value_dim = kDim,
                              .dtype = DType::kBF16,
                              .softmax_scale = 0.088f};
    header_ = OrDie(resident::PlanResident(shape, kTokens, {}));
    const uint64_t bytes =
        (TenantBuffer::BytesMin(4) + header_.region_bytes + (uint64_t{4} << 20)) >> 21 << 21;
    const UniqueFd fd = OrDie(CreateMemfd("bench_manager", bytes));
    Mapping mapping = OrDie(Mapping::Map(fd.get(), bytes, Mapping::kReadWrite));
    std::byte* const data = mapping.data();
    auto memory = std::make_unique<CountingMemory>(MapHostBuffer(std::move(mapping)), traffic);
    CountingMemory& counting = *memory;
    buffer_ = OrDie(TenantBuffer::Create(std::move(memory), 4));
    region_ = OrDie(
        resident::CreateResidentRegion(buffer_, SequenceId(number), shape, kTokens, {}, helpers));
    counting.set_loading(true);
    for (uint32_t layer = 0; layer < options.layers; ++layer) {
      OrDie(region_->Load(layer, View(segments)));
    }
    counting.set_loading(false);
    std::byte* const region = data + region_->place().region_offset;
    uint32_t block_count = 0;
    for (const auto& segment : segments) block_count += segment->first_block.back();
    for (uint32_t unit = 0; unit < options.layers * kKvHeads; ++unit) {
      steps_.emplace_back(header_.unit,
                          region + header_.units_offset + unit * header_.unit.unit_bytes,
                          reinterpret_cast<gpu::HeadState*>(region + header_.states_offset) + unit,
                          block_count, options.seed * 1000 + number * 300 + unit);
    }
  }
  void Step(double fresh, uint64_t number) {
    for (UnitSteps& steps : steps_) steps.Step(fresh, number);
  }
  ResidentSequence& region() { return *region_; }

 private:
  static ResidentLayer View(const std::vector<std::unique_ptr<SegmentHead>>& segments) {
    ResidentLayer view;
    view.version = 1;
    view.token_count = view.steady_first = kTokens;
    view.sink_count = kSinks;
    view.retrieve_count = kRetrieved;
    view.heads.resize(kKvHeads);
    view.steady.resize(kKvHeads);
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      for (const auto& segment : segments) view.heads[head].push_back({.head = segment.get()});
      view.steady[head] = {{nullptr, nullptr, kSinks}};
    }
    return view;
  }

  resident::ResidentHeader header_;
  std::shared_ptr<TenantBuffer> buffer_;
  std::unique_ptr<ResidentSequence> region_;
  std::vector<UnitSteps> steps_;
};

nlohmann::json RunRounds(const Options& options) {
  const auto segments = MakeSegments();
  Traffic traffic;
  const auto helpers =
      std::make_shared<ThreadPool>(static_cast<int>(options.threads), "bench_books");
  std::vector<std::unique_ptr<Attached>> attached;
  for (uint32_t i = 0; i < options.sequences; ++i) {
    attached.push_back(std::make_unique<Attached>(options, i + 1, segments, helpers, &traffic));
  }
  ResidentCounters before;
  std::vector<double> rounds, cpu, reads, writes, transfers;
  const auto sum = [&] {
    ResidentCounters counters;
    for (const auto& one : attached) {
      counters.hit_blocks += one->region().counters().hit_blocks;
      counters.miss_blocks += one->region().counters().miss_blocks;
      counters.violations += one->region().counters().violations;
      counters.log_losses += one->region().counters().log_losses;
    }
    return counters;
  };
  const uint32_t warm = options.rounds / 2;
  uint64_t number = 0;
  for (uint32_t round = 0; round < warm + options.rounds; ++round) {
    if (round == warm) before = sum();
    for (uint32_t step = 0; step < options.steps; ++step) {
      ++number;
      for (const auto& one : attached) one->Step(options.fresh, number);
    }
    traffic = {};
    const double begin = NowUs(), cpu_begin = CpuUs();
    for (const auto& one : attached) OrDie(one->region().Poll().status());
    if (round < warm) continue;
    rounds.push_back(NowUs() - begin);
    cpu.push_back(CpuUs() - cpu_begin);
    reads.push_back(traffic.read_us);
    writes.push_back(traffic.write_us);
    transfers.push_back(static_cast<double>(traffic.transfers));
  }
  const ResidentCounters after = sum();
  const uint64_t hits = after.hit_blocks - before.hit_blocks;
  const uint64_t uses = hits + after.miss_blocks - before.miss_blocks;
  const uint32_t units = options.sequences * options.layers * kKvHeads;
  return {{"units", units},
          {"uses_per_unit", double(uses) / units / options.rounds},
          {"hit_ratio", double(hits) / double(uses)},
          {"violations", after.violations},
          {"log_losses", after.log_losses},
          {"round_us", Median(rounds)},
          {"round_us_p90", Quantile(rounds, 0.9)},
          {"cpu_us", Median(cpu)},
          {"cpu_read_us", Median(reads)},
          {"cpu_write_us", Median(writes)},
          {"cpu_books_us", Median(cpu) - Median(reads) - Median(writes)},
          {"transfers", Median(transfers)}};
}

// Nanoseconds of CPU time of the policy's calls for many caches in turn, as a round makes them.
nlohmann::json RunPolicy(const Options& options) {
  constexpr uint32_t kCaches = 256, kSlots = 768, kBlocks = 16 * kSlots, kLookups = 592;
  constexpr uint32_t kLeaving = 48;
  std::mt19937_64 random(options.seed);
  std::vector<std::unique_ptr<BlockCachePolicy>> caches;
  for (uint32_t i = 0; i < kCaches; ++i) {
    caches.push_back(MakeLrfuBlockCachePolicy(kSlots));
    for (uint32_t slot = 0; slot < kSlots; ++slot) (void)caches[i]->Adopt({1, slot}, slot);
  }
  double lookup_us = 0, turn_us = 0;
  uint64_t lookups = 0, turns = 0;
  for (uint32_t round = 0; round < 30; ++round) {
    for (const auto& cache : caches) {
      std::vector<uint32_t> blocks(kLookups), missed;
      for (uint32_t& block : blocks) {
        block = static_cast<uint32_t>(random() % (random() % 10 == 0 ? kBlocks : kSlots));
      }
      const double begin = CpuUs();
      for (const uint32_t block : blocks) {
        if (!cache->Lookup({1, block}, 0).has_value() && missed.size() < kLeaving) {
          missed.push_back(block);
        }
      }
      const double between = CpuUs();
      for (const uint32_t block : missed) {
        const auto worst = cache->Evict(0);
        if (worst.has_value() && !cache->Adopt({1, block}, worst->slot)) {
          (void)cache->Adopt(worst->key, worst->slot);  // It was named twice.
        }
      }
      if (round < 10) continue;  // Until the histories are full.
      lookup_us += between - begin;
      turn_us += CpuUs() - between;
      lookups += blocks.size();
      turns += missed.size();
    }
  }
  return {{"lookup_ns", 1e3 * lookup_us / double(lookups)},
          {"evict_and_adopt_ns", 1e3 * turn_us / double(turns)}};
}

int Main(int argc, char** argv) {
  Options options;
  CLI::App app("What a round of the manager of resident regions costs");
  app.add_option("--sequences", options.sequences)->check(CLI::Range(1, 64));
  app.add_option("--layers", options.layers)->check(CLI::Range(1, 128));
  app.add_option("--steps", options.steps, "Of each unit between two rounds")
      ->check(CLI::Range(1, 1000));
  app.add_option("--rounds", options.rounds)->check(CLI::Range(4, 10000));
  app.add_option("--threads", options.threads, "Beside the manager's own")
      ->check(CLI::Range(0, 64));
  app.add_option("--fresh", options.fresh)->check(CLI::Range(0.0, 1.0));
  app.add_option("--seed", options.seed);
  app.add_flag("--json", options.json);
  CLI11_PARSE(app, argc, argv);
  nlohmann::json result = {{"bench", "manager"},
                           {"cpu", CpuName()},
                           {"commit", CommitName()},
                           {"steps", options.steps},
                           {"threads", options.threads},
                           {"layers", options.layers},
                           {"sequences", options.sequences},
                           {"fresh", options.fresh},
                           {"seed", options.seed}};
  result["policy"] = RunPolicy(options);
  result["round"] = RunRounds(options);
  if (!options.json) {
    std::printf("policy  %s\nround   %s\n", result["policy"].dump().c_str(),
                result["round"].dump().c_str());
  }
  std::cout << result.dump() << std::endl;
  return 0;
}

}  // namespace
}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
