"""FlashAttention 4's two functions and its combine, computed by cuflash. All return (out, lse)."""

import torch

import cuflash.torch as flash
from cuflash.compat import flash_attn_interface as fa3
from cuflash.compat._rules import options_of, refuse

_flash_attn_fwd = None  # only a test of its compile cache uses it


def _refuse(function, options):
    """What was given of the options that change the result and that cuflash does not have."""
    refuse(function, **{name: (value, None) for name, value in options.items()})


def flash_attn_func(
    q,
    k,
    v,
    qv=None,
    gather_kv_indices=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    mask_mod=None,
    block_sparse_tensors=None,
    return_lse=False,
):
    _refuse(
        "flash_attn_func",
        {
            "qv": qv,
            "gather_kv_indices": gather_kv_indices,
            "learnable_sink": learnable_sink,
            "score_mod": score_mod,
            "mask_mod": mask_mod,
            "block_sparse_tensors": block_sparse_tensors,
        },
    )
    options = options_of(softmax_scale, causal, window_size, softcap)
    return flash.attention(q, k, v, return_lse=True, deterministic=deterministic, **options)


def flash_attn_varlen_func(
    q,
    k,
    v,
    qv=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    min_seqlen_k=None,
    seqused_q=None,
    seqused_k=None,
    gather_kv_indices=None,
    page_table=None,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    num_splits=1,
    pack_gqa=None,
    deterministic=False,
    score_mod=None,
    mask_mod=None,
    return_lse=False,
):
    """Without its cu_seqlens a side is padded, (batch, seqlen, heads, head_dim), and seqused says what of it is used."""
    _refuse(
        "flash_attn_varlen_func",
        {
            "qv": qv,
            "gather_kv_indices": gather_kv_indices,
            "page_table": page_table,
            "learnable_sink": learnable_sink,
            "score_mod": score_mod,
            "mask_mod": mask_mod,
        },
    )
    options = options_of(softmax_scale, causal, window_size, softcap)
    shape = q.shape[:2]
    packed_q, ends_q = _packed(q, cu_seqlens_q)
    packed_k, ends_k = _packed(k, cu_seqlens_k)
    packed_v, _ = _packed(v, cu_seqlens_k)
    out, lse = flash.attention_varlen(
        packed_q,
        packed_k,
        packed_v,
        ends_q,
        ends_k,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        return_lse=True,
        deterministic=deterministic,
        **options,
    )
    if cu_seqlens_q is None:
        out, lse = out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)
    return out, lse


def _packed(x, ends):
    if ends is not None:
        return x, ends
    batch, seqlen = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, dtype=torch.int32, device=x.device) * seqlen


def flash_attn_combine(out_partial, lse_partial, out=None, out_dtype=None, return_lse=True):
    out, lse = fa3.flash_attn_combine(out_partial, lse_partial, out, out_dtype)
    return out, lse if return_lse else None
