// Rows of 16-bit elements from global to shared memory, at any alignment.
#pragma once
#include "ptx/memory.cuh"
#include "tile/layout.cuh"

// The chunk at `src`, of which the first `valid` bytes exist and the rest become zeros. kVecBytes divides every address.
template <int kVecBytes> DEV Chunk load_chunk(const char* src, int valid) {
  Chunk c = {};
  if (kVecBytes == 16 && valid == 16) {
    c = *(const Chunk*)src;
  } else {
    #pragma unroll
    for (int i = 0; i < 8; i++)
      if (2 * i < valid) c.word[i / 2] |= (u32)((const u16*)src)[i] << (i % 2 * 16);
  }
  return c;
}

// A tile of kRows rows by kThreads threads from `src` to `dst` (128-byte aligned). Rows >= `rows` and columns >= `cols`
// become zeros; kWholeCols, kWholeRows: there are none. Asynchronous where the hardware and the alignment allow it (then
// commit and wait), else finished on return. A thread keeps its chunk of a line and steps over the lines of a row and over
// rows, so that an address costs one addition a row.
template <typename Layout, int kRows, int kThreads, int kVecBytes, bool kWholeCols, bool kWholeRows, typename T>
DEV void copy_rows(u32 dst, const T* src, i64 row_stride, int rows, int cols, u32 thread) {
  constexpr int kLine = Layout::kLine;                          // chunks
  constexpr int kStep = kThreads / kLine;                       // rows
  constexpr bool kAsync = kHasCpAsync && kVecBytes >= 4;
  constexpr int kBatch = kAsync ? 1 : Layout::kChunks / kLine;  // loads in flight before the first store
  static_assert(kRows % kStep == 0, "every thread copies as many chunks");
  const int first_row = thread / kLine, first_chunk = thread % kLine;
  const char* line = (const char*)(src + first_row * row_stride + first_chunk * 8);
  #pragma unroll
  for (int row = 0; row < kRows; row += kStep, line += kStep * row_stride * (i64)sizeof(T)) {
    const bool inside = kWholeRows || first_row + row < rows;
    #pragma unroll
    for (int first = 0; first < Layout::kChunks / kLine; first += kBatch) {
      Chunk chunks[kBatch];
      #pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const int chunk = first_chunk + (first + i) * kLine;
        const int valid = !inside ? 0 : kWholeCols ? 16 : min(max(cols - chunk * 8, 0), 8) * 2;
        const char* from = line + (first + i) * kLine * 16;
        if constexpr (kAsync) {
          #pragma unroll
          for (int at = 0; at < 16; at += kVecBytes)
            cp_async<kVecBytes>(dst + Layout::offset(first_row + row, chunk) + at, from + at, min(max(valid - at, 0), kVecBytes));
        } else {
          chunks[i] = load_chunk<kVecBytes>(from, valid);
        }
      }
      if constexpr (!kAsync) {
        #pragma unroll
        for (int i = 0; i < kBatch; i++)
          store_shared(dst + Layout::offset(first_row + row, first_chunk + (first + i) * kLine), chunks[i]);
      }
    }
  }
}

// The first `valid` bytes of a chunk (negative: none) to global memory; kVecBytes divides the address.
template <int kVecBytes> DEV void store_chunk(char* dst, const Chunk& c, int valid) {
  if (kVecBytes == 16 && valid >= 16) {
    *(Chunk*)dst = c;
  } else {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
      if (kVecBytes >= 4 && 4 * i + 4 <= valid) {
        ((u32*)dst)[i] = c.word[i];
      } else {
        if (4 * i < valid) ((u16*)dst)[2 * i] = (u16)c.word[i];
        if (4 * i + 2 < valid) ((u16*)dst)[2 * i + 1] = (u16)(c.word[i] >> 16);
      }
    }
  }
}
