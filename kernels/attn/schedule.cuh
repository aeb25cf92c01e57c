// Which query tile a thread block computes.
#pragma once
#include "attn/params.cuh"

struct Work { int m_block, head, batch; };

// Blocks start in the order of their index. First the long tiles (under a right mask the later half of a head's, else all), by
// groups of heads whose K and V fit the L2 cache together, longest first. Then the short tiles of all heads, longest first:
// they fill the multiprocessors that the last group of long ones leaves idle, and the launch ends on the shortest.
DEV Work work_of_block(u32 block_idx, const FwdParams& p) {
  const u32 all_heads = (u32)p.batch * p.heads_q, num_long_blocks = p.num_m_blocks - p.num_short_blocks;
  u32 idx = block_idx, first_head = 0, heads = all_heads, num_blocks = p.num_m_blocks;
  if (idx < num_long_blocks * all_heads) {
    const u32 group_idx = idx / (p.heads_in_group * num_long_blocks);
    idx -= group_idx * p.heads_in_group * num_long_blocks;
    first_head = group_idx * p.heads_in_group;
    heads = min((u32)p.heads_in_group, all_heads - first_head);
  } else {
    idx -= num_long_blocks * all_heads;
    num_blocks = p.num_short_blocks;
  }
  const u32 step = idx / heads, batch_head = first_head + (idx - step * heads);
  return {(int)(num_blocks - 1 - step), (int)(batch_head % p.heads_q), (int)(batch_head / p.heads_q)};
}
