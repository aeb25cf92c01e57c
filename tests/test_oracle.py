"""The oracle: right by a triple loop and by hand, and a judge that rejects what is wrong."""

import dataclasses
import math

import ml_dtypes
import numpy as np
import pytest

from cuflash import oracle

DTYPES = ("float16", "bfloat16", "float32", "float64")
SIXTEEN_BITS = ("float16", "bfloat16")


def dtype_of(name):
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def tensors(dtype="float64", batch=1, seqlen_q=8, seqlen_k=8, heads_q=1, heads_k=1, dim=8, dim_v=8, seed=0):
    rng = np.random.default_rng(seed)
    shapes = (seqlen_q, heads_q, dim), (seqlen_k, heads_k, dim), (seqlen_k, heads_k, dim_v)
    return tuple(rng.standard_normal((batch, *shape)).astype(dtype_of(dtype)) for shape in shapes)


def is_visible(i, j, seqlen_q, seqlen_k, causal, window):
    distance = j - (i + seqlen_k - seqlen_q)
    left, right = window or (None, None)
    return not (causal and distance > 0 or left is not None and distance < -left
                or right is not None and distance > right)


def triple_loop(q, k, v, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """Attention of finite inputs without NumPy arithmetic: Python floats, one number at a time."""
    batch, seqlen_q, heads_q, dim = q.shape
    seqlen_k, heads_k, dim_v = v.shape[1:]
    scale = dim ** -0.5 if softmax_scale is None else softmax_scale
    out = np.zeros((batch, seqlen_q, heads_q, dim_v))
    lse = np.full((batch, heads_q, seqlen_q), -math.inf)
    for b in range(batch):
        for h in range(heads_q):
            hk = h // (heads_q // heads_k)
            for i in range(seqlen_q):
                logits = {}
                for j in range(seqlen_k):
                    if is_visible(i, j, seqlen_q, seqlen_k, causal, window):
                        pairs = zip(q[b, i, h], k[b, j, hk])
                        logit = scale * math.fsum(float(x) * float(y) for x, y in pairs)
                        logits[j] = softcap * math.tanh(logit / softcap) if softcap else logit
                if logits:
                    top = max(logits.values())
                    total = math.fsum(math.exp(x - top) for x in logits.values())
                    lse[b, h, i] = top + math.log(total)
                    for d in range(dim_v):
                        out[b, i, h, d] = math.fsum(
                            math.exp(x - top) / total * float(v[b, j, hk, d]) for j, x in logits.items())
    return out, lse


@pytest.mark.parametrize("options", [
    {}, {"causal": True},
    {"window": (2, 1)}, {"window": (0, 0)}, {"window": (None, 1)}, {"window": (1, None)},
    {"causal": True, "window": (1, 3)},
    {"softmax_scale": 0.0}, {"softmax_scale": -1.5}, {"softmax_scale": 40.0},
    {"softcap": 0.7}, {"softcap": 30.0, "softmax_scale": 20.0, "causal": True},
], ids=str)
@pytest.mark.parametrize("seqlens", [(1, 1), (1, 6), (5, 5), (3, 7), (7, 3)], ids=str)
def test_triple_loop(options, seqlens):
    q, k, v = tensors("float32", 2, *seqlens, heads_q=4, heads_k=2, dim=5, dim_v=3)
    out, lse = oracle.attention(q, k, v, **options)
    expected, expected_lse = triple_loop(q, k, v, **options)
    assert out.dtype == lse.dtype == np.float64
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12, atol=1e-14)


def test_by_hand():
    q = np.ones((1, 1, 1, 1))
    k = np.array([0.0, math.log(3)]).reshape(1, 2, 1, 1)
    v = np.array([[8.0, 0.0], [16.0, 4.0]]).reshape(1, 2, 1, 2)
    out, lse = oracle.attention(q, k, v, softmax_scale=1.0)
    np.testing.assert_allclose(out.ravel(), [14.0, 3.0], rtol=1e-15)         # weights 1/4 and 3/4
    np.testing.assert_allclose(lse.ravel(), [math.log(4)], rtol=1e-15)
    # The default scale is head_dim ** -0.5: with four equal channels the logit is 4 * log(3) / 2 / 2.
    out, lse = oracle.attention(np.ones((1, 1, 1, 4)), np.tile(k, (1, 1, 1, 4)) / 2, v)
    np.testing.assert_allclose(out.ravel(), [14.0, 3.0], rtol=1e-15)
    # A cap of 2 turns the logit 2 * atanh(log(3) / 2) into log(3).
    k[0, 1] = 2 * math.atanh(math.log(3) / 2)
    out, lse = oracle.attention(q, k, v, softmax_scale=1.0, softcap=2.0)
    np.testing.assert_allclose(out.ravel(), [14.0, 3.0], rtol=1e-14)


