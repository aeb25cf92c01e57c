// What the two kernels of a backward of wide heads share: bwd_dkv_sm90 and bwd_dq_sm90, each with its part of the gradients in
// the registers of warpgroups. All operands are tiles of 64 rows, of queries (Q, dO) or keys (K, V).
#pragma once
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
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"
#include "tile/pipeline.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDim = HEAD_DIM;              // of q and k and of v, padded with zeros
constexpr bool kWholeHeads = WHOLE_HEADS;       // head_dim and head_dim_v fill kHeadDim
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address of dq, dk and dv
constexpr bool kMaskLeft = MASK_LEFT, kMaskRight = MASK_RIGHT, kHasMask = kMaskLeft || kMaskRight;

constexpr int kRows = 64;                       // of a tile
constexpr int kStages = 2;
constexpr int kConsumers = 2;                   // warpgroups that compute
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr int kPreparers = 2;                   // warps
constexpr int kSlots = 2;                       // for tiles of the launch: one that is computed, the next
constexpr int kOtherRegisters = 24, kConsumerRegisters = 240;   // all that a block has

using OperandLayout = PanelLayout<kRows, kHeadDim>;
using HeadMask = Mask<kMaskLeft, kMaskRight>;
using HeadScore = Score<SCORE, float>;

struct TmaParams : BwdParams { TensorMap q_map, k_map, v_map, dout_map; };
static_assert(__INTADDR__(&((TmaParams*)0)->q_map) == BWD_TENSOR_MAPS_OFFSET, "launch.py disagrees on TmaParams");

DEV void prefetch_maps(const TmaParams& p) {
  tma_prefetch_map(&p.q_map);
  tma_prefetch_map(&p.k_map);
  tma_prefetch_map(&p.v_map);
  tma_prefetch_map(&p.dout_map);
}

// By one thread: a tile to shared memory, `barrier` counts it; and to the L2 cache, while its place is still taken.
DEV void load_operand(const u8* tile, const TensorMap* map, u64& barrier, int row, int head, int batch) {
  mbarrier_expect(shared_address(&barrier), OperandLayout::kBytes);
  load_tile<OperandLayout>(shared_address(tile), map, shared_address(&barrier), row, head, batch);
}
// The same of one half of its panels: a product begins with the first.
constexpr int kFirstPanels = OperandLayout::kPanels / 2;
template <int kHalf> DEV void load_half(const u8* tile, const TensorMap* map, u64& barrier, int row, int head, int batch) {
  constexpr int kBegin = kHalf ? kFirstPanels : 0, kEnd = kHalf ? OperandLayout::kPanels : kFirstPanels;
  mbarrier_expect(shared_address(&barrier), (kEnd - kBegin) * OperandLayout::kPanelBytes);
  #pragma unroll 1
  for (int i = kBegin; i < kEnd; i++)
    tma_load(shared_address(tile) + i * OperandLayout::kPanelBytes, map, shared_address(&barrier), i * OperandLayout::kPanel,
             row, head, batch);
}
DEV void prefetch_operand(const TensorMap* map, int row, int head, int batch) {
  #pragma unroll 1
  for (int i = 0; i < OperandLayout::kPanels; i++) tma_prefetch(map, i * OperandLayout::kPanel, row, head, batch);
}

// The preparers come last in the first warpgroup.
constexpr int kPreparing = kPreparers * 32;     // threads
DEV u32 preparer() { return thread_index() - (128 - kPreparing); }
DEV void sync_preparers() { barrier_sync(1, kPreparing); }
// Zeros in place of rows from `rows` on: what TMA read there are rows of the next sequence.
DEV void clear_rows(u32 tile, int rows) {
  #pragma unroll 1
  for (u32 at = preparer() * 16; at < OperandLayout::kBytes; at += kPreparing * 16)
    if (OperandLayout::row_at(at) >= rows) store_shared(tile + at, Chunk{});
}

