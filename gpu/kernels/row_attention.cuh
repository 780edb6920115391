// Exact attention of one warp over rows of keys and values, 16 at a time, on tensor cores.
//
// Keys and values are fragments in registers, loaded there directly or from a stage in shared
// memory (warp_ring.cuh). Scores are (16 rows) x (8 heads); the weights are transposed in registers
// (movmatrix) to be the second operand of
//   out^T [head_dim, heads] += V^T [head_dim, 16 rows] weights [16 rows, heads].
#pragma once

#include <type_traits>

#include "gpu/kernels/mma.cuh"
#include "gpu/kernels/step_layout.h"
#include "gpu/kernels/warp_ring.cuh"

namespace wavekv::gpu {

// Rows [begin, end) of a stretch of kBlockRows rows.
struct RowStretch {
  const char* keys = nullptr;
  const char* values = nullptr;
  uint32_t begin = 0;
  uint32_t end = 0;      // 0: nothing.
  char* fill = nullptr;  // Slot to copy the rows to, or null.
};

// Queries of a unit as the second operand, in shared memory: [heads / 8][head_dim / 16][lane].
template <int kDim, int kTiles>
struct QueryFragments {
  uint2 at[kTiles][kDim / 16][32];
};

// Dims of query pairs: step 2j + h of the sum, lane (g, t) holds dims 32j + 8t + 4h + {0..3} of
// head 8 * tile + g, which is what the keys' 16-byte loads give.
template <typename T, int kDim, int kTiles>
__device__ void LoadQueryFragments(const T* queries, uint32_t group,
                                   QueryFragments<kDim, kTiles>* fragments) {
  constexpr int kCount = kTiles * (kDim / 16) * 32;
  for (int i = threadIdx.x; i < kCount; i += blockDim.x) {
    const int lane = i % 32, step = i / 32 % (kDim / 16), tile = i / 32 / (kDim / 16);
    const uint32_t head = 8 * tile + lane / 4;
    const int dim = 32 * (step / 2) + 8 * (lane % 4) + 4 * (step % 2);
    uint2 pair = {0, 0};
    if (head < group) pair = *reinterpret_cast<const uint2*>(queries + head * kDim + dim);
    fragments->at[tile][step][lane] = pair;
  }
}

// Two stretches in shared memory. Rows in device memory come in 16-byte copies, permuted so that
// the fragments' loads meet no bank twice: chunk i of row r lies at i ^ 4 (r % 2) for keys, i ^ 2
// (r / 2) for values. Rows in host memory come as they are, in bulk: the bus is slower than the
// banks. What lies beyond a stretch's rows is undefined.
template <int kDim>
struct RowStage {
  static constexpr int kChunks = kDim / 8;  // Of a row.
  uint4 keys[2][kBlockRows][kChunks];
  uint4 values[2][kBlockRows][kChunks];

  static __device__ int KeyPlace(int row, int chunk) { return chunk ^ (row % 2 * 4); }
  static __device__ int ValuePlace(int row, int chunk) { return chunk ^ (row / 2 * 2); }

  // A warp asks for the rows; closes a group of copies.
  __device__ void Request(const RowStretch (&stretches)[2]) {
    constexpr int kRowsATurn = 32 / kChunks;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const RowStretch& stretch = stretches[s];
#pragma unroll
      for (int first = 0; first < kBlockRows; first += kRowsATurn) {
        const int row = first + lane / kChunks;
        if (row < stretch.begin || row >= stretch.end) continue;
        const size_t from = (row * kChunks + chunk) * sizeof(uint4);
        CopyAhead(&keys[s][row][KeyPlace(row, chunk)], stretch.keys + from);
        CopyAhead(&values[s][row][ValuePlace(row, chunk)], stretch.values + from);
      }
    }
    CloseCopies();
  }

