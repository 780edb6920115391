#include "tests/integration/raw_client.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"
#include "proto/rpc/metadata.h"
#include "proto/rpc/protocol_version.h"
#include "proto/rpc/status_conversion.h"
#include "storage/base/status_macros.h"
#include "wavekv/v1/wavekv.grpc.pb.h"

namespace wavekv::integration {
namespace {

constexpr std::chrono::seconds kDeadline(30);
constexpr std::chrono::milliseconds kLease(600'000);

std::string ToString(const grpc::ByteBuffer& buffer) {
  std::vector<grpc::Slice> slices;
  std::string bytes;
  if (!buffer.Dump(&slices).ok()) return bytes;
  for (const grpc::Slice& slice : slices) {
    bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return bytes;
}

}  // namespace

struct RawClient::Impl {
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<v1::WaveKV::Stub> stub;
  std::string token;
  std::string secret;
  uint64_t epoch = 0;

  void Prepare(grpc::ClientContext* context) const {
    context->set_deadline(std::chrono::system_clock::now() + kDeadline);
    if (!token.empty()) context->AddMetadata(kAuthorizationKey, kBearerPrefix + token);
    if (secret.empty()) return;
    context->AddMetadata(kSecretKey, secret);
    context->AddMetadata(kEpochKey, absl::StrCat(epoch));
  }
};

RawClient::RawClient(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
RawClient::~RawClient() = default;

absl::StatusOr<std::unique_ptr<RawClient>> RawClient::Attach(const std::string& address,
                                                             const std::string& token) {
  auto impl = std::make_unique<Impl>();
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Channels of one process must not share a connection that a test is about to spoil.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  impl->channel = grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  impl->stub = v1::WaveKV::NewStub(impl->channel);
  impl->token = token;
  v1::AttachRequest request;
  request.set_protocol_version_min(kProtocolVersionMin);
  request.set_protocol_version_max(kProtocolVersionMax);
  request.set_client_name("integration test");
  request.set_lease_ms(kLease.count());  // No heartbeats here: longer than any test.
  v1::AttachReply reply;
  grpc::ClientContext context;
  impl->Prepare(&context);
  WAVEKV_RETURN_IF_ERROR(FromGrpcStatus(impl->stub->Attach(&context, request, &reply)));
  impl->secret = reply.secret();
  impl->epoch = reply.epoch();
  return std::unique_ptr<RawClient>(new RawClient(std::move(impl)));
}

absl::StatusOr<v1::GetStatsReply> RawClient::Stats() {
  grpc::ClientContext context;
  impl_->Prepare(&context);
  v1::GetStatsReply reply;
  WAVEKV_RETURN_IF_ERROR(FromGrpcStatus(impl_->stub->GetStats(&context, {}, &reply)));
  return reply;
}

absl::StatusOr<v1::AttendReply> RawClient::Attend(const v1::AttendRequest& request) {
  grpc::ClientContext context;
  impl_->Prepare(&context);
  v1::AttendReply reply;
  WAVEKV_RETURN_IF_ERROR(FromGrpcStatus(impl_->stub->Attend(&context, request, &reply)));
  return reply;
}

absl::Status RawClient::Drop(const v1::SequenceRef& sequence) {
  grpc::ClientContext context;
  impl_->Prepare(&context);
  v1::DropSequenceRequest request;
  *request.mutable_sequence() = sequence;
  v1::DropSequenceReply reply;
  return FromGrpcStatus(impl_->stub->DropSequence(&context, request, &reply));
}

absl::StatusOr<v1::InsertReply> RawClient::Insert(const v1::InsertRequest& request) {
  grpc::ClientContext context;
  impl_->Prepare(&context);
  v1::InsertReply reply;
  const auto writer = impl_->stub->Insert(&context, &reply);
  writer->Write(request);
  writer->WritesDone();
  WAVEKV_RETURN_IF_ERROR(FromGrpcStatus(writer->Finish()));
  return reply;
}

absl::StatusOr<std::vector<std::string>> RawClient::CallBytes(
    const std::string& method, const std::vector<std::string>& messages) {
  grpc::ClientContext context;
  impl_->Prepare(&context);
  grpc::CompletionQueue queue;
  grpc::GenericStub stub(impl_->channel);
  const auto call = stub.PrepareCall(&context, method, &queue);
  // One operation is under way at a time; every one ends by the deadline.
  const auto wait = [&queue] {
    void* tag = nullptr;
    bool ok = false;
    return queue.Next(&tag, &ok) && ok;
  };
  call->StartCall(nullptr);
  bool open = wait();
  for (size_t i = 0; i < messages.size() && open; ++i) {
    const grpc::Slice slice(messages[i]);
    call->Write(grpc::ByteBuffer(&slice, 1), nullptr);
    open = wait();
  }
  if (open) {
    call->WritesDone(nullptr);
    open = wait();
  }
  std::vector<std::string> replies;
  while (true) {
    grpc::ByteBuffer buffer;
    call->Read(&buffer, nullptr);
    if (!wait()) break;
    replies.push_back(ToString(buffer));
  }
  grpc::Status status;
  call->Finish(&status, nullptr);
  wait();
  queue.Shutdown();
  WAVEKV_RETURN_IF_ERROR(FromGrpcStatus(status));
  return replies;
}

absl::Status RawClient::CheckHealth() {
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<std::string> replies,
                          CallBytes("/grpc.health.v1.Health/Check", {""}));
  // HealthCheckResponse{status: SERVING}
  if (replies.size() == 1 && replies[0] == std::string("\x08\x01", 2)) return absl::OkStatus();
  return absl::UnavailableError("the health service does not say SERVING");
}

bool HoldsNothing(const v1::GetStatsReply& stats) {
  return stats.pool_reserved_bytes() == 0 && stats.pool_allocated_bytes() == 0 &&
         stats.index_bytes() == 0 &&
         std::all_of(stats.tenants().begin(), stats.tenants().end(),
                     [](const v1::TenantStats& tenant) { return tenant.sequences() == 0; });
}

}  // namespace wavekv::integration
