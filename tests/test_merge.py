"""merge_attention without a GPU: results on the CPU, every message about a wrong input, and what is launched on a GPU."""

import contextlib
import ctypes
import functools
import importlib
import itertools
import re
import types

import ml_dtypes
import numpy as np
import pytest
from support import DTYPES

import cuflash
from cuflash import arrays, config, jit, launch, merge, problem
from cuflash.arrays import View
from cuflash.problem import MergeProblem

EPS = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}


class FromNumpy:
    def __call__(self, x):
        return x

    def back(self, x):
        return x


class FromTorch:
    """The same memory as PyTorch tensors on the CPU."""

    def __init__(self):
        self.torch = pytest.importorskip("torch", reason="no PyTorch")

    def __call__(self, x):
        if x.dtype == ml_dtypes.bfloat16:
            return self.torch.from_numpy(x.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(x)

    def back(self, x):
        assert isinstance(x, self.torch.Tensor)
        if x.dtype == self.torch.bfloat16:
            return x.view(self.torch.int16).numpy().view(ml_dtypes.bfloat16)
        return x.numpy()


@pytest.fixture(params=[FromNumpy, FromTorch], ids=["numpy", "torch"])
def wrap(request):
    return request.param()


def parts(dtype, count, batch=2, seqlen=5, heads=3, head_dim_v=8, seed=0):
    """outs and lses; of each batch one head that a part has not seen, and another that none has. There outs are NaN."""
    rng = np.random.default_rng(seed)
    outs = [rng.standard_normal((batch, seqlen, heads, head_dim_v)).astype(DTYPES[dtype]) for _ in range(count)]
    number = problem.lse_dtype(dtype)
    lses = [(3 * rng.standard_normal((batch, heads, seqlen))).astype(number) for _ in range(count)]
    for n, (out, lse) in enumerate(zip(outs, lses)):
        lse[n % batch, 0], out[n % batch, :, 0] = -np.inf, np.nan
        lse[:, -1], out[:, :, -1] = -np.inf, np.nan
    return outs, lses


def formula(outs, lses):
    """(out, lse) in float64, row by row."""
    shape = outs[0].shape
    out, lse = np.zeros(shape), np.full((shape[0], shape[2], shape[1]), -np.inf)
    for b, i, h in np.ndindex(shape[:3]):
        seen = [(x[b, i, h].astype(np.float64), float(y[b, h, i])) for x, y in zip(outs, lses) if y[b, h, i] != -np.inf]
        if seen:
            lse[b, h, i] = np.logaddexp.reduce([y for _, y in seen])
            out[b, i, h] = sum(x * np.exp(y - lse[b, h, i]) for x, y in seen)
    return out, lse


def assert_right(result, outs, lses, dtype):
    out, lse = result
    expected, expected_lse = formula(outs, lses)
    assert out.dtype == outs[0].dtype and out.shape == outs[0].shape
    assert lse.dtype == lses[0].dtype and lse.shape == lses[0].shape
    rounding = 2 * EPS[dtype] + 64 * EPS["float64" if dtype == "float64" else "float32"]
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=rounding, atol=4 * rounding)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6 if dtype != "float64" else 1e-14, atol=rounding)


# ------------------------------------------------------------------------------------------------------------
# Results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 32])
def test_against_the_formula(wrap, dtype, count):
    outs, lses = parts(dtype, count)
    given = [wrap(x) for x in outs], [wrap(x) for x in lses]
    out, lse = (wrap.back(x) for x in cuflash.merge_attention(*given))
    assert_right((out, lse), outs, lses, dtype)
    assert (out[:, :, -1] == 0).all() and (lse[:, -1] == -np.inf).all()

    target = wrap(np.full(outs[0].shape, np.nan, outs[0].dtype))
    written, again = cuflash.merge_attention(*map(tuple, given), out=target)
    assert written is target
    np.testing.assert_array_equal(wrap.back(target), out)
    np.testing.assert_array_equal(wrap.back(again), lse)


