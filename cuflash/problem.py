"""What to compute, checked once. Every message about a wrong input lives here."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .arrays import ITEMSIZE, View
from .memory import alignment, contiguous_strides, overlaps_itself, share_memory, tma_addressable

DTYPES = ("float16", "bfloat16", "float32", "float64")
LENGTH_DTYPES = ("int32", "int64")      # of cu_seqlens and seqused
MAX_HEAD_DIM = 256
MAX_CACHE_HEAD_DIMS = 576, 512  # of q and k, and of v, where keys and values lie in a cache
MAX_SEQLEN = 2**30 - 1          # row and key coordinates and their sums are int32 in the kernels
MAX_SPLITS = 4096
MAX_PARTS = 32                  # that merge_attention joins at once: a lane of a warp each
MAX_MERGED_ROWS = 2**31 - 1     # counted in 32 bits
WORKSPACE_ALIGNMENT = 16        # bytes: the widest access to partial results
MAX_STRIDE = 2**62


class _Call:
    """What all problems have in common."""

    varlen = False

    @property
    def in_place(self) -> tuple[str, ...]:
        """The arrays that the call changes besides its results."""
        return ()

    def may_share(self, one: str, other: str) -> bool:
        """Whether two arrays may share memory though the call writes one of them."""
        return False

    @property
    def lse_dtype(self) -> str:
        return lse_dtype(self.dtype)

    @property
    def result_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of each result, as views have them."""
        return result_shapes(vars(self))


@dataclass(frozen=True)
class Problem(_Call):
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


@dataclass(frozen=True)
class DecodeProblem(Problem):
    """A forward whose keys and values lie in a cache: ``seqlen_k`` is how many of them there may be of a request.

    How many there are is data of the call, not of the problem: the relation of queries and keys holds with the length of each
    request. ``alignment`` is that of q, the caches, and k and v where given; ``tma``: tensor maps can describe the caches.
    ``num_slots``: pages, or requests that the cache holds. ``page_size``: 0 if not ``paged``. ``seqlen_new``: tokens of k and v
    that are appended first, 0 without them. ``v_is_k``: the values are the first columns of the keys. Bits 0 and 1 of
    ``decode_int64_lengths`` say that cache_seqlens and cache_batch_idx are int64 and not int32.
    """

    paged: bool = False
    page_size: int = 0
    seqlen_new: int = 0
    num_slots: int = 0
    has_cache_seqlens: bool = False
    has_cache_batch_idx: bool = False
    num_splits: int = 0
    v_is_k: bool = False
    decode_int64_lengths: int = 0

    @property
    def rows(self) -> int:
        """Query rows that read one key head of a request."""
        return self.seqlen_q * (self.heads_q // self.heads_k) if self.heads_k else 0

    @property
    def is_empty(self) -> bool:
        """Nothing is written: there is no output element, and nothing to append."""
        appends = 0 not in (self.batch, self.seqlen_new, self.heads_k, self.seqlen_k)
        return super().is_empty and not appends

    @property
    def in_place(self) -> tuple[str, ...]:
        return ("k_cache", "v_cache", "workspace") if self.seqlen_new else ("workspace",)

    def may_share(self, one: str, other: str) -> bool:
        return self.v_is_k and {one, other} == {"k_cache", "v_cache"}


@dataclass(frozen=True)
class MergeProblem(_Call):
    """Results of attention to parts of the keys, to be joined. ``alignment`` is that of outs and of the result."""

    dtype: str
    batch: int
    seqlen: int
    heads: int
    head_dim_v: int
    num_parts: int
    alignment: int = 16

    return_lse = True

    @property
    def is_empty(self) -> bool:
        """Nothing is written: there is no output element and no lse."""
        return 0 in (self.batch, self.seqlen, self.heads)

    @property
    def result_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"out": (self.batch, self.seqlen, self.heads, self.head_dim_v), "lse": (self.batch, self.heads, self.seqlen)}


# ---------------------------------------------------------------------------------------------------------------- calls

