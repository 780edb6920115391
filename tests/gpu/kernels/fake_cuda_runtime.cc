#include "tests/gpu/kernels/fake_cuda_runtime.h"

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <vector>

#include "gpu/kernels/kmeans.h"

namespace wavekv::gpu {
namespace {

struct Operation {
  std::function<void()> call;
  std::vector<const void*> uses;
};

struct Memory {
  size_t bytes = 0;
  bool device = false;
};

// Not destroyed: memory may be freed while the process ends.
struct Machine {
  std::deque<Operation> queue;
  size_t done = 0;  // Operations that have left the queue.
  std::map<uintptr_t, Memory> memory;
  int current_device = 0;
};

Machine& TheMachine() {
  static auto* const machine = new Machine;
  return *machine;
}

// The memory that `address` lies in; null if it is gone.
const std::pair<const uintptr_t, Memory>* Find(const void* address) {
  const auto& memory = TheMachine().memory;
  const auto at = reinterpret_cast<uintptr_t>(address);
  auto it = memory.upper_bound(at);
  if (it == memory.begin()) return nullptr;
  --it;
  return at - it->first < it->second.bytes ? &*it : nullptr;
}

bool Fails(const char* function) {
  FakeCudaRuntime& runtime = FakeCudaRuntime::Get();
  return runtime.failing == function && --runtime.fails_at == 0;
}

cudaError_t Allocate(void** target, size_t bytes, bool device) {
  FakeCudaRuntime& runtime = FakeCudaRuntime::Get();
  *target = std::malloc(bytes);
  TheMachine().memory[reinterpret_cast<uintptr_t>(*target)] = {bytes, device};
  (device ? runtime.device_bytes : runtime.host_bytes) += bytes;
  ++runtime.allocations;
  return cudaSuccess;
}

cudaError_t Free(void* address, bool device) {
  FakeCudaRuntime& runtime = FakeCudaRuntime::Get();
  const auto* found = Find(address);
  if (found == nullptr || found->second.device != device) return cudaErrorInvalidValue;
  for (const Operation& operation : TheMachine().queue) {
    for (const void* used : operation.uses) runtime.misuses += Find(used) == found;
  }
  (device ? runtime.device_bytes : runtime.host_bytes) -= found->second.bytes;
  TheMachine().memory.erase(found->first);
  std::free(address);
  return cudaSuccess;
}

void RunUntil(size_t count) {
  Machine& machine = TheMachine();
  while (machine.done < count) {
    const Operation operation = machine.queue.front();
    bool gone = false;
    for (const void* used : operation.uses) gone |= Find(used) == nullptr;
    if (gone) {
      ++FakeCudaRuntime::Get().misuses;
    } else {
      operation.call();
    }
    machine.queue.pop_front();
    ++machine.done;
  }
}

size_t EndOfQueue() { return TheMachine().done + TheMachine().queue.size(); }

void WaitUntil(size_t count) {
  FakeCudaRuntime::Get().waits += TheMachine().done < count;
  RunUntil(count);
}

size_t& MomentOf(cudaEvent_t event) { return *reinterpret_cast<size_t*>(event); }

// Tokens in turn.
void Cluster(const KMeansTask* tasks, uint32_t count) {
  for (uint32_t i = 0; i < count; ++i) {
    for (uint32_t token = 0; token < tasks[i].token_count; ++token) {
      tasks[i].labels[token] = static_cast<uint16_t>(token % tasks[i].centroid_count);
    }
  }
}

}  // namespace

FakeCudaRuntime& FakeCudaRuntime::Get() {
  static FakeCudaRuntime runtime;
  return runtime;
}

void FakeCudaRuntime::Reset() {
  TheMachine().done += TheMachine().queue.size();
  TheMachine().queue.clear();
  *this = {.device_bytes = device_bytes, .host_bytes = host_bytes};
}

void FakeCudaRuntime::Run() { RunUntil(EndOfQueue()); }

size_t FakeCudaRuntime::queued() const { return TheMachine().queue.size(); }

}  // namespace wavekv::gpu

using namespace wavekv::gpu;  // NOLINT: what follows stands for another library.

#define FAKE_BEGIN(name) \
  if (Fails(name)) return cudaErrorMemoryAllocation

extern "C" {

cudaError_t cudaGetDevice(int* device) {
  *device = TheMachine().current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  TheMachine().current_device = device;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** memory, size_t bytes) {
  FAKE_BEGIN("cudaMalloc");
  return Allocate(memory, bytes, true);
}

cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned /*flags*/) {
  FAKE_BEGIN("cudaHostAlloc");
  return Allocate(memory, bytes, false);
}

cudaError_t cudaFree(void* memory) { return Free(memory, true); }
cudaError_t cudaFreeHost(void* memory) { return Free(memory, false); }

cudaError_t cudaMemset(void* target, int value, size_t bytes) {
  std::memset(target, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t bytes, cudaMemcpyKind /*kind*/) {
  std::memcpy(target, source, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t bytes, cudaMemcpyKind /*kind*/,
                            cudaStream_t /*stream*/) {
  FAKE_BEGIN("cudaMemcpyAsync");
  TheMachine().queue.push_back({[=] { std::memcpy(target, source, bytes); }, {target, source}});
  return cudaSuccess;
}

// Of the legacy stream: what other streams are told does not matter to it.
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (stream != cudaStreamLegacy) WaitUntil(EndOfQueue());
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  FAKE_BEGIN("cudaEventCreateWithFlags");
  *event = reinterpret_cast<cudaEvent_t>(new size_t(0));
  return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete &MomentOf(event);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t /*stream*/) {
  FAKE_BEGIN("cudaEventRecord");
  MomentOf(event) = EndOfQueue();
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t event) {
  return MomentOf(event) <= TheMachine().done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  WaitUntil(MomentOf(event));
  return cudaSuccess;
}

cudaError_t cudaGetLastError() { return cudaSuccess; }
const char* cudaGetErrorName(cudaError_t /*error*/) { return "cudaErrorFake"; }
const char* cudaGetErrorString(cudaError_t /*error*/) { return "as the fake runtime was told"; }

}  // extern "C"

namespace wavekv::gpu {

absl::Status LaunchKMeans(const KMeansTask* tasks, const KMeansShape& shape, GpuStream /*stream*/) {
  if (Fails("LaunchKMeans")) return absl::UnavailableError("as the fake runtime was told");
  TheMachine().queue.push_back(
      {[tasks, count = shape.task_count] { Cluster(tasks, count); }, {tasks}});
  return absl::OkStatus();
}

}  // namespace wavekv::gpu
