#include "daemon/server/metrics_endpoint.h"

#include <exception>
#include <future>
#include <limits>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "daemon/dataplane/data_plane.h"
#include "daemon/server/process_status.h"
#include "prometheus/collectable.h"
#include "prometheus/exposer.h"
#include "prometheus/metric_family.h"
#include "proto/rpc/address.h"
#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

using Families = std::vector<prometheus::MetricFamily>;
using Labels = std::vector<prometheus::ClientMetric::Label>;
using prometheus::MetricType;

constexpr size_t kEndpointThreads = 1;

prometheus::MetricFamily& AddFamily(const char* name, const char* help, MetricType type,
                                    Families* families) {
  families->push_back({.name = name, .help = help, .type = type, .metric = {}});
  return families->back();
}

void AddValue(Labels labels, uint64_t value, prometheus::MetricFamily* family) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  if (family->type == MetricType::Counter) {
    metric.counter.value = static_cast<double>(value);
  } else {
    metric.gauge.value = static_cast<double>(value);
  }
  family->metric.push_back(std::move(metric));
}

void AddHistogram(Labels labels, const LatencyHistogram::Snapshot& snapshot,
                  prometheus::MetricFamily* family) {
  prometheus::ClientMetric metric;
  metric.label = std::move(labels);
  metric.histogram.sample_count = snapshot.count;
  metric.histogram.sample_sum = snapshot.sum_us / 1e6;
  uint64_t cumulative = 0;
  for (size_t i = 0; i < snapshot.counts.size(); ++i) {
    cumulative += snapshot.counts[i];
    const bool last = i == LatencyHistogram::kEdgesUs.size();
    metric.histogram.bucket.push_back({.cumulative_count = cumulative,
                                       .upper_bound = last ? std::numeric_limits<double>::infinity()
                                                           : LatencyHistogram::kEdgesUs[i] / 1e6});
  }
  family->metric.push_back(std::move(metric));
}

struct Plain {
  const char* name;
  const char* help;
  MetricType type;
  uint64_t value;
};

void AddPlain(std::initializer_list<Plain> rows, Families* families) {
  for (const Plain& row : rows) {
    AddValue({}, row.value, &AddFamily(row.name, row.help, row.type, families));
  }
}

void CollectPool(const ServiceCore& core, const EngineStats& stats, Families* families) {
  const ProcessStatus process = ReadProcessStatus();
  AddPlain(
      {
          {"wavekv_pool_bytes_max", "Hard limit of the block pool.", MetricType::Gauge,
           stats.pool.bytes_max},
          {"wavekv_pool_reserved_bytes", "Bytes promised to sequences.", MetricType::Gauge,
           stats.pool.reserved_bytes},
          {"wavekv_pool_allocated_bytes", "Bytes that live runs occupy.", MetricType::Gauge,
           stats.pool.allocated_bytes},
          {"wavekv_pool_payload_bytes", "Room of live keys and values: segments and exact tails.",
           MetricType::Gauge, stats.pool.payload_bytes},
          {"wavekv_index_bytes", "Bytes of the wave indexes.", MetricType::Gauge,
           stats.index_bytes},
          {"wavekv_build_queue", "Layers that wait for a thread to cluster.", MetricType::Gauge,
           stats.build_queue},
          {"wavekv_recordings", "Sequences being recorded.", MetricType::Gauge, stats.recordings},
          {"wavekv_recording_queued_bytes", "What their recorders have not read.",
           MetricType::Gauge, stats.recording_queued_bytes},
          {"wavekv_clients", "Clients with a lease.", MetricType::Gauge, core.registry.Count()},
          {"wavekv_data_channels", "Clients that are served over shared memory.", MetricType::Gauge,
           core.data_plane == nullptr ? 0 : core.data_plane->channel_count()},
          {"wavekv_calls_running", "Calls that have not ended.", MetricType::Gauge,
           core.calls.running_count()},
          {"wavekv_uptime_seconds", "Time since start.", MetricType::Gauge,
           static_cast<uint64_t>(core.clock->NowMs() - core.start_ms) / 1000},
          {"wavekv_rss_bytes", "Resident memory of the daemon.", MetricType::Gauge,
           process.rss_bytes},
          {"wavekv_threads", "Threads of the daemon.", MetricType::Gauge, process.thread_count},
          {"wavekv_log_lines_lost_total", "Lines of the log that found no room on stderr.",
           MetricType::Counter, LogLinesLost()},
      },
      families);
}