@pytest.mark.parametrize("options, table", [
    ({"seqlen_q": 3, "seqlen_k": 3, "causal": True}, ["x..", "xx.", "xxx"]),
    ({"seqlen_q": 2, "seqlen_k": 5, "causal": True}, ["xxxx.", "xxxxx"]),
    ({"seqlen_q": 5, "seqlen_k": 2, "causal": True}, ["..", "..", "..", "x.", "xx"]),
    ({"seqlen_q": 4, "seqlen_k": 4, "window": (1, 0)}, ["x...", "xx..", ".xx.", "..xx"]),
    ({"seqlen_q": 4, "seqlen_k": 4, "window": (0, 2)}, ["xxx.", ".xxx", "..xx", "...x"]),
    ({"seqlen_q": 2, "seqlen_k": 4, "window": (1, 1)}, [".xxx", "..xx"]),
    ({"seqlen_q": 4, "seqlen_k": 4, "window": (1, 2), "causal": True}, ["x...", "xx..", ".xx.", "..xx"]),
    ({"seqlen_q": 3, "seqlen_k": 2, "window": (-1, 0)}, ["..", "x.", "xx"]),
    ({"seqlen_q": 3, "seqlen_k": 3, "window": (None, 1)}, ["xx.", "xxx", "xxx"]),
    ({"seqlen_q": 3, "seqlen_k": 3, "window": (1, -1)}, ["xxx", "xxx", ".xx"]),
    ({"seqlen_q": 3, "seqlen_k": 3, "window": (0, 2**63)}, ["xxx", ".xx", "..x"]),
    ({"seqlen_q": 2, "seqlen_k": 0}, ["", ""]),
], ids=str)
def test_visible(options, table):
    expected = np.array([[mark == "x" for mark in row] for row in table], bool)
    np.testing.assert_array_equal(oracle.visible(**options), expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("solve", [oracle.attention, oracle.unfused])
def test_what_is_masked_has_no_influence(solve, bad):
    q, k, v = tensors(seqlen_q=6, seqlen_k=6)
    clean = solve(q, k, v, causal=True)
    k[0, 5], v[0, 4:, :, ::2] = bad, bad
    out, lse = solve(q, k, v, causal=True)
    np.testing.assert_array_equal(out[:, :4], clean[0][:, :4])
    np.testing.assert_array_equal(lse[..., :5], clean[1][..., :5])
    # Row 4 sees the bad value in every other channel, and no bad key.
    np.testing.assert_array_equal(out[0, 4, 0, 1::2], clean[0][0, 4, 0, 1::2])
    np.testing.assert_array_equal(out[0, 4, 0, ::2], np.full(4, bad))


@pytest.mark.parametrize("solve", [oracle.attention, oracle.unfused])
def test_what_is_visible_propagates(solve):
    q, k, v = tensors(seqlen_q=3, seqlen_k=3)
    q[0, 1, 0, 0] = np.nan
    out, lse = solve(q, k, v)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])
    assert np.isfinite(out[0, ::2]).all() and np.isfinite(lse[0, 0, ::2]).all()

    q[:], k[:], k[0, 1] = 1.0, 1.0, np.inf
    out, lse = solve(q, k, v)                  # a logit of +inf: no softmax exists
    assert np.isnan(out).all() and np.isnan(lse).all()
    out, lse = solve(-q, k, v)                 # a logit of -inf: a key of weight 0
    np.testing.assert_allclose(out[0, 0, 0], (v[0, 0, 0] + v[0, 2, 0]) / 2, rtol=1e-14)
    v[0, 1] = np.nan
    out, lse = solve(-q, np.full_like(k, np.inf), v)        # nothing but -inf is as good as no key
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("solve", [oracle.attention, oracle.unfused])
def test_empty(solve):
    q, k, v = tensors(seqlen_q=5, seqlen_k=2)
    v[:] = np.nan
    v[0, 0] = 1.0
    out, lse = solve(q, k, v, causal=True)
    assert (out[0, :3] == 0).all() and (lse[0, 0, :3] == -np.inf).all()
    assert (out[0, 3] == 1).all() and np.isnan(out[0, 4]).all()
    for sizes in ({"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_k": 0}):
        q, k, v = tensors(**sizes)
        out, lse = solve(q, k, v)
        assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
        assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unfused_is_of_its_dtype(dtype):
    """With a one-hot V, unfused attention shows its weights: the float32 softmax, rounded to the dtype."""
    q, k, _ = tensors(dtype, seqlen_q=32, seqlen_k=32)
    v = np.eye(32, dtype=dtype_of(dtype)).reshape(1, 32, 1, 32)
    out, lse = oracle.unfused(q, k, v)
    exact, exact_lse = oracle.attention(q, k, v)
    assert out.dtype == dtype_of(dtype) and lse.dtype == (np.float64 if dtype == "float64" else np.float32)
    worst = np.abs(out.astype(np.float64) / exact - 1).max() / oracle.ROUNDOFF[dtype]
    assert (0.5 < worst <= 1.01) if dtype in SIXTEEN_BITS else worst < 20
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
    # The weights are rounded before they meet V: with alternating signs that shows in every row.
    signs = np.where(np.arange(32) % 2, -1.0, 1.0)
    mixed, _ = oracle.unfused(q, k, signs.reshape(1, 32, 1, 1).astype(dtype_of(dtype)))
    expected = (out[0, :, 0].astype(np.float64) @ signs).astype(dtype_of(dtype)).astype(np.float64)
    np.testing.assert_allclose(mixed[0, :, 0, 0].astype(np.float64), expected, rtol=1e-6, atol=1e-7)


