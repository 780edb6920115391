// The C++ SDK: a Session holds the lease, re-attaches, applies deadlines and chooses the data path;
// a Sequence is one request's KV cache.
//
//   auto session = wavekv::client::Session::Connect({.address = "unix:/run/wavekv/wavekvd.sock"});
//   auto sequence = (*session)->CreateSequence(options);
//   (*sequence)->Insert(0, all_layers, keys, values);   // prefill
//   (*sequence)->BuildIndex();
//   auto step = (*sequence)->Attend(layer, q, {.append_keys = k, .append_values = v});  // decode
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_attachment.h"
#include "client/gpu/segment_labels.h"
#include "client/types.h"

namespace wavekv::client {

class Sequence;

// One item of a batched decode step. At most one item of a batch appends to a layer of a sequence.
struct AttendItem {
  Sequence* sequence = nullptr;
  uint32_t layer = 0;
  Tensor queries;                       // [query_heads, key_dim]
  std::optional<Tensor> append_keys;    // [kv_heads, key_dim] of the new token
  std::optional<Tensor> append_values;  // [kv_heads, value_dim]
  std::optional<Budget> budget;
  bool exact = false;
};

struct AttendOptions {
  std::optional<Tensor> append_keys;    // [kv_heads, key_dim]: appended before attending
  std::optional<Tensor> append_values;  // [kv_heads, value_dim]
  std::optional<Budget> budget;         // Unset: the sequence's.
  bool exact = false;                   // Attend over every token.
};

struct QueryOptions {
  std::optional<Budget> budget;
  bool inline_rows = false;
};

struct ResidentOptions {
  double cache_ratio = 0;  // Of the payload of max_tokens, for the block cache; 0: 0.05.
  uint32_t ring_rows = 0;  // Exact tokens that the region holds, a multiple of 256; 0: 2304.
};

// How a sequence that is attached to a resident region is doing.
struct ResidentState {
  absl::Status attached;  // OK: it is. Else why it is not any more.
  uint64_t generation = 0;
  uint64_t token_count = 0;   // Stored by every layer.
  uint64_t steady_first = 0;  // Positions before it are clustered: their rows of the ring are free.
  uint64_t hit_blocks = 0;    // Blocks that steps asked for and found in the cache,
  uint64_t miss_blocks = 0;   // or not.
  uint64_t overflows = 0;     // Tokens that steps could not append: the ring was full.
  uint64_t violations = 0;    // Numbers found in the region that cannot be.
};

// Thread-safe. Calls fail with: Unavailable (the daemon is away: within the deadline, never a
// hang), DeadlineExceeded, FailedPrecondition (stale generation, or an id of a daemon that has been
// restarted: the text says so; the session itself has re-attached), ResourceExhausted,
// InvalidArgument, NotFound, Aborted, as the daemon's contract has it. A forked child has no part
// in its parent's session: there every call is FailedPrecondition, and destructors do nothing.
class Session {
 public:
  // Attaches; fails when the daemon is away or does not speak our protocol version.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(ClientOptions options);
  ~Session();  // Detaches: the sequences of this session go.
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Reserves memory for max_tokens. InvalidArgument names the field that cannot be;
  // ResourceExhausted says what was asked, what is free and who holds it.
  absl::StatusOr<std::unique_ptr<Sequence>> CreateSequence(const SequenceOptions& options);
  // One round trip (one for each ClientInfo::batch_max items) for many sequences of different
  // lengths; one result per item, in order: a bad item fails alone. An error of the whole says
  // that no result of it is known.
  absl::StatusOr<std::vector<absl::StatusOr<Attention>>> AttendBatch(
      std::span<const AttendItem> items);

  // Of the present attachment: the epoch changes when the daemon was restarted.
  ClientInfo info() const;

