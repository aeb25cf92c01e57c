"""The same values through other strides, addresses and buffers: the same result, to the bit, no copy.

What TMA cannot address the tier sm90 refuses: there such layouts are those of out alone.
"""

import math

import numpy as np
import pytest
from support import (
    BAND,
    DTYPES,
    PLAIN,
    POISON,
    Layout,
    Placed,
    assert_right,
    assert_same,
    backend_named,
    check,
    compute,
    fitting,
    fresh_process_state,
    inputs,
    is_taken,
    normal,
    on,
    on_tiers,
)

import cuflash
from cuflash import config, jit

LAYOUTS = {
    "heads before seqlen": Layout("bhsd"),
    "seqlen outermost": Layout("sbhd"),
    "heads outermost": Layout("hsbd"),
    "batch innermost": Layout("hsbd", pad=(8, 0, 8, 0)),
    "slice of wider rows": Layout(pad=(0, 0, 0, 128)),
    "batch stride of nothing in particular": Layout(pad=(0, 8 * 37, 0, 0)),
    "backwards over seqlen": Layout(backwards="s"),
    "backwards over all": Layout("bhsd", backwards="bsh"),
    "backwards and padded": Layout("hbsd", pad=(8, 16, 0, 24), backwards="hs"),
    "8 bytes off": Layout(base=8),
    "rows of D + 1": Layout(pad=(0, 0, 0, 1)),
    "rows of D + 2": Layout(pad=(0, 0, 0, 2)),
    "rows of D + 4": Layout(pad=(0, 0, 0, 4)),
    "one element between heads": Layout("bhsd", pad=(0, 1, 0, 0)),
}


@on()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_layout(backend, dtype, layout, head_dim):
    layout = LAYOUTS[layout]
    q, k, v = inputs(dtype, seqlen_q=90, seqlen_k=140, head_dim=head_dim)
    plain = check(backend, q, k, v, causal=True)
    if is_taken(backend, q, k, v, layouts=layout):
        assert_same(backend, compute(backend, q, k, v, layout, causal=True), plain, "q, k, v")
    assert_same(backend, compute(backend, q, k, v, PLAIN, layout, causal=True), plain, "out")


@on(dtypes=("float16", "float32"))
def test_layouts_of_head_dim_256(backend, dtype):
    q, k, v = inputs(dtype, seqlen_q=90, seqlen_k=140, head_dim=256)
    plain = check(backend, q, k, v)
    for name in ("heads before seqlen", "backwards over all", "8 bytes off", "rows of D + 1"):
        layout = LAYOUTS[name]
        of_inputs = layout if is_taken(backend, q, k, v, layouts=layout) else PLAIN
        assert_same(backend, compute(backend, q, k, v, of_inputs, layout), plain, name)


@on()
def test_addresses_off_by_some_bytes(backend, dtype):
    """All arrays, and each alone."""
    q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=90)
    plain = check(backend, q, k, v)
    for base in (2, 4, 8, 14):
        if base % q.itemsize:
            continue
        for which in ("qkvo", "q", "k", "v", "o"):
            layouts = [Layout(base=base if name in which else 0) for name in "qkvo"]
            if not is_taken(backend, q, k, v, layouts=layouts[:3]):
                continue
            assert_same(
                backend, compute(backend, q, k, v, layouts[:3], layouts[3]), plain, f"{base}, {which}"
            )


REFUSED_BY_TMA = {
    "backwards over seqlen",
    "backwards over all",
    "backwards and padded",
    "8 bytes off",
    "rows of D + 1",
    "rows of D + 2",
    "rows of D + 4",
    "one element between heads",
}


@on("sm90")
def test_what_tma_cannot_address_is_refused_by_its_tier_alone(backend, dtype, monkeypatch):
    """For one of q, k and v as for all, dense and packed; without a forced tier the next one takes it."""
    q, k, v = host = inputs(dtype, batch=2, seqlen_q=70, seqlen_k=90)
    assert {name for name, layout in LAYOUTS.items() if not is_taken(backend, *host, layouts=layout)} == REFUSED_BY_TMA
    plain = [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in host]
    ends = [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in np.array([[0, 70], [0, 90]], np.int32)]
    why = "tier sm90: TMA cannot address q, k and v: their addresses and strides must be multiples of 16 bytes"
    for name in sorted(REFUSED_BY_TMA):
        odd = [Placed(backend, LAYOUTS[name], x.shape, x.dtype, x).array for x in host]
        for which in ("qkv", "q", "k", "v"):
            arrays = [odd[i] if "qkv"[i] in which else plain[i] for i in range(3)]
            for _ in range(2):
                with config.force_tier("sm90"), pytest.raises(NotImplementedError, match=why):
                    cuflash.attention(*arrays)
            with config.force_tier("sm90"), pytest.raises(NotImplementedError, match=why):
                cuflash.attention_varlen(*(x[1] for x in arrays), *ends)
    with fresh_process_state(monkeypatch), config.force_tier(None):
        result, lse = cuflash.attention(*odd, return_lse=True)
        assert {key[0] for key in jit._loaded} == {"fwd_sm80"}
        assert_right(backend.download(result), backend.download(lse), q, k, v)
        cuflash.attention(*plain)
        assert {key[0] for key in jit._loaded} == {"fwd_sm80", "fwd_sm90"}


