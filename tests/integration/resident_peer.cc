// An engine in a process of its own, which is killed in the middle of a step: attaches a sequence
// on the wavekvd at argv[1], begins a step, detaches in spite of it, says so and waits.
#include <unistd.h>

#include <cstdio>
#include <string>

#include "absl/status/status.h"
#include "storage/base/status_macros.h"
#include "tests/gpu/driver/use_fake_cuda.h"
#include "tests/integration/resident_engine.h"

namespace wavekv::integration {
namespace {

constexpr uint64_t kTokens = 1400;
constexpr uint64_t kTokensMax = 4096;

absl::Status Run(const std::string& address) {
  UseFakeCuda();
  WAVEKV_ASSIGN_OR_RETURN(const auto session, client::Session::Connect({.address = address}));
  HostCache cache = HostCache::Random(ResidentShape(), kTokens + 20, 1);
  WAVEKV_ASSIGN_OR_RETURN(const auto sequence,
                          CreateResidentSequence(*session, &cache, kTokens, kTokensMax));
  WAVEKV_ASSIGN_OR_RETURN(const auto engine, ResidentEngine::Attach(sequence.get()));
  const std::vector<float> queries = RandomQueries(ResidentShape(), 2);
  for (int step = 0; step < 20; ++step) {
    WAVEKV_RETURN_IF_ERROR(engine->Step(&cache, queries).status());
  }
  engine->BeginStep();
  WAVEKV_RETURN_IF_ERROR(sequence->DetachResident());
  std::puts("detached in mid-step");
  std::fflush(stdout);
  for (;;) ::pause();
}

}  // namespace
}  // namespace wavekv::integration

int main(int, char** argv) {
  const absl::Status status = wavekv::integration::Run(argv[1]);
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return 1;
}
