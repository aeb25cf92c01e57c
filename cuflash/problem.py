"""What to compute, checked once. Every message about a wrong input lives here."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np

from .arrays import ITEMSIZE, View
from .memory import alignment, contiguous_strides, overlaps_itself, share_memory, tma_addressable

DTYPES = ("float16", "bfloat16", "float32", "float64")
LENGTH_DTYPES = ("int32", "int64")      # of cu_seqlens and seqused
MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**30 - 1          # row and key coordinates and their sums are int32 in the kernels
MAX_STRIDE = 2**62


@dataclass(frozen=True)
class Problem:
    """One attention forward: sizes, dtype, mask and score options.

    Query i sees key j iff ``i + d - window_left <= j <= i + d + window_right`` with ``d = seqlen_k - seqlen_q``;
    None is unbounded, and causal is already folded into ``window_right``. ``softcap`` 0 is off. ``alignment`` is
    the largest power of two (2 to 16, bytes) that divides every base pointer and outer stride of q, k and v;
    ``out_alignment`` the same of out. ``tma``: tensor maps can describe q, k and v.

    ``varlen``: ``batch`` is the number of sequences, packed one after the other; ``seqlen_q`` and ``seqlen_k`` are the
    rows of all arrays, and the relation above holds inside each sequence with its own lengths. Bits 0 to 3 of
    ``int64_lengths`` say that cu_seqlens_q, cu_seqlens_k, seqused_q and seqused_k are int64 and not int32.
    """

    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    softmax_scale: float
    softcap: float = 0.0
    window_left: int | None = None
    window_right: int | None = None
    return_lse: bool = False
    alignment: int = 16
    out_alignment: int = 16
    tma: bool = True
    varlen: bool = False
    has_seqused_q: bool = False
    has_seqused_k: bool = False
    int64_lengths: int = 0

    @property
    def batch_axis(self) -> int:
        """How many times there are seqlen_q rows of q and seqlen_k rows of k."""
        return 1 if self.varlen else self.batch

    @property
    def is_empty(self) -> bool:
        """Nothing is written: there is no output element and no lse."""
        return 0 in (self.batch_axis, self.seqlen_q, self.heads_q)

    @property
    def lse_dtype(self) -> str:
        return lse_dtype(self.dtype)


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """The gradients of a forward. ``alignment`` is that of q, k, v, out and dout, ``out_alignment`` of dq, dk and dv;
    ``tma``: tensor maps can describe q, k, v and dout."""

    deterministic: bool = False
    has_dlse: bool = False

    @property
    def is_empty(self) -> bool:
        """Nothing is written: neither dq nor dk and dv have an element."""
        return self.batch_axis == 0 or 0 in (self.seqlen_q, self.heads_q) and 0 in (self.seqlen_k, self.heads_k)


# ---------------------------------------------------------------------------------------------------------------- calls

def check_attention(q: View, k: View, v: View, *, return_lse=False, out: View | None = None, **options) -> Problem:
    """Check the inputs of ``cuflash.attention`` and return the problem they state.

    Raises ValueError or TypeError naming the argument, what came and what is allowed. ``options`` of all calls: causal,
    window, softmax_scale and softcap.
    """
    inputs = {"q": q, "k": k, "v": v}
    return _forward(_dense_sizes(inputs) | _options(q, k, **options), inputs, out, return_lse)


def check_attention_varlen(q: View, k: View, v: View, cu_seqlens_q: View, cu_seqlens_k: View, *, seqused_q: View | None = None,
                           seqused_k: View | None = None, return_lse=False, out: View | None = None, **options) -> Problem:
    """As check_attention, for ``cuflash.attention_varlen``. What the lengths say is not read: check_lengths does."""
    inputs = {"q": q, "k": k, "v": v}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    sizes = _packed_sizes(inputs) | _lengths(lengths, q)
    return _forward(sizes | _options(q, k, **options), inputs | _given(lengths), out, return_lse)


def check_attention_backward(dout: View, q: View, k: View, v: View, out: View, lse: View, *, dlse: View | None = None,
                             deterministic=False, dq: View | None = None, dk: View | None = None, dv: View | None = None,
                             **options) -> BackwardProblem:
    """As check_attention, for ``cuflash.attention_backward``."""
    inputs = {"q": q, "k": k, "v": v}
    return _backward(_dense_sizes(inputs) | _options(q, k, **options), inputs, {"out": out, "dout": dout},
                     {"lse": lse, "dlse": dlse}, {"dq": dq, "dk": dk, "dv": dv}, deterministic)


def check_attention_varlen_backward(dout: View, q: View, k: View, v: View, out: View, lse: View, cu_seqlens_q: View,
                                    cu_seqlens_k: View, *, seqused_q: View | None = None, seqused_k: View | None = None,
                                    dlse: View | None = None, deterministic=False, dq: View | None = None,
                                    dk: View | None = None, dv: View | None = None, **options) -> BackwardProblem:
    """As check_attention_varlen, for ``cuflash.attention_varlen_backward``."""
    inputs = {"q": q, "k": k, "v": v}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    sizes = _packed_sizes(inputs) | _lengths(lengths, q)
    return _backward(sizes | _options(q, k, **options), inputs | _given(lengths), {"out": out, "dout": dout},
                     {"lse": lse, "dlse": dlse}, {"dq": dq, "dk": dk, "dv": dv}, deterministic)


def _forward(fields: dict, inputs: dict[str, View], out: View | None, return_lse) -> Problem:
    if out is not None:
        _check_written("out", out, result_shapes(fields)["out"], inputs)
    return Problem(**fields, return_lse=bool(return_lse), alignment=min(alignment(inputs[name]) for name in "qkv"),
                   out_alignment=_alignment_of_written(fields, {"out": out}),
                   tma=all(tma_addressable(inputs[name]) for name in "qkv"))


def _backward(fields: dict, inputs: dict[str, View], results: dict[str, View], statistics: dict[str, View | None],
              gradients: dict[str, View | None], deterministic) -> BackwardProblem:
    """``results``: out and dout, shaped alike; ``statistics``: lse and dlse; ``gradients``: dq, dk and dv where given."""
    check_flag("deterministic", deterministic)
    q, shapes = inputs["q"], result_shapes(fields)
    for name, view in results.items():
        _check_like(name, view, shapes["out"], q)
        _check_last_stride(name, view)
    for name, view in _given(statistics).items():
        _check_like(name, view, shapes["lse"], q, lse_dtype(q.dtype))
        _check_packed(name, view)
    seen = inputs | results | _given(statistics)
    for name, view in _given(gradients).items():
        _check_written(name, view, shapes[name], seen)
        seen = seen | {name: view}
    return BackwardProblem(
        **fields, alignment=min(alignment(view) for view in (*(inputs[name] for name in "qkv"), *results.values())),
        out_alignment=_alignment_of_written(fields, gradients),
        tma=all(tma_addressable(view) for view in (*(inputs[name] for name in "qkv"), results["dout"])),
        deterministic=bool(deterministic),
        has_dlse=statistics["dlse"] is not None)


def _given(views: dict[str, View | None]) -> dict[str, View]:
    return {name: view for name, view in views.items() if view is not None}


def result_shapes(fields: dict) -> dict[str, tuple[int, ...]]:
    """Shapes of the results of a problem, by its fields, as views have them: with a batch axis, 1 where rows are packed."""
    batch = 1 if fields.get("varlen") else fields["batch"]
    rows_q, rows_k = (batch, fields["seqlen_q"], fields["heads_q"]), (batch, fields["seqlen_k"], fields["heads_k"])
    return {"out": (*rows_q, fields["head_dim_v"]), "lse": (batch, fields["heads_q"], fields["seqlen_q"]),
            "dq": (*rows_q, fields["head_dim"]), "dk": (*rows_k, fields["head_dim"]), "dv": (*rows_k, fields["head_dim_v"])}


# ----------------------------------------------------------------------------------------------------- shapes and kinds

def _dense_sizes(views: dict[str, View]) -> dict:
    check_kind(views)
    for name, view in views.items():
        if len(view.shape) != 4:
            raise ValueError(f"{name} must have 4 axes (batch, seqlen, heads, head_dim), or 3 for a batch of one; "
                             f"got shape {_original(view)}")
    q, k, v = views.values()
    if len({view.was_3d for view in views.values()}) != 1:
        raise ValueError("q, k and v must all have 4 axes or all have 3; got shapes "
                         f"{_original(q)}, {_original(k)} and {_original(v)}")
    if not (k.shape[0] == v.shape[0] == q.shape[0]):
        raise ValueError(f"batch must be the same in q, k and v; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    return {"batch": q.shape[0], **_sizes(views, "seqlen")}


def _packed_sizes(views: dict[str, View]) -> dict:
    check_kind(views)
    for name, view in views.items():
        if not view.was_3d:
            raise ValueError(f"{name} must have 3 axes (total rows of all sequences, heads, head_dim); got shape {view.shape}")
    return {"varlen": True, **_sizes(views, "total rows")}


def _sizes(views: dict[str, View], rows: str) -> dict:
    q, k, v = views.values()
    (_, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_k, head_dim_v) = q.shape, v.shape
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{rows} must be the same in k and v; got {k.shape[1]} and {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"heads must be the same in k and v; got {k.shape[2]} and {v.shape[2]}")
    if k.shape[3] != head_dim:
        raise ValueError(f"head_dim must be the same in q and k; got {head_dim} and {k.shape[3]}")
    if heads_k == 0 and heads_q > 0 or heads_k and heads_q % heads_k:
        raise ValueError(f"heads of q must be a multiple of the heads of k and v; got {heads_q} and {heads_k}")
    for name, size in (("head_dim of q and k", head_dim), ("head_dim of v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must be 1 to {MAX_HEAD_DIM}; got {size}")
    for name, size in ((f"{rows} of q", seqlen_q), (f"{rows} of k", seqlen_k)):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name} must be at most {MAX_SEQLEN}; got {size}")
    for name, view in views.items():
        _check_last_stride(name, view)
    return {"dtype": q.dtype, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q, "heads_k": heads_k,
            "head_dim": head_dim, "head_dim_v": head_dim_v}


def _lengths(lengths: dict[str, View | None], q: View) -> dict:
    """Fields of the problem that cu_seqlens and seqused state by their shapes and dtypes."""
    for name, view in _given(lengths).items():
        check_beside(name, view, q)
        if view.dtype not in LENGTH_DTYPES:
            raise TypeError(f"{name} must be one of {', '.join(LENGTH_DTYPES)}; got {view.dtype}")
        if len(view.shape) != 1 or view.was_3d:
            raise ValueError(f"{name} must have 1 axis; got shape {_original(view)}")
        _check_packed(name, view)
    (ends,), (key_ends,) = lengths["cu_seqlens_q"].shape, lengths["cu_seqlens_k"].shape
    if ends == 0:
        raise ValueError("cu_seqlens_q must have one element more than there are sequences, the first of them 0; got shape (0,)")
    if key_ends != ends:
        raise ValueError(f"cu_seqlens_k must have the shape of cu_seqlens_q, ({ends},); got ({key_ends},)")
    for name in ("seqused_q", "seqused_k"):
        if lengths[name] is not None and lengths[name].shape != (ends - 1,):
            raise ValueError(f"{name} must have an element for each sequence of cu_seqlens_q, shape ({ends - 1},); "
                             f"got {lengths[name].shape}")
    return {"batch": ends - 1, "has_seqused_q": lengths["seqused_q"] is not None,
            "has_seqused_k": lengths["seqused_k"] is not None,
            "int64_lengths": sum(1 << bit for bit, view in enumerate(lengths.values())
                                 if view is not None and view.dtype == "int64")}


def check_lengths(rows: dict[str, int], cu_seqlens: dict[str, np.ndarray], seqused: dict[str, np.ndarray | None]) -> None:
    """Raise ValueError unless the lengths, as arrays on the host, describe the arrays. Dicts by side, "q" and "k"."""
    for side, ends in cu_seqlens.items():
        name = f"cu_seqlens_{side}"
        if ends[0] != 0:
            raise ValueError(f"{name} must start at 0; got {ends[0]}")
        decreases = ends[1:] < ends[:-1]        # a difference could wrap
        if decreases.any():
            at = int(np.argmax(decreases))
            raise ValueError(f"{name} must not decrease; got {ends[at]} and then {ends[at + 1]} at index {at + 1}")
        if ends[-1] > rows[side]:
            raise ValueError(f"{name} must end at {rows[side]}, the rows of {side}, or before; got {ends[-1]}")
        used, lengths = seqused[side], np.diff(ends)
        if used is not None and ((used < 0) | (used > lengths)).any():
            at = int(np.argmax((used < 0) | (used > lengths)))
            raise ValueError(f"seqused_{side} must be 0 to the length of each sequence; got {used[at]} for sequence {at}, "
                             f"of length {lengths[at]}")


def check_flag(name: str, value) -> None:
    """Raise unless the value is a bool."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be a bool; got {value!r}")


