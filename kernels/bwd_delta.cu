// Before a backward: what it needs to know of each query row, and zeros where it adds.
//
//   out, dout [batch, seqlen_q, heads_q, head_dim_v], lse, dlse [batch, heads_q, seqlen_q]
//     ->  rows: RowFacts{lse in base 2, rowsum(dout * out) - dlse}, dq_sum: zeros, turns: zeros
//
// kLanes lanes of a warp take a row of a head. Heads come fastest, as they lie: blocks then read whole lines one after the
// other. Packed batches are one long sequence here; rows that no sequence covers are treated alike, as nothing reads them.
#include "attn/gradient.cuh"
#include "ptx/dependent.cuh"
#include "ptx/math.cuh"

using Element = ElementOf<DTYPE>::type;
using R = Real<Element>;

constexpr int kHeadDim = HEAD_DIM;              // of dq_sum
constexpr int kLanes = LANES;                   // a power of two, at most 32
constexpr int kThreads = THREADS;
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a lane loads at once; divides head_dim_v
constexpr int kPart = 16 / sizeof(Element);     // neighbours of a lane: at any alignment a sum is then made in the same order
constexpr int kZeros = 16 / sizeof(R);          // that a lane stores at once

struct alignas(VEC_BYTES) Elements { Element x[kLoad]; };
struct alignas(16) Zeros { R x[kZeros]; };

extern "C" __global__ void __launch_bounds__(kThreads) bwd_delta(const BwdParams p) {
  start_dependents();           // blocks of the next kernel are there when the last of these ends
  if (DETERMINISTIC || COUNTS_TILES) {
    const u32 count = (kHeadDim == 0 ? 2 : 1) + (DETERMINISTIC ? (kVarlen ? 1 : p.batch) * p.heads_q * p.num_query_tiles : 0);
    for (u32 i = blockIdx.x * kThreads + threadIdx.x; i < count; i += gridDim.x * kThreads) p.turns[i] = 0;
  }
  const i64 sums = (kVarlen ? 1 : p.batch) * p.heads_q * num_dq_groups(p) * (kDqGroup * kHeadDim / kZeros);
  #pragma unroll 4
  for (i64 i = (i64)blockIdx.x * kThreads + threadIdx.x; i < sums; i += (i64)gridDim.x * kThreads) ((Zeros*)p.dq_sum)[i] = {};

  if (p.heads_q == 0 || p.seqlen_q == 0) return;
  const u32 lane = threadIdx.x % kLanes, row_head = blockIdx.x * (kThreads / kLanes) + threadIdx.x / kLanes;
  const u32 all_row = row_head / p.heads_q, head = row_head - all_row * p.heads_q;
  const u32 batch = kVarlen ? 0 : all_row / p.seqlen_q, row = all_row - batch * p.seqlen_q;
  const bool inside = all_row < (u32)(kVarlen ? p.seqlen_q : p.batch * p.seqlen_q);     // else it only joins the shuffles
  const i64 index = ((i64)batch * p.heads_q + head) * p.seqlen_q + row;
  const Strides &so = p.out_strides, &sd = p.dout_strides;
  const Element* gOut = (const Element*)p.out + batch * so.batch + row * so.row + head * so.head;
  const Element* gDOut = (const Element*)p.dout + batch * sd.batch + row * sd.row + head * sd.head;

  const bool has_facts = inside && lane == 0;
  const R lse = has_facts ? ((const R*)p.lse)[index] : (R)0;
  const R dlse = has_facts && p.dlse ? ((const R*)p.dlse)[index] : (R)0;
  R delta = 0;
  #pragma unroll 1
  for (int first = lane * kPart; inside && first < p.head_dim_v; first += kLanes * kPart) {
    Elements out[kPart / kLoad], dout[kPart / kLoad];
    #pragma unroll
    for (int i = 0; i < kPart / kLoad; i++) {
      const int col = first + i * kLoad;
      out[i] = col < p.head_dim_v ? *(const Elements*)(gOut + col) : Elements{};
      dout[i] = col < p.head_dim_v ? *(const Elements*)(gDOut + col) : Elements{};
    }
    #pragma unroll
    for (int i = 0; i < kPart; i++)
      delta = fma(to_real(dout[i / kLoad].x[i % kLoad]), to_real(out[i / kLoad].x[i % kLoad]), delta);
  }
  #pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(0xffffffff, delta, distance);

  if (has_facts) {
    const bool is_empty = lse == -infinity(R());
    RowFacts<R> facts;
    facts.lse_log2 = is_empty ? infinity(R()) : lse * (R)1.44269504088896340736;
    facts.delta = is_empty ? (R)0 : delta - dlse;
    ((RowFacts<R>*)p.rows)[index] = facts;
  }
}