def check_attention(q: View, k: View, v: View, *, return_lse=False, out: View | None = None, **options) -> Problem:
    """Check the inputs of ``cuflash.attention`` and return the problem they state.

    Raises ValueError or TypeError naming the argument, what came and what is allowed. ``options`` of all calls: causal,
    window, softmax_scale and softcap.
    """
    inputs = {"q": q, "k": k, "v": v}
    return _forward(_dense_sizes(inputs) | _options(inputs, **options), inputs, out, return_lse)


def check_attention_varlen(q: View, k: View, v: View, cu_seqlens_q: View, cu_seqlens_k: View, *, seqused_q: View | None = None,
                           seqused_k: View | None = None, return_lse=False, out: View | None = None, **options) -> Problem:
    """As check_attention, for ``cuflash.attention_varlen``. What the lengths say is not read: check_lengths does."""
    inputs = {"q": q, "k": k, "v": v}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    sizes = _packed_sizes(inputs) | _lengths(lengths, q)
    return _forward(sizes | _options(inputs, **options), inputs | _given(lengths), out, return_lse)


def check_attention_backward(dout: View, q: View, k: View, v: View, out: View, lse: View, *, dlse: View | None = None,
                             deterministic=False, dq: View | None = None, dk: View | None = None, dv: View | None = None,
                             **options) -> BackwardProblem:
    """As check_attention, for ``cuflash.attention_backward``."""
    inputs = {"q": q, "k": k, "v": v}
    return _backward(_dense_sizes(inputs) | _options(inputs, **options), inputs, {"out": out, "dout": dout},
                     {"lse": lse, "dlse": dlse}, {"dq": dq, "dk": dk, "dv": dv}, deterministic)


def check_attention_varlen_backward(dout: View, q: View, k: View, v: View, out: View, lse: View, cu_seqlens_q: View,
                                    cu_seqlens_k: View, *, seqused_q: View | None = None, seqused_k: View | None = None,
                                    dlse: View | None = None, deterministic=False, dq: View | None = None,
                                    dk: View | None = None, dv: View | None = None, **options) -> BackwardProblem:
    """As check_attention_varlen, for ``cuflash.attention_varlen_backward``."""
    inputs = {"q": q, "k": k, "v": v}
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "seqused_q": seqused_q, "seqused_k": seqused_k}
    sizes = _packed_sizes(inputs) | _lengths(lengths, q)
    return _backward(sizes | _options(inputs, **options), inputs | _given(lengths), {"out": out, "dout": dout},
                     {"lse": lse, "dlse": dlse}, {"dq": dq, "dk": dk, "dv": dv}, deterministic)


def check_attention_with_kvcache(q: View, k_cache: View, v_cache: View, *, k: View | None = None, v: View | None = None,
                                 cache_seqlens: View | int | None = None, cache_batch_idx: View | None = None,
                                 block_table: View | None = None, num_splits=0, return_lse=False, out: View | None = None,
                                 workspace: View | None = None, causal=True, **options) -> DecodeProblem:
    """As check_attention, for ``cuflash.attention_with_kvcache``. What arrays of lengths and pages say is not read:
    check_cache_lengths does. An integer for cache_seqlens is checked and is no part of the problem.
    """
    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    new = {"k": k, "v": v}
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"k and v are appended together: {given} was given, {missing} was not")
    fields = _cache_sizes(inputs, _given(new), cache_batch_idx, block_table)
    lengths = {"cache_seqlens": cache_seqlens if isinstance(cache_seqlens, View) else None, "cache_batch_idx": cache_batch_idx,
               "block_table": block_table}
    fields |= _cache_lengths(lengths, q, fields["batch"])
    fields |= _options(inputs, causal, seqlen_k=fields["seqlen_k"], **options)
    seen = inputs | _given(new) | _given(lengths)
    v_is_k = _is_first_columns(v_cache, k_cache)
    if k is not None and fields["seqlen_new"]:
        _check_appended(seen, v_is_k)
    if out is not None:
        _check_written("out", out, result_shapes(fields)["out"], seen)
        seen = seen | {"out": out}
    if workspace is not None:
        _check_workspace(workspace, q, seen)
    stated = DecodeProblem(
        **fields, return_lse=bool(return_lse), alignment=min(alignment(view) for view in (inputs | _given(new)).values()),
        out_alignment=_alignment_of_written(fields, {"out": out}), tma=tma_addressable(k_cache) and tma_addressable(v_cache),
        num_splits=_num_splits(num_splits), v_is_k=v_is_k)
    if not isinstance(cache_seqlens, View):
        fixed_length(stated, cache_seqlens)
    return stated


