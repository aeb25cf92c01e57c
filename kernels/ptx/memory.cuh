// Loads and stores of a stated width, and the asynchronous copy of sm_80 (PTX ISA: "Data Movement and Conversion").
#pragma once
#include "ptx/types.cuh"

// Address of shared memory as the 32-bit number that ldmatrix, cp.async and st.shared take.
DEV u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

struct alignas(16) Chunk { u32 word[4]; };           // 16 bytes: eight 16-bit elements

DEV Chunk load_shared(u32 address) {
  Chunk c;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(c.word[0]), "=r"(c.word[1]), "=r"(c.word[2]), "=r"(c.word[3]) : "r"(address) : "memory");
  return c;
}
DEV void store_shared(u32 address, const Chunk& c) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(address), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}
DEV void store_shared(u32 address, u32 word) { asm volatile("st.shared.b32 [%0], %1;" :: "r"(address), "r"(word) : "memory"); }

// Without a branch: the compiler makes one of `if (condition) *p = ...`, and orders all that it stores by it.
DEV void store_global_if(bool condition, void* p, const Chunk& c) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %0, 0;\n@p st.global.v4.b32 [%1], {%2, %3, %4, %5};\n}"
               :: "r"((int)condition), "l"(p), "r"(c.word[0]), "r"(c.word[1]), "r"(c.word[2]), "r"(c.word[3]) : "memory");
}

#if __CUDA_ARCH__ >= 800
// Copies kBytes (4, 8, 16) of which the first `valid` are read and the rest are zeros; valid = 0 reads nothing.
template <int kBytes> DEV void cp_async(u32 dst, const void* src, int valid) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(dst), "l"(src), "r"(valid) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(dst), "l"(src), "n"(kBytes), "r"(valid) : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when at most kPending of this thread's newest groups are still on their way; a barrier then shows them to others.
template <int kPending> DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" :: "n"(kPending) : "memory"); }
constexpr bool kHasCpAsync = true;
#else
template <int kBytes> DEV void cp_async(u32, const void*, int) {}
DEV void cp_async_commit() {}
template <int kPending> DEV void cp_async_wait() {}
constexpr bool kHasCpAsync = false;
#endif

// Words by which blocks order their work: what a block wrote before a release, barriers included, the block that acquires sees.
#if __CUDA_ARCH__ >= 700
DEV int load_acquire(const int* p) {
  int x;
  asm volatile("ld.acquire.gpu.b32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
DEV void add_release(int* p, int x) { asm volatile("red.release.gpu.global.add.s32 [%0], %1;" :: "l"(p), "r"(x) : "memory"); }
#else
DEV int load_acquire(const int* p) { const int x = *(const volatile int*)p; __threadfence(); return x; }
DEV void add_release(int* p, int x) { __threadfence(); atomicAdd(p, x); }
#endif
