// As decode_combine, behind decode_sm90, whose outputs of a part are up to 128 KiB: too many for one block.
//
//   partial_out [slots, 2, HEAD_DIM_V / 16, 128, 4], partial_lse [slots, BLOCK_M]  ->  out, lse
//
// Outputs of parts lie as the threads of its consumers had them: number i of four that thread t of a half of the columns had at
// n is of row t / 32 * 16 + t % 32 / 4 + i / 2 * 8, column n * 8 + t % 4 * 2 + i % 2 of the half.
// A border between two shares (FIXED_SPLITS: an item) has kBlocks blocks; which parts there are, the block before the border has
// told. Their warps, and those of the other borders of the same item, take pieces of 16 rows by 32 columns in turns. Outputs of
// kBatch parts are on their way together, the first before it is known what they weigh. Sums are made in the order of the parts.
// Who has read a part is the only one, and the last: nothing of it goes to memory, which the next call would wait for.
#include "attn/merge.cuh"
#include "attn/parts_told.cuh"
#include "ptx/dependent.cuh"
#include "ptx/discard.cuh"
#include "tile/copy.cuh"
#include "tile/fragment.cuh"

using Element = ElementOf<DTYPE>::type;

constexpr int kHeadDimV = HEAD_DIM_V;           // padded: of partial_out
constexpr int kThreads = THREADS, kWarps = kThreads / 32;
constexpr int kBlocks = BLOCKS;                 // of a border
constexpr int kOutVecBytes = OUT_VEC_BYTES;     // divides every address and every row of out
constexpr int kVecs = 4;                        // of four numbers, of a lane in a piece
constexpr int kPieces = kHeadDimV / 32;         // beside one another
constexpr int kBatch = 4;
constexpr int kResident = kFixedSplits ? 1 : 2; // blocks of a multiprocessor: the blocks of all borders are there at once
static_assert(kThreads == 4 * kItemRows && kItemRows == 64, "four threads a row");

struct alignas(16) Four { float x[4]; };
struct SharedStorage { float max[kItemRows], inverse[kItemRows]; };     // what a part weighs: exp2(lse - max) * inverse

struct Piece {
  int row, columns, column;     // first row, which columns, the first of them
  DEV Piece(int i) : row(i / kPieces * 16), columns(i % kPieces), column(columns * 32) {}
  DEV i64 offset() const { return (i64)(columns * kVecs) * 512 + row / 16 * 128 + threadIdx.x % 32 * 4; }
};

// The outputs of parts `from` and behind, and their lse; where there are none, of no weight.
DEV void load_parts(Four (&x)[kBatch][kVecs], float (&lse)[kBatch][2], const DecodeParams& p, const Parts& parts,
                    const Piece& piece, int from) {
  #pragma unroll
  for (int j = 0; j < kBatch; j++) {
    const bool inside = from + j < parts.count;
    const i64 slot = inside ? parts.slot(p, from + j) : 0;
    #pragma unroll
    for (int r = 0; r < 2; r++)
      lse[j][r] = inside ? ((const float*)p.partial_lse)[slot * kItemRows + piece.row + threadIdx.x % 32 / 4 + r * 8]
                         : -infinity(0.f);
    const float* from_part = (const float*)p.partial_out + slot * (kItemRows * kHeadDimV) + piece.offset();
    #pragma unroll
    for (int i = 0; i < kVecs; i++) x[j][i] = inside ? *(const Four*)(from_part + i * 512) : Four{};
  }
}

// What the parts of a thread's row weigh, to shared memory, four threads a row; the lse of all, if this block has the row's.
DEV void weigh(SharedStorage& s, const DecodeParams& p, const Parts& parts, int rows) {
  const int row = threadIdx.x / 4;
  TotalLse<float, false> own;
  if (row < rows)
    #pragma unroll 4
    for (int part = threadIdx.x % 4; part < parts.count; part += 4)
      own.add(((const float*)p.partial_lse)[parts.slot(p, part) * kItemRows + row]);
  TotalLse<float, false> total = own;
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) total.max = fmaxf(total.max, __shfl_xor_sync(0xffffffff, total.max, step));
  total.sum *= total.below_max(own.max);
  #pragma unroll
  for (int step = 1; step < 4; step *= 2) total.sum += __shfl_xor_sync(0xffffffff, total.sum, step);
  if (threadIdx.x % 4) return;
  s.max[row] = total.max == -infinity(0.f) ? 0.f : total.max;
  s.inverse[row] = total.inverse();
  if (p.lse && row < rows && blockIdx.x % kBlocks == 0 && row % parts.shares == parts.share) {
    const int group = group_of(p), r = parts.row_tile * kItemRows + row, head = parts.head_k * group + r % group;
    ((float*)p.lse)[((i64)parts.batch * p.heads_q + head) * p.seqlen_q + r / group] = total.natural_lse();
  }
}