def check_hint(name: str, hint) -> None:
    """Raise unless max_seqlen_q or max_seqlen_k is None or a length."""
    if hint is None:
        return
    if isinstance(hint, bool) or not isinstance(hint, numbers.Integral):
        raise TypeError(f"{name} must be an integer or None; got {hint!r}")
    if hint < 0:
        raise ValueError(f"{name} must be 0 or more; got {hint}")


def _original(view: View) -> tuple[int, ...]:
    return view.shape[1:] if view.was_3d else view.shape


def check_place(views: dict[str, View]) -> None:
    """Raise unless the views agree on framework and device."""
    names = ", ".join(views)
    frameworks = [view.framework for view in views.values()]
    if len(set(frameworks)) != 1:
        raise TypeError(f"{names} must come from one framework; got {', '.join(frameworks)}")
    devices = [view.device for view in views.values()]
    if len(set(devices)) != 1:
        raise ValueError(f"{names} must be on one device; got {', '.join(devices)}")


def check_beside(name: str, view: View, q: View) -> None:
    """Raise unless the array is on the device of q and of its framework."""
    if view.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {view.device}")
    if view.framework != q.framework:
        raise TypeError(f"{name} must come from the framework of q, {q.framework}; got {view.framework}")


def check_kind(views: dict[str, View]) -> None:
    """Raise unless the views agree on framework, device and a dtype that is supported."""
    check_place(views)
    names = ", ".join(views)
    dtypes = [view.dtype for view in views.values()]
    if len(set(dtypes)) != 1:
        raise TypeError(f"{names} must have one dtype; got {', '.join(dtypes)}: cast them to the same one of "
                        f"{', '.join(DTYPES)}")
    if dtypes[0] not in DTYPES:
        raise TypeError(f"{names} must be one of {', '.join(DTYPES)}; got {dtypes[0]}")


