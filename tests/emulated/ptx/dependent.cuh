// In place of kernels/ptx/dependent.cuh: kernels run one after the other.
#pragma once
#include "ptx/types.cuh"

DEV void start_dependents() {}
DEV void wait_for_kernel_before() {}
constexpr bool kCanStartEarly = false;
