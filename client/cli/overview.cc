#include "client/cli/overview.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/histogram.h"
#include "client/cli/step_ratios.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

using Align = Table::Align;

constexpr size_t kPoolBarColumns = 32;
constexpr size_t kLabelColumnsMax = 24;

double Ratio(uint64_t part, uint64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

std::string DaemonLine(const std::string& address, const DaemonStats& stats) {
  return absl::StrCat("wavekvd ", Printable(stats.daemon_version), " at ", address, ", up ",
                      DurationText(stats.uptime_ms), ", epoch ", stats.epoch, ", ",
                      Printable(stats.isa), "\n");
}

std::string PoolLines(const DaemonStats& stats) {
  return absl::StrCat(
      "  pool     │", Bar(Ratio(stats.pool_reserved_bytes, stats.pool_bytes_max), kPoolBarColumns),
      "│ ", BytesText(stats.pool_reserved_bytes), " reserved of ", BytesText(stats.pool_bytes_max),
      "\n           payload ", BytesText(stats.pool_payload_bytes), " in ",
      BytesText(stats.pool_allocated_bytes), ", index ", BytesText(stats.index_bytes),
      stats.build_queue > 0
          ? absl::StrCat(", ", CountText(stats.build_queue), " layers wait to be clustered")
          : "",
      "\n");
}

std::string ProcessLine(const DaemonStats& stats) {
  return absl::StrCat(
      "  process  ", BytesText(stats.rss_bytes), " resident, ", stats.threads, " threads, ",
      BytesText(stats.memory_available_bytes), " available, cgroup ",
      Printable(stats.cgroup_version), " ",
      stats.cgroup_limit_bytes == 0 ? "without limit" : BytesText(stats.cgroup_limit_bytes), "\n");
}

std::string DataLine(const DaemonStats& stats) {
  return absl::StrCat("  data     ", stats.data_channels,
                      stats.data_channels == 1 ? " client" : " clients", " over shared memory\n");
}

// Nothing where no sequence was ever attached.
std::string ResidentLine(const ResidentStats& residents) {
  const uint64_t blocks = residents.hit_blocks + residents.miss_blocks;
  const uint64_t troubles = residents.overflows + residents.violations + residents.log_losses;
  if (residents.sequences + blocks + troubles == 0) return "";
  std::string text =
      absl::StrCat("\n  resident ", CountText(residents.sequences), " attached, hits ",
                   ShareText(static_cast<double>(residents.hit_blocks), blocks), " since start");
  if (troubles > 0) {
    absl::StrAppend(&text, "; ", CountText(residents.overflows), " overflows, ",
                    CountText(residents.violations), " violations, ",
                    CountText(residents.log_losses), " log losses");
  }
  return text + "\n";
}

std::string HostLine(const DaemonStats& stats) {
  return absl::StrCat("  host     ", stats.numa_nodes, " NUMA node",
                      stats.numa_nodes == 1 ? "" : "s", ", huge pages for the pool: ",
                      stats.shmem_huge_pages.empty() ? "none" : Printable(stats.shmem_huge_pages),
                      ", ", CountText(stats.huge_pages_total), " reserved\n");
}

std::string StepsText(const StepCounters& counters) {
  if (counters.kv_bytes_full == 0) return "no attention";
  const uint64_t blocks = counters.cache_hit_blocks + counters.cache_miss_blocks;
  return absl::StrCat(
      PercentText(KvBytesReadRatio(counters)), " of KV bytes read",
      blocks == 0 ? "" : absl::StrCat(", hit ratio ", PercentText(HitRatio(counters))),
      counters.moved_to_estimation == 0
          ? ""
          : absl::StrCat(", ", CountText(counters.moved_to_estimation),
                         " clusters moved to estimation"));
}

std::string Clipped(const std::string& text) {
  std::string safe = Printable(text);
  if (DisplayWidth(safe) <= kLabelColumnsMax) return safe;
  // Cut before a character, never within one.
  size_t bytes = 0;
  for (size_t width = 0; bytes < safe.size(); ++bytes) {
    const bool starts = (static_cast<unsigned char>(safe[bytes]) & 0xc0u) != 0x80u;
    if (starts && ++width == kLabelColumnsMax) break;
  }
  return safe.substr(0, bytes) + "…";
}

std::string OwnerText(const SequenceSummary& sequence) {
  std::string text = Clipped(sequence.client_name);
  if (text.empty()) text = "–";
  if (sequence.pinned) absl::StrAppend(&text, ", pinned");
  if (sequence.ttl_ms > 0) absl::StrAppend(&text, ", ttl ", DurationText(sequence.ttl_ms));
  if (sequence.wave_buffer) absl::StrAppend(&text, ", wave buffer");
  if (sequence.attached) absl::StrAppend(&text, ", attached");
  return text;
}

// What changed between two readings of a counter; a restart makes it smaller.
uint64_t Delta(uint64_t before, uint64_t now) { return now < before ? now : now - before; }

StepCounters Delta(const StepCounters& before, const StepCounters& now) {
  StepCounters delta;
  delta.retrieved_clusters = Delta(before.retrieved_clusters, now.retrieved_clusters);
  delta.moved_to_estimation = Delta(before.moved_to_estimation, now.moved_to_estimation);
  delta.kv_bytes_read = Delta(before.kv_bytes_read, now.kv_bytes_read);
  delta.kv_bytes_full = Delta(before.kv_bytes_full, now.kv_bytes_full);
  delta.cache_hit_blocks = Delta(before.cache_hit_blocks, now.cache_hit_blocks);
  delta.cache_miss_blocks = Delta(before.cache_miss_blocks, now.cache_miss_blocks);
  return delta;
}

// RPC names with their rate per second, busiest first; heartbeats and our own reading left out.
std::string RatesText(const DaemonStats& before, const DaemonStats& now, uint64_t interval_ms) {
  std::vector<std::pair<double, std::string>> rates;
  for (const auto& [name, count] : now.calls) {
    if (name == "Heartbeat" || name == "GetStats" || name == "ListSequences") continue;
    const auto it = before.calls.find(name);
    const uint64_t delta = Delta(it == before.calls.end() ? 0 : it->second, count);
    if (delta == 0) continue;
    rates.emplace_back(1000.0 * static_cast<double>(delta) / static_cast<double>(interval_ms),
                       Printable(name));
  }
  if (rates.empty()) return "idle";
  std::sort(rates.rbegin(), rates.rend());
  std::vector<std::string> parts;
  for (const auto& [rate, name] : rates) {
    parts.push_back(absl::StrFormat("%s %.1f/s", name, rate));
  }
  return absl::StrJoin(parts, ", ");
}

}  // namespace

