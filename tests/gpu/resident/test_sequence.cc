#include "tests/gpu/resident/test_sequence.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "storage/base/check.h"
#include "storage/base/dtype.h"
#include "tests/index/oracle.h"

namespace wavekv::resident {
namespace {

constexpr uint32_t kTopics = 24;
constexpr uint32_t kTopicTokens = 32;  // Of one topic in a row.
constexpr double kNoise = 0.6;
constexpr int kReleased = 0xab;
constexpr uint32_t kWindow = 1;
// Float64 on both sides, sums in another order.
constexpr double kTolerance = 1e-9;

// Rows to attend over in float64, for several query heads: keys and values, and what is added to a
// row's logit.
class AttendedRows {
 public:
  AttendedRows(DType dtype, uint32_t dim) : dtype_(dtype), dim_(dim) {}

  void AddRows(const std::byte* keys, const std::byte* values, size_t count) {
    std::vector<float> floats(2 * count * dim_);
    ConvertToFloat(dtype_, keys, count * dim_, floats.data());
    ConvertToFloat(dtype_, values, count * dim_, &floats[count * dim_]);
    keys_.insert(keys_.end(), floats.begin(), floats.begin() + count * dim_);
    values_.insert(values_.end(), floats.begin() + count * dim_, floats.end());
    biases_.resize(biases_.size() + count);
  }
  void AddMean(const std::vector<double>& key, const std::vector<double>& value, double bias) {
    keys_.insert(keys_.end(), key.begin(), key.end());
    values_.insert(values_.end(), value.begin(), value.end());
    biases_.push_back(bias);
  }

  // What differs from out [dim] and lse of one query; empty: nothing does.
  std::string Compare(std::span<const float> query, double scale, const double* out,
                      double lse) const {
    std::vector<double> logits(biases_);
    for (size_t i = 0; i < logits.size(); ++i) {
      double dot = 0;
      for (uint32_t d = 0; d < dim_; ++d) dot += query[d] * keys_[i * dim_ + d];
      logits[i] += scale * dot;
    }
    const double expected = test::LogSumExp(logits);
    std::vector<double> sums(dim_);
    for (size_t i = 0; i < logits.size(); ++i) {
      const double weight = std::exp(logits[i] - expected);
      for (uint32_t d = 0; d < dim_; ++d) sums[d] += weight * values_[i * dim_ + d];
    }
    if (expected != lse && !(std::abs(expected - lse) <= kTolerance * (1 + std::abs(expected)))) {
      return absl::StrCat("lse is ", lse, ", expected ", expected);
    }
    for (uint32_t d = 0; d < dim_; ++d) {
      if (!(std::abs(out[d] - sums[d]) <= kTolerance * (1 + std::abs(sums[d])))) {
        return absl::StrCat("out[", d, "] is ", out[d], ", expected ", sums[d]);
      }
    }
    return "";
  }

