// Hands out descriptors for tickets on a UNIX socket, to peers that may be hostile.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/fd_socket.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

struct DescriptorServerOptions {
  uint32_t connections_max = 64;
  uint32_t connections_per_uid_max = 16;  // So that one uid cannot keep the others out.
  int64_t ticket_wait_ms = 2'000;         // A peer that has not sent its ticket by then is dropped.
};

// One thread, which never waits for a peer: it polls all of them. One ticket and one answer per
// connection.
class DescriptorServer {
 public:
  // Called on the server's thread.
  using Redeem = std::function<absl::StatusOr<UniqueFd>(
      absl::string_view ticket, const PeerCredentials& peer, UniqueFd peer_process)>;

  static absl::StatusOr<std::unique_ptr<DescriptorServer>> Start(
      FdListener listener, const DescriptorServerOptions& options, Redeem redeem);
  ~DescriptorServer();  // Drops every connection and joins.
  DescriptorServer(const DescriptorServer&) = delete;
  DescriptorServer& operator=(const DescriptorServer&) = delete;

 private:
  struct Connection;
  DescriptorServer(FdListener listener, UniqueFd stop_event, const DescriptorServerOptions& options,
                   Redeem redeem);
  void Run();
  void AcceptOne(std::vector<Connection>* connections);
  void Answer(Connection* connection);
  absl::StatusOr<UniqueFd> RedeemFor(Connection* connection);
  void LogRefusal(const PeerCredentials& peer, const absl::Status& why);

  FdListener listener_;
  const UniqueFd stop_event_;
  const DescriptorServerOptions options_;
  const Redeem redeem_;
  // Of the server's thread.
  int64_t accept_after_ms_ = 0;
  int64_t log_after_ms_ = 0;
  uint64_t refusals_not_logged_ = 0;

  std::thread thread_;
};

}  // namespace wavekv
