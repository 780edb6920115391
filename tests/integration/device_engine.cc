#include "tests/integration/device_engine.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/gpu/resident_batch.h"
#include "gpu/kernels/cuda_status.h"
#include "gpu/kernels/device_array.h"
#include "storage/base/status_macros.h"

namespace wavekv::integration {
namespace {

constexpr std::chrono::seconds kPatience(60);
constexpr size_t kAlignmentBytes = 16;  // Of ResidentTensors.

// One kind of a token's rows, of all layers, on both sides.
class Rows {
 public:
  static absl::StatusOr<Rows> Make(size_t layer_count, size_t layer_bytes) {
    Rows rows;
    rows.layer_bytes_ = layer_bytes;
    rows.stride_bytes_ = (layer_bytes + kAlignmentBytes - 1) / kAlignmentBytes * kAlignmentBytes;
    const size_t bytes = layer_count * rows.stride_bytes_;
    WAVEKV_ASSIGN_OR_RETURN(rows.device_, gpu::DeviceArray<std::byte>::Make(bytes));
    WAVEKV_ASSIGN_OR_RETURN(rows.host_, gpu::PinnedArray<std::byte>::Make(bytes));
    return rows;
  }

  void* layer(uint32_t layer) const { return device_.data() + layer * stride_bytes_; }

  // `source`: layers without gaps. Both are in the stream's order.
  absl::Status Upload(std::span<const std::byte> source, cudaStream_t stream) {
    for (size_t i = 0; i * layer_bytes_ < source.size(); ++i) {
      std::memcpy(host_.data() + i * stride_bytes_, source.data() + i * layer_bytes_, layer_bytes_);
    }
    return Copy(device_.data(), host_.data(), stream);
  }
  absl::Status Download(cudaStream_t stream) { return Copy(host_.data(), device_.data(), stream); }
  // What was downloaded, once the stream has come so far.
  const std::byte* downloaded(uint32_t layer) const { return host_.data() + layer * stride_bytes_; }

 private:
  absl::Status Copy(std::byte* target, const std::byte* source, cudaStream_t stream) {
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMemcpyAsync(target, source, host_.size(), cudaMemcpyDefault, stream));
    return absl::OkStatus();
  }

  size_t layer_bytes_ = 0;
  size_t stride_bytes_ = 0;
  gpu::DeviceArray<std::byte> device_;
  gpu::PinnedArray<std::byte> host_;
};

class DeviceEngine : public TokenEngine {
 public:
  static absl::StatusOr<std::unique_ptr<TokenEngine>> Make(const ModelShape& shape,
                                                           uint64_t max_tokens,
                                                           uint32_t retrieve_clusters) {
    std::unique_ptr<DeviceEngine> engine(new DeviceEngine(shape));
    WAVEKV_ASSIGN_OR_RETURN(
        engine->batch_, client::ResidentBatch::Create({.layer_count = shape.layer_count,
                                                       .kv_head_count = shape.kv_head_count,
                                                       .group_size = shape.group_size(),
                                                       .head_dim = shape.key_dim,
                                                       .dtype = shape.dtype,
                                                       .softmax_scale = shape.softmax_scale,
                                                       .max_tokens = max_tokens,
                                                       .retrieve_capacity = retrieve_clusters}));
    WAVEKV_RETURN_IF_ERROR(engine->Allocate());
    return engine;
  }

  ~DeviceEngine() override {
    batch_.reset();  // Waits for the device.
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  absl::Status Attach(client::Sequence* sequence, const client::ResidentOptions& options) override {
    WAVEKV_ASSIGN_OR_RETURN(const client::ResidentAttachment attachment,
                            sequence->AttachResident(options));
    WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<client::OpenSequence> open, batch_->Open(attachment));
    sequence_ = sequence;
    covered_ = 0;
    return batch_->SetSequence(0, std::move(open), stream_);
  }

