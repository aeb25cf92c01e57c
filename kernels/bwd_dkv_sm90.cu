// Attention backward of wide heads on Hopper's warpgroup tensor cores, dk and dv: float16 and bfloat16, sm_90a.
//
//   q, dout [batch, seqlen_q, heads_q, ..], k, v [batch, seqlen_k, heads_k, ..], rows (bwd_delta)  ->  dk, dv
//
// dK and dV of 64 keys and 256 columns fill the registers of two warpgroups, and dQ finds no place beside them: bwd_dq_sm90
// computes it from the start. Seven products instead of five, but nothing is added up in memory: the bits are always the same.
// A block stays on its multiprocessor and computes one tile after the other: 64 keys of one key head, over all query heads of
// the group and all their tiles of 64 queries that see the keys. One consumer has dV, the other dK:
//   0: S^T = K Q^T, P = exp2(S - lse), dV += P^T dO        1: dP^T = V dO^T, dS = P * (dP - delta), dK += dS^T Q
// P goes from one to the other through shared memory, in the inputs' dtype and times 2^15: float16 keeps eleven bits of it down to
// 2^-29. The thread that needs an element is 128 behind the one that wrote it.
// Of warpgroup 0 one warp plans tiles, one loads, and two prepare what has landed. A tile lies in slot i, a query tile in stage
// s:
//   work_ready[i]: planner -> all, which tile is next               work_free[i]: all -> planner, they have done with it
//   k_ready, v_ready: loader -> the consumer that multiplies by it  k_free, v_free: back, for the last time of this tile
//   raw[s]:   loader -> all, dO and half of Q have landed, all has  q_free[s]: consumer 1 -> loader; dout_free[s]: both
//   ready[s]: preparers -> consumers, the facts of rows are there and NaN has been taken from what has landed
//   weights_ready: consumer 0 -> 1, P of a query tile               weights_free: back, it has been read
// The consumers are half a query tile apart: beside the exponentials of one run the products of the other. A turn begins with
// the gradient of the last query tile, so that dO and Q of that are free the sooner. What was tried: docs/bwd256_sm90.md.
// A query tile is masked only if it is partial. Not here: arrays that TMA cannot address (bwd_sm80).
#include "attn/bwd_wide.cuh"

// A tile of the launch.
struct Tile : KeyTile {
  int head_k, row_k;                            // for TMA: its head, its first key
};

constexpr float kLift = 32768.f, kLiftLog2 = 15.f;              // of P

using OutLayout = PanelLayout<16, 64>;          // what a warp writes at a time

