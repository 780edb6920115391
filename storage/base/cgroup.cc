#include "storage/base/cgroup.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "storage/base/unique_fd.h"

namespace wavekv {
namespace {

constexpr size_t kSmallFileBytesMax = 1 << 20;

bool ListHas(absl::string_view comma_list, absl::string_view item) {
  const std::vector<absl::string_view> items = absl::StrSplit(comma_list, ',');
  return std::find(items.begin(), items.end(), item) != items.end();
}

// The process's path in one hierarchy, from /proc/self/cgroup ("id:controllers:path"). An empty
// `controller` asks for v2, whose line has no controllers.
std::optional<std::string> GroupPath(absl::string_view text, absl::string_view controller) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    if (controller.empty() ? parts[1].empty() : ListHas(parts[1], controller)) {
      return std::string(parts[2]);
    }
  }
  return std::nullopt;
}

struct CgroupMount {
  std::string point;  // Where it is mounted.
  std::string top;    // Which path of the hierarchy is visible there.
};

// The mount of one hierarchy, from /proc/self/mountinfo (proc(5)); empty `controller`: v2.
std::optional<CgroupMount> FindMount(absl::string_view text, absl::string_view controller) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> halves = absl::StrSplit(line, absl::MaxSplits(" - ", 1));
    if (halves.size() != 2) continue;
    const std::vector<absl::string_view> mount = absl::StrSplit(halves[0], ' ');
    const std::vector<absl::string_view> fs = absl::StrSplit(halves[1], ' ');
    if (mount.size() < 5 || fs.size() < 3) continue;
    const bool wanted =
        controller.empty() ? fs[0] == "cgroup2" : fs[0] == "cgroup" && ListHas(fs[2], controller);
    if (wanted) return CgroupMount{std::string(mount[4]), std::string(mount[3])};
  }
  return std::nullopt;
}

// Directories from `path` up to the mount point. A path that is not below the mount's top (a
// container without a cgroup namespace, or an outer group shown as "/../..") sees the top only.
std::vector<std::string> Chain(const std::string& root, const CgroupMount& mount,
                               absl::string_view path) {
  std::vector<std::string> directories;
  if (mount.top != "/" && !absl::ConsumePrefix(&path, mount.top)) path = "/";
  if (absl::StrContains(path, "..")) path = "/";
  while (path.size() > 1) {
    directories.push_back(absl::StrCat(root, mount.point, path));
    path = path.substr(0, path.rfind('/'));
  }
  directories.push_back(absl::StrCat(root, mount.point));
  return directories;
}

}  // namespace

CgroupChain FindCgroup(const std::string& root, absl::string_view controller) {
  const std::optional<std::string> groups = ReadSmallFile(root + "/proc/self/cgroup");
  const std::optional<std::string> mounts = ReadSmallFile(root + "/proc/self/mountinfo");
  if (!groups.has_value() || !mounts.has_value()) return {};
  for (const int version : {1, 2}) {
    const absl::string_view key = version == 1 ? controller : absl::string_view();
    const std::optional<std::string> path = GroupPath(*groups, key);
    const std::optional<CgroupMount> mount = FindMount(*mounts, key);
    if (path.has_value() && mount.has_value()) return {version, Chain(root, *mount, *path)};
  }
  return {};
}

std::optional<std::string> ReadSmallFile(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return std::nullopt;
  std::string text;
  char buffer[4096];
  while (text.size() < kSmallFileBytesMax) {
    const ssize_t count = ::read(fd.get(), buffer, sizeof(buffer));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return std::nullopt;
    if (count == 0) break;
    text.append(buffer, static_cast<size_t>(count));
  }
  return text;
}

std::optional<uint64_t> ReadNumberFile(const std::string& path) {
  const std::optional<std::string> text = ReadSmallFile(path);
  uint64_t value = 0;
  if (!text.has_value() || !absl::SimpleAtoi(*text, &value)) return std::nullopt;
  return value;
}

std::optional<uint64_t> FindKeyedNumber(absl::string_view text, absl::string_view key) {
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    uint64_t value = 0;
    if (words.size() >= 2 && words[0] == key && absl::SimpleAtoi(words[1], &value)) return value;
  }
  return std::nullopt;
}

}  // namespace wavekv
