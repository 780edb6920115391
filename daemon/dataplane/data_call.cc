#include "daemon/dataplane/data_call.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "daemon/dataplane/data_requests.h"
#include "storage/base/status_macros.h"
#include "storage/base/stream_copy.h"

namespace wavekv {
namespace {

using std::chrono::steady_clock;

// A buffer beyond this is not kept for the next call.
constexpr size_t kKeptBytesMax = size_t{4} << 20;

bool IsKnown(uint64_t verb) { return verb >= shm::kInsert && verb <= shm::kAttend; }

absl::Status NoRoom(const shm::ReplyWriter& writer) {
  return absl::ResourceExhaustedError(absl::StrCat(
      "the reply may take ", writer.used(), " bytes, the call left room for ", writer.room()));
}

// Answers go where the reply has them, without a copy between.
class ReplySink final : public AnswerSink {
 public:
  // Both outlive the sink. `answers` has an element for each step.
  ReplySink(shm::ReplyWriter* writer, std::vector<AnswerRuns>* answers)
      : writer_(writer), answers_(answers) {}

  Place PlaceOf(size_t step_idx, uint32_t query_heads, uint32_t value_dim) override {
    AnswerRuns& runs = (*answers_)[step_idx];
    runs = ReserveAnswer(query_heads, value_dim, writer_);
    std::byte* const out = writer_->Place(runs.out);
    std::byte* const lse = writer_->Place(runs.lse);
    return out == nullptr || lse == nullptr ? Place() : Place{out, lse};
  }

 private:
  shm::ReplyWriter* const writer_;
  std::vector<AnswerRuns>* const answers_;
};

}  // namespace

shm::Completion DataCaller::Run(const shm::Submission& submission) {
  const auto begin = steady_clock::now();
  // An Insert's rows are read by others.
  if (submission.verb != shm::kInsert) {
    PrefetchStreamed(submission.request.data(), submission.request.size());
  }
  shm::ReplyWriter writer(submission.reply);
  absl::Status status;
  if (!IsKnown(submission.verb)) {
    status = absl::UnimplementedError(
        absl::StrCat("verb ", submission.verb, " is unknown to this daemon"));
  } else {
    status = lease_->BeginCall();
    if (status.ok()) {
      status = begin > submission.deadline
                   ? absl::DeadlineExceededError("the call's deadline passed before it began")
                   : Dispatch(submission, &writer);
      if (status.ok() && !writer.fits()) {
        status = NoRoom(writer);
      }
      const auto verb = static_cast<shm::Verb>(submission.verb);
      const bool happened = writer.fits() || verb != shm::kQuery;
      lease_->EndCall(
          verb, happened ? std::optional(status.code()) : std::nullopt,
          std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count());
    }
  }
  if (copy_.size() > kKeptBytesMax) copy_ = {};
  if (status.ok()) return {.reply_bytes = writer.used()};
  const uint64_t needed = writer.fits() ? 0 : writer.used();
  shm::ReplyWriter text(submission.reply);
  const shm::WireRun run = text.AddText(status.message());
  return {.code = status.code(),
          .reply_bytes = text.fits() ? run.bytes : 0,
          .reply_bytes_needed = needed};
}

absl::Status DataCaller::Dispatch(const shm::Submission& submission, shm::ReplyWriter* writer) {
  switch (static_cast<shm::Verb>(submission.verb)) {
    case shm::kInsert:
      return Insert(submission.request, writer);
    case shm::kQuery:
      return Query(Copy(submission.request), writer);
    case shm::kEstimate:
      return Estimate(Copy(submission.request), writer);
    case shm::kAttend:
      return Attend(Copy(submission.request), writer);
  }
  return absl::OkStatus();
}

std::span<const std::byte> DataCaller::Copy(std::span<const std::byte> shared) {
  copy_.resize(std::max(copy_.size(), shared.size()));
  std::copy(shared.begin(), shared.end(), copy_.begin());
  return {copy_.data(), shared.size()};
}

absl::Status DataCaller::Insert(std::span<const std::byte> request, shm::ReplyWriter* writer) {
  // The rows stay where they are: the engine checks what it has copied of them.
  const auto head = Copy(request.first(std::min<size_t>(request.size(), shm::kInsertHeadBytesMax)));
  WAVEKV_ASSIGN_OR_RETURN(const shm::InsertRequest insert, shm::DecodeInsert(head, request));
  WAVEKV_ASSIGN_OR_RETURN(const InsertOutcome outcome,
                          engine_->Insert(lease_->tenant(), ToEngine(insert)));
  WriteInsert(outcome, writer);
  return absl::OkStatus();
}

absl::Status DataCaller::Query(std::span<const std::byte> request, shm::ReplyWriter* writer) {
  WAVEKV_ASSIGN_OR_RETURN(const shm::QueryRequest query, shm::DecodeQuery(request));
  const auto admit = [writer](const ModelShape& shape, std::span<const HeadExtent> heads) {
    const uint64_t most = QueryReplyBytes(shape, heads);
    if (most <= writer->room()) return absl::OkStatus();
    writer->Reserve(most);
    return NoRoom(*writer);
  };
  WAVEKV_ASSIGN_OR_RETURN(const QueryOutcome outcome,
                          engine_->Query(lease_->tenant(), ToEngine(query.query),
                                         {.inline_rows = query.inline_rows,
                                          .completed_step = query.completed_step,
                                          .admit = admit}));
  WriteQuery(outcome, writer);
  return absl::OkStatus();
}

absl::Status DataCaller::Estimate(std::span<const std::byte> request, shm::ReplyWriter* writer) {
  WAVEKV_ASSIGN_OR_RETURN(const shm::LayerQueryRequest query, shm::DecodeEstimate(request));
  WAVEKV_ASSIGN_OR_RETURN(const EstimateOutcome outcome,
                          engine_->Estimate(lease_->tenant(), ToEngine(query)));
  WriteEstimate(outcome, writer);
  return absl::OkStatus();
}

absl::Status DataCaller::Attend(std::span<const std::byte> request, shm::ReplyWriter* writer) {
  WAVEKV_RETURN_IF_ERROR(shm::DecodeAttend(request, batch_max_, &items_));
  steps_.clear();
  step_items_.clear();
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!items_[i].ok()) continue;
    steps_.push_back(ToEngine(*items_[i]));
    step_items_.push_back(i);
  }
  WriteAttendHead(items_.size(), writer);
  // An item that cannot be read fails alone.
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!items_[i].ok()) WriteAttendResult({.status = items_[i].status()}, {}, i, writer);
  }
  if (steps_.empty()) return absl::OkStatus();
  answers_.assign(steps_.size(), AnswerRuns());
  ReplySink sink(writer, &answers_);
  WAVEKV_ASSIGN_OR_RETURN(const std::vector<AttendOutcome> outcomes,
                          engine_->Attend(lease_->tenant(), steps_, &sink));
  for (size_t i = 0; i < outcomes.size(); ++i) {
    WriteAttendResult(outcomes[i], answers_[i], step_items_[i], writer);
  }
  return absl::OkStatus();
}

}  // namespace wavekv
