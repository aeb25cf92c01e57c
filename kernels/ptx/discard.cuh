// Data that nobody reads again need not go from the L2 cache to memory (PTX ISA: "discard").
#pragma once
#include "ptx/types.cuh"

// Leaves 128 bytes from `p` on, a multiple of 128, without a value.
DEV void discard(void* p) { asm volatile("discard.global.L2 [%0], 128;" :: "l"(p) : "memory"); }
