#include "tests/gpu/stage_rows.h"

#include <cstring>

#include "absl/strings/str_cat.h"

namespace wavekv {
namespace {

// SplitMix64 of what the element is.
uint64_t Code(uint64_t tag, uint64_t position, uint64_t idx) {
  uint64_t x = tag * 0x9e3779b97f4a7c15u + position * 0xbf58476d1ce4e5b9u + idx + 1;
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9u;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

void Fill(uint64_t tag, uint64_t first_position, uint32_t row_count, size_t row_bytes,
          std::vector<std::byte>* out) {
  out->resize(row_count * row_bytes);
  for (uint32_t row = 0; row < row_count; ++row) {
    for (size_t i = 0; i < row_bytes; ++i) {
      (*out)[row * row_bytes + i] = static_cast<std::byte>(Code(tag, first_position + row, i));
    }
  }
}

}  // namespace

CodedRows::CodedRows(const ModelShape& shape, uint32_t tag, uint64_t first_position,
                     uint32_t row_count)
    : row_count_(row_count) {
  Fill(tag, first_position, row_count, shape.key_bytes(), &keys_);
  Fill(~uint64_t{tag}, first_position, row_count, shape.value_bytes(), &values_);
}

StageRun RunOf(const std::shared_ptr<const CodedRows>& rows, uint64_t segment_uid,
               uint32_t first_block) {
  return {rows->rows(), rows, segment_uid, first_block};
}

std::string CompareSpans(const ModelShape& shape, const std::byte* buffer, uint64_t buffer_bytes,
                         const std::vector<StagedSpan>& spans, const std::vector<StageRun>& runs,
                         size_t run_count) {
  std::string keys, values, want_keys, want_values;
  for (const StagedSpan& span : spans) {
    const uint64_t key_bytes = span.row_count * shape.key_bytes();
    const uint64_t value_bytes = span.row_count * shape.value_bytes();
    if (span.key_offset + key_bytes > buffer_bytes ||
        span.value_offset + value_bytes > buffer_bytes) {
      return absl::StrCat("a span at ", span.key_offset, " lies outside of the buffer");
    }
    keys.append(reinterpret_cast<const char*>(buffer) + span.key_offset, key_bytes);
    values.append(reinterpret_cast<const char*>(buffer) + span.value_offset, value_bytes);
  }
  for (size_t i = 0; i < run_count; ++i) {
    const RowRun& rows = runs[i].rows;
    want_keys.append(reinterpret_cast<const char*>(rows.keys), rows.row_count * shape.key_bytes());
    want_values.append(reinterpret_cast<const char*>(rows.values),
                       rows.row_count * shape.value_bytes());
  }
  if (keys.size() != want_keys.size()) {
    return absl::StrCat(keys.size() / shape.key_bytes(), " rows were staged, expected ",
                        want_keys.size() / shape.key_bytes());
  }
  if (keys != want_keys) return "key rows differ";
  if (values != want_values) return "value rows differ";
  return "";
}

uint64_t Checksum(const std::byte* data, uint64_t bytes) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (uint64_t i = 0; i < bytes; ++i) {
    hash = (hash ^ static_cast<uint64_t>(data[i])) * 0x100000001b3u;
  }
  return hash;
}

}  // namespace wavekv
