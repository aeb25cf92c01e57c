"""cuflash as an attention implementation of Hugging Face transformers.

    from cuflash.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cufa")

Causal and bidirectional attention, GQA, sliding windows, softcap, padding on either side of a row, packed sequences, dynamic and
static caches. A mask that says more than that, dropout, sinks, position biases and attention weights raise NotImplementedError.

Two functions are registered, one that makes masks and one that attends. The first makes None, where the second knows by itself
what is seen, or

* (batch, keys) of bool: which keys are no padding, where a query also sees none that come after it;
* (batch, 1, 1, keys) of bool: the same, where it sees all others;
* (batch, rows) of int32: the number of each row's sequence, where several are packed in a row.

Rows with padding are computed as packed sequences, the padding between them as sequences of which nothing is used: no length
comes to the host. In compiled code, where nobody can look into a mask function, it is checked on the device.
"""

from __future__ import annotations

import torch

from .. import attention_with_kvcache
from .. import torch as _torch

__all__ = ["register"]

_FEW = 8        # queries up to which a call is one of decoding


def register(name: str = "cufa") -> None:
    """Register cuflash with transformers' AttentionInterface and AttentionMaskInterface.

    Args:
        name: what ``attn_implementation`` will be called. Without "flash" in it: transformers takes any name that has it for one
            of its own flash implementations, and looks for their packages.

    Raises:
        ImportError: transformers is not installed, or too old.
        ValueError: the name contains "flash".
    """
    if "flash" in name:
        raise ValueError(f'name must not contain "flash", which transformers takes for its own implementations; got {name!r}')
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("cuflash.integrations.transformers needs transformers with AttentionInterface and "
                          f"AttentionMaskInterface: {error}") from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, attention_mask)


# ------------------------------------------------------------------------------------------------------------------ masks

class _Known:
    """What is known of a mask on the host, kept with it."""

    def __init__(self, window, has_padding: bool):
        self.window, self.has_padding = window, has_padding


def attention_mask(batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, device=None,
                   **kwargs):
    """The mask of a forward pass, or None: see above. ``attention_mask`` (batch, all keys so far) is False at padding."""
    if torch.compiler.is_compiling():
        packed = None
        kind, window = _kind_in_compiled_code(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, device,
                                              **kwargs)
    else:
        kind, window, packed = _kind_of(mask_function)
    if packed is not None:
        return packed.to(torch.int32)
    keep = attention_mask
    if keep is not None:
        keep = keep[:, kv_offset:kv_offset + kv_length].to(torch.bool)
    if kind == "bidirectional":
        if keep is None:
            return None
        keep = _filled(keep, kv_length)
        return _marked(keep, window, shape=(keep.shape[0], 1, 1, kv_length))

    tracing = torch.compiler.is_compiling()
    if isinstance(q_offset, torch.Tensor) and tracing:
        # A static cache in compiled code: how much of it is filled is known on the device only.
        if q_length != 1:
            raise NotImplementedError("a static cache is not supported by cuflash in compiled code with more than one query; got "
                                      f"{q_length}")
        filled = torch.arange(kv_length, device=q_offset.device) + kv_offset < q_offset + q_length
        filled = filled.expand(batch_size, kv_length)
        return filled if keep is None else _filled(keep, kv_length) & filled
    end = int(q_offset) + q_length - kv_offset      # what follows in a static cache is not there yet
    if keep is None:
        if end == kv_length and (tracing or window is None or kv_length <= window):
            return None
        keep = torch.ones(batch_size, end, dtype=torch.bool, device=device)
    keep = _filled(keep, kv_length)[:, :end]
    return keep if tracing else _marked(keep, window, trimmed=end < kv_length)


def _marked(keep, window, shape=None, trimmed=False):
    """The mask with what is known of it, or None if it says nothing."""
    if torch.compiler.is_compiling():
        return keep.reshape(shape or keep.shape)
    has_padding = not bool(keep.all())
    if has_padding:
        _check_runs(keep)
    elif not trimmed and (window is None or keep.shape[1] <= window):
        return None
    keep = keep.reshape(shape or keep.shape)
    keep.cuflash = _Known(window, has_padding)
    return keep


