// Lengths are read by 32 requests at a time, each time from far away: ask for all of them before the first are waited for.
#pragma once
#include "attn/decode.cuh"
#include "ptx/prefetch.cuh"

// By a warp, a line of 128 bytes each lane; beyond them they come when they are read.
DEV void prefetch_lengths(const DecodeParams& p) {
  const int bytes = p.batch * (p.decode_int64_lengths & 1 ? 8 : 4), at = (int)(threadIdx.x % 32) * 128;
  if (p.cache_seqlens && at < bytes) prefetch_l2((const char*)p.cache_seqlens + at);
}
