// Attention forward on Hopper's warpgroup tensor cores: float16 and bfloat16, sm_90a.
//
//   q [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_k, head_dim | head_dim_v]  ->  out, lse
//
// A block stays on its multiprocessor and computes tiles of kBlockM query rows of one head, one after the other. Of warpgroup 0
// one warp plans, one loads K and V and one Q by TMA; each of the kConsumers other warpgroups owns 64 rows from Q to O.
//   work_ready[i]:  planner -> all, which tile is next                  work_free[i]: all -> planner, they have done with it
//   nears_end:      loader -> planner, few key tiles are left to load: time to take the next tile
//   q_ready[c]:     loader -> consumer c, its Q has landed              q_free[c]: back, it has been multiplied
//   k_ready[s]:     loader -> consumers, a key tile of K has landed     k_free[s]: back, all have multiplied by it
//   v_ready[s], v_free[s]: the same of V
// Key tiles come last first. In one step a consumer starts S = Q K^T of the next key tile and O += P V of this one, and computes
// P of the next while PV is running (FlashAttention-3, Shah et al. 2024, Algorithm 2). Beside the last O of a tile begins the
// first S of the next. A consumer skips key tiles that none of its rows sees. Consumers take turns to start products (kTurns),
// so that the softmax of one runs beside the products of another; the last O of a tile takes none.
// The running max lags: it moves only when a logit would exceed it by kMaxLag, so O is seldom rescaled.
// V under a mask is taken to be finite: NaN and Inf of a key times P = 0 are NaN, so a tile whose O is finite had none. One whose O
// is not comes again by the planner, and with it all later tiles of the block are computed with care: V of partly masked key tiles
// is looked through, and what is not finite goes to the rows that see it. The bits of a row are the same either way.
// Not here: arrays that TMA cannot address (fwd_sm80). What was tried, and what a step costs: docs/fwd_sm90.md.
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/poison.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/softmax.cuh"
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

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kConsumers = CONSUMERS;           // warpgroups
constexpr int kBlockM = kConsumers * 64;
constexpr int kBlockN = BLOCK_N;
constexpr int kStages = STAGES;                 // of K and of V
constexpr bool kTurns = TURNS;
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim_v fills kHeadDimV
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address of out
constexpr int kThreads = (kConsumers + 1) * 128;
// All that a block has. O of 256 columns takes what the loader can do without.
constexpr int kLoaderRegisters = kConsumers == 3 ? 32 : kHeadDimV == 256 ? 24 : 40;
constexpr int kConsumerRegisters = kConsumers == 3 ? 160 : kHeadDimV == 256 ? 240 : 232;
static_assert(kBlockN % 16 == 0, "whole steps of P V");
static_assert((kBlockM - 65) / kBlockN + 1 < kStages, "key tiles behind a consumer's own need no place of its last V");

using QLayout = PanelLayout<64, kHeadDim>;      // of one consumer
using KLayout = PanelLayout<kBlockN, kHeadDim>;
using VLayout = PanelLayout<kBlockN, kHeadDimV>;
using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, float>;

// Row 0 of a tile. Where tiles do not fill a head, and the last rows see most keys, the first tile is the one that lacks rows, as it
// takes least time: its first consumers then have none, whose rows would be negative.
DEV int first_row_of(const Sequence& seq, int tile) {
  const int lacks = kMaskRight ? (kBlockM - 1) - (seq.rows_q + kBlockM - 1) % kBlockM : 0;
  return tile * kBlockM - lacks / 64 * 64;
}

// A tile of the launch, as the planner tells it to the others.
struct alignas(16) Tile {
  TileRange keys;                               // key tiles that any row sees
  TileRange own[kConsumers];                    // that the rows of a consumer see; begin = end = keys.begin: none
  int seqlen_q, seqlen_k;
  int first_row;
  int first_q, first_k, head_k;                 // for TMA: its first row, row 0 of the keys
  Work work;                                    // batch < 0: none, kNoneYet or kNoMore
  bool is_careful;                              // V is looked through
  bool not_finite;                              // some of its O, as consumers found
  // Whether what is not finite may have come from keys that its rows do not see.
  DEV bool is_doubtful() const { return not_finite && !is_careful && (keys.begin < keys.full_begin || keys.full_end < keys.end); }
};
// One of those that are being computed may come again; none does.
constexpr int kNoneYet = -1, kNoMore = -2;

