"""Every message about a wrong input, by its text; what a problem says of window, alignment and shared memory.

Through `cuflash.attention` on NumPy arrays and, where PyTorch is installed, on its CPU tensors; what needs a
GPU to happen (devices, frameworks, addresses) through `check_attention` on views that are made up.
"""

import math
import re
import sys

import ml_dtypes
import numpy as np
import pytest

import cuflash
from cuflash.arrays import View
from cuflash.problem import Problem, check_attention, check_overlap


class FromNumpy:
    """The arrays of the tests as they come."""

    name = "numpy"

    def __call__(self, x):
        return x

    def is_poison(self, x):
        return bool(np.isnan(np.asarray(x, np.float64)).all())


class FromTorch:
    """The same memory as PyTorch tensors on the CPU."""

    name = "torch"

    def __init__(self):
        self.torch = pytest.importorskip("torch", reason="no PyTorch")

    def __call__(self, x):
        if x.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(x)

    def is_poison(self, x):
        return bool(self.torch.isnan(x).all())


@pytest.fixture(params=[FromNumpy, FromTorch], ids=["numpy", "torch"])
def wrap(request):
    return request.param()


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, dtype)


Q, K, V = (2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)


def arrays(q=Q, k=K, v=V, dtype="float32"):
    return [zeros(*shape, dtype=dtype) for shape in (q, k, v)]


def refused(wrap, error, message, q, k, v, **options):
    """The call raises `error` with `message`, and a NaN-filled `out` of the right kind stays as it was."""
    with pytest.raises(error, match=message):
        cuflash.attention(wrap(q), wrap(k), wrap(v), **options)
    if "out" in options or q.ndim != 4 or v.ndim != 4 or q.dtype.kind != "f":
        return
    out = wrap(np.full((*q.shape[:3], v.shape[3]), np.nan, q.dtype))
    with pytest.raises((TypeError, ValueError)):
        cuflash.attention(wrap(q), wrap(k), wrap(v), out=out, **options)
    assert wrap.is_poison(out)


# ------------------------------------------------------------------------------------------------------------
# Shapes

SHAPES = {
    "2-d q": (dict(q=(5, 8)), r"q must have 4 axes .*, or 3 .*got shape \(5, 8\)"),
    "5-d k": (dict(k=(1, 2, 7, 2, 8)), r"k must have 4 axes .*got shape \(1, 2, 7, 2, 8\)"),
    "1-d v": (dict(v=(7,)), r"v must have 4 axes .*got shape \(7,\)"),
    "0-d q": (dict(q=()), r"q must have 4 axes .*got shape \(\)"),
    "3-d q, 4-d k and v": (
        dict(q=(5, 4, 8), k=(1, 7, 2, 8), v=(1, 7, 2, 6)),
        r"must all have 4 axes or all have 3; got shapes \(5, 4, 8\), \(1, 7, 2, 8\) and \(1, 7, 2, 6\)",
    ),
    "4-d q, 3-d k": (dict(q=(1, 5, 4, 8), k=(7, 2, 8), v=(1, 7, 2, 6)), "must all have 4 axes or all have 3"),
    "batch of k": (dict(k=(3, 7, 2, 8)), "batch must be the same in q, k and v; got 2, 3 and 2"),
    "batch of v": (dict(v=(1, 7, 2, 6)), "batch must be the same in q, k and v; got 2, 2 and 1"),
    "batch of q": (dict(q=(1, 5, 4, 8)), "batch must be the same in q, k and v; got 1, 2 and 2"),
    "seqlen": (dict(v=(2, 6, 2, 6)), "seqlen must be the same in k and v; got 7 and 6"),
    "heads": (dict(v=(2, 7, 1, 6)), "heads must be the same in k and v; got 2 and 1"),
    "head_dim": (dict(k=(2, 7, 2, 9)), "head_dim must be the same in q and k; got 8 and 9"),
    "head_dim 0": (dict(q=(2, 5, 4, 0), k=(2, 7, 2, 0)), "head_dim of q and k must be 1 to 256; got 0"),
    "head_dim 257": (
        dict(q=(2, 5, 4, 257), k=(2, 7, 2, 257)),
        "head_dim of q and k must be 1 to 256; got 257",
    ),
    "head_dim_v 0": (dict(v=(2, 7, 2, 0)), "head_dim of v must be 1 to 256; got 0"),
    "head_dim_v 300": (dict(v=(2, 7, 2, 300)), "head_dim of v must be 1 to 256; got 300"),
}


