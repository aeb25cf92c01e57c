"""What a case of ``cuflash check`` is: a call, its sizes, options, contents and layouts; and the layouts themselves."""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import ITEMSIZE, View, numpy_dtype
from ..memory import contiguous_strides
from ..problem import (
    Problem,
    check_attention,
    check_attention_backward,
    check_attention_varlen,
    check_attention_varlen_backward,
    check_attention_with_kvcache,
    lse_dtype,
)

# ------------------------------------------------------------------------------------------------- layouts
# A layout maps a shape (batch, seqlen, heads, dim) to the strides of its axes and the place of its first
# element in a block of memory, all in elements.


def place_in(layout: str, shape) -> tuple[tuple[int, ...], int]:
    """What a layout says of an array of up to 4 axes, the last of those that layouts know."""
    missing = 4 - len(shape)
    strides, first = LAYOUTS[layout]((1,) * missing + tuple(shape))
    return strides[missing:], first


def _packed(shape):
    return contiguous_strides(
        tuple(max(1, size) for size in shape)
    ), 0  # as frameworks do: an empty axis counts as 1


def _transposed(shape):
    batch, seqlen, heads, dim = shape
    return (heads * seqlen * dim, dim, seqlen * dim, 1), 0


def _fused(shape):
    """One of three that lie beside each other in every row, as a fused QKV projection writes them."""
    batch, seqlen, heads, dim = shape
    row = 3 * heads * dim
    return (seqlen * row, row, dim, 1), heads * dim


def _pitched(shape):
    """Heads 4 elements further apart than they are long: 16-bit rows start at multiples of 8 bytes."""
    batch, seqlen, heads, dim = shape
    return (seqlen * heads * (dim + 4), heads * (dim + 4), dim + 4, 1), 0


def _shifted(shape):
    """Packed, one element past an aligned address."""
    return _packed(shape)[0], 1


def _expanded(shape):
    """One key head of one sequence for all: stride 0 over batch and heads."""
    batch, seqlen, heads, dim = shape
    return (0, dim, 0, 1), 0


def _reversed(shape):
    """Sequence backwards in memory: a negative stride."""
    batch, seqlen, heads, dim = shape
    row = heads * dim
    return (seqlen * row, -row, dim, 1), max(0, seqlen - 1) * row


LAYOUTS = {
    "packed": _packed,
    "transposed": _transposed,
    "fused": _fused,
    "pitched": _pitched,
    "shifted": _shifted,
    "expanded": _expanded,
    "reversed": _reversed,
}

# --------------------------------------------------------------------------------------------------- cases


def dtype_of(name: str, dtype: str) -> str:
    """Of an array of a call whose q, k and v have ``dtype``."""
    return lse_dtype(dtype) if name in ("lse", "dlse") else dtype


