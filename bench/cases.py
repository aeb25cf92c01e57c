"""What is measured: named cases in suites, what each costs at least, its data, and the truth of some rows."""

from __future__ import annotations

import functools
import sys
import zlib
from dataclasses import dataclass

import numpy as np

from cuflash.arrays import numpy_dtype
from cuflash.problem import ITEMSIZE

# How far a result may be from float64. Loose, since one that keeps its logits in 16 bits is a contender too,
# but no wrong one passes: values are of size 1. Float32 rejects TF32, which is another problem.
TOLERANCE = {"float16": 0.03, "bfloat16": 0.1, "float32": 2e-4, "float64": 1e-10}


@dataclass(frozen=True)
class Case:
    """One forward: sizes and options as ``cuflash.attention`` has them.

    ``graph`` says that a call is so short that it is timed as a CUDA graph, with its inputs in L2.
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

    @property
    def name(self) -> str:
        """All that tells it from the other cases of a suite: "d128 s2048 b8 h16 causal"."""

        def two(letter, a, b):
            return f"{letter}{a}" if a == b else f"{letter}{a}/{b}"

        mask = "causal" if self.causal else "full"
        if self.window is not None:
            mask = f"{'causal ' if self.causal else ''}window {self.window[0]},{self.window[1]}"
        return " ".join(
            (
                two("d", self.head_dim, self.head_dim_v),
                two("s", self.seqlen_q, self.seqlen_k),
                f"b{self.batch}",
                two("h", self.heads_q, self.heads_k),
                mask,
            )
        )

    @property
    def options(self) -> dict:
        """Keyword arguments of ``cuflash.attention``."""
        return {"causal": self.causal} | ({} if self.window is None else {"window": self.window})

    @property
    def pairs(self) -> float:
        """Pairs of query and key that see each other, a head. Causal with equal lengths counts as half of
        all, as peers count it; any other mask is counted exactly.
        """
        if self.window is None and not self.causal:
            return self.seqlen_q * self.seqlen_k
        if self.window is None and self.seqlen_q == self.seqlen_k:
            return self.seqlen_q * self.seqlen_k / 2
        first, last = self.visible(np.arange(self.seqlen_q))
        return int(np.maximum(0, last - first + 1).sum())

    @property
    def flops(self) -> float:
        """Of the two products alone; 4 * batch * heads * seqlen_q * seqlen_k * head_dim without a mask."""
        return 2 * self.batch * self.heads_q * self.pairs * (self.head_dim + self.head_dim_v)

    @property
    def bytes(self) -> int:
        """Each input read once, the output written once."""
        rows_q = self.batch * self.seqlen_q * self.heads_q
        rows_k = self.batch * self.seqlen_k * self.heads_k
        return (rows_q + rows_k) * (self.head_dim + self.head_dim_v) * ITEMSIZE[self.dtype]

    @property
    def seed(self) -> int:
        """Its own, and the same in every run."""
        return zlib.crc32(f"{self.suite} {self.dtype} {self.name}".encode())

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of q, k and v."""
        return (
            (self.batch, self.seqlen_q, self.heads_q, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim),
            (self.batch, self.seqlen_k, self.heads_k, self.head_dim_v),
        )

    def visible(self, i: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First and last key that the queries ``i`` see (first > last: none)."""
        diagonal = i + self.seqlen_k - self.seqlen_q
        left, right = self.window or (None, None)
        first = np.zeros_like(i) if left is None else np.maximum(0, diagonal - left)
        last = (
            np.full_like(i, self.seqlen_k - 1)
            if right is None
            else np.minimum(self.seqlen_k - 1, diagonal + right)
        )
        return first, np.minimum(last, diagonal) if self.causal else last


# ------------------------------------------------------------------------------------------------------------
# Suites

_SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)


def _square(suite, dtype, tokens, hidden, head_dim, seqlen, causal, *, heads_k=None, window=None) -> Case:
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
        head_dim,
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
    """32 query heads on 8 key heads, as Llama 3 has them, and on one."""
    return [
        _square("gqa", dtype, 16384, 32 * head_dim, head_dim, seqlen, causal, heads_k=heads_k)
        for head_dim in head_dims
        for heads_k in (8, 1)
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


# name -> (cases, dtypes that it is about, the usual one first, head_dims, seqlens)
_SUITES = {
    "forward": (_forward, ("bfloat16", "float16"), (64, 128, 256), _SEQLENS),
    "float32": (_float32, ("float32",), (64, 128), (2048, 8192)),
    "float64": (_float64, ("float64",), (64, 128), (1024, 2048)),
    "gqa": (_gqa, ("bfloat16", "float16"), (128, 64), (2048, 8192)),
    "window": (_window, ("bfloat16", "float16"), (128, 64), (16384,)),
    "small": (_small, ("bfloat16", "float16"), (128,), (128, 256, 512, 1024)),
}
SUITES = tuple(_SUITES)


def suite(name: str, *, dtype=None, head_dims=(), seqlens=(), causal: bool | None = None) -> list[Case]:
    """The cases of a suite; ``head_dims``, ``seqlens`` and ``causal`` (None: without and with) replace its
    own.

    Raises ValueError for a name or dtype that it does not have.
    """
    if name not in _SUITES:
        raise ValueError(f"suite must be one of {', '.join(SUITES)}; got {name!r}")
    make, dtypes, usual_head_dims, usual_seqlens = _SUITES[name]
    dtype = dtype or dtypes[0]
    if dtype not in dtypes:
        raise ValueError(f"dtype of suite {name} must be one of {', '.join(dtypes)}; got {dtype!r}")
    masks = (False, True) if causal is None else (causal,)
    return make(dtype, tuple(head_dims) or usual_head_dims, tuple(seqlens) or usual_seqlens, masks)


def table(
    *, dtype: str, head_dims, seqlens, causal: bool | None = None, tokens=16384, hidden=2048
) -> list[Case]:
    """Square cases of ``tokens`` tokens and ``hidden // head_dim`` heads each, for any dtype."""
    masks = (False, True) if causal is None else (causal,)
    return _forward(dtype, head_dims, seqlens, masks, tokens, hidden, suite="table")


# ------------------------------------------------------------------------------------------------------------
# Data


@dataclass(frozen=True)
class Arrays:
    """q, k and v of a case, of ``framework`` "torch" (on a GPU), "cupy" or "numpy"."""

    framework: str
    q: object
    k: object
    v: object


def make_arrays(case: Case, framework: str) -> Arrays:
    """Normal values, made where they are needed; on the current device and stream."""
    make = {"torch": _torch_normal, "cupy": _cupy_normal, "numpy": _numpy_normal}[framework]
    return Arrays(framework, *make(case))


def _torch_normal(case):
    torch = sys.modules["torch"]
    generator = torch.Generator(device="cuda").manual_seed(case.seed)
    return [
        torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, case.dtype))
        for shape in case.shapes
    ]


