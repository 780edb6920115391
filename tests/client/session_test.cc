// The SDK against a programmable daemon: leases, epochs, deadlines, splitting, checked replies.
#include "client/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/client/fake_daemon.h"

namespace wavekv::client {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using testing::HasSubstr;
using testing::Not;

ModelShape SmallShape() {
  return {.layer_count = 2,
          .query_head_count = 4,
          .kv_head_count = 2,
          .key_dim = 32,
          .value_dim = 64,
          .dtype = DType::kF32,
          .softmax_scale = 0.125f,
          .model_id = "test"};
}

// Owns the data of a borrowed tensor: numbers that are all different.
struct OwnedTensor {
  OwnedTensor(std::vector<int64_t> shape, Layout layout = Layout::kNHD, float start = 0)
      : data(std::accumulate(shape.begin(), shape.end(), size_t{1},
                             [](size_t a, int64_t b) { return a * static_cast<size_t>(b); })),
        tensor{.dtype = DType::kF32, .shape = std::move(shape), .layout = layout} {
    std::iota(data.begin(), data.end(), start);
    tensor.data = data.data();
  }
  OwnedTensor(const OwnedTensor&) = delete;

  std::vector<float> data;
  Tensor tensor;
};

class SessionTest : public testing::Test {
 protected:
  void StartDaemon(FakeDaemon::Options options = {}) {
    daemon_.reset();
    daemon_ = std::make_unique<FakeDaemon>(address_, std::move(options));
  }
  absl::StatusOr<std::unique_ptr<Session>> Connect(milliseconds deadline = milliseconds(20000),
                                                   milliseconds lease = milliseconds(0)) {
    return Session::Connect({.address = address_,
                             .client_name = "session_test",
                             .deadline = deadline,
                             .build_deadline = milliseconds(20000),
                             .lease = lease});
  }
  std::unique_ptr<Sequence> Create(Session& session) {
    absl::StatusOr<std::unique_ptr<Sequence>> sequence =
        session.CreateSequence({.shape = SmallShape(), .max_tokens = 1024});
    EXPECT_TRUE(sequence.ok()) << sequence.status();
    return sequence.ok() ? *std::move(sequence) : nullptr;
  }

  TempDir dir_;
  const std::string address_ = absl::StrCat("unix:", dir_.path(), "/d.sock");
  std::unique_ptr<FakeDaemon> daemon_;
  const OwnedTensor queries_{{4, 32}};
};

TEST_F(SessionTest, ConnectNamesWhatIsWrong) {
  const absl::Status malformed = Session::Connect({.address = "nowhere"}).status();
  EXPECT_EQ(malformed.code(), absl::StatusCode::kInvalidArgument) << malformed;
  EXPECT_THAT(malformed.message(), HasSubstr("nowhere"));

  const auto start = steady_clock::now();
  const absl::Status nobody = Connect().status();
  EXPECT_EQ(nobody.code(), absl::StatusCode::kUnavailable) << nobody;
  EXPECT_THAT(nobody.message(), HasSubstr(address_));
  EXPECT_LT(steady_clock::now() - start, milliseconds(10000)) << "waited for nobody";

  const absl::Status name =
      Session::Connect({.address = address_, .client_name = std::string(129, 'x')}).status();
  EXPECT_EQ(name.code(), absl::StatusCode::kInvalidArgument) << name;
}

TEST_F(SessionTest, AttachReplyIsChecked) {
  struct Row {
    const char* why;
    std::function<void(v1::AttachReply*)> spoil;
    absl::StatusCode code;
    const char* text;
  };
  const Row rows[] = {
      {"short secret", [](v1::AttachReply* reply) { reply->set_secret("short"); },
       absl::StatusCode::kInternal, "5 bytes"},
      {"no epoch", [](v1::AttachReply* reply) { reply->set_epoch(0); }, absl::StatusCode::kInternal,
       "epoch 0"},
      {"no lease", [](v1::AttachReply* reply) { reply->set_lease_ms(0); },
       absl::StatusCode::kInternal, "lease 0"},
      {"a version of the future", [](v1::AttachReply* reply) { reply->set_protocol_version(999); },
       absl::StatusCode::kFailedPrecondition, "version 999"},
  };
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    StartDaemon();
    daemon_->on_attach = [&](const v1::AttachRequest&, v1::AttachReply* reply) {
      row.spoil(reply);
      return grpc::Status::OK;
    };
    const absl::Status status = Connect().status();
    EXPECT_EQ(status.code(), row.code) << status;
    EXPECT_THAT(status.message(), HasSubstr(row.text));
  }
}

