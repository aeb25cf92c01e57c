// Attention backward on Hopper's warpgroup tensor cores: float16 and bfloat16, sm_90a.
//
//   q, dout [batch, seqlen_q, heads_q, ..], k, v [batch, seqlen_k, heads_k, ..], rows (bwd_delta)  ->  dk, dv; adds to dq_sum
//
// The algorithm of bwd_sm80: of a tile, 128 keys of one key head, dK and dV are summed in registers over all query heads of the
// group and all their query tiles that see the keys. A block stays on its multiprocessor and computes one tile after the other.
// Of a query tile, of kBlockM queries:
//   S^T = K Q^T, dP^T = V dO^T;  P = exp2(S - lse), dS = P * (dP - delta);  dV += P^T dO, dK += dS^T Q;  dQ = dS K
// Two consumers, warpgroups, own 64 keys each: as accumulators P^T and dS^T then are the A operands of dV and dK. Of dQ each has
// a half, rows or columns, over all 128 keys: what the other computed of dS it reads from shared memory. Of warpgroup 0 one warp
// plans tiles and loads their K and V, one loads Q and dO, and two prepare what has landed. A tile lies in slot i, a query tile
// in stage s; dS has stages of its own; K and V may have a slot for all tiles:
//   work_ready[i]: planner -> all, which tile is next             work_free[i]: all -> planner, they have done with it, K and V
//   kv_ready[i]:   planner -> preparers, K and V have landed      raw[s]:       loader -> preparers, Q and dO have landed
//   ready[s]:      preparers -> all, so have the facts of rows    free[s]:      consumers -> loader, the stage has been used
//   ds_free[s]:    consumers -> consumers, both have computed their dQ of a query tile
//   v_free, k_free: consumers -> planner (of V also loader), they have done with V, with K, if all tiles share a slot
//   turn_ready[s]: DETERMINISTIC, loader -> consumers, the key tiles before this one have added their dQ (attn/gradient.cuh)
//   dq_added[s]:    consumers -> planner, they have too: it tells the next key tile, which takes a while
//   turn_passed[s]: planner -> loader, it has done so
// The consumers take turns to start products and are half a query tile apart: beside the exponentials of one run the products of
// the other. dQ of a query tile is computed one later, together with dV and dK of that: the other has written its dS by then. It
// leaves for dq_sum while dV and dK are computed, or is laid down in shared memory, from where TMA adds it. What a consumer has
// written there, dS too, it then shows to TMA and products once the next S and dP are on their way: a fence right behind the
// writing would wait for it.
// What was tried: docs/bwd_sm90.md.
// A query tile is masked only if it is partial. Not here: head_dim above 128, arrays that TMA cannot address (bwd_sm80).
#include "attn/bwd_wgmma.cuh"
#include "ptx/arrive.cuh"
#include "ptx/bulk.cuh"
#include "ptx/reduce.cuh"

constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kStages = STAGES;                 // of Q and dO
constexpr int kDsStages = 2;                    // one is written while the other consumer may still read the last; also of turns
constexpr int kKSlots = K_SLOTS, kVSlots = V_SLOTS;     // kSlots, or one that all tiles share
constexpr bool kDeterministic = DETERMINISTIC;
constexpr bool kStagesDq = STAGES_DQ;           // dQ is added in bulk, from shared memory
// A turn ends behind S and dP of the next query tile; or before the consumer waits for what other blocks add to dQ.
constexpr bool kShortTurns = kDeterministic && HEAD_DIM > 64;
static_assert(kVSlots == kSlots || kVSlots == 1, "V of a tile has a slot");
static_assert(kKSlots == kSlots || (kKSlots == 1 && kVSlots == 1), "where K has one slot, V has, which is free before it");
static_assert(!kDeterministic || (kKSlots == kSlots && kStages == kDsStages), "turns have the phases of stages");
// V in a slot for all tiles is waited for by the planner; or by the loader, where the planner has turns to pass.
constexpr bool kLoaderHasV = kDeterministic && kVSlots == 1;
static_assert(kBlockN == kConsumers * 64, "a consumer owns 64 keys");

// Key tiles that wait for each other under a right mask: visits may ascend (plan_tiles).
constexpr bool kAscends = ASCENDS;
static_assert(!kAscends || (kDeterministic && kMaskRight && !kVarlen), "each key tile begins at a query tile of its own");

// A consumer's half of dQ: 64 rows of 128, or half of the columns. 80 rows are no product's: there dQ^T = K^T dS^T is computed,
// of which a row is a column.
constexpr bool kHalvesRows = kBlockM == 128, kTransposesDq = kBlockM == 80;
constexpr int kDqCols = kHalvesRows ? kHeadDim : kHeadDim / 2;
static_assert(kHalvesRows || kBlockM == 64 || kTransposesDq, "a product has 64 rows");

