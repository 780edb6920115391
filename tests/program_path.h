// Where a test finds the programs that it starts.
#pragma once

#include <string>

namespace wavekv {

// The path of a program of ours: beside the running one, or where the build puts them.
std::string ProgramPath(const std::string& name);

}  // namespace wavekv
