// The thread that ends leases, and with them what their owners left behind.
#pragma once

#include <functional>
#include <thread>

#include "daemon/engine/engine.h"
#include "daemon/server/client_registry.h"
#include "storage/base/mutex.h"

namespace wavekv {

class LeaseReaper {
 public:
  // Both must outlive the reaper. `on_ended` hears of each client whose lease is over, before what
  // it owned is released; must not block.
  LeaseReaper(ClientRegistry* registry, Engine* engine, std::function<void(ClientId)> on_ended);
  ~LeaseReaper();

 private:
  void Run();

  ClientRegistry* const registry_;
  Engine* const engine_;
  const std::function<void(ClientId)> on_ended_;
  Mutex mutex_;
  CondVar wakeup_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace wavekv
