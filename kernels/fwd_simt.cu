// Attention forward by plain multiply-add: every dtype, every feature, every GPU. The readable statement of the algorithm.
//
//   q [batch, seqlen_q, heads_q, head_dim], k, v [batch, seqlen_k, heads_k, head_dim | head_dim_v]  ->  out, lse
//
// A block computes kBlockM query rows of one head. kGroup warps share kGroupRows of them: each takes its part of the keys
// of S and its part of the columns of O, so that the tiles of a lane stay square, with few reads for many multiply-adds, at
// any head_dim. float16 and bfloat16 are float from shared memory on. Online softmax: FlashAttention-2 (Dao 2023, Algorithm
// 1), whose max may lag: it moves, and O is rescaled, only when a logit exceeds it by 2^kMaxLag.
//   Columns of K, then keys of V, come in chunks through two buffers, filled by all threads one chunk ahead:
//     wait until chunk c has landed; once all warps have read c - 1, start copying c + 1; multiply by c.
//   Each buffer has barriers of its own for that, so that the last warp never waits; where nothing can be copied
//   asynchronously it is one barrier of the block. P goes through shared memory to all lanes of its group.
// A lane holds kRows x kKeys of S and kRows x kCols of O: rows by lane bits 0 and 4, keys and columns by bits 1 to 3, so that
// in every 16-byte read neighbouring lanes share an address, which halves the cost of the read. Q and P lie transposed: of
// the operands that a lane reads at once neighbours then go to neighbouring registers, thus to both register banks.
// P V is summed by tile and then added to O: one running sum over all keys would lose accuracy as they grow in number.
// A group skips tiles that its rows do not see, and masks only partial ones; there P = -1 says "masked: leave V alone".
#include "attn/mask.cuh"
#include "attn/params.cuh"
#include "attn/schedule.cuh"
#include "attn/score.cuh"
#include "attn/seqlen.cuh"
#include "attn/tiles.cuh"
#include "ptx/barrier.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/ring.cuh"
#include "tile/simt.cuh"

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kGroup = GROUP;                   // warps that share query rows
constexpr int kChunkK = CHUNK_K;                // columns of K in a buffer
constexpr int kChunkV = CHUNK_V;                // keys of V in a buffer
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a thread loads at once; divides head_dim, head_dim_v
constexpr int kStore = OUT_VEC_BYTES / sizeof(Element); // elements of out stored at once; divides head_dim_v
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;

constexpr int kThreads = kWarps * 32;
constexpr int kGroups = kWarps / kGroup;
constexpr int kGroupRows = kBlockM / kGroups;
constexpr int kWarpKeys = kBlockN / kGroup;
constexpr int kWarpCols = kHeadDimV / kGroup;
constexpr int kRows = kGroupRows / kLanesM;     // rows, keys and columns of a lane
constexpr int kKeys = kWarpKeys / kLanesN;
constexpr int kCols = kWarpCols / kLanesN;
constexpr int kChunksK = kHeadDim / kChunkK;
constexpr int kChunksV = kBlockN / kChunkV;
constexpr int kChunks = kChunksK + kChunksV;
constexpr int kRowVec = kRows % kVec == 0 ? kVec : kRows % 2 == 0 ? 2 : 1;     // rows in one read of Q or P
constexpr int kPitchK = kChunkK + kVec;         // neighbouring keys begin in different bank groups
constexpr int kPitchP = kGroupRows + 2 * kRowVec;       // lanes that write P side by side, neighbouring keys, do not collide
constexpr int kBufferK = kBlockN * kPitchK, kBufferV = kChunkV * kHeadDimV;
constexpr bool kRing = kHasCpAsync && sizeof(Element) == sizeof(R);     // copies are asynchronous: buffers have own barriers
// Keys of V in one turn of a loop, which begins with a wait for reads. The warps of a block alone on a multiprocessor keep
// step, so that the instruction cache holds longer turns.
constexpr int kMaxTurnV = MIN_BLOCKS == 1 ? 4 * kVec : 2 * kVec, kTurnV = kChunkV < kMaxTurnV ? kChunkV : kMaxTurnV;
constexpr float kMaxLag = 8;                    // P is at most 2^kMaxLag
static_assert(kWarps % kGroup == 0, "whole groups");
static_assert(kHeadDim % kChunkK == 0 && kBlockN % kChunkV == 0, "whole chunks");
static_assert(kChunkK % (2 * kVec) == 0 && kWarpCols % (kLanesN * kVec) == 0, "whole 16-byte reads, without bank conflicts");
static_assert(kRows * kLanesM * kGroups == kBlockM && kRows % kRowVec == 0 && kKeys * kLanesN * kGroup == kBlockN,
              "whole lane tiles");

