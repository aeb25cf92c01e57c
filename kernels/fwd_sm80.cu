// Attention forward on tensor cores through mma.sync: float16 and bfloat16, sm_80 and newer (float16 also sm_75).
//
//   q [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_k, head_dim | head_dim_v]  ->  out, lse
//
// A block computes kBlockM query rows of one head, a group of kGroup warps kMTiles x 16 of them: FlashAttention-2 (Dao 2023,
// Algorithm 1). All threads copy the key tiles, ahead of their use:
//   wait for the copies; barrier (they have landed for all, and all have read the buffers to fill next); start the next.
// S stays in registers: the accumulator of Q K^T is, element for element, the A operand of P V.
// Two warps a group are for a long head_dim, where O of 32 rows, which halve the reads of K and V, takes all registers of one:
// each has every other 16 keys of S and every other 16 columns of O, and reads the P of the other from shared memory.
// The running max lags: it moves only when a logit would exceed it by kMaxLag, so O is seldom rescaled.
// A tile is masked only if it is partial. Not here: float32 and float64 (fwd_simt).
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
#include "ptx/mma_sm80.cuh"
#include "tile/copy.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros to whole 64-byte groups
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kGroup = GROUP;                   // warps that share query rows: 1 or 2
constexpr int kStages = STAGES;                 // 2: K and V of the next tile are copied while this one is used; 1: V is while
                                                // S is computed, the next K while P V is
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim and kHeadDimV
constexpr int kVecBytes = VEC_BYTES;            // divides every address of q, k and v
constexpr int kOutVecBytes = OUT_VEC_BYTES;
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;

constexpr int kThreads = kWarps * 32;
constexpr int kGroups = kWarps / kGroup;
constexpr int kGroupRows = kBlockM / kGroups;
constexpr int kWarpKeys = kBlockN / kGroup;
constexpr int kWarpCols = kHeadDimV / kGroup;
constexpr int kMTiles = kGroupRows / 16;
constexpr int kHeadDimMax = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
// Not the whole of a long head_dim: the compiler would then load operands so far ahead that other registers spill.
constexpr int kUnrollQK = kMTiles == 1 ? kHeadDim / 16 : kHeadDimV <= 64 || kGroup > 1 ? 4 : 2;
static_assert(kGroup == 1 || kGroup == 2, "a warp has one partner");
static_assert(kMTiles * 16 * kGroups == kBlockM && kWarpKeys % 16 == 0 && kWarpCols % 16 == 0, "whole mma tiles");

using QLayout = TileLayout<kHeadDim>;
using KLayout = TileLayout<kHeadDim>;
using VLayout = TileLayout<kHeadDimV>;
using PLayout = TileLayout<kBlockN>;
using OLayout = TileLayout<kHeadDimV>;
using HeadMask = Mask<kMaskLeft, kMaskRight>;

// What all threads of a block know alike. It lies in shared memory and is read where it is used (hence volatile): the main
// loop needs every register.
struct BlockWork {
  const Element* gK;                            // row 0 of the key head
  const Element* gV;
  int seqlen_k;
  int first_row;                                // of the block's query rows
  KeyTiles tiles;
};

