"""Gradients of the NumPy path: every option against the oracle, at the edges of tiles, in bounded memory and time."""

import os
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_cpu import DTYPES, LAYOUTS, NAMED, SHIPPED, SMALL, TILES, attend, dtype_of, peak_of, problem_of

from cuflash import cpu, oracle
from cuflash.problem import Problem

EDGES = (1, 2, 15, 17, 63, 64, 65, 129)


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


def tensors(dtype="float32", batch=1, seqlen_q=8, seqlen_k=8, heads_q=1, heads_k=1, dim=8, dim_v=None, seed=0):
    """(dout, q, k, v), dlse."""
    rng, dim_v = np.random.default_rng(seed), dim_v or dim
    shapes = ((seqlen_q, heads_q, dim_v), (seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v))
    arrays = tuple(rng.standard_normal((batch, *shape)).astype(dtype_of(dtype)) for shape in shapes)
    dlse = rng.standard_normal((batch, heads_q, seqlen_q))
    return arrays, dlse.astype(np.float64 if dtype == "float64" else np.float32)


def differentiate(dout, q, k, v, dlse=None, gradients=None, forward=None, **options):
    """(dq, dk, dv) of the CPU path. They were full of nan, all else must stay as it is, nothing may warn."""
    out, lse = forward or attend(q, k, v, **options)
    if gradients is None:
        gradients = [np.empty(x.shape, x.dtype) for x in (q, k, v)]
    for gradient in gradients:
        gradient[...] = np.nan
    given = [x for x in (dout, q, k, v, out, lse, dlse) if x is not None]
    before = [x.tobytes() for x in given]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cpu.backward(problem_of(q, k, v, **options), dout, q, k, v, out, lse, dlse, *gradients) is None
    assert before == [x.tobytes() for x in given]
    return gradients


def check(arrays, dlse=None, **options):
    gradients = differentiate(*arrays, dlse, **options)
    verdict = oracle.judge_backward(*gradients, *arrays, dlse=dlse, **options)
    assert verdict.ok, verdict.why
    return gradients


def assert_equal(gradients, others):
    for gradient, other in zip(gradients, others, strict=True):
        np.testing.assert_array_equal(gradient, other)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMED)
def test_named(name, dtype, tiles):
    for seqlens, with_dlse in (((67, 67), True), ((33, 80), False), ((80, 33), True), ((1, 70), True)):
        arrays, dlse = tensors(dtype, 1, *seqlens, 4, 2, 16, 12)
        check(arrays, dlse if with_dlse else None, **NAMED[name])


@pytest.mark.parametrize("seqlen_q", EDGES)
def test_edges(seqlen_q, small_tiles):
    for seqlen_k in EDGES:
        for options in ({}, {"causal": True}):
            check(*tensors("float32", 1, seqlen_q, seqlen_k, dim=4, seed=seqlen_k), **options)


@pytest.mark.parametrize("past", (-1, 0, 1))
def test_edges_of_the_shipped_tiles(past):
    check(*tensors("float32", 1, cpu.BACKWARD_ROWS + past, cpu.BACKWARD_KEYS + past, dim=4), causal=True)
    check(*tensors("bfloat16", 1, cpu.BACKWARD_ROWS + past, 40, dim=4), window=(10, 3))
    check(*tensors("float16", 1, 40, cpu.BACKWARD_KEYS + past, dim=4))


@pytest.mark.parametrize("heads", [(6, 2), (7, 1), (28, 4), (15, 5), (13, 1), (12, 1), (5, 5)], ids=str)
def test_grouped_heads(heads, tiles):
    for seqlen_q in (1, 2, 9):
        arrays, dlse = tensors("float32", 2, seqlen_q, 20, *heads)
        dq, dk, dv = check(arrays, dlse, causal=True)
    # The gradients of a key head are those of its query heads, summed.
    dout, q, k, v = (x.astype(np.float64) for x in arrays)
    group = heads[0] // heads[1]
    repeated = dout, q, np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    _, each_dk, each_dv = differentiate(*repeated, dlse.astype(np.float64), causal=True)
    for gradient, each in ((dk, each_dk), (dv, each_dv)):
        np.testing.assert_allclose(gradient, each.reshape(2, 20, heads[1], group, 8).sum(axis=3), rtol=1e-3, atol=1e-5)


