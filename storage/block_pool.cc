#include "storage/block_pool.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "storage/base/bytes_text.h"
#include "storage/base/check.h"
#include "storage/base/shared_memory.h"
#include "storage/base/status_macros.h"
#include "storage/best_fit_allocator.h"

namespace wavekv {
namespace {

constexpr size_t kHoldersNamed = 3;
// Arenas from this size on ask for transparent huge pages, where shmem_enabled grants them.
constexpr uint64_t kHugePageArenaBytes = 64 << 20;

uint64_t PageBytes() {
  static const uint64_t bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

uint64_t RoundUpToPage(uint64_t bytes) {
  return (bytes + PageBytes() - 1) / PageBytes() * PageBytes();
}

// "'a' 2 MiB, 'b' 1 MiB and 4 more", largest first; "nobody" when there are none.
std::string HoldersText(std::vector<std::pair<uint64_t, std::string>> holders) {
  if (holders.empty()) return "nobody";
  const size_t named = std::min(kHoldersNamed, holders.size());
  std::partial_sort(holders.begin(), holders.begin() + static_cast<ptrdiff_t>(named), holders.end(),
                    std::greater<>());
  const size_t others = holders.size() - named;
  holders.resize(named);
  std::string text = absl::StrJoin(holders, ", ", [](std::string* out, const auto& holder) {
    absl::StrAppend(out, holder.second, " ", BytesText(holder.first));
  });
  if (others > 0) absl::StrAppend(&text, " and ", others, " more");
  return text;
}

}  // namespace

// What the ledger knows of an arena. The counters are the arena's, under its own mutex.
struct Arena::Impl {
  std::shared_ptr<BlockPool> pool;
  uint64_t id = 0;
  TenantId tenant;
  std::string label;
  uint64_t arena_bytes = 0;
  uint64_t reserved_bytes = 0;
  UniqueFd fd;
  Mapping mapping;
  Mapping private_mapping;

  mutable Mutex mutex;
  BestFitAllocator allocator ABSL_GUARDED_BY(mutex){0};
  BestFitAllocator private_allocator ABSL_GUARDED_BY(mutex){0};
  // What the kernel may have given pages for: of the file all below this, for it never takes them
  // back, and of private memory what is in use. Together at most arena_bytes.
  uint64_t file_end ABSL_GUARDED_BY(mutex) = 0;
  uint64_t private_bytes ABSL_GUARDED_BY(mutex) = 0;
  uint64_t allocated_bytes ABSL_GUARDED_BY(mutex) = 0;
  uint64_t payload_bytes ABSL_GUARDED_BY(mutex) = 0;
};

struct BlockPool::Impl {
  struct Tenant {
    uint64_t reserved_bytes = 0;
    uint64_t arena_count = 0;
  };
  struct Entry {
    TenantId tenant;
    std::string label;
    uint64_t reserved_bytes = 0;
    const Arena* arena = nullptr;  // Null until created; removed before it is destroyed.
  };

  uint64_t bytes_max = 0;
  uint64_t tenant_bytes_max = 0;

  // Taken before an arena's mutex.
  mutable Mutex mutex;
  uint64_t next_id ABSL_GUARDED_BY(mutex) = 1;
  uint64_t reserved_bytes ABSL_GUARDED_BY(mutex) = 0;
  absl::flat_hash_map<TenantId, Tenant> tenants ABSL_GUARDED_BY(mutex);
  absl::flat_hash_map<uint64_t, Entry> entries ABSL_GUARDED_BY(mutex);

