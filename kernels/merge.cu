// Attention to all keys from attention to parts of them.
//
//   outs[i] [batch, seqlen, heads, head_dim_v], lses[i] [batch, heads, seqlen], i < num_parts  ->  out, lse
//
// A warp takes a row of a head, lanes along columns; lane i first has the lse of part i. Heads come fastest, as they lie. Parts
// whose lse is -inf are not read: they have no influence, whatever they hold.
#include "attn/merge.cuh"
#include "attn/params.cuh"
#include "tile/simt.cuh"

constexpr int kThreads = THREADS;
constexpr int kMaxParts = MAX_PARTS;
constexpr int kLoad = VEC_BYTES / sizeof(Element);      // elements a lane loads and stores at once; divides head_dim_v
constexpr int kBatch = 4;                       // loads in flight
static_assert(kMaxParts <= 32, "a lane each");

struct MergeParams {
  const void* outs[kMaxParts];  // [batch, seqlen, heads, head_dim_v] each
  const void* lses[kMaxParts];  // [batch, heads, seqlen] of Real each, contiguous
  void* out;                    // [batch, seqlen, heads, head_dim_v]
  void* lse;                    // [batch, heads, seqlen], contiguous
  Strides outs_strides[kMaxParts];
  Strides out_strides;
  int batch, seqlen, heads, head_dim_v, num_parts;
};

#define MEETS(field) static_assert(__INTADDR__(&((MergeParams*)0)->field) == MERGE_OFFSET_##field, #field)
MEETS(outs); MEETS(lses); MEETS(out); MEETS(lse); MEETS(outs_strides); MEETS(out_strides);
MEETS(batch); MEETS(seqlen); MEETS(heads); MEETS(head_dim_v); MEETS(num_parts);
#undef MEETS
static_assert(sizeof(MergeParams) == MERGE_PARAMS_BYTES, "merge.py disagrees on the size of MergeParams");

// Where a row of a head lies.
struct Row {
  u32 batch, row, head;
  DEV i64 offset(const Strides& s) const { return batch * s.batch + row * s.row + head * s.head; }
};

extern "C" __global__ void __launch_bounds__(kThreads, 4) merge(const MergeParams p) {
  const u32 lane = threadIdx.x % 32, index = blockIdx.x * (kThreads / 32) + threadIdx.x / 32;
  if (index >= (u32)p.batch * p.seqlen * p.heads) return;
  const u32 row_of_all = index / p.heads;
  const Row row = {row_of_all / p.seqlen, row_of_all % p.seqlen, index % p.heads};
  const i64 lse_at = ((i64)row.batch * p.heads + row.head) * p.seqlen + row.row;

  const R lse = lane < p.num_parts ? ((const R*)p.lses[lane])[lse_at] : -infinity(R());
  const u32 saw_keys = __ballot_sync(0xffffffff, lse != -infinity(R()));
  TotalLse<R, true> total;
  total.add(lse);
  total.add_lanes();
  const R weight = total.weight(lse, total.inverse());

  #pragma unroll 1
  for (int first = 0; first < p.head_dim_v; first += 32 * kLoad) {
    const int col = first + lane * kLoad;
    R sum[kLoad] = {};
    #pragma unroll 1
    for (int part = 0; part < p.num_parts; part += kBatch) {
      Vec<Element, kLoad> x[kBatch];
      #pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const bool inside = (saw_keys >> (part + i) & 1) && col < p.head_dim_v;
        const Element* gO = (const Element*)p.outs[part + i] + row.offset(p.outs_strides[part + i]);
        x[i] = inside ? *(const Vec<Element, kLoad>*)(gO + col) : Vec<Element, kLoad>{};
      }
      #pragma unroll
      for (int i = 0; i < kBatch; i++) {
        const R w = __shfl_sync(0xffffffff, weight, part + i);
        #pragma unroll
        for (int e = 0; e < kLoad; e++) sum[e] = fma(w, to_real(x[i].x[e]), sum[e]);
      }
    }
    Vec<Element, kLoad> y;
    #pragma unroll
    for (int e = 0; e < kLoad; e++) from_real(y.x[e], sum[e]);
    if (col < p.head_dim_v) *(Vec<Element, kLoad>*)((Element*)p.out + row.offset(p.out_strides) + col) = y;
  }
  if (lane == 0) ((R*)p.lse)[lse_at] = total.natural_lse();
}
