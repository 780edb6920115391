#include "proto/rpc/grpc_log.h"

#include "absl/strings/str_cat.h"
#include "grpc/support/log.h"
#include "storage/base/log.h"

namespace wavekv {
namespace {

LogLevel LevelOf(gpr_log_severity severity) {
  switch (severity) {
    case GPR_LOG_SEVERITY_DEBUG:
      return LogLevel::kDebug;
    case GPR_LOG_SEVERITY_INFO:
      return LogLevel::kInfo;
    case GPR_LOG_SEVERITY_ERROR:
      break;
  }
  return LogLevel::kError;
}

void LogGrpc(gpr_log_func_args* args) {
  Log(LevelOf(args->severity), "grpc",
      {{"place", absl::StrCat(args->file, ":", args->line)}, {"message", args->message}});
}

}  // namespace

void TakeGrpcLog() { gpr_set_log_function(LogGrpc); }

}  // namespace wavekv
