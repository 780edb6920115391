// Where this process stands in the control-group tree, v1 or v2.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace wavekv {

struct CgroupChain {
  int version = 0;  // 1 or 2; 0: no hierarchy with that controller is mounted.
  // Directories of this process's group and all its visible ancestors, innermost first, `root`
  // included. Limits of all of them hold.
  std::vector<std::string> directories;
};

// The chain for `controller` ("memory", "cpu"). Reads <root>/proc/self/{cgroup,mountinfo}; `root`
// is "" outside tests. A v1 hierarchy that carries the controller wins over v2, as in the kernel.
CgroupChain FindCgroup(const std::string& root, absl::string_view controller);

// The whole of a small text file of the kernel's; nullopt when it cannot be read. At most 1 MiB.
std::optional<std::string> ReadSmallFile(const std::string& path);

// The number a file holds; nullopt for "max", another text or no file.
std::optional<uint64_t> ReadNumberFile(const std::string& path);

// The number behind `key` in lines of "key number"; nullopt when absent.
std::optional<uint64_t> FindKeyedNumber(absl::string_view text, absl::string_view key);

}  // namespace wavekv
