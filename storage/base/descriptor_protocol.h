// The descriptor socket: a ticket of 16 bytes goes in, one descriptor comes out. docs/formats.md.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "storage/base/fd_socket.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

inline constexpr size_t kTicketBytes = 16;
inline constexpr size_t kDescriptorReplyBytesMax = 512;  // Status byte and text.

// The reply: one byte, the numeric value of the status code, then the text; a descriptor is
// attached to a reply of one zero byte and to no other.
std::string EncodeDescriptorReply(const absl::Status& status);
// The status a reply carries. DataLoss: it is no such reply (empty, an unknown code, text after
// OK).
absl::Status DecodeDescriptorReply(absl::string_view reply);

// Connects to `socket_path`, sends `ticket` and returns the descriptor. Unavailable or
// DeadlineExceeded: the other side is not there or does not answer. Otherwise what it answered.
absl::StatusOr<UniqueFd> FetchDescriptor(const std::string& socket_path, absl::string_view ticket,
                                         std::chrono::milliseconds timeout);

// A descriptor whose server counts it as in use until `connection` is closed.
struct HeldDescriptor {
  UniqueFd fd;
  FdSocket connection;
};

// The same, keeping the connection.
absl::StatusOr<HeldDescriptor> FetchHeldDescriptor(const std::string& socket_path,
                                                   absl::string_view ticket,
                                                   std::chrono::milliseconds timeout);

}  // namespace wavekv
