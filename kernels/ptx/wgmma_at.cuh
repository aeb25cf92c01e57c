// wgmma with a and b in shared memory, a with M contiguous and b with k contiguous (PTX ISA: "wgmma.mma_async"): dQ^T = K^T dS^T.
#pragma once
#include "ptx/wgmma.cuh"

// d (64 x 80) = a * b, or += where `add`; as wgmma_ss of ptx/wgmma.cuh but for the order of a.
template <typename T, int kSize> DEV void wgmma_ss_at(float (&d)[kSize], u64 a, u64 b, bool add);
#define WGMMA_SS_AT(T, type)                                                                                                   \
  template <> DEV void wgmma_ss_at<T, 40>(float (&d)[40], u64 a, u64 b, bool add) {                                                \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %42, 0;\n"                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n80k16.f32." type "." type " {" WGMMA_NAMES_40 "}, %40, %41, p, 1, 1, 1, 0;\n}" \
                 : WGMMA_SUMS_40 : "l"(a), "l"(b), "r"((int)add) : "memory");                                                  \
  }
WGMMA_SS_AT(half, "f16")
WGMMA_SS_AT(bf16, "bf16")
#undef WGMMA_SS_AT
