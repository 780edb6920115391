// Work that somebody may have enough of.
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <stop_token>

#include "absl/status/status.h"

namespace wavekv::client {

// Runs `work` in a thread of its own and returns what it does. It is asked to stop by SIGINT,
// SIGTERM, the key q, or after `limit`. `tick` is called in this thread about ten times a second
// meanwhile. No other thread may have been started before that should not see the signals.
absl::Status RunStoppable(std::optional<std::chrono::milliseconds> limit,
                          const std::function<void()>& tick,
                          const std::function<absl::Status(std::stop_token)>& work);

}  // namespace wavekv::client
