// Which tile a thread block computes.
#pragma once
#include "attn/seqlen.cuh"

// The list of tiles of a packed batch, written by varlen_tiles, the most work first: their number, how many are long, how many
// blocks have taken beyond their first (fwd_sm90, where a dense batch has this header too), then the tiles, each with all that a
// block asks of its sequence.
constexpr int kTileListHeader = 4;              // words
struct alignas(16) ListedTile { int tile, batch; Slot q, k; };
DEV Work listed_work(const FwdParams& p, u32 idx, int head) {
  const ListedTile t = ((const ListedTile*)(p.tiles + kTileListHeader))[idx];
  return {t.tile, head, t.batch, t.q, t.k};
}

enum Side { kQuerySide, kKeySide };

// Blocks start in the order of their index. Tiles of a head come longest first: under a right mask the last query tile sees
// most keys, and the first key tile is seen by most queries. First the long tiles (under a right mask the longer half of a
// head's, else all), by groups of heads that fit the L2 cache together. Then the short tiles of all heads: they fill the
// multiprocessors that the last group of long ones leaves idle, and the launch ends on the shortest. Of a packed batch those
// are long that hold three quarters of the work, as the longer half of one causal sequence does.
template <Side kSide> DEV Work work_of_block(u32 block_idx, const FwdParams& p) {
  const u32 heads = kSide == kQuerySide ? p.heads_q : p.heads_k, all_heads = kVarlen ? heads : p.batch * heads;
  const u32 num_tiles = kVarlen ? p.tiles[0] : p.num_tiles;
  const u32 num_long = kVarlen ? p.tiles[1] : p.num_tiles - p.num_short_tiles;
  if (kVarlen && block_idx >= num_tiles * all_heads) return {0, 0, -1, {}, {}}; // the grid is for as many as there may be
  u32 idx = block_idx, first_head = 0, group = all_heads, first_tile = num_long;
  if (idx < num_long * all_heads) {
    const u32 group_idx = idx / (p.heads_in_group * num_long);
    idx -= group_idx * p.heads_in_group * num_long;
    first_head = group_idx * p.heads_in_group;
    group = min((u32)p.heads_in_group, all_heads - first_head);
    first_tile = 0;
  } else {
    idx -= num_long * all_heads;
  }
  const u32 step = idx / group, batch_head = first_head + (idx - step * group), tile = first_tile + step;
  if constexpr (kVarlen) return listed_work(p, tile, batch_head);
  return {(int)(kSide == kQuerySide ? num_tiles - 1 - tile : tile), (int)(batch_head % heads), (int)(batch_head / heads), {}, {}};
}
