// A directory of a test's own, with a path short enough for a UNIX socket.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>

#include "storage/base/check.h"

namespace wavekv {

// A new directory under $TMPDIR, or under /tmp where there is none or its name is long. Removed
// when destroyed, with all that is in it.
class TempDir {
 public:
  TempDir() {
    const char* const root = std::getenv("TMPDIR");
    path_ = std::string(root == nullptr ? "/tmp" : root) + kPattern;
    if (path_.size() > kPathBytesMax) path_ = std::string("/tmp") + kPattern;
    WAVEKV_CHECK(::mkdtemp(path_.data()) != nullptr, "a directory for the test");
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  static constexpr char kPattern[] = "/wavekv-XXXXXX";
  static constexpr size_t kPathBytesMax = 60;  // A socket's path has at most 107.

  std::string path_;
};

}  // namespace wavekv
