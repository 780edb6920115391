#include "client/cli/stoppable.h"

#include <algorithm>
#include <atomic>
#include <thread>

#include "client/cli/terminal.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr milliseconds kTick(100);

}  // namespace

absl::Status RunStoppable(std::optional<milliseconds> limit, const std::function<void()>& tick,
                          const std::function<absl::Status(std::stop_token)>& work) {
  LiveTerminal terminal;  // Before the work's threads: they inherit its signal mask.
  absl::Status status;
  std::atomic<bool> done{false};
  std::jthread worker([&](std::stop_token stop) {
    status = work(stop);
    done.store(true, std::memory_order_release);
  });
  const steady_clock::time_point begin = steady_clock::now();
  while (!done.load(std::memory_order_acquire)) {
    if (!terminal.Wait(kTick)) worker.request_stop();
    if (limit.has_value() && steady_clock::now() - begin >= *limit) worker.request_stop();
    if (worker.get_stop_token().stop_requested()) break;
    tick();
  }
  worker.join();
  return status;
}

}  // namespace wavekv::client
