// A resident region in host memory, as the manager and as an engine map it.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>

#include "gpu/resident/resident_region.h"
#include "gpu/tenant_buffer.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/resident/reference_step.h"
#include "tests/gpu/resident/test_sequence.h"

namespace wavekv::resident {

inline constexpr SequenceId kResidentSequence{0x900000001};

class RegionHarness {
 public:
  RegionHarness(const ModelShape& shape, uint64_t max_tokens, const ResidentOptions& options)
      : header_(PlanResident(shape, max_tokens, options).value()) {
    const uint64_t bytes = TenantBuffer::BytesMin(4) + AlignUp(header_.region_bytes, 4096);
    const UniqueFd fd = CreateMemfd("resident_region_test", bytes).value();
    engine_ = Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value();
    buffer_ = TenantBuffer::Create(
                  MapHostBuffer(Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value()), 4)
                  .value();
    sequence_ =
        CreateResidentRegion(buffer_, kResidentSequence, shape, max_tokens, options).value();
  }

  ResidentSequence& manager() { return *sequence_; }
  std::unique_ptr<ResidentSequence>& owned() { return sequence_; }
  TenantBuffer& buffer() { return *buffer_; }
  const ResidentHeader& header() const { return header_; }
  std::byte* region() { return engine_.data() + sequence_->place().region_offset; }
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
  const ResidentHeader header_;
  Mapping engine_;
  std::shared_ptr<TenantBuffer> buffer_;
  std::unique_ptr<ResidentSequence> sequence_;
};

}  // namespace wavekv::resident
