// Requests of the channel as values of the engine, and the engine's outcomes as replies.
//
// What only the engine can know (shapes against the sequence, generations) is left to it, as over
// gRPC. Views borrow from the decoded request.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "daemon/engine/types.h"
#include "proto/shm/replies.h"
#include "proto/shm/requests.h"

namespace wavekv {

InsertChunk ToEngine(const shm::InsertRequest& request);
LayerQuery ToEngine(const shm::LayerQueryRequest& request);
AttendStep ToEngine(const shm::AttendItemRequest& request);

void WriteInsert(const InsertOutcome& outcome, shm::ReplyWriter* writer);
void WriteEstimate(const EstimateOutcome& outcome, shm::ReplyWriter* writer);
void WriteQuery(const QueryOutcome& outcome, shm::ReplyWriter* writer);
// What WriteQuery will take at most for an outcome of these extents.
uint64_t QueryReplyBytes(const ModelShape& shape, std::span<const HeadExtent> heads);
// Of an Attend: the head, and room for the results.
void WriteAttendHead(size_t result_count, shm::ReplyWriter* writer);
// Where one result's answer lies in the reply; without bytes until there is one.
struct AnswerRuns {
  shm::WireRun out;
  shm::WireRun lse;
};
// Room for an answer, or for the text of an error in its place.
AnswerRuns ReserveAnswer(uint32_t query_heads, uint32_t value_dim, shm::ReplyWriter* writer);
// The result_idx-th result. Its answer is in place already, at `answer`.
void WriteAttendResult(const AttendOutcome& outcome, const AnswerRuns& answer, size_t result_idx,
                       shm::ReplyWriter* writer);

}  // namespace wavekv
