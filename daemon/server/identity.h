// Who a caller is: by the kernel's word on a UNIX socket, by a token over TCP.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "storage/base/ids.h"

namespace wavekv {

struct Caller {
  TenantId tenant;
  int64_t uid = -1;    // -1: over TCP.
  bool admin = false;  // Sees every tenant.
};

// The tenants of uids: "uid:1000", unless --tenant_map names it. Root and the daemon's own uid are
// administrators. Immutable.
class UidIdentities {
 public:
  // `map` is "uid=name,uid=name"; InvalidArgument quotes what cannot be read.
  static absl::StatusOr<UidIdentities> Create(std::string_view map, uid_t own_uid);

  Caller CallerOf(uid_t uid) const;

 private:
  explicit UidIdentities(uid_t own_uid) : own_uid_(own_uid) {}

  uid_t own_uid_;
  absl::flat_hash_map<uid_t, TenantId> names_;
};

// The tokens of --token_file: lines "token tenant [admin]"; empty lines and those that begin with
// '#' are skipped. Immutable.
class TokenTable {
 public:
  // InvalidArgument names the line. A token has at least 16 bytes.
  static absl::StatusOr<TokenTable> Parse(std::string_view text);
  // FailedPrecondition: other users can read the file; the text says how to cure it.
  static absl::StatusOr<TokenTable> Load(const std::string& path);

  // `authorization` is the value of the metadata key of that name, "Bearer <token>". Looks at
  // every token, so that the time tells nothing. Unauthenticated otherwise.
  absl::StatusOr<Caller> CallerOf(std::string_view authorization) const;

  size_t size() const { return entries_.size(); }

 private:
  struct Entry {
    std::string token;
    TenantId tenant;
    bool admin = false;
  };

  std::vector<Entry> entries_;
};

}  // namespace wavekv
