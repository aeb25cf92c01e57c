// In place of kernels/ptx/types.cuh.
#pragma once
#include "lanes.h"

DEV u32 opaque(u32 x) { return x; }
DEV int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
DEV u32 thread_index() { return threadIdx.x; }

struct half { u16 bits; };
struct bf16 { u16 bits; };
template <int> struct ElementOf;
template <> struct ElementOf<0> { using type = half; };
template <> struct ElementOf<1> { using type = bf16; };
template <> struct ElementOf<2> { using type = float; };
template <> struct ElementOf<3> { using type = double; };
template <typename T> struct RealOf { using type = float; };
template <> struct RealOf<double> { using type = double; };
template <typename T> using Real = typename RealOf<T>::type;

template <typename To, typename From> DEV To same_bits(From x) { To y; memcpy(&y, &x, sizeof y); return y; }
DEV float to_real(half x) { return same_bits<_Float16>(x); }
DEV float to_real(bf16 x) { return same_bits<float>((u32)x.bits << 16); }
DEV float to_real(float x) { return x; }
DEV double to_real(double x) { return x; }
DEV void from_real(half& y, float x) { y = same_bits<half>((_Float16)x); }
DEV void from_real(bf16& y, float x) {
  const u32 u = same_bits<u32>(x);
  y.bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
DEV void from_real(float& y, float x) { y = x; }
DEV void from_real(double& y, double x) { y = x; }
