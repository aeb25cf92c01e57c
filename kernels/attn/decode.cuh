// Few queries on a cache of keys and values: lengths, where a key lies, and which block computes what.
//
// The query heads that share a key head are packed: row r of a (request, key head) is query r / group, query head
// head_k * group + r % group. BLOCK_M such rows on all keys that they see are an item; its key tiles of BLOCK_N are the work.
#pragma once
#include "attn/tiles.cuh"

constexpr bool kPaged = PAGED;                  // else requests have their rows of the cache
constexpr bool kAppends = APPENDS;              // k_new and v_new go behind the keys in the cache
constexpr bool kFixedSplits = FIXED_SPLITS;     // num_splits parts an item, else equal shares a block
constexpr int kItemRows = BLOCK_M, kTileKeys = BLOCK_N;
constexpr int kItemCost = ITEM_COST;            // what an item costs beside its tiles, its Q and its results, in tiles
constexpr int kFewTiles = 16;                   // a share with fewer: a tile more is more than an item costs while others wait
static_assert(kItemCost < kFewTiles, "every share has a tile");

// A forward's params, and these. k and v are the cache: [cache_batch, seqlen_k, heads_k, head_dim], or pages
// [num_slots, page_size, heads_k, head_dim], of which seqlen_k = max_pages * page_size keys may be a request's.
struct DecodeParams : FwdParams {
  const void* k_new;            // APPENDS: [batch, seqlen_new, heads_k, head_dim]
  const void* v_new;            // APPENDS: [batch, seqlen_new, heads_k, head_dim_v]
  const int* cache_seqlens;     // [batch] keys in the cache before the new ones; null: fixed_seqlen for all
  const int* cache_batch_idx;   // [batch] which of the cache is a request's; null: its own number. Not PAGED
  const int* block_table;       // PAGED: [batch, max_pages]
  void* partial_out;            // [slots, BLOCK_M, HEAD_DIM_V] of Real: outputs of parts of items, each for itself
  void* partial_lse;            // [slots, BLOCK_M] of Real: their lse in base 2
  Strides k_new_strides, v_new_strides;
  i64 block_table_stride;       // elements
  int num_slots;                // pages, or requests that the cache holds
  int page_size;                // PAGED
  int seqlen_new;               // APPENDS
  int fixed_seqlen;
  int num_splits;               // FIXED_SPLITS
  int num_row_tiles;            // items of one request and key head
  int num_blocks;               // of the launch
  int decode_int64_lengths;     // bits 0 and 1: cache_seqlens and cache_batch_idx are int64
};

#define MEETS(field) static_assert(__INTADDR__(&((DecodeParams*)0)->field) == OFFSET_##field, #field)
MEETS(k_new); MEETS(v_new); MEETS(cache_seqlens); MEETS(cache_batch_idx); MEETS(block_table); MEETS(partial_out);
MEETS(partial_lse); MEETS(k_new_strides); MEETS(v_new_strides); MEETS(block_table_stride); MEETS(num_slots); MEETS(page_size);
MEETS(seqlen_new); MEETS(fixed_seqlen); MEETS(num_splits); MEETS(num_row_tiles); MEETS(num_blocks); MEETS(decode_int64_lengths);
#undef MEETS
static_assert(sizeof(DecodeParams) == DECODE_PARAMS_BYTES, "launch.py disagrees on the size of DecodeParams");

// ------------------------------------------------------------------------------------------------------ lengths, the cache

DEV int group_of(const DecodeParams& p) { return (u32)p.heads_q / (u32)p.heads_k; }      // query heads that share a key head
DEV int num_rows(const DecodeParams& p) { return p.seqlen_q * group_of(p); }

// Keys of a request in the cache before this call. Cut to what there is room for, as all lengths are.
DEV int num_cached(const DecodeParams& p, int batch) {
  const int given = p.cache_seqlens ? p.cache_seqlens[p.decode_int64_lengths & 1 ? 2 * batch : batch] : p.fixed_seqlen;
  return min(max(given, 0), p.seqlen_k);
}
DEV int num_keys(const DecodeParams& p, int cached) { return kAppends ? min(cached + p.seqlen_new, p.seqlen_k) : cached; }

