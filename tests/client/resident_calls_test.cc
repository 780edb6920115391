// AttachResident, ResidentStatus and DetachResident of the SDK against a programmable daemon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/shared_memory.h"
#include "tests/client/sequence_test.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr uint64_t kWindowBytes = 8192;
const std::string kWindowTicket(16, 'w');
const std::string kShortTicket(16, 's');
const std::string kLooseTicket(16, 'l');

class ResidentCallsTest : public SequenceTest {
 protected:
  ResidentCallsTest() : SequenceTest(4096) {}

  void SetUp() override {
    SequenceTest::SetUp();
    FdListener listener = FdListener::Listen(window_socket_).value();
    windows_ = DescriptorServer::Start(std::move(listener), {},
                                       [this](absl::string_view ticket, const PeerCredentials&,
                                              UniqueFd) { return Redeem(std::string(ticket)); })
                   .value();
    daemon_.on_attach_resident = [this](const v1::AttachResidentRequest& request,
                                        v1::AttachResidentReply* reply) {
      asked_ = request;
      *reply = Good();
      if (spoil_) spoil_(reply);
      return grpc::Status::OK;
    };
    daemon_.on_detach_resident = [](const v1::DetachResidentRequest& request,
                                    v1::DetachResidentReply* reply) {
      reply->set_generation(request.sequence().generation());
      reply->set_token_count(1234);
      return grpc::Status::OK;
    };
  }

  absl::StatusOr<Redeemed> Redeem(const std::string& ticket) {
    if (ticket != kWindowTicket && ticket != kShortTicket && ticket != kLooseTicket) {
      return absl::NotFoundError("no such ticket");
    }
    UniqueFd fd = CreateMemfd("window", ticket == kShortTicket ? 4096 : kWindowBytes).value();
    EXPECT_TRUE(ticket == kLooseTicket || SealForReaders(fd.get()).ok());
    return Redeemed(std::move(fd));
  }

  v1::AttachResidentReply Good() const {
    v1::AttachResidentReply reply;
    reply.set_generation(sequence_->generation());
    v1::WaveBufferInfo* buffer = reply.mutable_wave_buffer();
    buffer->set_backend("cuda");
    buffer->set_device_uuid("GPU-1");
    buffer->set_socket("/a/socket");
    buffer->set_ticket(std::string(16, 't'));
    buffer->set_buffer_bytes(1 << 20);
    reply.set_region_offset(4096);
    reply.set_region_bytes(65536);
    reply.set_token_count(1000);
    reply.set_max_tokens(4096);
    reply.set_ring_rows(2304);
    reply.set_window_socket(window_socket_);
    for (int i = 0; i < 2; ++i) {
      v1::PoolWindow* window = reply.add_windows();
      window->set_ticket(kWindowTicket);
      window->set_bytes(kWindowBytes);
    }
    return reply;
  }

  const std::string window_socket_ = dir_.path() + "/d.sock.pool";
  v1::AttachResidentRequest asked_;
  std::function<void(v1::AttachResidentReply*)> spoil_;
  std::unique_ptr<DescriptorServer> windows_;
};

TEST_F(ResidentCallsTest, AnAttachmentComesWithItsWindows) {
  const auto attachment = sequence_->AttachResident({.cache_ratio = 0.1, .ring_rows = 4096});
  ASSERT_TRUE(attachment.ok()) << attachment.status();
  EXPECT_EQ(asked_.sequence().sequence_id(), sequence_->id());
  EXPECT_EQ(asked_.cache_ratio(), 0.1);
  EXPECT_EQ(asked_.ring_rows(), 4096u);
  EXPECT_EQ(attachment->sequence.value(), sequence_->id());
  EXPECT_EQ(attachment->shape, sequence_->shape());
  EXPECT_EQ(attachment->max_tokens, 4096u);
  EXPECT_EQ(attachment->device_uuid, "GPU-1");
  EXPECT_EQ(attachment->socket, "/a/socket");
  EXPECT_EQ(attachment->ticket, std::string(16, 't'));
  EXPECT_EQ(attachment->buffer_bytes, 1u << 20);
  EXPECT_EQ(attachment->region_offset, 4096u);
  EXPECT_EQ(attachment->region_bytes, 65536u);
  EXPECT_EQ(attachment->token_count, 1000u);
  EXPECT_EQ(attachment->ring_rows, 2304u);
  ASSERT_EQ(attachment->windows.size(), 2u);
  for (const PoolWindow& window : attachment->windows) {
    EXPECT_EQ(window.bytes, kWindowBytes);
    EXPECT_TRUE(Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadOnly).ok());
  }
  EXPECT_EQ(daemon_.CallCount("DetachResident"), 0u);
}

struct BadReply {
  const char* what;
  std::function<void(v1::AttachResidentReply*)> spoil;
  absl::StatusCode code = absl::StatusCode::kInternal;
};

