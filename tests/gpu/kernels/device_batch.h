// A batch of random heads on the device, and the step over it.
#pragma once

#include <memory>
#include <random>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/step_launch.h"
#include "tests/gpu/kernels/head_problem.h"

namespace wavekv::gpu {

struct CacheSpec {
  double cached = 0.5;       // Share of the blocks that lie in a slot.
  double free_per_miss = 1;  // Free slots, that held nothing, for each block that does not.
  bool hostile = false;      // Entries of the table and the free ring that are no slots.
};

// One head on the device.
class DeviceHead {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceHead>> Make(const HeadProblem& head,
                                                          const CacheSpec& cache,
                                                          std::mt19937_64& random);

  const HeadDescriptor& descriptor() const { return descriptor_; }
  absl::StatusOr<HeadState> State() const;
  absl::StatusOr<std::vector<int32_t>> BlockSlots() const { return block_slots_.Download(); }
  absl::StatusOr<std::vector<uint16_t>> Slots() const { return slots_.Download(); }
  absl::StatusOr<std::vector<BlockUse>> Log() const { return log_.Download(); }
  // The ring of offers: the offer of place p is entry p % free_capacity.
  absl::StatusOr<std::vector<FreeSlot>> FreeSlots() const { return free_slots_.Download(); }
  // Between steps: offers the slots of a share of the cached blocks, as the manager does: the
  // blocks are named and stay in the table.
  absl::Status OfferCached(double share, std::mt19937_64& random);

 private:
  absl::Status UploadIndex(const HeadProblem& head);
  absl::Status UploadPool(const HeadProblem& head);
  absl::Status UploadCache(const HeadProblem& head, const CacheSpec& cache,
                           std::mt19937_64& random);

  HeadDescriptor descriptor_ = {};
  DeviceArray<uint16_t> sink_keys_, sink_values_, steady_keys_, steady_values_, slots_;
  DeviceArray<int8_t> centroids_, value_means_;
  DeviceArray<float> centroid_scales_, value_scales_, key_spreads_, value_spreads_, means_;
  DeviceArray<uint16_t> sizes_, cluster_segment_;
  DeviceArray<uint32_t> first_row_, first_block_;
  DeviceArray<FreeSlot> free_slots_;
  DeviceArray<SegmentCopy> segments_;
  DeviceArray<int32_t> block_slots_;
  DeviceArray<BlockUse> log_;
  DeviceArray<HeadState> state_;
  PinnedArray<uint16_t> pool_;
};

// What a step produced for all units.
struct StepResults {
  std::vector<float> out;  // [units, group, dim]
  std::vector<float> lse;  // [units, group]
  std::vector<UnitCounts> counts;
  std::vector<BlockRef> blocks;
  std::vector<std::vector<uint32_t>> retrieved;  // [units]
};

class DeviceBatch {
 public:
  // `heads` [batch * kv_heads]; a null entry of `present` [batch] is an empty sequence.
  static absl::StatusOr<std::unique_ptr<DeviceBatch>> Make(const StepShape& shape,
                                                           std::span<const HeadProblem> heads,
                                                           const std::vector<bool>& present,
                                                           const CacheSpec& cache,
                                                           std::mt19937_64& random);

  // Sets the queries [units, group, dim] and the appended rows [units, dim]; empty: nothing
  // appended.
  absl::Status SetInputs(const std::vector<uint16_t>& queries, const std::vector<uint16_t>& keys,
                         const std::vector<uint16_t>& values);
  // One step over poisoned outputs; through a captured graph when `graph`.
  absl::StatusOr<StepResults> Run(bool graph);

  const DeviceHead& head(uint32_t unit) const { return *heads_[unit]; }
  DeviceHead& mutable_head(uint32_t unit) { return *heads_[unit]; }
  const Step& step() const { return step_; }
  // Publishes `sequence` as being written (odd version) or not.
  absl::Status SetVersion(uint32_t sequence, uint32_t version);

 private:
  absl::Status Execute(bool graph);

  Step step_;
  std::vector<std::unique_ptr<DeviceHead>> heads_;
  std::vector<SequenceDescriptor> live_host_;
  DeviceArray<HeadDescriptor> descriptors_;
  DeviceArray<SequenceDescriptor> live_;
  DeviceArray<uint16_t> queries_, new_keys_, new_values_, out_;
  DeviceArray<float> lse_;
  DeviceArray<char> workspace_;
};

}  // namespace wavekv::gpu
