#include "bench/peers.h"

#include <faiss/IndexFlat.h>
#include <faiss/IndexHNSW.h>
#include <faiss/IndexIVFFlat.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

namespace wavekv::bench {
namespace {

using FaissId = faiss::Index::idx_t;

// Tokens in the order in which they were first added.
class TokenSet {
 public:
  bool Add(FaissId token) {
    if (token < 0 || !seen_.insert(token).second) return false;
    tokens_.push_back(static_cast<uint32_t>(token));
    return true;
  }
  size_t size() const { return tokens_.size(); }
  std::vector<uint32_t> Take() { return std::move(tokens_); }

 private:
  std::unordered_set<FaissId> seen_;
  std::vector<uint32_t> tokens_;
};

class IvfPeer : public Peer {
 public:
  IvfPeer(std::span<const float> keys, uint32_t dim)
      : quantizer_(dim),
        index_(&quantizer_, dim, static_cast<size_t>(4 * std::sqrt(keys.size() / dim)),
               faiss::METRIC_INNER_PRODUCT) {
    const auto count = static_cast<FaissId>(keys.size() / dim);
    index_.train(count, keys.data());
    index_.add(count, keys.data());
  }

  std::string name() const override { return "ivf_flat"; }

  Found Search(std::span<const float> queries, uint32_t group_size,
               const ReadBudget& budget) const override {
    const size_t lists = index_.nlist;
    std::vector<float> products(group_size * lists);
    std::vector<FaissId> order(products.size());
    quantizer_.search(group_size, queries.data(), static_cast<FaissId>(lists), products.data(),
                      order.data());
    Found found = {{}, lists * budget.row_bytes};
    std::unordered_set<FaissId> probed;
    for (size_t rank = 0; rank < lists; ++rank) {
      for (uint32_t g = 0; g < group_size; ++g) {
        const FaissId list = order[g * lists + rank];
        if (!probed.insert(list).second) continue;
        const size_t size = index_.invlists->list_size(static_cast<size_t>(list));
        if (found.bytes_read + size * 2 * budget.row_bytes > budget.bytes) return found;
        found.bytes_read += size * 2 * budget.row_bytes;
        const FaissId* const ids = index_.invlists->get_ids(static_cast<size_t>(list));
        found.tokens.insert(found.tokens.end(), ids, ids + size);
      }
    }
    return found;
  }

 private:
  faiss::IndexFlatIP quantizer_;
  faiss::IndexIVFFlat index_;
};

class HnswPeer : public Peer {
 public:
  HnswPeer(std::span<const float> keys, uint32_t dim)
      : index_(static_cast<int>(dim), 32, faiss::METRIC_INNER_PRODUCT) {
    index_.add(static_cast<FaissId>(keys.size() / dim), keys.data());
  }

  std::string name() const override { return "hnsw_flat"; }

  Found Search(std::span<const float> queries, uint32_t group_size,
               const ReadBudget& budget) const override {
    Found best;
    for (int width = 4; width <= index_.ntotal; width += width / 4) {
      Found found = SearchWidth(queries, group_size, width, budget);
      if (found.bytes_read > budget.bytes) break;
      best = std::move(found);
    }
    return best;
  }

 private:
  Found SearchWidth(std::span<const float> queries, uint32_t group_size, int width,
                    const ReadBudget& budget) const {
    std::vector<float> products(size_t{group_size} * static_cast<size_t>(width));
    std::vector<FaissId> ids(products.size());
    faiss::SearchParametersHNSW parameters;
    parameters.efSearch = width;
    faiss::hnsw_stats.reset();
    index_.search(group_size, queries.data(), width, products.data(), ids.data(), &parameters);
    TokenSet tokens;
    for (const FaissId id : ids) tokens.Add(id);
    // Products on the lowest level of the graph (FAISS 1.7's name for it); the few above it are
    // left aside.
    const uint64_t compared = faiss::hnsw_stats.n3;
    const uint64_t bytes = compared * (budget.row_bytes + sizeof(faiss::HNSW::storage_idx_t)) +
                           tokens.size() * budget.row_bytes;
    return {tokens.Take(), bytes};
  }

  faiss::IndexHNSWFlat index_;
};

class FlatPeer : public Peer {
 public:
  FlatPeer(std::span<const float> keys, uint32_t dim) : index_(dim) {
    index_.add(static_cast<FaissId>(keys.size() / dim), keys.data());
  }

  std::string name() const override { return kFoundForFree; }

  Found Search(std::span<const float> queries, uint32_t group_size,
               const ReadBudget& budget) const override {
    const size_t room = budget.bytes / (2 * budget.row_bytes);
    const size_t depth = std::min(room, static_cast<size_t>(index_.ntotal));
    std::vector<float> products(group_size * depth);
    std::vector<FaissId> ids(products.size());
    index_.search(group_size, queries.data(), static_cast<FaissId>(depth), products.data(),
                  ids.data());
    TokenSet tokens;
    for (size_t rank = 0; rank < depth && tokens.size() < room; ++rank) {
      for (uint32_t g = 0; g < group_size && tokens.size() < room; ++g) {
        tokens.Add(ids[g * depth + rank]);
      }
    }
    const uint64_t bytes = tokens.size() * 2 * budget.row_bytes;
    return {tokens.Take(), bytes};
  }

 private:
  faiss::IndexFlatIP index_;
};

}  // namespace

std::unique_ptr<Peer> CreateIvfPeer(std::span<const float> keys, uint32_t dim) {
  return std::make_unique<IvfPeer>(keys, dim);
}

std::unique_ptr<Peer> CreateHnswPeer(std::span<const float> keys, uint32_t dim) {
  return std::make_unique<HnswPeer>(keys, dim);
}

std::unique_ptr<Peer> CreateFlatPeer(std::span<const float> keys, uint32_t dim) {
  return std::make_unique<FlatPeer>(keys, dim);
}

}  // namespace wavekv::bench
