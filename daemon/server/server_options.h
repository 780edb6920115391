// What an operator can set about the server; validated once, immutable after start.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "daemon/server/client_registry.h"

namespace wavekv {

inline constexpr uint32_t kWorkerThreadsMax = 256;

struct ServerOptions {
  std::string listen;  // "unix:/path"; empty: no UNIX socket.
  mode_t socket_mode = 0600;
  std::string tenant_map;       // "uid=name,uid=name"
  uint32_t uids_max = 64;       // Different uids over the daemon's life.
  std::string listen_tcp;       // "host:port"; empty: no TCP. Port 0: any free one.
  bool allow_remote = false;    // Let the TCP addresses here be other than loopback.
  std::string token_file;       // Needed by listen_tcp.
  std::string metrics_address;  // "host:port" of /metrics; empty: none.

  LeaseOptions lease;
  uint64_t message_bytes_max = 64ull << 20;
  uint64_t tenant_bytes_max = 0;  // What Attach tells; the pool enforces it.
  uint32_t sequences_max = 0;     // Likewise, by the engine.
  uint64_t tokens_max = 0;
  uint32_t batch_max = 0;
  uint32_t data_channels_max = 64;          // 0: no shared-memory data plane.
  uint64_t data_arena_bytes = 16ull << 20;  // Of one channel.
  uint32_t recordings_max = 4;              // The engine enforces it.
  uint32_t worker_threads = 0;              // Calls that work at once; 1 to kWorkerThreadsMax.
  uint64_t shutdown_grace_ms = 5000;
  uint32_t epoch = 0;  // Of this life of the daemon; not 0.
};

// InvalidArgument naming the flag, what was found and what is allowed.
absl::Status ValidateServerOptions(const ServerOptions& options);

}  // namespace wavekv
