"""What tests of attention share: backends, arrays in awkward memory, inputs, and the judge.

A test is written once; it runs on the CPU path, which needs no GPU, and on every tier of a GPU. Arrays are
laid out on the host, bytes, strides and all, and copied to the device as they are. Whatever lies around an
array is NaN in every dtype (bytes of 0xff), inputs and results alike: what a kernel reads there shows in its
result, what it writes there is found afterwards.
"""

import contextlib
import dataclasses
import functools
import importlib
import itertools
import os
from dataclasses import dataclass
from typing import NamedTuple

# Matrices are small and processes many: BLAS threads that wait for each other cost ten times what they save.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import ml_dtypes  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

import cuflash  # noqa: E402
from cuflash import config, jit, oracle  # noqa: E402

DTYPES = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
}
TAKES = {
    "cpu": tuple(DTYPES),
    "simt": tuple(DTYPES),
    "sm80": ("float16", "bfloat16"),
    "sm90": ("float16", "bfloat16"),  # of arrays that TMA can address
}
# Marks of a tier's tests. `compute_capability` is the only one that they run on: tests/gpu/conftest.py skips them elsewhere.
MARKS = {
    "simt": pytest.mark.gpu,
    "sm80": pytest.mark.gpu,
    "sm90": pytest.mark.gpu(compute_capability=(9, 0)),
}
POISON = 0xFF  # in every byte: NaN as float16, bfloat16, float32 and float64
BAND = 1024  # bytes of poison on both sides of an array; keeps its alignment

# Sizes around the tiles of 16, 32, 64 and 128 rows or keys.
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193)


def tier_of(backend: str) -> str:
    """The tier of a backend: `sm90_rows` is sm90 where it decodes more than 32 rows of a key head."""
    return backend.removesuffix("_rows")


def on(*backends, dtypes=tuple(DTYPES)):
    """Parameters `backend, dtype` for each backend named (all by default) and dtype that it takes."""
    return on_pairs(
        *(f"{name}-{dtype}" for name in backends or TAKES for dtype in dtypes if dtype in TAKES[name])
    )


def on_pairs(*pairs):
    """Parameters `backend, dtype` for each pair of them, "sm80-float16"."""
    pairs = [(pair, *pair.split("-")) for pair in pairs]
    return pytest.mark.parametrize(
        "backend, dtype",
        [pytest.param(name, dtype, id=pair, marks=MARKS.get(tier_of(name), ())) for pair, name, dtype in pairs],
        indirect=["backend"],
    )


def on_tiers(*tiers):
    """Parameter `tier`: each of them."""
    return pytest.mark.parametrize("tier", [pytest.param(tier, marks=MARKS[tier]) for tier in tiers])


# What a test of every kernel needs, where each combination of options is a kernel to compile.
TIERS = on_tiers("simt", "sm80", "sm90")
FEW = (
    "cpu-float32",
    "simt-float32",
    "simt-float64",
    "sm80-float16",
    "sm80-bfloat16",
    "sm90-float16",
    "sm90-bfloat16",
)


# ------------------------------------------------------------------------------------------------------------
# Backends


class Cpu:
    """NumPy arrays and the CPU path."""

    name, tier = "cpu", None
    exact = False  # BLAS may sum in another order for other strides

    def upload(self, data: np.ndarray):
        memory = self.empty(data.size)
        memory[:] = data
        return memory

    def empty(self, size: int):
        """Bytes that start where 256 divides the address."""
        raw = np.empty(size + 256, np.uint8)
        start = -raw.ctypes.data % 256
        return raw[start : start + size]

    def array(self, memory, dtype, shape, strides, offset=0):
        """An array over `memory`; strides and offset in bytes."""
        return np.ndarray(shape, dtype, memory, offset, strides)

    def write(self, memory, data: np.ndarray) -> None:
        memory[:] = data

    def fetch(self, memory, size: int) -> np.ndarray:
        return memory[:size].copy()

    def download(self, x) -> np.ndarray:
        return np.array(x)

    def wash(self) -> None:
        pass

    def call(self, function, *arrays, **options):
        return function(*arrays, **options)

    def attention(self, q, k, v, **options):
        return self.call(cuflash.attention, q, k, v, **options)


