"""What FlashAttention 2's ``bert_padding`` offers: rows of a padded batch to packed ones and back, with gradients."""

from __future__ import annotations

import torch

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
           "unpad_input_for_concatenated_sequences"]


def index_first_axis(x, indices):
    """The rows ``indices`` of x (rows, ...)."""
    return x.index_select(0, indices)


def index_put_first_axis(values, indices, first_axis_dim):
    """(first_axis_dim, ...) of zeros, with the values (rows, ...) at ``indices``, none of which comes twice."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(x, indices):
    """(the rows ``indices`` of x, x without gradient)."""
    return index_first_axis(x, indices), x.detach()


def unpad_input(hidden_states, attention_mask, unused_mask=None):
    """Pack the rows that a mask keeps.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), bool or int: 1 for a row that takes part.
        unused_mask: None, or the same: 1 for a row that is packed too, and takes no part.

    Returns:
        (rows (total, ...), their indices (total,) among batch * seqlen, cu_seqlens (batch + 1,) int32, the longest sequence as an
        int, seqused (batch,) int32: the rows of each that take part).
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices, cu_seqlens, longest = _packing(kept, kept.sum(dim=-1, dtype=torch.int32))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(hidden_states, attention_mask_in_length):
    """As `unpad_input`, where a row of the batch may hold several sequences, one after the other.

    attention_mask_in_length (batch, seqlen) holds their lengths, first to last, and then zeros. Returns (rows, indices,
    cu_seqlens of all sequences, the longest one).
    """
    filled = attention_mask_in_length.sum(dim=-1)
    places = torch.arange(attention_mask_in_length.shape[-1], device=filled.device)
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[lengths.nonzero().flatten()].to(torch.int32)
    indices, cu_seqlens, longest = _packing(places < filled[:, None], lengths)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, cu_seqlens, longest


def pad_input(hidden_states, indices, batch, seqlen):
    """The inverse of `unpad_input`: rows (total, ...) at ``indices`` of (batch, seqlen, ...), zeros elsewhere."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packing(kept, lengths) -> tuple:
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
