// A 16 x 16 piece of a tile in the registers of a warp: as two accumulators of mma, as its A operand, and in shared memory.
#pragma once
#include "ptx/mma_sm80.cuh"
#include "tile/layout.cuh"

// Where lane `lane` points for ldmatrix_x4 in the 16 x 16 piece at row 0, chunk 0 of a tile. A as it lies, or B of which a row
// of the tile is a row of k (ldmatrix_x4_trans): registers go down 16 rows, then right.
template <typename Layout> DEV u32 piece_down(u32 tile, u32 lane) { return tile + Layout::offset(lane % 16, lane / 16); }
// B of which a row of the tile is a column, or A transposed (ldmatrix_x4_trans): registers go right, then down.
template <typename Layout> DEV u32 piece_right(u32 tile, u32 lane) {
  return tile + Layout::offset(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// Two neighbouring accumulators, 16 x 8 each, rounded: the A operand, of k 16.
template <typename T> DEV void pack_fragment(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack2<T>(left[0], left[1]);
  a[1] = pack2<T>(left[2], left[3]);
  a[2] = pack2<T>(right[0], right[1]);
  a[3] = pack2<T>(right[2], right[3]);
}

// That operand to rows `row`.. and chunks `chunk`, `chunk` + 1 (even) of a tile.
template <typename Layout> DEV void store_fragment(u32 tile, int row, int chunk, const u32 (&a)[4]) {
  const u32 lane = thread_index() % 32;
  if constexpr (kHasStmatrix) {
    stmatrix_x4(tile + Layout::offset(row + lane % 16, chunk + lane / 16), a);
  } else {
    #pragma unroll
    for (int i = 0; i < 4; i++)
      store_shared(tile + Layout::offset(row + i % 2 * 8 + lane / 4, chunk + i / 2) + lane % 4 * 4, a[i]);
  }
}

// Four lanes hold four words each, word i of lane t being item t of chunk i. Afterwards lane t has all of chunk t.
DEV Chunk transpose_quad(u32 (&word)[4], u32 t) {
  #pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2)         // lanes that differ in `bit` exchange what belongs to each other's half
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      if (i & bit) continue;
      const bool upper = t & bit;
      const u32 other = __shfl_xor_sync(0xffffffff, upper ? word[i] : word[i | bit], bit);
      if (upper) word[i] = other;
      else word[i | bit] = other;
    }
  return {{word[0], word[1], word[2], word[3]}};
}
