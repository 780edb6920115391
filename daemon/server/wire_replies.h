// Values of the engine as replies of the wire.
#pragma once

#include <string>

#include "daemon/engine/resident_terms.h"
#include "daemon/engine/types.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv {

void FillCounters(const StepCounters& counters, v1::StepCounters* wire);
void FillResidentCounters(const ResidentCounters& counters, v1::ResidentCounters* wire);
void FillWaveBuffer(const WaveBufferAccess& access, v1::WaveBufferInfo* info);
void FillShape(const ModelShape& shape, v1::ModelShape* wire);
void FillEstimate(const EstimateOutcome& outcome, v1::EstimateReply* reply);
// Takes the inline rows out of `outcome`. `shape` gives their dtype and dims.
void FillQuery(QueryOutcome&& outcome, const ModelShape& shape, v1::QueryReply* reply);
// The outcome of one item, its failure included.
void FillAttend(const AttendOutcome& outcome, v1::AttendResult* result);
void FillAttendError(const absl::Status& status, v1::AttendResult* result);
void FillSequence(const SequenceStatus& status, const std::string& client_name,
                  v1::SequenceInfo* info);
void FillDescription(const IndexDescription& description, v1::DescribeIndexReply* reply);
void FillPlan(const IndexPlan& plan, v1::PlanIndexReply* reply);
void FillExplanation(const Explanation& explanation, v1::ExplainReply* reply);
void FillRecall(const RecallSample& sample, v1::SampleRecallReply* reply);

}  // namespace wavekv
