#include "gpu/buffer_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "gpu/host_memory.h"
#include "storage/base/clock.h"
#include "storage/base/random.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/child_process.h"

namespace wavekv {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kMiB = 1 << 20;
constexpr int64_t kLeaseMs = 1000;

PeerCredentials Peer(uid_t uid) { return {::getpid(), uid, 0}; }
PeerCredentials Ourselves() { return Peer(::geteuid()); }

class BufferTableTest : public ::testing::Test {
 protected:
  BufferTableTest() { Restart({}); }

  void Restart(BufferTableOptions options) {
    options.bytes_max = 10 * kMiB;
    options.lease_ms = kLeaseMs;
    table_.emplace(options, memory_.get(), &clock_);
    secret_ = table_->AttachManager("test", ::getpid()).value();
  }

  // An allocation whose manager has mapped it; `process` is the manager's pidfd.
  AllocationGrant Fetched(const std::string& secret, uint64_t bytes,
                          UniqueFd process = UniqueFd()) {
    const AllocationGrant grant = table_->Allocate(secret, "uid:1", bytes).value();
    EXPECT_TRUE(table_->Redeem(grant.manager_ticket, Ourselves(), std::move(process)).ok());
    return grant;
  }
  AllocationGrant Sealed(uint64_t bytes) {
    const AllocationGrant grant = Fetched(secret_, bytes);
    EXPECT_TRUE(table_->Seal(secret_, grant.id).ok());
    return grant;
  }

  FakeClock clock_;
  std::unique_ptr<DeviceMemory> memory_ = CreateHostMemory();
  std::optional<BufferTable> table_;
  std::string secret_;
};

TEST_F(BufferTableTest, LimitHoldsAndSaysWhoHoldsWhat) {
  ASSERT_TRUE(table_->Allocate(secret_, "alice", 6 * kMiB).ok());
  const auto refused = table_->Allocate(secret_, "bob", 5 * kMiB);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.status().message()),
              testing::AllOf(HasSubstr("--bytes_max"), HasSubstr("alice holds 6291456"),
                             HasSubstr("4194304 of 10485760 are free")));
  EXPECT_EQ(table_->Usage().bytes_used, 6 * kMiB);
  EXPECT_TRUE(table_->Allocate(secret_, "bob", 4 * kMiB).ok());
}

TEST_F(BufferTableTest, SizesAreCheckedAndRounded) {
  struct Row {
    uint64_t bytes;
    bool ok;
  };
  const Row rows[] = {
      {0, false},              // Nothing.
      {1, true},               // A page.
      {10 * kMiB + 1, false},  // More than there is.
      {~uint64_t{0}, false},   // Rounding up would overflow.
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.bytes);
    const auto grant = table_->Allocate(secret_, "uid:1", row.bytes);
    ASSERT_EQ(grant.ok(), row.ok) << grant.status();
    if (row.ok) {
      EXPECT_EQ(grant->bytes, 4096u);
    }
  }
  EXPECT_EQ(table_->Usage().bytes_used, 4096u);
}

TEST_F(BufferTableTest, ReleasedMemoryComesBackZeroed) {
  const AllocationGrant grant = table_->Allocate(secret_, "uid:1", 10 * kMiB).value();
  const UniqueFd fd = table_->Redeem(grant.manager_ticket, Ourselves(), UniqueFd()).value().fd;
  {
    const Mapping mapping = Mapping::Map(fd.get(), grant.bytes, Mapping::kReadWrite).value();
    mapping.data()[123] = std::byte{42};
  }
  ASSERT_TRUE(table_->Release(secret_, grant.id).ok());
  EXPECT_EQ(table_->Usage().bytes_used, 0u);
  EXPECT_EQ(table_->Usage().wiped_bytes, 10 * kMiB);
  const AllocationGrant again = table_->Allocate(secret_, "uid:2", 10 * kMiB).value();
  const UniqueFd other = table_->Redeem(again.manager_ticket, Ourselves(), UniqueFd()).value().fd;
  const Mapping mapping = Mapping::Map(other.get(), again.bytes, Mapping::kReadOnly).value();
  EXPECT_EQ(mapping.data()[123], std::byte{0});
}