@pytest.mark.parametrize("shapes, message", SHAPES.values(), ids=SHAPES)
def test_shapes(wrap, shapes, message):
    refused(wrap, ValueError, message, *arrays(**shapes))


@pytest.mark.parametrize("heads_q, heads_k", [(33, 2), (3, 2), (2, 3), (4, 0), (1, 2)])
def test_heads_that_do_not_divide(wrap, heads_q, heads_k):
    message = f"heads of q must be a multiple of the heads of k and v; got {heads_q} and {heads_k}$"
    refused(wrap, ValueError, message, *arrays((2, 5, heads_q, 8), (2, 7, heads_k, 8), (2, 7, heads_k, 6)))


@pytest.mark.parametrize("heads_q, heads_k", [(6, 2), (7, 1), (28, 4), (15, 5), (96, 8), (0, 0), (0, 2)])
def test_heads_that_divide(wrap, heads_q, heads_k):
    q, k, v = arrays((2, 5, heads_q, 8), (2, 7, heads_k, 8), (2, 7, heads_k, 6))
    assert tuple(cuflash.attention(wrap(q), wrap(k), wrap(v)).shape) == (2, 5, heads_q, 6)


def test_a_sequence_longer_than_the_kernels_count():
    q, k = view((1, 2**30, 1, 8)), view((1, 2**30, 1, 8))
    with pytest.raises(ValueError, match=f"seqlen of q must be at most {2**30 - 1}; got {2**30}"):
        check_attention(q, view((1, 1, 1, 8)), view((1, 1, 1, 8)))
    with pytest.raises(ValueError, match=f"seqlen of k must be at most {2**30 - 1}; got {2**30}"):
        check_attention(view((1, 1, 1, 8)), k, k)


# ------------------------------------------------------------------------------------------------------------
# Kinds of array

DTYPES = "float16, bfloat16, float32, float64"


@pytest.mark.parametrize(
    "dtypes",
    [
        ("float32", "float16", "float16"),
        ("float16", "float16", "float64"),
        ("int8", "float32", "float32"),
        ("float32", "complex64", "float32"),
        ("bfloat16", "float16", "float16"),
    ],
)
def test_mixed_dtypes(wrap, dtypes):
    q, k, v = (x.astype(dtype) for x, dtype in zip(arrays(), dtypes, strict=True))
    message = f"q, k, v must have one dtype; got {', '.join(dtypes)}: cast them to the same one of {DTYPES}"
    refused(wrap, TypeError, re.escape(message), q, k, v)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8", "bool", "complex64", "complex128"])
def test_dtypes_that_are_no_floats(wrap, dtype):
    refused(wrap, TypeError, f"q, k, v must be one of {DTYPES}; got {dtype}$", *arrays(dtype=dtype))


def test_dtypes_that_only_numpy_has():
    for dtype in ("longdouble", ml_dtypes.float8_e4m3fn, "datetime64[s]", object):
        with pytest.raises(
            TypeError, match=f"q, k, v must be one of {DTYPES}; got {np.dtype(dtype).name.split('[')[0]}"
        ):
            cuflash.attention(*(x.astype(dtype) for x in arrays()))


def test_what_is_no_array():
    q, k, v = arrays()
    for bad in (q.tolist(), None, 3.0, "q"):
        kind = type(bad).__name__
        for name, call in (("q", (bad, k, v)), ("k", (q, bad, v)), ("v", (q, k, bad))):
            with pytest.raises(
                TypeError, match=f"{name} must be a CuPy, PyTorch, JAX or NumPy array.*got {kind}"
            ):
                cuflash.attention(*call)
    with pytest.raises(TypeError, match="out must be a CuPy, PyTorch, JAX or NumPy array.*got list"):
        cuflash.attention(q, k, v, out=[])


def test_mixed_frameworks():
    torch = FromTorch()
    q, k, v = arrays()
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got numpy, torch, torch"):
        cuflash.attention(q, torch(k), torch(v))
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got torch, torch, numpy"):
        cuflash.attention(torch(q), torch(k), v)
    out = np.full((*Q[:3], V[3]), np.nan, "float32")
    with pytest.raises(TypeError, match="out must come from the framework of q, torch; got numpy"):
        cuflash.attention(torch(q), torch(k), torch(v), out=out)
    with pytest.raises(TypeError, match="out must come from the framework of q, numpy; got torch"):
        cuflash.attention(q, k, v, out=torch(out))
    assert np.isnan(out).all()


