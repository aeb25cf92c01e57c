// Decoding by plain multiply-add: every dtype, every feature, every GPU. The readable statement of the algorithm.
//
//   q [batch, seqlen_q, heads_q, head_dim], a cache of keys and values, new ones  ->  out, lse, or partial results of them
//
// A block computes items one after the other: kBlockM rows, of the query heads that share a key head, on tiles of kBlockN keys
// (attn/decode.cuh says which). A warp has its own kWarpKeys keys of every tile and goes over them alone: own copies, own
// softmax, own O of all rows and columns. No barrier stands in the loop; at the end of an item the warps merge.
//   Columns of K, then keys of V, come in chunks through kStages buffers of the warp, as Elements:
//     wait for chunk c; the warp meets (c has landed, c - 1 has been read); start copying c + kStages - 1; multiply by c.
//   S: lanes are 4 along keys by 8 along columns. A lane sums all rows x kKeys keys over its columns of K; then the 8 add up,
//     and each keeps one row (2, 4 or 8 lanes the same one, where there are fewer): softmax is done there.
//   P and what O shrinks by go through shared memory to all lanes of the warp; P = -1 says "masked: leave V alone".
//   O: lanes are side by side along columns of V, and where those are few, in groups that take every kKeyGroups-th key.
//     P V is summed by tile and then added to O: one running sum over all keys would lose accuracy as they grow in number.
// Lane i knows where key i of its warp lies, or that no row sees it: then nothing is read and zeros stand there.
#include "attn/decode.cuh"
#include "attn/score.cuh"
#include "ptx/dependent.cuh"
#include "ptx/math.cuh"
#include "tile/simt.cuh"

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M;                // 1, 2, 4 or 8 rows
constexpr int kBlockN = BLOCK_N;
constexpr int kWarps = WARPS;
constexpr int kKeys = KEYS;                     // of a lane
constexpr int kChunkK = CHUNK_K;                // columns of K in a buffer
constexpr int kChunkV = CHUNK_V;                // keys of V in a buffer
constexpr int kStages = STAGES;                 // buffers of a warp
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a lane copies at once; divides head_dim, head_dim_v
constexpr bool kVIsK = V_IS_K;

constexpr int kThreads = kWarps * 32;
constexpr int kWarpKeys = kKeys * kLanesM;
constexpr int kPart = 16 / sizeof(Element);     // elements of a 16-byte read
constexpr int kPlanes = kPart / kVec;           // 16-byte reads of Q for one of K
constexpr int kLanesV = kHeadDimV / kVec < 32 ? kHeadDimV / kVec : 32;          // lanes along columns of V
constexpr int kKeyGroups = 32 / kLanesV;
constexpr int kCols = kHeadDimV / kLanesV;      // of a lane
constexpr int kRowVec = kBlockM < kVec ? kBlockM : kVec;
constexpr int kStore = OUT_VEC_BYTES / sizeof(Element) < kVec ? OUT_VEC_BYTES / sizeof(Element) : kVec;
constexpr int kChunksK = kHeadDim / kChunkK;
constexpr int kChunksV = kWarpKeys / kChunkV;
constexpr int kBufferK = kWarpKeys * kChunkK, kBufferV = kChunkV * kHeadDimV;
static_assert(kBlockM <= kLanesN && (kBlockM & (kBlockM - 1)) == 0, "a row for each lane along columns of K");
static_assert(kBlockN == kWarps * kWarpKeys && kWarpKeys <= 32, "a lane knows where one key lies");
static_assert(kHeadDim % kChunkK == 0 && kWarpKeys % kChunkV == 0 && kChunkV % kKeyGroups == 0, "whole chunks");
static_assert(kChunkK % (kLanesN * kPart) == 0 && kHeadDimV % (kLanesV * kVec) == 0, "whole 16-byte reads");
static_assert(kStages >= 2, "one is read while another is filled");

using ItemScore = Score<SCORE, R>;

