#include "client/cli/text.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "storage/base/check.h"

namespace wavekv::client {

std::string BytesText(uint64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  // 1023.5 would be written "1024".
  while (value >= 1023.5 && unit + 1 < std::size(kUnits)) {
    value /= 1024;
    ++unit;
  }
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f %s", decimals, value, kUnits[unit]);
}

std::string CountText(uint64_t count) {
  const std::string digits = absl::StrCat(count);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string DurationText(uint64_t ms) {
  const uint64_t seconds = ms / 1000;
  const uint64_t minutes = seconds / 60;
  const uint64_t hours = minutes / 60;
  if (ms < 1000) return absl::StrCat(ms, " ms");
  if (seconds < 60) return absl::StrCat(seconds, " s");
  if (minutes < 60) return absl::StrCat(minutes, " min ", seconds % 60, " s");
  if (hours < 24) return absl::StrCat(hours, " h ", minutes % 60, " min");
  return absl::StrCat(hours / 24, " d ", hours % 24, " h");
}

std::string ShareText(double part, uint64_t whole) {
  if (whole == 0) return "–";
  return absl::StrFormat("%.1f %%", 100 * part / static_cast<double>(whole));
}

std::string PercentText(double share) { return absl::StrFormat("%.2f %%", 100 * share); }

size_t DisplayWidth(std::string_view text) {
  return static_cast<size_t>(std::count_if(text.begin(), text.end(), [](char c) {
    return (static_cast<unsigned char>(c) & 0xc0u) != 0x80u;  // Not a continuation byte.
  }));
}

std::string PadLeft(std::string_view text, size_t width) {
  const size_t found = DisplayWidth(text);
  std::string padded(width - std::min(width, found), ' ');
  padded += text;
  return padded;
}

std::string PadRight(std::string_view text, size_t width) {
  const size_t found = DisplayWidth(text);
  std::string padded(text);
  padded.append(width - std::min(width, found), ' ');
  return padded;
}

std::string Printable(std::string_view text) {
  std::string safe(text);
  for (size_t i = 0; i < safe.size(); ++i) {
    const auto byte = static_cast<unsigned char>(safe[i]);
    if (byte < 0x20 || byte == 0x7f) safe[i] = '?';
    // U+0080 ... U+009F, some of which terminals obey.
    const bool c1 =
        byte == 0xc2 && i + 1 < safe.size() && static_cast<unsigned char>(safe[i + 1]) < 0xa0;
    if (c1) safe.replace(i, 2, "?");
  }
  return safe;
}

void Table::Add(std::vector<std::string> cells) {
  WAVEKV_CHECK(cells.size() == columns_.size(), "a row has as many cells as there are columns");
  rows_.push_back(std::move(cells));
}

std::string Table::Render(size_t indent) const {
  std::vector<size_t> widths;
  for (const Column& column : columns_) widths.push_back(DisplayWidth(column.title));
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], DisplayWidth(row[i]));
  }
  std::string text;
  const auto add_line = [&](const auto& cell) {
    std::string line(indent, ' ');
    for (size_t i = 0; i < columns_.size(); ++i) {
      if (i > 0) line += "  ";
      line += columns_[i].align == Align::kRight ? PadLeft(cell(i), widths[i])
                                                 : PadRight(cell(i), widths[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  };
  add_line([&](size_t i) { return columns_[i].title; });
  for (const auto& row : rows_) add_line([&](size_t i) { return row[i]; });
  return text;
}

}  // namespace wavekv::client
