// Attention backward on tensor cores through mma.sync: float16 and bfloat16, sm_80 and newer.
//
//   q, dout [batch, seqlen_q, heads_q, ..], k, v [batch, seqlen_k, heads_k, ..], rows (bwd_delta)  ->  dk, dv; adds to dq_sum
//
// A block computes dK and dV of kBlockN keys of one key head, in registers, over all query heads of the group and all their
// query tiles that see the keys (FlashAttention-2, Dao 2023, Algorithm 2). Of a tile of kBlockM queries:
//   S^T = K Q^T, dP^T = V dO^T;  P = exp2(S - lse), dS = P * (dP - delta);  dV += P^T dO, dK += dS^T Q;  dQ += dS K
// The scores are computed transposed, keys along the rows: as accumulators, P^T and dS^T then are the A operands of dV and dK.
// kGroup warps share kWarpKeys keys: each computes the scores of its share of the queries and its share of the columns of dK
// and dV; what the others computed it reads from shared memory. dS goes there for dQ in any case. With two buffers for it
// (kDsStages) the dQ of a tile is computed one tile later, beside the scores of the next, and a tile takes one barrier:
//   wait for the copies; barrier (they have landed for all, dS of the last tile is written, buffers are free); copy the next.
// DETERMINISTIC: the dQ of a tile is added when the key tiles before this one have added theirs (attn/gradient.cuh).
// A tile is masked only if it is partial. Not here: float32 and float64 (bwd_simt).
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
#include "ptx/mma_sm80.cuh"
#include "ptx/reduce.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros to whole 64-byte groups
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kGroup = GROUP;                   // warps that share keys
constexpr int kStages = STAGES;                 // buffers of Q and dO
constexpr int kDsStages = DS_STAGES;
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim and kHeadDimV
constexpr int kVecBytes = VEC_BYTES;            // divides every address of q, k, v and dout
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // of dk and dv
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT, kHasMask = kMaskLeft || kMaskRight;
constexpr bool kDeterministic = DETERMINISTIC;

constexpr int kThreads = kWarps * 32;
constexpr int kWarpKeys = kBlockN * kGroup / kWarps;
constexpr int kMTiles = kWarpKeys / 16;
constexpr int kOwnQueries = kBlockM / kGroup;   // whose scores a warp computes, kPassQueries at a time
constexpr int kPassQueries = kOwnQueries < 32 ? kOwnQueries : 32;
constexpr int kNTiles = kPassQueries / 8;
constexpr int kDkTiles = kHeadDim / kGroup / 8, kDvTiles = kHeadDimV / kGroup / 8;
constexpr bool kDqLater = kDsStages == 2;
static_assert(kWarpKeys % 16 == 0 && kOwnQueries % kPassQueries == 0 && kPassQueries % 16 == 0, "whole mma tiles");
static_assert(kHeadDim % (16 * kGroup) == 0 && kHeadDimV % (16 * kGroup) == 0, "columns are dealt 16 at a time");
static_assert(kHasCpAsync && kThreads >= kBlockM, "facts of rows are copied by a thread each");
static_assert(!kDqLater || kStages == 2, "the next tile is copied before dQ of the last is done");

// dQ of a tile is dealt to kDqWarps along the rows times the rest along the columns, for the fewest reads of operands.
DEV constexpr int dq_row_warps() {
  int best = 0, fewest = 1 << 30;
  for (int r = 1; r <= kWarps; r *= 2) {
    const int c = kWarps / r, reads = kBlockM / r + kHeadDim / c;
    if (kBlockM % (16 * r) == 0 && kHeadDim % (16 * c) == 0 && reads < fewest) best = r, fewest = reads;
  }
  return best;
}
constexpr int kDqRowWarps = dq_row_warps(), kDqColWarps = kWarps / kDqRowWarps;
constexpr int kDqMTiles = kBlockM / kDqRowWarps / 16, kDqNTiles = kHeadDim / kDqColWarps / 8;

using QLayout = TileLayout<kHeadDim>;           // also of K, dK
using OLayout = TileLayout<kHeadDimV>;          // dO, V, dV
using SLayout = TileLayout<kBlockM>;            // dS^T, P^T: a row is a key
using HeadMask = Mask<kMaskLeft, kMaskRight>;