union Buffers {
  Element sKV[kStages][larger(kBufferK, kBufferV)];     // kWarpKeys keys of kChunkK, swizzled, or kChunkV of kHeadDimV
  R sO[kBlockM][kHeadDimV];                     // at the end of an item
};
// What lanes of a warp tell each other of rows.
struct RowFacts {
  R alpha[kBlockM];                             // O shrinks by
  R max[kBlockM], sum[kBlockM];                 // at the end of an item
};
struct alignas(16) SharedStorage {
  R sQ[kBlockM][kHeadDim];                      // columns by q_place
  Buffers sBuffers[kWarps];
  R sP[kWarps][kWarpKeys][kBlockM];
  RowFacts sRows[kWarps];
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config_decode.py disagrees on shared memory");

// Where a column of Q lies: what lanes side by side read at once, next to each other.
DEV int q_place(int col) { return col / kVec % kPlanes * (kHeadDim / kPlanes) + col / kPart * kVec + col % kVec; }
// Where a column of a key lies in a chunk. Lanes that read it at once, by fours along two keys, find different banks.
DEV int k_place(int key, int col) { return key * kChunkK + (col ^ key % 2 * (4 * kPart)); }

// What a warp keeps from tile to tile.
struct Rows {
  R rO[kBlockM][kCols];
  R max;                        // of the logits of the lane's row so far, as a base-2 exponent
  R sum;                        // over the keys of the lane
};

DEV int lane_row() { return lane_n(thread_index()) / (kLanesN / kBlockM); }

// --------------------------------------------------------------------------------------------------------- loading keys

// Rows from `first` on of those that lanes know, kColumns each, of which the first `cols` exist. `src` is the lane's own.
// kBatch reads are in flight where copies are not asynchronous.
template <int kRows, int kColumns, bool kSwizzled>
DEV void load_rows(Element* dst, const Element* src, u32 is_read, int first, int cols) {
  constexpr bool kAsync = kHasCpAsync && VEC_BYTES >= 4;
  constexpr int kVecs = kColumns / kPart, kEven = kVecs & -kVecs, kAcross = kEven < 32 ? kEven : 32;
  constexpr int kSteps = kRows * kVecs / 32, kBatch = kAsync ? 1 : kSteps % 4 == 0 ? 4 : kSteps % 2 == 0 ? 2 : 1;
  static_assert(kRows * kVecs % 32 == 0 && kSteps % kBatch == 0, "every lane copies as much");
  const int lane = thread_index() % 32;
  #pragma unroll (kAsync ? 4 : 1)
  for (int at = 0; at < kSteps; at += kBatch) {
    Vec<Element, kLoad> x[kBatch][kPart / kLoad];
    #pragma unroll
    for (int i = 0; i < kBatch; i++) {
      const int row = (at + i) / (kVecs / kAcross) * (32 / kAcross) + lane / kAcross;
      const int col = ((at + i) % (kVecs / kAcross) * kAcross + lane % kAcross) * kPart;
      const Element* from = (const Element*)__shfl_sync(0xffffffff, (i64)src, first + row) + col;
      Element* to = dst + (kSwizzled ? k_place(row, col) : row * kColumns + col);
      #pragma unroll
      for (int j = 0; j < kPart; j += kLoad) {
        const bool inside = (is_read >> (first + row) & 1) && col + j < cols;
        if constexpr (kAsync) cp_async<VEC_BYTES>(shared_address(to + j), from + j, inside ? VEC_BYTES : 0);
        else x[i][j / kLoad] = inside ? *(const Vec<Element, kLoad>*)(from + j) : Vec<Element, kLoad>{};
      }
    }
    #pragma unroll
    for (int i = 0; !kAsync && i < kBatch; i++) {
      const int row = (at + i) / (kVecs / kAcross) * (32 / kAcross) + lane / kAcross;
      const int col = ((at + i) % (kVecs / kAcross) * kAcross + lane % kAcross) * kPart;
      Element* to = dst + (kSwizzled ? k_place(row, col) : row * kColumns + col);
      #pragma unroll
      for (int j = 0; j < kPart; j += kLoad) *(Vec<Element, kLoad>*)(to + j) = x[i][j / kLoad];
    }
  }
}

// The chunks of a warp's keys, one after the other through its buffers.
struct Chunks {
  const DecodeParams& p;
  Buffers& s;
  const Cache cache;
  int head_k, key_begin, key_end;               // keys that some row sees
  int tile, tile_end, chunk;                    // what is copied next
  int filled, used;                             // the buffers for it, and of the chunk in use
  int slot;                                     // of the lane's key of that tile
  const Element *gK, *gV;                       // the lane's key
  u32 is_read;                                  // by lanes: whether it is one that some row sees

