// Decoding on tensor cores: few queries on a cache of keys and values, float16 and bfloat16.
//
//   out = softmax(scale * q k^T) v of each request, whose keys lie in a cache, contiguous or in pages, and behind them new ones
//   q [batch, seqlen_q, heads_q, head_dim]    cache: attn/decode.cuh    out [batch, seqlen_q, heads_q, head_dim_v]
//
// The cache is read once and nothing else matters much: a block per multiprocessor takes its share of all key tiles and keeps
// stages of them on their way, over the borders of items. Warps go in groups of kWarpsM that share kGroupKeys keys of each
// tile and part the rows among them. A group has stages of its own and waits for nobody but its own copies, keeping a max and
// a sum of its own for every row (online softmax, FlashAttention; the split over keys is Flash-Decoding's); at the end of an
// item the groups join what they have in shared memory.
//   barrier 0 (all threads): Q of the item has landed; results of all groups stand in shared memory, where Q was, or have been read
//   barrier 1 + group:       the group's stage has landed; or all its warps have read it, and it is copied over
// Results of a part of an item go to partial_out and partial_lse, which decode_combine joins.
// Not here: float32 and float64, heads wider than 256 (decode_simt, decode_sm90).
#include "attn/decode.cuh"
#include "attn/poison.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "ptx/barrier.cuh"
#include "ptx/dependent.cuh"
#include "ptx/stream.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM, kHeadDimV = HEAD_DIM_V;      // padded
constexpr bool kWholeHeads = WHOLE_HEADS;                       // nothing is padded
constexpr int kMTiles = MTILES, kWarpsM = WARPS_M, kWarpsN = WARPS_N, kStages = STAGES, kMergeCols = MERGE_COLS;
constexpr int kVecBytes = VEC_BYTES, kOutVecBytes = OUT_VEC_BYTES;
constexpr int kGroupKeys = GROUP_KEYS, kWarpRows = kMTiles * 16;
constexpr int kThreads = kWarpsM * kWarpsN * 32, kGroupThreads = kWarpsM * 32;
static_assert(kItemRows == kWarpsM * kWarpRows && kTileKeys == kWarpsN * kGroupKeys && kStages >= 2);
static_assert(kGroupKeys == 16 || kGroupKeys == 32, "a lane a key, or one for its K and one for its V");
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;
// Stages on their way at once: all, into one as soon as it has been read; of a group of warps all but the one that others may
// still be reading, which spares a barrier.
constexpr int kAhead = kWarpsM == 1 ? kStages : kStages - 1;
constexpr bool kKeepsQ = KEEPS_Q;
static_assert(!kKeepsQ || kMTiles == 1);

using QLayout = TileLayout<kHeadDim>;
using KLayout = TileLayout<kHeadDim>;
using VLayout = TileLayout<kHeadDimV>;

struct alignas(128) SharedStorage {
  Element sK[kStages][kWarpsN][kGroupKeys * kHeadDim];
  Element sV[kStages][kWarpsN][kGroupKeys * kHeadDimV];
  union {
    Element sQ[kItemRows * kHeadDim];
    float sO[kWarpsN][kItemRows][kMergeCols + 8];       // some columns of what the groups join; 8 against bank conflicts
  };
  float sMax[kWarpsN][kItemRows], sSum[kWarpsN][kItemRows];
  // What is the same for all costs no registers here.
  DecodeItems items[2];         // the item that is computed and the next, in turns
  DecodeItems ahead[kThreads / 32];     // what a warp copies
  int pages[kPaged ? kStages : 1][kPaged ? kThreads : 1];       // of each thread's key of a stage, as the table says
};
static_assert(sizeof(SharedStorage) == SMEM_BYTES, "config.py disagrees on shared memory");

