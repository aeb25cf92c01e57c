// Decoding with wide heads whose values are their first columns (multi-head latent attention): float16 and bfloat16, sm_90a.
//
//   q [batch, seqlen_q, heads_q, head_dim], keys [.., heads_k, head_dim] of a cache, contiguous or paged  ->  out, lse or parts
//
// A block takes items of attn/decode.cuh, 64 rows each, and goes over their key tiles, last first. A tile lies in shared memory
// once: it is K of S = Q K^T and, its first kHeadDimV columns, V of O += P V. Warpgroup 0 loads; 1 and 2, the consumers, have
// half of the columns of O each, and compute S and P of every second tile of an item: its owner multiplies by P from
// registers, the other by P from shared memory.
//   ready[s][i]:   loader -> consumers, part i of a tile has landed: the halves of its owner's half of V, all the rest
//   free[s][h]:    back, consumer h has multiplied by half h of V
//   q_ready[i]:    loader -> consumers, part i of Q has landed, as of the first tile        q_free: back, the last S is there
//   p_ready[s][i]: owner -> the other, half i of the keys of P; with the first half the facts of rows. The owner of the next tile
//                  has multiplied by this P before it writes its own
// A consumer starts S of its tile on the half of V that is its own, then O of the tile before, of which it hands back its half,
// then the rest of S: what its S then still waits for is loaded meanwhile, and the softmax of one consumer runs beside the
// products of the other. Nothing is in flight from one turn of a loop to the next. The running max lags as in fwd_sm90.
// Whole tiles come by TMA if they lie in one piece (kTma), the others by cp.async, row by row, with zeros behind the keys.
// Not here: values apart from the keys, rows that are not aligned to 16 bytes (decode_sm80). What a tile costs, and why this
// order: docs/decode_sm90.md.
#include "attn/decode_wgmma.cuh"
#include "attn/lengths.cuh"
#include "attn/parts_told.cuh"
#include "ptx/count.cuh"
#include "ptx/tma_stream.cuh"

constexpr bool kTma = TMA;                      // a tile of cached keys lies in one piece, and a tensor map tells where
constexpr int kHalfV = kHeadDimV / 2;           // columns of O of a consumer
constexpr int kStages = 2;
constexpr int kLoaderRegisters = 72, kConsumerRegisters = 216;          // 504 by three: all that 168 a thread give a block
constexpr int kLoaders = 128, kConsumers = 256;                         // threads
static_assert(kHeadDim == 576 && kHeadDimV == 512, "two halves of V of 256 columns, 64 columns past it");
static_assert(V_IS_K, "values are the first columns of keys");

using PLayout = PanelLayout<kBlockM, kBlockN>;  // VLayout: the first panels of KLayout
constexpr int kHalfPanels = VLayout::kPanels / 2, kPastV = VLayout::kPanels;    // panels of half of V; the panel behind V
static_assert(KLayout::kPanels == kPastV + 1, "one panel past V");

// Parts of a tile, in the order in which S of its owner takes them, and how many panels they are.
constexpr int kParts = 3;
DEV constexpr int panels_of(int part) { return part < 2 ? kHalfPanels / 2 : kHalfPanels + 1; }
DEV int panel_of(int part, int i, int owner) {
  if (part < 2) return owner * kHalfPanels + part * (kHalfPanels / 2) + i;
  return i < kHalfPanels ? (owner ^ 1) * kHalfPanels + i : kPastV;
}

