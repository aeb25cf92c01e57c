// Attention backward of wide heads on Hopper's warpgroup tensor cores, dq: float16 and bfloat16, sm_90a.
//
//   q, dout [batch, seqlen_q, heads_q, ..], k, v [batch, seqlen_k, heads_k, ..], rows (bwd_delta)  ->  dq
//
// The other half of a backward: bwd_dkv_sm90. A block stays on its multiprocessor and computes one tile after the other: 128
// queries of one head, over all key tiles, of 64, that they see. Two consumers, warpgroups, own 64 rows each from Q to dQ:
//   S = Q K^T, dP = dO V^T;  P = exp2(S - lse), dS = P * (dP - delta);  dQ += dS K
// Of warpgroup 0 one warp plans tiles, one loads, and two prepare K. A tile lies in slot i, a key tile of K in stage s, of V in
// stage v:
//   work_ready[i]: planner -> all, which tile is next              work_free[i]: all -> planner, they have done with it
//   q_ready[c], dout_ready[c]: loader -> consumer c                q_free[c], dout_free[c]: back, they have been multiplied
//   k_raw[s]:   loader -> all, K has landed                      k_ready[s]: preparers -> consumers, NaN has been taken from it
//   v_ready[v]: loader -> consumers, V has landed                k_free[s], v_free[v]: consumers -> loader, all have used it
// The consumers take turns to start products: first dQ of a key tile and S of the next, then dP of that. K has two stages, V of
// 256 columns finds place for one: between both consumers' dP of a key tile and those of the next lie four other products, in
// which it is loaded. What was tried: docs/bwd256_sm90.md.
// A key tile is masked only if it is partial. Not here: arrays that TMA cannot address (bwd_sm80).
#include "attn/bwd_wide.cuh"

constexpr int kBlockM = kConsumers * kRows;
constexpr int kStagesV = STAGES_V;
constexpr bool kPrepares = kHasMask || kVarlen;                 // else K is used as it lands

// A tile of the launch, as KeyTile.
struct Tile {
  const RowFacts<float>* gRows;                 // of its first row
  Element* gDQ;
  int head, head_k, first_row;
  int rows;                                     // of dQ, to write
  int seqlen_q, seqlen_k;
  int row_q, row_k, batch_axis;                 // for TMA: its first row, row 0 of the keys, the last coordinate
  int begin, end, full_begin, full_end;         // KeyTiles; end < 0: there are no more tiles
  DEV bool is_partial(int tile) const volatile { return (tile < full_begin) | (tile >= full_end); }
};

