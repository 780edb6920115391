#include "proto/rpc/address.h"

#include <sys/un.h>

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

constexpr std::string_view kUnixScheme = "unix:";
constexpr size_t kUnixPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
constexpr size_t kHostBytesMax = 253;

absl::Status BadAddress(std::string_view text, std::string_view why) {
  return absl::InvalidArgumentError(absl::StrCat("address \"",
                                                 absl::string_view(text.data(), text.size()),
                                                 "\": ", absl::string_view(why.data(), why.size()),
                                                 "; expected unix:/absolute/path or host:port"));
}

absl::StatusOr<Address> ParseUnixAddress(std::string_view text) {
  std::string_view path = text.substr(kUnixScheme.size());
  if (path.starts_with("///")) path.remove_prefix(2);  // unix:///path, as URIs have it.
  if (!path.starts_with('/')) return BadAddress(text, "the path is not absolute");
  if (path.size() > kUnixPathBytesMax) {
    return BadAddress(text, absl::StrCat("the path has ", path.size(), " bytes, at most ",
                                         kUnixPathBytesMax, " fit a UNIX socket"));
  }
  if (path.find('\0') != std::string_view::npos) return BadAddress(text, "the path has a NUL byte");
  Address address;
  address.is_unix = true;
  address.path = std::string(path);
  return address;
}

bool IsHostCharacter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '-' || c == '_' || c == ':' || c == '%';
}

}  // namespace

std::string Address::ToString() const {
  if (is_unix) return absl::StrCat(absl::string_view(kUnixScheme.data(), kUnixScheme.size()), path);
  if (host.find(':') != std::string::npos) return absl::StrCat("[", host, "]:", port);
  return absl::StrCat(host, ":", port);
}

bool Address::IsLoopback() const {
  return !is_unix && (host == "localhost" || host == "::1" || host.starts_with("127."));
}

absl::StatusOr<Address> ParseAddress(std::string_view text) {
  if (text.starts_with(kUnixScheme)) return ParseUnixAddress(text);
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return BadAddress(text, "there is no port");
  std::string_view host = text.substr(0, colon);
  const std::string_view port_text = text.substr(colon + 1);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return BadAddress(text, "an IPv6 host needs brackets");
  }
  if (host.empty() || host.size() > kHostBytesMax) {
    return BadAddress(text, absl::StrCat("the host has ", host.size(), " bytes"));
  }
  for (const char c : host) {
    if (!IsHostCharacter(c)) return BadAddress(text, "the host has an odd character");
  }
  uint32_t port = 0;
  if (port_text.empty() || port_text.find_first_not_of("0123456789") != std::string_view::npos ||
      !absl::SimpleAtoi(absl::string_view(port_text.data(), port_text.size()), &port) ||
      port > 65535) {
    return BadAddress(text, "the port is no number from 0 to 65535");
  }
  Address address;
  address.host = std::string(host);
  address.port = static_cast<uint16_t>(port);
  return address;
}

std::string DefaultAddressOf(std::string_view daemon) {
  const char* const runtime = std::getenv("XDG_RUNTIME_DIR");
  return absl::StrCat("unix:", runtime != nullptr && runtime[0] == '/' ? runtime : "/run",
                      "/wavekv/", absl::string_view(daemon.data(), daemon.size()), ".sock");
}

}  // namespace wavekv