def _check_last_stride(name: str, view: View) -> None:
    if view.shape[3] > 1 and view.strides[3] != 1 and 0 not in view.shape:
        raise ValueError(f"{name} must be contiguous in its last axis (stride 1 element); got strides "
                         f"{view.strides[1:] if view.was_3d else view.strides} elements: make it contiguous first")
    itemsize = ITEMSIZE[view.dtype]
    if view.ptr % itemsize:
        raise ValueError(f"{name} must be aligned to its element ({itemsize} bytes); its address is {view.ptr:#x}")
    if any(size > 1 and abs(stride) >= MAX_STRIDE for size, stride in zip(view.shape, view.strides)):
        raise ValueError(f"{name} has a stride of {max(map(abs, view.strides))} elements, past the 64-bit range")


def _check_packed(name: str, view: View) -> None:
    """For arrays that the kernels read without strides."""
    shape, strides = (view.shape[1:], view.strides[1:]) if view.was_3d else (view.shape, view.strides)
    packed = contiguous_strides(shape)
    if 0 not in shape and any(size > 1 and stride != expected for size, stride, expected in zip(shape, strides, packed)):
        raise ValueError(f"{name} must be contiguous; got strides {strides} elements for shape {shape}: make it contiguous first")
    if view.ptr % ITEMSIZE[view.dtype]:
        raise ValueError(f"{name} must be aligned to its element ({ITEMSIZE[view.dtype]} bytes); its address is {view.ptr:#x}")


