"""The tier sm90: blocks of warpgroups that take one tile after the other, maps of arrays for TMA, a maximum that lags.

All other tests of the forward run on it too. Head dims, masks and kinds are combined such that tests share kernels: about 40
are compiled in all.
"""

import dataclasses
import itertools

import numpy as np
import pytest
from support import (
    DTYPES,
    MARKS,
    PLAIN,
    Gradients,
    Layout,
    Lengths,
    Placed,
    along_channel,
    assert_right,
    assert_right_gradients,
    assert_right_varlen,
    assert_same,
    backend_named,
    check,
    check_backward,
    check_varlen,
    compute,
    compute_varlen,
    dout_of,
    fitting,
    fresh_process_state,
    inputs,
    packed_inputs,
    rising,
    spin,
)
from test_mask import SPECIAL, sees

import cuflash
from cuflash import config, jit, launch
from cuflash.problem import Problem

pytestmark = MARKS["sm90"]

DTYPE = "bfloat16"
HEADS = {
    "64": dict(head_dim=64),
    "96": dict(head_dim=96),
    "128": dict(head_dim=128),
    "192": dict(head_dim=192),
    "192, 128": dict(head_dim=192, head_dim_v=128),
    "256": dict(head_dim=256),
}
MASKS = {"none": {}, "causal": dict(causal=True), "window": dict(window=(100, 30))}
EVERY_WARPGROUP = (1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 383, 384, 385, 1000)


@pytest.fixture(scope="module")
def backend():
    return backend_named("sm90")


def config_of(heads: str, seqlen_q: int = 1000):
    """What the tests ask of tiles: block_m rows, block_n keys."""
    head_dim = HEADS[heads]["head_dim"]
    head_dim_v = HEADS[heads].get("head_dim_v", head_dim)
    problem = Problem(DTYPE, 1, seqlen_q, seqlen_q, 1, 1, head_dim, head_dim_v, head_dim**-0.5)
    return config.choose(problem, config.DEVICES["sm_90"], "sm90")


def enough(tiles: int, heads: int) -> int:
    """So many sequences that a block takes three tiles in the mean, if each has so many tiles of so many heads."""
    return 3 * launch.device_of(0).num_sms // (tiles * heads) + 1


def placed(backend, host):
    return [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in host]


def fetch(stream, *arrays):
    stream.synchronize()
    return [x.get() for x in arrays]


def overwrite(array, values):
    values = np.ascontiguousarray(values)
    assert array.nbytes == values.nbytes
    array.data.copy_from_host(values.ctypes.data, values.nbytes)


# ------------------------------------------------------------------------------------------------------------
# Sizes


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("heads", HEADS)
def test_lengths_around_the_tiles(backend, heads, mask):
    """Rows around those of one to six warpgroups, keys around one to three tiles; out between NaN, which stay."""
    block_n = config_of(heads).block_n
    around = (tiles * block_n + more for tiles in (1, 2, 3) for more in (-1, 0, 1))
    keys = sorted({1, 2, *around, 5 * block_n, 1000})
    pairs = [
        (rows, keys[(5 * i + 4 * step) % len(keys)]) for i, rows in enumerate(EVERY_WARPGROUP) for step in range(3)
    ]
    pairs += [(rows, rows) for rows in EVERY_WARPGROUP]
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=1000, heads_q=2, heads_k=1, **HEADS[heads])
    backend.wash()
    for i, (seqlen_q, seqlen_k) in enumerate(pairs):
        out = Layout("bhsd", pad=(0, 8, 0, 8)) if i % 2 else None
        check(backend, q[:, :seqlen_q], k[:, :seqlen_k], v[:, :seqlen_k], out=out, **MASKS[mask])


@pytest.mark.parametrize("mask", [*MASKS, "wide window"])
def test_more_rows_than_are_short(backend, mask):
    """Tiles of 128 columns are others where rows are many, and others again in a narrow window."""
    options = MASKS.get(mask, dict(window=(1000, 100)))
    made = config_of("128", 1100)
    assert made.constants != config_of("128", 1000).constants
    whole = -(-1100 // made.block_m) * made.block_m
    n = made.block_n
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=whole + 65, heads_q=2, heads_k=1, head_dim=128)
    for seqlen_q, seqlen_k in (
        (1025, n - 1),
        (whole - 65, n + 1),
        (whole - 64, 400),
        (whole - 1, 1),
        (whole, whole),
        (whole + 1, 3 * n),
        (whole + 64, 1),
        (whole + 65, whole + 65),
        (1100, whole),
    ):
        check(backend, q[:, :seqlen_q], k[:, :seqlen_k], v[:, :seqlen_k], **options)