@pytest.mark.parametrize("sizes", [(0, 5, 3), (2, 0, 3), (2, 5, 0)], ids=str)
def test_without_a_row(wrap, sizes):
    batch, seqlen, heads = sizes
    outs = [wrap(np.zeros((*sizes, 8), np.float32))] * 2
    lses = [wrap(np.zeros((batch, heads, seqlen), np.float32))] * 2
    out, lse = cuflash.merge_attention(outs, lses)
    assert tuple(out.shape) == (*sizes, 8) and tuple(lse.shape) == (batch, heads, seqlen)


def test_three_axes(wrap):
    """A batch of one, or packed sequences."""
    outs, lses = parts("float32", 3, batch=1)
    expected = formula(outs, lses)
    given = [wrap(x[0]) for x in outs], [wrap(x[0]) for x in lses]
    target = wrap(np.zeros(outs[0].shape[1:], np.float32))
    for more in ({}, {"out": target}):
        out, lse = (wrap.back(x) for x in cuflash.merge_attention(*given, **more))
        np.testing.assert_allclose(out, expected[0][0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(lse, expected[1][0], rtol=1e-5)
    np.testing.assert_array_equal(wrap.back(target), out)


def test_any_strides(wrap):
    outs, lses = parts("float32", 3)
    expected = cuflash.merge_attention(outs, lses)
    turned = [wrap(x.transpose(0, 2, 1, 3).copy().transpose(0, 2, 1, 3)) for x in outs]
    padded = np.full((2, 5, 3, 11), np.nan, np.float32)
    out, lse = cuflash.merge_attention(turned, [wrap(x) for x in lses], out=wrap(padded[..., :8]))
    np.testing.assert_array_equal(padded[..., :8], expected[0])
    np.testing.assert_array_equal(wrap.back(lse), expected[1])
    assert np.isnan(padded[..., 8:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_extremes(dtype):
    """Weights of 0 beside 1, logarithms far from 0, and what is not finite."""
    lses = [[800.0, -900.0, 5.0, 5.0, np.nan, -1e30], [-800.0, -901.0, 5.0, 6.0, 1.0, -np.inf]]
    lses = [np.array([[values]], dtype) for values in lses]
    outs = [np.full((1, 6, 1, 1), value, dtype) for value in (1.0, 2.0)]
    outs[1][0, 3] = np.inf
    out, lse = (x.ravel() for x in cuflash.merge_attention(outs, lses))
    share = 1 / (1 + np.exp(-1.0))
    np.testing.assert_allclose(out, [1, share + 2 * (1 - share), 1.5, np.inf, np.nan, 1], rtol=1e-6)
    expected = [800, -900 + np.log1p(np.exp(-1.0)), 5 + np.log(2), 6 + np.log1p(np.exp(-1.0)), np.nan, -1e30]
    np.testing.assert_allclose(lse, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_parts_of_the_keys_are_the_whole(wrap, dtype):
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal(shape).astype(DTYPES[dtype]) for shape in ((2, 9, 4, 16), (2, 40, 2, 16), (2, 40, 2, 24)))
    q, k, v = map(wrap, (q, k, v))
    whole, whole_lse = (wrap.back(x) for x in cuflash.attention(q, k, v, return_lse=True))
    ends = 0, 7, 7, 31, 40  # one of the parts is empty
    pieces = [cuflash.attention(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in itertools.pairwise(ends)]
    out, lse = (wrap.back(x) for x in cuflash.merge_attention(*zip(*pieces)))
    np.testing.assert_allclose(out.astype(float), whole.astype(float), atol=8 * EPS[dtype])
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5 if dtype == "bfloat16" else 1e-14)


def test_jax():
    jax = pytest.importorskip("jax", reason="no JAX")
    outs, lses = parts("float32", 3)
    cpu = jax.devices("cpu")[0]
    given = [[jax.device_put(x, cpu) for x in group] for group in (outs, lses)]
    out, lse = cuflash.merge_attention(*given)
    assert isinstance(out, jax.Array) and isinstance(lse, jax.Array)
    assert_right((np.asarray(out), np.asarray(lse)), outs, lses, "float32")
    with pytest.raises(TypeError, match="^out is not supported for jax arrays; got ArrayImpl$"):
        cuflash.merge_attention(*given, out=given[0][0])


# ------------------------------------------------------------------------------------------------------------
# Wrong inputs


def zeros(*shape, dtype="float32"):
    return np.zeros(shape, DTYPES.get(dtype, dtype))


OUT, LSE = (2, 5, 3, 8), (2, 3, 5)


def given(count=2, out=OUT, lse=LSE, dtype="float32", lse_dtype="float32"):
    return [zeros(*out, dtype=dtype) for _ in range(count)], [zeros(*lse, dtype=lse_dtype) for _ in range(count)]


def wide(shape):
    return zeros(*shape[:-1], 2 * shape[-1])


def with_last(groups, out=None, lse=None):
    """The last of outs, or of lses, replaced."""
    outs, lses = (list(group) for group in groups)
    if out is not None:
        outs[-1] = out
    if lse is not None:
        lses[-1] = lse
    return outs, lses


WRONG = {
    "a stacked array": (TypeError, "outs must be a list or tuple of arrays; got ndarray", lambda: (zeros(2, *OUT), given()[1])),
    "lses of one array": (TypeError, "lses must be a list or tuple of arrays; got ndarray", lambda: (given()[0], zeros(*LSE))),
    "no parts": (ValueError, "outs must hold 1 to 32 arrays; got 0: join more than these in groups", lambda: ([], [])),
    "33 parts": (ValueError, "outs must hold 1 to 32 arrays; got 33: join more than these in groups", lambda: given(33)),
    "an lse too few": (ValueError, "lses must hold as many arrays as outs, 2; got 1", lambda: (given()[0], given()[1][:1])),
    "no array": (
        TypeError,
        r"outs\[1\] must be a CuPy, PyTorch, JAX or NumPy array, or have __dlpack__; got int",
        lambda: with_last(given(), out=3),
    ),
    "no lse": (
        TypeError,
        r"lses\[1\] must be a CuPy, PyTorch, JAX or NumPy array, or have __dlpack__; got NoneType",
        lambda: (given()[0], [given()[1][0], None]),
    ),
    "a dtype": (
        TypeError,
        r"outs\[0\] must be one of float16, bfloat16, float32, float64; got int32",
        lambda: given(dtype=np.int32),
    ),
    "two axes": (
        ValueError,
        r"outs\[0\] must have 4 axes \(batch, seqlen, heads, head_dim_v\), or 3 for a batch of one; got shape \(5, 8\)",
        lambda: given(out=(5, 8)),
    ),
    "head_dim_v 0": (ValueError, "head_dim_v of outs must be 1 to 512; got 0", lambda: given(out=(2, 5, 3, 0))),
    "head_dim_v 513": (ValueError, "head_dim_v of outs must be 1 to 512; got 513", lambda: given(out=(2, 5, 3, 513))),
    "another shape": (
        ValueError,
        r"outs\[1\] must have shape \(2, 5, 3, 8\); got \(2, 5, 3, 7\)",
        lambda: with_last(given(), out=zeros(2, 5, 3, 7)),
    ),
    "other axes": (
        ValueError,
        r"outs\[1\] must have shape \(1, 5, 3, 8\); got \(5, 3, 8\)",
        lambda: with_last(given(out=(1, 5, 3, 8), lse=(1, 3, 5)), out=zeros(5, 3, 8)),
    ),
    "another dtype": (
        TypeError,
        r"outs\[1\] must have the dtype of outs\[0\], float32; got float16",
        lambda: with_last(given(), out=zeros(*OUT, dtype="float16")),
    ),
    "a last stride": (
        ValueError,
        r"outs\[1\] must be contiguous in its last axis \(stride 1 element\); got strides \(240, 48, 16, 2\) elements: make it "
        "contiguous first",
        lambda: with_last(given(), out=wide(OUT)[..., ::2]),
    ),
    "the axes of an lse": (
        ValueError,
        r"lses\[1\] must have shape \(2, 3, 5\); got \(2, 5, 3\)",
        lambda: with_last(given(), lse=zeros(2, 5, 3)),
    ),
    "the dtype of an lse": (
        TypeError,
        r"lses\[0\] must be float32 where outs\[0\] is float16; got float16",
        lambda: given(dtype="float16", lse_dtype="float16"),
    ),
    "the dtype of an lse of float64": (
        TypeError,
        r"lses\[0\] must be float64 where outs\[0\] is float64; got float32",
        lambda: given(dtype="float64"),
    ),
    "an lse with gaps": (
        ValueError,
        r"lses\[1\] must be contiguous; got strides \(30, 10, 2\) elements for shape \(2, 3, 5\): make it contiguous "
        "first",
        lambda: with_last(given(), lse=wide(LSE)[..., ::2]),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_inputs(wrap, name):
    error, message, make = WRONG[name]
    outs, lses = make()
    if isinstance(wrap, FromTorch):
        message = message.replace("ndarray", "Tensor")

    def wrapped(group):
        if isinstance(group, np.ndarray):
            return wrap(group)
        return [wrap(x) if isinstance(x, np.ndarray) else x for x in group]

    with pytest.raises(error, match=f"^{message}$"):
        cuflash.merge_attention(wrapped(outs), wrapped(lses))


def test_wrong_out(wrap):
    outs, lses = given()
    shared = zeros(2, *OUT)
    outs[1] = shared[1]
    readonly = zeros(*OUT)
    readonly.setflags(write=False)
    folded = np.lib.stride_tricks.as_strided(zeros(*OUT), OUT, (480, 96, 0, 4))
    cases = [
        (ValueError, r"out must have shape \(2, 5, 3, 8\); got \(2, 5, 3, 9\)", zeros(2, 5, 3, 9)),
        (TypeError, r"out must have the dtype of outs\[0\], float32; got float64", zeros(*OUT, dtype="float64")),
        (ValueError, r"out must be contiguous in its last axis .*", wide(OUT)[..., ::2]),
        (ValueError, r"out must not overlap itself; got strides .*", folded),
        (ValueError, r"out must not overlap outs\[1\]: they share memory", shared[1]),
        (ValueError, r"out must not overlap lses\[0\]: they share memory", None),
    ]
    if isinstance(wrap, FromNumpy):
        cases.append((ValueError, "out must be writable; got a read-only array", readonly))
    memory = zeros(2 * 5 * 3 * 8)
    lses[0] = memory[-30:].reshape(LSE)
    for error, message, out in cases:
        with pytest.raises(error, match=f"^{message}$"):
            target = wrap(memory.reshape(OUT) if out is None else out)
            cuflash.merge_attention([wrap(x) for x in outs], [wrap(x) for x in lses], out=target)


def test_a_mix_of_frameworks():
    wrap, (outs, lses) = FromTorch(), given()
    for name, call in (
        (r"outs\[1\]", lambda: with_last((outs, lses), out=wrap(outs[1]))),
        (r"lses\[1\]", lambda: with_last((outs, lses), lse=wrap(lses[1]))),
    ):
        with pytest.raises(TypeError, match=rf"^{name} must come from the framework of outs\[0\], numpy; got torch$"):
            cuflash.merge_attention(*call())
    with pytest.raises(TypeError, match=r"^out must come from the framework of outs\[0\], numpy; got torch$"):
        cuflash.merge_attention(outs, lses, out=wrap(zeros(*OUT)))


def test_gradients_are_not_recorded():
    wrap, (outs, lses) = FromTorch(), given()
    outs, lses = [wrap(x) for x in outs], [wrap(x) for x in lses]
    outs[1].requires_grad_()
    message = r"^outs\[1\] require a gradient, which cuflash.merge_attention does not record"
    with pytest.raises(NotImplementedError, match=message):
        cuflash.merge_attention(outs, lses)
    with wrap.torch.no_grad():
        cuflash.merge_attention(outs, lses)


def view(shape, dtype="float16", device="cuda:0", ptr=1 << 20, strides=None):
    """As an array on a GPU would have it, of 4 axes or, for an lse, 3."""
    strides = strides or tuple(int(np.prod(shape[axis + 1 :])) for axis in range(len(shape)))
    axis = (1,) * (len(shape) == 3)
    return View((*axis, *shape), (*axis, *strides), dtype, device, ptr, "cupy", bool(axis))


def views(count=2, shape=OUT, dtype="float16", **changed):
    made = {f"outs[{i}]": view(shape, dtype, ptr=(i + 1) << 20) for i in range(count)}
    made |= {f"lses[{i}]": view((shape[0], shape[2], shape[1]), "float32", ptr=(i + 100) << 20) for i in range(count)}
    return made | {"out": None} | changed


def test_wrong_inputs_on_gpus():
    for name, shape, dtype in (("outs[1]", OUT, "float16"), ("lses[0]", LSE, "float32"), ("out", OUT, "float16")):
        wrong = views(**{name: view(shape, dtype, device="cuda:1")})
        message = f"{name} must be on the device of outs[0], cuda:0; got cuda:1"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            problem.check_merge(wrong, 2)
    with pytest.raises(ValueError, match=r"^outs\[1\] must be aligned to its element \(2 bytes\); its address is 0x100001$"):
        problem.check_merge(views(**{"outs[1]": view(OUT, ptr=(1 << 20) + 1)}), 2)
    many = (2**11, 2**12, 2**8, 8)
    message = "batch * seqlen * heads of outs must be at most 2147483647; got 2048 * 4096 * 256: split the batch"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        problem.check_merge(views(shape=many), 2)


# ------------------------------------------------------------------------------------------------------------
# The launch


@pytest.mark.parametrize(
    "dtype, head_dim_v, alignment, expected",
    [
        ("float16", 512, 16, 16),
        ("float16", 128, 16, 8),  # a lane takes 4 of 128 numbers
        ("float16", 64, 16, 4),
        ("float16", 8, 16, 2),
        ("float16", 512, 4, 4),
        ("bfloat16", 129, 16, 2),
        ("float32", 128, 16, 16),
        ("float32", 100, 16, 16),
        ("float32", 64, 16, 8),
        ("float32", 3, 16, 4),
        ("float64", 128, 16, 16),
        ("float64", 32, 16, 8),
        ("float64", 33, 16, 8),
    ],
)
def test_what_a_lane_loads(dtype, head_dim_v, alignment, expected):
    kernel = merge.kernel_of(MergeProblem(dtype, 2, 3, 4, head_dim_v, 5, alignment))
    assert dict(kernel.constants)["VEC_BYTES"] == expected


@pytest.mark.parametrize(
    "changed, alignment",
    [
        ({}, 16),
        ({"outs[1]": view(OUT, ptr=(2 << 20) + 4)}, 4),
        ({"outs[1]": view(OUT, strides=(121 * 2, 24, 8, 1))}, 4),
        ({"out": view(OUT, ptr=(50 << 20) + 8)}, 8),
    ],
)
def test_alignment(changed, alignment):
    assert problem.check_merge(views(**changed), 2).alignment == alignment
    assert problem.check_merge(views(shape=(2, 5, 3, 6)), 2).alignment == 4  # of the result that is allocated, and of outs


@pytest.fixture
def gpu(monkeypatch):
    """CuPy arrays over addresses that are never touched, and a driver that notes what is launched."""
    cupy = pytest.importorskip("cupy", reason="no CuPy")
    from cupy_backends.cuda.api import driver

    attention = importlib.import_module("cuflash.attention")
    made = types.SimpleNamespace(launches=[], loaded=[], next=1 << 32)

    def array(shape, dtype="float16", offset=0):
        made.next += 1 << 28
        memory = cupy.cuda.UnownedMemory(made.next, 1 << 28, None, device_id=0)
        return cupy.ndarray(shape, dtype, memptr=cupy.cuda.MemoryPointer(memory, offset))

    def launch_kernel(function, grid, _y, _z, threads, _ty, _tz, smem, stream, argv, _extra):
        address = ctypes.cast(argv, ctypes.POINTER(ctypes.c_uint64))[0]
        data = ctypes.string_at(address, merge.MERGE_PARAMS.itemsize)
        made.launches.append((grid, threads, smem, stream, np.frombuffer(data, merge.MERGE_PARAMS)[0]))

    def load(kernel, constants, arch, device_id, smem_bytes=0, *, stream):
        made.loaded.append((kernel, constants))
        return types.SimpleNamespace(function=1, registers=64)

    made.array = array
    monkeypatch.setattr(driver, "launchKernel", launch_kernel)
    monkeypatch.setattr(jit, "load", load)
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    monkeypatch.setattr(attention, "check_driver", lambda: None)
    monkeypatch.setattr(attention, "_prepared", attention._Prepared())
    monkeypatch.setattr(attention, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "device_of", lambda device_id: config.DEVICES["sm_90"])
    monkeypatch.setattr(arrays.CupyDoor, "stream", lambda self, device_id: 7)
    monkeypatch.setattr(arrays.CupyDoor, "maker", lambda self, *what: functools.partial(array, *what[:2]))
    monkeypatch.setattr(cupy.cuda, "Device", lambda device_id=0: contextlib.nullcontext())
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", lambda device_id: None)
    return made


@pytest.mark.parametrize("count", [1, 3, 32])
def test_what_is_launched(gpu, count):
    for into in (None, None, "out"):
        outs = [gpu.array((2, 5, 3, 64)) for _ in range(count)]
        lses = [gpu.array((2, 3, 5), "float32") for _ in range(count)]
        target = gpu.array((2, 5, 3, 64)) if into else None
        out, lse = cuflash.merge_attention(outs, lses, out=target)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((2, 5, 3, 64), "float16", (2, 3, 5), "float32")
        assert target is None or out is target
        ((grid, threads, smem, stream, record),) = gpu.launches
        gpu.launches.clear()
        assert (grid, threads, smem, stream) == (4, 256, 0, 7)  # 30 rows, 8 a block
        nulls = [0] * (32 - count)
        assert record["outs"].tolist() == [x.data.ptr for x in outs] + nulls
        assert record["lses"].tolist() == [x.data.ptr for x in lses] + nulls
        assert (record["out"], record["lse"]) == (out.data.ptr, lse.data.ptr)
        assert record["outs_strides"][:count].tolist() == [[960, 192, 64]] * count
        assert record["out_strides"].tolist() == [960, 192, 64]
        sizes = [int(record[name]) for name in ("batch", "seqlen", "heads", "head_dim_v", "num_parts")]
        assert sizes == [2, 5, 3, 64, count]
    assert [kernel for kernel, _ in gpu.loaded] == ["merge"] * 2, "the second call is that of the first"


def test_overlaps_are_found_in_repeated_calls(gpu):
    outs, lses = [gpu.array(OUT) for _ in range(2)], [gpu.array(LSE, "float32") for _ in range(2)]
    cuflash.merge_attention(outs, lses, out=gpu.array(OUT))
    with pytest.raises(ValueError, match=r"^out must not overlap outs\[1\]: they share memory$"):
        cuflash.merge_attention(outs, lses, out=outs[1])
    assert len(gpu.launches) == 1


def test_nothing_is_launched_without_rows(gpu):
    out, lse = cuflash.merge_attention([gpu.array((2, 0, 3, 8))], [gpu.array((2, 3, 0), "float32")])
    assert out.shape == (2, 0, 3, 8) and lse.shape == (2, 3, 0) and gpu.launches == gpu.loaded == []


# ------------------------------------------------------------------------------------------------------------
# The kernel


def known_archs():
    try:
        return jit.supported_archs()
    except jit.NvrtcMissing:
        return ()


needs_nvrtc = pytest.mark.skipif(not known_archs(), reason="no NVRTC")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_60", "sm_75", "sm_90", "sm_120"])
def test_variants_compile_without_spills(arch):
    if int(arch.removeprefix("sm_")) not in known_archs():
        pytest.skip(f"NVRTC does not know {arch}")
    for dtype, head_dim_v in itertools.product(DTYPES, (16, 64, 128, 512)):
        kernel = merge.kernel_of(MergeProblem(dtype, 2, 3, 4, head_dim_v, 5))
        built = jit.build(kernel.kernel, launch.kernel_constants(kernel), arch)
        assert built.registers and built.spill_bytes == 0, (arch, dtype, head_dim_v, built.log)


@needs_nvrtc
@pytest.mark.parametrize("name", [*(f"MERGE_OFFSET_{field}" for field in merge.MERGE_PARAMS.names), "MERGE_PARAMS_BYTES"])
def test_another_params_layout_does_not_compile(name):
    constants = launch.kernel_constants(merge.kernel_of(MergeProblem("float32", 2, 3, 4, 64, 5)))
    with pytest.raises(RuntimeError, match="(?s)cannot compile merge.*static"):
        jit.build("merge", constants | {name: constants[name] + 8}, "sm_90")


def test_every_field_of_the_params_is_checked():
    text = (jit.kernels_dir() / "merge.cu").read_text()
    assert re.findall(r"MEETS\((\w+)\);", text) == list(merge.MERGE_PARAMS.names)
