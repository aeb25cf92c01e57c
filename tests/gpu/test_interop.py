"""PyTorch and JAX: their arrays in and out, on their streams, from their allocators."""

import gc

import numpy as np
import pytest
from support import DTYPES, MARKS, TAKES, assert_right, inputs

import cuflash
from cuflash import config

# In one process of pytest-xdist: importing both takes longer than all tests here.
pytestmark = pytest.mark.xdist_group("frameworks")

TIERS = [
    pytest.param(tier, dtype, id=f"{tier}-{dtype}", marks=MARKS[tier]) for tier in MARKS for dtype in TAKES[tier]
]
CPU = [pytest.param("cpu", dtype, id=f"cpu-{dtype}") for dtype in DTYPES]
on_cuda = pytest.mark.gpu


def forced(tier):
    return config.force_tier(None if tier == "cpu" else tier)


# ------------------------------------------------------------------------------------------------------------
# PyTorch


def device_of(torch, tier) -> str:
    if tier != "cpu" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA GPU")
    return "cpu" if tier == "cpu" else "cuda"


def to_torch(torch, x: np.ndarray, device):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16).to(device)
    return torch.from_numpy(x.copy()).to(device)


def from_torch(torch, x) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.int16).numpy().view(DTYPES["bfloat16"]) if x.dtype == torch.bfloat16 else x.numpy()


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch(torch, tier, dtype):
    device = device_of(torch, tier)
    host = inputs(dtype, seqlen_q=90, seqlen_k=140)
    q, k, v = (to_torch(torch, x, device) for x in host)
    with forced(tier):
        result, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    for x in (result, lse):
        assert type(x) is torch.Tensor and x.device == q.device and not x.requires_grad and x.is_contiguous()
    assert result.dtype == q.dtype and lse.dtype == (torch.float64 if dtype == "float64" else torch.float32)
    assert_right(from_torch(torch, result), from_torch(torch, lse), *host, causal=True)


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch_views(torch, tier, dtype):
    """Head-major storage, slices of one projection, expanded heads, three axes."""
    device = device_of(torch, tier)
    host = inputs(dtype, seqlen_q=100)
    q, k, v = (to_torch(torch, x, device) for x in host)
    with forced(tier):
        plain = cuflash.attention(q, k, v, causal=True)
        heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
        fused = torch.cat([q, k, v], dim=2)
        for views in (heads_first, (fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:])):
            assert not views[1].is_contiguous()
            same(torch, tier, cuflash.attention(*views, causal=True), plain)
        repeated = [x[:, :, :1].expand(-1, -1, 2, -1) for x in (k, v)]
        same(
            torch,
            tier,
            cuflash.attention(q, *repeated, causal=True),
            cuflash.attention(q, *(x.contiguous() for x in repeated), causal=True),
        )
        flat, lse = cuflash.attention(q[1], k[1], v[1], causal=True, return_lse=True)
        assert flat.shape == (100, 4, 64) and lse.shape == (4, 100)
        same(torch, tier, flat, plain[1])