def _alignment_of_written(fields: dict, given: dict[str, View | None]) -> int:
    """The alignment of all results; those that are not given are row-major arrays that cuflash allocates."""
    bits = 16
    for name, view in given.items():
        bits |= result_shapes(fields)[name][3] * ITEMSIZE[fields["dtype"]] if view is None else alignment(view)
    return bits & -bits


def _options(q: View, k: View, causal=False, window=None, softmax_scale=None, softcap=0.0) -> dict:
    left, right = _window(window)
    check_flag("causal", causal)
    if causal:
        right = 0 if right is None else min(right, 0)
    # A side that reaches past every key is no bound at all, in no sequence of a packed batch; what is left fits int32.
    if left is not None and left >= k.shape[1] - 1:
        left = None
    if right is not None and right >= q.shape[1] - 1:
        right = None
    return {"softmax_scale": _scale(softmax_scale, q.shape[3]), "softcap": _softcap(softcap), "window_left": left,
            "window_right": right}


def _window(window) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    try:
        left, right = window
    except (TypeError, ValueError):
        raise ValueError(f"window must be None or a pair (left, right); got {window!r}") from None
    sides = []
    for name, side in (("left", left), ("right", right)):
        if side is None:
            sides.append(None)
            continue
        if isinstance(side, bool) or not isinstance(side, numbers.Integral):
            raise TypeError(f"window {name} must be an integer or None; got {side!r} in {window!r}")
        if side < -1:
            raise ValueError(f"window {name} must be 0 or more, or None (or -1) for unbounded; got {side} in {window!r}")
        sides.append(None if side == -1 else int(side))
    return sides[0], sides[1]


