// wavebufferd: owns the memory of one device that wavekvd fills and engines read.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/flags/flag.h"
#include "absl/strings/str_cat.h"
#include "gpu/buffer_table.h"
#include "gpu/cuda_memory.h"
#include "gpu/driver/driver.h"
#include "gpu/host_memory.h"
#include "gpu/wavebufferd/options.h"
#include "gpu/wavebufferd/service.h"
#include "grpcpp/ext/proto_server_reflection_plugin.h"
#include "grpcpp/grpcpp.h"
#include "grpcpp/health_check_service_interface.h"
#include "proto/rpc/address.h"
#include "proto/rpc/grpc_log.h"
#include "storage/base/byte_size.h"
#include "storage/base/bytes_text.h"
#include "storage/base/daemon_main.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/file_lock.h"
#include "storage/base/log.h"
#include "storage/base/memory_probe.h"
#include "storage/base/status_macros.h"

ABSL_FLAG(std::string, backend, "host",
          "Whose memory is lent: host (memfds), or cuda (an NVIDIA GPU's)");
ABSL_FLAG(int32_t, device, 0, "With --backend=cuda: which GPU, as CUDA counts those it sees");
ABSL_FLAG(std::string, listen, wavekv::DefaultAddressOf("wavebufferd"),
          "Control socket, unix:/path (mode 0600). Descriptors are handed out at <path>.fd");
ABSL_FLAG(wavekv::ByteSize, bytes_max, wavekv::ByteSize{uint64_t{1} << 30},
          "Most memory that may be lent, a GPU's context included: bytes, or a number of KiB, MiB, "
          "GiB, TiB");
