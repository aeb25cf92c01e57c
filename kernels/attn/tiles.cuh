// Which tiles of the other side a tile visits, and which of those need no mask.
#pragma once
#include "attn/mask.cuh"
#include "attn/seqlen.cuh"

struct TileRange {
  int begin, end;               // tiles to visit
  int full_begin, full_end;     // tiles of which every row sees every key
  DEV bool is_partial(int tile) const { return tile < full_begin || tile >= full_end; }
};

// Forward: the key tiles, of kBlockN, that query rows [row_begin, row_end) visit. There are none only in a packed batch.
struct KeyTiles : TileRange {
  template <int kBlockN, typename Mask>
  static DEV KeyTiles of(const Mask& mask, int row_begin, int row_end) {
    KeyTiles t = {};
    if (kVarlen && row_begin >= row_end) return t;
    const int key_end = mask.key_end(row_end - 1);
    t.begin = uniform(mask.key_begin(row_begin) / kBlockN);
    t.end = uniform(max((key_end + kBlockN - 1) / kBlockN, t.begin));           // key_end <= 0: nothing is visible
    t.full_begin = uniform((mask.key_begin(row_end - 1) + kBlockN - 1) / kBlockN);
    t.full_end = uniform(max(mask.key_end(row_begin), 0) / kBlockN);
    return t;
  }
};

// Backward: the query tiles, of kBlockM, that see keys of the tile of kBlockN at key_begin, which ends at key_end. It is the
// same relation as KeyTiles: a query tile is visited by a key tile that it visits.
struct QueryTiles : TileRange {
  template <int kBlockM, int kBlockN, typename Mask>
  static DEV QueryTiles of(const Mask& mask, int key_begin, int key_end) {
    QueryTiles t = {};
    if (kVarlen && key_begin >= key_end) return t;
    t.begin = uniform(mask.row_begin(key_begin) / kBlockM);
    t.end = uniform(max((mask.row_end(key_end - 1) + kBlockM - 1) / kBlockM, t.begin));
    t.full_begin = uniform((mask.row_begin(key_end - 1) + kBlockM - 1) / kBlockM);
    // Past the last key stand zeros, whose logit is 0 and not -inf: such a tile always needs the mask.
    t.full_end = key_end - key_begin < kBlockN ? 0 : uniform(max(mask.row_end(key_begin), 0) / kBlockM);
    return t;
  }
};
