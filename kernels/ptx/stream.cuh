// Asynchronous copies of what is read once (PTX ISA: "Cache Eviction Priority Hints", createpolicy; sm_80 and newer). Its lines
// make way in the L2 cache for each other before they do for lengths, results of parts, and code.
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ >= 800
// For cp_async_hinted. `once`: else the lines are like any others.
DEV u64 l2_policy(bool once) {
  u64 first, normal;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return once ? first : normal;
}
// As cp_async.
template <int kBytes> DEV void cp_async_hinted(u32 dst, const void* src, int valid, u64 policy) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
                 :: "r"(dst), "l"(src), "r"(valid), "l"(policy) : "memory");
  else
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %2, %3, %4;"
                 :: "r"(dst), "l"(src), "n"(kBytes), "r"(valid), "l"(policy) : "memory");
}
#else
DEV u64 l2_policy(bool) { return 0; }
template <int kBytes> DEV void cp_async_hinted(u32, const void*, int, u64) {}
#endif
