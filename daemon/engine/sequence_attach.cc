// When a sequence may be attached to a resident region, and that it is.
#include "absl/strings/str_cat.h"
#include "daemon/engine/sequence.h"
#include "storage/base/status_macros.h"

namespace wavekv {

absl::Status Sequence::CheckAttachable(ClientId client, uint64_t exact_max) const {
  const auto refuse = [this](const auto&... parts) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id().value(), " cannot be attached: ", parts...));
  };
  if (owner_ != client) return refuse("it belongs to another client's lease; attach a fork of it");
  if (!recordings_.empty()) {
    return refuse("it is being recorded, and steps on the device are not; end the recording first");
  }
  if (!decoding_) return refuse("its index was never built; call BuildIndex first");
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    const Layer& state = layers_[layer];
    const uint64_t count = state.content.token_count;
    if (count != layers_[0].content.token_count) {
      return refuse("layer ", layer, " holds ", count, " tokens and layer 0 ",
                    layers_[0].content.token_count, "; truncate or insert first");
    }
    if (count < kSinkTokens) {
      return refuse("it holds ", count, " tokens, expected at least ", kSinkTokens);
    }
    const uint64_t exact = count - state.version->clustered_end();
    if (exact > exact_max) {
      return refuse(exact, " tokens of layer ", layer, " are not clustered, its ring holds ",
                    exact_max, "; call BuildIndex first, or ask for more ring_rows");
    }
  }
  return absl::OkStatus();
}

absl::Status Sequence::BeginAttachment(Generation wanted, ClientId client, uint64_t exact_max) {
  MutexLock write(&write_mutex_);  // No rows are half in.
  MutexLock lock(&mutex_);
  WAVEKV_RETURN_IF_ERROR(CheckAlive(wanted));
  if (attached_) {
    return absl::AbortedError(absl::StrCat("sequence ", id().value(),
                                           " is attached already; detach it first, or attach a "
                                           "fork of it"));
  }
  WAVEKV_RETURN_IF_ERROR(CheckAttachable(client, exact_max));
  attached_ = true;
  return absl::OkStatus();
}

void Sequence::EndAttachment() {
  MutexLock lock(&mutex_);
  attached_ = false;
}

}  // namespace wavekv