// What load_parts has read of them: lines of 128 bytes that are no one else's, if the workspace is aligned to them.
DEV void drop_parts(const DecodeParams& p, const Parts& parts, const Piece& piece, int from) {
  if ((u64)p.partial_out % 128) return;
  __syncwarp();
  const int lane = threadIdx.x % 32, line = lane % 16;          // four of them: four numbers of each lane
  #pragma unroll
  for (int j = lane / 16; j < kBatch; j += 2)
    if (from + j < parts.count)
      discard((float*)p.partial_out + parts.slot(p, from + j) * (kItemRows * kHeadDimV) +
              (piece.columns * kVecs + line / 4) * 512 + piece.row / 16 * 128 + line % 4 * 32);
}

// Joins a piece, of which `x` and `lse` are the first parts, by a warp.
DEV void join(Four (&x)[kBatch][kVecs], float (&lse)[kBatch][2], const SharedStorage& s, const DecodeParams& p,
              const Parts& parts, const Piece& piece) {
  const u32 lane = threadIdx.x % 32;
  Four sum[kVecs] = {};
  #pragma unroll 1
  for (int from = 0; from < parts.count;) {
    #pragma unroll
    for (int j = 0; j < kBatch; j++) {
      #pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = piece.row + lane / 4 + r * 8;
        const float weight = exp2_fast(lse[j][r] - s.max[row]) * s.inverse[row];
        #pragma unroll
        for (int i = 0; i < kVecs; i++)
          #pragma unroll
          for (int e = r * 2; e < r * 2 + 2; e++) sum[i].x[e] = fmaf(weight, x[j][i].x[e], sum[i].x[e]);
      }
    }
    from += kBatch;
    if (from < parts.count) load_parts(x, lse, p, parts, piece, from);
    drop_parts(p, parts, piece, from - kBatch);
  }
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    const int group = group_of(p), row = parts.row_tile * kItemRows + piece.row + lane / 4 + r * 8, query = row / group;
    const int head = parts.head_k * group + row % group, column = piece.column + lane % 4 * 8;
    u32 word[kVecs];
    #pragma unroll
    for (int i = 0; i < kVecs; i++) word[i] = pack2<Element>(sum[i].x[r * 2], sum[i].x[r * 2 + 1]);
    const Chunk c = transpose_quad(word, lane % 4);
    Element* gO = (Element*)p.out + parts.batch * p.out_strides.batch + query * p.out_strides.row + head * p.out_strides.head;
    if (row < num_rows(p)) store_chunk<kOutVecBytes>((char*)(gO + column), c, (p.head_dim_v - column) * (int)sizeof(Element));
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, kResident) decode_combine_wide(const DecodeParams p) {
  __shared__ SharedStorage s;
  Parts parts;
  if constexpr (kFixedSplits) {
    __threadfence();            // lengths are what they are now, not what the L1 may have of them from an earlier kernel
    parts = find_parts<kBlocks>(p);
  }
  wait_for_kernel_before();     // whoever has nothing to do, too: else this kernel might end before that one
  if constexpr (!kFixedSplits) parts = *told_parts(p, blockIdx.x / kBlocks);
  if (parts.count <= 1) return;
  const int rows = min(kItemRows, num_rows(p) - parts.row_tile * kItemRows), pieces = (rows + 15) / 16 * kPieces;
  const int warp = uniform(threadIdx.x / 32), step = kBlocks * kWarps * parts.shares;
  // The first pieces are the first warps' of all blocks: there may be fewer than warps.
  int i = (warp * kBlocks + (int)blockIdx.x % kBlocks) * parts.shares + parts.share;
  Four x[kBatch][kVecs];
  float lse[kBatch][2];
  if (i < pieces) load_parts(x, lse, p, parts, Piece(i), 0);
  weigh(s, p, parts, rows);
  __syncthreads();
  #pragma unroll 1
  while (i < pieces) {
    join(x, lse, s, p, parts, Piece(i));
    i += step;
    if (i < pieces) load_parts(x, lse, p, parts, Piece(i), 0);
  }
}
