// Element types and their conversions. The project's own: NVRTC then needs no CUDA header at all.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define DEV __device__ __forceinline__

// The same value, of which the compiler knows nothing more: what is computed from it stays where it is written instead of
// being hoisted out of a loop into registers that the loop needs.
DEV u32 opaque(u32 x) { asm volatile("" : "+r"(x)); return x; }
// A number that is the same in all lanes, told so that the compiler can keep it, and what follows from it, in uniform registers.
DEV int uniform(int x) { return __shfl_sync(0xffffffff, x, 0); }
// threadIdx.x, read anew each time for the same reason.
DEV u32 thread_index() { u32 x; asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x)); return x; }

struct half { u16 bits; };
struct bf16 { u16 bits; };

// By the macro DTYPE, the code of config.py.
template <int> struct ElementOf;
template <> struct ElementOf<0> { using type = half; };
template <> struct ElementOf<1> { using type = bf16; };
template <> struct ElementOf<2> { using type = float; };
template <> struct ElementOf<3> { using type = double; };

// The type that sums and softmax of an element type are kept in.
template <typename T> struct RealOf { using type = float; };
template <> struct RealOf<double> { using type = double; };
template <typename T> using Real = typename RealOf<T>::type;

DEV float to_real(half x) { float y; asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits)); return y; }
DEV float to_real(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEV float to_real(float x) { return x; }
DEV double to_real(double x) { return x; }

// Round to nearest even; NaN stays NaN.
DEV void from_real(half& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEV void from_real(bf16& y, float x) {
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
  const u32 u = __float_as_uint(x);
  y.bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : (u16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
#endif
}
DEV void from_real(float& y, float x) { y = x; }
DEV void from_real(double& y, double x) { y = x; }

// Two neighbours in one register, the first in the low half.
template <typename T> DEV u32 pack2(float lo, float hi);
template <> DEV u32 pack2<half>(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
  u32 r; asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
#else
  half a, b; from_real(a, lo); from_real(b, hi); return (u32)a.bits | (u32)b.bits << 16;
#endif
}
template <> DEV u32 pack2<bf16>(float lo, float hi) {
#if __CUDA_ARCH__ >= 800
  u32 r; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo)); return r;
#else
  bf16 a, b; from_real(a, lo); from_real(b, hi); return (u32)a.bits | (u32)b.bits << 16;
#endif
}
