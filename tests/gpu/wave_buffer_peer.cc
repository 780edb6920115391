// A process on its own that the tests start, to be killed, stopped or refused.
//   manage ADDRESS BYTES        holds a tenant's buffer of so many bytes until it is killed
//   fetch UID SOCKET TICKET     becomes UID, takes the ticket (hex) there and says what happened
//   hold UUID SOCKET TICKET BYTES  maps so many bytes of a buffer on that GPU until it is killed
//   read UID SOCKET TICKET BYTES  the same, then prints a checksum of the first BYTES of the buffer
#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "client/gpu/device_reader.h"
#include "gpu/buffer_stager.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/stage_rows.h"

namespace wavekv {
namespace {

int Say(const absl::Status& status) {
  std::printf("status=%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}

int Manage(const std::string& address, uint64_t bytes) {
  BufferStagerOptions options;
  options.tenant_buffer_bytes = bytes;
  options.heartbeat_ms = 50;
  auto stager = ConnectWaveBuffer(address, options);
  if (!stager.ok()) return Say(stager.status());
  const auto access = (*stager)->Access("uid:0", -1);
  if (!access.ok()) return Say(access.status());
  std::printf("holding\n");
  std::fflush(stdout);
  while (true) ::pause();
}

int Fetch(uint32_t uid, const std::string& socket, const std::string& ticket, uint64_t bytes) {
  if (::setuid(uid) != 0) return Say(absl::ErrnoToStatus(errno, "setuid"));
  const absl::StatusOr<UniqueFd> fd =
      FetchDescriptor(socket, absl::HexStringToBytes(ticket), kWait);
  if (!fd.ok()) return Say(fd.status());
  const absl::StatusOr<Mapping> writable = Mapping::Map(fd->get(), 4096, Mapping::kReadWrite);
  std::printf("writable=%s\n", absl::StatusCodeToString(writable.status().code()).c_str());
  if (bytes > 0) {
    const absl::StatusOr<Mapping> mapping = Mapping::Map(fd->get(), bytes, Mapping::kReadOnly);
    if (!mapping.ok()) return Say(mapping.status());
    std::printf("checksum=%llu\n",
                static_cast<unsigned long long>(Checksum(mapping->data(), bytes)));
  }
  return Say(absl::OkStatus());
}

int Hold(const std::string& uuid, const std::string& socket, const std::string& ticket,
         uint64_t bytes) {
  absl::StatusOr<HeldDescriptor> held =
      FetchHeldDescriptor(socket, absl::HexStringToBytes(ticket), kWait);
  if (!held.ok()) return Say(held.status());
  const auto reader = client::DeviceReader::Open(uuid, *std::move(held), bytes);
  if (!reader.ok()) return Say(reader.status());
  std::printf("holding\n");
  std::fflush(stdout);
  while (true) ::pause();
}

int Main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  uint64_t bytes = 0;
  uint32_t uid = 0;
  if (mode == "manage" && argc == 4 && absl::SimpleAtoi(argv[3], &bytes)) {
    return Manage(argv[2], bytes);
  }
  if (mode == "fetch" && argc == 5 && absl::SimpleAtoi(argv[2], &uid)) {
    return Fetch(uid, argv[3], argv[4], 0);
  }
  if (mode == "read" && argc == 6 && absl::SimpleAtoi(argv[2], &uid) &&
      absl::SimpleAtoi(argv[5], &bytes)) {
    return Fetch(uid, argv[3], argv[4], bytes);
  }
  if (mode == "hold" && argc == 6 && absl::SimpleAtoi(argv[5], &bytes)) {
    return Hold(argv[2], argv[3], argv[4], bytes);
  }
  std::fprintf(stderr, "usage: see the top of wave_buffer_peer.cc\n");
  return 2;
}

}  // namespace
}  // namespace wavekv

int main(int argc, char** argv) { return wavekv::Main(argc, argv); }
