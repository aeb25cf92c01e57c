// Barriers of a part of a block (PTX ISA: "Parallel Synchronization": barrier, its short form bar). 0 is __syncthreads's own.
#pragma once
#include "ptx/types.cuh"

DEV void barrier_sync(u32 barrier, u32 threads) {
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
// Whether `x` holds for any of the threads.
DEV bool barrier_or(u32 barrier, u32 threads, bool x) {
  u32 any;
  asm volatile("{\n .reg .pred x;\n setp.ne.u32 x, %3, 0;\n bar.red.or.pred x, %1, %2, x;\n selp.u32 %0, 1, 0, x;\n}"
               : "=r"(any) : "r"(barrier), "r"(threads), "r"((u32)x) : "memory");
  return any;
}
// Arrives without waiting.
DEV void barrier_arrive(u32 barrier, u32 threads) {
  asm volatile("bar.arrive %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
