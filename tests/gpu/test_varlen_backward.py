"""Gradients of packed sequences on every backend: lengths of all kinds, and the bits of each sequence by itself."""

import dataclasses
import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import (
    FEW,
    MARKS,
    PLAIN,
    Gradients,
    Layout,
    Lengths,
    assert_right_gradients,
    assert_same,
    backward,
    check_backward,
    compute_varlen,
    dlse_of,
    dout_of,
    fitting,
    inputs,
    is_taken,
    normal,
    on_pairs,
    packed_inputs,
    place,
    place_lengths,
)
from test_varlen import CASES, MANY, WRONG, lengths_drawn

import cuflash
from cuflash import jit


def arrays_of(dtype, lengths, **sizes):
    """dout, q, k, v and dlse, NaN in rows that take part in nothing."""
    q, k, v = packed_inputs(dtype, lengths, **sizes)
    dout, dlse = dout_of(q, v), dlse_of(q)
    dout[lengths.unused("q")], dlse[:, lengths.unused("q")] = np.nan, np.nan
    return dout, q, k, v, dlse


@on_pairs(*FEW)
@pytest.mark.parametrize("case", CASES)
def test_named_case(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    *arrays, dlse = arrays_of(dtype, lengths, **sizes)
    layouts = fitting(backend, *arrays)
    state = compute_varlen(backend, *arrays[1:], lengths, layouts=layouts[1:], **options)
    options = options | {"layouts": dict(zip(("dout", "q", "k", "v"), layouts, strict=True)), "state": state}
    first = check_backward(backend, *arrays, lengths=lengths, **options)
    backend.wash()
    with_int64 = dataclasses.replace(lengths, dtype="int64")
    again = backward(backend, *arrays, lengths=with_int64, into=PLAIN, **options)
    assert_same(backend, again, first, "int64 lengths, into arrays of ours", exact=("dk", "dv"))
    check_backward(backend, *arrays, dlse=dlse, lengths=lengths, **options)


@on_pairs("simt-float16", "simt-bfloat16", "cpu-float16", "cpu-bfloat16", "cpu-float64")
@pytest.mark.parametrize("case", ["several", "used rows"])
def test_named_case_of_other_dtypes(backend, dtype, case):
    lengths, sizes, options = CASES[case]
    *arrays, dlse = arrays_of(dtype, lengths, **sizes)
    check_backward(backend, *arrays, dlse=dlse, lengths=lengths, deterministic=True, **options)


@on_pairs(*FEW)
def test_order_does_not_matter(backend, dtype):
    for deterministic in (False, True):
        for pairs in itertools.permutations([(0, 0), (0, 1), (65, 130)]):
            lengths = Lengths(*zip(*pairs, strict=True))
            *arrays, dlse = arrays_of(dtype, lengths)
            check_backward(backend, *arrays, dlse=dlse, lengths=lengths, causal=True, deterministic=deterministic)


@on_pairs(*FEW)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_no_queries_leave_zeros(backend, dtype, heads, causal):
    """dk and dv of a sequence without queries, or whose queries are not used, in memory that was NaN."""
    for lengths in (
        Lengths((3, 0, 2), (4, 7, 5)),
        Lengths((3, 9, 2), (4, 70, 5), used_q=(3, 0, 2)),
        Lengths((3, 9, 2), (4, 70, 5), used_k=(4, 0, 5)),
    ):
        *arrays, _ = arrays_of(dtype, lengths, heads_q=heads[0], heads_k=heads[1])
        _, dk, dv = check_backward(backend, *arrays, lengths=lengths, into=PLAIN, causal=causal)
        middle = lengths.slots("k")[1]
        assert (dk[middle] == 0).all() and (dv[middle] == 0).all() and (dv[:4] != 0).any()


# ------------------------------------------------------------------------------------------------------------
# The bits of a sequence are the same wherever it lies: dk and dv always, dq with deterministic=True, else
# within rounding. (On the CPU all within rounding.)


def assert_same_sequence(backend, got, expected, deterministic, what):
    exact = Gradients._fields if deterministic else ("dk", "dv")
    assert_same(backend, Gradients(*got), Gradients(*expected), what, exact=exact)


@on_pairs(*FEW)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [dict(causal=True), dict(window=(20, 9))], ids=str)
def test_packed_is_the_same_as_alone(backend, dtype, options, deterministic):
    """To the bit, for the tiles are the same, of the forward too: up to a head_dim of 64 short sequences have their own."""
    dout, q, k, v, dlse = arrays_of(dtype, MANY, head_dim=80)
    options = dict(options, deterministic=deterministic)
    dq, dk, dv = check_backward(backend, dout, q, k, v, dlse=dlse, lengths=MANY, **options)
    for rows, keys in zip(MANY.used("q"), MANY.used("k"), strict=True):
        part = dq[rows], dk[keys], dv[keys]
        own = dout[rows], q[rows], k[keys], v[keys]
        dense = backward(backend, *(x[None] for x in own), dlse=dlse[None, :, rows].copy(), **options)
        assert_same_sequence(backend, part, [x[0] for x in dense], deterministic, f"rows {rows}, dense")
        one = Lengths((rows.stop - rows.start,), (keys.stop - keys.start,))
        alone = backward(backend, *own, dlse=dlse[:, rows].copy(), lengths=one, **options)
        assert_same_sequence(backend, part, alone, deterministic, f"rows {rows}, packed alone")


