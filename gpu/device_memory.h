// Where wavebufferd's memory comes from: the part of it that differs between backends.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "storage/base/descriptor_server.h"
#include "storage/base/unique_fd.h"

namespace wavekv {

// Zeroed memory of a fixed size that crosses processes as a descriptor. Thread-safe.
class DeviceAllocation {
 public:
  virtual ~DeviceAllocation() = default;

  virtual uint64_t bytes() const = 0;
  // A descriptor that maps writable until Seal, and the same memory for readers only. Where the
  // system has no such difference (a device), both are the same.
  virtual absl::StatusOr<UniqueFd> WritableDescriptor() = 0;
  virtual absl::StatusOr<UniqueFd> ReadOnlyDescriptor() = 0;
  // No new writable mapping from now on, where that can be enforced; those that are there go on
  // working.
  virtual absl::Status Seal() = 0;
  // Counts one more reader that holds the memory, until it is told that the reader let go of the
  // connection which its descriptor came over. Null: the system knows who holds it.
  // ResourceExhausted: too many.
  virtual absl::StatusOr<std::shared_ptr<KeptPeer>> NewHolder() = 0;
  // Gives up our own hold. Readers may keep the memory for as long as they map it.
  virtual void Drop() = 0;
  // After Drop: some reader still holds a descriptor or a mapping.
  virtual bool HeldByReaders() const = 0;
};

// Thread-safe.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual std::string backend() const = 0;      // "host" or "cuda"
  virtual std::string device_uuid() const = 0;  // "host" for host memory.
  virtual bool pinned() const = 0;              // Locked, or registered with a device.
  virtual uint64_t allocation_unit_bytes() const = 0;
  // What lending takes before anything is lent: a device's context.
  virtual uint64_t overhead_bytes() const = 0;
  // `bytes` is a multiple of allocation_unit_bytes(). `name` is what the system's tools show.
  virtual absl::StatusOr<std::unique_ptr<DeviceAllocation>> Allocate(const std::string& name,
                                                                     uint64_t bytes) = 0;
};

}  // namespace wavekv
