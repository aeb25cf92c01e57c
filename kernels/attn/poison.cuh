// NaN and Inf under a mask. A product with P = 0 would carry those of V to rows that do not see them, so a partly masked tile that
// holds any is taken apart: what is not finite goes to exactly the rows that see it, and becomes 0 in the tile. So do, in a
// backward, those of Q, dO and K.
#pragma once
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma_sm80.cuh"
#include "tile/layout.cuh"

template <typename T> struct Bits;
template <> struct Bits<half> { static constexpr u32 kExponent = 0x7c00, kMantissa = 0x03ff, kOne = 0x3c00; };
template <> struct Bits<bf16> { static constexpr u32 kExponent = 0x7f80, kMantissa = 0x007f, kOne = 0x3f80; };

template <typename T> DEV bool is_nonfinite(u32 bits16) { return (bits16 & Bits<T>::kExponent) == Bits<T>::kExponent; }

// The halves of a word that are finite, all bits of them.
template <typename T> DEV u32 finite_mask(u32 word) {
  return (is_nonfinite<T>(word) ? 0 : 0xffffu) | (is_nonfinite<T>(word >> 16) ? 0 : 0xffff0000u);
}

// Bits 15 and 31: whether the low and the high element are NaN or Inf. Those are where adding 1 to the exponent carries.
template <typename T> DEV u32 nonfinite_carries(u32 word) {
  return (word & Bits<T>::kExponent * 0x10001u) + (Bits<T>::kMantissa + 1) * 0x10001u;
}

// Whether any element of the tile at `tile`, kBytes long and shared by kThreads threads, is NaN or Inf; with kClear those
// become 0. A thread answers for its own part.
template <typename T, int kBytes, int kThreads, bool kClear> DEV bool scan_nonfinite(u32 tile, u32 thread) {
  u32 found[4] = {};
  #pragma unroll 4
  for (u32 at = thread * 16; at < kBytes; at += kThreads * 16) {
    const Chunk c = load_shared(tile + at);
    #pragma unroll
    for (int i = 0; i < 4; i++) found[i] = fma2<T>(c.word[i], 0, found[i]);     // NaN and Inf times 0 are NaN
  }
  const bool any = (found[0] | found[1] | found[2] | found[3]) & 0x7fff7fff;
  if constexpr (kClear) {
    #pragma unroll 1
    for (u32 at = thread * 16; any && at < kBytes; at += kThreads * 16) {
      Chunk c = load_shared(tile + at);
      #pragma unroll
      for (int i = 0; i < 4; i++) c.word[i] &= finite_mask<T>(c.word[i]);
      store_shared(tile + at, c);
    }
  }
  return any;
}

// NaN and Inf of a tile of kRows rows become 0, and mark(row) is called for every row that had any. A thread answers for its own
// part.
template <typename T, typename Layout, int kRows, int kThreads, typename Mark>
DEV void clear_nonfinite(u32 tile, u32 thread, Mark mark) {
  constexpr int kBytes = kRows * Layout::kRowBytes;
  if (!scan_nonfinite<T, kBytes, kThreads, false>(tile, thread)) return;
  #pragma unroll 1
  for (u32 at = thread * 16; at < kBytes; at += kThreads * 16) {
    Chunk c = load_shared(tile + at);
    u32 kept = ~0u;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 mask = finite_mask<T>(c.word[i]);
      c.word[i] &= mask;
      kept &= mask;
    }
    if (kept == ~0u) continue;
    store_shared(tile + at, c);
    mark(Layout::row_at(at));
  }
}

// B fragment of ones where the elements of `v` are of the class: 0 NaN, 1 +Inf, 2 -Inf.
template <typename T, int kClass> DEV u32 class_ones(u32 v) {
  u32 ones = 0;
  #pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const u32 x = v >> shift & 0xffff;
    const bool nan = is_nonfinite<T>(x) && (x & Bits<T>::kMantissa);
    const bool hit = kClass == 0 ? nan : is_nonfinite<T>(x) && !nan && (x >> 15 != 0) == (kClass == 2);
    ones |= (hit ? Bits<T>::kOne : 0u) << shift;
  }
  return ones;
}

// Adds NaN or Inf to the outputs of a warp's kMTiles x 16 query rows wherever one that the row sees stands in the V tile:
// ones at visible keys, times ones at elements of a class, count how many. rO is of every kGroup-th 16 columns, from the
// part-th on.
template <typename T, typename Layout, int kBlockN, int kGroup, int kMTiles, int kNTiles, typename Mask>
DEV void add_nonfinite(float (&rO)[kMTiles][kNTiles][4], u32 v_tile, const Mask& mask, int first_row, int first_key, u32 part) {
  const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  #pragma unroll
  for (int d = 0; d < kNTiles; d += 2) {
    float counts[3][kMTiles][2][4] = {};
    #pragma unroll 1
    for (int key = 0; key < kBlockN; key += 16) {
      u32 rV[4];
      ldmatrix_x4_trans(rV, v_tile + Layout::offset(key + lane % 16, d * kGroup + part * 2 + lane / 16));
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        u32 rVisible[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
          const int row = first_row + m * 16 + g + i % 2 * 8, j = first_key + key + 2 * t + i / 2 * 8;
          const int begin = mask.key_begin(row), end = mask.key_end(row);
          rVisible[i] = (j >= begin && j < end ? Bits<T>::kOne : 0u) | (j + 1 >= begin && j + 1 < end ? Bits<T>::kOne << 16 : 0u);
        }
        #pragma unroll
        for (int n = 0; n < 2; n++) {
          mma_m16n8k16<T>(counts[0][m][n], rVisible, class_ones<T, 0>(rV[2 * n]), class_ones<T, 0>(rV[2 * n + 1]));
          mma_m16n8k16<T>(counts[1][m][n], rVisible, class_ones<T, 1>(rV[2 * n]), class_ones<T, 1>(rV[2 * n + 1]));
          mma_m16n8k16<T>(counts[2][m][n], rVisible, class_ones<T, 2>(rV[2 * n]), class_ones<T, 2>(rV[2 * n + 1]));
        }
      }
    }
    #pragma unroll
    for (int i = 0; i < kMTiles * 8; i++) {
      const int m = i / 8, n = i / 4 % 2, e = i % 4;
      float add = counts[1][m][n][e] > 0 ? __int_as_float(0x7f800000) : 0.f;
      if (counts[2][m][n][e] > 0) add -= __int_as_float(0x7f800000);     // both signs: NaN, as the sum would be
      if (counts[0][m][n][e] > 0) add = __int_as_float(0x7fffffff);
      rO[m][d + n][e] += add;
    }
  }
}
