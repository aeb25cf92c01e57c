"""The ends of the ranges: nothing at all, batches and heads past 65535, long rows; memory never grows."""

import math

import numpy as np
import pytest
from support import DTYPES, PLAIN, Layout, Placed, assert_right, compute, inputs, normal, on, on_pairs

import cuflash
from cuflash import config

# ------------------------------------------------------------------------------------------------------------
# Nothing

EMPTY = {
    "batch": dict(batch=0),
    "queries": dict(seqlen_q=0),
    "heads": dict(heads_q=0, heads_k=0),
    "query heads": dict(heads_q=0),
    "batch and keys": dict(batch=0, seqlen_k=0),
    "all": dict(batch=0, seqlen_q=0, seqlen_k=0, heads_q=0, heads_k=0),
}


@on()
@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_result(backend, dtype, case):
    q, k, v = inputs(dtype, **dict(seqlen_q=5, seqlen_k=7, head_dim=8, head_dim_v=6) | EMPTY[case])
    for out in (None, PLAIN):
        result, lse = compute(backend, q, k, v, out=out, causal=True)
        assert result.size == 0 and lse.size == 0


@on()
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(3, 3)), dict(softcap=2.0)], ids=str)
def test_no_keys(backend, dtype, options):
    q, k, v = inputs(dtype, seqlen_q=130, seqlen_k=0)
    for out in (None, Layout(pad=(0, 0, 0, 8))):
        result, lse = compute(backend, q, k, v, out=out, **options)
        assert (result == 0).all() and (lse == -np.inf).all()


# ------------------------------------------------------------------------------------------------------------
# Many


@on()
@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536), (70001, 2)])
def test_more_than_65535(backend, dtype, batch, heads):
    """With one key the result is its value: every row of every sequence and head is looked at."""
    q = normal((batch, 1, heads, 16), dtype, 1)
    k, v = normal((batch, 1, heads, 16), dtype, 2), normal((batch, 1, heads, 16), dtype, 3)
    result, lse = compute(backend, q, k, v)
    assert (result == v).all()
    logits = (q.astype(np.float64) * k.astype(np.float64)).sum(axis=3).transpose(0, 2, 1) / 4
    np.testing.assert_allclose(lse, logits, rtol=1e-5, atol=1e-5)


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_many_sequences_of_several_rows(backend, dtype):
    q, k, v = inputs(dtype, batch=65540, seqlen_q=3, seqlen_k=4, heads_q=2, heads_k=1, head_dim=16)
    result, lse = compute(backend, q, k, v, causal=True)
    some = [0, 1, 32767, 32768, 65534, 65535, 65536, 65539]
    assert_right(result[some], lse[some], q[some], k[some], v[some], causal=True)


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_more_query_tiles_than_65535(backend, dtype):
    q, k, v = inputs(dtype, batch=1, seqlen_q=65536 * 64 + 1, seqlen_k=1, heads_q=1, heads_k=1, head_dim=16)
    result, _ = compute(backend, q, k, v)
    assert (result.view(np.uint16) == v.view(np.uint16)).all()


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_a_launch_too_large_is_refused_before_anything_is_allocated(backend, dtype):
    import cupy

    one = Placed(backend, PLAIN, (1, 1, 1, 8), DTYPES[dtype], normal((1, 1, 1, 8), dtype, 1))
    q = backend.array(one.memory, one.dtype, (65536, 1, 65536, 8), (0, 0, 0, 2), one.offset)
    k = backend.array(one.memory, one.dtype, (65536, 1, 1, 8), (0, 0, 0, 2), one.offset)

    def nothing(size):
        raise AssertionError(f"{size} bytes are asked for")

    with config.force_tier(backend.tier), cupy.cuda.using_allocator(nothing):
        with pytest.raises(
            ValueError, match="query tiles must be at most 2147483647; got 65536 .* 65536 .* 1: split"
        ):
            cuflash.attention(q, k, k)


@on("cpu", "simt", "sm80", "sm90", dtypes=("float16", "float32"))
def test_a_long_row(backend, dtype):
    q, k, v = inputs(dtype, batch=1, seqlen_q=2, seqlen_k=100_000, heads_q=1, heads_k=1, head_dim=32)
    assert_right(*compute(backend, q, k, v, causal=True), q, k, v, causal=True)


# ------------------------------------------------------------------------------------------------------------
# Memory (GPU only)


def round_up(size: int) -> int:
    return -(-size // 512) * 512  # what CuPy's pool hands out


@on("simt", "sm80", "sm90", dtypes=("float16", "float32"))
@pytest.mark.parametrize("seqlen", [1000, 65536])
def test_the_pool_grows_by_out_and_lse_only(backend, dtype, seqlen):
    """Also where the score matrix would take 8 or 16 GiB."""
    import cupy

    q, k, v = inputs(dtype, batch=1, seqlen_q=seqlen, heads_q=1, heads_k=1)
    arrays = [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in (q, k, v)]
    for return_lse in (True, False):
        pool = cupy.cuda.MemoryPool()  # what it ever held is the peak, for it gives nothing back
        with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
            result = cuflash.attention(*arrays, return_lse=return_lse)
        assert pool.total_bytes() == round_up(q.nbytes) + return_lse * round_up(4 * seqlen)
        if return_lse:
            out, lse = map(backend.download, result)
    for rows in (slice(0, 3), slice(seqlen - 3, seqlen)):
        assert_right(out[:, rows], lse[..., rows], q[:, rows], k, v)


@on("simt", "sm80", "sm90", dtypes=("float16",))
def test_out_is_not_allocated_when_it_is_given(backend, dtype):
    import cupy

    q, k, v = inputs(dtype)
    arrays = [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in (q, k, v, np.zeros_like(q))]
    pool = cupy.cuda.MemoryPool()
    with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
        cuflash.attention(*arrays[:3], out=arrays[3])
    assert pool.total_bytes() == 0


@on_pairs("simt-float32", "sm80-bfloat16", "sm90-bfloat16")
def test_repeated_calls_leave_nothing_behind(backend, dtype):
    """A thousand calls of ten shapes: as many bytes in use after the last as after the first round."""
    import cupy

    sets = [
        [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in inputs(dtype, seqlen_q=n)]
        for n in range(20, 30)
    ]
    pool = cupy.cuda.MemoryPool()
    with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
        for arrays in sets:
            cuflash.attention(*arrays, return_lse=True)
        total = pool.total_bytes()
        for _ in range(100):
            for arrays in sets:
                cuflash.attention(*arrays, return_lse=True)
        assert (pool.used_bytes(), pool.total_bytes()) == (0, total)
    assert total <= round_up(math.prod(sets[-1][0].shape) * 4) * 20
