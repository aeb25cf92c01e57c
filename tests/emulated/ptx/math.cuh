// In place of kernels/ptx/math.cuh.
#pragma once
#include "ptx/types.cuh"

DEV float exp2_fast(float x) { return exp2f(x); }
DEV double exp2_fast(double x) { return exp2(x); }
template <typename R> DEV R reciprocal(R x) { return 1 / x; }
template <typename R> DEV R infinity(R) { return INFINITY; }
DEV float tanh_exp2(float x) { return tanhf(x); }
DEV double tanh_exp2(double x) { return tanh(x); }
