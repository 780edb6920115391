#include "gpu/transfer_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "gpu/buffer_layout.h"

namespace wavekv {
namespace {

constexpr uint8_t kUntouched = 0xEE;

// What a device's buffer holds once the batches went through a staging area full of rubbish.
std::vector<uint8_t> Carry(const std::vector<TransferBatch>& batches, uint64_t staging_bytes,
                           uint64_t buffer_bytes) {
  std::vector<uint8_t> staging(staging_bytes, 0xAB);
  std::vector<uint8_t> buffer(buffer_bytes, kUntouched);
  for (const TransferBatch& batch : batches) {
    for (const TransferBatch::Gather& piece : batch.gathers) {
      EXPECT_LE(piece.staged_at + piece.bytes, staging_bytes);
      if (piece.staged_at + piece.bytes > staging_bytes) return {};
      uint8_t* const target = staging.data() + piece.staged_at;
      if (piece.source == nullptr) {
        std::fill_n(target, piece.bytes, 0);
      } else {
        std::copy_n(reinterpret_cast<const uint8_t*>(piece.source), piece.bytes, target);
      }
    }
    for (const TransferBatch::Transfer& transfer : batch.transfers) {
      EXPECT_LE(transfer.staged_at + transfer.bytes, staging_bytes);
      std::copy_n(staging.data() + transfer.staged_at, transfer.bytes,
                  buffer.data() + transfer.offset);
    }
  }
  return buffer;
}

size_t TransferCount(const std::vector<TransferBatch>& batches) {
  size_t count = 0;
  for (const TransferBatch& batch : batches) count += batch.transfers.size();
  return count;
}

TEST(TransferPlanTest, NothingNeedsNothing) {
  EXPECT_TRUE(PlanTransfers({}, 4096, 4096).empty());
  const ByteCopy empty{nullptr, 64, 0};
  EXPECT_TRUE(PlanTransfers({&empty, 1}, 4096, 4096).empty());
}

TEST(TransferPlanTest, OneStepIsOneTransfer) {
  const std::vector<std::byte> rows(3 * 200);
  // Rows of 200 bytes, each padded to 64: gaps of 56 bytes.
  const ByteCopy copies[] = {
      {rows.data(), 4096, 200}, {rows.data() + 200, 4352, 200}, {rows.data() + 400, 4608, 200}};
  EXPECT_EQ(TransferCount(PlanTransfers(copies, 1 << 20, 1 << 16)), 1u);
}

TEST(TransferPlanTest, WhatDoesNotFollowIsATransferOfItsOwn) {
  const std::vector<std::byte> rows(128);
  // Too far ahead, and behind.
  const ByteCopy ahead[] = {{rows.data(), 0, 64}, {rows.data(), 64 + kRowAlignBytes, 64}};
  const ByteCopy behind[] = {{rows.data(), 256, 64}, {rows.data(), 128, 64}};
  EXPECT_EQ(TransferCount(PlanTransfers(ahead, 4096, 4096)), 2u);
  EXPECT_EQ(TransferCount(PlanTransfers(behind, 4096, 4096)), 2u);
}

TEST(TransferPlanTest, EveryByteArrivesAndNoOtherLeaves) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  std::mt19937_64 random(seed);
  for (int round = 0; round < 50; ++round) {
    const uint64_t staging_bytes = kRowAlignBytes * (1 + random() % 32);
    const uint64_t gather_bytes_max = kRowAlignBytes + random() % 512;
    std::vector<uint8_t> source(1 << 14);
    for (uint8_t& byte : source) byte = static_cast<uint8_t>(random());
    std::vector<ByteCopy> copies;
    std::vector<uint8_t> expected(1 << 17, kUntouched);
    uint64_t offset = 0;
    while (copies.size() < 40) {
      // Gaps below and above what is filled; now and then nothing at all.
      const uint64_t gap = random() % (2 * kRowAlignBytes);
      const uint64_t bytes = random() % 8 == 0 ? 0 : random() % 3000;
      const uint64_t from = random() % (source.size() - 3000);
      offset += gap;
      copies.push_back({reinterpret_cast<const std::byte*>(source.data() + from), offset, bytes});
      std::copy_n(source.data() + from, bytes, expected.data() + offset);
      offset += bytes;
    }
    const std::vector<uint8_t> found = Carry(PlanTransfers(copies, staging_bytes, gather_bytes_max),
                                             staging_bytes, expected.size());
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
      // In the gaps zeroes are allowed, rubbish is not.
      if (expected[i] == kUntouched && found[i] == 0) continue;
      ASSERT_EQ(found[i], expected[i]) << "round " << round << ", byte " << i;
    }
  }
}

}  // namespace
}  // namespace wavekv