TEST_F(BufferTableTest, MemoryThatAReaderMapsIsNotCountedAsFree) {
  const AllocationGrant grant = Sealed(6 * kMiB);
  const std::string ticket = table_->IssueTicket(secret_, grant.id, -1).value();
  UniqueFd fd = table_->Redeem(ticket, Peer(7), UniqueFd()).value().fd;
  std::optional<Mapping> mapping = Mapping::Map(fd.get(), grant.bytes, Mapping::kReadOnly).value();
  fd.reset();  // The mapping alone holds it now.
  ASSERT_TRUE(table_->Release(secret_, grant.id).ok());
  table_->Reap();
  EXPECT_EQ(table_->Usage().bytes_used, 6 * kMiB);
  EXPECT_EQ(table_->Usage().lingering_bytes, 6 * kMiB);
  const auto refused = table_->Allocate(secret_, "uid:1", 6 * kMiB);
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("readers of released buffers hold 6291456"));
  mapping.reset();
  table_->Reap();
  EXPECT_EQ(table_->Usage().bytes_used, 0u);
  EXPECT_EQ(table_->Usage().lingering_bytes, 0u);
  EXPECT_TRUE(table_->Allocate(secret_, "uid:1", 6 * kMiB).ok());
}

TEST_F(BufferTableTest, ClientTicketsAreForTheirUidAndOnlyReadable) {
  const AllocationGrant grant = Sealed(kMiB);
  const std::string ticket = table_->IssueTicket(secret_, grant.id, 1000).value();
  EXPECT_EQ(table_->IssueTicket(secret_, grant.id, 1000).value(), ticket);
  EXPECT_NE(table_->IssueTicket(secret_, grant.id, 1001).value(), ticket);
  // Nothing tells a ticket of somebody else from one that never was.
  const auto stolen = table_->Redeem(ticket, Peer(1001), UniqueFd());
  const auto unknown = table_->Redeem(RandomSecret(), Peer(1001), UniqueFd());
  EXPECT_EQ(stolen.status(), unknown.status());
  EXPECT_EQ(stolen.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->Redeem(ticket, Peer(0), UniqueFd()).status(), unknown.status());
  for (int i = 0; i < 3; ++i) {  // A client may come again.
    const auto fd = table_->Redeem(ticket, Peer(1000), UniqueFd());
    ASSERT_TRUE(fd.ok()) << fd.status();
    EXPECT_TRUE(Mapping::Map(fd->fd.get(), grant.bytes, Mapping::kReadOnly).ok());
    EXPECT_EQ(Mapping::Map(fd->fd.get(), grant.bytes, Mapping::kReadWrite).status().code(),
              absl::StatusCode::kPermissionDenied);
  }
}

