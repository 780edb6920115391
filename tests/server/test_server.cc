#include "tests/server/test_server.h"

#include <fcntl.h>

#include <chrono>
#include <cmath>
#include <random>
#include <thread>
#include <utility>

#include "grpcpp/create_channel_posix.h"
#include "gtest/gtest.h"
#include "proto/rpc/metadata.h"
#include "proto/rpc/tensor_wire.h"
#include "storage/base/check.h"

namespace wavekv {
namespace {

constexpr auto kCallDeadline = std::chrono::seconds(60);
constexpr auto kEmptyDeadline = std::chrono::seconds(20);
constexpr uint32_t kLayers = 2;
constexpr uint32_t kQueryHeads = 4;
constexpr uint32_t kKvHeads = 2;
constexpr uint32_t kKeyDim = 32;
constexpr uint32_t kValueDim = 48;

std::vector<float> Row(uint64_t seed, uint32_t dim) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> row(dim);
  for (float& value : row) value = normal(random);
  return row;
}

void Append(const std::vector<float>& row, std::vector<float>* rows) {
  rows->insert(rows->end(), row.begin(), row.end());
}

}  // namespace

TestServerOptions::TestServerOptions() {
  server.worker_threads = 4;
  server.sequences_max = 64;
  server.tokens_max = 1u << 20;
  server.batch_max = 16;
  server.shutdown_grace_ms = 2000;
}

TestServer::TestServer(TestServerOptions options) : options_(std::move(options)) {
  options_.server.listen = "unix:" + directory_.path() + "/s";
  Start();
}

void TestServer::Start() {
  EngineOptions engine_options;
  engine_options.epoch = ++options_.server.epoch;
  engine_options.build_threads = 1;
  engine_options.compute_threads = 1;
  engine_options.sequences_max = options_.server.sequences_max;
  engine_options.tokens_max = options_.server.tokens_max;
  engine_options.batch_max = options_.server.batch_max;
  engine_options.recordings_max = options_.server.recordings_max;
  engine_options.recording_queue_bytes = options_.recording_queue_bytes;
  absl::StatusOr<std::unique_ptr<Engine>> engine =
      Engine::Create(engine_options, BlockPool::Create({.bytes_max = options_.pool_bytes}),
                     CreateCpuBackend(), options_.stager ? options_.stager() : nullptr);
  WAVEKV_CHECK(engine.ok(), "no engine");
  engine_ = *std::move(engine);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(options_.server, engine_.get());
  EXPECT_TRUE(server.ok()) << server.status();
  WAVEKV_CHECK(server.ok(), "no server");
  server_ = *std::move(server);
}

void TestServer::Restart() {
  server_.reset();
  engine_.reset();
  Start();
}

bool TestServer::BecomesEmpty() {
  const auto deadline = std::chrono::steady_clock::now() + kEmptyDeadline;
  while (std::chrono::steady_clock::now() < deadline) {
    const PoolUsage usage = engine_->Stats().pool;
    if (usage.reserved_bytes == 0 && usage.allocated_bytes == 0 && usage.payload_bytes == 0 &&
        engine_->ListSequences("", SequenceId(0), 1).empty()) {
      return true;
    }
    std::this_thread::yield();
  }
  return false;
}

TestClient::TestClient(const std::string& address, std::string token) : token_(std::move(token)) {
  grpc::ChannelArguments arguments;
  // A connection of its own, not one shared with the test before.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  channel_ = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  stub_ = v1::WaveKV::NewStub(channel_);
}

TestClient::TestClient(UniqueFd connection) {
  const int fd = connection.release();
  WAVEKV_CHECK(fcntl(fd, F_SETFL, O_NONBLOCK) == 0, "gRPC wants sockets that do not block");
  channel_ = grpc::CreateInsecureChannelFromFd("inherited", fd);
  stub_ = v1::WaveKV::NewStub(channel_);
}

std::unique_ptr<grpc::ClientContext> TestClient::Context(const std::string& secret,
                                                         uint64_t epoch) const {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + kCallDeadline);
  context->set_wait_for_ready(true);
  if (!secret.empty()) context->AddMetadata(kSecretKey, secret);
  if (epoch != 0) context->AddMetadata(kEpochKey, std::to_string(epoch));
  if (!token_.empty()) context->AddMetadata(kAuthorizationKey, kBearerPrefix + token_);
  return context;
}

std::unique_ptr<grpc::ClientContext> TestClient::Context() const {
  return Context(attached_.secret(), attached_.epoch());
}

grpc::Status TestClient::Attach(uint64_t lease_ms) {
  v1::AttachRequest request;
  request.set_protocol_version_min(1);
  request.set_protocol_version_max(1);
  request.set_client_name("test");
  request.set_lease_ms(lease_ms);
  return stub_->Attach(Context("", 0).get(), request, &attached_);
}

