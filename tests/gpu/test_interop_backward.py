"""Gradients and packed sequences through PyTorch and JAX: their arrays in and out, from their allocators."""

import gc

import numpy as np
import pytest
from support import (
    Gradients,
    Lengths,
    assert_right,
    assert_right_gradients,
    assert_right_varlen,
    dlse_of,
    dout_of,
    inputs,
    packed_inputs,
)
from test_interop import CPU, TIERS, device_of, forced, from_torch, on_cuda, on_device, to_torch

import cuflash

# In one process of pytest-xdist: importing both takes longer than all tests here.
pytestmark = pytest.mark.xdist_group("frameworks")

JAX_TIERS = [parameter for parameter in CPU + TIERS if "float64" not in parameter.values]

LENGTHS = Lengths((40, 0, 70, 5), (60, 9, 70, 0), spare_q=3, spare_k=2)


# ------------------------------------------------------------------------------------------------------------
# PyTorch


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch(torch, tier, dtype):
    device = device_of(torch, tier)
    host = inputs(dtype, seqlen_q=90, seqlen_k=140)
    host_dout, host_dlse = dout_of(host[0], host[2]), dlse_of(host[0])
    q, k, v, dout, dlse = (to_torch(torch, x, device) for x in (*host, host_dout, host_dlse))
    with forced(tier):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        result = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True, deterministic=True)
        given = [torch.full_like(x, float("nan")) for x in (q, k, v)]
        into = dict(zip(Gradients._fields, given, strict=True))
        returned = cuflash.attention_backward(
            dout, q, k, v, out, lse, dlse=dlse, causal=True, deterministic=True, **into
        )
    for x, like in zip(result, (q, k, v), strict=True):
        assert type(x) is torch.Tensor and x.device == q.device and x.dtype == q.dtype and x.shape == like.shape
        assert not x.requires_grad and x.is_contiguous()
    assert all(x is y for x, y in zip(returned, given, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(returned, result, strict=True))
    gradients = Gradients(*(from_torch(torch, x) for x in result))
    assert_right_gradients(gradients, host_dout, *host, dlse=host_dlse, causal=True)


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch_vjp(torch, tier, dtype):
    device = device_of(torch, tier)
    host = inputs(dtype, seqlen_q=90)
    host_dout, host_dlse = dout_of(host[0], host[2]), dlse_of(host[0])
    q, k, v, dout, dlse = (to_torch(torch, x, device) for x in (*host, host_dout, host_dlse))
    with forced(tier):
        out, lse, pullback = cuflash.attention_vjp(q, k, v, causal=True, return_lse=True)
        assert_right(from_torch(torch, out), from_torch(torch, lse), *host, causal=True)
        for of_lse, named in ((None, {}), (host_dlse, dict(dlse=dlse))):
            gradients = Gradients(*(from_torch(torch, x) for x in pullback(dout, **named)))
            assert_right_gradients(gradients, host_dout, *host, dlse=of_lse, causal=True)


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch_varlen(torch, tier, dtype):
    device = device_of(torch, tier)
    host = packed_inputs(dtype, LENGTHS)
    host_dout, host_ends = dout_of(host[0], host[2]), LENGTHS.arrays()[0]
    q, k, v, dout, cu_q, cu_k = (to_torch(torch, x, device) for x in (*host, host_dout, *host_ends))
    with forced(tier):
        out, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
        result = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, causal=True)
        wide = cuflash.attention_varlen(q, k, v, cu_q.long(), cu_k.long(), causal=True, validate=True)
    assert all(type(x) is torch.Tensor and x.device == q.device for x in (out, lse, *result))
    assert torch.equal(wide, out)
    assert_right_varlen(from_torch(torch, out), from_torch(torch, lse), *host, LENGTHS, causal=True)
    gradients = Gradients(*(from_torch(torch, x) for x in result))
    assert_right_gradients(gradients, host_dout, *host, lengths=LENGTHS, causal=True)


