// One suite for both backends of the wave buffer: what differs between them, for tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/gpu/device_reader.h"
#include "index/backend/stager.h"
#include "storage/base/shared_memory.h"

namespace wavekv {

// "host", or "cuda": the fake driver's, or the GPU's that is there (WAVEKV_TEST_GPU=1).
class TestBackend {
 public:
  explicit TestBackend(const std::string& name);

  const std::string& name() const { return name_; }
  bool cuda() const { return name_ == "cuda"; }
  // A driver that fails on command (tests/gpu/driver/fake_cuda.cc).
  bool fake() const { return fake_; }
  // --bytes_max such that `bytes` can be lent.
  uint64_t LimitFor(uint64_t bytes) const { return bytes + context_bytes_; }
  uint64_t context_bytes() const { return context_bytes_; }
  // Flags of a wavebufferd of this backend that lends at most `bytes`.
  std::vector<std::string> Flags(uint64_t bytes) const;

 private:
  const std::string name_;
  const bool fake_;
  uint64_t context_bytes_ = 0;
};

// A tenant's buffer as a process of a client sees it.
class ClientView {
 public:
  // Takes the ticket there; a device's bytes are those of now, or of the last Refresh.
  static absl::StatusOr<ClientView> Open(const WaveBufferAccess& access);
  absl::Status Refresh();

  const std::byte* data() const { return device_ == nullptr ? mapping_.data() : copy_.data(); }
  uint64_t bytes() const { return device_ == nullptr ? mapping_.bytes() : copy_.size(); }

 private:
  Mapping mapping_;
  std::unique_ptr<client::DeviceReader> device_;
  std::vector<std::byte> copy_;
};

}  // namespace wavekv
