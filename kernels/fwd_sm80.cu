// Attention forward on tensor cores through mma.sync: float16 and bfloat16, sm_80 and newer (float16 also sm_75).
//
//   q [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_k, head_dim | head_dim_v]  ->  out, lse
//
// A block computes kBlockM query rows of one head, a warp kMTiles x 16 of them, alone from Q to output: FlashAttention-2
// (Dao 2023, Algorithm 1). All threads copy the key tiles, ahead of their use:
//   wait for the copies; barrier (they have landed for all, and all have read the buffers to fill next); start the next.
// S stays in registers: the accumulator of Q K^T is, element for element, the A operand of P V.
// The running max lags: it moves only when a logit would exceed it by kMaxLag, so O is seldom rescaled.
// A tile is masked only if it is partial. Not here: float32 and float64 (fwd_simt).
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/poison.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/tiles.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_sm80.cuh"
#include "tile/copy.cuh"

template <int> struct ElementOf;
template <> struct ElementOf<0> { using type = half; };
template <> struct ElementOf<1> { using type = bf16; };
using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros to whole 64-byte groups
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kStages = STAGES;                 // 2: K and V of the next tile are copied while this one is used; 1: V is while
                                                // S is computed, the next K while P V is
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim and kHeadDimV
constexpr int kVecBytes = VEC_BYTES;            // divides every address of q, k and v
constexpr int kOutVecBytes = OUT_VEC_BYTES;
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;

constexpr int kThreads = kWarps * 32;
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kMTiles = kWarpRows / 16;
constexpr int kHeadDimMax = kHeadDim > kHeadDimV ? kHeadDim : kHeadDimV;
constexpr float kMaxLag = 8.f;                  // in base 2: P stays below 256, which float16 holds with room for the sums
// Not the whole of a long head_dim: the compiler would then load operands so far ahead that other registers spill.
constexpr int kUnrollQK = kMTiles == 1 ? kHeadDim / 16 : kHeadDimV <= 64 ? 4 : 2;
static_assert(kBlockM % (kWarps * 16) == 0 && kBlockN % 16 == 0, "whole mma tiles");

using QLayout = TileLayout<kHeadDim>;
using KLayout = TileLayout<kHeadDim>;
using VLayout = TileLayout<kHeadDimV>;
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
  Element sQ[kWarps][kWarpRows * kHeadDimMax];  // a warp's own rows: Q, at the end its output
  Element sK[kStages][kBlockN * kHeadDim];
  Element sV[kStages][kBlockN * kHeadDimV];
  volatile BlockWork work;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// What a thread keeps of its 2 x kMTiles rows (g and g + 8 of each 16) from tile to tile.
struct Rows {
  float rO[kMTiles][kHeadDimV / 8][4];
  float max[kMTiles][2];                        // of the base-2 exponents, lagging; the same in the four lanes of a row
  float sum[kMTiles][2];                        // of P over this lane's columns
};

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
DEV void multiply_qk(float (&rS)[kMTiles][kBlockN / 8][4], u32 q_lane, u32 k_lane) {
  #pragma unroll
  for (int m = 0; m < kMTiles; m++)
    #pragma unroll
    for (int i = 0; i < kBlockN / 2; i++) rS[m][i / 4][i % 4] = 0.f;
  #pragma unroll kUnrollQK
  for (int d = 0; d < kHeadDim / 16; d++) {
    u32 rQ[kMTiles][4];
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rQ[m], QLayout::step(q_lane, d * 2) + m * 16 * QLayout::kRowBytes);
    #pragma unroll
    for (int n = 0; n < kBlockN / 8; n += 2) {
      u32 rK[4];
      ldmatrix_x4(rK, KLayout::step(k_lane, d * 2) + n * 8 * KLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rS[m][n], rQ[m], rK[0], rK[1]);
        mma_m16n8k16<Element>(rS[m][n + 1], rQ[m], rK[2], rK[3]);
      }
    }
  }
}

// Logits in place of raw products; -inf where masked.
template <typename Score>
DEV void apply_score_and_mask(float (&rS)[kMTiles][kBlockN / 8][4], const Score& score, const HeadMask& mask, bool partial,
                              int first_row, int first_key) {
  if constexpr (!Score::kIsIdentity) {
    #pragma unroll
    for (int i = 0; i < kMTiles * kBlockN / 2; i++) {
      float& s = rS[i / (kBlockN / 2)][i / 4 % (kBlockN / 8)][i % 4];
      s = score.logit(s);
    }
  }
  if (partial) {
    const u32 lane = thread_index() % 32;
    const int lane_key = first_key + lane % 4 * 2;
    #pragma unroll
    for (int r = 0; r < kMTiles * 2; r++) {
      const int row = first_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
      const int begin = mask.key_begin(row) - lane_key, end = mask.key_end(row) - lane_key;
      #pragma unroll
      for (int i = 0; i < kBlockN / 4; i++) {
        const int key = i / 2 * 8 + i % 2;
        if (key >= end || (kMaskLeft && key < begin)) rS[r / 2][i / 2][r % 2 * 2 + i % 2] = -infinity(0.f);
      }
    }
  }
}

