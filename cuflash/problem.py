"""What to compute, checked once. Every message about a wrong input lives here."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import numpy as np

from .arrays import View

DTYPES = ("float16", "bfloat16", "float32", "float64")
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MAX_HEAD_DIM = 256
MAX_SEQLEN = 2**30 - 1          # row and key coordinates and their sums are int32 in the kernels
MAX_STRIDE = 2**62


@dataclass(frozen=True)
class Problem:
    """One attention forward, dense: sizes, dtype, mask and score options.

    Query i sees key j iff ``i + d - window_left <= j <= i + d + window_right`` with ``d = seqlen_k - seqlen_q``;
    None is unbounded, and causal is already folded into ``window_right``. ``softcap`` 0 is off. ``alignment`` is
    the largest power of two (2 to 16, bytes) that divides every base pointer and outer stride of q, k and v;
    ``out_alignment`` the same of out.
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

    @property
    def is_empty(self) -> bool:
        """Nothing is written: there is no output element and no lse."""
        return 0 in (self.batch, self.seqlen_q, self.heads_q)

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"


def check_attention(q: View, k: View, v: View, *, causal=False, window=None, softmax_scale=None, softcap=0.0,
                    return_lse=False, out: View | None = None) -> Problem:
    """Check the inputs of ``cuflash.attention`` and return the problem they state.

    Raises ValueError or TypeError naming the argument, what came and what is allowed.
    """
    views = {"q": q, "k": k, "v": v}
    check_kind(views)
    for name, view in views.items():
        if len(view.shape) != 4:
            raise ValueError(f"{name} must have 4 axes (batch, seqlen, heads, head_dim), or 3 for a batch of one; "
                             f"got shape {_original(view)}")
    if len({view.was_3d for view in views.values()}) != 1:
        raise ValueError("q, k and v must all have 4 axes or all have 3; got shapes "
                         f"{_original(q)}, {_original(k)} and {_original(v)}")
    batch, seqlen_q, heads_q, head_dim = q.shape
    _, seqlen_k, heads_k, head_dim_v = v.shape
    if not (k.shape[0] == v.shape[0] == batch):
        raise ValueError(f"batch must be the same in q, k and v; got {batch}, {k.shape[0]} and {v.shape[0]}")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"seqlen must be the same in k and v; got {k.shape[1]} and {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"heads must be the same in k and v; got {k.shape[2]} and {v.shape[2]}")
    if k.shape[3] != head_dim:
        raise ValueError(f"head_dim must be the same in q and k; got {head_dim} and {k.shape[3]}")
    if heads_k == 0 and heads_q > 0 or heads_k and heads_q % heads_k:
        raise ValueError(f"heads of q must be a multiple of the heads of k and v; got {heads_q} and {heads_k}")
    for name, size in (("head_dim of q and k", head_dim), ("head_dim of v", head_dim_v)):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must be 1 to {MAX_HEAD_DIM}; got {size}")
    for name, size in (("seqlen of q", seqlen_q), ("seqlen of k", seqlen_k)):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name} must be at most {MAX_SEQLEN}; got {size}")
    for name, view in views.items():
        _check_last_stride(name, view)

    left, right = _window(window)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be a bool; got {causal!r}")
    if causal:
        right = 0 if right is None else min(right, 0)
    # A side that reaches past every key is no bound at all; what is left fits int32.
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:
        right = None

    problem = Problem(
        dtype=q.dtype, batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_k=heads_k,
        head_dim=head_dim, head_dim_v=head_dim_v, softmax_scale=_scale(softmax_scale, head_dim),
        softcap=_softcap(softcap), window_left=left, window_right=right, return_lse=bool(return_lse),
        alignment=min(_alignment(view) for view in views.values()),
        out_alignment=_alignment(out) if out is not None else _packed_alignment(head_dim_v, q.dtype))
    if out is not None:
        _check_out(out, problem, views)
    return problem


def _original(view: View) -> tuple[int, ...]:
    return view.shape[1:] if view.was_3d else view.shape


def check_kind(views: dict[str, View]) -> None:
    """Raise unless the views agree on framework, device and a dtype that is supported."""
    names = ", ".join(views)
    frameworks = [view.framework for view in views.values()]
    if len(set(frameworks)) != 1:
        raise TypeError(f"{names} must come from one framework; got {', '.join(frameworks)}")
    devices = [view.device for view in views.values()]
    if len(set(devices)) != 1:
        raise ValueError(f"{names} must be on one device; got {', '.join(devices)}")
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


def _alignment(view: View) -> int:
    """Largest power of two up to 16 bytes that divides the base pointer and the strides of axes longer than 1."""
    bits = view.ptr | 16
    for size, stride in zip(view.shape[:3], view.strides[:3]):
        if size > 1:
            bits |= stride * ITEMSIZE[view.dtype]
    return bits & -bits


def _packed_alignment(head_dim_v: int, dtype: str) -> int:
    """_alignment of a row-major output that cuflash allocates."""
    row_bytes = head_dim_v * ITEMSIZE[dtype] | 16
    return row_bytes & -row_bytes


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


def _check_out(out: View, problem: Problem, views: dict[str, View]) -> None:
    q = views["q"]
    expected = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
    if out.framework != q.framework:
        raise TypeError(f"out must come from the framework of q, {q.framework}; got {out.framework}")
    if out.was_3d != q.was_3d or out.shape != expected:
        raise ValueError(f"out must have shape {expected[1:] if q.was_3d else expected}; got {_original(out)}")
    if out.dtype != problem.dtype:
        raise TypeError(f"out must have the dtype of q, {problem.dtype}; got {out.dtype}")
    if out.device != q.device:
        raise ValueError(f"out must be on the device of q, {q.device}; got {out.device}")
    if out.readonly:
        raise ValueError("out must be writable; got a read-only array")
    _check_last_stride("out", out)
    if _overlaps_itself(out):
        raise ValueError(f"out must not overlap itself; got strides {out.strides} elements for shape {out.shape}")
    check_overlap(out, views)


def check_overlap(out: View, views: dict[str, View]) -> None:
    """Raise ValueError if out shares an element with one of the views."""
    for name, view in views.items():
        if _share_memory(out, view):
            raise ValueError(f"out must not overlap {name}: they share memory")


def byte_extent(view: View) -> tuple[int, int]:
    """First and past-the-last byte that a view reaches, counted from its pointer."""
    if 0 in view.shape:
        return 0, 0
    itemsize = ITEMSIZE[view.dtype]
    reach = [(size - 1) * stride * itemsize for size, stride in zip(view.shape, view.strides)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


class _Addresses:
    """The addresses of a view as NumPy sees arrays; nothing is ever read through it."""

    def __init__(self, view: View):
        itemsize = ITEMSIZE[view.dtype]
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "shape": view.shape, "data": (view.ptr, True),
            "strides": tuple(stride * itemsize for stride in view.strides)}


def _share_memory(a: View, b: View) -> bool:
    if 0 in a.shape or 0 in b.shape:
        return False
    a, b = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:      # interleaved beyond what can be decided quickly
        return np.may_share_memory(a, b)


def _overlaps_itself(view: View) -> bool:
    """True unless sorting the axes by stride shows that each one steps over everything inside it."""
    if 0 in view.shape:
        return False
    inner = 1
    for stride, size in sorted((abs(stride), size) for size, stride in zip(view.shape, view.strides) if size > 1):
        if stride < inner:
            return True
        inner = stride * (size - 1) + inner
    return False
