"""The gradients as an API, on NumPy arrays and CPU tensors: shapes, kinds, given buffers, and every message by its text."""

import math

import ml_dtypes
import numpy as np
import pytest
from support import DTYPES, assert_right_gradients, dlse_of, dout_of, inputs
from test_problem import FromNumpy, FromTorch

import cuflash
from cuflash.arrays import View
from cuflash.memory import contiguous_strides
from cuflash.problem import check_attention_backward

GRADIENTS = ("dq", "dk", "dv")


@pytest.fixture(params=[FromNumpy, FromTorch], ids=["numpy", "torch"])
def wrap(request):
    return request.param()


def host(x) -> np.ndarray:
    """The values of an array of any framework, bfloat16 among them."""
    if str(x.dtype) == "torch.bfloat16":
        return x.view(__import__("torch").int16).numpy().view(ml_dtypes.bfloat16)
    return np.asarray(x)


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


Q, K, V = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)
OUT, LSE = (2, 5, 4, 6), (2, 4, 5)


def operands(**changes) -> dict[str, np.ndarray]:
    """What attention_backward takes, in its order, zeros; `changes` are other arrays, by name."""
    shapes = {"dout": OUT, "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE}
    return {name: zeros(*shape) for name, shape in shapes.items()} | changes


def call(wrap, arrays: dict, **options):
    arrays = {name: wrap(x) for name, x in arrays.items()}
    options = {name: wrap(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    return cuflash.attention_backward(*arrays.values(), **options)


# ------------------------------------------------------------------------------------------------------------
# What comes back


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, dict(causal=True, softcap=5.0), dict(window=(9, 3), softmax_scale=-0.3)], ids=str
)
def test_gradients_of_a_forward(wrap, dtype, options):
    q, k, v = inputs(dtype, seqlen_q=40, seqlen_k=55, head_dim=16, head_dim_v=24)
    dout, dlse = dout_of(q, v), dlse_of(q)
    out, lse = cuflash.attention(wrap(q), wrap(k), wrap(v), return_lse=True, **options)
    given = wrap(dout), wrap(q), wrap(k), wrap(v), out, lse
    for extra in ({}, {"dlse": dlse}):
        wrapped = {name: wrap(x) for name, x in extra.items()}
        gradients = cuflash.attention_backward(*given, **wrapped, **options)
        assert isinstance(gradients, tuple) and {type(x) for x in gradients} == {type(given[0])}
        gradients = [host(x) for x in gradients]
        assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape] and {
            x.dtype for x in gradients
        } == {q.dtype}
        assert_right_gradients(named(gradients), dout, q, k, v, **extra, **options)
        again = cuflash.attention_backward(*given, deterministic=True, **wrapped, **options)
        assert all(np.array_equal(x, host(y)) for x, y in zip(gradients, again, strict=True))


def named(gradients):
    from support import Gradients

    return Gradients(*gradients)


def test_the_pullback_is_the_backward(wrap):
    q, k, v = inputs("float32", seqlen_q=20, head_dim=8)
    dout, dlse = wrap(dout_of(q, v)), wrap(dlse_of(q))
    q, k, v = wrap(q), wrap(k), wrap(v)
    options = dict(causal=True, softcap=3.0, softmax_scale=0.2)
    out, lse = cuflash.attention(q, k, v, return_lse=True, **options)
    one, pullback = cuflash.attention_vjp(q, k, v, **options)
    two, statistic, with_lse = cuflash.attention_vjp(q, k, v, return_lse=True, deterministic=True, **options)
    assert (one == out).all() and (two == out).all() and (statistic == lse).all()
    for extra in ({}, {"dlse": dlse}):
        expected = cuflash.attention_backward(dout, q, k, v, out, lse, **extra, **options)
        for function in (pullback, with_lse, pullback):
            assert all((x == y).all() for x, y in zip(function(dout, **extra), expected, strict=True))
    with pytest.raises(ValueError, match=r"dout must have shape \(2, 20, 4, 8\); got \(2, 20, 4, 7\)"):
        pullback(wrap(zeros(2, 20, 4, 7)))
    with pytest.raises(TypeError, match="dropout"):
        cuflash.attention_vjp(q, k, v, dropout=0.1)


