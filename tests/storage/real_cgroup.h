// A real control group below this process's own, with a limit of memory.
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "storage/base/cgroup.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

class RealCgroup {
 public:
  explicit RealCgroup(uint64_t limit_bytes) {
    const CgroupChain chain = FindCgroup("", "memory");
    if (chain.version == 0) {
      error_ = "no memory controller is mounted";
      return;
    }
    const std::string wanted = absl::StrCat(chain.directories.front(), "/wavekv-test-", ::getpid());
    if (::mkdir(wanted.c_str(), 0755) != 0) {
      error_ = absl::StrCat("cannot make ", wanted, ": ", std::strerror(errno));
      return;
    }
    directory_ = wanted;
    limit_file_ = wanted + (chain.version == 1 ? "/memory.limit_in_bytes" : "/memory.max");
    procs_file_ = wanted + "/cgroup.procs";
    if (!Write(limit_file_, absl::StrCat(limit_bytes))) {
      error_ = absl::StrCat("cannot set ", limit_file_);
    }
  }
  ~RealCgroup() {
    if (!directory_.empty()) ::rmdir(directory_.c_str());
  }
  RealCgroup(const RealCgroup&) = delete;
  RealCgroup& operator=(const RealCgroup&) = delete;

  // Why there is none; empty when there is one.
  const std::string& error() const { return error_; }
  const std::string& limit_file() const { return limit_file_; }
  // Moves the calling process into the group. System calls only: may run between fork and exec.
  bool Enter() const { return Write(procs_file_, "0"); }

 private:
  static bool Write(const std::string& path, const std::string& text) {
    const UniqueFd file(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    return file.valid() &&
           ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  }

  std::string directory_;
  std::string limit_file_;
  std::string procs_file_;
  std::string error_;
};

}  // namespace wavekv