def test_torch_tensors_that_are_not_plain():
    torch = FromTorch().torch
    q, k, v = map(torch.from_numpy, arrays())
    with pytest.raises(TypeError, match="tensors must be dense .*got layout torch.sparse_coo"):
        cuflash.attention(q.to_sparse(), k, v)
    with pytest.raises(ValueError, match="on the CPU or a CUDA device; got one on meta"):
        cuflash.attention(q.to("meta"), k, v)
    with pytest.raises(NotImplementedError, match="k, v require a gradient.*cuflash.torch.attention .*torch.no_grad.*detach"):
        cuflash.attention(q, k.requires_grad_(), v.requires_grad_())
    with torch.no_grad():
        cuflash.attention(q, k, v)
    cuflash.attention(q, k.detach(), v.detach())


class OnGpu:
    """An array that says through DLPack that it lies on a GPU."""

    shape, dtype = (2, 5, 4, 8), "float32"

    def __init__(self, device=(2, 0)):
        self.device = device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        raise AssertionError("read before it was checked")


def test_a_gpu_array_without_cupy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"CuPy is not installed.*pip install 'cuflash\[cuda12\]'.*cuda13"):
        cuflash.attention(OnGpu(), OnGpu(), OnGpu())


def test_dlpack_arrays_that_do_not_fit_together():
    with pytest.raises(ValueError, match="q, k, v must be on one device; got cuda:0, cuda:1, cuda:0"):
        cuflash.attention(OnGpu(), OnGpu((2, 1)), OnGpu())
    with pytest.raises(TypeError, match="out is not supported for dlpack arrays; got OnGpu"):
        cuflash.attention(OnGpu(), OnGpu(), OnGpu(), out=OnGpu())


def test_jax_on_the_cpu():
    jnp = pytest.importorskip("jax.numpy", reason="no JAX")
    import jax

    q, k, v = (jnp.asarray(x) for x in arrays())
    with pytest.raises(TypeError, match="out is not supported for jax arrays"):
        cuflash.attention(q, k, v, out=q)
    with pytest.raises(NotImplementedError, match="q is traced by JAX"):
        jax.jit(cuflash.attention)(q, k, v)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got jax, numpy, jax"):
        cuflash.attention(q, np.asarray(k), v)


# ------------------------------------------------------------------------------------------------------------
# Strides


