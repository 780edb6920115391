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
#include "storage/base/descriptor_protocol.h"
#include "storage/base/fd_socket.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

struct DescriptorServerOptions {
  size_t message_bytes = kTicketBytes;    // What a peer must send, no more and no less.
  uint32_t connections_max = 64;          // That wait for their answer.
  uint32_t connections_per_uid_max = 16;  // So that one uid cannot keep the others out.
  int64_t ticket_wait_ms = 2'000;         // A peer that has not sent its ticket by then is dropped.
};

// A peer whose connection stays open after its answer, so that its end is known. Both calls come
// from the server's thread and must not block.
class KeptPeer {
 public:
  virtual ~KeptPeer() = default;
  // The answer has left. `socket_fd` is the server's until OnGone returns. False: the connection
  // cannot be kept after all, and is closed.
  virtual bool OnKept(int socket_fd) = 0;
  // It hung up, died, or said more than it may; or could not be kept; the last call. Not
  // made when the server goes.
  virtual void OnGone() = 0;
};

// What a ticket buys.
struct Redeemed {
  // NOLINTNEXTLINE(google-explicit-constructor): most tickets buy a descriptor and no more.
  Redeemed(UniqueFd bought) : fd(std::move(bought)) {}
  Redeemed(UniqueFd bought, std::shared_ptr<KeptPeer> kept, UniqueFd peer_process)
      : fd(std::move(bought)), peer(std::move(kept)), process(std::move(peer_process)) {}

  UniqueFd fd;
  std::shared_ptr<KeptPeer> peer;  // Null: the connection is closed once answered.
  UniqueFd process;                // A kept peer's, to be watched; may be invalid.
};

// One thread, which never waits for a peer: it polls all of them. One ticket and one answer per
// connection.
class DescriptorServer {
 public:
  // Called on the server's thread.
  using Redeem = std::function<absl::StatusOr<Redeemed>(
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
  // What poll(2) found for one connection.
  void Look(Connection* connection, bool readable, bool process_ended, int64_t now_ms);
  void Answer(Connection* connection);
  absl::StatusOr<Redeemed> RedeemFor(Connection* connection);
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
