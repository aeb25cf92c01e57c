"""cuflash.torch and cuflash.compat on a GPU: the bits of the plain functions, however they are reached."""

import time

import numpy as np
import pytest
from support import Gradients, Lengths, assert_right, assert_right_gradients, assert_right_varlen, dout_of, inputs, packed_inputs
from test_interop import from_torch, to_torch

import cuflash

torch = pytest.importorskip("torch", reason="no PyTorch")
flash = pytest.importorskip("cuflash.torch", reason="PyTorch is too old")
pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("frameworks"), pytest.mark.usefixtures("cuda")]


@pytest.fixture(autouse=True)
def compile_anew():
    """PyTorch compiles one function a few times only, whichever tests it came from."""
    torch._dynamo.reset()


DTYPES = ["float16", "bfloat16", "float32", "float64"]
FLAT = (True, -1, -1, None, 0.0, True)  # causal, window, softmax_scale, softcap, deterministic


def on_gpu(*host, grad=False):
    return [to_torch(torch, x, "cuda").requires_grad_(grad) for x in host]


def leaves_of(dtype="bfloat16", **sizes):
    return on_gpu(*inputs(dtype, **{"seqlen_q": 130} | sizes), grad=True)


def plain_gradients(dout, leaves, **options):
    """By the plain functions: (out, lse, dq, dk, dv)."""
    given = [x.detach() for x in leaves]
    out, lse = cuflash.attention(*given, return_lse=True, **options)
    return out, lse, *cuflash.attention_backward(dout, *given, out, lse, deterministic=True, **options)


def equal(got, expected):
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))


