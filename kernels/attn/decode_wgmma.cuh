// What decoding by warpgroups shares: items of 64 rows, key tiles of 64, of which a warpgroup has S and P in registers; results.
#pragma once
#include "attn/decode.cuh"
#include "attn/poison.cuh"
#include "attn/score.cuh"
#include "attn/softmax.cuh"
#include "ptx/arrive.cuh"
#include "ptx/barrier.cuh"
#include "ptx/dependent.cuh"
#include "ptx/math.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"
#include "tile/warpgroup.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // padded with zeros
constexpr int kHeadDimV = HEAD_DIM_V;
constexpr int kBlockM = BLOCK_M, kBlockN = BLOCK_N;
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT;
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim and kHeadDimV
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address of out
constexpr int kThreads = 384;                   // a warpgroup that loads, two that compute
static_assert(kBlockM == 64 && kBlockN == 64, "rows of a warpgroup; a panel of P");
static_assert(VEC_BYTES == 16, "rows are copied by 16 bytes");

using QLayout = PanelLayout<kBlockM, kHeadDim>;
using KLayout = PanelLayout<kBlockN, kHeadDim>;
using VLayout = PanelLayout<kBlockN, kHeadDimV>;
using HeadScore = Score<SCORE, float>;

// First element of a packed row in q or out.
DEV i64 query_offset(const DecodeParams& p, const Strides& s, const DecodeItem& item, int row) {
  const int group = group_of(p);
  return item.batch * s.batch + row / group * s.row + (item.head_k * group + row % group) * s.head;
}

// ----------------------------------------------------------------------------------------------------------------- computing

using Scores = float[kBlockN / 2];
using Weights = u32[kBlockN / 16][4];

DEV u32 load_shared_word(u32 address) { return *(const u32*)__cvta_shared_to_generic(address); }
DEV int lane_row() { return warp_row() + (int)(thread_index() % 32 / 4); }     // the first of the two

// -inf where masked.
DEV void apply_mask(Scores& rS, const DecodeParams& p, const DecodeItem& item, int tile) {
  const KeyMask mask(p, p.seqlen_q, item.seqlen_k);
  const int lane_key = tile * kBlockN + (int)(thread_index() % 4) * 2, group = group_of(p);
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int query = (item.row_tile * kBlockM + lane_row() + r * 8) / group;
    const int begin = mask.key_begin(query) - lane_key, end = mask.key_end(query) - lane_key;
    #pragma unroll
    for (int i = 0; i < kBlockN / 4; i++) {
      const int key = i / 2 * 8 + i % 2;
      if (key >= end || (kMaskLeft && key < begin)) rS[i / 2 * 4 + r * 2 + i % 2] = -infinity(0.f);
    }
  }
}

template <int kSize> DEV void scale_output(float (&rO)[kSize], const float (&alpha)[2]) {
  #pragma unroll
  for (int i = 0; i < kSize; i++) rO[i] *= alpha[i / 2 % 2];
}

// Starts O += P V, or O = P V, of the columns from `v` on; P in registers.
template <int kSize> DEV void multiply_pv(float (&rO)[kSize], const Weights& rP, u64 v, bool add) {
  multiply_weights<Element, VLayout>(rO, rP, v, add);
}

// ------------------------------------------------------------------------------------------------------------------- results

// Writes the columns from `first_column` on of the 16 rows of a warp, to the outputs or as a part.
template <int kSize>
DEV void write_output(const float (&rO)[kSize], const float (&inverse)[2], const DecodeParams& p, const DecodeItem& item,
                      int first_column) {
  struct alignas(8) Pair { float x, y; };
  const u32 lane = thread_index() % 32;
  // A row that sees no key, or only logits of -inf, is 0, whatever the values are.
  const auto result = [&](int i, int r) { return inverse[r] == 0.f ? 0.f : rO[i] * inverse[r]; };
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row_in_tile = lane_row() + r * 8, row = item.row_tile * kBlockM + row_in_tile;
    const bool inside = row < num_rows(p);
    if (item.slot >= 0) {
      float* gO = (float*)p.partial_out + (item.slot * kBlockM + row_in_tile) * kHeadDimV + first_column + lane % 4 * 2;
      if (!inside) continue;
      #pragma unroll
      for (int i = 0; i < kSize / 4; i++) *(Pair*)(gO + i * 8) = {result(i * 4 + r * 2, r), result(i * 4 + r * 2 + 1, r)};
    } else {
      const int column = first_column + (int)(lane % 4) * 8;
      char* gO = (char*)((Element*)p.out + query_offset(p, p.out_strides, item, row) + column);
      #pragma unroll
      for (int d = 0; d < kSize / 4; d += 4) {
        u32 word[4];
        #pragma unroll
        for (int j = 0; j < 4; j++) {
          const int i = (d + j) * 4 + r * 2;
          word[j] = pack2<Element>(result(i, r), result(i + 1, r));
        }
        const Chunk c = transpose_quad(word, lane % 4);
        const int valid = kWholeHeads ? 16 : (p.head_dim_v - d * 8 - column) * (int)sizeof(Element);
        if constexpr (kWholeHeads && kOutVecBytes == 16) store_global_if(inside, gO + d * 16, c);
        else if (inside) store_chunk<kOutVecBytes>(gO + d * 16, c, valid);
      }
    }
  }
}

// Writes the lse of the rows whose sums over all lanes are `sum`.
DEV void write_lse(const RowStats& rows, const float (&sum)[2], const DecodeParams& p, const DecodeItem& item) {
  if (thread_index() % 4) return;
  const int group = group_of(p), end_row = num_rows(p);
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row_in_tile = lane_row() + r * 8, row = item.row_tile * kBlockM + row_in_tile;
    const float lse = sum[r] == 0.f ? -infinity(0.f) : rows.max[r] + log2f(sum[r]);
    if (row >= end_row) continue;
    if (item.slot >= 0) {
      ((float*)p.partial_lse)[item.slot * kBlockM + row_in_tile] = lse;
    } else if (p.lse) {
      const int head = item.head_k * group + row % group;
      ((float*)p.lse)[((i64)item.batch * p.heads_q + head) * p.seqlen_q + row / group] = lse * 0.6931471806f;
    }
  }
}

// --------------------------------------------------------------------------------------------------------------------- roles

// Warpgroup 0 loads, the others compute. All write new keys and values to the cache: who loads while the last tiles are computed,
// the others while the first ones come.
template <int kLoaderRegisters, int kConsumerRegisters, typename Load, typename Compute>
DEV void run_roles(const DecodeParams& p, Load load, Compute compute) {
  const int warpgroup = uniform(threadIdx.x / 128);
  if (warpgroup == 0) {
    set_fewer_registers<kLoaderRegisters>();
    load();
    append<Element>(p);
  } else {
    set_more_registers<kConsumerRegisters>();
    append<Element>(p);
    compute(warpgroup - 1);
  }
}
