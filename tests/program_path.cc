#include "tests/program_path.h"

#include <filesystem>
#include <system_error>

namespace wavekv {

std::string ProgramPath(const std::string& name) {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  const std::filesystem::path beside = self.parent_path() / name;
  if (!error && std::filesystem::is_regular_file(beside, error)) return beside.string();
  return std::string(WAVEKV_BIN_DIR) + "/" + name;
}

}  // namespace wavekv
