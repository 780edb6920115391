// One Attend over shared memory and over gRPC on a UNIX socket, in one run.
//
//   bench_rpc [--json] [--calls=20000] [--seed=1]
//
// A sequence of one token, so that what is measured is the way there and back with a full-size
// payload: 32 query vectors of 128 bf16 there, 32 outputs of 128 f32 back. The daemon is a process
// of its own. Both ways are measured in turn, in blocks; times are of Sequence::Attend.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "bench/data_world.h"
#include "bench/machine.h"
#include "bench/or_die.h"

namespace wavekv::bench {
namespace {

constexpr double kLatencyGoalUs = 10;
constexpr double kRatioGoal = 7;
constexpr uint32_t kBlock = 250;  // Calls of one way before the other has its turn.
constexpr uint64_t kPoolBytes = 64ull << 20;

// A sequence of one token.
std::unique_ptr<client::Sequence> MakeSequence(client::Session& session, uint64_t seed) {
  const ModelShape shape = DataShape();
  auto sequence = OrDie(session.CreateSequence({.shape = shape, .max_tokens = 16}));
  const std::vector<uint16_t> keys = RandomBF16(8 * 128, seed);
  const std::vector<uint16_t> values = RandomBF16(8 * 128, seed + 1);
  const uint32_t layers[] = {0};
  OrDie(sequence->Insert(0, layers,
                         {.dtype = DType::kBF16, .shape = {1, 1, 8, 128}, .data = keys.data()},
                         {.dtype = DType::kBF16, .shape = {1, 1, 8, 128}, .data = values.data()}));
  return sequence;
}

struct Times {
  std::vector<double> shm_us;
  std::vector<double> grpc_us;
  bool same_answers = true;
};

class Bench {
 public:
  Bench(DataWorld* world, uint64_t seed)
      : shared_(MakeSequence(world->shared(), seed)), grpc_(MakeSequence(world->grpc(), seed)) {
    for (uint64_t i = 0; i < kQueries; ++i) queries_.push_back(RandomBF16(32 * 128, seed + 2 + i));
  }

  Times Measure(uint32_t calls) {
    Times times;
    Run(*shared_, 2 * kBlock, nullptr);
    Run(*grpc_, kBlock, nullptr);
    for (uint32_t done = 0; done < calls; done += kBlock) {
      Run(*shared_, kBlock, &times.shm_us);
      Run(*grpc_, kBlock / 5, &times.grpc_us);
      times.same_answers &= OrDie(shared_->Attend(0, Queries(done))).out ==
                            OrDie(grpc_->Attend(0, Queries(done))).out;
    }
    return times;
  }

 private:
  static constexpr uint64_t kQueries = 16;

  client::Tensor Queries(uint64_t n) const {
    return {.dtype = DType::kBF16, .shape = {32, 128}, .data = queries_[n % kQueries].data()};
  }
  void Run(client::Sequence& sequence, uint32_t calls, std::vector<double>* us) {
    for (uint32_t i = 0; i < calls; ++i) {
      const client::Tensor queries = Queries(i);
      const double start = NowUs();
      const client::Attention attention = OrDie(sequence.Attend(0, queries));
      const double took = NowUs() - start;
      if (us != nullptr) us->push_back(took);
    }
  }

  const std::unique_ptr<client::Sequence> shared_;
  const std::unique_ptr<client::Sequence> grpc_;
  std::vector<std::vector<uint16_t>> queries_;
};

nlohmann::ordered_json Report(const Times& times, uint64_t seed) {
  const double shm_us = Median(times.shm_us);
  const double grpc_us = Median(times.grpc_us);
  nlohmann::ordered_json report;
  report["workload"] = "rpc";
  report["shm_us_p50"] = shm_us;
  report["shm_us_p99"] = Quantile(times.shm_us, 0.99);
  report["grpc_uds_us_p50"] = grpc_us;
  report["grpc_uds_us_p99"] = Quantile(times.grpc_us, 0.99);
  report["ratio"] = grpc_us / shm_us;
  report["shm_us_p10"] = Quantile(times.shm_us, 0.1);
  report["same_answers"] = times.same_answers;
  report["request_bytes"] = 32 * 128 * 2;
  report["reply_bytes"] = 32 * 129 * 4;
  report["calls"] = times.shm_us.size();
  report["seed"] = seed;
  report["cpu"] = CpuName();
  report["commit"] = CommitName();
  report["goals"] = {{"shm_us_p50", shm_us <= kLatencyGoalUs},
                     {"ratio", grpc_us >= kRatioGoal * shm_us}};
  return report;
}

}  // namespace

int Main(int argc, char** argv) {
  uint32_t calls = 20'000;
  uint64_t seed = 1;
  bool json = false;
  CLI::App app("One Attend: shared memory against gRPC over a UNIX socket");
  app.add_option("--calls", calls, "Over shared memory; a fifth as many over gRPC")
      ->check(CLI::Range(1, 10'000'000));
  app.add_option("--seed", seed);
  app.add_flag("--json", json, "The last line is one JSON object");
  CLI11_PARSE(app, argc, argv);
  const std::unique_ptr<DataWorld> world = OrDie(DataWorld::Start(kPoolBytes));
  Bench bench(world.get(), seed);
  const Times times = bench.Measure(calls);
  std::cout << Report(times, seed).dump(json ? -1 : 2) << std::endl;
  return times.same_answers ? 0 : 1;
}

}  // namespace wavekv::bench

int main(int argc, char** argv) { return wavekv::bench::Main(argc, argv); }
