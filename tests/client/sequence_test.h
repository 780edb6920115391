// A test with a programmable daemon, a session with it and a sequence of its.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "client/session.h"
#include "gtest/gtest.h"
#include "tests/client/fake_daemon.h"

namespace wavekv::client {

// The sequence has 2 layers, 4 query and 2 KV heads of 64 dimensions, in bf16.
class SequenceTest : public ::testing::Test {
 protected:
  explicit SequenceTest(uint64_t max_tokens) : max_tokens_(max_tokens) {}

  void SetUp() override {
    session_ =
        Session::Connect({.address = address_, .deadline = std::chrono::seconds(20)}).value();
    sequence_ = session_
                    ->CreateSequence({.shape = {.layer_count = 2,
                                                .query_head_count = 4,
                                                .kv_head_count = 2,
                                                .key_dim = 64,
                                                .value_dim = 64,
                                                .dtype = DType::kBF16,
                                                .softmax_scale = 0.125f},
                                      .max_tokens = max_tokens_})
                    .value();
  }

  const uint64_t max_tokens_;
  const TempDir dir_;
  const std::string address_ = "unix:" + dir_.path() + "/d.sock";
  FakeDaemon daemon_{address_, {}};
  std::unique_ptr<Session> session_;
  std::unique_ptr<Sequence> sequence_;
};

}  // namespace wavekv::client