struct alignas(1024) SharedStorage {
  u8 sK[OperandLayout::kBytes];
  u8 sV[OperandLayout::kBytes];
  u8 sQ[kStages][OperandLayout::kBytes];
  u8 sDO[kStages][OperandLayout::kBytes];
  u8 sOut[kConsumers * 4][OutLayout::kBytes];
  Chunk sP[kRows / 16][128];                    // by thread; with the slope of the logits, where they have one
  float lse[kStages][kRows], delta[kStages][kRows];             // RowFacts, lifted: P becomes P * kLift, dP - delta is divided
  u64 work_ready[kSlots], work_free[kSlots], k_ready, k_free, v_ready, v_free, raw[kStages][2], ready[kStages];
  u64 q_free[kStages][2], dout_free[kStages], weights_ready, weights_free, nears_end;
  volatile Tile work[kSlots];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// The planner brings K and V of its tiles into the L2 cache.
DEV void plan_tiles(SharedStorage& s, const TmaParams& p) {
  plan<kKeySide, true>(s, p, false, [&] { return gridDim.x + take_ticket(p); }, [&](const Work& work, bool is_there, u32 slot) {
    const KeyWork<kRows, kRows> keys(p, work, is_there);
    volatile Tile& t = s.work[slot];
    if (thread_index() % 32 == 0) {
      if (keys.visits > 0) {
        prefetch_operand(&p.k_map, keys.row_k(), work.head, keys.seq.batch);
        prefetch_operand(&p.v_map, keys.row_k(), work.head, keys.seq.batch);
      }
      keys.tell(t, p);
      t.head_k = work.head;
      t.row_k = keys.row_k();
      mbarrier_arrive(shared_address(&s.work_ready[slot]));
    }
    __syncwarp();
  });
}

// The loader, one warp, of which one thread acts. What comes first is what is free first.
DEV void load_tiles(SharedStorage& s, const TmaParams& p) {
  const bool acts = thread_index() % 32 == 0;
  Ring<kSlots> slot;
  Ring<kStages> at;
  Ring<1> kv;
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = uniform(t.visits);
    if (visits < 0) return;
    Visit visit = first_visit(t);
    const int near_end = max(visits - kTakeAhead, 0);
    if (visits == 0 && acts) mbarrier_arrive(shared_address(&s.nears_end));
    #pragma unroll 1
    for (int i = 0; i < visits; i++, at.next()) {
      if (i == near_end && acts) mbarrier_arrive(shared_address(&s.nears_end));
      const int row = t.row_q + visit.tile * kRows, head = t.first_head + visit.head;
      if (i == 0) {
        mbarrier_wait(shared_address(&s.k_free), kv.phase ^ 1);
        if (acts) load_operand(s.sK, &p.k_map, s.k_ready, t.row_k, t.head_k, t.batch_axis);
      }
      mbarrier_wait(shared_address(&s.dout_free[at.stage]), at.phase ^ 1);
      if (acts) load_operand(s.sDO[at.stage], &p.dout_map, s.raw[at.stage][0], row, head, t.batch_axis);
      mbarrier_wait(shared_address(&s.q_free[at.stage][0]), at.phase ^ 1);
      if (acts) load_half<0>(s.sQ[at.stage], &p.q_map, s.raw[at.stage][0], row, head, t.batch_axis);
      mbarrier_wait(shared_address(&s.q_free[at.stage][1]), at.phase ^ 1);
      if (acts) load_half<1>(s.sQ[at.stage], &p.q_map, s.raw[at.stage][1], row, head, t.batch_axis);
      if (i == 0) {
        mbarrier_wait(shared_address(&s.v_free), kv.phase ^ 1);
        if (acts) load_operand(s.sV, &p.v_map, s.v_ready, t.row_k, t.head_k, t.batch_axis);
        kv.next();
      }
      visit.advance(t);
    }
    arrive_warp(s.work_free[slot.stage]);
  }
}

// The preparers: facts of rows, and what must not be in the tiles.
DEV void prepare_tiles(SharedStorage& s, const BwdParams& p) {
  static_assert(kPreparing == kRows, "a row for a thread");
  Ring<kSlots> slot;
  Ring<kStages> at;
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = uniform(t.visits);
    if (visits < 0) return;
    Visit visit = first_visit(t);
    RowFacts<float> facts;
    // Asked for before the query tile has landed.
    const auto load_facts = [&] {
      const int row = visit.tile * kRows + (int)preparer();
      facts = row < t.seqlen_q ? t.gRows[(i64)visit.head * p.seqlen_q + row] : RowFacts<float>{infinity(0.f), 0.f};
    };
    if (visits > 0) load_facts();
    #pragma unroll 1
    for (int i = 0; i < visits; i++, at.next()) {
      const int rows = t.seqlen_q - visit.tile * kRows;
      const bool partial = is_partial(t, visit);
      // Who has used dO and Q of the last stage has read its facts.
      mbarrier_wait(shared_address(&s.dout_free[at.stage]), at.phase ^ 1);
      mbarrier_wait(shared_address(&s.q_free[at.stage][1]), at.phase ^ 1);
      s.lse[at.stage][preparer()] = facts.lse_log2 - kLiftLog2;
      s.delta[at.stage][preparer()] = facts.delta / kLift;
      if ((kHasMask && partial) || (kVarlen && rows < kRows)) {
        mbarrier_wait(shared_address(&s.raw[at.stage][0]), at.phase);
        mbarrier_wait(shared_address(&s.raw[at.stage][1]), at.phase);
      }
      clear_queries<OperandLayout>(s, at.stage, rows, partial,
                                   (int)preparer() < rows && may_be_nonfinite<HeadScore::kHasSlope>(facts));
      arrive_warp(s.ready[at.stage]);
      visit.advance(t);
      if (i + 1 < visits) load_facts();
    }
    arrive_warp(s.work_free[slot.stage]);
  }
}