// Without a mask, and a batch that is not packed, the only keys that no row sees are the zeros past the end.
constexpr bool kChecksV = kMaskLeft || kMaskRight || kVarlen;
constexpr int kSlots = 2;                       // for tiles of the launch: one that is computed, the next

struct alignas(1024) SharedStorage {
  u8 sQ[kConsumers][QLayout::kBytes];
  u8 sK[kStages][KLayout::kBytes];
  u8 sV[kStages][VLayout::kBytes];
  u64 q_ready[kConsumers], q_free[kConsumers], k_ready[kStages], k_free[kStages], v_ready[kStages], v_free[kStages];
  u64 work_ready[kSlots], work_free[kSlots], nears_end;
  Tile work[kSlots];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// A forward's params, and these. `tiles` without VARLEN: the header alone; null: a block takes every gridDim.x-th tile.
struct TmaParams : FwdParams { TensorMap q_map, k_map, v_map; };
static_assert(__INTADDR__(&((TmaParams*)0)->q_map) == TENSOR_MAPS_OFFSET, "launch.py disagrees on TmaParams");

// How many tiles there are.
DEV u32 num_work(const FwdParams& p) {
  return kVarlen ? p.tiles[0] * p.heads_q : (u32)p.num_tiles * p.batch * p.heads_q;
}

// Small key tiles gain by it, large ones lose: it takes from the L2 cache what others wait for.
constexpr bool kPrefetchKeys = KLayout::kBytes + VLayout::kBytes <= 32768;

// A block takes its next tile when it has this many key tiles of the present one still to load. Taken earlier, tiles of different
// length would not go to the block that is free first, and blocks that share keys would read them at different times.
constexpr int kTakeAhead = 2;

// The planner, one warp, of which one thread acts: works out the tiles of this block one ahead.
DEV void plan_tiles(SharedStorage& s, const TmaParams& p) {
  const bool acts = thread_index() % 32 == 0;
  u32 idx = blockIdx.x;
  Ring<kSlots> slot;
  bool is_careful = false, is_drained = !kChecksV;              // no tile but those in the slots can come, or come again
  const auto publish = [&] {
    if (acts) mbarrier_arrive(shared_address(&s.work_ready[slot.stage]));
    __syncwarp();
    slot.next();
  };
  const auto await_end = [&] {                  // as many phases as tiles before the next
    if (kVarlen || p.tiles) mbarrier_wait(shared_address(&s.nears_end), slot.stage ^ 1);
  };
  #pragma unroll 1
  while (true) {
    const bool is_there = idx < num_work(p);
    Work work = {0, 0, is_drained ? kNoMore : kNoneYet, {}, {}};
    if (is_there) work = work_of_block<kQuerySide>(idx, p);
    const Sequence seq(p, work);
    const int seqlen_q = seq.seqlen_q, seqlen_k = seq.seqlen_k, head_k = seq.head_k(work.head);
    const int first_row = first_row_of(seq, work.tile);
    if (acts && is_there) {
      // Q goes to the L2 cache while its place is still taken: from memory it would come late.
      for (int row = first_row; row < first_row + kBlockM; row += 64)
        if (row >= 0) prefetch_tile<QLayout>(&p.q_map, seq.first_q + row, work.head, seq.batch);
    }
    mbarrier_wait(shared_address(&s.work_free[slot.stage]), slot.phase ^ 1);
    #pragma unroll 1
    while (kChecksV && uniform(s.work[slot.stage].is_doubtful())) {     // it comes again, before the next
      is_careful = true;
      if (acts) s.work[slot.stage].is_careful = true;
      publish();
      await_end();
      mbarrier_wait(shared_address(&s.work_free[slot.stage]), slot.phase ^ 1);
    }
    Tile& t = s.work[slot.stage];
    if (acts) {
      t.seqlen_q = seqlen_q, t.seqlen_k = seqlen_k;
      t.first_row = first_row, t.first_q = seq.first_q + first_row, t.first_k = seq.first_k, t.head_k = head_k;
      t.work = work;
      t.is_careful = is_careful, t.not_finite = false;
    }
    const HeadMask mask(p, seqlen_q, seqlen_k);
    #pragma unroll 1
    for (int c = -1; c < kConsumers; c++) {     // -1: of the block
      const int row = c < 0 ? max(first_row, 0) : first_row + c * 64;
      const int end_row = min(c < 0 ? first_row + kBlockM : row + 64, seqlen_q);
      TileRange keys = {};
      if (is_there && row >= 0 && row < end_row) keys = KeyTiles::of<kBlockN>(mask, row, end_row);
      if (acts && c < 0) {
        t.keys = keys;
        if (kPrefetchKeys && keys.begin < keys.end) {
          const int first_key = seq.first_k + (keys.end - 1) * kBlockN;
          prefetch_tile<KLayout>(&p.k_map, first_key, head_k, seq.batch);
          prefetch_tile<VLayout>(&p.v_map, first_key, head_k, seq.batch);
        }
      }
      if (keys.begin >= keys.end) keys.begin = keys.end = t.keys.begin;
      if (acts && c >= 0) t.own[c] = keys;
    }
    publish();
    if (!is_there && is_drained) return;
    await_end();
    if (!is_there) {
      is_drained = true;
      continue;
    }
    u32 next = idx;
    if ((kVarlen || p.tiles) && acts) next = atomicAdd((u32*)p.tiles + 2, 1);
    idx = uniform(next) + gridDim.x;
  }
}

// Under a right mask the last rows of a block see key tiles that come before those of the others.
constexpr bool kLastFirst = kMaskRight && kBlockN < kBlockM;

// The loader of Q, one warp, of which one thread acts: where consumers end apart, the keys of the next tile do not wait for the last.
DEV void load_queries(SharedStorage& s, const TmaParams& p) {
  const bool acts = thread_index() % 32 == 0;
  if (acts) tma_prefetch_map(&p.q_map);
  Ring<kSlots> slot;
  Ring<1> q;
  #pragma unroll 1
  while (true) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const Tile& t = s.work[slot.stage];
    const int batch = uniform(t.work.batch), head = t.work.head, first_q = t.first_q, array_batch = kVarlen ? 0 : batch;
    const bool has_keys = uniform(t.keys.begin) < uniform(t.keys.end);
    if (batch == kNoMore) return;
    __syncwarp();
    if (acts) mbarrier_arrive(shared_address(&s.work_free[slot.stage]));
    slot.next();
    if (!has_keys) continue;
    #pragma unroll 1
    for (int i = 0; i < kConsumers; i++) {
      const int c = kLastFirst ? kConsumers - 1 - i : i;
      const u32 q_ready = shared_address(&s.q_ready[c]);
      mbarrier_wait(shared_address(&s.q_free[c]), q.phase ^ 1);
      if (acts) {
        mbarrier_expect(q_ready, QLayout::kBytes);
        load_tile<QLayout>(shared_address(s.sQ[c]), &p.q_map, q_ready, first_q + c * 64, head, array_batch);
      }
    }
    q.next();
  }
}

