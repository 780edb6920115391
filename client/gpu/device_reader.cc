#include "client/gpu/device_reader.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {

absl::StatusOr<std::unique_ptr<DeviceReader>> DeviceReader::Open(const std::string& device_uuid,
                                                                 HeldDescriptor held,
                                                                 uint64_t bytes) {
  WAVEKV_ASSIGN_OR_RETURN(auto driver, CudaDriver::Get());
  WAVEKV_ASSIGN_OR_RETURN(const CudaDevice::Identity identity,
                          CudaDevice::FindByUuid(*driver, device_uuid));
  WAVEKV_ASSIGN_OR_RETURN(
      auto device, CudaDevice::Open(std::move(driver), identity, CudaDevice::Waiting::kAsItIs));
  WAVEKV_ASSIGN_OR_RETURN(auto stream, DeviceStream::Create(device));
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<const SharedAllocation> allocation,
                          SharedAllocation::Import(std::move(device), held.fd.get(), bytes));
  WAVEKV_ASSIGN_OR_RETURN(auto mapping,
                          DeviceMapping::Map(std::move(allocation), DeviceMapping::kReadOnly));
  return std::unique_ptr<DeviceReader>(
      new DeviceReader(std::move(held.connection), std::move(mapping), std::move(stream)));
}

DeviceReader::DeviceReader(FdSocket held, std::unique_ptr<DeviceMapping> mapping,
                           std::unique_ptr<DeviceStream> stream)
    : held_(std::move(held)), mapping_(std::move(mapping)), stream_(std::move(stream)) {}

absl::Status DeviceReader::Read(std::span<const Piece> pieces) const {
  MutexLock lock(&mutex_);
  absl::Status status;
  for (size_t i = 0; i < pieces.size() && status.ok(); ++i) {
    status =
        stream_->CopyOut(pieces[i].target, mapping_->address() + pieces[i].offset, pieces[i].bytes);
  }
  // Whatever was queued must not write behind our back.
  const absl::Status done = stream_->Synchronise();
  status.Update(done);
  if (status.ok()) return status;
  return absl::UnavailableError(
      absl::StrCat("the wave buffer's device failed: ", status.message()));
}

}  // namespace wavekv::client