using QLayout = PanelLayout<kBlockM, kHeadDim>;                 // also of dO
using KLayout = PanelLayout<kBlockN, kHeadDim, K_PANEL>;        // a product begins with a panel: so does a half of the columns
static_assert(kDqCols % K_PANEL == 0, "whole panels of K for dQ");
constexpr int kDqWarpBytes = kDqGroup * kDqCols * 4;            // a warp's part, one piece of dq_sum
static_assert(!(kStagesDq && kTransposesDq), "a warp has parts of dq_sum, not one piece");
static_assert(!(kStagesDq && kDeterministic), "turns are passed behind what has been added");
using VLayout = PanelLayout<kBlockN, kHeadDim>;                 // also of dK and dV
using DsLayout = PanelLayout<kBlockM, kBlockN>;                 // a row is a query; a panel has the keys of a consumer

// A tile of the launch.
struct Tile : KeyTile {
  float* gDqSum;
  int* turns;                                   // DETERMINISTIC: of query tile 0 of that head
  int row_k;                                    // for TMA: its first key
  int step;                                     // from a visited query tile to the next: -1, or 1 where they ascend
  int keys_are_poisoned;
};

// DETERMINISTIC: a turn to wait for: of how many key tiles its counter must tell.
struct Turn { const int* counter; int key_tiles; };
constexpr u32 kTurns = 4;                       // that the loader knows at a time: query tiles in stages, and the last before
static_assert(kStages < kTurns, "a stage is free when the turn of the query tile before has been there");