def test_a_last_axis_that_is_not_contiguous(wrap):
    q, k, v = arrays()
    views = {
        "stored (batch, seqlen, head_dim, heads)": zeros(2, 5, 8, 4).transpose(0, 1, 3, 2),
        "every second element": zeros(2, 5, 4, 16)[..., ::2],
        "expanded": np.broadcast_to(zeros(2, 5, 4, 1), Q),
    }
    if wrap.name == "numpy":  # PyTorch has no negative strides
        views["backwards"] = zeros(*Q)[..., ::-1]
    for bad in views.values():
        strides = ", ".join(str(stride // 4) for stride in bad.strides)
        message = (
            rf"q must be contiguous in its last axis \(stride 1 element\); got strides \({strides}\) elements"
        )
        if bad.flags.writeable or wrap.name == "numpy":
            refused(wrap, ValueError, message, bad, k, v)
    for name, call in (
        ("k", (q, zeros(2, 7, 2, 16)[..., ::2], v)),
        ("v", (q, k, zeros(2, 7, 2, 12)[..., ::2])),
    ):
        refused(wrap, ValueError, f"{name} must be contiguous in its last axis", *call)


def test_a_last_axis_of_a_3d_array_is_named_as_it_is():
    q, k, v = zeros(5, 4, 16)[..., ::2], zeros(7, 2, 8), zeros(7, 2, 6)
    with pytest.raises(ValueError, match=r"got strides \(64, 16, 2\) elements"):
        cuflash.attention(q, k, v)


def test_strides_of_axes_of_length_one_do_not_count():
    absurd = np.lib.stride_tricks.as_strided
    q = absurd(zeros(2, 1, 4, 1), strides=(16, 4 * 10**9, 4, 996))
    k = absurd(zeros(2, 7, 1, 1), strides=(28, 4, 4 * 10**8, 0))
    v = absurd(zeros(2, 7, 1, 6), strides=(168, 24, 4 * 10**9 + 4, 4))
    assert cuflash.attention(q, k, v).shape == (2, 1, 4, 6)


def test_strides_that_are_no_whole_elements():
    records = np.zeros((2, 5, 4, 8), np.dtype([("x", "f4"), ("odd", "u1")]))
    with pytest.raises(ValueError, match="strides must be whole elements of 4 bytes; got .* bytes"):
        cuflash.attention(records["x"], *arrays()[1:])


def test_an_address_inside_an_element():
    raw = np.zeros(math.prod(Q) * 4 + 16, np.uint8)
    start = 2 + -raw.ctypes.data % 4
    q = raw[start : start + math.prod(Q) * 4].view("float32").reshape(Q)
    with pytest.raises(ValueError, match=r"q must be aligned to its element \(4 bytes\); its address is 0x"):
        cuflash.attention(q, *arrays()[1:])


# ------------------------------------------------------------------------------------------------------------
# Options

OPTIONS = {
    "window of one": (
        dict(window=(1,)),
        ValueError,
        r"window must be None or a pair \(left, right\); got \(1,\)",
    ),
    "window of three": (dict(window=(1, 2, 3)), ValueError, r"window must be .* pair .*got \(1, 2, 3\)"),
    "window a number": (dict(window=4), ValueError, r"window must be .* pair .*got 4"),
    "window left -2": (
        dict(window=(-2, 0)),
        ValueError,
        r"window left must be 0 or more, .*got -2 in \(-2, 0\)",
    ),
    "window right -3": (
        dict(window=(-1, -3)),
        ValueError,
        r"window right must be 0 or more, .*got -3 in \(-1, -3\)",
    ),
    "window of floats": (
        dict(window=(1.0, 2)),
        TypeError,
        r"window left must be an integer or None; got 1.0",
    ),
    "window right a float": (dict(window=(1, 2.5)), TypeError, r"window right must be an integer .*got 2.5"),
    "window of bools": (
        dict(window=(True, 0)),
        TypeError,
        r"window left must be an integer or None; got True",
    ),
    "window of text": (dict(window="ab"), TypeError, r"window left must be an integer or None; got 'a'"),
    "causal 1": (dict(causal=1), TypeError, r"causal must be a bool; got 1"),
    "causal None": (dict(causal=None), TypeError, r"causal must be a bool; got None"),
    "causal text": (dict(causal="no"), TypeError, r"causal must be a bool; got 'no'"),
    "softcap -1": (dict(softcap=-1.0), ValueError, r"softcap must be finite and 0 \(off\) or more; got -1.0"),
    "softcap nan": (dict(softcap=math.nan), ValueError, r"softcap must be finite .*got nan"),
    "softcap inf": (dict(softcap=math.inf), ValueError, r"softcap must be finite .*got inf"),
    "softcap text": (dict(softcap="50"), TypeError, r"softcap must be a number; got '50'"),
    "softcap True": (dict(softcap=True), TypeError, r"softcap must be a number; got True"),
    "scale nan": (dict(softmax_scale=math.nan), ValueError, r"softmax_scale must be finite; got nan"),
    "scale inf": (dict(softmax_scale=-math.inf), ValueError, r"softmax_scale must be finite; got -inf"),
    "scale complex": (dict(softmax_scale=1j), TypeError, r"softmax_scale must be a number; got 1j"),
    "scale a bool": (dict(softmax_scale=False), TypeError, r"softmax_scale must be a number; got False"),
}


@pytest.mark.parametrize("options, error, message", OPTIONS.values(), ids=OPTIONS)
def test_options(wrap, options, error, message):
    refused(wrap, error, message, *arrays(), **options)


def test_an_option_that_does_not_exist():
    with pytest.raises(TypeError, match="dropout"):
        cuflash.attention(*arrays(), dropout=0.1)
    with pytest.raises(TypeError, match="positional"):
        cuflash.attention(*arrays(), True)


def test_numbers_of_numpy_are_numbers():
    problem = stated(
        causal=np.bool_(True),
        window=(np.int64(3), np.int32(9)),
        softmax_scale=np.float32(0.5),
        softcap=np.float64(2),
    )
    assert (problem.window_left, problem.window_right, problem.softmax_scale, problem.softcap) == (
        3,
        0,
        0.5,
        2.0,
    )
    assert all(type(x) in (int, float) for x in (problem.window_left, problem.softmax_scale, problem.softcap))


def test_a_scale_of_zero_is_not_the_default():
    assert stated(softmax_scale=0).softmax_scale == 0.0
    assert stated(softmax_scale=-0.25).softmax_scale == -0.25
    assert stated().softmax_scale == 8**-0.5


# ------------------------------------------------------------------------------------------------------------
# out


def test_out_is_returned_and_written(wrap):
    q, k, v = arrays()
    v += 3
    out = wrap(np.full((*Q[:3], V[3]), np.nan, "float32"))
    assert cuflash.attention(wrap(q), wrap(k), wrap(v), out=out) is out
    assert (out == 3).all()
    result, lse = cuflash.attention(wrap(q), wrap(k), wrap(v), out=out, return_lse=True)
    assert result is out and tuple(lse.shape) == (2, 4, 5)


def test_out_of_a_3d_call(wrap):
    q, k, v = zeros(5, 4, 8), zeros(7, 2, 8), zeros(7, 2, 6) + 3
    out = wrap(np.full((5, 4, 6), np.nan, "float32"))
    result, lse = cuflash.attention(wrap(q), wrap(k), wrap(v), out=out, return_lse=True)
    assert result is out and (out == 3).all() and tuple(lse.shape) == (4, 5)
    with pytest.raises(ValueError, match=r"out must have shape \(5, 4, 6\); got \(1, 5, 4, 6\)"):
        cuflash.attention(wrap(q), wrap(k), wrap(v), out=wrap(zeros(1, 5, 4, 6)))


WRONG_OUT = {
    "the shape of q": (
        lambda: zeros(*Q),
        ValueError,
        r"out must have shape \(2, 5, 4, 6\); got \(2, 5, 4, 8\)",
    ),
    "heads first": (
        lambda: zeros(2, 4, 5, 6),
        ValueError,
        r"out must have shape \(2, 5, 4, 6\); got \(2, 4, 5, 6\)",
    ),
    "3-d": (lambda: zeros(5, 4, 6), ValueError, r"out must have shape \(2, 5, 4, 6\); got \(5, 4, 6\)"),
    "1-d": (lambda: zeros(6), ValueError, r"out must have shape \(2, 5, 4, 6\); got \(6,\)"),
    "dtype": (
        lambda: zeros(2, 5, 4, 6, dtype="float64"),
        TypeError,
        "out must have the dtype of q, float32; got float64",
    ),
    "every second": (
        lambda: zeros(2, 5, 4, 12)[..., ::2],
        ValueError,
        "out must be contiguous in its last axis",
    ),
}


@pytest.mark.parametrize("make, error, message", WRONG_OUT.values(), ids=WRONG_OUT)
def test_a_wrong_out(wrap, make, error, message):
    out = make()
    out[...] = np.nan
    refused(wrap, error, message, *arrays(), out=wrap(out))
    assert np.isnan(out).all()


def test_an_out_that_cannot_be_written():
    out = zeros(2, 5, 4, 6)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out must be writable; got a read-only array"):
        cuflash.attention(*arrays(), out=out)


def test_an_out_that_overlaps_itself(wrap):
    shape = (2, 5, 4, 6)
    for strides in ((0, 24, 6, 1), (120, 0, 6, 1), (120, 24, 5, 1), (6, 12, 24, 1)):
        out = np.lib.stride_tricks.as_strided(zeros(300), shape, tuple(4 * stride for stride in strides))
        refused(
            wrap,
            ValueError,
            rf"out must not overlap itself; got strides \({', '.join(map(str, strides))}\)",
            *arrays(),
            out=wrap(out),
        )


def test_an_out_that_overlaps_an_input(wrap):
    q, k, v = arrays(v=(2, 7, 2, 8))
    memory = np.full(3 * q.size, np.nan, "float32")
    for name, start, shape in (("q", 0, Q), ("k", 1, K), ("v", 2, K)):
        x = memory[start : start + math.prod(shape)].reshape(shape)
        out = memory[start + x.size - 1 :][: q.size].reshape(Q)  # its first element is the last one of x
        inputs = {"q": q, "k": k, "v": v} | {name: x}
        with pytest.raises(ValueError, match=f"out must not overlap {name}: they share memory"):
            cuflash.attention(*map(wrap, inputs.values()), out=wrap(out))
        assert np.isnan(out).all()
    with pytest.raises(ValueError, match="out must not overlap q"):
        cuflash.attention(wrap(q), wrap(k), wrap(v), out=wrap(q))


def test_an_out_beside_or_between_the_inputs_is_fine(wrap):
    fused = np.full((2, 5, 16, 8), np.nan, "float32")  # q, k, v and out as slices of one buffer
    fused[:, :, :12] = 1
    q, k, v, out = fused[:, :, :4], fused[:, :, 4:8], fused[:, :, 8:12], fused[:, :, 12:]
    cuflash.attention(wrap(q), wrap(k), wrap(v), out=wrap(out))
    assert (fused == 1).all()
    memory = np.full(2 * math.prod(Q), np.nan, "float32")
    out, q = memory[: math.prod(Q)].reshape(Q), memory[math.prod(Q) :].reshape(Q)  # end to end
    q[...] = 0
    k, v = np.ones(K, "float32"), np.ones(K, "float32")
    cuflash.attention(wrap(q), wrap(k), wrap(v), out=wrap(out))
    assert (out == 1).all() and (q == 0).all()


# ------------------------------------------------------------------------------------------------------------
# Made-up views


def view(
    shape=Q, strides=None, dtype="float32", device="cuda:0", ptr=1 << 20, framework="cupy", **more
) -> View:
    strides = (
        tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape))) if strides is None else strides
    )
    return View(shape, strides, dtype, device, ptr, framework, **more)