def same(torch, tier, got, expected):
    if tier == "cpu":
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch_out(torch, tier, dtype):
    """Into a slice of a larger tensor, whose other elements stay."""
    device = device_of(torch, tier)
    host = inputs(dtype, seqlen_q=100)
    q, k, v = (to_torch(torch, x, device) for x in host)
    larger = torch.full((2, 102, 6, 80), 7.0, dtype=q.dtype, device=device)
    out = larger[:, 1:101, 1:5, 8:72]
    out.fill_(float("nan"))
    with forced(tier):
        result, lse = cuflash.attention(q, k, v, out=out, return_lse=True)
        assert result is out
        assert_right(from_torch(torch, out.contiguous()), from_torch(torch, lse), *host)
        out.fill_(7)
        assert (larger == 7).all()
        with pytest.raises(ValueError, match="out must not overlap k"):
            cuflash.attention(k.clone(), k, v, out=k)
        # The same call again, prepared by now, and then with an out inside q.
        cuflash.attention(q, k, v, out=torch.empty_like(q))
        with pytest.raises(ValueError, match="out must not overlap q"):
            cuflash.attention(q, k, v, out=q)
    np.testing.assert_array_equal(from_torch(torch, q).view(np.uint8), host[0].view(np.uint8))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_torch_gradients_are_refused(torch, device):
    device = device_of(torch, device)
    q, k, v = (to_torch(torch, x, device) for x in inputs("float32", seqlen_q=20))
    cuflash.attention(q, k, v)  # prepared: the next call must still look
    v.requires_grad_()
    with pytest.raises(NotImplementedError, match="v require a gradient.*torch.no_grad"):
        cuflash.attention(q, k, v)
    with torch.no_grad():
        result = cuflash.attention(q, k, v)
    assert not result.requires_grad
    with torch.inference_mode():
        assert torch.equal(cuflash.attention(q, k, v), result)
    assert torch.equal(cuflash.attention(q, k, v.detach()), result)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_torch_subclasses(torch, device):
    """A Parameter among tensors is a tensor."""
    device = device_of(torch, device)
    q, k, v = (to_torch(torch, x, device) for x in inputs("float32", seqlen_q=20))
    expected = cuflash.attention(q, k, v)
    for _ in range(2):
        with torch.no_grad():
            assert torch.equal(cuflash.attention(torch.nn.Parameter(q), k, v), expected)
            assert torch.equal(cuflash.attention(q, torch.nn.Parameter(k), torch.nn.Parameter(v)), expected)
        frozen = torch.nn.Parameter(v, requires_grad=False)
        assert torch.equal(cuflash.attention(q, k, frozen), expected)
        assert torch.equal(
            cuflash.attention(q, k, v, out=torch.nn.Parameter(torch.empty_like(q), False)), expected
        )


@on_cuda
def test_torch_devices_do_not_mix(cuda):
    q, k, v = (to_torch(cuda, x, "cuda") for x in inputs("float16", seqlen_q=20))
    for mixed, names in (
        ((q.cpu(), k, v), "cpu, cuda:0, cuda:0"),
        ((q, k.cpu(), v), "cuda:0, cpu, cuda:0"),
        ((q, k, v.cpu()), "cuda:0, cuda:0, cpu"),
    ):
        with pytest.raises(ValueError, match=f"q, k, v must be on one device; got {names}"):
            cuflash.attention(*mixed)
    out = cuda.full_like(q, float("nan"), device="cpu")
    with pytest.raises(ValueError, match="out must be on the device of q, cuda:0; got cpu"):
        cuflash.attention(q, k, v, out=out)
    assert out.isnan().all()


@on_cuda
def test_frameworks_on_a_gpu_do_not_mix(cuda):
    import cupy

    host = inputs("float16", seqlen_q=20)
    q, k, v = (to_torch(cuda, x, "cuda") for x in host)
    on_cupy = [cupy.asarray(x) for x in host]
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got torch, cupy, torch"):
        cuflash.attention(q, on_cupy[1], v)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got cupy, torch, cupy"):
        cuflash.attention(on_cupy[0], k, on_cupy[2])
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got numpy, torch, torch"):
        cuflash.attention(host[0], k, v)
    with pytest.raises(TypeError, match="out must come from the framework of q, torch; got cupy"):
        cuflash.attention(q, k, v, out=on_cupy[0])


@on_cuda
def test_torch_memory_comes_from_torch(cuda):
    """out and lse from PyTorch's allocator, nothing from CuPy's."""
    import cupy

    q, k, v = (to_torch(cuda, x, "cuda") for x in inputs("bfloat16", batch=1, seqlen_q=4000))
    cuflash.attention(q, k, v, return_lse=True)
    pool = cupy.cuda.MemoryPool()
    gc.collect()
    cuda.cuda.synchronize()
    cuda.cuda.reset_peak_memory_stats()
    before = cuda.cuda.memory_stats()["requested_bytes.all.current"]
    with cupy.cuda.using_allocator(pool.malloc):
        out, lse = cuflash.attention(q, k, v, return_lse=True)
    grown = cuda.cuda.memory_stats()["requested_bytes.all.peak"] - before
    assert grown == sum(x.numel() * x.element_size() for x in (out, lse))
    assert pool.total_bytes() == 0


