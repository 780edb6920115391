#include "tests/mock_decoder/sdk_run.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <numeric>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/session.h"
#include "storage/base/status_macros.h"
#include "tests/mock_decoder/resident_run.h"
#include "tests/mock_decoder/stopwatch.h"

namespace wavekv::mock {
namespace {

constexpr uint32_t kSpeculatedTokens = 5;

// For people, and for tests that end this process at a chosen moment.
void SayPhase(const char* phase) { std::fprintf(stderr, "mock_decoder: phase=%s\n", phase); }

absl::Status Annotate(const absl::Status& status, absl::string_view where) {
  return absl::Status(status.code(), absl::StrCat(where, ": ", status.message()));
}

// One request of an engine: its sequence, from prefill to the last question.
class Decoder {
 public:
  Decoder(const World& world, const SdkRunOptions& options, client::Session* session)
      : world_(world), options_(options), session_(session) {
    if (options.resident != nullptr) resident_.emplace(world, options.resident);
  }

  absl::StatusOr<SdkRun> Run() {
    run_.has_wave_buffer = session_->info().has_wave_buffer;
    if (options_.staged && !run_.has_wave_buffer) {
      return absl::FailedPreconditionError("--staged: this daemon has no wave buffer");
    }
    if (options_.abort_prefill) {
      WAVEKV_RETURN_IF_ERROR(Admit());
      WAVEKV_RETURN_IF_ERROR(Prefill(world_.config().token_count / 2));
      WAVEKV_RETURN_IF_ERROR(sequence_->Drop());
    }
    WAVEKV_RETURN_IF_ERROR(AdmitAndBuild(world_.config().token_count));
    SayPhase("decoding");
    Stopwatch stopwatch;
    for (uint32_t i = 0; i < world_.facts().size(); ++i) {
      const absl::Status status = Step(i);
      if (!status.ok()) return Annotate(status, absl::StrCat("decode step ", i));
    }
    run_.seconds_decode += stopwatch.Seconds();
    if (resident_.has_value()) {
      WAVEKV_ASSIGN_OR_RETURN(run_.counters, resident_->Detach());
    }
    return std::move(run_);
  }

 private:
  const ModelConfig& model() const { return world_.config().model; }

  absl::Status Admit() {
    client::SequenceOptions options;
    options.shape = ShapeOf(model());
    options.max_tokens = MaxTokens(world_.config());
    options.label = "mock decoder";
    options.index.budget = BudgetOf(options_);
    options.attach_wave_buffer = run_.has_wave_buffer && !resident_.has_value();
    WAVEKV_ASSIGN_OR_RETURN(sequence_, session_->CreateSequence(options));
    return absl::OkStatus();
  }

  absl::Status AdmitAndBuild(uint64_t token_count) {
    WAVEKV_RETURN_IF_ERROR(Admit());
    SayPhase("admitted");
    Stopwatch prefill;
    WAVEKV_RETURN_IF_ERROR(Prefill(token_count));
    SayPhase("prefilled");
    run_.seconds_prefill += prefill.Seconds();
    Stopwatch build;
    const absl::StatusOr<client::BuildResult> built =
        sequence_->BuildIndex([this](const client::BuildProgress& progress) {
          options_.progress("index", progress.tokens_done, progress.tokens_total);
        });
    if (!built.ok()) return Annotate(built.status(), "BuildIndex");
    run_.seconds_build += build.Seconds();
    steady_tail_start_ = SteadyTailStart(token_count);
    return resident_.has_value() ? resident_->Attach(sequence_.get()) : absl::OkStatus();
  }

  // Inserts the first `token_count` tokens, a few layers and some thousand tokens at a time.
  absl::Status Prefill(uint64_t token_count) {
    for (uint64_t first = 0; first < token_count; first += options_.chunk_tokens) {
      const uint64_t count = std::min(options_.chunk_tokens, token_count - first);
      for (uint32_t layer = 0; layer < model().layer_count; layer += options_.chunk_layers) {
        std::vector<uint32_t> layers(std::min(options_.chunk_layers, model().layer_count - layer));
        std::iota(layers.begin(), layers.end(), layer);
        const absl::Status status = InsertChunk(layers, first, count);
        if (!status.ok()) return Annotate(status, absl::StrCat("Insert at token ", first));
      }
      options_.progress("insert", first + count, token_count);
    }
    return absl::OkStatus();
  }

