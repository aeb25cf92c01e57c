"""Packed batches as an API, on NumPy arrays and CPU tensors: what lengths may be, and every message by its text."""

import inspect
import re

import numpy as np
import pytest
from support import DTYPES, dlse_of, dout_of, inputs
from test_grad import GRADIENTS, host
from test_problem import FromNumpy, FromTorch

import cuflash
from cuflash.arrays import View
from cuflash.memory import contiguous_strides
from cuflash.problem import check_attention_varlen, check_attention_varlen_backward


@pytest.fixture(params=[FromNumpy, FromTorch], ids=["numpy", "torch"])
def wrap(request):
    return request.param()


def packed(dtype="float32", total_q=40, total_k=60, **sizes):
    sizes = dict(head_dim=8, head_dim_v=6) | sizes
    return [x[0] for x in inputs(dtype, batch=1, seqlen_q=total_q, seqlen_k=total_k, **sizes)]


ENDS_Q, ENDS_K = [0, 11, 11, 30, 40], [0, 5, 20, 20, 60]  # a sequence without queries, one without keys


def ends(*values, dtype="int32"):
    return np.array(values, dtype)


def call(wrap, function="attention_varlen", cu_seqlens_q=None, cu_seqlens_k=None, arrays=None, **options):
    """The function with the sequences above, or other lengths; `arrays` in place of q, k and v."""
    q, k, v = arrays or packed()
    cu_seqlens_q = ends(*ENDS_Q) if cu_seqlens_q is None else cu_seqlens_q
    cu_seqlens_k = ends(*ENDS_K) if cu_seqlens_k is None else cu_seqlens_k
    given = [q, k, v]
    if function == "attention_varlen_backward":
        out = np.zeros((*q.shape[:2], v.shape[2]), q.dtype)
        given = [out, *given, out, np.zeros((q.shape[1], q.shape[0]), "float32")]
    given = [wrap(x) for x in (*given, cu_seqlens_q, cu_seqlens_k)]
    options = {name: wrap(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return getattr(cuflash, function)(*given, **options)


EITHER = pytest.mark.parametrize("function", ["attention_varlen", "attention_varlen_backward"])

# ------------------------------------------------------------------------------------------------------------
# What comes back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length_dtype", ["int32", "int64"])
def test_each_sequence_as_by_itself(wrap, dtype, length_dtype):
    q, k, v = packed(dtype)
    dout, dlse = dout_of(q, v), dlse_of(q)
    lengths = [wrap(ends(*values, dtype=length_dtype)) for values in (ENDS_Q, ENDS_K)]
    wrapped = [wrap(x) for x in (q, k, v)]
    out, lse = cuflash.attention_varlen(*wrapped, *lengths, causal=True, return_lse=True)
    gradients = cuflash.attention_varlen_backward(
        wrap(dout), *wrapped, out, lse, *lengths, causal=True, dlse=wrap(dlse)
    )
    assert type(out) is type(wrapped[0]) and tuple(out.shape) == (40, 4, 6) and tuple(lse.shape) == (4, 40)
    out, lse, gradients = host(out), host(lse), [host(x) for x in gradients]
    assert out.dtype == q.dtype and lse.dtype == ("float64" if dtype == "float64" else "float32")
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]
    for i in range(4):
        rows, keys = slice(*ENDS_Q[i : i + 2]), slice(*ENDS_K[i : i + 2])
        one = q[rows], k[keys], v[keys]
        alone, statistic, pullback = cuflash.attention_vjp(*one, causal=True, return_lse=True)
        assert (alone == out[rows]).all() and np.array_equal(statistic, lse[:, rows])
        if rows.start < rows.stop:
            pulled = pullback(dout[rows], dlse[:, rows].copy())
            assert all(
                np.array_equal(x, y[part])
                for x, y, part in zip(pulled, gradients, (rows, keys, keys), strict=True)
            )


def test_used_lengths_cut_the_sequences(wrap):
    q, k, v = packed()
    lengths, used = (ends(0, 20, 40), ends(0, 30, 60)), (ends(13, 20), ends(30, 7))
    for x, starts, counts in ((q, lengths[0], used[0]), (k, lengths[1], used[1]), (v, lengths[1], used[1])):
        for start, stop, count in zip(starts, starts[1:], counts, strict=False):
            x[start + count : stop] = np.nan
    out, lse = call(
        wrap,
        "attention_varlen",
        *lengths,
        (q, k, v),
        seqused_q=used[0],
        seqused_k=used[1],
        causal=True,
        return_lse=True,
    )
    out, lse = host(out), host(lse)
    for i, (rows, keys) in enumerate(((slice(0, 13), slice(0, 30)), (slice(20, 40), slice(30, 37)))):
        alone, statistic = cuflash.attention(q[rows], k[keys], v[keys], causal=True, return_lse=True)
        assert (alone == out[rows]).all() and np.array_equal(statistic, lse[:, rows]), i
    assert (out[13:20] == 0).all() and (lse[:, 13:20] == -np.inf).all()


def test_rows_of_no_sequence_are_zeros(wrap):
    q, k, v = packed()
    q[7:], k[9:], v[9:] = np.nan, np.nan, np.nan
    lengths = ends(0, 3, 7), ends(0, 9, 9)
    target = np.full((40, 4, 6), np.nan, "float32")
    out, lse = call(wrap, "attention_varlen", *lengths, (q, k, v), out=target, return_lse=True)
    assert (
        (host(out)[3:] == 0).all()
        and (host(lse)[:, 3:] == -np.inf).all()
        and np.isfinite(host(lse)[:, :3]).all()
    )
    into = {name: np.full_like(x, np.nan) for name, x in zip(GRADIENTS, (q, k, v), strict=True)}
    dout = np.full((40, 4, 6), np.nan, "float32")
    dout[:7] = 1
    cuflash.attention_varlen_backward(
        *map(wrap, (dout, q, k, v, host(out), host(lse), *lengths)),
        **{name: wrap(x) for name, x in into.items()},
    )
    assert all(np.isfinite(x).all() for x in into.values())
    assert (into["dq"][3:] == 0).all() and (into["dk"][9:] == 0).all() and (into["dv"][9:] == 0).all()


@pytest.mark.parametrize(
    "lengths", [((0,), (0,)), ((0, 0, 0), (0, 0, 0)), ((0, 0), (0, 60)), ((0, 40), (0, 0))], ids=str
)
def test_nothing_to_see_is_zeros(wrap, lengths):
    lengths = [ends(*values) for values in lengths]
    out, lse = call(wrap, "attention_varlen", *lengths, return_lse=True)
    assert (host(out) == 0).all() and (host(lse) == -np.inf).all()
    assert all((host(x) == 0).all() for x in call(wrap, "attention_varlen_backward", *lengths))


def test_no_rows_at_all(wrap):
    lengths = ends(0, 0, 0), ends(0, 0, 0)
    nothing = packed(total_q=0, total_k=0)
    assert tuple(call(wrap, "attention_varlen", *lengths, nothing).shape) == (0, 4, 6)
    assert [len(x) for x in call(wrap, "attention_varlen_backward", *lengths, nothing)] == [0, 0, 0]


@EITHER
def test_hints_change_nothing(wrap, function):
    expected = call(wrap, function, causal=True)
    for hints in (
        dict(max_seqlen_q=19, max_seqlen_k=40),
        dict(max_seqlen_q=0),
        dict(max_seqlen_k=np.int64(10**9)),
    ):
        for x, y in zip(call(wrap, function, causal=True, **hints), expected, strict=True):
            assert (x == y).all()


def test_validate_changes_nothing_on_the_cpu(wrap):
    assert (call(wrap, validate=True) == call(wrap)).all()
    with pytest.raises(ValueError, match="cu_seqlens_q must start at 0; got 1"):
        call(wrap, cu_seqlens_q=ends(1, 11, 11, 30, 40), validate=False)


def test_signatures_agree():
    """Every option of the dense functions, at the same default; lengths and hints besides."""
    for dense, varlen in (
        (cuflash.attention, cuflash.attention_varlen),
        (cuflash.attention_backward, cuflash.attention_varlen_backward),
    ):
        dense, varlen = (inspect.signature(function).parameters for function in (dense, varlen))
        for name, parameter in dense.items():
            assert (varlen[name].kind, varlen[name].default) == (parameter.kind, parameter.default)
        assert set(varlen) - set(dense) == {
            "cu_seqlens_q",
            "cu_seqlens_k",
            "max_seqlen_q",
            "max_seqlen_k",
            "seqused_q",
            "seqused_k",
            "validate",
        }
    forward = inspect.signature(cuflash.attention).parameters
    for function in (cuflash.attention_vjp, cuflash.attention_backward):
        for name, parameter in inspect.signature(function).parameters.items():
            assert name not in forward or name == "out" or forward[name].default == parameter.default


# ------------------------------------------------------------------------------------------------------------
# Lengths that do not describe the arrays

VALUES = {
    "not from 0": (dict(cu_seqlens_q=ends(2, 11, 11, 30, 40)), "cu_seqlens_q must start at 0; got 2"),
    "k not from 0": (dict(cu_seqlens_k=ends(-1, 5, 20, 20, 60)), "cu_seqlens_k must start at 0; got -1"),
    "decreasing": (
        dict(cu_seqlens_q=ends(0, 11, 10, 30, 40)),
        "cu_seqlens_q must not decrease; got 11 and then 10 at index 2",
    ),
    "k decreasing": (
        dict(cu_seqlens_k=ends(0, 5, 20, 70, 60)),
        "cu_seqlens_k must not decrease; got 70 and then 60 at index 4",
    ),
    "decreasing by more than int32 holds": (
        dict(cu_seqlens_q=ends(0, 11, 2**31 - 1, -(2**31), 40)),
        f"cu_seqlens_q must not decrease; got {2**31 - 1} and then {-(2**31)} at index 3",
    ),
    "decreasing by more than int64 holds": (
        dict(cu_seqlens_k=ends(0, 5, 2**63 - 1, -(2**63), 60, dtype="int64")),
        f"cu_seqlens_k must not decrease; got {2**63 - 1} and then {-(2**63)} at index 3",
    ),
    "past q": (
        dict(cu_seqlens_q=ends(0, 11, 11, 30, 41)),
        "cu_seqlens_q must end at 40, the rows of q, or before; got 41",
    ),
    "past k": (
        dict(cu_seqlens_k=ends(0, 5, 20, 20, 2**40, dtype="int64")),
        f"cu_seqlens_k must end at 60, the rows of k, or before; got {2**40}",
    ),
    "more used than there are": (
        dict(seqused_q=ends(11, 0, 20, 10)),
        "seqused_q must be 0 to the length of each sequence; got 20 for sequence 2, of length 19",
    ),
    "fewer than none": (
        dict(seqused_k=ends(5, 15, 0, -1)),
        "seqused_k must be 0 to the length of each sequence; got -1 for sequence 3, of length 40",
    ),
}


@EITHER
@pytest.mark.parametrize("changes, message", VALUES.values(), ids=VALUES)
def test_values_of_lengths(wrap, function, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(wrap, function, **changes)


KINDS = {
    "float": (
        dict(cu_seqlens_q=ends(*ENDS_Q, dtype="float32")),
        TypeError,
        "cu_seqlens_q must be one of int32, int64; got float32",
    ),
    "int16": (
        dict(cu_seqlens_k=ends(*ENDS_K, dtype="int16")),
        TypeError,
        "cu_seqlens_k must be one of int32, int64; got int16",
    ),
    "used of bool": (
        dict(seqused_q=ends(1, 0, 1, 1, dtype="bool")),
        TypeError,
        "seqused_q must be one of int32, int64; got bool",
    ),
    "2-d": (
        dict(cu_seqlens_q=ends(*ENDS_Q)[None]),
        ValueError,
        "cu_seqlens_q must have 1 axis; got shape (1, 5)",
    ),
    "3-d": (
        dict(cu_seqlens_q=ends(*ENDS_Q)[None, None]),
        ValueError,
        "cu_seqlens_q must have 1 axis; got shape (1, 1, 5)",
    ),
    "0-d": (
        dict(cu_seqlens_k=np.array(3, "int32")),
        ValueError,
        "cu_seqlens_k must have 1 axis; got shape ()",
    ),
    "no element": (
        dict(cu_seqlens_q=ends()),
        ValueError,
        "cu_seqlens_q must have one element more than there are sequences",
    ),
    "of another batch": (
        dict(cu_seqlens_k=ends(0, 5, 60)),
        ValueError,
        "cu_seqlens_k must have the shape of cu_seqlens_q, (5,); got (3,)",
    ),
    "used of another batch": (
        dict(seqused_k=ends(1, 2, 3)),
        ValueError,
        "seqused_k must have an element for each sequence of cu_seqlens_q, shape (4,); got (3,)",
    ),
    "used like ends": (
        dict(seqused_q=ends(*ENDS_Q)),
        ValueError,
        "seqused_q must have an element for each sequence of cu_seqlens_q, shape (4,); got (5,)",
    ),
    "every second": (
        dict(cu_seqlens_q=ends(0, 0, 11, 11, 11, 11, 30, 30, 40, 40)[::2]),
        ValueError,
        "cu_seqlens_q must be contiguous; got strides (2,) elements for shape (5,): make it contiguous first",
    ),
}


@EITHER
@pytest.mark.parametrize("changes, error, message", KINDS.values(), ids=KINDS)
def test_kinds_of_lengths(wrap, function, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(wrap, function, **changes)


@EITHER
def test_lengths_that_are_no_arrays(wrap, function):
    class Listed:
        def __init__(self, name):
            self.name = name

        def __call__(self, x):
            return x.tolist() if x.dtype.kind == "i" else wrap(x)

    with pytest.raises(TypeError, match="cu_seqlens_q must be a CuPy, PyTorch, JAX or NumPy array.*got list"):
        call(Listed("lists"), function)
    with pytest.raises(TypeError, match="seqused_k must be a CuPy, PyTorch, JAX or NumPy array.*got list"):
        call(wrap, function, seqused_k=[1, 2, 3, 4])


def test_lengths_of_another_framework():
    torch = FromTorch()
    q, k, v = packed()
    with pytest.raises(TypeError, match="cu_seqlens_q must come from the framework of q, torch; got numpy"):
        cuflash.attention_varlen(torch(q), torch(k), torch(v), ends(*ENDS_Q), torch(ends(*ENDS_K)))


@EITHER
@pytest.mark.parametrize("name", ["max_seqlen_q", "max_seqlen_k"])
def test_hints(wrap, function, name):
    for bad, error, message in (
        (-1, ValueError, "must be 0 or more; got -1"),
        (2.5, TypeError, "must be an integer or None; got 2.5"),
        (True, TypeError, "must be an integer or None; got True"),
        ("9", TypeError, "must be an integer"),
    ):
        with pytest.raises(error, match=f"{name} {message}"):
            call(wrap, function, **{name: bad})


# ------------------------------------------------------------------------------------------------------------
# Arrays


@EITHER
@pytest.mark.parametrize(
    "changes, message",
    [
        (
            dict(q=(1, 40, 4, 8)),
            r"q must have 3 axes \(total rows of all sequences, heads, head_dim\); got shape \(1, 40, 4, 8\)",
        ),
        (dict(k=(60, 8)), r"k must have 3 axes .*got shape \(60, 8\)"),
        (dict(v=(60,)), r"v must have 3 axes .*got shape \(60,\)"),
        (dict(v=(59, 2, 6)), "total rows must be the same in k and v; got 60 and 59"),
        (dict(v=(60, 1, 6)), "heads must be the same in k and v; got 2 and 1"),
        (dict(k=(60, 2, 9)), "head_dim must be the same in q and k; got 8 and 9"),
        (dict(q=(40, 3, 8)), "heads of q must be a multiple of the heads of k and v; got 3 and 2"),
    ],
    ids=str,
)
def test_shapes(wrap, function, changes, message):
    shapes = dict(q=(40, 4, 8), k=(60, 2, 8), v=(60, 2, 6)) | changes
    arrays = [np.zeros(shape, "float32") for shape in shapes.values()]
    if function == "attention_varlen_backward" and {len(x.shape) for x in arrays} != {3}:
        return
    with pytest.raises(ValueError, match=message):
        call(wrap, function, arrays=arrays)


def test_out_and_gradients_of_another_shape(wrap):
    with pytest.raises(ValueError, match=r"out must have shape \(40, 4, 6\); got \(1, 40, 4, 6\)"):
        call(wrap, out=np.zeros((1, 40, 4, 6), "float32"))
    with pytest.raises(ValueError, match=r"dk must have shape \(60, 2, 8\); got \(40, 2, 8\)"):
        call(wrap, "attention_varlen_backward", dk=np.zeros((40, 2, 8), "float32"))
    q, k, v = packed()
    out, lse = np.zeros((40, 4, 6), "float32"), np.zeros((40, 4), "float32")
    with pytest.raises(ValueError, match=r"lse must have shape \(4, 40\); got \(40, 4\)"):
        cuflash.attention_varlen_backward(*map(wrap, (out, q, k, v, out, lse, ends(*ENDS_Q), ends(*ENDS_K))))


def test_a_gradient_that_overlaps_the_lengths(wrap):
    memory = np.zeros(40 * 4 * 8 + 8, "float32")
    lengths = memory[:5].view("int32")
    lengths[:] = ENDS_Q
    with pytest.raises(ValueError, match="dq must not overlap cu_seqlens_q: they share memory"):
        call(wrap, "attention_varlen_backward", cu_seqlens_q=lengths, dq=memory[4:-4].reshape(40, 4, 8))


def test_jax_on_the_cpu():
    jnp = pytest.importorskip("jax.numpy", reason="no JAX")
    arrays, lengths = packed(), (ends(*ENDS_Q), ends(*ENDS_K))
    out, lse = cuflash.attention_varlen(*map(jnp.asarray, (*arrays, *lengths)), return_lse=True)
    expected, statistic = cuflash.attention_varlen(*arrays, *lengths, return_lse=True)
    assert (np.asarray(out) == expected).all() and (np.asarray(lse) == statistic).all()
    dout = dout_of(arrays[0], arrays[2])
    gradients = cuflash.attention_varlen_backward(
        *map(jnp.asarray, (dout, *arrays)), out, lse, *map(jnp.asarray, lengths)
    )
    expected = cuflash.attention_varlen_backward(dout, *arrays, expected, statistic, *lengths)
    assert all((np.asarray(x) == y).all() for x, y in zip(gradients, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------
# Made-up views: what needs a GPU to happen


def view(*shape, dtype="float32", place=1, **changes):
    made = View(
        shape, contiguous_strides(shape), dtype, "cuda:0", place << 20, "cupy", was_3d=len(shape) == 4
    )
    return made._replace(**changes)


def stated(check=check_attention_varlen, **changes):
    views = dict(
        q=view(1, 40, 4, 8),
        k=view(1, 60, 2, 8, place=2),
        v=view(1, 60, 2, 6, place=3),
        cu_seqlens_q=view(5, dtype="int32", place=4),
        cu_seqlens_k=view(5, dtype="int32", place=5),
    )
    if check is check_attention_varlen_backward:
        views |= dict(
            dout=view(1, 40, 4, 6, place=6), out=view(1, 40, 4, 6, place=7), lse=view(4, 40, place=8)
        )
    return check(**views | changes)


@pytest.mark.parametrize("check", [check_attention_varlen, check_attention_varlen_backward])
def test_lengths_elsewhere(check):
    for name, size in (("cu_seqlens_q", 5), ("cu_seqlens_k", 5), ("seqused_q", 4), ("seqused_k", 4)):
        for device in ("cpu", "cuda:1"):
            with pytest.raises(ValueError, match=f"{name} must be on the device of q, cuda:0; got {device}"):
                stated(check, **{name: view(size, dtype="int32", device=device)})
        with pytest.raises(ValueError, match=f"{name} must be on the device of q, cuda:0; got cpu"):
            stated(check, **{name: view(size, dtype="int32", device="cpu", framework="numpy")})
        with pytest.raises(ValueError, match=rf"{name} must be aligned to its element \(8 bytes\)"):
            stated(check, **{name: view(size, dtype="int64", ptr=(1 << 24) + 4)})


def test_a_problem_says_what_was_asked():
    problem = stated(causal=True, return_lse=True)
    assert (problem.varlen, problem.batch, problem.batch_axis, problem.seqlen_q, problem.seqlen_k) == (
        True,
        4,
        1,
        40,
        60,
    )
    assert (problem.window_left, problem.window_right, problem.int64_lengths) == (None, 0, 0)
    assert not problem.has_seqused_q and not problem.has_seqused_k
    problem = stated(
        cu_seqlens_k=view(5, dtype="int64"),
        seqused_q=view(4, dtype="int64"),
        seqused_k=view(4, dtype="int32"),
    )
    assert problem.int64_lengths == 0b0110 and problem.has_seqused_q and problem.has_seqused_k
    assert stated(check_attention_varlen_backward, deterministic=True).deterministic


def test_no_sequence_has_rows_to_write_all_the_same():
    nobody = dict(cu_seqlens_q=view(1, dtype="int32"), cu_seqlens_k=view(1, dtype="int32"))
    assert stated(**nobody).batch == 0 and not stated(**nobody).is_empty
    assert stated(q=view(1, 0, 4, 8)).is_empty
    assert not stated(check_attention_varlen_backward, **nobody).is_empty


@pytest.mark.parametrize(
    "window, expected", [((58, 38), (58, 38)), ((59, 39), (None, None)), ((None, 0), (None, 0))]
)
def test_windows_are_cut_to_what_any_sequence_can_reach(window, expected):
    problem = stated(window=window)
    assert (problem.window_left, problem.window_right) == expected
