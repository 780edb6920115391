#include "client/gpu/open_sequence.h"

#include "absl/strings/str_cat.h"
#include "client/gpu/region_view.h"
#include "client/gpu/resident_shape.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

absl::Status CheckPlace(const ResidentAttachment& attachment, const CudaDevice& device) {
  if (attachment.device_uuid != device.identity().uuid) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the wave buffer of sequence ", attachment.sequence.value(), " lies on ",
        attachment.device_uuid, ", this batch on ", device.identity().uuid,
        "; make the batch while that device is current (cudaSetDevice, torch.cuda.set_device)"));
  }
  if (attachment.region_offset % resident::kAlignBytes != 0 ||
      attachment.region_offset > attachment.buffer_bytes ||
      attachment.region_bytes > attachment.buffer_bytes - attachment.region_offset ||
      attachment.region_bytes < sizeof(resident::ResidentHeader)) {
    return absl::DataLossError(absl::StrCat(
        "the daemon put a region of ", attachment.region_bytes, " bytes at ",
        attachment.region_offset, " of a wave buffer of ", attachment.buffer_bytes, " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::shared_ptr<OpenSequence>> OpenSequence::Open(
    const ResidentModel& model, std::shared_ptr<const CudaDevice> device, MappingCache* cache,
    const ResidentAttachment& attachment, std::chrono::milliseconds timeout) {
  WAVEKV_RETURN_IF_ERROR(CheckAttachment(model, attachment));
  WAVEKV_RETURN_IF_ERROR(CheckPlace(attachment, *device));
  std::shared_ptr<OpenSequence> open(new OpenSequence(device));
  WAVEKV_ASSIGN_OR_RETURN(open->buffer_, cache->Buffer(attachment, timeout));
  const cuda::DevicePointer region = open->buffer_->address() + attachment.region_offset;
  WAVEKV_ASSIGN_OR_RETURN(const RegionView view, ViewRegion(model, attachment, device, region));
  std::vector<gpu::ResolveWindow> windows;
  for (const PoolWindow& window : attachment.windows) {
    WAVEKV_ASSIGN_OR_RETURN(auto registered, cache->Window(window));
    windows.push_back({reinterpret_cast<const char*>(registered->address()), window.bytes});
    open->windows_.push_back(std::move(registered));
  }
  const CudaDevice::Current current(*device);
  WAVEKV_RETURN_IF_ERROR(current.status());
  WAVEKV_ASSIGN_OR_RETURN(open->device_windows_,
                          gpu::DeviceArray<gpu::ResolveWindow>::Copy(windows));
  open->entry_ = {.region = reinterpret_cast<char*>(region),
                  .region_bytes = attachment.region_bytes,
                  .windows = open->device_windows_.data(),
                  .sequence_id = attachment.sequence.value(),
                  .window_count = static_cast<uint32_t>(windows.size())};
  open->ledger_ = std::make_unique<TokenLedger>(attachment.token_count, view.steady_first,
                                                view.ring_rows, attachment.max_tokens);
  return open;
}

OpenSequence::~OpenSequence() {
  const CudaDevice::Current current(*device_);
  device_windows_ = {};
}

}  // namespace wavekv::client
