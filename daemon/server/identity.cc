#include "daemon/server/identity.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/rpc/metadata.h"
#include "storage/base/random.h"
#include "storage/base/status_macros.h"
#include "storage/base/unique_fd.h"

namespace wavekv {
namespace {

constexpr size_t kTenantBytesMax = 64;
constexpr size_t kTokenBytesMin = 16;
constexpr size_t kTokenBytesMax = 512;
constexpr size_t kTokensMax = 4096;
constexpr size_t kTokenFileBytesMax = 4u << 20;

absl::Status CheckTenantName(absl::string_view name) {
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) ||
           absl::string_view("._:@-").find(c) != absl::string_view::npos;
  });
  if (plain && !name.empty() && name.size() <= kTenantBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("tenant name \"", name, "\": expected 1 to ",
                                                 kTenantBytesMax,
                                                 " letters, digits or characters of ._:@-"));
}

absl::StatusOr<std::string> ReadPrivateFile(const std::string& path) {
  const UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open --token_file=", path));
  }
  struct stat info {};
  if (fstat(fd.get(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot examine --token_file=", path));
  }
  if ((info.st_mode & S_IRWXO) != 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--token_file=", path, " can be reached by every user; run: chmod o-rwx ", path));
  }
  std::string text;
  char chunk[4096];
  for (;;) {
    const ssize_t count = read(fd.get(), chunk, sizeof chunk);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path));
    if (count == 0) return text;
    text.append(chunk, static_cast<size_t>(count));
    if (text.size() > kTokenFileBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat("--token_file=", path, " has more than ", kTokenFileBytesMax, " bytes"));
    }
  }
}

}  // namespace

absl::StatusOr<UidIdentities> UidIdentities::Create(std::string_view map, uid_t own_uid) {
  UidIdentities identities(own_uid);
  const absl::string_view text(map.data(), map.size());
  for (const absl::string_view entry : absl::StrSplit(text, ',', absl::SkipWhitespace())) {
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    uint32_t uid = 0;
    if (!absl::SimpleAtoi(parts.first, &uid)) {
      return absl::InvalidArgumentError(
          absl::StrCat("--tenant_map: \"", entry, "\" is not uid=name"));
    }
    WAVEKV_RETURN_IF_ERROR(CheckTenantName(parts.second));
    if (!identities.names_.emplace(uid, std::string(parts.second)).second) {
      return absl::InvalidArgumentError(absl::StrCat("--tenant_map names uid ", uid, " twice"));
    }
  }
  return identities;
}

Caller UidIdentities::CallerOf(uid_t uid) const {
  const auto found = names_.find(uid);
  return {.tenant = found == names_.end() ? absl::StrCat("uid:", uid) : found->second,
          .uid = static_cast<int64_t>(uid),
          .admin = uid == 0 || uid == own_uid_};
}

absl::StatusOr<TokenTable> TokenTable::Parse(std::string_view text) {
  TokenTable table;
  size_t line_number = 0;
  for (const absl::string_view line :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++line_number;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty() || words[0][0] == '#') continue;
    // The text never quotes the line: it holds a secret.
    const std::string where = absl::StrCat("token file, line ", line_number, ": ");
    if (words.size() < 2 || words.size() > 3 || (words.size() == 3 && words[2] != "admin")) {
      return absl::InvalidArgumentError(absl::StrCat(where, "expected \"token tenant [admin]\""));
    }
    if (words[0].size() < kTokenBytesMin || words[0].size() > kTokenBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat(where, "the token has ", words[0].size(),
                                                     " bytes, expected ", kTokenBytesMin, " to ",
                                                     kTokenBytesMax));
    }
    const absl::Status name = CheckTenantName(words[1]);
    if (!name.ok()) return absl::InvalidArgumentError(absl::StrCat(where, name.message()));
    for (const Entry& entry : table.entries_) {
      if (entry.token == words[0]) {
        return absl::InvalidArgumentError(absl::StrCat(where, "the token was given before"));
      }
    }
    if (table.entries_.size() == kTokensMax) {
      return absl::InvalidArgumentError(absl::StrCat(where, "more than ", kTokensMax, " tokens"));
    }
    table.entries_.push_back({.token = std::string(words[0]),
                              .tenant = std::string(words[1]),
                              .admin = words.size() == 3});
  }
  return table;
}

absl::StatusOr<TokenTable> TokenTable::Load(const std::string& path) {
  WAVEKV_ASSIGN_OR_RETURN(const std::string text, ReadPrivateFile(path));
  WAVEKV_ASSIGN_OR_RETURN(TokenTable table, Parse(text));
  if (table.entries_.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--token_file=", path, " has no token: nobody could call"));
  }
  return table;
}

absl::StatusOr<Caller> TokenTable::CallerOf(std::string_view authorization) const {
  const Entry* match = nullptr;
  if (authorization.starts_with(kBearerPrefix)) {
    authorization.remove_prefix(std::string_view(kBearerPrefix).size());
    const absl::string_view token(authorization.data(), authorization.size());
    for (const Entry& entry : entries_) {
      if (SecretsEqual(entry.token, token)) match = &entry;
    }
  }
  if (match == nullptr) {
    return absl::UnauthenticatedError(
        "over TCP a call needs the metadata \"authorization: Bearer <token>\" with a token of the "
        "daemon's --token_file");
  }
  return Caller{.tenant = match->tenant, .uid = -1, .admin = match->admin};
}

}  // namespace wavekv
