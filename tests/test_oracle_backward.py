"""The oracle's gradients: right by finite differences and by hand, and a judge that rejects what is wrong."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from cuflash import oracle

DTYPES = ("float16", "bfloat16", "float32", "float64")
NAMES = ("dq", "dk", "dv")


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def tensors(dtype="float64", batch=1, seqlen_q=8, seqlen_k=8, heads_q=1, heads_k=1, dim=8, dim_v=8, seed=0):
    """(dout, q, k, v) and dlse."""
    rng = np.random.default_rng(seed)
    shapes = ((seqlen_q, heads_q, dim_v), (seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v))
    arrays = tuple(rng.standard_normal((batch, *shape)).astype(dtype_of(dtype)) for shape in shapes)
    dlse = rng.standard_normal((batch, heads_q, seqlen_q))
    return arrays, dlse.astype(np.float64 if dtype == "float64" else np.float32)


OPTIONS = [
    {}, {"causal": True},
    {"window": (2, 1)}, {"window": (0, 0)}, {"window": (None, 1)}, {"window": (1, None)},
    {"causal": True, "window": (1, 3)},
    {"softmax_scale": 0.0}, {"softmax_scale": -1.5}, {"softcap": 0.7},
    {"softcap": 3.0, "softmax_scale": 2.0, "causal": True}, {"softcap": 1.0, "window": (2, 0)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("seqlens", [(1, 1), (4, 4), (3, 5), (5, 3)], ids=str)
def test_finite_differences(options, seqlens):
    (dout, q, k, v), dlse = tensors("float64", 1, *seqlens, heads_q=2, heads_k=1, dim=3, dim_v=2)

    def loss(*arrays):
        out, lse = oracle.attention(*arrays, **options)
        return (dout * out).sum() + (dlse * np.where(lse == -np.inf, 0, lse)).sum()

    gradients = oracle.attention_backward(dout, q, k, v, dlse=dlse, **options)
    step = 1e-5
    for n, gradient in enumerate(gradients):
        assert gradient.dtype == np.float64
        numeric = np.zeros_like(gradient)
        for place in np.ndindex(numeric.shape):
            moved = [[x.copy() for x in (q, k, v)] for _ in range(2)]
            moved[0][n][place] += step
            moved[1][n][place] -= step
            numeric[place] = (loss(*moved[0]) - loss(*moved[1])) / (2 * step)
        np.testing.assert_allclose(gradient, numeric, rtol=1e-7, atol=1e-8)


def test_by_hand():
    """One query, weights 1/4 and 3/4: ds = 1/4 * 3/4 * (+-8) for values 8 and 16 and a dout of 1."""
    q, k = np.ones((1, 1, 1, 1)), np.array([0.0, math.log(3)]).reshape(1, 2, 1, 1)
    v, dout = np.array([8.0, 16.0]).reshape(1, 2, 1, 1), np.ones((1, 1, 1, 1))
    dq, dk, dv = oracle.attention_backward(dout, q, k, v, softmax_scale=2.0)
    weights = np.array([1, 9]) / 10
    np.testing.assert_allclose(dv.ravel(), weights, rtol=1e-15)
    np.testing.assert_allclose(dk.ravel(), 2 * np.array([-8, 8]) * 0.09, rtol=1e-14)
    np.testing.assert_allclose(dq.ravel(), 2 * 8 * 0.09 * math.log(3), rtol=1e-14)
    dq, dk, dv = oracle.attention_backward(0 * dout, q, k, v, dlse=np.ones((1, 1, 1)), softmax_scale=2.0)
    np.testing.assert_allclose(dk.ravel(), 2 * weights, rtol=1e-14)
    assert (dv == 0).all()


@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_gradient_of_lse(solve):
    """dout 0, dlse 1: dq = scale * P k, dk = scale * P^T q, dv = 0, with empty rows too."""
    (dout, q, k, v), _ = tensors("float64", 1, 7, 4)
    dlse = np.ones((1, 1, 7))
    dq, dk, dv = solve(0 * dout, q, k, v, dlse=dlse, causal=True)
    weights = oracle.attention(q, k, np.eye(4).reshape(1, 4, 1, 4), causal=True)[0][0, :, 0]
    scale = 8 ** -0.5
    np.testing.assert_allclose(dq[0, :, 0], scale * weights @ k[0, :, 0], rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(dk[0, :, 0], scale * weights.T @ q[0, :, 0], rtol=1e-12, atol=1e-15)
    assert (dv == 0).all() and (dq[0, :3] == 0).all()


# nan and inf

@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_rows_that_see_nothing_have_no_gradient(solve, bad):
    """Whatever they hold: everything is as if they were not there."""
    (dout, q, k, v), dlse = tensors("float32", 1, 7, 4, 2, 1)
    expected = solve(dout[:, 3:], q[:, 3:], k, v, dlse=dlse[:, :, 3:], causal=True)
    dout[:, :3], q[:, :3], dlse[:, :, :3] = bad, bad, bad
    dq, dk, dv = solve(dout, q, k, v, dlse=dlse, causal=True)
    assert (dq[:, :3] == 0).all()
    for gradient, other in zip((dq[:, 3:], dk, dv), expected):
        np.testing.assert_allclose(gradient, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_rows_with_nothing_but_minus_infinity(solve):
    (dout, q, k, v), dlse = tensors("float64", 1, 6, 6)
    q[...] = -1
    k[:, :3] = np.inf
    dout[:, :3], dlse[:, :, :3], v[:, 0] = np.nan, np.nan, np.nan
    dq, dk, dv = solve(dout, q, k, v, dlse=dlse, causal=True)
    assert (dq[:, :3] == 0).all() and not np.isnan(dv).any()
    # Later rows see the same keys with a weight of 0, and 0 * inf is nan.
    assert np.isnan(dq[:, 3:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_hidden_pairs_have_no_influence(solve, bad):
    (dout, q, k, v), dlse = tensors("float64", 1, 6, 6)
    clean = solve(dout, q, k, v, dlse=dlse, causal=True)
    for poisoned in (k, v):
        kept = poisoned[0, 5].copy()
        poisoned[0, 5] = bad                    # seen by the last row only
        dq, dk, dv = solve(dout, q, k, v, dlse=dlse, causal=True)
        np.testing.assert_array_equal(dq[0, :5], clean[0][0, :5])
        assert np.isnan(dq[0, 5]).all() and np.isnan(dk).all()
        poisoned[0, 5] = kept
    for poisoned in (q, dout):
        kept = poisoned[0, 0].copy()
        poisoned[0, 0] = bad                    # sees the first key only
        dq, dk, dv = solve(dout, q, k, v, dlse=dlse, causal=True)
        np.testing.assert_array_equal(dq[0, 1:], clean[0][0, 1:])
        np.testing.assert_array_equal(dk[0, 1:], clean[1][0, 1:])
        np.testing.assert_array_equal(dv[0, 1:], clean[2][0, 1:])
        assert not np.isfinite(dv[0, 0]).any()
        poisoned[0, 0] = kept


def test_contaminated_by_hand():
    """Of four causal rows, row 2 has a dout of nan in channel 1: keys 0 to 2."""
    (dout, q, k, v), dlse = tensors(seqlen_q=4, seqlen_k=4, dim=3, dim_v=2)
    masks = oracle.contaminated(dout, q, k, v, dlse=dlse, causal=True)
    assert not any(mask.any() for pair in masks for mask in pair)
    row, keys = np.arange(4) == 2, np.arange(4) < 3
    dout[0, 2, 0, 1] = np.nan
    (must_dq, may_dq), (must_dk, may_dk), (must_dv, may_dv) = oracle.contaminated(dout, q, k, v, causal=True)
    for mask, expected in ((must_dq, row), (may_dq, row), (must_dk, keys), (may_dk, keys), (may_dv, keys)):
        np.testing.assert_array_equal(mask[0, :, 0], np.broadcast_to(expected[:, None], mask.shape[1::2]))
    np.testing.assert_array_equal(must_dv[0, :, 0], keys[:, None] * [False, True])

    dlse[0, 0, 1] = np.inf
    dout[0, 2, 0, 1] = 0
    (must_dq, _), (must_dk, _), (_, may_dv) = oracle.contaminated(dout, q, k, v, dlse=dlse, causal=True)
    np.testing.assert_array_equal(must_dq[0, :, 0, 0], np.arange(4) == 1)
    np.testing.assert_array_equal(must_dk[0, :, 0, 0], np.arange(4) < 2)
    assert not may_dv.any()

    k[0, 3] = np.nan                            # seen by the last row, which then sees nothing but nan
    (must_dq, _), (must_dk, _), (must_dv, _) = oracle.contaminated(dout, q, k, v, causal=True)
    np.testing.assert_array_equal(must_dq[0, :, 0, 0], np.arange(4) == 3)
    assert must_dk.all() and must_dv.all()


@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_contaminated_bounds_both(solve):
    for seed in range(120):
        rng = np.random.default_rng(seed)
        seqlens = rng.integers(1, 12, 2)
        (dout, q, k, v), dlse = tensors("float32", 1, *seqlens, 4, 2, 3, 4, seed=seed)
        for _ in range(rng.integers(1, 4)):
            x = (dout, q, k, v, dlse)[rng.integers(5)]
            x[tuple(rng.integers(0, size) for size in x.shape)] = (np.nan, np.inf, -np.inf)[rng.integers(3)]
        options = OPTIONS[seed % len(OPTIONS)]
        masks = oracle.contaminated(dout, q, k, v, dlse=dlse, **options)
        for gradient, (must, may) in zip(solve(dout, q, k, v, dlse=dlse, **options), masks):
            assert not (must & ~may).any()
            assert np.isfinite(gradient[~may]).all() and not np.isfinite(gradient[must]).any()


@pytest.mark.parametrize("solve", [oracle.attention_backward, oracle.unfused_backward])
def test_empty(solve):
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_k": 0}):
        arrays, dlse = tensors("float32", **sizes)
        for gradient, x in zip(solve(*arrays, dlse=dlse), arrays[1:]):
            assert gradient.shape == x.shape and (gradient == 0).all()


# The unfused gradients

@pytest.mark.parametrize("dtype", DTYPES)
def test_unfused_is_of_its_dtype(dtype):
    """With a one-hot dout, dv shows the weights: the float32 softmax, rounded to the dtype."""
    (_, q, k, v), _ = tensors(dtype, seqlen_q=32, seqlen_k=32, dim_v=32)
    dout = np.eye(32, dtype=dtype_of(dtype)).reshape(1, 32, 1, 32)
    gradients = oracle.unfused_backward(dout, q, k, v)
    exact = oracle.attention_backward(dout, q, k, v)
    assert all(gradient.dtype == dtype_of(dtype) for gradient in gradients)
    worst = np.abs(gradients[2].astype(np.float64) / exact[2] - 1).max() / oracle.ROUNDOFF[dtype]
    assert (0.5 < worst <= 1.01) if dtype in ("float16", "bfloat16") else worst < 20
    # The rounded weights meet dout: with alternating signs that shows in every key.
    signs = np.where(np.arange(32) % 2, -1.0, 1.0)
    mixed = oracle.unfused_backward(signs.reshape(1, 32, 1, 1).astype(dtype_of(dtype)), q, k, v[..., :1])[2]
    expected = (gradients[2][0, :, 0].astype(np.float64) @ signs).astype(dtype_of(dtype)).astype(np.float64)
    np.testing.assert_allclose(mixed[0, :, 0, 0].astype(np.float64), expected, rtol=1e-6, atol=1e-7)
    # And ds is rounded before it meets the keys: a key of 1 in a channel of its own shows its ds.
    if dtype in ("float16", "bfloat16"):
        one_hot = np.concatenate([k, np.eye(32, dtype=k.dtype).reshape(1, 32, 1, 32)], axis=3)
        wide_q = np.concatenate([q, np.zeros((1, 32, 1, 32), q.dtype)], axis=3)
        ds = oracle.unfused_backward(dout, wide_q, one_hot, v, softmax_scale=1.0)[0][0, :, 0, 8:].astype(np.float64)
        true_ds = oracle.attention_backward(dout, wide_q, one_hot, v, softmax_scale=1.0)[0][0, :, 0, 8:]
        large = np.abs(true_ds) > np.abs(true_ds).max() / 10
        assert 0.3 * oracle.ROUNDOFF[dtype] < np.abs(ds / true_ds - 1)[large].max() < 0.1


def test_unfused_takes_an_out():
    (dout, q, k, v), _ = tensors("float32")
    own = oracle.unfused_backward(dout, q, k, v)
    out, _ = oracle.unfused(q, k, v)
    for gradient, same, other in zip(own, oracle.unfused_backward(dout, q, k, v, out),
                                     oracle.unfused_backward(dout, q, k, v, 0 * out)):
        np.testing.assert_array_equal(gradient, same)
        assert gradient is own[2] or np.abs(gradient - other).max() > 1e-2


# The judge

CASES = {
    "dense": dict(seqlen_q=128, seqlen_k=128, heads_q=2, heads_k=2, dim=16, dim_v=16),
    "causal": dict(seqlen_q=150, seqlen_k=100, heads_q=4, heads_k=2, dim=16, dim_v=12, causal=True),
    "window": dict(seqlen_q=90, seqlen_k=120, heads_q=3, heads_k=1, dim=20, dim_v=24, window=(30, 10)),
    "capped": dict(seqlen_q=50, seqlen_k=100, heads_q=2, heads_k=1, dim=24, dim_v=16, softmax_scale=-0.7, softcap=3.0),
    "peaked": dict(seqlen_q=40, seqlen_k=50, heads_q=2, heads_k=1, dim=24, dim_v=16, softmax_scale=8.0),
    "one key": dict(seqlen_q=3, seqlen_k=1, heads_q=2, heads_k=1, dim=8, dim_v=8),
    "two keys": dict(seqlen_q=2, seqlen_k=2, heads_q=1, heads_k=1, dim=4, dim_v=1),
}
LARGE = dict(seqlen_q=300, seqlen_k=300, heads_q=2, heads_k=1, dim=32, dim_v=32)


def case(name, dtype, seed=0, batch=1):
    """((dout, q, k, v), dlse, options) of a named case."""
    sizes = dict(CASES[name])
    options = {key: sizes.pop(key) for key in ("causal", "window", "softmax_scale", "softcap") if key in sizes}
    return *tensors(dtype, batch, **sizes, seed=seed), options


def rounded(dtype, arrays, dlse, options):
    """The best possible result: the truth, rounded once."""
    return tuple(x.astype(dtype_of(dtype)) for x in oracle.attention_backward(*arrays, dlse=dlse, **options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_judge_accepts(name, dtype):
    for seed in range(3):
        arrays, dlse, options = case(name, dtype, seed)
        for with_dlse in (dlse, None):
            for result in (rounded(dtype, arrays, with_dlse, options),
                           oracle.unfused_backward(*arrays, dlse=with_dlse, **options)):
                verdict = oracle.judge_backward(*result, *arrays, dlse=with_dlse, **options)
                assert verdict.ok and verdict.why == "", verdict
        for gradient in (verdict.dq, verdict.dk, verdict.dv):
            assert gradient.max_err == gradient.ref_max_err and gradient.scaled_err == gradient.ref_scaled_err


def flash(arrays, dlse, operand, causal=False, window=None, softmax_scale=None, softcap=0.0, tile=48, seed=0):
    """What a kernel computes: the weights from lse in base 2, tile by tile, in any order, ds and weights rounded."""
    dtype = arrays[0].dtype
    compute = np.float64 if dtype == np.float64 else np.float32
    dout, q, k, v = (x.astype(compute) for x in arrays)
    options = {"causal": causal, "window": window, "softmax_scale": softmax_scale, "softcap": softcap}
    out, lse = oracle.unfused(*arrays[1:], **options)
    scale = compute(q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale)
    table = oracle.visible(q.shape[1], k.shape[1], causal, window)
    log2e = compute(math.log2(math.e))
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    places = [(b, h, i, j) for b in range(q.shape[0]) for h in range(q.shape[2])
              for i in range(0, q.shape[1], tile) for j in range(0, k.shape[1], tile)]
    np.random.default_rng(seed).shuffle(places)
    for b, h, i, j in places:
        i, j = slice(i, i + tile), slice(j, j + tile)
        sees = table[i, j] & (lse[b, h, i, None] != -np.inf)
        logits, slope = (q[b, i, h] @ k[b, j, h // group].T) * scale, compute(1)
        if softcap:
            bent = np.tanh(logits / compute(softcap))
            logits, slope = bent * compute(softcap), 1 - bent * bent
        with np.errstate(all="ignore"):
            weights = np.where(sees, np.exp2(logits * log2e - lse[b, h, i, None] * log2e), 0).astype(compute)
        delta = (dout[b, i, h] * out[b, i, h].astype(compute)).sum(axis=1) - (0 if dlse is None else dlse[b, h, i])
        ds = weights * (dout[b, i, h] @ v[b, j, h // group].T - delta[:, None]) * slope
        ds, weights = (x.astype(operand).astype(compute) for x in (ds, weights))
        dq[b, i, h] += ds @ k[b, j, h // group]
        dk[b, j, h // group] += ds.T @ q[b, i, h]
        dv[b, j, h // group] += weights.T @ dout[b, i, h]
    return (dq * scale).astype(dtype), (dk * scale).astype(dtype), dv.astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_judge_accepts_what_a_kernel_rounds(name, dtype):
    """Including small problems, where unfused attention may be exact by luck."""
    for seed in range(20 if name in ("one key", "two keys") else 3):
        arrays, dlse, options = case(name, dtype, seed)
        for with_dlse, tile in ((dlse, 48), (None, 16)):
            result = flash(arrays, with_dlse, dtype_of(dtype), **options, tile=tile, seed=seed)
            verdict = oracle.judge_backward(*result, *arrays, dlse=with_dlse, **options)
            assert verdict.ok, verdict.why


def faults(dtype, arrays, dlse, options):
    """(name, which of the gradients are wrong, dq, dk, dv) of results that are each wrong in one way."""
    dout, q, k, v = arrays
    good = oracle.attention_backward(*arrays, dlse=dlse, **options)
    group = q.shape[2] // k.shape[2]
    scores = {key: options[key] for key in ("softmax_scale", "softcap") if key in options}
    table = oracle.visible(q.shape[1], k.shape[1], options.get("causal", False), options.get("window"))
    last = q.shape[1] - 1
    seen = np.flatnonzero(table[last])
    shares = oracle.attention(q[:, last:, :1], k[:, seen, :1], np.eye(seen.size)[None, :, None], **scores)[0]
    fewer = np.delete(seen, shares.argmax())        # of the keys, bfloat16 shows the absence of those that weigh something
    q_, dout_, dlse_ = q[:, last:], dout[:, last:], None if dlse is None else dlse[:, :, last:]

    def one_row(j):
        return oracle.attention_backward(dout_, q_, k[:, j], v[:, j], dlse=dlse_, **scores)

    def changed(n, place, value):
        copy = [x.copy() for x in good]
        copy[n][place] = value(copy[n][place])
        return copy

    row, row_fewer = one_row(seen), one_row(fewer)
    without = [x.copy() for x in good]
    without[0][:, last:] = row_fewer[0]
    for n in (1, 2):
        without[n][:, seen] -= row[n]
        without[n][:, fewer] += row_fewer[n]
    yield "the last row lacks a key", "dq dk dv", without
    lost = [x.copy() for x in good]
    for n in (1, 2):
        lost[n][:, seen] -= row[n]
    yield "the last row is missing in dk and dv", "dk dv", lost
    middle = (0, good[1].shape[1] // 2, 0)
    yield "a row of zeros in dq", "dq", changed(0, (0, last, 0), lambda x: 0 * x)
    yield "a row of zeros in dk", "dk", changed(1, middle, lambda x: 0 * x)
    yield "a row of zeros in dv", "dv", changed(2, middle, lambda x: 0 * x)
    yield "nothing written", "dq dk dv", [0 * x for x in good]
    yield "one nan", "dq", changed(0, (0, last, 0, 1), lambda x: np.nan)
    yield "one inf", "dv", changed(2, (*middle, 1), lambda x: np.inf)

    plain = oracle.attention_backward(*arrays, **options)
    yield "dlse left out", "dq dk", plain
    yield "dlse of the other sign", "dq dk", oracle.attention_backward(*arrays, dlse=-dlse, **options)
    yield "scale left out", "dq dk", [good[0] / 0.7, good[1] / 0.7, good[2]]
    yield "scale of base 2", "dq dk", [good[0] * math.log2(math.e), good[1] * math.log2(math.e), good[2]]
    yield "delta left out", "dq dk", oracle.attention_backward(
        *arrays, dlse=dlse + (dout.astype(np.float64) * oracle.attention(q, k, v, **options)[0]).sum(-1).swapaxes(1, 2),
        **options)
    if options.get("softcap"):
        cap = options["softcap"]
        # Without the slope: the gradients of uncapped logits at the same weights, by the chain rule backwards.
        wrong = [np.zeros_like(x) for x in good]
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                x = [y[b, :, n].astype(np.float64) for y, n in ((dout, h), (q, h), (k, h // group), (v, h // group))]
                bent = np.tanh(options["softmax_scale"] * (x[1] @ x[2].T) / cap)
                weights = np.where(table, np.exp(cap * bent), 0)
                weights /= np.maximum(weights.sum(axis=1, keepdims=True), 1e-300)
                dp = x[0] @ x[3].T
                ds = options["softmax_scale"] * weights * (
                    dp - (weights * dp).sum(axis=1, keepdims=True) + dlse[b, h][:, None])
                wrong[0][b, :, h] = ds @ x[2]
                wrong[1][b, :, h // group] += ds.T @ x[1]
        yield "the slope of the softcap left out", "dq dk", [wrong[0], wrong[1], good[2]]
    if group > 1:
        first = oracle.attention_backward(dout[:, :, ::group], q[:, :, ::group], k, v, dlse=dlse[:, ::group], **options)
        yield "one head of the group", "dk dv", [good[0], first[1], first[2]]
    # A tile of 16 queries and 16 keys, lost or taken twice, in one head.
    i, j = slice(last - 15, last + 1), slice(seen[0], seen[0] + 16)     # the last ones, so that the diagonal stays
    weights = oracle.attention(q[:, i, :1], k[:, :, :1], np.eye(k.shape[1])[None, :, None], **options)
    p = np.where(table[i, j], weights[0][0, :, 0, j], 0)
    x = [y[0, n, 0].astype(np.float64) for y, n in ((dout, i), (q, i), (k, j), (v, j))]
    out = oracle.attention(q, k, v, **options)[0][0, i, 0]
    scale = options.get("softmax_scale", q.shape[3] ** -0.5)
    ds = p * (x[0] @ x[3].T - (x[0] * out).sum(axis=1, keepdims=True) + dlse[0, 0, i, None]) * scale
    if options.get("softcap"):
        ds *= 1 - np.tanh(scale * x[1] @ x[2].T / options["softcap"])**2
    for name, times in (("lost", -1), ("doubled", 1)):
        tile = [y.copy() for y in good]
        tile[0][0, i, 0] += times * ds @ x[2]
        yield f"a tile {name} in dq", "dq", tile
        tile = [y.copy() for y in good]
        tile[1][0, j, 0] += times * ds.T @ x[1]
        tile[2][0, j, 0] += times * p.T @ x[0]
        yield f"a tile {name} in dk and dv", "dk dv", tile


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("dense", "causal", "window", "capped", "large"))
def test_judge_rejects(name, dtype):
    if name == "large":
        (arrays, dlse), options = tensors(dtype, **LARGE), {"causal": True}
    else:
        arrays, dlse, options = case(name, dtype)
    assert oracle.judge_backward(*rounded(dtype, arrays, dlse, options), *arrays, dlse=dlse, **options).ok
    truths, noises = oracle._exact_backward(*arrays, dlse, **options)
    references = oracle.unfused_backward(*arrays, dlse=dlse, **options)
    masks = oracle.contaminated(*arrays, dlse=dlse, **options)
    for fault, which, result in faults(dtype, arrays, dlse, options):
        result = [x.astype(dtype_of(dtype)) for x in result]
        verdict = oracle._judge_backward(result, truths, noises, references, masks, dtype)
        found = " ".join(n for n in NAMES if not getattr(verdict, n).ok)
        assert found == which, f"{fault}: {found or 'nothing'} found; {verdict}"
        assert verdict.why.startswith(found[:2]) and not verdict.ok


@pytest.mark.parametrize("dtype", DTYPES)
def test_judge_rejects_a_wrong_mask(dtype):
    arrays, dlse, options = case("causal", dtype)
    for wrong in ({}, {"window": (None, 1)}, {"window": (98, 0)}, {"causal": True, "softmax_scale": 0.26}):
        verdict = oracle.judge_backward(*rounded(dtype, arrays, dlse, wrong), *arrays, dlse=dlse, **options)
        assert not verdict.dq.ok and (dtype in ("float16", "bfloat16") or not verdict.dk.ok), wrong


def truncated(x, bits):
    """float32 with the lowest ``bits`` of the significand cleared."""
    return (x.view(np.uint32) & np.uint32(2**32 - 2**bits)).view(np.float32)


def test_judge_rejects_a_lower_precision():
    arrays, dlse, options = case("dense", "float32")
    for coarse in ([truncated(x, 13) for x in arrays], [x.astype(np.float16) for x in arrays]):
        verdict = oracle.judge_backward(*oracle.unfused_backward(*coarse, **options), *arrays, **options)
        assert not (verdict.dq.ok or verdict.dk.ok or verdict.dv.ok)
    arrays, dlse, options = case("dense", "float64")
    single = [x.astype(np.float32) for x in arrays]
    verdict = oracle.judge_backward(*oracle.unfused_backward(*single, **options), *arrays, **options)
    assert not (verdict.dq.ok or verdict.dk.ok or verdict.dv.ok)

    arrays, dlse, options = case("dense", "float16")
    coarse = flash(arrays, dlse, ml_dtypes.float8_e4m3fn)
    verdict = oracle.judge_backward(*coarse, *arrays, dlse=dlse, **options)
    assert not (verdict.dq.ok or verdict.dk.ok or verdict.dv.ok)
    coarse = flash(arrays, dlse, ml_dtypes.bfloat16)
    verdict = oracle.judge_backward(*coarse, *arrays, dlse=dlse, **options)
    assert not (verdict.dq.ok or verdict.dk.ok or verdict.dv.ok)


def test_judge_wants_zeros_nan_and_shapes_in_their_places():
    (dout, q, k, v), dlse = tensors("float32", seqlen_q=6, seqlen_k=4)
    good = rounded("float32", (dout, q, k, v), dlse, {"causal": True})

    def judge(n=0, place=None, value=None, result=good, **options):
        result = [x.copy() for x in result]
        if place is not None:
            result[n][place] = value
        return oracle.judge_backward(*result, dout, q, k, v, dlse=dlse, **{"causal": True, **options})

    assert judge().ok
    assert not judge(0, (0, 1), 1e-30).dq.ok        # a row that sees nothing
    assert not judge(0, (0, 1), np.nan).dq.ok
    verdict = oracle.judge_backward(good[0].swapaxes(1, 2), good[1][:, :3], good[2], dout, q, k, v, dlse=dlse, causal=True)
    assert "shape" in verdict.dq.why and "shape" in verdict.dk.why and verdict.dv.ok
    window = {"causal": False, "window": (0, 0)}    # keys that nothing sees: none here, then all but two
    q, dout, dlse = q[:, :2], dout[:, :2], dlse[:, :, :2]
    good = rounded("float32", (dout, q, k, v), dlse, window)
    assert (good[1][0, :2] == 0).all() and judge(result=good, **window).ok
    assert not judge(1, (0, 1), 1e-30, good, **window).dk.ok and not judge(2, (0, 0), 1e-30, good, **window).dv.ok

    (dout, q, k, v), dlse = tensors("float32", seqlen_q=6, seqlen_k=6)
    dout[0, 3, 0, 2] = np.nan                       # in dq of row 3, in dk of keys 0 to 3, in dv also by channel
    good = rounded("float32", (dout, q, k, v), dlse, {"causal": True})
    assert judge(result=good).ok
    assert judge(2, (0, 0, 0, 1), np.nan, good).ok                                 # of a touched key
    assert "finite by mistake" in judge(0, (0, 3, 0, 1), 0.0, good).dq.why
    assert "finite by mistake" in judge(1, (0, 2, 0, 1), 0.0, good).dk.why
    assert "finite by mistake" in judge(2, (0, 2, 0, 2), 0.0, good).dv.why
    assert "not finite" in judge(0, (0, 4, 0, 1), np.nan, good).dq.why
    assert "not finite" in judge(1, (0, 4, 0, 1), np.nan, good).dk.why
    assert "not finite" in judge(2, (0, 4, 0, 1), np.inf, good).dv.why


def test_judge_lets_a_gradient_overflow_where_it_must():
    (dout, q, k, v), _ = tensors("float16", seqlen_q=40, seqlen_k=4)
    dout[...] = 3e4
    result = oracle.unfused_backward(dout, q, k, v)
    assert np.isposinf(result[2]).any()
    assert oracle.judge_backward(*result, dout, q, k, v).ok
    for value in (-np.inf, np.nan, 65504.0):
        wrong = np.where(np.isinf(result[2]), np.float16(value), result[2])
        assert not oracle.judge_backward(*result[:2], wrong, dout, q, k, v).ok
    assert not oracle.judge_backward(np.full_like(q, np.inf), *result[1:], dout, q, k, v).ok


@pytest.mark.parametrize("value", [6e4, np.nan, np.inf])
def test_a_hidden_poison_does_not_widen_the_budget(value):
    (dout, q, k, v), dlse = tensors("float16", seqlen_q=64, seqlen_k=63)
    clean = oracle._exact_backward(dout, q, k, v, dlse, causal=True)[1]
    q[0, 0], dout[0, 0], dlse[0, 0, 0], k[0, 62], v[0, 62] = (value,) * 5
    noise = oracle._exact_backward(dout, q, k, v, dlse, causal=True)[1]
    np.testing.assert_array_equal(noise[0][0, :63], clean[0][0, :63])
    dout, q, dlse = dout[:, :63], q[:, :63], dlse[:, :, :63]            # without the row that sees the bad key
    k[0, 62], v[0, 62] = 0, 0
    clean = oracle._exact_backward(dout, q, k, v, dlse, window=(None, -1))[1]
    assert all(np.isfinite(x).all() for x in clean)


def test_judgement_is_a_record():
    arrays, dlse, options = case("two keys", "float32")
    judgement = oracle.judge_backward(*rounded("float32", arrays, dlse, options), *arrays, dlse=dlse, **options)
    for name, record in dataclasses.asdict(judgement).items():
        assert name in NAMES and {"max_err", "rms_err", "scaled_err", "ok", "why"} <= record.keys()
        assert all(type(value) in (float, bool, str) for value in record.values())


# Packed batches

def packed(dtype="float64", slots_q=(3, 0, 5), slots_k=(4, 2, 5), tail=(2, 3), heads=(2, 1), seed=0):
    """((dout, q, k, v), dlse, cu_seqlens_q, cu_seqlens_k) with rows past the last sequence."""
    cu_seqlens = [np.cumsum([0, *slots]).astype(np.int32) for slots in (slots_q, slots_k)]
    totals = [int(cu[-1]) + more for cu, more in zip(cu_seqlens, tail)]
    arrays, dlse = tensors(dtype, 1, *totals, *heads, 5, 3, seed=seed)
    return tuple(x[0] for x in arrays), dlse[0], *cu_seqlens


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (1, 1), "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("used", [(None, None), ((2, 0, 4), (4, 1, 3))], ids=str)
def test_packed_sequences_are_dense_ones(options, used):
    (dout, q, k, v), dlse, cu_q, cu_k = packed()
    rest = {"seqused_q": used[0], "seqused_k": used[1], **options}
    out, lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, **rest)
    gradients = oracle.attention_varlen_backward(dout, q, k, v, cu_q, cu_k, dlse=dlse, **rest)
    covered_q, covered_k = np.zeros(len(q), bool), np.zeros(len(k), bool)
    for n in range(3):
        rows = slice(cu_q[n], cu_q[n + 1] if used[0] is None else cu_q[n] + used[0][n])
        keys = slice(cu_k[n], cu_k[n + 1] if used[1] is None else cu_k[n] + used[1][n])
        covered_q[rows], covered_k[keys] = True, True
        dense = q[None, rows], k[None, keys], v[None, keys]
        one_out, one_lse = oracle.attention(*dense, **options)
        np.testing.assert_array_equal(out[rows], one_out[0])
        np.testing.assert_array_equal(lse[:, rows], one_lse[0])
        expected = oracle.attention_backward(dout[None, rows], *dense, dlse=dlse[None, :, rows], **options)
        for gradient, place, one in zip(gradients, (rows, keys, keys), expected):
            np.testing.assert_array_equal(gradient[place], one[0])
    assert (out[~covered_q] == 0).all() and (lse[:, ~covered_q] == -np.inf).all()
    for gradient, covered in zip(gradients, (covered_q, covered_k, covered_k)):
        assert (gradient[~covered] == 0).all() and gradient[covered].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_judges_of_packed_batches(dtype):
    (dout, q, k, v), dlse, cu_q, cu_k = packed(dtype, (30, 1, 0, 40), (20, 5, 7, 64), heads=(4, 2))
    rest = {"seqused_k": (18, 5, 7, 64), "causal": True}
    out, lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, **rest)
    gradients = oracle.attention_varlen_backward(dout, q, k, v, cu_q, cu_k, dlse=dlse, **rest)
    out, lse, *gradients = (x.astype(dtype_of(dtype)) for x in (out, lse, *gradients))
    lse = lse.astype(np.float64 if dtype == "float64" else np.float32)
    lse = oracle.attention_varlen(q, k, v, cu_q, cu_k, **rest)[1].astype(lse.dtype)
    for x in (q, dout):
        x[cu_q[-1]:] = np.nan                   # of no sequence
    for x in (k, v):
        x[18:20], x[cu_k[-1]:] = np.nan, np.nan

    def judge(out=out, lse=lse, **changes):
        return oracle.judge_varlen(out, lse, q, k, v, cu_q, cu_k, **{**rest, **changes})

    def judge_backward(gradients=gradients, dlse=dlse, **changes):
        return oracle.judge_varlen_backward(*gradients, dout, q, k, v, cu_q, cu_k, dlse=dlse, **{**rest, **changes})

    assert judge().ok and judge(lse=None).ok, judge().why
    assert judge_backward().ok, judge_backward().why
    assert not judge(seqused_k=None).ok and not judge_backward(seqused_k=None).ok
    assert not judge(causal=False).ok and not judge_backward(causal=False).ok
    assert not judge_backward(dlse=None).dq.ok
    assert not judge(lse=lse.T).ok and not judge(out=out[:-1]).ok
    for n, row in ((0, -1), (1, 19), (2, 19), (2, -1)):
        wrong = [x.copy() for x in gradients]
        wrong[n][row, 0, 0] = 1e-30 if dtype != "float16" else 1e-6
        verdict = judge_backward(wrong)
        assert [name for name in NAMES if not getattr(verdict, name).ok] == [NAMES[n]]
    wrong, wrong_lse = out.copy(), lse.copy()
    wrong[-1, 0, 0], wrong_lse[0, -1] = np.nan, 0
    assert not judge(out=wrong).ok and not judge(lse=wrong_lse).ok
    leak = oracle.attention_varlen_backward(*(np.nan_to_num(x) for x in (dout, q, k, v)), cu_q[[0, 1, 2, 2, 4]],
                                            cu_k[[0, 1, 3, 3, 4]], dlse=dlse, causal=True, seqused_k=(18, 12, 0, 64))
    assert not judge_backward([x.astype(dtype_of(dtype)) for x in leak]).ok


def test_nothing_packed():
    for slots in ((), (0,), (0, 0, 0)):
        (dout, q, k, v), dlse, cu_q, cu_k = packed("float32", slots, slots, (0, 2))
        out, lse = oracle.attention_varlen(q, k, v, cu_q, cu_k)
        assert out.shape == (0, 2, 3) and lse.shape == (2, 0)
        gradients = oracle.attention_varlen_backward(dout, q, k, v, cu_q, cu_k, dlse=dlse)
        assert all((x == 0).all() for x in gradients)
        assert oracle.judge_varlen(out, lse, q, k, v, cu_q, cu_k).ok
        assert oracle.judge_varlen_backward(*gradients, dout, q, k, v, cu_q, cu_k, dlse=dlse).ok
