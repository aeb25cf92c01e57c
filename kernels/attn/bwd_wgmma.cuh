// What the kernels of a backward on warpgroups share: bwd_sm90, and for wide heads bwd_dkv_sm90 and bwd_dq_sm90. A block stays
// on its multiprocessor and computes tiles of the launch one after the other, which lie in slots: one that is computed, the
// next. Of warpgroup 0 one warp plans tiles, two prepare what has landed, and one loads; two warpgroups, consumers, compute.
#pragma once
#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/poison.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // of q and k and of v, padded with zeros
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address of dq, dk and dv
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT, kHasMask = kMaskLeft || kMaskRight;

constexpr int kConsumers = 2;                   // warpgroups
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPreparers = 2;                   // warps
constexpr int kSlots = 2;
constexpr int kOtherRegisters = 24, kConsumerRegisters = 240;   // all that a block has

using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, float>;
using Gradient = float[kHeadDim / 2];           // accumulators of 64 rows

struct TmaParams : BwdParams { TensorMap q_map, k_map, v_map, dout_map; };
static_assert(__INTADDR__(&((TmaParams*)0)->q_map) == BWD_TENSOR_MAPS_OFFSET, "launch.py disagrees on TmaParams");

DEV void prefetch_maps(const TmaParams& p) {
  tma_prefetch_map(&p.q_map);
  tma_prefetch_map(&p.k_map);
  tma_prefetch_map(&p.v_map);
  tma_prefetch_map(&p.dout_map);
}

// ------------------------------------------------------------------------------------------------------------------ planning

// A block takes its next tile when it has this many visits of the present one still to load (nears_end: loader -> planner). Taken
// earlier, a long tile would wait for a block that is not the first to be free.
constexpr int kTakeAhead = 2;

// The planner, one warp: takes tiles of the launch, one ahead, where kLate not before the present one nears its end. `take()`, by
// one thread, gives the number of the next; of the first too where `takes`. `tell(work, is_there, slot)`, by all lanes, tells the
// others; the last time there is none.
template <Side kSide, bool kLate, typename Storage, typename Take, typename Tell>
DEV void plan(Storage& s, const FwdParams& p, bool takes, Take take, Tell tell) {
  Ring<kSlots> slot;
  bool is_there = true, is_first = true;
  #pragma unroll 1
  for (; is_there; slot.next(), takes = true, is_first = false) {
    mbarrier_wait(shared_address(&s.work_free[slot.stage]), slot.phase ^ 1);
    if constexpr (kLate)
      if (!is_first) mbarrier_wait(shared_address(&s.nears_end), slot.stage ^ 1);    // as many phases as tiles before
    u32 next = blockIdx.x;
    if (thread_index() % 32 == 0 && takes) next = take();
    const u32 idx = uniform(next), heads = kSide == kQuerySide ? p.heads_q : p.heads_k;
    is_there = idx < (kVarlen ? p.tiles[0] * heads : (u32)p.num_tiles * p.batch * heads);
    Work work = {0, 0, -1, {}, {}};
    if (is_there) work = work_of_block<kSide>(idx, p);
    tell(work, is_there, slot.stage);
  }
}

// A tile of keys, of one key head, as the planner tells it to the others; read where it is used (hence volatile), as the main
// loop needs every register.
struct KeyTile {
  const RowFacts<float>* gRows;                 // of row 0 of the first query head of the group
  Element* gDK;                                 // of its first key
  Element* gDV;
  int first_head, first_key;                    // of the group; of the tile
  int rows;                                     // of dK and dV, to write
  int seqlen_q, seqlen_k;
  int row_q, batch_axis;                        // for TMA: row 0 of the queries, the last coordinate
  int begin, end, full_begin, full_end;         // QueryTiles
  int heads;                                    // of the group
  int visits;                                   // query tiles of all of them; < 0: there are no more tiles
};

// What the planner knows of it. All lanes together.
template <int kBlockM, int kBlockN> struct KeyWork {
  const Sequence seq;
  int first_key, head_k, heads, first_head, visits;
  QueryTiles tiles;

  DEV KeyWork(const BwdParams& p, const Work& work, bool is_there) : seq(p, work) {
    heads = p.heads_q / p.heads_k;
    first_key = work.tile * kBlockN, head_k = work.head, first_head = work.head * heads;
    tiles = QueryTiles::of<kBlockM, kBlockN>(HeadMask(p, seq.seqlen_q, seq.seqlen_k), first_key,
                                             min(first_key + kBlockN, seq.seqlen_k));
    visits = is_there ? (tiles.end - tiles.begin) * heads : -1;
  }
  DEV int row_k() const { return seq.first_k + first_key; }     // for TMA
  // By one thread.
  DEV void tell(volatile KeyTile& t, const BwdParams& p) const {
    t.heads = heads;
    t.visits = visits;
    t.begin = tiles.begin;
    t.end = tiles.end;
    t.full_begin = tiles.full_begin;
    t.full_end = tiles.full_end;
    t.first_head = first_head;
    t.first_key = first_key;
    t.rows = seq.rows_k - first_key;
    t.seqlen_q = seq.seqlen_q;
    t.seqlen_k = seq.seqlen_k;
    t.row_q = seq.first_q;
    t.batch_axis = seq.batch;
    t.gRows = (const RowFacts<float>*)p.rows + seq.row_index(first_head);
    t.gDK = seq.key_rows((Element*)p.dk, p.dk_strides, head_k) + first_key * p.dk_strides.row;
    t.gDV = seq.key_rows((Element*)p.dv, p.dv_strides, head_k) + first_key * p.dv_strides.row;
  }
};

