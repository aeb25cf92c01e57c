// What the blocks of a decoding kernel compute, and which parts of it are found to be joined: kernels/attn/decode.cuh and
// parts.cuh on the host. SHARING blocks find the same.
#include <cstring>
#include <vector>

#include "attn/parts.cuh"

void run_blocks(void (*)(const void*), const void*, int, int, int);

static std::vector<int> rows;
template <typename... T> static void note(T... x) {
  if (threadIdx.x == 0) (rows.push_back((int)x), ...);
}

// block, batch, row_tile, head_k, first tile of the item, end, first tile of the block, end, slot
static void note_items(const void* given) {
  const DecodeParams p = *(const DecodeParams*)given;
  for (DecodeItems items(p); items.is_valid; items.next(p)) {
    const DecodeItem& i = items.item;
    note(blockIdx.x, i.batch, i.row_tile, i.head_k, i.tiles.begin, i.tiles.end, i.begin, i.end, i.slot);
  }
}
// batch, row_tile, head_k, share, shares, part, slot: for each part that is found at a border, or FIXED_SPLITS of an item
static void note_parts(const void* given) {
  const DecodeParams p = *(const DecodeParams*)given;
  const Parts parts = find_parts<SHARING>(p);
  if (blockIdx.x % SHARING != SHARING - 1) return;
  for (int part = 0; parts.count > 1 && part < parts.count; part++)
    note(parts.batch, parts.row_tile, parts.head_k, parts.share, parts.shares, part, parts.slot(p, part));
}

// How many numbers there are; `found` takes as many as it can.
static int found_by(void (*body)(const void*), const void* params, int blocks, int* found, int size) {
  rows.clear();
  run_blocks(body, params, blocks, 32, 1);
  memcpy(found, rows.data(), min(size, (int)rows.size()) * sizeof(int));
  return rows.size();
}
extern "C" int items(const void* p, int blocks, int* found, int size) { return found_by(note_items, p, blocks, found, size); }
extern "C" int parts(const void* p, int blocks, int* found, int size) { return found_by(note_parts, p, blocks, found, size); }
