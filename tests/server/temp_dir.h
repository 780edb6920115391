// A directory of a test's own, with a path short enough for a UNIX socket.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <string>

#include "storage/base/check.h"

namespace wavekv {

class TempDir {
 public:
  TempDir() {
    char path[] = "/tmp/wavekv-XXXXXX";
    WAVEKV_CHECK(mkdtemp(path) != nullptr, "no temporary directory");
    path_ = path;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace wavekv
