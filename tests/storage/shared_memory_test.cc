#include "storage/base/shared_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cstring>
#include <utility>

#include "gtest/gtest.h"
#include "tests/storage/resident_bytes.h"

namespace wavekv {
namespace {

constexpr uint64_t kBytes = 64 * 1024;

uint64_t TouchedBytes(int fd) {
  struct stat info;
  EXPECT_EQ(::fstat(fd, &info), 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

TEST(SharedMemoryTest, MemfdIsSparseZeroedAndCloseOnExec) {
  auto fd = CreateMemfd("wavekv-test", 1ull << 40);
  ASSERT_TRUE(fd.ok()) << fd.status();
  EXPECT_EQ(*FileBytes(fd->get()), 1ull << 40);
  EXPECT_EQ(TouchedBytes(fd->get()), 0u);
  EXPECT_NE(::fcntl(fd->get(), F_GETFD) & FD_CLOEXEC, 0);
  auto mapping = Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite);
  ASSERT_TRUE(mapping.ok()) << mapping.status();
  EXPECT_EQ(mapping->data()[kBytes - 1], std::byte{0});
}

TEST(SharedMemoryTest, RefusesSizesThatNoFileHas) {
  EXPECT_EQ(CreateMemfd("zero", 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateMemfd("huge", ~0ull).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(SharedMemoryTest, MappingsOfOneDescriptorShareBytes) {
  auto fd = CreateMemfd("wavekv-test", kBytes);
  ASSERT_TRUE(fd.ok());
  auto writer = Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite);
  auto reader = Mapping::Map(fd->get(), kBytes, Mapping::kReadOnly);
  ASSERT_TRUE(writer.ok() && reader.ok());
  fd->reset();  // A mapping outlives its descriptor.
  writer->data()[17] = std::byte{42};
  EXPECT_EQ(reader->data()[17], std::byte{42});
}

TEST(SharedMemoryTest, MapChecksTheSizeOfTheFile) {
  auto fd = CreateMemfd("wavekv-test", kBytes);
  ASSERT_TRUE(fd.ok());
  for (const uint64_t bytes : {uint64_t{0}, kBytes + 1}) {
    const auto mapping = Mapping::Map(fd->get(), bytes, Mapping::kReadOnly);
    EXPECT_EQ(mapping.status().code(), absl::StatusCode::kInvalidArgument) << bytes;
  }
  EXPECT_FALSE(Mapping::Map(-1, kBytes, Mapping::kReadOnly).ok());
}

TEST(SharedMemoryTest, SealForReadersLeavesOnlyTheOldMappingWritable) {
  auto fd = CreateMemfd("wavekv-test", kBytes);
  ASSERT_TRUE(fd.ok());
  auto owner = Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite);
  ASSERT_TRUE(owner.ok());
  ASSERT_TRUE(SealForReaders(fd->get()).ok());

  owner->data()[0] = std::byte{7};
  EXPECT_EQ(Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite).status().code(),
            absl::StatusCode::kPermissionDenied);
  auto reader = Mapping::Map(fd->get(), kBytes, Mapping::kReadOnly);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->data()[0], std::byte{7});
  // Nor can a reader make its mapping writable, write to the file, or change its size.
  EXPECT_NE(::mprotect(reader->data(), kBytes, PROT_READ | PROT_WRITE), 0);
  EXPECT_LT(::pwrite(fd->get(), "x", 1, 0), 0);
  EXPECT_NE(::ftruncate(fd->get(), kBytes / 2), 0);
  EXPECT_FALSE(SealSize(fd->get()).ok()) << "F_SEAL_SEAL forbids further seals";
}

TEST(SharedMemoryTest, SealSizeKeepsTheMemoryWritable) {
  auto fd = CreateMemfd("wavekv-test", kBytes);
  ASSERT_TRUE(fd.ok());
  EXPECT_EQ(CheckSizeSealed(fd->get()).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(SealSize(fd->get()).ok());
  EXPECT_TRUE(CheckSizeSealed(fd->get()).ok());
  EXPECT_TRUE(Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite).ok());
  EXPECT_NE(::ftruncate(fd->get(), kBytes / 2), 0);
}

TEST(SharedMemoryTest, OrdinaryFilesCountAsShrinkable) {
  UniqueFd fd(::open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  ASSERT_TRUE(fd.valid());
  EXPECT_EQ(CheckSizeSealed(fd.get()).code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SharedMemoryTest, MovedFromMappingIsEmpty) {
  auto fd = CreateMemfd("wavekv-test", kBytes);
  ASSERT_TRUE(fd.ok());
  auto mapped = Mapping::Map(fd->get(), kBytes, Mapping::kReadWrite);
  ASSERT_TRUE(mapped.ok());
  Mapping first = *std::move(mapped);
  std::byte* const address = first.data();
  Mapping second = std::move(first);
  EXPECT_EQ(second.data(), address);
  EXPECT_EQ(first.data(), nullptr);
  EXPECT_EQ(first.bytes(), 0u);
  first = std::move(second);
  EXPECT_EQ(first.data(), address);
}

TEST(SharedMemoryTest, PrivatePagesGoBack) {
  EXPECT_EQ(Mapping::Private(0).status().code(), absl::StatusCode::kInvalidArgument);
  const auto page = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  auto memory = Mapping::Private(8 * page);
  ASSERT_TRUE(memory.ok()) << memory.status();
  EXPECT_EQ(memory->bytes(), 8 * page);
  EXPECT_EQ(ResidentBytes(memory->data(), 8 * page), 0u) << "sparse at first";
  std::memset(memory->data(), 7, 8 * page);
  // Of what is discarded only whole pages go: two of the three that it touches.
  DiscardPages(memory->data() + page + 1, 3 * page - 1);
  EXPECT_EQ(ResidentBytes(memory->data(), 8 * page), 6 * page);
  EXPECT_EQ(memory->data()[2 * page - 1], std::byte{7});
  EXPECT_EQ(memory->data()[4 * page], std::byte{7});
  DiscardPages(memory->data() + 5 * page + 1, page);  // Holds no whole page.
  EXPECT_EQ(ResidentBytes(memory->data(), 8 * page), 6 * page);
  EXPECT_EQ(memory->data()[2 * page], std::byte{0});
}

}  // namespace
}  // namespace wavekv
