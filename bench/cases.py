"""What is measured: named cases in suites, what each costs at least, its data, and the truth of some rows."""

from __future__ import annotations

import functools
import itertools
import math
import sys
import zlib
from dataclasses import dataclass, replace

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.problem import ITEMSIZE

# How far a result may be from float64. Loose, since one that keeps its logits in 16 bits is a contender too,
# but no wrong one passes: values are of size 1. Gradients are not, and are measured against the size of their row
# (`relative_error`). Float32 rejects TF32, which is another problem.
TOLERANCE = {"float16": 0.03, "bfloat16": 0.1, "float32": 2e-4, "float64": 1e-10}


@dataclass(frozen=True)
class Case:
    """One forward or backward: sizes and options as ``cuflash.attention`` has them.

    With ``lengths`` the sequences are packed (``cuflash.attention_varlen``, queries and keys alike); ``batch`` and
    ``seqlen_q`` are then their number and the longest. ``graph`` says that a call is so short that it is timed as a
    CUDA graph, with its inputs in L2; ``wall`` that what the host takes belongs to it: by the host's clock. A ``step`` is a
    backward with the forward before it in the same call, as training has them.
    """

    suite: str
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads_q: int
    heads_k: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    graph: bool = False
    backward: bool = False
    lengths: tuple[int, ...] = ()
    wall: bool = False
    step: bool = False

    clocked = False  # by the host's clock too: see bench/decode.py

    @property
    def name(self) -> str:
        """All that tells it from the other cases of a suite: "d128 s2048 b8 h16 causal"."""

        def two(letter, a, b):
            return f"{letter}{a}" if a == b else f"{letter}{a}/{b}"

        sequences = f"{two('s', self.seqlen_q, self.seqlen_k)} b{self.batch}"
        if self.lengths:
            packed = "packed" if self.is_uniform else f"t{sum(self.lengths)}"
            sequences = f"s{'' if self.is_uniform else '<='}{self.seqlen_q} b{self.batch} {packed}"
        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask = f"{'causal ' if self.causal else ''}window {self.window[0]},{self.window[1]}"
        heads = two("h", self.heads_q, self.heads_k)
        return " ".join((two("d", self.head_dim, self.head_dim_v), sequences, heads, mask)) + self._pass

    @property
    def _pass(self) -> str:
        return " fwd+bwd" if self.step else " bwd" if self.backward else ""

    @property
    def options(self) -> dict:
        """Keyword arguments of ``cuflash.attention``."""
        return {"causal": self.causal} | ({} if self.window is None else {"window": self.window})

    @property
    def is_uniform(self) -> bool:
        """All packed sequences are as long."""
        return len(set(self.lengths)) == 1

    @property
    def pairs(self) -> float:
        """Pairs of query and key that see each other, of one head in all sequences. Causal with equal lengths
        counts as half of all, as peers count it; any other mask is counted exactly.
        """
        if self.lengths:
            return sum(self.alone(number).pairs for number in range(self.batch))
        if self.window is None and not self.causal:
            return self.batch * self.seqlen_q * self.seqlen_k
        if self.window is None and self.seqlen_q == self.seqlen_k:
            return self.batch * self.seqlen_q * self.seqlen_k / 2
        first, last = self.visible(np.arange(self.seqlen_q))
        return self.batch * int(np.maximum(0, last - first + 1).sum())

    @property
    def flops(self) -> float:
        """Of the products alone; without a mask 4 * batch * heads * seqlen_q * seqlen_k * head_dim for the two of a
        forward, 2.5 times as much for the five of a backward.
        """
        forward, backward = self.head_dim + self.head_dim_v, 3 * self.head_dim + 2 * self.head_dim_v
        widths = backward + forward * self.step if self.backward else forward
        return 2 * self.heads_q * self.pairs * widths

    @property
    def work(self) -> float:
        """What rates count: problems are compared by the time for the same work."""
        return self.flops

    @property
    def bytes(self) -> int:
        """Each input read once, each output written once: a backward reads out, dout and lse too, and writes as much
        as q, k and v are; a step takes what both take.
        """
        rows_q, rows_k = (math.prod(shape[:-1]) for shape in self.shapes[:2])
        once = (rows_q + rows_k) * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]
        lse = rows_q * (8 if self.dtype == "float64" else 4)
        return (2 + self.step) * once + (1 + self.step) * lse if self.backward else once

    @property
    def seed(self) -> int:
        """Its own, and the same in every run."""
        return zlib.crc32(f"{self.suite} {self.dtype} {self.name}".encode())

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v."""
        rows_q, rows_k = ((self.batch, seqlen) for seqlen in (self.seqlen_q, self.seqlen_k))
        if self.lengths:
            rows_q = rows_k = (sum(self.lengths),)
        return (
            (*rows_q, self.heads_q, self.head_dim),
            (*rows_k, self.heads_k, self.head_dim),
            (*rows_k, self.heads_k, self.head_dim_v),
        )

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Of out and its gradient."""
        return (*self.shapes[0][:-1], self.head_dim_v)

    @property
    def result_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of what a call returns: out, or dq, dk and dv."""
        return self.shapes if self.backward else (self.out_shape,)

    @property
    def by_row(self) -> bool:
        """Errors are measured by the size of their row."""
        return self.backward

    @property
    def tolerance(self) -> float:
        """Errors up to this are those of a right result."""
        return TOLERANCE[self.dtype]

    @property
    def answer(self) -> Case:
        """Cases that have this in common have the same result."""
        return self

    @property
    def facts(self) -> dict:
        """What a record says about it, beside what it says about every case."""
        return {"lengths": self.lengths} if self.lengths else {}

    def rates(self, seconds: float) -> dict:
        """What a record says about the speed of it, beside what it says of every case."""
        return {}

    @property
    def starts(self) -> list[int]:
        """``cu_seqlens`` of the packed sequences."""
        return [0, *itertools.accumulate(self.lengths)]

    @property
    def ungrouped(self) -> Case:
        """The case whose rate is the measure of one with grouped heads: with as many key heads as query heads."""
        return replace(self, heads_k=self.heads_q)

    @property
    def unwindowed(self) -> Case:
        """The case whose rate is the measure of a window: all keys up to a query's own."""
        return replace(self, window=None, causal=True) if self.window else self

    @property
    def dense(self) -> Case:
        """The dense case whose rate is the measure of a packed one: the same sequences if they are as long, else as
        many tokens in sequences as long as the longest.
        """
        batch = self.batch if self.is_uniform else max(1, round(sum(self.lengths) / self.seqlen_q))
        return replace(self, batch=batch, lengths=())

    def alone(self, number: int) -> Case:
        """One of the sequences as a dense case."""
        length = self.lengths[number] if self.lengths else None
        seqlens = {"seqlen_q": length, "seqlen_k": length} if self.lengths else {}
        return replace(self, batch=1, lengths=(), **seqlens)

    def part(self, x, number: int, head: int):
        """(seqlen, head_dim): one head of one sequence of an input or result."""
        if not self.lengths:
            return x[number, :, head]
        start = sum(self.lengths[:number])
        return x[start : start + self.lengths[number], head]

    def visible(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last key that the queries ``i`` of a dense case see (first > last: none)."""
        diagonal = i + self.seqlen_k - self.seqlen_q
        left, right = self.window or (None, None)
        first = np.zeros_like(i) if left is None else np.maximum(0, diagonal - left)
        last = (
            np.full_like(i, self.seqlen_k - 1)
            if right is None
            else np.minimum(self.seqlen_k - 1, diagonal + right)
        )
        return first, np.minimum(last, diagonal) if self.causal else last


def packed(suite, dtype, lengths, heads, head_dim, causal=False, **changes) -> Case:
    """A case of packed sequences."""
    longest = max(lengths)
    return Case(
        suite, dtype, len(lengths), longest, longest, heads, heads, head_dim, head_dim, causal, lengths=tuple(lengths),
        **changes,
    )


# ------------------------------------------------------------------------------------------------------------
# Suites

_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def _square(suite, dtype, tokens, hidden, head_dim, seqlen, causal, *, heads_k=None, window=None, head_dim_v=None) -> Case:
    heads = max(1, hidden // head_dim)
    return Case(
        suite,
        dtype,
        max(1, tokens // seqlen),
        seqlen,
        seqlen,
        heads,
        heads_k or heads,
        head_dim,
        head_dim_v or head_dim,
        causal,
        window,
    )


def _forward(dtype, head_dims, seqlens, masks, tokens=16384, hidden=2048, suite="forward"):
    return [
        _square(suite, dtype, tokens, hidden, head_dim, seqlen, causal)
        for head_dim in head_dims
        for seqlen in seqlens
        for causal in masks
    ]


def _float64(dtype, head_dims, seqlens, masks):
    return _forward(dtype, head_dims, seqlens, masks, tokens=2048, hidden=512, suite="float64")


def _float32(dtype, head_dims, seqlens, masks):
    return _forward(dtype, head_dims, seqlens, masks, tokens=8192, suite="float32")


def _gqa(dtype, head_dims, seqlens, masks):
    """32 query heads on 8 key heads, as Llama 3 has them, and on 4; forward and backward."""
    return [
        replace(
            _square("gqa", dtype, 16384, 32 * head_dim, head_dim, seqlen, causal, heads_k=heads_k), backward=backward
        )
        for backward in (False, True)
        for head_dim in head_dims
        for heads_k in (8, 4)
        for seqlen in seqlens
        for causal in masks
    ]


def _head_dims(dtype, head_dims, seqlens, masks):
    """Those that suite forward has not, and (192, 128); forward and backward."""
    pairs = [(head_dim, head_dim) for head_dim in head_dims] + [(192, 128)] * (192 in head_dims)
    return [
        replace(
            _square("head-dims", dtype, 16384, 2048, head_dim, seqlen, causal, head_dim_v=head_dim_v), backward=backward
        )
        for backward in (False, True)
        for head_dim, head_dim_v in pairs
        for seqlen in seqlens
        for causal in masks
    ]


def _window(dtype, head_dims, seqlens, masks):
    """The last 1024 or 4096 keys under a causal mask; 512 on both sides without."""
    windows = {True: ((1024, 0), (4096, 0)), False: ((512, 512),)}
    return [
        _square("window", dtype, 16384, 2048, head_dim, seqlen, causal, window=window)
        for head_dim in head_dims
        for seqlen in seqlens
        for causal in masks
        for window in windows[causal]
    ]


def _small(dtype, head_dims, seqlens, masks):
    return [
        Case("small", dtype, 1, seqlen, seqlen, 16, 16, head_dim, head_dim, causal, graph=True)
        for head_dim in head_dims
        for seqlen in seqlens
        for causal in masks
    ]


def _backward(dtype, head_dims, seqlens, masks):
    return [replace(case, backward=True) for case in _forward(dtype, head_dims, seqlens, masks, suite="backward")]


def _step(dtype, head_dims, seqlens, masks):
    """A forward and its backward in one call."""
    cases = _forward(dtype, head_dims, seqlens, masks, suite="step")
    return [replace(case, backward=True, step=True) for case in cases]


# Of the lengths that are drawn. RandomState's stream is frozen, so they are the same with every NumPy.
LENGTHS_SEED = 3


def _drawn(low: int, high: int, count: int) -> tuple[int, ...]:
    return tuple(int(length) for length in np.random.RandomState(LENGTHS_SEED).randint(low, high + 1, count))


def _varlen(dtype, head_dims, seqlens, masks):
    """16k tokens packed: sequences as long (``seqlens``); a long one among 16 short ones; and 128 short ones, where
    what the host takes counts.
    """
    skewed, short = (8192, *_drawn(16, 1024, 16)), _drawn(1, 255, 128)
    batches = [((seqlen,) * (16384 // seqlen), False) for seqlen in seqlens] + [(skewed, False), (short, True)]
    return [
        packed("varlen", dtype, lengths, 2048 // head_dim, head_dim, causal, backward=backward, wall=wall)
        for backward in (False, True)
        for lengths, wall in batches
        for head_dim in head_dims
        for causal in masks
    ]


def _decoding(name):
    """A suite of bench/decode.py. Its sizes are its own: head_dims and seqlens choose among them."""

    def make(dtype, head_dims, seqlens, masks):
        from . import decode  # which builds on this module

        return [
            case
            for case in decode.suite(name, dtype, masks[-1])
            if case.head_dim in (head_dims or (case.head_dim,)) and case.seqlen_k in (seqlens or (case.seqlen_k,))
        ]

    return make, ("bfloat16", "float16"), (), ()


# name -> (cases, dtypes that it is about, the usual one first, head_dims, seqlens)
_SUITES = {
    "forward": (_forward, ("bfloat16", "float16"), (64, 128, 256), _SEQLENS),
    "float32": (_float32, ("float32",), (64, 128), (2048, 8192)),
    "float64": (_float64, ("float64",), (64, 128), (1024, 2048)),
    "gqa": (_gqa, ("bfloat16", "float16"), (128, 64), (2048, 8192)),
    "window": (_window, ("bfloat16", "float16"), (128, 64), (16384,)),
    "small": (_small, ("bfloat16", "float16"), (128,), (128, 256, 512, 1024)),
    "backward": (_backward, ("bfloat16", "float16"), (64, 128, 256), (2048, 4096, 16384)),
    "step": (_step, ("bfloat16", "float16"), (64, 128, 256), (2048, 16384)),
    "head-dims": (_head_dims, ("bfloat16", "float16"), (96, 192), (4096, 16384)),
    "varlen": (_varlen, ("bfloat16", "float16"), (64, 128), (2048, 1024)),
    **{name: _decoding(name) for name in ("decode", "decode-paged", "decode-queries", "decode-mla", "decode-append")},
}
SUITES = tuple(_SUITES)


def suite(name: str, *, dtype=None, head_dims=(), seqlens=(), causal: bool | None = None) -> list[Case]:
    """The cases of a suite; ``head_dims``, ``seqlens`` and ``causal`` (None: without and with) replace its
    own. Of decoding, ``head_dims`` and ``seqlens`` (of keys) choose among its own, and ``causal`` None is True.

    Raises ValueError for a name or dtype that it does not have, and if no case is left.
    """
    if name not in _SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}; got {name!r}")
    make, dtypes, usual_head_dims, usual_seqlens = _SUITES[name]
    dtype = dtype or dtypes[0]
    if dtype not in dtypes:
        raise ValueError(f"dtype of suite {name} must be one of {', '.join(dtypes)}; got {dtype!r}")
    masks = (False, True) if causal is None else (causal,)
    cases = make(dtype, tuple(head_dims) or usual_head_dims, tuple(seqlens) or usual_seqlens, masks)
    if not cases:
        raise ValueError(f"suite {name} has no case of head_dim {head_dims or 'any'} and seqlen {seqlens or 'any'}")
    return cases


def table(
    *,
    dtype: str,
    head_dims,
    seqlens,
    causal: bool | None = None,
    tokens=16384,
    hidden=2048,
    backward: bool = False,
    varlen: bool = False,
    decode: bool = False,
) -> list[Case]:
    """Cases of ``tokens`` tokens and ``hidden // head_dim`` heads each, for any dtype: square, or with ``varlen``
    packed sequences of lengths drawn from 1 to seqlen, or with ``decode`` one query on each seqlen keys in a cache.
    """
    if decode:
        from .decode import table

        return table(dtype, head_dims, seqlens, causal is not False, tokens, hidden)
    masks = (False, True) if causal is None else (causal,)
    cases = _forward(dtype, head_dims, seqlens, masks, tokens, hidden, suite="table")
    if varlen:
        cases = [
            packed("table", dtype, _filled(tokens, case.seqlen_q), case.heads_q, case.head_dim, case.causal)
            for case in cases
        ]
    return [replace(case, backward=backward) for case in cases]


def _filled(tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths drawn from 1 to ``longest`` until they are ``tokens`` in all; the last is cut."""
    ends = np.cumsum(_drawn(1, longest, tokens))
    ends = np.append(ends[ends < tokens], tokens)
    return tuple(int(length) for length in np.diff(ends, prepend=0))


@dataclass(frozen=True)
class Asked:
    """What a case must reach: ``cuflash`` at least ``bound`` times as fast as the contender, by the ``clock`` of single or
    queued calls if one is named; ``keeps``: the contender at least ``bound`` times as fast as ``cuflash``. Without a
    contender: at least ``bound`` of the ``figure`` of the record, or at most ``bound`` seconds a call.
    """

    bound: float
    contender: str | None = None
    keeps: bool = False
    figure: str | None = None
    clock: str | None = None

    def judge(self, entry: dict, speed_over: dict | None) -> dict | None:
        """What was reached, for the record: ``entry`` is that of cuflash, ``speed_over`` its speed over the contender by
        clock, "ratio" that of its kernels. None if the contender took no part.
        """
        if self.figure is not None:
            value = entry[self.figure]
            return {"what": self.figure, "value": value, "asked": self.bound, "ok": value >= self.bound}
        if self.contender is None:
            seconds = entry["median_s"]
            return {"what": "ms", "value": round(seconds * 1e3, 4), "asked": self.bound * 1e3, "ok": seconds <= self.bound}
        ratio = (speed_over or {}).get(self.clock or "ratio")
        if ratio is None:
            return None
        value = 1 / ratio if self.keeps else ratio
        what = f"{self.contender} over cuflash" if self.keeps else f"cuflash over {self.contender}"
        if self.clock:
            what += f", {self.clock} calls"
        return {"what": what, "value": round(value, 4), "asked": round(self.bound, 4), "ok": value >= self.bound}


@functools.singledispatch
def asked(case: Case) -> list[Asked]:
    """The targets of the suites that have some."""
    if case.suite == "backward":
        rivals = [Asked(1.0, name) for name in ("sdpa_flash", "sdpa_cudnn", "fa3_jax", "fa4")]
        return [*rivals, Asked(0.9, "cuflash-deterministic", keeps=True)]
    if case.suite == "forward":
        return [Asked(1.0, "sdpa_cudnn"), Asked(1.0, "fa3"), Asked(0.98, "cuflash-bfloat16")]
    if case.suite == "window":
        return [Asked(0.8, "cuflash-causal")] if case.window == (1024, 0) else []
    if case.suite == "gqa":
        return [Asked(1.0, "cuflash-mha")]
    if case.suite != "varlen":
        return []
    if case.wall:
        return [] if case.backward else [Asked(0.2e-3)]
    return [Asked(0.95 if case.is_uniform else 0.85, "cuflash-dense")]


# ------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Arrays:
    """q, k and v of a case, of ``framework`` "torch" (on a GPU), "cupy" or "numpy"; dout for a backward; ``starts``,
    the int32 ``cu_seqlens``, for packed sequences. ``turns``: the same in several places, for calls to take in turns.
    """

    framework: str
    q: object
    k: object
    v: object
    dout: object = None
    starts: object = None
    turns: tuple = ()


@functools.singledispatch
def make_arrays(case: Case, framework: str) -> Arrays:
    """Normal values, made where they are needed; on the current device and stream."""
    q, k, v, *dout = normal(case, framework, (*case.shapes, case.out_shape) if case.backward else case.shapes)
    starts = int32(case.starts, framework) if case.lengths else None
    return Arrays(framework, q, k, v, dout[0] if dout else None, starts)


def normal(case: Case, framework: str, shapes) -> list:
    """Arrays of normal values."""
    make = {"torch": _torch_normal, "cupy": _cupy_normal, "numpy": _numpy_normal}[framework]
    return make(case, shapes)


def int32(values, framework):
    if framework == "torch":
        torch = sys.modules["torch"]
        return torch.tensor(values, dtype=torch.int32, device="cuda")
    if framework == "cupy":
        import cupy

        return cupy.asarray(values, dtype=np.int32)
    return np.array(values, np.int32)


def _torch_normal(case, shapes):
    torch = sys.modules["torch"]
    generator = torch.Generator(device="cuda").manual_seed(case.seed)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, case.dtype))
        for shape in shapes
    ]


