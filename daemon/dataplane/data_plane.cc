#include "daemon/dataplane/data_plane.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/shm/handshake.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {

absl::StatusOr<std::unique_ptr<DataPlane>> DataPlane::Start(const DataPlaneOptions& options,
                                                            Engine* engine, DataClients* clients) {
  WAVEKV_ASSIGN_OR_RETURN(const shm::ChannelGeometry geometry,
                          shm::LayOutChannel(options.ring_entries, options.arena_bytes));
  WAVEKV_ASSIGN_OR_RETURN(FdListener listener,
                          FdListener::Listen(options.path, options.socket_mode));
  std::unique_ptr<DataPlane> plane(new DataPlane(options, geometry, engine, clients));
  WAVEKV_ASSIGN_OR_RETURN(
      plane->server_,
      DescriptorServer::Start(std::move(listener), {.message_bytes = shm::kHelloBytes},
                              [raw = plane.get()](absl::string_view hello,
                                                  const PeerCredentials& peer, UniqueFd process) {
                                return raw->Admit(hello, peer, std::move(process));
                              }));
  return plane;
}

DataPlane::DataPlane(const DataPlaneOptions& options, const shm::ChannelGeometry& geometry,
                     Engine* engine, DataClients* clients)
    : options_(options), geometry_(geometry), engine_(engine), clients_(clients) {}

DataPlane::~DataPlane() { Stop(); }

void DataPlane::Stop() {
  std::vector<std::shared_ptr<DataClient>> ending;
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
    ending.swap(channels_);
  }
  for (const auto& client : ending) client->Stop();
  server_.reset();
  ending.clear();  // Joins.
}

void DataPlane::Drop(ClientId client) {
  MutexLock lock(&mutex_);
  for (const auto& channel : channels_) {
    if (channel->client() == client) channel->Stop();
  }
}

uint32_t DataPlane::channel_count() const {
  MutexLock lock(&mutex_);
  return static_cast<uint32_t>(
      std::count_if(channels_.begin(), channels_.end(),
                    [](const auto& channel) { return !channel->finished(); }));
}

std::vector<std::shared_ptr<DataClient>> DataPlane::TakeFinishedLocked() {
  std::vector<std::shared_ptr<DataClient>> finished;
  std::erase_if(channels_, [&finished](std::shared_ptr<DataClient>& channel) {
    if (!channel->finished()) return false;
    finished.push_back(std::move(channel));
    return true;
  });
  return finished;
}

absl::StatusOr<Redeemed> DataPlane::Admit(absl::string_view bytes, const PeerCredentials& peer,
                                          UniqueFd process) {
  WAVEKV_ASSIGN_OR_RETURN(const shm::Hello hello, shm::DecodeHello(bytes));
  if (hello.version != shm::kChannelVersion) {
    return absl::FailedPreconditionError(absl::StrCat("the client's channel layout has version ",
                                                      hello.version, ", this daemon has ",
                                                      shm::kChannelVersion));
  }
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<DataLease> lease,
                          clients_->Admit(peer, hello.secret, hello.epoch));
  const ClientId client = lease->client();
  // A client that comes again has lost its channel, whether we know it yet or not.
  Drop(client);
  MutexLock lock(&mutex_);
  // Their threads have ended, all but for the return.
  TakeFinishedLocked().clear();
  if (stopped_) return absl::UnavailableError("the daemon is shutting down");
  if (channels_.size() >= options_.channels_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the daemon has ", channels_.size(),
                     " shared-memory channels open, the most that --data_channels_max allows"));
  }
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<shm::ServerChannel> channel,
                          shm::ServerChannel::Create(absl::StrCat("wavekv-data-", client.value()),
                                                     geometry_, shm::SpinSlots::OfProcess()));
  UniqueFd descriptor = channel->TakeFd();
  auto kept = std::make_shared<DataClient>(engine_, std::move(lease), std::move(channel),
                                           options_.batch_max);
  channels_.push_back(kept);
  Log(LogLevel::kInfo, "data_channel_opened",
      {{"client", client.value()}, {"pid", peer.pid}, {"channels", channels_.size()}});
  return Redeemed(std::move(descriptor), std::move(kept), std::move(process));
}

}  // namespace wavekv
