// Barriers that copies by threads report to, and that are asked without waiting (PTX ISA: "mbarrier", "cp.async").
#pragma once
#include "ptx/types.cuh"

// Arrives for this thread once all of its cp.async so far have landed. Trap: they count as its own stores, so who reads them by
// wgmma needs fence_async_proxy behind the wait.
DEV void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}
// Whether the phase of this parity is over.
DEV bool mbarrier_test(u32 barrier, u32 parity) {
  u32 over;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
  return over;
}