def check_parts(outs, lses) -> None:
    """Raise unless outs and lses, as they are given to ``cuflash.merge_attention``, are as many arrays each."""
    for name, given in (("outs", outs), ("lses", lses)):
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} must be a list or tuple of arrays; got {type(given).__name__}")
    if not 1 <= len(outs) <= MAX_PARTS:
        raise ValueError(f"outs must hold 1 to {MAX_PARTS} arrays; got {len(outs)}: join more than these in groups")
    if len(lses) != len(outs):
        raise ValueError(f"lses must hold as many arrays as outs, {len(outs)}; got {len(lses)}")


def check_merge(views: dict[str, View | None], num_parts: int) -> MergeProblem:
    """Check the arrays of ``cuflash.merge_attention``, by name: outs[0], ..., lses[0], ..., out, None where not given."""
    first = views["outs[0]"]
    if first.dtype not in DTYPES:
        raise TypeError(f"outs[0] must be one of {', '.join(DTYPES)}; got {first.dtype}")
    if len(first.shape) != 4:
        raise ValueError("outs[0] must have 4 axes (batch, seqlen, heads, head_dim_v), or 3 for a batch of one; got shape "
                         f"{_original(first)}")
    batch, seqlen, heads, head_dim_v = first.shape
    if not 1 <= head_dim_v <= MAX_CACHE_HEAD_DIMS[1]:
        raise ValueError(f"head_dim_v of outs must be 1 to {MAX_CACHE_HEAD_DIMS[1]}; got {head_dim_v}")
    if batch * seqlen * heads > MAX_MERGED_ROWS:
        raise ValueError(f"batch * seqlen * heads of outs must be at most {MAX_MERGED_ROWS}; got {batch} * {seqlen} * {heads}: "
                         "split the batch")
    outs = [f"outs[{i}]" for i in range(num_parts)]
    for name in outs:
        _check_like(name, views[name], first.shape, first, of="outs[0]")
        _check_last_stride(name, views[name])
    for i in range(num_parts):
        name = f"lses[{i}]"
        _check_like(name, views[name], (batch, heads, seqlen), first, lse_dtype(first.dtype), of="outs[0]")
        _check_packed(name, views[name])
    out, inputs = views["out"], {name: view for name, view in views.items() if name != "out"}
    if out is not None:
        _check_written("out", out, first.shape, inputs, of="outs[0]")
    fields = {"dtype": first.dtype, "batch": batch, "seqlen": seqlen, "heads": heads, "head_dim_v": head_dim_v}
    bits = head_dim_v * ITEMSIZE[first.dtype] if out is None else alignment(out)
    for name in outs:
        bits |= alignment(views[name])
    return MergeProblem(**fields, num_parts=num_parts, alignment=bits & -bits)


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


def _sizes(views: dict[str, View], rows: str, limits: tuple[int, int] = (MAX_HEAD_DIM, MAX_HEAD_DIM)) -> dict:
    """``limits``: the widest head_dim of q and k, and of v."""
    q, k, v = views.values()
    (_, seqlen_q, heads_q, head_dim), (_, seqlen_k, heads_k, head_dim_v) = q.shape, v.shape
    _, name_k, name_v = views
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"{rows} must be the same in {name_k} and {name_v}; got {k.shape[1]} and {v.shape[1]}")
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"heads must be the same in {name_k} and {name_v}; got {k.shape[2]} and {v.shape[2]}")
    if k.shape[3] != head_dim:
        raise ValueError(f"head_dim must be the same in q and {name_k}; got {head_dim} and {k.shape[3]}")
    if heads_k == 0 and heads_q > 0 or heads_k and heads_q % heads_k:
        raise ValueError(f"heads of q must be a multiple of the heads of {name_k} and {name_v}; got {heads_q} and {heads_k}")
    names = (f"head_dim of q and {name_k}", f"head_dim of {name_v}")
    for name, size, limit in zip(names, (head_dim, head_dim_v), limits):
        if not 1 <= size <= limit:
            raise ValueError(f"{name} must be 1 to {limit}; got {size}")
    for name, size in ((f"{rows} of q", seqlen_q), (f"{rows} of {name_k}", seqlen_k)):
        if size > MAX_SEQLEN:
            raise ValueError(f"{name} must be at most {MAX_SEQLEN}; got {size}")
    for name, view in views.items():
        _check_last_stride(name, view)
    return {"dtype": q.dtype, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "heads_q": heads_q, "heads_k": heads_k,
            "head_dim": head_dim, "head_dim_v": head_dim_v}