@on_pairs(*FEW)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_dense_batch_is_packed_sequences_of_one_length(backend, dtype, deterministic):
    q, k, v = inputs(dtype, batch=3, seqlen_q=90, seqlen_k=130, head_dim=80)
    dout = dout_of(q, v)
    how = dict(causal=True, deterministic=deterministic)
    dense = backward(backend, dout, q, k, v, **how)
    flat = [x.reshape(-1, *x.shape[2:]) for x in (dout, q, k, v)]
    packed = backward(backend, *flat, lengths=Lengths((90,) * 3, (130,) * 3), **how)
    expected = [x.reshape(-1, *x.shape[2:]) for x in dense]
    assert_same_sequence(backend, packed, expected, deterministic, "packed")


@on_pairs(*FEW)
@pytest.mark.parametrize("deterministic", [False, True])
def test_padding_is_the_same_as_none(backend, dtype, deterministic):
    """The sequences in slots of 160 rows, NaN behind each in every array."""
    dout, q, k, v, dlse = arrays_of(dtype, MANY)
    how = dict(causal=True, deterministic=deterministic)
    plain = backward(backend, dout, q, k, v, dlse=dlse, lengths=MANY, **how)
    padded = Lengths((160,) * 5, (160,) * 5, MANY.q, MANY.k)
    wide = [np.full((800, *x.shape[1:]), np.nan, x.dtype) for x in (dout, q, k, v)]
    wide_dlse = np.full((dlse.shape[0], 800), np.nan, dlse.dtype)
    for x, y, side in zip((dout, q, k, v), wide, "qqkk", strict=True):
        for rows, there in zip(MANY.used(side), padded.used(side), strict=True):
            y[there] = x[rows]
    for rows, there in zip(MANY.used("q"), padded.used("q"), strict=True):
        wide_dlse[:, there] = dlse[:, rows]
    dq, dk, dv = check_backward(backend, *wide, dlse=wide_dlse, lengths=padded, **how)
    pairs = zip(*(lengths.used(side) for lengths in (MANY, padded) for side in "qk"), strict=True)
    for rows, keys, rows_there, keys_there in pairs:
        part, expected = (dq[rows_there], dk[keys_there], dv[keys_there]), (plain.dq[rows], plain.dk[keys], plain.dv[keys])
        assert_same_sequence(backend, part, expected, deterministic, f"rows {rows}")


@on_pairs(*FEW)
def test_documents_do_not_leak_into_each_other(backend, dtype):
    lengths = Lengths((3, 5, 70))
    dout, q, k, v, dlse = arrays_of(dtype, lengths)
    how = dict(lengths=lengths, deterministic=True)
    plain = check_backward(backend, dout, q, k, v, dlse=dlse, **how)
    for change in (lambda x: x + x.dtype.type(100), lambda x: x * x.dtype.type(np.nan)):
        moved = [x.copy() for x in (dout, q, k, v)]
        for x in moved:
            x[3:8] = change(x[3:8])
        other = backward(backend, *moved, dlse=dlse, **how)
        for rows in (slice(0, 3), slice(8, 78)):
            assert_same_sequence(backend, [x[rows] for x in other], [x[rows] for x in plain], True, f"{rows}")


@on_pairs(*FEW)
@pytest.mark.parametrize("layout", [Layout("bhsd"), Layout(base=8, backwards="s"), Layout(pad=(0, 0, 8, 24))], ids=str)
def test_layout(backend, dtype, layout):
    dout, q, k, v, dlse = arrays_of(dtype, MANY)
    how = dict(dlse=dlse, lengths=MANY, causal=True, deterministic=True)
    plain = check_backward(backend, dout, q, k, v, **how)
    if is_taken(backend, dout, q, k, v, layouts=layout):
        assert_same(backend, backward(backend, dout, q, k, v, layouts=layout, **how), plain, "inputs")
    assert_same(backend, backward(backend, dout, q, k, v, into=layout, **how), plain, "results")


