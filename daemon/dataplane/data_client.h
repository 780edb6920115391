// One attached client's channel and the thread that serves it.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "daemon/dataplane/data_lease.h"
#include "daemon/engine/engine.h"
#include "proto/shm/server_channel.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/mutex.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// Serves from OnKept until the client is gone, Stop, or garbage in the ring. When the thread ends,
// memory, descriptors and lease have gone already; the husk waits to be joined.
class DataClient final : public KeptPeer {
 public:
  // `engine` must outlive the object.
  DataClient(Engine* engine, std::unique_ptr<DataLease> lease,
             std::unique_ptr<shm::ServerChannel> channel, uint32_t batch_max);
  ~DataClient() override;  // Stops and joins.

  bool OnKept(int socket_fd) override;
  void OnGone() override;

  // Ends the channel once the call under way is answered; the client finds its socket closed. Does
  // not wait. Thread-safe.
  void Stop();
  // Whether nothing is held any more.
  bool finished() const { return finished_.load(std::memory_order_acquire); }
  ClientId client() const { return client_; }

 private:
  void Run();
  // Everything that costs: in the order in which it may go.
  void LetGo();

  Engine* const engine_;
  const ClientId client_;
  const uint32_t batch_max_;
  Mutex mutex_;
  std::unique_ptr<shm::ServerChannel> channel_ ABSL_GUARDED_BY(mutex_);
  UniqueFd socket_ ABSL_GUARDED_BY(mutex_);  // A duplicate, to hang up with.
  std::unique_ptr<DataLease> lease_;         // The thread's.
  std::atomic<bool> finished_{false};
  std::thread thread_;
};

}  // namespace wavekv