@pytest.mark.parametrize("head_dim", [8, 40, 72, 100])
def test_head_dims_that_are_padded(backend, head_dim):
    """TMA pads them with zeros: in memory NaN follow each row. So they do in out, where they stay."""
    q, k, v = inputs(DTYPE, seqlen_q=200, seqlen_k=300, head_dim=head_dim)
    plain = fitting(backend, q, k, v)
    apart = Layout(pad=(0, 0, 0, 8 + -head_dim % 8))
    backend.wash()
    first = check(backend, q, k, v, plain, causal=True)
    for layouts, out in ((plain, apart), (apart, apart)):
        assert_same(backend, compute(backend, q, k, v, layouts, out, causal=True), first, str(out))


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("heads", [(32, 8), (16, 1), (5, 5)], ids=str)
def test_groups_of_heads(backend, heads, mask):
    q, k, v = inputs(DTYPE, seqlen_q=200, seqlen_k=300, heads_q=heads[0], heads_k=heads[1], head_dim=128)
    v += np.arange(heads[1])[:, None].astype(v.dtype)  # a mix-up of key heads is no matter of rounding
    check(backend, q, k, v, **MASKS[mask])


def test_keys_that_do_not_fit_the_l2_cache(backend):
    """Heads come in groups, and hundreds of key tiles for each."""
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=200, seqlen_k=30_000, heads_q=6, heads_k=6, head_dim=128)
    result, lse = compute(backend, q, k, v, causal=True)
    for h in (0, 3, 5):
        one = slice(h, h + 1)
        assert_right(result[:, :, one], lse[:, one], q[:, :, one], k[:, :, one], v[:, :, one], causal=True)
    assert np.isfinite(result.astype(np.float64)).all()


# ------------------------------------------------------------------------------------------------------------
# Masks

SEQLENS = ((400, 400), (700, 300), (300, 700), (1000, 130), (130, 1000), (385, 1), (1, 385))
WINDOWS = {
    "both": [
        dict(window=window)
        for window in ((0, 0), (5, 5), (0, 70), (70, 0), (63, 64), (300, 10), (10, 300), (200, 200), (999, 0))
    ]
    + [dict(causal=True, window=(70, None)), dict(causal=True, window=(0, 40))],
    "left": [dict(window=window) for window in ((5, -1), (0, None), (63, -1), (200, None))],
    "right": [dict(window=window) for window in ((-1, 5), (None, 0), (-1, 64), (None, 200))],
}


@pytest.mark.parametrize(
    "heads, sides",
    [
        *((heads, "both") for heads in ("64", "96", "128", "192, 128", "256")),
        *((heads, "left") for heads in ("96", "128")),
        *((heads, "right") for heads in ("64", "128")),
    ],
)
def test_windows(backend, heads, sides):
    """Narrow ones too, of which each warpgroup sees other key tiles: it skips those before and behind its own."""
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=1000, heads_q=2, heads_k=1, **HEADS[heads])
    for (seqlen_q, seqlen_k), options in itertools.product(SEQLENS, WINDOWS[sides]):
        right = options["window"][1]
        if sides == "both" and right is not None and right >= seqlen_q - 1:
            continue  # it ends no row: as a window to the left, on a kernel of its own
        check(backend, q[:, :seqlen_q], k[:, :seqlen_k], v[:, :seqlen_k], **options)


@pytest.mark.parametrize("heads", HEADS)
def test_tiles_that_see_nothing(backend, heads):
    """Between and before those that do; rows behind out's are NaN and stay."""
    for seqlen_q, seqlen_k in ((1000, 1), (1000, 70), (900, 300), (193, 1), (64, 0)):
        q, k, v = inputs(DTYPE, batch=3, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **HEADS[heads])
        result, lse = check(backend, q, k, v, out=Layout(pad=(0, 8, 0, 8)), causal=True)
        empty = slice(0, seqlen_q - seqlen_k)
        assert (result[:, empty] == 0).all() and (lse[..., empty] == -np.inf).all()
        assert np.isfinite(lse[..., seqlen_q - seqlen_k :]).all()


# ------------------------------------------------------------------------------------------------------------
# Many tiles to a block

MANY = {
    "none": ((500, 500), {}),
    "causal": ((500, 500), dict(causal=True)),
    "window": ((500, 500), dict(window=(100, 30))),
    "causal, more rows": ((700, 300), dict(causal=True)),
    "causal, more keys": ((200, 900), dict(causal=True)),
    "narrow window": ((500, 500), dict(window=(3, 0))),
}


