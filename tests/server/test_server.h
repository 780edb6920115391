// An engine and a server in this process, on a UNIX socket of their own, and raw clients of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "daemon/engine/engine.h"
#include "daemon/server/server.h"
#include "grpcpp/grpcpp.h"
#include "storage/base/unique_fd.h"
#include "tests/temp_dir.h"
#include "wavekv/v1/wavekv.grpc.pb.h"

namespace wavekv {

struct TestServerOptions {
  ServerOptions server;
  uint64_t pool_bytes = 256ull << 20;
  uint64_t recording_queue_bytes = 1ull << 20;
  std::function<std::unique_ptr<Stager>()> stager;  // Of each life; empty: none.
  TestServerOptions();
};

class TestServer {
 public:
  explicit TestServer(TestServerOptions options = {});
  // Serves again as a new life of the daemon: other epoch, empty engine, same socket.
  void Restart();

  Server* server() { return server_.get(); }
  Engine* engine() { return engine_.get(); }
  const std::string& directory() const { return directory_.path(); }
  std::string address() const { return server_->unix_address(); }
  // Waits, with a bound, until the engine holds no live bytes and no sequence.
  bool BecomesEmpty();

 private:
  void Start();

  const TempDir directory_;
  TestServerOptions options_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Server> server_;
};

// One connection, perhaps attached. Every call has a deadline.
class TestClient {
 public:
  // `token`: sent with every call when not empty.
  explicit TestClient(const std::string& address, std::string token = "");
  // Speaks over a socket that somebody has connected.
  explicit TestClient(UniqueFd connection);

  // Attaches, or tells why not.
  grpc::Status Attach(uint64_t lease_ms = 0);
  // Metadata of an attached client.
  std::unique_ptr<grpc::ClientContext> Context() const;
  // Metadata of choice; an empty secret is left out, as is epoch 0.
  std::unique_ptr<grpc::ClientContext> Context(const std::string& secret, uint64_t epoch) const;

  // Creates the sequence of TestShape() with room for `max_tokens`; fails the test otherwise.
  v1::SequenceRef Create(uint64_t max_tokens);
  // Inserts `token_count` tokens at `first` into all layers in one message.
  grpc::Status Insert(const v1::SequenceRef& sequence, uint64_t first, uint64_t token_count);
  grpc::Status Build(const v1::SequenceRef& sequence, v1::BuildIndexProgress* last = nullptr);

  v1::WaveKV::Stub* stub() const { return stub_.get(); }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }
  const v1::AttachReply& attached() const { return attached_; }

 private:
  const std::string token_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::WaveKV::Stub> stub_;
  v1::AttachReply attached_;
};

// 2 layers, 4 query heads, 2 KV heads, key dim 32, value dim 48, f32.
v1::ModelShape TestShape();
// The key and the value of a position; they depend on layer, position and head.
std::vector<float> TestKey(uint32_t layer, uint64_t position, uint32_t head);
std::vector<float> TestValue(uint32_t layer, uint64_t position, uint32_t head);
// The chunk of all layers, [layers, tokens, kv_heads, dim].
v1::InsertRequest TestChunk(const v1::SequenceRef& sequence, uint64_t first, uint64_t token_count);
// [query_heads, key_dim]
v1::Tensor TestQueries(uint64_t seed);
// Exact attention in double over TestKey and TestValue of positions [0, token_count):
// [query_heads, value_dim].
std::vector<double> ExactAttention(uint32_t layer, uint64_t token_count, const v1::Tensor& queries);

}  // namespace wavekv
