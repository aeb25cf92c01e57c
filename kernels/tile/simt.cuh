// Products by plain multiply-add: how warps and lanes share one, and how its operands come to shared memory.
#pragma once
#include "ptx/memory.cuh"

using Element = ElementOf<DTYPE>::type;
using R = Real<Element>;                        // of every product, sum and tile in shared memory
template <typename T, int kSize> struct alignas(sizeof(T) * kSize) Vec { T x[kSize]; };
DEV constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int kVec = 16 / sizeof(R);            // elements of a 16-byte read of shared memory

// A warp is 4 lanes along the rows of a product by 8 along its columns. Rows go by lane bits 0 and 4, columns by bits 1 to 3:
// in every 16-byte read neighbouring lanes then share an address, which halves the cost of the read.
constexpr int kLanesM = 4, kLanesN = 8;
DEV int lane_m(u32 thread) { return (thread & 1) | (thread >> 3 & 2); }
DEV int lane_n(u32 thread) { return thread >> 1 & 7; }

// A product of kM x kN among kWarps_ warps, split so that a lane's tile, kRows x kCols, is as square as can be: the fewest reads
// for its multiply-adds. kVecN neighbouring columns, and up to kVecM neighbouring rows, go to the same lane.
template <int kWarps_, int kM, int kN, int kVecM, int kVecN>
struct Split {
  static DEV constexpr int choose() {
    int best = 0, reads = 1 << 30;
    for (int w = kWarps_; w >= 1; w /= 2) {
      const int rows = kM / (w * kLanesM), cols = kN / (kWarps_ / w * kLanesN);
      if (kM % (w * kLanesM) || kN % (kWarps_ / w * kLanesN * kVecN) || rows + cols >= reads) continue;
      best = w, reads = rows + cols;
    }
    return best;
  }
  static constexpr int kWarpsM = choose(), kWarpsN = kWarps_ / kWarpsM;
  static constexpr int kRows = kM / (kWarpsM * kLanesM), kCols = kN / (kWarpsN * kLanesN);
  static constexpr int kRowVec = kRows % kVecM == 0 ? kVecM : kRows % 2 == 0 && kVecM > 1 ? 2 : 1;
  static constexpr int kColVec = kVecN;
  // Row and column of a lane's first element, and from there to those of element i, j. Computed where they are used: kept for
  // all products, they would cost registers.
  static DEV int row() {
    const u32 thread = thread_index();
    return thread / 32 / kWarpsN * (kM / kWarpsM) + lane_m(thread) * kRowVec;
  }
  static DEV int col() {
    const u32 thread = thread_index();
    return thread / 32 % kWarpsN * (kN / kWarpsN) + lane_n(thread) * kColVec;
  }
  static DEV constexpr int row_step(int i) { return i / kRowVec * (kLanesM * kRowVec) + i % kRowVec; }
  static DEV constexpr int col_step(int j) { return j / kColVec * (kLanesN * kColVec) + j % kColVec; }
  using Tile = R[kRows][kCols];
};

// `n` of 0 .. count - 1, to and fro: where one line ends the next begins, so that each multiply-add shares an operand with
// the one before, which the reuse cache keeps: three new ones would take two cycles to read.
DEV constexpr int turn(int n, int count, int line) { return line % 2 ? count - 1 - n : n; }

template <int kSize> DEV Vec<R, kSize> load_vec(const R* src) { return *(const Vec<R, kSize>*)src; }

// Pointers in the three below are a lane's own. `seen`, in tiles that are partly masked, is -1 where x must not enter: neither it
// nor what it would be multiplied by, as 0 * y is NaN where y is NaN or Inf.

// sum += X Y^T: rows of X and of Y, kPitch apart, over kDepth columns.
template <typename Split, int kDepth, int kPitch> DEV void multiply_abt(typename Split::Tile& sum, const R* x, const R* y) {
  #pragma unroll 1
  for (int d = 0; d < kDepth; d += kVec) {
    Vec<R, kVec> rY[Split::kCols];
    #pragma unroll
    for (int j = 0; j < Split::kCols; j++) rY[j] = load_vec<kVec>(y + Split::col_step(j) * kPitch + d);
    #pragma unroll
    for (int i = 0; i < Split::kRows; i++) {
      const Vec<R, kVec> rX = load_vec<kVec>(x + Split::row_step(i) * kPitch + d);
      #pragma unroll
      for (int n = 0; n < kVec * Split::kCols; n++) {
        const int e = n / Split::kCols, j = turn(n % Split::kCols, Split::kCols, e);
        sum[i][j] = fma(rX.x[e], rY[j].x[e], sum[i][j]);
      }
    }
  }
}

