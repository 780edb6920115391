// The bytes of a buffer as wavekvd writes and reads them, in host memory and through the driver.
#include "gpu/buffer_memory.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "gpu/device_buffer.h"
#include "gpu/driver/device.h"
#include "tests/gpu/driver/use_fake_cuda.h"

namespace wavekv {
namespace {

// Less than what the tests move at once.
constexpr uint64_t kStagingBytes = 4096;

std::unique_ptr<BufferMemory> MakeHostMemory(uint64_t bytes) {
  const UniqueFd fd = CreateMemfd("buffer_memory_test", bytes).value();
  return MapHostBuffer(Mapping::Map(fd.get(), bytes, Mapping::kReadWrite).value());
}

std::unique_ptr<BufferMemory> MakeDeviceMemory(uint64_t bytes) {
  UseFakeCuda();
  const auto driver = CudaDriver::Get().value();
  const auto identity = CudaDevice::Identify(*driver, 0).value();
  const auto device = CudaDevice::Open(driver, identity).value();
  const auto allocation = SharedAllocation::Create(device, bytes).value();
  DeviceCopierOptions options;
  options.staging_bytes = kStagingBytes;
  auto memory = MapDeviceBuffer(std::make_shared<DeviceCopier>(device, options),
                                allocation->Export().value().get(), bytes)
                    .value();
  EXPECT_TRUE(memory->Zero(0, bytes).ok());
  return memory;
}

struct MemoryKind {
  const char* name;
  std::unique_ptr<BufferMemory> (*make)(uint64_t bytes);
};

class BufferMemoryTest : public ::testing::TestWithParam<MemoryKind> {
 protected:
  static constexpr uint64_t kBytes = uint64_t{2} << 20;

  std::vector<std::byte> ReadAll() {
    std::vector<std::byte> all(kBytes);
    const ByteRead piece{0, all.data(), kBytes};
    EXPECT_TRUE(memory_->Read({&piece, 1}).ok());
    return all;
  }

  const std::unique_ptr<BufferMemory> memory_ = GetParam().make(kBytes);
};

INSTANTIATE_TEST_SUITE_P(Kinds, BufferMemoryTest,
                         ::testing::Values(MemoryKind{"host", MakeHostMemory},
                                           MemoryKind{"cuda", MakeDeviceMemory}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(BufferMemoryTest, ReadsWhatWasWritten) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::vector<std::byte> expected(kBytes);
  for (std::byte& x : expected) x = static_cast<std::byte>(random());
  const ByteCopy all{expected.data(), 0, kBytes};
  ASSERT_TRUE(memory_->Write({&all, 1}).ok());
  EXPECT_EQ(ReadAll(), expected);
  for (int round = 0; round < 50; ++round) {
    // Pieces of any place and length, also none at all, together more than the staging memory.
    std::vector<std::vector<std::byte>> targets(random() % 8);
    std::vector<ByteRead> pieces;
    for (std::vector<std::byte>& target : targets) {
      const uint64_t bytes = random() % 4 == 0 ? random() % (3 * kStagingBytes) : random() % 100;
      target.resize(bytes + 1, std::byte{0x5a});
      pieces.push_back({random() % (kBytes - bytes), target.data(), bytes});
    }
    ASSERT_TRUE(memory_->Read(pieces).ok());
    for (size_t i = 0; i < pieces.size(); ++i) {
      const ByteRead& piece = pieces[i];
      ASSERT_EQ(std::memcmp(piece.target, &expected[piece.offset], piece.bytes), 0)
          << piece.bytes << " bytes at " << piece.offset;
      ASSERT_EQ(piece.target[piece.bytes], std::byte{0x5a}) << "a read ends where it should";
    }
  }
}

TEST_P(BufferMemoryTest, ScatterTouchesNothingElse) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937_64 random(seed);
  std::vector<std::byte> expected(kBytes, std::byte{0x77});
  const ByteCopy all{expected.data(), 0, kBytes};
  ASSERT_TRUE(memory_->Write({&all, 1}).ok());
  std::vector<BufferEntry> entries;
  // Neighbours, near ones, far ones; more than the staging memory holds.
  for (uint64_t at = 0; entries.size() < 3 * kStagingBytes / 4;) {
    entries.push_back({at, static_cast<uint32_t>(random())});
    at += 4 * (1 + (random() % 2 == 0 ? 0 : random() % 20));
  }
  entries.push_back({8, static_cast<uint32_t>(random())});  // Later ones win.
  std::vector<BufferWord> words;
  for (int i = 0; i < 20; ++i) words.push_back({kBytes / 2 + 8 * (random() % 100), random()});
  ASSERT_TRUE(memory_->Scatter(entries, words).ok());
  for (const BufferEntry& entry : entries) {
    std::memcpy(&expected[entry.offset], &entry.value, sizeof(entry.value));
  }
  for (const BufferWord& word : words) {
    std::memcpy(&expected[word.offset], &word.value, sizeof(word.value));
  }
  EXPECT_EQ(ReadAll(), expected);
}

// Another thread counts two words up, the second always first: who reads them in order finds the
// first never ahead. Both are read whole.
TEST(HostBufferMemoryTest, ReadsWordsThatAnotherWrites) {
  constexpr uint64_t kBytes = 4096, kCounts = 20'000, kStep = 0x100000001;
  const UniqueFd fd = CreateMemfd("buffer_memory_test", kBytes).value();
  const auto memory = MapHostBuffer(Mapping::Map(fd.get(), kBytes, Mapping::kReadWrite).value());
  const Mapping other = Mapping::Map(fd.get(), kBytes, Mapping::kReadWrite).value();
  auto* const words = reinterpret_cast<uint64_t*>(other.data());
  std::thread writer([&] {
    for (uint64_t i = 1; i <= kCounts; ++i) {
      std::atomic_ref<uint64_t>(words[1]).store(i * kStep, std::memory_order_relaxed);
      std::atomic_ref<uint64_t>(words[0]).store(i * kStep, std::memory_order_release);
    }
  });
  uint64_t seen[2] = {};
  while (seen[0] < kCounts * kStep) {
    const ByteRead piece{0, reinterpret_cast<std::byte*>(seen), sizeof(seen)};
    ASSERT_TRUE(memory->Read({&piece, 1}).ok());
    ASSERT_EQ(seen[0] % kStep, 0u);
    ASSERT_EQ(seen[1] % kStep, 0u);
    ASSERT_LE(seen[0], seen[1]);
  }
  writer.join();
}

}  // namespace
}  // namespace wavekv