using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, R>;

struct alignas(16) SharedStorage {
  R sQ[kGroups][kHeadDim][kGroupRows];          // transposed, as is P: a lane reads neighbouring rows at once
  R sKV[2][kBufferK > kBufferV ? kBufferK : kBufferV];  // kBlockN keys of kPitchK, or kChunkV of kHeadDimV
  R sP[kGroups][kBlockN][kPitchP];
  R sRows[kWarps][kGroupRows];                  // what a warp tells its group: maxima, at the end sums
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// Barriers of the buffer of chunk `n`, in the padding of P: it has landed; all warps have read it.
DEV u32 full_barrier(SharedStorage& s, u32 n) { return shared_address(&s.sP[0][n & 1][kGroupRows]); }
DEV u32 empty_barrier(SharedStorage& s, u32 n) { return shared_address(&s.sP[0][2 + (n & 1)][kGroupRows]); }
static_assert(kBlockN >= 4 && (kPitchP - kGroupRows) * sizeof(R) >= 8 && kGroupRows * sizeof(R) % 8 == 0 &&
              kPitchP * sizeof(R) % 8 == 0, "a place for each");

// What a lane keeps of its rows from tile to tile.
struct Rows {
  R rO[kRows][kCols];
  R max[kRows];                                 // at least all logits - kMaxLag, as base-2 exponents; the same in the group
  R sum[kRows];                                 // of P over this lane's keys
};

// Row 0 of the arrays of one query head.
struct Head : Sequence {
  int head, head_k;
  DEV Head(const FwdParams& p, const Work& work) : Sequence(p, work), head(work.head), head_k(Sequence::head_k(work.head)) {}
  DEV const Element* gQ() const { return query_rows((const Element*)p.q, p.q_strides, head); }
  DEV const Element* gK() const { return key_rows((const Element*)p.k, p.k_strides, head_k); }
  DEV const Element* gV() const { return key_rows((const Element*)p.v, p.v_strides, head_k); }
  DEV Element* gO() const { return query_rows((Element*)p.out, p.out_strides, head); }
  DEV R* gLse() const { return (R*)p.lse + row_index(head); }
};

// Row `i` of this lane, counted from the first row of the group, less that of lane_m.
DEV constexpr int row_step(int i) { return i / kRowVec * (kLanesM * kRowVec) + i % kRowVec; }

// This lane's rows of a column of Q or P, which lie transposed.
DEV void load_column(R (&x)[kRows], const R* src) {
  #pragma unroll
  for (int i = 0; i < kRows; i++) x[i] = ((const Vec<R, kRowVec>*)(src + row_step(i - i % kRowVec)))->x[i % kRowVec];
}

// As `turn` for rows, in an order that turns at rows `odd` and `odd` + 2. There two operands are new, a sum and an element of K;
// rows of one parity keep them in different register banks.
DEV constexpr int row_turn(int n, int count, int line, int odd) {
  const int m = turn(n, count, line);
  if (count != 8) return m;                     // others spill
  if (m == 0) return odd;
  if (m == count - 1) return odd + 2;
  const int other = m - 1 < odd ? m - 1 : m;
  return other < odd + 2 ? other : other + 1;
}

// kCount rows of kColumns to shared memory; rows >= `rows` and columns >= `cols` become zeros. Asynchronous where the
// hardware can and nothing is converted, else finished on return.
template <int kCount, int kColumns, int kPitch>
DEV void load_rows(R* dst, const Element* src, i64 row_stride, int rows, int cols) {
  constexpr int kVecs = kColumns / kLoad, kRowsAtOnce = kThreads / kVecs, kBatch = 4;        // kBatch loads in flight
  static_assert(kRowsAtOnce > 0, "a row of a chunk is at most one load a thread");
  const int col = threadIdx.x % kVecs * kLoad, first = threadIdx.x / kVecs;
  if (kThreads % kVecs && first >= kRowsAtOnce) return;
  if (col >= cols) rows = 0;
  src += first * row_stride + col;
  dst += first * kPitch + col;
  rows -= first;
  #pragma unroll (kRing ? 8 : 1)
  for (int at = 0; at < kCount; at += kBatch * kRowsAtOnce) {
    Vec<Element, kLoad> x[kBatch];
    #pragma unroll
    for (int i = 0; i < kBatch; i++, src += kRowsAtOnce * row_stride) {
      const int step = at + i * kRowsAtOnce;
      const bool inside = step < rows;
      if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
      if constexpr (kRing) cp_async<VEC_BYTES>(shared_address(dst + step * kPitch), src, inside ? VEC_BYTES : 0);
      else x[i] = inside ? *(const Vec<Element, kLoad>*)src : Vec<Element, kLoad>{};
    }
    #pragma unroll
    for (int i = 0; !kRing && i < kBatch; i++) {
      const int step = at + i * kRowsAtOnce;
      if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
      store_converted<kLoad>(dst + step * kPitch, x[i]);
    }
  }
}

// A lane takes a row: writes to shared memory are then neighbours.
DEV void load_q(SharedStorage& s, const Head& seq, const FwdParams& p, int first_row) {
  constexpr int kCount = kBlockM * (kHeadDim / kLoad), kBatch = 16;    // kBatch loads in flight
  #pragma unroll 1
  for (int at = threadIdx.x; at < kCount; at += kBatch * kThreads) {
    Vec<Element, kLoad> x[kBatch];
    #pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int row = (at + i * kThreads) % kBlockM, col = (at + i * kThreads) / kBlockM * kLoad;
      const bool inside = first_row + row < seq.seqlen_q && col < p.head_dim;
      x[i] = inside ? *(const Vec<Element, kLoad>*)(seq.gQ() + (first_row + row) * p.q_strides.row + col) : Vec<Element, kLoad>{};
    }
    #pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int row = (at + i * kThreads) % kBlockM, col = (at + i * kThreads) / kBlockM * kLoad;
      if (at + i * kThreads >= kCount) continue;
      #pragma unroll
      for (int j = 0; j < kLoad; j++) s.sQ[row / kGroupRows][col + j][row % kGroupRows] = to_real(x[i].x[j]);
    }
  }
}

