#include "client/gpu/region_view.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "client/gpu/resident_shape.h"
#include "gpu/resident/resident_layout.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

using resident::PublishedHead;
using resident::ResidentHeader;

template <typename T>
absl::Status Read(DeviceStream* stream, cuda::DevicePointer from, T* to) {
  WAVEKV_RETURN_IF_ERROR(stream->CopyOut(reinterpret_cast<std::byte*>(to), from, sizeof(T)));
  return stream->Synchronise();
}

}  // namespace

absl::StatusOr<RegionView> ViewRegion(const ResidentModel& model,
                                      const ResidentAttachment& attachment,
                                      std::shared_ptr<const CudaDevice> device,
                                      cuda::DevicePointer address) {
  WAVEKV_ASSIGN_OR_RETURN(const auto stream, DeviceStream::Create(std::move(device)));
  ResidentHeader header;
  WAVEKV_RETURN_IF_ERROR(Read(stream.get(), address, &header));
  WAVEKV_RETURN_IF_ERROR(CheckRegion(model, attachment, header));
  RegionView view{.steady_first = std::numeric_limits<uint64_t>::max(),
                  .ring_rows = header.unit.ring_rows};
  for (uint32_t layer = 0; layer < header.layer_count; ++layer) {
    // All heads of a layer are published together. The version that is current may be replaced
    // while we look: the one before it covers less, which is safe.
    const uint64_t unit = uint64_t{layer} * header.kv_head_count;
    gpu::HeadState state;
    WAVEKV_RETURN_IF_ERROR(
        Read(stream.get(), address + header.states_offset + unit * sizeof(state), &state));
    PublishedHead published;
    WAVEKV_RETURN_IF_ERROR(Read(stream.get(),
                                address + header.units_offset + unit * header.unit.unit_bytes +
                                    header.unit.published_offset +
                                    state.published % resident::kAreas * sizeof(PublishedHead),
                                &published));
    view.steady_first = std::min(view.steady_first, published.steady_first);
  }
  return view;
}

}  // namespace wavekv::client
