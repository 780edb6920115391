// The shared-memory data plane: the socket where clients get their channels, and the channels.
// docs/decisions/007-data-plane.md.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/dataplane/data_client.h"
#include "daemon/dataplane/data_lease.h"
#include "daemon/engine/engine.h"
#include "proto/shm/channel_layout.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/mutex.h"

namespace wavekv {

struct DataPlaneOptions {
  std::string path;  // Of the socket.
  mode_t socket_mode = 0600;
  uint32_t channels_max = 64;  // Each is a thread.
  uint64_t arena_bytes = 16ull << 20;
  uint32_t ring_entries = 64;
  uint32_t batch_max = 256;  // Items of one Attend.
};

// Thread-safe.
class DataPlane {
 public:
  // Both must outlive the data plane. InvalidArgument: an option or the path cannot be;
  // AlreadyExists: somebody listens there.
  static absl::StatusOr<std::unique_ptr<DataPlane>> Start(const DataPlaneOptions& options,
                                                          Engine* engine, DataClients* clients);
  ~DataPlane();  // Stop.
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // Takes no client any more, lets each channel finish the call it is at, and closes them all.
  void Stop();
  // The client's lease is over: closes its channel, if it has one. Does not wait.
  void Drop(ClientId client);

  // Channels that hold memory.
  uint32_t channel_count() const;
  const std::string& path() const { return options_.path; }

 private:
  DataPlane(const DataPlaneOptions& options, const shm::ChannelGeometry& geometry, Engine* engine,
            DataClients* clients);

  // A hello: a channel for it, or why not. On the descriptor server's thread.
  absl::StatusOr<Redeemed> Admit(absl::string_view hello, const PeerCredentials& peer,
                                 UniqueFd process);
  // Takes the husks of channels that have ended out of the list.
  std::vector<std::shared_ptr<DataClient>> TakeFinishedLocked()
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const DataPlaneOptions options_;
  const shm::ChannelGeometry geometry_;
  Engine* const engine_;
  DataClients* const clients_;
  mutable Mutex mutex_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::shared_ptr<DataClient>> channels_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<DescriptorServer> server_;  // Last: its thread uses the rest.
};

}  // namespace wavekv
