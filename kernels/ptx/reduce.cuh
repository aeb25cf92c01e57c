// Additions to global memory that nothing waits for (PTX ISA: "red"), each element by itself.
#pragma once
#include "ptx/types.cuh"

// Four neighbours, 16-byte aligned: one instruction where the hardware has it.
DEV void red_add(float* dst, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};"
               :: "l"(dst), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
#else
  #pragma unroll
  for (int i = 0; i < 4; i++) atomicAdd(dst + i, x[i]);
#endif
}
// Two neighbours, aligned to both.
DEV void red_add(float* dst, float x, float y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" :: "l"(dst), "f"(x), "f"(y) : "memory");
#else
  atomicAdd(dst, x);
  atomicAdd(dst + 1, y);
#endif
}
DEV void red_add(double* dst, double x, double y) {
  atomicAdd(dst, x);
  atomicAdd(dst + 1, y);
}