@dataclass(frozen=True)
class Lengths:
    """The sequences of a packed batch: rows of each in q and in k, how many of those of k are used, rows after the last."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    used_k: tuple[int, ...] | None = None
    spare: int = 0

    def arrays(self) -> dict[str, np.ndarray]:
        """By their names in a call."""
        found = {
            f"cu_seqlens_{side}": np.array([0, *itertools.accumulate(rows)], np.int32)
            for side, rows in (("q", self.q), ("k", self.k))
        }
        if self.used_k is not None:
            found["seqused_k"] = np.array(self.used_k, np.int32)
        return found

    def unused(self, side: str) -> np.ndarray:
        """Whether each row takes part in nothing."""
        rows = self.q if side == "q" else self.k
        used = rows if side == "q" or self.used_k is None else self.used_k
        parts = [np.arange(total) >= count for total, count in zip(rows, used, strict=True)]
        return np.concatenate([*parts, np.ones(self.spare, bool)])


@dataclass(frozen=True)
class Cache:
    """Keys in a cache: how many each request has there, how many are appended, and in how many parts they are computed.

    ``page_size`` 0: each request has rows of its own. Else pages, in mixed order, the last ones of a table no pages at all.
    ``values_are_keys``: the values are the first columns of the keys.
    """

    lengths: tuple[int, ...]
    new: int = 0
    page_size: int = 0
    num_splits: int = 0
    values_are_keys: bool = False

    def pages(self) -> np.ndarray:
        """The table: pages of each request as far as it has keys, then numbers of none."""
        needed = -(-(np.array(self.lengths) + self.new) // self.page_size)
        table = np.full((len(needed), max(needed) + 1), -1, np.int32)
        table[:, 1::2] = np.iinfo(np.int32).max
        used = np.arange(table.shape[1]) < needed[:, None]
        table[used] = np.random.default_rng(0).permutation(needed.sum())
        return table

    def arrays(self) -> dict[str, np.ndarray]:
        """By their names in a call."""
        lengths = {"cache_seqlens": np.array(self.lengths, np.int32)}
        return lengths | ({"block_table": self.pages()} if self.page_size else {})

    def shape(self, seqlen: int) -> tuple[int, int]:
        """The first axes of a cache with room for that many keys of each request; pages, as many as are needed and one."""
        if not self.page_size:
            return len(self.lengths), seqlen
        return sum(-(-(length + self.new) // self.page_size) for length in self.lengths) + 1, self.page_size

    def used(self, cache: np.ndarray) -> np.ndarray:
        """Whether each row of a cache holds a key before the call, (batch, max_seqlen) or (num_pages, page_size)."""
        used = np.zeros(cache.shape[:2], bool)
        table = self.pages() if self.page_size else None
        for request, length in enumerate(self.lengths):
            keys = np.arange(length)
            if table is None:
                used[request, keys] = True
            else:
                used[table[request, keys // self.page_size], keys % self.page_size] = True
        return used


@dataclass(frozen=True)
class Case:
    """One attention to check, in every dtype and tier that takes it; with ``backward`` its gradients instead.

    ``contents`` changes the drawn arrays, by name, in place. With ``lengths`` sequences are packed, and rows that
    take part in nothing are NaN. With ``cache`` keys and values lie in caches, which are NaN where they hold none.
    ``out_layout`` is that of out, or of dout, ``kv_layout`` that of caches, and gradients lie as what they are of.
    Where a layout is not packed, and with ``plain``, results must also be, bit for bit, those of packed arrays
    that are not given arrays to write into.
    """

    name: str
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 64
    head_dim_v: int = 64
    heads_q: int = 2
    heads_k: int = 2
    batch: int = 1
    options: dict = dataclasses.field(default_factory=dict)
    contents: Callable = lambda arrays: None
    q_layout: str = "packed"
    kv_layout: str = "packed"
    out_layout: str = "packed"
    plain: bool = False
    quick: bool = False
    lengths: Lengths | None = None
    cache: Cache | None = None
    backward: bool = False
    deterministic: bool = False
    with_dlse: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the arrays that a call is given, those to write last."""
        batch = (self.batch,) if self.lengths is None else ()
        rows_q, rows_k = (*batch, self.seqlen_q, self.heads_q), (*batch, self.seqlen_k, self.heads_k)
        q, k, v, out = (*rows_q, self.head_dim), (*rows_k, self.head_dim), (*rows_k, self.head_dim_v), (*rows_q, self.head_dim_v)
        if self.cache is not None:
            lead, dims = self.cache.shape(self.seqlen_k), {"k": self.head_dim, "v": self.head_dim_v}
            caches = {f"{name}_cache": (*lead, self.heads_k, dim) for name, dim in dims.items()}
            new = {name: (self.batch, self.cache.new, self.heads_k, dim) for name, dim in dims.items()}
            return {"q": q, **caches, **(new if self.cache.new else {}), "out": out}
        if not self.backward:
            return {"q": q, "k": k, "v": v, "out": out}
        dlse = {"dlse": self.lse_shape} if self.with_dlse else {}
        return {"q": q, "k": k, "v": v, "dout": out, **dlse, "dq": q, "dk": k, "dv": v}

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return (*((self.batch,) if self.lengths is None else ()), self.heads_q, self.seqlen_q)

    @property
    def written(self) -> tuple[str, ...]:
        return ("dq", "dk", "dv") if self.backward else ("out",)

    @property
    def views(self) -> dict[str, str]:
        """Arrays that are the first columns of another."""
        if self.cache is None or not self.cache.values_are_keys:
            return {}
        return {"v_cache": "k_cache", **({"v": "k"} if self.cache.new else {})}

    @property
    def in_place(self) -> tuple[str, ...]:
        """The inputs that a call changes."""
        return ("k_cache", "v_cache") if self.cache is not None and self.cache.new else ()

    @property
    def called_with(self) -> dict:
        """The options, and those that change no result beyond rounding."""
        return self.options if self.cache is None else {**self.options, "num_splits": self.cache.num_splits}

    @property
    def repeatable(self) -> tuple[str, ...]:
        """The results that have the same bits in every run."""
        if not self.backward:
            return ("out", "lse")
        return ("dq", "dk", "dv") if self.deterministic else ("dk", "dv")

    @property
    def layouts(self) -> dict[str, str]:
        layouts = {"q": self.q_layout, "k": self.kv_layout, "v": self.kv_layout}
        if self.cache is not None:
            caches = {"k_cache": self.kv_layout, "v_cache": self.kv_layout}
            return {**dict.fromkeys(self.shapes, "packed"), "q": self.q_layout, **caches, "out": self.out_layout}
        if not self.backward:
            return {**layouts, "out": self.out_layout}
        # A result has an address for each element.
        results = {f"d{name}": "packed" if layout == "expanded" else layout for name, layout in layouts.items()}
        return {**layouts, "dout": self.out_layout, **({"dlse": "packed"} if self.with_dlse else {}), **results}

    @property
    def has_packed_twin(self) -> bool:
        return self.plain or {self.q_layout, self.kv_layout, self.out_layout} != {"packed"}

    def packed_twin(self) -> Case:
        return dataclasses.replace(self, q_layout="packed", kv_layout="packed", out_layout="packed")

    def draw(self, dtype: str) -> dict[str, np.ndarray]:
        """q, k and v, for gradients dout and dlse, for a cache what goes with it: packed NumPy arrays, the same every time."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        arrays = {
            name: random.standard_normal(shape)
            for name, shape in self.shapes.items()
            if name not in self.written
        }
        self.contents(arrays)
        if self.lengths is not None:
            for name, x in arrays.items():
                unused = self.lengths.unused("k" if name in "kv" else "q")
                x[(slice(None), unused) if name == "dlse" else unused] = math.nan
        for name in ("k_cache", "v_cache") if self.cache is not None else ():
            arrays[name][~self.cache.used(arrays[name])] = math.nan
        for name, x in arrays.items():
            strides, _ = place_in(self.layouts[name], x.shape)
            one = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)] if x.size else x
            arrays[name] = np.broadcast_to(one, x.shape).astype(numpy_dtype(dtype_of(name, dtype)), order="C")
        for name, of in self.views.items():
            arrays[name] = arrays[of][..., : self.head_dim_v]
        return arrays

    def integers(self) -> dict[str, np.ndarray]:
        """Lengths, and the table of pages, by their names in a call."""
        described = self.lengths or self.cache
        return {} if described is None else described.arrays()

    def problems(self, dtype: str) -> list[Problem]:
        """What the arrays of this case will state, each at an aligned address, before any exists.

        Before that of the gradients comes that of the forward, whose out and lse they take.
        """
        views = {name: self._view(name, shape, dtype) for name, shape in self.shapes.items()}
        lengths = self._length_views()
        if self.cache is not None:
            for name, of in self.views.items():
                views[name] = views[of]._replace(shape=views[name].shape)
            return [check_attention_with_kvcache(**views, **lengths, return_lse=True, **self.called_with)]
        forward = {name: views[name] for name in ("q", "k", "v", "out") if name in views}
        check = check_attention if self.lengths is None else check_attention_varlen
        problems = [check(**forward, **lengths, return_lse=True, **self.options)]
        if self.backward:
            for name, shape in (("out", self.shapes["dout"]), ("lse", self.lse_shape)):
                views[name] = self._view(name, shape, dtype)
            check = check_attention_backward if self.lengths is None else check_attention_varlen_backward
            problems.append(check(**views, **lengths, deterministic=self.deterministic, **self.options))
        return problems

    def _view(self, name: str, shape, dtype: str) -> View:
        dtype = dtype_of(name, dtype)
        strides, first = place_in(self.layouts.get(name, "packed"), shape)
        names = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "k_cache", "v_cache")
        block = names.index(name) + 1
        axis = (1,) * (len(shape) == 3)
        ptr = (block << 40) + first * ITEMSIZE[dtype]
        return View((*axis, *shape), (*axis, *strides), dtype, "cuda:0", ptr, "cupy", len(shape) == 3)

    def _length_views(self) -> dict[str, View]:
        return {
            name: View(x.shape, contiguous_strides(x.shape), x.dtype.name, "cuda:0", place << 50, "cupy")
            for place, (name, x) in enumerate(self.integers().items(), 1)
        }