// The loader of K and V, one warp, of which one thread acts.
DEV void load_tiles(SharedStorage& s, const TmaParams& p) {
  const bool acts = thread_index() == 0;
  if (acts) {
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
  }
  const bool tells_end = acts && (kVarlen || p.tiles);          // else the planner does not wait for it
  Ring<kSlots> slot;
  Ring<kStages> k;                              // of K; V is a stage behind
  #pragma unroll 1
  while (true) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const Tile& t = s.work[slot.stage];
    const int batch = uniform(t.work.batch), head_k = t.head_k, first_k = t.first_k;
    const int begin = uniform(t.keys.begin), end = uniform(t.keys.end), array_batch = kVarlen ? 0 : batch;
    if (batch == kNoMore) return;
    __syncwarp();
    if (acts) mbarrier_arrive(shared_address(&s.work_free[slot.stage]));
    slot.next();
    if (begin >= end) {
      if (tells_end) mbarrier_arrive(shared_address(&s.nears_end));
      continue;
    }
    // K of the next key tile before V of this one: so their places become free.
    #pragma unroll 1
    for (int tile = end; tile >= begin; tile--) {
      const int row = first_k + tile * kBlockN;
      if (tells_end && (tile == begin + kTakeAhead || (tile == end && tile < begin + kTakeAhead)))
        mbarrier_arrive(shared_address(&s.nears_end));
      if (tile > begin) {
        const u32 k_ready = shared_address(&s.k_ready[k.stage]);
        mbarrier_wait(shared_address(&s.k_free[k.stage]), k.phase ^ 1);
        if (acts) {
          mbarrier_expect(k_ready, KLayout::kBytes);
          load_tile<KLayout>(shared_address(s.sK[k.stage]), &p.k_map, k_ready, row - kBlockN, head_k, array_batch);
        }
      }
      if (tile < end) {
        const u32 stage = (k.stage == 0 ? kStages : k.stage) - 1, v_ready = shared_address(&s.v_ready[stage]);
        mbarrier_wait(shared_address(&s.v_free[stage]), k.phase ^ (k.stage != 0));
        if (acts) {
          mbarrier_expect(v_ready, VLayout::kBytes);
          load_tile<VLayout>(shared_address(s.sV[stage]), &p.v_map, v_ready, row, head_k, array_batch);
        }
      }
      if (tile > begin) k.next();
    }
  }
}

