#include "storage/base/descriptor_protocol.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr int kCodeMax = static_cast<int>(absl::StatusCode::kUnauthenticated);

}  // namespace

std::string EncodeDescriptorReply(const absl::Status& status) {
  std::string reply(1, static_cast<char>(status.code()));
  if (!status.ok()) absl::StrAppend(&reply, status.message());
  if (reply.size() > kDescriptorReplyBytesMax) reply.resize(kDescriptorReplyBytesMax);
  return reply;
}

absl::Status DecodeDescriptorReply(absl::string_view reply) {
  if (reply.empty()) return absl::DataLossError("descriptor reply: empty");
  const int code = static_cast<unsigned char>(reply[0]);
  if (code > kCodeMax) {
    return absl::DataLossError(
        absl::StrCat("descriptor reply: status ", code, ", expected at most ", kCodeMax));
  }
  if (code == 0 && reply.size() != 1) {
    return absl::DataLossError(
        absl::StrCat("descriptor reply: OK with ", reply.size() - 1, " bytes of text"));
  }
  return absl::Status(static_cast<absl::StatusCode>(code), reply.substr(1));
}

absl::StatusOr<HeldDescriptor> FetchHeldDescriptor(const std::string& socket_path,
                                                   absl::string_view ticket,
                                                   std::chrono::milliseconds timeout) {
  WAVEKV_ASSIGN_OR_RETURN(FdSocket socket, FdSocket::Connect(socket_path, timeout));
  WAVEKV_RETURN_IF_ERROR(socket.Send(ticket, -1, timeout));
  WAVEKV_ASSIGN_OR_RETURN(FdMessage reply, socket.Receive(kDescriptorReplyBytesMax, timeout));
  WAVEKV_RETURN_IF_ERROR(DecodeDescriptorReply(reply.bytes));
  if (!reply.fd.valid()) return absl::DataLossError("descriptor reply: OK without a descriptor");
  return HeldDescriptor{std::move(reply.fd), std::move(socket)};
}

absl::StatusOr<UniqueFd> FetchDescriptor(const std::string& socket_path, absl::string_view ticket,
                                         std::chrono::milliseconds timeout) {
  WAVEKV_ASSIGN_OR_RETURN(HeldDescriptor held, FetchHeldDescriptor(socket_path, ticket, timeout));
  return std::move(held.fd);
}

}  // namespace wavekv
