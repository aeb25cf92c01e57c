// What the host passes to the kernels. The field lists in cuflash/launch.py are the same lists; every offset is checked.
#pragma once
#include "ptx/types.cuh"

struct Strides { i64 batch, row, head; };      // in elements; the last axis is always contiguous

// A forward. VARLEN: q, out and lse hold all sequences one after the other (seqlen_q rows in all, no batch axis), and so do
// k and v; batch is the number of sequences.
struct FwdParams {
  const void* q;                // [batch, seqlen_q, heads_q, head_dim]
  const void* k;                // [batch, seqlen_k, heads_k, head_dim]
  const void* v;                // [batch, seqlen_k, heads_k, head_dim_v]
  void* out;                    // [batch, seqlen_q, heads_q, head_dim_v]
  void* lse;                    // [batch, heads_q, seqlen_q] float (double for double), contiguous; null: not wanted
  const int* cu_seqlens_q;      // VARLEN: [batch + 1] first row of each sequence, and the end
  const int* cu_seqlens_k;
  const int* seqused_q;         // VARLEN: [batch] rows of each that take part; null: all
  const int* seqused_k;
  int* tiles;                   // VARLEN: the list of tiles that varlen_tiles writes: attn/schedule.cuh
  Strides q_strides, k_strides, v_strides, out_strides;
  double scale_log2;            // softmax_scale * log2(e)
  double tanh_scale;            // softmax_scale / softcap
  double cap_log2;              // softcap * log2(e)
  int batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;
  int window_left, window_right;      // counted from the bottom-right diagonal; read only where the mask has that side
  int num_tiles;                // tiles of one head: of queries, backward of keys; VARLEN: at most, over all sequences
  int num_short_tiles;          // those left to the end of the launch: schedule.cuh
  int heads_in_group;           // (batch, head) pairs whose K and V share the L2 cache at a time
  int int64_lengths;            // bits 0 to 3: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k are int64
};

// A backward: a forward's params, and these.
struct BwdParams : FwdParams {
  const void* dout;             // [batch, seqlen_q, heads_q, head_dim_v]
  const void* dlse;             // like lse; null: zeros
  void* dq;                     // like q
  void* dk;                     // like k
  void* dv;                     // like v
  void* rows;                   // [batch, heads_q, seqlen_q, 2] of Real: what bwd_delta tells of each query row (RowFacts)
  void* dq_sum;                 // [batch, heads_q, groups of 16 rows, HEAD_DIM / 8, 128] of Real: dq / softmax_scale while it
                                // is summed; gradient.cuh
  int* turns;                   // a ticket counter; DETERMINISTIC: then whose turn each query tile of dq_sum is
  Strides dout_strides, dq_strides, dk_strides, dv_strides;
  double softmax_scale;
  int num_query_tiles;          // of one head in `turns`; VARLEN: seqlen_q / BLOCK_M + batch + 1, over all sequences
};

// __INTADDR__ is the compiler front end's own offsetof; NVRTC declares none.
#define MEETS(field) static_assert(__INTADDR__(&((FwdParams*)0)->field) == OFFSET_##field, #field)
MEETS(q); MEETS(k); MEETS(v); MEETS(out); MEETS(lse);
MEETS(cu_seqlens_q); MEETS(cu_seqlens_k); MEETS(seqused_q); MEETS(seqused_k); MEETS(tiles);
MEETS(q_strides); MEETS(k_strides); MEETS(v_strides); MEETS(out_strides);
MEETS(scale_log2); MEETS(tanh_scale); MEETS(cap_log2);
MEETS(batch); MEETS(seqlen_q); MEETS(seqlen_k); MEETS(heads_q); MEETS(heads_k); MEETS(head_dim); MEETS(head_dim_v);
MEETS(window_left); MEETS(window_right); MEETS(num_tiles); MEETS(num_short_tiles); MEETS(heads_in_group); MEETS(int64_lengths);
#undef MEETS
static_assert(sizeof(FwdParams) == FWD_PARAMS_BYTES, "launch.py disagrees on the size of FwdParams");
#define MEETS(field) static_assert(__INTADDR__(&((BwdParams*)0)->field) == OFFSET_##field, #field)
MEETS(dout); MEETS(dlse); MEETS(dq); MEETS(dk); MEETS(dv); MEETS(rows); MEETS(dq_sum); MEETS(turns);
MEETS(dout_strides); MEETS(dq_strides); MEETS(dk_strides); MEETS(dv_strides); MEETS(softmax_scale); MEETS(num_query_tiles);
#undef MEETS
static_assert(sizeof(BwdParams) == BWD_PARAMS_BYTES, "launch.py disagrees on the size of BwdParams");
