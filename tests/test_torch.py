"""cuflash.torch on the CPU: gradients, torch.compile, torch.func, autocast, checkpoints, operators, SDPA, and every message."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support import inputs

import cuflash
from cuflash import jit

torch = pytest.importorskip("torch", reason="no PyTorch")
flash = pytest.importorskip("cuflash.torch", reason="PyTorch is too old")


@pytest.fixture(autouse=True)
def compile_anew():
    """PyTorch compiles one function a few times only, whichever tests it came from."""
    torch._dynamo.reset()


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window left": {"window": (4, None), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
}
optioned = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def tensors(dtype="float64", grad=True, **sizes):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 6, "head_dim_v": 4} | sizes
    return [torch.from_numpy(x).requires_grad_(grad) for x in inputs(dtype, **sizes)]


def packed(dtype="float64", grad=True):
    """q, k, v and the lengths of two sequences, the first shorter than it has rows, and two rows of none."""
    q, k, v = (torch.from_numpy(x[0]) for x in inputs(dtype, batch=1, seqlen_q=9, seqlen_k=11, head_dim=6))
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 4, 7], [0, 6, 10])]
    return [x.requires_grad_(grad) for x in (q, k, v)], ends, {"seqused_k": torch.tensor([5, 4])}


def unfused(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """(out, lse) by PyTorch itself."""
    group, shift = q.shape[-2] // k.shape[-2], k.shape[1] - q.shape[1]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - shift
    left, right = window or (None, None)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= distance > 0 if causal else hidden
    hidden |= distance < -left if left is not None else hidden
    hidden |= distance > right if right is not None else hidden
    logits = logits.masked_fill(hidden, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", logits.softmax(-1), v), logits.logsumexp(-1)


def gradients(results, leaves, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pulled = [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in results]
    return torch.autograd.grad(results, leaves, pulled)


def close(got, expected):
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y)


# ------------------------------------------------------------------------------------------------------------
# Gradients


@optioned
def test_agrees_with_unfused_attention(options):
    leaves = tensors()
    results, expected = flash.attention(*leaves, return_lse=True, **options), unfused(*leaves, **options)
    close(results, expected)
    # Each result by itself, and both.
    for x, y in zip(results, expected, strict=True):
        got = torch.autograd.grad(x.square().sum(), leaves, retain_graph=True, allow_unused=True)
        wanted = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True, allow_unused=True)
        close(got, [torch.zeros_like(leaf) if z is None else z for z, leaf in zip(wanted, leaves, strict=True)])
    close(gradients(results, leaves), gradients(expected, leaves))


@optioned
def test_gradcheck(options):
    leaves = tensors(seqlen_q=4, seqlen_k=5, head_dim=3, head_dim_v=2)
    assert torch.autograd.gradcheck(lambda *x: flash.attention(*x, return_lse=True, **options), leaves)


def test_gradcheck_varlen():
    leaves, ends, used = packed()

    def call(*x):
        out, lse = flash.attention_varlen(*x, *ends, causal=True, return_lse=True, **used)
        return out, lse[:, :7]  # the other rows are -inf

    assert torch.autograd.gradcheck(call, leaves)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_are_those_of_attention_backward(dtype):
    """The same bits, of a batch, of packed sequences, with a gradient of lse or without."""
    kind = getattr(torch, dtype)
    leaves = [x.detach().to(kind).requires_grad_() for x in tensors(head_dim_v=6)]
    for return_lse in (False, True):
        result = flash.attention(*leaves, causal=True, return_lse=return_lse)
        out, *lse = result if return_lse else (result,)
        dout, dlse = torch.randn_like(out), [torch.randn_like(x) for x in lse]
        got = torch.autograd.grad([out, *lse], leaves, [dout, *dlse])
        plain = [x.detach() for x in leaves]
        state = cuflash.attention(*plain, causal=True, return_lse=True)
        assert torch.equal(out, state[0])
        expected = cuflash.attention_backward(dout, *plain, *state, causal=True, dlse=dlse[0] if dlse else None)
        assert all(map(torch.equal, got, expected))
    (q, k, v), ends, used = packed()
    leaves = [x.detach().to(kind).requires_grad_() for x in (q, k, v)]
    out = flash.attention_varlen(*leaves, *ends, causal=True, **used)
    dout = torch.randn_like(out)
    plain = [x.detach() for x in leaves]
    state = cuflash.attention_varlen(*plain, *ends, causal=True, return_lse=True, **used)
    expected = cuflash.attention_varlen_backward(dout, *plain, *state, *ends, causal=True, **used)
    assert torch.equal(out, state[0]) and all(map(torch.equal, torch.autograd.grad(out, leaves, dout), expected))


def test_three_axes_and_any_strides():
    leaves = [x.detach()[0].requires_grad_() for x in tensors()]
    results = flash.attention(*leaves, return_lse=True)
    expected = unfused(*(x[None] for x in leaves))
    close(results, [x[0] for x in expected])
    close(gradients(results, leaves), gradients([x[0] for x in expected], leaves))
    # Last axes that are not contiguous: of the inputs, of dout.
    leaves = tensors(head_dim_v=6)
    strided = [x.transpose(1, 3).contiguous().transpose(1, 3) for x in leaves]
    assert strided[0].stride(-1) != 1
    out, expected = flash.attention(*strided), flash.attention(*leaves)
    assert torch.equal(out, expected)
    for dout in (
        torch.ones(()).double().expand(out.shape),
        torch.randn(2, 6, 4, 5, dtype=torch.float64).transpose(1, 3),
    ):
        got, wanted = (torch.autograd.grad(x, leaves, dout, retain_graph=True) for x in (out, expected))
        close(got, wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_negative_bit_is_resolved(dtype):
    """As the imaginary part of a conjugate has it: the memory holds the values negated."""
    kind = getattr(torch, dtype)
    plain = [x.to(kind).requires_grad_() for x in tensors("float32", grad=False)]
    negative = [torch._neg_view(-x.detach()).requires_grad_() for x in plain]
    assert all(x.is_neg() for x in negative)
    expected = flash.attention(*plain, causal=True, return_lse=True)
    got = flash.attention(*negative, causal=True, return_lse=True)
    close(got, expected)
    close(gradients(got, negative), gradients(expected, plain))
    for place in range(3):
        mixed = [x.detach() for x in plain]
        mixed[place] = negative[place].detach()
        close(flash.attention(*mixed, causal=True, return_lse=True), expected)
        close([torch.compile(flash.attention, backend="aot_eager")(*mixed, causal=True)], expected[:1])
    pulled = [torch.randn_like(x) for x in expected]
    of_negative = torch.autograd.grad(flash.attention(*plain, return_lse=True), plain, [torch._neg_view(-x) for x in pulled])
    close(of_negative, torch.autograd.grad(flash.attention(*plain, return_lse=True), plain, pulled))
    x = torch.randn(2, 4, 3, 8, dtype=torch.complex64).conj().imag
    close([flash.attention(x, x, x)], [flash.attention(*(x.resolve_neg(),) * 3)])
    (q, k_cache, v_cache), given = caches(dtype=kind)
    first, second = copied([q, k_cache, v_cache], given), copied([torch._neg_view(-q), k_cache, v_cache], given)
    second[1]["k"] = torch._neg_view(-second[1]["k"])
    close([flash.attention_with_kvcache(*second[0], **second[1])], [flash.attention_with_kvcache(*first[0], **first[1])])
    close(second[0][1:], first[0][1:])


def test_a_negative_bit_is_refused_where_nothing_is_copied():
    q, k, v = (x.float() for x in tensors("float32", grad=False))
    out, lse = cuflash.attention(q, k, v, return_lse=True)
    negative = torch._neg_view
    ends = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 10], [0, 7, 14])]
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    calls = {
        "q": lambda: cuflash.attention(negative(q), k, v),
        "v": lambda: cuflash.attention(q, k, negative(v)),
        "out": lambda: cuflash.attention(q, k, v, out=negative(torch.empty_like(out))),
        "packed": lambda: cuflash.attention_varlen(rows[0], negative(rows[1]), rows[2], *ends),
        "dout": lambda: cuflash.attention_backward(negative(out), q, k, v, out, lse),
        "dq": lambda: cuflash.attention_backward(out, q, k, v, out, lse, dq=negative(torch.empty_like(q))),
        "part": lambda: cuflash.merge_attention([out, negative(out)], [lse, lse]),
        "cache": lambda: flash.attention_with_kvcache(q[:, :1], negative(k), v),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"got one with the negative bit \(is_neg\(\)\): pass x.resolve_neg\(\)"):
            call()
            pytest.fail(name)
    with pytest.raises(TypeError, match="got complex64"):
        flash.attention(*(torch.randn(1, 2, 1, 4, dtype=torch.complex64).conj(),) * 3)


def test_only_what_is_asked_for():
    q, k, v = tensors()
    k, v = k.detach(), v.detach()
    flash.attention(q, k, v).sum().backward()
    assert q.grad is not None and k.grad is None
    with torch.no_grad():
        assert not flash.attention(q, k, v).requires_grad
    with torch.inference_mode():
        out, lse = flash.attention(q, k, v, return_lse=True)
    assert not out.requires_grad and lse.shape == (2, 4, 5)
    assert torch.equal(flash.attention(q.detach(), k, v), out)
    assert torch.equal(flash.attention(torch.nn.Parameter(q), k, v), out)


def test_a_change_in_place_is_noticed():
    q, k, v = tensors()
    out = flash.attention(q * 1, k, v)
    with torch.no_grad():
        k += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_second_derivatives_are_refused_by_name():
    leaves = tensors()
    flat = (False, -1, -1, None, 0.0, False)
    for out in (flash.attention(*leaves), torch.ops.cuflash.attention(*leaves, *flat)[0]):
        (dq,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
        close([dq], torch.autograd.grad(unfused(*leaves)[0].sum(), leaves[:1]))
        with pytest.raises(NotImplementedError, match="cuflash.torch has no second derivatives"):
            dq.sum().backward()


def test_forward_derivatives_are_refused():
    q, k, v = tensors(grad=False)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="cuflash.torch has no forward-mode derivatives"):
            flash.attention(dual, k, v)


def test_deterministic_is_handed_on(monkeypatch):
    said = []
    original = flash.attention_backward

    def spy(*args, deterministic, **options):
        said.append(deterministic)
        return original(*args, deterministic=deterministic, **options)

    monkeypatch.setattr(flash, "attention_backward", spy)
    leaves = tensors()
    flash.attention(*leaves).sum().backward()
    flash.attention(*leaves, deterministic=True).sum().backward()
    torch.use_deterministic_algorithms(True)
    try:
        flash.attention(*leaves).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert said == [False, True, True]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant):
    leaves = tensors()
    expected = torch.autograd.grad(flash.attention(*leaves, causal=True).square().sum(), leaves)
    from torch.utils.checkpoint import checkpoint

    out = checkpoint(lambda *x: flash.attention(*x, causal=True), *leaves, use_reentrant=reentrant)
    out.square().sum().backward()
    close([x.grad for x in leaves], expected)


def test_a_selective_checkpoint_sees_the_operator():
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    seen = []

    def policy(ctx, operator, *args, **kwargs):
        seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE if "cuflash" in str(operator) else CheckpointPolicy.PREFER_RECOMPUTE

    leaves = tensors()
    out = checkpoint(
        lambda *x: flash.attention(*x),
        *leaves,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(policy),
    )
    expected = torch.autograd.grad(flash.attention(*leaves).sum(), leaves)
    close(torch.autograd.grad(out.sum(), leaves), expected)
    assert "cuflash.attention.default" in seen


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    leaves = tensors("float32")
    with torch.autocast("cpu", dtype):
        out, lse = flash.attention(*leaves, return_lse=True)
        mixed = flash.attention(leaves[0].to(dtype), *leaves[1:])
        wide = flash.attention(*tensors())
    assert out.dtype == mixed.dtype == dtype and lse.dtype == torch.float32 and wide.dtype == torch.float64
    assert torch.equal(out, flash.attention(*(x.to(dtype) for x in leaves))) and torch.equal(out, mixed)
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in leaves)
    with torch.autocast("cpu", dtype):
        compiled = torch.compile(flash.attention, backend="aot_eager", fullgraph=True)(*leaves)
    assert torch.equal(compiled, out)


# ------------------------------------------------------------------------------------------------------------
# Operators, torch.compile


FLAT = (True, 3, -1, None, 0.0, False)  # causal, window, softmax_scale, softcap, deterministic


def test_operators():
    leaves = tensors()
    torch.library.opcheck(torch.ops.cuflash.attention, (*leaves, *FLAT))
    torch.library.opcheck(torch.ops.cuflash.attention, (*tensors("float32", grad=False), *FLAT))
    with torch.no_grad():
        out, lse = torch.ops.cuflash.attention(*leaves, *FLAT)
    given = [x.detach() for x in leaves]
    for dlse in (None, lse):
        torch.library.opcheck(torch.ops.cuflash.attention_backward, (out, dlse, out, lse, *given, *FLAT))


def test_packed_operators():
    leaves, ends, used = packed()
    lengths = (*ends, None, used["seqused_k"])
    torch.library.opcheck(torch.ops.cuflash.attention_varlen, (*leaves, *lengths, *FLAT))
    with torch.no_grad():
        out, lse = torch.ops.cuflash.attention_varlen(*leaves, *lengths, *FLAT)
    given = [x.detach() for x in leaves]
    torch.library.opcheck(torch.ops.cuflash.attention_varlen_backward, (out, None, out, lse, *given, *lengths, *FLAT))


@pytest.mark.parametrize("dynamic", [False, True])
@optioned
def test_compile(options, dynamic):
    def step(q, k, v):
        out, lse = flash.attention(q * 2, k, v.transpose(1, 3).contiguous().transpose(1, 3), return_lse=True, **options)
        return out.square() + 1, lse

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    for sizes in ({}, {"seqlen_q": 6, "seqlen_k": 9}):
        leaves = tensors(**sizes)
        results, expected = compiled(*leaves), step(*leaves)
        close(results, expected)
        close(gradients(results, leaves), gradients(expected, leaves))


def test_compile_varlen():
    leaves, ends, used = packed()

    def step(*x):
        return flash.attention_varlen(*x, *ends, max_seqlen_q=4, causal=True, return_lse=True, **used)

    results = torch.compile(step, backend="aot_eager", fullgraph=True)(*leaves)
    expected = step(*leaves)
    close(results, expected)
    close(gradients(results[:1], leaves), gradients(expected[:1], leaves))


def test_fake_tensors():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for device in ("cuda", "cpu"):
        with FakeTensorMode():
            q = torch.empty(2, 5, 4, 8, dtype=torch.bfloat16, device=device, requires_grad=True)
            k, v = (torch.empty(2, 7, 2, size, dtype=q.dtype, device=device) for size in (8, 6))
            out, lse = flash.attention(q, k, v, return_lse=True)
            assert out.shape == (2, 5, 4, 6) and lse.shape == (2, 4, 5) and lse.dtype == torch.float32
            assert out.device == lse.device == q.device and out.requires_grad
            if device == "cpu":  # the engine of a GPU's gradients wants the GPU
                out.sum().backward()
                assert q.grad.shape == q.shape


# ------------------------------------------------------------------------------------------------------------
# Caches


def caches(new=True, dtype=torch.float32):
    """q, the caches, and by name the new keys and values and the lengths."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 1, 4, 8), "k_cache": (2, 16, 2, 8), "v_cache": (2, 16, 2, 6), "k": (2, 1, 2, 8), "v": (2, 1, 2, 6)}
    made = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    given = {"cache_seqlens": torch.tensor([3, 15], dtype=torch.int32)}
    if new:
        given |= {name: made[name] for name in "kv"}
    return [made[name] for name in ("q", "k_cache", "v_cache")], given


