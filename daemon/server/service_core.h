// What the calls of all tenants share.
#pragma once

#include <atomic>
#include <cstdint>

#include "daemon/engine/engine.h"
#include "daemon/server/call_stats.h"
#include "daemon/server/call_tracker.h"
#include "daemon/server/client_registry.h"
#include "daemon/server/identity.h"
#include "daemon/server/server_options.h"
#include "daemon/server/stream_gate.h"
#include "storage/base/clock.h"
#include "storage/base/thread_pool.h"

namespace wavekv {

class DataPlane;
class WindowServer;

// Where a call works.
enum class Lane : uint8_t {
  kInline,  // In gRPC's thread: only what neither waits nor computes.
  kStep,    // With the decode steps.
  kSlow,    // May compute for seconds, or wait for wavebufferd: never holds up a decode step.
  kBuild,   // Waits for background threads: never holds up anything else.
  kWait,    // Waits for a step of an attached sequence, a second at most.
};

// One call's caller, known and with a lease.
struct CallScope {
  Caller caller;
  ClientHold hold;

  ClientId client() const { return hold.client(); }
};

struct ServiceCore {
  // `engine` and `clock` must outlive the core.
  ServiceCore(const ServerOptions& server_options, Engine* served_engine, const Clock* real_clock);

  ThreadPool* lane(Lane lane);

  const ServerOptions options;
  Engine* const engine;
  const Clock* const clock;
  const int64_t start_ms;
  ClientRegistry registry;
  CallStats stats;
  StreamSet streams;
  CallTracker calls;
  std::atomic<bool> stopping = false;
  // Set before anything is served, null where there is none.
  DataPlane* data_plane = nullptr;
  WindowServer* windows = nullptr;
  // Last, so that what they still run finds the rest.
  ThreadPool step_lane;
  ThreadPool slow_lane;
  ThreadPool build_lane;
  ThreadPool wait_lane;
  // A thread for each recording, and one to refuse what is too many; none before the first.
  ThreadPool record_lane;
};

}  // namespace wavekv