def _lengths(lengths: dict[str, View | None], q: View) -> dict:
    """Fields of the problem that cu_seqlens and seqused state by their shapes and dtypes."""
    for name, view in _given(lengths).items():
        _check_integers(name, view, q)
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


def _check_integers(name: str, view: View, q: View) -> None:
    """Raise unless the array is one of lengths or indices, beside q."""
    check_beside(name, view, q)
    if view.dtype not in LENGTH_DTYPES:
        raise TypeError(f"{name} must be one of {', '.join(LENGTH_DTYPES)}; got {view.dtype}")
    if len(view.shape) != 1:
        raise ValueError(f"{name} must have 1 axis; got shape {_original(view)}")
    _check_packed(name, view)


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


# ------------------------------------------------------------------------------------------------------------- the cache

def _cache_sizes(inputs: dict[str, View], new: dict[str, View], cache_batch_idx: View | None, block_table: View | None) -> dict:
    """Fields of the problem that the shapes of q, the caches, k and v and the table of pages state."""
    check_kind(inputs | new)
    for name, view in (inputs | new).items():
        if len(view.shape) != 4 or view.was_3d:
            axes = ("seqlen, heads" if name in ("q", *new) else
                    "max_seqlen, heads" if block_table is None else "page_size, heads")
            first = "num_pages" if block_table is not None and name not in ("q", *new) else "batch"
            raise ValueError(f"{name} must have 4 axes ({first}, {axes}, head_dim); got shape {_original(view)}")
    q, k_cache, v_cache = inputs.values()
    slots, batch = ("batch" if block_table is None else "num_pages"), q.shape[0]
    if k_cache.shape[0] != v_cache.shape[0]:
        raise ValueError(f"{slots} must be the same in k_cache and v_cache; got {k_cache.shape[0]} and {v_cache.shape[0]}")
    sizes = _sizes(inputs, "max_seqlen" if block_table is None else "page_size", MAX_CACHE_HEAD_DIMS)
    page_size, num_slots = 0, k_cache.shape[0]
    capacity = k_cache.shape[1]
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx is for a cache that is not paged: block_table says which pages are a request's")
        _check_block_table(block_table, q)
        page_size = k_cache.shape[1]
        if page_size == 0:
            raise ValueError(f"page_size of k_cache and v_cache must be 1 or more; got 0 in shape {k_cache.shape}")
        capacity = block_table.shape[1] * page_size
        if capacity > MAX_SEQLEN:
            raise ValueError(f"max_pages * page_size must be at most {MAX_SEQLEN}; got {block_table.shape[1]} * {page_size}")
    elif cache_batch_idx is None and num_slots != batch:
        raise ValueError(f"batch must be the same in q, k_cache and v_cache unless cache_batch_idx says which is whose; got "
                         f"{batch}, {num_slots} and {num_slots}")
    if num_slots == 0:
        capacity = 0                # there is no place for a key, whatever max_seqlen or the table promise
    rows = q.shape[1] * (sizes["heads_q"] // sizes["heads_k"] if sizes["heads_k"] else 0)
    if rows > MAX_SEQLEN:
        raise ValueError(f"seqlen of q * query heads a key head must be at most {MAX_SEQLEN}; got {q.shape[1]} * "
                         f"{sizes['heads_q'] // sizes['heads_k']}")
    seqlen_new = _new_sizes(inputs, new) if new else 0
    return {**sizes, "batch": batch, "seqlen_k": capacity, "paged": block_table is not None, "page_size": page_size,
            "num_slots": num_slots, "seqlen_new": seqlen_new}


def _new_sizes(inputs: dict[str, View], new: dict[str, View]) -> int:
    """The tokens of k and v."""
    q, k, v = inputs["q"], new["k"], new["v"]
    for axis, what in enumerate(("batch", "seqlen")):
        if k.shape[axis] != v.shape[axis]:
            raise ValueError(f"{what} must be the same in k and v; got {k.shape[axis]} and {v.shape[axis]}")
    if k.shape[0] != q.shape[0]:
        raise ValueError(f"batch must be the same in q, k and v; got {q.shape[0]}, {k.shape[0]} and {v.shape[0]}")
    for name, view in new.items():
        cache = inputs[f"{name}_cache"]
        for axis, what in ((2, "heads"), (3, "head_dim")):
            if view.shape[axis] != cache.shape[axis]:
                raise ValueError(f"{what} must be the same in {name} and {name}_cache; got {view.shape[axis]} and "
                                 f"{cache.shape[axis]}")
        _check_last_stride(name, view)
    if k.shape[1] > MAX_SEQLEN:
        raise ValueError(f"seqlen of k must be at most {MAX_SEQLEN}; got {k.shape[1]}")
    return k.shape[1]


def _cache_lengths(lengths: dict[str, View | None], q: View, batch: int) -> dict:
    """Fields of the problem that cache_seqlens and cache_batch_idx state; block_table is checked already."""
    fields = {"decode_int64_lengths": 0}
    for bit, name in enumerate(("cache_seqlens", "cache_batch_idx")):
        view = lengths[name]
        fields[f"has_{name}"] = view is not None
        if view is None:
            continue
        _check_integers(name, view, q)
        if view.shape != (batch,):
            raise ValueError(f"{name} must have an element for each request of q, shape ({batch},); got {view.shape}")
        fields["decode_int64_lengths"] |= (view.dtype == "int64") << bit
    return fields


def _check_block_table(table: View, q: View) -> None:
    check_beside("block_table", table, q)
    if table.dtype != "int32":
        raise TypeError(f"block_table must be int32; got {table.dtype}")
    if len(table.shape) != 2 or table.shape[0] != q.shape[0]:
        raise ValueError(f"block_table must have shape (batch, max_pages) with the batch of q, {q.shape[0]}; got "
                         f"{_original(table)}")
    if table.shape[1] > 1 and table.strides[1] != 1 and table.shape[0]:
        raise ValueError("block_table must be contiguous in its last axis (stride 1 element); got strides "
                         f"{table.strides} elements: make it contiguous first")
    if table.ptr % ITEMSIZE["int32"]:
        raise ValueError(f"block_table must be aligned to its element (4 bytes); its address is {table.ptr:#x}")


def _is_first_columns(narrow: View, wide: View) -> bool:
    """Whether an array is a view of the first columns of another."""
    return (narrow.ptr == wide.ptr and 0 not in narrow.shape and narrow.shape[3] <= wide.shape[3]
            and all(size <= 1 or stride == other
                    for size, stride, other in zip(narrow.shape[:3], narrow.strides[:3], wide.strides[:3])))


def _check_appended(views: dict[str, View], v_is_k: bool) -> None:
    """Raise unless k and v can be written into the caches. ``views``: all inputs of the call."""
    k_cache, v_cache = views["k_cache"], views["v_cache"]
    for name, view in (("k_cache", k_cache), ("v_cache", v_cache)):
        if view.readonly:
            raise ValueError(f"{name} must be writable where k and v are appended; got a read-only array")
        if overlaps_itself(view):
            raise ValueError(f"{name} must not overlap itself where k and v are appended; got strides {view.strides} elements "
                             f"for shape {view.shape}")
        check_overlap(name, view, {other: x for other, x in views.items() if other not in ("k_cache", "v_cache")})
    if not v_is_k:
        if share_memory(k_cache, v_cache):
            raise ValueError("v_cache must not overlap k_cache where k and v are appended, unless it is "
                             "k_cache[..., :head_dim_v]: they share memory")
    elif 0 not in views["v"].shape and not _is_first_columns(views["v"], views["k"]):
        raise ValueError("v must be k[..., :head_dim_v], as v_cache is k_cache[..., :head_dim_v]; got an array at "
                         f"{views['v'].ptr:#x} with strides {views['v'].strides}, k is at {views['k'].ptr:#x} with strides "
                         f"{views['k'].strides}")


def _check_workspace(view: View, q: View, others: dict[str, View]) -> None:
    check_beside("workspace", view, q)
    if view.dtype != "uint8":
        raise TypeError(f"workspace must be uint8; got {view.dtype}")
    if len(view.shape) != 1:
        raise ValueError(f"workspace must have 1 axis; got shape {_original(view)}")
    if view.readonly:
        raise ValueError("workspace must be writable; got a read-only array")
    _check_packed("workspace", view)
    if view.shape[0] and view.ptr % WORKSPACE_ALIGNMENT:
        raise ValueError(f"workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes; its address is {view.ptr:#x}")
    check_overlap("workspace", view, others)


def check_workspace_size(view: View | None, num_bytes: int) -> None:
    """Raise ValueError if a workspace was given that is smaller than what the call needs on its device."""
    if view is not None and view.shape[0] < num_bytes:
        raise ValueError(f"workspace must have {num_bytes} bytes or more (cuflash.kvcache_workspace_bytes); got "
                         f"{view.shape[0]}")


def _num_splits(value) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"num_splits must be an integer; got {value!r}")
    if not 0 <= value <= MAX_SPLITS:
        raise ValueError(f"num_splits must be 0 (chosen) to {MAX_SPLITS}; got {value}")
    return int(value)