// What all threads of a block know alike. It lies in shared memory and is read where it is used (hence volatile): the main
// loop needs every register.
struct BlockWork {
  const Element* gQ;                            // row 0 of the first query head of the group
  const Element* gDO;
  const RowFacts<float>* gRows;
  float* gDqSum;
  int batch, head_k, first_key;
  int seqlen_q, seqlen_k;
  int begin, end, full_begin, full_end;         // QueryTiles
  int visits;                                   // query tiles of all heads
  int keys_are_poisoned;
  u32 ticket;
  int* turns;                                   // DETERMINISTIC: of query tile 0 of the first query head of the group
};

struct alignas(128) SharedStorage {
  Element sK[kBlockN * kHeadDim];               // at the end dK
  Element sV[kBlockN * kHeadDimV];              // at the end dV
  Element sQ[kStages][kBlockM * kHeadDim];
  Element sDO[kStages][kBlockM * kHeadDimV];
  Element sDS[kDsStages + (kGroup > 1)][kBlockN * kBlockM];      // the last one: P
  RowFacts<float> facts[kStages][kBlockM];
  float key_poison[kBlockN];                    // NaN for a key whose K held NaN or Inf
  volatile BlockWork work;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// A query tile of a query head of the group.
struct Visit {
  int head, tile;
  DEV void advance(const SharedStorage& s) {
    if (++tile == s.work.end) tile = s.work.begin, head++;
  }
};

struct Gradients {
  float rDK[kMTiles][kDkTiles][4];              // columns 16 at a time, of kGroup times 16
  float rDV[kMTiles][kDvTiles][4];
};

template <typename Layout, int kRows, bool kWholeRows>
DEV void load_tile(Element* sTile, const Element* src, i64 row_stride, int rows, int cols) {
  copy_rows<Layout, kRows, kThreads, kVecBytes, kWholeHeads, kWholeRows>(shared_address(sTile), src, row_stride, rows, cols,
                                                                         thread_index());
}

// Start copying the Q, dO and facts of a query tile. Rows past the end become zeros; such a tile is partial.
template <bool kWholeRows> DEV void load_visit(SharedStorage& s, const BwdParams& p, const Visit& v, int stage, int rows) {
  const i64 first_row = v.tile * kBlockM;
  const int thread = thread_index();
  load_tile<QLayout, kBlockM, kWholeRows>(s.sQ[stage], s.work.gQ + v.head * p.q_strides.head + first_row * p.q_strides.row,
                                          p.q_strides.row, rows, p.head_dim);
  load_tile<OLayout, kBlockM, kWholeRows>(s.sDO[stage],
                                          s.work.gDO + v.head * p.dout_strides.head + first_row * p.dout_strides.row,
                                          p.dout_strides.row, rows, p.head_dim_v);
  if (thread < kBlockM)
    cp_async<8>(shared_address(&s.facts[stage][thread]), s.work.gRows + (i64)v.head * p.seqlen_q + first_row + thread,
                kWholeRows || thread < rows ? 8 : 0);
}
DEV void load_queries(SharedStorage& s, const BwdParams& p, const Visit& v, int stage) {
  const int rows = s.work.seqlen_q - v.tile * kBlockM;
  if (rows >= kBlockM)
    load_visit<true>(s, p, v, stage, rows);
  else
    load_visit<false>(s, p, v, stage, rows);
  cp_async_commit();
}

// rS += K Q^T or V dO^T. beside(i) for each i below kMTiles * kNTiles is other work to mix with it.
template <typename Layout, typename Beside>
DEV void multiply_scores(float (&rS)[kMTiles][kNTiles][4], u32 key_lane, u32 query_lane, Beside beside) {
  #pragma unroll
  for (int d = 0; d < Layout::kCols / 16; d++) {
    u32 rKeys[kMTiles][4];
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rKeys[m], Layout::step(key_lane, d * 2) + m * 16 * Layout::kRowBytes);
    #pragma unroll
    for (int n = 0; n < kNTiles; n += 2) {
      u32 rQueries[4];
      ldmatrix_x4(rQueries, Layout::step(query_lane, d * 2) + n * 8 * Layout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rS[m][n], rKeys[m], rQueries[0], rQueries[1]);
        mma_m16n8k16<Element>(rS[m][n + 1], rKeys[m], rQueries[2], rQueries[3]);
      }
    }
    constexpr int kSteps = Layout::kCols / 16, kPieces = kMTiles * kNTiles;
    #pragma unroll
    for (int i = d * kPieces / kSteps; i < (d + 1) * kPieces / kSteps; i++) beside(i);
  }
}

