// wavekvd: the vector storage engine of one host. Reads its flags, puts the rooms together, serves
// until it is told to stop.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "daemon/engine/engine.h"
#include "daemon/server/server.h"
#include "daemon/server/server_options.h"
#include "gpu/buffer_stager.h"
#include "index/backend/compute_backend.h"
#include "index/simd/kernels.h"
#include "proto/rpc/address.h"
#include "storage/base/byte_size.h"
#include "storage/base/cpuset.h"
#include "storage/base/daemon_main.h"
#include "storage/base/log.h"
#include "storage/base/memory_probe.h"
#include "storage/base/random.h"
#include "storage/base/status_macros.h"
#include "storage/block_pool.h"

ABSL_FLAG(std::string, listen, wavekv::DefaultAddressOf("wavekvd"),
          "UNIX socket to serve, unix:/path; empty: none. A lock file <path>.lock lies beside it");
ABSL_FLAG(std::string, socket_mode, "600", "File mode of the socket of --listen, octal");
ABSL_FLAG(std::string, tenant_map, "", "Tenants of uids, uid=name,uid=name; others are uid:<uid>");
ABSL_FLAG(uint32_t, uids_max, 64, "Most different uids that may connect");
ABSL_FLAG(std::string, listen_tcp, "", "TCP address to serve, host:port; needs --token_file");
ABSL_FLAG(bool, allow_remote, false, "Let TCP addresses be such that other hosts can reach them");
ABSL_FLAG(std::string, token_file, "", "Tokens of TCP callers, lines: token tenant [admin]");
ABSL_FLAG(std::string, metrics_address, "",
          "Serve Prometheus metrics at http://host:port/metrics; empty: no");
ABSL_FLAG(wavekv::ByteSize, pool_bytes, wavekv::ByteSize{},
          "Hard limit of memory for all sequences, as 8GiB; 0: half of what is available");
ABSL_FLAG(wavekv::ByteSize, tenant_bytes_max, wavekv::ByteSize{},
          "Hard limit of memory for each tenant; 0: --pool_bytes");
