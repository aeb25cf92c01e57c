"""The NumPy path: every option against the oracle, at the edges of its tiles, in bounded memory and time."""

import os
import subprocess
import sys
import time
import tracemalloc
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuflash
from cuflash import cpu, oracle
from cuflash.problem import Problem

DTYPES = ("float16", "bfloat16", "float32", "float64")
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 193)


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def tensors(dtype="float32", batch=1, seqlen_q=8, seqlen_k=8, heads_q=1, heads_k=1, dim=8, dim_v=None,
            seed=0):
    rng = np.random.default_rng(seed)
    shapes = (seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v or dim)
    return tuple(rng.standard_normal((batch, *shape)).astype(dtype_of(dtype)) for shape in shapes)


def problem_of(q, k, v, causal=False, window=None, softmax_scale=None, softcap=0.0):
    left, right = window or (None, None)
    if causal:
        right = 0 if right is None else min(right, 0)
    return Problem(
        dtype=q.dtype.name, batch=q.shape[0], seqlen_q=q.shape[1], seqlen_k=k.shape[1], heads_q=q.shape[2],
        heads_k=k.shape[2], head_dim=q.shape[3], head_dim_v=v.shape[3], softcap=softcap,
        softmax_scale=q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale,
        window_left=left, window_right=right, return_lse=True)


