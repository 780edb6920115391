// A test with daemons of its own and a session with them.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/session.h"
#include "gtest/gtest.h"
#include "tests/integration/daemons.h"
#include "tests/integration/host_cache.h"

#define ASSERT_OK(expr)                                                  \
  do {                                                                   \
    const absl::Status assert_ok_status_ = (expr);                       \
    ASSERT_TRUE(assert_ok_status_.ok()) << assert_ok_status_.ToString(); \
  } while (false)

#define EXPECT_OK(expr)                                                  \
  do {                                                                   \
    const absl::Status expect_ok_status_ = (expr);                       \
    EXPECT_TRUE(expect_ok_status_.ok()) << expect_ok_status_.ToString(); \
  } while (false)

namespace wavekv::integration {

inline absl::Status StatusOf(const absl::Status& status) { return status; }
template <class T>
absl::Status StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

// A fresh seed, printed; WAVEKV_TEST_SEED repeats one.
inline uint64_t FreshSeed() {
  const char* const wanted = std::getenv("WAVEKV_TEST_SEED");
  const uint64_t seed =
      wanted == nullptr ? std::random_device()() : std::strtoull(wanted, nullptr, 10);
  std::cout << "WAVEKV_TEST_SEED=" << seed << std::endl;
  return seed;
}

// Calls `done` until it is true or the time is up.
inline bool Eventually(const std::function<bool()>& done,
                       std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  while (std::chrono::steady_clock::now() < end) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return done();
}

class SdkTest : public testing::Test {
 protected:
  void Start(const DaemonOptions& options) {
    auto daemons = Daemons::Start(options);
    ASSERT_OK(daemons.status());
    daemons_ = std::move(daemons).value();
    attach_wave_buffer_ = !options.wave_buffer && daemons_->has_wave_buffer();
    session_ = Connect();
  }

  std::unique_ptr<client::Session> Connect(
      std::chrono::milliseconds deadline = std::chrono::seconds(30),
      std::chrono::milliseconds lease = {}) {
    client::ClientOptions options;
    options.address = daemons_->address();
    options.client_name = testing::UnitTest::GetInstance()->current_test_info()->name();
    options.deadline = deadline;
    options.lease = lease;
    auto session = client::Session::Connect(options);
    EXPECT_TRUE(session.ok()) << session.status().ToString();
    return session.ok() ? std::move(session).value() : nullptr;
  }

  static ModelShape Shape(DType dtype = DType::kF32) {
    ModelShape shape;
    shape.layer_count = 2;
    shape.query_head_count = 4;
    shape.kv_head_count = 2;
    shape.key_dim = 64;
    shape.value_dim = 32;
    shape.dtype = dtype;
    shape.softmax_scale = 0.125f;
    shape.model_id = "integration";
    return shape;
  }

  absl::StatusOr<std::unique_ptr<client::Sequence>> Create(const ModelShape& shape,
                                                           uint64_t max_tokens) {
    client::SequenceOptions options;
    options.shape = shape;
    options.max_tokens = max_tokens;
    options.label = "integration test";
    options.attach_wave_buffer = attach_wave_buffer_;
    return session_->CreateSequence(options);
  }

  // A sequence that holds all of `cache`; its index is built.
  std::unique_ptr<client::Sequence> CreateFilled(HostCache* cache, uint64_t spare_tokens = 64) {
    auto sequence = Create(cache->shape(), cache->token_count() + spare_tokens);
    EXPECT_TRUE(sequence.ok()) << sequence.status().ToString();
    if (!sequence.ok()) return nullptr;
    const HostCache::Chunk chunk = cache->All();
    const absl::Status inserted = (*sequence)->Insert(0, chunk.layers, chunk.keys, chunk.values);
    EXPECT_TRUE(inserted.ok()) << inserted.ToString();
    const absl::Status built = (*sequence)->BuildIndex().status();
    EXPECT_TRUE(built.ok()) << built.ToString();
    return std::move(sequence).value();
  }

  // As Sequence::Attend. Where the environment has brought a wave buffer (DaemonOptions), the rows
  // that are staged there give the same answer.
  absl::StatusOr<client::Attention> Attend(client::Sequence& sequence, uint32_t layer,
                                           const client::Tensor& queries,
                                           const client::AttendOptions& options = {}) const {
    absl::StatusOr<client::Attention> attention = sequence.Attend(layer, queries, options);
    if (attach_wave_buffer_ && attention.ok()) {
      const auto staged = sequence.AttendStaged(layer, queries, {.budget = options.budget});
      EXPECT_TRUE(staged.ok()) << staged.status();
      if (staged.ok()) ExpectAlike(*attention, *staged);
    }
    return attention;
  }

  Daemons& daemons() { return *daemons_; }
  client::Session& session() { return *session_; }

  // Sequences stage into a wave buffer that their test did not ask for.
  bool attach_wave_buffer_ = false;
  // Destroyed in reverse order: the session detaches before the daemons stop.
  std::unique_ptr<Daemons> daemons_;
  std::unique_ptr<client::Session> session_;

 private:
  // Two sums of the same terms, each as near to float64 as FAULTS 23 asks for.
  static void ExpectAlike(const client::Attention& served, const client::Attention& staged) {
    EXPECT_EQ(staged.token_count, served.token_count);
    EXPECT_EQ(staged.counters.retrieved_clusters, served.counters.retrieved_clusters);
    const std::vector<double> out(served.out.begin(), served.out.end());
    if (std::any_of(out.begin(), out.end(), [](double x) { return x != 0; })) {
      EXPECT_LT(RelativeError(staged.out, out), 1e-3);
    } else {
      EXPECT_EQ(staged.out, served.out);
    }
    ASSERT_EQ(staged.lse.size(), served.lse.size());
    for (size_t head = 0; head < served.lse.size(); ++head) {
      if (staged.lse[head] == served.lse[head]) continue;  // Both may be -inf.
      EXPECT_NEAR(staged.lse[head], served.lse[head], 1e-5 * std::abs(served.lse[head]) + 1e-3);
    }
  }
};

}  // namespace wavekv::integration
