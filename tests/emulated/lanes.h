// The threads of a block as coroutines on one thread of the host: what a kernel asks of its lanes, warp and block.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <setjmp.h>
#include <ucontext.h>
#include <algorithm>
#include <vector>

using std::exp2; using std::fma; using std::fmax; using std::log2; using std::max; using std::min;

#define __global__
#define __launch_bounds__(...)
#define __align__(bytes)
#define static_assert(...)      // NVRTC checks them; some hold for its compiler alone
#define DEV inline

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct Index { u32 x, y, z; };
struct Copy { void* dst; const void* src; int bytes, valid; };
struct Thread {
  ucontext_t context;                           // how it starts
  jmp_buf place;                                // where it goes on: a jump asks nothing of the operating system
  Index index;
  bool has_started, done;
  std::vector<Copy> copies;                     // asynchronous ones since the last commit
  std::vector<std::vector<Copy>> groups;        // those that are committed
};
struct Meeting { u64 values[2][1024]; int arrived, round; };

extern Thread* current;
extern Meeting warp_meetings[32], block_meeting;
extern Index blockIdx, gridDim, blockDim;
extern unsigned char smem[];
#define threadIdx (current->index)
void yield();

// All `size` threads come here, each with a value, before any goes on. Returns the values of all.
template <typename T> const u64* meet(Meeting& m, int size, int own, T value) {
  const int round = m.round;
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  m.values[round & 1][own] = bits;
  if (++m.arrived == size) m.arrived = 0, m.round++;
  else while (m.round == round) yield();
  return m.values[round & 1];
}
template <typename T> T shuffle(T value, int from) {
  const u64* values = meet(warp_meetings[threadIdx.x / 32], 32, threadIdx.x % 32, value);
  T x;
  memcpy(&x, &values[from & 31], sizeof x);
  return x;
}
template <typename T> T __shfl_sync(u32, T x, int lane) { return shuffle(x, lane); }
template <typename T> T __shfl_xor_sync(u32, T x, int bits) { return shuffle(x, (threadIdx.x % 32) ^ bits); }
template <typename T> T __shfl_up_sync(u32, T x, int step) {
  const int lane = threadIdx.x % 32;
  return shuffle(x, lane < step ? lane : lane - step);
}
inline u32 __ballot_sync(u32, bool x) {
  const u64* values = meet(warp_meetings[threadIdx.x / 32], 32, threadIdx.x % 32, (int)x);
  u32 bits = 0;
  for (int lane = 0; lane < 32; lane++) bits |= (values[lane] ? 1u : 0u) << lane;
  return bits;
}
inline bool __any_sync(u32 lanes, bool x) { return __ballot_sync(lanes, x); }
inline void __syncwarp() { meet(warp_meetings[threadIdx.x / 32], 32, threadIdx.x % 32, 0); }
inline void __syncthreads() { meet(block_meeting, blockDim.x, threadIdx.x, 0); }
inline void __threadfence() {}
inline int __ffs(u32 x) { return __builtin_ffs(x); }
