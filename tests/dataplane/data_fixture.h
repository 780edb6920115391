// A data plane over the engine of EngineTest, and clients that speak the channel without the SDK.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "daemon/dataplane/data_plane.h"
#include "proto/shm/client_channel.h"
#include "proto/shm/replies.h"
#include "proto/shm/requests.h"
#include "storage/base/mutex.h"
#include "tests/engine/engine_fixture.h"

namespace wavekv::testing {

// Knows clients by the first byte of their secret, and counts what it is told.
class FakeClients final : public DataClients {
 public:
  // Secret of client n (1 ... 255).
  static std::string SecretOf(uint8_t client) { return std::string(16, static_cast<char>(client)); }

  absl::StatusOr<std::unique_ptr<DataLease>> Admit(const PeerCredentials& peer,
                                                   absl::string_view secret,
                                                   uint64_t epoch) override;

  std::atomic<int64_t> leases{0};   // Alive.
  std::atomic<int64_t> running{0};  // Calls.
  std::atomic<uint64_t> calls{0};
  std::atomic<bool> refuse_calls{false};  // As after a lease's end.
};

// What an Attend answered.
struct DataAttention {
  absl::Status status;
  uint64_t token_count = 0;
  std::vector<float> out;
  std::vector<float> lse;
};

// One client's channel. Thread-safe as ClientChannel is.
class DataPeer {
 public:
  explicit DataPeer(std::shared_ptr<shm::ClientChannel> channel) : channel_(std::move(channel)) {}

  absl::Status Insert(const InsertChunk& chunk);
  DataAttention Attend(const shm::AttendItemRequest& item);
  std::vector<DataAttention> AttendBatch(std::span<const shm::AttendItemRequest> items);
  // The bytes of any call's reply, or its error.
  absl::StatusOr<std::vector<std::byte>> Call(uint64_t verb, std::span<const std::byte> request,
                                              uint64_t reply_bytes);
  shm::ClientChannel& channel() { return *channel_; }

 private:
  std::shared_ptr<shm::ClientChannel> channel_;
};

// Shapes and bytes of an engine's request as the channel's.
shm::TensorRef ToRef(const TensorView& view);
shm::LayerQueryRequest ToRequest(const LayerQuery& query);

class DataPlaneTest : public EngineTest {
 protected:
  DataPlaneTest();
  ~DataPlaneTest() override;

  // Replaces the data plane.
  void StartPlane(DataPlaneOptions options);
  absl::StatusOr<std::shared_ptr<shm::ClientChannel>> TryConnect(const shm::Hello& hello);
  // As client n.
  DataPeer Connect(uint8_t client = 1);
  // Waits, with a bound, until the plane holds no channel and no lease.
  bool BecomesIdle();

  const std::string& path() const { return path_; }

  FakeClients clients_;
  shm::SpinSlots slots_{2};
  std::unique_ptr<DataPlane> plane_;

 private:
  std::string directory_;
  std::string path_;
};

}  // namespace wavekv::testing
