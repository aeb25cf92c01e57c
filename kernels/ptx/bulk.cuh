// Sums in bulk: a piece of shared memory is added to global memory by the TMA unit (PTX ISA: "cp.reduce.async.bulk").
#pragma once
#include "ptx/types.cuh"

// Adds `bytes` of floats at `src`, both addresses and `bytes` multiples of 16, where `acts`; a predicate and not a branch, which
// products in flight would have to be waited for. What was written to `src` has been shown by fence_async_proxy.
DEV void bulk_add(float* dst, u32 src, u32 bytes, bool acts) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %3, 0;\n"
               "@p cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n"
               "cp.async.bulk.commit_group;\n}" :: "l"(dst), "r"(src), "r"(bytes), "r"((int)acts) : "memory");
}
// Until at most kPending groups of this thread still read shared memory.
template <int kPending> DEV void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kPending) : "memory");
}