# Small enough that BLAS takes one thread for them: quick also where other work shares the cores.
CASES = {
    "dense": dict(seqlen_q=128, seqlen_k=128, heads_q=2, heads_k=2, dim=16, dim_v=16),
    "causal": dict(seqlen_q=150, seqlen_k=100, heads_q=4, heads_k=2, dim=16, dim_v=12, causal=True),
    "scaled": dict(seqlen_q=50, seqlen_k=200, heads_q=2, heads_k=1, dim=24, dim_v=16,
                   softmax_scale=-0.7, softcap=9.0),
    "one key": dict(seqlen_q=3, seqlen_k=1, heads_q=2, heads_k=1, dim=8, dim_v=8),
    "two keys": dict(seqlen_q=2, seqlen_k=2, heads_q=1, heads_k=1, dim=4, dim_v=1),
}


def case(name, dtype, seed=0):
    """(tensors, options) of a named case."""
    sizes = dict(CASES[name])
    options = {key: sizes.pop(key) for key in ("causal", "softmax_scale", "softcap") if key in sizes}
    return tensors(dtype, 2, **sizes, seed=seed), options


def rounded(dtype, arrays, options):
    """The best possible result: the truth, rounded once."""
    out, lse = oracle.attention(*arrays, **options)
    return out.astype(dtype_of(dtype)), lse.astype(np.float64 if dtype == "float64" else np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_judge_accepts(name, dtype):
    for seed in range(5):
        arrays, options = case(name, dtype, seed)
        for result in (rounded(dtype, arrays, options), oracle.unfused(*arrays, **options)):
            verdict = oracle.judge(*result, *arrays, **options)
            assert verdict.ok and verdict.why == "", verdict
            assert verdict.max_err <= verdict.max_budget and verdict.rms_err <= verdict.rms_budget
    assert oracle.judge(result[0], None, *arrays, **options).ok
    assert verdict.max_err == verdict.ref_max_err and verdict.rms_err == verdict.ref_rms_err


def flash(arrays, tile, weight_dtype, causal):
    """Unnormalised weights, rounded, tile by tile, as the kernels compute them."""
    compute = np.float64 if arrays[0].dtype == np.float64 else np.float32
    q, k, v = (x.astype(compute).transpose(0, 2, 1, 3) for x in arrays)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    table = oracle.visible(q.shape[2], k.shape[2], causal)
    acc, row_sum = np.zeros((*q.shape[:3], v.shape[3]), compute), np.zeros((*q.shape[:3], 1), compute)
    row_max = np.full_like(row_sum, -np.inf)
    for start in range(0, k.shape[2], tile):
        j = slice(start, start + tile)
        logits = q @ k[:, :, j].swapaxes(2, 3) * compute(q.shape[3] ** -0.5)
        logits = np.where(table[:, j], logits, -np.inf)
        new_max = np.maximum(row_max, logits.max(axis=-1, keepdims=True))
        base = np.where(new_max == -np.inf, 0, new_max)
        weights, alpha = np.exp2((logits - base) * compute(math.log2(math.e))), np.exp(row_max - base)
        row_sum = alpha * row_sum + weights.sum(axis=-1, keepdims=True)
        acc = alpha * acc + weights.astype(weight_dtype).astype(compute) @ v[:, :, j]
        row_max = new_max
    return (acc / np.where(row_sum == 0, 1, row_sum)).transpose(0, 2, 1, 3).astype(arrays[0].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("dense", "causal", "one key", "two keys"))
def test_judge_accepts_what_a_kernel_rounds(name, dtype):
    """Including small problems, where unfused attention may be exact by luck."""
    for seed in range(20):
        arrays, options = case(name, dtype, seed)
        result = flash(arrays, 48, dtype_of(dtype), options.get("causal", False))
        assert (verdict := oracle.judge(result, None, *arrays, **options)).ok, verdict


def test_judge_accepts_what_float32_cannot_do_better():
    q, k, v = tensors("float32", seqlen_q=40, seqlen_k=40)
    q[..., 0], q[..., 1], k[..., :2] = 1e4, -1e4, np.pi           # large terms that cancel in each logit
    verdict = oracle.judge(*oracle.unfused(q, k, v), q, k, v)
    assert verdict.ok, verdict.why
    assert np.abs(oracle.unfused(q, k, v)[1] - oracle.attention(q, k, v)[1]).max() > 1e-4
    arrays = tensors("float32", seqlen_q=4, seqlen_k=4)             # a scale that overflows: unfused is nan
    assert np.isnan(oracle.unfused(*arrays, softmax_scale=1e39)[0]).any()
    truth, _ = oracle.attention(*arrays, softmax_scale=1e39)
    assert oracle.judge(truth.astype(np.float32), None, *arrays, softmax_scale=1e39).ok


def wrong_results(dtype, arrays, options):
    """(name, out, lse) of results that are each wrong in one way."""
    q, k, v = arrays
    good, good_lse = rounded(dtype, arrays, options)
    last = good.shape[1] - 1
    typical = float(np.sqrt(np.mean(good[:, last].astype(np.float64) ** 2)))

    def changed(what=good, at=(1, last, 1, 3), value=None):
        copy = what.copy()
        copy[at] = value(copy[at]) if callable(value) else value
        return copy

    shorter = oracle.attention(q, k[:, :-1], v[:, :-1], **{**options, "causal": False})[0].astype(good.dtype)
    largest = np.abs(good[1, last, 1]).argmax()
    at_lse, one = (1, 1, last), good_lse.dtype.type

    yield "one element of the last row", changed(value=lambda x: x + x.dtype.type(typical / 2)), good_lse
    yield "one nan", changed(value=np.nan), good_lse
    yield "one inf", changed(value=np.inf), good_lse
    yield "an unwritten row", changed(at=(1, last, 1), value=0), good_lse
    yield "an unwritten element", changed(at=(1, last, 1, largest), value=0), good_lse
    yield "nothing written", np.zeros_like(good), good_lse
    yield "heads swapped", good[:, :, ::-1], good_lse
    yield "batches swapped", good[::-1], good_lse[::-1]
    yield "the last row lacks its last key", changed(at=(0, last), value=shorter[0, last]), good_lse
    yield "rows shifted by one", np.roll(good, 1, axis=1), good_lse
    yield "lse in base 2", good, good_lse / one(math.log(2))
    yield "lse off in one place", good, changed(good_lse, at_lse, lambda x: x * one(1 + 1e-4))
    yield "lse nan in one place", good, changed(good_lse, at_lse, np.nan)
    yield "lse -inf in one place", good, changed(good_lse, at_lse, -np.inf)
    yield "lse transposed", good, good_lse.swapaxes(1, 2)
    yield "out transposed", good.swapaxes(1, 2), good_lse
    yield "scale left out", *oracle.unfused(*arrays, **{**options, "softmax_scale": 1.0})
    yield "softcap of another call", *oracle.unfused(*arrays, **{**options, "softcap": 2.0})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ("dense", "causal", "scaled"))