 private:
  friend class Sequence;
  struct Impl;
  explicit Session(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

// One sequence. Its calls may come from several threads, but appends to one layer must be ordered
// by the caller. Dropped when destroyed, unless released. May outlive its Session object; its calls
// are then FailedPrecondition. Calls fail as Session says. Shapes and dtypes that cannot be right
// are InvalidArgument, naming expected and found, and are never sent; a reply that does not fit the
// sequence is Internal, and never comes back as data.
class Sequence {
 public:
  ~Sequence();
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;

  uint64_t id() const;
  uint64_t generation() const;
  const ModelShape& shape() const;
  // Positions that this object knows to be stored in `layer`.
  uint64_t token_count(uint32_t layer = 0) const;

  // Stores K and V of consecutive positions for the named layers, of the sequence's dtype. keys
  // [layers, tokens, kv_heads, key_dim] (NHD) or [layers, kv_heads, tokens, key_dim] (HND), values
  // likewise with value_dim; with one layer the leading axis may be left out. Split into messages
  // that fit; after an error a part may be stored, and repeating the call is safe.
  // FailedPrecondition: a gap before first_position, naming the position expected. Aborted: other
  // bytes are stored there. InvalidArgument: NaN or infinity, naming position and head.
  absl::Status Insert(uint64_t first_position, std::span<const uint32_t> layers, const Tensor& keys,
                      const Tensor& values);
  // Cuts and clusters what is not yet, and waits for it. `progress` is called from this thread.
  absl::StatusOr<BuildResult> BuildIndex(
      const std::function<void(const BuildProgress&)>& progress = nullptr);

  // Where the daemon will cut a layer's index once the layer holds token_count tokens (0: those it
  // holds) and BuildIndex has come, as far as that is not planned yet. For a process that clusters
  // keys by itself. InvalidArgument: the layer holds more, or cannot hold as many. Unimplemented:
  // the daemon is older.
  absl::StatusOr<std::vector<PlannedSegment>> PlanIndex(uint32_t layer, uint64_t token_count = 0);
  // Clusters of planned segments, in place of the daemon's k-means; returns how many of them it
  // keeps. They are used for segments that are cut later with exactly these tokens: give them
  // before the rows, or the BuildIndex, that let them be cut. Others are not kept, and do no harm.
  // InvalidArgument: a label is none of the planned clusters, or positions lie beyond max_tokens.
  absl::StatusOr<uint32_t> GiveLabels(uint32_t layer, std::span<const SegmentLabels> segments);

  // Attention of queries [query_heads, key_dim], any dtype, over all stored tokens: the steady zone
  // and the retrieved clusters exactly, the others estimated. The new token's K and V, if given,
  // are appended first, at token_count(layer); after an error repeating the call is safe.
  absl::StatusOr<Attention> Attend(uint32_t layer, const Tensor& queries,
                                   const AttendOptions& options = {});
  // What Attend would read, without attending: clusters, plan and counters, the estimation zone,
  // and K and V bytes when asked for. Offsets of staged rows hold until the next Query or
  // AttendStaged.
  absl::StatusOr<QueryResult> Query(uint32_t layer, const Tensor& queries,
                                    const QueryOptions& options = {});
  // The estimation zone alone, with bounds of its true mass.
  absl::StatusOr<Estimation> Estimate(uint32_t layer, const Tensor& queries,
                                      const std::optional<Budget>& budget = std::nullopt);
  // The portable wave-buffer path: Query stages steady and selected rows into the wave buffer, and
  // this process attends over them there and merges the estimation zone. FailedPrecondition without
  // SequenceOptions::attach_wave_buffer or a wavebufferd; NotFound or Unavailable while it
  // restarts.
  absl::StatusOr<Attention> AttendStaged(uint32_t layer, const Tensor& queries,
                                         const QueryOptions& options = {});

  // Gives the sequence a resident region in the wave buffer on a GPU, where this process' own
  // kernels attend over it and append to it: where it lies, and the block pool's memory that it
  // points into. From then on this process is watched: when it ends, so does the attachment.
  // Attend, Query and Estimate see what was appended there once it is stored; until DetachResident
  // an Attend with a new token is FailedPrecondition, and Insert and Truncate are while a step is
  // under way. One of those that leaves more exact tokens than the ring holds ends the attachment,
  // as ResidentStatus then says: build the index, attach again. FailedPrecondition: what the
  // sequence or the daemon lacks, with the cure (call BuildIndex first; not over TCP). Aborted: it
  // is attached already. InvalidArgument: its shape, or an option, is none of a step on a GPU.
  // ResourceExhausted: the wave buffer has no room. Unavailable: wavebufferd is away.
  // Unimplemented: the daemon is older.
  absl::StatusOr<ResidentAttachment> AttachResident(const ResidentOptions& options = {});
  // Its state once it has ended or its steady_first is above `steady_first_above`, or after `wait`.
  // The step that appends position p may be submitted when p - ring_rows < steady_first, rounded
  // down to a multiple of 8.
  // FailedPrecondition: it was never attached.
  absl::StatusOr<ResidentState> ResidentStatus(uint64_t steady_first_above = 0,
                                               std::chrono::milliseconds wait = {});
  // Ends the attachment once what steps have appended is stored. Wait for the stream first: a step
  // that begins later attends over nothing. FailedPrecondition: it is not attached (any more).
  absl::Status DetachResident();

  // A sequence that shares what is stored, with an id and a generation of its own. token_count 0:
  // all; max_tokens 0: as this sequence.
  absl::StatusOr<std::unique_ptr<Sequence>> Fork(uint64_t token_count = 0, uint64_t max_tokens = 0,
                                                 std::string label = "");
  // Keeps the first token_count tokens of every layer. Bumps the generation: calls under way fail.
  absl::Status Truncate(uint64_t token_count);
  // Frees it now instead of at destruction. NotFound: it is gone already.
  absl::Status Drop();
  // A pinned sequence outlives this client's lease and is not evicted.
  absl::Status Pin(bool pinned);
  // It lives for `ttl` after its last use, beyond this client's lease; 0: until the lease ends.
  absl::Status SetTtl(std::chrono::milliseconds ttl);
  // Leaves the sequence with the daemon when this object goes (prefix sharing, with SetTtl or Pin).
  void Release();

 private:
  friend class Session;
  struct Impl;
  explicit Sequence(std::unique_ptr<Impl> impl);
  const std::unique_ptr<Impl> impl_;
};

}  // namespace wavekv::client