@on()
def test_slices_of_one_fused_buffer(backend, dtype):
    """q, k, v of one projection of width (heads_q + 2 heads_k) * head_dim, and out beside them."""
    heads_q, heads_k, dim = 4, 2, 64
    q, k, v = inputs(dtype, seqlen_q=100, heads_q=heads_q, heads_k=heads_k, head_dim=dim)
    plain = check(backend, q, k, v, causal=True)
    values = np.concatenate([q, k, v, np.full_like(q, np.nan)], axis=2)
    fused = Placed(backend, PLAIN, values.shape, values.dtype, values)
    first, parts = 0, []
    for heads in (heads_q, heads_k, heads_k, heads_q):
        shape = (2, 100, heads, dim)
        offset = fused.offset + first * dim * values.itemsize
        parts.append(backend.array(fused.memory, values.dtype, shape, fused.strides, offset))
        first += heads
    _, lse = backend.attention(*parts[:3], causal=True, out=parts[3], return_lse=True)
    after = fused.fetch()
    assert_same(backend, (after[:, :, heads_q + 2 * heads_k :], backend.download(lse)), plain, "out")
    bits = np.dtype(f"u{values.itemsize}")
    inputs_after, inputs_before = (
        x[:, :, : heads_q + 2 * heads_k].copy().view(bits) for x in (after, values)
    )
    assert (inputs_after == inputs_before).all(), "an input has changed"


@on()
@pytest.mark.parametrize("expanded", ["b", "h", "s", "bh", "bsh"])
def test_expanded_axes(backend, dtype, expanded):
    """Stride 0: one sequence, head or row seen many times."""
    q, k, v = inputs(dtype, batch=3, seqlen_q=70, seqlen_k=90, heads_q=4, heads_k=2)
    axes = ["bsh".index(name) for name in expanded]
    repeated = []
    for x in (q, k, v):
        shape = x.shape
        for axis in axes:
            x = x.take([0], axis)
        repeated.append(np.broadcast_to(x, shape).copy())
    full = check(backend, *repeated, causal=True)
    assert_same(backend, compute(backend, *repeated, Layout(expanded=expanded), causal=True), full, "all")
    for which in range(3):
        layouts = [Layout(expanded=expanded) if which == i else PLAIN for i in range(3)]
        assert_same(backend, compute(backend, *repeated, layouts, causal=True), full, f"input {which}")


@on(dtypes=("float16", "float32"))
def test_axes_of_length_one_may_have_any_stride(backend, dtype):
    itemsize = DTYPES[dtype].itemsize
    for shapes in (
        ((1, 1, 4, 64), (1, 90, 2, 64)),
        ((2, 70, 1, 64), (2, 90, 1, 64)),
        ((1, 70, 2, 1), (1, 90, 1, 1)),
    ):
        q, k, v = normal(shapes[0], dtype, 1), normal(shapes[1], dtype, 2), normal(shapes[1], dtype, 3)
        layouts = fitting(backend, q, k, v)
        plain = check(backend, q, k, v, layouts)
        placed = [Placed(backend, layout, x.shape, x.dtype, x) for x, layout in zip((q, k, v), layouts, strict=True)]
        for absurd in (1, 10**9, -(2**40) + 1, 0):
            arrays = []
            for x in placed:
                strides = [
                    absurd * itemsize if size == 1 else stride
                    for size, stride in zip(x.shape, x.strides, strict=True)
                ]
                arrays.append(backend.array(x.memory, x.dtype, x.shape, strides, x.offset))
            result, lse = backend.attention(*arrays, return_lse=True)
            assert_same(backend, (backend.download(result), backend.download(lse)), plain, f"stride {absurd}")


@on(dtypes=("float16", "float32"))
def test_a_last_axis_that_is_not_contiguous_is_refused(backend, dtype):
    itemsize = DTYPES[dtype].itemsize
    q, k, v = inputs(dtype)
    placed = [Placed(backend, Layout(pad=(0, 0, 0, 64)), x.shape, x.dtype, x) for x in (q, k, v)]
    for which, name in enumerate("qkv"):
        for stride in (2, 0):
            arrays = [x.array for x in placed]
            x = placed[which]
            arrays[which] = backend.array(
                x.memory, x.dtype, x.shape, (*x.strides[:3], stride * itemsize), x.offset
            )
            with pytest.raises(ValueError, match=f"{name} must be contiguous in its last axis"):
                backend.attention(*arrays)