  absl::Status InsertChunk(std::span<const uint32_t> layers, uint64_t first, uint64_t count) {
    const size_t bytes = count * world_.context().token_bytes();
    keys_.resize(layers.size() * bytes);
    values_.resize(layers.size() * bytes);
    for (size_t i = 0; i < layers.size(); ++i) {
      std::memcpy(keys_.data() + i * bytes, world_.context().Keys(layers[i], first), bytes);
      std::memcpy(values_.data() + i * bytes, world_.context().Values(layers[i], first), bytes);
    }
    const std::vector<int64_t> shape = {static_cast<int64_t>(layers.size()),
                                        static_cast<int64_t>(count), model().kv_head_count,
                                        kHeadDim};
    return sequence_->Insert(first, layers, {model().dtype, shape, keys_.data()},
                             {model().dtype, shape, values_.data()});
  }

  // K or V of one token of one layer, where it lies in the context.
  client::Tensor RowTensor(const std::byte* rows) const {
    return {model().dtype, {model().kv_head_count, kHeadDim}, rows};
  }

  // The question of fact `i`, in the sequence's dtype. `storage` holds the bytes.
  client::Tensor QueryTensor(uint32_t layer, uint32_t i, std::vector<std::byte>* storage) const {
    *storage = world_.QueryBytes(layer, i);
    return {model().dtype, {model().query_head_count(), kHeadDim}, storage->data()};
  }

  // One decode step: life's events, then the question token through every layer.
  absl::Status Step(uint32_t i) {
    if (options_.preempt_at == i) {
      WAVEKV_RETURN_IF_ERROR(sequence_->Drop());
      WAVEKV_RETURN_IF_ERROR(AdmitAndBuild(world_.facts()[i].ask_position));
    }
    if (options_.fork && i == world_.facts().size() / 2) {
      WAVEKV_ASSIGN_OR_RETURN(std::unique_ptr<client::Sequence> child, sequence_->Fork());
      parent_ = std::exchange(sequence_, std::move(child));
    }
    if (options_.truncate) WAVEKV_RETURN_IF_ERROR(Speculate(i));

    const uint64_t position = world_.facts()[i].position;
    if (position < kFirstTokens || position >= steady_tail_start_) ++run_.planted_steady;
    run_.outputs.emplace_back();
    if (options_.steady_only) run_.steady_outputs.emplace_back();
    if (parent_ != nullptr) run_.parent_outputs.emplace_back();
    if (resident_.has_value()) {
      WAVEKV_ASSIGN_OR_RETURN(run_.outputs.back(), resident_->Step(i));
    }
    for (uint32_t layer = 0; layer < model().layer_count; ++layer) {
      WAVEKV_RETURN_IF_ERROR(StepLayer(layer, i));
    }
    return absl::OkStatus();
  }

  absl::Status StepLayer(uint32_t layer, uint32_t i) {
    std::vector<std::byte> storage;
    const client::Tensor queries = QueryTensor(layer, i, &storage);
    if (options_.staged) {
      WAVEKV_RETURN_IF_ERROR(StepStaged(layer, i, queries));
    } else if (!resident_.has_value()) {
      WAVEKV_RETURN_IF_ERROR(StepAttend(layer, i, queries));
    }
    if (!options_.steady_only) return absl::OkStatus();
    client::AttendOptions steady_only;
    steady_only.budget = client::Budget::SteadyOnly();
    WAVEKV_ASSIGN_OR_RETURN(const client::Attention attention,
                            sequence_->Attend(layer, queries, steady_only));
    return Append(attention, &run_.steady_outputs.back());
  }

  // The sequence, and the parent it was forked from, in one round trip.
  absl::Status StepAttend(uint32_t layer, uint32_t i, const client::Tensor& queries) {
    client::AttendItem item;
    item.sequence = sequence_.get();
    item.layer = layer;
    item.queries = queries;
    const uint64_t position = world_.facts()[i].ask_position;
    item.append_keys = RowTensor(world_.context().Keys(layer, position));
    item.append_values = RowTensor(world_.context().Values(layer, position));
    std::vector<client::AttendItem> items = {item};
    if (parent_ != nullptr) {
      item.sequence = parent_.get();
      items.push_back(item);
    }
    WAVEKV_ASSIGN_OR_RETURN(std::vector<absl::StatusOr<client::Attention>> results,
                            session_->AttendBatch(items));
    WAVEKV_ASSIGN_OR_RETURN(const client::Attention attention, std::move(results[0]));
    run_.counters += attention.counters;
    WAVEKV_RETURN_IF_ERROR(Append(attention, &run_.outputs.back()));
    if (parent_ == nullptr) return absl::OkStatus();
    WAVEKV_ASSIGN_OR_RETURN(const client::Attention parents, std::move(results[1]));
    return Append(parents, &run_.parent_outputs.back());
  }

