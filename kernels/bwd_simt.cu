// Attention backward by plain multiply-add: every dtype, every feature, every GPU. The readable statement of the algorithm.
//
//   q, k, v, dout, and of each query row lse and delta = rowsum(dout * out) - dlse (bwd_delta)  ->  dk, dv, dq_sum (bwd_cast)
//
// A block computes dK and dV of kBlockN keys of one key head. It goes over the query tiles that see them, of all query heads
// that read the key head, and keeps nothing of the score matrix: FlashAttention-2 (Dao 2023, Algorithm 2). For each tile:
//   dP = dO V^T                           S = Q K^T, P = exp(logit(S) - lse)      dS = P (dP - delta) slope(S)
//   dV += P^T dO                          dK += dS^T Q                            dQ += dS K, added by all key tiles
// S and dP never stand in registers together: dP - delta waits where dS will be, read again by the lane that wrote it.
//   Operands come in chunks through two buffers, filled by all threads one chunk ahead; columns for dP, S and dQ, rows for dV
//   and dK:
//     wait for chunk c; barrier (c has landed, c - 1 has been read); start copying c + 1; multiply by c.
//   P and dS go through shared memory to all warps; the barrier of the first chunk of dV lies in between.
// Each product is shared out anew among the warps (tile/simt.cuh). float16 and bfloat16 are float from shared memory on.
// dV and dK are summed by tile and then added up: one running sum over all rows would lose accuracy as they grow in number.
// Only partial tiles are masked; there P = -1 says "masked", and neither P nor dS nor what they would multiply is touched.
// DETERMINISTIC: key tiles add to dQ in their order (attn/gradient.cuh), else as they come.
#include "attn/gradient.cuh"
#include "attn/mask.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/tiles.cuh"
#include "ptx/reduce.cuh"
#include "tile/simt.cuh"

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kChunkD = CHUNK_D;                // columns of Q and K, or of dO and V, in a buffer
constexpr int kChunkM = CHUNK_M;                // rows of dO, or of Q, in a buffer
constexpr int kChunkQ = CHUNK_Q;                // columns of K in a buffer, for as many of dQ
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a thread loads at once; divides head_dim, head_dim_v
constexpr int kStore = OUT_VEC_BYTES / sizeof(Element); // elements of dk and dv stored at once; divides both too
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT, kDeterministic = DETERMINISTIC;

constexpr int kThreads = kWarps * 32;
constexpr int kPitchD = kChunkD + kVec;         // neighbouring rows begin in different bank groups
constexpr int kPitchP = kBlockN + 8;            // what a warp writes side by side, 4 rows of 8 keys, does not collide
constexpr int kBuffer = larger((kBlockM + kBlockN) * kPitchD, larger(kChunkM * larger(kHeadDim, kHeadDimV), kBlockN * kChunkQ));
static_assert(kHeadDim % kChunkD == 0 && kHeadDimV % kChunkD == 0 && kBlockM % kChunkM == 0 && kHeadDim % kChunkQ == 0,
              "whole chunks");
static_assert(kChunkD % (2 * kVec) == 0 && kBlockN % 16 == 0, "reads and writes without bank conflicts");
static_assert(kBlockM <= kThreads, "a thread loads the facts of one row");
static_assert(kStore <= kVec, "what is stored at once lies together in a lane");

using Facts = RowFacts<R>;
using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, R>;
using SplitS = Split<kWarps, kBlockM, kBlockN, 1, 1>;           // S, dP
using SplitV = Split<kWarps, kBlockN, kHeadDimV, kVec, kVec>;   // dV
using SplitK = Split<kWarps, kBlockN, kHeadDim, kVec, kVec>;    // dK
using SplitQ = Split<kWarps, kBlockM, kChunkQ, 1, kVec>;        // dQ

