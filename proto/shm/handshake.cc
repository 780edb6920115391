#include "proto/shm/handshake.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "proto/shm/channel_layout.h"
#include "storage/base/random.h"

namespace wavekv::shm {
namespace {

struct WireHello {
  uint64_t magic = kChannelMagic;
  uint32_t version = 0;
  uint32_t zero = 0;
  uint64_t epoch = 0;
  char secret[kSecretBytes] = {};
};
static_assert(sizeof(WireHello) == kHelloBytes);

}  // namespace

std::string EncodeHello(const Hello& hello) {
  WireHello wire;
  wire.version = hello.version;
  wire.epoch = hello.epoch;
  std::memcpy(wire.secret, hello.secret.data(), std::min(hello.secret.size(), kSecretBytes));
  return std::string(reinterpret_cast<const char*>(&wire), sizeof wire);
}

absl::StatusOr<Hello> DecodeHello(absl::string_view bytes) {
  WireHello wire;
  if (bytes.size() != sizeof wire) {
    return absl::InvalidArgumentError(
        absl::StrCat("hello has ", bytes.size(), " bytes, expected ", sizeof wire));
  }
  std::memcpy(&wire, bytes.data(), sizeof wire);
  if (wire.magic != kChannelMagic || wire.zero != 0) {
    return absl::InvalidArgumentError("hello: these bytes are none");
  }
  return Hello{.version = wire.version,
               .epoch = wire.epoch,
               .secret = std::string(wire.secret, sizeof wire.secret)};
}

}  // namespace wavekv::shm