def _numpy_normal(case, shapes):
    rng = np.random.default_rng(case.seed)
    return [rng.standard_normal(shape, np.float32).astype(numpy_dtype(case.dtype)) for shape in shapes]


# SplitMix64 (Steele, Lea, Flood 2014) of the index, then Box-Muller: needs no cuRAND, which CuPy comes
# without.
_NORMAL = """
    unsigned long long x = seed + ((unsigned long long)i + 1) * 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    x = x ^ (x >> 31);
    const float uniform = ((float)(unsigned int)(x >> 32) + 1.0f) * 2.3283064365386963e-10f;    // in (0, 1]
    const float radius = sqrtf(-2.0f * logf(uniform));
    const float normal = radius * cospif((float)(unsigned int)x * 4.6566128730773926e-10f);
"""
_STORE = "y = normal;"
_STORE_BFLOAT16 = """
    const unsigned int bits = __float_as_uint(normal);
    y = (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);     // to nearest, ties to even
"""


@functools.cache
def _normal_kernel(bfloat16: bool):
    import cupy

    if bfloat16:
        return cupy.ElementwiseKernel(
            "uint64 seed", "uint16 y", _NORMAL + _STORE_BFLOAT16, "cuflash_bench_normal_bf16"
        )
    return cupy.ElementwiseKernel("uint64 seed", "T y", _NORMAL + _STORE, "cuflash_bench_normal")


