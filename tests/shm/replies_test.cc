#include "proto/shm/replies.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/shm/seed.h"

namespace wavekv::shm {
namespace {

using Bytes = std::vector<std::byte>;

TEST(ReplyWriterTest, RunsComeBack) {
  Bytes bytes(1024);
  ReplyWriter writer(bytes);
  const uint64_t at = writer.Reserve(sizeof(WireInsertReply));
  const std::vector<float> floats = {1, 2, 3};
  const WireRun run = writer.Add(floats.data(), floats.size());
  const WireRun text = writer.AddText("no");
  writer.Put(at, WireInsertReply{.generation = 5, .token_count = 6});
  ASSERT_TRUE(writer.fits());
  const ReplyReader reader(bytes);
  EXPECT_EQ(reader.Get<WireInsertReply>(at)->token_count, 6u);
  std::vector<float> read(3);
  ASSERT_TRUE(reader.Copy(run, 3, sizeof(float), read.data(), "floats").ok());
  EXPECT_EQ(read, floats);
  EXPECT_NE(reader.Find(run, 12), nullptr);
  EXPECT_EQ(reader.Find(run, 8), nullptr) << "another size than expected";
  EXPECT_EQ(reader.Run(text)->size(), 2u);
}

// What does not fit is counted, and not one byte is written past the end.
TEST(ReplyWriterTest, CountsWhatDoesNotFit) {
  std::mt19937_64 random(FreshSeed());
  for (int round = 0; round < 2'000; ++round) {
    const size_t room = random() % 300;
    Bytes bytes(512, std::byte{0xaa});
    ReplyWriter writer(std::span<std::byte>(bytes).first(room));
    const std::vector<uint64_t> data(random() % 30, 0x5555555555555555);
    const uint64_t at = writer.Reserve(sizeof(WireAttendResult));
    writer.Add(data.data(), data.size());
    writer.AddText(std::string(random() % 100, 'x'));
    writer.Put(at, WireAttendResult());
    EXPECT_EQ(writer.fits(), writer.used() <= room);
    for (size_t i = room; i < bytes.size(); ++i) ASSERT_EQ(bytes[i], std::byte{0xaa}) << i;
    // With the room that was asked for it fits.
    Bytes enough(writer.used());
    ReplyWriter again(enough);
    again.Reserve(sizeof(WireAttendResult));
    again.Add(data.data(), data.size());
    EXPECT_TRUE(again.fits());
  }
}

TEST(ReplyWriterTest, LongTextsAreCut) {
  Bytes bytes(8192);
  ReplyWriter writer(bytes);
  EXPECT_EQ(writer.AddText(std::string(5000, 'x')).bytes, kErrorTextBytesMax);
}

// Room that others write, and that an error's text may take instead.
TEST(ReplyWriterTest, ReservedRoomIsWrittenByOthers) {
  Bytes bytes(2 * kErrorTextBytesMax);
  ReplyWriter writer(bytes);
  const uint64_t at = writer.Reserve(kErrorTextBytesMax);
  EXPECT_EQ(writer.Place({at, 100}), bytes.data() + at);
  const uint64_t used = writer.used();
  const WireRun text = writer.PutText(at, std::string(5000, 'x'));
  EXPECT_EQ(text.offset, at);
  EXPECT_EQ(text.bytes, kErrorTextBytesMax);
  EXPECT_EQ(writer.used(), used) << "room that was counted already";
  struct Row {
    WireRun run;
    bool fits;
  };
  const Row rows[] = {
      {{0, bytes.size()}, true},
      {{bytes.size(), 0}, true},
      {{bytes.size() - 1, 2}, false},
      {{bytes.size() + 1, 0}, false},
      {{kArenaAlignment, UINT64_MAX}, false},  // Would wrap around.
  };
  for (const Row& row : rows) {
    EXPECT_EQ(writer.Place(row.run) != nullptr, row.fits)
        << row.run.offset << " + " << row.run.bytes;
  }
}

TEST(ReplyReaderTest, StaysInside) {
  const Bytes bytes(256);
  const ReplyReader reader(bytes);
  struct Row {
    WireRun run;
    bool inside;
  };
  const Row rows[] = {
      {{0, 256}, true},         {{256, 0}, true}, {{255, 2}, false},  // One byte too far.
      {{257, 0}, false},                                              // Begins behind the end.
      {{8, UINT64_MAX}, false},                                       // Would wrap around.
      {{UINT64_MAX, 1}, false},                                       // Likewise.
  };
  for (const Row& row : rows) {
    EXPECT_EQ(reader.Run(row.run).ok(), row.inside) << row.run.offset << " + " << row.run.bytes;
  }
  EXPECT_FALSE(reader.Get<WireQueryReply>(0).ok());
  EXPECT_FALSE(reader.Get<WireInsertReply>(UINT64_MAX).ok());
  EXPECT_EQ(reader.Find({8, 16}, 16), nullptr) << "not aligned";
}

}  // namespace
}  // namespace wavekv::shm
