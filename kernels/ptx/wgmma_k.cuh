// wgmma with a in registers and b in shared memory with k contiguous (PTX ISA: "wgmma.mma_async"): S = Q K^T of kept Q.
#pragma once
#include "ptx/wgmma.cuh"

// d (64 x 64) = a * b, or += where `add`; as wgmma_rs of ptx/wgmma.cuh but for the order of b.
template <typename T> DEV void wgmma_rs_k(float (&d)[32], const u32 (&a)[4], u64 b, bool add);
#define WGMMA_RS_K(T, type)                                                                                                    \
  template <> DEV void wgmma_rs_k<T>(float (&d)[32], const u32 (&a)[4], u64 b, bool add) {                                     \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" WGMMA_NAMES_32 "}, {%32, %33, %34, %35}, "   \
                 "%36, p, 1, 1, 0;\n}"                                                                                         \
                 : WGMMA_SUMS_32 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)add) : "memory");              \
  }
WGMMA_RS_K(half, "f16")
WGMMA_RS_K(bf16, "bf16")
#undef WGMMA_RS_K