  absl::StatusOr<uint64_t> Reserve(const TenantId& tenant, uint64_t bytes, std::string label)
      ABSL_LOCKS_EXCLUDED(mutex);
  void Release(uint64_t id) ABSL_LOCKS_EXCLUDED(mutex);
  absl::Status OverLimit(const TenantId& tenant, uint64_t asked_bytes, const std::string& label,
                         uint64_t tenant_free_bytes) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);
};

absl::StatusOr<uint64_t> BlockPool::Impl::Reserve(const TenantId& tenant, uint64_t bytes,
                                                  std::string label) {
  MutexLock lock(&mutex);
  const auto known = tenants.find(tenant);
  const uint64_t tenant_used = known == tenants.end() ? 0 : known->second.reserved_bytes;
  const uint64_t tenant_free = tenant_bytes_max - tenant_used;
  if (bytes > bytes_max - reserved_bytes || bytes > tenant_free) {
    return OverLimit(tenant, bytes, label, tenant_free);
  }
  reserved_bytes += bytes;
  Tenant& account = tenants[tenant];
  account.reserved_bytes += bytes;
  ++account.arena_count;
  const uint64_t id = next_id++;
  entries.emplace(id, Entry{tenant, std::move(label), bytes, nullptr});
  return id;
}

void BlockPool::Impl::Release(uint64_t id) {
  MutexLock lock(&mutex);
  const auto entry = entries.find(id);
  WAVEKV_CHECK(entry != entries.end(), "an arena was released twice");
  const auto account = tenants.find(entry->second.tenant);
  reserved_bytes -= entry->second.reserved_bytes;
  account->second.reserved_bytes -= entry->second.reserved_bytes;
  if (--account->second.arena_count == 0) {
    WAVEKV_CHECK(account->second.reserved_bytes == 0, "a tenant without arenas holds memory");
    tenants.erase(account);
  }
  entries.erase(entry);
}

// Tells a tenant the labels of its own arenas only; of others no more than how much they hold.
absl::Status BlockPool::Impl::OverLimit(const TenantId& tenant, uint64_t asked_bytes,
                                        const std::string& label,
                                        uint64_t tenant_free_bytes) const {
  // A share as large as the pool is no limit of its own: raising it would not help.
  const bool over_tenant = asked_bytes > tenant_free_bytes && tenant_bytes_max < bytes_max;
  std::vector<std::pair<uint64_t, std::string>> holders;
  for (const auto& [id, entry] : entries) {
    if (entry.tenant == tenant) {
      holders.emplace_back(entry.reserved_bytes, absl::StrCat("'", entry.label, "'"));
    }
  }
  if (!over_tenant) {
    for (const auto& [name, account] : tenants) {
      if (name != tenant) {
        holders.emplace_back(account.reserved_bytes, absl::StrCat("tenant '", name, "'"));
      }
    }
  }
  const uint64_t free_bytes = over_tenant ? tenant_free_bytes : bytes_max - reserved_bytes;
  const uint64_t limit_bytes = over_tenant ? tenant_bytes_max : bytes_max;
  return absl::ResourceExhaustedError(absl::StrCat(
      "block pool: tenant '", tenant, "' asked for ", BytesText(asked_bytes), " for '", label,
      "', ", over_tenant ? "its share has " : "the pool has ", BytesText(free_bytes), " free of ",
      BytesText(limit_bytes), "; largest holders: ", HoldersText(std::move(holders)),
      "; drop sequences, ask for fewer max_tokens, or raise ",
      over_tenant ? "--tenant_bytes_max" : "--pool_bytes"));
}

std::shared_ptr<BlockPool> BlockPool::Create(const BlockPoolOptions& options) {
  return std::shared_ptr<BlockPool>(new BlockPool(options));
}

BlockPool::BlockPool(const BlockPoolOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->bytes_max = options.bytes_max;
  impl_->tenant_bytes_max = options.tenant_bytes_max == 0
                                ? options.bytes_max
                                : std::min(options.tenant_bytes_max, options.bytes_max);
}

BlockPool::~BlockPool() = default;

absl::StatusOr<std::shared_ptr<Arena>> BlockPool::CreateArena(const TenantId& tenant,
                                                              uint64_t arena_bytes,
                                                              uint64_t reserved_bytes,
                                                              std::string label) {
  if (arena_bytes == 0 || reserved_bytes < arena_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block pool: arena '", label, "' of ", arena_bytes, " bytes with ", reserved_bytes,
        " bytes reserved, expected at least 1 byte and no less reserved"));
  }
  // A file takes whole pages, so whole pages are charged. What cannot be rounded up is refused by
  // the ledger as it is.
  const uint64_t rest = arena_bytes % PageBytes();
  const uint64_t padding = rest == 0 ? 0 : PageBytes() - rest;
  const bool fits = reserved_bytes <= std::numeric_limits<uint64_t>::max() - padding;

  auto impl = std::make_unique<Arena::Impl>();
  WAVEKV_ASSIGN_OR_RETURN(
      impl->id, impl_->Reserve(tenant, fits ? reserved_bytes + padding : reserved_bytes, label));
  impl->pool = shared_from_this();
  impl->tenant = tenant;
  impl->label = std::move(label);
  impl->arena_bytes = arena_bytes + padding;
  impl->reserved_bytes = reserved_bytes + padding;
  const uint64_t id = impl->id;
  const absl::Status mapped = Arena::MapMemory(impl.get());
  if (!mapped.ok()) {
    impl_->Release(id);
    return mapped;
  }
  std::shared_ptr<Arena> arena(new Arena(std::move(impl)));
  MutexLock lock(&impl_->mutex);
  impl_->entries.at(id).arena = arena.get();
  return arena;
}

