// A resident region without bytes, for tests of the engine's side: what it was shown, and what a
// test's "steps" append.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "index/backend/resident.h"
#include "storage/base/ids.h"
#include "storage/base/model_shape.h"
#include "storage/base/mutex.h"

namespace wavekv::testing {

// What a test reads and does of one region. Shared with the engine's; thread-safe.
class FakeRegion {
 public:
  FakeRegion(const ModelShape& shape, const ResidentOptions& options);

  // A step appends the next token of a layer: K and V of all heads, as they are stored.
  void Append(uint32_t layer, std::vector<std::byte> keys, std::vector<std::byte> values);
  // Whether a step is under way from now on.
  void SetStepping(bool stepping);
  // Every transfer fails so from now on.
  void SetStatus(absl::Status status);
  // Loads, respectively publications, are refused so from now on.
  void SetLoadStatus(absl::Status status);
  void SetPublishStatus(absl::Status status);
  // Whether publications must wait for steps from now on.
  void SetBusy(bool busy);

  struct Layer {
    ResidentLayer shown;
    uint64_t token_count = 0;  // On the device.
    uint64_t loads = 0;
    uint64_t publications = 0;  // Those that waited are not among them.
  };
  Layer layer(uint32_t layer) const;
  // What was wrong with calls: rows that the ring cannot hold, segments that do not join, a version
  // that is no newer, rows asked for that nobody has appended. Empty: nothing.
  std::string complaints() const;
  // Set once it is closed.
  std::function<bool()> engine_is_gone() const;

 private:
  friend class FakeResident;
  struct Row {
    std::vector<std::byte> keys;
    std::vector<std::byte> values;
  };
  void Check(bool good, const std::string& complaint) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CheckView(const ResidentLayer& view) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ModelShape shape_;
  const ResidentOptions options_;
  mutable Mutex mutex_;
  std::vector<Layer> layers_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::vector<Row>> rows_ ABSL_GUARDED_BY(mutex_);  // Since the layer's last Load.
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  absl::Status load_status_ ABSL_GUARDED_BY(mutex_);
  absl::Status publish_status_ ABSL_GUARDED_BY(mutex_);
  bool stepping_ ABSL_GUARDED_BY(mutex_) = false;
  bool busy_ ABSL_GUARDED_BY(mutex_) = false;
  std::string complaints_ ABSL_GUARDED_BY(mutex_);
  std::function<bool()> engine_is_gone_ ABSL_GUARDED_BY(mutex_);
};

std::unique_ptr<ResidentSequence> CreateFakeResident(std::shared_ptr<FakeRegion> region);

}  // namespace wavekv::testing
