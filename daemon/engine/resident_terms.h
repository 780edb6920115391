// What goes into and comes out of attaching a sequence to a resident region
// (docs/decisions/015-resident-region.md).
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "daemon/engine/types.h"
#include "index/backend/resident.h"
#include "index/backend/stager.h"
#include "storage/base/latency_histogram.h"
#include "storage/base/mutex.h"
#include "storage/base/unique_fd.h"
#include "storage/block_pool.h"

namespace wavekv {

// The process whose kernels step over an attached sequence: whoever first took a descriptor of its
// windows. While that is nobody, no kernel can be at work. Thread-safe.
class ResidentProcess {
 public:
  // A process takes a descriptor. FailedPrecondition: the attachment has ended, another process has
  // it, or the kernel has no pidfd of this one (`pidfd` is invalid), so that its end would go
  // unnoticed.
  absl::Status Bind(int64_t pid, UniqueFd pidfd);
  // Nobody binds to it any more.
  void Close();
  // It was there and is dead.
  bool Died() const;
  // Dead, or there never was one.
  bool Gone() const;

 private:
  mutable Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t pid_ ABSL_GUARDED_BY(mutex_) = 0;
  UniqueFd pidfd_ ABSL_GUARDED_BY(mutex_);  // Invalid: nobody's.
};

// What a client needs to step over its sequence on the device.
struct ResidentGrant {
  SequenceStatus sequence;  // Its token count is what the region was loaded with.
  WaveBufferAccess buffer;
  ResidentPlace place;
  uint32_t ring_rows = 0;
  std::vector<std::shared_ptr<const Arena>> windows;  // ResidentSegment.window is an index here.
  std::shared_ptr<ResidentProcess> process;           // To be bound before a window is handed out.
};

// How an attachment is doing.
struct ResidentState {
  Generation generation;
  absl::Status attached;      // OK: it is. Else why it is not, or not any more.
  uint64_t token_count = 0;   // Copied out, by every layer.
  uint64_t steady_first = 0;  // Positions before it are clustered, in every layer's shown version.
  ResidentCounters counters;
};

// For EngineStats.
struct ResidentStats {
  uint32_t attached = 0;
  ResidentCounters counters;          // Since start.
  LatencyHistogram::Snapshot rounds;  // Likewise: each over all that are attached.
};

ResidentCounters& operator+=(ResidentCounters& sum, const ResidentCounters& other);

}  // namespace wavekv