std::shared_ptr<const Arena> BlockPool::ArenaOf(const std::byte* address) const {
  MutexLock lock(&impl_->mutex);
  for (const auto& [id, entry] : impl_->entries) {
    if (entry.arena == nullptr || !entry.arena->FileOffset(address).has_value()) continue;
    // Not expired: a run of it is held.
    return entry.arena->weak_from_this().lock();
  }
  return nullptr;
}

PoolUsage BlockPool::Usage() const {
  MutexLock lock(&impl_->mutex);
  PoolUsage usage;
  usage.bytes_max = impl_->bytes_max;
  usage.reserved_bytes = impl_->reserved_bytes;
  usage.arena_count = impl_->entries.size();
  for (const auto& [id, entry] : impl_->entries) {
    if (entry.arena == nullptr) continue;
    const PoolUsage arena = entry.arena->Usage();
    usage.allocated_bytes += arena.allocated_bytes;
    usage.payload_bytes += arena.payload_bytes;
  }
  return usage;
}

std::vector<TenantUsage> BlockPool::TenantUsages() const {
  std::map<TenantId, TenantUsage> by_tenant;  // Sorted, so that answers are steady.
  MutexLock lock(&impl_->mutex);
  for (const auto& [id, entry] : impl_->entries) {
    TenantUsage& tenant = by_tenant[entry.tenant];
    tenant.usage.reserved_bytes += entry.reserved_bytes;
    ++tenant.usage.arena_count;
    if (entry.arena == nullptr) continue;
    const PoolUsage arena = entry.arena->Usage();
    tenant.usage.allocated_bytes += arena.allocated_bytes;
    tenant.usage.payload_bytes += arena.payload_bytes;
  }
  std::vector<TenantUsage> usages;
  usages.reserve(by_tenant.size());
  for (auto& [name, tenant] : by_tenant) {
    tenant.tenant = name;
    tenant.bytes_max = tenant.usage.bytes_max = impl_->tenant_bytes_max;
    usages.push_back(std::move(tenant));
  }
  return usages;
}

absl::Status Arena::MapMemory(Impl* impl) {
  absl::StatusOr<UniqueFd> fd =
      CreateMemfd(absl::StrCat("wavekv-arena-", impl->id), impl->arena_bytes);
  if (!fd.ok()) {
    return absl::Status(fd.status().code(),
                        absl::StrCat(fd.status().message(), "; each sequence needs a descriptor: ",
                                     "raise 'ulimit -n' when there are too many"));
  }
  impl->fd = *std::move(fd);
  WAVEKV_ASSIGN_OR_RETURN(impl->mapping,
                          Mapping::Map(impl->fd.get(), impl->arena_bytes, Mapping::kReadWrite));
  WAVEKV_RETURN_IF_ERROR(SealForReaders(impl->fd.get()));
  WAVEKV_ASSIGN_OR_RETURN(impl->private_mapping, Mapping::Private(impl->arena_bytes));
  if (impl->arena_bytes >= kHugePageArenaBytes) {
    // A hint: kernels without huge pages for such memory refuse it, and nothing is lost.
    for (const Mapping* mapping : {&impl->mapping, &impl->private_mapping}) {
      ::madvise(mapping->data(), impl->arena_bytes, MADV_HUGEPAGE);
    }
  }
  MutexLock lock(&impl->mutex);
  impl->allocator = BestFitAllocator(impl->arena_bytes);
  impl->private_allocator = BestFitAllocator(impl->arena_bytes);
  return absl::OkStatus();
}