def _cupy_normal(case, shapes):
    import cupy

    dtype = numpy_dtype(case.dtype)
    arrays = []
    for number, shape in enumerate(shapes):
        bfloat16 = case.dtype == "bfloat16"
        bits = cupy.empty(shape, np.uint16 if bfloat16 else dtype)
        _normal_kernel(bfloat16)(np.uint64(case.seed + (number << 40)), bits)
        arrays.append(cupy.ndarray(shape, dtype, memptr=bits.data))
    return arrays


def to_host(x) -> np.ndarray:
    """A small slice, in float64."""
    if isinstance(x, np.ndarray):
        return x.astype(np.float64)
    if hasattr(x, "data_ptr"):
        return x.detach().double().cpu().numpy()
    return as_words(x).get().view(x.dtype).astype(np.float64)


def as_words(x):
    """A CuPy array of bfloat16 as one of its bits, since not every CuPy has all operations for it; others as they are."""
    if hasattr(x, "data_ptr") or isinstance(x, np.ndarray) or x.dtype.name != "bfloat16":
        return x
    import cupy

    return cupy.ndarray(x.shape, np.uint16, memptr=x.data, strides=x.strides)


def largest_difference(a, b) -> float:
    """max |a - b|, nan if there is one, where the arrays are."""
    if hasattr(a, "data_ptr"):
        wide = a.double() if str(a.dtype) == "torch.float64" else a.float()
        return float((wide - b.to(wide.dtype)).abs_().max())
    if isinstance(a, np.ndarray):
        wide = np.float64 if a.dtype == np.float64 else np.float32
        return float(np.abs(a.astype(wide) - b.astype(wide)).max())
    return float(abs(_cupy_wide(a) - _cupy_wide(b)).max())