def test_a_batch_of_one_without_its_axis(wrap):
    q, k, v = (x[0] for x in inputs("float64", batch=1, seqlen_q=20, seqlen_k=30, head_dim=8))
    dout, dlse = dout_of(q, v), dlse_of(q)
    out, lse, pullback = cuflash.attention_vjp(wrap(q), wrap(k), wrap(v), causal=True, return_lse=True)
    gradients = [np.asarray(x) for x in pullback(wrap(dout), wrap(dlse))]
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape] and tuple(lse.shape) == (4, 20)
    dense = [x[None] for x in (dout, q, k, v, np.asarray(out), np.asarray(lse))]
    expected = cuflash.attention_backward(*dense, causal=True, dlse=dlse[None])
    assert all((x == y[0]).all() for x, y in zip(gradients, expected, strict=True))


def test_the_gradient_of_a_sum_needs_no_copy_by_the_caller(wrap):
    """All its strides are 0; and one that is expanded over rows only."""
    q, k, v = inputs("float32", seqlen_q=20, head_dim=8)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    for small in (np.ones((1, 1, 1, 1), "float32"), dout_of(q, v)[:1, :1, :1]):
        dout = np.broadcast_to(small, out.shape)
        expected = cuflash.attention_backward(dout.copy(), q, k, v, out, lse)
        lent = wrap(small)
        lent = lent.expand(out.shape) if wrap.name == "torch" else dout
        got = cuflash.attention_backward(lent, *map(wrap, (q, k, v, out, lse)))
        assert all((np.asarray(x) == y).all() for x, y in zip(got, expected, strict=True))


def test_expanded_inputs_have_whole_gradients(wrap):
    q, k, v = inputs("float32", seqlen_q=20, head_dim=8, heads_q=4, heads_k=4)
    k, v = (np.broadcast_to(x[:1, :, :1], x.shape) for x in (k, v))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    dout = dout_of(q, v)
    expected = cuflash.attention_backward(dout, q, k.copy(), v.copy(), out, lse)
    if wrap.name == "torch":
        k, v = (wrap(x[:1, :, :1].copy()).expand(x.shape) for x in (k, v))
    got = cuflash.attention_backward(
        *map(wrap, (dout, q)), *(x if wrap.name == "torch" else wrap(x) for x in (k, v)), wrap(out), wrap(lse)
    )
    assert all((np.asarray(x) == y).all() for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "shapes",
    [
        dict(q=(0, 5, 4, 8), k=(0, 7, 2, 8)),
        dict(q=(2, 0, 4, 8), k=K),
        dict(q=Q, k=(2, 0, 2, 8)),
        dict(q=(2, 5, 0, 8), k=(2, 7, 0, 8)),
        dict(q=(2, 5, 0, 8), k=K),
    ],
    ids=str,
)
def test_empty_sides_have_zero_gradients(wrap, shapes):
    q, k = (zeros(*shapes[name]) for name in "qk")
    v = zeros(*k.shape[:3], 6)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    dout = np.ones_like(out)
    into = {name: wrap(np.full_like(x, np.nan)) for name, x in zip(GRADIENTS, (q, k, v), strict=True)}
    gradients = cuflash.attention_backward(*map(wrap, (dout, q, k, v, out, lse)), **into)
    for x, like, given in zip(gradients, (q, k, v), into.values(), strict=True):
        assert x is given and tuple(x.shape) == like.shape and (np.asarray(x) == 0).all()


# ------------------------------------------------------------------------------------------------------------
# Buffers for the gradients