void CollectTenants(const ServiceCore& core, const EngineStats& stats, Families* families) {
  prometheus::MetricFamily reserved{.name = "wavekv_tenant_reserved_bytes",
                                    .help = "Bytes promised to a tenant's sequences.",
                                    .type = MetricType::Gauge,
                                    .metric = {}};
  prometheus::MetricFamily sequences{.name = "wavekv_sequences",
                                     .help = "Sequences of a tenant.",
                                     .type = MetricType::Gauge,
                                     .metric = {}};
  prometheus::MetricFamily clients{.name = "wavekv_tenant_clients",
                                   .help = "Clients of a tenant with a lease.",
                                   .type = MetricType::Gauge,
                                   .metric = {}};
  for (const TenantUsage& usage : stats.tenants) {
    AddValue({{"tenant", usage.tenant}}, usage.usage.reserved_bytes, &reserved);
  }
  for (const auto& [tenant, count] : core.registry.CountByTenant()) {
    AddValue({{"tenant", tenant}}, count, &clients);
  }
  for (const auto& [tenant, count] : stats.sequences) {
    AddValue({{"tenant", tenant}}, count, &sequences);
  }
  families->push_back(std::move(reserved));
  families->push_back(std::move(sequences));
  families->push_back(std::move(clients));
}

void CollectSteps(const StepCounters& steps, Families* families) {
  AddPlain(
      {
          {"wavekv_steady_tokens_total", "Tokens attended exactly in the steady zone.",
           MetricType::Counter, steps.steady_tokens},
          {"wavekv_retrieved_clusters_total", "Clusters in the retrieval zone.",
           MetricType::Counter, steps.retrieved_clusters},
          {"wavekv_retrieved_tokens_total", "Tokens in the retrieval zone.", MetricType::Counter,
           steps.retrieved_tokens},
          {"wavekv_estimated_clusters_total", "Clusters in the estimation zone.",
           MetricType::Counter, steps.estimated_clusters},
          {"wavekv_sketched_clusters_total", "Clusters estimated token by token from their sketch.",
           MetricType::Counter, steps.sketched_clusters},
          {"wavekv_ignored_clusters_total", "Clusters neither retrieved nor estimated.",
           MetricType::Counter, steps.ignored_clusters},
          {"wavekv_moved_to_estimation_total", "Clusters over budget, estimated instead.",
           MetricType::Counter, steps.moved_to_estimation},
          {"wavekv_kv_bytes_read_total", "Bytes that attention has read.", MetricType::Counter,
           steps.kv_bytes_read},
          {"wavekv_kv_bytes_full_total", "Bytes that exact attention would have read.",
           MetricType::Counter, steps.kv_bytes_full},
          {"wavekv_cache_hit_blocks_total", "Blocks found in the block cache.", MetricType::Counter,
           steps.cache_hit_blocks},
          {"wavekv_cache_miss_blocks_total", "Blocks not found in the block cache.",
           MetricType::Counter, steps.cache_miss_blocks},
          {"wavekv_error_budget_met_total", "KV heads whose error budget was met.",
           MetricType::Counter, steps.error_budget_met},
          {"wavekv_error_budget_capped_total", "KV heads whose error budget hit its cap.",
           MetricType::Counter, steps.error_budget_capped},
      },
      families);
}

void CollectResidents(const ResidentStats& residents, Families* families) {
  const ResidentCounters& counters = residents.counters;
  AddPlain(
      {
          {"wavekv_resident_sequences", "Sequences whose engines attend on the device.",
           MetricType::Gauge, residents.attached},
          {"wavekv_resident_hit_blocks_total", "Blocks that steps found in resident caches.",
           MetricType::Counter, counters.hit_blocks},
          {"wavekv_resident_miss_blocks_total", "Blocks that steps did not find there.",
           MetricType::Counter, counters.miss_blocks},
          {"wavekv_resident_overflows_total", "Tokens that steps could not append: a full ring.",
           MetricType::Counter, counters.overflows},
          {"wavekv_resident_violations_total", "Numbers in resident regions that cannot be.",
           MetricType::Counter, counters.violations},
          {"wavekv_resident_log_losses_total", "Rounds in which block uses were not heard of.",
           MetricType::Counter, counters.log_losses},
      },
      families);
  AddHistogram({}, residents.rounds,
               &AddFamily("wavekv_resident_round_seconds",
                          "Rounds over all resident regions: log, cache, new versions.",
                          MetricType::Histogram, families));
}

void CollectBuilds(const BuildStats& builds, Families* families) {
  prometheus::MetricFamily& built =
      AddFamily("wavekv_segments_built_total",
                "Segments built, by who clustered them: the daemon, or a client's labels.",
                MetricType::Counter, families);
  AddValue({{"labels", "own"}}, builds.segments_own, &built);
  AddValue({{"labels", "given"}}, builds.segments_given, &built);
  AddPlain({{"wavekv_labels_left_aside_total",
             "Given labels of segments that were not kept: they fit no cut, or came too late.",
             MetricType::Counter, builds.labels_left_aside},
            {"wavekv_labels_unused_total",
             "Kept labels of segments that went before a segment of the index was made of them.",
             MetricType::Counter, builds.labels_unused}},
           families);
}

