// After a decoding kernel, and beside its end: the items of which several blocks have a part.
//
//   partial_out [slots, BLOCK_M, HEAD_DIM_V], partial_lse [slots, BLOCK_M]  ->  out, lse
//
// A block finds the item that the border between two shares splits (FIXED_SPLITS: its own item). All that have a border of the
// same item share its tasks: a task is a row, and of it the columns of a warp. Where a block has fewer tasks than warps,
// several take one, each every so many of its parts, and then add up. Latency is what counts: outputs of parts are on their
// way, kBatch at a time, before it is known what they weigh. Sums are made in the same order every time.
#include "attn/merge.cuh"
#include "attn/parts.cuh"
#include "ptx/dependent.cuh"
#include "tile/simt.cuh"

constexpr int kHeadDimV = HEAD_DIM_V;           // padded: of partial_out
constexpr int kThreads = THREADS, kWarps = kThreads / 32;
constexpr int kStore = OUT_VEC_BYTES / sizeof(Element) < kVec ? OUT_VEC_BYTES / sizeof(Element) : kVec;
constexpr int kTaskCols = 32 * kVec;
constexpr int kTasksOfRow = (kHeadDimV + kTaskCols - 1) / kTaskCols;
constexpr int kBatch = 6;
// With the registers of the first a block fits beside one of decode_sm80, and has found its parts before that ends. Without
// equal shares it would spill.
constexpr int kMinBlocks = kCanStartEarly && !kFixedSplits && sizeof(R) == 4 ? 4 : 1;
static_assert(kThreads % 32 == 0 && kHeadDimV % kVec == 0, "whole warps, whole loads");

struct SharedStorage { Vec<R, kVec> sSums[kWarps][32]; };

// What a lane adds up of a task: some columns of a row of every `step`-th part from `first` on.
struct Task {
  const DecodeParams& p;
  const Parts& parts;
  const R* lse;                 // of the row in slot 0
  const R* out;
  int first, step;
  bool has_cols;

  DEV Task(const DecodeParams& params, const Parts& all, int i, int col, int first_part, int every)
      : p(params), parts(all), lse((const R*)params.partial_lse + i), out((const R*)params.partial_out + i * kHeadDimV + col),
        first(first_part), step(every), has_cols(col < kHeadDimV) {}

  // The weighted sum. `total`: the lse of all parts. `before_reading()` comes when addresses are known.
  template <typename F> DEV Vec<R, kVec> add_parts(TotalLse<R, false>& total, F before_reading) const {
    Vec<R, kVec> sum = {}, x[kBatch];
    R part_lse[kBatch];
    int slots[kBatch];          // below 2^31: the host refuses more parts
    const auto find = [&](int from) {
      #pragma unroll
      for (int j = 0; j < kBatch; j++) slots[j] = from + j * step < parts.count ? (int)parts.slot(p, from + j * step) : -1;
    };
    const auto load = [&] {
      #pragma unroll
      for (int j = 0; j < kBatch; j++) {
        const i64 row = (i64)slots[j] * kItemRows;
        part_lse[j] = slots[j] >= 0 ? lse[row] : -infinity(R());
        x[j] = slots[j] >= 0 && has_cols ? load_vec<kVec>(out + row * kHeadDimV) : Vec<R, kVec>{};
      }
    };
    find(first);
    int lanes = 2;              // that add up the lse: of few parts all do it, some each
    while (lanes < min(parts.count, 32)) lanes *= 2;
    before_reading();
    load();
    #pragma unroll 4
    for (int part = threadIdx.x % lanes; part < parts.count; part += lanes) total.add(lse[parts.slot(p, part) * kItemRows]);
    total.add_lanes(lanes);
    const R inverse = total.inverse();
    #pragma unroll 1
    for (int from = first; from < parts.count;) {
      #pragma unroll
      for (int j = 0; j < kBatch; j++) {
        const R weight = total.weight(part_lse[j], inverse);
        #pragma unroll
        for (int e = 0; e < kVec; e++) sum.x[e] = fma(weight, x[j].x[e], sum.x[e]);
      }
      from += kBatch * step;
      if (from < parts.count) find(from), load();
    }
    return sum;
  }
};

// Where a row's results go.
struct Result {
  Element* out;
  R* lse;                       // null: not wanted
  int cols;                     // from the lane's first on

  DEV Result(const DecodeParams& p, const Parts& parts, int row, int col) {
    const int group = group_of(p), query = (u32)row / (u32)group, head = parts.head_k * group + row - query * group;
    out = (Element*)p.out + parts.batch * p.out_strides.batch + query * p.out_strides.row + head * p.out_strides.head + col;
    lse = p.lse && col == 0 ? (R*)p.lse + ((i64)parts.batch * p.heads_q + head) * p.seqlen_q + query : nullptr;
    cols = p.head_dim_v - col;
  }
  DEV void write(const Vec<R, kVec>& x, R total) const {
    #pragma unroll
    for (int c = 0; c < kVec; c += kStore) {
      Vec<Element, kStore> y;
      #pragma unroll
      for (int e = 0; e < kStore; e++) from_real(y.x[e], x.x[c + e]);
      if (c < cols) *(Vec<Element, kStore>*)(out + c) = y;
    }
    if (lse) *lse = total;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads, kMinBlocks) decode_combine(const DecodeParams p) {
  __shared__ SharedStorage s;
  __threadfence();              // lengths are what they are now, not what the L1 may have of them from an earlier kernel
  const Parts parts = find_parts(p);
  const int first_row = parts.row_tile * kItemRows, rows = min(kItemRows, num_rows(p) - first_row);
  // Of this block; may be below 1.
  const int tasks = parts.count <= 1 ? 0 : (rows * kTasksOfRow - parts.share + parts.shares - 1) / parts.shares;
  if (tasks <= 0) {
    wait_for_kernel_before();   // whoever has nothing to do, too: else this kernel might end before that one
    return;
  }
  const int sharing = max(kWarps / tasks, 1), at_once = kWarps / sharing;       // warps of a task, tasks
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  #pragma unroll 1
  for (int first = 0; first < tasks; first += at_once) {
    const int own = first + warp / sharing, task = parts.share + own * parts.shares;
    const bool has_task = warp / sharing < at_once && own < tasks;
    const int i = task / kTasksOfRow, col = task % kTasksOfRow * kTaskCols + lane * kVec;
    const Result result(p, parts, first_row + i, col);
    const auto wait = [&] { if (first == 0) wait_for_kernel_before(); };        // the sooner it returns, the sooner all is done
    Vec<R, kVec> sum = {};
    TotalLse<R, false> total;
    if (has_task) sum = Task(p, parts, i, col, warp % sharing, sharing).add_parts(total, wait);
    else wait();
    if (sharing > 1) {
      s.sSums[warp][lane] = sum;
      __syncthreads();
      if (warp % sharing == 0)
        #pragma unroll
        for (int w = 1; w < kWarps; w++)
          #pragma unroll
          for (int e = 0; e < kVec; e++) sum.x[e] += w < sharing ? s.sSums[warp + w][lane].x[e] : 0;
    }
    if (has_task && warp % sharing == 0) result.write(sum, total.natural_lse());
    if (sharing > 1) __syncthreads();
  }
}
