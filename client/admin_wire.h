// wavekv.v1 replies of the inspection calls as plain values. A reply whose parts do not fit
// together is Internal. Internal to the SDK.
#pragma once

#include "absl/status/statusor.h"
#include "client/admin.h"
#include "wavekv/v1/wavekv.pb.h"

namespace wavekv::client {

DaemonStats FromWire(const v1::GetStatsReply& reply);
absl::StatusOr<SequenceSummary> FromWire(const v1::SequenceInfo& info);
absl::StatusOr<IndexDescription> FromWire(const v1::DescribeIndexReply& reply);
Explanation FromWire(const v1::ExplainReply& reply);
RecallSample FromWire(const v1::SampleRecallReply& reply);

}  // namespace wavekv::client