// The running max of each row; sums and O follow where it moves.
DEV void update_max(Rows& rows, const float (&rS)[kMTiles][kBlockN / 8][4], float exponent_scale) {
  float tile_max[kMTiles][2];
  bool moved = false;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float x = rS[r / 2][0][r % 2 * 2];
    #pragma unroll
    for (int i = 1; i < kBlockN / 4; i++) x = fmaxf(x, rS[r / 2][i / 2][r % 2 * 2 + i % 2]);
    tile_max[r / 2][r % 2] = x;
    // From -inf every logit moves it but -inf, which gives a NaN here.
    moved |= fmaf(x, exponent_scale, -rows.max[r / 2][r % 2]) > kMaxLag;
  }
  if (!__any_sync(0xffffffff, moved)) return;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float x = tile_max[r / 2][r % 2], &old = rows.max[r / 2][r % 2];
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
    x = fmaxf(x * exponent_scale, old);
    // A first max finds O and the sum empty but for Inf from V, which times 0 would be NaN.
    const float alpha = x == old || old == -infinity(0.f) ? 1.f : exp2_fast(old - x);
    old = x;
    rows.sum[r / 2][r % 2] *= alpha;
    #pragma unroll
    for (int i = 0; i < kHeadDimV / 4; i++) rows.rO[r / 2][i / 2][r % 2 * 2 + i % 2] *= alpha;
  }
}

// P = exp2(logits - max), 16 keys at a time, and O += P V with P rounded to the operand type.
DEV void multiply_pv(Rows& rows, const float (&rS)[kMTiles][kBlockN / 8][4], float exponent_scale, u32 v_lane) {
  float subtract[kMTiles][2];
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    const float m = rows.max[r / 2][r % 2];
    subtract[r / 2][r % 2] = m == -infinity(0.f) ? 0.f : m;
  }
  #pragma unroll
  for (int key = 0; key < kBlockN / 16; key++) {
    u32 rP[kMTiles][4];
    #pragma unroll
    for (int i = 0; i < kMTiles * 4; i++) {
      const int m = i / 4, r = i % 2;
      const float (&s)[4] = rS[m][2 * key + i % 4 / 2];
      const float lo = exp2_fast(fmaf(s[2 * r], exponent_scale, -subtract[m][r]));
      const float hi = exp2_fast(fmaf(s[2 * r + 1], exponent_scale, -subtract[m][r]));
      rows.sum[m][r] += lo + hi;
      rP[m][i % 4] = pack2<Element>(lo, hi);
    }
    #pragma unroll
    for (int d = 0; d < kHeadDimV / 16; d++) {
      u32 rV[4];
      ldmatrix_x4_trans(rV, VLayout::step(v_lane, d * 2) + key * 16 * VLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rows.rO[m][2 * d], rP[m], rV[0], rV[1]);
        mma_m16n8k16<Element>(rows.rO[m][2 * d + 1], rP[m], rV[2], rV[3]);
      }
    }
  }
}

// NaN and Inf of a partly masked V tile go to the rows that see them and become 0 in the tile. All threads call it together.
// Without a mask the only keys that no row sees are the zeros past the end.
DEV void separate_nonfinite(Rows& rows, SharedStorage& s, int stage, const HeadMask& mask, int first_row, int tile) {
  if constexpr (kMaskLeft || kMaskRight) {
    const u32 v_tile = shared_address(s.sV[stage]);
    constexpr int kBytes = kBlockN * VLayout::kRowBytes;
    if (!__syncthreads_or(scan_nonfinite<Element, kBytes, kThreads, false>(v_tile, thread_index()))) return;
    add_nonfinite<Element, VLayout, kBlockN>(rows.rO, v_tile, mask, first_row, tile * kBlockN);
    __syncthreads();
    scan_nonfinite<Element, kBytes, kThreads, true>(v_tile, thread_index());
    __syncthreads();
  }
}

