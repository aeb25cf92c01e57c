// A barrier that is asked, not waited for (ptx/tma.cuh: those that are).
#pragma once
#include "ptx/types.cuh"

DEV bool mbarrier_test(u32 barrier, u32 parity) {
  u32 done;
  asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
               : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
  return done;
}
