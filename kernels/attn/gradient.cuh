// What the kernels of a backward share: the facts of a query row, and the order in which key tiles add to dq.
#pragma once
#include "attn/seqlen.cuh"
#include "ptx/memory.cuh"

// P = exp2(logit in base 2 - lse_log2), dS = P * (dP - delta). Of a row that sees no key lse_log2 is +inf: P is 0.
template <typename R> struct alignas(2 * sizeof(R)) RowFacts {
  R lse_log2;
  R delta;                      // rowsum(dout * out) - dlse
};

DEV bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000) != 0x7f800000; }
// Whether q or dout of a row may hold NaN or Inf. If a key sees the row, no score of it is finite then, nor lse; nor is delta.
// Behind a tanh, kBounded, scores of Inf are.
template <bool kBounded> DEV bool may_be_nonfinite(const RowFacts<float>& facts) {
  return kBounded || !is_finite(facts.lse_log2) || !is_finite(facts.delta);
}

// dq_sum lies as tensor cores hold it: in units of 16 rows by 8 columns, in which the four elements of a lane of mma_m16n8k16
// are neighbours. A warp then adds whole lines, twice as fast as parts of rows. The units of 16 rows make a group, and a
// sequence begins with one.
constexpr int kDqGroup = DQ_GROUP;
static_assert(kDqGroup == 16, "the rows of an mma");
DEV i64 num_dq_groups(const BwdParams& p) {                     // of a head
  return kVarlen ? p.seqlen_q / kDqGroup + p.batch + 1 : (p.seqlen_q + kDqGroup - 1) / kDqGroup;
}
DEV i64 first_dq_group(const BwdParams& p, const Sequence& seq, int batch, int head) {
  return ((i64)(kVarlen ? 0 : batch) * p.heads_q + head) * num_dq_groups(p) + (kVarlen ? seq.first_q / kDqGroup + batch : 0);
}
// Where an element lies, counted from the first group of its sequence.
template <int kHeadDim> DEV i64 dq_index(int row, int col) {
  const i64 unit = (i64)(row / kDqGroup) * (kHeadDim / 8) + col / 8;
  return unit * 128 + (row % 8 * 4 + col % 8 / 2) * 4 + row % 16 / 8 * 2 + col % 2;
}

// DETERMINISTIC: the key tiles that see a query tile add to its dq_sum one after the other, in their order. A block takes its
// number as it starts, so that those it waits for have started before it, in whatever order the hardware starts blocks. (Blocks
// that take many tiles: bwd_sm90.)
DEV int* turn_of(const BwdParams& p, const Sequence& seq, int batch, int head, int tile, int block_m) {
  const int slot = kVarlen ? seq.first_q / block_m + batch + tile : tile;
  return p.turns + 1 + ((i64)(kVarlen ? 0 : batch) * p.heads_q + head) * p.num_query_tiles + slot;
}
DEV u32 take_ticket(const BwdParams& p) { return (u32)atomicAdd(p.turns, 1); }
// By one thread, before a block barrier that lets the others add.
DEV void wait_for_turn(const int* turn, int mine) {
  while (load_acquire(turn) < mine) {}
}
// By one thread, after a block barrier behind the additions of all.
DEV void pass_turn(int* turn) { add_release(turn, 1); }
