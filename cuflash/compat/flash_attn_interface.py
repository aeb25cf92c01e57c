"""FlashAttention 3's functions, with its argument order, defaults and return values, which are not FlashAttention 2's.

Layout, masks and windows are those of `cuflash.compat.flash_attn`; lse is -inf where a query sees no key, and
``return_attn_probs=True`` gives the pair (out, lse).

``num_splits`` (but of a cache), ``pack_gqa`` and ``sm_margin`` only say how to compute, never what: they are taken and not
needed. qv, descales, attention_chunk, rotary embedding, left padding, and packed queries or new keys of a cache raise
NotImplementedError.
"""

from __future__ import annotations

import torch

from . import _rules
from ._rules import refuse

__all__ = ["flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_with_kvcache", "get_scheduler_metadata"]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                    window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
                    sm_margin=0, return_attn_probs=False):
    """Attention of a dense batch. Returns out; with ``return_attn_probs`` (out, lse)."""
    refuse("flash_attn_func", qv=(qv, None), q_descale=(q_descale, None), k_descale=(k_descale, None),
           v_descale=(v_descale, None), attention_chunk=(attention_chunk, 0))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    return _rules.dense(q, k, v, deterministic, options, return_attn_probs)


def flash_attn_qkvpacked_func(qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None,
                              window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None,
                              sm_margin=0, return_attn_probs=False):
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim), or with ``num_heads_q`` (batch, seqlen, heads, head_dim),
    the heads of q, k and v one after the other."""
    refuse("flash_attn_qkvpacked_func", q_descale=(q_descale, None), k_descale=(k_descale, None), v_descale=(v_descale, None),
           attention_chunk=(attention_chunk, 0))
    if qkv.ndim == 5:
        q, k, v = _rules.unpack("qkv", qkv, 2, "qkv")
    else:
        if num_heads_q is None:
            raise ValueError(f"num_heads_q must be given where qkv has {qkv.ndim} axes and not 5; got None")
        heads_k, rest = divmod(qkv.shape[2] - num_heads_q, 2)
        if rest or heads_k < 0:
            raise ValueError(f"num_heads_q must leave two equal parts of the {qkv.shape[2]} heads of qkv; got {num_heads_q}")
        q, k, v = qkv.split([num_heads_q, heads_k, heads_k], dim=-2)
    return flash_attn_func(q, k, v, softmax_scale, causal, window_size=window_size, softcap=softcap,
                           deterministic=deterministic, return_attn_probs=return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
                           softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
                           window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None,
                           deterministic=False, sm_margin=0, return_attn_probs=False):
    """Attention of packed sequences, (total, heads, head_dim). Returns as `flash_attn_func`. max_seqlen are not needed."""
    refuse("flash_attn_varlen_func", qv=(qv, None), q_descale=(q_descale, None), k_descale=(k_descale, None),
           v_descale=(v_descale, None), attention_chunk=(attention_chunk, 0))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    return _rules.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, deterministic, options, return_attn_probs, seqused_q=seqused_q,
                         seqused_k=seqused_k)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                            max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None,
                            softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
                            rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
                            return_softmax_lse=False):
    """Attention to a cache, into which k and v are written first, at ``cache_seqlens``. The caller advances those itself.

    Returns out; with ``return_softmax_lse`` (out, lse). No gradients. ``max_seqlen_q`` says nothing without cu_seqlens_q, nor
    ``rotary_seqlens`` and ``rotary_interleaved`` without rotary_cos. With a page_table ``cache_batch_idx`` chooses its rows.
    """
    refuse("flash_attn_with_kvcache", qv=(qv, None), rotary_cos=(rotary_cos, None), rotary_sin=(rotary_sin, None),
           cache_leftpad=(cache_leftpad, None), cu_seqlens_q=(cu_seqlens_q, None), cu_seqlens_k_new=(cu_seqlens_k_new, None),
           q_descale=(q_descale, None), k_descale=(k_descale, None), v_descale=(v_descale, None),
           attention_chunk=(attention_chunk, 0), scheduler_metadata=(scheduler_metadata, None))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    if page_table is not None and cache_batch_idx is not None:      # here it says which row of the table is a request's
        page_table, cache_batch_idx = page_table.index_select(0, cache_batch_idx), None
    return _rules.with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, page_table, num_splits,
                               return_softmax_lse, options)


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None):
    """Join the results of parts of the keys: out_partial (parts, batch, seqlen, heads, head_dim), lse_partial (parts, batch,
    seqlen, heads). Returns (out, lse), out in ``out_dtype`` or that of the parts, written into ``out`` if given."""
    largest = lse_partial.amax(0)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)        # no part has seen a key: -inf - -inf is NaN
    weights = (lse_partial - largest).exp()
    total = weights.sum(0)
    # A part that has seen nothing weighs 0, whatever its out holds.
    parts = torch.where(weights[..., None] == 0, 0.0, weights[..., None] * out_partial.to(weights.dtype))
    joined = parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    lse = largest + total.log()
    if out is not None:
        return out.copy_(joined), lse
    return joined.to(out_partial.dtype if out_dtype is None else out_dtype), lse


def get_scheduler_metadata(batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, cache_seqlens,
                           qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
                           cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1),
                           attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0):
    """None, which `flash_attn_with_kvcache` takes as scheduler_metadata: cuflash shares out the work anew in each call."""
    return None
