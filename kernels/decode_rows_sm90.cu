// Decoding of many query rows a key head on warpgroup tensor cores: float16 and bfloat16, heads of 1 to 256, sm_90a.
//
//   out = softmax(scale * q k^T) v of each request, whose keys lie in a cache, contiguous or in pages, and behind them new ones
//   q [batch, seqlen_q, heads_q, head_dim]    cache: attn/decode.cuh    out [batch, seqlen_q, heads_q, head_dim_v]
//
// With 64 rows the cache still bounds the time, but only if the tensor cores of wgmma compute: decode_sm80 is for fewer rows. A
// block takes items of attn/decode.cuh and goes over their key tiles, last first. Warpgroup 0 loads, by cp.async, as rows may lie
// anywhere, and runs ahead over the borders of items. Two more take the tiles in turns, each with all rows of the item, a max, a
// sum and an O of its own; at the end of an item the one that had its first tile joins what both have and writes it.
//   k_ready[s], v_ready[s]: loader -> a consumer, K or V of stage s has landed    k_free[s], v_free[s]: back, it has been used
//   q_ready:                loader -> both, Q of an item has landed               q_free: back, both have it, or its last S
//   given[w]:               warp w of a consumer -> warp w of the other, columns of O are there    taken[w]: back, they are read
// The tiles of all items go to the consumers by turns, so that a stage always belongs to the same one. Nothing is in flight from
// one turn of a loop to the next. Not here: rows that are not aligned to 16 bytes (decode_sm80).
#include "attn/decode_wgmma.cuh"
#include "ptx/wgmma_k.cuh"

constexpr int kStages = STAGES;
constexpr bool kKeepsQ = KEEPS_Q;               // Q is in registers: S then reads only K from shared memory
// Together 504, all that 168 a thread give a block.
constexpr int kLoaderRegisters = kHeadDimV > 192 ? 88 : 104, kConsumerRegisters = kHeadDimV > 192 ? 208 : 200;
constexpr int kJoinCols = 64;                   // of O that go from one consumer to the other at a time
static_assert(kStages % 2 == 0, "half of the stages for each consumer");

