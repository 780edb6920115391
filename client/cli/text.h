// Numbers and tables as people read them. Pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace wavekv::client {

// "0 B", "1.50 GiB": three significant figures in the largest unit that fits.
std::string BytesText(uint64_t bytes);
// "12,345"
std::string CountText(uint64_t count);
// "350 ms", "12 s", "3 min 20 s", "2 h 13 min", "4 d 2 h"
std::string DurationText(uint64_t ms);
// `part` of `whole` as "12.3 %"; "–" when `whole` is 0.
std::string ShareText(double part, uint64_t whole);
// 0.1234 as "12.34 %"
std::string PercentText(double share);

// Columns that UTF-8 text takes on a terminal, every character one column.
size_t DisplayWidth(std::string_view text);
std::string PadLeft(std::string_view text, size_t width);
std::string PadRight(std::string_view text, size_t width);
// Text from the daemon, safe to print: control characters become '?'.
std::string Printable(std::string_view text);

// Rows under a header, columns as wide as their widest cell, separated by two spaces.
class Table {
 public:
  enum class Align : uint8_t { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };

  explicit Table(std::vector<Column> columns) : columns_(std::move(columns)) {}

  // As many cells as columns.
  void Add(std::vector<std::string> cells);
  bool empty() const { return rows_.empty(); }
  // Lines, each ended by a newline, indented by `indent` spaces.
  std::string Render(size_t indent = 0) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace wavekv::client
