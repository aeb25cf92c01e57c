// From the raw product q.k to the logit that softmax sees, in base 2, and the slope of that for the backward.
#pragma once
#include "attn/params.cuh"
#include "ptx/math.cuh"

enum ScoreKind {
  kScoreFolded = 0,             // scale > 0: the scale is folded into the exponent, one FMA an element
  kScoreScaled = 1,             // any scale: a scale of 0 would turn a masked -inf into NaN, a negative one into +inf
  kScoreSoftcap = 2,            // cap * tanh(scale * s / cap)
};

template <int kKind, typename R>
struct Score {
  R scale_log2, tanh_scale, cap_log2;

  DEV Score(const FwdParams& p) : scale_log2((R)p.scale_log2), tanh_scale((R)p.tanh_scale), cap_log2((R)p.cap_log2) {}
  static constexpr bool kIsIdentity = kKind == kScoreFolded;
  static constexpr bool kHasSlope = kKind == kScoreSoftcap;
  DEV R logit(R s) const {
    if constexpr (kKind == kScoreFolded) return s;
    if constexpr (kKind == kScoreScaled) return s * scale_log2;
    if constexpr (kKind == kScoreSoftcap) return cap_log2 * tanh_exp2(s * tanh_scale);
  }
  // Factor from logit() to base-2 exponents.
  DEV R exponent_scale() const { return kKind == kScoreFolded ? scale_log2 : (R)1; }
  // d logit / d (softmax_scale * s), from logit(s): 1 - tanh^2.
  DEV R slope(R logit) const {
    if constexpr (!kHasSlope) return 1;
    const R t = logit / cap_log2;
    return fma(-t, t, (R)1);
  }
};
