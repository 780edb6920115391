#include "tests/dataplane/data_fixture.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include "storage/base/check.h"

namespace wavekv::testing {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr seconds kDeadline(60);

class FakeLease final : public DataLease {
 public:
  FakeLease(FakeClients* clients, ClientId client) : clients_(clients), client_(client) {
    ++clients_->leases;
  }
  ~FakeLease() override { --clients_->leases; }
  ClientId client() const override { return client_; }
  const TenantId& tenant() const override { return tenant_; }
  absl::Status BeginCall() override {
    if (clients_->refuse_calls.load()) return absl::UnauthenticatedError("the lease is over");
    ++clients_->running;
    return absl::OkStatus();
  }
  void EndCall(shm::Verb /*verb*/, std::optional<absl::StatusCode> code,
               double /*latency_us*/) override {
    --clients_->running;
    if (code.has_value()) ++clients_->calls;
  }

 private:
  FakeClients* const clients_;
  const ClientId client_;
  const TenantId tenant_ = kTenant;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DataLease>> FakeClients::Admit(const PeerCredentials& peer,
                                                              absl::string_view secret,
                                                              uint64_t epoch) {
  if (peer.uid != ::getuid()) return absl::UnauthenticatedError("another uid");
  if (epoch != 1) return absl::FailedPreconditionError("stale epoch");
  const auto client = static_cast<uint8_t>(secret[0]);
  if (client == 0 || secret != SecretOf(client))
    return absl::UnauthenticatedError("unknown secret");
  return std::make_unique<FakeLease>(this, ClientId(client));
}

shm::TensorRef ToRef(const TensorView& view) {
  return {.dtype = view.dtype,
          .layout = view.layout == Layout::kHND ? shm::TensorLayout::kHND : shm::TensorLayout::kNHD,
          .shape = view.shape,
          .data = view.data};
}

shm::LayerQueryRequest ToRequest(const LayerQuery& query) {
  return {.sequence_id = query.sequence.id.value(),
          .generation = query.sequence.generation.value(),
          .layer = query.layer,
          .queries = ToRef(query.queries)};
}

absl::StatusOr<std::vector<std::byte>> DataPeer::Call(uint64_t verb,
                                                      std::span<const std::byte> request,
                                                      uint64_t reply_bytes) {
  const shm::TimePoint deadline = steady_clock::now() + kDeadline;
  shm::ClientChannel::Call call;
  shm::CallState state = channel_->Begin(request.size(), reply_bytes, deadline, &call);
  if (state == shm::CallState::kAnswered) {
    std::copy(request.begin(), request.end(), call.request().begin());
    state = channel_->Submit(verb, deadline, &call);
  }
  if (state == shm::CallState::kAnswered) state = channel_->Wait(deadline, &call);
  if (state != shm::CallState::kAnswered) return absl::UnavailableError("no answer");
  if (call.code() != absl::StatusCode::kOk) return call.status();
  return std::vector<std::byte>(call.reply().begin(), call.reply().end());
}

absl::Status DataPeer::Insert(const InsertChunk& chunk) {
  const shm::InsertRequest request{.sequence_id = chunk.sequence.id.value(),
                                   .generation = chunk.sequence.generation.value(),
                                   .first_position = chunk.first_position,
                                   .layers = chunk.layers,
                                   .keys = ToRef(chunk.keys),
                                   .values = ToRef(chunk.values)};
  std::vector<std::byte> bytes(shm::PlaceInsert(request).bytes);
  shm::EncodeInsert(request, bytes);
  return Call(shm::kInsert, bytes, shm::InsertReplyBytes()).status();
}

DataAttention DataPeer::Attend(const shm::AttendItemRequest& item) {
  return AttendBatch({&item, 1}).front();
}

std::vector<DataAttention> DataPeer::AttendBatch(std::span<const shm::AttendItemRequest> items) {
  std::vector<std::byte> bytes(shm::AttendBytes(items));
  shm::EncodeAttend(items, bytes);
  const auto reply = Call(shm::kAttend, bytes, shm::AttendReplyBytes(items.size(), 64, 256));
  std::vector<DataAttention> found(items.size());
  if (!reply.ok()) {
    for (DataAttention& attention : found) attention.status = reply.status();
    return found;
  }
  const shm::ReplyReader reader(*reply);
  EXPECT_EQ(reader.Get<shm::WireAttendReply>(0)->result_count, items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    const auto result = reader
                            .Get<shm::WireAttendResult>(sizeof(shm::WireAttendReply) +
                                                        i * sizeof(shm::WireAttendResult))
                            .value();
    const auto text = reader.Run(result.text).value();
    found[i].status =
        absl::Status(static_cast<absl::StatusCode>(result.code),
                     absl::string_view(reinterpret_cast<const char*>(text.data()), text.size()));
    found[i].token_count = result.token_count;
    found[i].out.resize(result.out.bytes / sizeof(float));
    found[i].lse.resize(result.lse.bytes / sizeof(float));
    EXPECT_TRUE(reader.Copy(result.out, found[i].out.size(), 4, found[i].out.data(), "out").ok());
    EXPECT_TRUE(reader.Copy(result.lse, found[i].lse.size(), 4, found[i].lse.data(), "lse").ok());
  }
  return found;
}

DataPlaneTest::DataPlaneTest() {
  char name[] = "/tmp/wavekv_data_XXXXXX";
  WAVEKV_CHECK(::mkdtemp(name) != nullptr, "no directory");
  directory_ = name;
  path_ = directory_ + "/s.data";
  StartPlane({});
}

DataPlaneTest::~DataPlaneTest() {
  plane_.reset();
  ::rmdir(directory_.c_str());
}

void DataPlaneTest::StartPlane(DataPlaneOptions options) {
  plane_.reset();
  options.path = path_;
  plane_ = DataPlane::Start(options, engine_.get(), &clients_).value();
}

absl::StatusOr<std::shared_ptr<shm::ClientChannel>> DataPlaneTest::TryConnect(
    const shm::Hello& hello) {
  return shm::ClientChannel::Connect(path_, hello, kDeadline, &slots_);
}

DataPeer DataPlaneTest::Connect(uint8_t client) {
  return DataPeer(
      TryConnect(
          {.version = shm::kChannelVersion, .epoch = 1, .secret = FakeClients::SecretOf(client)})
          .value());
}

bool DataPlaneTest::BecomesIdle() {
  const auto deadline = steady_clock::now() + kDeadline;
  while (steady_clock::now() < deadline) {
    if (plane_->channel_count() == 0 && clients_.leases.load() == 0) return true;
    std::this_thread::yield();
  }
  return false;
}

}  // namespace wavekv::testing