TEST_F(BufferTableTest, SealForbidsNewWritersAndKeepsTheOldOne) {
  const AllocationGrant grant = table_->Allocate(secret_, "uid:1", kMiB).value();
  EXPECT_EQ(table_->Seal(secret_, grant.id).code(), absl::StatusCode::kFailedPrecondition);
  const std::string client = table_->IssueTicket(secret_, grant.id, -1).value();
  EXPECT_EQ(table_->Redeem(client, Peer(1), UniqueFd()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const UniqueFd fd = table_->Redeem(grant.manager_ticket, Ourselves(), UniqueFd()).value().fd;
  const Mapping writer = Mapping::Map(fd.get(), grant.bytes, Mapping::kReadWrite).value();
  ASSERT_TRUE(table_->Seal(secret_, grant.id).ok());
  EXPECT_TRUE(table_->Seal(secret_, grant.id).ok());  // Idempotent.
  EXPECT_FALSE(Mapping::Map(fd.get(), grant.bytes, Mapping::kReadWrite).ok());
  writer.data()[1] = std::byte{9};
  const UniqueFd read = table_->Redeem(client, Peer(1), UniqueFd()).value().fd;
  EXPECT_EQ(Mapping::Map(read.get(), grant.bytes, Mapping::kReadOnly)->data()[1], std::byte{9});
  EXPECT_TRUE(CheckSizeSealed(read.get()).ok());
}

TEST_F(BufferTableTest, ManagerTicketIsGoodOnceAndForOurUid) {
  const AllocationGrant grant = table_->Allocate(secret_, "uid:1", kMiB).value();
  const uid_t stranger = ::geteuid() + 12345;
  EXPECT_EQ(table_->Redeem(grant.manager_ticket, Peer(stranger), UniqueFd()).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(table_->Redeem(grant.manager_ticket, Ourselves(), UniqueFd()).ok());
  EXPECT_EQ(table_->Redeem(grant.manager_ticket, Ourselves(), UniqueFd()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(BufferTableTest, OthersAllocationsAreUnknown) {
  const AllocationGrant grant = Sealed(kMiB);
  const std::string other = table_->AttachManager("other", 1).value();
  EXPECT_EQ(table_->Release(other, grant.id).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->Seal(other, grant.id).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->IssueTicket(other, grant.id, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->Allocate(RandomSecret(), "uid:1", 1).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->Heartbeat("short").code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(table_->Usage().bytes_used, kMiB);
}

TEST_F(BufferTableTest, TicketsEndWithTheirAllocation) {
  const AllocationGrant grant = Sealed(kMiB);
  const std::string ticket = table_->IssueTicket(secret_, grant.id, -1).value();
  ASSERT_TRUE(table_->Redeem(ticket, Peer(1), UniqueFd()).ok());
  ASSERT_TRUE(table_->Release(secret_, grant.id).ok());
  EXPECT_EQ(table_->Redeem(ticket, Peer(1), UniqueFd()).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(BufferTableTest, CountsAreBounded) {
  BufferTableOptions options;
  options.managers_max = 2;
  options.allocations_max = 3;
  options.tickets_per_allocation_max = 2;
  Restart(options);
  ASSERT_TRUE(table_->AttachManager("second", 1).ok());
  EXPECT_EQ(table_->AttachManager("third", 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(table_->AttachManager("", 1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(table_->AttachManager(std::string(1000, 'x'), 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  uint64_t id = 0;
  for (int i = 0; i < 3; ++i) id = table_->Allocate(secret_, "uid:1", 1)->id;
  EXPECT_EQ(table_->Allocate(secret_, "uid:1", 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(table_->IssueTicket(secret_, id, 1).ok());
  EXPECT_TRUE(table_->IssueTicket(secret_, id, 2).ok());
  EXPECT_EQ(table_->IssueTicket(secret_, id, 3).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(table_->IssueTicket(secret_, id, -2).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(BufferTableTest, LeaseEndsAManagerThatMappedNothing) {
  ASSERT_TRUE(table_->Allocate(secret_, "uid:1", kMiB).ok());
  clock_.AdvanceMs(kLeaseMs - 1);
  ASSERT_TRUE(table_->Heartbeat(secret_).ok());
  clock_.AdvanceMs(kLeaseMs - 1);
  table_->Reap();
  EXPECT_EQ(table_->Usage().managers, 1u);
  clock_.AdvanceMs(1);
  table_->Reap();
  EXPECT_EQ(table_->Usage().managers, 0u);
  EXPECT_EQ(table_->Usage().bytes_used, 0u);
  EXPECT_EQ(table_->Heartbeat(secret_).code(), absl::StatusCode::kNotFound);
}

TEST_F(BufferTableTest, OnlyItsDeathEndsAManagerThatMappedSomething) {
  ChildProcess manager({"/bin/sleep", "1000"});
  UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, manager.pid(), 0)));
  ASSERT_TRUE(process.valid());
  Fetched(secret_, kMiB, std::move(process));
  // It is stopped, say: its lease ends, but it maps the memory.
  clock_.AdvanceMs(100 * kLeaseMs);
  table_->Reap();
  EXPECT_EQ(table_->Usage().bytes_used, kMiB);
  EXPECT_TRUE(table_->Heartbeat(secret_).ok());
  manager.Kill();
  table_->Reap();  // At once, within the lease.
  EXPECT_EQ(table_->Usage().bytes_used, 0u);
  EXPECT_EQ(table_->Usage().managers, 0u);
}

// Memory that fails to come must not stay counted.
class FailingMemory : public DeviceMemory {
 public:
  std::string backend() const override { return "failing"; }
  std::string device_uuid() const override { return "failing"; }
  bool pinned() const override { return false; }
  uint64_t allocation_unit_bytes() const override { return 4096; }
  uint64_t overhead_bytes() const override { return 0; }
  absl::StatusOr<std::unique_ptr<DeviceAllocation>> Allocate(const std::string& /*name*/,
                                                             uint64_t /*bytes*/) override {
    return absl::ResourceExhaustedError("the device has no memory left");
  }
};

TEST_F(BufferTableTest, FailedAllocationLeavesNothingBehind) {
  FailingMemory failing;
  BufferTableOptions options;
  options.bytes_max = kMiB;
  BufferTable table(options, &failing, &clock_);
  const std::string secret = table.AttachManager("test", 1).value();
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(std::string(table.Allocate(secret, "uid:1", kMiB).status().message()),
                HasSubstr("the device has no memory left"));
  }
  EXPECT_EQ(table.Usage().bytes_used, 0u);
  EXPECT_EQ(table.Usage().allocations, 0u);
}

}  // namespace
}  // namespace wavekv