// What a thread keeps of its rows (g and g + 8 of each 16) from tile to tile.
struct Rows {
  float rO[kMTiles][kHeadDimV / 8][4];
  float max[kMTiles][2];                        // of the base-2 exponents, lagging; the same in all lanes of a row
  float sum[kMTiles][2];                        // of P over this lane's keys
};
using Logits = float[kMTiles][kGroupKeys / 8][4];
// A warp's rows of Q as operands, where there are registers for them: reads of shared memory are a limit of many rows.
struct QueryRows { u32 step[kKeepsQ ? kHeadDim / 16 : 1][4]; };

// Which keys a packed row sees.
struct RowMask {
  KeyMask mask;
  int group;
  DEV int key_begin(int row) const { return mask.key_begin(row / group); }
  DEV int key_end(int row) const { return mask.key_end(row / group); }
};

DEV int group_idx() { return uniform(thread_index() / kGroupThreads); }
DEV int part_idx() { return uniform(thread_index() / 32 % kWarpsM); }
DEV void sync_group() {
  if (kWarpsM == 1) __syncwarp();
  else barrier_sync(1 + group_idx(), kGroupThreads);
}
DEV bool any_of_group(bool x) {
  return kWarpsM == 1 ? __any_sync(0xffffffff, x) : barrier_or(1 + group_idx(), kGroupThreads, x);
}

// ------------------------------------------------------------------------------------------------------------------ loading

// Rows of a group's keys or values from where lanes first_lane.. of the warp say (null: zeros) to `dst`. `policy`: of
// l2_policy; not for pages, which requests may share.
template <typename Layout> DEV void copy_gathered(u32 dst, const char* own_row, int first_lane, int cols, u64 policy) {
  constexpr int kLine = Layout::kLine, kRowsAtOnce = 32 / kLine;
  constexpr bool kAsync = kHasCpAsync && kVecBytes >= 4;
  const u32 lane = thread_index() % 32;
  #pragma unroll
  for (int first = 0; first < kGroupKeys; first += kRowsAtOnce) {
    if (kWarpsM > 1 && first / kRowsAtOnce % kWarpsM != part_idx()) continue;
    const int row = first + lane / kLine;
    const char* src = (const char*)__shfl_sync(0xffffffff, (u64)own_row, first_lane + row);
    #pragma unroll
    for (int i = 0; i < Layout::kChunks; i += kLine) {
      const int chunk = i + lane % kLine;
      const int valid = !src ? 0 : kWholeHeads ? 16 : min(max(cols - chunk * 8, 0), 8) * 2;
      if constexpr (kAsync) {
        #pragma unroll
        for (int at = 0; at < 16; at += kVecBytes) {
          const u32 to = dst + Layout::offset(row, chunk) + at;
          const int bytes = min(max(valid - at, 0), kVecBytes);
          if constexpr (kPaged) cp_async<kVecBytes>(to, src + chunk * 16 + at, bytes);
          else cp_async_hinted<kVecBytes>(to, src + chunk * 16 + at, bytes, policy);
        }
      } else {
        store_shared(dst + Layout::offset(row, chunk), load_chunk<kVecBytes>(src + chunk * 16, valid));
      }
    }
  }
}

// To the next item, by a warp.
DEV void step_items(DecodeItems& to, const DecodeItems& from, const DecodeParams& p) {
  DecodeItems items = from;
  items.next(p);
  __syncwarp();
  if (thread_index() % 32 == 0) to = items;
  __syncwarp();
}

// Copies key tiles ahead of those that are computed. A lane finds the rows of a key; of 16 keys one half of the lanes those of K,
// the other those of V. Its page is copied from the table with the tile that had the stage before: behind all that is on its
// way an answer takes longer than a tile.
struct Loader {
  DecodeItems& items;
  int tile, slot;               // slot: of the item, if not PAGED
  u64 policy;