// The facts of this lane's two rows of the eight from `facts` on: the columns of an accumulator.
struct LaneFacts {
  float lse[2], delta[2];
  DEV LaneFacts(const RowFacts<float>* facts) {
    const Chunk c = load_shared(shared_address(facts + thread_index() % 4 * 2));
    #pragma unroll
    for (int i = 0; i < 2; i++) lse[i] = __uint_as_float(c.word[2 * i]), delta[i] = __uint_as_float(c.word[2 * i + 1]);
  }
};

// P in place of raw products.
template <typename Score> DEV void exponentiate(float (&s)[4], const Score& score, const RowFacts<float>* facts) {
  const LaneFacts f(facts);
  #pragma unroll
  for (int i = 0; i < 4; i++) s[i] = exp2_fast(fmaf(score.logit(s[i]), score.exponent_scale(), -f.lse[i % 2]));
}
// dS in place of dP - delta, and P in place of raw products if that was left to do: the slope needs the logits.
template <typename Score>
DEV void softmax_gradient(float (&s)[4], float (&ds)[4], const Score& score, const RowFacts<float>* facts) {
  if constexpr (Score::kHasSlope) {
    #pragma unroll
    for (int i = 0; i < 4; i++) ds[i] *= score.slope(score.logit(s[i]));
    exponentiate(s, score, facts);
  }
  #pragma unroll
  for (int i = 0; i < 4; i++) ds[i] *= s[i];
}

// P and dS of pairs that do not see each other become 0 whatever they were, those of poisoned keys NaN.
DEV void apply_mask(float (&rP)[kMTiles][kNTiles][4], float (&rDS)[kMTiles][kNTiles][4], const SharedStorage& s,
                    const BwdParams& p, int warp_key, int first_row) {
  const HeadMask mask(p, s.work.seqlen_q, s.work.seqlen_k);
  const int lane = thread_index() % 32, lane_row = first_row + lane % 4 * 2;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    const int tile_key = warp_key + r / 2 * 16 + r % 2 * 8 + lane / 4, key = s.work.first_key + tile_key;
    const int begin = mask.row_begin(key) - lane_row, end = key < mask.seqlen_k ? mask.row_end(key) - lane_row : begin;
    const float poison = kHasMask ? s.key_poison[tile_key] : 0.f;
    #pragma unroll
    for (int i = 0; i < kNTiles * 2; i++) {
      const int row = i / 2 * 8 + i % 2;
      const bool visible = row >= begin && row < end;
      float& prob = rP[r / 2][i / 2][r % 2 * 2 + i % 2];
      float& ds = rDS[r / 2][i / 2][r % 2 * 2 + i % 2];
      prob = visible ? prob + poison : 0.f;
      ds = visible ? ds + poison : 0.f;
    }
  }
}

// dK or dV += the A operand times 16 rows of Q or dO.
template <typename Layout, int kTiles>
DEV void accumulate(float (&acc)[kMTiles][kTiles][4], const u32 (&rA)[kMTiles][4], u32 query_lane) {
  #pragma unroll
  for (int n = 0; n < kTiles; n += 2) {
    u32 rB[4];
    ldmatrix_x4_trans(rB, Layout::step(query_lane, n * kGroup));
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) {
      mma_m16n8k16<Element>(acc[m][n], rA[m], rB[0], rB[1]);
      mma_m16n8k16<Element>(acc[m][n + 1], rA[m], rB[2], rB[3]);
    }
  }
}

