// A trace's records as bytes and back; docs/formats.md, "The trace file".
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "storage/trace/trace_records.h"

namespace wavekv {

inline constexpr std::array<char, 8> kTraceMagic = {'W', 'K', 'V', 'T', 'R', 'A', 'C', 'E'};
inline constexpr uint32_t kTraceVersion = 1;

struct TraceFileHead {
  std::array<char, 8> magic = kTraceMagic;
  uint32_t version = kTraceVersion;
  uint32_t zero = 0;
};
static_assert(sizeof(TraceFileHead) == 16);

// Before each record's payload.
struct TraceFrame {
  uint32_t type = 0;           // A TraceType.
  uint32_t payload_bytes = 0;  // At most kTracePayloadBytesMax.
  uint64_t number = 0;         // Of the record, from 0 on.
  uint32_t payload_crc = 0;    // Crc32c of the payload.
  uint32_t frame_crc = 0;      // Crc32c of the 20 bytes before.
};
static_assert(sizeof(TraceFrame) == 24);
inline constexpr size_t kTraceFrameCrcBytes = 20;

enum class TraceType : uint32_t { kSequence = 1, kRows, kStep, kBuild, kTruncate, kEnd };

// A token of the largest shape has 2 MiB of K and V.
inline constexpr uint32_t kTracePayloadBytesMax = 64u << 20;
// Rows of one record that a writer puts together, if a token is not larger.
inline constexpr uint32_t kTraceRowsBytes = 4u << 20;

// A frame and its payload. InvalidArgument when it is larger than a payload may be.
absl::StatusOr<std::vector<std::byte>> EncodeTrace(const TraceSequence& sequence);
absl::StatusOr<std::vector<std::byte>> EncodeTrace(const TraceRecord& record, uint64_t number);

// InvalidArgument: the frame is damaged, or not that of record `number`.
absl::Status CheckTraceFrame(const TraceFrame& frame, uint64_t number);

// One record among bytes: borrows them.
struct TraceFramed {
  uint32_t type = 0;
  std::span<const std::byte> payload;
};
// Takes record `number` off the front of `bytes`, which hold whole records. InvalidArgument: it is
// damaged, or they end before it does.
absl::StatusOr<TraceFramed> TakeTraceRecord(std::span<const std::byte>* bytes, uint64_t number);

// The payload of a first record. InvalidArgument when its bytes are not those of one; what it says
// is for ValidateTraceSequence to judge.
absl::StatusOr<TraceSequence> DecodeTraceSequence(std::span<const std::byte> payload);
// The payload of a later record; `shape` is valid and gives its tensors' sizes. Likewise, for
// TraceState::Admit to judge. Nothing larger than the payload is ever allocated.
absl::StatusOr<TraceRecord> DecodeTrace(uint32_t type, const ModelShape& shape,
                                        std::span<const std::byte> payload);

}  // namespace wavekv
