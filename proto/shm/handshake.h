// What a client says on the data socket: who it is. The answer is a descriptor reply
// (storage/base/descriptor_protocol.h) with the channel's descriptor.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace wavekv::shm {

inline constexpr size_t kHelloBytes = 40;

struct Hello {
  uint32_t version = 0;  // kChannelVersion of the client.
  uint64_t epoch = 0;    // Of the daemon that it attached to.
  std::string secret;    // 16 bytes, Attach's.
};

std::string EncodeHello(const Hello& hello);
// InvalidArgument: other bytes than a hello. The version is for the caller to judge.
absl::StatusOr<Hello> DecodeHello(absl::string_view bytes);

}  // namespace wavekv::shm
