"""FlashAttention 2's functions, with its argument order, defaults and return values.

Layout (batch, seqlen, heads, head_dim). causal is aligned bottom-right; ``window_size=(left, right)`` counts from that diagonal,
negative sides are unbounded. lse is float32, (batch, heads, seqlen_q), packed (heads, total_q), and +inf where a query sees no
key. Gradients flow through out and, unlike there, through lse. All dtypes of cuflash are taken, any head_dim up to 256, CPU
tensors too.

dropout, ALiBi, rotary embedding, left padding of caches, and pages in flash_attn_varlen_func raise NotImplementedError.
"""

from __future__ import annotations

from . import _rules
from ._rules import refuse

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
           "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache"]


def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                    alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """Attention of a dense batch. Returns out; with ``return_attn_probs`` (out, lse, None), the last being dropout's mask."""
    refuse("flash_attn_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    return _results(_rules.dense(q, k, v, deterministic, options, return_attn_probs), return_attn_probs)


def flash_attn_qkvpacked_func(qkv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                              alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """`flash_attn_func` of qkv (batch, seqlen, 3, heads, head_dim)."""
    refuse("flash_attn_qkvpacked_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    return flash_attn_func(*_rules.unpack("qkv", qkv, 2, "qkv"), 0.0, softmax_scale, causal, window_size, softcap, None,
                           deterministic, return_attn_probs)


def flash_attn_kvpacked_func(q, kv, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                             alibi_slopes=None, deterministic=False, return_attn_probs=False):
    """`flash_attn_func` of kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    refuse("flash_attn_kvpacked_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    return flash_attn_func(q, *_rules.unpack("kv", kv, 2, "kv"), 0.0, softmax_scale, causal, window_size, softcap, None,
                           deterministic, return_attn_probs)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
                           causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                           return_attn_probs=False, block_table=None):
    """Attention of packed sequences, (total, heads, head_dim). Returns as `flash_attn_func`. max_seqlen are not needed."""
    refuse("flash_attn_varlen_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None),
           block_table=(block_table, None))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    return _results(_rules.varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, deterministic, options, return_attn_probs),
                    return_attn_probs)


def flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout_p=0.0, softmax_scale=None, causal=False,
                                     window_size=(-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False,
                                     return_attn_probs=False):
    """`flash_attn_varlen_func` of qkv (total, 3, heads, head_dim)."""
    refuse("flash_attn_varlen_qkvpacked_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    q, k, v = _rules.unpack("qkv", qkv, 1, "qkv")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, 0.0, softmax_scale, causal,
                                  window_size, softcap, None, deterministic, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                                    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
                                    deterministic=False, return_attn_probs=False):
    """`flash_attn_varlen_func` of kv (total_k, 2, heads_k, head_dim)."""
    refuse("flash_attn_varlen_kvpacked_func", dropout_p=(dropout_p, 0.0), alibi_slopes=(alibi_slopes, None))
    k, v = _rules.unpack("kv", kv, 1, "kv")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal,
                                  window_size, softcap, None, deterministic, return_attn_probs)


def flash_attn_with_kvcache(q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
                            cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
                            window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
                            return_softmax_lse=False):
    """Attention to a cache, into which k and v are written first, at ``cache_seqlens``. The caller advances those itself.

    Returns out; with ``return_softmax_lse`` (out, lse). No gradients. ``rotary_interleaved`` says nothing without rotary_cos.
    """
    refuse("flash_attn_with_kvcache", rotary_cos=(rotary_cos, None), rotary_sin=(rotary_sin, None),
           cache_leftpad=(cache_leftpad, None), alibi_slopes=(alibi_slopes, None))
    options = _rules.options_of(softmax_scale, causal, window_size, softcap)
    result = _rules.with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, num_splits,
                                 return_softmax_lse, options)
    return (result[0], _inf_where_empty(result[1])) if return_softmax_lse else result


def _inf_where_empty(lse):
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _results(result, return_attn_probs):
    if not return_attn_probs:
        return result
    out, lse = result
    return out, _inf_where_empty(lse), None
