// Addresses as flags and options write them: "unix:/path" or "host:port".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace wavekv {

struct Address {
  bool is_unix = false;
  std::string path;  // Absolute; UNIX only.
  std::string host;  // Without the brackets of IPv6; TCP only.
  uint16_t port = 0;

  // As it was written; also a target that gRPC understands.
  std::string ToString() const;
  // A loopback address, or the name "localhost".
  bool IsLoopback() const;
};

// InvalidArgument quotes the text and says what was expected: a UNIX path must be absolute and fit
// sockaddr_un (107 bytes); an IPv6 host is written "[::1]:7070"; port 0 means "any" to a server.
absl::StatusOr<Address> ParseAddress(std::string_view text);

// The UNIX socket of a daemon where no flag says otherwise: unix:/run/wavekv/<daemon>.sock, or in
// $XDG_RUNTIME_DIR instead of /run where that is set to an absolute path.
std::string DefaultAddressOf(std::string_view daemon);

}  // namespace wavekv
