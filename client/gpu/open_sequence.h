// A sequence that a ResidentBatch has opened. Internal to the SDK.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/mapping_cache.h"
#include "client/gpu/resident_attachment.h"
#include "client/gpu/resident_batch.h"
#include "client/gpu/token_ledger.h"
#include "gpu/driver/device.h"
#include "gpu/kernels/device_array.h"
#include "gpu/kernels/resolve_head.h"

namespace wavekv::client {

class OpenSequence {
 public:
  // Errors as ResidentBatch::Open has them.
  static absl::StatusOr<std::shared_ptr<OpenSequence>> Open(
      const ResidentModel& model, std::shared_ptr<const CudaDevice> device, MappingCache* cache,
      const ResidentAttachment& attachment, std::chrono::milliseconds timeout);
  // Waits for the device, as freeing its memory does. No token that is queued may attend over it.
  ~OpenSequence();
  OpenSequence(const OpenSequence&) = delete;
  OpenSequence& operator=(const OpenSequence&) = delete;

  uint64_t id() const { return entry_.sequence_id; }
  // What the resolve kernel is told, but for the tag.
  const gpu::ResolveEntry& entry() const { return entry_; }
  const CudaDevice* device() const { return device_.get(); }
  // For its batch, which guards it.
  TokenLedger& ledger() { return *ledger_; }

 private:
  explicit OpenSequence(std::shared_ptr<const CudaDevice> device) : device_(std::move(device)) {}

  const std::shared_ptr<const CudaDevice> device_;
  std::shared_ptr<const MappedBuffer> buffer_;
  std::vector<std::shared_ptr<const RegisteredMemory>> windows_;
  gpu::DeviceArray<gpu::ResolveWindow> device_windows_;
  gpu::ResolveEntry entry_ = {};
  std::unique_ptr<TokenLedger> ledger_;
};

}  // namespace wavekv::client
