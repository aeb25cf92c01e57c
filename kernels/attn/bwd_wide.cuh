// What the two kernels of a backward of wide heads share: bwd_dkv_sm90 and bwd_dq_sm90, each with its part of the gradients in
// the registers of warpgroups. All operands are tiles of 64 rows, of queries (Q, dO) or keys (K, V). Each starts while the kernel
// before it ends; of a dense batch the second computes beside the last tiles of the first.
#pragma once
#include "attn/bwd_wgmma.cuh"
#include "ptx/dependent.cuh"

constexpr int kRows = 64;                       // of a tile
constexpr int kStages = 2;

using OperandLayout = PanelLayout<kRows, kHeadDim>;

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

// Accumulators of 64 x 64 products, and as A operands.
using Scores = float[kRows / 2];
using Weights = u32[kRows / 16][4];

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
DEV void accumulate(Gradient& acc, const Weights& rA, u64 b) { multiply_weights<Element, OperandLayout>(acc, rA, b, true); }
template <int kHalf> DEV void accumulate_half(Gradient& acc, const Weights& rA, u64 b) {
  constexpr int kFirst = kFirstPanels * OperandLayout::kPanel / 2, kSize = kHalf ? kHeadDim / 2 - kFirst : kFirst;
  float (&half_acc)[kSize] = *(float (*)[kSize])(acc + (kHalf ? kFirst : 0));
  constexpr u32 kFirstByte = kHalf ? kFirstPanels * OperandLayout::kPanelBytes : 0;
  multiply_weights<Element, OperandLayout>(half_acc, rA, descriptor_step(b, kFirstByte), true);
}

// Logits with a scale that is converted once: in a loop that has no register to spare it would be done anew each time.
DEV HeadScore kept(HeadScore score) {
  score.scale_log2 = __uint_as_float(opaque(__float_as_uint(score.scale_log2)));
  return score;
}
