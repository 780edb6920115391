// A directory that stands in for / with the files of /proc and /sys a test wants.
#pragma once

#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace wavekv {

class FakeRoot {
 public:
  FakeRoot() {
    char name[] = "/tmp/wavekv-root-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~FakeRoot() { std::filesystem::remove_all(path_); }
  FakeRoot(const FakeRoot&) = delete;
  FakeRoot& operator=(const FakeRoot&) = delete;

  void Write(const std::string& file, const std::string& text) {
    const std::filesystem::path path = path_ + file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text;
  }

  // Mounts one v1 hierarchy, with this process in `group`.
  void UseCgroupV1(const std::string& controller, const std::string& group,
                   const std::string& mount_top = "/") {
    Write("/proc/self/cgroup", "11:pids:/elsewhere\n4:" + controller + ":" + group + "\n0::/\n");
    Write("/proc/self/mountinfo",
          "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
          "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
          "35 31 0:32 " +
              mount_top + " /sys/fs/cgroup/" + controller +
              " rw,relatime shared:9 - cgroup cgroup rw," + controller + "\n");
  }

  // Mounts the v2 hierarchy, with this process in `group`.
  void UseCgroupV2(const std::string& group, const std::string& mount_top = "/") {
    Write("/proc/self/cgroup", "0::" + group + "\n");
    Write("/proc/self/mountinfo",
          "30 23 0:26 " + mount_top + " /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n");
  }

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace wavekv