def attend(q, k, v, out=None, **options):
    """(out, lse) of the CPU path. out was full of nan, the inputs must stay as they are, nothing may warn."""
    if out is None:
        out = np.empty((*q.shape[:3], v.shape[3]), q.dtype)
    out[...] = np.nan
    before = [x.tobytes() for x in (q, k, v)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lse = cpu.attention(problem_of(q, k, v, **options), q, k, v, out)
    assert before == [x.tobytes() for x in (q, k, v)]
    assert lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    assert lse.dtype == (np.float64 if q.dtype == np.float64 else np.float32)
    return out, lse


def check(q, k, v, **options):
    out, lse = attend(q, k, v, **options)
    verdict = oracle.judge(out, lse, q, k, v, **options)
    assert verdict.ok, verdict.why
    return out, lse


TILES = ("TILE_ROWS", "TILE_KEYS", "TILE_ELEMENTS", "HEADS_ELEMENTS", "CACHE_ELEMENTS", "BACKWARD_ROWS", "BACKWARD_KEYS")
SHIPPED, SMALL = tuple(getattr(cpu, name) for name in TILES), (32, 16, 512, 600, 100, 32, 16)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles so small that short sequences span many of them."""
    for name, value in zip(TILES, SMALL):
        monkeypatch.setattr(cpu, name, value)


@pytest.fixture(params=("shipped", "small"))
def tiles(request):
    """The tiles as shipped, and small ones."""
    if request.param == "small":
        request.getfixturevalue("small_tiles")


NAMED = {
    "dense": {},
    "causal": {"causal": True},
    "window": {"window": (20, 5)},
    "left only": {"window": (20, None)},
    "right only": {"window": (None, 5)},
    "causal window": {"causal": True, "window": (20, 9)},
    "diagonal": {"window": (0, 0)},
    "softcap": {"softcap": 1.5},
    "softcap causal": {"softcap": 30.0, "softmax_scale": 4.0, "causal": True},
    "scale 0": {"softmax_scale": 0.0, "causal": True},
    "scale negative": {"softmax_scale": -0.7, "causal": True},
    "scale tiny": {"softmax_scale": 1e-30},
    "scale large": {"softmax_scale": 30.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
def test_named(name, dtype, tiles):
    for seqlen_q, seqlen_k in ((67, 67), (33, 90), (90, 33), (1, 70)):
        check(*tensors(dtype, 2, seqlen_q, seqlen_k, 4, 2, 16, 12), **NAMED[name])


@pytest.mark.parametrize("seqlen_q", EDGES)
def test_edges(seqlen_q, small_tiles):
    for seqlen_k in EDGES:
        for causal in (False, True):
            check(*tensors("float32", 1, seqlen_q, seqlen_k, dim=4, seed=seqlen_k), causal=causal)


@pytest.mark.parametrize("past", (-1, 0, 1))
def test_edges_of_the_shipped_tiles(past):
    rows, keys = cpu.TILE_ROWS + past, cpu.TILE_KEYS
    for seqlen_k in (keys - 1, keys, keys + 1):
        check(*tensors("float32", 1, rows, seqlen_k, dim=4), causal=True)
    check(*tensors("bfloat16", 1, 2 * cpu.TILE_ROWS + past, 40, dim=4), window=(10, 3))


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (28, 4), (15, 5), (96, 8), (5, 5)], ids=str)
def test_grouped_heads(heads, tiles):
    q, k, v = tensors("float32", 2, 9, 20, *heads)
    out, lse = check(q, k, v, causal=True)
    # A value of its own for each key head shows which one a query head read.
    group = heads[0] // heads[1]
    v[...] = np.arange(heads[1])[:, None]
    out, _ = attend(q, k, v)
    expected = (np.arange(heads[0]) // group)[:, None]
    np.testing.assert_allclose(out, np.broadcast_to(expected, out.shape), rtol=1e-6)


def test_a_group_larger_than_a_tile():
    heads = cpu.TILE_ROWS + 3
    check(*tensors("float32", 1, 3, 5, heads, 1, 2), causal=True)


@pytest.mark.parametrize("dim", (1, 3, 7, 20, 33, 63, 100, 127, 256))
def test_head_dims(dim, tiles):
    for dim_v in (1, 7, 64, 130):
        out, _ = check(*tensors("float16", 1, 19, 37, 2, 1, dim, dim_v), causal=True)
        assert out.shape == (1, 19, 2, dim_v)


def test_every_channel_counts():
    for dim in (128, 256):
        q, k, v = tensors(dim=dim, seqlen_q=20, seqlen_k=20)
        q[..., :64], k[..., :64] = 0, 0
        out, _ = check(q, k, v)
        assert np.abs(out - v.mean(axis=1, keepdims=True)).max() > 0.1


def test_many_small_heads_and_batches(tiles):
    """More heads and batches than one step takes, and not a multiple of it."""
    check(*tensors("float32", 37, 5, 6, 6, 3, 4), causal=True)
    check(*tensors("float16", 1, 1, 3, 50, 50, 4))


# What the mask shows: a one-hot V makes the output the row of weights, and scale 0 makes all of them equal.

def seen(seqlen_q, seqlen_k, heads_q=1, heads_k=1, **options):
    """(heads_q, seqlen_q, seqlen_k) of bool, read off the output."""
    q, k, _ = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads_q, heads_k=heads_k)
    v = np.broadcast_to(np.eye(seqlen_k, dtype=np.float32)[:, None], (1, seqlen_k, heads_k, seqlen_k))
    out, lse = attend(q, k, v, softmax_scale=0.0, **options)
    shown = out[0].swapaxes(0, 1) > 0
    counts = shown.sum(axis=-1)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse[0], np.log(counts), rtol=1e-6)
    np.testing.assert_allclose(out[0].sum(axis=-1).T, counts > 0, rtol=1e-6)
    return shown


@pytest.mark.parametrize("options", [
    {"causal": True}, {"window": (0, 0)}, {"window": (3, 0)}, {"window": (0, 3)}, {"window": (20, 7)},
    {"window": (None, 2)}, {"window": (2, None)}, {"window": (2**31 - 1, 0)},
    {"causal": True, "window": (5, 9)},
], ids=str)
def test_visible_sets(options, tiles):
    for seqlens in ((3, 128), (2, 5), (5, 2), (65, 65), (129, 1), (130, 40)):
        shown = seen(*seqlens, **options)
        np.testing.assert_array_equal(shown[0], oracle.visible(*seqlens, options.get("causal", False),
                                                               options.get("window")))


def test_grouped_rows_keep_their_diagonal(tiles):
    shown = seen(130, 130, 8, 2, causal=True)
    np.testing.assert_array_equal(shown.sum(axis=-1), np.broadcast_to(np.arange(1, 131), (8, 130)))


@pytest.mark.parametrize("width", (0, 1, 63, 64, 65, 127, 128))
def test_a_window_shows_one_key_more_than_its_width(width, tiles):
    counts = seen(150, 150, window=(width, 0))[0].sum(axis=-1)
    np.testing.assert_array_equal(counts, np.minimum(np.arange(1, 151), width + 1))


def test_a_huge_window_is_no_window(tiles):
    q, k, v = tensors(seqlen_q=8, seqlen_k=3)
    full, _ = attend(q, k, v)
    for right in (2, 3, 5):
        assert np.abs(attend(q, k, v, window=(None, right))[0] - full).max() > 0.01
    for right in (7, 8, 2**31 - 1):
        np.testing.assert_array_equal(attend(q, k, v, window=(None, right))[0], full)
    q, k, v = tensors(seqlen_q=3, seqlen_k=8)
    full, _ = attend(q, k, v)
    assert np.abs(attend(q, k, v, window=(6, None))[0] - full).max() > 0.01
    for left in (7, 8, 2**31 - 1):
        np.testing.assert_array_equal(attend(q, k, v, window=(left, None))[0], full)


def test_spellings_of_causal(tiles):
    q, k, v = tensors(seqlen_q=65, seqlen_k=65, dim=64)
    causal, _ = attend(q, k, v, causal=True)
    for window in ((None, 0), (65, 0), (64, 0)):
        np.testing.assert_allclose(attend(q, k, v, window=window)[0], causal, rtol=1e-6, atol=1e-7)
    shorter = attend(q, k, v, window=(63, 0))[0]
    np.testing.assert_allclose(shorter[:, :64], causal[:, :64], rtol=1e-6, atol=1e-7)
    assert np.abs(shorter[:, 64] - causal[:, 64]).max() > 1e-3


def test_a_wide_window_stays_causal(tiles):
    q, k, v = tensors(seqlen_q=16, seqlen_k=16)
    causal, _ = attend(q, k, v, causal=True)
    for left in (15, 16, 100):
        out, _ = attend(q, k, v, causal=True, window=(left, 4))
        np.testing.assert_array_equal(out, causal)
        moved = v.copy()
        moved[0, 15] += 100
        out_moved, _ = attend(q, k, moved, causal=True, window=(left, 4))
        np.testing.assert_array_equal(out_moved[:, :15], out[:, :15])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_diagonal_alone_returns_v(dtype, tiles):
    for seqlen in (1, 2, 31, 130):
        q, k, v = tensors(dtype, 1, seqlen, seqlen, 4, 2, 5, 9)
        out, _ = attend(q, k, v, window=(0, 0))
        np.testing.assert_array_equal(out, np.repeat(v, 2, axis=2))


@pytest.mark.parametrize("seqlens", [(5, 2), (129, 1), (256, 3), (8, 4)], ids=str)
def test_rows_without_keys(seqlens, tiles):
    """Exactly 0 and -inf: not nan, and not the mean of V that a finite mask value gives."""
    seqlen_q, seqlen_k = seqlens
    q, k, _ = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    v = np.arange(1, seqlen_k + 1, dtype=np.float32).reshape(1, -1, 1, 1)
    out, lse = check(q, k, v, causal=True)
    empty = seqlen_q - seqlen_k
    assert (out[:, :empty] == 0).all() and (lse[..., :empty] == -np.inf).all()
    assert (out[:, empty:] >= 1).all() and np.isfinite(lse[..., empty:]).all()


def test_a_band_far_from_the_first_tile(small_tiles):
    """Rows whose first tiles are all masked, while other rows of the query tile see them."""
    for seqlen in (129, 640):
        q, k, v = tensors(seqlen_q=seqlen, seqlen_k=seqlen, dim=4)
        check(q, k, v, window=(9, 0))
        check(q, k, v, window=(0, 9))
        check(q[:, :seqlen // 2], k, v, window=(9, 40))


# Logits

@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
@pytest.mark.parametrize("sign", (1, -1))
def test_logits_beyond_any_stand_in(dtype, sign, tiles):
    """All logits near -7e4 (or 7e4) are a softmax like any other."""
    q, k, v = tensors(dtype, seqlen_q=40, seqlen_k=40, dim=64)
    q[..., 0], k[..., 0] = 100, -5600 * sign
    out, lse = check(q, k, v)
    assert 0.05 < np.abs(out.astype(np.float32)).max() < 5
    assert (np.abs(lse) > 6e4).all()


def test_softcap_saturates(tiles):
    q, k, v = tensors(seqlen_q=3, seqlen_k=4, dim=4)
    q[...], k[...] = 0, 0
    q[..., 0], k[0, :, 0, 0] = 1, (4400, 5000, 1e4, -1e4)
    out, lse = check(q, k, v, softmax_scale=1.0, softcap=50.0)
    np.testing.assert_allclose(out[0, 0, 0], v[0, :3, 0].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(lse, 50 + np.log(3), rtol=1e-6)
    check(q, k, v, softmax_scale=1.0, softcap=1e-3)
    q, k, v = tensors(seqlen_q=20, seqlen_k=20)
    full, _ = attend(q, k, v)
    for cap in (1e6, 1e300):
        np.testing.assert_allclose(attend(q, k, v, softcap=cap)[0], full, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(attend(q, k, v, softcap=1e-60)[0],
                               np.broadcast_to(v.mean(axis=1, keepdims=True), q.shape), rtol=1e-5, atol=1e-6)


def test_options_of_one_call_do_not_reach_the_next(tiles):
    q, k, v = tensors(seqlen_q=30, seqlen_k=30)
    results = [check(q, k, v, softmax_scale=3.0, softcap=cap)[0] for cap in (0.0, 10.0, 2.0, 10.0, 0.0)]
    np.testing.assert_array_equal(results[1], results[3])
    np.testing.assert_array_equal(results[0], results[4])
    assert np.abs(results[0] - results[1]).max() > 1e-3 and np.abs(results[1] - results[2]).max() > 1e-3


def test_scale_zero_is_the_mean(tiles):
    q, k, v = tensors(seqlen_q=5, seqlen_k=5)
    out, _ = check(q, k, v, causal=True, softmax_scale=0.0)
    means = np.cumsum(v, axis=1) / np.arange(1, 6).reshape(1, 5, 1, 1)
    np.testing.assert_allclose(out, means, rtol=1e-5, atol=1e-6)
    for scale in (-0.125, 1e-30, 1e4):
        check(q, k, v, causal=True, softmax_scale=scale)


def test_lse_is_natural_and_merges(tiles):
    q, k, v = tensors("float32", 1, 12, 50, 4, 2, 64)
    options = {"softmax_scale": 0.3, "softcap": 8.0}
    whole, whole_lse = check(q, k, v, **options)
    (a, lse_a), (b, lse_b) = (attend(q, k[:, j], v[:, j], **options) for j in (slice(0, 20), slice(20, 50)))
    weight = 1 / (1 + np.exp(lse_b - lse_a)).transpose(0, 2, 1)[..., None]
    np.testing.assert_allclose(weight * a + (1 - weight) * b, whole, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(np.logaddexp(lse_a, lse_b), whole_lse, rtol=1e-6)


# nan and inf

@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_masked_has_no_influence(bad, dtype, tiles):
    q, k, v = tensors(dtype, 2, 40, 40, 4, 2)
    for options, hidden, rows in (({"causal": True}, slice(35, 40), slice(0, 35)),
                                  ({"window": (4, 3)}, slice(0, 5), slice(9, 40)),
                                  ({"window": (4, 3)}, slice(30, 31), slice(0, 27))):
        for which in (k, v):
            kept = which[:, hidden].copy()
            clean, clean_lse = attend(q, k, v, **options)
            which[:, hidden] = bad
            out, lse = attend(q, k, v, **options)
            which[:, hidden] = kept
            np.testing.assert_array_equal(out[:, rows], clean[:, rows])
            np.testing.assert_array_equal(lse[..., rows], clean_lse[..., rows])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_reaches_the_rows_that_see_it(bad, tiles):
    for options in ({}, {"causal": True}, {"window": (7, 2)}, {"window": (None, 0), "softcap": 3.0}):
        q, k, v = tensors("float32", 2, 50, 50, 4, 2)
        for key, channel in ((0, 1), (17, 0), (18, 0), (33, 5), (49, 7)):
            v[1, key, 1, channel] = bad
        out, lse = check(q, k, v, **options)        # the judge compares the places of nan and inf
        assert np.isfinite(lse).all() and np.isfinite(out[0]).all() and np.isfinite(out[1, :, :2]).all()
        table = oracle.visible(50, 50, options.get("causal", False), options.get("window"))
        np.testing.assert_array_equal(~np.isfinite(out[1, :, 2, 5]), table[:, 33])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_key_or_query_reaches_its_rows(bad, tiles):
    for options in ({}, {"causal": True}, {"window": (7, 2)}):
        q, k, v = tensors("float32", 2, 50, 50, 4, 2)
        k[0, 21, 1, 3] = bad
        check(q, k, v, **options)
        q, k, v = tensors("float32", 2, 50, 50, 4, 2)
        q[1, 30, 3, 2] = bad
        out, _ = check(q, k, v, **options)
        assert np.isnan(out[1, 30, 3]).all() and np.isfinite(out).sum() == out.size - 8


def test_a_visible_nan_of_no_weight_still_shows(tiles):
    """Weights that underflow to 0 are not masks: 0 * nan is nan, whatever BLAS would skip."""
    for seqlen_q in (1, 2, 40):
        q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=40)
        q[...], k[...] = 10, 10
        k[0, 5] = -10
        v[0, 5, 0, 3] = np.nan
        out, lse = check(q, k, v)
        assert np.isnan(out[..., 3]).all() and np.isfinite(out[..., :3]).all() and np.isfinite(lse).all()


def test_logits_of_minus_infinity_make_an_empty_row(tiles):
    q, k, v = tensors(seqlen_q=20, seqlen_k=20)
    q[...] = -1
    k[:, :10] = np.inf
    out, lse = check(q, k, v, causal=True)
    assert (out[:, :10] == 0).all() and (lse[..., :10] == -np.inf).all() and np.isfinite(lse[..., 10:]).all()


# Sizes of zero

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", (False, True))
def test_zero_lengths(dtype, causal, tiles):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_k": 0},
                  {"heads_q": 0, "heads_k": 2}):
        q, k, v = tensors(dtype, **sizes)
        out, lse = attend(q, k, v, causal=causal)
        assert (out == 0).all() and (lse == -np.inf).all()
        assert out.shape == (*q.shape[:3], 8)


def test_no_lse_unless_asked():
    q, k, v = tensors()
    problem = problem_of(q, k, v)
    plain = Problem(**{**problem.__dict__, "return_lse": False})
    out, other = np.empty_like(q), np.empty_like(q)
    assert cpu.attention(plain, q, k, v, out) is None
    cpu.attention(problem, q, k, v, other)
    np.testing.assert_array_equal(out, other)
    for sizes in ({"seqlen_k": 0}, {"seqlen_q": 0}):
        q, k, v = tensors(**sizes)
        plain = Problem(**{**problem_of(q, k, v).__dict__, "return_lse": False})
        assert cpu.attention(plain, q, k, v, np.empty_like(q)) is None


# Strides

def head_major(x):
    return np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2)


def dim_before_heads(x):
    return np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3)


def every_second_channel(x):
    wide = np.full((*x.shape[:3], 2 * x.shape[3]), np.nan, x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def backwards(axis):
    def store(x):
        return np.flip(np.flip(x, axis).copy(), axis)
    store.__name__ = f"backwards_{axis}"
    return store


def inside_a_wider_buffer(x):
    wide = np.full((x.shape[0], x.shape[1] + 3, x.shape[2] + 2, x.shape[3] + 5), np.nan, x.dtype)
    view = wide[:, 2:-1, 1:-1, 1:1 + x.shape[3]]
    view[...] = x
    return view


def one_element_past_a_boundary(x):
    flat = np.empty(x.size + 1, x.dtype)
    flat[1:] = x.ravel()
    return flat[1:].reshape(x.shape)


LAYOUTS = (head_major, dim_before_heads, every_second_channel, backwards(1), backwards(2), backwards(3),
           inside_a_wider_buffer, one_element_past_a_boundary)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_agree_bit_for_bit(layout, dtype, tiles):
    for sizes in ((2, 45, 70, 4, 2, 24, 16), (1, 1, 70, 2, 2, 64, 64), (1, 33, 5, 2, 1, 256, 3)):
        q, k, v = tensors(dtype, *sizes)
        expected, expected_lse = attend(q, k, v, causal=True)
        stored = layout(q), layout(k), layout(v)
        assert all(np.array_equal(a, b) for a, b in zip(stored, (q, k, v)))
        out, lse = attend(*stored, out=layout(np.zeros_like(expected)), causal=True)
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(lse, expected_lse)


def test_slices_of_one_fused_tensor(tiles):
    rng = np.random.default_rng(0)
    for dtype in DTYPES:
        fused = rng.standard_normal((2, 40, 8, 16)).astype(dtype_of(dtype))
        q, k, v = fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]
        expected, _ = attend(*(np.ascontiguousarray(x) for x in (q, k, v)), causal=True)
        np.testing.assert_array_equal(attend(q, k, v, causal=True)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_inputs(dtype, tiles):
    """Stride 0 along the batch, the heads, the keys and the channels."""
    q, k, v = tensors(dtype, 1, 40, 40, 1, 1, 16)
    q, k, v = (np.broadcast_to(x, (3, 40, heads, 16)) for x, heads in ((q, 4), (k, 2), (v, 2)))
    expected, _ = check(*(x.copy() for x in (q, k, v)), causal=True)
    np.testing.assert_array_equal(attend(q, k, v, causal=True)[0], expected)
    check(q, np.broadcast_to(k[:, :1], k.shape), v, causal=True)
    check(*(np.broadcast_to(x[..., :1], x.shape) for x in (q, k, v)))


def test_strides_of_axes_of_one_do_not_matter(tiles):
    q, k, v = tensors("float32", 1, 1, 20, 1, 1, 8)
    expected, _ = attend(q, k, v)
    for stride in (1, 4, 10**9):
        odd = np.lib.stride_tricks.as_strided(q, q.shape, (stride, stride, stride, 4), writeable=False)
        out = np.lib.stride_tricks.as_strided(np.empty_like(q), q.shape, (stride, stride, stride, 4))
        np.testing.assert_array_equal(attend(odd, k, v, out=out)[0], expected)


def test_nothing_outside_out_is_written(tiles):
    q, k, v = tensors("float16", 2, 40, 20, 3, 1, 8, 7)
    wide = np.full((2, 44, 5, 12), 7, np.float16)
    attend(q, k, v, out=wide[:, 2:42, 1:4, 3:10], causal=True)
    wide[:, 2:42, 1:4, 3:10] = 7
    assert (wide == 7).all()


def test_repeats_are_equal_bit_for_bit(tiles):
    for dim in (24, 72, 248):
        q, k, v = tensors("float16", 1, 50, 130, 2, 2, dim)
        first, first_lse = attend(q, k, v)
        for _ in range(3):
            out, lse = attend(q, k, v)
            np.testing.assert_array_equal(out, first)
            np.testing.assert_array_equal(lse, first_lse)


# Anything

@st.composite
def cases(draw):
    length = st.one_of(st.integers(0, 40), st.sampled_from(EDGES))
    heads_k = draw(st.integers(1, 3))
    side = st.one_of(st.none(), st.integers(0, 70))
    sizes = (draw(st.integers(0, 2)), draw(length), draw(length), heads_k * draw(st.integers(1, 3)), heads_k,
             draw(st.integers(1, 40)), draw(st.integers(1, 40)))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.one_of(st.none(), st.tuples(side, side))),
        "softmax_scale": draw(st.one_of(st.none(), st.sampled_from((0.0, -0.3, 1.0, 1e-20, 5.0)))),
        "softcap": draw(st.sampled_from((0.0, 0.0, 0.5, 20.0))),
    }
    layouts = draw(st.tuples(*[st.sampled_from((np.copy, *LAYOUTS))] * 4))
    tile = draw(st.sampled_from((SHIPPED, SMALL, (3, 5, 40, 30, 7), (1, 1, 1, 1, 1))))
    return draw(st.sampled_from(DTYPES)), sizes, options, layouts, tile, draw(st.integers(0, 2**32 - 1))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_anything(drawn):
    dtype, sizes, options, layouts, tile, seed = drawn
    q, k, v = (layout(x) for layout, x in zip(layouts, tensors(dtype, *sizes, seed=seed)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(TILES, tile):
            patch.setattr(cpu, name, value)
        out = layouts[3](np.zeros((*q.shape[:3], v.shape[3]), q.dtype))
        out, lse = attend(q, k, v, out=out, **options)
    verdict = oracle.judge(out, lse, q, k, v, **options)
    assert verdict.ok, verdict.why


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.integers(1, 30), st.one_of(st.none(), st.integers(0, 35)),
       st.one_of(st.none(), st.integers(0, 35)), st.data())
def test_key_ranges_are_tight(seqlen_q, seqlen_k, left, right, data):
    """A query tile visits what lies from its first visible key to its last, and knows what needs no mask."""
    start = data.draw(st.integers(0, seqlen_q - 1))
    stop = data.draw(st.integers(start + 1, seqlen_q))
    q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    visited, by_all = cpu._key_ranges(problem_of(q, k, v, window=(left, right)), slice(start, stop))
    table = oracle.visible(seqlen_q, seqlen_k, False, (left, right))[start:stop]
    keys = np.flatnonzero(table.any(axis=0))
    assert (list(range(visited.start, visited.stop)) == list(range(keys[0], keys[-1] + 1)) if keys.size
            else visited.start >= visited.stop)
    unmasked = range(max(0, by_all.start), min(seqlen_k, by_all.stop))
    assert list(unmasked) == list(np.flatnonzero(table.all(axis=0)))


# The trap that the docstring of cpu.py describes

def right_recurrence(logits, v, tile):
    row_max, row_sum, acc = np.full((len(logits), 1), -np.inf), np.zeros((len(logits), 1)), 0.0
    for start in range(0, logits.shape[1], tile):
        s, values = logits[:, start:start + tile], v[start:start + tile]
        new_max = np.maximum(row_max, s.max(axis=1, keepdims=True))
        p, alpha = np.exp(s - new_max), np.exp(row_max - new_max)
        row_sum = alpha * row_sum + p.sum(axis=1, keepdims=True)
        acc = alpha * acc + p @ values
        row_max = new_max
    return acc / row_sum


def flash_1_recurrence(logits, v, tile):
    """Algorithm 1 of the first paper: the output is kept normalised, so the old sum has to be put back in."""
    row_max, row_sum, out = np.full((len(logits), 1), -np.inf), np.zeros((len(logits), 1)), 0.0
    for start in range(0, logits.shape[1], tile):
        s, values = logits[:, start:start + tile], v[start:start + tile]
        new_max = np.maximum(row_max, s.max(axis=1, keepdims=True))
        p, alpha = np.exp(s - new_max), np.exp(row_max - new_max)
        new_sum = alpha * row_sum + p.sum(axis=1, keepdims=True)
        out = (row_sum * alpha * out + p @ values) / new_sum
        row_max, row_sum = new_max, new_sum
    return out


def copied_recurrence(logits, v, tile):
    """The mix of both: an output that is never normalised, yet multiplied by the old sum."""
    row_max, row_sum, acc = np.full((len(logits), 1), -np.inf), np.zeros((len(logits), 1)), 0.0
    for start in range(0, logits.shape[1], tile):
        s, values = logits[:, start:start + tile], v[start:start + tile]
        new_max = np.maximum(row_max, s.max(axis=1, keepdims=True))
        p, alpha = np.exp(s - new_max), np.exp(row_max - new_max)
        acc = row_sum * alpha * acc + p @ values
        row_sum = alpha * row_sum + p.sum(axis=1, keepdims=True)
        row_max = new_max
    return acc / row_sum


def test_the_copied_recurrence_is_wrong():
    q, k, v = tensors("float64", seqlen_q=20, seqlen_k=48)
    logits = q[0, :, 0] @ k[0, :, 0].T * 8 ** -0.5

    def ok(recurrence, tile):
        out = recurrence(logits, v[0, :, 0], tile)[None, :, None]
        return oracle.judge(out, None, q, k, v).ok

    for recurrence in (right_recurrence, flash_1_recurrence):
        assert all(ok(recurrence, tile) for tile in (48, 24, 16, 7, 1))
    assert ok(copied_recurrence, 48), "one tile hides it"
    assert not any(ok(copied_recurrence, tile) for tile in (24, 16, 7, 1))
    out, _ = attend(q, k, v)
    np.testing.assert_allclose(right_recurrence(logits, v[0, :, 0], 16), out[0, :, 0], rtol=1e-12, atol=1e-14)


# Memory and time

def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def scratch_bytes(problem):
    """What the docstring promises, and a little for Python's own objects."""
    elements = 4 * cpu.TILE_ELEMENTS + problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return elements * (8 if problem.dtype == "float64" else 4) + 2**16


@pytest.mark.parametrize("sizes, dtype, options", [
    ((1, 2048, 2048, 2, 2, 64), "float16", {}),
    ((1, 2048, 2048, 2, 2, 64), "float32", {"causal": True}),
    ((1, 600, 3000, 16, 1, 128), "bfloat16", {"causal": True}),
    ((1, 1, 20000, 8, 8, 64), "float16", {}),
    ((300, 8, 8, 16, 16, 64), "float64", {"causal": True}),
    ((16, 300, 300, 16, 16, 32), "float16", {"window": (9, 9)}),
    ((1, 9000, 9000, 8, 8, 8), "bfloat16", {"window": (20, 0)}),
    ((1, 2048, 10, 32, 32, 128), "float16", {}),
    ((16, 128, 128, 16, 16, 32), "float16", {}),
], ids=str)
def test_scratch_is_what_the_docstring_says(sizes, dtype, options):
    q, k, v = tensors(dtype, *sizes)
    v[:, -1] = np.nan                       # the path of values that are not finite as well
    problem = Problem(**{**problem_of(q, k, v, **options).__dict__, "return_lse": False})
    out = np.empty_like(q)
    assert peak_of(lambda: cpu.attention(problem, q, k, v, out)) < scratch_bytes(problem)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_memory_at_8192_is_a_tenth_of_the_logits(dtype):
    """Unfused attention holds the logits of all heads; here it is less than a tenth of a single head's."""
    q, k, v = tensors(dtype, 1, 8192, 8192, 1, 1, 16)
    problem, out = problem_of(q, k, v), np.empty_like(q)
    assert peak_of(lambda: cpu.attention(problem, q, k, v, out)) < 8192 * 8192 * 4 / 10


def test_a_window_costs_what_it_shows(monkeypatch):
    """Of 65536 x 65536 logits, a window of 64 keys computes few but its own, in the memory of a few tiles."""
    q, k, v = tensors("float32", 1, 65536, 65536, dim=4)
    problem, out = problem_of(q, k, v, window=(63, 0)), np.empty_like(q)
    computed, matmul = [], np.matmul
    monkeypatch.setattr(np, "matmul", lambda *args, **kwargs: computed.append(
        (result := matmul(*args, **kwargs)).size) or result)
    assert peak_of(lambda: cpu.attention(problem, q, k, v, out)) < scratch_bytes(problem) + 65536 * 4
    assert 64 * 65536 < sum(computed) < 3 * 64 * 65536
    rows = slice(65536 - 300, 65536)
    expected, _ = oracle.attention(q[:, rows], k[:, -600:], v[:, -600:], window=(63, 0))
    np.testing.assert_allclose(out[:, rows], expected, rtol=1e-4, atol=1e-5)


def unfused(q, k, v, scale):
    """Plain attention as one writes it in NumPy, at its best: BLAS products, softmax in place."""
    dtype = q.dtype
    q, k, v = (x.swapaxes(1, 2).astype(np.float32, copy=False) for x in (q, k, v))
    logits = np.matmul(q * np.float32(scale), k.swapaxes(2, 3))
    logits -= logits.max(axis=-1, keepdims=True)
    np.exp(logits, out=logits)
    logits /= logits.sum(axis=-1, keepdims=True)
    return np.matmul(logits, v).swapaxes(1, 2).astype(dtype)


def race(dtype, seqlen, rounds=12):
    """(tiled, unfused): the least processor time of each, in turns, until tiled is not behind."""
    q, k, v = tensors(dtype, 1, seqlen, seqlen, 2, 2, 64)
    problem, out = problem_of(q, k, v), np.empty_like(q)
    best = [np.inf, np.inf]
    for turn in range(rounds):
        for which, call in enumerate((lambda: cpu.attention(problem, q, k, v, out),
                                      lambda: unfused(q, k, v, problem.softmax_scale))):
            start = time.process_time()
            call()
            best[which] = min(best[which], time.process_time() - start)
        if turn >= 2 and best[0] <= best[1]:
            break
    return best


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_no_slower_than_unfused(dtype):
    # Processor time of one BLAS thread, in a process of its own: what else runs on the cores does not count.
    code = f"import test_cpu; print(*test_cpu.race({dtype!r}, 2048))"
    here = os.path.dirname(__file__)
    path = os.pathsep.join((here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")))
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **threads, "PYTHONPATH": path},
                            capture_output=True, text=True, check=True, timeout=120)
    tiled, plain = map(float, result.stdout.split())
    assert tiled <= 1.1 * plain, f"tiled {tiled * 1e3:.1f} ms, unfused {plain * 1e3:.1f} ms"


# Through the public door

@pytest.mark.parametrize("dtype", DTYPES)
def test_public(dtype):
    q, k, v = tensors(dtype, 2, 30, 50, 4, 2, 16, 24)
    options = {"causal": True, "window": (11, 5), "softmax_scale": 0.5, "softcap": 4.0}
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    assert isinstance(out, np.ndarray) and out.dtype == q.dtype and out.shape == (2, 30, 4, 24)
    assert oracle.judge(out, lse, q, k, v, **options).ok
    given_out = np.full_like(out, np.nan)
    assert cuflash.attention(q, k, v, out=given_out, **options) is given_out
    np.testing.assert_array_equal(given_out, out)
    np.testing.assert_array_equal(cuflash.attention(q[0], k[0], v[0], **options), out[0])


def test_public_defaults():
    q, k, v = tensors("float32", 1, 20, 20, 2, 1, 16)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    assert oracle.judge(out, lse, q, k, v).ok
    np.testing.assert_array_equal(cuflash.attention(q, k, v, window=(-1, 0)),
                                  cuflash.attention(q, k, v, causal=True))
    assert np.abs(cuflash.attention(q, k, v, softmax_scale=0.0) - out).max() > 0.01
    np.testing.assert_array_equal(cuflash.attention(q, k, v, window=(0, 0)), np.repeat(v, 2, axis=2))
    assert (cuflash.attention(q, k[:, :0], v[:, :0]) == 0).all()