TEST_F(SessionTest, InfoIsTheDaemons) {
  StartDaemon({.epoch = 99});
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const ClientInfo info = (*session)->info();
  EXPECT_EQ(info.epoch, 99u);
  EXPECT_EQ(info.tenant, "uid:1000");
  EXPECT_EQ(info.daemon_version, "fake");
  EXPECT_FALSE(info.has_wave_buffer);
}

TEST_F(SessionTest, AppendsFollowTheTokenCount) {
  StartDaemon();
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  const OwnedTensor keys({2, 5, 2, 32});
  const OwnedTensor values({2, 5, 2, 64});
  const uint32_t layers[] = {0, 1};
  ASSERT_TRUE(sequence->Insert(0, layers, keys.tensor, values.tensor).ok());
  EXPECT_EQ(sequence->token_count(1), 5u);

  std::vector<uint64_t> positions;
  daemon_->on_attend = [&](const v1::AttendRequest& request, v1::AttendReply*) {
    positions.push_back(request.items(0).append_position());
    return grpc::Status::OK;
  };
  const OwnedTensor key({2, 32});
  const OwnedTensor value({2, 64});
  for (int step = 0; step < 3; ++step) {
    const auto attention = sequence->Attend(
        1, queries_.tensor, {.append_keys = key.tensor, .append_values = value.tensor});
    ASSERT_TRUE(attention.ok()) << attention.status();
    EXPECT_EQ(attention->out.size(), 4u * 64);
    EXPECT_EQ(attention->lse, std::vector<float>(4, 1.0f)) << "the layer's own answer";
  }
  EXPECT_THAT(positions, testing::ElementsAre(5, 6, 7));
  EXPECT_EQ(sequence->token_count(0), 5u);
  EXPECT_EQ(sequence->token_count(1), 8u);

  const auto child = sequence->Fork(3);
  ASSERT_TRUE(child.ok()) << child.status();
  EXPECT_EQ((*child)->token_count(1), 3u);
  EXPECT_NE((*child)->id(), sequence->id());

  ASSERT_TRUE(sequence->Truncate(4).ok());
  EXPECT_EQ(sequence->generation(), 2u);
  EXPECT_EQ(sequence->token_count(0), 4u);
  EXPECT_EQ(sequence->token_count(1), 4u);
  EXPECT_TRUE(sequence->Attend(0, queries_.tensor).ok()) << "the new generation is used";
}

