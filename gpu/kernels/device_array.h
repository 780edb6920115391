// Memory of a device, and host memory that it reads, owned.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "gpu/kernels/cuda_status.h"

namespace wavekv::gpu {

// `size` elements of plain data in the current device's memory. Movable; frees itself.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~DeviceArray() {
    if (data_ != nullptr) (void)cudaFree(data_);
  }

  // Zeroed, for every stream. ResourceExhausted when the device has too little memory.
  static absl::StatusOr<DeviceArray> Make(size_t size) {
    DeviceArray array;
    array.size_ = size;
    if (size == 0) return array;
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMalloc(reinterpret_cast<void**>(&array.data_), size * sizeof(T)));
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaMemset(array.data_, 0, size * sizeof(T)));
    if (absl::Status settled = Settle(); !settled.ok()) return settled;
    return array;
  }
  static absl::StatusOr<DeviceArray> Copy(std::span<const T> source) {
    absl::StatusOr<DeviceArray> array = Make(source.size());
    if (!array.ok()) return array;
    if (absl::Status copied = array->Upload(source); !copied.ok()) return copied;
    return array;
  }

  T* data() const { return data_; }
  size_t size() const { return size_; }

  // Synchronous, for every stream. `source` has at most size() elements.
  absl::Status Upload(std::span<const T> source) {
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(data_, source.data(), source.size_bytes(), cudaMemcpyDefault));
    return Settle();
  }
  absl::StatusOr<std::vector<T>> Download() const {
    std::vector<T> target(size_);
    WAVEKV_CUDA_RETURN_IF_ERROR(
        cudaMemcpy(target.data(), data_, size_ * sizeof(T), cudaMemcpyDefault));
    return target;
  }

 private:
  // The runtime fills memory, and copies small arrays, behind the caller's back: only streams that
  // wait for the legacy one would be sure to see it.
  static absl::Status Settle() {
    return CudaStatus(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  }

  T* data_ = nullptr;
  size_t size_ = 0;
};

// `size` elements of plain data in host memory that the device reads at the same address. Movable;
// frees itself.
template <typename T>
class PinnedArray {
 public:
  PinnedArray() = default;
  PinnedArray(PinnedArray&& other) noexcept { *this = std::move(other); }
  PinnedArray& operator=(PinnedArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }
  ~PinnedArray() {
    if (data_ != nullptr) (void)cudaFreeHost(data_);
  }

  static absl::StatusOr<PinnedArray> Make(size_t size) {
    PinnedArray array;
    array.size_ = size;
    if (size == 0) return array;
    WAVEKV_CUDA_RETURN_IF_ERROR(cudaHostAlloc(reinterpret_cast<void**>(&array.data_),
                                              size * sizeof(T), cudaHostAllocDefault));
    return array;
  }

  T* data() const { return data_; }
  size_t size() const { return size_; }
  std::span<T> span() const { return {data_, size_}; }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace wavekv::gpu
