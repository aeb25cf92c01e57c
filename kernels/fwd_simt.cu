// Attention forward by plain multiply-add: every dtype, every feature, every GPU. The readable statement of the algorithm.
//
//   q [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_k, head_dim | head_dim_v]  ->  out, lse
//
// A block computes kBlockM query rows of one head, a warp kWarpRows of them, alone from Q to output; float16 and bfloat16
// are float from shared memory on. Online softmax: FlashAttention-2 (Dao 2023, Algorithm 1).
//   Columns of K, then of V, come in chunks of kBlockN keys through two buffers, filled by all threads one chunk ahead:
//     wait for chunk c; barrier (c has landed, c - 1 has been read); start copying c + 1; multiply by c.
//   P goes through shared memory to the other lanes of its warp; the barrier of the first chunk of V lies in between.
// A lane holds kRows x kKeys of S and kRows x kCols of O: rows by lane bits 0 and 4, keys and columns by bits 1 to 3, so that
// in every 16-byte read neighbouring lanes share an address, which halves the cost of the read.
// P V is summed by chunk and then added to O: one running sum over all keys would lose accuracy as they grow in number.
// A warp skips tiles that its rows do not see, and masks only partial ones; there P = -1 says "masked: leave V alone".
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/tiles.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"

template <int> struct ElementOf;
template <> struct ElementOf<0> { using type = half; };
template <> struct ElementOf<1> { using type = bf16; };
template <> struct ElementOf<2> { using type = float; };
template <> struct ElementOf<3> { using type = double; };
using Element = ElementOf<DTYPE>::type;
using R = Real<Element>;                        // of every product, sum and tile in shared memory

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kChunkK = CHUNK_K;                // columns of K, and of V, in a buffer
constexpr int kChunkV = CHUNK_V;
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a thread loads at once; divides head_dim, head_dim_v
constexpr int kStore = OUT_VEC_BYTES / sizeof(Element); // elements of out stored at once; divides head_dim_v
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;

constexpr int kThreads = kWarps * 32;
constexpr int kLanesM = 4, kLanesN = 8;         // lanes of a warp along rows, and along keys or columns
constexpr int kWarpRows = kBlockM / kWarps;
constexpr int kRows = kWarpRows / kLanesM;      // rows, keys, and columns of a chunk of V, of a lane
constexpr int kKeys = kBlockN / kLanesN;
constexpr int kCols = kChunkV / kLanesN;
constexpr int kChunksK = kHeadDim / kChunkK;
constexpr int kChunksV = kHeadDimV / kChunkV;
constexpr int kChunks = kChunksK + kChunksV;
constexpr int kVec = 16 / sizeof(R);            // elements of a 16-byte read of shared memory
constexpr int kRowVec = kRows % kVec == 0 ? kVec : kRows % 2 == 0 ? 2 : 1;     // rows in one read of P
constexpr int kPitchQ = kHeadDim + kVec;        // neighbouring rows begin in different bank groups
constexpr int kPitchK = kChunkK + kVec;
constexpr int kPitchV = kChunkV;
constexpr int kPitchP = kWarpRows + 2 * kRowVec;        // lanes that write P side by side, neighbouring keys, do not collide
constexpr int kBufferSize = kBlockN * (kPitchK > kPitchV ? kPitchK : kPitchV);
static_assert(kHeadDim % kChunkK == 0 && kHeadDimV % kChunkV == 0, "whole chunks");
static_assert(kChunkK % (2 * kVec) == 0 && kChunkV % (kLanesN * kVec) == 0, "whole 16-byte reads, without bank conflicts");
static_assert(kRows * kLanesM * kWarps == kBlockM && kRows % kRowVec == 0 && kKeys * kLanesN == kBlockN, "whole lane tiles");

using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, R>;
template <typename T, int kSize> struct alignas(sizeof(T) * kSize) Vec { T x[kSize]; };