TEST_F(SessionTest, InsertIsSplitAndCarriesEveryByte) {
  constexpr int64_t kTokens = 700;
  StartDaemon({.message_bytes_max = 64 << 10});
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  for (const Layout layout : {Layout::kNHD, Layout::kHND}) {
    SCOPED_TRACE(layout == Layout::kNHD ? "NHD" : "HND");
    const size_t messages_before = daemon_->inserts().size();
    const auto sequence = Create(**session);
    const bool nhd = layout == Layout::kNHD;
    const OwnedTensor keys(
        nhd ? std::vector<int64_t>{2, kTokens, 2, 32} : std::vector<int64_t>{2, 2, kTokens, 32},
        layout);
    const OwnedTensor values(
        nhd ? std::vector<int64_t>{2, kTokens, 2, 64} : std::vector<int64_t>{2, 2, kTokens, 64},
        layout, 1e6f);
    const uint32_t layers[] = {1, 0};
    const absl::Status status = sequence->Insert(0, layers, keys.tensor, values.tensor);
    ASSERT_TRUE(status.ok()) << status;

    // Element (layer, token, head, d) of a tensor [2, ...] with `tokens` tokens.
    const auto at = [&](const float* data, size_t tokens, size_t dim, size_t layer, size_t token,
                        size_t head, size_t d) {
      return nhd ? data[((layer * tokens + token) * 2 + head) * dim + d]
                 : data[((layer * 2 + head) * tokens + token) * dim + d];
    };
    std::vector<v1::InsertRequest> messages = daemon_->inserts();
    messages.erase(messages.begin(), messages.begin() + messages_before);
    ASSERT_GT(messages.size(), 5u);
    uint64_t position = 0;
    for (const v1::InsertRequest& message : messages) {
      EXPECT_LE(message.ByteSizeLong(), 64u << 10);
      EXPECT_EQ(message.sequence().sequence_id(), sequence->id());
      EXPECT_EQ(message.sequence().generation(), 1u);
      ASSERT_THAT(message.layers(), testing::ElementsAre(1, 0));
      ASSERT_EQ(message.first_position(), position);
      const size_t count = static_cast<size_t>(message.keys().shape(nhd ? 1 : 2));
      ASSERT_EQ(message.keys().data().size(), 2 * count * 2 * 32 * 4);
      ASSERT_EQ(message.values().data().size(), 2 * count * 2 * 64 * 4);
      std::vector<float> sent_keys(2 * count * 2 * 32);
      std::vector<float> sent_values(2 * count * 2 * 64);
      std::memcpy(sent_keys.data(), message.keys().data().data(), message.keys().data().size());
      std::memcpy(sent_values.data(), message.values().data().data(),
                  message.values().data().size());
      for (size_t layer = 0; layer < 2; ++layer) {
        for (size_t token = 0; token < count; ++token) {
          for (size_t head = 0; head < 2; ++head) {
            for (size_t d = 0; d < 64; ++d) {
              ASSERT_EQ(at(sent_values.data(), count, 64, layer, token, head, d),
                        at(values.data.data(), kTokens, 64, layer, position + token, head, d));
              if (d >= 32) continue;
              ASSERT_EQ(at(sent_keys.data(), count, 32, layer, token, head, d),
                        at(keys.data.data(), kTokens, 32, layer, position + token, head, d));
            }
          }
        }
      }
      position += count;
    }
    EXPECT_EQ(position, static_cast<uint64_t>(kTokens));
  }
}

TEST_F(SessionTest, InsertStopsAtTheDaemonsWord) {
  StartDaemon({.message_bytes_max = 32 << 10});
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  daemon_->on_insert = [](const v1::InsertRequest& request) {
    if (request.first_position() == 0) return grpc::Status::OK;
    return grpc::Status(grpc::StatusCode::RESOURCE_EXHAUSTED, "no more room");
  };
  const OwnedTensor keys({4000, 2, 32});
  const OwnedTensor values({4000, 2, 64});
  const uint32_t layers[] = {0};
  const absl::Status status = sequence->Insert(0, layers, keys.tensor, values.tensor);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.message(), HasSubstr("no more room"));
  EXPECT_EQ(sequence->token_count(0), 0u);
  daemon_->on_insert = nullptr;
  EXPECT_TRUE(sequence->Insert(0, layers, keys.tensor, values.tensor).ok()) << "safe to repeat";
  EXPECT_EQ(sequence->token_count(0), 4000u);
}

