// What a client gets when it attaches a sequence to attend over it on the device itself: where its
// region lies, and the block pool's memory that its index points into. Owned by whoever holds it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "storage/base/ids.h"
#include "storage/base/model_shape.h"
#include "storage/base/unique_fd.h"

namespace wavekv::client {

// An arena of the block pool: a sealed memfd. To be mapped and registered read-only.
struct PoolWindow {
  UniqueFd fd;
  uint64_t bytes = 0;
};

struct ResidentAttachment {
  SequenceId sequence;
  ModelShape shape;
  uint64_t max_tokens = 0;
  // The tenant's wave buffer; equal tickets are of the same one.
  std::string device_uuid;
  std::string socket;
  std::string ticket;
  uint64_t buffer_bytes = 0;
  // The sequence's part of it: gpu/resident/resident_layout.h.
  uint64_t region_offset = 0;
  uint64_t region_bytes = 0;
  std::vector<PoolWindow> windows;  // SegmentEntry.window is an index here.
  uint64_t token_count = 0;         // On the device when it was attached.
  uint32_t ring_rows = 0;           // Exact tokens that the region holds.
};

}  // namespace wavekv::client
