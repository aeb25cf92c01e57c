// Which keys a query row sees, and which rows see a key: one interval each, counted from the bottom-right diagonal. Causal is
// right = 0.
#pragma once
#include "attn/params.cuh"

template <bool kLeft, bool kRight>
struct Mask {
  int seqlen_q, seqlen_k, left, right;    // row i sees keys i + left <= j <= i + right, cut to [0, seqlen_k)

  DEV Mask(const FwdParams& p, int seqlen_q_, int seqlen_k_) : seqlen_q(seqlen_q_), seqlen_k(seqlen_k_) {
    const int diagonal = seqlen_k - seqlen_q;
    left = kLeft ? diagonal - p.window_left : 0;
    right = kRight ? diagonal + p.window_right : 0;
  }
  DEV int key_begin(int row) const { return kLeft ? max(row + left, 0) : 0; }
  DEV int key_end(int row) const { return kRight ? min(row + right + 1, seqlen_k) : seqlen_k; }     // may be <= key_begin
  DEV int row_begin(int key) const { return kRight ? max(key - right, 0) : 0; }
  DEV int row_end(int key) const { return kLeft ? min(key - left + 1, seqlen_q) : seqlen_q; }       // may be <= row_begin
};