struct alignas(1024) SharedStorage {
  u8 sQ[kConsumers][OperandLayout::kBytes];
  u8 sDO[kConsumers][OperandLayout::kBytes];
  u8 sK[kStages][OperandLayout::kBytes];
  u8 sV[kStagesV][OperandLayout::kBytes];
  float key_poison[kStages][kRows];             // NaN for a key whose K held NaN or Inf; of partial tiles under a mask
  u64 work_ready[kSlots], work_free[kSlots], q_ready[kConsumers], q_free[kConsumers], dout_ready[kConsumers];
  u64 dout_free[kConsumers], k_raw[kStages], k_ready[kStages], k_free[kStages], v_ready[kStagesV], v_free[kStagesV], nears_end;
  volatile Tile work[kSlots];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// The params as a kernel of query tiles has them: those of a dense backward count key tiles, of as many heads at a time as have
// their queries in the L2 cache.
DEV FwdParams by_queries(const BwdParams& p) {
  FwdParams f = p;
  f.num_tiles = (p.seqlen_q + kBlockM - 1) / kBlockM;
  f.heads_in_group = p.heads_in_group * (p.heads_q / p.heads_k);
  return f;
}
// The planner brings Q and dO of its tiles into the L2 cache.
DEV void plan_tiles(SharedStorage& s, const TmaParams& p) {
  const FwdParams launched = by_queries(p);
  const auto take = [&] { return gridDim.x + (u32)atomicAdd(p.turns + 1, 1); };
  plan<kQuerySide, true>(s, launched, false, take, [&](const Work& work, bool is_there, u32 slot) {
    const Sequence seq(p, work);
    const HeadMask mask(p, seq.seqlen_q, seq.seqlen_k);
    const int first_row = work.tile * kBlockM;
    const KeyTiles tiles = KeyTiles::of<kRows>(mask, first_row, min(first_row + kBlockM, seq.seqlen_q));
    volatile Tile& t = s.work[slot];
    if (thread_index() % 32 == 0) {
      const int row_q = seq.first_q + first_row;
      if (is_there && tiles.begin < tiles.end) {
        #pragma unroll 1
        for (int c = 0; c < kConsumers; c++) {
          prefetch_operand(&p.q_map, row_q + c * kRows, work.head, seq.batch);
          prefetch_operand(&p.dout_map, row_q + c * kRows, work.head, seq.batch);
        }
      }
      t.begin = tiles.begin;
      t.end = is_there ? tiles.end : -1;
      t.full_begin = tiles.full_begin;
      t.full_end = tiles.full_end;
      t.head = work.head;
      t.head_k = seq.head_k(work.head);
      t.first_row = first_row;
      t.rows = seq.rows_q - first_row;
      t.seqlen_q = seq.seqlen_q;
      t.seqlen_k = seq.seqlen_k;
      t.row_q = row_q;
      t.row_k = seq.first_k;
      t.batch_axis = seq.batch;
      t.gRows = (const RowFacts<float>*)p.rows + seq.row_index(work.head) + first_row;
      t.gDQ = seq.query_rows((Element*)p.dq, p.dq_strides, work.head) + first_row * p.dq_strides.row;
      mbarrier_arrive(shared_address(&s.work_ready[slot]));
    }
    __syncwarp();
  });
}

// The loader, one warp, of which one thread acts. What comes first is what is free first.
DEV void load_tiles(SharedStorage& s, const TmaParams& p) {
  const bool acts = thread_index() % 32 == 0;
  Ring<kSlots> slot;
  Ring<1> q;
  Ring<kStages> k;
  Ring<kStagesV> v;
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int begin = uniform(t.begin), end = uniform(t.end);
    if (end < 0) return;
    const int near_end = min(begin + kTakeAhead, end) - 1;
    if (begin >= end && acts) mbarrier_arrive(shared_address(&s.nears_end));
    const auto load_q = [&](int c) {
      mbarrier_wait(shared_address(&s.q_free[c]), q.phase ^ 1);
      if (acts) load_operand(s.sQ[c], &p.q_map, s.q_ready[c], t.row_q + c * kRows, t.head, t.batch_axis);
    };
    const auto load_dout = [&](int c) {
      mbarrier_wait(shared_address(&s.dout_free[c]), q.phase ^ 1);
      if (acts) load_operand(s.sDO[c], &p.dout_map, s.dout_ready[c], t.row_q + c * kRows, t.head, t.batch_axis);
    };
    #pragma unroll 1
    for (int tile = end - 1; tile >= begin; tile--) {
      const int row = t.row_k + tile * kRows;
      if (tile == near_end && acts) mbarrier_arrive(shared_address(&s.nears_end));
      mbarrier_wait(shared_address(&s.k_free[k.stage]), k.phase ^ 1);
      if (acts) load_operand(s.sK[k.stage], &p.k_map, s.k_raw[k.stage], row, t.head_k, t.batch_axis);
      if (tile == end - 1) {
        load_q(0);
        load_dout(0);
        load_q(1);
      }
      mbarrier_wait(shared_address(&s.v_free[v.stage]), v.phase ^ 1);
      if (acts) load_operand(s.sV[v.stage], &p.v_map, s.v_ready[v.stage], row, t.head_k, t.batch_axis);
      if (tile == end - 1) {
        load_dout(1);
        q.next();
      }
      k.next();
      v.next();
    }
    arrive_warp(s.work_free[slot.stage]);
  }
}

// The preparers: what must not be in K.
DEV void prepare_tiles(SharedStorage& s) {
  Ring<kSlots> slot;
  Ring<kStages> k;
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int begin = uniform(t.begin), end = uniform(t.end);
    if (end < 0) return;
    #pragma unroll 1
    for (int tile = end - 1; tile >= begin; tile--, k.next()) {
      const u32 keys = shared_address(s.sK[k.stage]);
      mbarrier_wait(shared_address(&s.k_free[k.stage]), k.phase ^ 1);
      if (t.is_partial(tile)) {
        mbarrier_wait(shared_address(&s.k_raw[k.stage]), k.phase);
        if (kVarlen) clear_rows<OperandLayout>(keys, t.seqlen_k - tile * kRows);
        if (kHasMask) {
          static_assert(kPreparing == kRows, "a key for a thread");
          s.key_poison[k.stage][preparer()] = 0.f;
          sync_preparers();
          separate_nonfinite<OperandLayout>(keys, [&](int row) { s.key_poison[k.stage][row] = poison(); });
        }
        fence_async_proxy();
      }
      arrive_warp(s.k_ready[k.stage]);
    }
    arrive_warp(s.work_free[slot.stage]);
  }
}

