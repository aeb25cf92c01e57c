// Barriers of buffers that threads fill by cp.async, from sm_80 on (PTX ISA: "mbarrier", "cp.async.mbarrier.arrive").
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ >= 800
DEV void ring_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Arrives for this thread once all of its cp.async so far have landed.
DEV void ring_arrive_copied(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
DEV void ring_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" :: "r"(barrier) : "memory");
}
// Returns when the phase of this parity is over.
DEV void ring_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}"
               :: "r"(barrier), "r"(parity) : "memory");
#else
  asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}"
               :: "r"(barrier), "r"(parity) : "memory");
#endif
}
#else
DEV void ring_init(u32, int) {}
DEV void ring_arrive_copied(u32) {}
DEV void ring_arrive(u32) {}
DEV void ring_wait(u32, u32) {}
#endif
