// A sequence as the daemon holds it, in small: random tokens, segments clustered by the CPU
// backend, their rows in a window of memory that says when somebody reads what was released.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "index/backend/compute_backend.h"
#include "index/backend/resident.h"
#include "storage/base/model_shape.h"
#include "storage/base/shared_memory.h"
#include "tests/gpu/resident/reference_step.h"

namespace wavekv::resident {

// Of two layers of two KV heads of `dim`, two query heads each.
ModelShape SmallShape(uint32_t dim = 64, DType dtype = DType::kBF16, uint32_t layers = 2);

class TestSequence {
 public:
  static constexpr uint32_t kSinks = 4;

  // Room for the rows of all segments that will ever be made: `window_bytes`.
  TestSequence(const ModelShape& shape, uint64_t stream, uint64_t window_bytes = 64 << 20);

  // New tokens for all layers; the rows that an engine appends of one.
  void Append(uint32_t count);
  std::vector<std::byte> KeysAt(uint32_t layer, uint64_t position) const;  // [kv_heads, dim]
  std::vector<std::byte> ValuesAt(uint32_t layer, uint64_t position) const;
  uint64_t token_count() const { return token_count_; }
  void Truncate(uint64_t token_count);

  // Clusters the next `count` exact tokens of a layer; or anew, as one segment, all from the
  // segment on that begins at `first`.
  void Cluster(uint32_t layer, uint32_t count);
  void Merge(uint32_t layer, uint64_t first);
  uint64_t steady_first(uint32_t layer) const;
  size_t segment_count(uint32_t layer) const { return layers_[layer].heads[0].size(); }

  // The layer as it is now, `appended` tokens of it; every view is a version of its own.
  ResidentLayer View(uint32_t layer, uint32_t retrieve_count, uint64_t appended);
  ResidentLayer View(uint32_t layer, uint32_t retrieve_count) {
    return View(layer, retrieve_count, token_count_);
  }

  // Queries [kv_heads * group, dim] near the keys of some topic.
  std::vector<float> Queries();

  std::vector<std::span<const std::byte>> windows() const {
    return {{}, {window_.data(), window_.bytes()}};  // Window 0 is somebody else's.
  }

  // What is wrong with a step over a layer whose region lies at `region`; empty when nothing is:
  // rows are those of the tokens and blocks that it wanted, and output and mass those of exact
  // attention over them, of an estimate of the others. Only the region's index is believed.
  std::string Check(uint32_t layer, const std::byte* region, std::span<const float> queries,
                    const StepResult& result) const;
  // The same against exact attention over all `appended` tokens.
  std::string CheckExact(uint32_t layer, std::span<const float> queries, const StepResult& result,
                         uint64_t appended) const;

  const ModelShape& shape() const { return shape_; }
  std::mt19937_64& random() { return random_; }

 private:
  // Rows of one KV head of one layer, all tokens.
  struct HeadRows {
    std::vector<std::byte> keys, values;
  };
  // A segment with the rows that the window should have.
  struct Built {
    SegmentHead head;
    std::vector<std::byte> keys, values;
    uint64_t window_offset = 0;  // Keys, then values.
  };
  // While it is in the index. The last one to let go of the owner says that nobody may read the
  // rows in the window any more: they are spoilt.
  struct Live {
    std::shared_ptr<const Built> built;
    std::shared_ptr<const void> owner;
  };
  struct Layer {
    std::vector<HeadRows> rows;            // [kv_heads]
    std::vector<std::vector<Live>> heads;  // [kv_heads]
  };

  HeadRows& RowsOf(uint32_t layer, uint32_t head) { return layers_[layer].rows[head]; }
  void ClusterRange(uint32_t layer, uint64_t first, uint64_t end);
  Live BuildSegment(const HeadRows& rows, uint64_t first, uint32_t count);
  std::string CheckHead(uint32_t layer, uint32_t kv_head, const std::byte* region,
                        std::span<const float> queries, const StepHead& head, const double* out,
                        const double* lse) const;

  const ModelShape shape_;
  std::mt19937_64 random_;
  Mapping window_;
  uint64_t window_used_ = 0;
  std::unique_ptr<ComputeBackend> backend_ = CreateCpuBackend();
  std::vector<float> topics_;  // [kTopics, dim]
  uint64_t token_count_ = 0;
  uint64_t next_uid_ = 1;
  uint64_t next_version_ = 1;
  std::vector<Layer> layers_;
  std::map<uint64_t, std::shared_ptr<const Built>> by_offset_;  // In the window; all there were.
  // [version] the segments of each head.
  std::map<uint64_t, std::vector<std::vector<std::shared_ptr<const Built>>>> versions_;
};

}  // namespace wavekv::resident
