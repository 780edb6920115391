// The daemons' side of attachments, in the test's own process: a wave buffer on a device, whose
// descriptor is had for a ticket, with regions in it, and windows of a block pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "client/gpu/resident_attachment.h"
#include "gpu/driver/device.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/random.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/kernels/region_writer.h"

namespace wavekv::client {

// What fails ends the test's process. Not thread-safe.
class RegionHost {
 public:
  RegionHost(std::shared_ptr<const CudaDevice> device, uint64_t buffer_bytes);

  // Puts the region behind those that are there; the image's header says which sequence it is.
  ResidentAttachment Attach(gpu::RegionImage& image, const ModelShape& shape);

  // At an offset of the buffer.
  template <typename T>
  T Read(uint64_t offset) const {
    T value;
    Copy(offset, reinterpret_cast<std::byte*>(&value), sizeof(T), false);
    return value;
  }
  template <typename T>
  void Write(uint64_t offset, T value) {
    Copy(offset, reinterpret_cast<std::byte*>(&value), sizeof(T), true);
  }
  void WriteBytes(uint64_t offset, std::vector<std::byte> bytes) {
    Copy(offset, bytes.data(), bytes.size(), true);
  }

  // Descriptors handed out, and how many of those who have one still hold the connection.
  int redeemed() const { return *redeemed_; }
  int held() const { return *held_; }
  // Hands out no more.
  void Stop() { server_.reset(); }

 private:
  class Holder;
  void Copy(uint64_t offset, std::byte* data, uint64_t bytes, bool in) const;

  const std::shared_ptr<const CudaDevice> device_;
  const std::shared_ptr<const SharedAllocation> allocation_;
  const std::unique_ptr<DeviceMapping> mapping_;
  const std::unique_ptr<DeviceStream> stream_;
  uint64_t used_ = 0;
  std::vector<Mapping> windows_;  // Written once, then sealed.

  TempDir directory_;
  const std::string ticket_ = RandomSecret();
  const std::shared_ptr<std::atomic<int>> redeemed_ = std::make_shared<std::atomic<int>>(0);
  const std::shared_ptr<std::atomic<int>> held_ = std::make_shared<std::atomic<int>>(0);
  std::unique_ptr<DescriptorServer> server_;  // Last: its thread uses the rest.
};

// As the model of random heads: `layers` of `kv_heads`, each of `group` query heads.
ModelShape ShapeOf(gpu::RegionImage& image, uint32_t group, float scale);

}  // namespace wavekv::client