struct alignas(128) SharedStorage {
  Element sQ[kGroups][kGroupRows * kHeadDimMax];        // a group's own rows: Q, at the end its output
  Element sK[kStages][kBlockN * kHeadDim];
  Element sV[kStages][kBlockN * kHeadDimV];
  Element sP[kGroups][kGroup > 1 ? kGroupRows * kBlockN : 1];
  float sRows[kWarps][kGroup > 1 ? kGroupRows : 1];     // what a warp tells its group: maxima, at the end sums
  volatile BlockWork work;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// What a thread keeps of its 2 x kMTiles rows (g and g + 8 of each 16) from tile to tile.
struct Rows {
  float rO[kMTiles][kWarpCols / 8][4];
  float max[kMTiles][2];                        // of the base-2 exponents, lagging; the same in all lanes of a row
  float sum[kMTiles][2];                        // of P over this lane's keys
};
using Logits = float[kMTiles][kWarpKeys / 8][4];

// Start copying key tile `tile` of K or of V.
template <typename Layout>
DEV void load_tile(Element* sTile, const Element* gHead, i64 row_stride, int seqlen_k, int cols, int tile) {
  const u32 dst = shared_address(sTile), thread = thread_index();
  const Element* src = gHead + (i64)tile * kBlockN * row_stride;
  const int rows = seqlen_k - tile * kBlockN;
  if (rows >= kBlockN)
    copy_rows<Layout, kBlockN, kThreads, kVecBytes, kWholeHeads, true>(dst, src, row_stride, rows, cols, thread);
  else
    copy_rows<Layout, kBlockN, kThreads, kVecBytes, kWholeHeads, false>(dst, src, row_stride, rows, cols, thread);
}
DEV void load_k(SharedStorage& s, const FwdParams& p, int tile) {
  load_tile<KLayout>(s.sK[tile % kStages], s.work.gK, p.k_strides.row, s.work.seqlen_k, p.head_dim, tile);
}
DEV void load_v(SharedStorage& s, const FwdParams& p, int tile) {
  load_tile<VLayout>(s.sV[tile % kStages], s.work.gV, p.v_strides.row, s.work.seqlen_k, p.head_dim_v, tile);
}

// S = Q K^T, raw products.
DEV void multiply_qk(Logits& rS, u32 q_lane, u32 k_lane) {
  #pragma unroll
  for (int m = 0; m < kMTiles; m++)
    #pragma unroll
    for (int i = 0; i < kWarpKeys / 2; i++) rS[m][i / 4][i % 4] = 0.f;
  #pragma unroll kUnrollQK
  for (int d = 0; d < kHeadDim / 16; d++) {
    u32 rQ[kMTiles][4];
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rQ[m], QLayout::step(q_lane, d * 2) + m * 16 * QLayout::kRowBytes);
    #pragma unroll
    for (int n = 0; n < kWarpKeys / 8; n += 2) {
      u32 rK[4];
      ldmatrix_x4(rK, KLayout::step(k_lane, d * 2) + n * 8 * kGroup * KLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rS[m][n], rQ[m], rK[0], rK[1]);
        mma_m16n8k16<Element>(rS[m][n + 1], rQ[m], rK[2], rK[3]);
      }
    }
  }
}

// Logits in place of raw products; -inf where masked. first_key: of the warp's.
template <typename Score>
DEV void apply_score_and_mask(Logits& rS, const Score& score, const HeadMask& mask, bool partial, int first_row, int first_key) {
  #pragma unroll
  for (int m = 0; m < kMTiles; m++) apply_score(flat(rS[m]), score);
  if (partial) {
    const u32 lane = thread_index() % 32;
    const int lane_key = first_key + lane % 4 * 2;
    #pragma unroll
    for (int r = 0; r < kMTiles * 2; r++) {
      const int row = first_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
      const int begin = mask.key_begin(row) - lane_key, end = mask.key_end(row) - lane_key;
      #pragma unroll
      for (int i = 0; i < kWarpKeys / 4; i++) {
        const int key = i / 4 * 16 * kGroup + i / 2 % 2 * 8 + i % 2;
        if (key >= end || (kMaskLeft && key < begin)) rS[r / 2][i / 2][r % 2 * 2 + i % 2] = -infinity(0.f);
      }
    }
  }
}

// Of all its rows.
DEV bool find_max(float (&max)[kMTiles][2], const Rows& rows, const Logits& rS, float exponent_scale) {
  bool exceeds = false;
  #pragma unroll
  for (int m = 0; m < kMTiles; m++) find_max(max[m], rows.max[m], flat(rS[m]), exponent_scale, exceeds);
  return exceeds;
}

DEV void sync_group(int group) {
  if (kGroup == 1) __syncwarp();
  else barrier_sync(1 + group, 32 * kGroup);
}
// Whether `x` holds for any lane of a group. With one stage it is the block's barrier between K and V, hence for any lane.
DEV bool any_lane(bool x, int group) {
  if (kStages == 1) return __syncthreads_or(x);
  return kGroup == 1 ? __any_sync(0xffffffff, x) : barrier_or(1 + group, 32 * kGroup, x);
}