  DEV int key_of(int tile) const { return tile * kTileKeys + group_idx() * kGroupKeys + thread_index() % kGroupKeys; }
  // By all lanes, before an item's first tile, which goes to `stage`: pages of the tiles that nobody asked for before.
  DEV void begin(const DecodeParams& p, SharedStorage& s, int stage) {
    const DecodeItem& item = items.item;
    const Cache cache(p, item.batch, item.cached);
    tile = item.begin;
    if constexpr (!kPaged) {
      slot = cache.slot(0);
    } else {
      int pages[kAhead];
      #pragma unroll
      for (int i = 0; i < kAhead; i++) {
        const int key = key_of(tile + i);
        pages[i] = tile + i < item.end && key < item.cached ? *cache.entry(key) : 0;
      }
      #pragma unroll
      for (int i = 0; i < kAhead; i++) {
        s.pages[stage][thread_index()] = pages[i];
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
    }
  }
  DEV Loader(const DecodeParams& p, SharedStorage& s, DecodeItems& first)
      : items(first), tile(0), slot(0), policy(l2_policy(p.num_row_tiles == 1)) {
    if (items.is_valid) begin(p, s, 0);
  }
  DEV void load(const DecodeParams& p, SharedStorage& s, int stage) {
    if (items.is_valid) {
      const DecodeItem& item = items.item;
      const Cache cache(p, item.batch, item.cached);
      const int own_key = key_of(tile);
      const int own_slot = kPaged ? cache.slot_of(s.pages[stage][thread_index()]) : slot;
      const auto row = [&](bool of_v) -> const char* {
        if (own_key >= item.seqlen_k) return nullptr;
        if (cache.is_new(own_key))
          return (const char*)cache.new_row((const Element*)(of_v ? p.v_new : p.k_new), of_v ? p.v_new_strides : p.k_new_strides,
                                            item.head_k, own_key);
        return (const char*)cache.row((const Element*)(of_v ? p.v : p.k), of_v ? p.v_strides : p.k_strides, item.head_k, own_key,
                                      own_slot);
      };
      const u32 sK = shared_address(s.sK[stage][group_idx()]), sV = shared_address(s.sV[stage][group_idx()]);
      if constexpr (kGroupKeys == 32) {
        copy_gathered<KLayout>(sK, row(false), 0, p.head_dim, policy);
        copy_gathered<VLayout>(sV, row(true), 0, p.head_dim_v, policy);
      } else {
        const char* own = row(thread_index() % 32 >= 16);
        copy_gathered<KLayout>(sK, own, 0, p.head_dim, policy);
        copy_gathered<VLayout>(sV, own, 16, p.head_dim_v, policy);
      }
      const int later = key_of(tile + kAhead);
      if (kPaged && tile + kAhead < item.end && later < item.cached) {
        int& page = s.pages[kAhead == kStages ? stage : stage == 0 ? kStages - 1 : stage - 1][thread_index()];
        if constexpr (kHasCpAsync) cp_async<4>(shared_address(&page), cache.entry(later), 4);
        else page = *cache.entry(later);
      }
      if (++tile == item.end) {
        step_items(items, items, p);
        if (items.is_valid) begin(p, s, stage + 1 == kStages ? 0 : stage + 1);
      }
    }
    cp_async_commit();          // of nothing, too: the count of groups says which stage has landed
  }
};

// Q of an item, rows past the last as zeros, by all threads: to registers, then to shared memory.
constexpr int kQChunks = kItemRows * QLayout::kChunks / kThreads + (kItemRows * QLayout::kChunks % kThreads != 0);    // a thread
DEV void fetch_q(Chunk (&rQ)[kQChunks], const DecodeParams& p, const DecodeItem& item) {
  const int first_row = item.row_tile * kItemRows, group = group_of(p);
  #pragma unroll
  for (int i = 0; i < kQChunks; i++) {
    const int idx = thread_index() + i * kThreads, row = idx / QLayout::kChunks, chunk = idx % QLayout::kChunks;
    rQ[i] = {};
    // Without a division: warps that have no rows go on to the keys.
    if (row >= kItemRows || (i64)(first_row + row) * p.heads_k >= (i64)p.seqlen_q * p.heads_q) continue;
    const int query = (u32)(first_row + row) / (u32)group, head = item.head_k * group + first_row + row - query * group;
    const Element* src = (const Element*)p.q + item.batch * p.q_strides.batch + query * p.q_strides.row + head * p.q_strides.head;
    rQ[i] = load_chunk<kVecBytes>((const char*)(src + chunk * 8), min(max(p.head_dim - chunk * 8, 0), 8) * 2);
  }
}
DEV void store_q(SharedStorage& s, const Chunk (&rQ)[kQChunks]) {
  #pragma unroll
  for (int i = 0; i < kQChunks; i++) {
    const int idx = thread_index() + i * kThreads, row = idx / QLayout::kChunks, chunk = idx % QLayout::kChunks;
    if (row < kItemRows) store_shared(shared_address(s.sQ) + QLayout::offset(row, chunk), rQ[i]);
  }
}

// ---------------------------------------------------------------------------------------------------------------- computing

// S = Q K^T, raw products.
DEV void multiply_qk(Logits& rS, const QueryRows& rQ, u32 q_lane, u32 k_lane) {
  #pragma unroll
  for (int i = 0; i < kMTiles * kGroupKeys / 2; i++) rS[i / (kGroupKeys / 2)][i / 4 % (kGroupKeys / 8)][i % 4] = 0.f;
  #pragma unroll
  for (int d = 0; d < kHeadDim / 16; d++) {
    u32 q[kMTiles][4];
    #pragma unroll
    for (int m = 0; m < kMTiles; m++) {
      if constexpr (kKeepsQ) {
        #pragma unroll
        for (int i = 0; i < 4; i++) q[m][i] = rQ.step[d][i];
      } else {
        ldmatrix_x4(q[m], QLayout::step(q_lane, d * 2) + m * 16 * QLayout::kRowBytes);
      }
    }
    #pragma unroll
    for (int n = 0; n < kGroupKeys / 8; n += 2) {
      u32 rK[4];
      ldmatrix_x4(rK, KLayout::step(k_lane, d * 2) + n * 8 * KLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rS[m][n], q[m], rK[0], rK[1]);
        mma_m16n8k16<Element>(rS[m][n + 1], q[m], rK[2], rK[3]);
      }
    }
  }
}