def views(**changes) -> dict[str, View]:
    """q, k and v apart from each other, each with what `changes` names: k_device="cuda:1"."""
    made = {
        name: view(shape, ptr=(1 + i) << 20) for i, (name, shape) in enumerate((("q", Q), ("k", K), ("v", V)))
    }
    for change, value in changes.items():
        name, field = change.split("_", 1)
        made[name] = made[name]._replace(**{field: value})
    return made


def stated(q=None, k=None, v=None, **options) -> Problem:
    made = views()
    return check_attention(q or made["q"], k or made["k"], v or made["v"], **options)


MIXED = {
    "devices": (
        dict(k_device="cuda:1"),
        ValueError,
        "q, k, v must be on one device; got cuda:0, cuda:1, cuda:0",
    ),
    "cpu and gpu": (
        dict(v_device="cpu"),
        ValueError,
        "q, k, v must be on one device; got cuda:0, cuda:0, cpu",
    ),
    "frameworks": (
        dict(q_framework="torch"),
        TypeError,
        "q, k, v must come from one framework; got torch, cupy, cupy",
    ),
    "dtypes": (
        dict(v_dtype="float16"),
        TypeError,
        "q, k, v must have one dtype; got float32, float32, float16",
    ),
    "misaligned q": (
        dict(q_ptr=0x1002),
        ValueError,
        r"q must be aligned to its element \(4 bytes\); its address is 0x1002",
    ),
    "misaligned v": (
        dict(v_ptr=0x1001),
        ValueError,
        r"v must be aligned to its element \(4 bytes\); its address is 0x1001",
    ),
    "stride of k": (
        dict(k_strides=(2**62, 16, 8, 1)),
        ValueError,
        rf"k has a stride of {2**62} elements, past the 64-bit range",
    ),
    "negative stride of q": (
        dict(q_strides=(-(2**62), 32, 8, 1)),
        ValueError,
        rf"q has a stride of {2**62} elements, past the 64-bit range",
    ),
}