  // Likewise for rows in host memory, by ordinary loads of whole rows: the asynchronous kinds were
  // half as fast over the bus.
  __device__ void Fetch(const RowStretch (&stretches)[2]) {
    constexpr int kRowsATurn = 32 / kChunks, kTurns = kBlockRows / kRowsATurn;
    const int lane = threadIdx.x % 32, chunk = lane % kChunks;
#pragma unroll 1  // Registers for one at a time.
    for (int s = 0; s < 2; ++s) {
      uint4 fetched_keys[kTurns], fetched_values[kTurns];
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = i * kRowsATurn + lane / kChunks;
        if (row >= stretches[s].end) continue;
        const size_t from = (row * kChunks + chunk) * sizeof(uint4);
        fetched_keys[i] = LoadOnce(stretches[s].keys + from);
        fetched_values[i] = LoadOnce(stretches[s].values + from);
      }
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        const int row = i * kRowsATurn + lane / kChunks;
        if (row >= stretches[s].end) continue;
        keys[s][row][KeyPlace(row, chunk)] = fetched_keys[i];
        values[s][row][ValuePlace(row, chunk)] = fetched_values[i];
      }
    }
    CloseCopies();
  }
};

// Running attention. Lane (g, t) holds of heads 8 * tile + 2t + {0, 1} the dims OutDim(m, g, r).
template <typename T, int kDim, int kTiles>
struct WarpAttention {
  static constexpr int kKeyLoads = kDim / 32;    // 16-byte loads of a row of keys, per lane.
  static constexpr int kValueLoads = kDim / 64;  // Likewise of a row of values.
  static constexpr int kRowBytes = kDim * 2;
  // The maximum may be this far (base 2) under a score before what was summed is rescaled.
  static constexpr float kMaxLag = 8.0f;

  float out[kTiles][kDim / 16][4];
  float max[kTiles][2];  // Base 2, the same in all lanes of a column.
  float sum[kTiles][2];  // This lane's rows only, until Finish.

  // Dim of accumulator element r (0 to 3; r / 2 picks the dim) of row tile m.
  static __device__ int OutDim(int m, int g, int r) {
    return 64 * (m / 4) + 8 * g + 2 * (m % 4) + r / 2;
  }

  __device__ void Clear() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
#pragma unroll
        for (int r = 0; r < 4; ++r) out[n][m][r] = 0;
      }
      max[n][0] = max[n][1] = kLogFloor;
      sum[n][0] = sum[n][1] = 0;
    }
  }

  // Adds the rows of two stretches. `scale` is in base 2. All lanes call it with the same
  // arguments.
  __device__ void Add(const RowStretch (&stretches)[2], const QueryFragments<kDim, kTiles>& queries,
                      float scale) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Rows rows;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const RowStretch& stretch = stretches[s];
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        rows.keys[s][j] = uint4{};
        if (g >= stretch.begin && g < stretch.end) {
          rows.keys[s][j] = LoadOnce(stretch.keys + g * kRowBytes + 16 * (4 * j + t));
        }
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * t + i;
#pragma unroll
        for (int j = 0; j < kValueLoads; ++j) {
          rows.values[s][i][j] = uint4{};
          if (row >= stretch.begin && row < stretch.end) {
            rows.values[s][i][j] = LoadOnce(stretch.values + row * kRowBytes + 16 * (8 * j + g));
          }
        }
      }
    }
    AddRows(stretches, rows, queries, scale);
  }

  // Likewise, from a stage that holds them; copies them to the slots that the stretches name if
  // `fills`.
  __device__ void AddStage(const RowStretch (&stretches)[2], const RowStage<kDim>& stage,
                           const QueryFragments<kDim, kTiles>& queries, float scale, bool fills) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Rows rows;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        rows.keys[s][j] = stage.keys[s][g][RowStage<kDim>::KeyPlace(g, 4 * j + t)];
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * t + i;
        const bool valid = row >= stretches[s].begin && row < stretches[s].end;