@pytest.mark.parametrize("tier, dtype", CPU + TIERS)
def test_torch_gradient_of_a_sum(torch, tier, dtype):
    """Stride 0 on every axis, as .sum() gives it, and of one row for all."""
    device = device_of(torch, tier)
    q, k, v = (to_torch(torch, x, device) for x in inputs(dtype, seqlen_q=50))
    with forced(tier):
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        for dout in (torch.ones((), dtype=q.dtype, device=device).expand(out.shape), q[0, 0, 0].expand(out.shape)):
            expanded = cuflash.attention_backward(dout, q, k, v, out, lse, deterministic=True)
            whole = cuflash.attention_backward(dout.contiguous(), q, k, v, out, lse, deterministic=True)
            for x, y in zip(expanded, whole, strict=True):
                assert torch.equal(x, y) if tier != "cpu" else torch.allclose(x, y)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_torch_agrees_with_its_own_gradients(torch, device):
    """As PyTorch differentiates plain attention, with a gradient of lse as well."""
    device = device_of(torch, device)
    q, k, v = (to_torch(torch, x, device) for x in inputs("float64", seqlen_q=20, seqlen_k=30, heads_q=2))
    dout, dlse = torch.randn_like(q), torch.randn(2, 2, 20, dtype=q.dtype, device=device)
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    result = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    logits = torch.einsum("bihd,bjhd->bhij", leaves[0], leaves[1]) / 8
    loss = (torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), leaves[2]) * dout).sum()
    (loss + (logits.logsumexp(-1) * dlse).sum()).backward()
    for x, leaf in zip(result, leaves, strict=True):
        torch.testing.assert_close(x, leaf.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_torch_gradients_are_refused(torch, device):
    device = device_of(torch, device)
    q, k, v = (to_torch(torch, x, device) for x in inputs("float32", seqlen_q=20))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    cuflash.attention_backward(out, q, k, v, out, lse)  # prepared: the next call must still look
    wanting = v.clone().requires_grad_()
    with pytest.raises(NotImplementedError, match="v require a gradient.*attention_backward.*torch.no_grad"):
        cuflash.attention_backward(out, q, k, wanting, out, lse)
    with torch.no_grad():
        result = cuflash.attention_backward(out, q, k, wanting, out, lse)
    assert not any(x.requires_grad for x in result)


@on_cuda
@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_memory_comes_from_torch(cuda, deterministic):
    """Gradients and scratch from PyTorch's allocator, nothing from CuPy's."""
    import cupy

    q, k, v = (to_torch(cuda, x, "cuda") for x in inputs("bfloat16", batch=1, seqlen_q=4000))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    cuflash.attention_backward(out, q, k, v, out, lse, deterministic=deterministic)
    pool = cupy.cuda.MemoryPool()
    gc.collect()
    cuda.cuda.synchronize()
    cuda.cuda.reset_peak_memory_stats()
    before = cuda.cuda.memory_stats()["requested_bytes.all.current"]
    with cupy.cuda.using_allocator(pool.malloc):
        result = cuflash.attention_backward(out, q, k, v, out, lse, deterministic=deterministic)
    grown = cuda.cuda.memory_stats()["requested_bytes.all.peak"] - before
    scratch = grown - sum(x.numel() * x.element_size() for x in result)
    least = 4 * 4000 * 4 * (64 + 2)
    assert least <= scratch <= least + deterministic * 4 * 4 * (4000 // 16 + 2) + 3 * 512
    assert pool.total_bytes() == 0


@on_cuda
def test_torch_graph(cuda):
    """Packed forward and backward, replayed with other lengths."""
    first = LENGTHS
    host = packed_inputs("bfloat16", first)
    host = (dout_of(host[0], host[2]), *host)
    arrays = dout, q, k, v = [to_torch(cuda, x, "cuda") for x in host]
    cu_q, cu_k = (to_torch(cuda, x, "cuda") for x in first.arrays()[0])

    def call():
        out, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
        return out, lse, *cuflash.attention_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, causal=True, deterministic=True
        )

    call()
    graph = cuda.cuda.CUDAGraph()
    with cuda.cuda.graph(graph):
        results = call()
    for lengths in (
        Lengths((0, 118, 0, 0), (0, 141, 0, 0)),
        Lengths((1, 2, 3, 4), (70, 1, 0, 5), spare_q=108, spare_k=65),
        first,
    ):
        host = packed_inputs("bfloat16", lengths, seed=7)
        host = (dout_of(host[0], host[2]), *host)
        for x, y in zip((*arrays, cu_q, cu_k), (*host, *lengths.arrays()[0]), strict=True):
            x.copy_(to_torch(cuda, y, "cuda"))
        for x in results:
            x.fill_(float("nan"))
        graph.replay()
        out, lse, *gradients = (from_torch(cuda, x) for x in results)
        assert_right_varlen(out, lse, *host[1:], lengths, causal=True)
        assert_right_gradients(Gradients(*gradients), *host, lengths=lengths, causal=True)
        assert all(cuda.equal(x, y) for x, y in zip(call(), results, strict=True))


@on_cuda
def test_torch_streams(cuda):
    """dout comes late on the caller's stream, and goes right after."""
    host = inputs("float16", seqlen_q=130)
    q, k, v, staged = (to_torch(cuda, x, "cuda") for x in (*host, dout_of(host[0], host[2])))
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    how = dict(causal=True, deterministic=True)
    expected = [x.cpu() for x in cuflash.attention_backward(staged, q, k, v, out, lse, **how)]
    stream, dout = cuda.cuda.Stream(), cuda.empty_like(staged)
    for _ in range(5):
        dout.fill_(float("nan"))
        cuda.cuda.synchronize()
        with cuda.cuda.stream(stream):
            cuda.cuda._sleep(4_000_000)
            dout.copy_(staged)
            result = cuflash.attention_backward(dout, q, k, v, out, lse, **how)
            dout.fill_(float("nan"))
            on_host = [x.to("cpu") for x in result]
        assert all(cuda.equal(x, y) for x, y in zip(on_host, expected, strict=True))


@on_cuda
def test_torch_lengths_on_the_host_are_named(cuda):
    host = packed_inputs("float16", LENGTHS)
    q, k, v = (to_torch(cuda, x, "cuda") for x in host)
    on_host = [to_torch(cuda, x, "cpu") for x in LENGTHS.arrays()[0]]
    there = [x.cuda() for x in on_host]
    with pytest.raises(ValueError, match="cu_seqlens_q must be on the device of q, cuda:0; got cpu"):
        cuflash.attention_varlen(q, k, v, on_host[0], there[1])
    with pytest.raises(ValueError, match="cu_seqlens_k must be on the device of q, cuda:0; got cpu"):
        cuflash.attention_varlen(q, k, v, there[0], on_host[1])


# ------------------------------------------------------------------------------------------------------------
# JAX


@pytest.mark.parametrize("tier, dtype", JAX_TIERS)
def test_jax(jax, tier, dtype):
    host = inputs(dtype, seqlen_q=90, seqlen_k=140)
    host_dout, host_dlse = dout_of(host[0], host[2]), dlse_of(host[0])
    q, k, v, dout, dlse = on_device(jax, tier, (*host, host_dout, host_dlse))
    with forced(tier):
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        result = cuflash.attention_backward(dout, q, k, v, out, lse, dlse=dlse, causal=True)
        same_out, pullback = cuflash.attention_vjp(q, k, v, causal=True)
        pulled = pullback(dout, dlse=dlse)
    assert (same_out == out).all()
    for gradients in (result, pulled):
        for x, like in zip(gradients, (q, k, v), strict=True):
            assert isinstance(x, jax.Array) and x.devices() == q.devices() and x.dtype == q.dtype
            assert x.shape == like.shape
        gradients = Gradients(*map(np.asarray, gradients))
        assert_right_gradients(gradients, host_dout, *host, dlse=host_dlse, causal=True)


@pytest.mark.parametrize("tier, dtype", JAX_TIERS)
def test_jax_varlen(jax, tier, dtype):
    host = packed_inputs(dtype, LENGTHS)
    host_dout = dout_of(host[0], host[2])
    q, k, v, dout, cu_q, cu_k = on_device(jax, tier, (*host, host_dout, *LENGTHS.arrays()[0]))
    with forced(tier):
        out, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, causal=True, return_lse=True)
        result = cuflash.attention_varlen_backward(dout, q, k, v, out, lse, cu_q, cu_k, causal=True)
    assert all(isinstance(x, jax.Array) for x in (out, lse, *result))
    assert_right_varlen(np.asarray(out), np.asarray(lse), *host, LENGTHS, causal=True)
    gradients = Gradients(*map(np.asarray, result))
    assert_right_gradients(gradients, host_dout, *host, lengths=LENGTHS, causal=True)


