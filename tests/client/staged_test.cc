// AttendStaged over a wave buffer that the test itself lays out, as docs/formats.md has it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "storage/base/fd_socket.h"
#include "storage/base/shared_memory.h"
#include "tests/client/fake_daemon.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr uint64_t kBufferBytes = 64 << 10;
constexpr uint64_t kRegionOffset = 8192;
constexpr uint64_t kRegionBytes = 32 << 10;
constexpr uint64_t kStateOffset = 32;
constexpr uint64_t kDirectoryOffset = 4096;

ModelShape Shape() {
  return {.layer_count = 1,
          .query_head_count = 4,
          .kv_head_count = 2,
          .key_dim = 32,
          .value_dim = 48,
          .dtype = DType::kF32,
          .softmax_scale = 0.25f,
          .model_id = "test"};
}

// Writes a little-endian number into the buffer.
template <class T>
void Put(const Mapping& buffer, uint64_t offset, T value) {
  std::memcpy(buffer.data() + offset, &value, sizeof(value));
}

// A wave buffer as wavekvd writes it, and the socket at which wavebufferd hands it out.
class FakeBuffer {
 public:
  FakeBuffer(const std::string& socket_path, std::string ticket, bool sealed = true)
      : ticket_(std::move(ticket)),
        fd_(CreateMemfd("fake_buffer", kBufferBytes).value()),
        mapping_(Mapping::Map(fd_.get(), kBufferBytes, Mapping::kReadWrite).value()),
        listener_(FdListener::Listen(socket_path).value()) {
    EXPECT_TRUE(!sealed || SealForReaders(fd_.get()).ok());
    Put<uint64_t>(mapping_, 0, 0x3146554245564157);
    Put<uint32_t>(mapping_, 8, 1);
    Put<uint32_t>(mapping_, 12, 4);
    Put<uint64_t>(mapping_, 16, kBufferBytes);
    Put<uint64_t>(mapping_, 24, kDirectoryOffset);
    Put<uint64_t>(mapping_, kStateOffset, 1);
    thread_ = std::thread([this] { Serve(); });
  }
  ~FakeBuffer() {
    stopping_ = true;
    thread_.join();
  }

