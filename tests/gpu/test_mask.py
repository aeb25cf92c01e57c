"""Which keys a query sees, read off the result, and that those it does not see have no influence at all."""

import numpy as np
import pytest
from support import DTYPES, Layout, assert_same, check, compute, fitting, inputs, on


def sees(i, j, seqlen_q, seqlen_k, causal, window):
    """Whether query i sees key j, word by word as the documentation has it."""
    diagonal = i + seqlen_k - seqlen_q
    left, right = window or (None, None)
    return (
        (not causal or j <= diagonal)
        and (left in (None, -1) or j >= diagonal - left)
        and (right in (None, -1) or j <= diagonal + right)
    )


def one_hot(dtype, seqlen_q, seqlen_k, heads_q=2, heads_k=1, head_dim=64):
    """q, k and v whose result is the matrix of weights: q is 0, so every visible key weighs the same."""
    q, k, _ = inputs(
        dtype,
        batch=1,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads_q=heads_q,
        heads_k=heads_k,
        head_dim=head_dim,
    )
    v = np.broadcast_to(np.eye(seqlen_k)[None, :, None], (1, seqlen_k, heads_k, seqlen_k)).astype(
        DTYPES[dtype]
    )
    return q * 0, k, v


MASKS = [
    (3, 128, True, None),
    (2, 5, True, None),
    (130, 130, True, None),
    (130, 200, True, None),
    (256, 3, True, None),
    (129, 1, True, None),
    (5, 2, True, None),
    (130, 130, False, (0, 0)),
    (130, 130, False, (64, 63)),
    (130, 150, False, (65, None)),
    (150, 130, False, (None, 1)),
    (200, 150, False, (3, 70)),
    (100, 190, False, (10, 128)),
    (130, 130, True, (17, 100)),
    (260, 130, True, (17, None)),
    (70, 256, False, (127, -1)),
    (70, 256, False, (-1, 2)),
]


@on(dtypes=("float16", "float32"))
@pytest.mark.parametrize("seqlen_q, seqlen_k, causal, window", MASKS, ids=str)
def test_the_visible_keys(backend, dtype, seqlen_q, seqlen_k, causal, window):
    table = np.array(
        [[sees(i, j, seqlen_q, seqlen_k, causal, window) for j in range(seqlen_k)] for i in range(seqlen_q)]
    )
    q, k, v = one_hot(dtype, seqlen_q, seqlen_k, heads_q=4)
    result, lse = compute(backend, q, k, v, fitting(backend, q, k, v), causal=causal, window=window)
    count = table.sum(axis=1)
    for head in range(4):
        weights = result[0, :, head].astype(np.float64)
        assert ((weights != 0) == table).all(), f"head {head}: {np.argwhere((weights != 0) != table)[:5]}"
        np.testing.assert_allclose(weights.sum(axis=1), count > 0, atol=2e-3)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse[0, head], np.log(count), rtol=1e-6)


@on(dtypes=("float16", "float32"))
def test_a_window_of_w_shows_w_keys_and_the_diagonal(backend, dtype):
    q, k, v = one_hot(dtype, 130, 130)
    for w in (0, 1, 63, 64, 65, 127, 128):
        for window, seen in (
            ((w, 0), lambda i, w=w: min(i, w) + 1),
            ((0, w), lambda i, w=w: min(129 - i, w) + 1),
        ):
            result, _ = compute(backend, q, k, v, fitting(backend, q, k, v), window=window)
            assert (np.count_nonzero(result[0, :, 0], axis=1) == [seen(i) for i in range(130)]).all(), window


@on()
def test_window_0_0_returns_the_values(backend, dtype):
    for seqlen, head_dim, head_dim_v in ((1, 64, 64), (2, 40, 72), (65, 128, 33), (130, 64, 256)):
        q, k, v = inputs(dtype, seqlen_q=seqlen, head_dim=head_dim, head_dim_v=head_dim_v)
        result, _ = compute(backend, q, k, v, fitting(backend, q, k, v), window=(0, 0))
        assert (result == v.repeat(2, axis=2)).all()