def copied(tensors, given):
    return [x.clone() for x in tensors], {name: x.clone() for name, x in given.items()}


def test_a_cache_is_that_of_the_package():
    """The same bits, and the caches written where they lie; of q and new keys of any strides, too."""
    expected, given = caches()
    results = cuflash.attention_with_kvcache(*expected, return_lse=True, window=(9, 0), softcap=3.0, **given)
    tensors, given = caches()
    for name in "kv":
        given[name] = given[name].transpose(1, 3).contiguous().transpose(1, 3)
    tensors[0] = tensors[0].transpose(1, 3).contiguous().transpose(1, 3)
    got = flash.attention_with_kvcache(*tensors, return_lse=True, window=(9, 0), softcap=3.0, **given)
    assert all(map(torch.equal, (*got, *tensors[1:]), (*results, *expected[1:])))
    expected = cuflash.attention_with_kvcache(tensors[0].contiguous(), *tensors[1:], cache_seqlens=4)
    assert torch.equal(flash.attention_with_kvcache(*tensors, cache_seqlens=4), expected)


CACHED = (True, 9, -1, None, 0.0, 0)  # causal, window, softmax_scale, softcap, num_splits


def test_operators_of_a_cache():
    tensors, given = caches()
    lengths = given["cache_seqlens"]
    plain, append = torch.ops.cuflash.attention_with_kvcache, torch.ops.cuflash.attention_with_kvcache_append
    torch.library.opcheck(plain, (*tensors, None, None, None, None, lengths, None, *CACHED, True))
    torch.library.opcheck(plain, (*tensors, None, None, None, None, None, 7, *CACHED, False))
    torch.library.opcheck(append, (*tensors, given["k"], given["v"], None, None, lengths, None, *CACHED, True))
    pages = torch.tensor([[1, 0, 3], [2, 5, -1]], dtype=torch.int32)
    k_pages, v_pages = (x.reshape(8, 4, *x.shape[2:]) for x in tensors[1:])
    lengths = torch.tensor([9, 7], dtype=torch.int32)
    paged = tensors[0], k_pages, v_pages, given["k"], given["v"], None, pages, lengths
    torch.library.opcheck(append, (*paged, None, *CACHED, False))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("new", [False, True])