// 0 for pairs that do not see each other, whatever it was.
DEV void apply_mask(Scores& rS, const volatile Tile& t, const BwdParams& p, int first_row) {
  const HeadMask mask(p, t.seqlen_q, t.seqlen_k);
  const int lane = thread_index() % 32, lane_row = first_row + lane % 4 * 2;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int key = t.first_key + warp_row() + r * 8 + lane / 4;
    const int begin = mask.row_begin(key) - lane_row, end = key < mask.seqlen_k ? mask.row_end(key) - lane_row : begin;
    #pragma unroll
    for (int i = 0; i < kRows / 4; i++) {
      const int row = i / 2 * 8 + i % 2;
      if (row < begin || row >= end) rS[i / 2 * 4 + r * 2 + i % 2] = 0.f;
    }
  }
}

// One of the two facts of the rows that this lane has.
struct Facts { Pair pair[kRows / 8]; };
DEV Facts facts_of(const float* x) {
  Facts facts;
  #pragma unroll
  for (int n = 0; n < kRows / 8; n++) facts.pair[n] = lane_pair(x + n * 8);
  return facts;
}
// P in place of raw products; and, packed, with the slope of the logits, what the other consumer needs of it.
DEV void exponentiate(Scores& rS, Weights& rP, const HeadScore& score, const Facts& lse) {
  #pragma unroll
  for (int i = 0; i < kRows / 2; i += 2) {
    float weights[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const float logit = score.logit(rS[i + j]);
      rS[i + j] = weights[j] = exp2_fast(fmaf(logit, score.exponent_scale(), -lse.pair[i / 4].x[j]));
      if (HeadScore::kHasSlope) weights[j] *= score.slope(logit);
    }
    rP[i / 8][i / 2 % 4] = pack2<Element>(weights[0], weights[1]);
  }
}
DEV void write_weights(Chunk (&sP)[kRows / 16][128], const Weights& rP) {
  #pragma unroll
  for (int n = 0; n < kRows / 16; n++) sP[n][thread_index() % 128] = {{rP[n][0], rP[n][1], rP[n][2], rP[n][3]}};
}
DEV void read_weights(Weights& rP, const Chunk (&sP)[kRows / 16][128]) {
  #pragma unroll
  for (int n = 0; n < kRows / 16; n++) {
    const Chunk c = sP[n][thread_index() % 128];
    #pragma unroll
    for (int i = 0; i < 4; i++) rP[n][i] = c.word[i];
  }
}
// dS in place of dP.
DEV void softmax_gradient(Scores& rDP, const Weights& rP, const Facts& delta) {
  #pragma unroll
  for (int i = 0; i < kRows / 2; i++) {
    const float weight = to_real(Element{(u16)(rP[i / 8][i / 2 % 4] >> i % 2 * 16)});
    rDP[i] = weight * fmaf(rDP[i], 1 / kLift, -delta.pair[i / 4].x[i % 2]);
  }
}