def fixed_length(problem: DecodeProblem, cache_seqlens) -> int:
    """The keys that each request has in the cache before the call, where no array says it: the number given, or None for as
    many as there may be. Raises unless they are there, with room for the new ones.
    """
    if problem.has_cache_seqlens:
        return 0                    # the array is read
    capacity, new = problem.seqlen_k, problem.seqlen_new
    if cache_seqlens is None:
        if new:
            raise ValueError("cache_seqlens must be given where k and v are appended: it says behind which keys")
        return capacity
    if type(cache_seqlens) is not int:
        if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, numbers.Integral):
            raise TypeError(f"cache_seqlens must be an integer, an array or None; got {cache_seqlens!r}")
        cache_seqlens = int(cache_seqlens)
    _check_cached(cache_seqlens, capacity, new, "")
    return cache_seqlens


def _check_cached(length: int, capacity: int, new: int, whose: str) -> None:
    if not 0 <= length <= capacity:
        raise ValueError(f"cache_seqlens must be 0 to {capacity}, the keys that the cache can hold of a request; got "
                         f"{length}{whose}")
    if length > capacity - new:
        raise ValueError(f"cache_seqlens must leave room for the {new} tokens of k and v, {capacity - new} or less of "
                         f"{capacity}; got {length}{whose}")