 private:
  const DType dtype_;
  const uint32_t dim_;
  std::vector<double> keys_, values_;  // [count, dim]
  std::vector<double> biases_;         // [count]
};

}  // namespace

ModelShape SmallShape(uint32_t dim, DType dtype, uint32_t layers) {
  ModelShape shape;
  shape.layer_count = layers;
  shape.query_head_count = 4;
  shape.kv_head_count = 2;
  shape.key_dim = shape.value_dim = dim;
  shape.dtype = dtype;
  shape.softmax_scale = 1 / std::sqrt(static_cast<float>(dim));
  return shape;
}

TestSequence::TestSequence(const ModelShape& shape, uint64_t stream, uint64_t window_bytes)
    : shape_(shape),
      random_(test::NewRandom(stream)),
      window_(Mapping::Private(window_bytes).value()),
      topics_(test::Gaussian(random_, size_t{kTopics} * shape.key_dim)) {
  layers_.resize(shape.layer_count);
  for (Layer& layer : layers_) {
    layer.rows.resize(shape.kv_head_count);
    layer.heads.resize(shape.kv_head_count);
  }
}

void TestSequence::Append(uint32_t count) {
  const uint32_t dim = shape_.key_dim;
  for (uint32_t layer = 0; layer < layers_.size(); ++layer) {
    for (HeadRows& rows : layers_[layer].rows) {
      std::vector<float> keys = test::Gaussian(random_, size_t{count} * dim, kNoise);
      for (uint32_t i = 0; i < count; ++i) {
        const uint64_t topic = (token_count_ + i) / kTopicTokens * 7 % kTopics;
        for (uint32_t d = 0; d < dim; ++d) keys[size_t{i} * dim + d] += topics_[topic * dim + d];
      }
      const auto append = [&](const std::vector<float>& floats, std::vector<std::byte>* bytes) {
        const size_t at = bytes->size();
        bytes->resize(at + floats.size() * DTypeBytes(shape_.dtype));
        ConvertFromFloat(shape_.dtype, floats.data(), floats.size(), bytes->data() + at);
      };
      append(keys, &rows.keys);
      append(test::Gaussian(random_, size_t{count} * dim), &rows.values);
    }
  }
  token_count_ += count;
}

void TestSequence::Truncate(uint64_t token_count) {
  token_count_ = token_count;
  for (Layer& layer : layers_) {
    for (HeadRows& rows : layer.rows) {
      rows.keys.resize(token_count * shape_.key_bytes());
      rows.values.resize(token_count * shape_.value_bytes());
    }
    for (auto& segments : layer.heads) {
      while (!segments.empty() && segments.back().built->head.end_position() > token_count) {
        segments.pop_back();
      }
    }
  }
}

std::vector<std::byte> TestSequence::KeysAt(uint32_t layer, uint64_t position) const {
  std::vector<std::byte> all;
  for (const HeadRows& rows : layers_[layer].rows) {
    const std::byte* row = &rows.keys[position * shape_.key_bytes()];
    all.insert(all.end(), row, row + shape_.key_bytes());
  }
  return all;
}

std::vector<std::byte> TestSequence::ValuesAt(uint32_t layer, uint64_t position) const {
  std::vector<std::byte> all;
  for (const HeadRows& rows : layers_[layer].rows) {
    const std::byte* row = &rows.values[position * shape_.value_bytes()];
    all.insert(all.end(), row, row + shape_.value_bytes());
  }
  return all;
}

uint64_t TestSequence::steady_first(uint32_t layer) const {
  const auto& segments = layers_[layer].heads[0];
  return segments.empty() ? std::min<uint64_t>(kSinks, token_count_)
                          : segments.back().built->head.end_position();
}

void TestSequence::Cluster(uint32_t layer, uint32_t count) {
  const uint64_t first = steady_first(layer);
  ClusterRange(layer, first, first + count);
}

void TestSequence::Merge(uint32_t layer, uint64_t first) {
  const uint64_t end = steady_first(layer);
  for (auto& segments : layers_[layer].heads) {
    while (!segments.empty() && segments.back().built->head.first_position >= first)
      segments.pop_back();
  }
  ClusterRange(layer, first, end);
}

void TestSequence::ClusterRange(uint32_t layer, uint64_t first, uint64_t end) {
  WAVEKV_CHECK(first == steady_first(layer) && first < end && end <= token_count_,
               "segments follow one another");
  for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
    layers_[layer].heads[head].push_back(
        BuildSegment(RowsOf(layer, head), first, static_cast<uint32_t>(end - first)));
  }
}