// What a thread knows of its two rows.
struct Rows { float lse[2], delta[2]; };
DEV Rows rows_of(const volatile Tile& t, int consumer) {
  Rows rows;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = consumer * kRows + warp_row() + r * 8 + (int)(thread_index() % 32 / 4);
    const RowFacts<float> facts = t.first_row + row < t.seqlen_q ? t.gRows[row] : RowFacts<float>{infinity(0.f), 0.f};
    rows.lse[r] = facts.lse_log2, rows.delta[r] = facts.delta;
  }
  return rows;
}

// P in place of raw products, times the slope of the logits.
DEV void exponentiate(Scores& rS, const HeadScore& score, const Rows& rows) {
  #pragma unroll
  for (int i = 0; i < kRows / 2; i++) {
    const float logit = score.logit(rS[i]);
    rS[i] = exp2_fast(fmaf(logit, score.exponent_scale(), -rows.lse[i / 2 % 2]));
    if (HeadScore::kHasSlope) rS[i] *= score.slope(logit);
  }
}
// dS in place of dP.
DEV void softmax_gradient(Scores& rDP, const Scores& rP, const Rows& rows) {
  #pragma unroll
  for (int i = 0; i < kRows / 2; i++) rDP[i] = rP[i] * (rDP[i] - rows.delta[i / 2 % 2]);
}
// 0 for pairs that do not see each other, whatever it was, and NaN for those of poisoned keys.
DEV void apply_mask(Scores& rDS, const volatile Tile& t, const BwdParams& p, const float* key_poison, int consumer,
                    int first_key) {
  const HeadMask mask(p, t.seqlen_q, t.seqlen_k);
  const int lane = thread_index() % 32, lane_key = first_key + lane % 4 * 2;
  int begin[2], end[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = t.first_row + consumer * kRows + warp_row() + r * 8 + lane / 4;
    begin[r] = mask.key_begin(row) - lane_key, end[r] = mask.key_end(row) - lane_key;
  }
  #pragma unroll
  for (int n = 0; n < kRows / 8; n++) {
    const Pair poison = kHasMask ? lane_pair(key_poison + n * 8) : Pair{};
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      const int key = n * 8 + i % 2;
      float& ds = rDS[4 * n + i];
      if (kHasMask) ds += poison.x[i % 2];
      if (key < begin[i / 2] || key >= end[i / 2]) ds = 0.f;
    }
  }
}

