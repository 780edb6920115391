#include "daemon/server/service_core.h"

namespace wavekv {
namespace {

constexpr int kSlowThreads = 4;
constexpr int kBuildThreads = 8;  // They only wait: the engine's own threads build.
constexpr int kWaitThreads = 6;   // They only wait, a second at most: others have their turn.
constexpr size_t kQueueMax = 4096;

}  // namespace

ServiceCore::ServiceCore(const ServerOptions& server_options, Engine* served_engine,
                         const Clock* real_clock)
    : options(server_options),
      engine(served_engine),
      clock(real_clock),
      start_ms(real_clock->NowMs()),
      registry(server_options.lease, real_clock),
      step_lane({.thread_count = static_cast<int>(server_options.worker_threads),
                 .name = "wavekv-step",
                 .queue_max = kQueueMax}),
      slow_lane({.thread_count = kSlowThreads, .name = "wavekv-slow", .queue_max = kQueueMax}),
      build_lane({.thread_count = kBuildThreads, .name = "wavekv-build", .queue_max = kQueueMax}),
      // Without a wave buffer there is nothing to wait for.
      wait_lane({.thread_count = engine->has_stager() ? kWaitThreads : 0,
                 .name = "wavekv-wait",
                 .queue_max = kQueueMax}),
      record_lane({.thread_count = static_cast<int>(server_options.recordings_max) + 1,
                   .name = "wavekv-record",
                   .queue_max = kQueueMax,
                   .on_demand = true}) {}

ThreadPool* ServiceCore::lane(Lane lane) {
  switch (lane) {
    case Lane::kSlow:
      return &slow_lane;
    case Lane::kBuild:
      return &build_lane;
    case Lane::kWait:
      return wait_lane.thread_count() > 0 ? &wait_lane : &step_lane;
    default:
      return &step_lane;
  }
}

}  // namespace wavekv