  absl::Status StepStaged(uint32_t layer, uint32_t i, const client::Tensor& queries) {
    const uint64_t position = world_.facts()[i].ask_position;
    const uint32_t layers[] = {layer};
    WAVEKV_RETURN_IF_ERROR(InsertChunk(layers, position, 1));
    WAVEKV_ASSIGN_OR_RETURN(const client::Attention attention,
                            sequence_->AttendStaged(layer, queries));
    run_.counters += attention.counters;
    WAVEKV_RETURN_IF_ERROR(Append(attention, &run_.outputs.back()));
    if (parent_ == nullptr) return absl::OkStatus();
    client::AttendOptions append;
    append.append_keys = RowTensor(world_.context().Keys(layer, position));
    append.append_values = RowTensor(world_.context().Values(layer, position));
    WAVEKV_ASSIGN_OR_RETURN(const client::Attention parents,
                            parent_->Attend(layer, queries, append));
    return Append(parents, &run_.parent_outputs.back());
  }

  // Appends tokens that a draft model guessed wrong, and takes them back. They are false witnesses,
  // the fact's own keys with the values of another: left behind, they would spoil the answer.
  absl::Status Speculate(uint32_t i) {
    const std::vector<Fact>& facts = world_.facts();
    const uint64_t other = facts[(i + 1) % facts.size()].position;
    for (uint32_t token = 0; token < kSpeculatedTokens; ++token) {
      const absl::Status status = resident_.has_value()
                                      ? resident_->Speculate(i, facts[i].position, other)
                                      : SpeculateOnce(i, facts[i].position, other);
      if (!status.ok()) return Annotate(status, "speculation");
    }
    const absl::Status truncated = resident_.has_value()
                                       ? resident_->Truncate(facts[i].ask_position)
                                       : sequence_->Truncate(facts[i].ask_position);
    return truncated.ok() ? truncated : Annotate(truncated, "Truncate");
  }

  absl::Status SpeculateOnce(uint32_t i, uint64_t key_position, uint64_t value_position) {
    for (uint32_t layer = 0; layer < model().layer_count; ++layer) {
      std::vector<std::byte> storage;
      const client::Tensor queries = QueryTensor(layer, i, &storage);
      client::AttendOptions append;
      append.append_keys = RowTensor(world_.context().Keys(layer, key_position));
      append.append_values = RowTensor(world_.context().Values(layer, value_position));
      WAVEKV_RETURN_IF_ERROR(sequence_->Attend(layer, queries, append).status());
    }
    return absl::OkStatus();
  }

  absl::Status Append(const client::Attention& attention, StepOutput* output) const {
    const size_t expected = static_cast<size_t>(model().query_head_count()) * kHeadDim;
    if (attention.out.size() != expected) {
      return absl::InternalError(absl::StrCat("attention output: expected ", expected,
                                              " elements, found ", attention.out.size()));
    }
    output->insert(output->end(), attention.out.begin(), attention.out.end());
    return absl::OkStatus();
  }

  const World& world_;
  const SdkRunOptions& options_;
  client::Session* const session_;
  SdkRun run_;
  std::unique_ptr<client::Sequence> sequence_;
  std::unique_ptr<client::Sequence> parent_;  // Once forked.
  std::optional<ResidentRun> resident_;
  uint64_t steady_tail_start_ = 0;
  std::vector<std::byte> keys_;  // Of the chunk being inserted.
  std::vector<std::byte> values_;
};

}  // namespace

ModelShape ShapeOf(const ModelConfig& model) {
  ModelShape shape;
  shape.layer_count = model.layer_count;
  shape.query_head_count = model.query_head_count();
  shape.kv_head_count = model.kv_head_count;
  shape.key_dim = kHeadDim;
  shape.value_dim = kHeadDim;
  shape.dtype = model.dtype;
  shape.softmax_scale = kSoftmaxScale;
  shape.model_id = absl::StrCat("mock-decoder-", model.seed);
  return shape;
}

uint64_t MaxTokens(const WorldConfig& world) {
  return world.token_count + world.needle_count + kSpeculatedTokens;
}

client::Budget BudgetOf(const SdkRunOptions& options) {
  client::Budget budget;
  budget.value = options.retrieval_ratio.value_or(budget.value);
  budget.sketch_clusters = options.sketch_clusters.value_or(budget.sketch_clusters);
  return budget;
}

absl::Status ValidateSdkRunOptions(const SdkRunOptions& options) {
  if (options.resident == nullptr || !options.fork) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--fork: a run over a resident region has one sequence; add --staged, or take "
      "--backend=host");
}

absl::StatusOr<SdkRun> RunThroughSdk(const World& world, const SdkRunOptions& options) {
  client::ClientOptions client_options;
  client_options.address = options.address;
  client_options.client_name = "mock_decoder";
  auto session = client::Session::Connect(client_options);
  if (!session.ok()) return Annotate(session.status(), "Connect");
  return Decoder(world, options, session->get()).Run();
}

}  // namespace wavekv::mock