// Where the keys of one request lie.
struct Cache {
  const DecodeParams& p;
  int batch, cached;

  DEV Cache(const DecodeParams& params, int batch_, int cached_) : p(params), batch(batch_), cached(cached_) {}
  DEV bool is_new(int key) const { return kAppends && key >= cached; }
  // PAGED: where the page of a key below seqlen_k stands.
  DEV const int* entry(int key) const { return p.block_table + batch * p.block_table_stride + (u32)key / (u32)p.page_size; }
  // A page, or a request's part of the cache, that exists, whatever a table says.
  DEV int slot_of(int entry) const { return min(max(entry, 0), p.num_slots - 1); }
  // Of a key below seqlen_k.
  DEV int slot(int key) const {
    if (kPaged) return slot_of(*entry(key));
    return slot_of(p.cache_batch_idx ? p.cache_batch_idx[p.decode_int64_lengths & 2 ? 2 * batch : batch] : batch);
  }
  // First element of a head of a key of p.k or p.v, `slot` being its slot(key).
  template <typename T> DEV T* row(T* x, const Strides& s, int head_k, int key, int slot) const {
    return x + slot * s.batch + (kPaged ? (u32)key % (u32)p.page_size : key) * s.row + head_k * s.head;
  }
  // The same of p.k_new or p.v_new for a key that is new.
  template <typename T> DEV T* new_row(T* x, const Strides& s, int head_k, int key) const {
    return x + batch * s.batch + (key - cached) * s.row + head_k * s.head;
  }
};

// ------------------------------------------------------------------------------------------------------------ items, shares

using KeyMask = Mask<MASK_LEFT, MASK_RIGHT>;

// The key tiles that rows of an item see; one, of which nothing is visible, for an item that sees none.
DEV KeyTiles tiles_of_rows(const DecodeParams& p, const KeyMask& mask, int row_tile) {
  const int first = row_tile * kItemRows, last = min(first + kItemRows, num_rows(p)) - 1, group = group_of(p);
  KeyTiles tiles = KeyTiles::of<kTileKeys>(mask, first / group, last / group + 1);
  tiles.end = max(tiles.end, tiles.begin + 1);
  return tiles;
}
DEV int num_tiles_of_rows(const DecodeParams& p, int seqlen_k, int row_tile) {
  const int first = row_tile * kItemRows, last = min(first + kItemRows, num_rows(p)) - 1, group = group_of(p);
  const KeyMask mask(p, p.seqlen_q, seqlen_k);
  const int begin = mask.key_begin(first / group) / kTileKeys;
  return max((mask.key_end(last / group) + kTileKeys - 1) / kTileKeys - begin, 1);
}

// What a block computes of one item.
struct DecodeItem {
  int batch, row_tile, head_k;
  int cached, seqlen_k;
  KeyTiles tiles;               // of the item
  int begin, end;               // those of the block
  i64 slot;                     // where its partial results go; -1: it has all tiles and writes the outputs
};

// A step of the work on all items, which lie in the order of row tiles, requests, key heads: blocks that are at different rows
// of the same keys are there at about the same time, so that the second finds them in the L2 cache. The steps of an item are
// those that it costs and then its tiles.
struct StepPlace { int batch, row_tile, head_k, step, num_tiles; };     // step: counted from the item's first

// The tiles of an item of 32 requests, one a lane, and the sums of those of all key heads up to each. All lanes of a warp
// together, here and below. Tiles of all items are below 2^31, what the items cost with them: the host refuses more than there
// may be.
struct WorkOf32 {
  int tiles, own, sum;
  DEV WorkOf32(const DecodeParams& p, int row_tile, int first) {
    const int batch = first + threadIdx.x % 32;
    tiles = batch < p.batch ? num_tiles_of_rows(p, num_keys(p, num_cached(p, batch)), row_tile) : 0;
    own = sum = tiles * p.heads_k;
    #pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffff, sum, step);
      if (threadIdx.x % 32 >= step) sum += other;
    }
  }
  DEV int total() const { return __shfl_sync(0xffffffff, sum, 31); }
};

