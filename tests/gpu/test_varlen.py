"""Packed sequences on every backend: lengths of all kinds, and the same bits as each sequence by itself."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    DTYPES,
    EDGES,
    FEW,
    PLAIN,
    Layout,
    Lengths,
    assert_right_varlen,
    assert_same,
    check_varlen,
    compute,
    compute_varlen,
    fitting,
    inputs,
    is_taken,
    normal,
    on_pairs,
    packed_inputs,
    place,
    place_lengths,
)

import cuflash

# name -> (lengths, sizes, options). Rows that take part in nothing are NaN, in memory where what surrounds
# arrays, cu_seqlens and seqused is poison.
CASES = {
    "one sequence": (Lengths((130,)), {}, {}),
    "two documents": (Lengths((3, 5)), {}, dict(causal=True)),
    "several": (Lengths((1, 65, 3, 128, 17)), {}, dict(causal=True)),
    "several, not causal": (Lengths((1, 65, 3, 128, 17)), {}, {}),
    "more keys": (Lengths((17, 64, 5), (100, 65, 130)), {}, dict(causal=True)),
    "fewer keys": (Lengths((100, 65, 130), (17, 64, 5)), {}, dict(causal=True)),
    "one query each": (Lengths((1, 1, 1, 1), (70, 1, 129, 5)), {}, dict(causal=True)),
    "one query at most, one without, groups of 3": (
        Lengths((1, 0, 1), (3, 0, 5)),
        dict(heads_q=9, heads_k=3),
        dict(causal=True, softmax_scale=1.0),
    ),
    "fewer tokens than sequences": (Lengths((0, 0, 0, 1)), dict(heads_q=21, heads_k=7, head_dim=120), {}),
    "no tokens": (Lengths((0, 0)), {}, {}),
    "no sequences": (Lengths(()), {}, {}),
    "no sequences, some rows": (Lengths((), spare_q=5, spare_k=3), {}, {}),
    "leading empty ones": (Lengths((0, 0, 65), (0, 1, 130)), {}, dict(causal=True)),
    "trailing empty ones": (Lengths((65, 0, 0), (130, 1, 0)), {}, dict(causal=True)),
    "empty ones in between": (Lengths((0, 30, 0, 0, 70, 0)), {}, {}),
    "no queries for some keys": (Lengths((3, 0, 2), (4, 7, 5)), {}, dict(causal=True)),
    "no keys for some queries": (Lengths((3, 70, 2), (4, 0, 5)), {}, dict(causal=True)),
    "no keys at all": (Lengths((3, 70), (0, 0)), {}, {}),
    "no queries at all": (Lengths((0, 0), (3, 70)), {}, {}),
    "rows after the last sequence": (Lengths((3, 4), spare_q=2, spare_k=2), {}, dict(causal=True)),
    "many rows after the last": (Lengths((3, 64), (70, 5), spare_q=300, spare_k=150), {}, {}),
    "only rows after the last": (Lengths((0, 0), spare_q=70, spare_k=3), {}, {}),
    "gaps between sequences": (
        Lengths((12, 8, 8, 12, 8, 12), used_q=(9, 8, 8, 12, 8, 12), used_k=(9, 8, 8, 12, 8, 12)),
        {},
        dict(causal=True),
    ),
    "used rows": (
        Lengths((70, 70, 70, 70), (140, 140, 140, 140), (70, 1, 0, 33), (65, 140, 17, 0), 3, 3),
        {},
        dict(causal=True),
    ),
    "used keys alone": (Lengths((5, 65, 9), (130, 130, 130), used_k=(64, 1, 129)), {}, {}),
    "used queries alone": (Lengths((130, 130, 130), (5, 65, 9), used_q=(64, 0, 129)), {}, dict(window=(9, 3))),
    "window": (Lengths((130, 20, 65), (65, 90, 65)), {}, dict(window=(20, 9))),
    "window to the left": (Lengths((130, 20, 65), (65, 90, 65)), {}, dict(window=(20, None))),
    "window to the right": (Lengths((130, 20, 65), (65, 90, 65)), {}, dict(window=(None, 9))),
    "softcap, scale": (Lengths((65, 20)), {}, dict(softcap=2.0, softmax_scale=0.4, causal=True)),
    "scale below 0": (Lengths((65, 20)), {}, dict(softmax_scale=-0.2)),
    "one long among many": (Lengths((300, *range(1, 40))), dict(heads_q=2, heads_k=1), dict(causal=True)),
    "one long behind many": (Lengths((*range(1, 40), 300)), dict(heads_q=2, heads_k=1), {}),
    "at tile edges": (Lengths(EDGES, EDGES[::-1]), dict(heads_q=2, heads_k=1), dict(causal=True)),
    "odd head dims": (Lengths((33, 70)), dict(head_dim=33, head_dim_v=20), dict(causal=True)),
    "wide": (Lengths((33, 70)), dict(head_dim=192, head_dim_v=128), dict(causal=True)),
    "groups of 7": (Lengths((33, 4), (70, 90)), dict(heads_q=14, heads_k=2), dict(causal=True)),
}


@on_pairs(*FEW)
@pytest.mark.parametrize("case", CASES)
def test_named_case(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    q, k, v = packed_inputs(dtype, lengths, **sizes)
    layouts = fitting(backend, q, k, v)
    first = check_varlen(backend, q, k, v, lengths, layouts, **options)
    backend.wash()
    wide = dataclasses.replace(lengths, dtype="int64")
    again = compute_varlen(backend, q, k, v, wide, layouts, out=PLAIN, **options)
    assert_same(backend, again, first, "int64 lengths, into an array of ours")


@on_pairs("simt-float16", "simt-bfloat16", "cpu-float16", "cpu-bfloat16", "cpu-float64")
@pytest.mark.parametrize("case", ["several", "used rows"])
def test_named_case_of_other_dtypes(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    check_varlen(backend, *packed_inputs(dtype, lengths, **sizes), lengths, **options)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
def test_lengths_of_each_type(backend, dtype):
    """cu_seqlens and seqused, int32 and int64 in every mixture, and every second element of a longer array."""
    lengths = CASES["used rows"][0]
    q, k, v = packed_inputs(dtype, lengths)
    expected = check_varlen(backend, q, k, v, lengths, causal=True)
    placed = [place(backend, x).array for x in (q, k, v)]
    arrays = [*lengths.arrays()[0], *lengths.arrays()[1].values()]
    for mixture in range(16):
        host = [x.astype("int64" if mixture >> i & 1 else "int32") for i, x in enumerate(arrays)]
        *ends, used_q, used_k = (place(backend, x).array for x in host)
        out, lse = backend.call(
            cuflash.attention_varlen,
            *placed,
            *ends,
            seqused_q=used_q,
            seqused_k=used_k,
            causal=True,
            return_lse=True,
        )
        assert_same(backend, (backend.download(out), backend.download(lse)), expected, f"mixture {mixture:04b}")


@on_pairs(*FEW)
def test_order_does_not_matter(backend, dtype):
    """Every order of three pairs of lengths, two of which are empty."""
    for pairs in itertools.permutations([(0, 0), (0, 1), (65, 130)]):
        lengths = Lengths(*zip(*pairs, strict=True))
        check_varlen(backend, *packed_inputs(dtype, lengths), lengths, causal=True)


# ------------------------------------------------------------------------------------------------------------
# The bits of a sequence are the same wherever it lies: alone, in a dense batch, packed, before unused rows.
# (On the CPU within rounding.)


MANY = Lengths((65, 1, 130, 64, 33), (65, 70, 130, 140, 33))


@on_pairs(*FEW)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(20, 9)), dict(softcap=2.0)], ids=str)
def test_packed_is_the_same_as_alone(backend, dtype, options):
    """To the bit, for the tiles are the same: up to a head_dim of 64 short packed sequences have their own."""
    q, k, v = packed_inputs(dtype, MANY, head_dim=80)
    out, lse = check_varlen(backend, q, k, v, MANY, **options)
    for rows, keys in zip(MANY.used("q"), MANY.used("k"), strict=True):
        dense = compute(backend, q[None, rows], k[None, keys], v[None, keys], **options)
        assert_same(backend, (out[None, rows], lse[None, :, rows]), dense, f"rows {rows}, dense")
        one = Lengths((rows.stop - rows.start,), (keys.stop - keys.start,))
        alone = compute_varlen(backend, q[rows], k[keys], v[keys], one, **options)
        assert_same(backend, (out[rows], lse[:, rows]), alone, f"rows {rows}, packed alone")


@on_pairs(*FEW)
def test_a_dense_batch_is_packed_sequences_of_one_length(backend, dtype):
    q, k, v = inputs(dtype, batch=3, seqlen_q=90, seqlen_k=130, head_dim=80)
    out, lse = compute(backend, q, k, v, causal=True)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (q, k, v)]
    lengths = Lengths((90,) * 3, (130,) * 3)
    packed = compute_varlen(backend, *flat, lengths, causal=True)
    expected = out.reshape(-1, *out.shape[2:]), lse.transpose(1, 0, 2).reshape(lse.shape[1], -1)
    assert_same(backend, packed, expected, "packed")


@on_pairs(*FEW)
def test_padding_is_the_same_as_none(backend, dtype):
    """The sequences in slots of 160 rows, NaN behind each."""
    q, k, v = packed_inputs(dtype, MANY)
    out, lse = check_varlen(backend, q, k, v, MANY, causal=True)
    padded = Lengths((160,) * 5, (160,) * 5, MANY.q, MANY.k)
    wide = [np.full((800, *x.shape[1:]), np.nan, x.dtype) for x in (q, k, v)]
    for x, y, side in zip((q, k, v), wide, "qkk", strict=True):
        for rows, there in zip(MANY.used(side), padded.used(side), strict=True):
            y[there] = x[rows]
    wide_out, wide_lse = check_varlen(backend, *wide, padded, causal=True)
    for rows, there in zip(MANY.used("q"), padded.used("q"), strict=True):
        assert_same(backend, (wide_out[there], wide_lse[:, there]), (out[rows], lse[:, rows]), f"rows {rows}")


@on_pairs(*FEW)
def test_documents_do_not_leak_into_each_other(backend, dtype):
    lengths = Lengths((3, 5, 70))
    q, k, v = packed_inputs(dtype, lengths)
    out, lse = check_varlen(backend, q, k, v, lengths)
    for change in (lambda x: x + x.dtype.type(100), lambda x: x * x.dtype.type(np.nan)):
        moved = [x.copy() for x in (q, k, v)]
        for x in moved:
            x[3:8] = change(x[3:8])
        other = compute_varlen(backend, *moved, lengths)
        for rows in (slice(0, 3), slice(8, 78)):
            assert_same(backend, (other[0][rows], other[1][:, rows]), (out[rows], lse[:, rows]), f"{rows}")


@on_pairs(*FEW)
@pytest.mark.parametrize("options", [{}, dict(causal=True)], ids=str)
def test_queries_of_the_next_document_change_no_bit(backend, dtype, options):
    """They may lie in the tile of the last rows of the one before: if their logits there rise from key tile to key tile, by
    more than a lagging maximum allows, it moves no maximum of those rows."""
    lengths = Lengths((70, 60), (700, 60))
    q, k, v = packed_inputs(dtype, lengths, heads_q=2, heads_k=1)
    q[..., 0] = 0
    k[:700, :, 0] = (np.abs(np.arange(700) - 350) - 175)[:, None]
    alone = compute_varlen(backend, q[:70], k[:700], v[:700], Lengths((70,), (700,)), **options)
    for scale in (0, 1, -1, 8, -8):
        q[70:, :, 0] = scale
        out, lse = check_varlen(backend, q, k, v, lengths, **options)
        assert_same(backend, (out[:70], lse[:, :70]), alone, f"queries of {scale} behind")


@on_pairs(*FEW)
@pytest.mark.parametrize("layout", [Layout("bhsd"), Layout(base=8, backwards="s"), Layout(pad=(0, 0, 8, 24))], ids=str)
def test_layout(backend, dtype, layout):
    q, k, v = packed_inputs(dtype, MANY)
    plain = check_varlen(backend, q, k, v, MANY, causal=True)
    if is_taken(backend, q, k, v, layouts=layout):
        assert_same(backend, compute_varlen(backend, q, k, v, MANY, layout, causal=True), plain, "q, k, v")
    assert_same(backend, compute_varlen(backend, q, k, v, MANY, out=layout, causal=True), plain, "out")


@on_pairs("cpu-float32", "simt-float32", "sm80-bfloat16", "sm90-bfloat16")
@pytest.mark.parametrize("lengths", [Lengths((5, 200)), Lengths((200, 5, 64)), Lengths((1, 1, 1))], ids=str)
def test_max_seqlen_is_a_hint(backend, dtype, lengths):
    """Right or too large it changes no bit; too small neither, where the lengths are on the device."""
    q, k, v = packed_inputs(dtype, lengths)
    plain = check_varlen(backend, q, k, v, lengths, causal=True)
    longest = max(lengths.q)
    for hints in ((longest, longest), (1000, 1000), (None, longest), (longest + 1, None)):
        named = dict(max_seqlen_q=hints[0], max_seqlen_k=hints[1])
        assert_same(backend, compute_varlen(backend, q, k, v, lengths, causal=True, **named), plain, str(hints))
    if backend.name != "cpu":
        for hints in ((1, 1), (64, 1000), (1000, 64)):
            named = dict(max_seqlen_q=hints[0], max_seqlen_k=hints[1])
            assert_same(backend, compute_varlen(backend, q, k, v, lengths, causal=True, **named), plain, str(hints))


# ------------------------------------------------------------------------------------------------------------
# Many sequences


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("count", [1023, 1024, 1025, 65537])
def test_many_sequences_of_length_one(backend, dtype, count):
    """Each row sees its own key: its value comes back."""
    q, k, v = (normal((count, 2, 16), dtype, seed) for seed in range(3))
    out, lse = compute_varlen(backend, q, k, v, Lengths((1,) * count), causal=True)
    assert (out == v).all()
    logits = (q.astype(np.float64) * k.astype(np.float64)).sum(axis=2).T / 4
    np.testing.assert_allclose(lse, logits, rtol=1e-5, atol=1e-5)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
def test_many_sequences_nearly_all_empty(backend, dtype):
    rows = np.zeros(5000, int)
    rows[[0, 1500, 1501, 4999]] = 1, 70, 2, 33
    for lengths in (Lengths(tuple(rows)), Lengths(tuple(rows), tuple(rows[::-1]))):
        q, k, v = packed_inputs(dtype, lengths)
        out, lse = compute_varlen(backend, q, k, v, lengths, causal=True)
        assert_right_varlen(out, lse, q, k, v, lengths.without_empty(), causal=True)


# ------------------------------------------------------------------------------------------------------------
# Lengths that do not describe the arrays

WRONG = {
    "decreasing": ([0, 50, 20, 90], None),
    "longer than the arrays": ([0, 50, 70, 1000], None),
    "far too long": ([0, 50, 2**31 - 1, 2**31 - 1], None),
    "decreasing by more than int32 holds": ([0, 2**31 - 1, -(2**31), 90], None),
    "negative": ([-30, 20, 50, 90], None),
    "not from 0": ([40, 50, 70, 90], None),
    "used more than there is": ([0, 50, 70, 90], [60, 1000, 2**31 - 1]),
    "used below 0": ([0, 50, 70, 90], [-1, -1000, 5]),
    "far below": ([-(2**31), -(2**31), 2**31 - 1, -5], None),
}


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_wrong_lengths_on_the_device_stay_inside(backend, dtype, wrong, which):
    """Nothing is copied to look at them: the result means nothing, but no byte around any array changes."""
    ends, used = WRONG[wrong]
    right = np.array([0, 50, 70, 90], np.int32)
    ends = np.array(ends, np.int64).astype(np.int32)
    q, k, v = (normal((90, heads, 64), dtype, seed) for seed, heads in enumerate((4, 2, 2)))
    placed = [place(backend, x) for x in (q, k, v)]
    placed += [place(backend, ends if which in (side, "both") else right) for side in "qk"]
    named = {}
    if used is not None:
        array = place(backend, np.array(used, np.int64).astype(np.int32))
        placed.append(array)
        named = {f"seqused_{side}": array.array for side in "qk" if which in (side, "both")}
    target = place(backend, np.zeros_like(q))
    for options in ({}, dict(causal=True), dict(window=(5, 3))):
        backend.call(
            cuflash.attention_varlen,
            *(x.array for x in placed[:5]),
            out=target.array,
            return_lse=True,
            **named,
            **options,
        )
        for x in (*placed, target):
            x.fetch()
    if wrong in ("used more than there is", "used below 0"):  # what is cut to the slot is right
        lengths = Lengths((50, 20, 20))
        limit = np.clip(used, 0, (50, 20, 20))
        cut = {f"used_{side}": tuple(map(int, limit)) for side in "qk" if f"seqused_{side}" in named}
        lengths = dataclasses.replace(lengths, **cut)
        out, lse = backend.call(cuflash.attention_varlen, *(x.array for x in placed[:5]), return_lse=True, **named)
        assert_right_varlen(backend.download(out), backend.download(lse), q, k, v, lengths)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("side", "qk")
def test_validate_names_wrong_lengths(backend, dtype, side):
    """With validate=True, and on the CPU always: the lengths are read, and a wrong one raises."""
    q, k, v = (normal((90, heads, 64), dtype, seed) for seed, heads in enumerate((4, 2, 2)))
    arrays = [place(backend, x).array for x in (q, k, v)]
    for name, (ends, used) in WRONG.items():
        right = {other: np.array([0, 50, 70, 90], np.int32) for other in "qk"}
        right[side] = np.array(ends, np.int64).astype(np.int32)
        placed = [place(backend, right[other]).array for other in "qk"]
        named = {}
        if used is not None:
            named = {f"seqused_{side}": place(backend, np.array(used, np.int64).astype(np.int32)).array}
        for validate in (True, False) if backend.name == "cpu" else (True,):
            with pytest.raises(ValueError, match=f"seqused_{side}" if used else f"cu_seqlens_{side}"):
                backend.call(cuflash.attention_varlen, *arrays, *placed, validate=validate, **named)
                pytest.fail(f"{name} is accepted")
    lengths = Lengths((50, 20, 20), spare_q=3, spare_k=3)
    q, k, v = packed_inputs(dtype, lengths)
    _, ends, _ = place_lengths(backend, lengths)
    arrays = [place(backend, x).array for x in (q, k, v)]
    result = backend.call(cuflash.attention_varlen, *arrays, *ends, return_lse=True, validate=True)
    assert_right_varlen(*(backend.download(x) for x in result), q, k, v, lengths)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
def test_arrays_of_lengths_are_checked(backend, dtype):
    """What needs no look at the values: shape, dtype, device."""
    lengths = Lengths((50, 20, 20))
    q, k, v = (place(backend, x).array for x in packed_inputs(dtype, lengths))
    right = np.array([0, 50, 70, 90], np.int32)
    there = place(backend, right).array
    for wrong, error in (
        (place(backend, right[:3].copy()).array, ValueError),
        (place(backend, right[:0].copy()).array, ValueError),
        (place(backend, right[:, None].copy()).array, ValueError),
        (place(backend, right.astype(np.float32)).array, TypeError),
        (place(backend, right.astype(np.int16)).array, TypeError),
        ([0, 50, 70, 90], TypeError),
        *(() if backend.name == "cpu" else ((right, (TypeError, ValueError)),)),
    ):
        with pytest.raises(error, match="cu_seqlens_q"):
            backend.call(cuflash.attention_varlen, q, k, v, wrong, there)
        with pytest.raises(error, match="cu_seqlens_k"):
            backend.call(cuflash.attention_varlen, q, k, v, there, wrong)
    three = place(backend, np.array([50, 20, 20], np.int32)).array
    for name in ("seqused_q", "seqused_k"):
        for wrong in (there, three[:2], place(backend, np.ones(3, np.float64)).array):
            with pytest.raises((TypeError, ValueError), match=name):
                backend.call(cuflash.attention_varlen, q, k, v, there, there, **{name: wrong})
    for name in ("max_seqlen_q", "max_seqlen_k"):
        for wrong in (-1, 2.5, "70"):
            with pytest.raises((TypeError, ValueError), match=name):
                backend.call(cuflash.attention_varlen, q, k, v, there, there, **{name: wrong})


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
def test_strided_lengths_are_right_or_named(backend, dtype):
    lengths = Lengths((50, 20, 20))
    q, k, v = packed_inputs(dtype, lengths)
    expected = compute_varlen(backend, q, k, v, lengths)
    arrays = [place(backend, x).array for x in (q, k, v)]
    ends = place(backend, np.array([0, -7, 50, -7, 70, -7, 90, -7], np.int32)).array[::2]
    try:
        result = backend.call(cuflash.attention_varlen, *arrays, ends, ends, return_lse=True)
    except ValueError as error:
        assert "cu_seqlens_q" in str(error)
    else:
        assert_same(backend, [backend.download(x) for x in result], expected, "every second element")


# ------------------------------------------------------------------------------------------------------------
# Drawn lengths


@st.composite
def lengths_drawn(draw):
    rows = st.sampled_from((0, 0, 1, *EDGES[:-2])) | st.integers(0, 70)
    count = draw(st.integers(0, 6))
    q, k = (tuple(draw(st.lists(rows, min_size=count, max_size=count))) for _ in range(2))
    used = [tuple(draw(st.integers(0, n)) for n in side) if draw(st.booleans()) else None for side in (q, k)]
    return Lengths(
        q, k, *used, draw(st.integers(0, 70)), draw(st.integers(0, 70)), draw(st.sampled_from(("int32", "int64")))
    )


@on_pairs(*FEW)
def test_drawn_lengths(backend, dtype):
    @settings(
        max_examples=40,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        lengths=lengths_drawn(),
        options=st.sampled_from(({}, dict(causal=True), dict(window=(20, 9)), dict(causal=True, window=(33, 0)))),
        heads=st.sampled_from(((2, 1), (2, 2), (3, 1))),
        into=st.booleans(),
    )
    def holds(lengths, options, heads, into):
        q, k, v = packed_inputs(dtype, lengths, heads_q=heads[0], heads_k=heads[1])
        check_varlen(backend, q, k, v, lengths, out=Layout(pad=(0, 0, 8, 8)) if into else None, **options)

    holds()


@on_pairs("simt-float32", "sm80-bfloat16", "sm90-bfloat16")
def test_a_long_sequence_among_many(backend, dtype):
    """Sampled rows of a skewed batch."""
    rng = np.random.default_rng(5)
    lengths = Lengths((4092, *map(int, rng.integers(16, 400, 16))))
    q, k, v = packed_inputs(dtype, lengths, heads_q=2, heads_k=1)
    out, lse = compute_varlen(backend, q, k, v, lengths, causal=True)
    for slot in lengths.slots("q"):
        for stop in {min(slot.start + 70, slot.stop), slot.stop}:
            rows = slice(max(slot.start, stop - 50), stop)
            one = Lengths((rows.stop - rows.start,), (stop - slot.start,))
            assert_right_varlen(
                out[rows], lse[:, rows], q[rows], k[slot.start : stop], v[slot.start : stop], one, causal=True
            )
    assert DTYPES[dtype] == out.dtype
