// Lengths and first elements of one head of one sequence, dense (a batch of equal lengths) or packed (VARLEN).
#pragma once
#include "attn/params.cuh"

constexpr bool kVarlen = VARLEN;

// The rows of one sequence among those of all: `used` of its `rows` take part, the rest comes back as zeros.
struct Slot { int first, rows, used; };

// Sequence `batch` of a packed side with `total` rows. One past the last are the rows that no sequence covers. What the
// lengths say is cut to what exists, so that wrong ones cannot lead outside.
DEV Slot slot_of(const int* cu_seqlens, const int* seqused, int int64_lengths, int batch, int num_sequences, int total) {
  const int step = int64_lengths & 1 ? 2 : 1, used_step = int64_lengths & 4 ? 2 : 1;     // low words of int64
  const bool is_rest = batch == num_sequences;
  Slot s;
  s.first = min(max(cu_seqlens[batch * step], 0), total);
  s.rows = (is_rest ? total : min(max(cu_seqlens[(batch + 1) * step], s.first), total)) - s.first;
  s.used = is_rest ? 0 : seqused ? min(max(seqused[batch * used_step], 0), s.rows) : s.rows;
  return s;
}
DEV Slot query_slot(const FwdParams& p, int batch) {
  return slot_of(p.cu_seqlens_q, p.seqused_q, p.int64_lengths, batch, p.batch, p.seqlen_q);
}
DEV Slot key_slot(const FwdParams& p, int batch) {
  return slot_of(p.cu_seqlens_k, p.seqused_k, p.int64_lengths >> 1, batch, p.batch, p.seqlen_k);
}

// `tile` of the queries (forward) or keys (backward) of sequence `batch`, for one head of that side. batch < 0: none.
struct Work {
  int tile, head, batch;
  Slot q, k;                    // VARLEN: of that sequence
};

// As much of it as the number of a sequence says.
DEV Work work_of_sequence(const FwdParams& p, int batch) {
  Work work = {0, 0, batch, {}, {}};
  if constexpr (kVarlen) work.q = query_slot(p, batch), work.k = key_slot(p, batch);
  return work;
}

struct Sequence {
  const FwdParams& p;
  int batch;                    // 0 if packed: first_q and first_k then say where it begins
  int seqlen_q, seqlen_k;       // rows that take part
  int rows_q, rows_k;           // rows to write
  int first_q, first_k;

  DEV Sequence(const FwdParams& params, const Work& work) : p(params) {
    if constexpr (kVarlen) {
      batch = 0;
      seqlen_q = work.q.used, rows_q = work.q.rows, first_q = work.q.first;
      seqlen_k = work.k.used, rows_k = work.k.rows, first_k = work.k.first;
    } else {
      batch = work.batch;
      seqlen_q = rows_q = p.seqlen_q, seqlen_k = rows_k = p.seqlen_k;
      first_q = first_k = 0;
    }
  }
  DEV Sequence(const FwdParams& params, int batch_) : Sequence(params, work_of_sequence(params, batch_)) {}
  DEV int head_k(int head) const { return head / (p.heads_q / p.heads_k); }       // the key head that a query head reads

  // Row 0 of a head of q, out, ... or of k, v, ... Computed where it is used: pointers kept through a main loop cost registers.
  template <typename T> DEV T* query_rows(T* x, const Strides& s, int head) const {
    return x + batch * s.batch + first_q * s.row + head * s.head;
  }
  template <typename T> DEV T* key_rows(T* x, const Strides& s, int head_k) const {
    return x + batch * s.batch + first_k * s.row + head_k * s.head;
  }
  // Index of row 0 of a query head in arrays like lse, [batch, heads_q, seqlen_q].
  DEV i64 row_index(int head) const { return ((i64)batch * p.heads_q + head) * p.seqlen_q + first_q; }
};