def check_cache_lengths(problem: DecodeProblem, cache_seqlens: np.ndarray | int | None, cache_batch_idx: np.ndarray | None,
                        block_table: np.ndarray | None) -> None:
    """Raise ValueError unless lengths, indices and pages, as arrays on the host, describe the caches."""
    if problem.has_cache_seqlens:
        lengths = cache_seqlens
        wrong = (lengths < 0) | (lengths > problem.seqlen_k - problem.seqlen_new)
        if wrong.any():
            at = int(np.argmax(wrong))
            _check_cached(int(lengths[at]), problem.seqlen_k, problem.seqlen_new, f" for request {at}")
    else:
        lengths = np.full(problem.batch, fixed_length(problem, cache_seqlens))
    if cache_batch_idx is not None:
        wrong = (cache_batch_idx < 0) | (cache_batch_idx >= problem.num_slots)
        if wrong.any():
            at = int(np.argmax(wrong))
            raise ValueError(f"cache_batch_idx must be 0 to {problem.num_slots - 1}, below the batch of k_cache; got "
                             f"{cache_batch_idx[at]} for request {at}")
        if problem.seqlen_new:
            used, counts = np.unique(cache_batch_idx, return_counts=True)
            if (counts > 1).any():
                raise ValueError("cache_batch_idx must not name a part of the cache twice where k and v are appended; got "
                                 f"{used[np.argmax(counts)]} for requests "
                                 f"{', '.join(map(str, np.flatnonzero(cache_batch_idx == used[np.argmax(counts)])[:2]))}")
    if block_table is not None:
        pages = -(-(lengths + problem.seqlen_new) // problem.page_size)
        wrong = (block_table < 0) | (block_table >= problem.num_slots)
        wrong &= np.arange(block_table.shape[1]) < pages[:, None]
        if wrong.any():
            request, page = map(int, np.argwhere(wrong)[0])
            raise ValueError(f"block_table must name pages 0 to {problem.num_slots - 1} of k_cache as far as a request has keys; "
                             f"got {block_table[request, page]} for page {page} of request {request}")


# ------------------------------------------------------------------------------------------------------------------ options

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


def check_beside(name: str, view: View, q: View, of: str = "q") -> None:
    """Raise unless the array is on the device of q, or what else it is called, and of its framework."""
    if view.device != q.device:
        raise ValueError(f"{name} must be on the device of {of}, {q.device}; got {view.device}")
    if view.framework != q.framework:
        raise TypeError(f"{name} must come from the framework of {of}, {q.framework}; got {view.framework}")


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


def _options(inputs: dict[str, View], causal=False, window=None, softmax_scale=None, softcap=0.0, *, seqlen_k=None) -> dict:
    """Fields of the problem that the options state. ``seqlen_k``: that of k by default."""
    (_, seqlen_q, _, head_dim), seqlen_k = inputs["q"].shape, inputs["k"].shape[1] if seqlen_k is None else seqlen_k
    left, right = _window(window)
    check_flag("causal", causal)
    if causal:
        right = 0 if right is None else min(right, 0)
    # A side that reaches past every key is no bound at all, in no sequence of a packed batch, and in no request that has fewer
    # keys in its cache than there may be; what is left fits int32.
    if left is not None and left >= seqlen_k - 1:
        left = None
    if right is not None and right >= seqlen_q - 1:
        right = None
    return {"softmax_scale": _scale(softmax_scale, head_dim), "softcap": _softcap(softcap), "window_left": left,
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


def _check_like(name: str, view: View, shape: tuple[int, ...], q: View, dtype: str | None = None, of: str = "q") -> None:
    """Raise unless the array has that shape, with or without the batch axis as q, and otherwise is like q, which is named
    ``of``."""
    if view.framework != q.framework:
        raise TypeError(f"{name} must come from the framework of {of}, {q.framework}; got {view.framework}")
    expected = shape[1:] if q.was_3d else shape
    if _original(view) != expected:
        raise ValueError(f"{name} must have shape {expected}; got {_original(view)}")
    if view.dtype != (dtype or q.dtype):
        raise TypeError(f"{name} must have the dtype of {of}, {q.dtype}; got {view.dtype}" if dtype is None else
                        f"{name} must be {dtype} where {of} is {q.dtype}; got {view.dtype}")
    if view.device != q.device:
        raise ValueError(f"{name} must be on the device of {of}, {q.device}; got {view.device}")


def _check_written(name: str, view: View, shape: tuple[int, ...], others: dict[str, View], of: str = "q") -> None:
    """Raise unless the array can take a result of that shape, apart from all others in memory. ``of``: the one it is like."""
    _check_like(name, view, shape, others[of], of=of)
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


def pairs_to_keep_apart(problem: Problem, results: tuple[str, ...], names) -> Iterator[tuple[str, str]]:
    """(one that is written, another) of each pair of the arrays of a call that must share no memory, whatever they hold."""
    written = (*results, *problem.in_place)
    for other, name in itertools.combinations(names, 2):
        if not problem.may_share(name, other):
            if name in written:
                yield name, other
            elif other in written:
                yield other, name