// dQ of a tile, for this warp's share of it, added to dq_sum. dS is A transposed, K is B.
DEV void multiply_dq(SharedStorage& s, int stage, const BwdParams& p, const Visit& v) {
  const u32 lane = thread_index() % 32, warp = uniform(thread_index() / 32);
  const int row_warp = warp % kDqRowWarps, col_warp = warp / kDqRowWarps;
  const u32 ds_lane = SLayout::step(piece_right<SLayout>(shared_address(s.sDS[stage]), lane), row_warp * kDqMTiles * 2);
  const u32 k_lane = QLayout::step(piece_down<QLayout>(shared_address(s.sK), lane), col_warp * 2);
  float rDQ[kDqMTiles][kDqNTiles][4] = {};
  #pragma unroll
  for (int key = 0; key < kBlockN; key += 16) {
    u32 rDS[kDqMTiles][4];
    #pragma unroll
    for (int m = 0; m < kDqMTiles; m++) ldmatrix_x4_trans(rDS[m], SLayout::step(ds_lane, m * 2) + key * SLayout::kRowBytes);
    #pragma unroll
    for (int n = 0; n < kDqNTiles; n += 2) {
      u32 rK[4];
      ldmatrix_x4_trans(rK, QLayout::step(k_lane, n * kDqColWarps) + key * QLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kDqMTiles; m++) {
        mma_m16n8k16<Element>(rDQ[m][n], rDS[m], rK[0], rK[1]);
        mma_m16n8k16<Element>(rDQ[m][n + 1], rDS[m], rK[2], rK[3]);
      }
    }
  }
  // Groups past the end have dS = 0: they add nothing to the last one, without a branch. Rows past the end may get a NaN of K
  // there, which nothing reads.
  const int first_group = v.tile * (kBlockM / kDqGroup), last_group = (s.work.seqlen_q - 1) / kDqGroup;
  float* dst = s.work.gDqSum + (v.head * num_dq_groups(p) + first_group) * (kDqGroup * kHeadDim) + col_warp * 256 + lane * 4;
  #pragma unroll
  for (int m = 0; m < kDqMTiles; m++) {
    float* group = dst + min(row_warp * kDqMTiles + m, last_group - first_group) * (kDqGroup * kHeadDim);
    #pragma unroll
    for (int n = 0; n < kDqNTiles; n++) red_add(group + n / 2 * kDqColWarps * 256 + n % 2 * 128, rDQ[m][n]);
  }
}

// NaN and Inf of operands that a product would carry, times a 0 of P or dS, to what does not see them: they become 0 in the
// tile, and by a NaN in the facts of the row, or for the key, they go to exactly the pairs that see each other. There they
// become NaN in all columns; a full tile, which needs none of this, keeps to the columns that they stand in.
DEV void separate_nonfinite_queries(SharedStorage& s, int stage) {
  const auto poison = [&](int row) { s.facts[stage][row].lse_log2 = __int_as_float(0x7fffffff); };
  clear_nonfinite<Element, QLayout, kBlockM, kThreads>(shared_address(s.sQ[stage]), thread_index(), poison);
  clear_nonfinite<Element, OLayout, kBlockM, kThreads>(shared_address(s.sDO[stage]), thread_index(), poison);
}
DEV void separate_nonfinite_keys(SharedStorage& s) {
  clear_nonfinite<Element, QLayout, kBlockN, kThreads>(shared_address(s.sK), thread_index(), [&](int row) {
    s.key_poison[row] = __int_as_float(0x7fffffff);
    s.work.keys_are_poisoned = 1;
  });
}

// DETERMINISTIC: before a block barrier behind which all add the dQ of a visit; warp 0.
DEV void await_turn(SharedStorage& s, const BwdParams& p, const Visit& v) {
  if (thread_index() / 32 != 0) return;
  const int key_tile = s.work.first_key / kBlockN, first_row = v.tile * kBlockM;
  const HeadMask mask(p, s.work.seqlen_q, s.work.seqlen_k);
  const int turn = key_tile - KeyTiles::of<kBlockN>(mask, first_row, min(first_row + kBlockM, mask.seqlen_q)).begin;
  if (thread_index() == 0) wait_for_turn(s.work.turns + v.head * p.num_query_tiles + v.tile, turn);
}
// After one, behind those additions.
DEV void end_turn(SharedStorage& s, const BwdParams& p, const Visit& v) {
  if (thread_index() == 0) pass_turn(s.work.turns + v.head * p.num_query_tiles + v.tile);
}