  DEV Chunks(const DecodeParams& params, Buffers& buffers, const DecodeItem& item, int key_begin_, int key_end_, int begin,
             int end)
      : p(params), s(buffers), cache(params, item.batch, item.cached), head_k(item.head_k), key_begin(key_begin_),
        key_end(key_end_), tile(begin), tile_end(end), chunk(0), filled(0), used(kStages - 1) {
    find_slot(begin);
    #pragma unroll 1
    for (int i = 0; i < kStages - 1; i++) copy_next();
  }

  DEV static int lane_key(int tile) { return tile * kBlockN + threadIdx.x / 32 * kWarpKeys + threadIdx.x % 32; }
  DEV bool is_seen(int key) const { return threadIdx.x % 32 < kWarpKeys && key >= key_begin && key < key_end; }
  // Read a tile ahead: a page is known when its tile comes to be copied.
  DEV void find_slot(int tile) {
    const int key = lane_key(tile);
    slot = tile < tile_end && is_seen(key) && !cache.is_new(key) ? cache.slot(key) : 0;
  }
  DEV void find_key() {
    const int key = lane_key(tile);
    const bool seen = is_seen(key);
    gK = gV = (const Element*)p.k;
    if (seen && cache.is_new(key)) {
      gK = cache.new_row((const Element*)p.k_new, p.k_new_strides, head_k, key);
      gV = kVIsK ? gK : cache.new_row((const Element*)p.v_new, p.v_new_strides, head_k, key);
    } else if (seen) {
      gK = cache.row((const Element*)p.k, p.k_strides, head_k, key, slot);
      gV = kVIsK ? gK : cache.row((const Element*)p.v, p.v_strides, head_k, key, slot);
    }
    is_read = __ballot_sync(0xffffffff, seen);
  }
  DEV void copy_next() {
    if (tile < tile_end) {
      if (chunk == 0) {
        find_key();
        find_slot(tile + 1);
      }
      Element* dst = s.sKV[filled];
      const int col = chunk * kChunkK;
      if (chunk < kChunksK) load_rows<kWarpKeys, kChunkK, true>(dst, gK + col, is_read, 0, p.head_dim - col);
      else load_rows<kChunkV, kHeadDimV, false>(dst, gV, is_read, (chunk - kChunksK) * kChunkV, p.head_dim_v);
      if (++chunk == kChunksK + kChunksV) chunk = 0, tile++;
    }
    cp_async_commit();
    filled = filled + 1 == kStages ? 0 : filled + 1;
  }
  // The chunk that is multiplied next.
  DEV const Element* next() {
    cp_async_wait<kStages - 2>();
    __syncwarp();                               // the chunk has landed for all lanes; all have read the one before
    copy_next();
    used = used + 1 == kStages ? 0 : used + 1;
    return s.sKV[used];
  }
};

// ------------------------------------------------------------------------------------------------------------ multiplying

// S += Q K^T over the columns of one chunk, those of the lane. sQ is its first plane at the chunk's first column.
DEV void multiply_qk(R (&rS)[kBlockM][kKeys], const R* sQ, const Element* sK) {
  const u32 thread = thread_index();
  const int key = lane_m(thread), lane_col = lane_n(thread) * kPart;
  #pragma unroll 1
  for (int col = lane_col; col < kChunkK; col += kLanesN * kPart) {
    Vec<Element, kPart> k[kKeys];
    #pragma unroll
    for (int j = 0; j < kKeys; j++) k[j] = *(const Vec<Element, kPart>*)(sK + k_place(j * kLanesM + key, col));
    #pragma unroll
    for (int plane = 0; plane < kPlanes; plane++)
      #pragma unroll
      for (int i = 0; i < kBlockM; i++) {
        const Vec<R, kVec> q = load_vec<kVec>(sQ + i * kHeadDim + plane * (kHeadDim / kPlanes) + col / kPlanes);
        #pragma unroll
        for (int e = 0; e < kVec; e++)
          #pragma unroll
          for (int j = 0; j < kKeys; j++) rS[i][j] = fma(q.x[e], to_real(k[j].x[plane * kVec + e]), rS[i][j]);
      }
  }
}

// Adds up the parts of S of the 8 lanes along columns, bit by bit of lane_n. Each time a lane gives half of its kRows rows
// away; row 0 of rS is at last that of lane_row().
template <int kRows = kBlockM, int kLane = 8> DEV void add_columns(R (&rS)[kBlockM][kKeys]) {
  constexpr int kKept = kRows > 1 ? kRows / 2 : 1;
  const bool upper = thread_index() & kLane;
  #pragma unroll
  for (int i = 0; i < kKept; i++)
    #pragma unroll
    for (int j = 0; j < kKeys; j++) {
      const R first = rS[i][j], second = rS[kRows - kKept + i][j];              // one and the same if there is one row
      rS[i][j] = (upper ? second : first) + __shfl_xor_sync(0xffffffff, upper ? first : second, kLane);
    }
  if constexpr (kLane > 2) add_columns<kKept, kLane / 2>(rS);
}

// P of the lane's row in place of raw products, to shared memory; max, sum and O follow. `key` is the lane's first.
DEV void softmax(Rows& rows, R (&x)[kKeys], SharedStorage& s, int warp, const ItemScore& score, int key, int key_begin,
                 int key_end) {
  R max = -infinity(R());
  const auto visible = [=](int j) { return (key + j * kLanesM >= key_begin) & (key + j * kLanesM < key_end); };
  #pragma unroll
  for (int j = 0; j < kKeys; j++) {
    x[j] = visible(j) ? score.logit(x[j]) : -infinity(R());
    max = fmax(max, x[j]);
  }
  max = fmax(max, __shfl_xor_sync(0xffffffff, max, 1));         // the lanes along keys
  max = fmax(max, __shfl_xor_sync(0xffffffff, max, 16)) * score.exponent_scale();
  const bool moves = max > rows.max;
  const bool any_moves = __any_sync(0xffffffff, moves);
  if (any_moves) {
    const R alpha = moves ? exp2_fast(rows.max - max) : (R)1;
    if (moves) rows.max = max;
    rows.sum *= alpha;
    if (lane_m(threadIdx.x) == 0) s.sRows[warp].alpha[lane_row()] = alpha;
  }
  const R subtract = rows.max == -infinity(R()) ? (R)0 : rows.max;
  R sum = 0;
  #pragma unroll
  for (int j = 0; j < kKeys; j++) {
    const R weight = exp2_fast(fma(x[j], score.exponent_scale(), -subtract));
    sum += weight;
    s.sP[warp][j * kLanesM + lane_m(thread_index())][lane_row()] = visible(j) ? weight : (R)-1;
  }
  rows.sum += sum;
  if (any_moves) {
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < kBlockM; i++) {
      const R alpha = s.sRows[warp].alpha[i];
      #pragma unroll
      for (int c = 0; c < kCols; c++) rows.rO[i][c] *= alpha;
    }
  }
}