def test_compile_of_a_cache(new, dynamic):
    def step(q, k_cache, v_cache, given):
        out = flash.attention_with_kvcache(q * 2, k_cache, v_cache, causal=True, **given)
        more = flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=given["cache_seqlens"], return_lse=True)
        return out, *more

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    tensors, given = caches(new)
    for _ in range(2):
        (plain, plain_given), (traced, traced_given) = copied(tensors, given), copied(tensors, given)
        results, expected = compiled(*traced, traced_given), step(*plain, plain_given)
        assert all(map(torch.equal, (*results, *traced), (*expected, *plain)))
        tensors = traced


def test_compile_of_a_cache_of_latents_and_of_a_number():
    """The values are the first columns of the keys, which are written; a length that changes compiles nothing."""
    from torch._dynamo.testing import CompileCounterWithBackend

    (q, keys, _), given = caches()
    q, keys, new = q[..., :1, :], keys[..., :1, :].clone(), given["k"][..., :1, :].contiguous()

    def step(q, keys, new, length):
        values = {"k": new, "v": new[..., :6], "cache_seqlens": length}
        return flash.attention_with_kvcache(q, keys, keys[..., :6], **values)

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    compiles = []
    for length in (3, 4, 9):
        one, other = keys.clone(), keys.clone()
        assert torch.equal(compiled(q, one, new, length), step(q, other, new, length)) and torch.equal(one, other)
        compiles.append(backend.frame_count)
    assert compiles[0] == compiles[-1]


