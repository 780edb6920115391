#include "storage/base/daemon_main.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/reflection.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

constexpr std::chrono::seconds kLogReaderPatience(1);
// A file may name others; one that names itself would never end.
constexpr int kFlagFileDepthMax = 8;

absl::Status SetAll(const std::vector<std::string>& arguments, int depth);

// Not in the registry: absl has one of that name where its parser is linked, and it is not ours.
constexpr absl::string_view kFlagFile = "flagfile";

// The flag of that name; null for absl's own, which would bring in what is checked nowhere.
absl::CommandLineFlag* FindFlag(absl::string_view name) {
  for (const absl::string_view foreign :
       std::array<absl::string_view, 4>{kFlagFile, "fromenv", "tryfromenv", "undefok"}) {
    if (name == foreign) return nullptr;
  }
  return absl::FindCommandLineFlag(name);
}

absl::Status SetFlagFile(const std::string& path, int depth) {
  if (depth == kFlagFileDepthMax) {
    return absl::InvalidArgumentError(absl::StrCat("--flagfile=", path, " is named by ", depth,
                                                   " files in a row, expected fewer"));
  }
  std::ifstream file(path);
  if (!file) {
    return absl::InvalidArgumentError(
        absl::StrCat("--flagfile=", path, " cannot be read; expected a file with a flag a line"));
  }
  std::vector<std::string> arguments;
  for (std::string line; std::getline(file, line);) {
    const absl::string_view text = absl::StripAsciiWhitespace(line);
    if (text.empty() || text[0] == '#') continue;
    if (text[0] != '-') {
      return absl::InvalidArgumentError(
          absl::StrCat("--flagfile=", path, ": \"", text, "\" is no flag; expected --name=value"));
    }
    arguments.emplace_back(text);
  }
  return SetAll(arguments, depth + 1);
}

absl::Status UnknownFlag(absl::string_view argument) {
  return absl::InvalidArgumentError(
      absl::StrCat("unknown flag ", argument, "; --help lists those that there are"));
}

absl::Status SetFlag(absl::string_view name, absl::string_view value, int depth) {
  if (name == kFlagFile) {
    for (const std::string& path : std::vector<std::string>(absl::StrSplit(value, ','))) {
      WAVEKV_RETURN_IF_ERROR(SetFlagFile(path, depth));
    }
    return absl::OkStatus();
  }
  std::string error;
  if (absl::FindCommandLineFlag(name)->ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", name, "=", value, ": ", error.empty() ? "is no value of it" : error));
}

absl::Status SetAll(const std::vector<std::string>& arguments, int depth) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view name = arguments[i];
    if (!absl::ConsumePrefix(&name, "-") || name.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("unexpected argument '", arguments[i], "'; every option is a --flag"));
    }
    absl::ConsumePrefix(&name, "-");
    const size_t equals = name.find('=');
    const bool has_value = equals != absl::string_view::npos;
    absl::string_view value = has_value ? name.substr(equals + 1) : "";
    name = name.substr(0, equals);
    const absl::CommandLineFlag* flag = FindFlag(name);
    if (!has_value && flag == nullptr && absl::ConsumePrefix(&name, "no")) {
      flag = FindFlag(name);
      if (flag == nullptr || !flag->IsOfType<bool>()) return UnknownFlag(arguments[i]);
      value = "false";
    } else if (flag == nullptr && name != kFlagFile) {
      return UnknownFlag(arguments[i]);
    } else if (!has_value && flag != nullptr && flag->IsOfType<bool>()) {
      value = "true";
    } else if (!has_value) {
      if (++i == arguments.size()) {
        return absl::InvalidArgumentError(absl::StrCat("--", name, " has no value"));
      }
      value = arguments[i];
    }
    WAVEKV_RETURN_IF_ERROR(SetFlag(name, value, depth));
  }
  return absl::OkStatus();
}

// The flags of the program's main, with what they are now. absl's own --help calls itself an error.
std::string HelpText(const DaemonProgram& program) {
  std::map<std::string, const absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) {
    if (flag->Filename() == program.file) flags.emplace(name, flag);
  }
  std::string text = absl::StrCat(program.name, ": ", program.usage, "\n\n");
  for (const auto& [name, flag] : flags) {
    absl::StrAppend(&text, "  --", name, "=", flag->DefaultValue(), "\n      ", flag->Help(), "\n");
  }
  return text;
}

// Answers --help and --version; nullopt when the command line has neither.
std::optional<std::string> AnswerOf(int argc, char** argv, const DaemonProgram& program) {
  for (int i = 1; i < argc; ++i) {
    const absl::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") return HelpText(program);
    if (argument == "--version") return absl::StrCat(program.name, " ", WAVEKV_VERSION, "\n");
  }
  return std::nullopt;
}

}  // namespace

absl::Status SetFlags(int argc, const char* const* argv) {
  return SetAll(std::vector<std::string>(argv + 1, argv + argc), 0);
}

int WaitForSignal(const sigset_t& signals) {
  int signal = 0;
  while (::sigwait(&signals, &signal) != 0) {
  }
  return signal;
}

int RunDaemon(int argc, char** argv, const DaemonProgram& program) {
  // Before the first thread, so that all inherit it.
  sigset_t signals;
  ::sigemptyset(&signals);
  ::sigaddset(&signals, SIGTERM);
  ::sigaddset(&signals, SIGINT);
  ::pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  ::signal(SIGPIPE, SIG_IGN);

  if (const std::optional<std::string> answer = AnswerOf(argc, argv, program)) {
    return std::fputs(answer->c_str(), stdout) >= 0 && std::fflush(stdout) == 0 ? 0 : 1;
  }
  absl::Status status = SetFlags(argc, argv);
  if (status.ok()) status = program.serve(signals);
  // For nobody but a reader that is behind: the last line tells why the daemon ended.
  WaitForLogRoom(kLogReaderPatience);
  if (status.ok()) {
    Log(LogLevel::kInfo, "stopped");
    return 0;
  }
  Log(LogLevel::kError, "failed", {{"error", status}});
  return absl::IsInvalidArgument(status) ? 2 : 1;
}

}  // namespace wavekv
