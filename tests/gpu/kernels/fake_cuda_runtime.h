// A stand-in for the CUDA runtime and for the k-means kernels, for tests that link neither: what
// streams are told waits until the test lets the device run, so that what comes too early shows.
//
// Device memory is host memory. There is one queue for all streams. Allocating waits for nothing.
#pragma once

#include <cstddef>
#include <string>

namespace wavekv::gpu {

struct FakeCudaRuntime {
  // Of the process. What it counts begins at 0 with each `Reset`, which forgets what is queued.
  static FakeCudaRuntime& Get();
  void Reset();

  // The device does all that is queued.
  void Run();
  size_t queued() const;

  size_t device_bytes = 0;  // Allocated now.
  size_t host_bytes = 0;    // Likewise, page-locked.
  size_t allocations = 0;   // So far.
  size_t waits = 0;         // Times that the host waited for what was queued.
  size_t misuses = 0;       // Memory freed, or gone, that something queued reads or writes.

  // The call of that function that fails: 1 is the next one. Once.
  std::string failing;
  int fails_at = 0;
};

}  // namespace wavekv::gpu