void CollectWaveBuffers(const EngineStats& stats, Families* families) {
  prometheus::MetricFamily connected{.name = "wavekv_wave_buffer_connected",
                                     .help = "1 while wavebufferd answers.",
                                     .type = MetricType::Gauge,
                                     .metric = {}};
  prometheus::MetricFamily used{.name = "wavekv_wave_buffer_used_bytes",
                                .help = "Bytes of the wave buffer in use.",
                                .type = MetricType::Gauge,
                                .metric = {}};
  prometheus::MetricFamily admitted{.name = "wavekv_wave_buffer_admitted_blocks_total",
                                    .help = "Blocks admitted to the block cache.",
                                    .type = MetricType::Counter,
                                    .metric = {}};
  for (const WaveBufferStatus& status : stats.wave_buffers) {
    const Labels labels = {{"backend", status.backend}, {"device", status.device_uuid}};
    AddValue(labels, status.connected ? 1 : 0, &connected);
    AddValue(labels, status.bytes_used, &used);
    AddValue(labels, status.admitted_blocks, &admitted);
  }
  families->push_back(std::move(connected));
  families->push_back(std::move(used));
  families->push_back(std::move(admitted));
}

void CollectCalls(const CallStats& stats, Families* families) {
  prometheus::MetricFamily& calls =
      AddFamily("wavekv_calls_total", "Calls that have ended.", MetricType::Counter, families);
  for (size_t i = 0; i < kRpcCount; ++i) {
    const Rpc rpc = static_cast<Rpc>(i);
    for (size_t code = 0; code < kStatusCodeCount; ++code) {
      const auto status_code = static_cast<absl::StatusCode>(code);
      const uint64_t count = stats.Calls(rpc, status_code);
      // A row of zeros for each code would say nothing; OK is there from the start.
      if (count == 0 && code != 0) continue;
      AddValue(
          {{"code", absl::StatusCodeToString(status_code)}, {"rpc", std::string(RpcName(rpc))}},
          count, &calls);
    }
  }
}

void CollectLatencies(const CallStats& stats, Families* families) {
  prometheus::MetricFamily& family =
      AddFamily("wavekv_latency_seconds", "From a request's arrival to its answer.",
                MetricType::Histogram, families);
  for (const Rpc rpc : {Rpc::kAttend, Rpc::kDecode, Rpc::kQuery, Rpc::kEstimate}) {
    AddHistogram({{"rpc", std::string(RpcName(rpc))}}, stats.latency(rpc).Read(), &family);
  }
}

class Collector : public prometheus::Collectable {
 public:
  explicit Collector(const ServiceCore* core) : core_(core) {}

  // In a thread of its own: those of civetweb have a stack of 100 KiB, too little for reading /proc
  // under a sanitizer, and for comfort without.
  Families Collect() const override {
    try {
      return std::async(std::launch::async, [this] { return CollectAll(); }).get();
    } catch (const std::system_error& error) {
      // There is no further thread to be had; nothing may be thrown into civetweb.
      Log(LogLevel::kWarning, "metrics_failed", {{"error", error.what()}});
      return {};
    }
  }

 private:
  Families CollectAll() const {
    const EngineStats stats = core_->engine->Stats();
    Families families;
    CollectPool(*core_, stats, &families);
    CollectTenants(*core_, stats, &families);
    CollectSteps(stats.counters, &families);
    CollectBuilds(stats.builds, &families);
    CollectWaveBuffers(stats, &families);
    CollectResidents(stats.residents, &families);
    CollectCalls(core_->stats, &families);
    CollectLatencies(core_->stats, &families);
    return families;
  }

  const ServiceCore* const core_;
};

}  // namespace

struct MetricsEndpoint::Impl {
  std::shared_ptr<Collector> collector;  // The exposer holds it weakly.
  std::unique_ptr<prometheus::Exposer> exposer;
  Address address;
};

absl::StatusOr<std::unique_ptr<MetricsEndpoint>> MetricsEndpoint::Start(const std::string& address,
                                                                        const ServiceCore* core) {
  auto impl = std::make_unique<Impl>();
  WAVEKV_ASSIGN_OR_RETURN(impl->address, ParseAddress(address));
  impl->collector = std::make_shared<Collector>(core);
  try {
    impl->exposer =
        std::make_unique<prometheus::Exposer>(impl->address.ToString(), kEndpointThreads);
    impl->exposer->RegisterCollectable(impl->collector);
  } catch (const std::exception& error) {
    return absl::UnavailableError(
        absl::StrCat("cannot serve metrics on ", address, ": ", error.what(),
                     "; stop what uses the address or choose another --metrics_address"));
  }
  const std::vector<int> ports = impl->exposer->GetListeningPorts();
  if (!ports.empty()) impl->address.port = static_cast<uint16_t>(ports.front());
  return std::unique_ptr<MetricsEndpoint>(new MetricsEndpoint(std::move(impl)));
}

MetricsEndpoint::MetricsEndpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
MetricsEndpoint::~MetricsEndpoint() = default;

std::string MetricsEndpoint::address() const { return impl_->address.ToString(); }

}  // namespace wavekv
