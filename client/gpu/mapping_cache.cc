#include "client/gpu/mapping_cache.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"

namespace wavekv::client {
namespace {

// What is there under `key`, if it is as large as asked for.
template <class Map>
auto Find(const Map& map, const typename Map::key_type& key, uint64_t bytes) {
  const auto it = map.find(key);
  auto found = it == map.end() ? nullptr : it->second.lock();
  if (found != nullptr && found->bytes() < bytes) found = nullptr;
  return found;
}

template <class Map, class Value>
void Remember(const typename Map::key_type& key, const Value& value, Map* map) {
  std::erase_if(*map, [](const auto& item) { return item.second.expired(); });
  (*map)[key] = value;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const MappedBuffer>> MappingCache::Buffer(
    const ResidentAttachment& attachment, std::chrono::milliseconds timeout) {
  {
    MutexLock lock(&mutex_);
    if (auto found = Find(buffers_, attachment.ticket, attachment.buffer_bytes)) return found;
  }
  WAVEKV_ASSIGN_OR_RETURN(HeldDescriptor held,
                          FetchHeldDescriptor(attachment.socket, attachment.ticket, timeout));
  WAVEKV_ASSIGN_OR_RETURN(
      std::shared_ptr<const SharedAllocation> allocation,
      SharedAllocation::Import(device_, held.fd.get(), attachment.buffer_bytes));
  WAVEKV_ASSIGN_OR_RETURN(auto mapping,
                          DeviceMapping::Map(std::move(allocation), DeviceMapping::kReadWrite));
  auto buffer =
      std::make_shared<const MappedBuffer>(std::move(held.connection), std::move(mapping));
  MutexLock lock(&mutex_);
  Remember(attachment.ticket, buffer, &buffers_);
  return buffer;
}

absl::StatusOr<std::shared_ptr<const RegisteredMemory>> MappingCache::Window(
    const PoolWindow& window) {
  struct stat info;
  if (::fstat(window.fd.get(), &info) != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a window of the block pool is no open file: ", std::strerror(errno)));
  }
  const FileId id{info.st_dev, info.st_ino};
  {
    MutexLock lock(&mutex_);
    if (auto found = Find(windows_, id, window.bytes)) return found;
  }
  WAVEKV_RETURN_IF_ERROR(CheckSizeSealed(window.fd.get()));
  WAVEKV_ASSIGN_OR_RETURN(Mapping mapping,
                          Mapping::Map(window.fd.get(), window.bytes, Mapping::kReadOnly));
  WAVEKV_ASSIGN_OR_RETURN(std::shared_ptr<const RegisteredMemory> registered,
                          RegisteredMemory::Register(device_, std::move(mapping)));
  MutexLock lock(&mutex_);
  Remember(id, registered, &windows_);
  return registered;
}

}  // namespace wavekv::client
