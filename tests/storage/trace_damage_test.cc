// A trace file as hostile input: cut at every byte, any bit flipped, and bytes made up with
// checksums that fit.

#include <algorithm>
#include <cstring>

#include "gmock/gmock.h"
#include "storage/base/crc32c.h"
#include "storage/trace/layer_trace.h"
#include "storage/trace/trace_layout.h"
#include "tests/storage/largest_allocation.h"
#include "tests/storage/trace_fixture.h"

namespace wavekv {
namespace {

using testing::HasSubstr;

constexpr size_t kFirstFrame = sizeof(TraceFileHead);

class TraceDamageTest : public TraceFixture {
 protected:
  TraceDamageTest() : sequence_(Sequence()), records_(Records(sequence_)) {
    WriteTrace(sequence_, records_);
    whole_ = FileBytes(path_);
    for (size_t at = kFirstFrame; at < whole_.size();) {
      frames_.push_back(at);
      at += sizeof(TraceFrame) + FrameAt(whole_, at).payload_bytes;
    }
  }

  static TraceFrame FrameAt(const std::string& bytes, size_t at) {
    TraceFrame frame;
    std::memcpy(&frame, bytes.data() + at, sizeof frame);
    return frame;
  }
  // Makes the checksums of the frame at `at` those of what it has become.
  static void Reseal(std::string* bytes, size_t at) {
    TraceFrame frame = FrameAt(*bytes, at);
    const auto all = std::as_bytes(std::span(bytes->data(), bytes->size()));
    const size_t payload_at = at + sizeof frame;
    if (all.size() - payload_at >= frame.payload_bytes) {
      frame.payload_crc = Crc32c(all.subspan(payload_at, frame.payload_bytes));
    }
    frame.frame_crc = Crc32c(std::as_bytes(std::span(&frame, 1)).first(kTraceFrameCrcBytes));
    std::memcpy(bytes->data() + at, &frame, sizeof frame);
  }
  // Reads `bytes` as a file.
  ReadBack ReadMade(const std::string& bytes, bool accept_cut = false) {
    WriteBytes(path_, bytes);
    return Read(path_, accept_cut);
  }

