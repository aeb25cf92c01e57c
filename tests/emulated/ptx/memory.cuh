// In place of kernels/ptx/memory.cuh. What an asynchronous copy brings is there when it has been waited for, and NaN before.
#pragma once
#include "ptx/types.cuh"

DEV u32 shared_address(const void* p) { return (u32)((const unsigned char*)p - smem); }
constexpr bool kHasCpAsync = ASYNCHRONOUS;
template <int kBytes> DEV void cp_async(u32 dst, const void* src, int valid) {
  memset(smem + dst, 0xff, kBytes);
  current->copies.push_back({smem + dst, src, kBytes, valid});
}
DEV void cp_async_commit() {
  current->groups.push_back(current->copies);
  current->copies.clear();
}
template <int kPending> DEV void cp_async_wait() {
  while ((int)current->groups.size() > kPending) {
    for (const Copy& c : current->groups[0]) {
      memset(c.dst, 0, c.bytes);
      if (c.valid) memcpy(c.dst, c.src, c.valid);
    }
    current->groups.erase(current->groups.begin());
  }
}