@on(dtypes=("bfloat16", "float32"))
def test_a_huge_window_is_none(backend, dtype):
    for seqlen_q, seqlen_k in ((8, 3), (3, 8), (100, 70)):
        q, k, v = inputs(dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
        full = check(backend, q, k, v)
        for right in (2, 3, 5, 7, 8, 99, 2**31 - 1):
            result = check(backend, q, k, v, window=(None, right))
            if right >= seqlen_q - 1:
                assert_same(backend, result, full, f"window right {right}")
        for left in (2, 3, 5, 7, 8, 69, 2**31 - 1):
            result = check(backend, q, k, v, window=(left, None))
            if left >= seqlen_k - 1:
                assert_same(backend, result, full, f"window left {left}")


@on(dtypes=("bfloat16", "float32"))
def test_spellings_of_causal_agree(backend, dtype):
    seqlen = 65
    q, k, v = inputs(dtype, seqlen_q=seqlen)
    causal = check(backend, q, k, v, causal=True)
    for window in ((-1, 0), (None, 0), (seqlen, 0), (seqlen - 1, 0), (2**40, 0)):
        assert_same(backend, compute(backend, q, k, v, window=window), causal, str(window))
    narrower, lse = check(backend, q, k, v, window=(seqlen - 2, 0))
    assert (narrower[:, -1] != causal[0][:, -1]).any() and (lse[..., -1] != causal[1][..., -1]).all()
    np.testing.assert_array_max_ulp(lse[..., :-1], causal[1][..., :-1], 8)


@on(dtypes=("float16", "float32"))
def test_a_window_wider_than_the_sequence_keeps_causality(backend, dtype):
    q, k, v = inputs(dtype, seqlen_q=16)
    causal = check(backend, q, k, v, causal=True)
    for left in (15, 16, 100):
        assert_same(
            backend, compute(backend, q, k, v, causal=True, window=(left, None)), causal, f"left {left}"
        )
    k[:, -1], v[:, -1] = 100, 100
    moved = compute(backend, q, k, v, causal=True, window=(100, 100))
    assert_same(
        backend,
        [moved[0][:, :-1], moved[1][..., :-1]],
        [causal[0][:, :-1], causal[1][..., :-1]],
        "last key moved",
    )


@on()
@pytest.mark.parametrize(
    "seqlen_q, seqlen_k, options",
    [
        (5, 2, dict(causal=True)),
        (129, 1, dict(causal=True)),
        (256, 3, dict(causal=True)),
        (300, 100, dict(window=(5, 20))),
    ],
    ids=str,
)
def test_a_row_that_sees_nothing_is_zero(backend, dtype, seqlen_q, seqlen_k, options):
    q, k, v = inputs(dtype, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    empty = np.array(
        [
            not any(
                sees(i, j, seqlen_q, seqlen_k, options.get("causal", False), options.get("window"))
                for j in range(seqlen_k)
            )
            for i in range(seqlen_q)
        ]
    )
    assert empty.any() and not empty.all()
    result, lse = check(backend, q, k, v, out=Layout(pad=(0, 0, 0, 8)), **options)
    assert (result[:, empty] == 0).all() and (lse[..., empty] == -np.inf).all()
    assert np.isfinite(lse[..., ~empty]).all()


# ------------------------------------------------------------------------------------------------------------
# NaN and Inf among keys and values

SPECIAL = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}
POISON_MASKS = {
    "causal": dict(causal=True),
    "window": dict(window=(40, 3)),
    "left": dict(window=(70, None)),
    "right": dict(window=(None, 5)),
    "none": {},
}


@on()
@pytest.mark.parametrize("mask", POISON_MASKS)
@pytest.mark.parametrize("special", SPECIAL)
def test_a_special_value_reaches_exactly_the_rows_that_see_it(backend, dtype, mask, special):
    """Alone in V, in one channel, at places that some rows of a tile see and others do not."""
    options = POISON_MASKS[mask]
    for key in (0, 1, 63, 64, 100, 149):
        q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
        channel = key % 64
        v[0, key, 0, channel] = SPECIAL[special]
        result, lse = check(backend, q, k, v, **options)
        table = np.array(
            [sees(i, key, 150, 150, options.get("causal", False), options.get("window")) for i in range(150)]
        )
        hit = ~np.isfinite(result[0].astype(np.float64))
        assert (hit[:, :, channel] == table[:, None]).all() and not np.delete(hit, channel, axis=2).any()
        assert np.isfinite(lse).all()


@on()
@pytest.mark.parametrize("mask", POISON_MASKS)
def test_nan_in_a_key_reaches_exactly_the_rows_that_see_it(backend, dtype, mask):
    options = POISON_MASKS[mask]
    for key in (0, 63, 64, 100, 149):
        q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
        k[0, key, 0, 5] = np.nan
        result, lse = check(backend, q, k, v, **options)
        table = np.array(
            [sees(i, key, 150, 150, options.get("causal", False), options.get("window")) for i in range(150)]
        )
        assert (np.isnan(result[0].astype(np.float64)) == table[:, None, None]).all()
        assert (np.isnan(lse[0]) == table).all()


@on()
@pytest.mark.parametrize("mask", POISON_MASKS)
def test_infinity_in_a_key(backend, dtype, mask):
    """A logit of -inf takes its key away, one of +inf is NaN: each query's sign decides."""
    options = POISON_MASKS[mask]
    q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
    for key in (0, 64, 100):
        k[0, key, 0, key % 64] = np.inf
    check(backend, q, k, v, **options)
    q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1)
    k[0, 100] = -np.inf  # inf - inf in the product: NaN
    check(backend, q, k, v, **options)