  // As when the sequence goes: nobody finds the region from here on.
  void RemoveRegion() {
    Put<uint64_t>(mapping_, kDirectoryOffset + 32, 0);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void AddRegion(uint64_t sequence_id, uint64_t step) {
    const uint64_t entry = kDirectoryOffset + 32;  // The second one: the first stays free.
    Put<uint64_t>(mapping_, entry + 8, kRegionOffset);
    Put<uint64_t>(mapping_, entry + 16, kRegionBytes);
    Put<uint64_t>(mapping_, kRegionOffset, 0x3147455245564157);
    Put<uint64_t>(mapping_, kRegionOffset + 8, sequence_id);
    Put<uint64_t>(mapping_, kRegionOffset + 64, step);
    Put<uint64_t>(mapping_, entry, sequence_id);
  }
  void Close() { Put<uint64_t>(mapping_, kStateOffset, 2); }

  v1::WaveBufferInfo info() const {
    v1::WaveBufferInfo info;
    info.set_backend("host");
    info.set_device_uuid("host");
    info.set_socket(listener_.path());
    info.set_ticket(ticket_);
    info.set_buffer_bytes(kBufferBytes);
    return info;
  }
  const Mapping& mapping() const { return mapping_; }

 private:
  void Serve() {
    while (!stopping_) {
      absl::StatusOr<FdSocket> peer = listener_.Accept(milliseconds(20));
      if (!peer.ok()) continue;
      const absl::StatusOr<FdMessage> request = peer->Receive(64, milliseconds(5000));
      const bool known = request.ok() && request->bytes == ticket_;
      const std::string reply =
          known ? std::string(1, '\0') : absl::StrCat(std::string(1, '\x05'), "unknown ticket");
      EXPECT_TRUE(peer->Send(reply, known ? fd_.get() : -1, milliseconds(5000)).ok());
    }
  }

  const std::string ticket_;
  const UniqueFd fd_;
  const Mapping mapping_;
  FdListener listener_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

class StagedTest : public testing::Test {
 protected:
  StagedTest() {
    std::mt19937 random(seed_);
    std::normal_distribution<float> normal;
    for (auto* values : {&queries_, &keys_, &values_, &estimated_out_, &estimated_lse_}) {
      for (float& value : *values) value = normal(random);
    }
  }

  void Start(std::vector<v1::WaveBufferInfo> buffers) {
    daemon_ = std::make_unique<FakeDaemon>(address_,
                                           FakeDaemon::Options{.wave_buffers = std::move(buffers)});
    // KV head h has kRows rows: two steady ones in one run, then a cluster in two blocks.
    daemon_->on_query = [this](const v1::QueryRequest&, v1::QueryReply* reply) {
      for (uint32_t head = 0; head < 2; ++head) {
        v1::HeadZones* const zones = reply->mutable_heads(static_cast<int>(head));
        zones->set_steady_tokens(2);
        zones->add_retrieved()->set_size(kRows - 2);
        uint32_t row = 0;
        for (const uint32_t count : {2u, 3u, kRows - 5}) {
          v1::StagedRows* const run = zones->add_staged();
          run->set_key_offset(KeyOffset(head, row));
          run->set_value_offset(ValueOffset(head, row));
          run->set_row_count(count);
          row += count;
        }
      }
      v1::EstimateReply* const estimation = reply->mutable_estimation();
      estimation->mutable_out()->set_data(estimated_out_.data(), estimated_out_.size() * 4);
      estimation->mutable_lse()->set_data(estimated_lse_.data(), estimated_lse_.size() * 4);
      if (spoil_) spoil_(reply);
      return grpc::Status::OK;
    };
    session_ = Session::Connect({.address = address_}).value();
    sequence_ =
        session_->CreateSequence({.shape = Shape(), .max_tokens = 64, .attach_wave_buffer = true})
            .value();
  }

  static uint64_t KeyOffset(uint32_t head, uint32_t row) {
    return kRegionOffset + 128 + (head * kRows + row) * 32 * 4;
  }
  static uint64_t ValueOffset(uint32_t head, uint32_t row) {
    return kRegionOffset + 128 + 2 * kRows * 32 * 4 + (head * kRows + row) * 48 * 4;
  }
  void Stage(const FakeBuffer& buffer) const {
    std::memcpy(buffer.mapping().data() + KeyOffset(0, 0), keys_.data(), keys_.size() * 4);
    std::memcpy(buffer.mapping().data() + ValueOffset(0, 0), values_.data(), values_.size() * 4);
  }
  absl::StatusOr<Attention> AttendStaged() {
    return sequence_->AttendStaged(
        0, {.dtype = DType::kF32, .shape = {4, 32}, .data = queries_.data()});
  }

  void ExpectOracle(const Attention& attention) const {
    SCOPED_TRACE(testing::Message() << "seed " << seed_);
    for (size_t head = 0; head < 4; ++head) {
      // The estimation zone is one more token with logit lse and value out.
      std::vector<double> weights = {std::exp(double{estimated_lse_[head]})};
      double sum = weights[0];
      for (size_t row = 0; row < kRows; ++row) {
        double dot = 0;
        for (size_t d = 0; d < 32; ++d) {
          dot += double{queries_[head * 32 + d]} * double{keys_[(head / 2 * kRows + row) * 32 + d]};
        }
        weights.push_back(std::exp(0.25 * dot));
        sum += weights.back();
      }
      EXPECT_NEAR(attention.lse[head], std::log(sum), 1e-5);
      for (size_t d = 0; d < 48; ++d) {
        double expected = weights[0] * double{estimated_out_[head * 48 + d]};
        for (size_t row = 0; row < kRows; ++row) {
          expected += weights[row + 1] * double{values_[(head / 2 * kRows + row) * 48 + d]};
        }
        ASSERT_NEAR(attention.out[head * 48 + d], expected / sum, 1e-5);
      }
    }
  }

  static constexpr uint32_t kRows = 11;
  const uint32_t seed_ = std::random_device()();
  const TempDir dir_;
  const std::string address_ = absl::StrCat("unix:", dir_.path(), "/d.sock");
  std::vector<float> queries_ = std::vector<float>(4 * 32);
  std::vector<float> keys_ = std::vector<float>(2 * kRows * 32);
  std::vector<float> values_ = std::vector<float>(2 * kRows * 48);
  std::vector<float> estimated_out_ = std::vector<float>(4 * 48);
  std::vector<float> estimated_lse_ = std::vector<float>(4);
  std::function<void(v1::QueryReply*)> spoil_;
  std::unique_ptr<FakeDaemon> daemon_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Sequence> sequence_;
};

TEST_F(StagedTest, EqualsTheOracleAndAcknowledges) {
  FakeBuffer buffer(dir_.path() + "/b.sock", "0123456789abcdef");
  Start({buffer.info()});
  EXPECT_TRUE(session_->info().has_wave_buffer);
  buffer.AddRegion(sequence_->id(), 100);
  Stage(buffer);
  for (int step = 0; step < 3; ++step) {
    const auto attention = AttendStaged();
    ASSERT_TRUE(attention.ok()) << attention.status();
    ExpectOracle(*attention);
  }
  std::vector<uint64_t> completed;
  for (const v1::QueryRequest& query : daemon_->queries()) {
    completed.push_back(query.completed_step());
  }
  EXPECT_THAT(completed, testing::ElementsAre(0, 1, 2));
}

TEST_F(StagedTest, ABufferThatCameLaterOrCameBackIsFound) {
  Start({});
  const absl::Status none = AttendStaged().status();
  EXPECT_EQ(none.code(), absl::StatusCode::kFailedPrecondition) << none;
  EXPECT_THAT(none.message(), HasSubstr("wavebufferd"));

  FakeBuffer first(dir_.path() + "/b1.sock", "first ticket ...");
  first.AddRegion(sequence_->id(), 100);
  Stage(first);
  daemon_->SetWaveBuffers({first.info()});
  auto attention = AttendStaged();
  ASSERT_TRUE(attention.ok()) << attention.status();
  ExpectOracle(*attention);

  // The old buffer keeps its rows, now stale; only its header says that it is closed.
  first.Close();
  for (float& value : values_) value += 1;
  FakeBuffer second(dir_.path() + "/b2.sock", "second ticket ..");
  second.AddRegion(sequence_->id(), 100);
  Stage(second);
  daemon_->SetWaveBuffers({second.info()});
  attention = AttendStaged();
  ASSERT_TRUE(attention.ok()) << attention.status();
  ExpectOracle(*attention);
}

TEST_F(StagedTest, RowsThatAreNotThereAreNoAnswer) {
  FakeBuffer buffer(dir_.path() + "/b.sock", "0123456789abcdef");
  Start({buffer.info()});
  EXPECT_EQ(AttendStaged().status().code(), absl::StatusCode::kNotFound) << "no region";
  buffer.AddRegion(sequence_->id(), 1);
  EXPECT_EQ(AttendStaged().status().code(), absl::StatusCode::kNotFound) << "step 2 is not ready";
  buffer.AddRegion(sequence_->id(), 100);
  ASSERT_TRUE(AttendStaged().ok());

  struct Row {
    const char* why;
    std::function<void(v1::QueryReply*)> spoil;
  };
  const Row rows[] = {
      {"a run is missing",
       [](v1::QueryReply* reply) { reply->mutable_heads(1)->mutable_staged()->RemoveLast(); }},
      {"nothing is staged", [](v1::QueryReply* reply) { reply->mutable_heads(0)->clear_staged(); }},
      {"outside the region",
       [](v1::QueryReply* reply) {
         reply->mutable_heads(0)->mutable_staged(0)->set_key_offset(kRegionOffset - 128);
       }},
      {"behind the buffer",
       [](v1::QueryReply* reply) {
         reply->mutable_heads(0)->mutable_staged(0)->set_value_offset(~uint64_t{0} - 3);
       }},
      {"a head twice", [](v1::QueryReply* reply) { reply->mutable_heads(1)->set_kv_head(0); }},
      {"an unknown head", [](v1::QueryReply* reply) { reply->mutable_heads(1)->set_kv_head(2); }},
      {"a head is missing", [](v1::QueryReply* reply) { reply->mutable_heads()->RemoveLast(); }},
      {"another generation", [](v1::QueryReply* reply) { reply->set_generation(7); }},
      {"the estimation is missing", [](v1::QueryReply* reply) { reply->clear_estimation(); }},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    spoil_ = row.spoil;
    const absl::Status status = AttendStaged().status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
}

// FAULTS 11: a region is given back, and its memory used for others, while a reader is at it. What
// it has read may be anything: it is an answer only if the region is there afterwards.
TEST_F(StagedTest, RowsOfARegionThatIsUsedAgainAreNoAnswer) {
  FakeBuffer buffer(dir_.path() + "/b.sock", "0123456789abcdef");
  Start({buffer.info()});
  const std::vector<float> others(keys_.size() + values_.size(), 3.0f);
  std::mt19937 random(seed_);
  std::atomic<int> queried{0};
  spoil_ = [&](v1::QueryReply*) { ++queried; };
  // Until the owner takes the region back, at most: about as many steps are to be refused as are
  // answered, however fast the machine is.
  int64_t pause_max_ns = 300'000;
  int answered = 0, refused = 0;
  for (int round = 0; round < 3000 && (answered < 100 || refused < 100); ++round) {
    buffer.AddRegion(sequence_->id(), 1'000'000);
    Stage(buffer);
    const int before = queried;
    const auto pause = std::chrono::nanoseconds(random() % pause_max_ns);
    std::atomic<bool> over = false;
    std::thread owner([&] {
      while (queried == before && !over) std::this_thread::yield();
      const auto until = std::chrono::steady_clock::now() + pause;
      while (std::chrono::steady_clock::now() < until) {
      }
      buffer.RemoveRegion();
      std::memcpy(buffer.mapping().data() + KeyOffset(0, 0), others.data(), others.size() * 4);
    });
    const auto attention = AttendStaged();
    over = true;
    owner.join();
    if (attention.ok()) {
      ExpectOracle(*attention);
      ++answered;
    } else {
      EXPECT_EQ(attention.status().code(), absl::StatusCode::kNotFound) << attention.status();
      ++refused;
    }
    if (round % 20 == 19) {
      pause_max_ns =
          answered < refused ? 2 * pause_max_ns : std::max<int64_t>(1000, pause_max_ns / 2);
      pause_max_ns = std::min<int64_t>(pause_max_ns, 100'000'000);
    }
    if (HasFailure()) break;
  }
  EXPECT_GT(answered, 0);
  EXPECT_GT(refused, 0);
}

TEST_F(StagedTest, HostileBuffersAreRefused) {
  struct Row {
    const char* why;
    bool sealed;
    std::function<void(FakeBuffer&)> spoil;
    std::function<void(v1::WaveBufferInfo*)> spoil_info;
    absl::StatusCode code;
  };
  const auto no_info = [](v1::WaveBufferInfo*) {};
  const Row rows[] = {
      {"could shrink under us", false, [](FakeBuffer&) {}, no_info,
       absl::StatusCode::kFailedPrecondition},
      {"another magic", true, [](FakeBuffer& b) { Put<uint64_t>(b.mapping(), 0, 1); }, no_info,
       absl::StatusCode::kDataLoss},
      {"another version", true, [](FakeBuffer& b) { Put<uint32_t>(b.mapping(), 8, 2); }, no_info,
       absl::StatusCode::kDataLoss},
      {"a directory without end", true,
       [](FakeBuffer& b) { Put<uint32_t>(b.mapping(), 12, 0xffffffff); }, no_info,
       absl::StatusCode::kDataLoss},
      {"a directory behind the end", true,
       [](FakeBuffer& b) { Put<uint64_t>(b.mapping(), 24, ~uint64_t{7}); }, no_info,
       absl::StatusCode::kDataLoss},
      {"a region behind the end", true,
       [](FakeBuffer& b) { Put<uint64_t>(b.mapping(), kDirectoryOffset + 32 + 8, kBufferBytes); },
       no_info, absl::StatusCode::kDataLoss},
      {"a region that is too large", true,
       [](FakeBuffer& b) { Put<uint64_t>(b.mapping(), kDirectoryOffset + 32 + 16, ~uint64_t{0}); },
       no_info, absl::StatusCode::kDataLoss},
      {"fewer bytes than promised", true, [](FakeBuffer&) {},
       [](v1::WaveBufferInfo* info) { info->set_buffer_bytes(kBufferBytes + 1); },
       absl::StatusCode::kDataLoss},
      {"an unknown ticket", true, [](FakeBuffer&) {},
       [](v1::WaveBufferInfo* info) { info->set_ticket("fedcba9876543210"); },
       absl::StatusCode::kNotFound},
      {"nobody at the socket", true, [](FakeBuffer&) {},
       [](v1::WaveBufferInfo* info) { info->set_socket("/nonexistent/b.sock"); },
       absl::StatusCode::kNotFound},
  };
  int count = 0;
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    sequence_.reset();
    session_.reset();
    daemon_.reset();
    FakeBuffer buffer(absl::StrCat(dir_.path(), "/b", ++count, ".sock"), "0123456789abcdef",
                      row.sealed);
    v1::WaveBufferInfo info = buffer.info();
    row.spoil_info(&info);
    Start({info});
    buffer.AddRegion(sequence_->id(), 100);
    row.spoil(buffer);
    const absl::Status status = AttendStaged().status();
    EXPECT_EQ(status.code(), row.code) << status;
  }
}

TEST_F(StagedTest, NeedsTheOptionOfTheSequence) {
  Start({});
  const auto plain = session_->CreateSequence({.shape = Shape(), .max_tokens = 64});
  ASSERT_TRUE(plain.ok()) << plain.status();
  const absl::Status status =
      (*plain)->AttendStaged(0, {.shape = {4, 32}, .data = queries_.data()}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("attach_wave_buffer"));
}

}  // namespace
}  // namespace wavekv::client