# ------------------------------------------------------------------------------------------------------------
# Gradients


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_are_those_of_the_plain_functions(dtype):
    leaves = leaves_of(dtype, seqlen_k=200)
    options = {"causal": True, "window": (100, None), "softcap": 5.0}
    out, lse = flash.attention(*leaves, return_lse=True, deterministic=True, **options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse), retain_graph=True)
    given = [x.detach() for x in leaves]
    state = cuflash.attention(*given, return_lse=True, **options)
    expected = cuflash.attention_backward(dout, *given, *state, dlse=dlse, deterministic=True, **options)
    equal((out, lse, *got), (*state, *expected))
    # Without a gradient of lse, with one of out that is expanded, and through the operator.
    whole = torch.ones_like(out)
    expected = cuflash.attention_backward(whole, *given, *state, deterministic=True, **options)
    equal(torch.autograd.grad(out.sum(), leaves), expected)
    flat = (True, 100, -1, None, 5.0, True)
    through = torch.ops.cuflash.attention(*leaves, *flat)
    equal((*through, *torch.autograd.grad(through[0].sum(), leaves)), (*state, *expected))
    with torch.no_grad():
        equal([flash.attention(*leaves, **options)], state[:1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_right_against_the_oracle(dtype):
    host = inputs(dtype, seqlen_q=100)
    leaves = on_gpu(*host, grad=True)
    out, lse = flash.attention(*leaves, causal=True, return_lse=True)
    dout = dout_of(host[0], host[2])
    gradients = torch.autograd.grad(out, leaves, *on_gpu(dout))
    assert_right(from_torch(torch, out.detach()), from_torch(torch, lse.detach()), *host, causal=True)
    assert_right_gradients(Gradients(*(from_torch(torch, x) for x in gradients)), dout, *host, causal=True)


LENGTHS = Lengths((5, 0, 130, 17), (40, 3, 130, 64), used_k=(40, 2, 100, 64), spare_q=3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_packed_sequences(dtype):
    host = [np.nan_to_num(x) for x in packed_inputs(dtype, LENGTHS)]
    leaves = on_gpu(*host, grad=True)
    ends, used = LENGTHS.arrays()
    ends, used = [torch.from_numpy(x).cuda() for x in ends], {key: torch.from_numpy(x).cuda() for key, x in used.items()}
    out, lse = flash.attention_varlen(*leaves, *ends, causal=True, return_lse=True, deterministic=True, **used)
    given = [x.detach() for x in leaves]
    state = cuflash.attention_varlen(*given, *ends, causal=True, return_lse=True, **used)
    dout = torch.randn_like(out)
    expected = cuflash.attention_varlen_backward(dout, *given, *state, *ends, causal=True, deterministic=True, **used)
    equal((out, lse, *torch.autograd.grad(out, leaves, dout)), (*state, *expected))


def test_gradcheck():
    leaves = leaves_of("float64", batch=1, seqlen_q=5, seqlen_k=7, head_dim=4)
    assert torch.autograd.gradcheck(
        lambda *x: flash.attention(*x, causal=True, return_lse=True, deterministic=True), leaves, fast_mode=True
    )


def test_autocast():
    leaves = leaves_of("float32")
    with torch.autocast("cuda", torch.bfloat16):
        out = flash.attention(*leaves, causal=True, deterministic=True)
    assert out.dtype == torch.bfloat16
    low = [x.detach().bfloat16() for x in leaves]
    dout = torch.randn_like(out)
    expected = plain_gradients(dout, low, causal=True)
    got = torch.autograd.grad(out, leaves, dout)
    assert all(x.dtype == torch.float32 for x in got)
    equal((out, *got), (expected[0], *(x.float() for x in expected[2:])))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    from torch.utils.checkpoint import checkpoint

    leaves = leaves_of()
    out = checkpoint(lambda *x: flash.attention(*x, causal=True, deterministic=True), *leaves, use_reentrant=reentrant)
    dout = torch.randn_like(out)
    expected = plain_gradients(dout, leaves, causal=True)
    out.backward(dout)
    equal((out, *(x.grad for x in leaves)), (expected[0], *expected[2:]))


def test_vmap():
    q, k, v = (x.detach() for x in leaves_of("float32", batch=3))
    many = torch.stack([q, 2 * q])

    def loss(x, k):
        return flash.attention(x, k, v, causal=True, deterministic=True).square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(many, k)
    for i, x in enumerate(many):
        for y, z in zip(got, torch.func.grad(loss, argnums=(0, 1))(x, k), strict=True):
            torch.testing.assert_close(y[i], z)
    flat = torch.vmap(lambda x, y, z: flash.attention(x, y, z, causal=True))(q, k, v)
    torch.testing.assert_close(flat, flash.attention(q, k, v, causal=True))


# ------------------------------------------------------------------------------------------------------------
# Compiled, captured, on streams


def test_operators():
    leaves = leaves_of(seqlen_q=40)
    torch.library.opcheck(torch.ops.cuflash.attention, (*leaves, *FLAT))
    given = [x.detach() for x in leaves]
    out, lse = torch.ops.cuflash.attention(*given, *FLAT)
    torch.library.opcheck(torch.ops.cuflash.attention_backward, (out, lse, out, lse, *given, *FLAT))
    q, k, v = (x[0] for x in given)
    ends = torch.tensor([0, 10, 40], dtype=torch.int32, device="cuda")
    lengths = (ends, ends, None, None)
    torch.library.opcheck(torch.ops.cuflash.attention_varlen, (q, k, v, *lengths, *FLAT))
    out, lse = torch.ops.cuflash.attention_varlen(q, k, v, *lengths, *FLAT)
    given = (out, None, out, lse, q, k, v, *lengths, *FLAT)
    torch.library.opcheck(torch.ops.cuflash.attention_varlen_backward, given)


def compiler() -> str:
    try:
        import triton  # noqa: F401
    except ImportError:
        return "aot_eager"
    return "inductor"


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compile(mode):
    def step(q, k, v):
        heads_first = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        out, lse = flash.attention(*heads_first, causal=True, return_lse=True, deterministic=True)
        return out, lse

    backend = compiler()
    if mode and backend != "inductor":
        pytest.skip("no Triton")
    compiled = torch.compile(step, fullgraph=True, backend=backend, mode=mode)
    leaves = leaves_of()
    dout = torch.randn(2, 130, 4, 64, device="cuda", dtype=torch.bfloat16)
    for _ in range(3):  # with "reduce-overhead" the third one is replayed
        torch.compiler.cudagraph_mark_step_begin()
        out, lse = compiled(*leaves)
        got = [x.clone() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))]
        equal(got, plain_gradients(dout, leaves, causal=True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_generated_code_calls_past_the_dispatcher(dynamic):
    """The bits of uncompiled calls, whatever the shapes: results that generated code allocates, and ones that the call does."""
    if compiler() != "inductor":
        pytest.skip("no Triton")
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    def step(q, k, v, ends, cache, length):
        first = flash.attention(q * 2, k, v, causal=True)
        second, lse = flash.attention(first, k, v, return_lse=True)
        rows = (x.flatten(0, 1) for x in (second, k, v))
        third = flash.attention_varlen(*rows, ends, ends, window=(20, 0)).view(q.shape)
        fourth = flash.attention_with_kvcache(third[:, -1:], cache, cache, cache_seqlens=length)
        return lse, third, fourth + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for number, (batch, seqlen) in enumerate(((2, 130), (3, 71), (2, 130))):
        q, k, v, cache = (torch.randn(batch, seqlen, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        ends = torch.arange(batch + 1, device="cuda", dtype=torch.int32) * seqlen
        given = q, k, v, ends, cache, torch.full((batch,), 57, device="cuda", dtype=torch.int32)
        with config.patch(force_disable_caches=True):
            results, code = (compiled(*given), []) if number else run_and_get_code(compiled, *given)
        equal(results, step(*given))
        for text in code:
            assert text.count("cuflash_inductor.Site(") == 4 and "= torch.ops.cuflash" not in text
    # Not aligned: generated code copies them first, so that other kernels are taken than uncompiled.
    odd = [torch.randn(2 * 130 * 4 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(2, 130, 4, 64) for _ in range(3)]
    for x, y in zip(compiled(*odd, *given[3:]), step(*odd, *given[3:]), strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)
    equal(compiled(*given), step(*given))


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_torch_func_in_compiled_code():
    """The part that torch.func differentiates runs uncompiled."""
    q, k, v = (x.detach() for x in leaves_of("float32"))

    def loss(x):
        return flash.attention(x, k, v, causal=True).square().sum()

    for function, x in ((torch.func.grad(loss), q), (torch.vmap(torch.func.grad(loss)), torch.stack([q, 2 * q]))):
        torch.testing.assert_close(torch.compile(function, backend=compiler())(x), function(x), rtol=1e-4, atol=1e-4)


def test_graph_of_forward_and_backward():
    leaves = leaves_of()
    dout = torch.randn_like(leaves[0])

    def step():
        out = flash.attention(*leaves, causal=True, deterministic=True)
        return out, *torch.autograd.grad(out, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for seed in range(3):
        with torch.no_grad():
            for x, y in zip(leaves, inputs("bfloat16", seqlen_q=130, seed=10 + seed), strict=True):
                x.copy_(to_torch(torch, y, "cuda"))
            for x in results:
                x.fill_(float("nan"))
        graph.replay()
        expected = plain_gradients(dout, leaves, causal=True)
        equal(results, (expected[0], *expected[2:]))


def test_second_stream():
    """The backward runs on the stream of its forward, behind what was queued there."""
    staged = [x.detach() for x in leaves_of()]
    dout = torch.randn_like(staged[0])
    expected = plain_gradients(dout, staged, causal=True)
    stream = torch.cuda.Stream()
    for _ in range(5):
        leaves = [torch.full_like(x, float("nan")).requires_grad_() for x in staged]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000)
            with torch.no_grad():
                for x, y in zip(leaves, staged, strict=True):
                    x.copy_(y)
            out = flash.attention(*leaves, causal=True, deterministic=True)
            got = [x.cpu() for x in (out, *torch.autograd.grad(out, leaves, dout))]
        equal(got, [x.cpu() for x in (expected[0], *expected[2:])])


def test_sdpa():
    """F.scaled_dot_product_attention, eager and compiled, once it is told to."""
    registry = torch.nn.attention
    if not hasattr(registry, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no register_flash_attention_impl")
    leaves = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves_of(heads_k=4)]
    expected = plain_gradients(torch.ones_like(leaves[0]).transpose(1, 2), [x.transpose(1, 2) for x in leaves], causal=True)
    flash.register_sdpa()
    registry.activate_flash_attention_impl("cuflash")
    torch.use_deterministic_algorithms(True)
    try:

        def step(*x):
            with registry.sdpa_kernel(registry.SDPBackend.FLASH_ATTENTION):
                return torch.nn.functional.scaled_dot_product_attention(*x, is_causal=True)

        for call in (step, torch.compile(step, backend=compiler())):
            out = call(*leaves)
            got = out, *torch.autograd.grad(out, leaves, torch.ones_like(out))
            equal([x.transpose(1, 2) for x in got], (expected[0], *expected[2:]))
    finally:
        torch.use_deterministic_algorithms(False)
        registry.restore_flash_attention_impl()
    out = step(*leaves)
    torch.testing.assert_close(out.transpose(1, 2), expected[0], rtol=2e-2, atol=2e-2)


# ------------------------------------------------------------------------------------------------------------
# Caches and parts


def caches(**changes):
    """q, the caches, and by name the new keys and values and the lengths."""
    sizes = {"batch": 3, "heads_q": 8, "heads_k": 2, "head_dim": 64} | changes
    q, k_cache, v_cache = on_gpu(*inputs("bfloat16", seqlen_q=1, seqlen_k=300, **sizes))
    _, k, v = on_gpu(*inputs("bfloat16", seqlen_q=1, seqlen_k=1, seed=1, **sizes))
    lengths = torch.tensor([3, 250, 0], dtype=torch.int32, device="cuda")
    return [q, k_cache, v_cache], {"k": k, "v": v, "cache_seqlens": lengths}


def test_a_cache_and_its_operators():
    tensors, given = caches()
    copies = [x.clone() for x in tensors]
    expected = cuflash.attention_with_kvcache(*copies, return_lse=True, **given)
    flat = (True, -1, -1, None, 0.0, 0, True)
    new, lengths = (given["k"], given["v"], None, None), given["cache_seqlens"]
    torch.library.opcheck(torch.ops.cuflash.attention_with_kvcache_append, (*tensors, *new, lengths, None, *flat))
    torch.library.opcheck(torch.ops.cuflash.attention_with_kvcache, (*tensors, *[None] * 4, lengths, None, *flat))
    for scale in (None, 0.2):
        given |= {"softmax_scale": scale, "return_lse": True}
        results = flash.attention_with_kvcache(*tensors, **given)
        through = torch.ops.cuflash.attention_with_kvcache_append(*tensors, *new, lengths, None, *flat[:3], scale, *flat[4:])
        equal(results, through)
        equal(results, expected if scale is None else cuflash.attention_with_kvcache(*copies, **given))
    equal(tensors[1:], copies[1:])


@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_compile_of_a_cache(mode):
    """A token is appended in each step, where the last one ended."""
    backend = compiler()
    if mode and backend != "inductor":
        pytest.skip("no Triton")

    def step(q, k_cache, v_cache, k, v, lengths):
        out = flash.attention_with_kvcache(q * 2, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths)
        return out + 1

    compiled = torch.compile(step, fullgraph=True, backend=backend, mode=mode)
    tensors, given = caches()
    copies, lengths = [x.clone() for x in tensors], given["cache_seqlens"]
    with torch.no_grad():
        for number in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            new = [x + number for x in (given["k"], given["v"])]
            equal([compiled(*tensors, *new, lengths)], [step(*copies, *new, lengths)])
            equal(tensors[1:], copies[1:])
            lengths += 1


def test_graph_of_a_cache():
    """The lengths are read when it is replayed, and tokens are appended there."""
    tensors, given = caches()
    lengths = given["cache_seqlens"]
    flash.attention_with_kvcache(*tensors, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = flash.attention_with_kvcache(*tensors, **given)
    for _ in range(3):
        lengths += 7
        copies = [x.clone() for x in tensors]
        graph.replay()
        equal([out, *tensors[1:]], [cuflash.attention_with_kvcache(*copies, **given), *copies[1:]])


def test_merged_parts():
    leaves = leaves_of("float32", seqlen_k=200)
    whole = flash.attention(*leaves, return_lse=True)
    q, k, v = leaves
    pieces = [flash.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(0, 30), slice(30, 30), slice(30, 200))]
    outs, lses = zip(*pieces, strict=True)
    results = flash.merge_attention(outs, lses)
    with torch.no_grad():
        equal(results, cuflash.merge_attention(outs, lses))
    torch.library.opcheck(torch.ops.cuflash.merge_attention, ([x.detach() for x in outs], [x.detach() for x in lses]))
    pulled = [torch.randn_like(x) for x in whole]
    got, expected = (torch.autograd.grad(x, leaves, pulled, retain_graph=True) for x in (results, whole))
    for x, y in zip((*results, *got), (*whole, *expected), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)
    compiled = torch.compile(flash.merge_attention, backend=compiler(), fullgraph=True)
    equal(compiled(list(outs), list(lses)), results)


def test_rows_that_are_not_contiguous():
    """And tensors whose memory holds the negated values: both are copied first."""
    given = [x.detach() for x in leaves_of()]
    leaves = [x.transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_() for x in given]
    assert all(x.stride(-1) > 1 for x in leaves)
    dout = torch.randn_like(given[0])
    expected = plain_gradients(dout, given, causal=True)
    strided = dout.transpose(-1, -2).contiguous().transpose(-1, -2)
    negative = [torch._neg_view(-x).requires_grad_() for x in given]
    for inputs_, pulled in ((leaves, strided), (negative, torch._neg_view(-dout))):
        out, lse = flash.attention(*inputs_, causal=True, return_lse=True, deterministic=True)
        equal((out, lse, *torch.autograd.grad(out, inputs_, pulled)), expected)
        # PyTorch's own code generator takes the negated values for the values.
        backend = "aot_eager" if inputs_ is negative else compiler()
        compiled = torch.compile(flash.attention, backend=backend, fullgraph=True)
        equal([compiled(*(x.detach() for x in inputs_), causal=True)], expected[:1])
    tensors, new = caches()
    copies, options = [x.clone() for x in tensors], {"return_lse": True, "cache_seqlens": new["cache_seqlens"]}
    wanted = cuflash.attention_with_kvcache(*copies, k=new["k"], v=new["v"], **options)
    q, k, v = (x.transpose(-1, -2).contiguous().transpose(-1, -2) for x in (tensors[0], new["k"], new["v"]))
    equal(flash.attention_with_kvcache(q, *tensors[1:], k=k, v=v, **options), wanted)
    equal(tensors[1:], copies[1:])
    for call in (cuflash.attention, cuflash.attention_with_kvcache):
        call(*given)  # a call of these shapes has been made
        with pytest.raises(ValueError, match="the negative bit"):
            call(given[0], torch._neg_view(given[1]), given[2])
    with pytest.raises(ValueError, match="the negative bit"):
        cuflash.attention(*given, out=torch._neg_view(torch.empty_like(given[0])))


class Named(torch.Tensor):
    """A tensor by another name."""


def test_results_are_tensors_like_the_inputs():
    """They are not allocated by torch.empty."""
    q, k, v = (x.detach() for x in leaves_of())
    for _ in range(2):
        for kind in (torch.Tensor, Named):
            given = [x.as_subclass(kind) for x in (q, k, v)]
            out, lse = cuflash.attention(*given, return_lse=True)
            assert type(out) is type(lse) is kind
        out = cuflash.attention(q, k, v)
        assert out.is_contiguous() and (out.dtype, out.device) == (q.dtype, q.device) and not out.is_inference()
        assert out._version == 0 and out.add_(1)._version == 1 and not out.requires_grad
        out.requires_grad_().sum().backward()
        with torch.inference_mode():
            assert cuflash.attention(q, k, v).is_inference()


# ------------------------------------------------------------------------------------------------------------
# Devices


def test_tensors_on_the_cpu_and_on_the_gpu():
    q, k, v = (x.detach() for x in leaves_of())
    calls = {
        "q, k, v must be on one device; got cuda:0, cpu, cuda:0": lambda: flash.attention(q, k.cpu(), v),
        "q, k, v must be on one device; got cpu, cuda:0, cuda:0": lambda: cuflash.attention(q.cpu(), k, v),
        "out must be on the device of q, cuda:0; got cpu": lambda: cuflash.attention(q, k, v, out=q.cpu()),
        "q, k_cache, v_cache must be on one device; got cuda:0, cuda:0, cpu": lambda: flash.attention_with_kvcache(q, k, v.cpu()),
        "cache_seqlens must be on the device of q, cuda:0; got cpu": lambda: flash.attention_with_kvcache(
            q, k, v, cache_seqlens=torch.tensor([3, 4], dtype=torch.int32)
        ),
    }
    for _ in range(2):  # once calls of these shapes have been made, too
        for message, call in calls.items():
            with pytest.raises(ValueError, match=message):
                call()
        flash.attention_with_kvcache(q, k, v, cache_seqlens=torch.tensor([3, 4], dtype=torch.int32, device="cuda"))
        cuflash.attention(q, k, v, out=torch.empty_like(q))
        flash.attention(q, k, v)


def test_a_second_gpu():
    """Tensors on one GPU while the other is current, with gradients and without; what is current stays current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    host = inputs("bfloat16", seqlen_q=100)
    results = {}
    for device in (1, 0, 1):
        leaves = [to_torch(torch, x, f"cuda:{device}").requires_grad_() for x in host]
        tensors, given = caches()
        tensors = [x.to(f"cuda:{device}") for x in tensors]
        given = {name: x.to(f"cuda:{device}") for name, x in given.items()}
        for current in (0, 1):
            with torch.cuda.device(current):
                out, lse = flash.attention(*leaves, causal=True, return_lse=True, deterministic=True)
                found = [out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
                with torch.no_grad():
                    found.append(flash.attention(*leaves, causal=True))
                    found += flash.attention_with_kvcache(*tensors, return_lse=True, **given)
                    found += flash.merge_attention([out, out], [lse, lse])
                assert torch.cuda.current_device() == current
            assert {x.device.index for x in found} == {device}
            results[device, current] = [x.detach().cpu() for x in found]
    for found in results.values():
        equal(found, results[0, 0])
    with pytest.raises(ValueError, match="q, k, v must be on one device; got cuda:1, cuda:0, cuda:1"):
        cuflash.attention(*(x.detach().to(f"cuda:{i}") for i, x in zip((1, 0, 1), leaves, strict=True)))


def test_a_second_gpu_by_the_peers_names():
    """FlashAttention's names, SDPA, and compiled code, on the GPU that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from cuflash.compat import flash_attn, flash_attn_interface

    flash.register_sdpa()

    def by_sdpa(q, k, v, causal):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal)
        return out.transpose(1, 2)

    host = inputs("bfloat16", seqlen_q=130, heads_k=4)
    lengths = torch.tensor([3, 100], dtype=torch.int32)
    compiled = torch.compile(lambda *x: flash.attention(*x, causal=True, deterministic=True), backend=compiler())
    results = {}
    torch.use_deterministic_algorithms(True)
    torch.nn.attention.activate_flash_attention_impl("cuflash")
    try:
        for device, current in ((0, 0), (1, 0), (1, 1), (0, 1)):
            with torch.cuda.device(current):
                leaves = [to_torch(torch, x, f"cuda:{device}").requires_grad_() for x in host]
                found = []
                for call in (
                    lambda *x: flash_attn.flash_attn_func(*x, causal=True),
                    lambda *x: flash_attn_interface.flash_attn_func(*x, causal=True),
                    lambda *x: by_sdpa(*x, causal=True),
                    compiled,
                ):
                    out = call(*leaves)
                    found += [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
                q, k, v = (x.detach() for x in leaves)
                found.append(
                    flash_attn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=lengths.to(f"cuda:{device}"), causal=True)
                )
                assert torch.cuda.current_device() == current
            assert {x.device.index for x in found} == {device}
            results[device, current] = [x.detach().cpu() for x in found]
    finally:
        torch.use_deterministic_algorithms(False)
        torch.nn.attention.restore_flash_attention_impl()
    for found in results.values():
        equal(found, results[0, 0])
    for place in range(4, 16):  # all four are one computation
        assert torch.equal(results[0, 0][place], results[0, 0][place % 4])


# ------------------------------------------------------------------------------------------------------------
# The peers' names


@pytest.mark.parametrize("head_dim", [59, 64, 128])
def test_compat_dense(head_dim):
    from cuflash.compat import flash_attn, flash_attn_interface

    host = inputs("bfloat16", seqlen_q=100, seqlen_k=90, head_dim=head_dim)
    q, k, v = on_gpu(*host)
    options = {"causal": True, "window_size": (20, 0), "return_attn_probs": True}
    for result in (
        flash_attn.flash_attn_func(q, k, v, **options)[:2],
        flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2), **options)[:2],
        flash_attn_interface.flash_attn_func(q, k, v, **options),
    ):
        out, lse = (from_torch(torch, x) for x in result)
        assert np.isinf(lse[:, :, :10]).all()  # +inf of FlashAttention 2
        assert_right(out, np.where(np.isposinf(lse), -np.inf, lse), *host, causal=True, window=(20, None))
    qkv = torch.stack([k, k, v], 2)
    for module in (flash_attn, flash_attn_interface):
        assert torch.equal(module.flash_attn_qkvpacked_func(qkv, causal=True), cuflash.attention(k, k, v, causal=True))


def test_compat_packed():
    from cuflash.compat import flash_attn, flash_attn_interface

    lengths = Lengths((5, 0, 130, 17), (40, 3, 130, 64))
    host = packed_inputs("bfloat16", lengths)
    q, k, v = on_gpu(*host)
    ends = [torch.from_numpy(x).cuda() for x in lengths.arrays()[0]]
    for result in (
        flash_attn.flash_attn_varlen_func(q, k, v, *ends, 130, 130, causal=True, return_attn_probs=True)[:2],
        flash_attn.flash_attn_varlen_kvpacked_func(
            q, torch.stack([k, v], 1), *ends, 130, 130, causal=True, return_attn_probs=True
        )[:2],
        flash_attn_interface.flash_attn_varlen_func(q, k, v, *ends, 130, 130, causal=True, return_attn_probs=True),
    ):
        assert_right_varlen(*(from_torch(torch, x) for x in result), *host, lengths, causal=True)


def test_compat_caches():
    """New keys are written where they belong; each request as attention on what it has."""
    from cuflash.compat import flash_attn, flash_attn_interface

    q, k, v = on_gpu(*inputs("bfloat16", batch=3, seqlen_q=2, seqlen_k=300))
    _, new_k, new_v = on_gpu(*inputs("bfloat16", batch=3, seqlen_q=2, seqlen_k=2, seed=1))
    lengths = torch.tensor([3, 250, 0], dtype=torch.int32, device="cuda")
    for module in (flash_attn, flash_attn_interface):
        k_cache, v_cache = k.clone(), v.clone()
        out, lse = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True, return_softmax_lse=True
        )
        for i, length in enumerate(lengths.tolist()):
            assert torch.equal(k_cache[i, length : length + 2], new_k[i])
            assert torch.equal(v_cache[i, length : length + 2], new_v[i])
            host = [
                from_torch(torch, x) for x in (q[i : i + 1], k_cache[i : i + 1, : length + 2], v_cache[i : i + 1, : length + 2])
            ]
            assert_right(from_torch(torch, out[i : i + 1]), from_torch(torch, lse[i : i + 1]), *host, causal=True)


# ------------------------------------------------------------------------------------------------------------
# Host cost


def test_host_cost():
    """Printed, and held to a bound far above what it is, for a noisy machine."""
    leaves = leaves_of("bfloat16", batch=1, seqlen_q=64)
    given = [x.detach() for x in leaves]
    dout = torch.randn_like(given[0])
    out, lse = cuflash.attention(*given, return_lse=True)
    compiled = torch.compile(lambda *x: flash.attention(*x, causal=True), backend=compiler(), fullgraph=True)

    def step():
        torch.autograd.grad(flash.attention(*leaves, causal=True), leaves, dout)

    calls = {
        "cuflash.attention": lambda: cuflash.attention(*given, causal=True),
        "cuflash.torch.attention, no gradient": lambda: flash.attention(*given, causal=True),
        "cuflash.torch.attention": lambda: flash.attention(*leaves, causal=True),
        "compiled, no gradient": lambda: compiled(*given),
        "operator": lambda: torch.ops.cuflash.attention(*given, *FLAT),
        "cuflash.attention_backward": lambda: cuflash.attention_backward(dout, *given, out, lse, causal=True),
        "forward and backward": step,
        "SDPA": lambda: torch.nn.functional.scaled_dot_product_attention(*(given[0].transpose(1, 2),) * 3, is_causal=True),
    }
    tensors, more = caches()
    calls |= {
        "cuflash.attention_with_kvcache": lambda: cuflash.attention_with_kvcache(*tensors, **more),
        "cuflash.torch.attention_with_kvcache": lambda: flash.attention_with_kvcache(*tensors, **more),
        "cuflash.merge_attention": lambda: cuflash.merge_attention([out, out], [lse, lse]),
        "cuflash.torch.merge_attention": lambda: flash.merge_attention([out, out], [lse, lse]),
    }
    took = {}
    for name, call in calls.items():
        best = float("inf")
        for _ in range(7):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, time.perf_counter() - start)
        took[name] = best * 1e4
        print(f"{name}: {took[name]:.1f} us")
    assert took["cuflash.torch.attention, no gradient"] < took["cuflash.attention"] + 30
    assert took["cuflash.torch.attention_with_kvcache"] < took["cuflash.attention_with_kvcache"] + 30
