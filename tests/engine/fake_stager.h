// A wave buffer in plain memory, for tests of the engine's side.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <vector>

#include "index/backend/stager.h"
#include "storage/base/mutex.h"
#include "tests/engine/fake_resident.h"

namespace wavekv::testing {

// What a test reads and sets of its stager. Shared with the engine's; thread-safe.
class FakeBuffer {
 public:
  struct Region {
    ModelShape shape;
    uint64_t max_tokens = 0;
  };

  // How many retrieved runs of a head fit from now on.
  void SetRunsMax(uint32_t runs_max);
  // Every call fails so from now on.
  void SetStatus(absl::Status status);
  std::map<SequenceId, Region> regions() const;
  // The staged bytes: key and value offsets point into it.
  std::vector<std::byte> bytes() const;
  uint64_t touches() const;
  uint64_t last_completed_step() const;
  // The last resident region of a sequence; null: there was none.
  std::shared_ptr<FakeRegion> resident(SequenceId sequence) const;

 private:
  friend class FakeStager;
  mutable Mutex mutex_;
  uint32_t runs_max_ ABSL_GUARDED_BY(mutex_) = UINT32_MAX;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, Region> regions_ ABSL_GUARDED_BY(mutex_);
  std::map<SequenceId, std::shared_ptr<FakeRegion>> residents_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<uint64_t, uint32_t>> cached_ ABSL_GUARDED_BY(mutex_);  // (uid, block)
  std::vector<std::byte> bytes_ ABSL_GUARDED_BY(mutex_);
  uint64_t step_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t touches_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t last_completed_step_ ABSL_GUARDED_BY(mutex_) = 0;
};

std::unique_ptr<Stager> CreateFakeStager(std::shared_ptr<FakeBuffer> buffer);

}  // namespace wavekv::testing
