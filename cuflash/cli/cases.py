"""The named cases of ``cuflash check``: sizes, options, contents and layout; and the layouts themselves."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..arrays import View, numpy_dtype
from ..launch import contiguous_strides
from ..problem import ITEMSIZE, Problem, check_attention

# ------------------------------------------------------------------------------------------------- layouts
# A layout maps a shape (batch, seqlen, heads, dim) to the strides of its axes and the place of its first
# element in a block of memory, all in elements.


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


@dataclass(frozen=True)
class Case:
    """One attention to check, in every dtype and tier that takes it.

    ``contents`` changes the drawn q, k and v in place. Where a layout is not packed, and with ``plain``, the
    result must also be, bit for bit, that of packed arrays without ``out=`` and lse.
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
    contents: Callable = lambda q, k, v: None
    q_layout: str = "packed"
    kv_layout: str = "packed"
    out_layout: str = "packed"
    plain: bool = False
    quick: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {
            "q": (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            "k": (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            "v": (self.batch, self.seqlen_k, self.heads_k, self.head_dim_v),
            "out": (self.batch, self.seqlen_q, self.heads_q, self.head_dim_v),
        }

    @property
    def layouts(self) -> dict[str, str]:
        return {"q": self.q_layout, "k": self.kv_layout, "v": self.kv_layout, "out": self.out_layout}

    @property
    def has_packed_twin(self) -> bool:
        return self.plain or set(self.layouts.values()) != {"packed"}

    def packed_twin(self) -> Case:
        return dataclasses.replace(self, q_layout="packed", kv_layout="packed", out_layout="packed")

    def draw(self, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """q, k and v, packed NumPy arrays; the same ones every time."""
        random = np.random.default_rng(zlib.crc32(self.name.encode()))
        q, k, v = (random.standard_normal(self.shapes[name]) for name in "qkv")
        self.contents(q, k, v)
        drawn = []
        for x, layout in ((q, self.q_layout), (k, self.kv_layout), (v, self.kv_layout)):
            strides, _ = LAYOUTS[layout](x.shape)
            one = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)] if x.size else x
            drawn.append(np.broadcast_to(one, x.shape).astype(numpy_dtype(dtype), order="C"))
        return tuple(drawn)

    def problem(self, dtype: str) -> Problem:
        """What the arrays of this case will state, each at an aligned address, before any exists."""
        views = {}
        for place, (name, shape) in enumerate(self.shapes.items(), 1):
            strides, first = LAYOUTS[self.layouts[name]](shape)
            views[name] = View(
                shape, strides, dtype, "cuda:0", (place << 40) + first * ITEMSIZE[dtype], "cupy"
            )
        return check_attention(**views, return_lse=True, **self.options)


def _seqlens(seqlen_q: int, seqlen_k: int, quick=False) -> Case:
    return Case(f"seqlen {seqlen_q} x {seqlen_k}", seqlen_q, seqlen_k, quick=quick)


def _head_dims(head_dim: int, head_dim_v: int, quick=False) -> Case:
    name = f"head_dim {head_dim}" + (f", of v {head_dim_v}" if head_dim_v != head_dim else "")
    return Case(name, 129, 150, head_dim, head_dim_v, quick=quick)


def _masked(name: str, seqlen_q: int, seqlen_k: int, quick=False, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, options=options, quick=quick)


def _scored(name: str, contents=lambda q, k, v: None, quick=False, **options) -> Case:
    return Case(name, 129, 193, options=options, contents=contents, quick=quick)


def _poisoned(name: str, seqlen_q: int, seqlen_k: int, contents, quick=False, **options) -> Case:
    return Case(name, seqlen_q, seqlen_k, options=options, contents=contents, quick=quick)


def _laid_out(name: str, q="packed", kv="packed", out="packed", quick=False) -> Case:
    return Case(name, 65, 129, batch=2, q_layout=q, kv_layout=kv, out_layout=out, quick=quick)


def _set(**rows):
    """Contents: {(first, stop): value} for rows of q, k or v, in all batches and heads."""

    def contents(q, k, v):
        arrays = {"q": q, "k": k, "v": v}
        for name, values in rows.items():
            for (first, stop), value in values.items():
                arrays[name][:, first:stop] = value

    return contents


def _one_value_is_nan(q, k, v):
    v[:, 70, :, 3] = math.nan


def _large_dots(q, k, v):
    """Products of about 70, of four features: few roundings, since the oracle itself is float64."""
    q[...], k[...] = 4 + np.abs(q) / 4, 4 + np.abs(k) / 4
    q[..., 4:] = 0


def _rising_dots(q, k, v):
    """Later keys have far larger logits: what earlier tiles gave must be scaled down again and again."""
    _large_dots(q, k, v)
    k *= np.linspace(0, 1, k.shape[1])[:, None, None]


CASES = (
    # Tile edges. Out of a tile's rows and keys, what is past the end must neither be read nor written.
    _seqlens(1, 1),
    _seqlens(2, 15),
    _seqlens(16, 17),
    _seqlens(63, 65, quick=True),
    _seqlens(64, 64),
    _seqlens(65, 63),
    _seqlens(127, 129),
    _seqlens(128, 128, quick=True),
    _seqlens(129, 127),
    _seqlens(193, 191),
    _seqlens(1, 300),
    _seqlens(300, 1),
    _masked("seqlen 1000 x 1030, causal", 1000, 1030, causal=True),
    _masked("seqlen 300 x 1030, window 200,100", 300, 1030, window=(200, 100)),
    Case("batch 3, 5 heads", 40, 70, heads_q=5, heads_k=5, batch=3),
    Case("no out=, no lse", 65, 129, plain=True, quick=True),
    # Nothing to do, or nothing to see.
    Case("batch 0", 8, 8, batch=0),
    Case("no heads", 8, 8, heads_q=0, heads_k=0),
    Case("seqlen 0 x 64", 0, 64, quick=True),
    Case("seqlen 64 x 0", 64, 0, quick=True),
    _head_dims(1, 1, quick=True),
    _head_dims(20, 20),
    _head_dims(80, 80),
    _head_dims(96, 96),
    _head_dims(128, 128, quick=True),
    _head_dims(192, 128),
    _head_dims(256, 256, quick=True),
    Case("8 heads, 2 of keys", 65, 129, heads_q=8, heads_k=2, batch=2, quick=True),
    Case("7 heads, 1 of keys, causal", 65, 129, heads_q=7, heads_k=1, options={"causal": True}),
    # Masks, counted from the bottom-right diagonal.
    _masked("causal 128 x 128", 128, 128, causal=True),
    _masked("causal 129 x 257", 129, 257, quick=True, causal=True),
    _masked("causal 257 x 129, empty rows", 257, 129, quick=True, causal=True),
    _masked("window 0,0", 193, 193, window=(0, 0)),
    _masked("window 31,7", 129, 257, quick=True, window=(31, 7)),
    _masked("window 100,open", 200, 257, window=(100, None)),
    _masked("window open,20", 129, 129, window=(None, 20)),
    _masked("window 50,20, causal", 257, 193, window=(50, 20), causal=True),
    _masked("window 16,3, empty rows", 300, 129, window=(16, 3)),
    # Scores. Options are shared where they can be: each set of them is a kernel more to compile.
    _scored("softcap 2, causal", quick=True, softcap=2.0, causal=True),
    _scored("softcap 30, causal, scale 3", softcap=30.0, causal=True, softmax_scale=3.0),
    _scored("scale 0", softmax_scale=0.0),
    _scored("scale -0.2", softmax_scale=-0.2),
    _scored("logits around 70", _large_dots, softmax_scale=1.0),
    _scored("logits around -700", _large_dots, quick=True, softmax_scale=-10.0),
    _scored("logits that rise to 70", _rising_dots, softmax_scale=1.0),
    # NaN and infinities reach exactly the rows that see them.
    _poisoned(
        "NaN in key 70, causal", 129, 193, _set(k={(70, 71): math.nan}, v={(70, 71): math.nan}), causal=True
    ),
    _poisoned(
        "NaN in the last key, causal",
        129,
        129,
        _set(k={(128, 129): math.nan}, v={(128, 129): math.nan}),
        quick=True,
        causal=True,
    ),
    _poisoned(
        "NaN in keys that no query sees",
        64,
        300,
        _set(k={(0, 200): math.nan}, v={(0, 200): math.nan}),
        quick=True,
        window=(30, 30),
    ),
    _poisoned(
        "inf in values, window 20,20",
        193,
        193,
        _set(v={(70, 71): math.inf, (160, 161): -math.inf}),
        window=(20, 20),
    ),
    _poisoned(
        "inf in keys that no query sees",
        64,
        300,
        _set(k={(0, 200): math.inf}, v={(0, 200): -math.inf}),
        window=(30, 30),
    ),
    _poisoned("NaN in one visible value", 65, 129, _one_value_is_nan),
    _poisoned("NaN in one query", 129, 65, _set(q={(64, 65): math.nan})),
    # Layouts: the result is that of packed arrays, bit for bit.
    _laid_out("transposed", "transposed", "transposed", "transposed", quick=True),
    _laid_out("fused QKV slice", "fused", "fused"),
    _laid_out("keys and values of stride 0", kv="expanded", quick=True),
    _laid_out("rows of 8-byte alignment", "pitched", "pitched", "pitched"),
    _laid_out("base addresses off by an element", "shifted", "shifted", "shifted", quick=True),
    _laid_out("backwards", "reversed", "reversed", "reversed"),
    _laid_out("three layouts at once", "fused", "transposed", "reversed"),
)