  const TraceSequence sequence_;
  const std::vector<TraceRecord> records_;
  std::string whole_;
  std::vector<size_t> frames_;  // Where each begins.
};

TEST_F(TraceDamageTest, CutAnywhereIsToldFromWhole) {
  ASSERT_EQ(frames_.size(), records_.size() + 2);
  // Every place around the frames' borders, and some in the payloads.
  std::vector<size_t> lengths;
  for (const size_t frame : frames_) {
    for (size_t length = frame; length <= frame + sizeof(TraceFrame) + 1; ++length) {
      lengths.push_back(length);
    }
  }
  for (int i = 0; i < 50; ++i) lengths.push_back(Below(whole_.size()));
  for (const size_t length : lengths) {
    if (length >= whole_.size()) continue;
    SCOPED_TRACE(testing::Message() << "cut to " << length << " bytes");
    const std::string cut = whole_.substr(0, length);
    const ReadBack refused = ReadMade(cut);
    const bool has_head = length >= sizeof(TraceFileHead);
    EXPECT_EQ(refused.status.code(),
              has_head ? absl::StatusCode::kDataLoss : absl::StatusCode::kInvalidArgument);
    if (length < frames_[1]) continue;  // Without its first record it says nothing.
    EXPECT_THAT(std::string(refused.status.message()), HasSubstr("is cut"));

    const ReadBack accepted = ReadMade(cut, /*accept_cut=*/true);
    ASSERT_TRUE(accepted.status.ok()) << accepted.status;
    EXPECT_TRUE(accepted.cut);
    size_t whole_records = 0;
    while (whole_records + 2 < frames_.size() && frames_[whole_records + 2] <= length) {
      ++whole_records;
    }
    ASSERT_EQ(accepted.records.size(), whole_records);
    for (size_t i = 0; i < whole_records; ++i) EXPECT_EQ(accepted.records[i], records_[i]);
  }
}

TEST_F(TraceDamageTest, AFlippedBitIsAlwaysFound) {
  for (int i = 0; i < 700; ++i) {
    std::string bytes = whole_;
    // The first ones in the head and the first frame, the others anywhere.
    const size_t at = i < 400 ? static_cast<size_t>(i) / 8 : Below(bytes.size());
    const int bit = i < 400 ? i % 8 : static_cast<int>(Below(8));
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
    WriteBytes(path_, bytes);
    for (const bool accept_cut : {false, true}) {
      const ReadBack back = Read(path_, accept_cut);
      ASSERT_FALSE(back.status.ok()) << "bit " << bit << " of byte " << at;
      ASSERT_EQ(back.status.code(), at < sizeof(TraceFileHead) ? absl::StatusCode::kInvalidArgument
                                                               : absl::StatusCode::kDataLoss)
          << back.status;
    }
  }
}

// Lengths and counts that would be allocated, were they believed; all checksums fit.
TEST_F(TraceDamageTest, AbsurdLengthsAllocateNothing) {
  constexpr size_t kRowsFrame = 1;  // Of frames_: stored rows.
  const struct {
    const char* why;
    size_t frame;
    size_t offset;  // In the frame, or behind it in the payload.
    uint64_t value;
    size_t bytes;
    bool frame_cut = false;  // It reads like a file that ends too early.
  } rows[] = {
      {"a payload beyond the file's end", kRowsFrame, 4, kTracePayloadBytesMax, 4, true},
      {"a payload of 4 GiB", kRowsFrame, 4, UINT32_MAX, 4},
      {"a payload above the limit", kRowsFrame, 4, kTracePayloadBytesMax + 1, 4},
      {"tokens past all counting", kRowsFrame, sizeof(TraceFrame) + 24, UINT64_MAX, 8},
      {"tokens whose bytes overflow", kRowsFrame, sizeof(TraceFrame) + 24, 1ull << 58, 8},
      {"a position past all counting", kRowsFrame, sizeof(TraceFrame) + 16, UINT64_MAX, 8},
      {"traced layers without end", 0, sizeof(TraceFrame) + 120, UINT32_MAX, 4},
      {"layer budgets without end", 0, sizeof(TraceFrame) + 124, UINT32_MAX, 4},
      {"dense layers without end", 0, sizeof(TraceFrame) + 128, UINT32_MAX, 4},
      {"a label without end", 0, sizeof(TraceFrame) + 136, UINT32_MAX, 4},
      {"heads without end", 0, sizeof(TraceFrame) + 8, UINT32_MAX, 4},
      {"a dtype that is none", 0, sizeof(TraceFrame) + 20, 4, 4},
      {"an unknown type", kRowsFrame, 0, 99, 4},
      {"a second sequence", kRowsFrame, 0, 1, 4},
      {"a number out of order", kRowsFrame, 8, 2, 8},
  };
  for (const auto& row : rows) {
    std::string bytes = whole_;
    const size_t at = frames_[row.frame];
    std::memcpy(bytes.data() + at + row.offset, &row.value, row.bytes);
    Reseal(&bytes, at);
    for (const bool accept_cut : {false, true}) {
      TakeLargestAllocation();
      const ReadBack back = ReadMade(bytes, accept_cut);
      EXPECT_LE(TakeLargestAllocation(), whole_.size()) << row.why;
      if (row.frame_cut && accept_cut) {
        EXPECT_TRUE(back.cut) << row.why << back.status;
      } else {
        EXPECT_EQ(back.status.code(), absl::StatusCode::kDataLoss) << row.why << back.status;
      }
    }
  }
}

TEST_F(TraceDamageTest, RecordsThatMovedAreFound) {
  const size_t first = frames_[1];
  const size_t second = frames_[2];
  const size_t third = frames_[3];
  const struct {
    const char* why;
    std::string bytes;
  } rows[] = {
      {"one is missing", whole_.substr(0, first) + whole_.substr(second)},
      {"one is there twice", whole_.substr(0, second) + whole_.substr(first)},
      {"two have changed places", whole_.substr(0, first) + whole_.substr(second, third - second) +
                                      whole_.substr(first, second - first) + whole_.substr(third)},
      {"bytes behind the end", whole_ + '\0'},
      {"a trace behind the end", whole_ + whole_},
  };
  for (const auto& row : rows) {
    for (const bool accept_cut : {false, true}) {
      const ReadBack back = ReadMade(row.bytes, accept_cut);
      EXPECT_EQ(back.status.code(), absl::StatusCode::kDataLoss) << row.why << back.status;
    }
  }
}

TEST_F(TraceDamageTest, OtherFilesAndVersionsAreNamed) {
  std::string newer = whole_;
  newer[8] = 2;
  const struct {
    std::string bytes;
    const char* text;
  } rows[] = {
      {"", "is no trace file"},
      {"WKVTRAC", "is no trace file"},
      {std::string(100, 'x'), "is no trace file"},
      {newer, "format version 2, expected version 1"},
  };
  for (const auto& row : rows) {
    const ReadBack back = ReadMade(row.bytes);
    EXPECT_EQ(back.status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(back.status.message()), HasSubstr(row.text));
  }
}

// Random bytes over a sealed record: whatever a reader gives out fits the shape.
TEST_F(TraceDamageTest, FuzzedRecordsFitOrAreRefused) {
  size_t accepted = 0;
  for (int round = 0; round < 800; ++round) {
    std::string bytes = whole_;
    const size_t frame_idx = Below(frames_.size());
    const size_t at = frames_[frame_idx];
    const size_t payload_bytes = FrameAt(bytes, at).payload_bytes;
    // Heads matter more than rows.
    const size_t reach = std::min<size_t>(payload_bytes, 160);
    for (uint64_t i = 0; i <= Below(4); ++i) {
      const size_t where =
          Below(4) == 0 ? Below(kTraceFrameCrcBytes) : sizeof(TraceFrame) + Below(reach);
      const char values[] = {0, 1, 2, 3, '\x7f', '\xff', static_cast<char>(random_())};
      bytes[at + where] = values[Below(sizeof values)];
    }
    Reseal(&bytes, at);
    WriteBytes(path_, bytes);
    const auto traces = LoadLayerTraces(path_, {}, {.accept_cut = true});
    if (!traces.ok()) continue;
    ++accepted;
    const ModelShape& shape = traces->sequence.shape;
    for (const LayerTrace& layer : traces->layers) {
      ASSERT_EQ(layer.keys.size(), layer.token_count * shape.kv_head_count * shape.key_bytes());
      ASSERT_EQ(layer.values.size(), layer.token_count * shape.kv_head_count * shape.value_bytes());
      ASSERT_EQ(layer.queries.size(),
                layer.token_counts.size() * shape.query_head_count * shape.key_dim);
      for (const uint64_t count : layer.token_counts) ASSERT_LE(count, layer.token_count);
    }
  }
  EXPECT_GT(accepted, 0u) << "some of what was changed does not matter to a reader";
}

}  // namespace
}  // namespace wavekv
