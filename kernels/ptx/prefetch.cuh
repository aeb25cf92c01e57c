// Fetching ahead of the load that needs it (PTX ISA: "prefetch").
#pragma once
#include "ptx/types.cuh"

// The line of global memory that holds this address, to the L2 cache.
DEV void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p) : "memory"); }