// Moves the running max of each row to that of all logits so far; sums and O follow.
DEV void move_max(Rows& rows, float (&max)[kMTiles][2], SharedStorage& s, int warp, float exponent_scale) {
  const u32 lane = thread_index() % 32;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float& x = max[r / 2][r % 2];
    x = max_of_row(x);
    if (kGroup > 1 && lane % 4 == 0) s.sRows[warp][r * 8 + lane / 4] = x;
  }
  if (kGroup > 1) sync_group(warp / kGroup);
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float x = max[r / 2][r % 2], &old = rows.max[r / 2][r % 2];
    if (kGroup > 1) x = fmaxf(x, s.sRows[warp ^ 1][r * 8 + lane / 4]);
    x = fmaxf(x * exponent_scale, old);
    const float alpha = factor_of_move(old, x);
    old = x;
    rows.sum[r / 2][r % 2] *= alpha;
    #pragma unroll
    for (int i = 0; i < kWarpCols / 4; i++) rows.rO[r / 2][i / 2][r % 2 * 2 + i % 2] *= alpha;
  }
}

// O += P V over 16 keys, the key-th of a warp's.
DEV void multiply_pv(Rows& rows, const u32 (&rP)[kMTiles][4], u32 v_lane, int key) {
  #pragma unroll
  for (int d = 0; d < kWarpCols / 16; d++) {
    u32 rV[4];
    ldmatrix_x4_trans(rV, VLayout::step(v_lane, d * 2 * kGroup) + key * 16 * kGroup * VLayout::kRowBytes);
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) {
      mma_m16n8k16<Element>(rows.rO[m][2 * d], rP[m], rV[0], rV[1]);
      mma_m16n8k16<Element>(rows.rO[m][2 * d + 1], rP[m], rV[2], rV[3]);
    }
  }
}

// P = exp2(logits - max), 16 keys at a time, and O += P V with P rounded to the operand type.
DEV void softmax_and_multiply_pv(Rows& rows, const Logits& rS, float exponent_scale, SharedStorage& s, u32 v_lane, int warp) {
  const u32 p_tile = shared_address(s.sP[warp / kGroup]), part = warp % kGroup, lane = thread_index() % 32;
  float subtract[kMTiles][2];
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) subtract[r / 2][r % 2] = subtrahend(rows.max[r / 2][r % 2]);
  #pragma unroll
  for (int key = 0; key < kWarpKeys / 16; key++) {
    u32 rP[kMTiles][4];
    #pragma unroll
    for (int i = 0; i < kMTiles * 4; i++) {
      const int m = i / 4, r = i % 2;
      const float (&x)[4] = rS[m][2 * key + i % 4 / 2];
      const float lo = exp2_fast(fmaf(x[2 * r], exponent_scale, -subtract[m][r]));
      const float hi = exp2_fast(fmaf(x[2 * r + 1], exponent_scale, -subtract[m][r]));
      rows.sum[m][r] += lo + hi;
      rP[m][i % 4] = pack2<Element>(lo, hi);
      if (kGroup > 1) {
        const u32 p_lane = p_tile + PLayout::offset(lane / 4, part * 2) + lane % 4 * 4;
        store_shared(PLayout::step(p_lane, key * 2 * kGroup + i % 4 / 2) + (m * 16 + r * 8) * PLayout::kRowBytes, rP[m][i % 4]);
      }
    }
    multiply_pv(rows, rP, v_lane + part * 16 * VLayout::kRowBytes, key);
  }
  if (kGroup > 1) {
    sync_group(warp / kGroup);                  // the P of both has been written
    const u32 p_lane = p_tile + PLayout::offset(lane % 16, (part ^ 1) * 2 + lane / 16);
    #pragma unroll
    for (int key = 0; key < kWarpKeys / 16; key++) {
      u32 rP[kMTiles][4];
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rP[m], PLayout::step(p_lane, key * 2 * kGroup) + m * 16 * PLayout::kRowBytes);
      multiply_pv(rows, rP, v_lane + (part ^ 1) * 16 * VLayout::kRowBytes, key);
    }
  }
}