@pytest.mark.parametrize("changes, error, message", MIXED.values(), ids=MIXED)
def test_views_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        check_attention(**views(**changes))


OUT_VIEWS = {
    "device": (dict(device="cuda:1"), ValueError, "out must be on the device of q, cuda:0; got cuda:1"),
    "on the cpu": (dict(device="cpu"), ValueError, "out must be on the device of q, cuda:0; got cpu"),
    "framework": (
        dict(framework="torch"),
        TypeError,
        "out must come from the framework of q, cupy; got torch",
    ),
    "dtype": (dict(dtype="bfloat16"), TypeError, "out must have the dtype of q, float32; got bfloat16"),
    "address": (dict(ptr=(5 << 20) + 2), ValueError, "out must be aligned to its element"),
    "over k": (dict(ptr=2 << 20), ValueError, "out must not overlap k: they share memory"),
}


@pytest.mark.parametrize("changes, error, message", OUT_VIEWS.values(), ids=OUT_VIEWS)
def test_out_views_that_do_not_fit(changes, error, message):
    with pytest.raises(error, match=message):
        stated(out=view((2, 5, 4, 6), **{"ptr": 5 << 20} | changes))


def test_a_problem_says_what_was_asked():
    assert stated(causal=True, softcap=30, return_lse=True) == Problem(
        dtype="float32",
        batch=2,
        seqlen_q=5,
        seqlen_k=7,
        heads_q=4,
        heads_k=2,
        head_dim=8,
        head_dim_v=6,
        softmax_scale=8**-0.5,
        softcap=30.0,
        window_left=None,
        window_right=0,
        return_lse=True,
        alignment=8,
        out_alignment=8,
        tma=False,  # rows of v at multiples of 8 bytes
    )


