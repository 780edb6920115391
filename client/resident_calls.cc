// A sequence that this process attends over on the device: attaching, asking, detaching.
#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/sequence_impl.h"
#include "storage/base/descriptor_protocol.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

constexpr std::chrono::milliseconds kOneWait(1000);  // The most that the daemon waits.
constexpr int kWindowsMax = 4096;

absl::Status CheckReply(const v1::AttachResidentReply& reply, uint64_t generation) {
  const v1::WaveBufferInfo& buffer = reply.wave_buffer();
  bool good = buffer.ticket().size() == kTicketBytes && buffer.backend() == "cuda" &&
              reply.generation() == generation && reply.ring_rows() > 0 &&
              reply.region_bytes() > 0 && reply.region_bytes() <= buffer.buffer_bytes() &&
              reply.region_offset() <= buffer.buffer_bytes() - reply.region_bytes() &&
              reply.token_count() <= reply.max_tokens() && reply.windows_size() > 0 &&
              reply.windows_size() <= kWindowsMax;
  for (const v1::PoolWindow& window : reply.windows()) {
    good = good && window.ticket().size() == kTicketBytes && window.bytes() > 0;
  }
  if (good) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the daemon's reply is malformed: generation ",
                                          reply.generation(), ", backend '", buffer.backend(),
                                          "', a region of ", reply.region_bytes(), " bytes at ",
                                          reply.region_offset(), " of ", buffer.buffer_bytes(),
                                          ", ", reply.windows_size(), " windows"));
}

absl::StatusOr<PoolWindow> FetchWindow(const std::string& socket, const v1::PoolWindow& offered,
                                       std::chrono::milliseconds timeout) {
  PoolWindow window;
  window.bytes = offered.bytes();
  WAVEKV_ASSIGN_OR_RETURN(window.fd, FetchDescriptor(socket, offered.ticket(), timeout));
  WAVEKV_RETURN_IF_ERROR(CheckSizeSealed(window.fd.get()));
  WAVEKV_ASSIGN_OR_RETURN(const uint64_t found, FileBytes(window.fd.get()));
  if (found >= window.bytes) return window;
  return absl::InternalError(absl::StrCat("a window of the block pool has ", found,
                                          " bytes, the daemon said ", window.bytes));
}

ResidentState StateOf(const v1::ResidentStatusReply& reply) {
  ResidentState state;
  if (reply.error_code() != 0) {
    const bool known =
        reply.error_code() <= static_cast<uint32_t>(absl::StatusCode::kUnauthenticated);
    state.attached = absl::Status(
        known ? static_cast<absl::StatusCode>(reply.error_code()) : absl::StatusCode::kUnknown,
        reply.error_message());
  }
  state.generation = reply.generation();
  state.token_count = reply.token_count();
  state.steady_first = reply.steady_first();
  state.hit_blocks = reply.counters().hit_blocks();
  state.miss_blocks = reply.counters().miss_blocks();
  state.overflows = reply.counters().overflows();
  state.violations = reply.counters().violations();
  return state;
}

}  // namespace

absl::Status Sequence::Impl::NoteStored(uint64_t asked_generation, uint64_t found_generation,
                                        uint64_t token_count) {
  WAVEKV_RETURN_IF_ERROR(CheckGeneration(asked_generation, found_generation));
  for (uint32_t layer = 0; layer < shape.layer_count; ++layer) {
    RaiseTokenCount(layer, token_count, found_generation);
  }
  return absl::OkStatus();
}

absl::StatusOr<ResidentAttachment> Sequence::Impl::TakeAttachment(
    const v1::AttachResidentReply& reply, uint64_t asked_generation) const {
  WAVEKV_RETURN_IF_ERROR(CheckReply(reply, asked_generation));
  const v1::WaveBufferInfo& buffer = reply.wave_buffer();
  ResidentAttachment attachment;
  attachment.sequence = SequenceId(id);
  attachment.shape = shape;
  attachment.max_tokens = reply.max_tokens();
  attachment.device_uuid = buffer.device_uuid();
  attachment.socket = buffer.socket();
  attachment.ticket = buffer.ticket();
  attachment.buffer_bytes = buffer.buffer_bytes();
  attachment.region_offset = reply.region_offset();
  attachment.region_bytes = reply.region_bytes();
  attachment.token_count = reply.token_count();
  attachment.ring_rows = reply.ring_rows();
  for (const v1::PoolWindow& offered : reply.windows()) {
    WAVEKV_ASSIGN_OR_RETURN(PoolWindow window, FetchWindow(reply.window_socket(), offered,
                                                           connection->options().deadline));
    attachment.windows.push_back(std::move(window));
  }
  return attachment;
}

absl::StatusOr<ResidentAttachment> Sequence::AttachResident(const ResidentOptions& options) {
  v1::AttachResidentRequest request;
  impl_->FillRef(request.mutable_sequence());
  request.set_cache_ratio(options.cache_ratio);
  request.set_ring_rows(options.ring_rows);
  v1::AttachResidentReply reply;
  const absl::Status status = impl_->connection->Run(
      impl_->Call("AttachResident"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.AttachResident(context, request, &reply);
      });
  if (absl::IsUnimplemented(status)) {
    return absl::UnimplementedError(absl::StrCat("the daemon at ",
                                                 impl_->connection->options().address,
                                                 " is of a version that attaches no sequences; "
                                                 "update wavekvd, or use Attend"));
  }
  WAVEKV_RETURN_IF_ERROR(status);
  absl::StatusOr<ResidentAttachment> attachment =
      impl_->TakeAttachment(reply, request.sequence().generation());
  if (!attachment.ok()) DetachResident().IgnoreError();
  return attachment;
}

absl::StatusOr<ResidentState> Sequence::ResidentStatus(uint64_t steady_first_above,
                                                       std::chrono::milliseconds wait) {
  const auto deadline = std::chrono::steady_clock::now() + wait;
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    v1::ResidentStatusRequest request;
    impl_->FillRef(request.mutable_sequence());
    request.set_steady_first_above(steady_first_above);
    request.set_wait_ms(
        static_cast<uint32_t>(std::clamp(left, std::chrono::milliseconds(0), kOneWait).count()));
    v1::ResidentStatusReply reply;
    WAVEKV_RETURN_IF_ERROR(impl_->connection->Run(
        impl_->Call("ResidentStatus"),
        [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
          return stub.ResidentStatus(context, request, &reply);
        }));
    // An attachment that ended before a truncation counts tokens of the generation before.
    if (reply.generation() == request.sequence().generation()) {
      WAVEKV_RETURN_IF_ERROR(impl_->NoteStored(request.sequence().generation(), reply.generation(),
                                               reply.token_count()));
    }
    const bool wanted = reply.error_code() != 0 || reply.steady_first() > steady_first_above;
    if (wanted || left <= kOneWait) return StateOf(reply);
  }
}

absl::Status Sequence::DetachResident() {
  v1::DetachResidentRequest request;
  impl_->FillRef(request.mutable_sequence());
  v1::DetachResidentReply reply;
  WAVEKV_RETURN_IF_ERROR(impl_->connection->Run(
      impl_->Call("DetachResident"),
      [&](v1::WaveKV::Stub& stub, grpc::ClientContext* context, const Attachment&) {
        return stub.DetachResident(context, request, &reply);
      }));
  return impl_->NoteStored(request.sequence().generation(), reply.generation(),
                           reply.token_count());
}

}  // namespace wavekv::client
