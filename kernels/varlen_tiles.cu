// The tiles of a packed batch in the order in which blocks take them: attn/schedule.cuh. One block of kThreads threads.
//
//   cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k [batch (+ 1)]  ->  tiles: how many, how many long (all, unless
//     short ones come last: Config.short_tiles_last), and each
//
// Lengths are known on the device only, so the list is made there before the kernel that reads it. A counting sort by work,
// the most first, so that a long sequence does not begin when short ones have left the chip:
//   under a right mask the work of a tile follows its distance from the end of the sequence that sees least: its level;
//   without one all tiles of a sequence have as much, which follows the length of the other side.
// Tiles of one sequence keep the order in which they must start (a deterministic backward waits in it). Rows that no sequence
// covers come last as one more sequence, whose tiles only write zeros.
#include "attn/schedule.cuh"

constexpr int kTile = TILE;                     // rows, of the side that is tiled
constexpr Side kSide = (Side)SIDE;
constexpr bool kByLevel = MASK_RIGHT;
constexpr int kThreads = THREADS;
static_assert(kTileListHeader == LIST_HEADER && sizeof(ListedTile) == LISTED_WORDS * 4, "launch.py disagrees on the list");
constexpr int kSharedLevels = 4096;             // a longer histogram lies behind the list

struct SharedStorage {
  int sHistogram[kSharedLevels];
  float work;                                   // of all tiles, by level
  int num_long;
  int sWarps[kThreads / 32];
  int sFirst[kThreads];                         // of the sequences at hand: index of the first tile among theirs
  int sTiles[kThreads];                         // how many tiles
  int sPlace[kThreads];                         // where the first goes in the list; not by level
};

// Sum of `x` over the threads up to and with this one; `total` over all. All threads call it together.
template <typename T> DEV T scan(T x, T& total, int* shared) {
  static_assert(sizeof(T) == 4, "as the words of sWarps");
  T* sWarps = (T*)shared;
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  #pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T y = __shfl_up_sync(0xffffffff, x, d);
    if (lane >= d) x += y;
  }
  if (lane == 31) sWarps[warp] = x;
  __syncthreads();
  T before = 0;
  total = 0;
  for (int w = 0; w < kThreads / 32; w++) {
    if (w < warp) before += sWarps[w];
    total += sWarps[w];
  }
  __syncthreads();
  return x + before;
}

// Tiles of sequence `batch`, and what its work counts as if not by level.
struct Sizes { int num_tiles, work; };
DEV Sizes sizes_of(const FwdParams& p, int batch, int num_levels) {
  const Slot own = kSide == kQuerySide ? query_slot(p, batch) : key_slot(p, batch);
  const Slot other = kSide == kQuerySide ? key_slot(p, batch) : query_slot(p, batch);
  return {(own.rows + kTile - 1) / kTile, min(other.used / kTile, num_levels - 1)};
}

// What a tile of this level counts for. Without a right mask the levels begin at 0: less than a tile of the other side.
DEV float work_of_level(int level) { return (float)(kByLevel ? level : level + 1); }

// Turns counts by level into the place of each level's first tile: one behind all that have more work. Returns the number of
// tiles, and in `num_long` of those that hold three quarters of the work.
DEV int places_of(int* histogram, int num_levels, int* sWarps, float work, int& num_long) {
  int sequences = 0, tiles = 0;                 // of the levels done
  float work_done = 0;
  for (int at = num_levels - 1; at >= 0; at -= kThreads) {
    const int level = at - (int)threadIdx.x;
    int count = level >= 0 ? histogram[level] : 0, total;
    if (kByLevel) {                             // so far the sequences whose last level it is; now all that reach it
      count = scan(count, total, sWarps) + sequences;
      sequences += total;
    }
    const int own = level >= 0 && (!kByLevel || level > 0) ? count : 0;
    const int end = scan(own, total, sWarps) + tiles;
    tiles += total;
    if (level >= 0) histogram[level] = end - own;
    float total_work;
    const float own_work = work_of_level(level) * own, work_end = scan(own_work, total_work, sWarps) + work_done;
    work_done += total_work;
    if (own > 0 && work_end - own_work < 0.75f * work) atomicMax(&num_long, end);
  }
  return tiles;
}

extern "C" __global__ void __launch_bounds__(kThreads) varlen_tiles(const FwdParams p) {
  __shared__ SharedStorage s;
  const int max_tiles = p.num_tiles, num_levels = max(p.seqlen_q, p.seqlen_k) / kTile + 2;
  ListedTile* list = (ListedTile*)(p.tiles + kTileListHeader);
  int* histogram = num_levels <= kSharedLevels ? s.sHistogram : (int*)(list + max_tiles);
  for (int level = threadIdx.x; level < num_levels; level += kThreads) histogram[level] = 0;
  if (threadIdx.x == 0) s.work = 0, s.num_long = 0;
  __syncthreads();
  for (int batch = threadIdx.x; batch <= p.batch; batch += kThreads) {
    const Sizes sizes = sizes_of(p, batch, num_levels);
    if (kByLevel) {
      atomicAdd(&histogram[sizes.num_tiles], 1);
      atomicAdd(&s.work, 0.5f * sizes.num_tiles * (sizes.num_tiles + 1.f));
    } else {
      atomicAdd(&histogram[sizes.work], sizes.num_tiles);
      atomicAdd(&s.work, work_of_level(sizes.work) * sizes.num_tiles);
    }
  }
  __syncthreads();
  const int num_tiles = places_of(histogram, num_levels, s.sWarps, s.work, s.num_long);
  __syncthreads();
  if (threadIdx.x == 0) {
    const u32 listed = min((u32)num_tiles, (u32)max_tiles);
    p.tiles[0] = listed;
    p.tiles[1] = p.num_short_tiles > 0 ? min((u32)s.num_long, listed) : listed;
    p.tiles[2] = 0;
  }

  for (int first_batch = 0; first_batch <= p.batch; first_batch += kThreads) {
    const int batch = first_batch + threadIdx.x;
    const Sizes sizes = batch <= p.batch ? sizes_of(p, batch, num_levels) : Sizes{0, 0};
    int total;
    s.sFirst[threadIdx.x] = scan(sizes.num_tiles, total, s.sWarps) - sizes.num_tiles;
    s.sTiles[threadIdx.x] = sizes.num_tiles;
    if (!kByLevel) s.sPlace[threadIdx.x] = atomicAdd(&histogram[sizes.work], sizes.num_tiles);
    __syncthreads();
    for (int i = threadIdx.x; i < total; i += kThreads) {
      int at = 0;                               // the last sequence that begins at i or before: it has tiles
      #pragma unroll
      for (int step = kThreads / 2; step > 0; step /= 2)
        if (s.sFirst[at + step] <= i) at += step;
      const int tile = i - s.sFirst[at];
      const int level = kSide == kQuerySide ? tile + 1 : s.sTiles[at] - tile;
      const int place = kByLevel ? atomicAdd(&histogram[level], 1) : s.sPlace[at] + tile;
      if ((u32)place < (u32)max_tiles)                                       // only wrong lengths give more
        list[place] = {tile, first_batch + at, query_slot(p, first_batch + at), key_slot(p, first_batch + at)};
    }
    __syncthreads();
  }
}