// sum += P V over the keys of one chunk, those of the lane.
template <bool kPartial> DEV void multiply_pv(R (&sum)[kBlockM][kCols], const R* sP, const Element* sV) {
  const int lane = thread_index() % 32, first = lane / kLanesV;
  #pragma unroll (kCols > 4 ? 1 : 4)
  for (int key = first; key < first + kChunkV; key += kKeyGroups) {
    R x[kBlockM];
    Vec<Element, kVec> v[kCols / kVec];
    #pragma unroll
    for (int i = 0; i < kBlockM; i += kRowVec) {
      const Vec<R, kRowVec> rows = load_vec<kRowVec>(sP + key * kBlockM + i);
      #pragma unroll
      for (int e = 0; e < kRowVec; e++) x[i + e] = rows.x[e];
    }
    #pragma unroll
    for (int j = 0; j < kCols / kVec; j++)
      v[j] = *(const Vec<Element, kVec>*)(sV + key * kHeadDimV + (j * kLanesV + lane % kLanesV) * kVec);
    #pragma unroll
    for (int i = 0; i < kBlockM; i++) {
      if (kPartial && x[i] < 0) continue;       // 0 * V would be NaN where V is NaN or Inf
      #pragma unroll
      for (int c = 0; c < kCols; c++) sum[i][c] = fma(x[i], to_real(v[c / kVec].x[c % kVec]), sum[i][c]);
    }
  }
}