// Starts copying a chunk, number `n` of the block. Chunks alternate between the two buffers: those of K, then those of V, then
// those of the next tile.
DEV void load_chunk(SharedStorage& s, const Head& seq, const FwdParams& p, int tile, int chunk, u32 n) {
  R* dst = s.sKV[n & 1];
  if (chunk < kChunksK) {
    const int first = tile * kBlockN, col = chunk * kChunkK;
    load_rows<kBlockN, kChunkK, kPitchK>(dst, seq.gK() + first * p.k_strides.row + col, p.k_strides.row,
                                         seq.seqlen_k - first, p.head_dim - col);
  } else {
    const int first = tile * kBlockN + (chunk - kChunksK) * kChunkV;
    constexpr int kCopyCols = kHeadDimV <= kThreads * kLoad ? kHeadDimV : 32;        // at most one load a thread for a row
    for (int col = 0; col < kHeadDimV; col += kCopyCols)
      load_rows<kChunkV, kCopyCols, kHeadDimV>(dst + col, seq.gV() + first * p.v_strides.row + col, p.v_strides.row,
                                                seq.seqlen_k - first, p.head_dim_v - col);
  }
  if (kRing) ring_arrive_copied(full_barrier(s, n));
}

// Waits for chunk `n`, which is `chunk` of a tile, and starts the one after it. Returns the buffer it is in.
DEV const R* next_chunk(SharedStorage& s, const Head& seq, const FwdParams& p, int tile, int chunk, int tile_end, u32 n) {
  if (kRing) ring_wait(full_barrier(s, n), n >> 1 & 1);
  else __syncthreads();                         // the chunk is there for all; all have read the one before
  const bool is_last = chunk + 1 == kChunks;
  if (!is_last || tile + 1 < tile_end) {
    if (kRing && n > 0) ring_wait(empty_barrier(s, n - 1), (n - 1) >> 1 & 1);     // all have read chunk n - 1
    load_chunk(s, seq, p, is_last ? tile + 1 : tile, is_last ? 0 : chunk + 1, n + 1);
  }
  return s.sKV[n & 1];
}

