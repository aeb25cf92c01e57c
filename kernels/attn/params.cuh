// What the host passes to a forward kernel. The field list in cuflash/launch.py is the same list; every offset is checked.
#pragma once
#include "ptx/types.cuh"

struct Strides { i64 batch, row, head; };      // in elements; the last axis is always contiguous

struct FwdParams {
  const void* q;                // [batch, seqlen_q, heads_q, head_dim]
  const void* k;                // [batch, seqlen_k, heads_k, head_dim]
  const void* v;                // [batch, seqlen_k, heads_k, head_dim_v]
  void* out;                    // [batch, seqlen_q, heads_q, head_dim_v]
  void* lse;                    // [batch, heads_q, seqlen_q] float (double for double), contiguous; null: not wanted
  Strides q_strides, k_strides, v_strides, out_strides;
  double scale_log2;            // softmax_scale * log2(e)
  double tanh_scale;            // softmax_scale / softcap
  double cap_log2;              // softcap * log2(e)
  int batch, seqlen_q, seqlen_k, heads_q, heads_k, head_dim, head_dim_v;
  int window_left, window_right;      // counted from the bottom-right diagonal; read only where the mask has that side
  int num_m_blocks;             // query tiles of one head
  int num_short_blocks;         // the first of them, left to the end of the launch: schedule.cuh
  int heads_in_group;           // (batch, head) pairs whose K and V share the L2 cache at a time
};

// __INTADDR__ is the compiler front end's own offsetof; NVRTC declares none.
#define MEETS(field) static_assert(__INTADDR__(&((FwdParams*)0)->field) == OFFSET_##field, #field)
MEETS(q); MEETS(k); MEETS(v); MEETS(out); MEETS(lse);
MEETS(q_strides); MEETS(k_strides); MEETS(v_strides); MEETS(out_strides);
MEETS(scale_log2); MEETS(tanh_scale); MEETS(cap_log2);
MEETS(batch); MEETS(seqlen_q); MEETS(seqlen_k); MEETS(heads_q); MEETS(heads_k); MEETS(head_dim); MEETS(head_dim_v);
MEETS(window_left); MEETS(window_right); MEETS(num_m_blocks); MEETS(num_short_blocks); MEETS(heads_in_group);
#undef MEETS
static_assert(sizeof(FwdParams) == PARAMS_BYTES, "launch.py disagrees on the size of FwdParams");
