#include "daemon/server/service_core.h"

namespace wavekv {
namespace {

// Builds wait for background threads and inspections compute for seconds: a few of them at a time.
constexpr int kPatientThreads = 8;
constexpr size_t kQueueMax = 4096;

}  // namespace

ServiceCore::ServiceCore(const ServerOptions& server_options, Engine* served_engine,
                         const Clock* real_clock)
    : options(server_options),
      engine(served_engine),
      clock(real_clock),
      start_ms(real_clock->NowMs()),
      registry(server_options.lease, real_clock),
      step({.thread_count = static_cast<int>(server_options.worker_threads),
            .name = "wavekv-call",
            .queue_max = kQueueMax}),
      patient({.thread_count = kPatientThreads, .name = "wavekv-patient", .queue_max = kQueueMax}) {
}

}  // namespace wavekv