@pytest.mark.parametrize("shape", [(0, 5, 4, 8), (2, 0, 4, 8), (2, 5, 0, 8)])
def test_an_empty_problem_has_nothing_to_write(shape):
    assert stated(q=view(shape), k=view((shape[0], 7, 2, 8)), v=view((shape[0], 7, 2, 6))).is_empty


def test_a_problem_without_keys_has_rows_to_write():
    assert not stated(k=view((2, 0, 2, 8)), v=view((2, 0, 2, 6))).is_empty


# Rows 0 to 4 (seqlen_q 5), keys 0 to 6 (seqlen_k 7): row i is at key i + 2, so no row has more than 6 keys to
# its left (i = 4) or 4 to its right (i = 0).
@pytest.mark.parametrize(
    "causal, window, expected",
    [
        (False, None, (None, None)),
        (False, (None, None), (None, None)),
        (False, (-1, -1), (None, None)),
        (False, [2, 3], (2, 3)),
        (False, (0, 0), (0, 0)),
        (True, None, (None, 0)),
        (True, (2, 3), (2, 0)),
        (True, (2, None), (2, 0)),
        (True, (6, 0), (None, 0)),
        (False, (5, 3), (5, 3)),
        (False, (6, 4), (None, None)),
        (False, (2**31 - 1, 2**40), (None, None)),
        (True, (2**63, 2**63), (None, 0)),
    ],
)
def test_windows_are_cut_to_what_they_can_reach(causal, window, expected):
    problem = stated(causal=causal, window=window)
    assert (problem.window_left, problem.window_right) == expected


@pytest.mark.parametrize("seqlen_q", [1, 2, 5, 8])
@pytest.mark.parametrize("seqlen_k", [1, 3, 5, 9])
def test_cutting_a_window_changes_no_row(seqlen_q, seqlen_k):
    def sees(i, j, left, right):
        distance = j - (i + seqlen_k - seqlen_q)
        return (left is None or distance >= -left) and (right is None or distance <= right)

    for left in (None, *range(11)):
        for right in (None, *range(11)):
            problem = stated(
                q=view((2, seqlen_q, 4, 8)),
                k=view((2, seqlen_k, 2, 8)),
                v=view((2, seqlen_k, 2, 6)),
                window=(left, right),
            )
            for i in range(seqlen_q):
                for j in range(seqlen_k):
                    assert sees(i, j, left, right) == sees(i, j, problem.window_left, problem.window_right)


def test_one_query_is_causal_without_a_mask():
    # A single row sees every key to its left, which is every key: no mask is needed.
    problem = stated(q=view((2, 1, 4, 8)), causal=True)
    assert (problem.window_left, problem.window_right) == (None, None)


@pytest.mark.parametrize(
    "changes, alignment",
    [
        ({}, 16),
        (dict(q_ptr=(1 << 20) + 2), 2),
        (dict(k_ptr=(1 << 20) + 4), 4),
        (dict(v_ptr=(1 << 20) + 8), 8),
        (dict(v_ptr=(1 << 20) + 14), 2),
        (dict(v_ptr=(1 << 20) + 32), 16),
        (dict(q_strides=(1280, 65, 64, 1)), 2),  # rows of D + 1
        (dict(k_strides=(1792, 68, 1, 1)), 2),
        (dict(k_strides=(1792, 66, 33 * 2, 1)), 4),
        (dict(k_strides=(1792, 68, 68, 1)), 8),
        (dict(k_strides=(-1792, -64, 0, 1)), 16),  # backwards and expanded
        (dict(v_strides=(1792 + 4, 128, 64, 1)), 8),
    ],
)
def test_alignment_is_what_divides_every_address(changes, alignment):
    made = {
        name: view(shape, dtype="float16", ptr=1 << 20)
        for name, shape in (("q", (2, 5, 4, 64)), ("k", (2, 7, 2, 64)), ("v", (2, 7, 2, 64)))
    }
    for change, value in changes.items():
        name, field = change.split("_", 1)
        made[name] = made[name]._replace(**{field: value})
    problem = check_attention(**made)
    assert problem.alignment == alignment
    for x in made.values():
        for b in range(2):
            for s in range(5):
                address = x.ptr + 2 * (b * x.strides[0] + s * x.strides[1] + x.strides[2])
                assert address % problem.alignment == 0