ABSL_FLAG(uint32_t, sequences_max, 4096, "Most sequences of a tenant");
ABSL_FLAG(uint64_t, tokens_max, 1ull << 24, "Most tokens of a sequence");
ABSL_FLAG(uint32_t, batch_max, 256, "Most sequences in one Attend");
ABSL_FLAG(uint64_t, lease_ms, 30'000, "Lease of a client that asks for none");
ABSL_FLAG(uint32_t, clients_max, 1024, "Most clients of a tenant");
ABSL_FLAG(wavekv::ByteSize, message_bytes_max, wavekv::ByteSize{64ull << 20},
          "Largest message, request or reply");
ABSL_FLAG(uint32_t, data_channels_max, 64,
          "Most clients served over shared memory, a thread each; 0: none");
ABSL_FLAG(wavekv::ByteSize, data_arena_bytes, wavekv::ByteSize{16ull << 20},
          "Memory for the calls of one client over shared memory, taken as it is touched");
ABSL_FLAG(uint32_t, recordings_max, 4, "Most sequences that are recorded at a time; 0: none");
ABSL_FLAG(wavekv::ByteSize, recording_queue_bytes, wavekv::ByteSize{64ull << 20},
          "What may wait to be read of one recording, reserved in the pool while it goes on");
ABSL_FLAG(uint32_t, build_threads, 0, "Threads that cluster segments; 0: from the CPUs it may use");
ABSL_FLAG(uint32_t, compute_threads, 0, "Threads that attend; 0: from the CPUs it may use");
ABSL_FLAG(uint32_t, worker_threads, 0, "Calls that work at once; 0: from the CPUs it may use");
ABSL_FLAG(uint64_t, shutdown_grace_ms, 5000, "How long running calls may take after SIGTERM");
ABSL_FLAG(std::string, wave_buffer, "", "Control socket of wavebufferd, unix:/path; empty: none");
ABSL_FLAG(wavekv::ByteSize, wave_buffer_bytes, wavekv::ByteSize{256ull << 20},
          "Wave buffer of each tenant");
ABSL_FLAG(double, wave_buffer_cache_ratio, 0.05,
          "Block cache of a sequence, as a share of the payload of its max_tokens");
ABSL_FLAG(uint32_t, wave_buffer_staging_tokens, 8192,
          "Tokens of one layer that a sequence's staging area holds");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error");

namespace wavekv {
namespace {

constexpr uint32_t kWorkerThreadsMin = 4;
constexpr uint64_t kPoolBytesMin = 1 << 20;
// A call that ignores its cancellation may hold up the end no longer than this.
constexpr uint64_t kHardStopSeconds = 10;

uint32_t NewEpoch() {
  for (;;) {
    const auto epoch = static_cast<uint32_t>(RandomU64());
    if (epoch != 0) return epoch;
  }
}

absl::StatusOr<mode_t> SocketModeFromFlag() {
  const std::string text = absl::GetFlag(FLAGS_socket_mode);
  const bool octal =
      !text.empty() && text.size() <= 4 && text.find_first_not_of("01234567") == std::string::npos;
  if (octal) return static_cast<mode_t>(std::strtoul(text.c_str(), nullptr, 8));
  return absl::InvalidArgumentError(
      absl::StrCat("--socket_mode=", text, " is no octal file mode such as 600 or 660"));
}

// The pool's limits, compared with the machine and its control groups.
absl::StatusOr<BlockPoolOptions> PoolOptionsFromFlags() {
  const MemoryReport memory = ReadMemoryReport();
  BlockPoolOptions options;
  options.bytes_max = absl::GetFlag(FLAGS_pool_bytes).bytes;
  if (options.bytes_max == 0) {
    options.bytes_max = std::max(LargestPoolBytes(memory) / 2, kPoolBytesMin);
  }
  if (options.bytes_max < kPoolBytesMin) {
    return absl::InvalidArgumentError(absl::StrCat("--pool_bytes=", options.bytes_max,
                                                   " holds no sequence, expected at least ",
                                                   kPoolBytesMin));
  }
  WAVEKV_RETURN_IF_ERROR(CheckPoolFits(memory, options.bytes_max));
  options.tenant_bytes_max = absl::GetFlag(FLAGS_tenant_bytes_max).bytes;
  if (options.tenant_bytes_max == 0) options.tenant_bytes_max = options.bytes_max;
  return options;
}

EngineOptions EngineOptionsFromFlags() {
  EngineOptions options;
  options.epoch = NewEpoch();
  options.build_threads = absl::GetFlag(FLAGS_build_threads);
  options.compute_threads = absl::GetFlag(FLAGS_compute_threads);
  options.sequences_max = absl::GetFlag(FLAGS_sequences_max);
  options.tokens_max = absl::GetFlag(FLAGS_tokens_max);
  options.batch_max = absl::GetFlag(FLAGS_batch_max);
  options.recordings_max = absl::GetFlag(FLAGS_recordings_max);
  options.recording_queue_bytes = absl::GetFlag(FLAGS_recording_queue_bytes).bytes;
  return options;
}

absl::StatusOr<ServerOptions> ServerOptionsFromFlags(const EngineOptions& engine,
                                                     const BlockPoolOptions& pool) {
  ServerOptions options;
  options.listen = absl::GetFlag(FLAGS_listen);
  WAVEKV_ASSIGN_OR_RETURN(options.socket_mode, SocketModeFromFlag());
  options.tenant_map = absl::GetFlag(FLAGS_tenant_map);
  options.uids_max = absl::GetFlag(FLAGS_uids_max);
  options.listen_tcp = absl::GetFlag(FLAGS_listen_tcp);
  options.allow_remote = absl::GetFlag(FLAGS_allow_remote);
  options.token_file = absl::GetFlag(FLAGS_token_file);
  options.metrics_address = absl::GetFlag(FLAGS_metrics_address);
  options.lease.lease_ms = absl::GetFlag(FLAGS_lease_ms);
  options.lease.clients_max = absl::GetFlag(FLAGS_clients_max);
  options.message_bytes_max = absl::GetFlag(FLAGS_message_bytes_max).bytes;
  options.data_channels_max = absl::GetFlag(FLAGS_data_channels_max);
  options.data_arena_bytes = absl::GetFlag(FLAGS_data_arena_bytes).bytes;
  options.tenant_bytes_max = pool.tenant_bytes_max;
  options.sequences_max = engine.sequences_max;
  options.tokens_max = engine.tokens_max;
  options.batch_max = engine.batch_max;
  options.recordings_max = engine.recordings_max;
  options.worker_threads = absl::GetFlag(FLAGS_worker_threads);
  if (options.worker_threads == 0) {
    options.worker_threads =
        std::clamp(static_cast<uint32_t>(UsableCpuCount()), kWorkerThreadsMin, kWorkerThreadsMax);
  }
  options.shutdown_grace_ms = absl::GetFlag(FLAGS_shutdown_grace_ms);
  options.epoch = engine.epoch;
  WAVEKV_RETURN_IF_ERROR(ValidateServerOptions(options));
  return options;
}

// The stager of --wave_buffer; null without one.
absl::StatusOr<std::unique_ptr<Stager>> StagerFromFlags() {
  BufferStagerOptions options;
  options.tenant_buffer_bytes = absl::GetFlag(FLAGS_wave_buffer_bytes).bytes;
  options.cache_ratio = absl::GetFlag(FLAGS_wave_buffer_cache_ratio);
  options.staging_tokens = absl::GetFlag(FLAGS_wave_buffer_staging_tokens);
  WAVEKV_RETURN_IF_ERROR(ValidateBufferStagerOptions(options));
  const std::string address = absl::GetFlag(FLAGS_wave_buffer);
  if (address.empty()) return std::unique_ptr<Stager>();
  return ConnectWaveBuffer(address, options);
}

absl::Status Serve(const sigset_t& signals) {
  WAVEKV_ASSIGN_OR_RETURN(const LogLevel level, ParseLogLevel(absl::GetFlag(FLAGS_log_level)));
  SetLogLevel(level);
  WAVEKV_RETURN_IF_ERROR(simd::ChooseKernels().status());
  const EngineOptions engine_options = EngineOptionsFromFlags();
  WAVEKV_ASSIGN_OR_RETURN(const BlockPoolOptions pool_options, PoolOptionsFromFlags());
  WAVEKV_ASSIGN_OR_RETURN(const ServerOptions server_options,
                          ServerOptionsFromFlags(engine_options, pool_options));
  WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<Stager> stager, StagerFromFlags());
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Engine> engine,
                          Engine::Create(engine_options, BlockPool::Create(pool_options),
                                         CreateCpuBackend(), std::move(stager)));
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<Server> server,
                          Server::Start(server_options, engine.get()));
  Log(LogLevel::kInfo, "ready",
      {{"address", server->unix_address().empty() ? server->tcp_address() : server->unix_address()},
       {"tcp_address", server->tcp_address()},
       {"metrics_address", server->metrics_address()},
       {"pool_bytes", pool_options.bytes_max},
       {"epoch", engine_options.epoch},
       {"isa", engine->Stats().backend.isa},
       {"version", WAVEKV_VERSION},
       {"pid", ::getpid()}});
  const int signal = WaitForSignal(signals);
  Log(LogLevel::kInfo, "shutting_down",
      {{"signal", signal}, {"grace_ms", server_options.shutdown_grace_ms}});
  // The kernel ends us with SIGALRM if a call does not heed its cancellation.
  ::alarm(static_cast<unsigned>(server_options.shutdown_grace_ms / 1000 + kHardStopSeconds));
  server->Shutdown();
  return absl::OkStatus();
}

}  // namespace
}  // namespace wavekv

int main(int argc, char** argv) {
  return wavekv::RunDaemon(
      argc, argv,
      {.name = "wavekvd",
       .usage = "Keeps the KV caches of language models and answers attention over them.\n"
                "Every flag can stand in a file: --flagfile=/etc/wavekv/wavekvd.flags",
       .file = __FILE__,
       .serve = wavekv::Serve});
}
