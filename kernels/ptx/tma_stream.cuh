// As ptx/stream.cuh, by the tensor memory accelerator (PTX ISA: "cp.async.bulk.tensor", L2::cache_hint).
#pragma once
#include "ptx/stream.cuh"
#include "ptx/tma.cuh"

// As tma_load; `policy`: of l2_policy.
DEV void tma_load_hinted(u32 dst, const TensorMap* map, u32 barrier, int column, int row, int head, int batch, u64 policy) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
               "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;"
               :: "r"(dst), "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(head), "r"(batch), "l"(policy) : "memory");
}