struct alignas(16) SharedStorage {
  R sQ[kBlockM][kPitchQ];
  R sKV[2][kBufferSize];                        // a chunk of K or V: kBlockN keys of kPitchK or kPitchV
  R sP[kWarps][kBlockN][kPitchP];               // transposed: a lane reads neighbouring rows at once
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// What a lane keeps of its rows from tile to tile.
struct Rows {
  R rO[kChunksV][kRows][kCols];
  R max[kRows];                                 // of the logits, as base-2 exponents; the same in the eight lanes of a row
  R sum[kRows];                                 // of P over this lane's keys
};

DEV int lane_m() { return (threadIdx.x & 1) | (threadIdx.x >> 3 & 2); }
DEV int lane_n() { return threadIdx.x >> 1 & 7; }
// Row `i` of this lane, counted from the first row of the warp, less lane_m() * kRowVec.
DEV constexpr int row_step(int i) { return i / kRowVec * (kLanesM * kRowVec) + i % kRowVec; }

// Converts and writes neighbouring elements to shared memory, 16 bytes at a time.
DEV void store_vec(R* dst, const Vec<Element, kLoad>& x) {
  constexpr int kSize = kLoad < kVec ? kLoad : kVec;
  #pragma unroll
  for (int i = 0; i < kLoad; i += kSize) {
    Vec<R, kSize> y;
    #pragma unroll
    for (int j = 0; j < kSize; j++) y.x[j] = to_real(x.x[i + j]);
    *(Vec<R, kSize>*)(dst + i) = y;
  }
}

// kCount rows of kColumns to shared memory; rows >= `rows` and columns >= `cols` become zeros. Asynchronous where the
// hardware can and nothing is converted, else finished on return.
template <int kCount, int kColumns, int kPitch>
DEV void load_rows(R* dst, const Element* src, i64 row_stride, int rows, int cols) {
  constexpr bool kAsync = kHasCpAsync && sizeof(Element) == sizeof(R);
  constexpr int kVecs = kColumns / kLoad, kRowsAtOnce = kThreads / kVecs, kBatch = 4;        // kBatch loads in flight
  static_assert(kRowsAtOnce > 0, "a row of a chunk is at most one load a thread");
  const int col = threadIdx.x % kVecs * kLoad, first = threadIdx.x / kVecs;
  if (kThreads % kVecs && first >= kRowsAtOnce) return;
  if (col >= cols) rows = 0;
  src += first * row_stride + col;
  dst += first * kPitch + col;
  #pragma unroll 1
  for (int at = 0; at < kCount; at += kBatch * kRowsAtOnce) {
    Vec<Element, kLoad> x[kBatch];
    #pragma unroll
    for (int i = 0; i < kBatch; i++, src += kRowsAtOnce * row_stride) {
      const int step = at + i * kRowsAtOnce;
      const bool inside = first + step < rows;
      if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
      if constexpr (kAsync) cp_async<VEC_BYTES>(shared_address(dst + step * kPitch), src, inside ? VEC_BYTES : 0);
      else x[i] = inside ? *(const Vec<Element, kLoad>*)src : Vec<Element, kLoad>{};
    }
    #pragma unroll
    for (int i = 0; !kAsync && i < kBatch; i++) {
      const int step = at + i * kRowsAtOnce;
      if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
      store_vec(dst + step * kPitch, x[i]);
    }
  }
}

// Chunks alternate between the two buffers: those of K, then those of V, then those of the next tile.
DEV int buffer_of(int tile, int chunk) { return (tile * kChunks + chunk) & 1; }

DEV void load_q(SharedStorage& s, const Sequence<Element>& seq, const FwdParams& p, int first_row) {
  const Element* gQ = seq.gQ() + first_row * p.q_strides.row;
  for (int col = 0; col < kHeadDim; col += kChunkK)
    load_rows<kBlockM, kChunkK, kPitchQ>(s.sQ[0] + col, gQ + col, p.q_strides.row, seq.seqlen_q - first_row,
                                         p.head_dim - col);
}

// Starts copying a chunk.
DEV void load_chunk(SharedStorage& s, const Sequence<Element>& seq, const FwdParams& p, int tile, int chunk) {
  R* dst = s.sKV[buffer_of(tile, chunk)];
  const int first = tile * kBlockN, rows = seq.seqlen_k - first;
  if (chunk < kChunksK) {
    const int col = chunk * kChunkK;
    load_rows<kBlockN, kChunkK, kPitchK>(dst, seq.gK() + first * p.k_strides.row + col, p.k_strides.row, rows,
                                         p.head_dim - col);
  } else {
    const int col = (chunk - kChunksK) * kChunkV;
    load_rows<kBlockN, kChunkV, kPitchV>(dst, seq.gV() + first * p.v_strides.row + col, p.v_strides.row, rows,
                                         p.head_dim_v - col);
  }
  cp_async_commit();
}

// Waits for chunk `chunk` of a tile and starts the one after it. Returns the buffer it is in.
DEV const R* next_chunk(SharedStorage& s, const Sequence<Element>& seq, const FwdParams& p, int tile, int chunk,
                        int tile_end) {
  cp_async_wait<0>();
  __syncthreads();                              // the chunk has landed for all; all have read the one before
  if (chunk + 1 < kChunks) load_chunk(s, seq, p, tile, chunk + 1);
  else if (tile + 1 < tile_end) load_chunk(s, seq, p, tile + 1, 0);
  return s.sKV[buffer_of(tile, chunk)];
}

// S += Q K^T over the columns of one chunk. All pointers are the lane's own.
DEV void multiply_qk(R (&rS)[kRows][kKeys], const R* sQ, const R* sK) {
  #pragma unroll 1
  for (int d = 0; d < kChunkK; d += kVec) {
    Vec<R, kVec> k[kKeys];
    #pragma unroll
    for (int j = 0; j < kKeys; j++) k[j] = *(const Vec<R, kVec>*)(sK + j * kLanesN * kPitchK + d);
    #pragma unroll
    for (int i = 0; i < kRows; i++) {
      const Vec<R, kVec> q = *(const Vec<R, kVec>*)(sQ + row_step(i) * kPitchQ + d);
      #pragma unroll
      for (int ej = 0; ej < kVec * kKeys; ej++)
        rS[i][ej % kKeys] = fma(q.x[ej / kKeys], k[ej % kKeys].x[ej / kKeys], rS[i][ej % kKeys]);
    }
  }
}

// P in place of raw products, to shared memory; max, sum and, where the max has moved, O follow.
template <bool kPartial>
DEV void softmax(Rows& rows, R (&rS)[kRows][kKeys], R* sP, const HeadScore& score, const HeadMask& mask, int first_row,
                 int first_key) {
  const R exponent_scale = score.exponent_scale();
  // The mask seen from this lane's first row and key: what a row and key add to it is known when compiling.
  const int num_keys = mask.seqlen_k - first_key, left = mask.left + first_row - first_key;
  const int right = mask.right + first_row - first_key;
  const auto visible = [=](int i, int j) {
    const int key = j * kLanesN, row = row_step(i);
    return (key < num_keys) & (!kMaskLeft | (key - row >= left)) & (!kMaskRight | (key - row <= right));   // no branches
  };
  R max[kRows];
  bool moved = false;
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    R x = -infinity(R());
    #pragma unroll
    for (int j = 0; j < kKeys; j++) {
      rS[i][j] = score.logit(rS[i][j]);
      if (kPartial && !visible(i, j)) rS[i][j] = -infinity(R());
      x = fmax(x, rS[i][j]);
    }
    #pragma unroll
    for (int lane = 2; lane < 16; lane *= 2) x = fmax(x, __shfl_xor_sync(0xffffffff, x, lane));
    max[i] = fmax(rows.max[i], x * exponent_scale);
    moved |= max[i] > rows.max[i];
  }
  if (__any_sync(0xffffffff, moved)) {
    #pragma unroll
    for (int i = 0; i < kRows; i++) {
      const R alpha = max[i] > rows.max[i] ? exp2_fast(rows.max[i] - max[i]) : (R)1;
      rows.max[i] = max[i];
      rows.sum[i] *= alpha;
      #pragma unroll
      for (int c = 0; c < kChunksV * kCols; c++) rows.rO[c / kCols][i][c % kCols] *= alpha;
    }
  }
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    const R subtract = rows.max[i] == -infinity(R()) ? (R)0 : rows.max[i];
    R sum = 0;
    #pragma unroll
    for (int j = 0; j < kKeys; j++) {
      rS[i][j] = exp2_fast(fma(rS[i][j], exponent_scale, -subtract));
      sum += rS[i][j];
      if (kPartial && !visible(i, j)) rS[i][j] = -1;
    }
    rows.sum[i] += sum;
  }
  #pragma unroll
  for (int j = 0; j < kKeys; j++)
    #pragma unroll
    for (int i = 0; i < kRows; i += kRowVec) {
      Vec<R, kRowVec> x;
      #pragma unroll
      for (int e = 0; e < kRowVec; e++) x.x[e] = rS[i + e][j];
      *(Vec<R, kRowVec>*)(sP + j * kLanesN * kPitchP + row_step(i)) = x;
    }
}