TestSequence::Live TestSequence::BuildSegment(const HeadRows& rows, uint64_t first,
                                              uint32_t count) {
  auto built = std::make_shared<Built>();
  const size_t row_bytes = shape_.key_bytes(), bytes = count * row_bytes;
  built->keys.resize(bytes);
  built->values.resize(bytes);
  const ClusterInput input{first,
                           count,
                           shape_.key_dim,
                           shape_.value_dim,
                           shape_.dtype,
                           &rows.keys[first * row_bytes],
                           &rows.values[first * row_bytes]};
  ClusterOptions options;
  options.sketch = false;
  built->head =
      backend_->ClusterSegment(input, options, built->keys.data(), built->values.data()).value();
  built->head.uid = next_uid_++;
  WAVEKV_CHECK(window_used_ + 2 * bytes <= window_.bytes(), "the window has room");
  std::byte* const place = window_.data() + window_used_;
  std::memcpy(place, built->keys.data(), bytes);
  std::memcpy(place + bytes, built->values.data(), bytes);
  built->window_offset = window_used_;
  by_offset_[window_used_] = built;
  window_used_ += 2 * bytes;
  return {built, std::shared_ptr<const void>(place, [place, bytes](const void*) {
            std::memset(place, kReleased, 2 * bytes);
          })};
}

ResidentLayer TestSequence::View(uint32_t layer, uint32_t retrieve_count, uint64_t appended) {
  ResidentLayer view;
  view.version = next_version_++;
  view.token_count = appended;
  view.steady_first = steady_first(layer);
  view.sink_count = static_cast<uint32_t>(std::min<uint64_t>(kSinks, appended));
  view.retrieve_count = retrieve_count;
  auto& version = versions_[view.version];
  for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
    auto& segments = view.heads.emplace_back();
    auto& kept = version.emplace_back();
    for (const Live& live : layers_[layer].heads[head]) {
      const uint64_t offset = live.built->window_offset;
      segments.push_back(
          {&live.built->head, live.owner, kWindow, offset, offset + live.built->keys.size()});
      kept.push_back(live.built);
    }
    const HeadRows& rows = layers_[layer].rows[head];
    const auto run = [&](uint64_t first, uint64_t end) {
      return RowRun{rows.keys.data() + first * shape_.key_bytes(),
                    rows.values.data() + first * shape_.value_bytes(),
                    static_cast<uint32_t>(end - first)};
    };
    // In more pieces than it needs.
    auto& steady = view.steady.emplace_back();
    steady.push_back(run(0, view.sink_count));
    const uint64_t middle = (view.steady_first + appended) / 2;
    steady.push_back(run(view.steady_first, middle));
    steady.push_back(run(middle, appended));
  }
  return view;
}

std::vector<float> TestSequence::Queries() {
  const uint32_t dim = shape_.key_dim;
  std::vector<float> queries =
      test::Gaussian(random_, size_t{shape_.query_head_count} * dim, kNoise);
  for (uint32_t head = 0; head < shape_.query_head_count; ++head) {
    // Some topics are asked for more often.
    const uint64_t topic = std::min(random_() % kTopics, random_() % kTopics);
    for (uint32_t d = 0; d < dim; ++d) queries[head * dim + d] += 2 * topics_[topic * dim + d];
  }
  return queries;
}

std::string TestSequence::Check(uint32_t layer, const std::byte* region,
                                std::span<const float> queries, const StepResult& result) const {
  const size_t of_head = size_t{shape_.group_size()} * shape_.key_dim;
  for (uint32_t head = 0; head < shape_.kv_head_count; ++head) {
    const std::string wrong =
        CheckHead(layer, head, region, queries.subspan(head * of_head, of_head), result.heads[head],
                  &result.out[head * of_head], &result.lse[head * shape_.group_size()]);
    if (!wrong.empty()) return absl::StrCat("layer ", layer, " head ", head, ": ", wrong);
  }
  return "";
}