@on_pairs("cpu-float32", "simt-float32", "sm80-bfloat16", "sm90-bfloat16")
def test_max_seqlen_is_a_hint(backend, dtype):
    lengths = Lengths((5, 200, 64))
    dout, q, k, v, dlse = arrays_of(dtype, lengths)
    how = dict(dlse=dlse, lengths=lengths, causal=True, deterministic=True)
    plain = check_backward(backend, dout, q, k, v, **how)
    hints = [(200, 200), (1000, 1000), (None, 200)] + ([] if backend.name == "cpu" else [(1, 1), (64, 1000), (1000, 64)])
    for hint_q, hint_k in hints:
        named = dict(max_seqlen_q=hint_q, max_seqlen_k=hint_k)
        assert_same(backend, backward(backend, dout, q, k, v, **how, **named), plain, f"{hint_q}, {hint_k}")


# ------------------------------------------------------------------------------------------------------------
# Many sequences


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("count", [1025, 65537])
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_sequences_of_length_one(backend, dtype, count, deterministic):
    """With one key its weight is 1: dv is dout, and the logit changes nothing but lse."""
    q, k, v, dout = (normal((count, 2, 16), dtype, seed) for seed in range(4))
    dlse = np.ones((2, count), np.float32)
    how = dict(lengths=Lengths((1,) * count), causal=True, deterministic=deterministic)
    dq, dk, dv = backward(backend, dout, q, k, v, dlse=dlse, **how)
    for x, expected in ((dv, dout), (dq, k / 4), (dk, q / 4)):
        np.testing.assert_allclose(x.astype(np.float64), expected.astype(np.float64), rtol=2e-3, atol=3e-4)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("deterministic", [False, True])
def test_many_sequences_nearly_all_empty(backend, dtype, deterministic):
    rows = np.zeros(5000, int)
    rows[[0, 1500, 1501, 4999]] = 1, 70, 2, 33
    for lengths in (Lengths(tuple(rows)), Lengths(tuple(rows), tuple(rows[::-1]))):
        *arrays, dlse = arrays_of(dtype, lengths)
        how = dict(dlse=dlse, causal=True)
        gradients = backward(backend, *arrays, lengths=lengths, deterministic=deterministic, **how)
        assert_right_gradients(gradients, *arrays, lengths=lengths.without_empty(), **how)


# ------------------------------------------------------------------------------------------------------------
# Lengths that do not describe the arrays


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("which", ["q", "k", "both"])
def test_wrong_lengths_on_the_device_stay_inside(backend, dtype, wrong, which):
    """The gradients mean nothing, but the call ends, and no byte around any array changes."""
    ends, used = WRONG[wrong]
    right = np.array([0, 50, 70, 90], np.int32)
    ends = np.array(ends, np.int64).astype(np.int32)
    q, k, v = (normal((90, heads, 64), dtype, seed) for seed, heads in enumerate((4, 2, 2)))
    lse = np.zeros((4, 90), np.float32)
    placed = [place(backend, x) for x in (dout_of(q, v), q, k, v, dout_of(q, v, 1), lse)]
    placed += [place(backend, ends if which in (side, "both") else right) for side in "qk"]
    named = {}
    if used is not None:
        placed.append(place(backend, np.array(used, np.int64).astype(np.int32)))
        named = {f"seqused_{side}": placed[-1].array for side in "qk" if which in (side, "both")}
    targets = dict(zip(Gradients._fields, (place(backend, np.zeros_like(x)) for x in (q, k, v)), strict=True))
    for options in (dict(causal=True), dict(window=(5, 3))):
        backend.call(
            cuflash.attention_varlen_backward,
            *(x.array for x in placed[:8]),
            **{name: x.array for name, x in targets.items()},
            **named,
            **options,
        )
        for x in (*placed, *targets.values()):
            x.fetch()