@on_cuda
def test_torch_streams(cuda):
    """Work queued before on the caller's stream is waited for, and nothing else is."""
    host = inputs("float16", seqlen_q=130)
    staged, k, v = (to_torch(cuda, x, "cuda") for x in host)
    expected = cuflash.attention(staged, k, v, causal=True)
    stream = cuda.cuda.Stream()
    q = cuda.empty_like(staged)
    for _ in range(10):
        q.fill_(float("nan"))
        cuda.cuda.synchronize()
        with cuda.cuda.stream(stream):
            cuda.cuda._sleep(4_000_000)
            q.copy_(staged)
            result = cuflash.attention(q, k, v, causal=True)
            q.fill_(float("nan"))  # after the read
            host_result = result.to("cpu", non_blocking=False)
        assert cuda.equal(host_result, expected.cpu())


@on_cuda
def test_torch_graph(cuda):
    q, k, v = (to_torch(cuda, x, "cuda") for x in inputs("bfloat16", seqlen_q=130))
    given = cuda.empty_like(q)
    cuflash.attention(q, k, v, causal=True, return_lse=True)
    cuflash.attention(q, k, v, causal=True, out=given)
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        cuflash.attention(q, k, v, causal=True, out=given)
    for seed in range(3):
        for x, y in zip((q, k, v), inputs("bfloat16", seqlen_q=130, seed=10 + seed), strict=True):
            x.copy_(to_torch(cuda, y, "cuda"))
        for x in (out, lse, given):
            x.fill_(float("nan"))
        graph.replay()
        expected = cuflash.attention(q, k, v, causal=True, return_lse=True)
        assert (
            cuda.equal(out, expected[0]) and cuda.equal(lse, expected[1]) and cuda.equal(given, expected[0])
        )


# ------------------------------------------------------------------------------------------------------------
# JAX

JAX_TIERS = [parameter for parameter in CPU + TIERS if "float64" not in parameter.values]


def on_device(jax, tier, host):
    device = jax.devices("cpu")[0] if tier == "cpu" else jax_gpu_or_skip(jax)
    return [jax.device_put(x, device) for x in host]


def jax_gpu_or_skip(jax):
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("JAX finds no CUDA GPU")


@pytest.mark.parametrize("tier, dtype", JAX_TIERS)
def test_jax(jax, tier, dtype):
    host = inputs(dtype, seqlen_q=90, seqlen_k=140)
    q, k, v = on_device(jax, tier, host)
    with forced(tier):
        result, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        alone = cuflash.attention(q, k, v, causal=True)
        flat = cuflash.attention(q[0], k[0], v[0], causal=True)
    for x in (result, lse, alone):
        assert isinstance(x, jax.Array) and x.devices() == q.devices()
    assert result.dtype == q.dtype and lse.dtype == np.float32
    assert_right(np.asarray(result), np.asarray(lse), *host, causal=True)
    assert (alone == result).all() and flat.shape == (90, 4, 64)
    assert np.isfinite(float(jax.numpy.sum(result.astype("float32"))))  # JAX can compute with it
    np.testing.assert_array_equal(np.asarray(q).view(np.uint8), host[0].view(np.uint8))


@pytest.mark.parametrize("tier, dtype", JAX_TIERS)
def test_jax_out_and_tracing_are_refused(jax, tier, dtype):
    q, k, v = on_device(jax, tier, inputs(dtype, seqlen_q=20))
    with pytest.raises(TypeError, match="out is not supported for jax arrays"):
        cuflash.attention(q, k, v, out=q)
    with pytest.raises(NotImplementedError, match="traced by JAX"):
        jax.jit(cuflash.attention)(q, k, v)
    with pytest.raises(NotImplementedError, match="traced by JAX"):
        jax.vmap(cuflash.attention)(q[None], k[None], v[None])