// O += P V over the columns of one chunk. All pointers are the lane's own.
template <bool kPartial> DEV void multiply_pv(R (&rO)[kRows][kCols], const R* sP, const R* sV) {
  R sum[kRows][kCols] = {};
  #pragma unroll (kVec)
  for (int key = 0; key < kBlockN; key++) {
    Vec<R, kVec> v[kCols / kVec];
    #pragma unroll
    for (int j = 0; j < kCols / kVec; j++) v[j] = *(const Vec<R, kVec>*)(sV + key * kPitchV + j * (kLanesN * kVec));
    #pragma unroll
    for (int i = 0; i < kRows; i++) {
      const R x = ((const Vec<R, kRowVec>*)(sP + key * kPitchP + row_step(i - i % kRowVec)))->x[i % kRowVec];
      if (kPartial && x < 0) continue;          // 0 * V would be NaN where V is NaN or Inf
      #pragma unroll
      for (int j = 0; j < kCols; j++) sum[i][j] = fma(x, v[j / kVec].x[j % kVec], sum[i][j]);
    }
  }
  #pragma unroll
  for (int i = 0; i < kRows * kCols; i++) rO[i / kCols][i % kCols] += sum[i / kCols][i % kCols];
}

// first_row and first_col are the lane's own.
DEV void write_out(const Rows& rows, const Sequence<Element>& seq, const FwdParams& p, int first_row, int first_col) {
  Element* gO = seq.gO();
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    const int row = first_row + row_step(i);
    R sum = rows.sum[i];
    #pragma unroll
    for (int lane = 2; lane < 16; lane *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lane);
    if (row >= seq.seqlen_q) continue;
    const R inverse = sum == 0 ? (R)0 : 1 / sum;                // no visible key: O is 0
    if (seq.wants_lse() && lane_n() == 0)
      seq.gLse()[row] = sum == 0 ? -infinity(R()) : (rows.max[i] + log2(sum)) * (R)0.693147180559945309417;
    #pragma unroll
    for (int c = 0; c < kChunksV * kCols; c += kStore) {
      const int col = first_col + c / kVec * (kLanesN * kVec) + c % kVec;
      Vec<Element, kStore> x;
      #pragma unroll
      for (int j = 0; j < kStore; j++) from_real(x.x[j], rows.rO[c / kCols][i][c % kCols + j] * inverse);
      if (col < p.head_dim_v) *(Vec<Element, kStore>*)(gO + row * p.out_strides.row + col) = x;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) fwd_simt(const FwdParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const Work work = work_of_block(blockIdx.x, p);
  const Sequence<Element> seq(p, work.batch, work.head);
  const HeadMask mask(p, seq.seqlen_q, seq.seqlen_k);
  const HeadScore score(p);
  const int block_row = work.m_block * kBlockM, warp = uniform(threadIdx.x / 32), warp_row = block_row + warp * kWarpRows;
  const KeyTiles tiles = KeyTiles::of<kBlockN>(mask, block_row, min(block_row + kBlockM, seq.seqlen_q));
  KeyTiles warp_tiles = {};                     // rows past the end visit none
  if (warp_row < seq.seqlen_q)
    warp_tiles = KeyTiles::of<kBlockN>(mask, warp_row, min(warp_row + kWarpRows, seq.seqlen_q));

  R* sP = s.sP[warp][0] + lane_m() * kRowVec;
  const int lane_row = warp_row + lane_m() * kRowVec;
  const R* sQ = s.sQ[lane_row - block_row];
  Rows rows = {};
  #pragma unroll
  for (int i = 0; i < kRows; i++) rows.max[i] = -infinity(R());

  if (tiles.begin < tiles.end) {
    load_q(s, seq, p, block_row);
    load_chunk(s, seq, p, tiles.begin, 0);
  }
  #pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; tile++) {
    const bool visited = tile >= warp_tiles.begin && tile < warp_tiles.end, partial = warp_tiles.is_partial(tile);
    R rS[kRows][kKeys] = {};
    #pragma unroll 1
    for (int c = 0; c < kChunksK; c++) {
      const R* sK = next_chunk(s, seq, p, tile, c, tiles.end);
      if (visited) multiply_qk(rS, sQ + c * kChunkK, sK + lane_n() * kPitchK);
    }
    if (visited) {
      const int lane_key = tile * kBlockN + lane_n();
      R* lane_p = sP + lane_n() * kPitchP;
      if (partial) softmax<true>(rows, rS, lane_p, score, mask, lane_row, lane_key);
      else softmax<false>(rows, rS, lane_p, score, mask, lane_row, lane_key);
    }
    #pragma unroll
    for (int c = 0; c < kChunksV; c++) {
      const R* sV = next_chunk(s, seq, p, tile, kChunksK + c, tiles.end) + lane_n() * kVec;
      if (visited && partial) multiply_pv<true>(rows.rO[c], sP, sV);
      else if (visited) multiply_pv<false>(rows.rO[c], sP, sV);
    }
  }
  write_out(rows, seq, p, lane_row, lane_n() * kVec);
}
