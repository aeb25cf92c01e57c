// Online softmax of logits that lie as accumulators of tensor cores (ptx/mma_sm80.cuh, ptx/wgmma.cuh): of 16 rows a lane has two,
// eight apart, and element i of row r at [i / 2 * 4 + r * 2 + i % 2]. Four lanes have the same rows. Logits times
// `exponent_scale` are exponents in base 2, and so are maxima. The running max lags: it moves only where a logit would exceed it
// by more than kMaxLag, so O is seldom rescaled.
#pragma once
#include "ptx/math.cuh"

constexpr float kMaxLag = 8.f;                  // P stays below 256, which float16 holds with room for the sums

DEV float max_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
DEV float sum_of_row(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// Accumulators of 16 rows, as one array.
template <int kTiles> DEV float (&flat(float (&x)[kTiles][4]))[kTiles * 4] { return *(float (*)[kTiles * 4])x; }
template <int kTiles> DEV const float (&flat(const float (&x)[kTiles][4]))[kTiles * 4] { return *(const float (*)[kTiles * 4])x; }

// Logits in place of raw products.
template <typename Score, int kSize> DEV void apply_score(float (&rS)[kSize], const Score& score) {
  if constexpr (!Score::kIsIdentity) {
    #pragma unroll
    for (int i = 0; i < kSize; i++) rS[i] = score.logit(rS[i]);
  }
}

// The max of this lane's logits in each row, not yet scaled. `exceeds` if one exceeds the running max by more than it may.
template <int kSize>
DEV void find_max(float (&max)[2], const float (&running)[2], const float (&rS)[kSize], float exponent_scale, bool& exceeds) {
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = rS[r * 2];
    #pragma unroll
    for (int i = 1; i < kSize / 2; i++) x = fmaxf(x, rS[i / 2 * 4 + r * 2 + i % 2]);
    max[r] = x;
    // From -inf every logit moves it but -inf, which gives a NaN here.
    exceeds |= fmaf(x, exponent_scale, -running[r]) > kMaxLag;
  }
}
// What the sum and O of a row are multiplied by where its max moves. A first max finds them empty but for Inf from V, which times
// 0 would be NaN.
DEV float factor_of_move(const float& old, const float& max) {
  return max == old || old == -infinity(0.f) ? 1.f : exp2_fast(old - max);
}

// What exponents are counted from: a row that has seen nothing has no max.
DEV float subtrahend(float max) { return max == -infinity(0.f) ? 0.f : max; }
// P in place of logits, added to the sums over this lane's columns.
template <int kSize> DEV void exponentiate(float (&rS)[kSize], const float (&max)[2], float (&sum)[2], float exponent_scale) {
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const float subtract = subtrahend(max[r]);
    #pragma unroll
    for (int i = 0; i < kSize / 2; i++) {
      float& x = rS[i / 2 * 4 + r * 2 + i % 2];
      x = exp2_fast(fmaf(x, exponent_scale, -subtract));
      sum[r] += x;
    }
  }
}

// What a lane of a warp that has rows alone keeps of its two from key tile to key tile.
struct RowStats {
  float max[2];                                 // lagging; the same in the four lanes of a row
  float sum[2];                                 // of P over this lane's columns
};
// The running max of each row. Whether any moved: then the sums have followed, and O is to be multiplied by `alpha`.
template <int kSize> DEV bool update_max(RowStats& rows, const float (&rS)[kSize], float (&alpha)[2], float exponent_scale) {
  float tile_max[2];
  bool exceeds = false;
  find_max(tile_max, rows.max, rS, exponent_scale, exceeds);
  if (!__any_sync(0xffffffff, exceeds)) return false;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float x = max_of_row(tile_max[r]) * exponent_scale, &old = rows.max[r];
    if (!(x - old > kMaxLag)) x = old;          // only another row of the warp moves: bits of one never depend on another
    alpha[r] = factor_of_move(old, x);
    old = x;
    rows.sum[r] *= alpha[r];
  }
  return true;
}