def test_judge_rejects(name, dtype):
    arrays, options = case(name, dtype)
    assert oracle.judge(*rounded(dtype, arrays, options), *arrays, **options).ok
    for fault, out, lse in wrong_results(dtype, arrays, options):
        verdict = oracle.judge(out, lse, *arrays, **options)
        assert not verdict.ok and verdict.why, f"{fault} passed: {verdict}"


@pytest.mark.parametrize("dtype", DTYPES)
def test_judge_rejects_a_wrong_mask(dtype):
    arrays, options = case("causal", dtype)
    good, good_lse = rounded(dtype, arrays, options)
    judge = lambda out, lse: oracle.judge(out, lse, *arrays, **options)     # noqa: E731
    assert not judge(*rounded(dtype, arrays, {})).ok
    assert not judge(*rounded(dtype, arrays, {"window": (None, 1)})).ok
    assert not judge(*rounded(dtype, arrays, {"window": (98, 0)})).ok        # differs only in the last row
    finite_lse, mean = good_lse.copy(), good.copy()
    finite_lse[:, :, :50], mean[:, :50] = 0, arrays[2].mean(axis=1, keepdims=True).repeat(2, axis=2)
    assert not judge(good, finite_lse).ok
    assert not judge(mean, good_lse).ok
    tiny = good.copy()
    tiny[0, 0, 0, 0] = 1e-6
    assert not judge(tiny, good_lse).ok                                      # an empty row is exactly 0
    assert judge(good, good_lse).ok