struct alignas(1024) SharedStorage {
  u8 sK[kKSlots][KLayout::kBytes];
  u8 sV[kVSlots][VLayout::kBytes];
  u8 sQ[kStages][QLayout::kBytes];
  u8 sDO[kStages][QLayout::kBytes];
  u8 sDS[kDsStages][DsLayout::kBytes];
  u8 sDQ[kStagesDq ? kConsumers * 4 : 1][kStagesDq ? kDqWarpBytes : 16];       // a piece of a warp; no array is empty
  float lse[kStages][kBlockM], delta[kStages][kBlockM];         // RowFacts
  float key_poison[kKSlots][kBlockN];          // NaN for a key whose K held NaN or Inf; only if some query tile is partial
  u64 work_ready[kSlots], work_free[kSlots], kv_ready[kSlots], raw[kStages], ready[kStages], free[kStages], ds_free[kDsStages];
  u64 turn_ready[kDsStages], dq_added[kDsStages], turn_passed[kDsStages], nears_end, v_free, k_free;
  Turn turns[kDeterministic ? kTurns : 1];      // of the loader, who has no registers for them
  volatile Tile work[kSlots];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

DEV bool is_partial(const volatile Tile& t, const Visit& v) {
  return is_partial((const volatile KeyTile&)t, v) | (kHasMask && t.keys_are_poisoned);
}

// The visits of a tile, as Visit has them but for kAscends.
DEV int first_tile(const volatile Tile& t) { return kAscends && t.step > 0 ? t.begin : t.end - 1; }
DEV int step_of(const volatile Tile& t) { return kAscends ? t.step : -1; }
DEV void advance(Visit& v, const volatile Tile& t, int heads) {
  if (++v.head == heads) v.tile += step_of(t), v.head = 0;
}

// DETERMINISTIC: tells the next key tile that this one has added its dQ of visit `i`; `passed` visits, of all tiles, were before.
// By one thread.
DEV void pass_turn(SharedStorage& s, const BwdParams& p, const volatile Tile& t, int i, u32 passed) {
  const u32 stage = passed % kDsStages, phase = passed / kDsStages % 2;
  const int heads = t.heads;
  mbarrier_wait(shared_address(&s.dq_added[stage]), phase);
  const int tile = first_tile(t) + i / heads * step_of(t);
  pass_turn(t.turns + i % heads * p.num_query_tiles + tile);
  mbarrier_arrive(shared_address(&s.turn_passed[stage]));
}

// DETERMINISTIC: how many visits of a tile are left to pass when the planner tells the next tile: the loader is ahead of it.
constexpr int kTurnsAhead = 4;

// The planner loads K and V of its tiles. K that shares its slot comes late, behind dQ of the last query tile: it is brought into
// the L2 cache before, and lands while dK and dV are written out.
// DETERMINISTIC: a tile waits only for tiles of lesser numbers, which blocks that run have taken: the least that is not finished
// waits for none, and its block, which computes its tiles in their order, is at it. There the planner passes on turns: behind
// telling a tile those of the last visits of the tile before, and of all but the last of this one. To tell one it waits for
// nothing but the consumers of its block, who by then have all turns of the tile before the last. It asks for the next number one
// visit early, as the turns do not wait for it then.
// kAscends: the last key tile, which few queries see, is the first of its head and visits begin with the first query tile that
// sees the keys: another one for each key tile, which is the second of the key tile after it. So they wait for each other less
// than where all begin with the last query tile. Long tiles come last then, so the last heads do as otherwise.
DEV void plan_tiles(SharedStorage& s, const TmaParams& p) {
  u32 v_phase = 0, passed = 0;
  int visits_left = 0;                          // of the tile before, whose turns are to be passed on
  u32 next = kDeterministic && thread_index() % 32 == 0 ? take_ticket(p) : 0;
  const auto take = [&] { return kDeterministic ? next : gridDim.x + take_ticket(p); };
  const auto load_k = [&](const KeyWork<kBlockM, kBlockN>& keys, const Work& work, u32 slot) {
    load_tile<KLayout>(shared_address(s.sK[slot % kKSlots]), &p.k_map, shared_address(&s.kv_ready[slot]), keys.row_k(), work.head,
                       keys.seq.batch);
  };
  const auto load_v = [&](const KeyWork<kBlockM, kBlockN>& keys, const Work& work, u32 slot) {
    load_tile<VLayout>(shared_address(s.sV[slot % kVSlots]), &p.v_map, shared_address(&s.kv_ready[slot]), keys.row_k(), work.head,
                       keys.seq.batch);
  };
  plan<kKeySide, !kDeterministic>(s, p, kDeterministic, take, [&](Work work, bool is_there, u32 slot) {
    const u32 head = work.batch * p.heads_k + work.head, last_head = p.batch * p.heads_k - 1, together = p.heads_in_group;
    const bool ascends = kAscends && is_there && head / together != last_head / together;
    if (ascends) work.tile = p.num_tiles - 1 - work.tile;
    const KeyWork<kBlockM, kBlockN> keys(p, work, is_there);
    const Sequence& seq = keys.seq;
    volatile Tile& t = s.work[slot];
    if (thread_index() % 32 == 0) {
      const u32 kv_ready = shared_address(&s.kv_ready[slot]);
      if (keys.visits > 0) {
        mbarrier_expect(kv_ready, KLayout::kBytes + VLayout::kBytes);
        if (kKSlots > 1) load_k(keys, work, slot);
        else prefetch_tile<KLayout>(&p.k_map, keys.row_k(), work.head, seq.batch);
        if (kVSlots > 1) load_v(keys, work, slot);
      } else {
        mbarrier_arrive(kv_ready);
      }
      keys.tell(t, p);
      t.keys_are_poisoned = 0;
      t.step = ascends ? 1 : -1;
      t.gDqSum = (float*)p.dq_sum + first_dq_group(p, seq, work.batch, keys.first_head) * (kDqGroup * kHeadDim);
      if (kDeterministic) t.turns = turn_of(p, seq, work.batch, keys.first_head, 0, kBlockM);
      if (kLoaderHasV) t.row_k = keys.row_k();
      mbarrier_arrive(shared_address(&s.work_ready[slot]));
      if (kVSlots == 1 && !kLoaderHasV && keys.visits > 0) {
        mbarrier_wait(shared_address(&s.v_free), v_phase ^ 1);
        load_v(keys, work, slot);
        if (kKSlots == 1) {
          mbarrier_wait(shared_address(&s.k_free), v_phase ^ 1);
          load_k(keys, work, slot);
        }
        v_phase ^= 1;
      }
      if constexpr (kDeterministic) {
        const int now = max(t.visits - kTurnsAhead, 0);
        #pragma unroll 1
        for (int i = -visits_left; i < now; i++, passed++) {
          const volatile Tile& of = s.work[i < 0 ? slot ^ 1 : slot];
          if (i == now - 1) next = take_ticket(p);
          pass_turn(s, p, of, i < 0 ? of.visits + i : i, passed);
        }
        if (now == -visits_left) next = take_ticket(p);         // there was none to pass
        visits_left = t.visits - now;
      }
    }
    __syncwarp();
  });
}

// DETERMINISTIC: how many key tiles add to dQ of a query tile before this one (KeyTiles).
DEV int key_tiles_before(const volatile Tile& t, const BwdParams& p, const Visit& v) {
  const HeadMask mask(p, t.seqlen_q, t.seqlen_k);
  const int tile = t.first_key / kBlockN, first_row = v.tile * kBlockM;
  if (kAscends && t.step > 0) return (mask.key_end(min(first_row + kBlockM, t.seqlen_q) - 1) - 1) / kBlockN - tile;
  return tile - mask.key_begin(first_row) / kBlockN;
}

// The loader, one thread. It waits for turns too: asks for the next one while it waits for whatever else. That of two visits
// before must have been passed on, as dq_added tells no more apart.
DEV void load_tiles(SharedStorage& s, const TmaParams& p) {
  Ring<kSlots> slot;
  Ring<kStages> at;
  u32 v_phase = 1;
  u32 asked = 0, served = 0;                    // turns
  const auto ask_turn = [&] {
    const u32 stage = served % kDsStages;
    if (served == asked || !mbarrier_test(shared_address(&s.turn_passed[stage]), served / kDsStages % 2 ^ 1)) return;
    const volatile Turn& turn = s.turns[served % kTurns];
    if (load_acquire(turn.counter) < turn.key_tiles) return;
    mbarrier_arrive(shared_address(&s.turn_ready[stage]));
    served++;
  };
  const auto wait = [&](u64& barrier, u32 parity) {
    if constexpr (kDeterministic) {
      while (!mbarrier_test(shared_address(&barrier), parity)) ask_turn();
    } else {
      mbarrier_wait(shared_address(&barrier), parity);
    }
  };
  #pragma unroll 1
  for (;; slot.next()) {
    wait(s.work_ready[slot.stage], slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = t.visits, heads = t.heads;
    if (visits < 0) break;
    Visit visit = {0, first_tile(t)};
    const int near_end = max(visits - kTakeAhead, 0);
    if (!kDeterministic && visits == 0) mbarrier_arrive(shared_address(&s.nears_end));
    #pragma unroll 1
    for (int i = 0; i < visits; i++) {
      if (!kDeterministic && i == near_end) mbarrier_arrive(shared_address(&s.nears_end));
      wait(s.free[at.stage], at.phase ^ 1);
      const int row = t.row_q + visit.tile * kBlockM, head = t.first_head + visit.head, batch = t.batch_axis;
      const u32 raw = shared_address(&s.raw[at.stage]);
      mbarrier_expect(raw, 2 * QLayout::kBytes);
      load_tile<QLayout>(shared_address(s.sQ[at.stage]), &p.q_map, raw, row, head, batch);
      load_tile<QLayout>(shared_address(s.sDO[at.stage]), &p.dout_map, raw, row, head, batch);
      if (kLoaderHasV && i == 0) {
        wait(s.v_free, v_phase);
        load_tile<VLayout>(shared_address(s.sV[0]), &p.v_map, shared_address(&s.kv_ready[slot.stage]), t.row_k,
                           t.first_head / heads, batch);
        v_phase ^= 1;
      }
      if constexpr (kDeterministic) {
        volatile Turn& turn = s.turns[asked++ % kTurns];
        turn.counter = t.turns + visit.head * p.num_query_tiles + visit.tile;
        turn.key_tiles = key_tiles_before(t, p, visit);
      }
      advance(visit, t, heads);
      at.next();
    }
    mbarrier_arrive(shared_address(&s.work_free[slot.stage]));
  }
  if constexpr (kDeterministic)
    while (served != asked) ask_turn();
}

DEV void separate_nonfinite_keys(SharedStorage& s, u32 slot) {
  #pragma unroll
  for (int row = preparer(); row < kBlockN; row += kPreparing) s.key_poison[slot % kKSlots][row] = 0.f;
  sync_preparers();
  separate_nonfinite<KLayout>(shared_address(s.sK[slot % kKSlots]), [&](int row) {
    s.key_poison[slot % kKSlots][row] = poison();
    s.work[slot].keys_are_poisoned = 1;
  });
}

// The preparers: facts of rows, and what must not be in the tiles.
DEV void prepare_tiles(SharedStorage& s, const BwdParams& p) {
  constexpr int kRows = (kBlockM + kPreparing - 1) / kPreparing;        // of a thread, or one less
  const auto has_row = [](int row) { return kBlockM % kPreparing == 0 || row < kBlockM; };
  Ring<kSlots> slot;
  Ring<kStages> at;
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = uniform(t.visits);
    if (visits < 0) return;
    const int heads = t.heads;
    Visit visit = {0, uniform(first_tile(t))};
    RowFacts<float> facts[kRows];
    // Asked for before the query tile has landed.
    const auto load_facts = [&] {
      const int first_row = visit.tile * kBlockM, seqlen_q = t.seqlen_q;
      const RowFacts<float>* gRows = t.gRows + (i64)visit.head * p.seqlen_q;
      #pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int tile_row = j * kPreparing + preparer(), row = first_row + tile_row;
        facts[j] = has_row(tile_row) && row < seqlen_q ? gRows[row] : RowFacts<float>{infinity(0.f), 0.f};
      }
    };
    if (visits > 0) {
      load_facts();
      mbarrier_wait(shared_address(&s.kv_ready[slot.stage]), slot.phase);
      if (kVarlen) clear_rows<KLayout>(shared_address(s.sK[slot.stage % kKSlots]), t.seqlen_k - t.first_key);
      if (kHasMask && (is_partial(t, {0, t.begin}) || is_partial(t, {0, t.end - 1}))) separate_nonfinite_keys(s, slot.stage);
      if (kVarlen || kHasMask) {
        fence_async_proxy();
        sync_preparers();
      }
    }
    #pragma unroll 1
    for (int i = 0; i < visits; i++, at.next()) {
      const int rows = t.seqlen_q - visit.tile * kBlockM;
      bool may_be_poisoned = false;
      mbarrier_wait(shared_address(&s.raw[at.stage]), at.phase);
      #pragma unroll
      for (int j = 0; j < kRows; j++) {
        const int row = j * kPreparing + preparer();
        if (!has_row(row)) continue;
        s.lse[at.stage][row] = facts[j].lse_log2;
        s.delta[at.stage][row] = facts[j].delta;
        may_be_poisoned |= row < rows && may_be_nonfinite<HeadScore::kHasSlope>(facts[j]);
      }
      clear_queries<QLayout>(s, at.stage, rows, is_partial(t, visit), may_be_poisoned);
      arrive_warp(s.ready[at.stage]);
      advance(visit, t, heads);
      if (i + 1 < visits) load_facts();
    }
    arrive_warp(s.work_free[slot.stage]);
  }
}