TEST_F(SessionTest, ARestartedDaemonIsToldFromALostLease) {
  StartDaemon({.epoch = 1});
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  const uint64_t old_id = sequence->id();

  daemon_->ForgetClients();
  EXPECT_TRUE(sequence->Attend(0, queries_.tensor).ok()) << "same daemon: attach again, go on";
  EXPECT_EQ(daemon_->CallCount("Attach"), 2u);

  StartDaemon({.epoch = 2});
  const absl::Status status = sequence->Attend(0, queries_.tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("restarted"));
  EXPECT_EQ(daemon_->CallCount("Attach"), 1u) << "the session has attached again by itself";
  EXPECT_EQ((*session)->info().epoch, 2u);

  const uint64_t attends = daemon_->CallCount("Attend");
  EXPECT_EQ(sequence->Attend(0, queries_.tensor).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(sequence->Drop().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(daemon_->CallCount("Attend"), attends) << "an old id reached the new daemon";
  EXPECT_EQ(daemon_->CallCount("DropSequence"), 0u) << "an old id reached the new daemon";

  const auto fresh = Create(**session);
  ASSERT_NE(fresh, nullptr);
  EXPECT_NE(fresh->id(), old_id);
  EXPECT_TRUE(fresh->Attend(0, queries_.tensor).ok());

  const AttendItem items[] = {{.sequence = sequence.get(), .queries = queries_.tensor},
                              {.sequence = fresh.get(), .queries = queries_.tensor}};
  const auto batch = (*session)->AttendBatch(items);
  ASSERT_TRUE(batch.ok()) << batch.status();
  EXPECT_EQ((*batch)[0].status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE((*batch)[1].ok()) << (*batch)[1].status();
}

TEST_F(SessionTest, AnIdleSessionAttachesAgainByItself) {
  StartDaemon({.epoch = 1});
  const auto session = Connect(milliseconds(20000), milliseconds(60));
  ASSERT_TRUE(session.ok()) << session.status();
  StartDaemon({.epoch = 2});
  EXPECT_TRUE(daemon_->WaitForCalls("Attach", 1));
}

TEST_F(SessionTest, HeartbeatsKeepTheLease) {
  StartDaemon();
  const auto session = Connect(milliseconds(20000), milliseconds(60));
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_TRUE(daemon_->WaitForCalls("Heartbeat", 4));
  EXPECT_EQ(daemon_->CallCount("Attach"), 1u);
}

TEST_F(SessionTest, OneCallThatHangsIsNotADeadDaemon) {
  StartDaemon();
  const auto session = Connect(milliseconds(800));
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  daemon_->Hang("Attend");
  const auto start = steady_clock::now();
  const absl::Status status = sequence->Attend(0, queries_.tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LT(steady_clock::now() - start, milliseconds(5000));
  daemon_->Unhang("Attend");
  EXPECT_TRUE(sequence->Attend(0, queries_.tensor).ok());
}

TEST_F(SessionTest, AStoppedDaemonCostsOneDeadline) {
  constexpr milliseconds kDeadline(3000);
  StartDaemon();
  const auto session = Connect(kDeadline);
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  for (const char* call : {"Attend", "Heartbeat", "Estimate"}) daemon_->Hang(call);
  const absl::Status first = sequence->Attend(0, queries_.tensor).status();
  EXPECT_EQ(first.code(), absl::StatusCode::kUnavailable) << first;
  EXPECT_THAT(first.message(), HasSubstr(address_));

  const auto start = steady_clock::now();
  const absl::Status second = sequence->Estimate(0, queries_.tensor).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kUnavailable) << second;
  EXPECT_LT(steady_clock::now() - start, kDeadline / 2) << "a second deadline was spent";

  for (const char* call : {"Attend", "Heartbeat", "Estimate"}) daemon_->Unhang(call);
  EXPECT_TRUE(sequence->Attend(0, queries_.tensor).ok()) << "and it is found again";
}

TEST_F(SessionTest, ADaemonThatFallsSilentEndsALongCall) {
  StartDaemon();
  const auto session = Connect(milliseconds(500), milliseconds(60));
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  daemon_->Hang("BuildIndex");
  daemon_->Hang("Heartbeat");
  const auto start = steady_clock::now();
  const absl::Status status = sequence->BuildIndex().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_LT(steady_clock::now() - start, milliseconds(15000)) << "waited for build_deadline";
}

TEST_F(SessionTest, ADeadDaemonIsUnavailableAtOnce) {
  StartDaemon();
  const auto session = Connect(milliseconds(20000));
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  daemon_.reset();
  for (int call = 0; call < 3; ++call) {
    const auto start = steady_clock::now();
    const absl::Status status = sequence->Attend(0, queries_.tensor).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_LT(steady_clock::now() - start, milliseconds(5000));
  }
}

TEST_F(SessionTest, DestructionDropsAndReleaseDoesNot) {
  StartDaemon();
  auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  auto dropped = Create(**session);
  auto released = Create(**session);
  auto outliving = Create(**session);
  EXPECT_EQ(daemon_->live_sequences().size(), 3u);
  dropped.reset();
  released->Release();
  const uint64_t released_id = released->id();
  released.reset();
  EXPECT_THAT(daemon_->live_sequences(), testing::ElementsAre(released_id, outliving->id()));
  auto released_and_dropped = Create(**session);
  released_and_dropped->Release();
  EXPECT_TRUE(released_and_dropped->Drop().ok());
  EXPECT_EQ(released_and_dropped->Drop().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(daemon_->live_sequences().size(), 2u);

  session->reset();
  EXPECT_EQ(daemon_->CallCount("Detach"), 1u);
  const absl::Status status = outliving->Attend(0, queries_.tensor).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(status.message(), HasSubstr("closed"));
}

TEST_F(SessionTest, BatchesKeepOrderAndSplitAtTheLimit) {
  StartDaemon({.batch_max = 4});
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  std::vector<std::unique_ptr<Sequence>> sequences;
  std::vector<AttendItem> items;
  for (uint32_t i = 0; i < 10; ++i) {
    sequences.push_back(Create(**session));
    items.push_back(
        {.sequence = sequences.back().get(), .layer = i % 2, .queries = queries_.tensor});
  }
  const OwnedTensor wrong({4, 31});
  items[3].queries = wrong.tensor;
  items[5].sequence = nullptr;
  ASSERT_TRUE(sequences[7]->Drop().ok());
  const auto batch = (*session)->AttendBatch(items);
  ASSERT_TRUE(batch.ok()) << batch.status();
  ASSERT_EQ(batch->size(), items.size());
  EXPECT_EQ(daemon_->CallCount("Attend"), 2u) << "8 sound items, 4 a call";
  for (uint32_t i = 0; i < items.size(); ++i) {
    const absl::StatusOr<Attention>& result = (*batch)[i];
    if (i == 3 || i == 5) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument) << result.status();
    } else if (i == 7) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kNotFound) << result.status();
    } else {
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_EQ(result->out[0], static_cast<float>(sequences[i]->id() & 0xffffffffu));
      EXPECT_EQ(result->lse[0], static_cast<float>(i % 2));
    }
  }
}