def truncated(x, bits):
    """float32 with the lowest ``bits`` of the significand cleared."""
    return (x.view(np.uint32) & np.uint32(2**32 - 2**bits)).view(np.float32)


def test_judge_rejects_a_lower_precision():
    arrays, options = case("dense", "float32")
    tf32 = [truncated(x, 13) for x in arrays]
    assert not oracle.judge(*oracle.unfused(*tf32, **options), *arrays, **options).ok
    half = [x.astype(np.float16) for x in arrays]
    assert not oracle.judge(*oracle.unfused(*half, **options), *arrays, **options).ok
    arrays, options = case("dense", "float64")
    single = [x.astype(np.float32) for x in arrays]
    assert not oracle.judge(*oracle.unfused(*single, **options), *arrays, **options).ok

    arrays, options = case("dense", "float16")
    coarse = flash(arrays, 64, ml_dtypes.float8_e4m3fn, False)
    assert not oracle.judge(coarse, None, *arrays, **options).ok
    coarse = oracle.attention(*arrays, **options)[0].astype(ml_dtypes.bfloat16)
    assert not oracle.judge(coarse, None, *arrays, **options).ok


def test_judge_rejects_by_each_of_its_budgets():
    """Errors that one of the three budgets alone catches: everywhere, where noise is large, where small."""
    arrays, options = case("causal", "float32", seed=3)
    truth, lse, noise, _ = oracle._exact(*arrays, **options)
    budget = oracle.judge(truth, lse, *arrays, **options)
    signs = np.random.default_rng(0).choice((-1.0, 1.0), truth.shape)

    def verdict(error):
        return oracle.judge(truth + error, lse, *arrays, **options)

    def at(place, size):
        error = np.zeros_like(truth)
        error[place] = size
        return error

    everywhere = verdict(signs * noise * (truth != 0))
    assert "RMS" in everywhere.why and ";" not in everywhere.why, everywhere.why
    largest = np.unravel_index(noise.argmax(), noise.shape)
    at_largest = verdict(at(largest, (budget.max_budget + budget.scaled_budget * noise[largest]) / 2))
    assert "max" in at_largest.why and ";" not in at_largest.why, at_largest.why
    smallest = np.unravel_index(np.where(truth != 0, noise, np.inf).argmin(), noise.shape)
    at_smallest = verdict(at(smallest, 1.1 * budget.scaled_budget * noise[smallest]))
    assert "noise" in at_smallest.why and ";" not in at_smallest.why, at_smallest.why
    assert verdict(at(smallest, 0.9 * budget.scaled_budget * noise[smallest])).ok


