#include "daemon/server/window_server.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/random.h"
#include "storage/base/status_macros.h"

namespace wavekv {

absl::StatusOr<std::unique_ptr<WindowServer>> WindowServer::Start(const std::string& path,
                                                                  mode_t mode) {
  WAVEKV_ASSIGN_OR_RETURN(FdListener listener, FdListener::Listen(path, mode));
  std::unique_ptr<WindowServer> server(new WindowServer(path));
  WAVEKV_ASSIGN_OR_RETURN(
      server->server_,
      DescriptorServer::Start(std::move(listener), {},
                              [raw = server.get()](absl::string_view ticket,
                                                   const PeerCredentials& peer, UniqueFd process) {
                                return raw->Redeem(ticket, peer, std::move(process));
                              }));
  return server;
}

std::vector<std::string> WindowServer::Issue(int64_t uid, const ResidentGrant& grant) {
  std::vector<std::string> tickets;
  MutexLock lock(&mutex_);
  // Of attachments that have ended, whose clients never came.
  std::erase_if(offers_, [](const auto& offer) {
    return offer.second.arena.expired() || offer.second.process.expired();
  });
  for (const auto& arena : grant.windows) {
    tickets.push_back(RandomSecret());
    offers_[tickets.back()] = {uid, arena, grant.process};
  }
  return tickets;
}

absl::StatusOr<Redeemed> WindowServer::Redeem(absl::string_view ticket, const PeerCredentials& peer,
                                              UniqueFd process) {
  Offer offer;
  {
    MutexLock lock(&mutex_);
    const auto found = offers_.find(std::string(ticket));
    // Another's ticket is as unknown as none, and stays good for its owner.
    if (found == offers_.end() || found->second.uid != static_cast<int64_t>(peer.uid)) {
      return absl::NotFoundError(absl::StrCat("no such ticket for uid ", peer.uid,
                                              "; a ticket is good once: attach "
                                              "the sequence again"));
    }
    offer = std::move(found->second);
    offers_.erase(found);
  }
  const std::shared_ptr<const Arena> arena = offer.arena.lock();
  const std::shared_ptr<ResidentProcess> resident = offer.process.lock();
  if (arena == nullptr || resident == nullptr) {
    return absl::FailedPreconditionError("the attachment has ended; attach again");
  }
  WAVEKV_RETURN_IF_ERROR(resident->Bind(peer.pid, std::move(process)));
  UniqueFd fd(fcntl(arena->fd(), F_DUPFD_CLOEXEC, 0));
  if (!fd.valid()) return absl::ErrnoToStatus(errno, "cannot duplicate an arena's descriptor");
  return Redeemed(std::move(fd));
}

}  // namespace wavekv