#pragma unroll
        for (int j = 0; j < kValueLoads; ++j) {
          // A weight of zero times whatever lies there might be NaN.
          rows.values[s][i][j] = uint4{};
          if (valid) {
            rows.values[s][i][j] = stage.values[s][row][RowStage<kDim>::ValuePlace(row, 8 * j + g)];
          }
        }
      }
      if (fills) Fill(stretches[s], rows, s);
    }
    AddRows(stretches, rows, queries, scale);
  }

  // Sums over the lanes of a column; afterwards every lane holds the whole sum.
  __device__ void Finish() {
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      sum[n][0] = RowsSum(sum[n][0]);
      sum[n][1] = RowsSum(sum[n][1]);
    }
  }

 private:
  // Lane (g, t): key row g, value rows 2t and 2t + 1 of each of two stretches.
  struct Rows {
    uint4 keys[2][kKeyLoads];
    uint4 values[2][2][kValueLoads];
  };

  __device__ void AddRows(const RowStretch (&stretches)[2], const Rows& rows,
                          const QueryFragments<kDim, kTiles>& queries, float scale) {
    uint32_t weights[kTiles][2];
    Score(stretches, rows.keys, queries, scale, weights);
    AddValues(rows.values, weights);
  }

  __device__ void Fill(const RowStretch& stretch, const Rows& rows, int s) const {
    if (stretch.fill == nullptr) return;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (g >= stretch.begin && g < stretch.end) {
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        *reinterpret_cast<uint4*>(stretch.fill + g * kRowBytes + 16 * (4 * j + t)) =
            rows.keys[s][j];
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * t + i;
      if (row >= stretch.begin && row < stretch.end) {
#pragma unroll
        for (int j = 0; j < kValueLoads; ++j) {
          *reinterpret_cast<uint4*>(stretch.fill + (kBlockRows + row) * kRowBytes +
                                    16 * (8 * j + g)) = rows.values[s][i][j];
        }
      }
    }
  }

  // weights[n][s]: rows 2t, 2t + 1 of stretch s for head 8n + g.
  __device__ void Score(const RowStretch (&stretches)[2], const uint4 (&keys)[2][kKeyLoads],
                        const QueryFragments<kDim, kTiles>& queries, float scale,
                        uint32_t (&weights)[kTiles][2]) {
    const int lane = threadIdx.x % 32, g = lane / 4;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      float scores[4] = {0, 0, 0, 0};
#pragma unroll
      for (int j = 0; j < kKeyLoads; ++j) {
        const uint2 q0 = queries.at[n][2 * j][lane], q1 = queries.at[n][2 * j + 1][lane];
        Mma<T>({keys[0][j].x, keys[1][j].x, keys[0][j].y, keys[1][j].y}, q0.x, q0.y, scores);
        Mma<T>({keys[0][j].z, keys[1][j].z, keys[0][j].w, keys[1][j].w}, q1.x, q1.y, scores);
      }
      bool grows = false;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const RowStretch& stretch = stretches[r / 2];
        const bool valid = g >= stretch.begin && g < stretch.end;
        scores[r] = valid ? scores[r] * scale : -INFINITY;
        grows |= scores[r] > max[n][r % 2] + kMaxLag;
      }
      if (__any_sync(kFullWarp, grows)) Rescale(n, scores);
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        scores[r] = Exp2(scores[r] - max[n][r % 2]);
        sum[n][r % 2] += scores[r];
      }
      weights[n][0] = Transpose8x8(PackPair<T>(scores[0], scores[1]));
      weights[n][1] = Transpose8x8(PackPair<T>(scores[2], scores[3]));
    }
  }

  __device__ void Rescale(int n, const float (&scores)[4]) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float largest = fmaxf(max[n][c], RowsMax(fmaxf(scores[c], scores[2 + c])));
      const float factor = Exp2(max[n][c] - largest);
      max[n][c] = largest;
      sum[n][c] *= factor;
#pragma unroll
      for (int m = 0; m < kDim / 16; ++m) {
        out[n][m][c] *= factor;
        out[n][m][2 + c] *= factor;
      }
    }
  }

  __device__ void AddValues(const uint4 (&values)[2][2][kValueLoads],
                            const uint32_t (&weights)[kTiles][2]) {
    constexpr uint32_t kLowHalves = 0x5410, kHighHalves = 0x7632;
#pragma unroll
    for (int j = 0; j < kValueLoads; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const uint32_t a0 = Word(values[0][0][j], e), a1 = Word(values[0][1][j], e);
        const uint32_t b0 = Word(values[1][0][j], e), b1 = Word(values[1][1][j], e);
        const AFragment fragment = {
            __byte_perm(a0, a1, kLowHalves), __byte_perm(a0, a1, kHighHalves),
            __byte_perm(b0, b1, kLowHalves), __byte_perm(b0, b1, kHighHalves)};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          Mma<T>(fragment, weights[n][0], weights[n][1], out[n][4 * j + e]);
        }
      }
    }
  }

  static __device__ uint32_t Word(const uint4& x, int e) {
    return e == 0 ? x.x : e == 1 ? x.y : e == 2 ? x.z : x.w;
  }
};

}  // namespace wavekv::gpu
