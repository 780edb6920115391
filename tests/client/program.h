// Runs a program to its end, within bounds.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace wavekv {

struct ProgramResult {
  int exit_code = -1;  // -1: it did not end by itself in time, and was killed.
  std::string out;
  std::string err;
};

// `arguments` starts with the program's path. Standard input is empty; `environment` ("K=V") is
// added to ours. Its output is read to the end, so that it never waits for us.
ProgramResult RunProgram(const std::vector<std::string>& arguments,
                         const std::vector<std::string>& environment = {},
                         std::chrono::milliseconds timeout = std::chrono::seconds(60));

// Runs the program on a terminal of its own. Once it has printed `until`, types `keys`. `out` has
// all that it printed; `err` is empty.
ProgramResult RunOnTerminal(const std::vector<std::string>& arguments,
                            const std::vector<std::string>& environment, const std::string& until,
                            const std::string& keys,
                            std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace wavekv