// Writes a gradient, a warp its 16 rows; those past `rows_used` are zeros. They go through shared memory: shuffles crawl beside
// the products of the other consumer.
DEV void write_panels(u32 sOut, Element* dst, i64 row_stride, const Gradient& acc, float scale, int rows, int rows_used,
                      int cols) {
  const u32 lane = thread_index() % 32;
  #pragma unroll 1
  for (int panel = 0; panel < OperandLayout::kPanels; panel++) {
    __syncwarp();
    #pragma unroll
    for (int each = 0; each < OperandLayout::kPanels; each++) {
      if (each != panel) continue;              // registers have no index
      #pragma unroll
      for (int n = 0; n < OutLayout::kCols / 16; n++) {
        const int first = (each * OutLayout::kCols + n * 16) / 2;
        u32 a[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = pack2<Element>(acc[first + 2 * i] * scale, acc[first + 2 * i + 1] * scale);
        store_fragment<OutLayout>(sOut, 0, 2 * n, a);
      }
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const int out_row = i + lane / 8, row = warp_row() + out_row, column = panel * OutLayout::kCols + lane % 8 * 8;
      Chunk c = load_shared(sOut + OutLayout::offset(out_row, lane % 8));
      if (kVarlen && row >= rows_used) c = {};
      char* g = (char*)(dst + row * row_stride + column);
      if constexpr (kWholeHeads && kOutVecBytes == 16) store_global_if(row < rows, g, c);
      else if (row < rows) store_chunk<kOutVecBytes>(g, c, kWholeHeads ? 16 : (cols - column) * 2);
    }
  }
}

// A consumer, a warpgroup: 0 has dV, 1 has dK.
template <int kConsumer> DEV void differentiate(SharedStorage& s, const BwdParams& p) {
  constexpr bool kHasDV = kConsumer == 0;
  const HeadScore score = kept(HeadScore(p));
  // Rows of scores, of their columns, and what the gradient sums.
  const u64 keys = descriptor_of<OperandLayout>(kHasDV ? s.sK : s.sV);
  const u64 queries = descriptor_of<OperandLayout>(kHasDV ? s.sQ[0] : s.sDO[0]);
  const u64 summed = descriptor_of<OperandLayout>(kHasDV ? s.sDO[0] : s.sQ[0]);
  u64 &keys_ready = kHasDV ? s.k_ready : s.v_ready, &keys_free = kHasDV ? s.k_free : s.v_free;
  Ring<kSlots> slot;
  Ring<kStages> at;
  Ring<1> kv, handed;
  first_turn(kConsumer);
  #pragma unroll 1
  for (;; slot.next()) {
    mbarrier_wait(shared_address(&s.work_ready[slot.stage]), slot.phase);
    const volatile Tile& t = s.work[slot.stage];
    const int visits = uniform(t.visits);
    if (visits < 0) return;
    const int heads = uniform(t.heads);
    const int full_begin = uniform(t.full_begin), full_end = uniform(t.full_end);
    Gradient acc;
    clear(acc);
    Scores rS;
    Weights rA;
    Visit visit = first_visit(t);
    int left = visits;
    // The keys' descriptors depend on the stage too, by nothing: computed before the loop they would not all find uniform
    // registers.
    const auto keys_at = [&] { return descriptor_step(keys, at.stage / kStages * 16); };
    const auto queries_at = [&] { return descriptor_step(queries, at.stage * OperandLayout::kBytes); };
    const auto finish_scores = [&] {
      const bool is_masked = (visit.tile < full_begin) | (visit.tile >= full_end);
      const Facts facts = facts_of(kHasDV ? s.lse[at.stage] : s.delta[at.stage]);
      Weights rP;
      if constexpr (kHasDV) {
        wgmma_wait<0>();
        wgmma_pin(rS);
        if (--left == 0 && speaks()) mbarrier_arrive(shared_address(&keys_free));
        exponentiate(rS, rP, score, facts);
        mbarrier_wait(shared_address(&s.weights_free), handed.phase ^ 1);
        write_weights(s.sP, rP);
        arrive_warp(s.weights_ready);
      } else {
        mbarrier_wait(shared_address(&s.weights_ready), handed.phase);
        read_weights(rP, s.sP);
        arrive_warp(s.weights_free);
        wgmma_wait<0>();
        wgmma_pin(rS);
        if (speaks()) mbarrier_arrive(shared_address(&s.dout_free[at.stage]));
        if (--left == 0 && speaks()) mbarrier_arrive(shared_address(&keys_free));
        softmax_gradient(rS, rP, facts);
      }
      handed.next();
      if (is_masked) apply_mask(rS, t, p, visit.tile * kRows);
      pack<Element>(rA, rS);
    };
    const auto await_queries = [&](int half) {
      mbarrier_wait(shared_address(&s.raw[at.stage][half]), at.phase);
      if (half == 0) mbarrier_wait(shared_address(&s.ready[at.stage]), at.phase);
    };
    const auto give_back = [&](u64& barrier) { if (speaks()) mbarrier_arrive(shared_address(&barrier)); };
    const auto start_sum = [&](u32 stage) {
      const u64 rows = descriptor_step(summed, stage * OperandLayout::kBytes);
      if constexpr (kHasDV) {
        accumulate(acc, rA, rows);
      } else {                                  // Q is waited for: half of it goes back while the other is multiplied
        accumulate_half<0>(acc, rA, rows);
        accumulate_half<1>(acc, rA, rows);
        wgmma_wait<1>();
        give_back(s.q_free[stage][0]);
      }
    };
    const auto finish_sum = [&](u32 stage) {
      wgmma_pin(acc);
      give_back(kHasDV ? s.dout_free[stage] : s.q_free[stage][1]);
    };

    if (visits > 0) {
      mbarrier_wait(shared_address(&keys_ready), kv.phase);
      kv.next();
      await_queries(0);
      await_queries(1);
      my_turn(kConsumer);
      multiply_rows<0>(rS, keys_at(), queries_at());
      multiply_rows<1>(rS, keys_at(), queries_at());
      your_turn(kConsumer);
      finish_scores();
      #pragma unroll 1
      for (int i = 1; i < visits; i++) {
        const u32 last = at.stage;
        visit.advance(heads);
        at.next();
        my_turn(kConsumer);
        start_sum(last);
        await_queries(0);                       // Q of two query tiles before has been used half a turn ago
        multiply_rows<0>(rS, keys_at(), queries_at());
        wgmma_wait<1>();                        // while this half is computed the last dO or Q is given back
        finish_sum(last);
        await_queries(1);
        multiply_rows<1>(rS, keys_at(), queries_at());
        your_turn(kConsumer);
        finish_scores();
      }
      my_turn(kConsumer);
      start_sum(at.stage);
      your_turn(kConsumer);
      wgmma_wait<0>();
      finish_sum(at.stage);
      at.next();
    }
    const int rows = t.rows, rows_used = t.seqlen_k - t.first_key;
    const u32 out = shared_address(s.sOut[kConsumer * 4 + thread_index() / 32 % 4]);
    if (kHasDV) write_panels(out, t.gDV, p.dv_strides.row, acc, 1 / kLift, rows, rows_used, p.head_dim_v);
    else write_panels(out, t.gDK, p.dk_strides.row, acc, (float)p.softmax_scale, rows, rows_used, p.head_dim);
    arrive_warp(s.work_free[slot.stage]);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) bwd_dkv_sm90(const __grid_constant__ TmaParams p) {
  extern __shared__ __align__(1024) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const int warp = uniform(threadIdx.x / 32);
  if (threadIdx.x == 0) {
    prefetch_maps(p);
    for (int i = 0; i < kSlots; i++) {
      mbarrier_init(shared_address(&s.work_ready[i]), 1);
      mbarrier_init(shared_address(&s.work_free[i]), 1 + kPreparers + kConsumers * 4);
    }
    for (int i = 0; i < kStages; i++) {
      mbarrier_init(shared_address(&s.raw[i][0]), 2);           // dO, half of Q
      mbarrier_init(shared_address(&s.raw[i][1]), 1);
      mbarrier_init(shared_address(&s.ready[i]), kPreparers);
      mbarrier_init(shared_address(&s.q_free[i][0]), 1);
      mbarrier_init(shared_address(&s.q_free[i][1]), 1);
      mbarrier_init(shared_address(&s.dout_free[i]), 2);        // dP, dV
    }
    mbarrier_init(shared_address(&s.k_ready), 1);
    mbarrier_init(shared_address(&s.k_free), 1);
    mbarrier_init(shared_address(&s.v_ready), 1);
    mbarrier_init(shared_address(&s.v_free), 1);
    mbarrier_init(shared_address(&s.weights_ready), 4);
    mbarrier_init(shared_address(&s.weights_free), 4);
    mbarrier_init(shared_address(&s.nears_end), 1);
    mbarrier_init_fence();
  }
  wait_for_kernel_before();     // bwd_delta
  start_dependents();
  __syncthreads();
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kOtherRegisters>();
    if (warp == 0) plan_tiles(s, p);
    else if (warp <= kPreparers) prepare_tiles(s, p);
    else load_tiles(s, p);
  } else {
    set_more_registers<kConsumerRegisters>();
    if (warpgroup == 1) differentiate<0>(s, p);
    else differentiate<1>(s, p);
  }
}