def test_judge_rejects_a_float32_lse_of_float64():
    arrays, options = case("dense", "float64")
    out, lse = rounded("float64", arrays, options)
    assert not oracle.judge(out, lse.astype(np.float32), *arrays, **options).ok


def test_judge_wants_nan_and_inf_in_their_places():
    q, k, v = tensors("float32", seqlen_q=4, seqlen_k=4)
    v[0, 2, 0, 1], v[0, 3, 0, 2] = np.nan, -np.inf
    good, lse = rounded("float32", (q, k, v), {"causal": True})
    assert np.isnan(good[0, 2:, 0, 1]).all() and good[0, 3, 0, 2] == -np.inf
    assert oracle.judge(good, lse, q, k, v, causal=True).ok
    for place, value in (((0, 2, 0, 1), 1.0), ((0, 1, 0, 1), np.nan), ((0, 3, 0, 2), np.inf),
                         ((0, 3, 0, 2), -1e30), ((0, 3, 0, 2), np.nan)):
        out = good.copy()
        out[place] = value
        assert not oracle.judge(out, lse, q, k, v, causal=True).ok, (place, value)


def test_a_masked_poison_does_not_widen_the_budget():
    q, k, v = tensors("float16", seqlen_q=64, seqlen_k=64)
    noise = []
    for value in (0, 6e4, np.nan):
        k[0, 63], v[0, 63] = value, value
        noise.append(oracle._exact(q, k, v, causal=True)[2][0, :63])
    np.testing.assert_array_equal(noise[1], noise[0])
    np.testing.assert_array_equal(noise[2], noise[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_judge_rejects_one_key_of_a_thousand(dtype):
    """What the floor must stay below: the last row of a long causal problem, off by one key."""
    q, k, v = tensors(dtype, seqlen_q=1000, seqlen_k=1000, dim=8, dim_v=64)
    good, lse = rounded(dtype, (q, k, v), {"causal": True})
    out = good.copy()
    out[0, -1] = oracle.attention(q[:, -1:], k[:, :-1], v[:, :-1])[0][0, -1].astype(out.dtype)
    assert oracle.judge(good, lse, q, k, v, causal=True).ok
    verdict = oracle.judge(out, lse, q, k, v, causal=True)
    assert not verdict.ok
    if dtype == "bfloat16":         # the coarsest: even here not by a hair
        assert verdict.scaled_err > 1.2 * verdict.scaled_budget


def test_judgement_is_a_record():
    arrays, options = case("two keys", "float32")
    record = dataclasses.asdict(oracle.judge(*rounded("float32", arrays, options), *arrays, **options))
    assert {"max_err", "rms_err", "ref_max_err", "ref_rms_err", "max_budget", "rms_budget", "lse_err",
            "lse_budget", "ok", "why"} <= record.keys()
    assert all(type(value) in (float, bool, str) for value in record.values())


# Keys in a cache

def decoding_call(dtype="float64", page_size=None, new=2, lengths=(4, 0, 5), heads=(4, 2), seed=0):
    """(q, k_cache, v_cache) and the rest by name: caches of 7 keys, or pages of them, that are nan where unused."""
    rng = np.random.default_rng(seed)
    lead, table = (3, 7), None
    if page_size:
        table = np.arange(3 * -(-7 // page_size))[::-1].reshape(3, -1)
        lead = (table.size + 1, page_size)
    k_cache, v_cache = (np.full((*lead, heads[1], dim), np.nan) for dim in (5, 3))
    for b, length in enumerate(lengths):
        for j in range(length):
            place = (b, j) if table is None else (table[b, j // page_size], j % page_size)
            k_cache[place], v_cache[place] = rng.standard_normal((heads[1], 5)), rng.standard_normal((heads[1], 3))
    if table is not None:
        table = table.copy()
        for b, length in enumerate(lengths):
            table[b, -(-(length + new) // page_size):] = 2**31 - 1
    named = dict(cache_seqlens=np.array(lengths), block_table=table)
    if new:
        named |= dict(k=rng.standard_normal((3, new, heads[1], 5)), v=rng.standard_normal((3, new, heads[1], 3)))
    arrays = rng.standard_normal((3, 2, heads[0], 5)), k_cache, v_cache
    cast = dtype_of(dtype)
    return [x.astype(cast) for x in arrays], {
        name: x.astype(cast) if name in ("k", "v") else x for name, x in named.items() if x is not None}


@pytest.mark.parametrize("options", [{}, {"causal": False}, {"window": (2, 1)}, {"softcap": 0.7, "softmax_scale": 2.0}],
                         ids=str)
@pytest.mark.parametrize("page_size", [None, 1, 2, 3, 7])
@pytest.mark.parametrize("new", [0, 2])
def test_kvcache_by_triple_loop(options, page_size, new):
    """Each request by Python floats, on keys that are looked up one by one."""
    (q, k_cache, v_cache), named = decoding_call(page_size=page_size, new=new)
    before = k_cache.copy(), v_cache.copy()
    out, lse, k_after, v_after = oracle.attention_with_kvcache(q, k_cache, v_cache, **named, **options)
    for x, y in zip(before, (k_cache, v_cache)):
        np.testing.assert_array_equal(x, y)                 # the caches after the call are copies
    touched = np.zeros(k_cache.shape[:2], bool)
    for b, length in enumerate((4, 0, 5)):
        keys, values = [], []
        for j in range(length + new):
            page, row = (b, j) if page_size is None else (int(named["block_table"][b, j // page_size]), j % page_size)
            is_new = j >= length
            keys.append(named["k"][b, j - length] if is_new else k_cache[page, row])
            values.append(named["v"][b, j - length] if is_new else v_cache[page, row])
            np.testing.assert_array_equal(k_after[page, row], keys[-1])
            np.testing.assert_array_equal(v_after[page, row], values[-1])
            touched[page, row] = is_new
        k, v = (np.array(rows).reshape(1, len(rows), 2, dim) for rows, dim in ((keys, 5), (values, 3)))
        expected, expected_lse = triple_loop(q[b:b + 1], k, v, **{"causal": True, **options})
        np.testing.assert_allclose(out[b], expected[0], rtol=1e-12, atol=1e-14)
        np.testing.assert_allclose(lse[b], expected_lse[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_array_equal(k_after[~touched], before[0][~touched])
    np.testing.assert_array_equal(v_after[~touched], before[1][~touched])


def test_kvcache_by_hand():
    """Two keys in the cache and one behind them: equal logits, so a mean of three values; 9 is another's."""
    cache = np.array([[1.0, 2.0, 9.0], [9.0, 9.0, 9.0]]).reshape(2, 3, 1, 1)
    q, zeros, new = np.ones((1, 1, 1, 1)), np.zeros((2, 3, 1, 1)), np.array([6.0]).reshape(1, 1, 1, 1)
    out, lse, _, after = oracle.attention_with_kvcache(q, zeros, cache, k=new * 0, v=new, cache_seqlens=2)
    assert out.item() == pytest.approx(3.0) and lse.item() == pytest.approx(math.log(3))
    assert after[..., 0, 0].tolist() == [[1, 2, 6], [9, 9, 9]]
    out, *_ = oracle.attention_with_kvcache(q, zeros, cache, cache_seqlens=np.array([2]), cache_batch_idx=np.array([1]))
    assert out.item() == pytest.approx(9.0)
    out, *_ = oracle.attention_with_kvcache(q, zeros, cache)             # all of it
    assert out.item() == pytest.approx(4.0)
    # What does not fit is dropped, and a length past the end is the end.
    for length in (3, 100):
        out, _, _, after = oracle.attention_with_kvcache(q, zeros, cache, k=new, v=new, cache_seqlens=length)
        assert out.item() == pytest.approx(4.0) and after[0, :, 0, 0].tolist() == [1, 2, 9]
    # Pages of one key, the last first; no key at all.
    pages, table = cache[0, :, None], np.array([[2, 0, -1]])
    out, *_ = oracle.attention_with_kvcache(q, pages * 0, pages, cache_seqlens=2, block_table=table)
    assert out.item() == pytest.approx(5.0)
    out, lse, *_ = oracle.attention_with_kvcache(q, pages * 0, pages, cache_seqlens=-3, block_table=table)
    assert out.item() == 0 and lse.item() == -math.inf


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [None, 2])
def test_judge_of_kvcache(dtype, page_size):
    (q, k_cache, v_cache), named = decoding_call(dtype, page_size)
    out, lse, *_ = oracle.attention_with_kvcache(q, k_cache, v_cache, **named)
    rounded = out.astype(q.dtype)
    assert oracle.judge_with_kvcache(rounded, lse, q, k_cache, v_cache, **named).ok
    assert oracle.judge_with_kvcache(rounded, None, q, k_cache, v_cache, **named).ok
    # A key of each request too few, or another mask, or another's keys.
    fewer = named | {"cache_seqlens": np.maximum(named["cache_seqlens"] - 1, 0)}
    wrong = oracle.attention_with_kvcache(q, k_cache, v_cache, **fewer)[0].astype(q.dtype)
    assert not oracle.judge_with_kvcache(wrong, None, q, k_cache, v_cache, **named).ok
    assert not oracle.judge_with_kvcache(rounded, lse, q, k_cache, v_cache, **named, causal=False).ok
    assert not oracle.judge_with_kvcache(rounded[::-1], lse[::-1], q, k_cache, v_cache, **named).ok
    assert not oracle.judge_with_kvcache(rounded, np.where(lse == 0, 0, lse * 1.001), q, k_cache, v_cache, **named).ok
    # What a request without keys gets is exactly 0, and -inf.
    empty = {"cache_seqlens": 0}
    zeros, nothing = np.zeros_like(rounded), np.full_like(lse, -np.inf)
    pages = {} if page_size is None else {"block_table": named["block_table"]}
    assert oracle.judge_with_kvcache(zeros, nothing, q, k_cache, v_cache, **empty, **pages).ok
    zeros[1, 0, 0, 0] = 1e-7
    assert not oracle.judge_with_kvcache(zeros, nothing, q, k_cache, v_cache, **empty, **pages).ok


# Parts of the keys, joined

@pytest.mark.parametrize("cuts", [(4,), (0, 8), (1, 2, 3), (8,), (3, 3)], ids=str)
def test_merge_of_parts_is_the_whole(cuts):
    q, k, v = tensors(batch=2, seqlen_q=3, seqlen_k=8, heads_q=4, heads_k=2, dim_v=3)
    ends = 0, *cuts, 8
    parts = [oracle.attention(q, k[:, a:b], v[:, a:b], softcap=2.0) for a, b in zip(ends, ends[1:])]
    out, lse = oracle.merge_attention(*zip(*parts))
    expected, expected_lse = oracle.attention(q, k, v, softcap=2.0)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-13)


def test_merge_by_hand():
    """Weights 1/4 and 3/4; a part that saw nothing has none, whatever it holds."""
    outs = [np.full((1, 1, 1, 2), value) for value in (8.0, 16.0, np.nan)]
    lses = [np.full((1, 1, 1), value) for value in (5.0, 5.0 + math.log(3), -np.inf)]
    out, lse = oracle.merge_attention(outs, lses)
    np.testing.assert_allclose(out.ravel(), [14.0, 14.0], rtol=1e-15)
    assert lse.item() == pytest.approx(5.0 + math.log(4))
    out, lse = oracle.merge_attention(outs[2:], lses[2:])
    assert (out == 0).all() and lse.item() == -np.inf
    out, lse = oracle.merge_attention(outs[1:2], lses[1:2])
    assert (out == 16).all() and lse.item() == lses[1].item()
    out, lse = oracle.merge_attention(outs[:2], [lses[0], np.full((1, 1, 1), np.nan)])
    assert np.isnan(out).all() and np.isnan(lse).all()