@on(dtypes=("float16", "float32"))
def test_three_axes_are_a_batch_of_one(backend, dtype):
    q, k, v = inputs(dtype, batch=1)
    plain = check(backend, q, k, v, causal=True)
    flat = []
    for x in (q, k, v):
        placed = Placed(backend, PLAIN, x.shape, x.dtype, x)
        flat.append(backend.array(placed.memory, x.dtype, x.shape[1:], placed.strides[1:], placed.offset))
    result, lse = backend.attention(*flat, causal=True, return_lse=True)
    assert_same(backend, (backend.download(result)[None], backend.download(lse)[None]), plain, "3-d")


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_no_layout_is_copied(backend, dtype):
    """What the pool hands out is out and lse, whatever the strides."""
    import cupy

    q, k, v = inputs(dtype)
    for layout in LAYOUTS.values():
        if not is_taken(backend, q, k, v, layouts=layout):
            continue
        arrays = [Placed(backend, layout, x.shape, x.dtype, x).array for x in (q, k, v)]
        sizes = []

        def counted(size, sizes=sizes):
            sizes.append(size)
            return cupy.get_default_memory_pool().malloc(size)

        with config.force_tier(backend.tier), cupy.cuda.using_allocator(counted):
            cuflash.attention(*arrays, return_lse=True)
        assert sizes == [math.prod(q.shape) * 2, math.prod(q.shape[:3]) * 4]


# ------------------------------------------------------------------------------------------------------------
# Offsets past 32 bits (GPU only)

GIB = 1 << 30


def needs_memory(size: int) -> None:
    import cupy

    free, _ = cupy.cuda.runtime.memGetInfo()
    if free < size + GIB:
        pytest.skip(f"needs {size / GIB:.0f} GiB of GPU memory, {free / GIB:.0f} are free")


