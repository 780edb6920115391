#include "gpu/tenant_buffer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

#include "gpu/buffer_layout.h"
#include "storage/base/shared_memory.h"
#include "storage/base/unique_fd.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

// A buffer in a memfd, and a reader's mapping of the same.
class TenantBufferTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<TenantBuffer>> MakeBuffer(uint64_t bytes, uint32_t regions_max) {
    const UniqueFd fd = CreateMemfd("tenant_buffer_test", bytes).value();
    reader_ = Mapping::Map(fd.get(), bytes, Mapping::kReadOnly).value();
    return TenantBuffer::Create(
        MapHostBuffer(Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value()), regions_max);
  }

  const BufferHeader* Header() const {
    return reinterpret_cast<const BufferHeader*>(reader_.data());
  }
  const DirectoryEntry* Directory() const {
    return reinterpret_cast<const DirectoryEntry*>(reader_.data() + Header()->directory_offset);
  }

  Mapping reader_;
};

TEST_F(TenantBufferTest, HeaderSaysWhatIsThere) {
  const auto buffer = MakeBuffer(1 << 20, 100);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  const BufferHeader* const header = Header();
  EXPECT_EQ(header->magic, kBufferMagic);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(header), 8), "WAVEBUF1");
  EXPECT_EQ(header->version, 1u);
  EXPECT_EQ(header->directory_entries, 100u);
  EXPECT_EQ(header->buffer_bytes, 1u << 20);
  EXPECT_EQ(header->state.load(), kBufferLive);
  EXPECT_TRUE((*buffer)->Close().ok());
  EXPECT_EQ(header->state.load(), kBufferClosed);
}

TEST_F(TenantBufferTest, TooSmallIsRefused) {
  const auto buffer = MakeBuffer(8192, 1000);
  EXPECT_EQ(buffer.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(buffer.status().message()), HasSubstr("8192"));
}

TEST_F(TenantBufferTest, FullDirectoryIsRefused) {
  const auto buffer = MakeBuffer(1 << 20, 2);
  ASSERT_TRUE(buffer.ok()) << buffer.status();
  ASSERT_TRUE((*buffer)->Carve(4096).ok());
  const auto second = (*buffer)->Carve(4096);
  ASSERT_TRUE(second.ok());
  EXPECT_EQ((*buffer)->Carve(4096).status().code(), absl::StatusCode::kResourceExhausted);
  (*buffer)->Return(*second);
  EXPECT_TRUE((*buffer)->Carve(4096).ok());
}

TEST_F(TenantBufferTest, PiecesThatAreReturnedLaterWaitForTheirWipe) {
  const auto made = MakeBuffer(1 << 20, 8);
  ASSERT_TRUE(made.ok()) << made.status();
  TenantBuffer& buffer = **made;
  const uint64_t all_bytes = buffer.free_bytes();
  const auto first = buffer.Carve(all_bytes / 2), second = buffer.Carve(4096);
  ASSERT_TRUE(first.ok() && second.ok());
  bool wiped = false;
  int asked = 0;
  buffer.ReturnLater(*first, [&]() -> absl::StatusOr<bool> {
    ++asked;
    return wiped;
  });
  EXPECT_EQ(asked, 1) << "it may be possible at once";
  EXPECT_EQ(buffer.Sweep(), 1u);
  EXPECT_EQ(buffer.Carve(all_bytes / 2 + 4096).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(asked, 3) << "whoever needs room asks";
  wiped = true;
  buffer.Return(*second);
  EXPECT_TRUE(buffer.Carve(all_bytes).ok()) << "it came back, and joined the rest";
  EXPECT_EQ(buffer.Sweep(), 0u);
  EXPECT_EQ(asked, 4);
}

TEST_F(TenantBufferTest, AWipeThatFailsTakesThePieceAway) {
  const auto made = MakeBuffer(1 << 20, 8);
  ASSERT_TRUE(made.ok()) << made.status();
  const auto piece = (*made)->Carve(8192);
  ASSERT_TRUE(piece.ok());
  const uint64_t free_bytes = (*made)->free_bytes();
  (*made)->ReturnLater(
      *piece, []() -> absl::StatusOr<bool> { return absl::UnavailableError("the device failed"); });
  EXPECT_EQ((*made)->Sweep(), 0u);
  EXPECT_EQ((*made)->free_bytes(), free_bytes);
}

// Regions come and go at random; none overlaps another, all are page aligned, and once all are
// back, one region may take everything again.
TEST_F(TenantBufferTest, RegionsNeverOverlap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  const auto made = MakeBuffer(4 << 20, 64);
  ASSERT_TRUE(made.ok()) << made.status();
  TenantBuffer& buffer = **made;
  const uint64_t all_bytes = buffer.free_bytes();
  std::map<uint64_t, RegionPlace> live;  // By offset.
  uint64_t next_sequence = 1;
  for (int i = 0; i < 5000; ++i) {
    if (!live.empty() && random() % 2 == 0) {
      auto it = live.begin();
      std::advance(it, static_cast<int64_t>(random() % live.size()));
      ASSERT_TRUE(buffer.Withdraw(it->second).ok());
      EXPECT_EQ(Directory()[it->second.directory_idx].sequence_id.load(), 0u);
      buffer.Return(it->second);
      live.erase(it);
      continue;
    }
    const uint64_t bytes = 1 + random() % (256 << 10);
    const auto place = buffer.Carve(bytes);
    if (!place.ok()) {
      ASSERT_EQ(place.status().code(), absl::StatusCode::kResourceExhausted);
      continue;
    }
    ASSERT_GE(place->bytes, bytes);
    ASSERT_EQ(place->offset % kBufferPageBytes, 0u);
    ASSERT_LE(place->offset + place->bytes, buffer.bytes());
    ASSERT_GE(place->offset, 2 * kBufferPageBytes);  // Behind header and directory.
    const auto next = live.lower_bound(place->offset);
    if (next != live.end()) {
      ASSERT_LE(place->offset + place->bytes, next->first);
    }
    if (next != live.begin()) {
      const RegionPlace& before = std::prev(next)->second;
      ASSERT_LE(before.offset + before.bytes, place->offset);
    }
    ASSERT_TRUE(buffer.Announce(*place, SequenceId(next_sequence)).ok());
    const DirectoryEntry& entry = Directory()[place->directory_idx];
    ASSERT_EQ(entry.sequence_id.load(), next_sequence);
    ASSERT_EQ(entry.region_offset, place->offset);
    ++next_sequence;
    live[place->offset] = *place;
  }
  for (const auto& [offset, place] : live) buffer.Return(place);
  EXPECT_EQ(buffer.free_bytes(), all_bytes);
  EXPECT_TRUE(buffer.Carve(all_bytes).ok());
}

}  // namespace
}  // namespace wavekv