  absl::StatusOr<TokenAnswer> Step(const TokenRows& rows) override {
    WAVEKV_RETURN_IF_ERROR(Reserve());
    WAVEKV_RETURN_IF_ERROR(queries_.Upload(rows.queries, stream_));
    WAVEKV_RETURN_IF_ERROR(keys_.Upload(rows.keys, stream_));
    WAVEKV_RETURN_IF_ERROR(values_.Upload(rows.values, stream_));
    WAVEKV_RETURN_IF_ERROR(batch_->BeginToken(stream_));
    for (uint32_t layer = 0; layer < shape_.layer_count; ++layer) {
      WAVEKV_RETURN_IF_ERROR(batch_->Attend(layer,
                                            {.queries = queries_.layer(layer),
                                             .new_keys = keys_.layer(layer),
                                             .new_values = values_.layer(layer),
                                             .out = out_.layer(layer),
                                             .lse = static_cast<float*>(lse_.layer(layer))},
                                            stream_));
    }
    WAVEKV_RETURN_IF_ERROR(out_.Download(stream_));
    WAVEKV_RETURN_IF_ERROR(lse_.Download(stream_));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamSynchronize(stream_));
    TokenAnswer answer = Answer();
    const client::ResidentOutcome outcome = batch_->OutcomeOf(0);
    // A region that was closed in mid-token: later layers attend over nothing.
    const bool over_nothing = std::ranges::find(answer.lse, -HUGE_VALF) != answer.lse.end();
    if (outcome == client::ResidentOutcome::kAttending && !over_nothing) return answer;
    return absl::AbortedError(absl::StrCat("a layer was attended over nothing; the token was ",
                                           client::ToString(outcome)));
  }

  absl::Status NoteStored(uint64_t token_count) override {
    WAVEKV_ASSIGN_OR_RETURN(const client::ResidentState state, sequence_->ResidentStatus());
    WAVEKV_RETURN_IF_ERROR(state.attached);
    covered_ = state.steady_first;
    batch_->NoteStored(0, token_count, covered_);
    return absl::OkStatus();
  }

 private:
  explicit DeviceEngine(const ModelShape& shape) : shape_(shape) {}

  absl::Status Allocate() {
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    const size_t row_bytes = size_t{shape_.key_dim} * DTypeBytes(shape_.dtype);
    const size_t layers = shape_.layer_count;
    WAVEKV_ASSIGN_OR_RETURN(queries_, Rows::Make(layers, shape_.query_head_count * row_bytes));
    WAVEKV_ASSIGN_OR_RETURN(out_, Rows::Make(layers, shape_.query_head_count * row_bytes));
    WAVEKV_ASSIGN_OR_RETURN(lse_, Rows::Make(layers, shape_.query_head_count * sizeof(float)));
    WAVEKV_ASSIGN_OR_RETURN(keys_, Rows::Make(layers, shape_.kv_head_count * row_bytes));
    WAVEKV_ASSIGN_OR_RETURN(values_, Rows::Make(layers, shape_.kv_head_count * row_bytes));
    return absl::OkStatus();
  }

  absl::Status Reserve() {
    while (batch_->RoomFor(0) == 0) {
      WAVEKV_ASSIGN_OR_RETURN(const client::ResidentState state,
                              sequence_->ResidentStatus(covered_, kPatience));
      WAVEKV_RETURN_IF_ERROR(state.attached);
      if (state.steady_first <= covered_) {
        return absl::FailedPreconditionError(
            absl::StrCat("the ring stays full: ", batch_->TokensOf(0), " tokens, clustered up to ",
                         state.steady_first));
      }
      covered_ = state.steady_first;
      batch_->NoteCovered(0, covered_);
    }
    return batch_->ReserveToken();
  }

  TokenAnswer Answer() const {
    const size_t layer_floats = size_t{shape_.query_head_count} * shape_.key_dim;
    TokenAnswer answer;
    answer.out.resize(shape_.layer_count * layer_floats);
    for (uint32_t layer = 0; layer < shape_.layer_count; ++layer) {
      ConvertToFloat(shape_.dtype, out_.downloaded(layer), layer_floats,
                     answer.out.data() + layer * layer_floats);
      const auto* lse = reinterpret_cast<const float*>(lse_.downloaded(layer));
      answer.lse.insert(answer.lse.end(), lse, lse + shape_.query_head_count);
    }
    return answer;
  }

  const ModelShape shape_;
  std::unique_ptr<client::ResidentBatch> batch_;
  cudaStream_t stream_ = nullptr;
  client::Sequence* sequence_ = nullptr;
  uint64_t covered_ = 0;  // As the daemon said last.
  Rows queries_, keys_, values_, out_, lse_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<TokenEngine>> MakeDeviceEngine(const ModelShape& shape,
                                                              uint64_t max_tokens,
                                                              uint32_t retrieve_clusters) {
  return DeviceEngine::Make(shape, max_tokens, retrieve_clusters);
}

}  // namespace wavekv::integration
