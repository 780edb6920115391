// A resident region as the manager and as an engine map it: in host memory, or in that of the fake
// driver, which the manager reaches by DMA.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "gpu/buffer_layout.h"
#include "gpu/device_buffer.h"
#include "gpu/resident/resident_region.h"
#include "gpu/resident/unit_version.h"
#include "gpu/tenant_buffer.h"
#include "storage/base/check.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/gpu/resident/reference_step.h"
#include "tests/gpu/resident/test_sequence.h"
#include "tests/gpu/resident/turn_taking_memory.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {

inline constexpr SequenceId kResidentSequence{0x900000001};

enum class RegionMemory { kHost, kFakeDevice };

class RegionHarness {
 public:
  // In the buffer, beside the region.
  static constexpr uint64_t kSpareBytes = 64 << 10;
  static constexpr int kHelpers = 2;  // Threads of the manager's, beside the caller.

  RegionHarness(const ModelShape& shape, uint64_t max_tokens, const ResidentOptions& options,
                RegionMemory kind = RegionMemory::kHost)
      : header_(PlanResident(shape, max_tokens, options).value()) {
    const uint64_t bytes =
        AlignUp(TenantBuffer::BytesMin(4) + header_.region_bytes + kSpareBytes, uint64_t{2} << 20);
    std::unique_ptr<BufferMemory> memory =
        kind == RegionMemory::kHost ? MapHost(bytes) : MapFakeDevice(bytes);
    auto taking = std::make_unique<TurnTakingMemory>(std::move(memory), test::RunSeed());
    memory_ = taking.get();
    buffer_ = TenantBuffer::Create(std::move(taking), 4).value();
    sequence_ = CreateResidentRegion(buffer_, kResidentSequence, shape, max_tokens, options,
                                     std::make_shared<ThreadPool>(kHelpers, "region_test"))
                    .value();
  }

  ResidentSequence& manager() { return *sequence_; }
  std::unique_ptr<ResidentSequence>& owned() { return sequence_; }
  TenantBuffer& buffer() { return *buffer_; }
  // The manager's way to the buffer, between whose pieces an engine may have turns.
  TurnTakingMemory& memory() { return *memory_; }
  const ResidentHeader& header() const { return header_; }
  std::byte* region() { return engine_data_ + sequence_->place().region_offset; }
  gpu::HeadState* states() {
    return reinterpret_cast<gpu::HeadState*>(region() + header_.states_offset);
  }
  std::byte* unit(uint32_t number) {
    return region() + header_.units_offset + number * header_.unit.unit_bytes;
  }
  ReferenceStep Engine(const TestSequence& tokens) {
    return ReferenceStep(region(), tokens.windows(), tokens.shape().group_size(),
                         tokens.shape().softmax_scale);
  }

 private:
  std::unique_ptr<BufferMemory> MapHost(uint64_t bytes) {
    const UniqueFd fd = CreateMemfd("resident_region_test", bytes).value();
    Mapping mapping = Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value();
    // At one address for both sides: ThreadSanitizer knows memory by its address.
    engine_data_ = mapping.data();
    return MapHostBuffer(std::move(mapping));
  }
  // Its memory is a memfd.
  std::unique_ptr<BufferMemory> MapFakeDevice(uint64_t bytes) {
    WAVEKV_CHECK(UseFakeCuda(), "an engine on the host needs the fake driver's memory");
    const auto driver = CudaDriver::Get().value();
    const auto device = CudaDevice::Open(driver, CudaDevice::Identify(*driver, 0).value()).value();
    const auto allocation = SharedAllocation::Create(device, bytes).value();
    const UniqueFd fd = allocation->Export().value();
    engine_ = Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value();
    engine_data_ = engine_.data();
    DeviceCopierOptions options;
    options.staging_bytes = 64 << 10;
    auto memory =
        MapDeviceBuffer(std::make_shared<DeviceCopier>(device, options), fd.get(), bytes).value();
    WAVEKV_CHECK(memory->Zero(0, bytes).ok(), "the fake driver wipes");
    return memory;
  }

  const ResidentHeader header_;
  Mapping engine_;
  std::byte* engine_data_ = nullptr;
  TurnTakingMemory* memory_ = nullptr;
  std::shared_ptr<TenantBuffer> buffer_;
  std::unique_ptr<ResidentSequence> sequence_;
};

}  // namespace wavekv::resident
