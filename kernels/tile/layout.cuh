// A tile of 16-bit elements in shared memory: rows of kCols, in 16-byte chunks that are permuted inside a row so that the
// eight rows of an ldmatrix matrix lie in eight different bank groups.
#pragma once
#include "ptx/types.cuh"

template <int kCols_>
struct TileLayout {
  static constexpr int kCols = kCols_;
  static constexpr int kChunks = kCols / 8;
  static constexpr int kRowBytes = kCols * 2;
  static_assert(kCols % 32 == 0, "a row is whole 64-byte groups");
  // Rows of whole 128-byte lines permute eight chunks; rows of an odd number of 64-byte groups alternate between the two
  // halves of a line by themselves and permute four.
  static constexpr bool kWholeLines = kChunks % 8 == 0;
  static constexpr int kLine = kWholeLines ? 8 : 4;
  static constexpr int kMask = kLine - 1;

  static DEV int swizzle(int row) { return kWholeLines ? row & 7 : (row >> 1) & 3; }
  // Byte offset of chunk `chunk` of row `row`.
  static DEV u32 offset(int row, int chunk) { return row * kRowBytes + (chunk ^ swizzle(row)) * 16; }
  // From the address of chunk 0 or 1 of a row, in a tile aligned to 128 bytes, to that of the chunk an even number of chunks
  // further on (nothing carries): one xor with a constant once the loop over `chunks` is unrolled.
  static DEV u32 step(u32 address, int chunks) { return (address ^ ((chunks & kMask) * 16)) + (chunks & ~kMask) * 16; }
  // The row that the byte at `offset` belongs to.
  static DEV int row_at(u32 offset) { return offset / kRowBytes; }
};

// The same elements as TMA lays them: panels of kPanel columns, [kCols / kPanel][kRows][kPanel], whose swizzle spans a row of a
// panel. The widest that whole columns allow, unless a product starts in the middle of one.
template <int kRows_, int kCols_, int kPanel_ = kCols_ % 64 == 0 ? 64 : 32>
struct PanelLayout {
  static constexpr int kRows = kRows_, kCols = kCols_, kPanel = kPanel_;
  static constexpr int kPanels = kCols / kPanel;
  static constexpr int kSwizzleBytes = kPanel * 2;
  static constexpr int kPanelBytes = kRows * kSwizzleBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;
  static constexpr int kRowBytes = kCols * 2;
  static constexpr int kChunks = kPanel / 8;
  static_assert(kCols % kPanel == 0, "whole panels");

  static DEV u32 offset(int row, int chunk) {
    const int swizzle = row * kSwizzleBytes >> 7 & (kChunks - 1);       // bits 7 and up of an address change 4 and up
    return chunk / kChunks * kPanelBytes + row * kSwizzleBytes + (chunk % kChunks ^ swizzle) * 16;
  }
  static DEV int row_at(u32 offset) { return offset % kPanelBytes / kSwizzleBytes; }
};