// What all threads of a block know alike. It lies in shared memory and is read where it is used: products need all registers.
struct BlockWork {
  const Element* gQ;                            // row 0 of query head 0
  const Element* gDO;
  const Element* gK;                            // the first key of the key head
  const Element* gV;
  i64 row_index;                                // of row 0 of query head 0, in arrays like lse
  i64 dq_group;                                 // and in dq_sum
  int seqlen_q, seqlen_k;
  int batch, tile, head_k;                      // sequence, key tile, key head
  int head_begin, head_end;                     // query heads that read the key head
  TileRange tiles;                              // query tiles of each
};

struct alignas(16) SharedStorage {
  R sChunk[2][kBuffer];
  R sP[kBlockM][kPitchP];
  R sDS[kBlockM][kPitchP];
  Facts sFacts[kBlockM];
  BlockWork work;
  u32 ticket;
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// The products of a tile, in order, and the chunks of their operands.
enum Product { kDP, kS, kDV, kDK, kDQ };
constexpr int kNumChunks[] = {kHeadDimV / kChunkD, kHeadDim / kChunkD, kBlockM / kChunkM, kBlockM / kChunkM, kHeadDim / kChunkQ};

struct Step { int head, tile; };                // a query head and a tile of its rows
DEV Step step_after(const BlockWork& work, Step at) {
  return at.tile + 1 < work.tiles.end ? Step{at.head, at.tile + 1} : Step{at.head + 1, work.tiles.begin};
}

// kCount rows of a head from row `first` and column `col` on, or all keys of the tile.
template <int kCount, int kColumns, int kPitch>
DEV void load_query_rows(const BlockWork& work, R* dst, const Element* src, const Strides& strides, int head, int first, int col,
                         int cols) {
  load_rows<kThreads, kCount, kColumns, kPitch, kLoad>(dst, src + head * strides.head + first * strides.row + col, strides.row,
                                                       work.seqlen_q - first, cols - col);
}
template <int kColumns, int kPitch>
DEV void load_key_rows(const BlockWork& work, R* dst, const Element* src, const Strides& strides, int col, int cols) {
  load_rows<kThreads, kBlockN, kColumns, kPitch, kLoad>(dst, src + col, strides.row, work.seqlen_k - work.tile * kBlockN,
                                                        cols - col);
}

// Starts copying a chunk, and with the first of a step the facts of its rows.
template <Product kProduct> DEV void load_chunk(SharedStorage& s, const BwdParams& p, R* dst, Step at, int chunk) {
  const BlockWork& work = s.work;
  const int first_row = at.tile * kBlockM, col = chunk * kChunkD, row = first_row + chunk * kChunkM;
  Facts facts = {};
  const bool has_facts = kProduct == kDP && chunk == 0 && threadIdx.x < kBlockM;
  if (has_facts && first_row + (int)threadIdx.x < work.seqlen_q)
    facts = ((const Facts*)p.rows)[work.row_index + (i64)at.head * p.seqlen_q + first_row + threadIdx.x];
  if constexpr (kProduct == kDP) {
    load_query_rows<kBlockM, kChunkD, kPitchD>(work, dst, work.gDO, p.dout_strides, at.head, first_row, col, p.head_dim_v);
    load_key_rows<kChunkD, kPitchD>(work, dst + kBlockM * kPitchD, work.gV, p.v_strides, col, p.head_dim_v);
  }
  if constexpr (kProduct == kS) {
    load_query_rows<kBlockM, kChunkD, kPitchD>(work, dst, work.gQ, p.q_strides, at.head, first_row, col, p.head_dim);
    load_key_rows<kChunkD, kPitchD>(work, dst + kBlockM * kPitchD, work.gK, p.k_strides, col, p.head_dim);
  }
  if constexpr (kProduct == kDV)
    load_query_rows<kChunkM, kHeadDimV, kHeadDimV>(work, dst, work.gDO, p.dout_strides, at.head, row, 0, p.head_dim_v);
  if constexpr (kProduct == kDK)
    load_query_rows<kChunkM, kHeadDim, kHeadDim>(work, dst, work.gQ, p.q_strides, at.head, row, 0, p.head_dim);
  if constexpr (kProduct == kDQ)
    load_key_rows<kChunkQ, kChunkQ>(work, dst, work.gK, p.k_strides, chunk * kChunkQ, p.head_dim);
  cp_async_commit();
  if (has_facts) s.sFacts[threadIdx.x] = facts;
}

// Chunks alternate between two buffers.
struct Pipeline {
  SharedStorage& s;
  const BwdParams& p;
  int buffer;                                   // that of the chunk that comes next