@pytest.mark.parametrize("tier, dtype", JAX_TIERS)
def test_jax_results_to_write_and_tracing_are_refused(jax, tier, dtype):
    q, k, v = on_device(jax, tier, inputs(dtype, seqlen_q=20))
    with forced(tier):
        out, lse = cuflash.attention(q, k, v, return_lse=True)
        for name, like in zip(Gradients._fields, (q, k, v), strict=True):
            with pytest.raises(TypeError, match=f"{name} is not supported for jax arrays"):
                cuflash.attention_backward(out, q, k, v, out, lse, **{name: like})
        with pytest.raises(NotImplementedError, match="traced by JAX"):
            jax.jit(cuflash.attention_backward)(out, q, k, v, out, lse)


@on_cuda
def test_jax_orders_its_own_work(jax, jax_gpu):
    """dout is still being computed when the call is made, and given up right after: neither may show."""
    host = inputs("float16", seqlen_q=130)
    host_dout = dout_of(host[0], host[2])
    q, k, v = (jax.device_put(x, jax_gpu) for x in host)
    out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
    zeros = jax.device_put(np.zeros((2048, 2048), np.float32), jax_gpu)

    @jax.jit
    def slow(zeros, x):
        for _ in range(20):
            zeros = zeros @ zeros
        return x + zeros[0, 0].astype(x.dtype)

    how = dict(causal=True, deterministic=True)
    expected = [np.asarray(x) for x in cuflash.attention_backward(slow(zeros, host_dout), q, k, v, out, lse, **how)]
    assert_right_gradients(Gradients(*expected), host_dout, *host, causal=True)
    for _ in range(10):
        result = cuflash.attention_backward(slow(zeros, host_dout), q, k, v, out, lse, **how)
        overwriting = [jax.numpy.full(host_dout.shape, np.nan, np.float16) for _ in range(4)]
        for x, y in zip(result, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(x), y)
        del overwriting