// Logits in place of raw products; -inf where masked.
template <typename Score>
DEV void apply_score_and_mask(Logits& rS, const Score& score, const RowMask& mask, bool partial, int first_row, int first_key) {
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
      for (int i = 0; i < kGroupKeys / 4; i++) {
        const int key = i / 2 * 8 + i % 2;
        if (key >= end || (kMaskLeft && key < begin)) rS[r / 2][i / 2][r % 2 * 2 + i % 2] = -infinity(0.f);
      }
    }
  }
}

// The running max of a row follows once a logit exceeds it by more than it may; sums and O with it.
DEV void move_max(Rows& rows, const Logits& rS, float exponent_scale) {
  float max[kMTiles][2];
  bool exceeds = false;
  #pragma unroll
  for (int m = 0; m < kMTiles; m++) find_max(max[m], rows.max[m], flat(rS[m]), exponent_scale, exceeds);
  if (!__any_sync(0xffffffff, exceeds)) return;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float& old = rows.max[r / 2][r % 2];
    const float x = fmaxf(max_of_row(max[r / 2][r % 2]) * exponent_scale, old), alpha = factor_of_move(old, x);
    old = x;
    rows.sum[r / 2][r % 2] *= alpha;
    #pragma unroll
    for (int i = 0; i < kHeadDimV / 4; i++) rows.rO[r / 2][i / 2][r % 2 * 2 + i % 2] *= alpha;
  }
}