Arena::Arena(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

Arena::~Arena() {
  {
    MutexLock lock(&impl_->mutex);
    WAVEKV_CHECK(impl_->allocated_bytes == 0, "an arena was destroyed under a live run");
  }
  // The memory first, then the promise: nobody may be promised what is still in use.
  impl_->mapping = Mapping();
  impl_->private_mapping = Mapping();
  impl_->fd.reset();
  impl_->pool->impl_->Release(impl_->id);
}

absl::StatusOr<std::shared_ptr<Run>> Arena::Allocate(uint64_t bytes) {
  if (bytes == 0) return NoRoom(bytes);
  const std::optional<uint64_t> rounded = BestFitAllocator::RoundUp(bytes);
  if (!rounded.has_value()) return NoRoom(bytes);
  std::shared_ptr<Run> run = AllocateAt(Run::Place::kFile, *rounded, bytes);
  if (run == nullptr) return NoRoom(bytes);
  return run;
}

absl::StatusOr<std::shared_ptr<Run>> Arena::AllocatePrivate(uint64_t bytes) {
  if (bytes == 0 || bytes > impl_->arena_bytes) return NoRoom(bytes);
  std::shared_ptr<Run> run = AllocateAt(Run::Place::kPrivate, RoundUpToPage(bytes), bytes);
  if (run == nullptr) return Allocate(bytes);
  return run;
}

std::shared_ptr<Run> Arena::AllocateAt(Run::Place place, uint64_t bytes, uint64_t payload_bytes) {
  const bool in_file = place == Run::Place::kFile;
  uint64_t offset = 0;
  {
    MutexLock lock(&impl_->mutex);
    BestFitAllocator& allocator = in_file ? impl_->allocator : impl_->private_allocator;
    const std::optional<uint64_t> found = allocator.Allocate(bytes);
    if (!found.has_value()) return nullptr;
    const uint64_t file_end = in_file ? std::max(impl_->file_end, *found + bytes) : impl_->file_end;
    const uint64_t private_bytes = impl_->private_bytes + (in_file ? 0 : bytes);
    if (RoundUpToPage(file_end) + private_bytes > impl_->arena_bytes) {
      allocator.Free(*found, bytes);
      return nullptr;
    }
    offset = *found;
    impl_->file_end = file_end;
    impl_->private_bytes = private_bytes;
    impl_->allocated_bytes += bytes;
    impl_->payload_bytes += payload_bytes;
  }
  return std::make_shared<Run>(shared_from_this(), place, offset, bytes, payload_bytes);
}

absl::Status Arena::NoRoom(uint64_t bytes) const {
  if (bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block pool: a run of 0 bytes asked for in '", impl_->label, "'"));
  }
  MutexLock lock(&impl_->mutex);
  return absl::ResourceExhaustedError(absl::StrCat(
      "block pool: no room for a run of ", BytesText(bytes), " in the arena of '", impl_->label,
      "' of tenant '", impl_->tenant, "': ", BytesText(impl_->arena_bytes - impl_->allocated_bytes),
      " free of ", BytesText(impl_->arena_bytes),
      ", in pieces that are too small; create the sequence with more max_tokens"));
}

void Arena::Free(const Run& run) {
  MutexLock lock(&impl_->mutex);
  if (run.place() == Run::Place::kFile) {
    impl_->allocator.Free(run.offset(), run.bytes());
  } else {
    impl_->private_allocator.Free(run.offset(), run.bytes());
    impl_->private_bytes -= run.bytes();
  }
  impl_->allocated_bytes -= run.bytes();
  impl_->payload_bytes -= run.payload_bytes();
}

PoolUsage Arena::Usage() const {
  PoolUsage usage;
  usage.bytes_max = impl_->arena_bytes;
  usage.reserved_bytes = impl_->reserved_bytes;
  usage.arena_count = 1;
  MutexLock lock(&impl_->mutex);
  usage.allocated_bytes = impl_->allocated_bytes;
  usage.payload_bytes = impl_->payload_bytes;
  return usage;
}

uint64_t Arena::arena_bytes() const { return impl_->arena_bytes; }
uint64_t Arena::reserved_bytes() const { return impl_->reserved_bytes; }
const TenantId& Arena::tenant() const { return impl_->tenant; }
int Arena::fd() const { return impl_->fd.get(); }

std::optional<uint64_t> Arena::FileOffset(const std::byte* address) const {
  const auto begin = reinterpret_cast<uintptr_t>(impl_->mapping.data());
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (at < begin || at - begin >= impl_->arena_bytes) return std::nullopt;
  return at - begin;
}

std::byte* Arena::base(Run::Place place) const {
  return place == Run::Place::kFile ? impl_->mapping.data() : impl_->private_mapping.data();
}

Run::Run(std::shared_ptr<Arena> arena, Place place, uint64_t offset, uint64_t bytes,
         uint64_t payload_bytes)
    : arena_(std::move(arena)),
      place_(place),
      offset_(offset),
      bytes_(bytes),
      payload_bytes_(payload_bytes) {}

Run::~Run() {
  Discard(0, bytes_);
  arena_->Free(*this);
}

void Run::Discard(uint64_t offset, uint64_t bytes) {
  WAVEKV_CHECK(offset <= bytes_ && bytes <= bytes_ - offset, "a run discards what is its own");
  if (place_ == Place::kPrivate) DiscardPages(data() + offset, bytes);
}

std::byte* Run::data() const { return arena_->base(place_) + offset_; }

}  // namespace wavekv
