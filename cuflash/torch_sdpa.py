"""The operators of SDPA's flash backend, computed by cuflash: what `cuflash.torch.register_sdpa` registers.

Tensors of the scaled_dot_product operators are (batch, heads, seqlen, head_dim), those of the flash_attention ones (batch,
seqlen, heads, head_dim), or packed. Results have the strides that PyTorch's own shape functions promise, on which compiled code
relies.
"""

from __future__ import annotations

import torch

from . import attention, attention_backward, attention_varlen, attention_varlen_backward


class Handle:
    """Keeps the overriding kernels registered until `remove` is called."""

    def __init__(self, library):
        self.library = library

    def remove(self) -> None:
        self.library = None


def activate() -> Handle:
    """Override the operators on CUDA."""
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name, function in OPERATORS.items():
        if hasattr(torch.ops.aten, name):       # one of them came after register_flash_attention_impl
            library.impl(name, function, "CUDA")
    return Handle(library)


def _refuse(dropout_p, return_debug_mask=False, **others) -> None:
    if dropout_p != 0:
        raise NotImplementedError(f"dropout_p is not supported by cuflash's SDPA; got {dropout_p}: only 0.0 is allowed")
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask is not supported by cuflash's SDPA; got True: only False is allowed")
    for name, value in others.items():
        if value is not None:
            raise NotImplementedError(f"{name} is not supported by cuflash's SDPA; got a tensor: only None is allowed")


def _rows(x):
    return x if x.stride(-1) == 1 else x.contiguous()


def _options(is_causal, scale, left=None, right=None) -> dict:
    return {"causal": is_causal, "softmax_scale": scale, "window": (-1 if left is None else left, -1 if right is None else right)}


def _into(targets: list, compute):
    """``compute(*targets)``; a target whose last axis is not contiguous gets a copy of what is computed elsewhere."""
    results = compute(*(x if x.stride(-1) == 1 else None for x in targets))
    for target, result in zip(targets, results):
        if result is not target:
            target.copy_(result)
    return results[len(targets):]


def _forward(out, q, k, v, cum_seq_q, cum_seq_k, seqused_k, options: dict):
    """Writes into ``out``, returns lse."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    if cum_seq_q is None:
        if seqused_k is not None:
            raise NotImplementedError("seqused_k is not supported by cuflash's SDPA without cum_seq_q; got a tensor: only None "
                                      "is allowed")
        lse, = _into([out], lambda out: attention(q, k, v, return_lse=True, out=out, **options))
    else:
        lse, = _into([out], lambda out: attention_varlen(q, k, v, cum_seq_q, cum_seq_k, seqused_k=seqused_k, return_lse=True,
                                                         out=out, **options))
    return lse


def _backward(dout, q, k, v, out, lse, cum_seq_q, cum_seq_k, options: dict) -> tuple:
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    given = (*map(_rows, (dout, q, k, v, out)), lse.contiguous())
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    if cum_seq_q is None:
        _into(gradients, lambda dq, dk, dv: attention_backward(*given, dq=dq, dk=dk, dv=dv, **options))
    else:
        given += (cum_seq_q, cum_seq_k)
        _into(gradients, lambda dq, dk, dv: attention_varlen_backward(*given, dq=dq, dk=dk, dv=dv, **options))
    return tuple(gradients)


def _no_dropout(query) -> tuple:
    """(rng_state, unused, debug_mask): what dropout would need again, and its mask."""
    return (torch.zeros(2, dtype=torch.uint64, device=query.device), torch.zeros((), dtype=torch.uint64, device=query.device),
            torch.empty(0, dtype=query.dtype, device=query.device))


def flash_attention_forward(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                            scale=None, window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None,
                            block_table=None, num_splits=None):
    out = query.new_empty((*query.shape[:-1], value.shape[-1]))
    lse = flash_attention_forward_inplace(
        out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, scale=scale,
        window_size_left=window_size_left, window_size_right=window_size_right, seqused_k=seqused_k, alibi_slopes=alibi_slopes,
        block_table=block_table, num_splits=num_splits)
    return out, lse, *_no_dropout(query)


def flash_attention_forward_inplace(out, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                                    return_debug_mask, *, scale=None, window_size_left=None, window_size_right=None,
                                    seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None):
    # max_q, max_k and num_splits say how to compute, not what.
    _refuse(dropout_p, return_debug_mask, alibi_slopes=alibi_slopes, block_table=block_table)
    options = _options(is_causal, scale, window_size_left, window_size_right)
    return _forward(out, query, key, value, cum_seq_q, cum_seq_k, seqused_k, options)


def flash_attention_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
                             is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None):
    _refuse(dropout_p)
    options = _options(is_causal, scale, window_size_left, window_size_right)
    return _backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, options)


def sdpa_forward(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    _refuse(dropout_p, return_debug_mask)
    out = torch.empty_like(query)       # SDPA pads v to the head_dim of q, or does not come here
    lse = _forward(*(x.transpose(1, 2) for x in (out, query, key, value)), None, None, None, _options(is_causal, scale))
    return out, lse, None, None, query.shape[2], key.shape[2], *_no_dropout(query)


def sdpa_backward(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
                  philox_seed, philox_offset, *, scale=None):
    _refuse(dropout_p)
    given = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    return tuple(x.transpose(1, 2) for x in _backward(*given, logsumexp, None, None, _options(is_causal, scale)))


OPERATORS = {
    "_flash_attention_forward": flash_attention_forward,
    "_flash_attention_forward_no_dropout_inplace": flash_attention_forward_inplace,
    "_flash_attention_backward": flash_attention_backward,
    "_scaled_dot_product_flash_attention": sdpa_forward,
    "_scaled_dot_product_flash_attention_backward": sdpa_backward,
}