def test_a_group_larger_than_a_tile():
    check(*tensors("float32", 1, 3, 5, cpu.BACKWARD_ROWS + 3, 1, 2), causal=True)


@pytest.mark.parametrize("dim", (1, 7, 33, 64, 256))
def test_head_dims(dim, tiles):
    for dim_v in (1, 7, 64, 130):
        check(*tensors("float16", 1, 19, 37, 2, 1, dim, dim_v), causal=True)


def test_many_small_heads_and_batches(tiles):
    """More heads and batches than one step takes, and not a multiple of it."""
    check(*tensors("float32", 37, 5, 6, 6, 3, 4), causal=True)
    check(*tensors("float16", 1, 1, 3, 50, 50, 4))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (5, 2)}, {"softcap": 2.0, "softmax_scale": 1.5}], ids=str)
def test_finite_differences(options, small_tiles):
    """The gradients of this path are those of this path's own forward."""
    (dout, q, k, v), dlse = tensors("float64", 1, 22, 19, 2, 1, 3, 2)

    def loss(*arrays):
        out, lse = attend(*arrays, **options)
        return (dout * out).sum() + (dlse * np.where(lse == -np.inf, 0, lse)).sum()

    gradients = differentiate(dout, q, k, v, dlse, **options)
    for n, gradient in enumerate(gradients):
        for place in np.ndindex(gradient.shape):
            moved = [[x.copy() for x in (q, k, v)] for _ in range(2)]
            moved[0][n][place] += 1e-5
            moved[1][n][place] -= 1e-5
            numeric = (loss(*moved[0]) - loss(*moved[1])) / 2e-5
            assert abs(gradient[place] - numeric) < 1e-8 + 1e-6 * abs(numeric)