  // Waits for a chunk of a product and starts the one after it. Returns where it lies.
  template <Product kProduct> DEV const R* next_chunk(Step at, int chunk) {
    cp_async_wait<0>();
    __syncthreads();                            // the chunk has landed for all; all have read the one before
    const R* landed = s.sChunk[buffer];
    buffer ^= 1;
    const Step next = step_after(s.work, at);
    if (chunk + 1 < kNumChunks[kProduct]) load_chunk<kProduct>(s, p, s.sChunk[buffer], at, chunk + 1);
    else if (kProduct != kDQ) load_chunk<Product((kProduct + 1) % 5)>(s, p, s.sChunk[buffer], at, 0);
    else if (next.head < s.work.head_end) load_chunk<kDP>(s, p, s.sChunk[buffer], next, 0);
    return landed;
  }
};

// X Y^T over all chunks of a product of query rows with key rows.
template <Product kProduct> DEV void multiply_rows(Pipeline& chunks, Step at, SplitS::Tile& sum) {
  #pragma unroll 1
  for (int c = 0; c < kNumChunks[kProduct]; c++) {
    const R* chunk = chunks.next_chunk<kProduct>(at, c);
    multiply_abt<SplitS, kChunkD, kPitchD>(sum, chunk + SplitS::row() * kPitchD,
                                           chunk + (kBlockM + SplitS::col()) * kPitchD);
  }
}

// Which pairs of a lane's rows and keys of S see each other.
struct Visible {
  int num_rows, num_keys, left, right;
  DEV Visible(const HeadMask& mask, int row, int key)
      : num_rows(mask.seqlen_q - row), num_keys(mask.seqlen_k - key), left(mask.left + row - key),
        right(mask.right + row - key) {}
  DEV bool operator()(int i, int j) const {
    const int row = SplitS::row_step(i), key = SplitS::col_step(j);
    return (row < num_rows) & (key < num_keys) & (!kMaskLeft | (key - row >= left)) & (!kMaskRight | (key - row <= right));
  }
};

// dP - delta to where dS will be.
DEV void write_dp(SharedStorage& s, const SplitS::Tile& rDP) {
  const int row = SplitS::row(), at = row * kPitchP + SplitS::col();
  #pragma unroll
  for (int i = 0; i < SplitS::kRows; i++) {
    const R delta = s.sFacts[row + SplitS::row_step(i)].delta;
    #pragma unroll
    for (int j = 0; j < SplitS::kCols; j++)
      s.sDS[0][at + SplitS::row_step(i) * kPitchP + SplitS::col_step(j)] = rDP[i][j] - delta;
  }
}

// P and dS from S and dP - delta.
template <bool kPartial>
DEV void softmax_gradient(SharedStorage& s, const BwdParams& p, const SplitS::Tile& rS, int tile_row) {
  const HeadScore score(p);
  const int row = SplitS::row(), key = SplitS::col(), at = row * kPitchP + key;
  const Visible visible(HeadMask(p, s.work.seqlen_q, s.work.seqlen_k), tile_row + row, s.work.tile * kBlockN + key);
  #pragma unroll
  for (int i = 0; i < SplitS::kRows; i++) {
    const R lse_log2 = s.sFacts[row + SplitS::row_step(i)].lse_log2;
    #pragma unroll
    for (int j = 0; j < SplitS::kCols; j++) {
      const int pair = at + SplitS::row_step(i) * kPitchP + SplitS::col_step(j);
      const R logit = score.logit(rS[i][j]);
      R prob = exp2_fast(fma(logit, score.exponent_scale(), -lse_log2));
      R ds = prob * s.sDS[0][pair];
      if (HeadScore::kHasSlope) ds *= score.slope(logit);
      if (kPartial && !visible(i, j)) prob = -1, ds = 0;
      s.sP[0][pair] = prob;
      s.sDS[0][pair] = ds;
    }
  }
}

// total += X^T Y: of P and dO, or of dS and Q, rows by chunks.
template <Product kProduct, typename Split>
DEV void add_products(Pipeline& chunks, Step at, typename Split::Tile& total, const R* x, bool partial) {
  constexpr int kCols = kProduct == kDV ? kHeadDimV : kHeadDim;
  typename Split::Tile sum = {};
  #pragma unroll 1
  for (int c = 0; c < kNumChunks[kProduct]; c++) {
    const R* chunk = chunks.next_chunk<kProduct>(at, c);
    const int offset = c * kChunkM * kPitchP + Split::row();
    const R* seen = chunks.s.sP[0] + offset;
    if (partial) multiply_atb<Split, true, kChunkM, kPitchP, kCols>(sum, x + offset, seen, chunk + Split::col());
    else multiply_atb<Split, false, kChunkM, kPitchP, kCols>(sum, x + offset, seen, chunk + Split::col());
  }
  #pragma unroll
  for (int n = 0; n < Split::kRows * Split::kCols; n++)
    total[n / Split::kCols][n % Split::kCols] += sum[n / Split::kCols][n % Split::kCols];
}

// dq_sum += dS K, columns by chunks.
DEV void add_dq(Pipeline& chunks, Step at, bool partial) {
  SharedStorage& s = chunks.s;
  #pragma unroll 1
  for (int c = 0; c < kNumChunks[kDQ]; c++) {
    const R* chunk = chunks.next_chunk<kDQ>(at, c);
    const int row = SplitQ::row(), first_row = at.tile * kBlockM + row;
    SplitQ::Tile sum = {};
    if (partial) multiply_ab<SplitQ, true, kBlockN, kPitchP, kChunkQ>(sum, s.sDS[row], s.sP[row], chunk + SplitQ::col());
    else multiply_ab<SplitQ, false, kBlockN, kPitchP, kChunkQ>(sum, s.sDS[row], s.sP[row], chunk + SplitQ::col());
    R* gDQ = (R*)chunks.p.dq_sum + (s.work.dq_group + at.head * num_dq_groups(chunks.p)) * (kDqGroup * kHeadDim);
    const int col = c * kChunkQ + SplitQ::col();
    #pragma unroll
    for (int i = 0; i < SplitQ::kRows; i++)
      #pragma unroll
      for (int j = 0; j < SplitQ::kCols; j += 2)
        if (first_row + SplitQ::row_step(i) < s.work.seqlen_q)
          red_add(gDQ + dq_index<kHeadDim>(first_row + SplitQ::row_step(i), col + SplitQ::col_step(j)), sum[i][j], sum[i][j + 1]);
  }
}

// dV, or dK, of a lane.
template <typename Split>
DEV void write_out(const SharedStorage& s, const BwdParams& p, const typename Split::Tile& total, R scale, void* out,
                   const Strides& strides, int cols) {
  const Sequence seq(p, s.work.batch);
  const int col = Split::col();
  #pragma unroll
  for (int i = 0; i < Split::kRows; i++) {
    const int row = opaque(s.work.tile * kBlockN + Split::row() + Split::row_step(i)); // one address at a time
    Element* gOut = seq.key_rows((Element*)out, strides, s.work.head_k) + row * strides.row + col;
    if (row >= seq.rows_k) continue;
    #pragma unroll
    for (int j = 0; j < Split::kCols; j += kStore) {
      Vec<Element, kStore> x;
      #pragma unroll
      for (int e = 0; e < kStore; e++) from_real(x.x[e], scale * total[i][j + e]);
      if (col + Split::col_step(j) < cols) *(Vec<Element, kStore>*)(gOut + Split::col_step(j)) = x;
    }
  }
}

// What the block with this index works on; batch < 0: nothing.
DEV BlockWork find_work(const BwdParams& p, u32 block_idx) {
  const Work found = work_of_block<kKeySide>(block_idx, p);
  BlockWork work = {};
  work.batch = found.batch, work.tile = found.tile, work.head_k = found.head;
  if (found.batch < 0) return work;
  const Sequence seq(p, found);
  const int first_key = found.tile * kBlockN, heads = p.heads_q / p.heads_k;
  work.gQ = seq.query_rows((const Element*)p.q, p.q_strides, 0);
  work.gDO = seq.query_rows((const Element*)p.dout, p.dout_strides, 0);
  work.gK = seq.key_rows((const Element*)p.k, p.k_strides, found.head) + first_key * p.k_strides.row;
  work.gV = seq.key_rows((const Element*)p.v, p.v_strides, found.head) + first_key * p.v_strides.row;
  work.row_index = seq.row_index(0);
  work.dq_group = first_dq_group(p, seq, found.batch, 0);
  work.seqlen_q = seq.seqlen_q, work.seqlen_k = seq.seqlen_k;
  work.head_begin = found.head * heads, work.head_end = work.head_begin + heads;
  work.tiles = QueryTiles::of<kBlockM, kBlockN>(HeadMask(p, seq.seqlen_q, seq.seqlen_k), first_key,
                                                min(first_key + kBlockN, seq.seqlen_k));
  return work;
}

// DETERMINISTIC, by one warp: waits until the key tiles before this one have added to a query tile. Returns what tells the next.
DEV int* wait_for_turn_at(const BlockWork& work, const BwdParams& p, Step at) {
  const int first_row = at.tile * kBlockM, end_row = min(first_row + kBlockM, work.seqlen_q);
  const KeyTiles visited = KeyTiles::of<kBlockN>(HeadMask(p, work.seqlen_q, work.seqlen_k), first_row, end_row);
  int* turn = turn_of(p, Sequence(p, work.batch), work.batch, at.head, at.tile, kBlockM);
  if (threadIdx.x == 0) wait_for_turn(turn, work.tile - visited.begin);
  return turn;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) bwd_simt(const BwdParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  if (kDeterministic) {
    if (threadIdx.x == 0) s.ticket = take_ticket(p);
    __syncthreads();
  }
  const BlockWork work = find_work(p, kDeterministic ? s.ticket : blockIdx.x);
  if (work.batch < 0) return;
  if (threadIdx.x == 0) s.work = work;
  __syncthreads();

  Pipeline chunks = {s, p, 0};
  SplitV::Tile rDV = {};
  SplitK::Tile rDK = {};
  Step at = {s.work.tiles.begin < s.work.tiles.end ? s.work.head_begin : s.work.head_end, s.work.tiles.begin};
  if (at.head < s.work.head_end) load_chunk<kDP>(s, p, s.sChunk[0], at, 0);
  #pragma unroll 1
  for (; at.head < s.work.head_end; at = step_after(s.work, at)) {
    const bool partial = s.work.tiles.is_partial(at.tile);
    SplitS::Tile rDP = {};
    multiply_rows<kDP>(chunks, at, rDP);
    write_dp(s, rDP);
    SplitS::Tile rS = {};
    multiply_rows<kS>(chunks, at, rS);
    if (partial) softmax_gradient<true>(s, p, rS, at.tile * kBlockM);
    else softmax_gradient<false>(s, p, rS, at.tile * kBlockM);
    add_products<kDV, SplitV>(chunks, at, rDV, s.sP[0], partial);
    add_products<kDK, SplitK>(chunks, at, rDK, s.sDS[0], partial);
    int* turn = nullptr;                        // the next barrier lets the others add
    if (kDeterministic && threadIdx.x < 32) turn = wait_for_turn_at(s.work, p, at);
    add_dq(chunks, at, partial);
    if (kDeterministic) {
      __syncthreads();                          // all have added
      if (threadIdx.x == 0) pass_turn(turn);
    }
  }
  write_out<SplitV>(s, p, rDV, 1, p.dv, p.dv_strides, p.head_dim_v);
  write_out<SplitK>(s, p, rDK, (R)p.softmax_scale, p.dk, p.dk_strides, p.head_dim);
}