def test_a_cache_under_modes_and_transforms():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(2, 1, 4, 8, dtype=torch.bfloat16, device="cuda")
        k_cache, v_cache = (torch.empty(9, 16, 2, size, dtype=q.dtype, device="cuda") for size in (8, 6))
        table = torch.empty(2, 4, dtype=torch.int32, device="cuda")
        out, lse = flash.attention_with_kvcache(q, k_cache, v_cache, block_table=table, return_lse=True)
        assert out.shape == (2, 1, 4, 6) and lse.shape == (2, 4, 1) and lse.dtype == torch.float32
    tensors, given = caches(new=False)
    many = torch.stack([tensors[0], 2 * tensors[0]])
    got = torch.vmap(lambda q: flash.attention_with_kvcache(q, *tensors[1:], **given))(many)
    close(got, [flash.attention_with_kvcache(q, *tensors[1:], **given) for q in many])
    tensors, given = caches(dtype=torch.bfloat16)
    expected = flash.attention_with_kvcache(*copied(tensors, given)[0], **given)
    given |= {name: given[name].float() for name in "kv"}
    with torch.autocast("cpu", torch.float16):  # the caches say which dtype
        assert torch.equal(flash.attention_with_kvcache(tensors[0].float(), *tensors[1:], **given), expected)