// NaN and Inf of a partly masked V tile go to the rows that see them and become 0 in the tile. All threads call it together.
// Without a mask the only keys that no row sees are the zeros past the end.
DEV void separate_nonfinite(Rows& rows, SharedStorage& s, int stage, const HeadMask& mask, int first_row, int tile, int part) {
  if constexpr (kMaskLeft || kMaskRight) {
    const u32 v_tile = shared_address(s.sV[stage]);
    constexpr int kBytes = kBlockN * VLayout::kRowBytes;
    if (!__syncthreads_or(scan_nonfinite<Element, kBytes, kThreads, false>(v_tile, thread_index()))) return;
    add_nonfinite<Element, VLayout, kBlockN, kGroup>(rows.rO, v_tile, mask, first_row, tile * kBlockN, part);
    __syncthreads();
    scan_nonfinite<Element, kBytes, kThreads, true>(v_tile, thread_index());
    __syncthreads();
  }
}

DEV void write_out(SharedStorage& s, Rows& rows, const FwdParams& p) {
  const Work work = work_of_block<kQuerySide>(opaque(blockIdx.x), p);    // computed again rather than kept through the loop
  const Sequence seq(p, work);
  Element* gO = seq.query_rows((Element*)p.out, p.out_strides, work.head);
  float* gLse = (float*)p.lse + seq.row_index(work.head);
  const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const u32 group = warp / kGroup, part = warp % kGroup, group_thread = thread % (32 * kGroup);
  const int first_row = work.tile * kBlockM + group * kGroupRows;
  const u32 tile = shared_address(s.sQ[group]);
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float& sum = rows.sum[r / 2][r % 2];
    sum = sum_of_row(sum);
    if (kGroup > 1 && t == 0) s.sRows[warp][r * 8 + g] = sum;
  }
  sync_group(group);                            // every lane has read its Q
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    const int row = r * 8 + g;
    float sum = rows.sum[r / 2][r % 2];
    if (kGroup > 1) sum += s.sRows[warp ^ 1][row];
    const bool takes_part = !kVarlen || first_row + row < seq.seqlen_q;
    if (!takes_part) sum = 0.f;
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;         // no visible key: O is 0
    if (p.lse && part == 0 && t == 0 && first_row + row < seq.rows_q)
      gLse[first_row + row] = sum == 0.f ? -infinity(0.f) : (rows.max[r / 2][r % 2] + log2f(sum)) * 0.6931471806f;
    #pragma unroll
    for (int d = 0; d < kWarpCols / 8; d++) {
      const float lo = rows.rO[r / 2][d][r % 2 * 2] * inverse, hi = rows.rO[r / 2][d][r % 2 * 2 + 1] * inverse;
      const u32 at = tile + OLayout::offset(row, (d / 2 * kGroup + part) * 2 + d % 2) + t * 4;
      store_shared(at, takes_part ? pack2<Element>(lo, hi) : 0);
    }
  }
  sync_group(group);
  #pragma unroll 4
  for (int idx = group_thread; idx < kGroupRows * OLayout::kChunks; idx += 32 * kGroup) {
    const int row = idx / OLayout::kChunks, chunk = idx % OLayout::kChunks;
    if (first_row + row < seq.rows_q)
      store_chunk<kOutVecBytes>((char*)(gO + (first_row + row) * p.out_strides.row + chunk * 8),
                                load_shared(tile + OLayout::offset(row, chunk)), (p.head_dim_v - chunk * 8) * 2);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) fwd_sm80(const FwdParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const Work work = work_of_block<kQuerySide>(blockIdx.x, p);
  if (work.batch < 0) return;
  const Sequence seq(p, work);
  const HeadMask mask(p, seq.seqlen_q, seq.seqlen_k);
  const Score<SCORE, float> score(p);
  const int block_row = work.tile * kBlockM;
  const KeyTiles tiles = KeyTiles::of<kBlockN>(mask, block_row, min(block_row + kBlockM, seq.seqlen_q));
  if (threadIdx.x == 0) {
    s.work.gK = seq.key_rows((const Element*)p.k, p.k_strides, seq.head_k(work.head));
    s.work.gV = seq.key_rows((const Element*)p.v, p.v_strides, seq.head_k(work.head));
    s.work.seqlen_k = seq.seqlen_k;
    s.work.first_row = block_row;
    s.work.tiles.begin = tiles.begin;
    s.work.tiles.end = tiles.end;
    s.work.tiles.full_begin = tiles.full_begin;
    s.work.tiles.full_end = tiles.full_end;
  }
  __syncthreads();

  const int warp = uniform(threadIdx.x / 32), group = warp / kGroup, part = warp % kGroup;
  if (tiles.begin < tiles.end) {
    const int first_row = block_row + group * kGroupRows;
    copy_rows<QLayout, kGroupRows, 32 * kGroup, kVecBytes, kWholeHeads, false>(
        shared_address(s.sQ[group]), seq.query_rows((const Element*)p.q, p.q_strides, work.head) + first_row * p.q_strides.row,
        p.q_strides.row, seq.seqlen_q - first_row, p.head_dim, threadIdx.x % (32 * kGroup));
    load_k(s, p, tiles.begin);
    if (kStages == 2) load_v(s, p, tiles.begin);
    cp_async_commit();
  }

  Rows rows = {};
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) rows.max[r / 2][r % 2] = -infinity(0.f);
  const float exponent_scale = score.exponent_scale();

  #pragma unroll 1
  for (int tile = tiles.begin; tile < s.work.tiles.end; tile++) {
    const int stage = tile % kStages;
    const bool partial = (kMaskLeft && tile < s.work.tiles.full_begin) || tile >= s.work.tiles.full_end;
    const int first_row = s.work.first_row + group * kGroupRows;
    cp_async_wait<0>();
    __syncthreads();                            // K, with two stages V too, has landed; all have read what is copied over next
    if (kStages == 1) load_v(s, p, tile);
    if (kStages == 2 && tile + 1 < s.work.tiles.end) {
      load_k(s, p, tile + 1);
      load_v(s, p, tile + 1);
    }
    cp_async_commit();
    if (kStages == 2 && partial) separate_nonfinite(rows, s, stage, mask, first_row, tile, part);    // before S needs registers

    // Where this lane's row of the first ldmatrix lies: Q and V by 16 rows, K by 2 x 8 rows of 2 chunks.
    const u32 l = thread_index() % 32;
    const u32 q_lane = shared_address(s.sQ[group]) + QLayout::offset(l % 16, l / 16);
    const u32 k_lane = shared_address(s.sK[stage]) + KLayout::offset(part * 16 + l % 8 + l / 16 * 8, l / 8 % 2);
    const u32 v_lane = shared_address(s.sV[stage]) + VLayout::offset(l % 16, part * 2 + l / 16);
    Logits rS;
    float max[kMTiles][2];
    multiply_qk(rS, q_lane, k_lane);
    apply_score_and_mask(rS, score, mask, partial, first_row, tile * kBlockN + part * 16);
    const bool exceeds = find_max(max, rows, rS, exponent_scale);
    if (kStages == 1) cp_async_wait<0>();
    const bool moves = any_lane(exceeds, group);        // with one stage: V has landed; all have read K
    if (kStages == 1) {
      if (tile + 1 < s.work.tiles.end) load_k(s, p, tile + 1);
      cp_async_commit();
    }
    if (moves) move_max(rows, max, s, warp, exponent_scale);
    if (kStages == 1 && partial) separate_nonfinite(rows, s, stage, mask, first_row, tile, part);
    softmax_and_multiply_pv(rows, rS, exponent_scale, s, v_lane, warp);
  }
  write_out(s, rows, p);
}