def _numpy_normal(case):
    rng = np.random.default_rng(case.seed)
    return [rng.standard_normal(shape, np.float32).astype(numpy_dtype(case.dtype)) for shape in case.shapes]


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


def _cupy_normal(case):
    import cupy

    dtype = numpy_dtype(case.dtype)
    arrays = []
    for number, shape in enumerate(case.shapes):
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
    import cupy

    if x.dtype.name == "bfloat16":  # as bits: not every CuPy has all operations for it
        bits = cupy.ndarray(x.shape, np.uint16, memptr=x.data, strides=x.strides)
        return bits.get().view(x.dtype).astype(np.float64)
    return x.get().astype(np.float64)


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
    import cupy

    if x.dtype.name == "bfloat16":
        bits = cupy.ndarray(x.shape, np.uint16, memptr=x.data, strides=x.strides)
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return x if x.dtype == np.float64 else x.astype(np.float32)


class Truth:
    """Some rows of the result in float64: 32 queries of the first head of the first batch and of the last of
    the last.

    What they leave out is compared with cuflash's own result, element by element.
    """

    def __init__(self, case: Case, arrays: Arrays):
        rng = np.random.default_rng(case.seed)
        ends = [0, case.seqlen_q - 1]
        self.rows = np.unique(np.concatenate([ends, rng.integers(0, case.seqlen_q, 30)]))
        self.expected = {}
        group = case.heads_q // case.heads_k
        for b, h in {(0, 0), (case.batch - 1, case.heads_q - 1)}:
            q = to_host(arrays.q[b, :, h])[self.rows]
            k, v = to_host(arrays.k[b, :, h // group]), to_host(arrays.v[b, :, h // group])
            first, last = case.visible(self.rows)
            key = np.arange(case.seqlen_k)
            hidden = (key < first[:, None]) | (key > last[:, None])
            logits = np.where(hidden, -np.inf, q @ k.T * case.head_dim**-0.5)
            top = logits.max(axis=1, keepdims=True)
            weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
            total = weights.sum(axis=1, keepdims=True)
            self.expected[b, h] = weights @ v / np.where(total == 0, 1, total)

    def error(self, out) -> float:
        """Largest absolute error of a result (batch, seqlen_q, heads_q, head_dim_v); nan if one is not a
        number.
        """
        worst = [
            np.abs(to_host(out[b, :, h])[self.rows] - expected).max()
            for (b, h), expected in self.expected.items()
        ]
        return float(np.max(worst))
