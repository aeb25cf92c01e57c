// Joining the outputs of parts of the keys: each weighs exp(lse - the lse of all). A part whose lse is -inf saw nothing.
#pragma once
#include "ptx/math.cuh"

// The lse of several parts, as a max and a sum of exponentials below it. kNatural: natural logarithms, else to base 2.
template <typename R, bool kNatural> struct TotalLse {
  R max = -infinity(R()), sum = 0;

  static DEV R power(R x) { return exp2_fast(kNatural ? x * (R)1.44269504088896340736 : x); }
  DEV R below_max(R lse) const { return power(lse - (max == -infinity(R()) ? (R)0 : max)); }       // no -inf - -inf
  DEV void add(R lse) {
    TotalLse total = {fmax(max, lse), 0};
    total.sum = fma(sum, total.below_max(max), total.below_max(lse));
    *this = total;
  }
  // Of what the lanes of a warp have, in all of them; or of each so many, a power of two, in those.
  DEV void add_lanes(int lanes = 32) {
    TotalLse total = *this;
    #pragma unroll
    for (int step = 16; step; step /= 2)
      if (step < lanes) total.max = fmax(total.max, __shfl_xor_sync(0xffffffff, total.max, step));
    total.sum *= total.below_max(max);
    #pragma unroll
    for (int step = 16; step; step /= 2)
      if (step < lanes) total.sum += __shfl_xor_sync(0xffffffff, total.sum, step);
    *this = total;
  }
  DEV R inverse() const { return sum == 0 ? (R)0 : 1 / sum; }   // no part saw anything: all weigh 0
  // What a part weighs; `inverse` is inverse().
  DEV R weight(R lse, R inverse) const { return below_max(lse) * inverse; }
  DEV R natural_lse() const {
    if (sum == 0) return -infinity(R());
    return kNatural ? fma(log2(sum), (R)0.693147180559945309417, max) : (max + log2(sum)) * (R)0.693147180559945309417;
  }
};
