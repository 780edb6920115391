// The thread that ends leases, and with them what their owners left behind.
#pragma once

#include <thread>

#include "daemon/engine/engine.h"
#include "daemon/server/client_registry.h"
#include "storage/base/mutex.h"

namespace wavekv {

class LeaseReaper {
 public:
  // Both must outlive the reaper.
  LeaseReaper(ClientRegistry* registry, Engine* engine);
  ~LeaseReaper();

 private:
  void Run();

  ClientRegistry* const registry_;
  Engine* const engine_;
  Mutex mutex_;
  CondVar wakeup_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace wavekv