class Gpu:
    """CuPy arrays and one tier, forced. What a call allocates, results and scratch, is full of NaN, and guarded."""

    exact = True

    def __init__(self, name: str):
        self.name, self.tier = name, tier_of(name)

    def upload(self, data: np.ndarray):
        memory = self.empty(data.size)
        self.write(memory, data)
        return memory

    def write(self, memory, data: np.ndarray) -> None:
        import cupy

        memory.copy_from_host(data.ctypes.data, data.size)
        cupy.cuda.Stream.null.synchronize()  # other streams do not wait for the copy

    def empty(self, size: int):
        import cupy

        return cupy.cuda.alloc(size)

    def array(self, memory, dtype, shape, strides, offset=0):
        import cupy

        return cupy.ndarray(shape, dtype, memptr=memory + offset, strides=strides)

    def fetch(self, memory, size: int) -> np.ndarray:
        import cupy

        cupy.cuda.get_current_stream().synchronize()  # the copy waits for the default stream only
        data = np.empty(size, np.uint8)
        memory.copy_to_host(data.ctypes.data, size)
        return data

    def download(self, x) -> np.ndarray:
        assert x.flags.c_contiguous
        return self.fetch(x.data, x.nbytes).view(x.dtype).reshape(x.shape)

    def wash(self) -> None:
        """Leave NaN in the shared memory of every multiprocessor."""
        shared_memory_wash()

    def attention(self, q, k, v, **options):
        return self.call(cuflash.attention, q, k, v, **options)

    def call(self, function, *arrays, **options):
        import cupy

        pool, blocks = cupy.get_default_memory_pool(), []

        def guarded(size):
            block = pool.malloc(size + 2 * BAND)
            block.memset_async(POISON, size + 2 * BAND)
            blocks.append((block, size))
            return block + BAND

        with config.force_tier(self.tier), cupy.cuda.using_allocator(guarded):
            result = function(*arrays, **options)
        for block, size in blocks:
            before, after = self.fetch(block, BAND), self.fetch(block + (BAND + size), BAND)
            assert (before == POISON).all(), "written before the start of a result or of scratch"
            assert (after == POISON).all(), "written past the end of a result or of scratch"
        return result


@functools.cache
def backend_named(name: str):
    return Cpu() if name == "cpu" else Gpu(name)


# ------------------------------------------------------------------------------------------------------------
# Small kernels of the tests' own (GPU only)

_WASH = r"""
extern "C" __global__ void wash(unsigned words, unsigned* found) {
  extern __shared__ unsigned shared[];
  volatile unsigned* s = shared;
  for (unsigned i = threadIdx.x; i < words; i += blockDim.x) s[i] = 0xffffffffu;
  __syncthreads();
  if (s[threadIdx.x] == 1) *found = 1;
}
"""
_SPIN = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
"""


@functools.cache
def _raw_kernel(code: str, name: str):
    import cupy

    return cupy.RawKernel(code, name)


@functools.cache
def _wash_size(device_id: int) -> tuple[int, int]:
    """Bytes of shared memory that a block can have, and blocks that leave no multiprocessor out."""
    import cupy

    attributes = cupy.cuda.Device(device_id).attributes
    # A block takes a multiprocessor to itself: four rounds.
    return attributes["MaxSharedMemoryPerBlockOptin"], 4 * attributes["MultiProcessorCount"]


def shared_memory_wash() -> None:
    import cupy

    size, blocks = _wash_size(cupy.cuda.runtime.getDevice())
    kernel = _raw_kernel(_WASH, "wash")
    kernel.max_dynamic_shared_size_bytes = size
    found = cupy.cuda.alloc(4)
    kernel((blocks,), (256,), (np.uint32(size // 4), np.uint64(found.ptr)), shared_mem=size)


def spin(milliseconds: float, blocks: int = 1) -> None:
    """Keep CuPy's current stream busy, and as many multiprocessors as there are blocks."""
    _raw_kernel(_SPIN, "spin")((blocks,), (256,), (np.int64(milliseconds * 1.5e6),))


# ------------------------------------------------------------------------------------------------------------
# Arrays in memory


@dataclass(frozen=True)
class Layout:
    """How the elements of a (batch, seqlen, heads, head_dim) array, or one of fewer axes, lie in memory.

    ``order``: the axes b, s, h, d from the outermost to the innermost. ``pad``: elements left free behind
    each axis, in the order b, s, h, d. ``base``: bytes from an address that 256 divides to the first element.
    ``backwards``: axes that run from high to low addresses. ``expanded``: axes of stride 0.
    """

    order: str = "bshd"
    pad: tuple[int, int, int, int] = (0, 0, 0, 0)
    base: int = 0
    backwards: str = ""
    expanded: str = ""

    def strides(self, shape) -> tuple[list[int], int, int]:
        """Strides and the place of the first element, in elements, and how many the array spans."""
        missing = 4 - len(shape)
        shape = (1,) * missing + tuple(shape)
        strides, start, step = [0] * 4, 0, 1
        for name in reversed(self.order):
            axis = "bshd".index(name)
            if name in self.expanded:
                continue
            strides[axis] = step
            step = step * shape[axis] + self.pad[axis]
            if name in self.backwards and 0 not in shape:
                start += strides[axis] * (shape[axis] - 1)
                strides[axis] *= -1
        return strides[missing:], start, step


