#include "bench/attend_world.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "bench/or_die.h"
#include "bench/topic_data.h"
#include "index/backend/cpu_backend.h"
#include "storage/base/check.h"
#include "storage/base/cpuset.h"

namespace wavekv::bench {
namespace {

const TenantId kTenant("bench");
void StoreBf16(std::span<const float> from, std::byte* to) {
  ConvertFromFloat(DType::kBF16, from.data(), from.size(), to);
}

}  // namespace

AttendWorld::AttendWorld(const WorldOptions& options)
    : options_(options),
      pool_((options.threads == 0 ? UsableCpuCount() : static_cast<int>(options.threads)) - 1,
            "bench"),
      keys_(size_t{options.kv_heads} * options.tokens * options.dim * 2),
      values_(keys_.size()),
      queries_(options.layers),
      stored_queries_(options.layers) {
  shape_ = {options.layers,
            options.query_heads,
            options.kv_heads,
            options.dim,
            options.dim,
            DType::kBF16,
            1 / std::sqrt(static_cast<float>(options.dim)),
            "bench"};
  EngineOptions engine_options;
  engine_options.epoch = 1;
  engine_options.compute_threads = options.threads;
  engine_options.build_threads = options.threads;
  engine_ = OrDie(Engine::Create(engine_options, BlockPool::Create({uint64_t{1} << 40, 0}),
                                 CreateCpuBackend(), nullptr));
  SequenceSpec spec;
  spec.shape = shape_;
  spec.max_tokens = options.tokens;
  const SequenceStatus status = OrDie(engine_->CreateSequence(kTenant, ClientId(), spec));
  sequence_ = {status.id, status.generation};
  for (uint32_t layer = 0; layer < options.layers; ++layer) {
    std::fprintf(stderr, "making layer %u of %u\n", layer + 1, options.layers);
    Fill(layer);
  }
  std::fprintf(stderr, "building the index\n");
  OrDie(engine_->BuildIndex(kTenant, sequence_, [](const BuildProgress&) { return true; }));
}

// A stretch at a time: all heads of it together are one chunk of the insert.
void AttendWorld::Fill(uint32_t layer) {
  const size_t row_bytes = shape_.key_bytes();
  const uint32_t heads = options_.kv_heads, dim = options_.dim;
  std::vector<std::vector<float>> topics(heads);
  for (uint32_t first = 0; first < options_.tokens; first += kTopicStretchTokens) {
    const uint32_t count = std::min(kTopicStretchTokens, options_.tokens - first);
    std::vector<std::byte> keys(heads * count * row_bytes), values(keys.size());
    pool_.ParallelFor(heads, [&](size_t head) {
      const TopicStretchId id = {options_.seed, layer, static_cast<uint32_t>(head),
                                 first / kTopicStretchTokens};
      const TopicStretch stretch = MakeTopicStretch(id, count, dim);
      topics[head].insert(topics[head].end(), stretch.topics.begin(), stretch.topics.end());
      std::byte* const head_keys = keys.data() + head * count * row_bytes;
      std::byte* const head_values = values.data() + head * count * row_bytes;
      StoreBf16(stretch.keys, head_keys);
      StoreBf16(MakeTopicValues(id, count, dim), head_values);
      if (layer == 0) {
        const size_t at = (head * options_.tokens + first) * row_bytes;
        std::memcpy(&keys_[at], head_keys, count * row_bytes);
        std::memcpy(&values_[at], head_values, count * row_bytes);
      }
    });
    const int64_t chunk[] = {1, heads, count, dim};
    const InsertChunk insert = {sequence_,
                                first,
                                std::span(&layer, 1),
                                {DType::kBF16, chunk, Layout::kHND, keys},
                                {DType::kBF16, chunk, Layout::kHND, values}};
    OrDie(engine_->Insert(kTenant, insert));
  }
  queries_[layer].resize(size_t{options_.steps} * options_.query_heads * dim);
  pool_.ParallelFor(
      heads, [&](size_t head) { WalkQueries(layer, static_cast<uint32_t>(head), topics[head]); });
  stored_queries_[layer].resize(queries_[layer].size() * 2);
  StoreBf16(queries_[layer], stored_queries_[layer].data());
  ConvertToFloat(DType::kBF16, stored_queries_[layer].data(), queries_[layer].size(),
                 queries_[layer].data());
}

void AttendWorld::WalkQueries(uint32_t layer, uint32_t kv_head, std::span<const float> topics) {
  const size_t group_floats = size_t{group_size()} * options_.dim;
  const std::vector<float> walk = WalkTopicQueries({options_.seed, layer, kv_head}, topics,
                                                   options_.steps, group_size(), options_.dim);
  for (uint32_t step = 0; step < options_.steps; ++step) {
    std::copy_n(&walk[step * group_floats], group_floats,
                &queries_[layer][(size_t{step} * options_.kv_heads + kv_head) * group_floats]);
  }
}

std::span<const std::byte> AttendWorld::HeadRows(const std::vector<std::byte>& rows,
                                                 uint32_t kv_head) const {
  const size_t bytes = options_.tokens * shape_.key_bytes();
  return std::span<const std::byte>(rows).subspan(kv_head * bytes, bytes);
}

std::span<const float> AttendWorld::queries(uint32_t layer, uint32_t step) const {
  const size_t floats = size_t{options_.query_heads} * options_.dim;
  return std::span<const float>(queries_[layer]).subspan(step * floats, floats);
}

AttendOutcome AttendWorld::Attend(uint32_t layer, uint32_t step, bool exact) {
  AttendStep attend;
  attend.exact = exact;
  return Run(std::move(attend), layer, step);
}

AttendOutcome AttendWorld::Attend(uint32_t layer, uint32_t step, const ZoneBudget& budget) {
  AttendStep attend;
  attend.query.budget = budget;
  return Run(std::move(attend), layer, step);
}

AttendOutcome AttendWorld::Run(AttendStep step, uint32_t layer, uint32_t step_idx) {
  const size_t bytes = size_t{options_.query_heads} * options_.dim * 2;
  const int64_t shape[] = {options_.query_heads, options_.dim};
  step.query.sequence = sequence_;
  step.query.layer = layer;
  step.query.queries = {
      DType::kBF16, shape, Layout::kNHD,
      std::span<const std::byte>(stored_queries_[layer]).subspan(step_idx * bytes, bytes)};
  std::vector<AttendOutcome> outcomes = OrDie(engine_->Attend(kTenant, std::span(&step, 1)));
  WAVEKV_CHECK(outcomes[0].status.ok(), std::string(outcomes[0].status.message()).c_str());
  return std::move(outcomes[0]);
}

}  // namespace wavekv::bench
