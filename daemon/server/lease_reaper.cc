#include "daemon/server/lease_reaper.h"

#include <chrono>
#include <utility>

#include "storage/base/log.h"

namespace wavekv {
namespace {

constexpr std::chrono::milliseconds kPeriod(250);

}  // namespace

LeaseReaper::LeaseReaper(ClientRegistry* registry, Engine* engine,
                         std::function<void(ClientId)> on_ended)
    : registry_(registry),
      engine_(engine),
      on_ended_(std::move(on_ended)),
      thread_([this] { Run(); }) {}

LeaseReaper::~LeaseReaper() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  wakeup_.NotifyAll();
  thread_.join();
}

void LeaseReaper::Run() {
  for (;;) {
    {
      MutexLock lock(&mutex_);
      if (!stopping_) wakeup_.WaitFor(&mutex_, kPeriod);
      if (stopping_) return;
    }
    for (const ClientId client : registry_->TakeEnded()) {
      on_ended_(client);
      const uint32_t dropped = engine_->ReleaseOwner(client);
      Log(LogLevel::kInfo, "client_ended",
          {{"client", client.value()}, {"sequences_dropped", dropped}});
    }
    engine_->Reap();
  }
}

}  // namespace wavekv
