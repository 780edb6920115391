// Hands the block pool's arenas to clients that attend on the device, as descriptors for tickets.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "daemon/engine/resident_terms.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/mutex.h"

namespace wavekv {

// Thread-safe. The protocol is wavebufferd's: a ticket of 16 bytes goes in, a descriptor comes out.
class WindowServer {
 public:
  // AlreadyExists: somebody listens at `path`.
  static absl::StatusOr<std::unique_ptr<WindowServer>> Start(const std::string& path, mode_t mode);
  WindowServer(const WindowServer&) = delete;
  WindowServer& operator=(const WindowServer&) = delete;

  // A ticket for each window of the grant, in order: good once, for a process of `uid`, while the
  // attachment lasts. Whoever redeems one is bound to the attachment.
  std::vector<std::string> Issue(int64_t uid, const ResidentGrant& grant);

  const std::string& path() const { return path_; }

 private:
  struct Offer {
    int64_t uid = -1;
    std::weak_ptr<const Arena> arena;
    std::weak_ptr<ResidentProcess> process;
  };

  explicit WindowServer(std::string path) : path_(std::move(path)) {}
  absl::StatusOr<Redeemed> Redeem(absl::string_view ticket, const PeerCredentials& peer,
                                  UniqueFd process);

  const std::string path_;
  Mutex mutex_;
  std::map<std::string, Offer> offers_ ABSL_GUARDED_BY(mutex_);  // By ticket.
  std::unique_ptr<DescriptorServer> server_;                     // Last: its thread uses the rest.
};

}  // namespace wavekv
