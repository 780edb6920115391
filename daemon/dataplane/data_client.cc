#include "daemon/dataplane/data_client.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/socket.h>

#include <cerrno>
#include <optional>
#include <utility>

#include "daemon/dataplane/data_call.h"
#include "storage/base/log.h"

namespace wavekv {

DataClient::DataClient(Engine* engine, std::unique_ptr<DataLease> lease,
                       std::unique_ptr<shm::ServerChannel> channel, uint32_t batch_max)
    : engine_(engine),
      client_(lease->client()),
      batch_max_(batch_max),
      channel_(std::move(channel)),
      lease_(std::move(lease)) {}

DataClient::~DataClient() {
  Stop();
  if (thread_.joinable()) thread_.join();
}

bool DataClient::OnKept(int socket_fd) {
  UniqueFd socket(::fcntl(socket_fd, F_DUPFD_CLOEXEC, 0));
  if (!socket.valid()) {
    Log(LogLevel::kError, "out_of_descriptors", {{"client", client_.value()}, {"errno", errno}});
    return false;
  }
  {
    MutexLock lock(&mutex_);
    socket_ = std::move(socket);
  }
  thread_ = std::thread([this] { Run(); });
  return true;
}

void DataClient::OnGone() {
  if (thread_.joinable()) return Stop();
  LetGo();
}

void DataClient::Stop() {
  MutexLock lock(&mutex_);
  if (channel_ != nullptr) channel_->Stop();
  if (socket_.valid()) ::shutdown(socket_.get(), SHUT_RDWR);
}

void DataClient::Run() {
  ::pthread_setname_np(::pthread_self(), "wavekv-data");
  shm::ServerChannel* channel = nullptr;
  {
    MutexLock lock(&mutex_);
    channel = channel_.get();  // Ours to take away.
  }
  DataCaller caller(engine_, lease_.get(), batch_max_);
  for (;;) {
    const absl::StatusOr<std::optional<shm::Submission>> next = channel->Next();
    if (!next.ok()) {
      Log(LogLevel::kWarning, "data_channel_broken",
          {{"client", client_.value()}, {"tenant", lease_->tenant()}, {"error", next.status()}});
      break;
    }
    if (!next->has_value()) break;
    channel->Complete(**next, caller.Run(**next));
  }
  LetGo();
}

void DataClient::LetGo() {
  std::unique_ptr<shm::ServerChannel> channel;
  {
    MutexLock lock(&mutex_);
    channel = std::move(channel_);
    if (socket_.valid()) ::shutdown(socket_.get(), SHUT_RDWR);
    socket_.reset();
  }
  channel.reset();
  lease_.reset();
  finished_.store(true, std::memory_order_release);
}

}  // namespace wavekv
