#include "tests/mock_decoder/modes.h"

#include <algorithm>
#include <memory>

#include "storage/base/cpuset.h"
#include "storage/base/status_macros.h"
#include "storage/base/thread_pool.h"
#include "tests/mock_decoder/stopwatch.h"

namespace wavekv::mock {
namespace {

std::string ModeName(Mode mode) {
  switch (mode) {
    case Mode::kExact:
      return "exact";
  }
  return "unknown";
}

uint32_t CountFound(const std::vector<bool>& found) {
  return static_cast<uint32_t>(std::count(found.begin(), found.end(), true));
}

}  // namespace

absl::StatusOr<Report> RunMode(const RunOptions& options) {
  ThreadPool pool(UsableCpuCount() - 1, "mock_decoder");
  Report report;
  report.mode = ModeName(options.mode);
  report.world = options.world;
  report.needles_asked = options.world.needle_count;
  Stopwatch world_time;
  WAVEKV_ASSIGN_OR_RETURN(const std::unique_ptr<World> world, World::Create(options.world, &pool));
  report.seconds_world = world_time.Seconds();

  Stopwatch exact_time;
  const ExactAnswers exact = world->AnswerExactly(&pool);
  report.seconds_exact = exact_time.Seconds();
  report.needle_mass_min = exact.needle_mass_min;
  report.logit_std = exact.logit_std;
  const std::vector<bool> found = FoundFacts(*world, exact.outputs);
  report.needles_found = CountFound(found);
  report.needles_found_exact = report.needles_found;
  for (size_t i = 0; i < found.size(); ++i) {
    if (!found[i]) report.missed_positions.push_back(world->facts()[i].position);
  }
  return report;
}

}  // namespace wavekv::mock
