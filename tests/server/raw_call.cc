#include "tests/server/raw_call.h"

#include <utility>

namespace wavekv {

RawStream::RawStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                     std::unique_ptr<grpc::ClientContext> context)
    : context_(std::move(context)),
      stub_(channel),
      stream_(stub_.PrepareCall(context_.get(), method, &queue_)) {
  stream_->StartCall(this);
  Await();
}

RawStream::~RawStream() {
  queue_.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (queue_.Next(&tag, &ok)) {
  }
}

bool RawStream::Await() {
  void* tag = nullptr;
  bool ok = false;
  return queue_.Next(&tag, &ok) && ok;
}

bool RawStream::Write(const grpc::ByteBuffer& message) {
  stream_->Write(message, this);
  return Await();
}

void RawStream::WritesDone() {
  stream_->WritesDone(this);
  Await();
}

bool RawStream::Read(std::string* message) {
  grpc::ByteBuffer buffer;
  stream_->Read(&buffer, this);
  if (!Await()) return false;
  std::vector<grpc::Slice> slices;
  message->clear();
  if (!buffer.Dump(&slices).ok()) return false;
  for (const grpc::Slice& slice : slices) {
    message->append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  }
  return true;
}

grpc::Status RawStream::Finish() {
  grpc::Status status;
  stream_->Finish(&status, this);
  Await();
  return status;
}

RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const grpc::ByteBuffer& message, std::unique_ptr<grpc::ClientContext> context) {
  RawStream stream(channel, method, std::move(context));
  RawReply reply;
  if (stream.Write(message)) stream.WritesDone();
  std::string bytes;
  while (stream.Read(&bytes)) reply.messages.push_back(bytes);
  reply.status = stream.Finish();
  return reply;
}

RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const std::string& message, std::unique_ptr<grpc::ClientContext> context) {
  const grpc::Slice slice(message);
  return RawCall(channel, method, grpc::ByteBuffer(&slice, 1), std::move(context));
}

}  // namespace wavekv
