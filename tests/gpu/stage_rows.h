// Rows whose every element says where it belongs, and readers that expect to find them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "index/backend/stager.h"
#include "storage/base/dtype.h"

namespace wavekv {

// The K and V rows of consecutive tokens of one head in memory of their own.
class CodedRows {
 public:
  // Element d of the key of position p is coded from (tag, p, d); of the value, from the
  // complement of the tag.
  CodedRows(const ModelShape& shape, uint32_t tag, uint64_t first_position, uint32_t row_count);

  RowRun rows() const { return {keys_.data(), values_.data(), row_count_}; }
  uint32_t row_count() const { return row_count_; }

 private:
  std::vector<std::byte> keys_;
  std::vector<std::byte> values_;
  uint32_t row_count_;
};

// A run over all rows of `rows`, which it keeps alive. `segment_uid` 0: not cacheable.
StageRun RunOf(const std::shared_ptr<const CodedRows>& rows, uint64_t segment_uid,
               uint32_t first_block);

// What `buffer` holds at `spans`, one after another, compared with the rows of `runs`. Empty when
// they are the same; else what differs.
std::string CompareSpans(const ModelShape& shape, const std::byte* buffer, uint64_t buffer_bytes,
                         const std::vector<StagedSpan>& spans, const std::vector<StageRun>& runs,
                         size_t run_count);

// FNV-1a of some memory.
uint64_t Checksum(const std::byte* data, uint64_t bytes);

}  // namespace wavekv
