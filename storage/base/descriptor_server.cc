#include "storage/base/descriptor_server.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/clock.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr auto kNow = std::chrono::milliseconds(0);
constexpr int kPollMaxMs = 1'000;
constexpr int64_t kAcceptRetryMs = 100;  // After a failure that will not pass by itself at once.
constexpr int64_t kLogEveryMs = 1'000;   // Refusals: a flood of them must not flood the log.

}  // namespace

struct DescriptorServer::Connection {
  FdSocket socket;
  PeerCredentials peer;
  int64_t deadline_ms = 0;
  bool done = false;
  std::shared_ptr<KeptPeer> kept;  // Set once it was answered and stays.
  UniqueFd process;                // Of a kept one.
};

absl::StatusOr<std::unique_ptr<DescriptorServer>> DescriptorServer::Start(
    FdListener listener, const DescriptorServerOptions& options, Redeem redeem) {
  UniqueFd stop_event(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!stop_event.valid()) return absl::ErrnoToStatus(errno, "cannot create an eventfd");
  return std::unique_ptr<DescriptorServer>(
      new DescriptorServer(std::move(listener), std::move(stop_event), options, std::move(redeem)));
}

DescriptorServer::DescriptorServer(FdListener listener, UniqueFd stop_event,
                                   const DescriptorServerOptions& options, Redeem redeem)
    : listener_(std::move(listener)),
      stop_event_(std::move(stop_event)),
      options_(options),
      redeem_(std::move(redeem)),
      thread_([this] { Run(); }) {}

DescriptorServer::~DescriptorServer() {
  const uint64_t one = 1;
  WAVEKV_CHECK(::write(stop_event_.get(), &one, sizeof(one)) == sizeof(one), "stop event");
  thread_.join();
}

void DescriptorServer::Run() {
  std::vector<Connection> connections;
  std::vector<pollfd> polled;
  while (true) {
    const auto waiting = static_cast<size_t>(
        std::count_if(connections.begin(), connections.end(),
                      [](const Connection& connection) { return connection.kept == nullptr; }));
    const bool room =
        waiting < options_.connections_max && RealClock()->NowMs() >= accept_after_ms_;
    polled.assign({{stop_event_.get(), POLLIN, 0}, {room ? listener_.fd() : -1, POLLIN, 0}});
    for (const Connection& connection : connections) {
      polled.push_back({connection.socket.fd(), POLLIN, 0});
      // A forked child may keep the socket open: the process itself says when it is dead. Only what
      // is there is polled: poll refuses more entries than the process may have descriptors.
      if (connection.process.get() >= 0) polled.push_back({connection.process.get(), POLLIN, 0});
    }
    const int timeout_ms = waiting == 0 && room ? kPollMaxMs : 50;
    const int ready = ::poll(polled.data(), polled.size(), timeout_ms);
    WAVEKV_CHECK(ready >= 0 || errno == EINTR, "poll of our own descriptors");
    if (ready < 0) continue;
    if (polled[0].revents != 0) return;
    const int64_t now_ms = RealClock()->NowMs();
    size_t next = 2;
    for (Connection& connection : connections) {
      const bool readable = polled[next++].revents != 0;
      const bool ended = connection.process.get() >= 0 && polled[next++].revents != 0;
      Look(&connection, readable, ended, now_ms);
    }
    std::erase_if(connections, [](const Connection& connection) { return connection.done; });
    if (polled[1].revents != 0) AcceptOne(&connections);
  }
}

void DescriptorServer::Look(Connection* connection, bool readable, bool process_ended,
                            int64_t now_ms) {
  if (connection->kept != nullptr) {
    if (!readable && !process_ended) return;
    connection->kept->OnGone();
    connection->done = true;
  } else if (readable) {
    Answer(connection);
  } else {
    connection->done = now_ms >= connection->deadline_ms;
  }
}

void DescriptorServer::AcceptOne(std::vector<Connection>* connections) {
  absl::StatusOr<FdSocket> socket = listener_.Accept(kNow);
  if (!socket.ok()) {
    if (!absl::IsDeadlineExceeded(socket.status())) {  // That is a peer which left again.
      accept_after_ms_ = RealClock()->NowMs() + kAcceptRetryMs;
      Log(LogLevel::kWarning, "descriptor_accept_failed", {{"error", socket.status()}});
    }
    return;
  }
  const absl::StatusOr<PeerCredentials> peer = socket->Peer();
  if (!peer.ok()) return;
  const auto same_uid = [&peer](const Connection& other) {
    return other.kept == nullptr && other.peer.uid == peer->uid;
  };
  if (std::count_if(connections->begin(), connections->end(), same_uid) >=
      static_cast<int64_t>(options_.connections_per_uid_max)) {
    const absl::Status busy = absl::ResourceExhaustedError(
        absl::StrCat("uid ", peer->uid, " has ", options_.connections_per_uid_max,
                     " connections waiting; send the tickets of those first"));
    (void)socket->Send(EncodeDescriptorReply(busy), -1, kNow);
    return;
  }
  connections->push_back({.socket = *std::move(socket),
                          .peer = *peer,
                          .deadline_ms = RealClock()->NowMs() + options_.ticket_wait_ms});
}

void DescriptorServer::Answer(Connection* connection) {
  connection->done = true;
  absl::StatusOr<Redeemed> bought = RedeemFor(connection);
  if (!bought.ok()) LogRefusal(connection->peer, bought.status());
  // A peer that does not read its answer has lost it: the socket's buffer has room for one.
  const absl::Status sent = connection->socket.Send(EncodeDescriptorReply(bought.status()),
                                                    bought.ok() ? bought->fd.get() : -1, kNow);
  if (!bought.ok() || bought->peer == nullptr) return;
  if (!sent.ok() || !bought->peer->OnKept(connection->socket.fd())) {
    return bought->peer->OnGone();
  }
  connection->kept = std::move(bought->peer);
  connection->process = std::move(bought->process);
  connection->done = false;
}

absl::StatusOr<Redeemed> DescriptorServer::RedeemFor(Connection* connection) {
  WAVEKV_ASSIGN_OR_RETURN(const FdMessage message,
                          connection->socket.Receive(options_.message_bytes + 1, kNow));
  if (message.bytes.size() != options_.message_bytes || message.fd.valid()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a ticket of ", options_.message_bytes, " bytes and no descriptor, found ",
        message.bytes.size(), " bytes", message.fd.valid() ? " and one" : ""));
  }
  return redeem_(message.bytes, connection->peer,
                 PeerProcess(connection->socket.fd(), connection->peer));
}

void DescriptorServer::LogRefusal(const PeerCredentials& peer, const absl::Status& why) {
  ++refusals_not_logged_;
  const int64_t now_ms = RealClock()->NowMs();
  if (now_ms < log_after_ms_) return;
  log_after_ms_ = now_ms + kLogEveryMs;
  Log(LogLevel::kWarning, "ticket_refused",
      {{"uid", peer.uid}, {"pid", peer.pid}, {"error", why}, {"count", refusals_not_logged_}});
  refusals_not_logged_ = 0;
}

}  // namespace wavekv