def test_gradient_of_lse(tiles):
    """dout 0, dlse 1: dq = scale * P k, dk = scale * P^T q, dv = 0, with rows that see nothing too."""
    (dout, q, k, v), dlse = tensors("float64", 1, 40, 30)
    dq, dk, dv = differentiate(0 * dout, q, k, v, 0 * dlse + 1, causal=True)
    weights = oracle.attention(q, k, np.eye(30).reshape(1, 30, 1, 30), causal=True)[0][0, :, 0]
    scale = 8 ** -0.5
    np.testing.assert_allclose(dq[0, :, 0], scale * weights @ k[0, :, 0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(dk[0, :, 0], scale * weights.T @ q[0, :, 0], rtol=1e-12, atol=1e-14)
    assert (dv == 0).all()


def test_softcap_saturates(tiles):
    arrays, dlse = tensors("float32", seqlen_q=20, seqlen_k=30)
    for cap in (1e-3, 1e-60, 1e6, 1e300):
        check(arrays, dlse, softmax_scale=3.0, softcap=cap)
    full = differentiate(*arrays, dlse)
    for gradient, other in zip(full, differentiate(*arrays, dlse, softcap=1e300)):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ("float16", "bfloat16", "float32"))
def test_logits_beyond_any_stand_in(dtype, tiles):
    """All logits near -7e4 are a softmax like any other."""
    (dout, q, k, v), dlse = tensors(dtype, seqlen_q=40, seqlen_k=40, dim=64)
    q[..., 0], k[..., 0] = 100, -5600
    check((dout, q, k, v), dlse)


# What sees nothing, and what nothing sees

@pytest.mark.parametrize("bad", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("seqlens", [(5, 2), (129, 1), (130, 40)], ids=str)
def test_rows_without_keys(seqlens, bad, tiles):
    (dout, q, k, v), dlse = tensors("float32", 1, *seqlens, 2, 1)
    empty = seqlens[0] - seqlens[1]
    expected = differentiate(dout[:, empty:], q[:, empty:], k, v, dlse[:, :, empty:], causal=True)
    dout[:, :empty], q[:, :empty], dlse[:, :, :empty] = bad, bad, bad
    dq, dk, dv = check((dout, q, k, v), dlse, causal=True)
    assert (dq[:, :empty] == 0).all()
    for gradient, other in zip((dq[:, empty:], dk, dv), expected):
        np.testing.assert_allclose(gradient, other, rtol=1e-4, atol=1e-5)


def test_keys_that_nothing_sees(tiles):
    for seqlens in ((1, 257), (17, 300), (64, 65), (3, 2)):
        arrays, dlse = tensors("float32", 1, *seqlens)
        arrays[2][:, :-seqlens[0] or None], arrays[3][:, :-seqlens[0] or None] = np.nan, np.nan
        _, dk, dv = check(arrays, dlse, window=(0, None) if seqlens[0] < seqlens[1] else (0, 0))
        assert (dk[:, :max(0, seqlens[1] - seqlens[0])] == 0).all() and np.isfinite(dk).all() and np.isfinite(dv).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_hidden_has_no_influence(bad, dtype, tiles):
    """Bad keys change no row that does not see them; bad rows change no key that they do not see."""
    (dout, q, k, v), dlse = tensors(dtype, 2, 40, 40, 4, 2)
    for options, hidden, rows in (({"causal": True}, slice(35, 40), slice(0, 35)),
                                  ({"window": (4, 3)}, slice(0, 5), slice(9, 40)),
                                  ({"window": (4, 3)}, slice(30, 31), slice(0, 27))):
        clean = differentiate(dout, q, k, v, dlse, **options)
        for poisoned in (k, v):
            kept = poisoned[:, hidden].copy()
            poisoned[:, hidden] = bad
            dq, _, _ = differentiate(dout, q, k, v, dlse, **options)
            poisoned[:, hidden] = kept
            np.testing.assert_array_equal(dq[:, rows], clean[0][:, rows])
    for options, bad_rows, keys in (({"causal": True}, slice(0, 5), slice(5, 40)),
                                    ({"window": (4, 3)}, slice(0, 5), slice(8, 40)),
                                    ({"window": (4, 3)}, slice(30, 31), slice(0, 26))):
        clean = differentiate(dout, q, k, v, dlse, **options)
        for poisoned in (dout, q, dlse.swapaxes(1, 2)):
            kept = poisoned[:, bad_rows].copy()
            poisoned[:, bad_rows] = bad
            _, dk, dv = differentiate(dout, q, k, v, dlse, **options)
            poisoned[:, bad_rows] = kept
            np.testing.assert_array_equal(dk[:, keys], clean[1][:, keys])
            np.testing.assert_array_equal(dv[:, keys], clean[2][:, keys])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_visible_shows(bad, tiles):
    for options in ({}, {"causal": True}, {"window": (7, 2)}, {"window": (None, 0), "softcap": 3.0}):
        for which in range(5):
            arrays, dlse = tensors("float32", 2, 50, 50, 4, 2)
            (*arrays, dlse)[which][(1, 17, 1, 3) if which < 4 else (1, 1, 17)] = bad
            gradients = check(arrays, dlse, **options)      # the judge says where
            assert not all(np.isfinite(gradient).all() for gradient in gradients)
            assert all(np.isfinite(gradient[0]).all() for gradient in gradients)


def test_logits_of_minus_infinity_make_an_empty_row(tiles):
    (dout, q, k, v), dlse = tensors("float32", seqlen_q=20, seqlen_k=20)
    q[...] = -1
    k[:, :10] = np.inf
    dout[:, :10], dlse[:, :, :10] = np.nan, np.nan
    dq, _, dv = check((dout, q, k, v), dlse, causal=True)
    assert (dq[:, :10] == 0).all() and np.isfinite(dv).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", (False, True))
def test_zero_lengths(dtype, causal, tiles):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_k": 0},
                  {"heads_q": 0, "heads_k": 2}):
        arrays, dlse = tensors(dtype, **sizes)
        assert all((gradient == 0).all() for gradient in differentiate(*arrays, dlse, causal=causal))


# Strides and bits

@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_layouts_agree_bit_for_bit(layout, dtype, tiles):
    for sizes in ((2, 45, 70, 4, 2, 24, 16), (1, 1, 70, 2, 2, 64, 64), (1, 33, 5, 2, 1, 25, 3)):
        arrays, dlse = tensors(dtype, *sizes)
        out, lse = attend(*arrays[1:], causal=True)
        expected = differentiate(*arrays, dlse, forward=(out, lse), causal=True)
        stored = [layout(x) for x in arrays]
        statistics = [layout(x[..., None])[..., 0] for x in (lse, dlse)]
        results = differentiate(*stored, statistics[1], [layout(np.zeros_like(x)) for x in expected],
                                (layout(out), statistics[0]), causal=True)
        assert_equal(results, expected)


def test_expanded_inputs(tiles):
    """Stride 0: a dout as a sum gives it, and heads that share their memory."""
    for dtype in DTYPES:
        (dout, q, k, v), _ = tensors(dtype, 2, 40, 40, 2, 2, 16)
        for part in (dout[:1, :1, :1, :1], dout[:1, :1, :1], dout[:, :, :1]):
            wide = np.broadcast_to(part, dout.shape)
            assert_equal(check((wide, q, k, v), causal=True), differentiate(wide.copy(), q, k, v, causal=True))
        wide = np.broadcast_to(k[:1, :, :1], k.shape)
        assert_equal(check((dout, q, wide, wide), causal=True),
                     differentiate(dout, q, wide.copy(), wide.copy(), causal=True))


def test_nothing_outside_the_gradients_is_written(tiles):
    arrays, dlse = tensors("float16", 2, 40, 20, 4, 2, 8, 7)
    wide = [np.full((2, x.shape[1] + 4, x.shape[2] + 3, 12), 7, np.float16) for x in arrays[1:]]
    inner = [x[:, 2:-2, 1:-2, 3:3 + y.shape[3]] for x, y in zip(wide, arrays[1:])]
    differentiate(*arrays, dlse, inner, causal=True)
    for x, y in zip(wide, inner):
        y[...] = 7
        assert (x == 7).all()


def test_repeats_batches_and_heads_agree_bit_for_bit(tiles):
    for dtype, sizes, options in (("float16", (3, 50, 130, 4, 2, 24), {"causal": True}),
                                  ("float32", (5, 33, 20, 6, 3, 16), {"window": (9, 4)}),
                                  ("float64", (4, 3, 2, 2, 2, 5), {})):
        arrays, dlse = tensors(dtype, *sizes)
        expected = differentiate(*arrays, dlse, **options)
        assert_equal(differentiate(*arrays, dlse, **options), expected)
        for b in range(sizes[0]):
            alone = differentiate(*(x[b:b + 1] for x in arrays), dlse[b:b + 1], **options)
            assert_equal(alone, [x[b:b + 1] for x in expected])
        group, (dout, q, k, v) = sizes[3] // sizes[4], arrays
        for h in range(sizes[4]):
            of_q, of_k = slice(h * group, (h + 1) * group), slice(h, h + 1)
            alone = differentiate(dout[:, :, of_q], q[:, :, of_q], k[:, :, of_k], v[:, :, of_k], dlse[:, of_q], **options)
            assert_equal(alone, [expected[0][:, :, of_q], expected[1][:, :, of_k], expected[2][:, :, of_k]])


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
    layouts = draw(st.tuples(*[st.sampled_from((np.copy, *LAYOUTS))] * 7))
    poison = draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2**32 - 1),
                                     st.sampled_from((np.nan, np.inf, -np.inf))), max_size=3))
    tile = draw(st.sampled_from((SHIPPED, SMALL, (3, 5, 40, 30, 7, 3, 5), (1,) * 7)))
    if sizes[1] * sizes[2] > 1000 and tile[0] < 32:     # takes too long
        tile = SMALL
    return (draw(st.sampled_from(DTYPES)), sizes, options, layouts, poison, draw(st.booleans()), tile,
            draw(st.integers(0, 2**32 - 1)))


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_anything(drawn):
    dtype, sizes, options, layouts, poison, with_dlse, tile, seed = drawn
    arrays, dlse = tensors(dtype, *sizes, seed=seed)
    for which, place, bad in poison:
        x = (*arrays, dlse)[which].reshape(-1)
        if x.size:
            x[place % x.size] = bad
    arrays = [layout(x) for layout, x in zip(layouts, arrays)]
    gradients = [layout(np.zeros_like(x)) for layout, x in zip(layouts[4:], arrays[1:])]
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(TILES, tile):
            patch.setattr(cpu, name, value)
        differentiate(*arrays, dlse if with_dlse else None, gradients, **options)
    verdict = oracle.judge_backward(*gradients, *arrays, dlse=dlse if with_dlse else None, **options)
    assert verdict.ok, verdict.why


