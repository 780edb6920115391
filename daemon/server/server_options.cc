#include "daemon/server/server_options.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/rpc/address.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr uint64_t kMessageBytesMin = 1ull << 20;
constexpr uint64_t kMessageBytesMax = 1ull << 30;  // gRPC counts a message's bytes in an int.
constexpr uint64_t kDataChannelsMax = 1024;
constexpr uint64_t kDataArenaBytesMin = 1ull << 20;
constexpr uint64_t kDataArenaBytesMax = 4ull << 30;
constexpr uint64_t kDataArenaBytesStep = 4096;
constexpr uint64_t kShutdownGraceMsMax = 600'000;

absl::Status CheckRange(const char* flag, uint64_t value, uint64_t low, uint64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " is ", value, ", expected ", low, " to ", high));
}

absl::Status CheckUnixAddress(const std::string& listen) {
  WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(listen));
  if (address.is_unix) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--listen=", listen,
                                                 " is no UNIX socket; expected unix:/path (TCP "
                                                 "has a flag of its own, --listen_tcp)"));
}

// What listens on TCP, --listen_tcp or --metrics_address: loopback, unless more was asked for.
absl::Status CheckTcpAddress(const char* flag, const std::string& text, bool allow_remote) {
  WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(text));
  if (address.is_unix) {
    return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", text, " is no host:port"));
  }
  if (!address.IsLoopback() && !allow_remote) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flag, "=", text,
                     " can be reached from other hosts, without encryption; if that is wanted, "
                     "say --allow_remote"));
  }
  return absl::OkStatus();
}

absl::Status CheckListenTcp(const ServerOptions& options) {
  WAVEKV_RETURN_IF_ERROR(CheckTcpAddress("listen_tcp", options.listen_tcp, options.allow_remote));
  if (options.token_file.empty()) {
    return absl::InvalidArgumentError(
        "--listen_tcp needs --token_file: over TCP a caller is known by its token only");
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateServerOptions(const ServerOptions& options) {
  if (options.listen.empty() && options.listen_tcp.empty()) {
    return absl::InvalidArgumentError("neither --listen nor --listen_tcp is given");
  }
  if (!options.listen.empty()) WAVEKV_RETURN_IF_ERROR(CheckUnixAddress(options.listen));
  if (!options.listen_tcp.empty()) WAVEKV_RETURN_IF_ERROR(CheckListenTcp(options));
  if (!options.metrics_address.empty()) {
    WAVEKV_RETURN_IF_ERROR(
        CheckTcpAddress("metrics_address", options.metrics_address, options.allow_remote));
  }
  if ((options.socket_mode & ~mode_t{0777}) != 0 || (options.socket_mode & 0600) != 0600) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "--socket_mode is %o, expected an octal mode from 600 to 777", options.socket_mode));
  }
  WAVEKV_RETURN_IF_ERROR(CheckRange("uids_max", options.uids_max, 1, 1024));
  WAVEKV_RETURN_IF_ERROR(
      CheckRange("lease_ms", options.lease.lease_ms, kLeaseMsMin, options.lease.lease_ms_max));
  WAVEKV_RETURN_IF_ERROR(CheckRange("clients_max", options.lease.clients_max, 1, 1u << 20));
  WAVEKV_RETURN_IF_ERROR(CheckRange("message_bytes_max", options.message_bytes_max,
                                    kMessageBytesMin, kMessageBytesMax));
  WAVEKV_RETURN_IF_ERROR(
      CheckRange("worker_threads", options.worker_threads, 1, kWorkerThreadsMax));
  WAVEKV_RETURN_IF_ERROR(
      CheckRange("data_channels_max", options.data_channels_max, 0, kDataChannelsMax));
  WAVEKV_RETURN_IF_ERROR(CheckRange("data_arena_bytes", options.data_arena_bytes,
                                    kDataArenaBytesMin, kDataArenaBytesMax));
  if (options.data_arena_bytes % kDataArenaBytesStep != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--data_arena_bytes is ", options.data_arena_bytes,
                     ", expected a multiple of ", kDataArenaBytesStep));
  }
  return CheckRange("shutdown_grace_ms", options.shutdown_grace_ms, 0, kShutdownGraceMsMax);
}

}  // namespace wavekv