// A query tile of a query head of the group. They come last first, and each of all heads before the next: under a right mask the
// key tiles of a head then begin with the same one and stay in step, and find it in the L2 cache, or, DETERMINISTIC, take their
// turns soon.
struct Visit {
  int head, tile;
  DEV void advance(int heads) {
    if (++head == heads) tile--, head = 0;
  }
  DEV void advance(const volatile KeyTile& t) { advance(uniform(t.heads)); }
};
DEV Visit first_visit(const volatile KeyTile& t) { return {0, uniform(t.end) - 1}; }
// Whether some pairs of it do not see each other.
DEV bool is_partial(const volatile KeyTile& t, const Visit& v) { return (v.tile < t.full_begin) | (v.tile >= t.full_end); }

// ----------------------------------------------------------------------------------------------------------------- preparing

// The preparers come behind the planner, the loader last.
constexpr int kPreparing = kPreparers * 32;     // threads
DEV u32 preparer() { return thread_index() - 32; }
DEV void sync_preparers() { barrier_sync(1, kPreparing); }
DEV bool any_preparer(bool x) { return barrier_or(1, kPreparing, x); }

// Zeros in place of rows from `rows` on: what TMA read there are rows of the next sequence.
template <typename Layout> DEV void clear_rows(u32 tile, int rows) {
  #pragma unroll 1
  for (u32 at = preparer() * 16; at < Layout::kBytes; at += kPreparing * 16)
    if (Layout::row_at(at) >= rows) store_shared(tile + at, Chunk{});
}

DEV float poison() { return __int_as_float(0x7fffffff); }
// NaN and Inf of operands that a product would carry, times a 0 of P or dS, to what does not see them: they become 0 in the
// tile, and by a poison() that `mark(row)` leaves for the row they go to exactly the pairs that see each other. There they
// become NaN in all columns; a full tile, which needs none of this, keeps to the columns that they stand in.
template <typename Layout, typename Mark> DEV void separate_nonfinite(u32 tile, Mark mark) {
  clear_nonfinite<Element, Layout, Layout::kRows, kPreparing>(tile, preparer(), mark);
}

// What must not be in Q and dO of a stage, of which `rows` exist. Of a partial tile they are looked through if any of the facts,
// of which each thread has some, say that there may be something (may_be_nonfinite).
template <typename Layout, typename Storage>
DEV void clear_queries(Storage& s, u32 stage, int rows, bool partial, bool may_be_poisoned) {
  const bool clears = kVarlen && rows < Layout::kRows;
  if (clears) {
    clear_rows<Layout>(shared_address(s.sQ[stage]), rows);
    clear_rows<Layout>(shared_address(s.sDO[stage]), rows);
  }
  const bool separates = kHasMask && partial && any_preparer(may_be_poisoned);  // a barrier: rows are poisoned behind their facts
  if (separates) {
    const auto mark = [&](int row) { s.lse[stage][row] = poison(); };
    separate_nonfinite<Layout>(shared_address(s.sQ[stage]), mark);
    separate_nonfinite<Layout>(shared_address(s.sDO[stage]), mark);
  }
  if (clears || separates) fence_async_proxy();
}

// ----------------------------------------------------------------------------------------------------------------- computing

// The consumers take turns to start products: beside the exponentials of one run the products of the other.
DEV void first_turn(int consumer) { if (consumer == 0) barrier_arrive(5, kConsumers * 128); }
DEV void my_turn(int consumer) { barrier_sync(5 + consumer, kConsumers * 128); }
DEV void your_turn(int consumer) { barrier_arrive(6 - consumer, kConsumers * 128); }

DEV void clear(Gradient& acc) {
  #pragma unroll
  for (int i = 0; i < kHeadDim / 2; i++) acc[i] = 0.f;
}
// This lane's two of the eight numbers from `x` on: the columns of an accumulator.
struct alignas(8) Pair { float x[2]; };
DEV Pair lane_pair(const float* x) { return *(const Pair*)(x + thread_index() % 4 * 2); }

// Writes a gradient, a warp its 16 rows from `first_row` on; those past `rows_used` are zeros.
DEV void write_gradient(Element* dst, i64 row_stride, const Gradient& acc, float scale, int first_row, int rows, int rows_used,
                        int cols) {
  const u32 lane = thread_index() % 32;
  const int column = lane % 4 * 8;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + r * 8 + lane / 4;
    char* g = (char*)(dst + row * row_stride + column);
    #pragma unroll
    for (int d = 0; d < kHeadDim / 8; d += 4) {
      u32 word[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        word[j] = pack2<Element>(acc[(d + j) * 4 + 2 * r] * scale, acc[(d + j) * 4 + 2 * r + 1] * scale);
        if (kVarlen && row >= rows_used) word[j] = 0;
      }
      const Chunk c = transpose_quad(word, lane % 4);
      if constexpr (kWholeHeads && kOutVecBytes == 16) store_global_if(row < rows, g + d * 16, c);
      else if (row < rows) store_chunk<kOutVecBytes>(g + d * 16, c, kWholeHeads ? 16 : (cols - d * 8 - column) * 2);
    }
  }
}
