#include "client/cli/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

#include "client/cli/histogram.h"
#include "client/cli/text.h"

namespace wavekv::client {
namespace {

constexpr size_t kBarColumns = 32;

}  // namespace

ProgressBar::ProgressBar(std::string title)
    : title_(std::move(title)), shown_(isatty(STDERR_FILENO) == 1) {}

ProgressBar::~ProgressBar() {
  if (!last_line_.empty()) std::fputc('\n', stderr);
}

void ProgressBar::Update(uint64_t done, uint64_t total) {
  if (!shown_) return;
  const double share = total == 0 ? 1.0 : static_cast<double>(done) / static_cast<double>(total);
  std::string line = title_ + " │" + Bar(share, kBarColumns) + "│ " + CountText(done) + " of " +
                     CountText(total) + " tokens";
  if (line == last_line_) return;
  std::fprintf(stderr, "\r%s\x1b[K", line.c_str());
  std::fflush(stderr);
  last_line_ = std::move(line);
}

}  // namespace wavekv::client