def test_gradients_are_written_where_they_are_wanted(wrap):
    q, k, v = inputs("float32", seqlen_q=20, head_dim=8)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    dout = dout_of(q, v)
    expected = cuflash.attention_backward(dout, q, k, v, out, lse)
    arrays = [wrap(x) for x in (dout, q, k, v, out, lse)]
    for wanted in (GRADIENTS, ("dk",), ("dq", "dv")):
        sources = dict(zip(GRADIENTS, (q, k, v), strict=True))
        fused = np.full(
            (*k.shape[:2], 3 * k.shape[2], 8), np.nan, "float32"
        )  # dk and dv as slices of one buffer
        into = {"dq": np.full_like(q, np.nan), "dk": fused[:, :, :2], "dv": fused[:, :, 4:]}
        assert sources["dk"].shape == into["dk"].shape
        into = {name: wrap(into[name]) for name in wanted}
        gradients = cuflash.attention_backward(*arrays, **into)
        for name, x, right in zip(GRADIENTS, gradients, expected, strict=True):
            assert (np.asarray(x) == right).all() and (name not in into or x is into[name])
        assert np.isnan(fused[:, :, 2:4]).all()


def test_gradients_that_overlap(wrap):
    memory = zeros(3 * math.prod(Q))
    first = memory[: math.prod(K)].reshape(K)
    inside = memory[math.prod(K) - 1 :][: math.prod(K)].reshape(K)
    for name in ("q", "k", "v", "dout", "out"):
        shape = operands()[name].shape
        x = memory[: math.prod(shape)].reshape(shape)
        with pytest.raises(ValueError, match=f"dk must not overlap {name}: they share memory"):
            call(wrap, operands(**{name: x}), dk=memory[math.prod(shape) - 1 :][: math.prod(K)].reshape(K))
    lse = memory[: math.prod(LSE)].reshape(LSE)
    with pytest.raises(ValueError, match="dq must not overlap lse"):
        call(wrap, operands(lse=lse), dq=memory[: math.prod(Q)].reshape(Q))
    with pytest.raises(ValueError, match="dq must not overlap dlse"):
        call(wrap, operands(), dlse=lse, dq=memory[: math.prod(Q)].reshape(Q))
    with pytest.raises(ValueError, match="dk must not overlap dq"):
        call(wrap, operands(), dq=memory[: math.prod(Q)].reshape(Q), dk=first)
    with pytest.raises(ValueError, match="dv must not overlap dk"):
        call(wrap, operands(v=zeros(*K), out=zeros(*Q), dout=zeros(*Q)), dk=first, dv=inside)


@pytest.mark.parametrize("name, shape", [("dq", Q), ("dk", K), ("dv", V)])
def test_a_wrong_buffer(wrap, name, shape):
    longer = (*shape[:3], shape[3] + 1)
    cases = {
        "shape": (
            zeros(*longer),
            ValueError,
            rf"{name} must have shape \({', '.join(map(str, shape))}\); got",
        ),
        "axes": (zeros(*shape[1:]), ValueError, f"{name} must have shape"),
        "dtype": (
            zeros(*shape, dtype="float16"),
            TypeError,
            f"{name} must have the dtype of q, float32; got float16",
        ),
        "integers": (
            zeros(*shape, dtype="int32"),
            TypeError,
            f"{name} must have the dtype of q, float32; got int32",
        ),
        "stride": (
            zeros(*shape[:3], 2 * shape[3])[..., ::2],
            ValueError,
            f"{name} must be contiguous in its last axis",
        ),
    }
    for bad, error, message in cases.values():
        bad[...] = 7
        with pytest.raises(error, match=message):
            call(wrap, operands(), **{name: bad})
        assert (bad == 7).all()
    folded = np.lib.stride_tricks.as_strided(
        zeros(300), shape, (0, *(4 * s for s in contiguous_strides(shape[1:])))
    )
    with pytest.raises(ValueError, match=f"{name} must not overlap itself"):
        call(wrap, operands(), **{name: folded})
    if wrap.name == "numpy":
        fixed = zeros(*shape)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match=f"{name} must be writable; got a read-only array"):
            call(wrap, operands(), **{name: fixed})


