#include "proto/shm/replies.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::shm {
uint64_t AttendReplyBytes(uint64_t item_count, uint64_t query_heads, uint64_t value_dim) {
  const uint64_t answer = ArenaRounded(query_heads * value_dim * 4) + ArenaRounded(query_heads * 4);
  return sizeof(WireAttendReply) +
         item_count * (sizeof(WireAttendResult) + std::max<uint64_t>(answer, kErrorTextBytesMax));
}

uint64_t EstimateReplyBytes(uint64_t query_heads, uint64_t value_dim) {
  const uint64_t answer =
      ArenaRounded(query_heads * value_dim * 4) + 3 * ArenaRounded(query_heads * 4);
  return std::max<uint64_t>(ArenaRounded(sizeof(WireEstimateReply)) + answer, kErrorTextBytesMax);
}

uint64_t InsertReplyBytes() { return kErrorTextBytesMax; }

uint64_t ReplyWriter::Reserve(uint64_t bytes) {
  const uint64_t offset = used_;
  used_ += ArenaRounded(bytes);
  return offset;
}

WireRun ReplyWriter::AddText(absl::string_view text) {
  return PutText(Reserve(std::min(text.size(), kErrorTextBytesMax)), text);
}

WireRun ReplyWriter::PutText(uint64_t offset, absl::string_view text) {
  const WireRun run{offset, std::min(text.size(), kErrorTextBytesMax)};
  PutBytes(run.offset, text.data(), run.bytes);
  return run;
}

absl::Status ReplyReader::OutOfBounds(uint64_t offset, uint64_t bytes) const {
  return absl::InternalError(absl::StrCat("the daemon's reply is malformed: ", bytes, " bytes at ",
                                          offset, " of ", bytes_.size()));
}

absl::StatusOr<std::span<const std::byte>> ReplyReader::Run(const WireRun& run) const {
  if (run.offset > bytes_.size() || bytes_.size() - run.offset < run.bytes) {
    return OutOfBounds(run.offset, run.bytes);
  }
  return bytes_.subspan(run.offset, run.bytes);
}

absl::Status ReplyReader::Copy(const WireRun& run, uint64_t count, uint64_t element_bytes,
                               void* target, absl::string_view name) const {
  WAVEKV_ASSIGN_OR_RETURN(const std::span<const std::byte> bytes, Run(run));
  if (bytes.size() != count * element_bytes) {
    return absl::InternalError(absl::StrCat("the daemon's reply is malformed: ", name, " has ",
                                            bytes.size(), " bytes, expected ",
                                            count * element_bytes));
  }
  if (!bytes.empty()) std::memcpy(target, bytes.data(), bytes.size());
  return absl::OkStatus();
}

}  // namespace wavekv::shm
