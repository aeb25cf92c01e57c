// After a backward: dq from its sum over key tiles.
//
//   dq_sum, in units of 16 rows by 8 columns (attn/gradient.cuh), * softmax_scale  ->  dq [batch, seqlen_q, heads_q, head_dim]
//
// Or in units of 16 columns by 8 rows, where dQ^T has been computed.
// A warp takes 16 rows and 32 columns of a head. Columns and heads come fastest, as they lie in dq. Rows that no sequence covers,
// or that see no key, are zeros in the sum.
#include "attn/gradient.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

using Element = ElementOf<DTYPE>::type;
using R = Real<Element>;

constexpr int kHeadDim = HEAD_DIM;              // of dq_sum
constexpr bool kTransposed = TRANSPOSED;        // a unit has 16 columns and 8 rows
constexpr int kThreads = THREADS;
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address of dq
struct alignas(16) Lane { R x[4]; };            // of a unit: two columns of row lane / 4, and of the row eight below

// The sequence that a group of rows belongs to: the last that begins at the group or before.
DEV int sequence_of(const BwdParams& p, int group) {
  int at = 0, end = p.batch + 1;                // the rows that no sequence covers are one more
  while (end - at > 1) {
    const int middle = (at + end) / 2;
    if (query_slot(p, middle).first / kDqGroup + middle <= group) at = middle;
    else end = middle;
  }
  return at;
}

// Rows lane / 4 and 8 below, 32 columns; the first `rows` and `cols` exist, of rows the first `used` take part.
template <typename T> DEV void write_rows(T* gDQ, i64 row_stride, Real<T> (&x)[4][4], int rows, int used, int cols) {
  const u32 lane = threadIdx.x % 32, quad = lane % 4;
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int row = lane / 4 + r * 8;
    T* dst = gDQ + row * row_stride;
    #pragma unroll
    for (int i = 0; i < 8; i++)
      if (row >= used) x[i / 2][2 * r + i % 2] = 0;
    if constexpr (sizeof(T) == 2) {
      u32 word[4];
      #pragma unroll
      for (int i = 0; i < 4; i++) word[i] = pack2<T>(x[i][2 * r], x[i][2 * r + 1]);
      const Chunk c = transpose_quad(word, quad);
      if (row < rows) store_chunk<kOutVecBytes>((char*)(dst + quad * 8), c, (cols - (int)quad * 8) * 2);
    } else {
      #pragma unroll
      for (int i = 0; i < 8; i++) {
        const int col = i / 2 * 8 + quad * 2 + i % 2;
        if (row < rows && col < cols) dst[col] = x[i / 2][2 * r + i % 2];
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) bwd_cast(const BwdParams p) {
  constexpr int kParts = kHeadDim / 32;
  const u32 warp = blockIdx.x * (kThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 groups = num_dq_groups(p), part = warp % kParts, head = warp / kParts % p.heads_q;
  const u32 batch_group = warp / kParts / p.heads_q, group = batch_group % groups, dense_batch = batch_group / groups;
  if (dense_batch >= (kVarlen ? 1 : p.batch)) return;
  const int batch = kVarlen ? sequence_of(p, group) : dense_batch;
  const Sequence seq(p, batch);
  const i64 first_group = first_dq_group(p, seq, batch, head);
  const int first_row = (group - (kVarlen ? seq.first_q / kDqGroup + batch : 0)) * kDqGroup, col = part * 32;
  const R* gGroup = (const R*)p.dq_sum + (first_group + first_row / kDqGroup) * (kDqGroup * kHeadDim);
  const Lane* gSum = (const Lane*)(gGroup + dq_index<kHeadDim>(0, col));
  R x[4][4];
  #pragma unroll
  for (int i = 0; i < 16; i++) {
    R sum;
    if (kTransposed) {                          // units of 16 columns by 8 rows, two of them a group
      const int row = lane / 4 + i % 4 / 2 * 8, unit_col = i / 4 * 8 + lane % 4 * 2 + i % 2;
      const R* gUnit = gGroup + ((col + unit_col) / 16 * 2 + row / 8) * 128;
      sum = gUnit[(unit_col % 8 * 4 + row % 8 / 2) * 4 + unit_col % 16 / 8 * 2 + row % 2];
    } else {
      sum = gSum[i / 4 * 32 + lane].x[i % 4];
    }
    x[i / 4][i % 4] = sum * (R)p.softmax_scale;
  }
  write_rows(seq.query_rows((Element*)p.dq, p.dq_strides, head) + first_row * p.dq_strides.row + col, p.dq_strides.row, x,
             seq.rows_q - first_row, seq.seqlen_q - first_row, p.head_dim - col);
}
