// The C++ SDK: a Session holds the lease, re-attaches, applies deadlines and chooses the data path;
// a Sequence is one request's KV cache.
//
//   auto session = wavekv::client::Session::Connect({.address = "unix:/run/wavekv/wavekvd.sock"});
//   auto sequence = (*session)->CreateSequence(options);
//   (*sequence)->Insert(0, all_layers, keys, values);   // prefill
//   (*sequence)->BuildIndex();
//   auto step = (*sequence)->Attend(layer, q, {.keys = k, .values = v});  // decode
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/types.h"

namespace wavekv::client {

class Sequence;

// One item of a batched decode step.
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

// Thread-safe. Calls fail with: Unavailable (the daemon is away: within the deadline, never a
// hang), DeadlineExceeded, FailedPrecondition (stale generation, or an id of a daemon that has been
// restarted: the text says so; the session itself has re-attached), ResourceExhausted,
// InvalidArgument, NotFound, Aborted, as the daemon's contract has it.
class Session {
 public:
  // Attaches; fails when the daemon is away or does not speak our protocol version.
  static absl::StatusOr<std::unique_ptr<Session>> Connect(ClientOptions options);
  ~Session();  // Detaches: the sequences of this session go.
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  absl::StatusOr<std::unique_ptr<Sequence>> CreateSequence(const SequenceOptions& options);
  // One round trip for many sequences of different lengths; one result per item, in order.
  absl::StatusOr<std::vector<absl::StatusOr<Attention>>> AttendBatch(
      std::span<const AttendItem> items);

  ClientInfo info() const;

 private:
  friend class Sequence;
  struct Impl;
  explicit Session(std::shared_ptr<Impl> impl);
  const std::shared_ptr<Impl> impl_;
};

// One sequence. Its calls may come from several threads, but appends to one layer must be ordered
// by the caller. Dropped when destroyed, unless released. May outlive its Session object.
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

  // Stores K and V of consecutive positions for the named layers. keys [layers, tokens, kv_heads,
  // key_dim] (NHD) or [layers, kv_heads, tokens, key_dim] (HND); with one layer the leading axis
  // may be left out. Split into messages that fit; safe to repeat.
  absl::Status Insert(uint64_t first_position, std::span<const uint32_t> layers, const Tensor& keys,
                      const Tensor& values);
  absl::StatusOr<BuildResult> BuildIndex(
      const std::function<void(const BuildProgress&)>& progress = nullptr);

  absl::StatusOr<Attention> Attend(uint32_t layer, const Tensor& queries,
                                   const AttendOptions& options = {});
  absl::StatusOr<QueryResult> Query(uint32_t layer, const Tensor& queries,
                                    const QueryOptions& options = {});
  absl::StatusOr<Estimation> Estimate(uint32_t layer, const Tensor& queries,
                                      const std::optional<Budget>& budget = std::nullopt);
  // The portable wave-buffer path: Query stages steady and selected rows into the wave buffer, and
  // this process attends over them there and merges the estimation zone. Needs
  // SequenceOptions::attach_wave_buffer.
  absl::StatusOr<Attention> AttendStaged(uint32_t layer, const Tensor& queries,
                                         const QueryOptions& options = {});

  // token_count 0: all; max_tokens 0: as this sequence.
  absl::StatusOr<std::unique_ptr<Sequence>> Fork(uint64_t token_count = 0, uint64_t max_tokens = 0,
                                                 std::string label = "");
  absl::Status Truncate(uint64_t token_count);
  absl::Status Drop();
  absl::Status Pin(bool pinned);
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