using Scores = float[kBlockM / 2];
using Weights = u32[kBlockM / 16][4];
using DqPart = float[kTransposesDq ? kBlockM / 2 : kDqCols / 2];

// `n` times 16 columns, or 16 rows, further on.
template <typename Layout> DEV u64 step_columns(u64 descriptor, int n) {
  constexpr int kSteps = Layout::kPanel / 16;
  return descriptor_step(descriptor, n / kSteps * Layout::kPanelBytes + n % kSteps * 32);
}
template <typename Layout> DEV u64 step_rows(u64 descriptor, int n) {
  return descriptor_step(descriptor, n * 16 * Layout::kSwizzleBytes);
}

// Starts S^T = K Q^T or dP^T = V dO^T.
template <typename KeyLayout> DEV void multiply_scores(Scores& rS, u64 keys, u64 queries) {
  wgmma_fence();
  #pragma unroll
  for (int d = 0; d < kHeadDim / 16; d++)
    wgmma_ss<Element>(rS, step_columns<KeyLayout>(keys, d), step_columns<QLayout>(queries, d), d > 0);
  wgmma_commit();
}
// Starts dV += P^T dO or dK += dS^T Q.
DEV void accumulate(Gradient& acc, const Weights& rA, u64 queries) { multiply_weights<Element, QLayout>(acc, rA, queries, true); }
// Starts dQ = dS K, or dQ^T.
template <int kSize> DEV void multiply_dq(float (&rDQ)[kSize], u64 ds, u64 k) {
  wgmma_fence();
  #pragma unroll
  for (int key = 0; key < kBlockN / 16; key++) {
    const u64 ds_keys = step_columns<DsLayout>(ds, key), k_keys = step_rows<KLayout>(k, key);
    if constexpr (kSize == 40) wgmma_ss_at<Element>(rDQ, k_keys, ds_keys, key > 0);
    else wgmma_ss_trans<Element>(rDQ, ds_keys, k_keys, key > 0);
  }
  wgmma_commit();
}