struct alignas(1024) SharedStorage {
  u8 sK[kStages][KLayout::kBytes];
  u8 sV[kStages][VLayout::kBytes];
  u8 sQ[QLayout::kBytes];
  float sO[4][kJoinCols / 8][32][4];            // of a warp, in the order of its registers
  u64 k_ready[kStages], v_ready[kStages], k_free[kStages], v_free[kStages], q_ready, q_free, given[4], taken[4];
  float max[kBlockM], sum[kBlockM];             // of the rows of the consumer that gives its O
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// ------------------------------------------------------------------------------------------------------------------- loading

constexpr int kWarpRows = 16;                   // of a tile, that one warp copies

// Those rows to `tile`, from where lanes first_lane.. say (null: zeros).
template <typename Layout> DEV void copy_gathered(u32 tile, const char* own_row, int first_lane, int cols) {
  const u32 lane = threadIdx.x % 32;
  #pragma unroll (kLoaderRegisters < 104 || Layout::kPanels > 2 ? 1 : 4)        // more addresses at a time would spill
  for (int first = 0; first < kWarpRows; first += 4) {
    const int row = first + lane / 8;
    const char* src = (const char*)__shfl_sync(0xffffffff, (u64)own_row, first_lane + row);
    #pragma unroll
    for (int panel = 0; panel < Layout::kPanels; panel++) {
      const int chunk = panel * 8 + lane % 8;
      const int valid = !src ? 0 : kWholeHeads ? 16 : min(max(cols - chunk * 8, 0), 8) * 2;
      cp_async<16>(tile + Layout::offset(threadIdx.x / 32 * kWarpRows + row, chunk), src + chunk * 16, valid);
    }
  }
}

// Where this lane's key lies: its K for lanes 0 to 15 of a warp, its V for the others. Null: there is none.
DEV const char* key_row(const DecodeParams& p, const DecodeItem& item, const Cache& cache, int key, int slot) {
  const bool of_v = threadIdx.x % 32 >= 16;
  if (key >= item.seqlen_k) return nullptr;
  if (cache.is_new(key))
    return (const char*)cache.new_row((const Element*)(of_v ? p.v_new : p.k_new), of_v ? p.v_new_strides : p.k_new_strides,
                                      item.head_k, key);
  return (const char*)cache.row((const Element*)(of_v ? p.v : p.k), of_v ? p.v_strides : p.k_strides, item.head_k, key, slot);
}

DEV void load_tiles(SharedStorage& s, const DecodeParams& p) {
  Ring<kStages> kv;
  u32 q_phase = 0;
  const int own_row = threadIdx.x / 32 * kWarpRows + threadIdx.x % 16;
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const Cache cache(p, item.batch, item.cached);
    const auto look_up = [&](int key) { return !kPaged || key < item.cached ? cache.slot(key) : 0; };
    int key = (item.end - 1) * kBlockN + own_row, slot = look_up(key);
    #pragma unroll 1
    for (int tile = item.end - 1; tile >= item.begin; tile--, kv.next()) {
      const char* row = key_row(p, item, cache, key, slot);
      key -= kBlockN;
      if (kPaged && tile > item.begin) slot = look_up(key);     // in time for the next tile
      mbarrier_wait(shared_address(&s.k_free[kv.stage]), kv.phase ^ 1);
      copy_gathered<KLayout>(shared_address(s.sK[kv.stage]), row, 0, p.head_dim);
      cp_async_arrive(shared_address(&s.k_ready[kv.stage]));
      mbarrier_wait(shared_address(&s.v_free[kv.stage]), kv.phase ^ 1);
      copy_gathered<VLayout>(shared_address(s.sV[kv.stage]), row, 16, p.head_dim_v);
      cp_async_arrive(shared_address(&s.v_ready[kv.stage]));
      if (tile + 1 == item.end) {
        const int query = item.row_tile * kBlockM + own_row;
        const Element* q = query < num_rows(p) ? (const Element*)p.q + query_offset(p, p.q_strides, item, query) : nullptr;
        mbarrier_wait(shared_address(&s.q_free), q_phase ^ 1);
        copy_gathered<QLayout>(shared_address(s.sQ), (const char*)q, 0, p.head_dim);
        cp_async_arrive(shared_address(&s.q_ready));
        q_phase ^= 1;
      }
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// ----------------------------------------------------------------------------------------------------------------- computing

using Output = float[kHeadDimV / 2];
// The 16 rows of a warp as operands.
struct QueryRows { u32 step[kKeepsQ ? kHeadDim / 16 : 1][4]; };

DEV void fetch_q(QueryRows& rQ, const SharedStorage& s) {
  const u32 lane = thread_index() % 32;
  #pragma unroll
  for (int d = 0; d < kHeadDim / 16; d++)
    ldmatrix_x4(rQ.step[d], shared_address(s.sQ) + QLayout::offset(warp_row() + lane % 16, d * 2 + lane / 16));
}

// Starts S = Q K^T. `nothing` is 0, which the compiler does not know: of operands that only wgmma reads, ptxas (12.9, 13.0) forgot
// that a loop keeps them and gave their registers to P.
DEV void multiply_qk(Scores& rS, const QueryRows& rQ, u32 nothing, u64 q, u64 k) {
  u32 operands[kKeepsQ ? kHeadDim / 16 : 1][4];
  #pragma unroll
  for (int i = 0; kKeepsQ && i < kHeadDim / 4; i++) operands[i / 4][i % 4] = rQ.step[i / 4][i % 4] ^ nothing;
  wgmma_fence();
  #pragma unroll
  for (int d = 0; d < kHeadDim / 16; d++) {
    const u64 k_step = descriptor_step(k, d / 4 * KLayout::kPanelBytes + d % 4 * 32);
    if constexpr (kKeepsQ) wgmma_rs_k<Element>(rS, operands[d], k_step, d > 0);
    else wgmma_ss<Element>(rS, descriptor_step(q, d / 4 * QLayout::kPanelBytes + d % 4 * 32), k_step, d > 0);
  }
  wgmma_commit();
}

// NaN and Inf of a partly masked V tile go to the rows that see them, then become 0: times a weight of 0 they would be NaN.
// Without a mask the only keys that no row sees are the zeros past the end. `is_fresh`: O holds nothing of this item yet.
DEV void take_apart(Output& rO, bool& is_fresh, u32 v, int consumer, const DecodeParams& p, const DecodeItem& item, int tile) {
  constexpr int kAll = 128;
  const u32 thread = thread_index() % kAll, barrier = 1 + consumer;
  if (!barrier_or(barrier, kAll, scan_nonfinite<Element, VLayout::kBytes, kAll, false>(v, thread))) return;
  if (is_fresh) {
    #pragma unroll
    for (int i = 0; i < kHeadDimV / 2; i++) rO[i] = 0.f;
    is_fresh = false;
  }
  const KeyMask mask(p, p.seqlen_q, item.seqlen_k);
  const int group = group_of(p), first_row = item.row_tile * kBlockM + lane_row();
  #pragma unroll 1
  for (int i = 0; i < kBlockN; i++) {
    const int key = tile * kBlockN + i;
    bool sees[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      const int query = (first_row + r * 8) / group;
      sees[r] = key >= mask.key_begin(query) && key < mask.key_end(query);
    }
    #pragma unroll
    for (int c = 0; c < kHeadDimV / 8; c++) {
      const u32 word = load_shared_word(v + VLayout::offset(i, c) + thread % 4 * 4);
      if (!(nonfinite_carries<Element>(word) & 0x80008000)) continue;
      #pragma unroll
      for (int e = 0; e < 2; e++) {
        const Element x = {(u16)(word >> e * 16)};
        if (!is_nonfinite<Element>(x.bits)) continue;
        if (sees[0]) rO[c * 4 + e] += to_real(x);
        if (sees[1]) rO[c * 4 + 2 + e] += to_real(x);
      }
    }
  }
  barrier_sync(barrier, kAll);
  scan_nonfinite<Element, VLayout::kBytes, kAll, true>(v, thread);
  fence_async_proxy();
  barrier_sync(barrier, kAll);
}

// A warp's O, and the max and the sums of its rows, to the same warp of the other consumer, some columns at a time.
DEV void give(SharedStorage& s, const RowStats& rows, const Output& rO, u32& phase) {
  const u32 lane = thread_index() % 32, warp = warp_row() / 16;
  #pragma unroll
  for (int first = 0; first < kHeadDimV / 2; first += kJoinCols / 2, phase ^= 1) {
    mbarrier_wait(shared_address(&s.taken[warp]), phase ^ 1);
    if (first == 0 && lane % 4 == 0) {
      #pragma unroll
      for (int r = 0; r < 2; r++) s.max[lane_row() + r * 8] = rows.max[r], s.sum[lane_row() + r * 8] = rows.sum[r];
    }
    #pragma unroll
    for (int i = 0; i < kJoinCols / 8; i++) {
      Chunk c;
      #pragma unroll
      for (int e = 0; e < 4; e++) c.word[e] = __float_as_uint(rO[first + i * 4 + e]);
      store_shared(shared_address(s.sO[warp][i][lane]), c);
    }
    arrive_warp(s.given[warp]);
  }
}
// The other side of it: to what this consumer has of the same rows.
DEV void take(SharedStorage& s, RowStats& rows, Output& rO, u32& phase) {
  const u32 lane = thread_index() % 32, warp = warp_row() / 16;
  float own[2], other[2];                       // what each O is multiplied by
  #pragma unroll
  for (int first = 0; first < kHeadDimV / 2; first += kJoinCols / 2, phase ^= 1) {
    mbarrier_wait(shared_address(&s.given[warp]), phase);
    if (first == 0) {
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const float other_max = s.max[lane_row() + r * 8], max = fmaxf(rows.max[r], other_max);
        // Who saw nothing has a sum of 0, or of NaN if that is what it saw.
        own[r] = rows.max[r] == -infinity(0.f) ? 1.f : exp2_fast(rows.max[r] - max);
        other[r] = other_max == -infinity(0.f) ? 1.f : exp2_fast(other_max - max);
        rows.sum[r] = rows.sum[r] * own[r] + s.sum[lane_row() + r * 8] * other[r];
        rows.max[r] = max;
      }
    }
    #pragma unroll
    for (int i = 0; i < kJoinCols / 8; i++) {
      const Chunk c = load_shared(shared_address(s.sO[warp][i][lane]));
      #pragma unroll
      for (int e = 0; e < 4; e++) {
        float& x = rO[first + i * 4 + e];
        x = x * own[e / 2] + __uint_as_float(c.word[e]) * other[e / 2];
      }
    }
    arrive_warp(s.taken[warp]);
  }
}

// A consumer, a warpgroup: 0 or 1.
DEV void compute(SharedStorage& s, const DecodeParams& p, int consumer) {
  const HeadScore score(p);
  const float exponent_scale = score.exponent_scale();
  const u64 q = descriptor_of<QLayout>(shared_address(s.sQ));
  const u64 k = descriptor_of<KLayout>(shared_address(s.sK));
  const u64 v = descriptor_of<VLayout>(shared_address(s.sV));
  Ring<kStages / 2> kv;                         // of this consumer's stages
  u32 q_phase = 0, join_phase = 0;
  int turn = 0;                                 // whose the next tile is
  QueryRows rQ;
  Scores rS;
  Weights rP;
  Output rO;
  #pragma unroll 1
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const bool is_first = turn == consumer;
    turn ^= (item.end - item.begin) & 1;
    int tile = item.end - (is_first ? 1 : 2);
    RowStats rows = {{-infinity(0.f), -infinity(0.f)}, {0.f, 0.f}};
    mbarrier_wait(shared_address(&s.q_ready), q_phase);
    q_phase ^= 1;
    if constexpr (kKeepsQ) fetch_q(rQ, s);
    if (kKeepsQ || tile < item.begin) arrive_warp(s.q_free);
    #pragma unroll 1
    for (; tile >= item.begin; tile -= 2, kv.next()) {
      // Q's descriptors depend on the stage too, by nothing: before the loop they would not all find uniform registers.
      const u32 stage = uniform(kv.stage * 2 + consumer);
      mbarrier_wait(shared_address(&s.k_ready[stage]), kv.phase);
      fence_async_proxy();
      multiply_qk(rS, rQ, stage / kStages, descriptor_step(q, stage / kStages * 16), descriptor_step(k, stage * KLayout::kBytes));
      wgmma_wait<0>();
      wgmma_pin(rS);
      arrive_warp(s.k_free[stage]);
      if (!kKeepsQ && tile - 2 < item.begin) arrive_warp(s.q_free);

      float alpha[2] = {1.f, 1.f};
      apply_score(rS, score);
      const bool is_partial = item.tiles.is_partial(tile);
      if (is_partial) apply_mask(rS, p, item, tile);
      const bool moved = update_max(rows, rS, alpha, exponent_scale);
      exponentiate(rS, rows.max, rows.sum, exponent_scale);
      pack<Element>(rP, rS);
      bool is_fresh = tile + 2 >= item.end;
      if (moved && !is_fresh) scale_output(rO, alpha);

      mbarrier_wait(shared_address(&s.v_ready[stage]), kv.phase);
      fence_async_proxy();
      if ((kMaskLeft || kMaskRight) && is_partial) take_apart(rO, is_fresh, shared_address(s.sV[stage]), consumer, p, item, tile);
      multiply_pv(rO, rP, descriptor_step(v, stage * VLayout::kBytes), !is_fresh);
      wgmma_wait<0>();
      wgmma_pin(rO);
      arrive_warp(s.v_free[stage]);
    }
    const bool is_shared = item.end - item.begin > 1;
    if (!is_first && !is_shared) continue;
    #pragma unroll
    for (int r = 0; r < 2; r++) rows.sum[r] = sum_of_row(rows.sum[r]);
    if (!is_first) {
      give(s, rows, rO, join_phase);
      continue;
    }
    if (is_shared) take(s, rows, rO, join_phase);
    float inverse[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) inverse[r] = rows.sum[r] == 0.f ? 0.f : rcp_fast(rows.sum[r]);  // no visible key: O is 0
    write_lse(rows, rows.sum, p, item);
    write_output(rO, inverse, p, item, 0);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode_rows_sm90(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&s.k_ready[i]), 128);
      mbarrier_init(shared_address(&s.v_ready[i]), 128);
      mbarrier_init(shared_address(&s.k_free[i]), 4);
      mbarrier_init(shared_address(&s.v_free[i]), 4);
    }
    mbarrier_init(shared_address(&s.q_ready), 128);
    mbarrier_init(shared_address(&s.q_free), 8);
    for (int warp = 0; warp < 4; warp++) {
      mbarrier_init(shared_address(&s.given[warp]), 1);
      mbarrier_init(shared_address(&s.taken[warp]), 1);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  start_dependents();           // decode_combine finds its parts while these are computed
  run_roles<kLoaderRegisters, kConsumerRegisters>(p, [&] { load_tiles(s, p); }, [&](int consumer) { compute(s, p, consumer); });
}