def _real(name: str, value) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number; got {value!r}")
    return float(value)


def _scale(softmax_scale, head_dim: int) -> float:
    if softmax_scale is None:
        return head_dim ** -0.5
    scale = _real("softmax_scale", softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"softmax_scale must be finite; got {scale}")
    return scale


def _softcap(softcap) -> float:
    cap = 0.0 if softcap is None else _real("softcap", softcap)
    if not (math.isfinite(cap) and cap >= 0):
        raise ValueError(f"softcap must be finite and 0 (off) or more; got {cap}")
    return cap


# ------------------------------------------------------------------------------------------- arrays that go with q, k, v

def lse_dtype(dtype: str) -> str:
    return "float64" if dtype == "float64" else "float32"


def _check_like(name: str, view: View, shape: tuple[int, ...], q: View, dtype: str | None = None) -> None:
    """Raise unless the array has that shape, with or without the batch axis as q, and otherwise is like q."""
    if view.framework != q.framework:
        raise TypeError(f"{name} must come from the framework of q, {q.framework}; got {view.framework}")
    expected = shape[1:] if q.was_3d else shape
    if _original(view) != expected:
        raise ValueError(f"{name} must have shape {expected}; got {_original(view)}")
    if view.dtype != (dtype or q.dtype):
        raise TypeError(f"{name} must have the dtype of q, {q.dtype}; got {view.dtype}" if dtype is None else
                        f"{name} must be {dtype} where q is {q.dtype}; got {view.dtype}")
    if view.device != q.device:
        raise ValueError(f"{name} must be on the device of q, {q.device}; got {view.device}")


def _check_written(name: str, view: View, shape: tuple[int, ...], others: dict[str, View]) -> None:
    """Raise unless the array can take a result of that shape, apart from all others in memory."""
    _check_like(name, view, shape, others["q"])
    if view.readonly:
        raise ValueError(f"{name} must be writable; got a read-only array")
    _check_last_stride(name, view)
    if overlaps_itself(view):
        raise ValueError(f"{name} must not overlap itself; got strides {view.strides} elements for shape {view.shape}")
    check_overlap(name, view, others)


def check_overlap(name: str, view: View, others: dict[str, View]) -> None:
    """Raise ValueError if an array that is written shares an element with one of the others."""
    for other_name, other in others.items():
        if share_memory(view, other):
            raise ValueError(f"{name} must not overlap {other_name}: they share memory")
