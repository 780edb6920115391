#include "client/gpu/resident_shape.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// A segment takes 8,192 tokens in the end; some are smaller, or about to be replaced.
constexpr uint64_t kSegmentTokens = 8192;
constexpr uint64_t kSegmentsBeside = 24;
// Clusters of 16 tokens, those of outliers, and the segments that are about to be replaced.
constexpr uint64_t kTokensPerCluster = 10;
constexpr uint64_t kClustersBeside = 2048;
// The default budget of a step without sketches (UnsketchedRetrievalCount) is 1.4 % of the
// clusters, and at least 128: a 64th is more than that, and as many again are room for a larger
// one.
constexpr uint64_t kRetrieveBeside = 256;
constexpr uint64_t kClustersPerRetrieved = 64;
constexpr uint64_t kTokensMax = uint64_t{1} << 32;
constexpr uint32_t kSegmentCapacityMax = 65536;  // A cluster names its segment in 16 bits.
constexpr uint32_t kClusterCapacityMax = 389120;

absl::Status Refuse(const char* field, uint64_t found, absl::string_view allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat("ResidentModel::", field, " is ", found, "; allowed: ", allowed));
}

absl::Status Differs(const ResidentAttachment& attachment, const char* field, uint64_t found,
                     uint64_t expected) {
  return absl::InvalidArgumentError(absl::StrCat("sequence ", attachment.sequence.value(), " has ",
                                                 field, " ", found, ", the batch was made for ",
                                                 expected));
}

uint32_t RoundUp(uint64_t count, uint32_t unit) {
  return static_cast<uint32_t>((count + unit - 1) / unit * unit);
}

}  // namespace

absl::StatusOr<ResidentModel> CompleteModel(ResidentModel model) {
  if (model.layer_count == 0 || model.layer_count > kLayersMax) {
    return Refuse("layer_count", model.layer_count, absl::StrCat("1 to ", kLayersMax));
  }
  if (model.kv_head_count == 0 || model.kv_head_count > kHeadsMax) {
    return Refuse("kv_head_count", model.kv_head_count, absl::StrCat("1 to ", kHeadsMax));
  }
  if (model.dtype != DType::kBF16 && model.dtype != DType::kF16) {
    return absl::InvalidArgumentError("ResidentModel::dtype is f32; allowed: bf16, f16");
  }
  if (model.max_tokens == 0 || model.max_tokens > kTokensMax) {
    return Refuse("max_tokens", model.max_tokens, absl::StrCat("1 to ", kTokensMax));
  }
  if (!(model.softmax_scale > 0)) {
    return absl::InvalidArgumentError(absl::StrCat("ResidentModel::softmax_scale is ",
                                                   model.softmax_scale, "; allowed: above 0"));
  }
  if (model.segment_capacity == 0) {
    model.segment_capacity = static_cast<uint32_t>(std::min<uint64_t>(
        model.max_tokens / kSegmentTokens + kSegmentsBeside, kSegmentCapacityMax));
  }
  if (model.segment_capacity > kSegmentCapacityMax) {
    return Refuse("segment_capacity", model.segment_capacity,
                  absl::StrCat("at most ", kSegmentCapacityMax));
  }
  if (model.cluster_capacity == 0) {
    const uint64_t clusters = model.max_tokens / kTokensPerCluster + kClustersBeside +
                              uint64_t{model.segment_capacity} * gpu::kClusterPad;
    model.cluster_capacity =
        RoundUp(std::min<uint64_t>(clusters, kClusterCapacityMax), gpu::kClusterPad);
  }
  if (model.retrieve_capacity == 0) {
    model.retrieve_capacity = static_cast<uint32_t>(std::min<uint64_t>(
        model.cluster_capacity / kClustersPerRetrieved + kRetrieveBeside, gpu::kRetrieveMax));
  }
  return model;
}

gpu::StepShape StepShapeOf(const ResidentModel& model) {
  return {.batch = model.batch,
          .kv_heads = model.kv_head_count,
          .group = model.group_size,
          .head_dim = model.head_dim,
          .element = model.dtype == DType::kBF16 ? gpu::Element::kBF16 : gpu::Element::kF16,
          .scale = model.softmax_scale,
          .cluster_capacity = model.cluster_capacity,
          .segment_capacity = model.segment_capacity,
          .retrieve_capacity = model.retrieve_capacity};
}

gpu::ResolveShape ResolveShapeOf(const ResidentModel& model) {
  return {.layer_count = model.layer_count,
          .kv_heads = model.kv_head_count,
          .head_dim = model.head_dim,
          .element = StepShapeOf(model).element,
          .cluster_capacity = model.cluster_capacity,
          .segment_capacity = model.segment_capacity,
          .retrieve_capacity = model.retrieve_capacity};
}

absl::Status CheckAttachment(const ResidentModel& model, const ResidentAttachment& attachment) {
  const ModelShape& shape = attachment.shape;
  const struct {
    const char* field;
    uint64_t found, expected;
  } rows[] = {
      {"layer_count", shape.layer_count, model.layer_count},
      {"kv_head_count", shape.kv_head_count, model.kv_head_count},
      {"query_head_count", shape.query_head_count,
       uint64_t{model.kv_head_count} * model.group_size},
      {"key_dim", shape.key_dim, model.head_dim},
      {"value_dim", shape.value_dim, model.head_dim},
  };
  for (const auto& row : rows) {
    if (row.found != row.expected) return Differs(attachment, row.field, row.found, row.expected);
  }
  if (shape.dtype != model.dtype) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", attachment.sequence.value(), " is of dtype ",
                     std::string(DTypeName(shape.dtype)), ", the batch was made for ",
                     std::string(DTypeName(model.dtype))));
  }
  if (shape.softmax_scale != model.softmax_scale) {
    return absl::InvalidArgumentError(
        absl::StrCat("sequence ", attachment.sequence.value(), " has softmax_scale ",
                     shape.softmax_scale, ", the batch was made for ", model.softmax_scale));
  }
  return absl::OkStatus();
}

absl::Status CheckRegion(const ResidentModel& model, const ResidentAttachment& attachment,
                         const resident::ResidentHeader& header) {
  const gpu::ResolveEntry entry = {.region_bytes = attachment.region_bytes,
                                   .sequence_id = attachment.sequence.value()};
  if (!gpu::HeaderIsSound(header, entry, ResolveShapeOf(model))) {
    return absl::DataLossError(
        absl::StrCat("no resident region of sequence ", attachment.sequence.value(), " lies at ",
                     attachment.region_offset, " of the wave buffer: magic ",
                     absl::Hex(header.magic), ", version ", header.version, ", sequence ",
                     header.sequence_id, ", ", header.region_bytes, " bytes; expected magic ",
                     absl::Hex(resident::kResidentMagic), ", version ", resident::kResidentVersion,
                     ", at most ", attachment.region_bytes, " bytes, and all arrays inside"));
  }
  const auto too_small = [&](const char* field, uint32_t found, uint32_t needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ResidentModel::", field, " is ", found, ", too small for the region of sequence ",
        attachment.sequence.value(), "; make the batch with ", needed, " or more"));
  };
  if (header.unit.segment_capacity > model.segment_capacity) {
    return too_small("segment_capacity", model.segment_capacity, header.unit.segment_capacity);
  }
  if (header.unit.cluster_capacity > model.cluster_capacity) {
    return too_small("cluster_capacity", model.cluster_capacity, header.unit.cluster_capacity);
  }
  return absl::OkStatus();
}

}  // namespace wavekv::client
