// Behind a decoding kernel: which items several blocks have a part of, and where the parts are.
#pragma once
#include "attn/decode.cuh"

// The parts of an item, and which share of joining them is had at the border between two blocks: the `share`-th of `shares`.
struct Parts {
  int batch, row_tile, head_k;
  int count;                    // at most 1: nobody needs to join them
  int share, shares;
  i64 first, step;              // FIXED_SPLITS: slot of split 0, tiles of the item; else slots of parts 0 and 1

  DEV i64 slot(const DecodeParams& p, int part) const {
    // With fewer tiles than splits a part is a tile, and its split the last that begins at or before it.
    if constexpr (kFixedSplits)
      return first + (step < p.num_splits ? ((part + 1) * (i64)p.num_splits + step - 1) / step - 1 : part);
    return part == 0 ? first : step + slot_of_part(part - 1, true);
  }
};

// Those of the item that the border behind a block splits; FIXED_SPLITS: of an item. kBlocks blocks of this launch have the
// same. All lanes of a warp together.
template <int kBlocks = 1> DEV Parts find_parts(const DecodeParams& p) {
  Parts parts = {};
  if constexpr (kFixedSplits) {
    const int item = blockIdx.x / kBlocks, of_row_tile = item / p.heads_k;
    parts.batch = of_row_tile / p.num_row_tiles, parts.row_tile = of_row_tile % p.num_row_tiles;
    parts.head_k = item % p.heads_k;
    const int num_tiles = num_tiles_of_rows(p, num_keys(p, num_cached(p, parts.batch)), parts.row_tile);
    parts.count = min(num_tiles, p.num_splits), parts.shares = 1;
    parts.first = (i64)item * p.num_splits, parts.step = num_tiles;
  } else {
    const Shares shares(p);
    const int block = blockIdx.x / kBlocks;
    if (block + 1 >= shares.blocks) return parts;
    const int border = shares.begin(block + 1);
    const StepPlace place = shares.place(p, border);
    if (place.step <= shares.cost) return parts;        // between two items
    const int begin = border - place.step + shares.cost, first_block = shares.block_of(begin);      // the item's first tile
    parts.batch = place.batch, parts.row_tile = place.row_tile, parts.head_k = place.head_k;
    parts.count = shares.block_of(begin + place.num_tiles - 1) - first_block + 1;
    parts.share = block - first_block, parts.shares = parts.count - 1;
    parts.first = slot_of_part(first_block, shares.begin(first_block) >= begin - shares.cost);
    parts.step = slot_of_part(first_block + 1, true);
  }
  return parts;
}