// P = exp2(logits - max), rounded to the operand type, and O += P V.
DEV void softmax_and_multiply_pv(Rows& rows, Logits& rS, float exponent_scale, u32 v_lane) {
  u32 rP[kGroupKeys / 16][kMTiles][4];
  #pragma unroll
  for (int m = 0; m < kMTiles; m++) {
    exponentiate(flat(rS[m]), rows.max[m], rows.sum[m], exponent_scale);
    #pragma unroll
    for (int k = 0; k < kGroupKeys / 16; k++) pack_fragment<Element>(rP[k][m], rS[m][2 * k], rS[m][2 * k + 1]);
  }
  #pragma unroll
  for (int k = 0; k < kGroupKeys / 16; k++)
    #pragma unroll
    for (int d = 0; d < kHeadDimV / 16; d++) {
      u32 rV[4];
      ldmatrix_x4_trans(rV, VLayout::step(v_lane, d * 2) + k * 16 * VLayout::kRowBytes);
      #pragma unroll
      for (int m = 0; m < kMTiles; m++) {
        mma_m16n8k16<Element>(rows.rO[m][2 * d], rP[k][m], rV[0], rV[1]);
        mma_m16n8k16<Element>(rows.rO[m][2 * d + 1], rP[k][m], rV[2], rV[3]);
      }
    }
}

// NaN and Inf of a group's partly masked values go to the rows that see them and become 0 in shared memory: a product with
// P = 0 would carry them to all. Without a mask the only keys that no row sees are the zeros past the end.
DEV void separate_nonfinite(Rows& rows, const Element* sV, const RowMask& mask, int first_row, int first_key) {
  if constexpr (kMaskLeft || kMaskRight) {
    constexpr int kBytes = kGroupKeys * VLayout::kRowBytes;
    const u32 thread = thread_index() % kGroupThreads, lane = thread % 32, v_tile = shared_address(sV);
    if (!any_of_group(scan_nonfinite<Element, kBytes, kGroupThreads, false>(v_tile, thread))) return;
    #pragma unroll 1
    for (int key = 0; key < kGroupKeys; key++) {
      bool sees[kMTiles][2];
      #pragma unroll
      for (int r = 0; r < kMTiles * 2; r++) {
        const int row = first_row + r / 2 * 16 + r % 2 * 8 + lane / 4;
        sees[r / 2][r % 2] = first_key + key >= mask.key_begin(row) && first_key + key < mask.key_end(row);
      }
      #pragma unroll
      for (int i = 0; i < kHeadDimV / 8; i++) {
        const u32 v = *(const u32*)((const char*)sV + VLayout::offset(key, i) + lane % 4 * 4);
        #pragma unroll
        for (int e = 0; e < 2; e++) {
          const u32 bits = v >> e * 16 & 0xffff;
          if (!is_nonfinite<Element>(bits)) continue;
          #pragma unroll
          for (int r = 0; r < kMTiles * 2; r++)
            if (sees[r / 2][r % 2]) rows.rO[r / 2][i][r % 2 * 2 + e] += to_real(Element{(u16)bits});
        }
      }
    }
    sync_group();
    scan_nonfinite<Element, kBytes, kGroupThreads, true>(v_tile, thread);
    sync_group();
  }
}

// Where this lane's row of the warp's first rows of Q lies, for ldmatrix.
DEV u32 query_lane(SharedStorage& s) {
  return piece_down<QLayout>(shared_address(s.sQ) + part_idx() * kWarpRows * QLayout::kRowBytes, thread_index() % 32);
}

// The group's keys of a tile, which lie in the stage.
DEV void attend(Rows& rows, const QueryRows& rQ, SharedStorage& s, int stage, const Score<SCORE, float>& score, const DecodeParams& p,
                const DecodeItem& item, int tile) {
  const int first_key = tile * kTileKeys + group_idx() * kGroupKeys;
  const bool partial = item.tiles.is_partial(tile);
  const int first_row = item.row_tile * kItemRows + part_idx() * kWarpRows;
  const RowMask mask = {KeyMask(p, p.seqlen_q, item.seqlen_k), group_of(p)};
  const u32 lane = thread_index() % 32, v_tile = shared_address(s.sV[stage][group_idx()]);
  // By a group past the last key too, which finds zeros: racecheck takes groups for racing that meet unequally often.
  if (partial) separate_nonfinite(rows, s.sV[stage][group_idx()], mask, first_row, first_key);
  if (first_key >= item.seqlen_k) return;
  Logits rS;
  multiply_qk(rS, rQ, query_lane(s), piece_right<KLayout>(shared_address(s.sK[stage][group_idx()]), lane));
  apply_score_and_mask(rS, score, mask, partial, first_row, first_key);
  move_max(rows, rS, score.exponent_scale());
  softmax_and_multiply_pv(rows, rS, score.exponent_scale(), piece_down<VLayout>(v_tile, lane));
}

