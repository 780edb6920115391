// Inserting a prefill over shared memory and over gRPC on a UNIX socket, against one thread's
// memcpy, in one run.
//
//   bench_insert [--json] [--tokens=16384] [--rounds=9] [--seed=1]
//
// One layer of 8 KV heads of 128 bf16: 4 KiB of K and V a token. Each round inserts all tokens into
// a sequence of its own, as a prefill does: its memory is fresh from the kernel. The memcpy copies
// as many bytes, of the same source, to memory that was touched before. In turn; medians.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/data_world.h"
#include "bench/machine.h"
#include "bench/or_die.h"

namespace wavekv::bench {
namespace {

constexpr double kShareGoal = 0.5;
// A sequence reserves room for its index, too, and a dropped one's goes when the builder has
// noticed: enough for three, in multiples of what is inserted.
constexpr uint64_t kPoolShare = 8;

struct Rates {
  std::vector<double> shm_gbps;
  std::vector<double> grpc_gbps;
  std::vector<double> memcpy_gbps;
};

class Bench {
 public:
  Bench(uint64_t tokens, uint64_t seed)
      : tokens_(tokens),
        keys_(RandomBF16(tokens * 8 * 128, seed)),
        values_(RandomBF16(tokens * 8 * 128, seed + 1)),
        target_(bytes()) {}

  uint64_t bytes() const { return tokens_ * DataShape().token_bytes(); }

  double Insert(client::Session& session) const {
    auto sequence = OrDie(session.CreateSequence({.shape = DataShape(), .max_tokens = tokens_}));
    const uint32_t layers[] = {0};
    const std::vector<int64_t> shape = {1, static_cast<int64_t>(tokens_), 8, 128};
    const client::Tensor keys{.dtype = DType::kBF16, .shape = shape, .data = keys_.data()};
    const client::Tensor values{.dtype = DType::kBF16, .shape = shape, .data = values_.data()};
    const double start = NowUs();
    OrDie(sequence->Insert(0, layers, keys, values));
    return Gbps(NowUs() - start);
  }

  double Memcpy() {
    const size_t half = bytes() / 2;
    const double start = NowUs();
    std::memcpy(target_.data(), keys_.data(), half);
    std::memcpy(target_.data() + half, values_.data(), half);
    asm volatile("" : : "r"(target_.data()) : "memory");
    return Gbps(NowUs() - start);
  }

 private:
  double Gbps(double us) const { return static_cast<double>(bytes()) / us / 1e3; }

  const uint64_t tokens_;
  const std::vector<uint16_t> keys_;
  const std::vector<uint16_t> values_;
  std::vector<std::byte> target_;
};

nlohmann::ordered_json Report(const Bench& bench, const Rates& rates, uint64_t seed) {
  const double shm = Median(rates.shm_gbps);
  const double copy = Median(rates.memcpy_gbps);
  nlohmann::ordered_json report;
  report["workload"] = "insert";
  report["shm_gbps"] = shm;
  report["grpc_gbps"] = Median(rates.grpc_gbps);
  report["memcpy_gbps"] = copy;
  report["shm_share_of_memcpy"] = shm / copy;
  report["shm_gbps_best"] = Quantile(rates.shm_gbps, 1);
  report["bytes"] = bench.bytes();
  report["rounds"] = rates.shm_gbps.size();
  report["seed"] = seed;
  report["cpu"] = CpuName();
  report["commit"] = CommitName();
  report["goals"] = {{"shm_gbps", shm >= kShareGoal * copy}};
  return report;
}

}  // namespace

int Main(int argc, char** argv) {
  uint64_t tokens = 16'384;
  uint32_t rounds = 9;
  uint64_t seed = 1;
  bool json = false;
  CLI::App app("Insert: shared memory and gRPC against memcpy");
  app.add_option("--tokens", tokens)->check(CLI::Range(128, 1 << 20));
  app.add_option("--rounds", rounds)->check(CLI::Range(1, 1000));
  app.add_option("--seed", seed);
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  Bench bench(tokens, seed);
  const std::unique_ptr<DataWorld> world = OrDie(DataWorld::Start(kPoolShare * bench.bytes()));
  Rates rates;
  for (uint32_t round = 0; round <= rounds; ++round) {
    if (round == 1) rates = Rates();  // The first one warms up.
    rates.memcpy_gbps.push_back(bench.Memcpy());
    rates.shm_gbps.push_back(bench.Insert(world->shared()));
    rates.grpc_gbps.push_back(bench.Insert(world->grpc()));
  }
  std::cout << Report(bench, rates, seed).dump(json ? -1 : 2) << std::endl;
  return 0;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