// One of dK and dV, kBlockN rows, through shared memory.
template <typename Layout, int kTiles>
DEV void write_gradient(Element* sTile, const float (&acc)[kMTiles][kTiles][4], float scale) {
  const int warp = thread_index() / 32, warp_key = warp / kGroup * kWarpKeys;
  #pragma unroll
  for (int m = 0; m < kMTiles; m++)
    #pragma unroll
    for (int n = 0; n < kTiles; n += 2) {
      float scaled[2][4];
      #pragma unroll
      for (int i = 0; i < 8; i++) scaled[i / 4][i % 4] = acc[m][n + i / 4][i % 4] * scale;
      u32 r[4];
      pack_fragment<Element>(r, scaled[0], scaled[1]);
      store_fragment<Layout>(shared_address(sTile), warp_key + m * 16, warp % kGroup * 2 + n * kGroup, r);
    }
}
template <typename Layout>
DEV void write_rows(Element* dst, i64 row_stride, Element* sTile, int rows, int rows_used, int cols) {
  #pragma unroll 4
  for (int idx = thread_index(); idx < kBlockN * Layout::kChunks; idx += kThreads) {
    const int row = idx / Layout::kChunks, chunk = idx % Layout::kChunks;
    const Chunk c = row < rows_used ? load_shared(shared_address(sTile) + Layout::offset(row, chunk)) : Chunk{};
    if (row < rows) store_chunk<kOutVecBytes>((char*)(dst + row * row_stride + chunk * 8), c, (cols - chunk * 8) * 2);
  }
}
DEV void write_out(SharedStorage& s, const Gradients& gradients, const BwdParams& p) {
  write_gradient<QLayout>(s.sK, gradients.rDK, (float)p.softmax_scale);
  write_gradient<OLayout>(s.sV, gradients.rDV, 1.f);
  __syncthreads();
  const Sequence seq(p, s.work.batch);
  const int first = s.work.first_key, head = s.work.head_k;
  write_rows<QLayout>(seq.key_rows((Element*)p.dk, p.dk_strides, head) + first * p.dk_strides.row, p.dk_strides.row, s.sK,
                      seq.rows_k - first, seq.seqlen_k - first, p.head_dim);
  write_rows<OLayout>(seq.key_rows((Element*)p.dv, p.dv_strides, head) + first * p.dv_strides.row, p.dv_strides.row, s.sV,
                      seq.rows_k - first, seq.seqlen_k - first, p.head_dim_v);
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) bwd_sm80(const BwdParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (kDeterministic) {
    if (threadIdx.x == 0) s.work.ticket = take_ticket(p);
    __syncthreads();
  }
  const Work work = work_of_block<kKeySide>(kDeterministic ? s.work.ticket : blockIdx.x, p);
  if (work.batch < 0) return;
  const Sequence seq(p, work);
  const HeadMask block_mask(p, seq.seqlen_q, seq.seqlen_k);
  const int first_key = work.tile * kBlockN;
  const QueryTiles tiles = QueryTiles::of<kBlockM, kBlockN>(block_mask, first_key, min(first_key + kBlockN, seq.seqlen_k));
  if (threadIdx.x == 0) {
    const int heads = p.heads_q / p.heads_k, head = work.head * heads;
    s.work.gQ = seq.query_rows((const Element*)p.q, p.q_strides, head);
    s.work.gDO = seq.query_rows((const Element*)p.dout, p.dout_strides, head);
    s.work.gRows = (const RowFacts<float>*)p.rows + seq.row_index(head);
    s.work.gDqSum = (float*)p.dq_sum + first_dq_group(p, seq, work.batch, head) * (kDqGroup * kHeadDim);
    if (kDeterministic) s.work.turns = turn_of(p, seq, work.batch, head, 0, kBlockM);
    s.work.batch = work.batch;
    s.work.head_k = work.head;
    s.work.first_key = first_key;
    s.work.seqlen_q = seq.seqlen_q;
    s.work.seqlen_k = seq.seqlen_k;
    s.work.begin = tiles.begin;
    s.work.end = tiles.end;
    s.work.full_begin = tiles.full_begin;
    s.work.full_end = tiles.full_end;
    s.work.visits = (tiles.end - tiles.begin) * heads;
    s.work.keys_are_poisoned = 0;
  }
  if (kHasMask)
    for (int i = threadIdx.x; i < kBlockN; i += kThreads) s.key_poison[i] = 0.f;
  __syncthreads();

  Visit visit = {0, tiles.begin}, last = visit, before_last = visit;
  if (s.work.visits > 0) {
    const Element *gK = seq.key_rows((const Element*)p.k, p.k_strides, work.head) + first_key * p.k_strides.row;
    const Element *gV = seq.key_rows((const Element*)p.v, p.v_strides, work.head) + first_key * p.v_strides.row;
    const int keys = seq.seqlen_k - first_key;
    load_tile<QLayout, kBlockN, false>(s.sK, gK, p.k_strides.row, keys, p.head_dim);
    load_tile<OLayout, kBlockN, false>(s.sV, gV, p.v_strides.row, keys, p.head_dim_v);
    load_queries(s, p, visit, 0);
    if (kHasMask && (tiles.is_partial(tiles.begin) || tiles.is_partial(tiles.end - 1))) {
      cp_async_wait<0>();
      __syncthreads();
      separate_nonfinite_keys(s);               // the barrier of the first tile shows it to all
    }
  }

  const Score<SCORE, float> score(p);
  const int warp = uniform(threadIdx.x / 32), warp_key = warp / kGroup * kWarpKeys, member = warp % kGroup;
  Gradients gradients = {};
  #pragma unroll 1
  for (int i = 0; i < s.work.visits; i++) {
    const int stage = i % kStages, ds_stage = i % kDsStages;
    cp_async_wait<0>();
    if (kDeterministic && kDqLater && i > 0) await_turn(s, p, last);
    __syncthreads();
    if (kDeterministic && i > kDqLater) end_turn(s, p, kDqLater ? before_last : last);
    Visit next = visit;
    next.advance(s);
    const bool partial = visit.tile < s.work.full_begin || visit.tile >= s.work.full_end ||
                         (kHasMask && s.work.keys_are_poisoned);
    if (kHasMask && partial) {
      separate_nonfinite_queries(s, stage);
      __syncthreads();
    }

    const u32 lane = thread_index() % 32;
    // Of B for dV and dK: this warp's first columns of the tile.
    const u32 do_lane = OLayout::step(piece_down<OLayout>(shared_address(s.sDO[stage]), lane), member * 2);
    const u32 q_lane = QLayout::step(piece_down<QLayout>(shared_address(s.sQ[stage]), lane), member * 2);
    // Half of the warps compute dQ before the scores, half behind the first of them: beside one's exponentials then run the
    // products of another on the same scheduler.
    if (kDqLater && warp < kWarps / 2 && i > 0) multiply_dq(s, ds_stage ^ 1, p, last);
    #pragma unroll (kDeterministic ? 1 : 2)      // waiting for turns takes registers
    for (int pass = 0; pass < kOwnQueries / kPassQueries; pass++) {
      const int first_query = member * kOwnQueries + pass * kPassQueries;
      const RowFacts<float>* facts = &s.facts[stage][first_query];
      float rS[kMTiles][kNTiles][4] = {}, rDP[kMTiles][kNTiles][4];
      multiply_scores<QLayout>(rS, piece_down<QLayout>(shared_address(s.sK), lane) + warp_key * QLayout::kRowBytes,
                               piece_right<QLayout>(shared_address(s.sQ[stage]), lane) + first_query * QLayout::kRowBytes,
                               [](int) {});
      #pragma unroll
      for (int n = 0; n < kNTiles; n++) {
        const LaneFacts f(facts + n * 8);
        #pragma unroll
        for (int j = 0; j < kMTiles * 4; j++) rDP[j / 4][n][j % 4] = -f.delta[j % 2];
      }
      multiply_scores<OLayout>(rDP, piece_down<OLayout>(shared_address(s.sV), lane) + warp_key * OLayout::kRowBytes,
                               piece_right<OLayout>(shared_address(s.sDO[stage]), lane) + first_query * OLayout::kRowBytes,
                               [&](int j) {
        if (!score.kHasSlope) exponentiate(rS[j % kMTiles][j / kMTiles], score, facts + j / kMTiles * 8);
      });
      if (pass == 0 && kStages == 2 && i + 1 < s.work.visits) load_queries(s, p, next, stage ^ 1);
      #pragma unroll
      for (int j = 0; j < kMTiles * kNTiles; j++)
        softmax_gradient(rS[j % kMTiles][j / kMTiles], rDP[j % kMTiles][j / kMTiles], score, facts + j / kMTiles * 8);
      if (partial) apply_mask(rS, rDP, s, p, warp_key, visit.tile * kBlockM + first_query);
      #pragma unroll
      for (int query = 0; query < kPassQueries; query += 16) {
        u32 rA[kMTiles][4];
        #pragma unroll
        for (int m = 0; m < kMTiles; m++) {
          pack_fragment<Element>(rA[m], rS[m][query / 8], rS[m][query / 8 + 1]);
          if (kGroup > 1)
            store_fragment<SLayout>(shared_address(s.sDS[kDsStages]), warp_key + m * 16, (first_query + query) / 8, rA[m]);
        }
        accumulate<OLayout>(gradients.rDV, rA, do_lane + (first_query + query) * OLayout::kRowBytes);
      }
      #pragma unroll
      for (int query = 0; query < kPassQueries; query += 16) {
        u32 rA[kMTiles][4];
        #pragma unroll
        for (int m = 0; m < kMTiles; m++) {
          pack_fragment<Element>(rA[m], rDP[m][query / 8], rDP[m][query / 8 + 1]);
          store_fragment<SLayout>(shared_address(s.sDS[ds_stage]), warp_key + m * 16, (first_query + query) / 8, rA[m]);
        }
        accumulate<QLayout>(gradients.rDK, rA, q_lane + (first_query + query) * QLayout::kRowBytes);
      }
      if (kDqLater && pass == 0 && warp >= kWarps / 2 && i > 0) multiply_dq(s, ds_stage ^ 1, p, last);
    }
    if (kGroup > 1) {
      barrier_sync(1 + warp / kGroup, kGroup * 32);             // P and dS of this warp's keys are written
      const u32 p_lane = piece_down<SLayout>(shared_address(s.sDS[kDsStages]), lane) + warp_key * SLayout::kRowBytes;
      const u32 ds_lane = piece_down<SLayout>(shared_address(s.sDS[ds_stage]), lane) + warp_key * SLayout::kRowBytes;
      #pragma unroll
      for (int other = 1; other < kGroup; other++) {
        const int first_query = (member + other) % kGroup * kOwnQueries;
        #pragma unroll
        for (int query = first_query; query < first_query + kOwnQueries; query += 16) {
          u32 rA[kMTiles][4];
          #pragma unroll
          for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rA[m], SLayout::step(p_lane, query / 8) + m * 16 * SLayout::kRowBytes);
          accumulate<OLayout>(gradients.rDV, rA, do_lane + query * OLayout::kRowBytes);
          #pragma unroll
          for (int m = 0; m < kMTiles; m++) ldmatrix_x4(rA[m], SLayout::step(ds_lane, query / 8) + m * 16 * SLayout::kRowBytes);
          accumulate<QLayout>(gradients.rDK, rA, q_lane + query * QLayout::kRowBytes);
        }
      }
    }
    if (!kDqLater) {
      if (kDeterministic) await_turn(s, p, visit);
      __syncthreads();                          // dS is written, and all have read Q and dO
      if (kStages == 1 && i + 1 < s.work.visits) load_queries(s, p, next, 0);
      multiply_dq(s, 0, p, visit);
    }
    before_last = last;
    last = visit;
    visit = next;
  }
  if (kDeterministic && kDqLater && s.work.visits > 0) await_turn(s, p, last);
  __syncthreads();                              // dS of the last tile is written; all have read K and V
  if (kDqLater && s.work.visits > 0) {
    if (kDeterministic && s.work.visits > 1) end_turn(s, p, before_last);
    multiply_dq(s, (s.work.visits - 1) % 2, p, last);
    __syncthreads();                            // all have read K
  }
  if (kDeterministic && s.work.visits > 0) end_turn(s, p, last);
  write_out(s, gradients, p);
}