// Equal shares: of all steps block `block` has those from begin(block) to begin(block + 1), `blocks` blocks have any.
struct Shares {
  WorkOf32 work;                // of the first rows and requests: often of all
  int cost;                     // steps of an item before its first tile
  int blocks, each, more;       // `more` blocks have one step more

  DEV Shares(const DecodeParams& p) : work(p, 0, 0) {
    int total = work.total();
    // Not unrolled: many calls need none of it, and instructions that a kernel starts with come from far away.
    #pragma unroll 1
    for (int t = 0; t < p.num_row_tiles; t++)
      #pragma unroll 1
      for (int first = t ? 0 : 32; first < p.batch; first += 32) total += WorkOf32(p, t, first).total();
    const int cost_of_all = p.batch * p.num_row_tiles * p.heads_k * kItemCost;
    const bool is_much = total >= p.num_blocks * kFewTiles;
    cost = is_much ? kItemCost : 0, total += is_much ? cost_of_all : 0;
    blocks = min(total, p.num_blocks), each = (u32)total / (u32)blocks, more = total - each * blocks;
  }
  DEV int begin(int block) const { return each * block + min(block, more); }
  DEV int block_of(int step) const {
    const int of_larger = more * (each + 1);
    return step < of_larger ? (u32)step / (u32)(each + 1) : more + (u32)(step - of_larger) / (u32)each;
  }

  DEV StepPlace place(const DecodeParams& p, int step) const {
    const int cost_of_request = cost * p.heads_k;
    const auto steps_of_32 = [&](const WorkOf32& w, int first) {
      return w.total() + cost_of_request * min(p.batch - first, 32);
    };
    WorkOf32 w = work;
    int row_tile = 0, first = 0;
    while (step >= steps_of_32(w, first)) {
      step -= steps_of_32(w, first);
      first += 32;
      if (first >= p.batch) first = 0, row_tile++;
      w = WorkOf32(p, row_tile, first);
    }
    const int before = w.sum - w.own + cost_of_request * (threadIdx.x % 32);            // steps of the requests before a lane's
    const int at = __ffs(__ballot_sync(0xffffffff, before + w.own + cost_of_request > step)) - 1, batch = first + at;
    step -= __shfl_sync(0xffffffff, before, at);
    const int n = __shfl_sync(0xffffffff, w.tiles, at), head_k = (u32)step / (u32)(n + cost);
    return {batch, row_tile, head_k, step - head_k * (n + cost), n};
  }
};
// A block has at most two items that it shares with others: its first, and its last.
DEV i64 slot_of_part(int block, bool is_first) { return 2 * (i64)block + !is_first; }

// FIXED_SPLITS: part `split` of an item's tiles; slots are numbered by item and part. A part may be empty: nobody computes it.
DEV int split_begin(const DecodeParams& p, int num_tiles, int split) { return (int)((i64)num_tiles * split / p.num_splits); }
DEV int num_parts(const DecodeParams& p) { return p.batch * p.num_row_tiles * p.heads_k * p.num_splits; }

// The items of this block, one after the other. All lanes of a warp together; each warp has its own.
struct DecodeItems {
  DecodeItem item;
  bool is_valid;                // whether there is an item
  bool is_first;
  int left;                     // steps of the block behind the item; FIXED_SPLITS: the next part
  int cost;                     // of an item