v1::SequenceRef TestClient::Create(uint64_t max_tokens) {
  v1::CreateSequenceRequest request;
  *request.mutable_shape() = TestShape();
  request.set_max_tokens(max_tokens);
  request.set_label("a label");
  v1::CreateSequenceReply reply;
  const grpc::Status status = stub_->CreateSequence(Context().get(), request, &reply);
  EXPECT_TRUE(status.ok()) << status.error_message();
  v1::SequenceRef sequence;
  sequence.set_sequence_id(reply.sequence_id());
  sequence.set_generation(reply.generation());
  return sequence;
}

grpc::Status TestClient::Insert(const v1::SequenceRef& sequence, uint64_t first,
                                uint64_t token_count) {
  const std::unique_ptr<grpc::ClientContext> context = Context();
  v1::InsertReply reply;
  const std::unique_ptr<grpc::ClientWriter<v1::InsertRequest>> writer =
      stub_->Insert(context.get(), &reply);
  // A refused write shows in the status.
  static_cast<void>(writer->Write(TestChunk(sequence, first, token_count)));
  writer->WritesDone();
  return writer->Finish();
}

grpc::Status TestClient::Build(const v1::SequenceRef& sequence, v1::BuildIndexProgress* last) {
  v1::BuildIndexRequest request;
  *request.mutable_sequence() = sequence;
  const std::unique_ptr<grpc::ClientContext> context = Context();
  const std::unique_ptr<grpc::ClientReader<v1::BuildIndexProgress>> reader =
      stub_->BuildIndex(context.get(), request);
  v1::BuildIndexProgress progress;
  while (reader->Read(&progress)) {
    if (last != nullptr) *last = progress;
  }
  return reader->Finish();
}

v1::ModelShape TestShape() {
  v1::ModelShape shape;
  shape.set_layer_count(kLayers);
  shape.set_query_head_count(kQueryHeads);
  shape.set_kv_head_count(kKvHeads);
  shape.set_key_dim(kKeyDim);
  shape.set_value_dim(kValueDim);
  shape.set_dtype(v1::DTYPE_F32);
  shape.set_softmax_scale(0.176f);
  shape.set_model_id("test-model");
  return shape;
}

std::vector<float> TestKey(uint32_t layer, uint64_t position, uint32_t head) {
  return Row((position * kLayers + layer) * kKvHeads + head, kKeyDim);
}

std::vector<float> TestValue(uint32_t layer, uint64_t position, uint32_t head) {
  return Row(~((position * kLayers + layer) * kKvHeads + head), kValueDim);
}

v1::InsertRequest TestChunk(const v1::SequenceRef& sequence, uint64_t first, uint64_t token_count) {
  std::vector<float> keys;
  std::vector<float> values;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint64_t position = first; position < first + token_count; ++position) {
      for (uint32_t head = 0; head < kKvHeads; ++head) {
        Append(TestKey(layer, position, head), &keys);
        Append(TestValue(layer, position, head), &values);
      }
    }
  }
  v1::InsertRequest request;
  *request.mutable_sequence() = sequence;
  request.set_first_position(first);
  for (uint32_t layer = 0; layer < kLayers; ++layer) request.add_layers(layer);
  const auto tokens = static_cast<int64_t>(token_count);
  FillWireTensor(DType::kF32, std::vector<int64_t>{kLayers, tokens, kKvHeads, kKeyDim}, keys.data(),
                 request.mutable_keys());
  FillWireTensor(DType::kF32, std::vector<int64_t>{kLayers, tokens, kKvHeads, kValueDim},
                 values.data(), request.mutable_values());
  return request;
}

v1::Tensor TestQueries(uint64_t seed) {
  v1::Tensor queries;
  FillWireTensor(DType::kF32, std::vector<int64_t>{kQueryHeads, kKeyDim},
                 Row(seed ^ 0x5eed, kQueryHeads * kKeyDim).data(), &queries);
  return queries;
}

std::vector<double> ExactAttention(uint32_t layer, uint64_t token_count,
                                   const v1::Tensor& queries) {
  const auto* query = reinterpret_cast<const float*>(queries.data().data());
  std::vector<double> out(kQueryHeads * kValueDim);
  for (uint32_t head = 0; head < kQueryHeads; ++head) {
    const uint32_t kv_head = head / (kQueryHeads / kKvHeads);
    double mass = 0;
    std::vector<double> sum(kValueDim);
    for (uint64_t position = 0; position < token_count; ++position) {
      const std::vector<float> key = TestKey(layer, position, kv_head);
      const std::vector<float> value = TestValue(layer, position, kv_head);
      double dot = 0;
      for (uint32_t i = 0; i < kKeyDim; ++i) dot += double{query[head * kKeyDim + i]} * key[i];
      const double weight = std::exp(dot * double{0.176f});
      mass += weight;
      for (uint32_t i = 0; i < kValueDim; ++i) sum[i] += weight * value[i];
    }
    for (uint32_t i = 0; i < kValueDim; ++i) out[head * kValueDim + i] = sum[i] / mass;
  }
  return out;
}

}  // namespace wavekv