@on_cuda
def test_jax_orders_its_own_work(jax, jax_gpu):
    """q is still being computed when the call is made, and given up right after: neither may show."""
    host = inputs("float16", seqlen_q=130)
    k, v = (jax.device_put(x, jax_gpu) for x in host[1:])
    zeros = jax.device_put(np.zeros((2048, 2048), np.float32), jax_gpu)

    @jax.jit
    def slow(zeros, q):
        for _ in range(20):
            zeros = zeros @ zeros
        return q + zeros[0, 0].astype(q.dtype)

    expected = np.asarray(cuflash.attention(slow(zeros, host[0]), k, v))
    assert_right(expected, None, *host)
    for _ in range(20):
        result = cuflash.attention(slow(zeros, host[0]), k, v)
        overwriting = [jax.numpy.full(host[0].shape, np.nan, np.float16) for _ in range(4)]
        np.testing.assert_array_equal(np.asarray(result), expected)
        del overwriting


@on_cuda
def test_jax_and_torch_arrays_do_not_mix(jax, jax_gpu, cuda):
    host = inputs("float16", seqlen_q=20)
    q = jax.device_put(host[0], jax_gpu)
    k, v = (to_torch(cuda, x, "cuda") for x in host[1:])
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got jax, torch, torch"):
        cuflash.attention(q, k, v)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got torch, jax, torch"):
        cuflash.attention(k, q, v)


# ------------------------------------------------------------------------------------------------------------
# Anything with __dlpack__


class Dlpack:
    """A tensor's memory, known only through DLPack."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tensor.shape
        self.dtype = str(tensor.dtype).removeprefix("torch.")

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@on_cuda
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_dlpack(cuda, dtype):
    """With strides and a start of its own. The result is CuPy's."""
    import cupy

    host = inputs(dtype, seqlen_q=100)
    fused = cuda.cat([to_torch(cuda, x, "cuda") for x in host], dim=2)
    q, k, v = (Dlpack(x) for x in (fused[:, :, :4], fused[:, :, 4:6], fused[:, :, 6:]))
    result, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(result, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    assert_right(result.get(), lse.get(), *host, causal=True)


def test_dlpack_on_the_cpu(torch):
    host = inputs("float32", seqlen_q=20)
    result = cuflash.attention(*(Dlpack(torch.from_numpy(x)) for x in host))
    assert isinstance(result, np.ndarray)
    assert_right(result, None, *host)


@on_cuda
def test_a_float8_tensor_is_refused_with_its_name(cuda):
    q, k, v = (to_torch(cuda, x, "cuda").to(cuda.float8_e4m3fn) for x in inputs("float16", seqlen_q=20))
    with pytest.raises(
        TypeError, match="must be one of float16, bfloat16, float32, float64; got float8_e4m3fn"
    ):
        cuflash.attention(q, k, v)


def test_no_framework_is_imported_by_the_others():
    """NumPy arrays bring in neither PyTorch, JAX nor CuPy."""
    import subprocess
    import sys

    from cuflash import jit

    code = """
import sys, numpy as np, cuflash
x = np.zeros((1, 3, 1, 8), np.float32)
cuflash.attention(x, x, x)
print(sorted({"torch", "jax", "cupy", "click"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=jit.kernels_dir().parent,
    )
    assert done.stdout.strip() == "[]", done.stderr


@on_cuda
def test_bfloat16_through_every_door_in_a_process_of_its_own(cuda):
    """A crash below Python would take the process with it."""
    import subprocess
    import sys

    from cuflash import jit

    code = """
import torch, cuflash
x = torch.randn(1, 40, 2, 64, device="cuda", dtype=torch.bfloat16)
expected = cuflash.attention(x, x, x)
import cupy
y = cupy.from_dlpack(x)
assert torch.equal(torch.from_dlpack(cuflash.attention(y, y, y)), expected)
try:
    import jax
    gpu = jax.devices("gpu")
except (ImportError, RuntimeError):
    print("ok without JAX")
else:
    z = jax.dlpack.from_dlpack(x)
    assert torch.equal(torch.from_dlpack(cuflash.attention(z, z, z)), expected)
    print("ok")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jit.kernels_dir().parent,
    )
    assert done.returncode == 0 and done.stdout.startswith("ok"), (
        f"exit status {done.returncode}: {done.stderr}"
    )
