// gRPC calls of plain bytes: for services whose generated code is not at hand (health, reflection),
// and for bytes that no generated code would send.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "grpcpp/generic/generic_stub.h"
#include "grpcpp/grpcpp.h"

namespace wavekv {

struct RawReply {
  grpc::Status status;
  std::vector<std::string> messages;
};

// Calls `method` ("/package.Service/Method"), whatever its kind: sends one message, says that no
// more follow, and reads until the end. The context carries the deadline.
RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const grpc::ByteBuffer& message, std::unique_ptr<grpc::ClientContext> context);
RawReply RawCall(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
                 const std::string& message, std::unique_ptr<grpc::ClientContext> context);

// A stream of bytes, one operation at a time.
class RawStream {
 public:
  RawStream(const std::shared_ptr<grpc::Channel>& channel, const std::string& method,
            std::unique_ptr<grpc::ClientContext> context);
  ~RawStream();

  bool Write(const grpc::ByteBuffer& message);
  void WritesDone();
  bool Read(std::string* message);
  void Cancel() { context_->TryCancel(); }
  grpc::Status Finish();

 private:
  bool Await();

  const std::unique_ptr<grpc::ClientContext> context_;
  grpc::CompletionQueue queue_;
  grpc::GenericStub stub_;
  std::unique_ptr<grpc::GenericClientAsyncReaderWriter> stream_;
};

}  // namespace wavekv