def test_a_cache_records_no_gradient():
    (q, k_cache, v_cache), given = caches()
    q.requires_grad_()
    given["v"].requires_grad_()
    message = "q, v require a gradient, which cuflash.*attention_with_kvcache does not record"
    with pytest.raises(NotImplementedError, match=message):
        flash.attention_with_kvcache(q, k_cache, v_cache, **given)
    compiled = torch.compile(flash.attention_with_kvcache, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=message):
        compiled(q, k_cache, v_cache, **given)
    with torch.no_grad():
        out = flash.attention_with_kvcache(q, k_cache, v_cache, **given)
        assert torch.equal(compiled(q, k_cache, v_cache, **given), out) and not out.requires_grad


# ------------------------------------------------------------------------------------------------------------
# Parts


def parts(empty=True, grad=True):
    """outs and lses of three parts; with ``empty`` one has not seen a head, and none another."""
    generator = torch.Generator().manual_seed(0)
    outs, lses = (
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)] for shape in ((2, 5, 3, 4), (2, 3, 5))
    )
    if empty:
        lses[1][0, 0], outs[1][0, :, 0] = -torch.inf, torch.nan
        for out, lse in zip(outs, lses, strict=True):
            lse[:, -1], out[:, :, -1] = -torch.inf, torch.nan
    return [[x.requires_grad_(grad) for x in group] for group in (outs, lses)]


def loss_of(out, lse):
    return out.square().sum() + torch.where(lse == -torch.inf, 0, lse).sin().sum()


def test_merged_parts():
    outs, lses = parts()
    results = flash.merge_attention(outs, lses)
    with torch.no_grad():
        expected = cuflash.merge_attention(outs, lses)
        assert all(map(torch.equal, results, expected)) and all(map(torch.equal, flash.merge_attention(outs, lses), expected))
    unfused = flash._merge_unfused(outs, lses)
    close(results, unfused)
    leaves = [*outs, *lses]
    wanted = torch.autograd.grad(loss_of(*unfused), leaves)
    assert all(x.isfinite().all() for x in wanted)
    close(torch.autograd.grad(loss_of(*results), leaves), wanted)
    compiled = torch.compile(flash.merge_attention, backend="aot_eager", fullgraph=True)(outs, lses)
    assert all(map(torch.equal, compiled, results))
    close(torch.autograd.grad(loss_of(*compiled), leaves), wanted)
    close(torch.func.grad(lambda x: loss_of(*flash.merge_attention([x, *outs[1:]], lses)))(outs[0]), wanted[0])
    many = torch.stack([outs[0], 2 * outs[0]]).detach()
    got = torch.vmap(lambda x: flash.merge_attention([x, *outs[1:]], lses)[0])(many)
    close(got, [flash.merge_attention([x, *outs[1:]], lses)[0] for x in many])


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
def test_vmap_of_merged_parts_in_compiled_code(batched, place):
    first, second, third = (x.detach() if batched else x.detach()[0] for x in parts()[0])
    lses = [x.detach() if batched else x.detach()[0] for x in parts()[1]]

    def call(x, lse):
        return flash.merge_attention([first, x, third], [lses[0], lse, lses[2]])

    many = torch.stack([second, 2 * second, third], place), torch.stack([lses[1], lses[1] + 1, lses[2]])
    got = torch.compile(torch.vmap(call, (place, 0)), backend="aot_eager", fullgraph=True)(*many)
    expected = [call(x, lse) for x, lse in zip(many[0].unbind(place), many[1])]
    assert all(map(torch.equal, got, (torch.stack(x) for x in zip(*expected))))


