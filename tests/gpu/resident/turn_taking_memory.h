// Memory that lets somebody else have a turn in the middle of every call, as a DMA does.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "gpu/buffer_memory.h"

namespace wavekv::resident {

// What a call reads or writes, it does piece by piece in any order that BufferMemory allows, and
// between pieces the other side may get a turn: a state of several words is torn.
class TurnTakingMemory : public BufferMemory {
 public:
  TurnTakingMemory(std::unique_ptr<BufferMemory> memory, uint64_t seed)
      : memory_(std::move(memory)), random_(seed) {}

  // `turn` is called before one piece in `one_in`; never from within itself.
  void SetTurn(std::function<void()> turn, uint32_t one_in) {
    turn_ = std::move(turn);
    one_in_ = one_in;
  }

  // Calls that went through.
  uint64_t reads() const { return reads_; }
  uint64_t writes() const { return writes_; }

  uint64_t bytes() const override { return memory_->bytes(); }
  absl::Status Zero(uint64_t offset, uint64_t bytes) override {
    return memory_->Zero(offset, bytes);
  }
  absl::Status Write(std::span<const ByteCopy> copies,
                     const std::optional<BufferWord>& word) override {
    ++writes_;
    for (const size_t i : AnyOrder(copies.size())) {
      MaybeTurn();
      const absl::Status status = memory_->Write({&copies[i], 1});
      if (!status.ok()) return status;
    }
    MaybeTurn();
    return memory_->Write({}, word);
  }
  absl::Status Scatter(std::span<const BufferEntry> entries,
                       std::span<const BufferWord> words) override {
    ++writes_;
    absl::Status status;
    for (const BufferEntry& entry : entries) {
      MaybeTurn();
      status.Update(memory_->Scatter({&entry, 1}, {}));
    }
    for (const BufferWord& word : words) {
      MaybeTurn();
      status.Update(memory_->Scatter({}, {&word, 1}));
    }
    return status;
  }
  absl::Status Read(std::span<const ByteRead> pieces) override {
    ++reads_;
    absl::Status status;
    for (const size_t i : AnyOrder(pieces.size())) {
      const ByteRead& piece = pieces[i];
      // Words of a small piece, a few strides of a large one.
      const uint64_t stride = std::max<uint64_t>(8, piece.bytes / 64 / 8 * 8);
      for (const size_t j : AnyOrder((piece.bytes + stride - 1) / stride)) {
        MaybeTurn();
        const uint64_t at = j * stride;
        const ByteRead part{piece.offset + at, piece.target + at,
                            std::min(stride, piece.bytes - at)};
        status.Update(memory_->Read({&part, 1}));
      }
    }
    return status;
  }

 private:
  std::vector<size_t> AnyOrder(size_t count) {
    std::vector<size_t> order(count);
    for (size_t i = 0; i < count; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random_);
    return order;
  }
  void MaybeTurn() {
    if (turn_ == nullptr || in_turn_ || random_() % one_in_ != 0) return;
    in_turn_ = true;
    turn_();
    in_turn_ = false;
  }

  const std::unique_ptr<BufferMemory> memory_;
  std::mt19937_64 random_;
  std::function<void()> turn_;
  uint32_t one_in_ = 1;
  bool in_turn_ = false;
  uint64_t reads_ = 0, writes_ = 0;
};

}  // namespace wavekv::resident