def _filled(keep, kv_length: int):
    """With False for keys that the mask does not reach."""
    missing = kv_length - keep.shape[1]
    return torch.nn.functional.pad(keep, (0, missing)) if missing > 0 else keep


def _check_runs(keep) -> None:
    if bool(((keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0] > 1).any()):
        raise NotImplementedError("an attention_mask with padding inside of a row is not supported by cuflash; padding before "
                                  "and after it is")


def _kind_of(mask_function) -> tuple:
    """("causal" or "bidirectional", window or None, numbers of packed sequences or None) of a mask function of transformers."""
    parts, kind, window, packed = [mask_function], None, None, None
    while parts:
        function = parts.pop()
        name = getattr(function, "__qualname__", repr(function)).split(".<locals>")[0]
        inside = dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in function.__closure__ or ())))
        if name == "and_masks":
            parts += inside["mask_functions"]
        elif name == "remap_positions_for_packed_sequence":
            parts.append(inside["mask_function"])
        elif name == "packed_sequence_mask_function":
            packed = inside["packed_sequence_mask"]
        elif name in ("sliding_window_overlay", "sliding_window_bidirectional_overlay"):
            # The second one counts without the query itself.
            window = inside["sliding_window"] + (name == "sliding_window_bidirectional_overlay")
        elif name in ("causal_mask_function", "bidirectional_mask_function"):
            kind = name.removesuffix("_mask_function")
        else:
            raise NotImplementedError(f"the mask {name} is not supported by cuflash: only causal, bidirectional, sliding "
                                      "windows, padding and packed sequences are")
    if kind is None:
        raise NotImplementedError("a mask that is neither causal nor bidirectional is not supported by cuflash")
    return kind, window, packed


def _kind_in_compiled_code(batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, device, local_size=None,
                           use_vmap=False, **kwargs) -> tuple:
    """(kind, window), from what is said beside a mask function.

    What the function itself says of the pairs of rows at the edges of that mask is checked on the device.
    """
    if use_vmap:
        raise NotImplementedError("a mask with functions of the model's own is not supported by cuflash")
    kind = "bidirectional" if "allow_is_bidirectional_skip" in kwargs else "causal"
    window = None if local_size is None else local_size + (kind == "bidirectional")
    rows = torch.arange(q_length, device=device) + q_offset
    seen, hidden = ([-1], [1]) if kind == "causal" else ([-1, 1], [])
    if window is not None:
        seen = [distance for distance in seen if abs(distance) < window] + [1 - window]
        hidden.append(-window)
    batch, head = torch.arange(batch_size, device=device)[:, None], torch.zeros((), dtype=torch.long, device=device)
    for distance in (*seen, *hidden):
        keys = rows + distance
        exists = (keys >= kv_offset) & (keys < kv_offset + kv_length)
        inside = torch.where(exists, keys, rows)        # a function may index with them
        said = mask_function(batch, head, rows[None], inside[None])
        wrong = (said if distance in hidden else ~said) & exists
        torch._assert_async(~wrong.any(), "in compiled code cuflash supports causal, bidirectional and sliding window masks of "
                                          "transformers, not this one, as that of packed sequences")
    return kind, window


# -------------------------------------------------------------------------------------------------------------- attention

def attention_forward(module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, softcap=None,
                      is_causal=None, s_aux=None, position_bias=None, **kwargs):
    """(out (batch, seqlen, heads, head_dim), None) of query, key and value (batch, heads, seqlen, head_dim)."""
    if dropout:
        raise NotImplementedError(f"dropout is not supported by cuflash; got {dropout}: only 0.0 is allowed (attention_dropout "
                                  "of the configuration, or model.eval())")
    for name, value_of in (("s_aux", s_aux), ("position_bias", position_bias), ("block_table", kwargs.get("block_table")),
                           ("output_attentions", kwargs.get("output_attentions") or None)):
        if value_of is not None:
            came = "True" if value_of is True else "a tensor"
            raise NotImplementedError(f"{name} is not supported by cuflash; got {came}: only None is allowed")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    ends = kwargs.get("cu_seq_lens_q")
    if attention_mask is not None:
        is_causal = attention_mask.ndim == 2 and is_causal
        _check_mask(attention_mask, q, k, sliding_window)
    if sliding_window is not None:
        options["window"] = (sliding_window - 1, sliding_window - 1)    # theirs counts the query itself
    options["causal"] = bool(is_causal)

    if ends is not None:
        return _packed(q, k, v, ends, kwargs["cu_seq_lens_k"], options), None
    if attention_mask is None:
        return _dense(q, k, v, options), None
    if attention_mask.dtype is torch.int32:
        ends = _ends_of(attention_mask)
        return _packed(q, k, v, ends, ends, options), None
    keep = attention_mask.flatten(1)
    k, v = k[:, :keep.shape[1]], v[:, :keep.shape[1]]
    known = getattr(attention_mask, "cuflash", None)
    if known is not None and not known.has_padding:
        return _dense(q, k, v, options), None
    if known is None:
        _check_unknown(keep)
    return _padded(q, k, v, keep, options), None


