// Barriers that count bytes and, apart from them, arrivals (PTX ISA: "mbarrier.expect_tx", "mbarrier.arrive" with a count).
#pragma once
#include "ptx/types.cuh"

// The phase also waits for so many bytes more. To come before the arrivals that end the phase.
DEV void mbarrier_expect_more(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
// Arrives for `count` threads.
DEV void mbarrier_arrive_for(u32 barrier, u32 count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(count) : "memory");
}
