// Which query tile a thread block computes.
#pragma once
#include "attn/params.cuh"

struct Work { int m_block, head, batch; };

// Groups of heads whose K and V fit the L2 cache together; inside a group the last query tiles (the longest, when causal)
// of all heads first, so that short tiles fill the end of the launch.
DEV Work work_of_block(u32 block_idx, const FwdParams& p) {
  const u32 blocks_in_group = (u32)p.heads_in_group * p.num_m_blocks;
  const u32 group_idx = block_idx / blocks_in_group;
  const u32 first_head = group_idx * p.heads_in_group;
  const u32 heads = min((u32)p.heads_in_group, (u32)p.batch * p.heads_q - first_head);
  const u32 idx = block_idx - group_idx * blocks_in_group;
  const u32 m = idx / heads, batch_head = first_head + (idx - m * heads);
  return {(int)(p.num_m_blocks - 1 - m), (int)(batch_head % p.heads_q), (int)(batch_head / p.heads_q)};
}