// ------------------------------------------------------------------------------------------------------------------ results

// Max and sum of a row over all groups.
struct RowTotal { float max, sum; };
DEV RowTotal total_of(const SharedStorage& s, int row) {
  RowTotal total = {-infinity(0.f), 0.f};
  #pragma unroll
  for (int n = 0; n < kWarpsN; n++) total.max = fmaxf(total.max, s.sMax[n][row]);
  #pragma unroll
  for (int n = 0; n < kWarpsN; n++)     // one that saw nothing has a sum of 0, or of NaN if that is what it saw
    total.sum += s.sSum[n][row] * (s.sMax[n][row] == -infinity(0.f) ? 1.f : exp2_fast(s.sMax[n][row] - total.max));
  return total;
}

// Where the outputs of an item go: to out, or with those of other blocks to partial_out.
struct Results {
  const DecodeParams& p;
  const DecodeItem& item;
  int first_row, group;
  DEV Results(const DecodeParams& params, const DecodeItem& i)
      : p(params), item(i), first_row(i.row_tile * kItemRows), group(group_of(params)) {}
  DEV bool has(int row) const { return first_row + row < num_rows(p); }
  DEV int query(int row) const { return (first_row + row) / group; }
  DEV int head(int row) const { return item.head_k * group + (first_row + row) % group; }
  DEV void store(int row, int col, const float (&x)[4]) const {
    if (item.slot >= 0) {
      float* dst = (float*)p.partial_out + (item.slot * kItemRows + row) * kHeadDimV + col;
      *(Chunk*)dst = {{__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3])}};
      return;
    }
    Element* dst = (Element*)p.out + item.batch * p.out_strides.batch + query(row) * p.out_strides.row
                   + head(row) * p.out_strides.head + col;
    const u32 word[2] = {pack2<Element>(x[0], x[1]), pack2<Element>(x[2], x[3])};
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int left = p.head_dim_v - col - 2 * i;
      if (kOutVecBytes >= 4 && left >= 2) {
        ((u32*)dst)[i] = word[i];
      } else {
        if (left >= 1) ((u16*)dst)[2 * i] = (u16)word[i];
        if (left >= 2) ((u16*)dst)[2 * i + 1] = (u16)(word[i] >> 16);
      }
    }
  }
  DEV void store_lse(int row, const RowTotal& total) const {
    const float lse = total.sum == 0.f ? -infinity(0.f) : total.max + log2f(total.sum);        // base 2
    if (item.slot >= 0) ((float*)p.partial_lse)[item.slot * kItemRows + row] = lse;
    else if (p.lse) ((float*)p.lse)[((i64)item.batch * p.heads_q + head(row)) * p.seqlen_q + query(row)] = lse * 0.6931471806f;
  }
};