@pytest.mark.parametrize("case", MANY)
@pytest.mark.parametrize("heads", ["64", "96", "128", "256"])
def test_many_tiles(backend, heads, case):
    """Blocks that take several, of other sequences and heads: the bits of each sequence alone, where a block takes one."""
    (seqlen_q, seqlen_k), options = MANY[case]
    batch = enough(-(-seqlen_q // config_of(heads).block_m), 4)
    sizes = dict(seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_k=2, **HEADS[heads])
    q, k, v = inputs(DTYPE, batch=batch, **sizes)
    v[::3, seqlen_k // 2, 0, 5], v[1::6, seqlen_k - 1, 1, 7], k[2::6, 0, 0, 0] = np.inf, np.nan, np.nan
    result, lse = compute(backend, q, k, v, out=PLAIN, **options)
    for b in range(batch):
        one = slice(b, b + 1)
        alone = compute(backend, q[one], k[one], v[one], **options)
        assert_same(backend, (result[one], lse[one]), alone, f"sequence {b}")
        if b % 4 == 0 or b == batch - 1:
            assert_right(result[one], lse[one], q[one], k[one], v[one], **options)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_many_tiles_of_long_heads(backend, mask):
    groups = enough(-(-1500 // config_of("128", 1500).block_m), 5)
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=1500, heads_q=5 * groups, heads_k=groups, head_dim=128)
    result, lse = compute(backend, q, k, v, **MASKS[mask])
    for g in range(groups):
        one, keys = slice(5 * g, 5 * g + 5), slice(g, g + 1)
        arrays = q[:, :, one], k[:, :, keys], v[:, :, keys]
        alone = compute(backend, *arrays, **MASKS[mask])
        assert_same(backend, (result[:, :, one], lse[:, one]), alone, f"heads {one}")
        if g in (0, groups - 1):
            assert_right(*alone, *arrays, **MASKS[mask])


# ------------------------------------------------------------------------------------------------------------
# Scores and the maximum

SCORES = {
    "softcap": (dict(softcap=5.0), None),
    "softcap that flattens all": (dict(softcap=1e-3), None),
    "softcap of logits near 5000": (dict(softcap=50.0), along_channel(200, 200)),
    "softcap of logits near -10000": (dict(softcap=50.0), along_channel(283, -283)),
    "softcap, scale below 0": (dict(softcap=2.0, softmax_scale=-0.4), None),
    "scale 0": (dict(softmax_scale=0.0), None),
    "scale -0.125": (dict(softmax_scale=-0.125), None),
    "scale -3": (dict(softmax_scale=-3.0), rising(0.01)),
    "scale 1e-31": (dict(softmax_scale=1e-31), None),
    "scale 1": (dict(softmax_scale=1.0), None),
    "scale 10000": (dict(softmax_scale=1e4), None),
}


@pytest.mark.parametrize("case", SCORES)
def test_scores(backend, case):
    options, edit = SCORES[case]
    q, k, v = inputs(DTYPE, batch=1, seqlen_q=300, seqlen_k=500)
    if edit:
        edit(q, k, v)
    check(backend, q, k, v, causal=True, **options)


def logits(q, k, of_key, of_row=1):
    """Logits of about of_key * of_row, one number for each key and one for each row or for all."""
    q[..., 0], k[..., 0] = np.reshape(of_row, (-1, 1)), (of_key * q.shape[3] ** 0.5)[:, None]


# name -> (logit of each key, of each row's factor), of the numbers of keys and rows and the keys of a tile. Tiles come last
# first; 8 in base 2, by which the maximum lags at most, are 5.545.
LOGITS = {
    "up to 700": lambda keys, rows, tile: (np.linspace(-700, 700, keys), 1),
    "down to -700": lambda keys, rows, tile: (np.linspace(700, -700, keys), 1),
    "all near 700": lambda keys, rows, tile: (np.full(keys, 700), 1),
    "all near -700": lambda keys, rows, tile: (np.full(keys, -700), 1),
    "by less than the lag from tile to tile": lambda keys, rows, tile: (np.arange(keys) * -4.5 / tile, 1),
    "by more than the lag": lambda keys, rows, tile: (np.arange(keys) * -7 / tile, 1),
    "up and down from tile to tile": lambda keys, rows, tile: (700 * (-1.0) ** (np.arange(keys) // tile), 1),
    "each other row the other way": lambda keys, rows, tile: (
        np.linspace(-700, 700, keys),
        (-1.0) ** np.arange(rows),
    ),
    "rows of a warp by different steps": lambda keys, rows, tile: (
        np.arange(keys) * -7 / tile,
        np.arange(rows) % 16 / 8 - 0.5,
    ),
    "one key, the first": lambda keys, rows, tile: (np.where(np.arange(keys) == 0, 700, 0), 1),
    "one key, the last": lambda keys, rows, tile: (np.where(np.arange(keys) == keys - 1, 700, 0), 1),
    "one key of each tile, more each time": lambda keys, rows, tile: (
        np.where(np.arange(keys) % tile == 7, (keys - np.arange(keys)) * 0.1, 0),
        1,
    ),
}


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize(
    "dtype, heads",
    [*((DTYPE, heads) for heads in ("64", "96", "128", "192, 128", "256")), ("float16", "64"), ("float16", "128")],
)
def test_the_maximum_moves(backend, dtype, heads, mask):
    q, k, v = inputs(dtype, batch=1, seqlen_q=200, seqlen_k=1000, heads_q=2, heads_k=1, **HEADS[heads])
    for of_key, of_row in (make(1000, 200, config_of(heads).block_n) for make in LOGITS.values()):
        logits(q, k, of_key, of_row)
        check(backend, q, k, v, **MASKS[mask])


@pytest.mark.parametrize("dtype, heads", [(DTYPE, "64"), (DTYPE, "128"), ("float16", "128")])
def test_the_maximum_lags_as_far_as_it_may(backend, dtype, heads):
    """All keys but those of the first tile that comes weigh 2**7.9 or, if the maximum moves, 1: both are right."""
    tile = config_of(heads).block_n
    keys = 8 * tile
    q, k, v = inputs(dtype, batch=1, seqlen_q=200, seqlen_k=keys, heads_q=2, heads_k=1, **HEADS[heads])
    q[...] = 0
    for step in (7.9, 8.1):
        logits(q, k, np.where(np.arange(keys) < keys - tile, step * np.log(2), 0))
        check(backend, q, k, v)


# ------------------------------------------------------------------------------------------------------------
# NaN and Inf


def visible(seqlen_q, seqlen_k, key, options):
    """Which rows see the key."""
    causal, window = options.get("causal", False), options.get("window")
    return np.array([sees(i, key, seqlen_q, seqlen_k, causal, window) for i in range(seqlen_q)])


def places(seqlen_k, tile):
    """In the first, in a middle and in the last key tile, at their ends and inside."""
    last = (seqlen_k - 1) // tile * tile
    return sorted({0, 1, tile - 1, tile, tile + 33, 2 * tile - 1, last - 1, last, last + 3, seqlen_k - 1})


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["64", "96", "128", "256"])
def test_what_is_not_finite_reaches_exactly_the_rows_that_see_it(backend, heads, mask):
    """Alone in V or K. The rows are more than a tile's, of which some see it and some do not."""
    options = MASKS[mask]
    clean = inputs(DTYPE, batch=1, seqlen_q=300, seqlen_k=420, heads_q=2, heads_k=1, **HEADS[heads])
    for key in places(420, config_of(heads).block_n):
        table = visible(300, 420, key, options)
        for special in SPECIAL.values():
            q, k, v = (x.copy() for x in clean)
            channel = (7 * key + 3) % v.shape[3]
            v[0, key, 0, channel] = special
            result, lse = check(backend, q, k, v, **options)
            hit = ~np.isfinite(result[0].astype(np.float64))
            assert (hit[:, :, channel] == table[:, None]).all(), f"key {key}, {special}"
            assert not np.delete(hit, channel, axis=2).any() and np.isfinite(lse).all()
        q, k, v = (x.copy() for x in clean)
        k[0, key, 0, key % k.shape[3]] = np.nan
        result, lse = check(backend, q, k, v, **options)
        assert (np.isnan(result[0].astype(np.float64)) == table[:, None, None]).all(), f"key {key} of K"
        assert (np.isnan(lse[0]) == table).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["64", "96", "128", "256"])
def test_much_that_is_not_finite(backend, heads, mask):
    """In many places of V and some of K, in many tiles at once. No Inf in K: its weight may be 0, and 0 times an Inf in V is NaN,
    but Inf in a tile that is taken apart."""
    rng = np.random.default_rng(9)
    for count in (3, 30, 300):
        q, k, v = inputs(DTYPE, seqlen_q=300, seqlen_k=420, **HEADS[heads])
        for special in SPECIAL.values():
            v[tuple(rng.integers(0, size, count) for size in v.shape)] = special
        k[0, 200, 0, 3], k[1, 419, 1, 0] = np.nan, np.nan
        check(backend, q, k, v, **MASKS[mask])


def test_values_that_no_row_sees(backend):
    """Whole tiles of NaN beside the window's, in tiles that some warpgroups skip; the same bits as with zeros."""
    for heads in ("64", "128", "256"):
        q, k, v = inputs(DTYPE, batch=2, seqlen_q=400, seqlen_k=900, **HEADS[heads])
        unseen = slice(0, 900 - 400 - 100)
        k[:, unseen], v[:, unseen] = 0, 0
        clean = check(backend, q, k, v, window=(100, 30))
        k[:, unseen], v[:, unseen] = np.nan, np.nan
        assert_same(backend, compute(backend, q, k, v, window=(100, 30)), clean, heads)


@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("heads", ["64", "128", "256"])
def test_tiles_that_come_again(backend, heads, mask):
    """NaN that some rows do not see, among the first, the last or all tiles of the blocks: the bits that zeros in their place
    give."""
    batch = enough(-(-500 // config_of(heads, 500).block_m), 2)
    q, k, v = inputs(DTYPE, batch=batch, seqlen_q=500, heads_q=2, heads_k=1, **HEADS[heads])
    v[:, -1] = 0
    clean = compute(backend, q, k, v, **MASKS[mask])
    rows = visible(500, 500, 499, MASKS[mask])
    for which in (slice(1), slice(batch - 1, None), slice(0, None, 7), slice(None)):
        poisoned = v.copy()
        poisoned[which, -1] = np.nan
        result, lse = compute(backend, q, k, poisoned, **MASKS[mask])
        hit = np.isnan(result[which].astype(np.float64))
        assert (hit == rows[None, :, None, None]).all(), which
        result[which] = np.where(hit, clean[0][which], result[which])
        assert_same(backend, (result, lse), clean, str(which))


POISONED = Lengths((130, 300, 65, 1), (200, 420, 65, 5), spare_q=20, spare_k=30)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["64", "128"])
def test_what_is_not_finite_in_packed_sequences(backend, heads, mask):
    """In V or K of the second, at the ends of its tiles: no row of another sees it. Behind the last there are NaN."""
    options = MASKS[mask]
    clean = packed_inputs(DTYPE, POISONED, heads_q=2, heads_k=1, **HEADS[heads])
    rows, keys = POISONED.slots("q")[1], POISONED.slots("k")[1]
    for key in places(420, config_of(heads).block_n):
        table = np.zeros(POISONED.total("q"), bool)
        table[rows] = visible(300, 420, key, options)
        for special in SPECIAL.values():
            q, k, v = (x.copy() for x in clean)
            channel = (7 * key + 3) % v.shape[2]
            v[keys.start + key, 0, channel] = special
            result, lse = check_varlen(backend, q, k, v, POISONED, **options)
            hit = ~np.isfinite(result.astype(np.float64))
            assert (hit[:, :, channel] == table[:, None]).all(), f"key {key}, {special}"
            assert not np.delete(hit, channel, axis=2).any() and not np.isnan(lse).any()
        q, k, v = (x.copy() for x in clean)
        k[keys.start + key, 0, 5] = np.nan
        result, lse = check_varlen(backend, q, k, v, POISONED, **options)
        assert (np.isnan(result.astype(np.float64)) == table[:, None, None]).all(), f"key {key} of K"
        assert (np.isnan(lse) == table).all()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("heads", ["64", "128"])
def test_a_sequence_of_nan_among_others(backend, heads, mask):
    lengths = Lengths((130, 300, 65, 200), (200, 420, 65, 200))
    q, k, v = packed_inputs(DTYPE, lengths, heads_q=2, heads_k=1, **HEADS[heads])
    clean = check_varlen(backend, q, k, v, lengths, **MASKS[mask])
    for which in range(4):
        poisoned = [x.copy() for x in (q, k, v)]
        for x, side in zip(poisoned, "qkk", strict=True):
            x[lengths.slots(side)[which]] = np.nan
        out, lse = compute_varlen(backend, *poisoned, lengths, **MASKS[mask])
        for i, rows in enumerate(lengths.slots("q")):
            if i != which:
                expected = clean[0][rows], clean[1][:, rows]
                assert_same(backend, (out[rows], lse[:, rows]), expected, f"sequence {i} beside NaN in {which}")


# ------------------------------------------------------------------------------------------------------------
# Packed sequences

RANDOM = tuple(map(int, np.random.default_rng(3).integers(1, 131, 110)))
PACKED = {
    "one": Lengths((385,)),
    "empty ones first": Lengths((0, 0, 200, 0, 65), (0, 7, 300, 0, 65)),
    "empty ones last": Lengths((200, 65, 0, 0, 0), (130, 300, 0, 9, 0)),
    "no queries, no keys": Lengths((130, 0, 270, 0, 5), (130, 150, 0, 0, 5)),
    "no keys at all": Lengths((200, 1), (0, 0)),
    "more sequences than rows": Lengths((0,) * 40 + (1,) + (0,) * 30 + (33,), (0,) * 40 + (90,) + (3,) * 30 + (70,)),
    "one long among short ones": Lengths((3, 1, 700, 5, 2, 64, 9, 1, 33)),
    "one row each": Lengths((1,) * 50, tuple(range(1, 401, 8))),
    "rows of the first warpgroup alone": Lengths((1, 64, 193, 256, 129, 385, 140), (300, 64, 193, 400, 1, 385, 70)),
    "more rows than keys": Lengths((300, 500, 193), (100, 3, 65)),
    "more keys than rows": Lengths((1, 65, 193), (700, 400, 900)),
    "used": Lengths((200,) * 4, (300,) * 4, (200, 1, 0, 129), (300, 0, 65, 1), 40, 50),
    "used keys": Lengths((200, 70, 193), (300, 300, 500), used_k=(257, 128, 1)),
    "used queries": Lengths((300, 200, 193), (300, 300, 500), used_q=(65, 192, 64)),
    "nothing used": Lengths((200, 70), (90, 100), (0, 0), (0, 0), 3, 3),
    "rows behind the last": Lengths((70, 200), (200, 70), spare_q=500, spare_k=300),
    "more than there are blocks": Lengths(RANDOM, RANDOM[::-1]),
}
PACKED_RUNS = {
    **{f"{heads}, causal": (heads, "causal") for heads in ("64", "96", "128", "256")},
    **{f"{heads}, {mask}": (heads, mask) for heads in ("64", "128") for mask in ("none", "window")},
}


@pytest.mark.parametrize("case", PACKED)
@pytest.mark.parametrize("run", PACKED_RUNS)
def test_packed(backend, run, case):
    heads, mask = PACKED_RUNS[run]
    lengths, options = PACKED[case], MASKS[mask]
    q, k, v = packed_inputs(DTYPE, lengths, **HEADS[heads])
    backend.wash()
    first = check_varlen(backend, q, k, v, lengths, **options)
    wide = Lengths(**vars(lengths) | {"dtype": "int64"})
    again = compute_varlen(backend, q, k, v, wide, out=Layout(pad=(0, 0, 8, 8)), **options)
    assert_same(backend, again, first, "int64 lengths, into an array of ours")


def test_packed_float16(backend):
    for case in ("more than there are blocks", "rows of the first warpgroup alone", "used"):
        check_varlen(backend, *packed_inputs("float16", PACKED[case]), PACKED[case], causal=True)


def test_long_packed_sequences(backend):
    """Of more than 1024 rows in the mean, and short ones beside them."""
    lengths = Lengths((3000, 1, 1700, 2000), (3000, 300, 1700, 500))
    q, k, v = packed_inputs(DTYPE, lengths, heads_q=2, heads_k=1, head_dim=128)
    out, lse = compute_varlen(backend, q, k, v, lengths, causal=True)
    for rows, keys in zip(lengths.slots("q"), lengths.slots("k"), strict=True):
        more = (keys.stop - keys.start) - (rows.stop - rows.start)
        for stop in {rows.start + 60, (rows.start + rows.stop) // 2, rows.stop}:
            if not rows.start <= stop <= rows.stop:
                continue
            some = slice(max(rows.start, stop - 150), stop)
            seen = slice(keys.start, max(keys.start, keys.start + stop - rows.start + more))
            one = Lengths((some.stop - some.start,), (seen.stop - seen.start,))
            assert_right_varlen(out[some], lse[:, some], q[some], k[seen], v[seen], one, causal=True)


@pytest.mark.parametrize("heads", ["64", "128", "256"])
def test_packed_is_the_same_as_dense(backend, heads):
    """To the bit: the tiles are the same."""
    lengths = Lengths((385, 65, 1, 200), (385, 300, 70, 90))
    q, k, v = packed_inputs(DTYPE, lengths, **HEADS[heads])
    out, lse = check_varlen(backend, q, k, v, lengths, causal=True)
    for rows, keys in zip(lengths.slots("q"), lengths.slots("k"), strict=True):
        dense = compute(backend, q[None, rows], k[None, keys], v[None, keys], causal=True)
        assert_same(backend, (out[None, rows], lse[None, :, rows]), dense, f"rows {rows}")


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("heads", ["64", "128"])
def test_what_unused_rows_hold_changes_no_bit(backend, heads, mask):
    """Nor what the next sequence holds: queries whose logits rise from key tile to key tile, in the tile of others."""
    lengths = Lengths((200, 130, 60), (700, 700, 60), used_q=(70, 129, 60))
    q, k, v = packed_inputs(DTYPE, lengths, **HEADS[heads])
    q[..., 0] = 0
    k[:1400, :, 0] = np.tile(np.linspace(400, -400, 700), 2)[:, None]
    clean = check_varlen(backend, q, k, v, lengths, **MASKS[mask])
    mine = [slice(0, 70), slice(200, 329)]
    for factor in (1, -1, 1000):
        for rows in (slice(70, 200), slice(329, 390)):
            q[rows] = 0
            q[rows, :, 0] = factor
        out, lse = compute_varlen(backend, q, k, v, lengths, **MASKS[mask])
        for rows in mine:
            assert_same(backend, (out[rows], lse[:, rows]), (clean[0][rows], clean[1][:, rows]), f"{rows}, {factor}")


# ------------------------------------------------------------------------------------------------------------
# The prepared call


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_other_arrays_of_one_prepared_call(backend, monkeypatch, mask):
    """The maps of its arrays follow the addresses, one by one and all together; nothing is prepared anew."""
    hosts = [inputs(DTYPE, seqlen_q=200, heads_q=2, heads_k=2, head_dim=128, seed=seed) for seed in range(3)]
    sets = [placed(backend, host) for host in hosts]
    outs = placed(backend, [np.zeros_like(hosts[0][0])] * 2)
    mixed = [(0, 0, 0), (1, 1, 1), (0, 0, 0), (2, 0, 0), (2, 1, 0), (2, 1, 2), (0, 1, 2), (1, 1, 2), (1, 1, 1)]
    with fresh_process_state(monkeypatch), config.force_tier("sm90"), monkeypatch.context() as patch:
        cuflash.attention(*sets[0], return_lse=True, **MASKS[mask])
        cuflash.attention(*sets[0], return_lse=True, out=outs[0], **MASKS[mask])
        patch.setattr(launch, "choose", None)
        results = []
        for i, which in enumerate(mixed):
            arrays, host = ([x[at][j] for j, at in enumerate(which)] for x in (sets, hosts))
            result = cuflash.attention(*arrays, return_lse=True, **MASKS[mask])
            given, lse = cuflash.attention(*arrays, return_lse=True, out=outs[i % 2], **MASKS[mask])
            assert given is outs[i % 2]
            results.append((host, [backend.download(x) for x in (*result, given, lse)]))
        # One array in another's place.
        q, k, v = sets[0]
        host = hosts[0][1], hosts[0][0], hosts[0][2]
        results.append((host, [backend.download(x) for x in cuflash.attention(k, q, v, return_lse=True, **MASKS[mask])]))
    for host, result in results:
        assert_right(*result[:2], *host, **MASKS[mask])
        if result[2:]:
            assert_same(backend, result[2:], result[:2], "into an array of ours")


def test_other_arrays_of_one_prepared_packed_call(backend, monkeypatch):
    all_lengths = [Lengths((200, 70, 30)), Lengths((30, 200, 70)), Lengths((0, 1, 299))]
    hosts = [packed_inputs(DTYPE, lengths, seed=seed) for seed, lengths in enumerate(all_lengths)]
    sets = [placed(backend, (*host, *lengths.arrays()[0])) for host, lengths in zip(hosts, all_lengths, strict=True)]
    with fresh_process_state(monkeypatch), config.force_tier("sm90"), monkeypatch.context() as patch:
        cuflash.attention_varlen(*sets[0], causal=True, return_lse=True)
        patch.setattr(launch, "choose", None)
        for i in (1, 0, 2, 2, 1, 0, 1):
            result = cuflash.attention_varlen(*sets[i], causal=True, return_lse=True)
            assert_right_varlen(*map(backend.download, result), *hosts[i], all_lengths[i], causal=True)


def test_no_keys_at_no_address(backend):
    """An array of no elements has the address 0."""
    import cupy

    (q,) = placed(backend, inputs(DTYPE, seqlen_q=300)[:1])
    k = cupy.empty((2, 0, 2, 64), q.dtype)
    for options in ({}, dict(causal=True)):
        out, lse = map(backend.download, backend.attention(q, k, k, return_lse=True, **options))
        assert (out == 0).all() and (lse == -np.inf).all()
    ends, no_ends = placed(backend, np.array([[0, 200, 300], [0, 0, 0]], np.int32))
    packed = backend.call(cuflash.attention_varlen, q[0], k[0], k[0], ends, no_ends, causal=True, return_lse=True)
    out, lse = map(backend.download, packed)
    assert (out == 0).all() and (lse == -np.inf).all()


def test_memory(backend):
    """Under a mask there is a counter of tiles beside out and lse, which goes back to the pool."""
    import cupy

    arrays = placed(backend, inputs(DTYPE, seqlen_q=5000))  # more tiles than multiprocessors
    for options, more in (({}, 0), (dict(causal=True), 512), (dict(window=(100, 30)), 512)):
        pool = cupy.cuda.MemoryPool()
        with config.force_tier("sm90"), cupy.cuda.using_allocator(pool.malloc):
            results = cuflash.attention(*arrays, return_lse=True, **options)
            held = sum(-(-x.nbytes // 512) * 512 for x in results)
            assert (pool.used_bytes(), pool.total_bytes()) == (held, held + more)
            for _ in range(100):
                results = cuflash.attention(*arrays, return_lse=True, **options)
        assert pool.used_bytes() == held and pool.total_bytes() <= 2 * held + more
        del results


# ------------------------------------------------------------------------------------------------------------
# Streams, graphs, and the same bits each time


def test_two_streams_with_a_counter_each(cupy, backend):
    """Masked calls of more tiles than blocks, dense and packed: blocks of both count their tiles at once."""
    batch = enough(-(-600 // config_of("64").block_m), 8)
    dense = inputs(DTYPE, batch=batch, seqlen_q=600, heads_q=8, heads_k=2)
    lengths = PACKED["more than there are blocks"]
    packed = packed_inputs(DTYPE, lengths)
    expected = [compute(backend, *dense, causal=True), compute_varlen(backend, *packed, lengths, causal=True)]
    expected.append(compute(backend, *dense, window=(100, 30)))
    arrays, packed_arrays = placed(backend, dense), placed(backend, (*packed, *lengths.arrays()[0]))
    calls = (
        lambda: cuflash.attention(*arrays, causal=True, return_lse=True),
        lambda: cuflash.attention_varlen(*packed_arrays, causal=True, return_lse=True),
        lambda: cuflash.attention(*arrays, window=(100, 30), return_lse=True),
    )
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for first, second in ((0, 0), (0, 1), (0, 2), (1, 1)):
        results = []
        with config.force_tier("sm90"):
            for _ in range(6):
                for stream, call in zip(streams, (first, second), strict=True):
                    with stream:
                        results.append((stream, call, calls[call]()))
        for stream, call, result in results:
            assert_same(backend, fetch(stream, *result), expected[call], f"call {call} beside another")


def test_graph(cupy, backend):
    """Of masked dense calls with many tiles, replayed with other values; memory of the pool is not touched."""
    batch = enough(-(-600 // config_of("64").block_m), 8)
    sizes = dict(batch=batch, seqlen_q=600, heads_q=8, heads_k=2)
    arrays = placed(backend, inputs(DTYPE, **sizes))
    given = cupy.empty(arrays[0].shape, arrays[0].dtype)
    stream = cupy.cuda.Stream(non_blocking=True)

    def call():
        cuflash.attention(*arrays, window=(100, 30), out=given)
        return cuflash.attention(*arrays, causal=True, return_lse=True)

    with config.force_tier("sm90"), stream:
        call()
        stream.synchronize()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
        taken = [cupy.empty(size, np.uint8) for size in (16, 256, 512, 1024, 4096) for _ in range(4)]
    for seed in range(3):
        host = inputs(DTYPE, **sizes, seed=40 + seed)
        for x, y in zip(arrays, host, strict=True):
            overwrite(x, y)
        for x in (*results, given):
            x.data.memset(0xFF, x.nbytes)
        for x in taken:
            x.data.memset(0x5A, x.nbytes)
        cupy.cuda.Device().synchronize()
        for _ in range(2):
            graph.launch(stream=stream)
        out, lse, windowed = fetch(stream, *results, given)
        assert all((x.get() == 0x5A).all() for x in taken)
        assert_same(backend, (out, lse), compute(backend, *host, causal=True), "causal")
        assert_same(backend, (windowed,) * 2, (compute(backend, *host, window=(100, 30))[0],) * 2, "window")
        assert_right(out[:1], lse[:1], *(x[:1] for x in host), causal=True)


# As many sequences, in the same 900 rows of q and 1000 of k.
REPLAYS = (
    Lengths((300, 300, 150, 150), (100, 100, 400, 400)),
    Lengths((900, 0, 0, 0), (0, 0, 0, 1000)),
    Lengths((0, 0, 0, 900), (0, 0, 0, 1000)),
    Lengths((1, 200, 5, 0), (1, 300, 7, 9), spare_q=694, spare_k=683),
    Lengths((0, 0, 0, 0), spare_q=900, spare_k=1000),
    Lengths((193, 65, 385, 257), (129, 81, 513, 277)),
)


@pytest.mark.parametrize("length_dtype", ["int32", "int64"])
def test_graph_with_new_lengths(cupy, backend, length_dtype):
    """Packed, captured once, replayed with other values and lengths in the same arrays."""
    first = REPLAYS[0]
    arrays = placed(backend, packed_inputs(DTYPE, first))
    ends = placed(backend, [x.astype(length_dtype) for x in first.arrays()[0]])
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier("sm90"), stream:
        cuflash.attention_varlen(*arrays, *ends, causal=True, return_lse=True)
        stream.begin_capture()
        results = cuflash.attention_varlen(*arrays, *ends, causal=True, return_lse=True)
        graph = stream.end_capture()
    for seed, lengths in enumerate((*REPLAYS, first)):
        host = packed_inputs(DTYPE, lengths, seed=30 + seed)
        new_ends = [x.astype(length_dtype) for x in lengths.arrays()[0]]
        for x, y in zip((*arrays, *ends), (*host, *new_ends), strict=True):
            overwrite(x, y)
        for x in results:
            x.data.memset(0xFF, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        result = fetch(stream, *results)
        assert_right_varlen(*result, *host, lengths, causal=True)
        assert_same(backend, result, compute_varlen(backend, *host, lengths, causal=True), str(lengths))


@pytest.mark.parametrize("heads", ["64", "128", "256"])
@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_two_hundred_runs(cupy, backend, heads, kind):
    """The same bits, whichever block takes a tile, while other blocks come and go on another stream."""
    if kind == "causal":
        batch = enough(-(-400 // config_of(heads).block_m), 4)
        host = inputs(DTYPE, batch=batch, seqlen_q=400, **HEADS[heads])
        arrays = placed(backend, host)
        expected = compute(backend, *host, causal=True)
        call = cuflash.attention
    else:
        lengths = PACKED["more than there are blocks"]
        host = packed_inputs(DTYPE, lengths, **HEADS[heads])
        arrays = placed(backend, (*host, *lengths.arrays()[0]))
        expected = compute_varlen(backend, *host, lengths, causal=True)
        call = cuflash.attention_varlen
    rng, noise = np.random.default_rng(0), cupy.cuda.Stream(non_blocking=True)
    expected = [x.tobytes() for x in expected]
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier("sm90"):
        for run in range(200):
            with noise:
                spin(float(rng.uniform(0.01, 0.1)), int(rng.integers(1, 400)))
            with stream:
                result = call(*arrays, causal=True, return_lse=True)
            assert [x.tobytes() for x in fetch(stream, *result)] == expected, f"run {run}"


# ------------------------------------------------------------------------------------------------------------
# Gradients


def test_gradients_of_a_long_head_dim_come_from_two_kernels(backend, monkeypatch):
    host = inputs(DTYPE, seqlen_q=200, seqlen_k=300, head_dim=136)
    dout = dout_of(host[0], host[2])
    q, k, v, given = placed(backend, (*host, dout))
    with fresh_process_state(monkeypatch), config.force_tier(None):
        out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
        gradients = pullback(given)
        assert {key[0] for key in jit._loaded} == {"fwd_sm90", "bwd_delta", "bwd_dkv_sm90", "bwd_dq_sm90"}
    assert_right_gradients(Gradients(*map(backend.download, gradients)), dout, *host, causal=True)
    assert backend.download(out).dtype == DTYPES[DTYPE]


@pytest.mark.parametrize("heads", ["64", "96", "128"])
@pytest.mark.parametrize("seqlens", [(130, 130), (700, 300), (300, 700), (2100, 2200)], ids=str)
@pytest.mark.parametrize("mask", [dict(causal=True), dict(window=(100, 30)), dict(window=(None, 70))], ids=str)
def test_heads_that_begin_at_other_queries(backend, monkeypatch, heads, seqlens, mask):
    """Deterministic gradients where the L2 cache holds two heads: all but the last take their key tiles from the last one on."""
    (seqlen_q, seqlen_k), sizes = seqlens, HEADS[heads]
    group = 1 if seqlen_q > 2000 else 2
    host = inputs(DTYPE, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=5 * group, heads_k=5, **sizes)
    held = group * seqlen_q * (2 * 2 + 4) * sizes["head_dim"]
    device = dataclasses.replace(launch.device_of(0), l2_bytes=4 * held)
    with fresh_process_state(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(launch, "device_of", lambda device_id: device)
        first, again = (check_backward(backend, dout_of(host[0], host[2]), *host, **mask, deterministic=True) for _ in range(2))
        assert [int(dict(key[1])["ASCENDS"]) for key in jit._loaded if key[0] == "bwd_sm90"] == [1]
    assert_same(backend, again, first, "again")