  DEV void set(const DecodeParams& p, int batch, int row_tile, int head_k) {
    item.batch = batch, item.row_tile = row_tile, item.head_k = head_k;
    item.cached = uniform(num_cached(p, batch));
    item.seqlen_k = num_keys(p, item.cached);
    item.tiles = tiles_of_rows(p, KeyMask(p, p.seqlen_q, item.seqlen_k), row_tile);
  }
  // Of the item, from a step of it on what the block has, which is a tile at least.
  DEV void take(int step, int num_tiles) {
    const int end = min(num_tiles + cost, step + left);
    left -= end - step;
    item.begin = item.tiles.begin + max(step - cost, 0), item.end = item.tiles.begin + end - cost;
    item.slot = item.end - item.begin == num_tiles ? -1 : slot_of_part(blockIdx.x, is_first);
    is_first = false;
  }
  DEV void next_part(const DecodeParams& p) {
    is_valid = false;
    for (; left < num_parts(p) && !is_valid; left += gridDim.x) {
      const int of_item = left / p.num_splits, split = left % p.num_splits, of_row_tile = of_item / p.heads_k;
      set(p, of_row_tile / p.num_row_tiles, of_row_tile % p.num_row_tiles, of_item % p.heads_k);
      const int n = item.tiles.end - item.tiles.begin;
      const int begin = split_begin(p, n, split), end = split_begin(p, n, split + 1);
      item.begin = item.tiles.begin + begin, item.end = item.tiles.begin + end;
      item.slot = end - begin == n ? -1 : left;
      is_valid = begin < end;
    }
  }
  DEV explicit DecodeItems(const DecodeParams& p) {
    if constexpr (kFixedSplits) {
      left = blockIdx.x;
      next_part(p);
    } else {
      const Shares shares(p);
      is_valid = blockIdx.x < shares.blocks, is_first = true;
      if (!is_valid) return;
      const int first = shares.begin(blockIdx.x);
      left = shares.begin(blockIdx.x + 1) - first, cost = shares.cost;
      const StepPlace place = shares.place(p, first);
      set(p, place.batch, place.row_tile, place.head_k);
      take(place.step, place.num_tiles);
    }
  }
  DEV void next(const DecodeParams& p) {
    if constexpr (kFixedSplits) {
      next_part(p);
    } else {
      is_valid = left > cost;
      if (!is_valid) return;
      if (item.head_k + 1 < p.heads_k) item.head_k++;
      else if (item.batch + 1 < p.batch) set(p, item.batch + 1, item.row_tile, 0);
      else set(p, 0, item.row_tile + 1, 0);
      take(0, item.tiles.end - item.tiles.begin);
    }
  }
};

// ---------------------------------------------------------------------------------------------------------------- appending

// New keys and values to the cache, by all threads of the launch. Who attends to them reads them where they were given.
template <typename T> DEV void append(const DecodeParams& p) {
  if constexpr (!kAppends) return;
  const i64 rows = (i64)p.batch * p.seqlen_new * p.heads_k, warps = (i64)gridDim.x * (blockDim.x / 32);
  for (i64 at = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; at < rows; at += warps) {
    const int head_k = (int)(at % p.heads_k);
    const i64 token = at / p.heads_k;
    const int batch = (int)(token / p.seqlen_new), cached = num_cached(p, batch);
    const int key = cached + (int)(token - (i64)batch * p.seqlen_new);
    if (key >= p.seqlen_k) continue;            // the cache is full
    const Cache cache(p, batch, cached);
    const int slot = cache.slot(key);
    T* k = cache.row((T*)p.k, p.k_strides, head_k, key, slot);
    T* v = cache.row((T*)p.v, p.v_strides, head_k, key, slot);
    const T* k_new = cache.new_row((const T*)p.k_new, p.k_new_strides, head_k, key);
    const T* v_new = cache.new_row((const T*)p.v_new, p.v_new_strides, head_k, key);
    for (int col = threadIdx.x % 32; col < p.head_dim; col += 32) k[col] = k_new[col];
    if constexpr (!V_IS_K)                      // else values are the first columns of keys
      for (int col = threadIdx.x % 32; col < p.head_dim_v; col += 32) v[col] = v_new[col];
  }
}