WATCHED = """
import sys
sys.path[:0] = sys.argv[2:]
import cupy, cuflash
import numpy as np
from cuflash import config
from test_varlen import WRONG

q, k = cupy.zeros((1000, 4, 64), "float16"), cupy.zeros((1000, 2, 64), "float16")
lse = cupy.zeros((4, 1000), "float32")
more = [[0, 1000, 0, 1000], [0, 1000, 1000, 0, 1000, 0, 0, 1000], [500, 0, 1000, 0]]
with config.force_tier(sys.argv[1]):
    for ends in (*(ends for ends, _ in WRONG.values()), *more):
        ends = cupy.asarray(np.array(ends, np.int64).astype(np.int32))
        right = cupy.asarray(np.linspace(0, 1000, len(ends)).astype(np.int32))
        for cu_q, cu_k in ((ends, ends), (ends, right), (right, ends)):
            for causal in (False, True):
                cuflash.attention_varlen_backward(
                    q, q, k, k, q, lse, cu_q, cu_k, causal=causal, deterministic=True)
            cupy.cuda.Device().synchronize()
print("ok")
"""


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["simt", "sm80", pytest.param("sm90", marks=MARKS["sm90"])])
def test_wrong_lengths_do_not_make_a_deterministic_call_wait_forever(tier):
    """Key tiles wait for their turn at each query tile: overlapping sequences count each other's turns."""
    folders = [str(jit.kernels_dir().parent), *(str(Path(__file__).resolve().parents[i]) for i in range(2))]
    done = subprocess.run(
        [sys.executable, "-c", WATCHED, tier, *folders], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "ok", f"exit status {done.returncode}: {done.stderr}"


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
def test_validate_names_wrong_lengths(backend, dtype):
    lengths = Lengths((50, 20, 20))
    q, k, v = packed_inputs(dtype, lengths)
    dout = dout_of(q, v)
    state = compute_varlen(backend, q, k, v, lengths)
    arrays = [place(backend, x).array for x in (dout, q, k, v, *state)]
    _, right, _ = place_lengths(backend, lengths)
    for name, (ends, used) in WRONG.items():
        if used is not None:
            continue
        wrong = place(backend, np.array(ends, np.int64).astype(np.int32)).array
        for side, both in (("q", (wrong, right[1])), ("k", (right[0], wrong))):
            with pytest.raises(ValueError, match=f"cu_seqlens_{side}"):
                backend.call(cuflash.attention_varlen_backward, *arrays, *both, validate=True)
                pytest.fail(f"{name} is accepted")
    result = backend.call(cuflash.attention_varlen_backward, *arrays, *right, validate=True)
    gradients = Gradients(*(backend.download(x) for x in result))
    assert_right_gradients(gradients, dout, q, k, v, lengths=lengths)


@on_pairs("cpu-float32", "simt-float32", "sm80-float16")
def test_arrays_of_another_call_are_named(backend, dtype):
    """out, lse, dout and dlse have the shapes of this call's results."""
    lengths = Lengths((50, 20, 20))
    q, k, v = packed_inputs(dtype, lengths)
    out, lse = compute_varlen(backend, q, k, v, lengths)
    host = dict(dout=dout_of(q, v), q=q, k=k, v=v, out=out, lse=lse)
    right = {name: place(backend, x).array for name, x in host.items()}
    _, ends, _ = place_lengths(backend, lengths)

    def call(dlse=None, **changed):
        arrays = (right | changed).values()
        return backend.call(cuflash.attention_varlen_backward, *arrays, *ends, dlse=dlse)

    for name, wrong in {
        "dout": host["dout"][:-1],
        "out": out[:, :2],
        "lse": lse.T,
    }.items():
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            call(**{name: place(backend, wrong.copy()).array})
    with pytest.raises(ValueError, match=r"\bdlse\b"):
        call(dlse=place(backend, lse[:, :-1].copy()).array)
    for name in ("dout", "out", "lse"):
        other = np.float64 if q.dtype != np.float64 else np.float32
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            call(**{name: place(backend, host[name].astype(other)).array})


# ------------------------------------------------------------------------------------------------------------
# Drawn lengths


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
        deterministic=st.booleans(),
        into=st.none() | st.just(Layout(pad=(0, 0, 8, 8))),
    )
    def holds(lengths, options, heads, deterministic, into):
        dout, q, k, v, dlse = arrays_of(dtype, lengths, heads_q=heads[0], heads_k=heads[1])
        how = dict(lengths=lengths, deterministic=deterministic, into=into)
        check_backward(backend, dout, q, k, v, dlse=dlse, **how, **options)

    holds()


@on_pairs("cpu-float32", "simt-float32", "sm80-bfloat16", "sm90-bfloat16")
def test_nan_of_one_sequence_stays_there(backend, dtype):
    lengths = Lengths((40, 70, 33), spare_q=9, spare_k=9)
    dout, q, k, v, _ = arrays_of(dtype, lengths)
    plain = check_backward(backend, dout, q, k, v, lengths=lengths, causal=True)
    for x in (dout, q, k, v):
        other = [y.copy() if y is x else y for y in (dout, q, k, v)]
        other[[y is x for y in (dout, q, k, v)].index(True)][80, 0] = np.nan
        gradients = check_backward(backend, *other, lengths=lengths, causal=True)
        for rows in (slice(0, 40), slice(110, 152)):
            assert_same_sequence(
                backend, [y[rows] for y in gradients], [y[rows] for y in plain], False, f"{rows}"
            )
