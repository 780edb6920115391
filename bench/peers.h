// Other ways to find a query's tokens, over the same keys: FAISS's IVF lists, its HNSW graph, and
// the best tokens as if finding them cost nothing.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace wavekv::bench {

// What one search may read, in bytes of a cache of bf16 rows: keys or centroids that are compared,
// and the keys and values of the tokens that are attended over. A row that was compared and is
// attended over counts once.
struct ReadBudget {
  uint64_t bytes = 0;
  uint64_t row_bytes = 0;  // Of a key; of a value.
};

struct Found {
  std::vector<uint32_t> tokens;  // Each once. The query heads of the group attend over all of them.
  uint64_t bytes_read = 0;       // At most the budget's.
};

// Built over the keys [tokens, dim] of one KV head. Searches one after the other.
class Peer {
 public:
  virtual ~Peer() = default;
  virtual std::string name() const = 0;
  // As many tokens as the budget allows for, best first, for queries [group_size, dim].
  virtual Found Search(std::span<const float> queries, uint32_t group_size,
                       const ReadBudget& budget) const = 0;
};

// faiss::IndexIVFFlat over inner products, with 4 sqrt(tokens) lists; lists are taken in the order
// of their centroids' products, the group's heads in turn, and attended over whole.
std::unique_ptr<Peer> CreateIvfPeer(std::span<const float> keys, uint32_t dim);

// faiss::IndexHNSWFlat over inner products, 32 neighbours; every head searches for itself, with the
// widest search that the budget allows for. Of the graph only the neighbours' numbers that lead to
// a comparison are counted.
std::unique_ptr<Peer> CreateHnswPeer(std::span<const float> keys, uint32_t dim);

// The name of CreateFlatPeer's.
inline constexpr char kFoundForFree[] = "flat_top_k_found_for_free";
// faiss::IndexFlatIP: each head's best tokens. Comparing with all keys is NOT counted: no search
// for whole tokens can do better with as many bytes.
std::unique_ptr<Peer> CreateFlatPeer(std::span<const float> keys, uint32_t dim);

}  // namespace wavekv::bench