# Memory and time

def scratch_bytes(problem):
    """What the docstring promises, and a little for Python's own objects."""
    elements = 8 * cpu.TILE_ELEMENTS + 2 * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return elements * (8 if problem.dtype == "float64" else 4) + 2**16


@pytest.mark.parametrize("sizes, dtype, options", [
    ((1, 2048, 2048, 2, 2, 64), "float16", {}),
    ((1, 2048, 2048, 2, 2, 64), "float32", {"causal": True, "softcap": 5.0}),
    ((1, 300, 3000, 16, 1, 128), "bfloat16", {"causal": True}),
    ((1, 1, 20000, 8, 8, 64), "float16", {}),
    ((300, 8, 8, 16, 16, 64), "float64", {"causal": True}),
    ((16, 300, 300, 16, 16, 32), "float16", {"window": (9, 9)}),
    ((1, 5000, 5000, 8, 8, 8), "bfloat16", {"window": (20, 0)}),
    ((1, 2048, 10, 32, 32, 128), "float16", {}),
    ((1, 2, 1000, 4096, 1, 64), "float32", {}),
], ids=str)
def test_scratch_is_what_the_docstring_says(sizes, dtype, options):
    (dout, q, k, v), dlse = tensors(dtype, *sizes)
    dout[:, 0, 0] = np.nan                  # the path of values that are not finite as well
    problem = problem_of(q, k, v, **options)
    out, lse = np.ones_like(dout), np.full(dlse.shape, 3.0, dlse.dtype)
    gradients = [np.empty_like(x) for x in (q, k, v)]
    peak = peak_of(lambda: cpu.backward(problem, dout, q, k, v, out, lse, dlse, *gradients))
    assert peak < scratch_bytes(problem)


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_memory_at_8192_is_a_tenth_of_the_logits(dtype):
    (dout, q, k, v), dlse = tensors(dtype, 1, 8192, 8192, 1, 1, 16)
    problem, gradients = problem_of(q, k, v, causal=True), [np.empty_like(x) for x in (q, k, v)]
    lse = np.full(dlse.shape, 9.0, dlse.dtype)
    assert peak_of(lambda: cpu.backward(problem, dout, q, k, v, dout, lse, dlse, *gradients)) < 8192 * 8192 * 4 / 10


