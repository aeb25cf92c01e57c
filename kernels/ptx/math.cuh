// Special functions, one instruction each where the hardware has one.
#pragma once
#include "ptx/types.cuh"

// ex2.approx.ftz: 2 ulp; the plain form adds a compare and two multiplications for subnormals, which softmax does not need.
DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
// For x <= 1023, within 0.6 ulp; 0 where the result is subnormal. exp2() takes 40 registers more in an unrolled loop.
DEV double exp2_fast(double x) {
  constexpr double kRound = 6755399441055744.0;                 // 1.5 * 2^52: with it added, the low word is x as an integer
  // (2^f - 1) / f on [-1/2, 1/2], interpolated at Chebyshev nodes.
  constexpr double kTerms[] = {0.6931471805599453, 0.24022650695910097, 0.0555041086648216, 0.009618129107606888,
                               0.0013333558146416936, 0.0001540353044173605, 1.525273382983612e-05, 1.321544258792169e-06,
                               1.0178062445845774e-07, 7.072585949269223e-09, 4.4549605981865186e-10};
  const double shifted = x + kRound, f = x - (shifted - kRound);
  double y = kTerms[10];
  #pragma unroll
  for (int i = 9; i >= 0; i--) y = fma(y, f, kTerms[i]);
  y = fma(y, f, 1.0);
  y = __hiloint2double(__double2hiint(y) + (__double2loint(shifted) << 20), __double2loint(y));
  return x < -1022 ? 0 : x == x ? y : x;        // the shift may turn a NaN into a number
}
DEV float rcp_fast(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// 1 / x within an ulp, without the branch of the division: x is neither subnormal nor beyond 2^126.
DEV float reciprocal(float x) { const float y = rcp_fast(x); return fmaf(fmaf(-x, y, 1.f), y, y); }
DEV double reciprocal(double x) { return 1 / x; }

DEV float infinity(float) { return __int_as_float(0x7f800000); }
DEV double infinity(double) { return __longlong_as_double(0x7ff0000000000000ll); }

// tanh by exp2, relative error below 1e-6 everywhere: tanh.approx keeps 11 bits, which a cap of 50 turns into 2% of P.
DEV float tanh_exp2(float x) {
  const float z = x * x;
  const float small = x * fmaf(z, fmaf(z, fmaf(z, -17.f / 315.f, 2.f / 15.f), -1.f / 3.f), 1.f);
  const float large = copysignf(fmaf(-2.f, rcp_fast(1.f + exp2_fast(2.885390082f * fabsf(x))), 1.f), x);
  return fabsf(x) < 0.25f ? small : large;     // NaN falls to `large`, which keeps it
}
DEV double tanh_exp2(double x) { return tanh(x); }

// a * b + c of two 16-bit numbers each.
template <typename T> DEV u32 fma2(u32 a, u32 b, u32 c);
template <> DEV u32 fma2<half>(u32 a, u32 b, u32 c) {
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(c));
  return c;
}
template <> DEV u32 fma2<bf16>(u32 a, u32 b, u32 c) {
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(c));
  return c;
}