TEST_F(ResidentCallsTest, WhatCannotBeIsRefusedAndDetached) {
  using Reply = v1::AttachResidentReply;
  const std::vector<BadReply> rows = {
      {"another generation", [](Reply* r) { r->set_generation(9); }},
      {"host memory", [](Reply* r) { r->mutable_wave_buffer()->set_backend("host"); }},
      {"no ticket", [](Reply* r) { r->mutable_wave_buffer()->set_ticket(""); }},
      {"a region beyond the buffer", [](Reply* r) { r->set_region_offset(1 << 20); }},
      {"a region that wraps around", [](Reply* r) { r->set_region_offset(~uint64_t{0} - 100); }},
      {"a region larger than the buffer", [](Reply* r) { r->set_region_bytes(1 << 21); }},
      {"no region", [](Reply* r) { r->set_region_bytes(0); }},
      {"no ring", [](Reply* r) { r->set_ring_rows(0); }},
      {"more tokens than there may be", [](Reply* r) { r->set_token_count(5000); }},
      {"no windows", [](Reply* r) { r->clear_windows(); }},
      {"an empty window", [](Reply* r) { r->mutable_windows(1)->set_bytes(0); }},
      {"half a window's ticket", [](Reply* r) { r->mutable_windows(1)->set_ticket("12345678"); }},
      {"a window of fewer bytes",
       [](Reply* r) { r->mutable_windows(1)->set_ticket(kShortTicket); }},
      {"a window that may shrink",
       [](Reply* r) { r->mutable_windows(0)->set_ticket(kLooseTicket); },
       absl::StatusCode::kFailedPrecondition},
      {"an unknown window",
       [](Reply* r) { r->mutable_windows(0)->set_ticket(std::string(16, '?')); },
       absl::StatusCode::kNotFound},
  };
  uint64_t detached = 0;
  for (const BadReply& row : rows) {
    SCOPED_TRACE(row.what);
    spoil_ = row.spoil;
    EXPECT_EQ(sequence_->AttachResident().status().code(), row.code);
    EXPECT_EQ(daemon_.CallCount("DetachResident"), ++detached);
  }
  spoil_ = nullptr;
  EXPECT_TRUE(sequence_->AttachResident().ok());
}

TEST_F(ResidentCallsTest, AnOlderDaemonIsNamed) {
  daemon_.on_attach_resident = nullptr;
  const absl::Status status = sequence_->AttachResident().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("update wavekvd"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(address_));
}

TEST_F(ResidentCallsTest, StateIsToldAndTokensAreKnown) {
  std::atomic<int> asked = 0;
  daemon_.on_resident_status = [&](const v1::ResidentStatusRequest& request,
                                   v1::ResidentStatusReply* reply) {
    EXPECT_EQ(request.steady_first_above(), 900u);
    EXPECT_EQ(request.wait_ms(), 1000u) << "the daemon waits no longer at once";
    reply->set_generation(request.sequence().generation());
    reply->set_token_count(1100);
    // The first answer comes when nothing has happened yet.
    reply->set_steady_first(++asked < 2 ? 900 : 1000);
    reply->mutable_counters()->set_hit_blocks(5);
    reply->mutable_counters()->set_miss_blocks(3);
    reply->mutable_counters()->set_overflows(2);
    reply->mutable_counters()->set_violations(1);
    return grpc::Status::OK;
  };
  const auto state = sequence_->ResidentStatus(900, std::chrono::seconds(60));
  ASSERT_TRUE(state.ok()) << state.status();
  EXPECT_EQ(asked, 2);
  EXPECT_TRUE(state->attached.ok());
  EXPECT_EQ(state->token_count, 1100u);
  EXPECT_EQ(state->steady_first, 1000u);
  EXPECT_EQ(state->hit_blocks, 5u);
  EXPECT_EQ(state->miss_blocks, 3u);
  EXPECT_EQ(state->overflows, 2u);
  EXPECT_EQ(state->violations, 1u);
  EXPECT_EQ(sequence_->token_count(1), 1100u);

  daemon_.on_resident_status = [](const v1::ResidentStatusRequest& request,
                                  v1::ResidentStatusReply* reply) {
    EXPECT_EQ(request.wait_ms(), 0u);
    reply->set_generation(request.sequence().generation());
    reply->set_error_code(static_cast<uint32_t>(grpc::StatusCode::UNAVAILABLE));
    reply->set_error_message("wavebufferd was restarted");
    return grpc::Status::OK;
  };
  const auto ended = sequence_->ResidentStatus();
  ASSERT_TRUE(ended.ok()) << ended.status();
  EXPECT_EQ(ended->attached, absl::UnavailableError("wavebufferd was restarted"));

  ASSERT_TRUE(sequence_->DetachResident().ok());
  EXPECT_EQ(sequence_->token_count(0), 1234u);
}

}  // namespace
}  // namespace wavekv::client