def test_merged_parts_are_differentiated_twice():
    outs, lses = parts(empty=False)

    def call(*tensors):
        return flash.merge_attention(tensors[:3], tensors[3:])

    assert torch.autograd.gradcheck(call, (*outs, *lses)) and torch.autograd.gradgradcheck(call, (*outs, *lses))
    torch.library.opcheck(torch.ops.cuflash.merge_attention, (outs, lses))


def test_one_part_of_the_keys_and_another():
    """Gradients through attention to parts are those of attention to all."""
    q, k, v = tensors(head_dim_v=6)
    pieces = [flash.attention(q, k[:, i], v[:, i], return_lse=True) for i in (slice(0, 3), slice(3, 7))]
    results, expected = flash.merge_attention(*zip(*pieces, strict=True)), flash.attention(q, k, v, return_lse=True)
    close(results, expected)
    close(gradients(results, (q, k, v)), gradients(expected, (q, k, v)))


# ------------------------------------------------------------------------------------------------------------
# torch.func


def test_vmap():
    q, k, v = tensors(grad=False)
    many = torch.stack([q, 2 * q, q + 1])
    out, lse = torch.vmap(lambda x: flash.attention(x, k, v, causal=True, return_lse=True))(many)
    for i, x in enumerate(many):
        close((out[i], lse[i]), flash.attention(x, k, v, causal=True, return_lse=True))
    # Of a batch of one without its axis, along other axes, and nested.
    flat = torch.vmap(flash.attention, in_dims=(0, 0, 0))(q, k, v)
    close([flat], [flash.attention(q, k, v)])
    moved = torch.vmap(flash.attention, in_dims=(2, None, None), out_dims=1)(many.movedim(0, 2), k, v)
    close([moved], [torch.stack([flash.attention(x, k, v) for x in many], 1)])
    nested = torch.vmap(torch.vmap(lambda a, b: flash.attention(a, b, v[0])))(many, k.expand(3, *k.shape))
    close([nested[1]], [flash.attention(2 * q, k, v[:1].expand(v.shape))])


def test_gradients_under_torch_func():
    q, k, v = tensors(grad=False)
    many = torch.stack([q, 2 * q, q + 1])

    def loss(attend):
        def total(*x):
            out, lse = attend(*x)
            return out.square().sum() + lse.sin().sum()

        return total

    with_lse = loss(lambda *x: flash.attention(*x, causal=True, return_lse=True))
    plain = loss(lambda *x: unfused(*x, causal=True))
    got = torch.func.grad(with_lse, argnums=(0, 1, 2))(q, k, v)
    close(got, torch.func.grad(plain, argnums=(0, 1, 2))(q, k, v))
    per_sample = torch.vmap(torch.func.grad(with_lse, argnums=(0, 1)), in_dims=(0, None, None))(many, k, v)
    expected = [torch.func.grad(plain, argnums=(0, 1))(x, k, v) for x in many]
    close(per_sample, [torch.stack(x) for x in zip(*expected, strict=True)])
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.func.grad(lambda x: torch.func.grad(with_lse)(x, k, v).sum())(q)


def test_vmap_of_packed_sequences():
    """Rows that no sequence covers stay apart from the sequences of the next one."""
    (q, k, v), ends, used = packed(grad=False)
    many = torch.stack([q, 2 * q])
    for more in ({}, used):
        got = torch.vmap(lambda x, more=more: flash.attention_varlen(x, k, v, *ends, causal=True, return_lse=True, **more))(many)
        for i, x in enumerate(many):
            close(
                [y[i] for y in got],
                flash.attention_varlen(x, k, v, *ends, causal=True, return_lse=True, **more),
            )
    other = torch.stack([ends[0], torch.tensor([0, 1, 9], dtype=torch.int32)])

    def loss(x, first):
        return flash.attention_varlen(x, k, v, first, ends[1], **used).square().sum()

    got = torch.vmap(torch.func.grad(loss))(many, other)
    close(got, [torch.func.grad(loss)(x, first) for x, first in zip(many, other, strict=True)])