using Scores = float[kBlockN / 2];
using Weights = u32[kBlockN / 16][4];
using Output = float[1][kHeadDimV / 8][4];

// Starts S = Q K^T.
DEV void multiply_qk(Scores& rS, u64 q, u64 k) {
  wgmma_fence();
  #pragma unroll
  for (int d = 0; d < kHeadDim / 16; d++) {
    constexpr int kSteps = QLayout::kPanel / 16;
    const int panel = d / kSteps, step = d % kSteps * 32;
    wgmma_ss<Element>(rS, descriptor_step(q, panel * QLayout::kPanelBytes + step),
                      descriptor_step(k, panel * KLayout::kPanelBytes + step), d > 0);
  }
  wgmma_commit();
}

// Starts O += P V, or O = P V.
DEV void multiply_pv(Output& rO, const Weights& rP, u64 v, bool add) { multiply_weights<Element, VLayout>(flat(rO[0]), rP, v, add); }

// Of the keys that a lane has of a row, two of each eight: a bit for each that comes before `end`, counted from the lane's first.
DEV u32 keys_before(int end) {
  const int count = max(end, 0) / 8 * 2 + min(max(end, 0) % 8, 2);
  return count < 32 ? (1u << count) - 1 : 0xffffffff;
}

// -inf where masked. By bits of a word: the compiler moves seven at a time into predicates, where it would compare one by one.
DEV void apply_mask(Scores& rS, const HeadMask& mask, int first_row, int first_key) {
  static_assert(kBlockN / 4 <= 32, "a row's keys of a lane are bits of a word");
  const u32 lane = thread_index() % 32;
  const int lane_key = first_key + lane % 4 * 2;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + r * 8 + lane / 4;
    u32 seen = keys_before(mask.key_end(row) - lane_key);
    if (kMaskLeft) seen &= ~keys_before(mask.key_begin(row) - lane_key);
    #pragma unroll
    for (int i = 0; i < kBlockN / 4; i++) {
      if (!(seen & 1u << i)) rS[i / 2 * 4 + r * 2 + i % 2] = -infinity(0.f);
    }
  }
}

// NaN and Inf of a V tile become 0, once the consumers that see it have added them to the rows that do. Those call it together.
DEV void clear_tile(u32 v_tile, const Tile& t, int tile) {
  int first = 0, count = 0;                     // of these consumers: they follow one another
  #pragma unroll 1
  for (int c = kConsumers - 1; c >= 0; c--)
    if (tile >= t.own[c].begin && tile < t.own[c].end) first = c, count++;
  const u32 barrier = 8 + first * kConsumers + count - 1;       // of its own for each set of them
  barrier_sync(barrier, count * 128);
  scan_nonfinite<Element, VLayout::kBytes, 128, true>(v_tile, thread_index() % 128);
  fence_async_proxy();
  barrier_sync(barrier, count * 128);
}