# ------------------------------------------------------------------------------------------------------------
# What came of another call

OTHER = {
    "seqlen of dout": (
        dict(dout=zeros(2, 6, 4, 6)),
        ValueError,
        r"dout must have shape \(2, 5, 4, 6\); got \(2, 6, 4, 6\)",
    ),
    "dout like q": (
        dict(dout=zeros(*Q)),
        ValueError,
        r"dout must have shape \(2, 5, 4, 6\); got \(2, 5, 4, 8\)",
    ),
    "3-d dout": (
        dict(dout=zeros(5, 4, 6)),
        ValueError,
        r"dout must have shape \(2, 5, 4, 6\); got \(5, 4, 6\)",
    ),
    "dtype of dout": (
        dict(dout=zeros(*OUT, dtype="float16")),
        TypeError,
        "dout must have the dtype of q, float32; got float16",
    ),
    "stride of dout": (
        dict(dout=zeros(*OUT[:3], 12)[..., ::2]),
        ValueError,
        "dout must be contiguous in its last axis",
    ),
    "out of one more batch": (
        dict(out=zeros(3, 5, 4, 6)),
        ValueError,
        r"out must have shape \(2, 5, 4, 6\); got \(3, 5, 4, 6\)",
    ),
    "heads of out": (
        dict(out=zeros(2, 4, 5, 6)),
        ValueError,
        r"out must have shape \(2, 5, 4, 6\); got \(2, 4, 5, 6\)",
    ),
    "dtype of out": (
        dict(out=zeros(*OUT, dtype="float64")),
        TypeError,
        "out must have the dtype of q, float32; got float64",
    ),
    "stride of out": (
        dict(out=zeros(*OUT[:3], 12)[..., ::2]),
        ValueError,
        "out must be contiguous in its last axis",
    ),
    "seqlen of lse": (
        dict(lse=zeros(2, 4, 7)),
        ValueError,
        r"lse must have shape \(2, 4, 5\); got \(2, 4, 7\)",
    ),
    "lse by row": (dict(lse=zeros(2, 5, 4)), ValueError, r"lse must have shape \(2, 4, 5\); got \(2, 5, 4\)"),
    "lse without batch": (
        dict(lse=zeros(4, 5)),
        ValueError,
        r"lse must have shape \(2, 4, 5\); got \(4, 5\)",
    ),
    "dtype of lse": (
        dict(lse=zeros(*LSE, dtype="float16")),
        TypeError,
        "lse must be float32 where q is float32; got float16",
    ),
    "wider lse": (
        dict(lse=zeros(*LSE, dtype="float64")),
        TypeError,
        "lse must be float32 where q is float32; got float64",
    ),
    "stride of lse": (
        dict(lse=zeros(2, 5, 4).transpose(0, 2, 1)),
        ValueError,
        r"lse must be contiguous; got strides \(20, 1, 4\) elements for shape \(2, 4, 5\): make it contiguous first",
    ),
    "expanded lse": (dict(lse=zeros(2, 4, 10)[..., ::2]), ValueError, "lse must be contiguous"),
    "batch of k": (dict(k=zeros(3, 7, 2, 8)), ValueError, "batch must be the same in q, k and v"),
}


@pytest.mark.parametrize("changes, error, message", OTHER.values(), ids=OTHER)
def test_what_came_of_another_call(wrap, changes, error, message):
    into = {name: np.full(shape, 7, "float32") for name, shape in zip(GRADIENTS, (Q, K, V), strict=True)}
    with pytest.raises(error, match=message):
        call(wrap, operands(**changes), **into)
    assert all((x == 7).all() for x in into.values())


@pytest.mark.parametrize(
    "dlse, error, message",
    [
        (zeros(2, 5, 4), ValueError, r"dlse must have shape \(2, 4, 5\); got \(2, 5, 4\)"),
        (zeros(*LSE, dtype="float64"), TypeError, "dlse must be float32 where q is float32; got float64"),
        (zeros(2, 5, 4).transpose(0, 2, 1), ValueError, "dlse must be contiguous"),
    ],
)
def test_a_wrong_dlse(wrap, dlse, error, message):
    with pytest.raises(error, match=message):
        call(wrap, operands(), dlse=dlse)