// A consumer, a warpgroup.
DEV void differentiate(SharedStorage& s, const BwdParams& p, int consumer) {
  const HeadScore score = kept(HeadScore(p));
  const u64 q = descriptor_of<OperandLayout>(s.sQ[consumer]), dout = descriptor_of<OperandLayout>(s.sDO[consumer]);
  const u64 k = descriptor_of<OperandLayout>(s.sK[0]), v = descriptor_of<OperandLayout>(s.sV[0]);
  Ring<kSlots> slot;
  Ring<1> q_ring;
  Ring<kStages> k_ring;
  Ring<kStagesV> v_ring;
  first_turn(consumer);
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int begin = uniform(t.begin), end = uniform(t.end);
    const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
    if (end < 0) return;
    const Rows rows = rows_of(t, consumer);
    Gradient acc;
    clear(acc);
    Scores rS, rDP;
    Weights rDS;
    int tile = end - 1;
    const auto await_k = [&] {
      mbarrier_wait(shared_address(&s.k_raw[k_ring.stage]), k_ring.phase);
      if (kPrepares) mbarrier_wait(shared_address(&s.k_ready[k_ring.stage]), k_ring.phase);
    };
    // The descriptors of Q, dO and V depend on the stage too, by nothing: computed before the loop they would not all find
    // uniform registers.
    const auto nothing = [&] { return k_ring.stage / kStages * 16; };
    const auto q_at = [&] { return descriptor_step(q, nothing()); };
    const auto k_at = [&] { return descriptor_step(k, k_ring.stage * OperandLayout::kBytes); };
    // P, then dS from it, of the key tile at hand.
    const auto finish_s = [&] {
      wgmma_wait<0>();
      wgmma_pin(rS);
      if (tile == begin && speaks()) mbarrier_arrive(shared_address(&s.q_free[consumer]));
      exponentiate(rS, score, rows);
      wgmma_pin(rS);                            // before dP is started
    };
    const auto start_dp = [&] {
      const u64 a = descriptor_step(dout, nothing()), b = descriptor_step(v, v_ring.stage * OperandLayout::kBytes + nothing());
      mbarrier_wait(shared_address(&s.v_ready[v_ring.stage]), v_ring.phase);
      my_turn(consumer);
      multiply_rows<0>(rDP, a, b);
      multiply_rows<1>(rDP, a, b);
      your_turn(consumer);
    };
    const auto start_dq = [&](u32 stage) { accumulate(acc, rDS, descriptor_step(k, stage * OperandLayout::kBytes)); };
    const auto finish_dq = [&](u32 stage) {
      wgmma_pin(acc);
      if (speaks()) mbarrier_arrive(shared_address(&s.k_free[stage]));
    };
    const auto finish_dp = [&] {
      wgmma_wait<0>();
      wgmma_pin(rDP);
      if (speaks()) {
        mbarrier_arrive(shared_address(&s.v_free[v_ring.stage]));
        if (tile == begin) mbarrier_arrive(shared_address(&s.dout_free[consumer]));
      }
      v_ring.next();
      softmax_gradient(rDP, rS, rows);
      if ((tile < full_begin) | (tile >= full_end)) apply_mask(rDP, t, p, s.key_poison[k_ring.stage], consumer, tile * kRows);
      pack<Element>(rDS, rDP);
    };

    if (begin < end) {
      await_k();
      mbarrier_wait(shared_address(&s.q_ready[consumer]), q_ring.phase);
      my_turn(consumer);
      multiply_rows<0>(rS, q_at(), k_at());
      multiply_rows<1>(rS, q_at(), k_at());
      your_turn(consumer);
      finish_s();
      mbarrier_wait(shared_address(&s.dout_ready[consumer]), q_ring.phase);
      q_ring.next();
      start_dp();
      finish_dp();
      #pragma unroll 1
      while (--tile >= begin) {
        const u32 last = k_ring.stage;
        k_ring.next();
        my_turn(consumer);
        start_dq(last);
        await_k();
        multiply_rows<0>(rS, q_at(), k_at());
        wgmma_wait<1>();                        // while this half is computed the last K is given back
        finish_dq(last);
        multiply_rows<1>(rS, q_at(), k_at());
        your_turn(consumer);
        finish_s();
        start_dp();
        finish_dp();
      }
      my_turn(consumer);
      start_dq(k_ring.stage);
      your_turn(consumer);
      wgmma_wait<0>();
      finish_dq(k_ring.stage);
      k_ring.next();
    }
    const int row = consumer * kRows;
    write_gradient(t.gDQ + row * p.dq_strides.row, p.dq_strides.row, acc, (float)p.softmax_scale, warp_row(), t.rows - row,
                   t.seqlen_q - t.first_row - row, p.head_dim);
    arrive_warp(s.work_free[slot.stage]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_dq_sm90(const __grid_constant__ TmaParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    prefetch_maps(p);
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(shared_address(&s.work_ready[i]), 1);
      mbarrier_init(shared_address(&s.work_free[i]), 1 + kPrepares * kPreparers + kConsumers * 4);
    }
    for (int i = 0; i < kConsumers; i++) {
      mbarrier_init(shared_address(&s.q_ready[i]), 1);
      mbarrier_init(shared_address(&s.q_free[i]), 1);
      mbarrier_init(shared_address(&s.dout_ready[i]), 1);
      mbarrier_init(shared_address(&s.dout_free[i]), 1);
    }
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&s.k_raw[i]), 1);
      mbarrier_init(shared_address(&s.k_ready[i]), kPreparers);
      mbarrier_init(shared_address(&s.k_free[i]), kConsumers);
    }
    for (int i = 0; i < kStagesV; i++) {
      mbarrier_init(shared_address(&s.v_ready[i]), 1);
      mbarrier_init(shared_address(&s.v_free[i]), kConsumers);
    }
    mbarrier_init(shared_address(&s.nears_end), 1);
    mbarrier_init_fence();
  }
  // Of bwd_dkv_sm90, which has waited for bwd_delta, a dense batch needs nothing.
  if (kVarlen) wait_for_kernel_before();
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kOtherRegisters>();
    if (warp == 0) plan_tiles(s, p);
    else if (warp > kPreparers) load_tiles(s, p);
    else if constexpr (kPrepares) prepare_tiles(s);
  } else {
    set_more_registers<kConsumerRegisters>();
    differentiate(s, p, warpgroup - 1);
  }
  if (!kVarlen) wait_for_kernel_before();       // else this kernel might end before that one
}