struct alignas(1024) SharedStorage {
  u8 sK[kStages][KLayout::kBytes];
  u8 sQ[QLayout::kBytes];
  u8 sP[PLayout::kBytes];
  u64 ready[kStages][kParts], free[kStages][2], p_ready[kStages][2], q_ready[kParts], q_free;
  float alpha[kStages][kBlockM];                // by which O is to be multiplied before this tile is added
  float max[kStages][kBlockM];                  // RowStats::max with this tile
  float sum[2][2][kBlockM];                     // of an item, in turns: each consumer's RowStats::sum
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

struct TmaDecodeParams : DecodeParams { TensorMap k_map; };     // k_map: only with kTma
static_assert(__INTADDR__(&((TmaDecodeParams*)0)->k_map) == DECODE_TENSOR_MAPS_OFFSET, "launch.py disagrees on TmaDecodeParams");

// The consumer that computes S and P of a tile.
DEV int owner_of(const DecodeItem& item, int tile) { return (item.end - 1 - tile) & 1; }

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

DEV void load_tiles(SharedStorage& s, const TmaDecodeParams& p) {
  const bool acts = threadIdx.x == 0;           // by TMA
  if (kTma && acts) tma_prefetch_map(&p.k_map);
  const u64 policy = l2_policy(true);           // parts, lengths and code stay in the L2 cache
  Ring<kStages> kv;
  u32 q_phase = 0;
  RowsOfThread rows;
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const Cache cache(p, item.batch, item.cached);
    const int slot = kPaged ? 0 : cache.slot(0);
    const auto is_whole = [&](int tile) { return kTma && tile >= item.begin && (tile + 1) * kBlockN <= item.cached; };
    const auto slot_of_tile = [&](int tile) { return kPaged && is_whole(tile) ? cache.slot(tile * kBlockN) : slot; };
    int next_slot = slot_of_tile(item.end - 1);
    #pragma unroll 1
    for (int tile = item.end - 1; tile >= item.begin; tile--, kv.next()) {
      const bool whole = is_whole(tile);
      const int tile_slot = next_slot, first_row = kPaged ? (u32)(tile * kBlockN) % (u32)p.page_size : tile * kBlockN;
      next_slot = slot_of_tile(tile - 1);       // what a table says is there when it is needed
      if (!whole) {
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
      }
      const u32 sK = shared_address(s.sK[kv.stage]);
      const int owner = owner_of(item, tile);
      #pragma unroll 1
      for (int part = 0; part < kParts; part++) {
        const u32 ready = shared_address(&s.ready[kv.stage][part]);
        if (part != 1) mbarrier_wait(shared_address(&s.free[kv.stage][part ? owner ^ 1 : owner]), kv.phase ^ 1);
        if (!whole) {
          #pragma unroll 1
          for (int i = 0; i < panels_of(part); i++) rows.copy_panel<KLayout>(sK, panel_of(part, i, owner));
          cp_async_arrive(ready);
        } else {
          if (acts) {
            mbarrier_expect_more(ready, panels_of(part) * KLayout::kPanelBytes);
            #pragma unroll 1
            for (int i = 0; i < panels_of(part); i++) {
              const int panel = panel_of(part, i, owner);
              tma_load_hinted(sK + panel * KLayout::kPanelBytes, &p.k_map, ready, panel * KLayout::kPanel, first_row,
                              item.head_k, tile_slot, policy);
            }
          }
          // Each warp for itself: one that is late must not miss a phase of `free`.
          if (threadIdx.x % 32 == 0) mbarrier_arrive_for(ready, 32);
        }
        __syncwarp();
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
        for (int part = 0; part < kParts; part++) {
          #pragma unroll
          for (int i = 0; i < panels_of(part); i++) rows.copy_panel<QLayout>(shared_address(s.sQ), panel_of(part, i, 0));
          cp_async_arrive(shared_address(&s.q_ready[part]));
        }
        q_phase ^= 1;
      }
    }
  }
  cp_async_commit();
  if (!kFixedSplits && threadIdx.x / 32 == 3) tell_parts(p);    // beside the last tiles
  cp_async_wait<0>();
}

// ----------------------------------------------------------------------------------------------------------------- computing

using Output = float[kHalfV / 2];