def test_lse_of_float64_is_float64(wrap):
    arrays = {name: x.astype("float64") for name, x in operands().items()}
    assert call(wrap, arrays)[0].shape == Q
    with pytest.raises(TypeError, match="lse must be float64 where q is float64; got float32"):
        call(wrap, arrays | {"lse": zeros(*LSE)})


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(deterministic=1), TypeError, "deterministic must be a bool; got 1"),
        (dict(deterministic=None), TypeError, "deterministic must be a bool; got None"),
        (dict(causal=1), TypeError, "causal must be a bool; got 1"),
        (dict(window=(1,)), ValueError, r"window must be None or a pair"),
        (dict(softcap=-1.0), ValueError, "softcap must be finite"),
        (dict(softmax_scale="1"), TypeError, "softmax_scale must be a number"),
        (dict(return_lse=True), TypeError, "return_lse"),
        (dict(dropout=0.5), TypeError, "dropout"),
    ],
    ids=str,
)
def test_options(wrap, options, error, message):
    with pytest.raises(error, match=message):
        call(wrap, operands(), **options)


def test_what_is_no_array(wrap):
    for name in ("dout", "q", "k", "v", "out", "lse"):
        arrays = {other: x if other == name else wrap(x) for other, x in operands().items()}
        for bad in (None, 3.0):
            kind = type(bad).__name__
            with pytest.raises(
                TypeError, match=f"{name} must be a CuPy, PyTorch, JAX or NumPy array.*got {kind}"
            ):
                cuflash.attention_backward(*(arrays | {name: bad}).values())
    for name in ("dlse", *GRADIENTS):
        with pytest.raises(TypeError, match=f"{name} must be a CuPy, PyTorch, JAX or NumPy array.*got list"):
            call(wrap, operands(), **{name: []})


def test_mixed_frameworks():
    torch = FromTorch()
    for name in ("dout", "out", "lse"):
        arrays = {other: x if other == name else torch(x) for other, x in operands().items()}
        with pytest.raises(TypeError, match=f"{name} must come from the framework of q, torch; got numpy"):
            cuflash.attention_backward(*arrays.values())
    with pytest.raises(TypeError, match="dk must come from the framework of q, numpy; got torch"):
        cuflash.attention_backward(*operands().values(), dk=torch(zeros(*K)))


def test_torch_tensors_that_want_gradients():
    torch = FromTorch().torch
    arrays = [torch.from_numpy(x) for x in operands().values()]
    arrays[3].requires_grad_()
    with pytest.raises(
        NotImplementedError, match="v require a gradient, which cuflash.attention_backward does not record"
    ):
        cuflash.attention_backward(*arrays)
    with pytest.raises(NotImplementedError, match="cuflash.attention does not record.*torch.no_grad"):
        cuflash.attention_vjp(*arrays[1:4])
    with torch.no_grad():
        cuflash.attention_backward(*arrays)


def test_jax_on_the_cpu():
    jnp = pytest.importorskip("jax.numpy", reason="no JAX")
    q, k, v = inputs("float32", seqlen_q=20, head_dim=8)
    out, lse, pullback = cuflash.attention_vjp(*map(jnp.asarray, (q, k, v)), causal=True, return_lse=True)
    dout, dlse = dout_of(q, v), dlse_of(q)
    gradients = pullback(jnp.asarray(dout), jnp.asarray(dlse))
    assert {type(x) for x in gradients} == {type(out)}
    expected = cuflash.attention_backward(
        dout, q, k, v, np.asarray(out), np.asarray(lse), dlse=dlse, causal=True
    )
    assert all((np.asarray(x) == y).all() for x, y in zip(gradients, expected, strict=True))
    with pytest.raises(TypeError, match="dq is not supported for jax arrays"):
        cuflash.attention_backward(*map(jnp.asarray, operands().values()), dq=q)


