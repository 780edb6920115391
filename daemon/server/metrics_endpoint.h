// /metrics for Prometheus. The only room that knows prometheus-cpp. Every name is documented in
// docs/operations.md.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "daemon/server/service_core.h"

namespace wavekv {

class MetricsEndpoint {
 public:
  // Serves GET /metrics at `address` ("host:port"). `core` must outlive the endpoint.
  // Unavailable, naming the address: it cannot be bound.
  static absl::StatusOr<std::unique_ptr<MetricsEndpoint>> Start(const std::string& address,
                                                                const ServiceCore* core);
  ~MetricsEndpoint();

  // With the real port.
  std::string address() const;

 private:
  struct Impl;
  explicit MetricsEndpoint(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv
