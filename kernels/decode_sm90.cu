// Decoding with wide heads whose values are their first columns (multi-head latent attention): float16 and bfloat16, sm_90a.
//
//   q [batch, seqlen_q, heads_q, head_dim], keys [.., heads_k, head_dim] of a cache, contiguous or paged  ->  out, lse or parts
//
// A block takes items of attn/decode.cuh, 64 rows each, and goes over their key tiles, last first. A tile lies in shared memory
// once: it is K of S = Q K^T and, its first kHeadDimV columns, V of O += P V. It comes and goes in two parts: the first half of
// V with what lies past V, and the second half. Warpgroup 0 loads, by cp.async, as rows may lie anywhere; warpgroup 1, the
// leader, computes S, P and the first half of O; warpgroup 2, the follower, the second half.
//   ready[s][h]: loader -> leader, follower, part h of a tile has landed   free[s][h]: back, who multiplies by that half of V
//   q_ready:     loader -> leader, Q of an item has landed                 q_free: back, the last S of the item is there
//   p_ready:     leader -> follower, sP, alpha (and inverse) are there     free[s][1] frees them as well
//   s_started:   leader -> follower, S of a tile has been started
// The leader starts O of a tile at once, then S of the next. The follower lets that S go first if its keys are there: its own
// product then runs beside the leader's softmax, else while the keys come. Nothing is in flight from one turn of a loop to the
// next. The running max lags as in fwd_sm90. Not here: values apart from the keys, rows that are not aligned to 16 bytes
// (decode_sm80). What a tile should cost: docs/decode_sm90.md.
#include "attn/decode_wgmma.cuh"

constexpr int kHalfV = kHeadDimV / 2;           // columns of O of a consumer
constexpr int kStages = 2;
constexpr int kLoaderRegisters = 88, kConsumerRegisters = 208;          // 504 by three: all that 168 a thread give a block
static_assert(kHeadDim == 576 && kHeadDimV == 512, "two halves of V of 256 columns, 64 columns past it");
static_assert(V_IS_K, "values are the first columns of keys");

using PLayout = PanelLayout<kBlockM, kBlockN>;  // VLayout: the first panels of KLayout

// Parts of a tile and their panels, in the order in which S takes them.
constexpr int kPartPanels[2] = {5, 4};
DEV constexpr int part_panel(int part, int i) { return part == 1 ? 4 + i : i < 4 ? i : 8; }

struct alignas(1024) SharedStorage {
  u8 sK[kStages][KLayout::kBytes];
  u8 sQ[QLayout::kBytes];
  u8 sP[PLayout::kBytes];
  u64 ready[kStages][2], free[kStages][2], q_ready, q_free, p_ready, s_started;
  float alpha[kBlockM];                         // by which O is to be multiplied before this tile is added
  float inverse[kBlockM];                       // with the last tile of an item: one over the sum of P
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// ------------------------------------------------------------------------------------------------------------------- loading

// A thread's rows of a tile, every 16th, at its chunk of a panel.
constexpr int kRowStep = 16, kRowsAThread = kBlockN / kRowStep;
struct RowsOfThread {
  const char* from[kRowsAThread];               // the chunk in the first panel
  int bytes[kRowsAThread];                      // of the row from there on
  u32 first_row, chunk;
  DEV RowsOfThread() : first_row(threadIdx.x / 8), chunk(threadIdx.x % 8) {}
  // Of the row `head_dim` elements exist; 0: none.
  DEV void set(int i, const Element* row, int head_dim) {
    from[i] = (const char*)(row + chunk * 8);
    bytes[i] = head_dim * (int)sizeof(Element) - (int)chunk * 16;
  }
  // Starts the copies of panel `panel` to a tile at `tile`; zeros where there is nothing.
  template <typename Layout> DEV void copy_panel(u32 tile, int panel) const {
    const u32 dst = tile + Layout::offset(first_row, chunk) + panel * Layout::kPanelBytes;
    #pragma unroll
    for (int i = 0; i < kRowsAThread; i++) {
      const int valid = kWholeHeads ? bytes[i] > 0 ? 16 : 0 : min(max(bytes[i] - panel * Layout::kSwizzleBytes, 0), 16);
      cp_async<16>(dst + i * kRowStep * Layout::kSwizzleBytes, from[i] + panel * Layout::kSwizzleBytes, valid);
    }
  }
};

DEV void load_tiles(SharedStorage& s, const DecodeParams& p) {
  Ring<kStages> kv;
  u32 q_phase = 0;
  RowsOfThread rows;
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const Cache cache(p, item.batch, item.cached);
    const int slot = kPaged ? 0 : cache.slot(0);
    #pragma unroll 1
    for (int tile = item.end - 1; tile >= item.begin; tile--, kv.next()) {
      #pragma unroll
      for (int i = 0; i < kRowsAThread; i++) {
        const int key = tile * kBlockN + i * kRowStep + (int)rows.first_row;
        const Element* row = (const Element*)p.k;
        if (key < item.seqlen_k) {
          if (cache.is_new(key)) row = cache.new_row((const Element*)p.k_new, p.k_new_strides, item.head_k, key);
          else row = cache.row(row, p.k_strides, item.head_k, key, kPaged ? cache.slot(key) : slot);
        }
        rows.set(i, row, key < item.seqlen_k ? p.head_dim : 0);
      }
      const u32 sK = shared_address(s.sK[kv.stage]);
      #pragma unroll
      for (int part = 0; part < 2; part++) {
        mbarrier_wait(shared_address(&s.free[kv.stage][part]), kv.phase ^ 1);
        #pragma unroll
        for (int i = 0; i < kPartPanels[part]; i++) rows.copy_panel<KLayout>(sK, part_panel(part, i));
        cp_async_arrive(shared_address(&s.ready[kv.stage][part]));
      }
      if (tile + 1 == item.end) {
        #pragma unroll
        for (int i = 0; i < kRowsAThread; i++) {
          const int row = item.row_tile * kBlockM + i * kRowStep + (int)rows.first_row;
          const bool inside = row < num_rows(p);
          rows.set(i, (const Element*)p.q + (inside ? query_offset(p, p.q_strides, item, row) : 0), inside ? p.head_dim : 0);
        }
        mbarrier_wait(shared_address(&s.q_free), q_phase ^ 1);
        #pragma unroll
        for (int panel = 0; panel < QLayout::kPanels; panel++) rows.copy_panel<QLayout>(shared_address(s.sQ), panel);
        cp_async_arrive(shared_address(&s.q_ready));
        q_phase ^= 1;
      }
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// ----------------------------------------------------------------------------------------------------------------- computing

using Output = float[kHalfV / 2];

// Starts S = Q K^T over a part of the columns.
template <int kPart> DEV void multiply_qk(Scores& rS, u64 q, u64 k) {
  wgmma_fence();
  #pragma unroll
  for (int d = 0; d < kPartPanels[kPart] * 4; d++) {
    const int panel = part_panel(kPart, d / 4), step = d % 4 * 32;
    wgmma_ss<Element>(rS, descriptor_step(q, panel * QLayout::kPanelBytes + step),
                      descriptor_step(k, panel * KLayout::kPanelBytes + step), kPart > 0 || d > 0);
  }
}
// Starts O += P V, or O = P V, with P in shared memory.
DEV void multiply_pv(Output& rO, u64 sP, u64 v, bool add) {
  wgmma_fence();
  #pragma unroll
  for (int key = 0; key < kBlockN / 16; key++)
    wgmma_ss_trans<Element>(rO, descriptor_step(sP, key * 32), descriptor_step(v, key * 16 * VLayout::kSwizzleBytes),
                            key > 0 || add);
  wgmma_commit();
}

// Keys that exist and that some row of an item does not see: their tiles are looked through for NaN and Inf.
struct HiddenKeys {
  int before, from, seqlen_k;                   // those below `before`, and from `from` on
  DEV HiddenKeys(const DecodeParams& p, const DecodeItem& item) : before(0), from(item.seqlen_k), seqlen_k(item.seqlen_k) {
    if constexpr (!kMaskLeft && !kMaskRight) return;
    const KeyMask mask(p, p.seqlen_q, seqlen_k);
    const int first = item.row_tile * kBlockM, last = min(first + kBlockM, num_rows(p)) - 1, group = group_of(p);
    before = uniform(mask.key_begin(last / group)), from = uniform(mask.key_end(first / group));
  }
  DEV bool any_in(int tile) const {
    if constexpr (!kMaskLeft && !kMaskRight) return false;
    return tile * kBlockN < before || min((tile + 1) * kBlockN, seqlen_k) > from;
  }
};

// Adds P V of those V that are NaN or Inf and that a row sees, to this consumer's columns: `v` is the first of them.
DEV void add_nonfinite_seen(Output& rO, u32 sP, u32 v, const DecodeParams& p, const DecodeItem& item, int tile) {
  const KeyMask mask(p, p.seqlen_q, item.seqlen_k);
  const int group = group_of(p), lane = thread_index() % 32;
  #pragma unroll 1
  for (int r = 0; r < 2; r++) {
    const int query = (item.row_tile * kBlockM + lane_row() + r * 8) / group;
    const int begin = max(mask.key_begin(query) - tile * kBlockN, 0), end = min(mask.key_end(query) - tile * kBlockN, kBlockN);
    #pragma unroll 1
    for (int key = begin; key < end; key++) {
      const u32 pair = load_shared_word(sP + PLayout::offset(lane_row() + r * 8, key / 8) + key % 8 / 2 * 4);
      Element weight;
      weight.bits = (u16)(pair >> key % 2 * 16);
      #pragma unroll
      for (int i = 0; i < kHalfV / 8; i++) {
        const u32 word = load_shared_word(v + VLayout::offset(key, i) + lane % 4 * 4);
        if (!(nonfinite_carries<Element>(word) & 0x80008000)) continue;
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          Element x;
          x.bits = (u16)(word >> e * 16);
          const float add = is_nonfinite<Element>(x.bits) ? to_real(weight) * to_real(x) : 0.f;
          if (r == 0) rO[i * 4 + e] += add;
          else rO[i * 4 + 2 + e] += add;
        }
      }
    }
  }
}

// NaN and Inf of a V tile go to the rows that see them, then become 0: times a weight of 0 they would be NaN. Both consumers
// call it together, once S and P are there. `is_fresh`: O holds nothing of this item yet.
DEV void take_apart(Output& rO, bool& is_fresh, SharedStorage& s, u32 stage, int half, const DecodeParams& p,
                    const DecodeItem& item, int tile) {
  constexpr int kAll = 256, kBarrier = 1;
  const u32 v = shared_address(s.sK[stage]), thread = thread_index() - 128;
  if (!barrier_or(kBarrier, kAll, scan_nonfinite<Element, VLayout::kBytes, kAll, false>(v, thread))) return;
  if (is_fresh) {
    #pragma unroll
    for (int i = 0; i < kHalfV / 2; i++) rO[i] = 0.f;
    is_fresh = false;
  }
  add_nonfinite_seen(rO, shared_address(s.sP), v + half * (VLayout::kBytes / 2), p, item, tile);
  barrier_sync(kBarrier, kAll);
  scan_nonfinite<Element, VLayout::kBytes, kAll, true>(v, thread);
  fence_async_proxy();
  barrier_sync(kBarrier, kAll);
}

// The leader, a warpgroup.
DEV void lead(SharedStorage& s, const DecodeParams& p) {
  const HeadScore score(p);
  const float exponent_scale = score.exponent_scale();
  const u64 q = wgmma_descriptor<QLayout::kSwizzleBytes>(shared_address(s.sQ), QLayout::kPanelBytes);
  const u64 k = wgmma_descriptor<KLayout::kSwizzleBytes>(shared_address(s.sK), KLayout::kPanelBytes);
  Ring<kStages> kv, last = {kStages - 1, 1};    // of the tile before: `free` of a fresh stage passes
  u32 q_phase = 0;
  Scores rS;
  Weights rP;
  Output rO;
  #pragma unroll 1
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const HiddenKeys hidden(p, item);
    Rows rows = {{-infinity(0.f), -infinity(0.f)}, {0.f, 0.f}};
    float sum[2], inverse[2];
    mbarrier_wait(shared_address(&s.q_ready), q_phase);
    q_phase ^= 1;
    #pragma unroll 1
    for (int tile = item.end - 1; tile >= item.begin; tile--, kv.next(), last.next()) {
      // Q's descriptors depend on the stage too, by nothing: before the loop they would not all find uniform registers.
      const u32 stage = uniform(kv.stage);
      const u64 k_tile = descriptor_step(k, stage * KLayout::kBytes), q_tile = descriptor_step(q, stage / kStages * 16);
      mbarrier_wait(shared_address(&s.ready[kv.stage][0]), kv.phase);
      fence_async_proxy();
      multiply_qk<0>(rS, q_tile, k_tile);
      mbarrier_wait(shared_address(&s.ready[kv.stage][1]), kv.phase);
      fence_async_proxy();
      multiply_qk<1>(rS, q_tile, k_tile);
      wgmma_commit();
      if (thread_index() == 128) mbarrier_arrive(shared_address(&s.s_started));
      wgmma_wait<0>();
      wgmma_pin(rS);
      if (tile == item.begin) arrive_warp(s.q_free);

      float alpha[2];
      apply_score(rS, score);
      if (item.tiles.is_partial(tile)) apply_mask(rS, p, item, tile);
      const bool moved = update_max(rows, rS, alpha, exponent_scale);
      softmax(rows, rS, exponent_scale);
      pack(rP, rS);
      mbarrier_wait(shared_address(&s.free[last.stage][1]), last.phase);        // the follower has done with sP
      #pragma unroll
      for (int j = 0; j < kBlockN / 16; j++) store_fragment<PLayout>(shared_address(s.sP), warp_row(), j * 2, rP[j]);
      if (tile == item.begin) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          sum[r] = sum_of_row(rows.sum[r]);
          inverse[r] = sum[r] == 0.f ? 0.f : rcp_fast(sum[r]);  // no visible key: O is 0
          if (thread_index() % 4 == 0) s.inverse[lane_row() + r * 8] = inverse[r];
        }
      }
      if (thread_index() % 4 == 0) s.alpha[lane_row()] = alpha[0], s.alpha[lane_row() + 8] = alpha[1];
      fence_async_proxy();
      arrive_warp(s.p_ready);

      bool is_fresh = tile + 1 == item.end;
      if (moved && !is_fresh) scale_output(rO, alpha);
      if (hidden.any_in(tile)) take_apart(rO, is_fresh, s, kv.stage, 0, p, item, tile);
      multiply_pv(rO, rP, k_tile, !is_fresh);
      wgmma_wait<0>();
      wgmma_pin(rO);
      arrive_warp(s.free[kv.stage][0]);
    }
    write_lse(rows, sum, p, item);
    write_output(rO, inverse, p, item, 0);
  }
}

// The follower, a warpgroup.
DEV void follow(SharedStorage& s, const DecodeParams& p) {
  const u64 sP = wgmma_descriptor<PLayout::kSwizzleBytes>(shared_address(s.sP), PLayout::kPanelBytes);
  const u64 first_v = wgmma_descriptor<VLayout::kSwizzleBytes>(shared_address(s.sK), VLayout::kPanelBytes);
  const u64 v = descriptor_step(first_v, VLayout::kBytes / 2);
  Ring<kStages> kv, next = {1, 0};
  u32 p_phase = 0;
  Output rO;
  #pragma unroll 1
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const HiddenKeys hidden(p, item);
    float inverse[2];
    #pragma unroll 1
    for (int tile = item.end - 1; tile >= item.begin; tile--, kv.next(), next.next(), p_phase ^= 1) {
      mbarrier_wait(shared_address(&s.ready[kv.stage][1]), kv.phase);
      fence_async_proxy();
      mbarrier_wait(shared_address(&s.p_ready), p_phase);
      const float alpha[2] = {s.alpha[lane_row()], s.alpha[lane_row() + 8]};
      if (tile == item.begin) inverse[0] = s.inverse[lane_row()], inverse[1] = s.inverse[lane_row() + 8];
      bool is_fresh = tile + 1 == item.end;
      if (!is_fresh && __any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) scale_output(rO, alpha);
      if (hidden.any_in(tile)) take_apart(rO, is_fresh, s, kv.stage, 1, p, item, tile);
      // S of the next tile first, if it can start: it is what the leader waits for.
      if (tile > item.begin && uniform(mbarrier_test(shared_address(&s.ready[next.stage][1]), next.phase)))
        mbarrier_wait(shared_address(&s.s_started), p_phase ^ 1);
      multiply_pv(rO, sP, descriptor_step(v, kv.stage * KLayout::kBytes), !is_fresh);
      wgmma_wait<0>();
      wgmma_pin(rO);
      arrive_warp(s.free[kv.stage][1]);
    }
    write_output(rO, inverse, p, item, kHalfV);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode_sm90(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages * 2; i++) {
      mbarrier_init(shared_address(&s.ready[i / 2][i % 2]), 128);
      mbarrier_init(shared_address(&s.free[i / 2][i % 2]), 4);
    }
    mbarrier_init(shared_address(&s.q_ready), 128);
    mbarrier_init(shared_address(&s.q_free), 4);
    mbarrier_init(shared_address(&s.p_ready), 4);
    mbarrier_init(shared_address(&s.s_started), 1);
    mbarrier_init_fence();
  }
  __syncthreads();
  start_dependents();           // decode_combine finds its parts while these are computed
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kLoaderRegisters>();
    load_tiles(s, p);
    append<Element>(p);                         // while the last tiles are computed; the others while the first ones come
  } else {
    set_more_registers<kConsumerRegisters>();
    append<Element>(p);
    if (warpgroup == 1) lead(s, p);
    else follow(s, p);
  }
}