TEST_F(SessionTest, RepliesAreNotTrusted) {
  struct Row {
    const char* why;
    std::function<void(v1::AttendReply*)> spoil;
  };
  const Row rows[] = {
      {"no result", [](v1::AttendReply* reply) { reply->clear_results(); }},
      {"two results", [](v1::AttendReply* reply) { reply->add_results(); }},
      {"a byte is missing",
       [](v1::AttendReply* reply) {
         reply->mutable_results(0)->mutable_out()->mutable_data()->pop_back();
       }},
      {"another shape with as many bytes",
       [](v1::AttendReply* reply) {
         reply->mutable_results(0)->mutable_out()->set_shape(0, 8);
         reply->mutable_results(0)->mutable_out()->set_shape(1, 32);
       }},
      {"another dtype with as many bytes",
       [](v1::AttendReply* reply) {
         reply->mutable_results(0)->mutable_lse()->set_dtype(v1::DTYPE_BF16);
         reply->mutable_results(0)->mutable_lse()->set_shape(0, 8);
       }},
      {"a negative dimension",
       [](v1::AttendReply* reply) { reply->mutable_results(0)->mutable_out()->set_shape(0, -4); }},
      {"another generation",
       [](v1::AttendReply* reply) { reply->mutable_results(0)->set_generation(9); }},
  };
  StartDaemon();
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  for (const Row& row : rows) {
    SCOPED_TRACE(row.why);
    daemon_->on_attend = [&](const v1::AttendRequest&, v1::AttendReply* reply) {
      row.spoil(reply);
      return grpc::Status::OK;
    };
    const absl::Status status = sequence->Attend(0, queries_.tensor).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  }
}

TEST_F(SessionTest, BuildIndexReportsProgressAndItsEnd) {
  StartDaemon();
  const auto session = Connect();
  ASSERT_TRUE(session.ok()) << session.status();
  const auto sequence = Create(**session);
  v1::BuildIndexProgress half;
  half.set_tokens_done(5);
  half.set_tokens_total(10);
  half.set_generation(1);
  v1::BuildIndexProgress end = half;
  end.set_tokens_done(10);
  end.set_done(true);
  end.set_version(3);

  daemon_->build_progress = {half};
  EXPECT_EQ(sequence->BuildIndex().status().code(), absl::StatusCode::kInternal)
      << "a stream that ends early is no success";
  daemon_->build_progress = {half, end};
  std::vector<uint64_t> seen;
  const auto result = sequence->BuildIndex(
      [&](const BuildProgress& progress) { seen.push_back(progress.tokens_done); });
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->version, 3u);
  EXPECT_THAT(seen, testing::ElementsAre(5, 10));
}

}  // namespace
}  // namespace wavekv::client