@on()
@pytest.mark.parametrize("mask", POISON_MASKS)
def test_several_special_values_at_once(backend, dtype, mask):
    options = POISON_MASKS[mask]
    q, k, v = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1, head_dim=64, head_dim_v=96)
    v[0, 20, 0, :8], v[0, 21, 0, 4:12], v[0, 90, 0, 8:40], v[0, 149, 0] = np.inf, -np.inf, np.nan, np.inf
    k[0, 60, 0, 0] = np.nan
    check(backend, q, k, v, **options)


@on()
@pytest.mark.parametrize("value", SPECIAL)
def test_what_no_row_sees_has_no_influence(backend, dtype, value):
    """Keys to the left of every window: some lie in tiles that are visited all the same."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=100, seqlen_k=300, heads_q=2, heads_k=1)
    unseen = slice(0, 300 - 100 - 20)
    k[:, unseen], v[:, unseen] = 0, 0
    clean = check(backend, q, k, v, window=(20, 0))
    for x in (k, v):
        x[:, unseen] = SPECIAL[value]
        assert_same(backend, check(backend, q, k, v, window=(20, 0)), clean, "poisoned")


@on()
def test_memory_after_the_last_key_and_channel_has_no_influence(backend, dtype):
    """Rows and columns beyond the array, which pad the last tile, are NaN or zeros: the same result."""
    for head_dim in (64, 72, 33):
        q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=100, head_dim=head_dim)
        plain = fitting(backend, q, k, v)
        clean = check(backend, q, k, v, plain)
        pad = plain[0].pad[3]
        step = 8 if (head_dim + pad) % 8 == 0 else 1
        poisoned = Layout(pad=(0, 0, 40 * step, 8 * step + pad))
        assert_same(
            backend, compute(backend, q, k, v, poisoned), clean, f"head_dim {head_dim}, poison after each row"
        )
        one = [x[:1] for x in (q, k, v)]
        assert_same(backend, compute(backend, *one, plain), [x[:1] for x in clean], "poison after the last")


@on(dtypes=("float16", "float32"))
def test_an_infinite_value_before_the_first_finite_logit(backend, dtype):
    """Keys of -inf first: the maximum is still -inf when Inf in V passes with a weight of 0."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=70, seqlen_k=300, heads_q=1, heads_k=1)
    q[..., 0], k[..., 0] = 1, 0
    k[:, :200, :, 0] = -np.inf
    check(backend, q, k, v)
    check(backend, q, k, v, causal=True)
    k[:] = 0
    k[..., 0] = -np.inf
    result, lse = check(backend, q, k, v)
    assert (result == 0).all() and (lse == -np.inf).all()