class Wide:
    """A (batch, seqlen, heads, head_dim) array with strides in elements given, inside gigabytes of NaN."""

    def __init__(self, backend, values, strides):
        import cupy

        self.itemsize = values.itemsize
        self.shape, self.dtype = values.shape, values.dtype
        reach = [(size - 1) * stride for size, stride in zip(values.shape, strides, strict=True)]
        self.start = -sum(min(0, x) for x in reach)
        self.size = (sum(abs(x) for x in reach) + 1) * self.itemsize + 2 * BAND
        needs_memory(self.size)
        # Outside of the pool, so that it goes back to the other processes at once.
        self.memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(self.size), 0)
        self.memory.memset_async(POISON, self.size)
        self.strides = strides
        self.array = backend.array(
            self.memory,
            values.dtype,
            values.shape,
            [x * self.itemsize for x in strides],
            BAND + self.start * self.itemsize,
        )
        for at, row in self._rows(values):
            (self.memory + at).copy_from_host(row.ctypes.data, row.nbytes)

    def _rows(self, values):
        """(byte offset, row) of each run of head_dim elements."""
        for index in np.ndindex(self.shape[:3]):
            element = self.start + sum(i * stride for i, stride in zip(index, self.strides, strict=False))
            yield BAND + element * self.itemsize, values[index]

    def fetch(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        for at, row in self._rows(values):
            (self.memory + at).copy_to_host(row.ctypes.data, row.nbytes)
        return values


# Of an array (2, 33, 2, 64): one stride so large that the array reaches past 2**31 and 2**32 elements, the
# others small. Even ones keep 16-byte alignment, the odd one does not.
WIDE_STRIDES = {
    "rows": (128, 2**27 + 256, 64, 1),
    "rows backwards": (128, -(2**27 + 256), 64, 1),
    "heads": (33 * 64, 64, 2**32 + 64 * 100, 1),
    "batches": (2**32 + 64 * 100, 128, 64, 1),
    "batches, odd": (2**32 + 64 * 100 + 1, 128, 64, 1),
}
WIDE = {f"{which}, {strides}": (which, strides) for which in ("q", "k", "v", "out") for strides in WIDE_STRIDES}
WIDE_FOR_TMA = {
    name: (which, strides)
    for name, (which, strides) in WIDE.items()
    if which == "out" or strides in ("rows", "heads", "batches")
}


@on("simt", "sm80", dtypes=("float16",))
@pytest.mark.parametrize("which, strides", WIDE.values(), ids=list(WIDE))
def test_offsets_past_32_bits(backend, dtype, which, strides):
    check_wide(backend, dtype, which, strides)


@on("sm90", dtypes=("float16",))
@pytest.mark.parametrize("which, strides", WIDE_FOR_TMA.values(), ids=list(WIDE_FOR_TMA))
def test_offsets_past_32_bits_by_tma(backend, dtype, which, strides):
    check_wide(backend, dtype, which, strides)


def check_wide(backend, dtype, which, strides):
    q, k, v = inputs(dtype, seqlen_q=33, heads_q=2, heads_k=2)
    plain = check(backend, q, k, v, causal=True)
    arrays = {
        name: Placed(backend, PLAIN, x.shape, x.dtype, x).array for name, x in (("q", q), ("k", k), ("v", v))
    }
    values = {"q": q, "k": k, "v": v, "out": np.full_like(q, np.nan)}[which]
    wide = Wide(backend, values, WIDE_STRIDES[strides])
    assert wide.size > 8 * GIB
    out = wide.array if which == "out" else None
    if which != "out":
        arrays[which] = wide.array
    result, lse = backend.attention(*arrays.values(), causal=True, return_lse=True, out=out)
    result = wide.fetch() if which == "out" else backend.download(result)
    assert_same(backend, (result, backend.download(lse)), plain, f"{which}, {strides}")


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_a_key_far_into_a_long_cache(backend, dtype):
    """Contiguous rows of many heads: a single row index times the row stride passes 2**32 bytes."""
    seqlen_k, heads = 40_000, 1024
    q, k, v = inputs(dtype, batch=1, seqlen_q=5, seqlen_k=64, heads_q=2, heads_k=2)
    plain = check(backend, q, k, v)
    row = heads * 64
    arrays = [Placed(backend, PLAIN, q.shape, q.dtype, q).array]
    for x in (k, v):
        wide = Wide(backend, x, (0, row * (seqlen_k // 64), 64, 1))
        assert wide.size > 4 * GIB
        arrays.append(wide.array)
    result, lse = backend.attention(*arrays, return_lse=True)
    assert_same(backend, (backend.download(result), backend.download(lse)), plain, "far keys")


@on_tiers("simt", "sm80", "sm90")
def test_a_result_of_more_than_4_gib(tier):
    """More than 2**31 elements of out: with one key every row is that value, from the first to the last."""
    import cupy

    backend = backend_named(tier)
    seqlen_q, heads, dim = (1 << 22) + 3, 2, 256
    q, k, v = (
        Placed(backend, PLAIN, x.shape, x.dtype, x)
        for x in inputs(
            "float16", batch=1, seqlen_q=1, heads_q=heads, heads_k=heads, head_dim=8, head_dim_v=dim
        )
    )
    # One row of q, seen by all.
    arrays = [
        backend.array(q.memory, q.dtype, (1, seqlen_q, heads, 8), (0, 0, 16, 2), q.offset),
        k.array,
        v.array,
    ]
    size = seqlen_q * heads * dim * 2
    assert size > 4 * GIB
    needs_memory(size)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(size + 2 * BAND), 0)
    memory.memset_async(POISON, size + 2 * BAND)
    out = cupy.ndarray((1, seqlen_q, heads, dim), "float16", memptr=memory + BAND)
    with config.force_tier(tier):
        cuflash.attention(*arrays, out=out)
    row = heads * dim * 2
    for start in (0, (1 << 21) - 500, (1 << 22) - 1500, seqlen_q - 1000):
        rows = np.empty((1000, heads, dim), np.float16)
        (memory + (BAND + start * row)).copy_to_host(rows.ctypes.data, rows.nbytes)
        assert (rows == v.fetch()[0]).all(), f"rows from {start}"
    for at in (0, BAND + size):
        band = np.empty(BAND, np.uint8)
        (memory + at).copy_to_host(band.ctypes.data, BAND)
        assert (band == POISON).all()


@on("cpu", "simt", "sm80", dtypes=("float16", "float32"))
def test_guard_bands_are_seen(backend, dtype):
    """The harness itself: a result written one element too far is found."""
    q, _, _ = inputs(dtype, batch=1)
    placed = Placed(backend, Layout(pad=(0, 0, 0, 8)), q.shape, q.dtype, q)
    assert (placed.fetch() == q).all()
    wider = backend.array(placed.memory, q.dtype, (1, 130, 4, 65), placed.strides, placed.offset)
    target = Placed(backend, PLAIN, (1, 130, 4, 65), q.dtype, normal((1, 130, 4, 65), dtype, 5))
    if backend.name == "cpu":
        wider[...] = target.array
    else:
        v = normal((1, 1, 4, 65), dtype, 5)
        arrays = [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in (q, v[..., :64], v)]
        backend.attention(*arrays, out=wider)
    with pytest.raises(AssertionError, match="written outside of the array"):
        placed.fetch()
    assert_right(*compute(backend, q, q, q), q, q, q)