// Writes the 16 rows of a warp. Whether any of this lane's part is not finite, but in rows with a logit of NaN, which are NaN
// whatever V is.
DEV bool write_out(const Output& rO, const RowStats& rows, const FwdParams& p, const Work& work) {
  const Sequence seq(p, work);
  const u32 lane = thread_index() % 32;
  const int first_row = first_row_of(seq, work.tile) + (int)((thread_index() - 128) / 32) * 16;
  float* gLse = (float*)p.lse + seq.row_index(work.head);
  float inverse[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + r * 8 + lane / 4;
    float sum = sum_of_row(rows.sum[r]);
    if (kVarlen && row >= seq.seqlen_q) sum = 0.f;              // takes no part
    inverse[r] = sum == 0.f ? 0.f : rcp_fast(sum);              // no visible key: O is 0
    if (p.lse && lane % 4 == 0 && row < seq.rows_q)
      gLse[row] = sum == 0.f ? -infinity(0.f) : (rows.max[r] + log2f(sum)) * 0.6931471806f;
  }
  bool not_finite = false;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = first_row + r * 8 + lane / 4, column = lane % 4 * 8;
    u32 found[2] = {};
    char* gO = (char*)(seq.query_rows((Element*)p.out, p.out_strides, work.head) + row * p.out_strides.row + column);
    #pragma unroll
    for (int d = 0; d < kHeadDimV / 8; d += 4) {
      u32 word[4];
      #pragma unroll
      for (int j = 0; j < 4; j++) {
        word[j] = pack2<Element>(rO[0][d + j][2 * r] * inverse[r], rO[0][d + j][2 * r + 1] * inverse[r]);
        if (kVarlen && inverse[r] == 0.f) word[j] = 0;          // of a row that takes no part O is anything
        if (kChecksV) found[j % 2] = fma2<Element>(word[j], 0, found[j % 2]);   // NaN and Inf times 0 are NaN
      }
      const Chunk c = transpose_quad(word, lane % 4);
      if constexpr (kWholeHeads && kOutVecBytes == 16) store_global_if(row < seq.rows_q, gO + d * 16, c);
      else if (row < seq.rows_q) store_chunk<kOutVecBytes>(gO + d * 16, c, kWholeHeads ? 16 : (p.head_dim_v - d * 8 - column) * 2);
    }
    not_finite |= row < seq.rows_q && inverse[r] == inverse[r] && ((found[0] | found[1]) & 0x7fff7fff);
  }
  return not_finite;
}

// Writes the rows of a warp, or of all, of which none sees a key.
DEV void write_empty(const FwdParams& p, const Work& work, int first_row, int num_rows, u32 thread, u32 num_threads) {
  const Sequence seq(p, work);
  Element* gO = seq.query_rows((Element*)p.out, p.out_strides, work.head);
  float* gLse = (float*)p.lse + seq.row_index(work.head);
  const int begin = max(first_row, 0), rows = min(first_row + num_rows, seq.rows_q) - begin;
  #pragma unroll 1
  for (int i = thread; i < rows * (kHeadDimV / 8); i += num_threads) {
    const int row = begin + i / (kHeadDimV / 8), column = i % (kHeadDimV / 8) * 8;
    store_chunk<kOutVecBytes>((char*)(gO + row * p.out_strides.row + column), Chunk{}, (p.head_dim_v - column) * 2);
    if (p.lse && column == 0) gLse[row] = -infinity(0.f);
  }
}

DEV TileRange uniform(const TileRange& t) {
  return {uniform(t.begin), uniform(t.end), uniform(t.full_begin), uniform(t.full_end)};
}

// Where a consumer is in the launch.
struct Position {
  HeadMask mask;
  TileRange keys;                               // of the block
  TileRange own;                                // of the consumer's own rows: the block's others it skips
  int first_row;                                // of the warp
  bool is_careful;
};

