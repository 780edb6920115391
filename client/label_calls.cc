// PlanIndex and GiveLabels: clusters that this process has found by itself, for the daemon's index.
#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/connection.h"
#include "client/sequence_impl.h"
#include "client/session.h"
#include "client/validation.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// One message, unless a single segment has more: the daemon checks it in a millisecond or two. Its
// own limit may be lower.
constexpr uint64_t kMessageBytesMax = uint64_t{1} << 20;
constexpr uint64_t kMessageHeaderBytes = 8192;
constexpr uint64_t kSegmentHeaderBytes = 32;  // Position, length and field tags, at most.

absl::Status OlderDaemon(const Connection& connection) {
  return absl::UnimplementedError(absl::StrCat("the daemon at ", connection.options().address,
                                               " is of a version that takes no labels; update ",
                                               "wavekvd, or let it cluster by itself"));
}

absl::Status CheckPlan(const v1::PlanIndexReply& reply, uint64_t max_tokens) {
  uint64_t end = 0;
  for (const v1::PlannedSegment& segment : reply.segments()) {
    const uint64_t first = segment.first_position(), tokens = segment.token_count();
    if (first < end || tokens == 0 || tokens > max_tokens || first > max_tokens - tokens ||
        segment.cluster_count() == 0 || segment.cluster_count() > tokens) {
      return absl::InternalError(absl::StrCat("the daemon's reply is malformed: a plan with ",
                                              segment.cluster_count(), " clusters in ", tokens,
                                              " tokens from position ", first));
    }
    end = first + tokens;
  }
  return absl::OkStatus();
}

absl::Status CheckLabels(const ModelShape& shape, const SegmentLabels& segment) {
  const uint64_t expected = uint64_t{shape.kv_head_count} * segment.token_count;
  if (segment.token_count > 0 && segment.labels.size() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "labels of the ", segment.token_count, " tokens from position ", segment.first_position,
      ": found ", segment.labels.size(), ", expected ", expected, " (KV heads times tokens)"));
}

}  // namespace

absl::StatusOr<std::vector<PlannedSegment>> Sequence::PlanIndex(uint32_t layer,
                                                                uint64_t token_count) {
  WAVEKV_RETURN_IF_ERROR(CheckLayer(impl_->shape, layer));
  v1::PlanIndexRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_layer(layer);
  request.set_token_count(token_count);
  v1::PlanIndexReply reply;
  const absl::Status status = impl_->connection->Run(
      impl_->Call("PlanIndex"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.PlanIndex(context, request, &reply);
      });
  if (absl::IsUnimplemented(status)) return OlderDaemon(*impl_->connection);
  WAVEKV_RETURN_IF_ERROR(status);
  WAVEKV_RETURN_IF_ERROR(
      impl_->CheckGeneration(request.sequence().generation(), reply.generation()));
  WAVEKV_RETURN_IF_ERROR(CheckPlan(reply, impl_->max_tokens));
  std::vector<PlannedSegment> segments;
  for (const v1::PlannedSegment& segment : reply.segments()) {
    segments.push_back({.first_position = segment.first_position(),
                        .token_count = segment.token_count(),
                        .cluster_count = segment.cluster_count()});
  }
  return segments;
}

absl::StatusOr<uint32_t> Sequence::GiveLabels(uint32_t layer,
                                              std::span<const SegmentLabels> segments) {
  WAVEKV_RETURN_IF_ERROR(CheckLayer(impl_->shape, layer));
  for (const SegmentLabels& segment : segments) {
    WAVEKV_RETURN_IF_ERROR(CheckLabels(impl_->shape, segment));
  }
  v1::SequenceRef sequence;  // Of one moment: what a truncate makes old is refused.
  impl_->FillRef(&sequence);
  const uint64_t limit = impl_->connection->attachment()->info.message_bytes_max;
  const uint64_t message_max = limit == 0 ? kMessageBytesMax : std::min(limit, kMessageBytesMax);
  const uint64_t bytes_max = message_max - std::min(message_max, kMessageHeaderBytes);
  uint32_t kept = 0;
  for (size_t next = 0; next < segments.size();) {
    v1::GiveLabelsRequest request;
    *request.mutable_sequence() = sequence;
    request.set_layer(layer);
    uint64_t bytes = 0;
    do {
      const SegmentLabels& segment = segments[next++];
      v1::SegmentLabels* wire = request.add_segments();
      wire->set_first_position(segment.first_position);
      wire->set_token_count(segment.token_count);
      wire->set_labels(segment.labels.data(), segment.labels.size_bytes());
      bytes += segment.labels.size_bytes() + kSegmentHeaderBytes;
    } while (next < segments.size() &&
             bytes + segments[next].labels.size_bytes() + kSegmentHeaderBytes <= bytes_max);
    v1::GiveLabelsReply reply;
    const absl::Status status = impl_->connection->Run(
        impl_->Call("GiveLabels"),
        [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
          return stub.GiveLabels(context, request, &reply);
        });
    if (absl::IsUnimplemented(status)) return OlderDaemon(*impl_->connection);
    WAVEKV_RETURN_IF_ERROR(status);
    WAVEKV_RETURN_IF_ERROR(impl_->CheckGeneration(sequence.generation(), reply.generation()));
    if (reply.kept() > static_cast<uint32_t>(request.segments_size())) {
      return absl::InternalError(
          absl::StrCat("the daemon's reply is malformed: it keeps labels of ", reply.kept(),
                       " segments, was given ", request.segments_size()));
    }
    kept += reply.kept();
  }
  return kept;
}

}  // namespace wavekv::client