def test_vmap_in_compiled_code():
    q, k, v = tensors(grad=False)
    many = torch.stack([q, 2 * q])
    compiled = torch.compile(lambda x: torch.vmap(lambda y: flash.attention(y, k, v))(x), backend="aot_eager", fullgraph=True)
    close([compiled(many)], [torch.stack([flash.attention(x, k, v) for x in many])])


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_torch_func_in_compiled_code():
    """Code that may be in parts computes as uncompiled code does; code that must be one graph is refused, by name."""
    (q, k, v), (rows, ends, used) = tensors(grad=False), packed(grad=False)
    many = torch.stack([q, 2 * q])

    def loss(x):
        return flash.attention(x, k, v, causal=True).square().sum()

    def packed_loss(x):
        return flash.attention_varlen(x, *rows[1:], *ends, **used).square().sum()

    cases = {
        "grad": (torch.func.grad(loss), q),
        "vjp": (lambda x: torch.func.vjp(loss, x)[1](torch.ones((), dtype=x.dtype))[0], q),
        "vmap of grad": (torch.vmap(torch.func.grad(loss)), many),
        "grad of vmap": (torch.func.grad(lambda x: torch.vmap(loss)(x).sum()), many),
        "packed": (torch.func.grad(packed_loss), rows[0]),
    }
    if torch.__version__ < (2, 12):  # there any break of a graph in it, whoever's, makes the gradients 0
        del cases["vjp"]
    for name, (function, x) in cases.items():
        torch._dynamo.reset()
        close([torch.compile(function, backend="aot_eager")(x)], [function(x)])
        torch._dynamo.reset()
        with pytest.raises(Exception, match="_attend_uncompiled_under_torch_func"):
            torch.compile(function, backend="aot_eager", fullgraph=True)(x)
            pytest.fail(name)
    lse = torch.randn(2, 4, 5, dtype=q.dtype)

    def merged(x):
        return flash.merge_attention([x, q], [lse, lse + 1])[0].square().sum()

    compiled = torch.compile(torch.func.grad(merged), backend="aot_eager", fullgraph=True)
    close([compiled(q + 1)], [torch.func.grad(merged)(q + 1)])


# ------------------------------------------------------------------------------------------------------------
# Messages


def test_errors():
    q, k, v = tensors()
    with pytest.raises(TypeError, match="q must be a torch.Tensor; got ndarray"):
        flash.attention(np.zeros((1, 2, 3, 4)), k, v)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got torch, numpy, torch"):
        flash.attention(q, k.detach().numpy(), v)
    with pytest.raises(TypeError, match="k must be a CuPy, PyTorch, JAX or NumPy array.*got list"):
        flash.attention(q, [1], v)
    with pytest.raises(ValueError, match="head_dim must be the same in q and k; got 6 and 3"):
        flash.attention(q, k[..., :3], v)
    with pytest.raises(TypeError, match="causal must be a bool; got 1"):
        flash.attention(q, k, v, causal=1)
    with pytest.raises(TypeError, match="deterministic must be a bool; got 'yes'"):
        flash.attention(q, k, v, deterministic="yes")
    with pytest.raises(ValueError, match=r"window must be None or a pair \(left, right\); got 3"):
        flash.attention(q, k, v, window=3)
    with pytest.raises(TypeError, match="max_seqlen_q must be an integer or None; got 2.5"):
        flash.attention_varlen(*packed()[0], *packed()[1], max_seqlen_q=2.5)
    with pytest.raises(TypeError, match="tensors must be dense .*got layout torch.sparse_coo"):
        flash.attention(q.detach().to_sparse(), k, v)
    with pytest.raises(TypeError, match="q must be a torch.Tensor; got ndarray"):
        flash.attention_with_kvcache(np.zeros((1, 2, 3, 4)), k, v)
    with pytest.raises(ValueError, match="k and v are appended together: k was given, v was not"):
        flash.attention_with_kvcache(*(x.detach() for x in (q, k, v)), k=k.detach())
    with pytest.raises(ValueError, match="lses must hold as many arrays as outs, 1; got 2"):
        flash.merge_attention([q], [k, v])
    for call in (flash.merge_attention, torch.compile(flash.merge_attention, backend="aot_eager", fullgraph=True)):
        with pytest.raises(Exception, match="outs must hold 1 to 32 arrays; got 0"):
            call([], [])


def test_what_is_made_is_of_the_kind_of_the_inputs():
    from cuflash import arrays

    class Named(torch.Tensor):
        pass

    x = torch.zeros(3, dtype=torch.float16)
    for like, kind in ((x, torch.Tensor), (torch.nn.Parameter(x), torch.Tensor), (x.as_subclass(Named), Named)):
        made = arrays.door_of(like).maker((2, 3), "float32", like)()
        assert type(made) is kind and made.shape == (2, 3) and made.dtype == torch.float32 and not made.requires_grad


def test_functions_that_record_no_gradient_say_which_do():
    leaves = tensors(head_dim_v=6)
    out, lse = flash.attention(*leaves, return_lse=True)
    (q, k, v), ends, used = packed()
    calls = {
        "attention": lambda: cuflash.attention(*leaves),
        "attention_varlen": lambda: cuflash.attention_varlen(q, k, v, *ends, **used),
        "attention_backward": lambda: cuflash.attention_backward(out, *leaves, out, lse),
        "attention_with_kvcache": lambda: cuflash.attention_with_kvcache(*leaves),
        "merge_attention": lambda: cuflash.merge_attention([out, out], [lse, lse]),
    }
    for name, call in calls.items():
        message = f"require a gradient, which cuflash.{name} does not record: cuflash.torch.attention, attention_varlen and merge"
        with pytest.raises(NotImplementedError, match=message):
            call()
        with torch.no_grad():
            call()


