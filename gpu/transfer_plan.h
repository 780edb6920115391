// How scattered bytes of ours reach a device: gathered into a staging area, then moved by as few
// transfers as their targets allow. A pure function.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "gpu/buffer_memory.h"

namespace wavekv {

// What goes through the staging area at once.
struct TransferBatch {
  struct Gather {
    const std::byte* source = nullptr;  // Null: zeroes.
    uint64_t staged_at = 0;             // Where in the staging area.
    uint64_t bytes = 0;
  };
  struct Transfer {
    uint64_t staged_at = 0;
    uint64_t offset = 0;  // Where in the buffer.
    uint64_t bytes = 0;
  };
  std::vector<Gather> gathers;
  std::vector<Transfer> transfers;
};

// Copies whose targets follow one another by less than kRowAlignBytes go together, zeroes between
// them, so that what was staged there before goes nowhere. No gather is longer than
// `gather_bytes_max`. Both limits are at least kRowAlignBytes.
std::vector<TransferBatch> PlanTransfers(std::span<const ByteCopy> copies, uint64_t staging_bytes,
                                         uint64_t gather_bytes_max);

}  // namespace wavekv
