#include "daemon/server/call_guard.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "proto/rpc/metadata.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// The value of `key`, which must come once.
std::optional<std::string_view> FindMetadata(const grpc::CallbackServerContext& context,
                                             const char* key) {
  const auto [first, last] = context.client_metadata().equal_range(key);
  if (first == last || std::next(first) != last) return std::nullopt;
  return std::string_view(first->second.data(), first->second.size());
}

}  // namespace

CallGuard::CallGuard(ServiceCore* core, Identify identify)
    : core_(core), identify_(std::move(identify)) {}

absl::StatusOr<CallScope> CallGuard::Admit(grpc::CallbackServerContext* context) const {
  if (core_->stopping.load()) return absl::UnavailableError("the daemon is shutting down");
  CallScope scope;
  WAVEKV_ASSIGN_OR_RETURN(scope.caller, identify_(*context));
  return scope;
}

absl::StatusOr<CallScope> CallGuard::Authenticate(grpc::CallbackServerContext* context) const {
  WAVEKV_ASSIGN_OR_RETURN(CallScope scope, Admit(context));
  const std::optional<std::string_view> epoch_text = FindMetadata(*context, kEpochKey);
  const std::optional<std::string_view> secret = FindMetadata(*context, kSecretKey);
  uint64_t epoch = 0;
  if (!secret.has_value() || !epoch_text.has_value() ||
      !absl::SimpleAtoi(absl::string_view(epoch_text->data(), epoch_text->size()), &epoch)) {
    return absl::UnauthenticatedError(absl::StrCat("the call lacks the metadata ", kSecretKey,
                                                   " and ", kEpochKey,
                                                   " of Attach's reply; attach first"));
  }
  if (epoch != core_->options.epoch) {
    context->AddTrailingMetadata(kStaleEpochKey, absl::StrCat(core_->options.epoch));
    return StaleEpochError(epoch, core_->options.epoch);
  }
  WAVEKV_ASSIGN_OR_RETURN(scope.hold, core_->registry.Authenticate(scope.caller.tenant, *secret));
  return scope;
}

absl::Status StaleEpochError(uint64_t epoch, uint64_t daemon_epoch) {
  return absl::FailedPreconditionError(absl::StrCat(
      "stale epoch: the call is of daemon epoch ", epoch, ", this daemon has epoch ", daemon_epoch,
      "; the daemon has been restarted and its sequences are gone: attach again"));
}

CallGuard::Identify IdentifyByToken(const TokenTable* tokens) {
  return [tokens](const grpc::CallbackServerContext& context) {
    return tokens->CallerOf(FindMetadata(context, kAuthorizationKey).value_or(""));
  };
}

}  // namespace wavekv
