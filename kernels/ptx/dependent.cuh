// Kernels that start while the one before them ends (PTX ISA: griddepcontrol; CUDA: programmatic dependent launch). Trap: what
// such a kernel reads or writes before it has waited may still be in use. Every thread waits, or the kernel ends, for those behind
// it, before the one before it has. A kernel that starts early itself must not let others start before it has waited.
#pragma once
#include "ptx/types.cuh"

#if __CUDA_ARCH__ >= 900
// Lets a kernel behind this one start as soon as all blocks of this one have come here.
DEV void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
// Returns when the kernel before has ended and all that it wrote can be seen; at once unless this one was started early.
DEV void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
constexpr bool kCanStartEarly = true;
#else
DEV void start_dependents() {}
DEV void wait_for_kernel_before() {}
constexpr bool kCanStartEarly = false;
#endif
