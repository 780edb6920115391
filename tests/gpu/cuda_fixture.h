// What the tests of wavebufferd --backend=cuda share.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "gpu/buffer_client.h"
#include "gpu/buffer_stager.h"
#include "tests/gpu/child_process.h"
#include "tests/gpu/stage_rows.h"
#include "tests/gpu/test_backend.h"
#include "tests/program_path.h"

namespace wavekv {

inline constexpr uint64_t kCudaBufferBytes = uint64_t{8} << 20;
inline constexpr SequenceId kCudaSequence{0x100000001};

// One layer of one KV head.
inline ModelShape CudaShape() {
  ModelShape shape;
  shape.layer_count = 1;
  shape.query_head_count = 2;
  shape.kv_head_count = 1;
  shape.key_dim = 64;
  shape.value_dim = 64;
  shape.dtype = DType::kBF16;
  shape.softmax_scale = 0.125f;
  return shape;
}

// A step that stages rows coded by `tag`.
inline std::vector<StageHead> CudaHeads(uint32_t tag) {
  StageHead head;
  head.steady.push_back(RunOf(std::make_shared<CodedRows>(CudaShape(), tag, 0, 68), 0, 0));
  head.retrieved.push_back(RunOf(std::make_shared<CodedRows>(CudaShape(), tag, 100, 19), 7, 3));
  return {head};
}

// A start that must fail: `flags` beside --backend=cuda, what it says, and how it ends.
struct CudaRefusal {
  std::string name;
  std::vector<std::string> flags;
  std::vector<std::string> says;
  int exit_code = 1;  // 2: a flag that no machine would take.
};
void ExpectRefused(const CudaRefusal& row);

class CudaBufferTest : public ::testing::Test {
 protected:
  void Start(uint64_t lent_bytes = uint64_t{64} << 20) {
    wavebufferd_ =
        std::make_unique<WavebufferdProcess>(directory_.path(), backend_.Flags(lent_bytes));
    ASSERT_TRUE(wavebufferd_->ready()) << wavebufferd_->process().output();
    client_ = CreateBufferClient(wavebufferd_->address()).value();
  }
  std::unique_ptr<Stager> Connect() {
    BufferStagerOptions options;
    options.tenant_buffer_bytes = kCudaBufferBytes;
    options.cache_bytes_min = 64 << 10;
    options.staging_tokens = 512;
    options.heartbeat_ms = 20;
    auto stager = ConnectWaveBuffer(wavebufferd_->address(), options);
    EXPECT_TRUE(stager.ok()) << stager.status();
    return *std::move(stager);
  }
  // What is lent or still mapped.
  uint64_t BytesLent() { return client_->Stats().value().bytes_used - backend_.context_bytes(); }

  const TestBackend backend_{"cuda"};
  TempDir directory_;
  std::unique_ptr<WavebufferdProcess> wavebufferd_;
  std::unique_ptr<BufferClient> client_;
};

}  // namespace wavekv
