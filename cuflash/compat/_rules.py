"""What the functions of FlashAttention 2 and 3 have in common, and how they differ from cuflash's."""

from __future__ import annotations

import torch

from .. import torch as _torch


def refuse(function: str, **options) -> None:
    """Raise for each option that cuflash does not have, unless it is at the value where it does nothing.

    ``options``: name=(value, neutral value).
    """
    for name, (value, neutral) in options.items():
        is_tensor = isinstance(value, torch.Tensor)
        if value is neutral or neutral is not None and not is_tensor and value == neutral:
            continue
        came = f"a tensor of shape {tuple(value.shape)}" if is_tensor else repr(value)
        raise NotImplementedError(f"{name} is not supported by cuflash's {function}; got {came}: only {neutral!r} is allowed")


def unpack(name: str, x, axis: int, parts: str) -> tuple:
    """The ``parts`` (such as "qkv") of a packed tensor, along an axis of as many elements."""
    if x.ndim <= axis or x.shape[axis] != len(parts):
        raise ValueError(f"{name} must have {len(parts)} elements ({', '.join(parts)}) along axis {axis}; got shape "
                         f"{tuple(x.shape)}")
    return x.unbind(axis)       # its gradient is one copy; that of slices would be a sum of arrays of zeros


def window_of(window_size) -> tuple[int, int]:
    """cuflash's window of theirs: any negative side is unbounded. It may be a tensor, which compares with no tuple."""
    left, right = (-1 if side is None else int(side) for side in (window_size[0], window_size[1]))
    return max(left, -1), max(right, -1)


def options_of(softmax_scale, causal, window_size, softcap) -> dict:
    return {"softmax_scale": softmax_scale, "causal": bool(causal), "window": window_of(window_size), "softcap": softcap}


def dense(q, k, v, deterministic, options: dict, return_lse=True):
    return _torch.attention(q, k, v, return_lse=return_lse, deterministic=bool(deterministic), **options)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, deterministic, options: dict, return_lse=True, **seqused):
    # Their max_seqlen decide how much is launched. Here they could only be hints, and are not needed.
    return _torch.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, return_lse=return_lse,
                                   deterministic=bool(deterministic), **seqused, **options)


def with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, num_splits, return_lse, options: dict):
    """out, or (out, lse). As in theirs, nothing of it is differentiable, and the caches are written where they lie."""
    with torch.no_grad():
        return _torch.attention_with_kvcache(
            q, k_cache, v_cache, k=k, v=v, cache_seqlens=cache_seqlens, cache_batch_idx=cache_batch_idx, block_table=block_table,
            num_splits=num_splits, return_lse=bool(return_lse), **options)
