// Lengths and first elements of one head of one sequence of the batch.
#pragma once
#include "attn/params.cuh"

template <typename T>
struct Sequence {
  const FwdParams& p;
  int batch, head, head_k;      // head_k: the key head that this query head reads
  int seqlen_q, seqlen_k;

  DEV Sequence(const FwdParams& params, int batch_, int head_)
      : p(params), batch(batch_), head(head_), head_k(head_ / (params.heads_q / params.heads_k)),
        seqlen_q(params.seqlen_q), seqlen_k(params.seqlen_k) {}

  // Row 0 of each, computed where it is used: five pointers kept through the main loop would cost ten registers.
  DEV const T* gQ() const { return (const T*)p.q + batch * p.q_strides.batch + head * p.q_strides.head; }
  DEV const T* gK() const { return (const T*)p.k + batch * p.k_strides.batch + head_k * p.k_strides.head; }
  DEV const T* gV() const { return (const T*)p.v + batch * p.v_strides.batch + head_k * p.v_strides.head; }
  DEV T* gO() const { return (T*)p.out + batch * p.out_strides.batch + head * p.out_strides.head; }
  DEV bool wants_lse() const { return p.lse != nullptr; }
  DEV Real<T>* gLse() const { return (Real<T>*)p.lse + ((i64)batch * p.heads_q + head) * p.seqlen_q; }
};
