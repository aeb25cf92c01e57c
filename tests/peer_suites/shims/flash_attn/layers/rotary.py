"""Rotary embedding in plain PyTorch: the reference that caches with rotary embedding are compared with."""

import torch


def apply_rotary_emb(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    """x (batch, seqlen, heads, head_dim) with its first 2 * cos.shape[1] columns turned by the angles of cos and sin
    (positions, rotary_dim / 2), row i of a request by those of position seqlen_offsets + i.
    """
    if inplace or cu_seqlens is not None:
        raise NotImplementedError("apply_rotary_emb is for dense batches, and returns a new tensor")
    half = cos.shape[1]
    offsets = torch.as_tensor(seqlen_offsets, device=x.device).reshape(-1, 1)
    positions = (offsets + torch.arange(x.shape[1], device=x.device)).expand(x.shape[0], -1).long()
    cos, sin = (table[positions].unsqueeze(2).float() for table in (cos, sin))
    turned, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = turned.unflatten(-1, (half, 2)).unbind(-1)
    else:
        first, second = turned.chunk(2, dim=-1)
    pair = (first * cos - second * sin, first * sin + second * cos)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned.to(x.dtype), rest], -1)