def test_alignment_leaves_out_axes_of_length_one_and_counts_bytes():
    one = view((1, 5, 1, 64), (12345, 64, 777, 1), "float16")
    assert check_attention(one, one, one).alignment == 16
    double = view((1, 5, 1, 3), dtype="float64")
    assert check_attention(double, double, double).alignment == 8
    odd = view((1, 5, 1, 3), dtype="float16")
    assert check_attention(odd, odd, odd).alignment == 2


@pytest.mark.parametrize("head_dim_v, alignment", [(64, 16), (72, 16), (20, 8), (6, 4), (7, 2), (1, 2)])
def test_alignment_of_an_out_that_is_allocated(head_dim_v, alignment):
    half = [view((1, 5, 2, d), dtype="float16") for d in (64, 64, head_dim_v)]
    problem = check_attention(*half)
    assert problem.out_alignment == alignment
    given = view((1, 5, 2, head_dim_v), dtype="float16", ptr=1 << 24)
    assert check_attention(*half, out=given).out_alignment == alignment
    assert check_attention(*half, out=given._replace(ptr=(1 << 24) + 2)).out_alignment == 2


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, True),
        (dict(ptr=(1 << 20) + 8), False),
        (dict(strides=(1792, 256, 68, 1)), False),
        (dict(strides=(1792, -128, 64, 1)), False),
        (dict(strides=(2**39, 128, 64, 1)), False),  # of 2 bytes
        (dict(strides=(2**39 - 8, 128, 64, 1)), True),
        (dict(shape=(1, 5, 2, 64), strides=(-7, 128, 64, 1)), True),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_whether_tensor_maps_can_describe_the_arrays(name, change, expected):
    """Any of q, k and v decides for the three; out needs none."""
    batch = change.get("shape", (2,))[0]
    made = {
        other: view((batch, 5, 2, 64), dtype="float16", ptr=place << 50)
        for place, other in enumerate(("q", "k", "v", "out"), 1)
    }
    own = made[name]
    made[name] = own._replace(**change | {"ptr": own.ptr + change.get("ptr", 0) % 16})
    problem = check_attention(**made)
    assert problem.tma == (expected or name == "out")


def test_tensor_maps_can_describe_expanded_arrays():
    one = view((2, 5, 2, 64), (0, 64, 0, 1), "float16")
    assert check_attention(one, one, one).tma


def test_shared_memory_is_decided_by_element():
    # Three heads of one buffer of four: interleaved in memory, apart in elements.
    inside = [view((2, 5, 1, 8), (160, 32, 8, 1), ptr=(1 << 20) + 32 * head) for head in range(4)]
    check_overlap("out", inside[3], dict(zip("qkv", inside[:3], strict=True)))
    one_over = inside[3]._replace(ptr=inside[3].ptr - 4)  # one element into head 2
    with pytest.raises(ValueError, match="out must not overlap v"):
        check_overlap("out", one_over, dict(zip("qkv", inside[:3], strict=True)))


def test_shared_memory_of_backwards_and_empty_views():
    forwards = view((1, 10, 1, 8), ptr=1 << 20)
    backwards = view((1, 10, 1, 8), (80, -8, 8, 1), ptr=(1 << 20) + 9 * 32)  # the same ten rows
    with pytest.raises(ValueError, match="out must not overlap q"):
        check_overlap("out", backwards, {"q": forwards})
    check_overlap("out", backwards._replace(ptr=(1 << 20) + 19 * 32), {"q": forwards})  # the ten after them
    check_overlap("out", view((1, 0, 1, 8), ptr=1 << 20), {"q": forwards})


def test_shared_memory_of_views_over_gigabytes_is_decided_quickly():
    wide = view((64, 64, 64, 8), (2**40, 2**31, 2**20 + 8, 1), "float16", ptr=1 << 20)
    apart = wide._replace(ptr=(1 << 20) + 16)
    check_overlap("out", apart, {"q": wide})
    with pytest.raises(ValueError, match="out must not overlap q"):
        check_overlap("out", wide._replace(ptr=(1 << 20) + 14), {"q": wide})
