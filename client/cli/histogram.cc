#include "client/cli/histogram.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

constexpr const char* kEighths[] = {"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
constexpr const char* kFull = "█";

// `eighths` of a column drawn, the rest of `width` columns spaces.
std::string BarOfEighths(size_t eighths, size_t width) {
  std::string bar;
  size_t columns = eighths / 8;
  for (size_t i = 0; i < columns; ++i) bar += kFull;
  if (eighths % 8 != 0) {
    bar += kEighths[eighths % 8];
    ++columns;
  }
  bar.append(width - std::min(columns, width), ' ');
  return bar;
}

std::string BinLabel(double low, double high, bool whole) {
  if (!whole) return absl::StrFormat("%.4g – %.4g", low, high);
  const double first = std::ceil(low);
  const double last = std::ceil(high) - 1;
  if (last <= first) return absl::StrFormat("%.0f", first);
  return absl::StrFormat("%.0f – %.0f", first, last);
}

}  // namespace

std::string Bar(double share, size_t width) {
  if (!(share > 0)) return std::string(width, ' ');
  const double eighths = std::round(std::min(share, 1.0) * static_cast<double>(width * 8));
  return BarOfEighths(static_cast<size_t>(eighths), width);
}

std::vector<std::string> RenderHistogram(const Histogram& histogram, bool whole, size_t width) {
  size_t begin = 0;
  size_t end = histogram.counts.size();
  while (begin < end && histogram.counts[begin] == 0) ++begin;
  while (begin < end && histogram.counts[end - 1] == 0) --end;
  if (begin == end || histogram.edges.size() != histogram.counts.size() + 1) return {"(nothing)"};

  uint64_t most = 0;
  uint64_t total = 0;
  std::vector<std::string> labels;
  size_t label_width = 0;
  for (size_t i = begin; i < end; ++i) {
    most = std::max(most, histogram.counts[i]);
    total += histogram.counts[i];
    labels.push_back(BinLabel(histogram.edges[i], histogram.edges[i + 1], whole));
    label_width = std::max(label_width, DisplayWidth(labels.back()));
  }
  std::vector<std::string> lines;
  for (size_t i = begin; i < end; ++i) {
    const uint64_t count = histogram.counts[i];
    const double share = static_cast<double>(count) / static_cast<double>(most);
    size_t eighths = static_cast<size_t>(std::round(share * static_cast<double>(width * 8)));
    if (count > 0) eighths = std::max<size_t>(eighths, 1);
    lines.push_back(absl::StrFormat("%s │%s %s (%s)", PadLeft(labels[i - begin], label_width),
                                    BarOfEighths(eighths, width), CountText(count),
                                    ShareText(static_cast<double>(count), total)));
  }
  return lines;
}

}  // namespace wavekv::client
