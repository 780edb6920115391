// Clusters of freshly made keys, found on the device in the engine's own stream, for the daemon's
// index (docs/decisions/016-index-built-on-the-gpu.md).
//
//   auto labeller = wavekv::client::KeyLabeller::Create(kv_heads, head_dim, dtype);
//   auto plan = sequence->PlanIndex(layer, token_count);       // once the prompt is in
//   auto labels = (*labeller)->Launch(keys, *plan, stream);    // behind what made the keys
//   ...                                                        // other layers
//   sequence->GiveLabels(layer, *(*labels)->Wait());           // then Insert, then BuildIndex
//
// Built where the CUDA Toolkit is found: wavekv::client_gpu.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_batch.h"
#include "client/gpu/segment_labels.h"
#include "storage/base/dtype.h"

namespace wavekv::client {

// Keys [kv_heads, token_count, head_dim] of one layer in device memory. The elements of a key lie
// in a row. Strides are in elements and multiples of 8; `data` is aligned to 16 bytes.
struct DeviceKeys {
  const void* data = nullptr;
  int device = 0;
  uint64_t head_stride = 0;
  uint64_t token_stride = 0;
  uint64_t first_position = 0;  // Of the first token.
  uint64_t token_count = 0;
};

// What one launch labels. Used by one thread at a time; may outlive its labeller. Labels that
// nobody waited for may be let go of: their memory is used again, or freed, when the device has
// made them.
class KeyLabels {
 public:
  // Waits for nothing, but where the labeller is gone: then for the device, if it is not so far.
  ~KeyLabels();
  KeyLabels(const KeyLabels&) = delete;
  KeyLabels& operator=(const KeyLabels&) = delete;

  size_t segment_count() const;
  // Whether Wait would return at once.
  bool Ready() const;
  // As Sequence::GiveLabels takes them, once the stream has come so far. The labels are there until
  // this object goes. Unavailable: CUDA failed, with its own words.
  absl::StatusOr<std::vector<SegmentLabels>> Wait() const;

 private:
  friend class KeyLabeller;
  struct Impl;
  explicit KeyLabels(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

// Thread-safe. The last of a labeller and its labels to go frees their memory, and waits for the
// device to be through with it.
class KeyLabeller {
 public:
  // Launches whose labels are held, and those that were let go of before the device made them.
  static constexpr size_t kLaunchesMax = 64;

  // InvalidArgument: no kernel does it; head_dim is 64, 128 or 256, dtype bf16 or f16.
  static absl::StatusOr<std::unique_ptr<KeyLabeller>> Create(uint32_t kv_head_count,
                                                             uint32_t head_dim, DType dtype);
  ~KeyLabeller();

  uint32_t kv_head_count() const;
  uint32_t head_dim() const;
  DType dtype() const;

  // Whether there is a kernel for such a segment: up to 8,192 tokens and 512 clusters.
  static bool Takes(const PlannedSegment& segment);

  // Queues k-means of those segments that it takes and that lie in the keys, and the copy of their
  // labels, in `stream`. The keys must stay until the stream has passed. Not in a captured stream.
  //
  // Waits for nothing but its own allocations, for which CUDA waits for the device: where no
  // earlier launch has left a workspace, or one that is too small. With n = segments times heads
  // that is
  //   n * 56 + 2 * labels                       bytes on the device, as many in locked memory, and
  //   min(n, 128) * (1,028 * head_dim + 2,048)  on the device.
  //
  // InvalidArgument: strides or alignment. ResourceExhausted: no memory, or kLaunchesMax.
  // Unavailable: CUDA failed; what was queued by then has run, or never will.
  absl::StatusOr<std::unique_ptr<KeyLabels>> Launch(const DeviceKeys& keys,
                                                    std::span<const PlannedSegment> segments,
                                                    CudaStream stream);

 private:
  friend class KeyLabels;
  struct Impl;
  explicit KeyLabeller(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

}  // namespace wavekv::client
