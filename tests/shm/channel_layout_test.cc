#include "proto/shm/channel_layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "proto/shm/handshake.h"
#include "storage/base/random.h"
#include "tests/shm/seed.h"

namespace wavekv::shm {
namespace {

using ::testing::HasSubstr;

TEST(ChannelLayoutTest, PartsFollowOneAnother) {
  const ChannelGeometry geometry = LayOutChannel(64, 1 << 20).value();
  EXPECT_EQ(geometry.submissions_offset, 4096u);
  EXPECT_EQ(geometry.completions_offset, 8192u);
  EXPECT_EQ(geometry.arena_offset, 12288u);
  EXPECT_EQ(geometry.channel_bytes, 12288u + (1 << 20));
}

TEST(ChannelLayoutTest, RefusesWhatCannotBe) {
  struct Row {
    uint32_t entries;
    uint64_t arena_bytes;
    const char* why;
  };
  const Row rows[] = {
      {0, 1 << 20, "ring_entries"},        // No ring.
      {1, 1 << 20, "ring_entries"},        // The client could never submit ahead.
      {48, 1 << 20, "ring_entries"},       // Numbers would not wrap evenly.
      {2048, 1 << 20, "ring_entries"},     // More than is looked at.
      {64, 0, "arena_bytes"},              // No arena.
      {64, (1 << 20) + 1, "arena_bytes"},  // Not whole pages.
      {64, 1ull << 40, "arena_bytes"},     // Far too much.
  };
  for (const Row& row : rows) {
    const auto geometry = LayOutChannel(row.entries, row.arena_bytes);
    EXPECT_EQ(geometry.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(geometry.status().message()), HasSubstr(row.why));
  }
}

TEST(ChannelLayoutTest, ArenaEndsWhereItEnds) {
  const ChannelGeometry geometry = LayOutChannel(64, 1 << 20).value();
  const uint64_t end = geometry.arena_offset + geometry.arena_bytes;
  struct Row {
    uint64_t offset;
    uint64_t bytes;
    bool inside;
  };
  const Row rows[] = {
      {geometry.arena_offset, geometry.arena_bytes, true},
      {end, 0, true},
      {end - 1, 1, true},
      {end - 1, 2, false},                    // One byte too far.
      {geometry.arena_offset - 1, 1, false},  // In the completion ring.
      {0, 1, false},                          // In the header.
      {end + 1, 0, false},
      {geometry.arena_offset, UINT64_MAX, false},  // Would wrap around.
      {UINT64_MAX, 2, false},                      // Likewise.
      {UINT64_MAX, UINT64_MAX, false},
  };
  for (const Row& row : rows) {
    EXPECT_EQ(geometry.InArena(row.offset, row.bytes), row.inside)
        << row.offset << " + " << row.bytes;
  }
}

TEST(ChannelLayoutTest, HeaderComesBack) {
  const ChannelGeometry geometry = LayOutChannel(128, 4 << 20).value();
  const ChannelGeometry read = ReadHeader(HeaderOf(geometry), geometry.channel_bytes).value();
  EXPECT_EQ(read.arena_offset, geometry.arena_offset);
  EXPECT_EQ(read.arena_bytes, geometry.arena_bytes);
  EXPECT_EQ(read.ring_entries, 128u);
}

TEST(ChannelLayoutTest, OtherVersionIsNamed) {
  const ChannelGeometry geometry = LayOutChannel(64, 1 << 20).value();
  ChannelHeader header = HeaderOf(geometry);
  header.version = 7;
  const auto read = ReadHeader(header, geometry.channel_bytes);
  EXPECT_EQ(read.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(read.status().message()), HasSubstr("version 7"));
}

// No header that differs in a checked byte is believed, and none makes a geometry of another size.
TEST(ChannelLayoutTest, FuzzedHeadersAreRefusedOrFit) {
  std::mt19937_64 random(FreshSeed());
  const ChannelGeometry geometry = LayOutChannel(64, 1 << 20).value();
  for (int i = 0; i < 50'000; ++i) {
    ChannelHeader header = HeaderOf(geometry);
    unsigned char bytes[sizeof header];
    std::memcpy(bytes, &header, sizeof header);
    const int flips = 1 + static_cast<int>(random() % 4);
    for (int flip = 0; flip < flips; ++flip) bytes[random() % 56] ^= 1u << (random() % 8);
    std::memcpy(&header, bytes, sizeof header);
    const auto read = ReadHeader(header, geometry.channel_bytes);
    if (!read.ok()) continue;
    ASSERT_EQ(read->channel_bytes, geometry.channel_bytes);
    ASSERT_TRUE(geometry.InArena(read->arena_offset, read->arena_bytes));
  }
}

TEST(HandshakeTest, HelloComesBack) {
  const Hello hello{.version = 3, .epoch = 0x1234567890, .secret = RandomSecret()};
  const Hello read = DecodeHello(EncodeHello(hello)).value();
  EXPECT_EQ(read.version, 3u);
  EXPECT_EQ(read.epoch, hello.epoch);
  EXPECT_EQ(read.secret, hello.secret);
}

TEST(HandshakeTest, GarbageIsNoHello) {
  std::mt19937_64 random(FreshSeed());
  EXPECT_FALSE(DecodeHello("").ok());
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes(random() % 64, '\0');
    for (char& byte : bytes) byte = static_cast<char>(random());
    EXPECT_EQ(DecodeHello(bytes).status().code(), absl::StatusCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace wavekv::shm