DEV void write_out(SharedStorage& s, Rows& rows, const FwdParams& p) {
  const Work work = work_of_block(opaque(blockIdx.x), p);       // computed again rather than kept through the loop
  const Sequence<Element> seq(p, work.batch, work.head);
  const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32, g = lane / 4, t = lane % 4;
  const int first_row = work.m_block * kBlockM + warp * kWarpRows;
  const u32 tile = shared_address(s.sQ[warp]);
  __syncwarp();                                 // every lane has read its Q
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    const int row = r / 2 * 16 + r % 2 * 8 + g;
    float sum = rows.sum[r / 2][r % 2];
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    sum += __shfl_xor_sync(0xffffffff, sum, 2);
    const float inverse = sum == 0.f ? 0.f : 1.f / sum;         // no visible key: O is 0
    if (seq.wants_lse() && t == 0 && first_row + row < seq.seqlen_q)
      seq.gLse()[first_row + row] = sum == 0.f ? -infinity(0.f) : (rows.max[r / 2][r % 2] + log2f(sum)) * 0.6931471806f;
    #pragma unroll
    for (int d = 0; d < kHeadDimV / 8; d++) {
      const float (&o)[4] = rows.rO[r / 2][d];
      store_shared(tile + OLayout::offset(row, d) + t * 4, pack2<Element>(o[r % 2 * 2] * inverse, o[r % 2 * 2 + 1] * inverse));
    }
  }
  __syncwarp();
  #pragma unroll 4
  for (int idx = lane; idx < kWarpRows * OLayout::kChunks; idx += 32) {
    const int row = idx / OLayout::kChunks, chunk = idx % OLayout::kChunks;
    if (first_row + row < seq.seqlen_q)
      store_chunk<kOutVecBytes>((char*)(seq.gO() + (first_row + row) * p.out_strides.row + chunk * 8),
                                load_shared(tile + OLayout::offset(row, chunk)), (p.head_dim_v - chunk * 8) * 2);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) fwd_sm80(const FwdParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const Work work = work_of_block(blockIdx.x, p);
  const Sequence<Element> seq(p, work.batch, work.head);
  const HeadMask mask(p, seq.seqlen_q, seq.seqlen_k);
  const Score<SCORE, float> score(p);
  const int block_row = work.m_block * kBlockM;
  const KeyTiles tiles = KeyTiles::of<kBlockN>(mask, block_row, min(block_row + kBlockM, seq.seqlen_q));
  if (threadIdx.x == 0) {
    s.work.gK = seq.gK();
    s.work.gV = seq.gV();
    s.work.seqlen_k = seq.seqlen_k;
    s.work.first_row = block_row;
    s.work.tiles.begin = tiles.begin;
    s.work.tiles.end = tiles.end;
    s.work.tiles.full_begin = tiles.full_begin;
    s.work.tiles.full_end = tiles.full_end;
  }
  __syncthreads();

  const u32 lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
  if (tiles.begin < tiles.end) {
    const int first_row = block_row + warp * kWarpRows;
    copy_rows<QLayout, kWarpRows, 32, kVecBytes, kWholeHeads, false>(
        shared_address(s.sQ[warp]), seq.gQ() + first_row * p.q_strides.row, p.q_strides.row, seq.seqlen_q - first_row, p.head_dim,
        lane);
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
    const int first_row = s.work.first_row + warp * kWarpRows;
    cp_async_wait<0>();
    __syncthreads();                            // K, with two stages V too, has landed; all have read what is copied over next
    if (kStages == 1) load_v(s, p, tile);
    if (kStages == 2 && tile + 1 < s.work.tiles.end) {
      load_k(s, p, tile + 1);
      load_v(s, p, tile + 1);
    }
    cp_async_commit();
    if (kStages == 2 && partial) separate_nonfinite(rows, s, stage, mask, first_row, tile);   // before S needs its registers

    // Where this lane's row of the first ldmatrix lies: Q and V by 16 rows, K by 2 x 8 rows of 2 chunks.
    const u32 l = thread_index() % 32;
    const u32 q_lane = shared_address(s.sQ[warp]) + QLayout::offset(l % 16, l / 16);
    const u32 k_lane = shared_address(s.sK[stage]) + KLayout::offset(l % 8 + l / 16 * 8, l / 8 % 2);
    const u32 v_lane = shared_address(s.sV[stage]) + VLayout::offset(l % 16, l / 16);
    float rS[kMTiles][kBlockN / 8][4];
    multiply_qk(rS, q_lane, k_lane);
    if (kStages == 1) {
      cp_async_wait<0>();
      __syncthreads();                          // V has landed; all have read K
      if (tile + 1 < s.work.tiles.end) load_k(s, p, tile + 1);
      cp_async_commit();
    }
    apply_score_and_mask(rS, score, mask, partial, first_row, tile * kBlockN);
    update_max(rows, rS, exponent_scale);
    if (kStages == 1 && partial) separate_nonfinite(rows, s, stage, mask, first_row, tile);
    multiply_pv(rows, rS, exponent_scale, v_lane);
  }
  write_out(s, rows, p);
}
