#include "gpu/device_buffer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv {
namespace {

class DeviceBuffer : public BufferMemory {
 public:
  DeviceBuffer(std::shared_ptr<DeviceCopier> copier, std::unique_ptr<DeviceMapping> mapping)
      : copier_(std::move(copier)), mapping_(std::move(mapping)) {}

  uint64_t bytes() const override { return mapping_->bytes(); }

  absl::Status Write(std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word) override {
    return Explain(copier_->Write(mapping_->address(), copies, word));
  }

  absl::Status Zero(uint64_t offset, uint64_t bytes) override {
    return Explain(copier_->Zero(mapping_->address(), offset, bytes));
  }

  absl::Status Scatter(std::span<const BufferEntry> entries,
                       std::span<const BufferWord> words) override {
    return Explain(copier_->Scatter(mapping_->address(), entries, words));
  }

  absl::Status Read(std::span<const ByteRead> pieces) override {
    return Explain(copier_->Read(mapping_->address(), pieces));
  }

 private:
  static absl::Status Explain(const absl::Status& status) {
    if (status.ok() || absl::IsResourceExhausted(status)) return status;
    return absl::UnavailableError(absl::StrCat(
        "the wave buffer's device failed; if that lasts, restart wavekvd: ", status.message()));
  }

  const std::shared_ptr<DeviceCopier> copier_;
  const std::unique_ptr<DeviceMapping> mapping_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<DeviceCopier>> DeviceCopierCache::Get(
    const std::string& device_uuid) {
  MutexLock lock(&mutex_);
  if (copier_ != nullptr && copier_->device()->identity().uuid == device_uuid) return copier_;
  WAVEKV_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Identity identity,
                          CudaDevice::FindByUuid(*driver, device_uuid));
  WAVEKV_ASSIGN_OR_RETURN(auto device, CudaDevice::Open(std::move(driver), identity));
  copier_ =
      std::make_shared<DeviceCopier>(std::move(device), DeviceCopier::OptionsForThisMachine());
  return copier_;
}

absl::StatusOr<std::unique_ptr<BufferMemory>> MapDeviceBuffer(std::shared_ptr<DeviceCopier> copier,
                                                              int fd, uint64_t bytes) {
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<const SharedAllocation> allocation,
                          SharedAllocation::Import(copier->device(), fd, bytes));
  WAVEKV_ASSIGN_OR_RETURN(auto mapping,
                          DeviceMapping::Map(std::move(allocation), DeviceMapping::kReadWrite));
  return std::make_unique<DeviceBuffer>(std::move(copier), std::move(mapping));
}

}  // namespace wavekv