// P in place of raw products.
DEV void exponentiate(Scores& rS, const HeadScore& score, const float* lse) {
  #pragma unroll
  for (int n = 0; n < kBlockM / 8; n++) {
    const Pair f = lane_pair(lse + n * 8);
    #pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; i++)
      rS[i] = exp2_fast(fmaf(score.logit(rS[i]), score.exponent_scale(), -f.x[i % 2]));
  }
}
// dS in place of dP, and P in place of raw products if that was left to do: the slope needs the logits.
DEV void softmax_gradient(Scores& rS, Scores& rDP, const HeadScore& score, const float* lse, const float* delta) {
  #pragma unroll
  for (int n = 0; n < kBlockM / 8; n++) {
    const Pair f = lane_pair(delta + n * 8);
    #pragma unroll
    for (int i = 4 * n; i < 4 * n + 4; i++) {
      rDP[i] -= f.x[i % 2];
      if constexpr (HeadScore::kHasSlope) {
        const float logit = score.logit(rS[i]);
        rDP[i] *= score.slope(logit);
        rS[i] = exp2_fast(fmaf(logit, score.exponent_scale(), -lane_pair(lse + n * 8).x[i % 2]));
      }
      rDP[i] *= rS[i];
    }
  }
}

// P and dS of pairs that do not see each other become 0 whatever they were, those of poisoned keys NaN.
DEV void apply_mask(Scores& rP, Scores& rDS, const SharedStorage& s, u32 slot, const BwdParams& p, int warp_key, int first_row) {
  const volatile Tile& t = s.work[slot];
  const HeadMask mask(p, t.seqlen_q, t.seqlen_k);
  const int lane = thread_index() % 32, lane_row = first_row + lane % 4 * 2;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int tile_key = warp_key + r * 8 + lane / 4, key = t.first_key + tile_key;
    const int begin = mask.row_begin(key) - lane_row, end = key < mask.seqlen_k ? mask.row_end(key) - lane_row : begin;
    const float poison = kHasMask ? s.key_poison[slot % kKSlots][tile_key] : 0.f;
    #pragma unroll
    for (int i = 0; i < kBlockM / 4; i++) {
      const int row = i / 2 * 8 + i % 2;
      const bool visible = row >= begin && row < end;
      float& prob = rP[i / 2 * 4 + r * 2 + i % 2];
      float& ds = rDS[i / 2 * 4 + r * 2 + i % 2];
      prob = visible ? prob + poison : 0.f;
      ds = visible ? ds + poison : 0.f;
    }
  }
}

