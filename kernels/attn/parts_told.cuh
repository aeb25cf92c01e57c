// Which parts there are, told by the blocks that computed them: who joins them has it at once, not from all lengths again.
#pragma once
#include "attn/parts.cuh"

// Of the border behind block `block`, behind the lse of the parts.
DEV Parts* told_parts(const DecodeParams& p, int block) {
  return (Parts*)((float*)p.partial_lse + 2 * (i64)p.num_blocks * kItemRows) + block;
}
static_assert(sizeof(Parts) == 40, "launch.py disagrees on the size of Parts");

// By a warp of each block.
DEV void tell_parts(const DecodeParams& p) {
  const Parts parts = find_parts(p);
  if (threadIdx.x % 32 == 0) *told_parts(p, blockIdx.x) = parts;
}
