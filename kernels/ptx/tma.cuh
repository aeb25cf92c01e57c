// Tensor memory accelerator and the barriers it reports to (PTX ISA: "cp.async.bulk.tensor", "mbarrier").
#pragma once
#include "ptx/types.cuh"

struct alignas(64) TensorMap { u64 words[16]; };      // CUtensorMap

// A tile at coordinates (column, row, head, batch) to shared memory; `barrier` counts its bytes. What lies outside is 0.
DEV void tma_load(u32 dst, const TensorMap* map, u32 barrier, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
               :: "r"(dst), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
// The same tile to the L2 cache.
DEV void tma_prefetch(const TensorMap* map, int column, int row, int head, int batch) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];"
               :: "l"(map), "r"(column), "r"(row), "r"(head), "r"(batch) : "memory");
}
DEV void tma_prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" :: "l"(map) : "memory"); }

DEV void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
// Shows initialised barriers to the copies that report to them.
DEV void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEV void mbarrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
DEV void mbarrier_arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory"); }
// Returns once the phase of this parity is over. A fresh barrier passes parity 1.
DEV void mbarrier_wait(u32 barrier, u32 parity) {
  asm volatile("{\n.reg .pred p;\nwait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra wait;\ndone:\n}"
               :: "r"(barrier), "r"(parity) : "memory");
}

// What this thread wrote to shared memory is shown to wgmma and TMA.
DEV void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kRegisters> DEV void set_more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
template <int kRegisters> DEV void set_fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters)); }