// Joins what the groups have of an item and writes it; Q of the next item comes into its place. Then a barrier.
DEV void write_out(SharedStorage& s, Rows& rows, const DecodeParams& p, const DecodeItem& item, const DecodeItems& next) {
  const Results results(p, item);
  const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
  const int n = group_idx(), first = part_idx() * kWarpRows;
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    float& sum = rows.sum[r / 2][r % 2];
    sum = sum_of_row(sum);
    if (t == 0) s.sMax[n][first + r * 8 + g] = rows.max[r / 2][r % 2], s.sSum[n][first + r * 8 + g] = sum;
  }
  __syncthreads();
  Chunk rQ[kQChunks];
  if (next.is_valid) fetch_q(rQ, p, next.item);
  #pragma unroll
  for (int r = 0; r < kMTiles * 2; r++) {
    const RowTotal total = total_of(s, first + r * 8 + g);
    const float own = rows.max[r / 2][r % 2];
    const float factor = total.sum == 0.f || own == -infinity(0.f) ? 0.f : exp2_fast(own - total.max) * reciprocal(total.sum);
    #pragma unroll
    for (int i = 0; i < kHeadDimV / 4; i++) rows.rO[r / 2][i / 2][r % 2 * 2 + i % 2] *= factor;
  }
  for (int row = thread_index(); row < kItemRows; row += kThreads)
    if (results.has(row)) results.store_lse(row, total_of(s, row));
  #pragma unroll
  for (int col = 0; col < kHeadDimV; col += kMergeCols) {
    #pragma unroll
    for (int r = 0; r < kMTiles * 2; r++)
      #pragma unroll
      for (int i = 0; i < kMergeCols / 8; i++) {
        float* dst = &s.sO[n][first + r * 8 + g][i * 8 + t * 2];
        const float (&x)[4] = rows.rO[r / 2][col / 8 + i];
        dst[0] = x[r % 2 * 2], dst[1] = x[r % 2 * 2 + 1];
      }
    __syncthreads();
    for (int idx = thread_index(); idx < kItemRows * kMergeCols / 4; idx += kThreads) {
      const int row = idx / (kMergeCols / 4), at = idx % (kMergeCols / 4) * 4;
      if (!results.has(row)) continue;
      float sum[4] = {};
      #pragma unroll
      for (int w = 0; w < kWarpsN; w++)
        #pragma unroll
        for (int i = 0; i < 4; i++) sum[i] += s.sO[w][row][at + i];
      results.store(row, col + at, sum);
    }
    __syncthreads();
  }
  if (next.is_valid) store_q(s, rQ);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) decode_sm80(const DecodeParams p) {
  extern __shared__ __align__(128) unsigned char smem[];
  SharedStorage& s = *(SharedStorage*)smem;
  start_dependents();           // decode_combine finds its parts while these are computed
  const DecodeItems first(p);
  if (threadIdx.x == 0) s.items[0] = first;
  if (threadIdx.x % 32 == 0) s.ahead[threadIdx.x / 32] = first;
  __syncwarp();
  Chunk rQ[kQChunks];           // asked for first: behind all the keys it would come late
  if (first.is_valid) fetch_q(rQ, p, first.item);
  Loader loader(p, s, s.ahead[threadIdx.x / 32]);
  #pragma unroll 1
  for (int stage = 0; stage < kAhead; stage++) loader.load(p, s, stage);
  append<Element>(p);
  store_q(s, rQ);
  __syncthreads();

  const Score<SCORE, float> score(p);
  int stage = 0, turn = 0;
  #pragma unroll 1
  while (s.items[turn].is_valid) {              // it, and its Q, stand in shared memory
    const DecodeItem& item = s.items[turn].item;
    DecodeItems& next = s.items[turn ^ 1];
    if (threadIdx.x < 32) step_items(next, s.items[turn], p);
    QueryRows query;
    #pragma unroll
    for (int d = 0; d < kHeadDim / 16 && kKeepsQ; d++) ldmatrix_x4(query.step[d], QLayout::step(query_lane(s), d * 2));
    Rows rows = {};
    #pragma unroll
    for (int r = 0; r < kMTiles * 2; r++) rows.max[r / 2][r % 2] = -infinity(0.f);
    #pragma unroll 1
    for (int tile = item.begin; tile < item.end; tile++) {
      cp_async_wait<kAhead - 1>();
      sync_group();
      if (kAhead < kStages) loader.load(p, s, stage == 0 ? kStages - 1 : stage - 1);
      attend(rows, query, s, stage, score, p, item, tile);
      if (kAhead == kStages) {
        __syncwarp();
        loader.load(p, s, stage);
      }
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    write_out(s, rows, p, item, next);
    turn ^= 1;
  }
}
