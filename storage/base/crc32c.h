// CRC-32C (Castagnoli, as iSCSI and ext4 use it), the checksum of the file formats.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace wavekv {

// The checksum of `bytes`, or of what `crc` was computed over followed by `bytes`. By the CPU's own
// instruction where it has one.
uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// The same by table look-ups: what a CPU without the instruction runs.
uint32_t Crc32cPortable(std::span<const std::byte> bytes, uint32_t crc = 0);

}  // namespace wavekv