@pytest.mark.parametrize(
    "function, names",
    [
        ("attention", ["q", "k", "v"]),
        ("attention_varlen", ["q", "k", "v", "cu_seqlens_q", "cu_seqlens_k"]),
        ("attention_with_kvcache", ["q", "k_cache", "v_cache"]),
        ("merge_attention", ["outs", "lses"]),
    ],
)
def test_signatures(function, names):
    """Those of the package, less what autograd has no use for."""
    import inspect

    def parameters(module):
        return {x.name: (x.kind, x.default) for x in inspect.signature(getattr(module, function)).parameters.values()}

    ours, theirs = parameters(flash), parameters(cuflash)
    assert list(ours)[: len(names)] == names
    if len({"causal", "num_splits"} & set(ours)) == 1:
        assert ours.pop("deterministic")[1] is False
    for name in ("out", "workspace", "validate"):
        theirs.pop(name, None)
    assert ours == theirs


def test_the_snippet_of_the_readme():
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    code = readme.split("## In PyTorch")[1].split("```python")[1].split("```")[0]
    names = {}
    exec(code, names)
    assert torch.equal(names["same"], names["out"]) and names["k"].grad.shape == (2, 128, 2, 64)


def run_python(code) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=jit.kernels_dir().parent,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_else_imports_torch():
    assert run_python("import sys, cuflash; print('torch' in sys.modules)") == "False"


def test_without_torch():
    code = """
import sys
sys.modules["torch"] = None
import cuflash
try:
    import cuflash.torch
except ImportError as error:
    print(error)
"""
    assert "cuflash.torch needs PyTorch" in run_python(code)


# ------------------------------------------------------------------------------------------------------------
# SDPA's flash backend


@pytest.fixture
def registry():
    if not hasattr(torch.nn.attention, "register_flash_attention_impl"):
        pytest.skip("this PyTorch has no register_flash_attention_impl")
    return torch.nn.attention


def test_sdpa_is_active_only_when_asked(registry):
    flash.register_sdpa()
    flash.register_sdpa("another name")
    assert {"cuflash", "another name"} <= set(registry.list_flash_attention_impls())
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("cuflash")
    try:
        assert registry.current_flash_attention_impl() == "cuflash"
    finally:
        registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None


def test_sdpa_without_a_registry(registry, monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl")
    with pytest.raises(RuntimeError, match="register_sdpa needs a PyTorch with .*; got " + torch.__version__[:3]):
        flash.register_sdpa()


def test_sdpa_operators_have_the_arguments_of_pytorch():
    import inspect

    from cuflash.torch_sdpa import OPERATORS

    for name, function in OPERATORS.items():
        if not hasattr(torch.ops.aten, name):
            continue
        schema = getattr(torch.ops.aten, name).default._schema
        ours = inspect.signature(function).parameters
        required = [x.name for x in ours.values() if x.default is x.empty]
        assert required == [x.name for x in schema.arguments if not x.has_default_value()], name
        assert {x.name for x in schema.arguments} <= set(ours), name


@pytest.mark.parametrize("contiguous", [True, False])
def test_sdpa_operators(contiguous):
    """Called by hand: no GPU, no dispatch to them."""
    from cuflash import torch_sdpa

    q, k, v = (x.detach().transpose(1, 2) for x in tensors(head_dim_v=6, seqlen_k=5, heads_k=4))
    if contiguous:
        q, k, v = (x.contiguous() for x in (q, k, v))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, scale=0.3)
    dout = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, dout)
    with torch.no_grad():
        out, lse, *_, rng_state, offset, _ = torch_sdpa.sdpa_forward(q, k, v, 0.0, True, scale=0.3)
        got = torch_sdpa.sdpa_backward(dout, q, k, v, out, lse, None, None, 5, 5, 0.0, True, rng_state, offset, scale=0.3)
    close((out, *got), (expected, *wanted))
    assert out.stride() == q.stride() and all(x.stride() == y.stride() for x, y in zip(got, leaves, strict=True))
    with pytest.raises(NotImplementedError, match="dropout_p is not supported .*got 0.5: only 0.0"):
        torch_sdpa.sdpa_forward(q, k, v, 0.5)


def test_sdpa_operators_of_packed_sequences():
    from cuflash import torch_sdpa

    (q, k, v), ends, used = packed(grad=False)
    expected = cuflash.attention_varlen(q, k, v, *ends, causal=True, window=(2, -1), return_lse=True, **used)
    given = (*ends, 4, 6, 0.0, True, False)
    out, lse, *_ = torch_sdpa.flash_attention_forward(q, k, v, *given, window_size_left=2, **used)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    with pytest.raises(NotImplementedError, match="block_table is not supported"):
        torch_sdpa.flash_attention_forward(q, k, v, *given, block_table=ends[0])
    expected = cuflash.attention_varlen(q, k, v, *ends, return_lse=True)
    wanted = cuflash.attention_varlen_backward(q, q, k, v, *expected, *ends)
    got = torch_sdpa.flash_attention_backward(q, q, k, v, *expected, *ends, 4, 6, 0.0, False, None, None)
    assert all(map(torch.equal, got, wanted))