std::string StatusText(const std::string& address, const DaemonStats& stats) {
  std::string text = absl::StrCat(DaemonLine(address, stats), PoolLines(stats), ProcessLine(stats),
                                  DataLine(stats), HostLine(stats), "  steps    ",
                                  StepsText(stats.counters), " since start\n");
  Table tenants(
      {{"tenant", Align::kLeft}, {"sequences"}, {"clients"}, {"reserved"}, {"payload"}, {"limit"}});
  for (const TenantStats& tenant : stats.tenants) {
    tenants.Add({Clipped(tenant.tenant), CountText(tenant.sequences), CountText(tenant.clients),
                 BytesText(tenant.reserved_bytes), BytesText(tenant.payload_bytes),
                 BytesText(tenant.bytes_max)});
  }
  if (!tenants.empty()) absl::StrAppend(&text, "\n", tenants.Render(2));
  Table buffers({{"wave buffer", Align::kLeft},
                 {"backend", Align::kLeft},
                 {"state", Align::kLeft},
                 {"used"},
                 {"of"},
                 {"hits"},
                 {"admitted"}});
  for (const WaveBufferStats& buffer : stats.wave_buffers) {
    const uint64_t blocks = buffer.cache_hit_blocks + buffer.cache_miss_blocks;
    buffers.Add({Clipped(buffer.device_uuid), Clipped(buffer.backend),
                 absl::StrCat(buffer.connected ? "connected" : "away",
                              buffer.pinned ? ", pinned" : ", pageable"),
                 BytesText(buffer.bytes_used), BytesText(buffer.bytes_max),
                 ShareText(static_cast<double>(buffer.cache_hit_blocks), blocks),
                 CountText(buffer.admitted_blocks)});
  }
  if (!buffers.empty()) absl::StrAppend(&text, "\n", buffers.Render(2));
  absl::StrAppend(&text, ResidentLine(stats.residents));
  std::vector<std::string> calls;
  for (const auto& [name, count] : stats.calls) {
    if (count > 0) calls.push_back(absl::StrCat(Printable(name), " ", CountText(count)));
  }
  if (!calls.empty()) absl::StrAppend(&text, "\n  calls    ", absl::StrJoin(calls, ", "), "\n");
  return text;
}