// sum += X^T Y: columns of X, rows of Y, over kDepth rows of both.
template <typename Split, bool kPartial, int kDepth, int kPitchX, int kPitchY>
DEV void multiply_atb(typename Split::Tile& sum, const R* x, const R* seen, const R* y) {
  constexpr int kRowVec = Split::kRowVec;
  #pragma unroll (kVec / 2)
  for (int k = 0; k < kDepth; k++) {
    Vec<R, kVec> rY[Split::kCols / kVec];
    Vec<R, kRowVec> rX[Split::kRows / kRowVec], rSeen[Split::kRows / kRowVec];
    #pragma unroll
    for (int j = 0; j < Split::kCols; j += kVec) rY[j / kVec] = load_vec<kVec>(y + k * kPitchY + Split::col_step(j));
    #pragma unroll
    for (int i = 0; i < Split::kRows; i += kRowVec) {
      rX[i / kRowVec] = load_vec<kRowVec>(x + k * kPitchX + Split::row_step(i));
      if (kPartial) rSeen[i / kRowVec] = load_vec<kRowVec>(seen + k * kPitchX + Split::row_step(i));
    }
    #pragma unroll
    for (int i = 0; i < Split::kRows; i++) {
      if (kPartial && rSeen[i / kRowVec].x[i % kRowVec] < 0) continue;
      #pragma unroll
      for (int n = 0; n < Split::kCols; n++) {
        const int j = turn(n, Split::kCols, i);
        sum[i][j] = fma(rX[i / kRowVec].x[i % kRowVec], rY[j / kVec].x[j % kVec], sum[i][j]);
      }
    }
  }
}

// sum += X Y: rows of X, columns of Y, over kDepth columns of X, rows of Y.
template <typename Split, bool kPartial, int kDepth, int kPitchX, int kPitchY>
DEV void multiply_ab(typename Split::Tile& sum, const R* x, const R* seen, const R* y) {
  #pragma unroll 1
  for (int k = 0; k < kDepth; k += kVec) {
    Vec<R, kVec> rY[kVec][Split::kCols / kVec];
    #pragma unroll
    for (int e = 0; e < kVec; e++)
      #pragma unroll
      for (int j = 0; j < Split::kCols; j += kVec) rY[e][j / kVec] = load_vec<kVec>(y + (k + e) * kPitchY + Split::col_step(j));
    #pragma unroll
    for (int i = 0; i < Split::kRows; i++) {
      const Vec<R, kVec> rX = load_vec<kVec>(x + Split::row_step(i) * kPitchX + k);
      Vec<R, kVec> rSeen;
      if (kPartial) rSeen = load_vec<kVec>(seen + Split::row_step(i) * kPitchX + k);
      #pragma unroll
      for (int e = 0; e < kVec; e++) {
        if (kPartial && rSeen.x[e] < 0) continue;
        #pragma unroll
        for (int n = 0; n < Split::kCols; n++) {
          const int j = turn(n, Split::kCols, e);
          sum[i][j] = fma(rX.x[e], rY[e][j / kVec].x[j % kVec], sum[i][j]);
        }
      }
    }
  }
}

// Converts and writes neighbouring elements to shared memory, 16 bytes at a time.
template <int kLoad> DEV void store_converted(R* dst, const Vec<Element, kLoad>& x) {
  constexpr int kSize = kLoad < kVec ? kLoad : kVec;
  #pragma unroll
  for (int i = 0; i < kLoad; i += kSize) {
    Vec<R, kSize> y;
    #pragma unroll
    for (int j = 0; j < kSize; j++) y.x[j] = to_real(x.x[i + j]);
    *(Vec<R, kSize>*)(dst + i) = y;
  }
}

// kCount rows of kColumns, kPitch apart, from `src` to `dst`, kLoad elements at a time, by kThreads threads. Rows >= `rows` and
// columns >= `cols` become zeros. Asynchronous where the hardware can and nothing is converted, else finished on return.
template <int kThreads, int kCount, int kColumns, int kPitch, int kLoad>
DEV void load_rows(R* dst, const Element* src, i64 row_stride, int rows, int cols) {
  constexpr bool kAsync = kHasCpAsync && sizeof(Element) == sizeof(R);
  constexpr int kVecs = kColumns / kLoad, kAcross = kVecs <= kThreads ? kVecs : 32;        // loads side by side in a row
  constexpr int kRowsAtOnce = kThreads / kAcross, kBatch = 4;                              // kBatch loads in flight
  static_assert(kColumns % kLoad == 0 && kVecs % kAcross == 0, "whole loads");
  const int thread = thread_index(), first_col = thread % kAcross * kLoad, first = thread / kAcross;
  if (kThreads % kAcross && first >= kRowsAtOnce) return;
  #pragma unroll 1
  for (int col = first_col; col < kColumns; col += kAcross * kLoad) {
    const Element* from = src + first * row_stride + col;
    R* to = dst + first * kPitch + col;
    const int num_rows = col < cols ? rows - first : 0;
    #pragma unroll (kAsync ? 8 : 1)
    for (int at = 0; at < kCount; at += kBatch * kRowsAtOnce) {
      Vec<Element, kLoad> x[kBatch];
      #pragma unroll
      for (int i = 0; i < kBatch; i++, from += kRowsAtOnce * row_stride) {
        const int step = at + i * kRowsAtOnce;
        const bool inside = step < num_rows;
        if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
        if constexpr (kAsync) cp_async<sizeof(x[0])>(shared_address(to + step * kPitch), from, inside ? sizeof(x[0]) : 0);
        else x[i] = inside ? *(const Vec<Element, kLoad>*)from : Vec<Element, kLoad>{};
      }
      #pragma unroll
      for (int i = 0; !kAsync && i < kBatch; i++) {
        const int step = at + i * kRowsAtOnce;
        if (kCount % kRowsAtOnce == 0 ? step >= kCount : first + step >= kCount) continue;
        store_converted<kLoad>(to + step * kPitch, x[i]);
      }
    }
  }
}
