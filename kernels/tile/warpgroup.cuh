// A warpgroup that computes: 64 rows of accumulators, of which a warp has 16 and a lane two, eight apart (ptx/wgmma.cuh).
#pragma once
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"

DEV int warp_row() { return (int)(thread_index() % 128 / 32) * 16; }            // the first of this warp's
DEV bool speaks() { return thread_index() % 128 == 0; }                         // for its warpgroup
// One arrival a warp, once all its lanes are there.
DEV void arrive_warp(u64& barrier) {
  __syncwarp();
  if (thread_index() % 32 == 0) mbarrier_arrive(shared_address(&barrier));
}

// Of a tile that lies as a PanelLayout; from a multiple of eight rows on.
template <typename Layout> DEV u64 descriptor_of(u32 tile) {
  return wgmma_descriptor<Layout::kSwizzleBytes>(tile, Layout::kPanelBytes);
}
template <typename Layout> DEV u64 descriptor_of(const u8* tile, int first_row = 0) {
  return descriptor_of<Layout>(shared_address(tile) + first_row * Layout::kSwizzleBytes);
}

// Accumulators, rounded: A operands.
template <typename T, int kSize> DEV void pack(u32 (&a)[kSize / 8][4], const float (&d)[kSize]) {
  #pragma unroll
  for (int i = 0; i < kSize / 2; i++) a[i / 4][i % 4] = pack2<T>(d[2 * i], d[2 * i + 1]);
}

// Starts d = a b, or += where `add`: the rows of a tile, from `b` on, by weights.
template <typename T, typename Layout, int kSize, int kSteps>
DEV void multiply_weights(float (&d)[kSize], const u32 (&a)[kSteps][4], u64 b, bool add) {
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < kSteps; i++) wgmma_rs<T>(d, a[i], descriptor_step(b, i * 16 * Layout::kSwizzleBytes), i > 0 || add);
  wgmma_commit();
}