// One tile of the warp's keys.
DEV void attend(Rows& rows, Chunks& chunks, SharedStorage& s, int warp, const ItemScore& score, bool partial, int key,
                int key_begin, int key_end) {
  R rS[kBlockM][kKeys] = {};
  #pragma unroll 1
  for (int c = 0; c < kChunksK; c++) {
    const Element* sK = chunks.next();
    multiply_qk(rS, s.sQ[0] + c * (kChunkK / kPlanes), sK);
  }
  add_columns(rS);
  softmax(rows, rS[0], s, warp, score, key, key_begin, key_end);
  R sum[kBlockM][kCols] = {};
  #pragma unroll 1
  for (int c = 0; c < kChunksV; c++) {
    const Element* sV = chunks.next();          // P, written by all lanes, is there too
    if (partial) multiply_pv<true>(sum, s.sP[warp][c * kChunkV], sV);
    else multiply_pv<false>(sum, s.sP[warp][c * kChunkV], sV);
  }
  #pragma unroll
  for (int i = 0; i < kBlockM * kCols; i++) rows.rO[i / kCols][i % kCols] += sum[i / kCols][i % kCols];
}

// --------------------------------------------------------------------------------------------------- the ends of an item

DEV void load_q(SharedStorage& s, const DecodeParams& p, const DecodeItem& item) {
  constexpr int kSize = kLoad < kVec ? kLoad : kVec;
  const int group = group_of(p), first_row = item.row_tile * kBlockM;
  #pragma unroll 2
  for (int at = threadIdx.x; at < kBlockM * kHeadDim / kVec; at += kThreads) {
    const int i = at / (kHeadDim / kVec), col = at % (kHeadDim / kVec) * kVec, row = first_row + i;
    const Element* gQ = (const Element*)p.q + item.batch * p.q_strides.batch + row / group * p.q_strides.row
                        + (item.head_k * group + row % group) * p.q_strides.head;
    Vec<R, kVec> x;
    #pragma unroll
    for (int j = 0; j < kVec; j += kSize) {
      const bool inside = row < num_rows(p) && col + j < p.head_dim;
      const Vec<Element, kSize> given = inside ? *(const Vec<Element, kSize>*)(gQ + col + j) : Vec<Element, kSize>{};
      #pragma unroll
      for (int e = 0; e < kSize; e++) x.x[j + e] = to_real(given.x[e]);
    }
    *(Vec<R, kVec>*)(s.sQ[i] + q_place(col)) = x;
  }
}

// What the warp has of the item, for all to merge.
DEV void give_rows(Rows& rows, SharedStorage& s, int warp) {
  #pragma unroll
  for (int lane = kLanesV; lane < 32; lane *= 2)                // the groups of keys
    #pragma unroll
    for (int i = 0; i < kBlockM * kCols; i++)
      rows.rO[i / kCols][i % kCols] += __shfl_xor_sync(0xffffffff, rows.rO[i / kCols][i % kCols], lane);
  rows.sum += __shfl_xor_sync(0xffffffff, rows.sum, 1);         // the lanes along keys
  rows.sum += __shfl_xor_sync(0xffffffff, rows.sum, 16);
  __syncwarp();                                 // all lanes have read the last chunk
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < kBlockM; i++)
    #pragma unroll
    for (int c = 0; c < kCols; c += kVec) {
      Vec<R, kVec> x;
      #pragma unroll
      for (int e = 0; e < kVec; e++) x.x[e] = rows.rO[i][c + e];
      if (lane < kLanesV) *(Vec<R, kVec>*)(s.sBuffers[warp].sO[i] + (c / kVec * kLanesV + lane) * kVec) = x;
    }
  if (lane_m(threadIdx.x) == 0) s.sRows[warp].max[lane_row()] = rows.max, s.sRows[warp].sum[lane_row()] = rows.sum;
}

