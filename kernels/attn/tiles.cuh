// Which key tiles a query tile visits, and which of those need no mask.
#pragma once
#include "attn/mask.cuh"

struct KeyTiles {
  int begin, end;               // tiles to visit
  int full_begin, full_end;     // tiles in which every row of the query tile sees every key

  // Query rows [row_begin, row_end), not empty; key tiles of kBlockN.
  template <int kBlockN, typename Mask>
  static DEV KeyTiles of(const Mask& mask, int row_begin, int row_end) {
    KeyTiles t;
    const int key_end = mask.key_end(row_end - 1);
    t.begin = uniform(mask.key_begin(row_begin) / kBlockN);
    t.end = uniform(max((key_end + kBlockN - 1) / kBlockN, t.begin));           // key_end <= 0: nothing is visible
    t.full_begin = uniform((mask.key_begin(row_end - 1) + kBlockN - 1) / kBlockN);
    t.full_end = uniform(max(mask.key_end(row_begin), 0) / kBlockN);
    return t;
  }
  DEV bool is_partial(int tile) const { return tile < full_begin || tile >= full_end; }
};