// This lane has read chunk `n`. Each arrives for itself: one for its warp, behind a __syncwarp, was no faster, and racecheck does
// not see what it orders.
DEV void leave_chunk(SharedStorage& s, u32 n) {
  if (kRing) ring_arrive(empty_barrier(s, n));
}

// S += Q K^T over the columns of one chunk. All pointers are the lane's own.
DEV void multiply_qk(R (&rS)[kRows][kKeys], const R* sQ, const R* sK) {
  #pragma unroll (kVec * kVec / 4)
  for (int d = 0; d < kChunkK; d += kVec) {
    Vec<R, kVec> k[kKeys];
    #pragma unroll
    for (int j = 0; j < kKeys; j++) k[j] = *(const Vec<R, kVec>*)(sK + j * kLanesN * kPitchK + d);
    #pragma unroll
    for (int e = 0; e < kVec; e++) {
      R q[kRows];
      load_column(q, sQ + (d + e) * kGroupRows);
      #pragma unroll
      for (int n = 0; n < kRows * kKeys; n++) {
        // Keys always in this order, rows turning at the parity that compiles to the fewest collisions of register banks.
        const int j = n / kRows, i = row_turn(n % kRows, kRows, j, 1 - e % 2);
        rS[i][j] = fma(q[i], k[j].x[e], rS[i][j]);
      }
    }
  }
}

// The warps of a group share rows, and meet without the others of the block.
DEV void group_sync(int group) {
  if (kGroup > 1) barrier_sync(1 + group, kGroup * 32);
  else __syncwarp();
}

// Whether `x` holds for any lane of the group: a barrier of it.
DEV bool any_of_group(int group, bool x) {
  return kGroup > 1 ? barrier_or(1 + group, kGroup * 32, x) : __any_sync(0xffffffff, x);
}

// Moves the max of all rows of a group to that of all logits so far. O and sum follow. `max`: of this lane's new logits.
DEV void move_max(Rows& rows, R (&max)[kRows], SharedStorage& s, int warp) {
  const int group = warp / kGroup, first = lane_m(threadIdx.x) * kRowVec;
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    #pragma unroll
    for (int lane = 2; lane < 16; lane *= 2) max[i] = fmax(max[i], __shfl_xor_sync(0xffffffff, max[i], lane));
    if (kGroup > 1 && lane_n(threadIdx.x) == 0) s.sRows[warp][first + row_step(i)] = max[i];
  }
  if (kGroup > 1) group_sync(group);
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    #pragma unroll
    for (int w = 0; w < kGroup && kGroup > 1; w++)
      max[i] = fmax(max[i], s.sRows[group * kGroup + w][first + row_step(i)]);
    const R alpha = max[i] > rows.max[i] ? exp2_fast(rows.max[i] - max[i]) : (R)1;
    rows.max[i] = fmax(max[i], rows.max[i]);
    rows.sum[i] *= alpha;
    #pragma unroll
    for (int c = 0; c < kCols; c++) rows.rO[i][c] *= alpha;
  }
}

// Which of a lane's keys its rows see, counted from its first key and row: what a key and a row add is known when compiling.
struct Visible {
  int num_keys, left, right;
  DEV Visible(const HeadMask& mask, int first_row, int first_key)
      : num_keys(mask.seqlen_k - first_key), left(mask.left + first_row - first_key), right(mask.right + first_row - first_key) {}
  DEV bool operator()(int i, int j) const {
    const int key = j * kLanesN, row = row_step(i);
    return (key < num_keys) & (!kMaskLeft | (key - row >= left)) & (!kMaskRight | (key - row <= right));   // no branches
  }
};

// Logits in place of raw products, -inf where masked, and their max. Whether one exceeds the max so far by more than it may.
template <bool kPartial>
DEV bool apply_score_and_mask(R (&rS)[kRows][kKeys], R (&max)[kRows], const Rows& rows, const HeadScore& score, Visible visible) {
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
    max[i] = x * score.exponent_scale();
    moved |= max[i] - rows.max[i] > kMaxLag;    // from -inf every logit moves it but -inf, which gives a NaN here
  }
  return moved;
}