def _check_mask(mask, q, k, sliding_window) -> None:
    is_packed = mask.ndim == 2 and mask.dtype is torch.int32
    is_padding = mask.dtype is torch.bool and (mask.ndim == 2 or mask.ndim == 4 and mask.shape[1] == mask.shape[2] == 1)
    if not (is_packed or is_padding) or mask.shape[0] != q.shape[0] or mask.shape[-1] > k.shape[1]:
        raise NotImplementedError("attention_mask must be one that cuflash made of a mask of padding, others are not supported; "
                                  f"got shape {tuple(mask.shape)} of {mask.dtype} for {k.shape[1]} keys")
    known = getattr(mask, "cuflash", None)
    if known is not None and known.window is not None and known.window != sliding_window and mask.shape[-1] > known.window:
        raise NotImplementedError(f"sliding_window must be that of the mask, {known.window}; got {sliding_window}: models that "
                                  "do not hand it to the attention are not supported by cuflash")


def _check_unknown(keep) -> None:
    if not torch.compiler.is_compiling():
        _check_runs(keep)
        return
    # In compiled code the host cannot look.
    starts = (keep[:, 1:] & ~keep[:, :-1]).sum(1) + keep[:, 0]
    torch._assert_async((starts <= 1).all(), "an attention_mask with padding inside of a row is not supported by cuflash")


def _dense(q, k, v, options: dict):
    if q.shape[1] <= _FEW < k.shape[1] and not torch.compiler.is_compiling() and not torch.is_grad_enabled():
        q, k, v = _torch.cast(q, k, v)
        return attention_with_kvcache(q, k, v, **options)       # parts the keys among the blocks: few queries fill no GPU
    return _torch.attention(q, k, v, **options)


def _packed(q, k, v, ends_q, ends_k, options: dict):
    out = _torch.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends_q, ends_k, **options)
    return out.unflatten(0, q.shape[:2])


def _ends_of(numbers):
    """cu_seqlens of rows in which each sequence has a number of its own."""
    starts = torch.ones_like(numbers, dtype=torch.bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = starts.flatten().nonzero().flatten().to(torch.int32)
    return torch.nn.functional.pad(starts, (0, 1), value=numbers.numel())


def _padded(q, k, v, keep, options: dict):
    """Of rows of which only the keys that ``keep`` (batch, keys) says take part."""
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    first, count = keep.to(torch.int8).argmax(1), keep.sum(1)
    if seqlen_q == 1 or not options["causal"] and options.get("window") is None:
        start_q, stop_q = torch.zeros_like(first), torch.full_like(first, seqlen_q)
    else:       # queries are the last rows of the keys, and those of padding come between the sequences
        start_q, stop_q = ((x - (seqlen_k - seqlen_q)).clamp(0, seqlen_q) for x in (first, first + count))
    rows = torch.arange(batch, device=keep.device)
    ends_q = _between(rows * seqlen_q, start_q, stop_q, batch * seqlen_q)
    ends_k = _between(rows * seqlen_k, first, first + count, batch * seqlen_k)
    used = ends_k.diff()
    used[::2] = 0       # what lies between them
    out = _torch.attention_varlen(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends_q, ends_k, seqused_k=used, **options)
    return out.unflatten(0, (batch, seqlen_q))


def _between(row, start, stop, total: int):
    """cu_seqlens with a sequence from start to stop of each row, and one before, between and behind them."""
    ends = torch.stack([row + start, row + stop], 1).flatten().to(torch.int32)
    return torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=total)
