"""The forward pass on every backend, judged by the oracle: named cases, tile edges, drawn cases, and more."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    EDGES,
    Layout,
    along_channel,
    assert_right,
    assert_same,
    check,
    compute,
    fitting,
    inputs,
    on,
    place,
    rising,
)

# ------------------------------------------------------------------------------------------------------------
# Named cases: name -> (sizes, options, what is done to q, k and v)


def half_silent(q, k, v):
    """Only the upper half of the channels says anything: without it the result is the mean of V."""
    half = q.shape[3] // 2
    q[..., :half], k[..., :half] = 0, 0


def large_values(q, k, v):
    v *= v.dtype.type(4000)  # near the end of float16


CASES = {
    "plain": ({}, {}, None),
    "one query, one key": (dict(seqlen_q=1), {}, None),
    "one query": (dict(seqlen_q=1, seqlen_k=300), {}, None),
    "one key": (dict(seqlen_q=70, seqlen_k=1), {}, None),
    "causal": ({}, dict(causal=True), None),
    "causal, more keys": (dict(seqlen_q=65, seqlen_k=190), dict(causal=True), None),
    "causal, fewer keys": (dict(seqlen_q=190, seqlen_k=65), dict(causal=True), None),
    "causal, 3 keys for 256 queries": (dict(seqlen_q=256, seqlen_k=3), dict(causal=True), None),
    "causal, 3 queries for 128 keys": (dict(seqlen_q=3, seqlen_k=128), dict(causal=True), None),
    "window on both sides": (dict(seqlen_q=200), dict(window=(20, 10)), None),
    "window to the left": (dict(seqlen_q=150, seqlen_k=260), dict(window=(33, None)), None),
    "window to the right": (dict(seqlen_q=150, seqlen_k=260), dict(window=(None, 7)), None),
    "window that leaves rows empty": (dict(seqlen_q=260, seqlen_k=70), dict(window=(3, 3)), None),
    "causal window": (dict(seqlen_q=300), dict(causal=True, window=(64, 5)), None),
    "a band of 10 keys among 640": (
        dict(seqlen_q=640, heads_q=1, heads_k=1, head_dim=32),
        dict(window=(9, 0)),
        None,
    ),
    "softcap": ({}, dict(softcap=5.0), None),
    "softcap, causal, window": (dict(seqlen_q=200), dict(softcap=1.5, causal=True, window=(100, 0)), None),
    "softcap that flattens all": ({}, dict(softcap=1e-3), None),
    "softcap that is none": ({}, dict(softcap=1e6), None),
    "softcap of logits near 5000": ({}, dict(softcap=50.0), along_channel(200, 200)),
    "softcap of logits near -10000": ({}, dict(softcap=50.0), along_channel(283, -283)),
    "scale 0": ({}, dict(softmax_scale=0.0, causal=True), None),
    "scale -0.125": ({}, dict(softmax_scale=-0.125, causal=True), None),
    "scale 1e-30": ({}, dict(softmax_scale=1e-30, causal=True), None),
    "scale 1": ({}, dict(softmax_scale=1.0), None),
    "scale 10000": ({}, dict(softmax_scale=1e4, causal=True), None),
    "logits near -70000": ({}, {}, along_channel(100, -5600)),
    "logits near 70000": ({}, dict(causal=True), along_channel(100, 5600)),
    "maximum that creeps up": (dict(seqlen_q=65, seqlen_k=700), {}, rising(0.02)),
    "maximum that jumps up": (dict(seqlen_q=65, seqlen_k=700), {}, rising(0.5)),
    "maximum at the first key": (dict(seqlen_q=65, seqlen_k=700), dict(causal=True), rising(-0.05)),
    "only the upper channels": (dict(head_dim=128), {}, half_silent),
    "only the upper channels of 256": (dict(head_dim=256), {}, half_silent),
    "values of thousands": ({}, {}, large_values),
    "multi-query": (dict(heads_q=8, heads_k=1), dict(causal=True), None),
    "groups of 7": (dict(heads_q=14, heads_k=2, seqlen_q=4, seqlen_k=90), dict(causal=True), None),
    "groups of 12": (dict(heads_q=12, heads_k=1, seqlen_q=2, seqlen_k=33), {}, None),
    "wider values": (dict(head_dim=64, head_dim_v=128), dict(causal=True), None),
    "narrower values": (dict(head_dim=192, head_dim_v=128), dict(causal=True), None),
    "much narrower values": (dict(head_dim=256, head_dim_v=8), {}, None),
    "much wider values": (dict(head_dim=8, head_dim_v=256), {}, None),
}


@on()
@pytest.mark.parametrize("case", CASES)
def test_named_case(backend, dtype, case):
    sizes, options, edit = CASES[case]
    q, k, v = inputs(dtype, **sizes)
    if edit:
        edit(q, k, v)
    first = check(backend, q, k, v, **options)
    backend.wash()
    assert_same(backend, compute(backend, q, k, v, **options), first, "the second run")


@on(dtypes=("float16", "float32"))
@pytest.mark.parametrize("seqlen", [2049, 4092])
def test_a_long_sequence(backend, dtype, seqlen):
    q, k, v = inputs(dtype, batch=1, seqlen_q=seqlen, heads_q=2, heads_k=1)
    result, lse = compute(backend, q, k, v, causal=True)
    for stop in (70, 1500, seqlen):  # rows up to `stop` are the attention over that many keys
        rows = slice(stop - 70, stop)
        assert_right(result[:, rows], lse[:, :, rows], q[:, rows], k[:, :stop], v[:, :stop], causal=True)


# Inputs are slices of these, so that a difference between two sizes is not one of values.
@on()
@pytest.mark.parametrize(
    "options", [{}, dict(causal=True), dict(window=(40, 9))], ids=["none", "causal", "window"]
)
def test_tile_edges(backend, dtype, options):
    """All pairs of lengths around the tiles, in memory where the rows after the last one are NaN."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=EDGES[-1], heads_q=2, heads_k=1)
    for seqlen_q in EDGES:
        for seqlen_k in EDGES:
            check(
                backend,
                q[:, :seqlen_q],
                k[:, :seqlen_k],
                v[:, :seqlen_k],
                Layout(pad=(0, 0, 0, 8)),
                **options,
            )


# ------------------------------------------------------------------------------------------------------------
# Head dims

ODD_HEAD_DIMS = (1, 3, 7, 20, 33, 63, 100, 127)
HEAD_DIMS = (8, 24, 40, 56, 72, 80, 96, 104, 112, 120, 160, 192, 224, 248)


def check_head_dim(backend, dtype, head_dim, head_dim_v):
    q, k, v = inputs(dtype, batch=1, seqlen_q=100, seqlen_k=150, head_dim=head_dim, head_dim_v=head_dim_v)
    layouts = fitting(backend, q, k, v)
    backend.wash()
    first = check(backend, q, k, v, layouts)
    for _ in range(3):
        backend.wash()
        assert_same(backend, compute(backend, q, k, v, layouts), first, "after NaN in shared memory")


@on(dtypes=("float16", "float32"))
@pytest.mark.parametrize("head_dim", HEAD_DIMS + ODD_HEAD_DIMS)
def test_head_dim(backend, dtype, head_dim):
    check_head_dim(backend, dtype, head_dim, head_dim)


@on(dtypes=("bfloat16", "float64"))
@pytest.mark.parametrize("head_dim", (1, 33, 72, 127, 128, 160, 256))
def test_head_dim_of_other_dtypes(backend, dtype, head_dim):
    check_head_dim(backend, dtype, head_dim, head_dim)


@on(dtypes=("bfloat16", "float32"))
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(1, 63), (40, 72), (100, 20), (33, 256), (224, 7), (96, 160)]
)
def test_head_dims_that_differ(backend, dtype, head_dim, head_dim_v):
    check_head_dim(backend, dtype, head_dim, head_dim_v)