// Merges what the warps gave, and writes outputs or, of a part of an item, partial results.
DEV void write_out(const SharedStorage& s, const DecodeParams& p, const DecodeItem& item) {
  const int group = group_of(p), first_row = item.row_tile * kBlockM;
  #pragma unroll 1
  for (int at = threadIdx.x; at < kBlockM * kHeadDimV / kVec; at += kThreads) {
    const int i = at / (kHeadDimV / kVec), col = at % (kHeadDimV / kVec) * kVec, row = first_row + i;
    if (row >= num_rows(p)) continue;
    R max = -infinity(R()), sum = 0;
    #pragma unroll
    for (int w = 0; w < kWarps; w++) max = fmax(max, s.sRows[w].max[i]);
    const R subtract = max == -infinity(R()) ? (R)0 : max;
    Vec<R, kVec> x = {};
    #pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const R weight = exp2_fast(s.sRows[w].max[i] - subtract);
      const Vec<R, kVec> part = load_vec<kVec>(s.sBuffers[w].sO[i] + col);
      sum = fma(weight, s.sRows[w].sum[i], sum);
      #pragma unroll
      for (int e = 0; e < kVec; e++) x.x[e] = fma(weight, part.x[e], x.x[e]);
    }
    const R inverse = sum == 0 ? (R)0 : 1 / sum;        // no visible key: O is 0
    const R lse = sum == 0 ? -infinity(R()) : max + log2(sum);
    if (item.slot >= 0) {
      #pragma unroll
      for (int e = 0; e < kVec; e++) x.x[e] *= inverse;
      *(Vec<R, kVec>*)((R*)p.partial_out + (item.slot * kBlockM + i) * kHeadDimV + col) = x;
      if (col == 0) ((R*)p.partial_lse)[item.slot * kBlockM + i] = lse;
      continue;
    }
    const int query = row / group, head = item.head_k * group + row % group;
    Element* gO = (Element*)p.out + item.batch * p.out_strides.batch + query * p.out_strides.row + head * p.out_strides.head;
    #pragma unroll
    for (int c = 0; c < kVec; c += kStore) {
      Vec<Element, kStore> y;
      #pragma unroll
      for (int e = 0; e < kStore; e++) from_real(y.x[e], x.x[c + e] * inverse);
      if (col + c < p.head_dim_v) *(Vec<Element, kStore>*)(gO + col + c) = y;
    }
    if (p.lse && col == 0)
      ((R*)p.lse)[((i64)item.batch * p.heads_q + head) * p.seqlen_q + query] = lse * (R)0.693147180559945309417;
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, MIN_BLOCKS) decode_simt(const DecodeParams p) {
  extern __shared__ __align__(16) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  start_dependents();           // decode_combine finds its parts while these are computed
  append<Element>(p);
  const ItemScore score(p);
  const int warp = uniform(threadIdx.x / 32);

  #pragma unroll 1
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& item = items.item;
    const KeyMask mask(p, p.seqlen_q, item.seqlen_k);
    const int first_row = item.row_tile * kBlockM, last_row = min(first_row + kBlockM, num_rows(p)) - 1, group = group_of(p);
    const int key_begin = uniform(mask.key_begin(first_row / group)), key_end = uniform(mask.key_end(last_row / group));
    // Only in the first and the last tile can there be keys of a warp that no row sees.
    const int first_key = warp * kWarpKeys;
    const int begin = item.begin + (item.begin * kBlockN + first_key + kWarpKeys <= key_begin);
    const int end = item.end - ((item.end - 1) * kBlockN + first_key >= key_end);
    const int query = (first_row + lane_row()) / group;         // of the lane's row
    const int row_begin = mask.key_begin(query), row_end = mask.key_end(query);

    __syncthreads();                            // all have read what the item before left
    Chunks chunks(p, s.sBuffers[warp], item, key_begin, key_end, begin, end);
    load_q(s, p, item);
    __syncthreads();
    Rows rows = {};
    rows.max = -infinity(R());
    #pragma unroll 1
    for (int tile = begin; tile < end; tile++) {
      const int key = tile * kBlockN + first_key + lane_m(threadIdx.x);
      attend(rows, chunks, s, warp, score, item.tiles.is_partial(tile), key, row_begin, row_end);
    }
    give_rows(rows, s, warp);
    __syncthreads();
    write_out(s, p, item);
  }
}