std::string TestSequence::CheckHead(uint32_t layer, uint32_t kv_head, const std::byte* region,
                                    std::span<const float> queries, const StepHead& head,
                                    const double* out, const double* lse) const {
  if (head.is != StepHead::Is::kAttended) return "it attended over nothing";
  const size_t row_bytes = shape_.key_bytes();
  const HeadRows& rows = layers_[layer].rows[kv_head];
  // The steady zone.
  std::vector<std::byte> keys(rows.keys.begin(), rows.keys.begin() + kSinks * row_bytes);
  std::vector<std::byte> values(rows.values.begin(), rows.values.begin() + kSinks * row_bytes);
  if (head.appended * row_bytes > rows.keys.size()) return "it has more tokens than there are";
  for (auto [all, some] : {std::pair(&rows.keys, &keys), std::pair(&rows.values, &values)}) {
    some->insert(some->end(), all->begin() + head.steady_first * row_bytes,
                 all->begin() + head.appended * row_bytes);
  }
  if (head.steady_keys != keys || head.steady_values != values) return "exact rows differ";
  // Blocks: the region says which segment an entry is, the rows are those of the test.
  const auto* header = reinterpret_cast<const ResidentHeader*>(region);
  const uint32_t unit = layer * shape_.kv_head_count + kv_head;
  const std::byte* base = region + header->units_offset + unit * header->unit.unit_bytes;
  const auto* entries = reinterpret_cast<const SegmentEntry*>(base + header->unit.segments_offset);
  const auto& segments = versions_.at(head.version)[kv_head];
  std::map<uint64_t, std::map<uint32_t, uint32_t>> retrieved;  // uid -> first row -> rows
  for (const StepBlock& block : head.blocks) {
    const auto& built = by_offset_.at(entries[block.segment].keys_offset);
    const size_t at = block.first_row * row_bytes, bytes = block.keys.size();
    if (at + bytes > built->keys.size()) return "a block behind its segment's end";
    if (std::memcmp(&built->keys[at], block.keys.data(), bytes) != 0 ||
        std::memcmp(&built->values[at], block.values.data(), bytes) != 0) {
      return absl::StrCat("rows of block ", block.block, " in slot ", block.slot,
                          block.hit ? ", a hit," : ", a miss,", " are not its rows");
    }
    retrieved[built->head.uid][block.first_row] = static_cast<uint32_t>(bytes / row_bytes);
  }
  AttendedRows attended(shape_.dtype, shape_.key_dim);
  attended.AddRows(keys.data(), values.data(), keys.size() / row_bytes);
  for (const std::shared_ptr<const Built>& built : segments) {
    const SegmentHead& segment = built->head;
    const auto blocks = retrieved.find(segment.uid);
    for (uint32_t c = 0; c < segment.cluster_count; ++c) {
      const size_t at = segment.first_row[c] * row_bytes;
      if (blocks != retrieved.end() && blocks->second.contains(segment.first_row[c])) {
        attended.AddRows(&built->keys[at], &built->values[at], segment.sizes[c]);
      } else {
        attended.AddMean(StoredCentroid(segment, c), StoredValueMean(segment, c),
                         std::log(segment.sizes[c]));
      }
    }
  }
  for (uint32_t g = 0; g < shape_.group_size(); ++g) {
    const std::string wrong =
        attended.Compare(queries.subspan(g * shape_.key_dim, shape_.key_dim), shape_.softmax_scale,
                         out + g * shape_.value_dim, lse[g]);
    if (!wrong.empty()) return absl::StrCat("query head ", g, ": ", wrong);
  }
  return "";
}

std::string TestSequence::CheckExact(uint32_t layer, std::span<const float> queries,
                                     const StepResult& result, uint64_t appended) const {
  const uint32_t dim = shape_.key_dim;
  for (uint32_t head = 0; head < shape_.query_head_count; ++head) {
    const HeadRows& rows = layers_[layer].rows[head / shape_.group_size()];
    AttendedRows attended(shape_.dtype, dim);
    attended.AddRows(rows.keys.data(), rows.values.data(), appended);
    const std::string wrong =
        attended.Compare(queries.subspan(head * dim, dim), shape_.softmax_scale,
                         &result.out[size_t{head} * dim], result.lse[head]);
    if (!wrong.empty()) return absl::StrCat("query head ", head, ": ", wrong);
  }
  return "";
}

}  // namespace wavekv::resident
