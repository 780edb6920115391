// The daemon's face: listens, serves wavekv.v1 over the engine, keeps leases. No gRPC in here.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/engine/engine.h"
#include "daemon/server/server_options.h"

namespace wavekv {

class Server {
 public:
  // Validates `options`, binds every address and serves. `engine` must outlive the server. Errors
  // name the flag or the address: AlreadyExists and Unavailable when somebody else has it.
  static absl::StatusOr<std::unique_ptr<Server>> Start(const ServerOptions& options,
                                                       Engine* engine);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Health answers NOT_SERVING, no new call is taken, running ones have shutdown_grace_ms and are
  // cancelled then; the socket is removed. Returns when no call runs. Once.
  void Shutdown();

  // Where it listens, TCP with the real port; empty when not asked for.
  std::string unix_address() const;
  std::string tcp_address() const;
  std::string metrics_address() const;

 private:
  struct Impl;
  explicit Server(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv
