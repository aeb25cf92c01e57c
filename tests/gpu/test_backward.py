"""Gradients on every backend, judged by the oracle: named cases, tile edges, head dims, layouts, drawn cases."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    FEW,
    PLAIN,
    Gradients,
    Layout,
    along_channel,
    assert_right_gradients,
    assert_same,
    backward,
    check_backward,
    compute,
    dlse_of,
    dout_of,
    inputs,
    is_taken,
    normal,
    on_pairs,
    place,
    rising,
)

import cuflash

# ------------------------------------------------------------------------------------------------------------
# Named cases: name -> (sizes, options, what is done to q, k and v)


CASES = {
    "plain": ({}, {}, None),
    "one query, one key": (dict(seqlen_q=1), {}, None),
    "one query": (dict(seqlen_q=1, seqlen_k=257), {}, None),
    "17 queries, 300 keys": (dict(seqlen_q=17, seqlen_k=300), {}, None),
    "one key": (dict(seqlen_q=70, seqlen_k=1), {}, None),
    "causal": ({}, dict(causal=True), None),
    "causal, three tiles": (dict(batch=1, seqlen_q=257), dict(causal=True), None),
    "causal, more keys": (dict(seqlen_q=65, seqlen_k=190), dict(causal=True), None),
    "causal, fewer keys": (dict(seqlen_q=190, seqlen_k=65), dict(causal=True), None),
    "causal, 3 keys for 256 queries": (dict(seqlen_q=256, seqlen_k=3), dict(causal=True), None),
    "causal, 2 keys for 5 queries": (dict(seqlen_q=5, seqlen_k=2), dict(causal=True), None),
    "window on both sides": (dict(seqlen_q=200), dict(window=(20, 10)), None),
    "window of the diagonal": ({}, dict(window=(0, 0)), None),
    "window to the left": (dict(seqlen_q=100, seqlen_k=200), dict(window=(33, None)), None),
    "window to the right": (dict(seqlen_q=100, seqlen_k=200), dict(window=(None, 7)), None),
    "window that leaves rows empty": (dict(seqlen_q=260, seqlen_k=70), dict(window=(3, 3)), None),
    "window that leaves keys unseen": (dict(seqlen_q=64, seqlen_k=260), dict(window=(30, 30)), None),
    "causal window": (dict(batch=1, seqlen_q=270), dict(causal=True, window=(64, 5)), None),
    "softcap": ({}, dict(softcap=5.0), None),
    "softcap, causal, window": (dict(seqlen_q=200), dict(softcap=1.5, causal=True, window=(100, 0)), None),
    "softcap that flattens all": ({}, dict(softcap=1e-3), None),
    "softcap that is none": ({}, dict(softcap=1e6), None),
    "softcap of logits near 5000": ({}, dict(softcap=50.0), along_channel(200, 200)),
    "scale 0": ({}, dict(softmax_scale=0.0, causal=True), None),
    "scale -0.125": ({}, dict(softmax_scale=-0.125, causal=True), None),
    "scale 1e-30": ({}, dict(softmax_scale=1e-30, causal=True), None),
    "scale 1": ({}, dict(softmax_scale=1.0), None),
    "logits near -700": ({}, {}, along_channel(10, -560)),
    "logits near 700": ({}, dict(causal=True), along_channel(10, 560)),
    "logits that rise": (dict(seqlen_q=65, seqlen_k=300), {}, rising(0.05)),
    "logits that fall": (dict(seqlen_q=65, seqlen_k=300), dict(causal=True), rising(-0.05)),
    "multi-query": (dict(heads_q=8, heads_k=1), dict(causal=True), None),
    "groups of 3": (dict(heads_q=6, heads_k=2, seqlen_q=70, seqlen_k=90), dict(causal=True), None),
    "groups of 5": (dict(heads_q=10, heads_k=2, seqlen_q=33, seqlen_k=90), {}, None),
    "groups of 7": (dict(heads_q=14, heads_k=2, seqlen_q=4, seqlen_k=90), dict(causal=True), None),
    "groups of 13": (dict(heads_q=13, heads_k=1, seqlen_q=2, seqlen_k=33), {}, None),
}
OTHERS = ("simt-float16", "simt-bfloat16", "cpu-float16", "cpu-bfloat16", "cpu-float64")


def check_case(backend, dtype, sizes, options, edit=None):
    """Twice: into memory of cuflash's, and with a gradient of lse into arrays of ours."""
    q, k, v = inputs(dtype, **sizes)
    if edit:
        edit(q, k, v)
    dout = dout_of(q, v)
    first = check_backward(backend, dout, q, k, v, **options)
    backend.wash()
    check_backward(backend, dout, q, k, v, dlse=dlse_of(q), into=PLAIN, **options)
    again = backward(backend, dout, q, k, v, **options)
    assert_same(backend, again, first, "after NaN in shared memory", exact=("dk", "dv"))


@on_pairs(*FEW)
@pytest.mark.parametrize("case", CASES)
def test_named_case(backend, dtype, case):
    check_case(backend, dtype, *CASES[case])


@on_pairs(*OTHERS)
@pytest.mark.parametrize("case", ["plain", "causal, fewer keys", "softcap, causal, window", "groups of 3"])
def test_named_case_of_other_dtypes(backend, dtype, case):
    check_case(backend, dtype, *CASES[case])


# Sizes around tiles of 16, 32, 64 and 128, each with three partners.
EDGES = (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 193, 257)
PAIRS = [(EDGES[i], EDGES[(i * step + shift) % len(EDGES)]) for i in range(15) for step, shift in ((1, 0), (4, 5), (7, 3))]


# Rows after the last one are NaN in memory, inputs and results alike.
@on_pairs(*FEW)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(40, 9))], ids=["none", "causal", "window"])
def test_tile_edges(backend, dtype, options):
    q, k, v = inputs(dtype, batch=1, seqlen_q=EDGES[-1], heads_q=2, heads_k=1)
    dout, dlse = dout_of(q, v), dlse_of(q)
    for seqlen_q, seqlen_k in PAIRS:
        check_backward(
            backend,
            dout[:, :seqlen_q],
            q[:, :seqlen_q],
            k[:, :seqlen_k],
            v[:, :seqlen_k],
            dlse=dlse[..., :seqlen_q].copy(),
            layouts=Layout(pad=(0, 0, 0, 8)),
            into=Layout(pad=(0, 0, 0, 8)),
            **options,
        )


# ------------------------------------------------------------------------------------------------------------
# Head dims


def check_head_dim(backend, dtype, head_dim, head_dim_v, **options):
    q, k, v = inputs(dtype, batch=1, seqlen_q=70, seqlen_k=150, head_dim=head_dim, head_dim_v=head_dim_v)
    dout = dout_of(q, v)
    backend.wash()
    first = check_backward(backend, dout, q, k, v, dlse=dlse_of(q), **options)
    backend.wash()
    again = backward(backend, dout, q, k, v, dlse=dlse_of(q), into=PLAIN, **options)
    assert_same(backend, again, first, "after NaN in shared memory", exact=("dk", "dv"))


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
@pytest.mark.parametrize("head_dim", (1, 3, 16, 32, 40, 72, 96, 128, 160, 192, 200, 256))
def test_head_dim(backend, dtype, head_dim):
    check_head_dim(backend, dtype, head_dim, head_dim, causal=True)


@on_pairs("simt-float64", "sm80-bfloat16")
@pytest.mark.parametrize("head_dim", (33, 128, 256))
def test_head_dim_of_other_dtypes(backend, dtype, head_dim):
    check_head_dim(backend, dtype, head_dim, head_dim)


@on_pairs("cpu-float32", "simt-float32", "sm80-bfloat16")
@pytest.mark.parametrize(
    "head_dim, head_dim_v", [(1, 63), (64, 128), (40, 72), (192, 128), (33, 256), (256, 8), (100, 20)]
)
def test_head_dims_that_differ(backend, dtype, head_dim, head_dim_v):
    check_head_dim(backend, dtype, head_dim, head_dim_v, causal=True)


@on_pairs("sm90-float16", "sm90-bfloat16")
@pytest.mark.parametrize(
    "head_dim, head_dim_v",
    [(8, 8), (40, 40), (72, 72), (96, 96), (104, 104), (128, 128), (64, 128), (40, 72), (96, 24), (128, 8)],
)
@pytest.mark.parametrize("options", [{}, dict(causal=True)], ids=["none", "causal"])
def test_head_dims_that_tma_can_address(backend, dtype, head_dim, head_dim_v, options):
    check_head_dim(backend, dtype, head_dim, head_dim_v, **options)


@on_pairs("sm90-float16", "sm90-bfloat16")
@pytest.mark.parametrize("head_dim, head_dim_v", [(128, 128), (104, 72)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(softcap=5.0),
        dict(softmax_scale=-0.125),
        dict(causal=True),
        dict(window=(300, 40)),
        dict(window=(300, None)),
    ],
    ids=str,
)
@pytest.mark.parametrize("seqlen_q", [2048, 2049, 2100])
def test_many_queries(backend, dtype, head_dim, head_dim_v, options, seqlen_q):
    """At head_dim 128 a tile of them has 80 rows where all see all keys; else dq is added from shared memory."""
    sizes = dict(batch=1, seqlen_q=seqlen_q, seqlen_k=333, heads_q=4, heads_k=2)
    q, k, v = inputs(dtype, head_dim=head_dim, head_dim_v=head_dim_v, **sizes)
    check_backward(backend, dout_of(q, v), q, k, v, dlse=dlse_of(q), into=PLAIN, **options)


@on_pairs(*FEW)
def test_all_channels_enter_the_products(backend, dtype):
    """One channel of q and k that is not 0, then one of v and dout: each gradient has it, and no other."""
    head_dim = 128
    for channel in (0, 7, 8, 31, 32, 63, 64, 100, 127):
        q, k, v = inputs(dtype, batch=1, seqlen_q=16, seqlen_k=40, heads_q=1, heads_k=1, head_dim=head_dim)
        dout = dout_of(q, v)
        others = np.arange(head_dim) != channel
        for x in (q, k):
            x[..., others] = 0
        dq, dk, _ = check_backward(backend, dout, q, k, v, softmax_scale=1.0)
        for x in (dq, dk):
            assert (x[..., others] == 0).all() and (x[..., channel] != 0).all()
        q, k, v = inputs(dtype, batch=1, seqlen_q=16, seqlen_k=40, heads_q=1, heads_k=1, head_dim=head_dim)
        for x in (v, dout):
            x[..., others] = 0
        dq, dk, dv = check_backward(backend, dout, q, k, v, softmax_scale=0.1)
        assert (dv[..., others] == 0).all() and all((x != 0).any() for x in (dq, dk, dv[..., channel]))


# ------------------------------------------------------------------------------------------------------------
# Gradients by finite differences


def loss(backend, dout, dlse, q, k, v, **options):
    """sum(dout * out) + sum(dlse * lse) of each sequence of a batch, in float64."""
    arrays = [place(backend, x).array for x in (q, k, v)]
    out, lse = (backend.download(x) for x in backend.attention(*arrays, return_lse=True, **options))
    seen = np.isfinite(lse)
    return (dout * out).sum(axis=(1, 2, 3)) + np.where(seen, dlse * np.where(seen, lse, 0), 0).sum(axis=(1, 2))


@on_pairs("cpu-float64", "simt-float64")
@pytest.mark.parametrize(
    "options",
    [{}, dict(causal=True), dict(window=(3, 1)), dict(softcap=1.5, causal=True), dict(softmax_scale=-0.7)],
    ids=str,
)
@pytest.mark.parametrize("seqlens", [(7, 11), (9, 5)], ids=str)
def test_finite_differences(backend, dtype, options, seqlens):
    """Every element of q, k and v, each moved by a step in a sequence of its own."""
    seqlen_q, seqlen_k = seqlens
    arrays = inputs(
        dtype, batch=1, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=4, heads_k=2, head_dim=5, head_dim_v=3
    )
    q, _, v = arrays
    dout, dlse = dout_of(q, v), dlse_of(q)
    gradients = backward(backend, dout, *arrays, dlse=dlse, **options)
    step = 1e-5
    for which, gradient in enumerate(gradients):
        moved = [np.repeat(x, gradient.size, axis=0) for x in arrays]
        at = moved[which]
        change = (step * np.eye(gradient.size)).reshape(gradient.size, *gradient.shape[1:])
        slopes = np.zeros(gradient.size)
        for sign in (1, -1):
            moved[which] = at + sign * change
            slopes += sign * loss(backend, dout, dlse, *moved, **options) / (2 * step)
        slopes = slopes.reshape(gradient.shape)
        np.testing.assert_allclose(gradient, slopes, rtol=1e-6, atol=1e-6, err_msg=Gradients._fields[which])


# ------------------------------------------------------------------------------------------------------------
# The gradient of lse


@on_pairs(*FEW)
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(30, 5), softmax_scale=0.3)], ids=str)
@pytest.mark.parametrize("seqlens", [(70, 130), (130, 70)], ids=str)
def test_gradient_of_lse_alone(backend, dtype, options, seqlens):
    """dout 0, dlse 1: dq is the mean key, dk the mean query, in weights, and dv is 0."""
    q, k, v = inputs(dtype, seqlen_q=seqlens[0], seqlen_k=seqlens[1])
    dout, dlse = np.zeros_like(q), np.ones_like(dlse_of(q))
    dq, dk, dv = check_backward(backend, dout, q, k, v, dlse=dlse, **options)
    assert (dv == 0).all() and (dk != 0).any() and (dq != 0).any()


@on_pairs(*FEW)
def test_no_gradient_of_lse_is_one_of_zeros(backend, dtype):
    q, k, v = inputs(dtype, seqlen_q=70)
    dout = dout_of(q, v)
    without = backward(backend, dout, q, k, v, causal=True, deterministic=True)
    zeros = backward(backend, dout, q, k, v, dlse=np.zeros_like(dlse_of(q)), causal=True, deterministic=True)
    assert_same(backend, zeros, without, "dlse of zeros")


# ------------------------------------------------------------------------------------------------------------
# Strides and addresses. deterministic=True, so that all three gradients must be the same to the bit.

LAYOUTS = {
    "heads before seqlen": Layout("bhsd"),
    "heads outermost": Layout("hsbd", pad=(8, 0, 8, 0)),
    "slice of wider rows": Layout(pad=(0, 0, 0, 128)),
    "backwards over all": Layout("bhsd", backwards="bsh"),
    "8 bytes off": Layout(base=8),
    "rows of D + 1": Layout(pad=(0, 0, 0, 1)),
    "rows of D + 4": Layout(pad=(0, 0, 0, 4)),
}


@on_pairs(*FEW)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(backend, dtype, layout):
    layout = LAYOUTS[layout]
    q, k, v = inputs(dtype, seqlen_q=90, seqlen_k=140)
    dout = dout_of(q, v)
    how = dict(causal=True, deterministic=True)
    plain = check_backward(backend, dout, q, k, v, **how)
    if is_taken(backend, dout, q, k, v, layouts=layout):
        assert_same(backend, backward(backend, dout, q, k, v, layouts=layout, **how), plain, "inputs")
    assert_same(backend, backward(backend, dout, q, k, v, into=layout, **how), plain, "results")


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
def test_one_array_of_another_layout(backend, dtype):
    """Each input and result alone off by some bytes, or with its heads outside."""
    q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=90)
    dout = dout_of(q, v)
    how = dict(deterministic=True)
    plain = check_backward(backend, dout, q, k, v, **how)
    for layout in (Layout(base=4), Layout("bhsd")):
        for name in ("dout", "q", "k", "v", "out"):
            result = backward(backend, dout, q, k, v, layouts={name: layout}, **how)
            assert_same(backend, result, plain, f"{name}, {layout}")
        for name in Gradients._fields:
            result = backward(backend, dout, q, k, v, into={name: layout}, **how)
            assert_same(backend, result, plain, f"{name}, {layout}")


@on_pairs("simt-float16", "sm80-float16")
def test_addresses_off_by_an_element(backend, dtype):
    q, k, v = inputs(dtype, seqlen_q=70, seqlen_k=90)
    dout = dout_of(q, v)
    plain = check_backward(backend, dout, q, k, v, deterministic=True)
    odd = Layout(base=2)
    assert_same(backend, backward(backend, dout, q, k, v, layouts=odd, into=odd, deterministic=True), plain, "2 bytes off")


@on_pairs(*FEW)
@pytest.mark.parametrize("expanded", ["b", "h", "s", "bsh"])
def test_expanded_axes(backend, dtype, expanded):
    """Stride 0 in k and v, and in dout, as the gradients of sums and means have it."""
    q, k, v = inputs(dtype, batch=3, seqlen_q=70, seqlen_k=90)
    dout = dout_of(q, v)
    repeated = []
    for x in (dout, k, v):
        shape = x.shape
        for name in expanded:
            x = x.take([0], "bsh".index(name))
        repeated.append(np.broadcast_to(x, shape).copy())
    dout, k, v = repeated
    how = dict(causal=True, deterministic=True)
    plain = check_backward(backend, dout, q, k, v, **how)
    layout = Layout(expanded=expanded)
    for names in (("dout",), ("k", "v"), ("dout", "k", "v")):
        result = backward(backend, dout, q, k, v, layouts=dict.fromkeys(names, layout), **how)
        assert_same(backend, result, plain, f"{expanded}, {names}")


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
def test_three_axes_are_a_batch_of_one(backend, dtype):
    q, k, v = inputs(dtype, batch=1, seqlen_q=70)
    dout, dlse = dout_of(q, v), dlse_of(q)
    out, lse = compute(backend, q, k, v, causal=True)
    plain = check_backward(backend, dout, q, k, v, dlse=dlse, causal=True, deterministic=True)
    flat = [place(backend, x[0]).array for x in (dout, q, k, v, out, lse)]
    result = backend.call(
        cuflash.attention_backward,
        *flat,
        dlse=place(backend, dlse[0]).array,
        causal=True,
        deterministic=True,
    )
    assert_same(backend, Gradients(*(backend.download(x)[None] for x in result)), plain, "3-d")


# ------------------------------------------------------------------------------------------------------------
# Invariances


@on_pairs(*FEW)
def test_a_sequence_is_the_same_alone_and_in_a_batch(backend, dtype):
    q, k, v = inputs(dtype, batch=5, seqlen_q=130, seqlen_k=200)
    dout = dout_of(q, v)
    together = check_backward(backend, dout, q, k, v, causal=True, deterministic=True)
    for b in (0, 3, 4):
        one = [x[b : b + 1] for x in (dout, q, k, v)]
        expected = Gradients(*(x[b : b + 1] for x in together))
        for deterministic in (True, False):
            alone = backward(backend, *one, causal=True, deterministic=deterministic)
            exact = Gradients._fields if deterministic else ("dk", "dv")
            assert_same(backend, alone, expected, f"sequence {b} alone", exact=exact)


@on_pairs(*FEW)
@pytest.mark.parametrize("group", [2, 3, 5, 7])
def test_grouped_heads_are_the_sum_of_repeated_ones(backend, dtype, group):
    """dk and dv of a key head are those of its copies, one for each query head, added up; dq is the same."""
    for seqlen_q in (1, 70):
        q, k, v = inputs(dtype, batch=2, seqlen_q=seqlen_q, seqlen_k=90, heads_q=2 * group, heads_k=2)
        v += np.array([[0], [8]]).astype(v.dtype)  # a mix-up of key heads is no matter of rounding
        dout = dout_of(q, v)
        grouped = check_backward(backend, dout, q, k, v, causal=True, deterministic=True)
        repeated = backward(
            backend, dout, q, k.repeat(group, axis=2), v.repeat(group, axis=2), causal=True, deterministic=True
        )
        assert_same(backend, (grouped.dq,) * 2, (repeated.dq,) * 2, "dq")
        sums = [
            x.reshape(2, 90, 2, group, -1).astype(np.float64).sum(axis=3).astype(DTYPES[dtype])
            for x in (repeated.dk, repeated.dv)
        ]
        if dtype in ("float32", "float64"):  # 16 bits round each copy: no better than the oracle's word on it
            assert_same(backend, Gradients(grouped.dq, *sums), grouped, "sums", exact=("dq",))


@on_pairs(*FEW)
def test_options_of_one_call_do_not_stay_for_the_next(backend, dtype):
    """Same shapes, one option changed at a time and changed back: nothing may be left out of a key."""
    q, k, v = inputs(dtype, seqlen_q=50)
    dout, dlse = dout_of(q, v), dlse_of(q)
    for name, values in {
        "softcap": (0.0, 2.0, 0.5, 2.0, 0.0),
        "softmax_scale": (None, 0.5, 0.25, -0.5, 0.0, None),
        "window": (None, (3, 0), (3, 1), (5, 1), (None, 1), (3, None), (3, 0), None),
        "causal": (False, True, False),
        "deterministic": (False, True, False),
        "dlse": (None, dlse, -dlse, None),
    }.items():
        for value in values:
            check_backward(backend, dout, q, k, v, **{name: value})


# ------------------------------------------------------------------------------------------------------------
# Nothing

EMPTY = {
    "batch": dict(batch=0),
    "queries": dict(seqlen_q=0),
    "keys": dict(seqlen_k=0),
    "heads": dict(heads_q=0, heads_k=0),
    "query heads": dict(heads_q=0),
    "queries and keys": dict(seqlen_q=0, seqlen_k=0),
}


@on_pairs(*FEW)
@pytest.mark.parametrize("case", EMPTY)
def test_nothing(backend, dtype, case):
    """Of no queries, or none that sees a key, dk and dv are zeros; of no keys dq is."""
    q, k, v = inputs(dtype, **dict(seqlen_q=5, seqlen_k=70, head_dim=8, head_dim_v=6) | EMPTY[case])
    if backend.tier == "sm90":  # TMA takes whole 16 bytes of a row
        v = np.zeros((*v.shape[:3], 8), v.dtype)
    for into in (None, Layout(pad=(0, 0, 0, 8))):
        for dlse in (None, dlse_of(q)):
            gradients = backward(backend, dout_of(q, v), q, k, v, dlse=dlse, into=into, causal=True)
            assert all((x == 0).all() for x in gradients)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
@pytest.mark.parametrize("batch, heads", [(65536, 1), (1, 65536), (40001, 2)])
def test_more_than_65535(backend, dtype, batch, heads):
    """With one key its weight is 1: dv is dout, and the logit changes nothing but lse."""
    shape = (batch, 1, heads, 16)
    q, k, v, dout = (normal(shape, dtype, seed) for seed in range(4))
    dlse = np.ones((batch, heads, 1), np.float32)
    dq, dk, dv = backward(backend, dout, q, k, v, dlse=dlse)
    # dS is dlse, and dout * v - dout * out, which is 0 but for rounding.
    for x, expected in ((dv, dout), (dq, k / 4), (dk, q / 4)):
        np.testing.assert_allclose(x.astype(np.float64), expected.astype(np.float64), rtol=2e-3, atol=3e-4)


# ------------------------------------------------------------------------------------------------------------
# Drawn problems

# Head dims and alignments that are drawn from: few, since each is a kernel to compile.
DRAWN_VARIANTS = ((64, 64, 16), (72, 40, 8))
LENGTHS = st.sampled_from((0, 1, *EDGES[:-2])) | st.integers(0, 200)
SIDES = st.none() | st.integers(0, 20) | st.sampled_from((0, 63, 64, 65, 128, 2**31 - 1))


@st.composite
def layouts(draw, alignment, itemsize, head_dim):
    """A layout whose every address is a multiple of `alignment` bytes, and of the element."""
    step = max(1, alignment // itemsize)
    return Layout(
        order="".join(draw(st.permutations("bsh"))) + "d",
        pad=(*(step * draw(st.integers(0, 3)) for _ in range(3)), -head_dim % step),
        base=max(alignment, itemsize) * draw(st.integers(0, 4)),
        backwards="".join(draw(st.sets(st.sampled_from("bsh")))),
    )


@st.composite
def problems(draw, itemsize):
    head_dim, head_dim_v, alignment = draw(st.sampled_from(DRAWN_VARIANTS))
    sizes = dict(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(LENGTHS),
        seqlen_k=draw(LENGTHS),
        heads_k=(heads_k := draw(st.integers(1, 2))),
        heads_q=heads_k * draw(st.integers(1, 3)),
        head_dim=head_dim,
        head_dim_v=head_dim_v,
    )
    how = dict(
        causal=draw(st.booleans()),
        window=draw(st.none() | st.tuples(SIDES, SIDES)),
        softmax_scale=draw(st.none() | st.sampled_from((0.05, 1.0))),
        deterministic=draw(st.booleans()),
    )
    widths = dict(dout=head_dim_v, q=head_dim, k=head_dim, v=head_dim_v, out=head_dim_v)
    how["layouts"] = {name: draw(layouts(alignment, itemsize, width)) for name, width in widths.items()}
    if draw(st.booleans()):
        widths = dict(dq=head_dim, dk=head_dim, dv=head_dim_v)
        how["into"] = {name: draw(layouts(alignment, itemsize, width)) for name, width in widths.items()}
    return sizes, how, draw(st.booleans()), draw(st.integers(0, 1000))


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
def test_drawn_problem(backend, dtype):
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(problem=problems(DTYPES[dtype].itemsize))
    def holds(problem):
        sizes, how, with_dlse, seed = problem
        q, k, v = inputs(dtype, **sizes, seed=seed)
        check_backward(backend, dout_of(q, v, seed), q, k, v, dlse=dlse_of(q, seed) if with_dlse else None, **how)

    holds()


# ------------------------------------------------------------------------------------------------------------
# attention_vjp


@on_pairs(*FEW)
def test_pullback_is_the_backward_of_the_same_call(backend, dtype):
    q, k, v = inputs(dtype, seqlen_q=70)
    dout, dlse = dout_of(q, v), dlse_of(q)
    options = dict(causal=True, softcap=3.0, softmax_scale=0.2)
    expected = compute(backend, q, k, v, **options)
    arrays = [place(backend, x).array for x in (q, k, v)]
    dout_there, dlse_there = place(backend, dout).array, place(backend, dlse).array
    out, pullback = backend.call(cuflash.attention_vjp, *arrays, **options)
    assert_same(backend, (backend.download(out),) * 2, (expected[0],) * 2, "out")
    for of_lse, named in ((None, {}), (dlse, dict(dlse=dlse_there))):
        result = Gradients(*(backend.download(x) for x in backend.call(pullback, dout_there, **named)))
        assert_right_gradients(result, dout, q, k, v, dlse=of_lse, **options)
    out, lse, pullback = backend.call(cuflash.attention_vjp, *arrays, return_lse=True, **options)
    assert_same(backend, (backend.download(out), backend.download(lse)), expected, "with lse")
    result = Gradients(*(backend.download(x) for x in backend.call(pullback, dout_there, dlse=dlse_there)))
    assert_right_gradients(result, dout, q, k, v, dlse=dlse, **options)