def _cupy_wide(x):
    if x.dtype.name == "bfloat16":
        return (as_words(x).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x if x.dtype == np.float64 else x.astype(np.float32)


def relative_error(error, size):
    """Errors of rows over the sizes of these rows: 1-D arrays of any one library. A row smaller than the median row
    counts as that: what cancels to nothing in it does not cancel in 16 bits.
    """
    usual = float(np.median(to_host(size))) if len(size) else 0.0
    small = size < usual
    size = size + small * (usual - size)
    return error / (size + (size == 0))


def largest_relative_difference(a, b) -> float:
    """``relative_error`` of the worst row of ``a`` beside ``b``, nan if there is one."""
    if hasattr(a, "data_ptr"):
        wide = a.double() if str(a.dtype) == "torch.float64" else a.float()
        b = b.to(wide.dtype)
        rows = (wide - b).abs_().amax(-1).flatten(), b.abs().amax(-1).flatten()
    else:
        widen = (lambda x: x.astype(np.promote_types(x.dtype, np.float32))) if isinstance(a, np.ndarray) else _cupy_wide
        a, b = widen(a), widen(b)
        rows = abs(a - b).max(-1).ravel(), abs(b).max(-1).ravel()
    return float(relative_error(*rows).max()) if len(rows[0]) else 0.0


class Truth:
    """Some rows of the results in float64: 32 of the first head of the first sequence, of the last of the last, and of
    the first of the longest.

    What they leave out is compared with cuflash's own result, element by element.
    """

    def __init__(self, case: Case, arrays: Arrays):
        self.case = case
        rng = np.random.default_rng(case.seed)
        parts = {(0, 0), (case.batch - 1, case.heads_q - 1)}
        if case.lengths:
            parts.add((case.lengths.index(case.seqlen_q), 0))
        make = _true_gradients if case.backward else _true_rows
        self.expected = {part: make(case, arrays, *part, rng) for part in sorted(parts)}

    def error(self, result) -> float:
        """Of a result, out or (dq, dk, dv): the largest error, absolute of out, relative of gradients; nan if one is
        not a number.
        """
        results, group, worst = (result if self.case.backward else (result,)), self.case.heads_q // self.case.heads_k, [0.0]
        for (number, head), expected in self.expected.items():
            for index, (rows, values) in enumerate(expected):
                x = self.case.part(results[index], number, head // group if index else head)
                error = np.abs(to_host(x)[rows] - values)
                if self.case.backward:
                    error = relative_error(error.max(axis=1), np.abs(values).max(axis=1))
                worst.append(error.max())
        return float(np.max(worst))


@functools.singledispatch
def truth_of(case: Case, arrays: Arrays) -> Truth:
    return Truth(case, arrays)


def _some(seqlen: int, rng) -> np.ndarray:
    return np.unique(np.concatenate([[0, seqlen - 1], rng.integers(0, seqlen, 30)]))


def _true_rows(case: Case, arrays: Arrays, number: int, head: int, rng):
    """[(rows, out of these rows)]."""
    alone, head_k = case.alone(number), head // (case.heads_q // case.heads_k)
    rows = _some(alone.seqlen_q, rng)
    q = to_host(case.part(arrays.q, number, head))[rows]
    k, v = (to_host(case.part(x, number, head_k)) for x in (arrays.k, arrays.v))
    first, last = alone.visible(rows)
    key = np.arange(alone.seqlen_k)
    hidden = (key < first[:, None]) | (key > last[:, None])
    logits = np.where(hidden, -np.inf, q @ k.T * case.head_dim**-0.5)
    top = logits.max(axis=1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=1, keepdims=True)
    return [(rows, weights @ v / np.where(total == 0, 1, total))]


_CHUNK = 1024  # queries whose float64 scores are held at a time


def _true_gradients(case: Case, arrays: Arrays, number: int, head: int, rng):
    """[(rows of queries, dq), (rows of keys, dk), (rows of keys, dv)]; dq of ``head``, dk and dv of its key head.

    A column of the score matrix needs every row's softmax, so all of it is computed, in chunks, where the arrays are.
    """
    xp, wide = library_of(arrays)
    alone, group = case.alone(number), case.heads_q // case.heads_k
    rows_q, rows_k = _some(alone.seqlen_q, rng), _some(alone.seqlen_k, rng)
    keys = rows_k.tolist()
    k, v = (wide(case.part(x, number, head // group)) for x in (arrays.k, arrays.v))
    scale, dq, dk, dv = case.head_dim**-0.5, [], 0, 0
    key = xp.arange(alone.seqlen_k, device=k.device) if arrays.framework == "torch" else xp.arange(alone.seqlen_k)
    for h in range(head // group * group, head // group * group + group):
        q, dout = (wide(case.part(x, number, h)) for x in (arrays.q, arrays.dout))
        for start in range(0, alone.seqlen_q, _CHUNK):
            stop = min(start + _CHUNK, alone.seqlen_q)
            first, last = (like(key, x) for x in alone.visible(np.arange(start, stop)))
            p = q[start:stop] @ k.T * scale
            p[(key < first[:, None]) | (key > last[:, None])] = -np.inf
            top = xp.amax(p, 1)
            top[top == -np.inf] = 0
            p = xp.exp(p - top[:, None])
            total = p.sum(1)
            total[total == 0] = 1
            p /= total[:, None]
            ds = dout[start:stop] @ v.T
            ds -= (p * ds).sum(1)[:, None]
            ds *= p
            dk = dk + ds[:, keys].T @ q[start:stop]
            dv = dv + p[:, keys].T @ dout[start:stop]
            if h == head:
                if here := [int(row) - start for row in rows_q if start <= row < stop]:
                    dq.append(to_host(ds[here] @ k))
    return [(rows_q, np.concatenate(dq) * scale), (rows_k, to_host(dk) * scale), (rows_k, to_host(dv))]


def library_of(arrays: Arrays):
    """(the library that computes the truth of arrays, a function that takes them there in float64): their own, or
    NumPy for CuPy without cuBLAS.
    """
    if arrays.framework == "torch":
        return sys.modules["torch"], lambda x: x.double()
    if arrays.framework == "cupy":
        try:
            import cupy
            import cupy_backends.cuda.libs.cublas  # noqa: F401

            return cupy, lambda x: _cupy_wide(x).astype(np.float64)
        except Exception:  # names the library and where it looked, at length
            pass
    return np, to_host


def like(x, values: np.ndarray):
    """A NumPy array in the library and on the device of ``x``."""
    if hasattr(x, "data_ptr"):
        return sys.modules["torch"].as_tensor(values, device=x.device)
    return values if isinstance(x, np.ndarray) else sys.modules["cupy"].asarray(values)