// Starts S = Q K^T, or S += Q K^T, over kPanels panels from `q` and `k` on, and over those at `q_past` and `k_past`.
template <int kPanels> DEV void multiply_qk(Scores& rS, u64 q, u64 k, bool add) {
  wgmma_fence();
  #pragma unroll
  for (int d = 0; d < kPanels * 4; d++) {
    const int at = d / 4 * KLayout::kPanelBytes + d % 4 * 32;
    wgmma_ss<Element>(rS, descriptor_step(q, at), descriptor_step(k, at), add || d > 0);
  }
}
DEV void multiply_qk_rest(Scores& rS, u64 q, u64 k, u64 q_past, u64 k_past) {
  multiply_qk<kHalfPanels>(rS, q, k, true);
  #pragma unroll
  for (int d = 0; d < 4; d++) wgmma_ss<Element>(rS, descriptor_step(q_past, d * 32), descriptor_step(k_past, d * 32), true);
  wgmma_commit();
}
static_assert(QLayout::kPanelBytes == KLayout::kPanelBytes, "Q and K are stepped alike");
// Starts O += P V, or O = P V, over half `part` of the keys, with P in shared memory.
DEV void multiply_pv(Output& rO, u64 sP, u64 v, int part, bool add) {
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < kBlockN / 32; i++) {
    const int key = part * (kBlockN / 32) + i;
    wgmma_ss_trans<Element>(rO, descriptor_step(sP, key * 32), descriptor_step(v, key * 16 * VLayout::kSwizzleBytes),
                            add || i > 0);
  }
  wgmma_commit();
}

// P = exp2(logits - max) of half `part` of the keys, to registers and to rows of shared memory that are the warp's own.
DEV void make_weights(Weights& rP, RowStats& rows, Scores& rS, float exponent_scale, u32 sP, int part) {
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const float subtract = subtrahend(rows.max[r]);
    #pragma unroll
    for (int i = part * (kBlockN / 8); i < (part + 1) * (kBlockN / 8); i++) {
      float& x = rS[i / 2 * 4 + r * 2 + i % 2];
      x = exp2_fast(fmaf(x, exponent_scale, -subtract));
      rows.sum[r] += x;
    }
  }
  #pragma unroll
  for (int j = part * (kBlockN / 32); j < (part + 1) * (kBlockN / 32); j++) {
    #pragma unroll
    for (int i = 0; i < 4; i++) rP[j][i] = pack2<Element>(rS[j * 8 + i * 2], rS[j * 8 + i * 2 + 1]);
    store_fragment<PLayout>(sP, warp_row(), j * 2, rP[j]);
  }
}

constexpr u32 kBarrier = 1;                     // of the consumers

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
// call it together, once S and P are there, and all of V. `is_fresh`: O holds nothing of this item yet.
DEV void take_apart(Output& rO, bool& is_fresh, SharedStorage& s, u32 stage, int half, const DecodeParams& p,
                    const DecodeItem& item, int tile) {
  const u32 v = shared_address(s.sK[stage]), thread = thread_index() - kLoaders;
  if (!barrier_or(kBarrier, kConsumers, scan_nonfinite<Element, VLayout::kBytes, kConsumers, false>(v, thread))) return;
  if (is_fresh) {
    #pragma unroll
    for (int i = 0; i < kHalfV / 2; i++) rO[i] = 0.f;
    is_fresh = false;
  }
  add_nonfinite_seen(rO, shared_address(s.sP), v + half * (VLayout::kBytes / 2), p, item, tile);
  barrier_sync(kBarrier, kConsumers);
  scan_nonfinite<Element, VLayout::kBytes, kConsumers, true>(v, thread);
  fence_async_proxy();
  barrier_sync(kBarrier, kConsumers);
}

// Writes what a consumer has of a part as its threads have it, which is how decode_combine_wide reads it.
DEV void write_part(const Output& rO, const float (&inverse)[2], const DecodeParams& p, const DecodeItem& item, int half) {
  struct alignas(16) Four { float x[4]; };
  if (item.row_tile * kBlockM + warp_row() >= num_rows(p)) return;      // no row of the warp exists
  float* gO = (float*)p.partial_out + (item.slot * 2 + half) * (kBlockM * kHalfV) + thread_index() % 128 * 4;
  #pragma unroll
  for (int i = 0; i < kHalfV / 8; i++) {
    Four x;
    // A row that sees no key, or only logits of -inf, is 0, whatever the values are.
    #pragma unroll
    for (int e = 0; e < 4; e++) x.x[e] = inverse[e / 2] == 0.f ? 0.f : rO[i * 4 + e] * inverse[e / 2];
    *(Four*)(gO + i * 512) = x;
  }
}