@on(dtypes=("float16", "float32"))
def test_all_channels_enter_the_product(backend, dtype):
    """A head_dim of D with a single channel set is right for each channel of each group of 8."""
    for head_dim in (72, 128, 256):
        for channel in {0, 7, 8, 31, 32, 63, 64, head_dim // 2, head_dim - 9, head_dim - 1}:
            q, k, v = inputs(
                dtype,
                batch=1,
                seqlen_q=16,
                seqlen_k=40,
                heads_q=1,
                heads_k=1,
                head_dim=head_dim,
                head_dim_v=64,
            )
            keep = q[..., channel].copy(), k[..., channel].copy()
            q[...], k[...] = 0, 0
            q[..., channel], k[..., channel] = keep[0] * 8, keep[1]
            result, _ = check(backend, q, k, v, softmax_scale=1.0)
            assert (
                np.abs(result.astype(np.float64) - v.astype(np.float64).mean(axis=1, keepdims=True)).max()
                > 0.1
            )


# ------------------------------------------------------------------------------------------------------------
# First call and later ones


@on(dtypes=("float16", "float32"))
@pytest.mark.parametrize("seqlen", [130, 192, 4092])
def test_the_first_call_equals_the_tenth(backend, dtype, seqlen):
    q, k, v = inputs(
        dtype, batch=1, seqlen_q=seqlen if seqlen < 1000 else 70, seqlen_k=seqlen, heads_q=2, heads_k=1
    )
    backend.wash()
    first = compute(backend, q, k, v, causal=True)
    assert_right(*first, q, k, v, causal=True)
    for _ in range(9):
        again = compute(backend, q, k, v, causal=True)
    assert_same(backend, again, first, "the tenth call")


@on(dtypes=("float16", "float32"))
def test_options_of_one_call_do_not_stay_for_the_next(backend, dtype):
    """Same shapes, one option changed at a time and changed back: nothing may be left out of a key."""
    q, k, v = inputs(dtype, seqlen_q=90)
    for name, values in {
        "softcap": (0.0, 2.0, 0.5, 2.0, 0.0),
        "softmax_scale": (None, 0.5, 0.25, -0.5, 0.0, None),
        "window": (None, (3, 0), (3, 1), (5, 1), (None, 1), (3, None), (3, 0), None),
        "causal": (False, True, False),
    }.items():
        for value in values:
            check(backend, q, k, v, **{name: value})


@on(dtypes=("float16", "float32"))
def test_lse_is_optional_and_changes_nothing(backend, dtype):
    q, k, v = inputs(dtype)
    expected, _ = check(backend, q, k, v, causal=True)
    arrays = [place(backend, x).array for x in (q, k, v)]
    result = backend.attention(*arrays, causal=True)
    assert_same(backend, (backend.download(result),) * 2, (expected,) * 2, "without lse")


# ------------------------------------------------------------------------------------------------------------
# Invariances


@on()
def test_a_sequence_is_the_same_alone_and_in_a_batch(backend, dtype):
    q, k, v = inputs(dtype, batch=5, seqlen_q=130, seqlen_k=200)
    together = check(backend, q, k, v, causal=True)
    for b in (0, 3, 4):
        alone = compute(backend, q[b : b + 1], k[b : b + 1], v[b : b + 1], causal=True)
        assert_same(backend, alone, [x[b : b + 1] for x in together], f"sequence {b} alone")


@on()
@pytest.mark.parametrize("group", [2, 3, 5, 6, 7, 12, 13])
def test_grouped_heads_equal_repeated_ones(backend, dtype, group):
    for seqlen_q in (1, 4, 130):
        q, k, v = inputs(dtype, batch=2, seqlen_q=seqlen_q, seqlen_k=140, heads_q=2 * group, heads_k=2)
        v += np.array([[0], [8]]).astype(v.dtype)  # a mix-up of key heads is no matter of rounding
        grouped = check(backend, q, k, v, causal=True)
        repeated = compute(backend, q, k.repeat(group, axis=2), v.repeat(group, axis=2), causal=True)
        assert_same(backend, grouped, repeated, f"groups of {group}")


@on()
@pytest.mark.parametrize(
    "options",
    [{}, dict(softmax_scale=0.3), dict(softcap=2.0), dict(softmax_scale=-0.2)],
    ids=["plain", "scale", "cap", "neg"],
)
def test_lse_merges_two_halves_of_the_keys(backend, dtype, options):
    """lse is the natural logarithm: halves weighted by exp(lse) are the whole."""
    q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=200)
    parts = [
        compute(backend, q, k[:, half], v[:, half], **options) for half in (slice(0, 77), slice(77, None))
    ]
    outs = np.stack([out for out, _ in parts]).astype(np.float64)
    lses = np.stack([lse for _, lse in parts]).astype(np.float64)
    lse = np.logaddexp(*lses)
    weights = np.exp(lses - lse).transpose(0, 1, 3, 2)[..., None]
    whole = (weights * outs).sum(axis=0).astype(DTYPES[dtype])
    assert_right(whole, lse, q, k, v, **options)


@on(dtypes=("float16", "bfloat16", "float32"))
def test_a_row_depends_on_its_own_query_only(backend, dtype):
    """Other rows of the tile, NaN ones included, change nothing: what they hold is judged row by row."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=130, heads_q=2, heads_k=1)
    expected, expected_lse = check(backend, q, k, v, causal=True)
    rows = [0, 17, 64, 129]
    q[:, rows] = np.nan
    result, lse = check(backend, q, k, v, causal=True)
    assert np.isnan(result[:, rows].astype(np.float64)).all() and np.isnan(lse[..., rows]).all()


# ------------------------------------------------------------------------------------------------------------
# Drawn problems

# Head dims and alignments that are drawn from: few, since each is a kernel to compile.
DRAWN_VARIANTS = ((64, 64, 16), (128, 128, 16), (72, 40, 8), (33, 33, 2), (192, 128, 16), (8, 256, 4))
DRAWN_FOR_TMA = ((64, 64, 16), (192, 128, 16), (33, 72, 16))

LENGTHS = st.sampled_from((0, 1, *EDGES)) | st.integers(0, 220)
SIDES = st.none() | st.integers(0, 20) | st.sampled_from((0, 63, 64, 65, 128, 2**31 - 1))


@st.composite
def layouts(draw, alignment, itemsize, head_dim, may_be_backwards=True):
    """A layout whose every address is a multiple of `alignment` bytes, and of the element."""
    step = max(1, alignment // itemsize)
    return Layout(
        order="".join(draw(st.permutations("bsh"))) + "d",
        pad=(*(step * draw(st.integers(0, 3)) for _ in range(3)), -head_dim % step),
        base=max(alignment, itemsize) * draw(st.integers(0, 4)),
        backwards="".join(draw(st.sets(st.sampled_from("bsh")))) if may_be_backwards else "",
    )


@st.composite
def problems(draw, itemsize, for_tma):
    head_dim, head_dim_v, alignment = draw(st.sampled_from(DRAWN_FOR_TMA if for_tma else DRAWN_VARIANTS))
    group = draw(st.integers(1, 4))
    sizes = dict(
        batch=draw(st.integers(1, 3)),
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        heads_k=(heads_k := draw(st.integers(1, 3))),
        heads_q=heads_k * group,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    options = dict(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
        softmax_scale=draw(st.none() | st.sampled_from((0.0, -0.1, 0.05, 1.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 0.0, 3.0))),
    )
    places = [
        draw(layouts(alignment, itemsize, size, not for_tma)) for size in (head_dim, head_dim, head_dim_v)
    ]
    out = draw(layouts(alignment, itemsize, head_dim_v))
    out = out if draw(st.booleans()) else None
    return sizes, options, places, out, draw(st.integers(0, 1000))


@on()
def test_drawn_problem(backend, dtype):
    @settings(
        max_examples=60,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problem=problems(DTYPES[dtype].itemsize, backend.tier == "sm90"))
    def holds(problem):
        sizes, options, places, out, seed = problem
        check(backend, *inputs(dtype, **sizes, seed=seed), places, out, **options)

    holds()