// The consumers take turns to start products: beside the exponentials of one run the products of the other.
DEV void first_turn(int consumer) { if (consumer == 0) barrier_arrive(5, kConsumers * 128); }
DEV void my_turn(int consumer) { barrier_sync(5 + consumer, kConsumers * 128); }
DEV void your_turn(int consumer) { barrier_arrive(6 - consumer, kConsumers * 128); }

// Accumulators of 64 x 64 products, as A operands, and of a gradient of 64 rows.
using Scores = float[kRows / 2];
using Weights = u32[kRows / 16][4];
using Gradient = float[kHeadDim / 2];

DEV u64 descriptor_of(const u8* tile) {
  return wgmma_descriptor<OperandLayout::kSwizzleBytes>(shared_address(tile), OperandLayout::kPanelBytes);
}
// Starts half of a product of the rows of `a` with those of `b`: of their first panels, or of the others.
template <int kHalf> DEV void multiply_rows(Scores& rS, u64 a, u64 b) {
  constexpr int kSteps = OperandLayout::kPanel / 16;
  wgmma_fence();
  #pragma unroll
  for (int d = kHalf ? kFirstPanels * kSteps : 0; d < (kHalf ? kHeadDim / 16 : kFirstPanels * kSteps); d++) {
    const u32 step = d / kSteps * OperandLayout::kPanelBytes + d % kSteps * 32;
    wgmma_ss<Element>(rS, descriptor_step(a, step), descriptor_step(b, step), d > 0);
  }
  wgmma_commit();
}
// Starts the sum of rows of `b` by weights; and that of half of its panels.
DEV void accumulate(Gradient& acc, const Weights& rA, u64 b) {
  wgmma_fence();
  #pragma unroll
  for (int m = 0; m < kRows / 16; m++)
    wgmma_rs<Element>(acc, rA[m], descriptor_step(b, m * 16 * OperandLayout::kSwizzleBytes), true);
  wgmma_commit();
}
template <int kHalf> DEV void accumulate_half(Gradient& acc, const Weights& rA, u64 b) {
  constexpr int kFirst = kFirstPanels * OperandLayout::kPanel / 2, kSize = kHalf ? kHeadDim / 2 - kFirst : kFirst;
  float (&half_acc)[kSize] = *(float (*)[kSize])(acc + (kHalf ? kFirst : 0));
  wgmma_fence();
  #pragma unroll
  for (int m = 0; m < kRows / 16; m++) {
    const u32 step = m * 16 * OperandLayout::kSwizzleBytes + (kHalf ? kFirstPanels * OperandLayout::kPanelBytes : 0);
    wgmma_rs<Element>(half_acc, rA[m], descriptor_step(b, step), true);
  }
  wgmma_commit();
}
DEV void clear(Gradient& acc) {
  #pragma unroll
  for (int i = 0; i < kHeadDim / 2; i++) acc[i] = 0.f;
}
// Accumulators, rounded: A operands.
DEV void pack(Weights& rA, const Scores& rS) {
  #pragma unroll
  for (int i = 0; i < kRows / 4; i++) rA[i / 4][i % 4] = pack2<Element>(rS[2 * i], rS[2 * i + 1]);
}

// The same, converted once: in a loop that has no register to spare it would be done anew each time.
DEV HeadScore kept(HeadScore score) {
  score.scale_log2 = __uint_as_float(opaque(__float_as_uint(score.scale_log2)));
  return score;
}

DEV int warp_row() { return thread_index() % 128 / 32 * 16; }                  // of the consumer's 64
DEV bool speaks() { return thread_index() % 128 == 0; }                         // for its warpgroup
// One arrival a warp, once all its lanes are there.
DEV void arrive_warp(u64& barrier) {
  __syncwarp();
  if (thread_index() % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}
// This lane's two of the eight numbers from `x` on: the columns of an accumulator.
struct alignas(8) Pair { float x[2]; };
DEV Pair lane_pair(const float* x) { return *(const Pair*)(x + thread_index() % 4 * 2); }
