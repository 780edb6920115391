// wavekv.v1 spoken without the SDK: to ask what the SDK does not, and to send what it never would.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv::integration {

// Whether no sequence of those that the caller may see holds anything.
bool HoldsNothing(const v1::GetStatsReply& stats);

// An attached client. Every call has a deadline. Thread-safe.
class RawClient {
 public:
  // `token` is for TCP.
  static absl::StatusOr<std::unique_ptr<RawClient>> Attach(const std::string& address,
                                                           const std::string& token = "");
  ~RawClient();
  RawClient(const RawClient&) = delete;
  RawClient& operator=(const RawClient&) = delete;

  absl::StatusOr<v1::GetStatsReply> Stats();
  absl::StatusOr<v1::AttendReply> Attend(const v1::AttendRequest& request);
  absl::Status Drop(const v1::SequenceRef& sequence);
  absl::StatusOr<v1::InsertReply> Insert(const v1::InsertRequest& request);

  // One call of any method, of any kind, its messages as bytes: sends them all, then reads to the
  // end. Returns the replies' bytes. `method` is "/package.Service/Method".
  absl::StatusOr<std::vector<std::string>> CallBytes(const std::string& method,
                                                     const std::vector<std::string>& messages);

  // OK when the daemon's health service says that it serves.
  absl::Status CheckHealth();

 private:
  struct Impl;
  explicit RawClient(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv::integration