# ------------------------------------------------------------------------------------------------------------
# Made-up views: what needs a GPU to happen


def views(**changes) -> dict[str, View]:
    made = {}
    for place, (name, x) in enumerate(operands().items(), 1):
        made[name] = View(x.shape, contiguous_strides(x.shape), "float32", "cuda:0", place << 20, "cupy")
    for change, value in changes.items():
        name, field = change.split("_", 1)
        made[name] = made[name]._replace(**{field: value})
    return made


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(dout_device="cuda:1"), ValueError, "dout must be on the device of q, cuda:0; got cuda:1"),
        (dict(out_device="cpu"), ValueError, "out must be on the device of q, cuda:0; got cpu"),
        (dict(lse_device="cuda:1"), ValueError, "lse must be on the device of q, cuda:0; got cuda:1"),
        (dict(lse_framework="torch"), TypeError, "lse must come from the framework of q, cupy; got torch"),
        (dict(dout_ptr=(9 << 20) + 2), ValueError, r"dout must be aligned to its element \(4 bytes\)"),
        (dict(lse_ptr=(9 << 20) + 2), ValueError, r"lse must be aligned to its element \(4 bytes\)"),
        (dict(out_strides=(2**62, 24, 6, 1)), ValueError, "out has a stride of"),
    ],
    ids=str,
)
def test_views_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        check_attention_backward(**views(**changes))


def test_a_problem_says_what_was_asked():
    stated = check_attention_backward(**views(), causal=True, deterministic=np.True_)
    assert (stated.window_right, stated.deterministic, stated.has_dlse, stated.varlen) == (
        0,
        True,
        False,
        False,
    )
    assert (stated.batch, stated.seqlen_q, stated.seqlen_k, stated.heads_q, stated.heads_k) == (2, 5, 7, 4, 2)
    assert check_attention_backward(**views(), dlse=views()["lse"]).has_dlse


@pytest.mark.parametrize(
    "changes, alignment, out_alignment",
    [
        ({}, 8, 8),
        (dict(dout_ptr=(1 << 24) + 4), 4, 8),
        (dict(out_strides=(121, 24, 6, 1)), 4, 8),
        (dict(lse_ptr=(1 << 24) + 4), 8, 8),
    ],
    ids=str,
)
def test_alignment_covers_all_that_is_read_in_rows(changes, alignment, out_alignment):
    stated = check_attention_backward(**views(**changes))
    assert (stated.alignment, stated.out_alignment) == (alignment, out_alignment)


def test_alignment_of_given_buffers():
    dq = View(Q, contiguous_strides(Q), "float32", "cuda:0", (1 << 26) + 4, "cupy")
    assert check_attention_backward(**views(), dq=dq).out_alignment == 4
    assert check_attention_backward(**views(), dq=dq._replace(ptr=1 << 26)).out_alignment == 8


def test_flags_are_bools():
    q = np.ones((1, 2, 1, 4), np.float32)
    with pytest.raises(TypeError, match="deterministic must be a bool; got 1"):
        cuflash.attention_vjp(q, q, q, deterministic=1)
    packed, ends = q[0], np.array([0, 2], np.int32)
    with pytest.raises(TypeError, match="validate must be a bool; got 'no'"):
        cuflash.attention_varlen(packed, packed, packed, ends, ends, validate="no")


@pytest.mark.parametrize("name", ["q", "k", "v", "dout", "out"])
def test_out_needs_no_tensor_map(name):
    """Of an odd head_dim cuflash's own is never aligned; it is read without one."""
    made = {
        other: x._replace(strides=(8 * 64, 64, 8, 1)) if len(x.shape) == 4 else x
        for other, x in views().items()
    }
    assert check_attention_backward(**made).tma
    made[name] = made[name]._replace(ptr=made[name].ptr + 4)
    stated = check_attention_backward(**made)
    assert stated.tma == (name == "out") and stated.alignment == 4
