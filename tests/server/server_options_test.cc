// Every flag of the server is judged once, by name.

#include "daemon/server/server_options.h"

#include <functional>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

ServerOptions Valid() {
  ServerOptions options;
  options.listen = "unix:/run/wavekv/s";
  options.worker_threads = 4;
  options.epoch = 1;
  return options;
}

struct Row {
  std::string error;  // Names the flag; empty: fine.
  std::function<void(ServerOptions*)> change;
};

TEST(ServerOptionsTest, IsJudgedByFlag) {
  const std::vector<Row> rows = {
      {"", [](ServerOptions*) {}},
      {"--listen", [](ServerOptions* o) { o->listen = ""; }},
      {"--listen_tcp", [](ServerOptions* o) { o->listen = "127.0.0.1:1"; }},
      {"absolute", [](ServerOptions* o) { o->listen = "unix:relative"; }},
      {"--token_file", [](ServerOptions* o) { o->listen_tcp = "127.0.0.1:0"; }},
      {"",
       [](ServerOptions* o) {
         o->listen_tcp = "127.0.0.1:0";
         o->token_file = "/etc/tokens";
       }},
      {"--allow_remote",
       [](ServerOptions* o) {
         o->listen_tcp = "0.0.0.0:7070";
         o->token_file = "/etc/tokens";
       }},
      {"",
       [](ServerOptions* o) {
         o->listen_tcp = "0.0.0.0:7070";
         o->token_file = "/etc/tokens";
         o->allow_remote = true;
       }},
      {"--listen_tcp", [](ServerOptions* o) { o->listen_tcp = "unix:/x"; }},
      {"--metrics_address", [](ServerOptions* o) { o->metrics_address = "unix:/x"; }},
      {"", [](ServerOptions* o) { o->metrics_address = "127.0.0.1:0"; }},
      {"--allow_remote", [](ServerOptions* o) { o->metrics_address = "0.0.0.0:0"; }},
      {"",
       [](ServerOptions* o) {
         o->metrics_address = "0.0.0.0:0";
         o->allow_remote = true;
       }},
      {"--socket_mode", [](ServerOptions* o) { o->socket_mode = 0400; }},
      {"--socket_mode", [](ServerOptions* o) { o->socket_mode = 04600; }},
      {"", [](ServerOptions* o) { o->socket_mode = 0666; }},
      {"--uids_max", [](ServerOptions* o) { o->uids_max = 0; }},
      {"--lease_ms", [](ServerOptions* o) { o->lease.lease_ms = 1; }},
      {"--lease_ms", [](ServerOptions* o) { o->lease.lease_ms = 1ull << 40; }},
      {"--clients_max", [](ServerOptions* o) { o->lease.clients_max = 0; }},
      {"--message_bytes_max", [](ServerOptions* o) { o->message_bytes_max = 1000; }},
      // gRPC takes an int: 2 GiB would come out negative, which means "no limit".
      {"--message_bytes_max", [](ServerOptions* o) { o->message_bytes_max = 1ull << 31; }},
      {"--worker_threads", [](ServerOptions* o) { o->worker_threads = 0; }},
      {"--shutdown_grace_ms", [](ServerOptions* o) { o->shutdown_grace_ms = ~0ull; }},
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    ServerOptions options = Valid();
    rows[i].change(&options);
    const absl::Status status = ValidateServerOptions(options);
    if (rows[i].error.empty()) {
      EXPECT_TRUE(status.ok()) << "row " << i << ": " << status;
    } else {
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << "row " << i;
      EXPECT_THAT(std::string(status.message()), HasSubstr(rows[i].error)) << "row " << i;
    }
  }
}

}  // namespace
}  // namespace wavekv