def test_a_window_costs_what_it_shows(monkeypatch):
    """Of 65536 x 65536 logits, a window of 64 keys computes few but its own."""
    (dout, q, k, v), _ = tensors("float32", 1, 65536, 65536, dim=4)
    problem = problem_of(q, k, v, window=(63, 0))
    gradients, computed, matmul = [np.empty_like(x) for x in (q, k, v)], [], np.matmul
    out = np.empty_like(q)
    lse = cpu.attention(problem, q, k, v, out)
    monkeypatch.setattr(np, "matmul", lambda *args, **kwargs: computed.append(
        (result := matmul(*args, **kwargs)).size) or result)
    assert peak_of(lambda: cpu.backward(problem, dout, q, k, v, out, lse, None, *gradients)) < scratch_bytes(problem)
    assert 2 * 64 * 65536 < sum(computed) < 2 * 3 * 64 * 65536
    few = slice(65536 - 300, 65536)         # the keys that only the last rows see
    expected = oracle.attention_backward(dout[:, few], q[:, few], k[:, few], v[:, few], window=(63, 0))
    for gradient, other in zip(gradients, expected):
        np.testing.assert_allclose(gradient[:, few][:, 100:], other[:, 100:], rtol=1e-4, atol=1e-5)


def unfused(dout, q, k, v, out, lse, scale):
    """The plain backward as one writes it in NumPy, at its best: BLAS products, the weights from lse, in place."""
    dtype = q.dtype
    dout, q, k, v, out = (x.swapaxes(1, 2).astype(np.float32, copy=False) for x in (dout, q, k, v, out))
    q = q * np.float32(scale)
    weights = np.matmul(q, k.swapaxes(2, 3))
    weights -= lse[..., None]
    np.exp(weights, out=weights)
    dv = np.matmul(weights.swapaxes(2, 3), dout)
    ds = np.matmul(dout, v.swapaxes(2, 3))
    ds -= (dout * out).sum(axis=-1, keepdims=True)
    ds *= weights
    dq, dk = np.matmul(ds, k) * np.float32(scale), np.matmul(ds.swapaxes(2, 3), q)
    return [x.swapaxes(1, 2).astype(dtype) for x in (dq, dk, dv)]