// A consumer, a warpgroup.
DEV void consume(SharedStorage& s, const DecodeParams& p) {
  const int half = uniform(thread_index() / 128) - 1;
  const HeadScore score(p);
  const float exponent_scale = score.exponent_scale();
  const u64 q = descriptor_of<QLayout>(shared_address(s.sQ));
  const u64 k = descriptor_of<KLayout>(shared_address(s.sK));
  const u64 sP = descriptor_of<PLayout>(shared_address(s.sP));
  u32 tiles_before = 0, q_phase = 0;            // of the items before; of Q, and which of the sums
  Scores rS;
  Output rO;
  #pragma unroll 1
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const HiddenKeys hidden(p, item);
    const int count = item.end - item.begin;
    RowStats rows = {{-infinity(0.f), -infinity(0.f)}, {0.f, 0.f}};
    bool is_fresh = true;
    // Brings O and the rows to where tile `i` of the item, the other consumer's, begins.
    const auto follow = [&](int i) {
      const u32 at = tiles_before + i, stage = at % kStages, phase = at / kStages & 1;
      mbarrier_wait(shared_address(&s.p_ready[stage][0]), phase);
      mbarrier_wait(shared_address(&s.ready[stage][2]), phase);
      fence_async_proxy();
      float alpha[2];
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        alpha[r] = s.alpha[stage][lane_row() + r * 8], rows.max[r] = s.max[stage][lane_row() + r * 8];
        rows.sum[r] *= alpha[r];
      }
      if (!__any_sync(0xffffffff, alpha[0] != 1.f || alpha[1] != 1.f)) return;    // as always where O is fresh
      wgmma_wait<0>();                          // seldom; else ptxas would wait each time
      wgmma_pin(rS);
      scale_output(rO, alpha);
    };
    // Starts O of that tile.
    const auto multiply_other = [&](int i) {
      const u32 at = tiles_before + i, stage = uniform(at % kStages);
      const u64 v = descriptor_step(k, stage * KLayout::kBytes + half * (VLayout::kBytes / 2));
      multiply_pv(rO, sP, v, 0, !is_fresh);
      mbarrier_wait(shared_address(&s.p_ready[stage][1]), at / kStages & 1);
      fence_async_proxy();
      multiply_pv(rO, sP, v, 1, true);
      is_fresh = false;
    };
    // All that is to be done with it, nothing being in flight.
    const auto finish_other = [&](int i) {
      const u32 at = tiles_before + i, stage = at % kStages, phase = at / kStages & 1;
      const int tile = item.end - 1 - i;
      follow(i);
      if (hidden.any_in(tile)) {
        mbarrier_wait(shared_address(&s.p_ready[stage][1]), phase);
        for (int part = 0; part < 2; part++) mbarrier_wait(shared_address(&s.ready[stage][part]), phase);
        take_apart(rO, is_fresh, s, stage, half, p, item, tile);
      }
      multiply_other(i);
      wgmma_wait<0>();
      wgmma_pin(rO);
      arrive_warp(s.free[stage][half]);
    };
    if (half >= count) arrive_warp(s.q_free);

    #pragma unroll 1
    for (int i = half; i < count; i += 2) {
      const int tile = item.end - 1 - i;
      const bool has_beside = i > 0 && !hidden.any_in(tile + 1);
      if (i > 0 && !has_beside) finish_other(i - 1);
      // Q's descriptors depend on the stage too, by nothing: before the loop they would not all find uniform registers.
      const u32 stage = uniform((tiles_before + i) % kStages), phase = (tiles_before + i) / kStages & 1;
      const u64 k_tile = descriptor_step(k, stage * KLayout::kBytes), q_tile = descriptor_step(q, stage / kStages * 16);
      constexpr u32 kHalf = kHalfPanels * KLayout::kPanelBytes, kPast = kPastV * KLayout::kPanelBytes;
      const u32 own = half * kHalf, not_own = (half ^ 1) * kHalf;
      #pragma unroll
      for (int part = 0; part < 2; part++) {
        const u32 at = own + part * (kHalf / 2);
        if (i == half) mbarrier_wait(shared_address(&s.q_ready[half ? 2 : part]), q_phase);    // the last part is behind all
        mbarrier_wait(shared_address(&s.ready[stage][part]), phase);
        fence_async_proxy();
        multiply_qk<kHalfPanels / 2>(rS, descriptor_step(q_tile, at), descriptor_step(k_tile, at), part > 0);
        wgmma_commit();
      }
      if (has_beside) {
        follow(i - 1);
        multiply_other(i - 1);
      }
      if (i == 0) mbarrier_wait(shared_address(&s.q_ready[2]), q_phase);
      mbarrier_wait(shared_address(&s.ready[stage][2]), phase);
      fence_async_proxy();
      multiply_qk_rest(rS, descriptor_step(q_tile, not_own), descriptor_step(k_tile, not_own), descriptor_step(q_tile, kPast),
                       descriptor_step(k_tile, kPast));
      if (has_beside) {
        wgmma_wait<1>();
        wgmma_pin(rO);
        arrive_warp(s.free[stage ^ 1][half]);
      }
      wgmma_wait<0>();
      wgmma_pin(rS);
      if (i + 2 >= count) arrive_warp(s.q_free);

      float alpha[2] = {1.f, 1.f};
      Weights rP;
      apply_score(rS, score);
      if (item.tiles.is_partial(tile)) apply_mask(rS, p, item, tile);
      const bool moved = update_max(rows, rS, alpha, exponent_scale);
      if (thread_index() % 4 == 0) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
          s.alpha[stage][lane_row() + r * 8] = alpha[r];
          s.max[stage][lane_row() + r * 8] = rows.max[r];
        }
      }
      #pragma unroll
      for (int part = 0; part < 2; part++) {
        make_weights(rP, rows, rS, exponent_scale, shared_address(s.sP), part);
        fence_async_proxy();
        arrive_warp(s.p_ready[stage][part]);
      }

      if (moved && !is_fresh) scale_output(rO, alpha);
      if (hidden.any_in(tile)) take_apart(rO, is_fresh, s, stage, half, p, item, tile);
      multiply_pv(rO, rP, descriptor_step(k_tile, own), !is_fresh);
      is_fresh = false;
      wgmma_wait<0>();
      wgmma_pin(rO);
      arrive_warp(s.free[stage][half]);
    }

    if ((count - 1) % 2 != half) finish_other(count - 1);
    float sum[2], inverse[2];
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] = sum_of_row(rows.sum[r]);
      if (thread_index() % 4 == 0) s.sum[q_phase][half][lane_row() + r * 8] = sum[r];
    }
    barrier_sync(kBarrier, kConsumers);
    #pragma unroll
    for (int r = 0; r < 2; r++) {
      sum[r] += s.sum[q_phase][half ^ 1][lane_row() + r * 8];
      inverse[r] = sum[r] == 0.f ? 0.f : rcp_fast(sum[r]);      // no visible key: O is 0
    }
    tiles_before += count;
    q_phase ^= 1;
    if (half == 0) write_lse(rows, sum, p, item);
    if (item.slot >= 0) {
      write_part(rO, inverse, p, item, half);
    } else {
      DecodeItem whole = item;
      whole.slot = -1;                          // known: what it would do for a part falls away
      write_output(rO, inverse, p, whole, half * kHalfV);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode_sm90(const __grid_constant__ TmaDecodeParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (threadIdx.x / 32 == 1) prefetch_lengths(p);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; i++) {
      for (int part = 0; part < kParts; part++) mbarrier_init(shared_address(&s.ready[i][part]), kLoaders);
      for (int half = 0; half < 2; half++) {
        mbarrier_init(shared_address(&s.free[i][half]), 4);
        mbarrier_init(shared_address(&s.p_ready[i][half]), 4);
      }
    }
    for (int part = 0; part < kParts; part++) mbarrier_init(shared_address(&s.q_ready[part]), kLoaders);
    mbarrier_init(shared_address(&s.q_free), 8);
    mbarrier_init_fence();
  }
  __syncthreads();
  start_dependents();           // the blocks of decode_combine_wide are there when the last of these ends
  run_roles<kLoaderRegisters, kConsumerRegisters>(p, [&] { load_tiles(s, p); }, [&](int) { consume(s, p); });
}
