#include "gpu/resident/closing_region.h"

#include <cstddef>
#include <utility>

#include "storage/base/log.h"
#include "storage/base/status_macros.h"

namespace wavekv::resident {

absl::StatusOr<std::vector<gpu::HeadState>> ReadStates(BufferMemory& memory, uint64_t region_offset,
                                                       const ResidentHeader& header,
                                                       uint32_t first_unit, uint32_t count) {
  std::vector<gpu::HeadState> states(count);
  const ByteRead piece{
      region_offset + header.states_offset + uint64_t{first_unit} * sizeof(gpu::HeadState),
      reinterpret_cast<std::byte*>(states.data()), count * sizeof(gpu::HeadState)};
  WAVEKV_RETURN_IF_ERROR(memory.Read({&piece, 1}));
  return states;
}

ClosingRegion::ClosingRegion(BufferMemory& memory, const RegionPlace& place,
                             const ResidentHeader& header, std::function<bool()> engine_is_gone,
                             std::vector<std::shared_ptr<const void>> kept)
    : memory_(memory),
      place_(place),
      header_(header),
      engine_is_gone_(std::move(engine_is_gone)),
      kept_(std::move(kept)) {}

absl::StatusOr<bool> ClosingRegion::StepsAreOver() {
  const uint32_t units = header_.layer_count * header_.kv_head_count;
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<gpu::HeadState> states,
                          ReadStates(memory_, place_.offset, header_, 0, units));
  const bool first = epochs_.empty();
  bool over = true;
  for (uint32_t unit = 0; unit < units; ++unit) {
    if (first) epochs_.push_back(states[unit].started);
    over = over && states[unit].completed_epoch >= epochs_[unit];
  }
  if (first && !over) {
    Log(LogLevel::kInfo, "resident_region_waits",
        {{"sequence", header_.sequence_id}, {"bytes", place_.bytes}});
  }
  return over;
}

absl::StatusOr<bool> ClosingRegion::TryWipe() {
  // The driver tears a process' kernels down before the process can be waited for.
  if (engine_is_gone_ == nullptr || !engine_is_gone_()) {
    WAVEKV_ASSIGN_OR_RETURN(const bool over, StepsAreOver());
    if (!over) return false;
  }
  const absl::Status wiped = memory_.Zero(place_.offset, place_.bytes);
  if (wiped.ok()) return true;
  Log(LogLevel::kWarning, "region_not_wiped",
      {{"sequence", header_.sequence_id}, {"bytes", place_.bytes}, {"error", wiped}});
  return wiped;
}

}  // namespace wavekv::resident
