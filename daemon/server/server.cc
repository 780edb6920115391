#include "daemon/server/server.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/dataplane/data_plane.h"
#include "daemon/server/data_leases.h"
#include "daemon/server/grpc_host.h"
#include "daemon/server/lease_reaper.h"
#include "daemon/server/metrics_endpoint.h"
#include "daemon/server/service_core.h"
#include "daemon/server/unix_acceptor.h"
#include "daemon/server/window_server.h"
#include "proto/rpc/address.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

// Makes the socket's own directory, so that the default address works at once. Its parents are the
// operator's.
absl::Status MakeSocketDirectory(const std::string& socket_path) {
  const std::string directory = socket_path.substr(0, socket_path.rfind('/'));
  if (directory.empty() || mkdir(directory.c_str(), 0755) == 0 || errno == EEXIST) {
    return absl::OkStatus();
  }
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot make the directory ", directory,
                                                 " of the socket; make it, or choose another "
                                                 "--listen"));
}

}  // namespace

struct Server::Impl {
  Impl(const ServerOptions& options, Engine* engine, UidIdentities uid_identities)
      : identities(std::move(uid_identities)),
        core(options, engine, RealClock()),
        host(&core, &identities),
        data_leases(&core, &identities) {}

  absl::Status Listen();
  absl::Status StartDataPlane(const std::string& socket_path);
  absl::Status StartWindows(const std::string& socket_path);
  void Accept(UniqueFd connection, const PeerCredentials& peer);

  const UidIdentities identities;
  std::optional<TokenTable> tokens;
  ServiceCore core;
  GrpcHost host;
  DataLeases data_leases;
  std::unique_ptr<UnixAcceptor> acceptor;
  // After the acceptor, whose lock guards their paths, too.
  std::unique_ptr<DataPlane> data_plane;
  std::unique_ptr<WindowServer> windows;
  std::unique_ptr<MetricsEndpoint> metrics;
  std::unique_ptr<LeaseReaper> reaper;
  std::string unix_address;
  std::string tcp_address;
  bool shut_down = false;
};

absl::Status Server::Impl::Listen() {
  const ServerOptions& options = core.options;
  if (!options.listen.empty()) {
    WAVEKV_ASSIGN_OR_RETURN(const Address address, ParseAddress(options.listen));
    WAVEKV_RETURN_IF_ERROR(MakeSocketDirectory(address.path));
    WAVEKV_ASSIGN_OR_RETURN(acceptor, UnixAcceptor::Listen(address.path, options.socket_mode));
    unix_address = address.ToString();
    if (options.data_channels_max > 0) WAVEKV_RETURN_IF_ERROR(StartDataPlane(address.path));
    // Nothing can be attached without a wave buffer.
    if (!core.engine->Stats().wave_buffers.empty()) {
      WAVEKV_RETURN_IF_ERROR(StartWindows(address.path));
    }
  }
  if (!options.metrics_address.empty()) {
    WAVEKV_ASSIGN_OR_RETURN(metrics, MetricsEndpoint::Start(options.metrics_address, &core));
  }
  reaper = std::make_unique<LeaseReaper>(&core.registry, core.engine, [this](ClientId client) {
    if (data_plane != nullptr) data_plane->Drop(client);
  });
  if (!options.listen_tcp.empty()) {
    WAVEKV_ASSIGN_OR_RETURN(tokens, TokenTable::Load(options.token_file));
    WAVEKV_ASSIGN_OR_RETURN(tcp_address, host.ServeTcp(options.listen_tcp, &*tokens));
  }
  if (acceptor != nullptr) {
    acceptor->Start([this](UniqueFd connection, const PeerCredentials& peer) {
      Accept(std::move(connection), peer);
    });
  }
  return absl::OkStatus();
}

absl::Status Server::Impl::StartDataPlane(const std::string& socket_path) {
  const ServerOptions& options = core.options;
  const DataPlaneOptions plane{.path = absl::StrCat(socket_path, ".data"),
                               .socket_mode = options.socket_mode,
                               .channels_max = options.data_channels_max,
                               .arena_bytes = options.data_arena_bytes,
                               .batch_max = options.batch_max};
  absl::StatusOr<std::unique_ptr<DataPlane>> started =
      DataPlane::Start(plane, core.engine, &data_leases);
  if (!started.ok()) {
    return absl::Status(started.status().code(),
                        absl::StrCat("the shared-memory data plane at ", plane.path,
                                     " cannot start: ", started.status().message(),
                                     "; choose another --listen, or do without it by "
                                     "--data_channels_max=0"));
  }
  data_plane = *std::move(started);
  core.data_plane = data_plane.get();
  return absl::OkStatus();
}

absl::Status Server::Impl::StartWindows(const std::string& socket_path) {
  const std::string path = absl::StrCat(socket_path, ".pool");
  absl::StatusOr<std::unique_ptr<WindowServer>> started =
      WindowServer::Start(path, core.options.socket_mode);
  if (!started.ok()) {
    return absl::Status(
        started.status().code(),
        absl::StrCat("the socket of the block pool's descriptors at ", path,
                     " cannot start: ", started.status().message(), "; choose another --listen"));
  }
  windows = *std::move(started);
  core.windows = windows.get();
  return absl::OkStatus();
}

void Server::Impl::Accept(UniqueFd connection, const PeerCredentials& peer) {
  const absl::Status served = host.ServeConnection(std::move(connection), peer.uid);
  if (!served.ok()) {
    Log(LogLevel::kWarning, "connection_refused",
        {{"uid", peer.uid}, {"pid", peer.pid}, {"error", served}});
  }
}

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      Engine* engine) {
  WAVEKV_RETURN_IF_ERROR(ValidateServerOptions(options));
  WAVEKV_ASSIGN_OR_RETURN(UidIdentities identities,
                          UidIdentities::Create(options.tenant_map, geteuid()));
  auto impl = std::make_unique<Impl>(options, engine, std::move(identities));
  const absl::Status listening = impl->Listen();
  std::unique_ptr<Server> server(new Server(std::move(impl)));
  if (!listening.ok()) return listening;
  return server;
}

Server::Server(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Server::~Server() { Shutdown(); }

void Server::Shutdown() {
  if (std::exchange(impl_->shut_down, true)) return;
  impl_->host.SetNotServing();
  impl_->core.stopping.store(true);
  if (impl_->acceptor != nullptr) impl_->acceptor->Stop();
  impl_->core.streams.StopAll();
  const std::chrono::milliseconds grace(impl_->core.options.shutdown_grace_ms);
  if (!impl_->core.calls.WaitIdle(grace)) {
    Log(LogLevel::kWarning, "calls_cancelled", {{"calls", impl_->core.calls.running_count()}});
  }
  if (impl_->data_plane != nullptr) impl_->data_plane->Stop();
  impl_->host.Shutdown();
  impl_->windows.reset();
  impl_->acceptor.reset();
  impl_->metrics.reset();
  impl_->reaper.reset();
}

std::string Server::unix_address() const { return impl_->unix_address; }
std::string Server::tcp_address() const { return impl_->tcp_address; }
std::string Server::metrics_address() const {
  return impl_->metrics == nullptr ? "" : impl_->metrics->address();
}

}  // namespace wavekv
