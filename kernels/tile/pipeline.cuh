// Tiles that TMA copies while others are used.
#pragma once
#include "ptx/tma.cuh"
#include "tile/layout.cuh"

// A stage of a ring and the parity of its phase.
template <int kSize> struct Ring {
  u32 stage = 0, phase = 0;
  DEV void next() { if (++stage == kSize) stage = 0, phase ^= 1; }
};

// Starts copying a tile that lies as a PanelLayout; `barrier` counts its bytes.
template <typename Layout> DEV void load_tile(u32 dst, const TensorMap* map, u32 barrier, int row, int head, int batch) {
  #pragma unroll 1
  for (int i = 0; i < Layout::kPanels; i++)
    tma_load(dst + i * Layout::kPanelBytes, map, barrier, i * Layout::kPanel, row, head, batch);
}
// Asks for one to come into the L2 cache.
template <typename Layout> DEV void prefetch_tile(const TensorMap* map, int row, int head, int batch) {
  #pragma unroll 1
  for (int i = 0; i < Layout::kPanels; i++) tma_prefetch(map, i * Layout::kPanel, row, head, batch);
}