def race(dtype, seqlen, rounds=10):
    """(tiled, unfused): the least processor time of each, in turns, until tiled is not behind."""
    (dout, q, k, v), _ = tensors(dtype, 1, seqlen, seqlen, 2, 2, 64)
    problem, out = problem_of(q, k, v), np.empty_like(q)
    lse, gradients, best = cpu.attention(problem, q, k, v, out), [np.empty_like(x) for x in (q, k, v)], [np.inf, np.inf]
    for turn in range(rounds):
        for which, call in enumerate((lambda: cpu.backward(problem, dout, q, k, v, out, lse, None, *gradients),
                                      lambda: unfused(dout, q, k, v, out, lse, problem.softmax_scale))):
            start = time.process_time()
            call()
            best[which] = min(best[which], time.process_time() - start)
        if turn >= 2 and best[0] <= best[1]:
            break
    return best


@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_no_slower_than_unfused(dtype):
    # Processor time of one BLAS thread, in a process of its own: what else runs on the cores does not count.
    code = f"import test_cpu_backward; print(*test_cpu_backward.race({dtype!r}, 2048))"
    here = os.path.dirname(__file__)
    path = os.pathsep.join((here, os.path.dirname(here), os.environ.get("PYTHONPATH", "")))
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS"), "1")
    result = subprocess.run([sys.executable, "-c", code], env={**os.environ, **threads, "PYTHONPATH": path},
                            capture_output=True, text=True, check=True, timeout=120)
    tiled, plain = map(float, result.stdout.split())
    assert tiled <= 1.1 * plain, f"tiled {tiled * 1e3:.1f} ms, unfused {plain * 1e3:.1f} ms"


def test_fields_that_the_backward_does_not_need():
    arrays, dlse = tensors("float32", 1, 20, 30, 2, 1)
    out, lse = attend(*arrays[1:])
    problem = Problem(**{**problem_of(*arrays[1:]).__dict__, "return_lse": False, "alignment": 2, "out_alignment": 4})
    gradients = [np.empty_like(x) for x in arrays[1:]]
    cpu.backward(problem, *arrays, out, lse, dlse, *gradients)
    assert_equal(gradients, differentiate(*arrays, dlse))