// dS^T of a warp's 16 keys to the tile of dS.
DEV void store_ds(u32 tile, const Weights& rA, int warp_key) {
  const u32 lane = thread_index() % 32;
  const u32 lane_ds = tile + DsLayout::offset(lane % 8 + lane / 16 * 8, warp_key / 8 + lane / 8 % 2);
  #pragma unroll
  for (int m = 0; m < kBlockM / 16; m++) stmatrix_x4_trans(lane_ds + m * 16 * DsLayout::kSwizzleBytes, rA[m]);
}

// Where this lane's part of dQ goes. Groups past the end have dS = 0: they add nothing to the last one, without a branch. Rows
// past the end may get a NaN of K there, which nothing reads.
DEV float* dq_of(const volatile Tile& t, const BwdParams& p, const Visit& v, int consumer) {
  const u32 lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int group = v.tile * (kBlockM / kDqGroup) + (kHalvesRows ? consumer * 4 : 0) + warp;
  const i64 head_group = v.head * num_dq_groups(p) + min(group, (t.seqlen_q - 1) / kDqGroup);
  return t.gDqSum + head_group * (kDqGroup * kHeadDim) + (kHalvesRows ? 0 : consumer * (kDqCols / 8) * 128) + lane * 4;
}
// To the piece of shared memory of this warp, once TMA has read what lay there.
DEV void stage_dq(u32 piece, const DqPart& rDQ) {
  const u32 lane = thread_index() % 32;
  bulk_wait_read<0>();
  __syncwarp();
  #pragma unroll
  for (int n = 0; n < (int)(sizeof(DqPart) / 16); n++)
    store_shared(piece + n * 512 + lane * 16, Chunk{__float_as_uint(rDQ[4 * n]), __float_as_uint(rDQ[4 * n + 1]),
                                                    __float_as_uint(rDQ[4 * n + 2]), __float_as_uint(rDQ[4 * n + 3])});
}
// Units of 16 rows by 8 columns.
DEV void add_dq(float* dst, const DqPart& rDQ) {
  #pragma unroll
  for (int n = 0; n < kDqCols / 8; n++) {
    const float unit[4] = {rDQ[4 * n], rDQ[4 * n + 1], rDQ[4 * n + 2], rDQ[4 * n + 3]};
    red_add(dst + n * 128, unit);
  }
}

// dQ^T: units of 16 columns by 8 rows, two of them a group of rows.
DEV void add_dq_transposed(const volatile Tile& t, const BwdParams& p, const Visit& v, int consumer, const DqPart& rDQ) {
  const u32 lane = thread_index() % 32, warp = thread_index() / 32 % 4;
  const int group = v.tile * (kBlockM / kDqGroup), more_groups = (t.seqlen_q - 1) / kDqGroup - group;
  float* dst = t.gDqSum + (v.head * num_dq_groups(p) + group) * (kDqGroup * kHeadDim) + (consumer * 4 + warp) * 256 + lane * 4;
  #pragma unroll
  for (int g = 0; g < (int)sizeof(DqPart) / 32; g++) {
    float* d = dst + min(g, more_groups) * (kDqGroup * kHeadDim);
    #pragma unroll
    for (int n = 2 * g; n < 2 * g + 2; n++) {
      const float unit[4] = {rDQ[4 * n], rDQ[4 * n + 1], rDQ[4 * n + 2], rDQ[4 * n + 3]};
      red_add(d + n % 2 * 128, unit);
    }
  }
}

