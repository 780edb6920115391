// A test with daemons of its own and a session with them.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>

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

  Daemons& daemons() { return *daemons_; }
  client::Session& session() { return *session_; }

  // Destroyed in reverse order: the session detaches before the daemons stop.
  std::unique_ptr<Daemons> daemons_;
  std::unique_ptr<client::Session> session_;
};

}  // namespace wavekv::integration