PLAIN = Layout()


def is_taken(backend, *arrays, layouts=PLAIN) -> bool:
    """Whether the backend's tier takes q, k and v that lie in memory so. TMA wants addresses and strides that 16 bytes divide,
    and none of the strides below 0."""
    if backend.tier != "sm90":
        return True
    layouts = (layouts,) * len(arrays) if isinstance(layouts, Layout) else layouts
    for x, layout in zip(arrays, layouts, strict=True):
        strides, start, _ = layout.strides(x.shape)
        strides = [stride for stride, size in zip(strides[:-1], x.shape[:-1], strict=True) if size > 1]
        places = [layout.base + start * x.itemsize, *(stride * x.itemsize for stride in strides)]
        if any(stride < 0 for stride in strides) or any(place % 16 for place in places):
            return False
    return True


def fitting(backend, *arrays) -> tuple[Layout, ...]:
    """The plainest layouts that the backend's tier takes: for TMA rows begin where 16 bytes divide the address."""
    return tuple(
        PLAIN if is_taken(backend, x) else Layout(pad=(0, 0, 0, -x.shape[-1] % (16 // x.itemsize))) for x in arrays
    )


class Placed:
    """An array with a layout, on a backend, with poison all around. Without values it is poison too."""

    def __init__(self, backend, layout: Layout, shape, dtype, values=None):
        self.backend, self.shape, self.dtype = backend, tuple(shape), np.dtype(dtype)
        strides, start, span = layout.strides(self.shape)
        self.strides = tuple(stride * self.dtype.itemsize for stride in strides)
        self.offset = BAND + layout.base + start * self.dtype.itemsize
        self.size = 2 * BAND + layout.base + span * self.dtype.itemsize
        if values is not None:
            for axis, name in enumerate("bshd"[4 - len(self.shape) :]):
                if name in layout.expanded:
                    assert (values.astype(np.float64) == values.take([0], axis).astype(np.float64)).all()
        self.memory = backend.upload(self._around(values))
        self.array = backend.array(self.memory, self.dtype, self.shape, self.strides, self.offset)

    def _around(self, values):
        data = Cpu().empty(self.size)
        data[:] = POISON
        if values is not None:
            self._inside(data)[...] = values
        return data

    def write(self, values) -> None:
        """Other values into the same memory."""
        assert values.shape == self.shape and values.dtype == self.dtype
        self.backend.write(self.memory, self._around(values))

    def _inside(self, data):
        return np.ndarray(self.shape, self.dtype, data, self.offset, self.strides)

    def fetch(self) -> np.ndarray:
        """The elements; fails if any byte around them has changed."""
        data = self.backend.fetch(self.memory, self.size)
        values = self._inside(data).copy()
        bits = np.dtype(f"u{self.dtype.itemsize}")
        self._inside(data).view(bits)[...] = np.iinfo(bits).max
        assert (data == POISON).all(), (
            f"written outside of the array, in {np.count_nonzero(data != POISON)} bytes"
        )
        return values


def place(backend, values, layout: Layout = PLAIN) -> Placed:
    return Placed(backend, layout, values.shape, values.dtype, values)


# ------------------------------------------------------------------------------------------------------------
# Inputs and results


def normal(shape, dtype: str, seed: int) -> np.ndarray:
    """Standard normal numbers, rounded to the dtype."""
    return np.random.default_rng(seed).standard_normal(shape).astype(DTYPES[dtype])


def inputs(
    dtype, *, batch=2, seqlen_q=130, seqlen_k=None, heads_q=4, heads_k=2, head_dim=64, head_dim_v=None, seed=0
):
    """q, k and v of standard normal numbers on the host."""
    seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    return (
        normal((batch, seqlen_q, heads_q, head_dim), dtype, 3 * seed + 1),
        normal((batch, seqlen_k, heads_k, head_dim), dtype, 3 * seed + 2),
        normal((batch, seqlen_k, heads_k, head_dim_v), dtype, 3 * seed + 3),
    )


def along_channel(q_value, k_value):
    """Logits of about q_value * k_value * scale, through channel 0."""

    def edit(q, k, v):
        q[..., 0], k[..., 0] = q_value, k_value

    return edit


def rising(per_key):
    """Each key's logit lies about `per_key` above (or below) the one before: the maximum keeps moving."""

    def edit(q, k, v):
        q[..., 0] = 1
        k[..., 0] = (np.arange(k.shape[1]) * per_key * q.shape[3] ** 0.5)[None, :, None]

    return edit


def compute(backend, q, k, v, layouts=PLAIN, out: Layout | None = None, **options):
    """(out, lse) on the host, of host arrays placed with one layout, or one each.

    With a layout for `out` the result is written into an array of the test's. Fails if a byte around an input
    or the result has changed.
    """
    layouts = (layouts,) * 3 if isinstance(layouts, Layout) else layouts
    placed = [place(backend, x, layout) for x, layout in zip((q, k, v), layouts, strict=True)]
    arrays = [x.array for x in placed]
    if out is None:
        result, lse = backend.attention(*arrays, return_lse=True, **options)
        result = backend.download(result)
    else:
        target = Placed(backend, out, (*q.shape[:3], v.shape[3]), q.dtype)
        given, lse = backend.attention(*arrays, return_lse=True, out=target.array, **options)
        assert given is target.array
        result = target.fetch()
    for x in placed:
        x.fetch()
    lse = backend.download(lse)
    assert result.dtype == q.dtype and result.shape == (*q.shape[:3], v.shape[3])
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    return result, lse


def check(backend, q, k, v, layouts=PLAIN, out: Layout | None = None, **options):
    """`compute`, judged by the oracle."""
    result, lse = compute(backend, q, k, v, layouts, out, **options)
    assert_right(result, lse, q, k, v, **options)
    return result, lse


def assert_right(result, lse, q, k, v, **options) -> None:
    judgement = oracle.judge(result, lse, q, k, v, **options)
    assert judgement.ok, f"{judgement.why} (q {q.shape}, k {k.shape}, v {v.shape}, {q.dtype}, {options})"


def assert_same(backend, got, expected, what="", exact=None) -> None:
    """Two results of the same values: bit for bit on a GPU, within rounding on the CPU, NaN equal to NaN.

    They are (out, lse) or Gradients. With `exact` only the results so named must agree to the bit.
    """
    names = getattr(got, "_fields", ("out", "lse"))
    for name, x, y in zip(names, got, expected, strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        if backend.exact and (exact is None or name in exact):
            bits = np.dtype(f"u{x.dtype.itemsize}")
            places = np.argwhere(np.ascontiguousarray(x).view(bits) != np.ascontiguousarray(y).view(bits))
            assert not len(places), f"{what}: {len(places)} elements of {name} differ, first at {places[0]}"
        else:
            # On a GPU dq is summed in changing order, from terms that may be larger than what remains of them.
            tolerance = (64 if backend.exact and name == "dq" else 16) * float(ml_dtypes.finfo(x.dtype).eps)
            x, y = x.astype(np.float64), y.astype(np.float64)
            largest = np.abs(y[np.isfinite(y)]).max(initial=1.0)
            np.testing.assert_allclose(x, y, tolerance, tolerance * largest, err_msg=f"{what}: {name}")


@contextlib.contextmanager
def fresh_process_state(monkeypatch):
    """As in a process that has computed nothing yet: no variant loaded, no call prepared."""
    attention = importlib.import_module("cuflash.attention")
    with monkeypatch.context() as patch:
        patch.setattr(jit, "_loaded", {})
        patch.setattr(attention, "_prepared", attention._Prepared())
        yield


# ------------------------------------------------------------------------------------------------------------
# Packed sequences


@dataclass(frozen=True)
class Lengths:
    """The sequences of a packed batch: rows of each in q and in k, and rows that follow the last one.

    With `used_q` or `used_k` only so many rows of each take part. Without `k` it is as long as q.
    """

    q: tuple[int, ...]
    k: tuple[int, ...] | None = None
    used_q: tuple[int, ...] | None = None
    used_k: tuple[int, ...] | None = None
    spare_q: int = 0
    spare_k: int = 0
    dtype: str = "int32"

    def slots(self, side: str) -> list[slice]:
        """The rows of each sequence in q or k."""
        rows = self.q if side == "q" or self.k is None else self.k
        ends = list(itertools.accumulate(rows, initial=0))
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def used(self, side: str) -> list[slice]:
        """The rows of each sequence that take part."""
        used = self.used_q if side == "q" else self.used_k
        return [
            slice(slot.start, slot.stop if used is None else slot.start + used[i])
            for i, slot in enumerate(self.slots(side))
        ]

    def total(self, side: str) -> int:
        slots = self.slots(side)
        return (slots[-1].stop if slots else 0) + (self.spare_q if side == "q" else self.spare_k)

    def without_empty(self):
        """The same rows without the sequences that have none, in q nor in k: as right, and sooner judged."""
        assert self.used_q is self.used_k is None
        pairs = [pair for pair in zip(self.q, self.k or self.q, strict=True) if any(pair)]
        return Lengths(*zip(*pairs, strict=True), spare_q=self.spare_q, spare_k=self.spare_k)

    def unused(self, side: str) -> np.ndarray:
        """Whether each row takes part in nothing."""
        rest = np.ones(self.total(side), bool)
        for rows in self.used(side):
            rest[rows] = False
        return rest

    def arrays(self) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
        """cu_seqlens_q and cu_seqlens_k, and the other arrays by keyword."""
        ends = (np.array([0, *(slot.stop for slot in self.slots(side))], self.dtype) for side in "qk")
        used = {"seqused_q": self.used_q, "seqused_k": self.used_k}
        return tuple(ends), {
            name: np.array(rows, self.dtype) for name, rows in used.items() if rows is not None
        }


def packed_inputs(dtype, lengths: Lengths, **sizes):
    """q, k and v of the sequences one after the other, (rows, heads, head_dim). Rows that take part in nothing are NaN."""
    total_q, total_k = lengths.total("q"), lengths.total("k")
    q, k, v = (x[0] for x in inputs(dtype, batch=1, seqlen_q=total_q, seqlen_k=total_k, **sizes))
    for x, side in ((q, "q"), (k, "k"), (v, "k")):
        x[lengths.unused(side)] = np.nan
    return q, k, v


def place_lengths(backend, lengths: Lengths):
    """The arrays of `lengths` on the backend, each between guard bands: ([Placed], positional, by keyword)."""
    positional, named = lengths.arrays()
    positional = [place(backend, x) for x in positional]
    named = {name: place(backend, x) for name, x in named.items()}
    arrays = {name: x.array for name, x in named.items()}
    return [*positional, *named.values()], [x.array for x in positional], arrays


def compute_varlen(backend, q, k, v, lengths: Lengths, layouts=PLAIN, out: Layout | None = None, **options):
    """`compute` for packed sequences."""
    layouts = (layouts,) * 3 if isinstance(layouts, Layout) else layouts
    placed = [place(backend, x, layout) for x, layout in zip((q, k, v), layouts, strict=True)]
    more, ends, used = place_lengths(backend, lengths)
    target = None if out is None else Placed(backend, out, (*q.shape[:2], v.shape[2]), q.dtype)
    result, lse = backend.call(
        cuflash.attention_varlen,
        *(x.array for x in placed),
        *ends,
        return_lse=True,
        out=None if target is None else target.array,
        **used,
        **options,
    )
    assert target is None or result is target.array
    result = backend.download(result) if target is None else target.fetch()
    for x in (*placed, *more):
        x.fetch()
    lse = backend.download(lse)
    assert result.dtype == q.dtype and result.shape == (*q.shape[:2], v.shape[2])
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32) and lse.shape == q.shape[1::-1]
    return result, lse


def check_varlen(backend, q, k, v, lengths: Lengths, layouts=PLAIN, out: Layout | None = None, **options):
    """`compute_varlen`, judged by the oracle. `max_seqlen_q` and `max_seqlen_k` are no matter of the truth."""
    result, lse = compute_varlen(backend, q, k, v, lengths, layouts, out, **options)
    assert_right_varlen(result, lse, q, k, v, lengths, **_without_hints(options))
    return result, lse


def assert_right_varlen(result, lse, q, k, v, lengths: Lengths, **options) -> None:
    ends, used = lengths.arrays()
    judgement = oracle.judge_varlen(result, lse, q, k, v, *ends, **used, **options)
    assert judgement.ok, f"{judgement.why} ({lengths}, {q.shape[1:]}, {k.shape[1:]}, {v.shape[1:]}, {q.dtype}, {options})"
    rest = lengths.unused("q")
    assert (result[rest] == 0).all() and (lse[:, rest] == -np.inf).all()


def _without_hints(options):
    return {name: value for name, value in options.items() if not name.startswith("max_seqlen")}


# ------------------------------------------------------------------------------------------------------------
# Decoding


@dataclass(frozen=True)
class Decoding:
    """A call of attention_with_kvcache on the host; the caches are as before it. `page_size` 0: no pages."""

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    k: np.ndarray | None = None
    v: np.ndarray | None = None
    cache_seqlens: np.ndarray | int | None = None
    cache_batch_idx: np.ndarray | None = None
    block_table: np.ndarray | None = None
    values_are_keys: bool = False

    def named(self) -> dict:
        """What is given beside q and the caches."""
        names = ("k", "v", "cache_seqlens", "cache_batch_idx", "block_table")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def capacity(self) -> int:
        rows = self.k_cache.shape[1]
        return rows if self.block_table is None else rows * self.block_table.shape[1]

    def cached(self, b: int) -> int:
        """Keys of a request in the cache before the call."""
        given = self.capacity if self.cache_seqlens is None else np.broadcast_to(self.cache_seqlens, self.batch)[b]
        return min(max(int(given), 0), self.capacity)

    def place(self, b: int, key: int) -> tuple[int, int]:
        """Where a key lies in the caches."""
        if self.block_table is not None:
            page_size = self.k_cache.shape[1]
            return int(self.block_table[b, key // page_size]), key % page_size
        return int(b if self.cache_batch_idx is None else self.cache_batch_idx[b]), key

    def after(self) -> tuple[np.ndarray, np.ndarray]:
        """The caches after the call. What there is no room for is dropped."""
        caches = self.k_cache.copy(), self.v_cache.copy()
        for b in range(self.batch if self.k is not None else 0):
            for n in range(min(self.k.shape[1], self.capacity - self.cached(b))):
                for cache, new in zip(caches, (self.k, self.v), strict=True):
                    cache[self.place(b, self.cached(b) + n)] = new[b, n]
        return caches

    def keys(self, b: int) -> tuple[np.ndarray, np.ndarray]:
        """All keys and values of a request, (1, length, heads_k, dim) each."""
        length = self.cached(b) + (0 if self.k is None else self.k.shape[1])
        rows = [self.place(b, key) for key in range(min(length, self.capacity))]
        return tuple(
            np.array([x[row] for row in rows], x.dtype).reshape(1, len(rows), *x.shape[2:]) for x in self.after()
        )

    def only(self, requests):
        """A batch of these requests, on the same caches."""
        requests = np.array(requests, int)
        rows = {
            name: None if (x := getattr(self, name)) is None else x[requests]
            for name in ("q", "k", "v", "cache_batch_idx", "block_table")
        }
        if self.values_are_keys and self.k is not None:
            rows["v"] = rows["k"][..., : self.v.shape[3]]
        if self.block_table is None and self.cache_batch_idx is None:
            rows["cache_batch_idx"] = requests.astype(np.int32)
        lengths = self.cache_seqlens
        return dataclasses.replace(self, **rows, cache_seqlens=lengths[requests] if np.ndim(lengths) else lengths)


def decoding(
    dtype,
    lengths,
    *,
    seqlen_q=1,
    new=0,
    page_size=0,
    shared=0,
    capacity=None,
    num_pages=0,
    by_index=False,
    length_dtype="int32",
    heads_q=4,
    heads_k=2,
    head_dim=64,
    head_dim_v=None,
    values_are_keys=False,
    seed=0,
) -> Decoding:
    """Requests with `lengths` keys in the cache, `new` to append; all of the cache that is not theirs is NaN.

    Pages lie in random order, `shared` first ones are the same of all requests, and what the table says past
    the last page of a request is no page. With `by_index` the requests lie in other rows than their own.
    """
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    batch, rng = len(lengths), np.random.default_rng(seed)
    lengths = np.array(lengths, length_dtype).reshape(batch)
    capacity = int(lengths.max(initial=0)) + new + 5 if capacity is None else capacity
    number = DTYPES[dtype]
    table = index = None
    if page_size:
        needed = -(-(lengths + new) // page_size)
        own = np.maximum(needed - shared, 0)
        count = max(num_pages, shared + int(own.sum()) + 3)
        pages = rng.permutation(count)
        max_pages = -(-capacity // page_size)
        table = np.where(np.arange(batch * max_pages) % 2, -1, 2**31 - 1).reshape(batch, max_pages).astype(np.int32)
        ends = shared + np.cumsum(own)
        for b in range(batch):
            used = np.concatenate([pages[:shared], pages[ends[b] - own[b] : ends[b]]])[: needed[b]]
            table[b, : len(used)] = used
        lead = (count, page_size)
    else:
        lead = (batch + 2 if by_index else batch, capacity)
        index = rng.permutation(batch + 2)[:batch].astype(length_dtype) if by_index else None
    k_cache = np.full((*lead, heads_k, head_dim), np.nan, number)
    v_cache = k_cache[..., :head_dim_v] if values_are_keys else np.full((*lead, heads_k, head_dim_v), np.nan, number)
    q = rng.standard_normal((batch, seqlen_q, heads_q, head_dim)).astype(number)
    k, v = (rng.standard_normal((batch, new, heads_k, dim)).astype(number) for dim in (head_dim, head_dim_v))
    if values_are_keys:
        v = k[..., :head_dim_v]
    call = Decoding(
        q, k_cache, v_cache, *((k, v) if new else (None, None)), lengths, index, table, values_are_keys
    )
    for b in range(batch):
        places = tuple(zip(*(call.place(b, key) for key in range(call.cached(b))), strict=True)) or ([], [])
        for x in (k_cache,) if values_are_keys else (k_cache, v_cache):
            rows = rng.standard_normal((call.cached(b), *x.shape[2:])).astype(number)
            x[list(places[0]), list(places[1])] = rows
    return call


class PlacedDecoding:
    """The arrays of a call on a backend, each between guard bands: `q`, `k_cache`, `v_cache`, and the others by `named`.

    `layouts` is one for q, the caches, k and v, or some of them by name; the rows of the table are strided.
    """

    def __init__(self, backend, call: Decoding, layouts=PLAIN):
        if isinstance(layouts, Layout):
            layouts = dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), layouts)
        layouts = {"block_table": Layout(pad=(0, 0, 0, 3))} | layouts
        self.backend, self.call = backend, call
        host = {"q": call.q, "k_cache": call.k_cache, "v_cache": call.v_cache, **call.named()}
        views = {"v_cache": "k_cache", "v": "k"} if call.values_are_keys else {}
        self.placed = {
            name: place(backend, x, layouts.get(name, PLAIN))
            for name, x in host.items()
            if isinstance(x, np.ndarray) and name not in views
        }
        arrays = {name: x.array for name, x in self.placed.items()}
        for name, of in views.items():
            if of in self.placed:
                x = self.placed[of]
                arrays[name] = backend.array(x.memory, x.dtype, host[name].shape, x.strides, x.offset)
        self.q, self.k_cache, self.v_cache = (arrays.pop(name) for name in ("q", "k_cache", "v_cache"))
        self.named = arrays | {name: x for name, x in host.items() if not isinstance(x, np.ndarray)}

    @property
    def arrays(self):
        return self.q, self.k_cache, self.v_cache

    def write(self, call: Decoding, *names: str) -> None:
        """Another call of the same shapes into the same memory; or of it these arrays alone, the others being there."""
        self.call = call
        for name, x in self.placed.items():
            if not names or name in names:
                x.write(getattr(call, name))

    def verify(self) -> None:
        """Fails if the caches are not what the call leaves, or a byte of anything else, or around it, has changed."""
        k_cache, v_cache = self.call.after()
        expected = {"k_cache": k_cache, "v_cache": v_cache}
        for name, x in self.placed.items():
            before = expected.get(name, getattr(self.call, name))
            assert_bits(x.fetch(), np.ascontiguousarray(before), name)


def assert_bits(got, expected, what) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype, what
    bits = np.dtype(f"u{got.dtype.itemsize}")
    places = np.argwhere(np.ascontiguousarray(got).view(bits) != expected.view(bits))
    assert not len(places), f"{len(places)} elements of {what} are wrong, first at {places[0]}"


def compute_kvcache(backend, call: Decoding, layouts=PLAIN, out: Layout | None = None, **options):
    """(out, lse) on the host. Fails if the caches afterwards, or any other byte, is not as it should be."""
    placed = PlacedDecoding(backend, call, layouts)
    shape = (*call.q.shape[:3], call.v_cache.shape[3])
    target = None if out is None else Placed(backend, out, shape, call.q.dtype)
    result, lse = backend.call(
        cuflash.attention_with_kvcache,
        *placed.arrays,
        return_lse=True,
        out=None if target is None else target.array,
        **placed.named,
        **options,
    )
    assert target is None or result is target.array
    result = backend.download(result) if target is None else target.fetch()
    lse = backend.download(lse)
    placed.verify()
    assert result.dtype == call.q.dtype and result.shape == shape
    assert lse.dtype == (np.float64 if call.q.dtype == np.float64 else np.float32)
    assert lse.shape == (call.q.shape[0], call.q.shape[2], call.q.shape[1])
    return result, lse


def check_kvcache(backend, call: Decoding, layouts=PLAIN, out: Layout | None = None, **options):
    """`compute_kvcache`, judged by the oracle. `num_splits` is no matter of the truth."""
    result, lse = compute_kvcache(backend, call, layouts, out, **options)
    assert_right_kvcache(result, lse, call, **options)
    return result, lse


def assert_right_kvcache(result, lse, call: Decoding, *, num_splits=0, judge=None, **options) -> None:
    """`judge` is that of the call and the options, if it has been made before."""
    judge = judge or judge_of(call, **options)
    judgement = judge(result, lse)
    lengths = [call.cached(b) for b in range(min(call.batch, 20))]
    where = f"q {call.q.shape}, caches {call.k_cache.shape}, {call.v_cache.shape}, lengths {lengths}, {call.q.dtype}"
    assert judgement.ok, f"{judgement.why} ({where}, num_splits {num_splits}, {options})"


def judge_of(call: Decoding, **options):
    """The oracle's judgement as a function of (out, lse)."""
    return oracle.judge_of_kvcache(call.q, call.k_cache, call.v_cache, **call.named(), **options)


# ------------------------------------------------------------------------------------------------------------
# Gradients


class Gradients(NamedTuple):
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def dout_of(q, v, seed=0):
    """The gradient of out, standard normal numbers."""
    return normal((*q.shape[:-1], v.shape[-1]), q.dtype.name, 1000 + seed)


def dlse_of(q, seed=0):
    """The gradient of lse, of a dense batch or of packed sequences."""
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    return normal(shape, "float64" if q.dtype == np.float64 else "float32", 2000 + seed)


def backward(
    backend,
    dout,
    q,
    k,
    v,
    *,
    dlse=None,
    lengths: Lengths | None = None,
    layouts=PLAIN,
    into=None,
    state=None,
    deterministic=False,
    **options,
) -> Gradients:
    """The gradients on the host, of host arrays. Fails if a byte of an input, or around a result, has changed.

    `layouts` is one for all of dout, q, k, v and out, or some of them by name. With `into`, one layout or some
    by name, the results are written into arrays of the test's. `state` is (out, lse) on the host if not those
    that the backend computes.
    """
    if state is None:
        forward = compute if lengths is None else functools.partial(compute_varlen, lengths=lengths)
        state = forward(backend, q, k, v, **options)
    host = dict(dout=dout, q=q, k=k, v=v, out=state[0], lse=state[1])
    if isinstance(layouts, Layout):
        layouts = dict.fromkeys(("dout", "q", "k", "v", "out"), layouts)
    if isinstance(into, Layout):
        into = dict.fromkeys(Gradients._fields, into)
    placed = [place(backend, x, layouts.get(name, PLAIN)) for name, x in host.items()]
    arrays, named, more = [x.array for x in placed], {}, []
    if dlse is not None:
        more = [place(backend, dlse)]
        named = {"dlse": more[0].array}
    if lengths is not None:
        placed_lengths, ends, used = place_lengths(backend, lengths)
        more, arrays, named = more + placed_lengths, arrays + ends, named | used
    like = {"dq": q, "dk": k, "dv": v}
    targets = {
        name: Placed(backend, layout, like[name].shape, q.dtype) for name, layout in (into or {}).items()
    }
    result = backend.call(
        cuflash.attention_backward if lengths is None else cuflash.attention_varlen_backward,
        *arrays,
        deterministic=deterministic,
        **{name: x.array for name, x in targets.items()},
        **named,
        **options,
    )
    for x, (name, before) in zip(placed, host.items(), strict=False):
        assert x.fetch().tobytes() == before.tobytes(), f"{name} was written"
    for x in more:
        x.fetch()
    values = []
    for (name, x), given in zip(like.items(), result, strict=True):
        assert name not in targets or given is targets[name].array
        values.append(targets[name].fetch() if name in targets else backend.download(given))
        assert values[-1].shape == x.shape and values[-1].dtype == x.dtype
    return Gradients(*values)


def check_backward(backend, dout, q, k, v, *, dlse=None, lengths: Lengths | None = None, **how) -> Gradients:
    """`backward`, judged by the oracle."""
    gradients = backward(backend, dout, q, k, v, dlse=dlse, lengths=lengths, **how)
    options = {
        name: value
        for name, value in _without_hints(how).items()
        if name not in ("layouts", "into", "state", "deterministic")
    }
    assert_right_gradients(gradients, dout, q, k, v, dlse=dlse, lengths=lengths, **options)
    return gradients


def assert_right_gradients(
    gradients, dout, q, k, v, *, dlse=None, lengths: Lengths | None = None, **options
) -> None:
    if lengths is None:
        judgement = oracle.judge_backward(*gradients, dout, q, k, v, dlse=dlse, **options)
    else:
        ends, used = lengths.arrays()
        judgement = oracle.judge_varlen_backward(
            *gradients, dout, q, k, v, *ends, dlse=dlse, **used, **options
        )
        for name, x in gradients._asdict().items():
            assert (x[lengths.unused("q" if name == "dq" else "k")] == 0).all(), name
    where = f"q {q.shape}, k {k.shape}, v {v.shape}, {q.dtype}, dlse {dlse is not None}, {lengths}, {options}"
    assert judgement.ok, f"{judgement.why} ({where})"
