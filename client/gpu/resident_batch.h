// Attention on the device itself: a batch of sequences whose wave indexes, block caches and newest
// tokens lie in their tenant's wave buffer, attended over by kernels in the engine's own stream.
//
//   auto batch = wavekv::client::ResidentBatch::Create(model);
//   auto open = (*batch)->Open(attachment);              // from Sequence::AttachResident
//   (*batch)->SetSequence(0, *open, stream);
//   for (;;) {                                           // a token
//     (*batch)->ReserveToken();                          // Unavailable: wait for the daemon
//     (*batch)->BeginToken(stream);                      // these may be a captured graph
//     for (layer ...) (*batch)->Attend(layer, tensors, stream);
//   }
//
// No call of a token waits for the device or for the daemon. Decisions: 010, 013 and 015 in
// docs/decisions. Built where the CUDA Toolkit is found: wavekv::client_gpu.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_attachment.h"
#include "storage/base/dtype.h"

struct CUstream_st;

namespace wavekv::client {

using CudaStream = CUstream_st*;  // cudaStream_t; null: the legacy default stream.

// What a batch's memory and kernels are made for. Zero capacities follow from max_tokens and suit
// an index of 16 tokens a cluster.
struct ResidentModel {
  uint32_t layer_count = 0;
  uint32_t kv_head_count = 0;
  uint32_t group_size = 0;        // Query heads of a KV head, 1 to 16.
  uint32_t head_dim = 0;          // 64, 128 or 256, of keys and values.
  DType dtype = DType::kBF16;     // Or kF16.
  float softmax_scale = 0;        // Multiplies q.k.
  uint32_t batch = 1;             // Entries, each a sequence or empty.
  uint64_t max_tokens = 0;        // Of the longest sequence.
  uint32_t cluster_capacity = 0;  // Of a head, a multiple of 16.
  uint32_t segment_capacity = 0;  // Of a head.
  // Clusters that a step of a head retrieves at most. Steps on the device have no sketches: where a
  // sequence's budget sketches clusters, the daemon has more of them retrieved instead (decision
  // 010). What it asks for beyond this is estimated.
  uint32_t retrieve_capacity = 0;
};

// What became of an entry in the last token that has begun on the device.
enum class ResidentOutcome {
  kEmpty,       // No sequence.
  kPending,     // No token has begun since the sequence was set.
  kAttending,   // It is attended over.
  kClosed,      // The daemon closed the region: attended over nothing.
  kDoesNotFit,  // The index is larger than the batch's capacities: attended over nothing.
  kMalformed,   // The region is damaged: attended over nothing.
};
const char* ToString(ResidentOutcome outcome);

// Device memory, row-major and dense, 16-byte aligned; `element` is the model's dtype.
struct ResidentTensors {
  const void* queries = nullptr;     // [batch, kv_heads * group, head_dim] element, after RoPE
  const void* new_keys = nullptr;    // [batch, kv_heads, head_dim] element: appended first.
  const void* new_values = nullptr;  // [batch, kv_heads, head_dim]; both null: nothing appended.
  void* out = nullptr;               // [batch, kv_heads * group, head_dim] element
  float* lse = nullptr;  // [batch, kv_heads * group] natural log; -inf where nothing is attended to
};

// A sequence that this process has opened: mappings of its region and its rows. It keeps them, and
// wavebufferd's count of them, for as long as it lives; of one batch. Thread-safe.
class OpenSequence;

// On the device that is current in the thread that calls Create; the other calls do not care which
// is. Open, Note..., RoomFor, TokensOf and OutcomeOf are thread-safe, the others come from one
// thread at a time. All streams belong to that device, and what is queued in several is ordered by
// the caller: tokens run one after another.
//
// Errors: InvalidArgument names what was found and what is allowed. Unavailable: CUDA failed, with
// its own words; what is not said otherwise.
class ResidentBatch {
 public:
  // FailedPrecondition, with the cure: no driver or no GPU. ResourceExhausted: the device has too
  // little memory.
  static absl::StatusOr<std::unique_ptr<ResidentBatch>> Create(const ResidentModel& model);
  // Waits for the device. No captured graph may be launched any more.
  ~ResidentBatch();
  ResidentBatch(const ResidentBatch&) = delete;
  ResidentBatch& operator=(const ResidentBatch&) = delete;

  const ResidentModel& model() const;  // With all capacities.
  int device() const;                  // As CUDA numbers devices in this process.
  const std::string& device_uuid() const;

  // Imports the wave buffer and registers the pool's windows, unless another sequence has: 75 ms
  // for each GB. The attachment's descriptors are not needed afterwards. FailedPrecondition: the
  // buffer lies on another device than the batch. InvalidArgument: model and sequence differ, or a
  // capacity is too small (which one, and what it must be). DataLoss: no region of this sequence
  // lies there. DeadlineExceeded: wavebufferd does not answer.
  absl::StatusOr<std::shared_ptr<OpenSequence>> Open(
      const ResidentAttachment& attachment,
      std::chrono::milliseconds timeout = std::chrono::milliseconds(10'000));

  // From the next token of the stream on, `entry` is that sequence, or empty. What it was before is
  // let go when the stream has come so far. Not while the stream is captured. FailedPrecondition:
  // it is another entry's, or another batch's.
  absl::Status SetSequence(uint32_t entry, std::shared_ptr<OpenSequence> sequence,
                           CudaStream stream);

  // Counts a token of every sequence of the batch, before it is submitted, by calls or as a
  // captured graph: the daemon must have taken over enough of what was appended. Unavailable names
  // the entries that have no room; nothing is counted then. Ask the daemon, NoteCovered, try again.
  // Steps that append nothing need none.
  absl::Status ReserveToken();

  // A token: finds what every sequence has published. Each layer is then attended to once, in any
  // order; a layer that is left out keeps the daemon from ever reusing what the token might read.
  absl::Status BeginToken(CudaStream stream);
  // Appends the new rows to `layer` and attends over all stored tokens: exactly over the first and
  // newest and the best clusters, estimating the others.
  absl::Status Attend(uint32_t layer, const ResidentTensors& tensors, CudaStream stream);

  // What the daemon says of the entry's sequence: its index covers positions up to `steady_first`,
  // the least of all layers.
  void NoteCovered(uint32_t entry, uint64_t steady_first);
  // After an Insert or a Truncate of the drained sequence.
  void NoteStored(uint32_t entry, uint64_t token_count, uint64_t steady_first);
  // Tokens that ReserveToken grants now; of an empty entry as many as one likes.
  uint64_t RoomFor(uint32_t entry) const;
  // Tokens of the entry's sequence, those submitted included; 0 of an empty one.
  uint64_t TokensOf(uint32_t entry) const;
  // As far as the device has come; never waits for it. What went wrong in any token stays. An
  // outcome other than kAttending leaves heads that have appended and others that have not: detach
  // the sequence.
  ResidentOutcome OutcomeOf(uint32_t entry) const;

 private:
  struct Impl;
  explicit ResidentBatch(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv::client