// The consumer, a warpgroup.
DEV void differentiate(SharedStorage& s, const BwdParams& p, int consumer) {
  const HeadScore score(p);
  const u64 k = descriptor_of<KLayout>(s.sK[0], consumer * 64), v = descriptor_of<VLayout>(s.sV[0], consumer * 64);
  const u64 q = descriptor_of<QLayout>(s.sQ[0]), dout = descriptor_of<QLayout>(s.sDO[0]);
  // For dQ: rows of dS, columns of K.
  const u64 ds = descriptor_of<DsLayout>(s.sDS[0], kHalvesRows ? consumer * 64 : 0);
  const u64 k_columns = step_columns<KLayout>(descriptor_of<KLayout>(s.sK[0]), kHalvesRows ? 0 : consumer * (kDqCols / 16));
  const int warp_key = consumer * 64 + warp_row();
  const auto sync_consumers = [] { barrier_sync(2, kConsumers * 128); };
  // From slot to slot.
  constexpr u32 kKBytes = kKSlots > 1 ? KLayout::kBytes : 0, kVBytes = kVSlots > 1 ? VLayout::kBytes : 0;
  const bool is_speaker = speaks();             // kept: the loop has a predicate for it

  Ring<kSlots> slot;
  Ring<kStages> at;
  u32 parity = 0;                               // of the query tiles so far
  const auto ds_stage = [&] { return kStages == kDsStages ? at.stage : parity; };
  const auto next_stage = [&] {
    at.next();
    parity ^= 1;
  };
  u32 ds_used = 0;                              // bit s: parity of how many dQ have been computed of stage s of dS
  first_turn(consumer);
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = uniform(t.visits);
    if (visits < 0) break;
    const int heads = uniform(t.heads), full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
    Gradient rDK, rDV;
    clear(rDK);
    clear(rDV);
    Scores rS, rDP;
    Weights rP, rDS;
    DqPart rDQ;
    // The one at hand; the one before, whose dQ is not computed yet; the one whose dQ is in shared memory.
    Visit visit = {0, uniform(first_tile(t))}, last = visit, sent = visit;
    bool are_poisoned = false;
    // What the slot decides depends on the stage too, by nothing: computed before the loop its descriptors would not all find
    // uniform registers.
    const auto in_slot = [&](u64 descriptor, u32 bytes) {
      constexpr u32 kBeyond = kStages == 2 ? 2 : 4;     // a power of two that no stage reaches
      return descriptor_step(descriptor, slot.stage * bytes + at.stage / kBeyond * 16);
    };
    const auto start_scores = [&] {
      multiply_scores<KLayout>(rS, in_slot(k, kKBytes), descriptor_step(q, at.stage * QLayout::kBytes));
      multiply_scores<VLayout>(rDP, in_slot(v, kVBytes), descriptor_step(dout, at.stage * QLayout::kBytes));
    };
    // P and dS in registers, dS in shared memory too.
    const auto finish_scores = [&] {
      wgmma_wait<1>();
      wgmma_pin(rS);
      if (!HeadScore::kHasSlope) exponentiate(rS, score, s.lse[at.stage]);
      wgmma_wait<0>();
      wgmma_pin(rDP);
      softmax_gradient(rS, rDP, score, s.lse[at.stage], s.delta[at.stage]);
      if ((visit.tile < full_begin) | (visit.tile >= full_end) | are_poisoned)
        apply_mask(rS, rDP, s, slot.stage, p, warp_key, visit.tile * kBlockM);
      pack<Element>(rP, rS);
      pack<Element>(rDS, rDP);
      mbarrier_wait(shared_address(&s.ds_free[ds_stage()]), (ds_used >> ds_stage() & 1) ^ 1);
      store_ds(shared_address(s.sDS[ds_stage()]), rDS, warp_key);
      if (!kStagesDq) fence_async_proxy();
    };
    const auto start_dq = [&](u32 stage) {
      ds_used ^= 1 << stage;
      multiply_dq(rDQ, descriptor_step(ds, stage * DsLayout::kBytes), in_slot(k_columns, kKBytes));
    };
    const auto finish_dq = [&](u32 stage, u32 phase) {
      wgmma_pin(rDQ);
      sent = last;
      if (is_speaker) mbarrier_arrive(shared_address(&s.ds_free[stage]));
      if (kDeterministic) mbarrier_wait(shared_address(&s.turn_ready[stage]), phase);
      if constexpr (kStagesDq) stage_dq(shared_address(s.sDQ[warp_key / 16]), rDQ);
      else if constexpr (kTransposesDq) add_dq_transposed(t, p, last, consumer, rDQ);
      else add_dq(dq_of(t, p, last, consumer), rDQ);
      if constexpr (kDeterministic) arrive_warp(s.dq_added[stage]);
    };
    // Shows dS to products of both consumers, and dQ to TMA, which adds it if it `is_there`.
    const auto publish = [&](bool is_there) {
      if constexpr (kStagesDq) {
        fence_async_proxy();
        __syncwarp();
        bulk_add(dq_of(t, p, sent, consumer), shared_address(s.sDQ[warp_key / 16]), kDqWarpBytes,
                 is_there && thread_index() % 32 == 0);
      }
    };
    const auto start_dv_dk = [&] {
      accumulate(rDV, rP, descriptor_step(dout, at.stage * QLayout::kBytes));
      accumulate(rDK, rDS, descriptor_step(q, at.stage * QLayout::kBytes));
      if constexpr (kShortTurns) your_turn(consumer);
    };
    // dV and dK of the query tile at hand, dQ of the one before.
    const auto sum_gradients = [&](bool is_first) {
      my_turn(consumer);
      if (is_first) {                           // a branch that products are not in flight across
        start_dv_dk();
        wgmma_wait<0>();
      } else {
        start_dq(ds_stage() ^ 1);
        start_dv_dk();
        wgmma_wait<2>();
        finish_dq(ds_stage() ^ 1, at.phase ^ ds_stage() ^ 1);      // the phase is of turns
        wgmma_wait<0>();
      }
      wgmma_pin(rDV);
      wgmma_pin(rDK);
      if (is_speaker) mbarrier_arrive(shared_address(&s.free[at.stage]));
      last = visit;
    };

    if (visits > 0) {
      mbarrier_wait(shared_address(&s.ready[at.stage]), at.phase);
      are_poisoned = kHasMask && t.keys_are_poisoned;
      my_turn(consumer);
      start_scores();
      your_turn(consumer);
      finish_scores();
      #pragma unroll 1
      for (int i = 1; i < visits; i++) {
        sum_gradients(i == 1);
        advance(visit, t, heads);
        next_stage();
        mbarrier_wait(shared_address(&s.ready[at.stage]), at.phase);
        start_scores();
        publish(i > 1);
        if constexpr (!kShortTurns) your_turn(consumer);
        finish_scores();
      }
      if (kVSlots == 1 && is_speaker) mbarrier_arrive(shared_address(&s.v_free));
      sum_gradients(visits == 1);
      publish(visits > 1);
      if constexpr (!kShortTurns) your_turn(consumer);
      sync_consumers();                         // dS of the last one is written
      start_dq(ds_stage());
      wgmma_wait<0>();
      if (kKSlots == 1 && is_speaker) mbarrier_arrive(shared_address(&s.k_free));
      finish_dq(ds_stage(), at.phase);
      publish(true);
      next_stage();
    }
    const int rows = t.rows, rows_used = t.seqlen_k - t.first_key;
    write_gradient(t.gDK, p.dk_strides.row, rDK, (float)p.softmax_scale, warp_key, rows, rows_used, p.head_dim);
    write_gradient(t.gDV, p.dv_strides.row, rDV, 1.f, warp_key, rows, rows_used, p.head_dim_v);
    arrive_warp(s.work_free[slot.stage]);
  }
  if (kStagesDq) bulk_wait_read<0>();           // shared memory outlives what is read of it
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_sm90(const __grid_constant__ TmaParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    prefetch_maps(p);
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(shared_address(&s.work_ready[i]), 1);
      mbarrier_init(shared_address(&s.work_free[i]), 1 + kPreparers + kConsumers * 4);
      mbarrier_init(shared_address(&s.kv_ready[i]), 1);
    }
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&s.raw[i]), 1);
      mbarrier_init(shared_address(&s.ready[i]), kPreparers);
      mbarrier_init(shared_address(&s.free[i]), kConsumers);
      if (i >= kDsStages) continue;
      mbarrier_init(shared_address(&s.ds_free[i]), kConsumers);
      mbarrier_init(shared_address(&s.turn_ready[i]), 1);
      mbarrier_init(shared_address(&s.dq_added[i]), kDeterministic ? kConsumers * 4 : kConsumers);
      mbarrier_init(shared_address(&s.turn_passed[i]), 1);
    }
    mbarrier_init(shared_address(&s.nears_end), 1);
    mbarrier_init(shared_address(&s.v_free), kConsumers);
    mbarrier_init(shared_address(&s.k_free), kConsumers);
    mbarrier_init_fence();
  }
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kOtherRegisters>();
    if (warp == 0) plan_tiles(s, p);
    else if (warp <= kPreparers) prepare_tiles(s, p);
    else if (threadIdx.x % 32 == 0) load_tiles(s, p);
  } else {
    set_more_registers<kConsumerRegisters>();
    differentiate(s, p, warpgroup - 1);
  }
}