std::string SequencesText(const std::vector<SequenceSummary>& sequences, size_t rows_max) {
  Table table({{"id"},
               {"label", Align::kLeft},
               {"model", Align::kLeft},
               {"tokens"},
               {"clustered"},
               {"payload"},
               {"index"},
               {"bytes read"},
               {"hits"},
               {"idle"},
               {"owner", Align::kLeft}});
  const size_t shown = std::min(rows_max, sequences.size());
  for (size_t i = 0; i < shown; ++i) {
    const SequenceSummary& sequence = sequences[i];
    const StepCounters& counters = sequence.counters;
    const uint64_t blocks = counters.cache_hit_blocks + counters.cache_miss_blocks;
    table.Add({absl::StrCat(sequence.id), Clipped(sequence.label), Clipped(sequence.shape.model_id),
               CountText(sequence.token_count),
               ShareText(static_cast<double>(sequence.clustered_tokens), sequence.token_count),
               BytesText(sequence.payload_bytes), BytesText(sequence.index_bytes),
               ShareText(static_cast<double>(counters.kv_bytes_read), counters.kv_bytes_full),
               ShareText(static_cast<double>(counters.cache_hit_blocks), blocks),
               DurationText(sequence.idle_ms), OwnerText(sequence)});
  }
  std::string text = table.Render();
  if (shown < sequences.size()) {
    absl::StrAppend(&text, "... and ", CountText(sequences.size() - shown), " more\n");
  }
  return text;
}

std::string TopText(const std::string& address, const Snapshot* before, const Snapshot& now,
                    uint64_t interval_ms, size_t rows_max) {
  std::string text = absl::StrCat(DaemonLine(address, now.stats), PoolLines(now.stats));
  std::vector<SequenceSummary> sequences = now.sequences;
  if (before != nullptr && interval_ms > 0) {
    absl::StrAppend(&text, "  now      ", RatesText(before->stats, now.stats, interval_ms),
                    "\n  steps    ", StepsText(Delta(before->stats.counters, now.stats.counters)),
                    "\n");
    for (SequenceSummary& sequence : sequences) {
      const auto it = std::find_if(before->sequences.begin(), before->sequences.end(),
                                   [&](const auto& old) { return old.id == sequence.id; });
      if (it != before->sequences.end()) {
        sequence.counters = Delta(it->counters, sequence.counters);
      }
    }
  }
  std::stable_sort(sequences.begin(), sequences.end(), [](const auto& a, const auto& b) {
    return a.counters.kv_bytes_read > b.counters.kv_bytes_read;
  });
  absl::StrAppend(&text, "\n");
  if (!sequences.empty()) absl::StrAppend(&text, SequencesText(sequences, rows_max));
  return text;
}

}  // namespace wavekv::client