// The consumer, a warpgroup.
DEV void attend(SharedStorage& s, const TmaParams& p, int consumer) {
  const HeadScore score(p);
  const float exponent_scale = score.exponent_scale();
  const u64 q = descriptor_of<QLayout>(shared_address(s.sQ[consumer]));
  const u64 k = descriptor_of<KLayout>(shared_address(s.sK));
  const u64 v = descriptor_of<VLayout>(shared_address(s.sV));
  const bool speaks = thread_index() % 128 == 0;
  Ring<kSlots> slot;
  Ring<1> q_ring;
  Ring<kStages> k_ring, v_ring;
  Position at = {HeadMask(p, 0, 0), {}, {}, 0, false};
  RowStats rows;
  Scores rS;
  Weights rP;
  Output rO;
  float alpha[2];
  bool moved;
  bool is_fresh = true;                         // O holds nothing of this tile yet
  int num_left = 0;                             // tiles of V still to skip

  const auto free_slot = [&](u32 stage) {
    __syncwarp();
    if (thread_index() % 32 == 0) mbarrier_arrive(shared_address(&s.work_free[stage]));
  };
  // Reads the tile of the launch that is next. False: there is none.
  const auto look = [&] {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const Tile& t = s.work[slot.stage];
    if (uniform(t.work.batch) == kNoMore) return false;
    at.mask = HeadMask(p, t.seqlen_q, t.seqlen_k);
    at.keys = uniform(t.keys);
    at.own = uniform(t.own[consumer]);
    at.first_row = t.first_row + (int)((thread_index() - 128) / 32) * 16;
    at.is_careful = kChecksV && uniform(t.is_careful);
    return true;
  };
  // To the next tile in which any row of the block sees a key; writes out those on the way. False: there is none.
  const auto next_tile = [&] {
    while (look()) {
      if (at.keys.begin < at.keys.end) return true;
      const Tile& t = s.work[slot.stage];
      if (t.work.batch >= 0) write_empty(p, t.work, t.first_row, kBlockM, thread_index() - 128, kConsumers * 128);
      free_slot(slot.stage);
      slot.next();
    }
    return false;
  };
  const auto await_v = [&] { mbarrier_wait(shared_address(&s.v_ready[v_ring.stage]), v_ring.phase); };
  const auto my_turn = [&] { if (kTurns) barrier_sync(1 + consumer, 256); };
  const auto your_turn = [&] { if (kTurns) barrier_arrive(1 + (consumer + 1 == kConsumers ? 0 : consumer + 1), 256); };
  // Q's descriptors depend on the stage too, by nothing: computed before the loop they would not all find uniform registers.
  const auto start_s = [&] {
    multiply_qk(rS, descriptor_step(q, k_ring.stage / kStages * 16), descriptor_step(k, k_ring.stage * KLayout::kBytes));
  };
  const auto start_o = [&](bool add) {
    await_v();
    multiply_pv(rO, rP, descriptor_step(v, v_ring.stage * VLayout::kBytes), add);
  };
  // Where no product keeps the warps together, before one of them speaks for all: the others have waited too.
  const auto sync_consumer = [&] { barrier_sync(4 + consumer, 128); };
  const auto free_k = [&] {
    if (speaks) mbarrier_arrive(shared_address(&s.k_free[k_ring.stage]));
    k_ring.next();
  };
  const auto free_v = [&] {
    if (speaks) mbarrier_arrive(shared_address(&s.v_free[v_ring.stage]));
    v_ring.next();
  };
  const auto free_q = [&] { if (speaks) mbarrier_arrive(shared_address(&s.q_free[consumer])); };
  // S has been computed: exponentials of it, in place.
  const auto finish_s = [&](int tile, bool may_be_partial) {
    wgmma_pin(rS);
    free_k();
    if (tile == at.own.begin) free_q();
    apply_score(rS, score);
    if (may_be_partial && at.own.is_partial(tile)) apply_mask(rS, at.mask, at.first_row, tile * kBlockN);
    moved = update_max(rows, rS, alpha, exponent_scale);
    exponentiate(rS, rows.max, rows.sum, exponent_scale);
  };
  const auto finish_o = [&] {
    wgmma_pin(flat(rO[0]));
    free_v();
  };
  // Whether the next tile of V has NaN or Inf to be taken apart from it. Consumers that see it all look before one changes it.
  const auto is_poisoned = [&](int tile) {
    if constexpr (!kChecksV) return false;
    if (!at.is_careful || !at.keys.is_partial(tile)) return false;
    await_v();
    return barrier_or(4 + consumer, 128, scan_nonfinite<Element, VLayout::kBytes, 128, false>(
                                             shared_address(s.sV[v_ring.stage]), thread_index() % 128));
  };
  // Key tiles that no row of this consumer sees: their barriers are kept, as the others count on them.
  const auto skip_k = [&] {
    mbarrier_wait(shared_address(&s.k_ready[k_ring.stage]), k_ring.phase);
    sync_consumer();
    free_k();
  };
  const auto skip_v = [&] {
    await_v();
    sync_consumer();
    free_v();
  };
  // NaN and Inf of the next tile of V, whose key tile this is, go to the rows that see them.
  const auto take_apart = [&](int tile) {
    if (!is_poisoned(tile)) return;
    const u32 v_tile = shared_address(s.sV[v_ring.stage]);
    if (is_fresh) {
      #pragma unroll
      for (int i = 0; i < kHeadDimV / 2; i++) flat(rO[0])[i] = 0.f;
      is_fresh = false;
    }
    add_nonfinite<Element, VLayout, kBlockN, 1>(rO, v_tile, at.mask, at.first_row, tile * kBlockN, 0);
    clear_tile(v_tile, s.work[slot.stage], tile);
  };
  // Past the key tiles that only rows of later consumers see. Their V lands late, behind Q: those that need no place of the last
  // V of the tile before are left for later.
  const auto skip_to_own = [&] {
    #pragma unroll 1
    for (int tile = at.keys.end - 1; tile >= at.own.end; tile--) {
      my_turn();
      your_turn();
      skip_k();
      if (tile - at.own.end >= kStages - 1) skip_v();
      else num_left++;
    }
  };
  const auto skip_left = [&] {
    #pragma unroll 1
    for (; num_left > 0; num_left--) skip_v();
  };
  const auto begin_rows = [&] { rows.max[0] = rows.max[1] = -infinity(0.f), rows.sum[0] = rows.sum[1] = 0.f; };
  const auto start_tile = [&] {
    mbarrier_wait(shared_address(&s.q_ready[consumer]), q_ring.phase);
    mbarrier_wait(shared_address(&s.k_ready[k_ring.stage]), k_ring.phase);
    my_turn();
    start_s();
    your_turn();
  };

  if (kTurns && consumer == 0) barrier_arrive(1, 256);
  if (!next_tile()) return;
  bool is_started = false;
  while (true) {
    if (!is_started) {
      skip_to_own();
      if (at.own.begin >= at.own.end) {
        skip_left();
        mbarrier_wait(shared_address(&s.q_ready[consumer]), q_ring.phase);
        sync_consumer();
        free_q();
        q_ring.next();
        write_empty(p, s.work[slot.stage].work, at.first_row, 16, thread_index() % 32, 32);
        free_slot(slot.stage);
        slot.next();
        if (!next_tile()) return;
        continue;
      }
      start_tile();
      wgmma_wait<0>();
      begin_rows();
      finish_s(at.own.end - 1, true);
      pack<Element>(rP, rS);
    }
    q_ring.next();
    skip_left();
    is_fresh = true;
    int tile = at.own.end - 1;
    // O of this key tile and S of the next.
    const auto step = [&](bool may_be_partial, bool may_be_fresh) {
      mbarrier_wait(shared_address(&s.k_ready[k_ring.stage]), k_ring.phase);
      my_turn();
      start_s();
      start_o(!may_be_fresh || !is_fresh);
      your_turn();
      if (may_be_fresh) is_fresh = false;
      wgmma_wait<1>();
      finish_s(--tile, may_be_partial);
      wgmma_wait<0>();
      finish_o();
      pack<Element>(rP, rS);
      if (moved) {
        #pragma unroll
        for (int i = 0; i < kHeadDimV / 2; i++) flat(rO[0])[i] *= alpha[i / 2 % 2];
      }
    };
    // From plain_begin to plain_end a step has neither a V to look through nor an S to mask. A loop of its own: it is shorter.
    int plain_begin = max(at.own.full_begin, at.own.begin) + 1, plain_end = at.own.full_end + 1;
    if (at.is_careful) plain_begin = max(plain_begin, at.keys.full_begin), plain_end = min(plain_end, at.keys.full_end);
    while (true) {
      take_apart(tile);
      if (tile == at.own.begin) break;
      step(true, true);
      if (tile < plain_end) {
        #pragma unroll 1
        while (tile >= plain_begin) step(false, false);
      }
    }
    const RowStats finished = rows;
    const u32 finished_slot = slot.stage;
    const auto write_finished = [&] {
      const bool not_finite = write_out(rO, finished, p, s.work[finished_slot].work);
      if (kChecksV && not_finite) s.work[finished_slot].not_finite = true;
      free_slot(finished_slot);
    };
    const int num_tail = kMaskLeft ? at.own.begin - at.keys.begin : 0;
    if (kTurns && kMaskLeft) {
      // Those of key tiles behind its own. Before it looks at the next tile: the others may need them before they free the slot that
      // it is to lie in.
      #pragma unroll 1
      for (int i = 0; i < num_tail; i++) my_turn(), your_turn();
    }
    start_o(!is_fresh);
    // Beside this last product the next tile begins, behind the key tiles that only rows of earlier consumers see.
    const u32 last_v = v_ring.stage;
    const auto free_last_v = [&] { if (speaks) mbarrier_arrive(shared_address(&s.v_free[last_v])); };
    v_ring.next();
    slot.next();
    const bool is_last = !look();
    const bool is_found = !is_last && at.keys.begin < at.keys.end;
    is_started = is_found && at.own.begin < at.own.end;
    const auto skip_tail = [&] {
      #pragma unroll 1
      for (int i = 0; kMaskLeft && i < num_tail; i++) {
        skip_k();
        skip_v();
      }
    };
    if (is_started) {
      // V of the key tiles on the way needs the place of the last one.
      const bool frees = num_tail + (at.keys.end - at.own.end) >= kStages;
      if (frees) {
        wgmma_wait<0>();
        free_last_v();
      }
      skip_tail();
      skip_to_own();
      start_tile();
      wgmma_wait<1>();
      wgmma_pin(flat(rO[0]));
      if (!frees) free_last_v();
      write_finished();                         // while S is computed
      wgmma_wait<0>();
      begin_rows();
      finish_s(at.own.end - 1, true);
      pack<Element>(rP, rS);
      continue;
    }
    wgmma_wait<0>();
    wgmma_pin(flat(rO[0]));
    free_last_v();
    write_finished();
    skip_tail();
    if (is_last) return;
    if (!is_found && !next_tile()) return;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) fwd_sm90(const __grid_constant__ TmaParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(shared_address(&s.work_ready[i]), 1);
      mbarrier_init(shared_address(&s.work_free[i]), 2 + kConsumers * 4);
      s.work[i].not_finite = false;
    }
    for (int i = 0; i < kConsumers; i++) {
      mbarrier_init(shared_address(&s.q_ready[i]), 1);
      mbarrier_init(shared_address(&s.q_free[i]), 1);
    }
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&s.k_ready[i]), 1);
      mbarrier_init(shared_address(&s.v_ready[i]), 1);
      mbarrier_init(shared_address(&s.k_free[i]), kConsumers);
      mbarrier_init(shared_address(&s.v_free[i]), kConsumers);
    }
    mbarrier_init(shared_address(&s.nears_end), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kLoaderRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) load_tiles(s, p);
    else if (warp == 1) load_queries(s, p);
    else if (warp == 2) plan_tiles(s, p);
  } else {
    set_more_registers<kConsumerRegisters>();
    attend(s, p, warpgroup - 1);
  }
}