// P in place of logits, to shared memory; sum follows.
template <bool kPartial>
DEV void softmax(Rows& rows, R (&rS)[kRows][kKeys], R* sP, R exponent_scale, Visible visible) {
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

// sum += P V over the keys of one chunk. All pointers are the lane's own.
template <bool kPartial> DEV void multiply_pv(R (&sum)[kRows][kCols], const R* sP, const R* sV) {
  // Two loops, as of one with `unroll` the compiler takes out the first turn: more code for the instruction cache.
  #pragma unroll 1
  for (int turn_key = 0; turn_key < kChunkV; turn_key += kTurnV) {
    #pragma unroll
    for (int key = turn_key; key < turn_key + kTurnV; key++) {
      Vec<R, kVec> v[kCols / kVec];
      R x[kRows];
      #pragma unroll
      for (int j = 0; j < kCols / kVec; j++) v[j] = *(const Vec<R, kVec>*)(sV + key * kHeadDimV + j * (kLanesN * kVec));
      load_column(x, sP + key * kPitchP);
      #pragma unroll
      for (int i = 0; i < kRows; i++) {
        if (kPartial && x[i] < 0) continue;     // 0 * V would be NaN where V is NaN or Inf
        #pragma unroll
        for (int n = 0; n < kCols; n++) {
          const int j = turn(n, kCols, i);
          sum[i][j] = fma(x[i], v[j / kVec].x[j % kVec], sum[i][j]);
        }
      }
    }
  }
}

// first_row and first_col are the lane's own.
DEV void write_out(Rows& rows, SharedStorage& s, int warp, const Head& seq, const FwdParams& p, int first_row,
                   int first_col) {
  const int first = lane_m(threadIdx.x) * kRowVec, group = warp / kGroup;
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    #pragma unroll
    for (int lane = 2; lane < 16; lane *= 2) rows.sum[i] += __shfl_xor_sync(0xffffffff, rows.sum[i], lane);
    if (kGroup > 1 && lane_n(threadIdx.x) == 0) s.sRows[warp][first + row_step(i)] = rows.sum[i];
  }
  if (kGroup > 1) group_sync(group);
  // All rows at once, without branches: row by row each would wait for its own loads and its own division.
  R sum[kRows], inverse[kRows];
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    sum[i] = kGroup > 1 ? (R)0 : rows.sum[i];
    #pragma unroll
    for (int w = 0; w < kGroup && kGroup > 1; w++) sum[i] += s.sRows[group * kGroup + w][first + row_step(i)];
    if (kVarlen && first_row + row_step(i) >= seq.seqlen_q) sum[i] = 0;
    inverse[i] = sum[i] == 0 ? (R)0 : reciprocal(sum[i]);       // no visible key: O is 0
  }
  Element* gO = seq.gO();
  #pragma unroll
  for (int i = 0; i < kRows; i++) {
    const int row = first_row + row_step(i);
    if (row >= seq.rows_q) continue;
    const bool takes_part = !kVarlen || row < seq.seqlen_q;
    #pragma unroll
    for (int c = 0; c < kCols; c += kStore) {
      const int col = first_col + c / kVec * (kLanesN * kVec) + c % kVec;
      Vec<Element, kStore> x;
      #pragma unroll
      for (int j = 0; j < kStore; j++) from_real(x.x[j], takes_part ? rows.rO[i][c + j] * inverse[i] : (R)0);
      if (col < p.head_dim_v) *(Vec<Element, kStore>*)(gO + row * p.out_strides.row + col) = x;
    }
  }
  if (!p.lse || lane_n(threadIdx.x) != 0 || warp % kGroup != 0) return;
  R* gLse = seq.gLse();
  #pragma unroll
  for (int i = 0; i < kRows; i++)
    if (first_row + row_step(i) < seq.rows_q)
      gLse[first_row + row_step(i)] = sum[i] == 0 ? -infinity(R()) : (rows.max[i] + log2(sum[i])) * (R)0.693147180559945309417;
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) fwd_simt(const FwdParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  const Work work = work_of_block<kQuerySide>(blockIdx.x, p);
  if (work.batch < 0) return;
  const Head seq(p, work);
  const HeadMask mask(p, seq.seqlen_q, seq.seqlen_k);
  const HeadScore score(p);
  const int warp = uniform(threadIdx.x / 32), group = warp / kGroup, part = warp % kGroup;
  const int block_row = work.tile * kBlockM, group_row = block_row + group * kGroupRows;
  const KeyTiles tiles = KeyTiles::of<kBlockN>(mask, block_row, min(block_row + kBlockM, seq.seqlen_q));
  KeyTiles group_tiles = {};                    // rows past the end visit none
  int key_begin = 0, key_end = 0;
  if (group_row < seq.seqlen_q) {
    const int row_end = min(group_row + kGroupRows, seq.seqlen_q);
    group_tiles = KeyTiles::of<kBlockN>(mask, group_row, row_end);
    key_begin = uniform(mask.key_begin(group_row)), key_end = uniform(mask.key_end(row_end - 1));
  }
  // Whether the group sees any of `count` keys.
  const auto sees = [=](int first, int count) { return (first < key_end) & (first + count > key_begin); };

  const int lane_row = group_row + lane_m(threadIdx.x) * kRowVec, lane_col = part * kWarpCols + lane_n(threadIdx.x) * kVec;
  const R* sQ = s.sQ[group][0] + lane_m(threadIdx.x) * kRowVec;
  const R* sP = s.sP[group][0] + lane_m(threadIdx.x) * kRowVec;
  Rows rows = {};
  #pragma unroll
  for (int i = 0; i < kRows; i++) rows.max[i] = -infinity(R());

  if (tiles.begin < tiles.end) {
    if (kRing && threadIdx.x < 2) {
      ring_init(full_barrier(s, threadIdx.x), kThreads);
      ring_init(empty_barrier(s, threadIdx.x), kThreads);
    }
    if (kRing) __syncthreads();
    load_chunk(s, seq, p, tiles.begin, 0, 0);
    load_q(s, seq, p, block_row);
    if (kRing) __syncthreads();                 // Q is there for all
  }
  u32 n = 0;                                    // chunks behind
  #pragma unroll 1
  for (int tile = tiles.begin; tile < tiles.end; tile++) {
    const bool visited = tile >= group_tiles.begin && tile < group_tiles.end, partial = group_tiles.is_partial(tile);
    const int tile_key = tile * kBlockN, warp_key = tile_key + part * kWarpKeys;
    R rS[kRows][kKeys] = {};
    #pragma unroll 1
    for (int c = 0; c < kChunksK; c++) {
      const R* sK = next_chunk(s, seq, p, tile, c, tiles.end, n) + (part * kWarpKeys + lane_n(threadIdx.x)) * kPitchK;
      if (visited && sees(warp_key, kWarpKeys)) multiply_qk(rS, sQ + c * kChunkK * kGroupRows, sK);
      leave_chunk(s, n++);
    }
    R max[kRows];
    bool moved = false;
    const Visible visible(mask, lane_row, warp_key + lane_n(threadIdx.x));
    #pragma unroll
    for (int i = 0; i < kRows; i++) max[i] = -infinity(R());
    if (visited && partial) moved = apply_score_and_mask<true>(rS, max, rows, score, visible);
    else if (visited) moved = apply_score_and_mask<false>(rS, max, rows, score, visible);
    if (any_of_group(group, moved)) move_max(rows, max, s, warp);
    R* lane_p = s.sP[group][part * kWarpKeys + lane_n(threadIdx.x)] + lane_m(threadIdx.x) * kRowVec;
    if (visited && partial) softmax<true>(rows, rS, lane_p, score.exponent_scale(), visible);
    else if (visited) softmax<false>(rows, rS, lane_p, score.exponent_scale(), visible);
    if (kRing) group_sync(group);               // P is there for the group; else the barrier of the next chunk lies in between
    R sum[kRows][kCols] = {};
    #pragma unroll 1
    for (int c = 0; c < kChunksV; c++) {
      const R* sV = next_chunk(s, seq, p, tile, kChunksK + c, tiles.end, n) + lane_col;
      const R* chunk_p = sP + c * kChunkV * kPitchP;
      if (visited && sees(tile_key + c * kChunkV, kChunkV)) {
        if (partial) multiply_pv<true>(sum, chunk_p, sV);
        else multiply_pv<false>(sum, chunk_p, sV);
      }
      leave_chunk(s, n++);
    }
    #pragma unroll
    for (int i = 0; i < kRows * kCols; i++) rows.rO[i / kCols][i % kCols] += sum[i / kCols][i % kCols];
  }
  const u32 thread = thread_index();            // where a lane is, found anew: kept through the loop it would cost registers
  const int out_warp = uniform(thread / 32), out_row = block_row + out_warp / kGroup * kGroupRows;
  write_out(rows, s, out_warp, seq, p, out_row + lane_m(thread) * kRowVec, out_warp % kGroup * kWarpCols + lane_n(thread) * kVec);
}