ABSL_FLAG(int64_t, lease_ms, 10'000, "A manager that says nothing for so long is looked at");
ABSL_FLAG(uint32_t, threads_max, 8, "Most threads that serve the control socket");
ABSL_FLAG(std::string, log_level, "info", "debug, info, warning or error");

namespace wavekv {
namespace {

constexpr auto kReapEvery = std::chrono::milliseconds(100);
constexpr auto kShutdownGrace = std::chrono::seconds(2);
constexpr int kMessageBytesMax = 64 * 1024;

// Reaps in a thread of its own while it lives.
class Reaper {
 public:
  explicit Reaper(BufferTable* table) : table_(table), thread_([this] { Run(); }) {}
  ~Reaper() {
    {
      MutexLock lock(&mutex_);
      stopping_ = true;
    }
    stop_.NotifyAll();
    thread_.join();
  }

 private:
  void Run() {
    while (true) {
      {
        MutexLock lock(&mutex_);
        if (!stopping_) stop_.WaitFor(&mutex_, kReapEvery);
        if (stopping_) return;
      }
      table_->Reap();
    }
  }

  BufferTable* const table_;
  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

absl::StatusOr<WavebufferdOptions> OptionsFromFlags() {
  WAVEKV_ASSIGN_OR_RETURN(const LogLevel level, ParseLogLevel(absl::GetFlag(FLAGS_log_level)));
  SetLogLevel(level);
  WavebufferdOptions options;
  options.backend = absl::GetFlag(FLAGS_backend);
  options.device = absl::GetFlag(FLAGS_device);
  options.listen = absl::GetFlag(FLAGS_listen);
  options.bytes_max = absl::GetFlag(FLAGS_bytes_max).bytes;
  options.lease_ms = absl::GetFlag(FLAGS_lease_ms);
  options.threads_max = absl::GetFlag(FLAGS_threads_max);
  WAVEKV_RETURN_IF_ERROR(ValidateWavebufferdOptions(options));
  return options;
}

// Lending more than there is would end in the OOM killer, long after it was promised.
absl::Status CheckMemory(uint64_t bytes_max) {
  const MemoryReport report = ReadMemoryReport();
  const uint64_t largest = LargestPoolBytes(report);
  if (bytes_max <= largest) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      "--bytes_max is ", BytesText(bytes_max), ", but only ", BytesText(largest),
      " fit: the machine has ", BytesText(report.machine_available_bytes), " available",
      report.cgroup_limit_bytes.has_value()
          ? absl::StrCat(", the control group allows ", BytesText(*report.cgroup_limit_bytes), " (",
                         report.cgroup_limit_file, ")")
          : "",
      "; lower --bytes_max, free memory or raise the limit"));
}

absl::StatusOr<std::unique_ptr<DeviceMemory>> OpenMemory(const WavebufferdOptions& options) {
  if (options.backend == "host") {
    WAVEKV_RETURN_IF_ERROR(CheckMemory(options.bytes_max));
    return CreateHostMemory();
  }
  const auto open = [&options]() -> absl::StatusOr<std::unique_ptr<DeviceMemory>> {
    WAVEKV_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
    return CreateCudaMemory(std::move(driver), options.device, options.bytes_max);
  };
  absl::StatusOr<std::unique_ptr<DeviceMemory>> memory = open();
  if (memory.ok()) return memory;
  return absl::Status(
      memory.status().code(),
      absl::StrCat("--backend=cuda --device=", options.device, ": ", memory.status().message(),
                   " (--backend=host does the same in host memory, without a GPU)"));
}

// The last directory of the path, if only that is missing.
absl::Status MakeDirectoryOf(const std::string& path) {
  const std::string directory = std::filesystem::path(path).parent_path().string();
  if (::mkdir(directory.c_str(), 0755) == 0 || errno == EEXIST) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot create directory ", directory));
}

// gRPC unlinks a live socket and binds again, so the caller holds the lock file. The socket's mode
// comes from the umask: no other thread runs yet.
std::unique_ptr<grpc::Server> ListenGrpc(const std::string& target, uint32_t threads_max,
                                         grpc::Service* service) {
  TakeGrpcLog();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  grpc::ResourceQuota quota("wavebufferd");
  quota.SetMaxThreads(static_cast<int>(threads_max));
  builder.SetResourceQuota(quota);
  builder.SetSyncServerOption(grpc::ServerBuilder::NUM_CQS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MIN_POLLERS, 1);
  builder.SetSyncServerOption(grpc::ServerBuilder::MAX_POLLERS, 2);
  builder.SetMaxReceiveMessageSize(kMessageBytesMax);
  builder.AddListeningPort(target, grpc::InsecureServerCredentials());
  builder.RegisterService(service);
  const mode_t before = ::umask(0177);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  ::umask(before);
  return server;
}

// Anyone may connect to the descriptor socket: a ticket, and the uid it was issued for, decide.
absl::StatusOr<FdListener> ListenForTickets(const std::string& path) {
  const mode_t before = ::umask(0);
  absl::StatusOr<FdListener> listener = FdListener::Listen(path, 0666);
  ::umask(before);
  return listener;
}

absl::Status Serve(const sigset_t& signals) {
  WAVEKV_ASSIGN_OR_RETURN(const WavebufferdOptions options, OptionsFromFlags());
  WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(options.listen));
  WAVEKV_RETURN_IF_ERROR(MakeDirectoryOf(address.path));
  const absl::StatusOr<FileLock> lock = FileLock::Acquire(address.path + ".lock");
  if (!lock.ok()) {
    return absl::Status(lock.status().code(), absl::StrCat("wavebufferd at ", address.ToString(),
                                                           ": ", lock.status().message()));
  }
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<DeviceMemory> memory, OpenMemory(options));
  BufferTableOptions table_options;
  table_options.bytes_max = options.bytes_max;
  table_options.lease_ms = options.lease_ms;
  BufferTable table(table_options, memory.get(), RealClock());

  const std::string descriptor_path = address.path + ".fd";
  WAVEKV_ASSIGN_OR_RETURN(FdListener listener, ListenForTickets(descriptor_path));
  WaveBufferService service(&table, memory.get(), descriptor_path);
  const std::unique_ptr<grpc::Server> server =
      ListenGrpc(address.ToString(), options.threads_max, &service);
  if (server == nullptr) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", address.ToString()));
  }
  WAVEKV_ASSIGN_OR_RETURN(
      const std::unique_ptr<DescriptorServer> descriptors,
      DescriptorServer::Start(
          std::move(listener), DescriptorServerOptions(),
          [&table](absl::string_view ticket, const PeerCredentials& peer, UniqueFd peer_process) {
            return table.Redeem(ticket, peer, std::move(peer_process));
          }));
  const Reaper reaper(&table);
  Log(LogLevel::kInfo, "ready",
      {{"address", address.ToString()},
       {"descriptor_socket", descriptor_path},
       {"backend", memory->backend()},
       {"device_uuid", memory->device_uuid()},
       {"bytes_max", options.bytes_max},
       {"context_bytes", memory->overhead_bytes()},
       {"version", WAVEKV_VERSION},
       {"pid", ::getpid()}});
  const int signal = WaitForSignal(signals);
  Log(LogLevel::kInfo, "shutting_down", {{"signal", signal}});
  server->Shutdown(std::chrono::system_clock::now() + kShutdownGrace);
  return absl::OkStatus();
}

}  // namespace
}  // namespace wavekv

int main(int argc, char** argv) {
  return wavekv::RunDaemon(
      argc, argv,
      {.name = "wavebufferd",
       .usage = "Owns the memory of wave buffers and hands it out by descriptor.\n"
                "Every flag can stand in a file: --flagfile=/etc/wavekv/wavebufferd.flags",
       .file = __FILE__,
       .serve = wavekv::Serve});
}
