"""cuflash.jax on the CPU: gradients, jit, vmap, sharding, shard_map, lowering for CUDA, the C interface, and every message."""

import ctypes
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import decoding, inputs

import cuflash

jax = pytest.importorskip("jax", reason="no JAX")
if jax.__version_info__ < (0, 11):
    pytest.skip("JAX is too old", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cuflash.jax as flash  # noqa: E402
from cuflash import jax_ffi  # noqa: E402

try:  # four devices for the tests of sharding, if no other test has made JAX's backend yet
    jax.config.update("jax_num_cpu_devices", 4)
except RuntimeError:
    pass


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (3, 2)},
    "window left": {"window": (4, None), "causal": True},
    "softcap": {"softcap": 2.0, "softmax_scale": 0.7},
}
optioned = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter")


def tensors(dtype="float32", **sizes):
    sizes = {"batch": 2, "seqlen_q": 5, "seqlen_k": 7, "head_dim": 6, "head_dim_v": 4} | sizes
    return [jnp.asarray(x) for x in inputs(dtype, **sizes)]


def packed(dtype="float32"):
    """q, k, v and the lengths of two sequences, the first shorter than it has rows, and two rows of none."""
    q, k, v = (jnp.asarray(x[0]) for x in inputs(dtype, batch=1, seqlen_q=9, seqlen_k=11, head_dim=6))
    ends = [jnp.asarray(x, jnp.int32) for x in ([0, 4, 7], [0, 6, 10])]
    return [q, k, v], ends, {"seqused_k": jnp.asarray([5, 4], jnp.int32)}


def unfused(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0):
    """(out, lse) by JAX itself."""
    group, shift = q.shape[-2] // k.shape[-2], k.shape[1] - q.shape[1]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    logits = jnp.einsum("bihd,bjhd->bhij", q, k) * (softmax_scale or q.shape[-1] ** -0.5)
    if softcap:
        logits = softcap * jnp.tanh(logits / softcap)
    distance = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None] - shift
    left, right = window or (None, None)
    hidden = jnp.zeros_like(distance, bool)
    hidden |= distance > 0 if causal else hidden
    hidden |= distance < -left if left is not None else hidden
    hidden |= distance > right if right is not None else hidden
    logits = jnp.where(hidden, -jnp.inf, logits)
    return jnp.einsum("bhij,bjhd->bihd", jax.nn.softmax(logits, -1), v), jax.nn.logsumexp(logits, -1)


def pulled(function, leaves, seed=0):
    """(results, gradients of the leaves for random gradients of the results), in a list."""
    results, pull = jax.vjp(jax.jit(function), *leaves)
    rng = np.random.default_rng(seed)
    cotangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), results)
    return [*jax.tree.leaves(results), *pull(cotangents)]


def close(got, expected, **tolerance):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_allclose(
            np.asarray(x, np.float64), np.asarray(y, np.float64), **({"rtol": 1e-5, "atol": 1e-5} | tolerance)
        )


def equal(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


# ------------------------------------------------------------------------------------------------------------
# What is computed


@optioned
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_bits_are_those_of_the_plain_functions(dtype, options, x64):
    leaves = tensors(dtype)
    host = [np.asarray(x) for x in leaves]
    out, lse = flash.attention(*leaves, return_lse=True, **options)
    expected = cuflash.attention(*host, return_lse=True, **options)
    equal((out, lse), expected)
    assert isinstance(out, jax.Array) and out.dtype == dtype and lse.dtype == expected[1].dtype
    equal(flash.attention(*leaves, **options), expected[0])
    equal(flash.attention(*host, **options), expected[0])
    dout, dlse = (np.random.default_rng(3).standard_normal(x.shape).astype(x.dtype) for x in expected)
    _, pull = jax.vjp(lambda *x: flash.attention(*x, return_lse=True, deterministic=True, **options), *leaves)
    equal(
        pull((jnp.asarray(dout), jnp.asarray(dlse))),
        cuflash.attention_backward(dout, *host, *expected, dlse=dlse, deterministic=True, **options),
    )


@optioned
def test_agrees_with_unfused_attention(options, x64):
    leaves = tensors("float64")
    got = pulled(lambda *x: flash.attention(*x, return_lse=True, **options), leaves)
    close(got, pulled(lambda *x: unfused(*x, **options), leaves), rtol=1e-9, atol=1e-9)
    # Through out alone, through lse alone, and neither.
    got = jax.grad(lambda *x: flash.attention(*x, **options).sum(), (0, 1, 2))(*leaves)
    close(got, jax.grad(lambda *x: unfused(*x, **options)[0].sum(), (0, 1, 2))(*leaves), rtol=1e-9, atol=1e-9)
    got = jax.grad(lambda *x: flash.attention(*x, return_lse=True, **options)[1].sum(), (0, 1, 2))(*leaves)
    close(got, jax.grad(lambda *x: unfused(*x, **options)[1].sum(), (0, 1, 2))(*leaves), rtol=1e-9, atol=1e-9)
    assert not any(map(np.any, jax.grad(lambda *x: 0.0 * flash.attention(*x, **options).sum(), (0, 1, 2))(*leaves)))
    # One of them only.
    got = jax.grad(lambda k: flash.attention(leaves[0], k, leaves[2], **options).sum())(leaves[1])
    close(got, jax.grad(lambda k: unfused(leaves[0], k, leaves[2], **options)[0].sum())(leaves[1]), rtol=1e-9, atol=1e-9)


def test_three_axes():
    leaves = [x[0] for x in tensors()]
    whole = [x[None] for x in leaves]

    def call(*x):
        return flash.attention(*x, causal=True, return_lse=True)

    equal(pulled(call, leaves), [x[0] for x in pulled(call, whole)])


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}, {"heads_q": 0, "heads_k": 0}], ids=str)
def test_empty(sizes):
    leaves = tensors(**sizes)
    host = [np.asarray(x) for x in leaves]
    out, lse = flash.attention(*leaves, return_lse=True)
    equal((out, lse), cuflash.attention(*host, return_lse=True))
    equal(jax.grad(lambda *x: flash.attention(*x).sum(), (0, 1, 2))(*leaves), [np.zeros_like(x) for x in host])


def test_packed():
    leaves, ends, used = packed()
    host = [np.asarray(x) for x in leaves]
    plain = {name: np.asarray(x) for name, x in used.items()}
    call = dict(causal=True, softcap=3.0)
    out, lse = flash.attention_varlen(*leaves, *ends, return_lse=True, max_seqlen_q=4, **used, **call)
    expected = cuflash.attention_varlen(*host, *map(np.asarray, ends), return_lse=True, **plain, **call)
    equal((out, lse), expected)
    equal(flash.attention_varlen(*leaves, *ends, **used, **call), expected[0])
    got = jax.grad(lambda *x: (flash.attention_varlen(*x, *ends, deterministic=True, **used, **call) ** 2).sum(), (0, 1, 2))(
        *leaves
    )
    equal(
        got,
        cuflash.attention_varlen_backward(
            2 * expected[0], *host, *expected, *map(np.asarray, ends), deterministic=True, **plain, **call
        ),
    )


CACHES = {
    "plain": {},
    "rows": {"by_index": True},
    "pages": {"page_size": 4},
    "append": {"new": 2},
    "append to rows": {"new": 2, "by_index": True},
    "append to pages": {"new": 3, "page_size": 4, "seqlen_q": 3},
}
cached = pytest.mark.parametrize("kind", CACHES.values(), ids=CACHES)


@cached
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cache(dtype, kind):
    call = decoding(dtype, [5, 0, 9], head_dim=8, **kind)
    named = {name: jnp.asarray(x) for name, x in call.named().items()}
    caches = [jnp.asarray(x) for x in (call.k_cache, call.v_cache)]
    results = flash.attention_with_kvcache(call.q, *caches, return_lse=True, **named)
    k_cache, v_cache = call.k_cache.copy(), call.v_cache.copy()
    expected = cuflash.attention_with_kvcache(call.q, k_cache, v_cache, return_lse=True, **call.named())
    equal(results[:2], expected)
    assert len(results) == (4 if "new" in kind else 2)
    equal(results[2:], [k_cache, v_cache][: len(results) - 2])
    equal(caches, (call.k_cache, call.v_cache))  # those given are as they were
    short = flash.attention_with_kvcache(call.q, *caches, num_splits=1, **named)
    equal(short[0] if "new" in kind else short, expected[0])


def test_lengths_of_the_cache_as_a_number():
    q, k_cache, v_cache = (jnp.asarray(x) for x in inputs("float32", batch=3, seqlen_q=1, seqlen_k=12, head_dim=8))
    expected = cuflash.attention_with_kvcache(*map(np.asarray, (q, k_cache, v_cache)), cache_seqlens=7)
    equal(flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=7), expected)
    equal(flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=np.int64(7)), expected)
    traced = jax.jit(lambda n: flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=n))
    equal(traced(7), expected)
    equal(flash.attention_with_kvcache(q, k_cache, v_cache), flash.attention(q, k_cache, v_cache))
    # One array as both caches is two.
    equal(flash.attention_with_kvcache(q, k_cache, k_cache), flash.attention(q, k_cache, k_cache))


def test_decoding_in_a_loop():
    """Caches that are carried, or donated, are changed where they are."""
    q, k, v = tensors(batch=2, seqlen_q=6, seqlen_k=6, head_dim_v=6)
    room = [jnp.full((2, 8, 2, 6), jnp.nan) for _ in range(2)]

    @jax.jit
    def decode(q, k, v, *caches):
        def step(caches, at):
            one = [jax.lax.dynamic_slice_in_dim(x, at, 1, 1) for x in (q, k, v)]
            out, *caches = flash.attention_with_kvcache(one[0], *caches, k=one[1], v=one[2], cache_seqlens=at)
            return tuple(caches), out[:, 0]

        return jax.lax.scan(step, caches, jnp.arange(6))

    caches, out = decode(q, k, v, *room)
    close(out.swapaxes(0, 1), flash.attention(q, k, v, causal=True))
    equal([x[:, :6] for x in caches], (k, v))
    step = jax.jit(lambda *x: flash.attention_with_kvcache(*x[:3], k=x[3], v=x[4], cache_seqlens=0), donate_argnums=(1, 2))
    text = step.lower(q, *room, k, v).compile().as_text()
    assert "copy(" not in text and "output_to_operand_aliasing" in text


# ------------------------------------------------------------------------------------------------------------
# Under JAX's transformations


def test_jit():
    leaves = tensors()
    call = jax.jit(lambda *x: flash.attention(*x, causal=True, return_lse=True))
    equal(call(*leaves), flash.attention(*leaves, causal=True, return_lse=True))
    text = call.lower(*leaves).compile().as_text()
    assert text.count('custom_call_target="cuflash_attention"') == 1
    both = jax.jit(jax.value_and_grad(lambda *x: flash.attention(*x).sum(), (0, 1, 2)))
    assert both.lower(*leaves).compile().as_text().count('custom_call_target="cuflash_attention"') == 2
    close(both(*leaves)[1], jax.grad(lambda *x: flash.attention(*x).sum(), (0, 1, 2))(*leaves))


def test_calls_that_are_not_traced_are_compiled_once():
    leaves = tensors(seqlen_q=23)
    for _ in range(3):
        flash.attention(*leaves)
    before = flash._run_attend._cache_size()
    flash.attention(*[x + 1 for x in leaves])
    flash.attention(*leaves, causal=False, window=[None, -1], softmax_scale=6**-0.5, softcap=0)
    assert flash._run_attend._cache_size() == before


def test_checkpoint_and_scan():
    q, k, v = tensors(head_dim_v=6)
    weights = jnp.linspace(0.5, 1.5, 3)

    def run(attend, q):
        return jax.lax.scan(lambda x, w: (attend(x * w), None), q, weights)[0].sum()

    plain = jax.grad(lambda q: run(lambda x: flash.attention(x, k, v), q))(q)
    close(jax.grad(lambda q: run(jax.checkpoint(lambda x: flash.attention(x, k, v)), q))(q), plain)
    close(plain, jax.grad(lambda q: run(lambda x: unfused(x, k, v)[0], q))(q), rtol=1e-4, atol=1e-4)


def varied(x, size=3):
    return jnp.stack([x * (1 + 0.3 * i) if jnp.issubdtype(x.dtype, jnp.floating) else x for i in range(size)])


def assert_vmap(function, given, mapped, **tolerance):
    """vmap over the arrays that are mapped is the calls one by one, results and gradients."""
    given = [varied(x) if is_mapped else x for x, is_mapped in zip(given, mapped, strict=True)]
    got = jax.jit(jax.vmap(function, [0 if is_mapped else None for is_mapped in mapped]))(*given)
    function = jax.jit(function)
    one_by_one = [function(*(x[i] if is_mapped else x for x, is_mapped in zip(given, mapped))) for i in range(3)]
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *one_by_one), **tolerance)


@pytest.mark.parametrize("mapped", [(q, k, v) for q in (0, 1) for k in (0, 1) for v in (0, 1) if q or k or v], ids=str)
@pytest.mark.parametrize("batched", [True, False], ids=["batch", "no batch"])
def test_vmap(mapped, batched):
    leaves = tensors() if batched else [x[0] for x in tensors()]

    def call(*x):
        return flash.attention(*x, causal=True, return_lse=True)

    assert_vmap(call, leaves, mapped)
    assert_vmap(lambda *x: pulled(call, x), leaves, mapped)
    # The gradient of what is mapped, and an axis inside another.
    given = [varied(x) if is_mapped else x for x, is_mapped in zip(leaves, mapped)]
    axes = [0 if is_mapped else None for is_mapped in mapped]
    got = jax.grad(lambda *x: (jax.vmap(call, axes)(*x)[0] ** 2).sum(), (0, 1, 2))(*given)
    expected = [
        jax.grad(lambda *x: (call(*x)[0] ** 2).sum(), (0, 1, 2))(
            *(x[i] if is_mapped else x for x, is_mapped in zip(given, mapped))
        )
        for i in range(3)
    ]
    close(got, [jnp.stack(x) if is_mapped else sum(x) for x, is_mapped in zip(zip(*expected), mapped)], rtol=1e-4, atol=1e-4)
    nested = jax.vmap(jax.vmap(call, axes), [None if axis is None else 1 for axis in axes])  # the new axis is the second
    got = nested(*(jnp.stack([x, x + 1], 1) if is_mapped else x for x, is_mapped in zip(given, mapped)))
    ones = [jax.vmap(call, axes)(*(x + i if is_mapped else x for x, is_mapped in zip(given, mapped))) for i in range(2)]
    equal(got, jax.tree.map(lambda *x: jnp.stack(x), *ones))


def test_vmap_over_nothing():
    def none(x):
        return jnp.zeros((0, *x.shape), x.dtype)

    q, k, v = tensors()
    leaves, ends, used = packed()
    for call, given in (
        (lambda *x: flash.attention(*x, return_lse=True), (q, k, v)),
        (lambda *x: flash.attention_varlen(*x, *ends, **used, return_lse=True), leaves),
    ):
        got = jax.vmap(lambda *x, call=call: pulled(call, x))(*map(none, given))
        assert [x.shape for x in got] == [(0, *x.shape) for x in pulled(call, given)]
    cache, new = jnp.ones((2, 7, 3, 8)), jnp.ones((2, 1, 3, 8))
    results = jax.vmap(lambda q, c: flash.attention_with_kvcache(q, c, c, k=new, v=new, cache_seqlens=2))(none(new), none(cache))
    assert [x.shape for x in results] == [(0, *x.shape) for x in (new, cache, cache)]


@pytest.mark.parametrize("mapped", [(1, 1, 1, 0, 0, 0), (1, 0, 0, 0, 0, 0), (0, 1, 1, 0, 1, 1), (0, 0, 0, 1, 1, 0)], ids=str)
@pytest.mark.parametrize("with_used", [True, False])
def test_vmap_of_packed_sequences(mapped, with_used):
    leaves, ends, used = packed()

    def call(*x):
        more = {"seqused_k": x[5]} if with_used else {}
        return flash.attention_varlen(*x[:5], causal=True, return_lse=True, **more)

    given = [*leaves, *ends, used["seqused_k"]]
    if not with_used and mapped[5] and not any(mapped[:5]):
        pytest.skip("nothing is mapped")
    assert_vmap(call, given, mapped)
    assert_vmap(lambda *x: pulled(lambda *y: call(*y, *x[3:]), x[:3]), given, mapped)


@cached
def test_vmap_of_caches(kind):
    call = decoding("float32", [5, 0, 9], head_dim=8, **kind)
    named = {name: jnp.asarray(x) for name, x in call.named().items()}
    given = [jnp.asarray(x) for x in (call.q, call.k_cache, call.v_cache)]
    appended = [named.pop(name) for name in ("k", "v") if name in named]

    def attend(q, k_cache, v_cache, *appended):
        more = dict(zip(("k", "v"), appended))
        return flash.attention_with_kvcache(q, k_cache, v_cache, return_lse=True, **named, **more)

    for caches in (False, True):
        assert_vmap(attend, [*given, *appended], (True, caches, caches, *[True] * len(appended)))
    assert_vmap(attend, [*given, *appended], (False, True, False, *[False] * len(appended)))


def test_threads():
    leaves = tensors(batch=1, seqlen_q=30, seqlen_k=30)
    call = jax.jit(lambda *x: flash.attention(*x, causal=True))
    expected, wrong = [np.asarray(call(x, *leaves[1:])) for x in varied(leaves[0], 4)], []

    def work(i):
        for _ in range(20):
            if not np.array_equal(call(varied(leaves[0], 4)[i], *leaves[1:]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# ------------------------------------------------------------------------------------------------------------
# Sharding


@pytest.fixture(scope="module")
def mesh():
    if len(jax.devices("cpu")) < 4:
        pytest.skip("JAX's backend was made with fewer CPU devices before")
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    return jax.sharding.Mesh(devices, ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def collectives(function, *given):
    text = function.lower(*given).compile().as_text()
    return {name for name in COLLECTIVES if name in text}


SPLIT = {"batch": P(("x", "y")), "batch, heads": P("x", None, "y"), "heads": P(None, None, ("x", "y")), "some": P("y")}


@pytest.mark.parametrize("spec", SPLIT.values(), ids=SPLIT)
@pytest.mark.parametrize("heads_q", [4, 8])
def test_sharded_over_batch_and_heads(mesh, spec, heads_q):
    leaves = tensors(batch=4, heads_q=heads_q, heads_k=4)
    sharded = [put(mesh, x, spec) for x in leaves]
    forward = jax.jit(lambda *x: flash.attention(*x, causal=True, return_lse=True))
    assert not collectives(forward, *sharded)
    out, lse = forward(*sharded)
    equal((out, lse), forward(*leaves))
    assert out.sharding.is_equivalent_to(sharded[0].sharding, 4)
    batch, _, heads = (*spec, None, None)[:3]
    assert lse.sharding.is_equivalent_to(NamedSharding(mesh, P(batch, heads)), 3)
    backward = jax.jit(lambda *x: pulled(lambda *y: flash.attention(*y, causal=True), x)[1:])
    assert not collectives(backward, *sharded)
    got = backward(*sharded)
    close(got, backward(*leaves))
    for x, y in zip(got, sharded):
        assert x.sharding.is_equivalent_to(y.sharding, 4)


def test_sharded_over_the_queries_of_a_key_head(mesh):
    """Fewer key heads than devices: the gradients of a key head are summed."""
    leaves = tensors(batch=2, heads_q=8, heads_k=2)
    sharded = [put(mesh, leaves[0], P(None, None, ("x", "y"))), *(put(mesh, x, P(None, None, "x")) for x in leaves[1:])]
    forward = jax.jit(lambda *x: flash.attention(*x, causal=True))
    assert not collectives(forward, *sharded)
    equal(forward(*sharded), forward(*leaves))
    backward = jax.jit(lambda *x: pulled(lambda *y: flash.attention(*y, causal=True), x)[1:])
    assert collectives(backward, *sharded) == {"all-reduce"}
    close(backward(*sharded), backward(*leaves))


def test_threads_of_xla_keep_their_state(mesh, monkeypatch):
    """Python would make a new one for each call, which takes longer than the rest of a call."""
    local, calls, new_states, known_of = threading.local(), [], [], jax_ffi._known_of

    def look(*arguments):
        calls.append(threading.get_ident())
        if not hasattr(local, "seen"):
            local.seen = new_states.append(calls[-1])
        return known_of(*arguments)

    q = put(mesh, tensors(batch=4)[0], P(("x", "y")))
    program = jax.jit(lambda q: flash.attention(flash.attention(q, q, q), q, q))
    monkeypatch.setattr(jax_ffi, "_known_of", look)
    for _ in range(20):
        jax.block_until_ready(program(q))
    assert len(calls) == 160 and set(calls) == set(new_states) and len(set(calls)) == len(new_states)


def test_what_cannot_be_split_is_gathered(mesh):
    for leaves, spec in (
        (tensors(batch=2, seqlen_q=6, seqlen_k=8), P(None, "x")),
        (tensors(batch=2), P(None, None, None, "y")),
        (tensors(batch=2, heads_q=6, heads_k=3), P("x", None, None)),
    ):
        sharded = [put(mesh, x, spec) for x in leaves]
        function = jax.jit(lambda *x: pulled(lambda *y: flash.attention(*y, causal=True), x))
        close(function(*sharded), function(*leaves))
    # Heads that divide in q, and not in k.
    leaves = tensors(batch=2, heads_q=6, heads_k=3)
    sharded = [put(mesh, leaves[0], P(None, None, "x")), *leaves[1:]]
    close(jax.jit(flash.attention)(*sharded), flash.attention(*leaves))


def test_sharded_packed_sequences(mesh):
    leaves, ends, used = packed()
    sharded = [put(mesh, x, P(None, "x")) for x in leaves]
    function = jax.jit(lambda *x: pulled(lambda *y: flash.attention_varlen(*y, *ends, causal=True, **used), x))
    assert not collectives(function, *sharded)
    close(function(*sharded), function(*leaves))


@cached
def test_sharded_caches(mesh, kind):
    call = decoding("float32", [5, 0, 9, 3], head_dim=8, **kind)
    named = {name: jnp.asarray(x) for name, x in call.named().items()}
    given = [jnp.asarray(x) for x in (call.q, call.k_cache, call.v_cache)]

    def attend(given, named):
        return flash.attention_with_kvcache(*given, return_lse=True, **named)

    function = jax.jit(attend)
    expected = function(given, named)
    by_heads = P(None, None, "x")
    sharded = [put(mesh, x, by_heads) for x in given]
    new = {name: put(mesh, x, by_heads) if name in ("k", "v") else x for name, x in named.items()}
    assert not collectives(function, sharded, new)
    equal(function(sharded, new), expected)
    if "by_index" not in kind and "page_size" not in kind:
        sharded = [put(mesh, x, P(("x", "y"))) for x in given]
        new = {name: put(mesh, x, P(("x", "y"))) for name, x in named.items()}
        assert not collectives(function, sharded, new)
        equal(function(sharded, new), expected)
    elif "new" not in kind:  # requests are split, on caches that all have
        sharded = [put(mesh, given[0], P("x")), *(put(mesh, x, P()) for x in given[1:])]
        new = {name: put(mesh, x, P("x")) for name, x in named.items()}
        assert not collectives(function, sharded, new)
        equal(function(sharded, new), expected)


EXPLICIT = {
    "batch": (P(("x", "y")),) * 3,
    "batch, heads": (P("x", None, "y"),) * 3,
    "heads": (P(None, None, ("x", "y")),) * 3,
    "queries of a key head": (P(None, None, ("x", "y")), P(None, None, "x"), P(None, None, "x")),
    "queries": (P(None, "x"),) * 3,
    "queries, not keys": (P(None, None, "y"), P(), P()),
}


@pytest.mark.parametrize("specs", EXPLICIT.values(), ids=EXPLICIT)
def test_explicit_axes(mesh, specs):
    """Of a mesh as jax.make_mesh makes it: shardings are part of the types."""
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    shared = specs[0] != specs[1]
    leaves = tensors(batch=4, seqlen_q=6, seqlen_k=8, heads_q=8, heads_k=2 if shared else 4)
    sharded = [put(mesh, x, spec) for x, spec in zip(leaves, specs)]
    function = jax.jit(jax.value_and_grad(lambda *x: (flash.attention(*x, causal=True) ** 2).sum(), (0, 1, 2)))
    forward = jax.jit(lambda *x: flash.attention(*x, causal=True, return_lse=True))
    with jax.set_mesh(mesh):
        out, lse = forward(*sharded)
        value, gradients = function(*sharded)
        if specs[0] != P(None, "x"):
            assert not collectives(forward, *sharded)
            assert jax.typeof(out).sharding.spec == P(*specs[0], *[None] * (4 - len(specs[0])))
            # Of the sum; and of a key head that devices share.
            assert collectives(function, *sharded) == {"all-reduce", *(["all-gather"] if shared else [])}
        for x, y in zip(gradients, sharded):
            assert jax.typeof(x) == jax.typeof(y)
    equal((out, lse), forward(*leaves))
    close((value, gradients), function(*leaves), rtol=1e-4, atol=1e-4)


def test_explicit_axes_with_caches_and_three_axes(mesh):
    mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    call = decoding("float32", [5, 0, 9, 3], head_dim=8, new=1)
    given = [jnp.asarray(x) for x in (call.q, call.k_cache, call.v_cache, call.k, call.v)]
    lengths = jnp.asarray(call.cache_seqlens)

    @jax.jit
    def attend(q, k_cache, v_cache, k, v, n):
        return flash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=n)

    with jax.set_mesh(mesh):
        got = attend(*(put(mesh, x, P("x", None, "y")) for x in given), put(mesh, lengths, P("x")))
        assert all(jax.typeof(x).sharding.spec == P("x", None, "y", None) for x in got)
    equal(got, attend(*given, lengths))
    leaves = [x[0] for x in tensors(heads_q=4, heads_k=4)]
    with jax.set_mesh(mesh):
        out = flash.attention(*(put(mesh, x, P(None, "x")) for x in leaves))
        assert jax.typeof(out).sharding.spec == P(None, "x", None)
    equal(out, flash.attention(*leaves))


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(mesh, check_vma):
    leaves = tensors(batch=4, heads_q=4, heads_k=2)

    def mapped(*specs):
        return jax.jit(
            jax.shard_map(lambda *x: flash.attention(*x), mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=check_vma)
        )

    function = mapped(*[P("x", None, "y")] * 3)
    assert not collectives(function, *(put(mesh, x, P("x", None, "y")) for x in leaves))
    equal(function(*leaves), flash.attention(*leaves))
    close(pulled(function, leaves), pulled(flash.attention, leaves))


def test_shard_map_with_keys_that_all_have(mesh):
    leaves = tensors(batch=2, seqlen_q=6)
    function = jax.jit(jax.shard_map(flash.attention, mesh=mesh, in_specs=(P(None, "x"), P(), P()), out_specs=P(None, "x")))
    equal(function(*leaves), flash.attention(*leaves))
    close(pulled(function, leaves), pulled(flash.attention, leaves))  # those of the keys are summed


# ------------------------------------------------------------------------------------------------------------
# jax.nn.dot_product_attention


def test_signature_is_that_of_jax():
    def names(function):
        return [(x.name, x.kind, x.default) for x in inspect.signature(function).parameters.values()]

    assert names(flash.dot_product_attention) == names(jax.nn.dot_product_attention)


DOT_PRODUCTS = [
    {},
    {"is_causal": True},
    {"local_window_size": 2},
    {"local_window_size": (3, 0)},
    {"local_window_size": (0, 2)},
    {"local_window_size": (1, 4), "is_causal": True, "scale": 0.3},
    {"query_seq_lengths": [3, 5]},
    {"key_value_seq_lengths": [4, 2]},
    {"query_seq_lengths": [3, 5], "key_value_seq_lengths": [4, 2]},
    {"query_seq_lengths": [3, 5], "key_value_seq_lengths": [4, 2], "is_causal": True},
    {"key_value_seq_lengths": [4, 2], "is_causal": True},
    {"query_seq_lengths": [3, 5], "is_causal": True},
]


@pytest.mark.parametrize("options", DOT_PRODUCTS, ids=str)
@pytest.mark.parametrize("seqlens", [(5, 5), (5, 9), (9, 5)], ids=str)
def test_dot_product_attention(options, seqlens):
    leaves = tensors(seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads_k=1 if "scale" in options else 2, head_dim_v=6)
    options = {name: jnp.asarray(x, jnp.int32) if isinstance(x, list) else x for name, x in options.items()}
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(leaves[0].shape), jnp.float32)
    used = options.get("query_seq_lengths", jnp.full(2, seqlens[0]))

    def run(attend, sees, *leaves):
        def loss(*leaves):
            out, residual = attend(*leaves, return_residual=True, **options)
            # A query that sees no key has the mean of the values there, and 0 here.
            return (out * weights * sees[..., None]).sum(), (out * sees[..., None], residual * in_both)

        in_both = sees & (jnp.arange(seqlens[0]) < used[:, None])[..., None]
        return jax.grad(loss, (0, 1, 2), has_aux=True)(*leaves)

    out, residual = flash.dot_product_attention(*leaves, return_residual=True, **options)
    sees = residual > -jnp.inf
    assert not out[~sees].any()
    expected = jax.jit(lambda *x: run(jax.nn.dot_product_attention, sees, *x))(*leaves)

    def ours(*x, **options):
        out, residual = flash.dot_product_attention(*x, **options)
        return out, jnp.where(residual == -jnp.inf, 0, residual)

    close(jax.jit(lambda *x: run(ours, sees, *x))(*leaves), expected)


def test_dot_product_attention_with_a_window_and_lengths():
    leaves = tensors(seqlen_q=7, head_dim_v=6)
    lengths = jnp.asarray([3, 6], jnp.int32)
    for options in ({"local_window_size": (2, 1)}, {"local_window_size": 2, "is_causal": True}):
        got = flash.dot_product_attention(*leaves, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options)
        close(got, jax.nn.dot_product_attention(*leaves, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options))
    with pytest.raises(NotImplementedError, match="local_window_size is not supported with key_value_seq_lengths"):
        flash.dot_product_attention(*leaves, key_value_seq_lengths=lengths, local_window_size=2)


def test_dot_product_attention_of_three_axes_under_jit():
    leaves = [x[0] for x in tensors("bfloat16", head_dim_v=6)]
    out, residual = jax.jit(lambda *x: flash.dot_product_attention(*x, is_causal=True, return_residual=True))(*leaves)
    expected, _ = jax.nn.dot_product_attention(*leaves, is_causal=True, return_residual=True)
    close(out, expected, rtol=0.02, atol=0.02)
    assert residual.shape == out.shape[:-1] and residual.dtype == jnp.bfloat16


def test_what_dot_product_attention_refuses():
    leaves = tensors(head_dim_v=6)
    for name in ("bias", "mask"):
        with pytest.raises(NotImplementedError, match=f"^{name} is not supported by cuflash: use is_causal"):
            flash.dot_product_attention(*leaves, **{name: jnp.zeros((1, 1, 5, 7))})
    with pytest.raises(NotImplementedError, match="implementation must be None, which is cuflash; got 'cudnn'"):
        flash.dot_product_attention(*leaves, implementation="cudnn")
    for wrong in (-1, (1, -1), (1, 2, 3), True, 1.5):
        with pytest.raises(ValueError, match="local_window_size must be None, an integer of 0 or more, or a pair"):
            flash.dot_product_attention(*leaves, local_window_size=wrong)
    with pytest.raises(
        ValueError, match=r"query_seq_lengths must be int32 of shape \(2,\), the batch; got int32 of shape \(3,\)"
    ):
        flash.dot_product_attention(*leaves, query_seq_lengths=jnp.zeros(3, jnp.int32))
    with pytest.raises(TypeError, match="is_causal must be a bool; got 1"):
        flash.dot_product_attention(*leaves, is_causal=1)


# ------------------------------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
def test_errors_when_a_call_is_traced(traced, monkeypatch):
    q, k, v = tensors()
    monkeypatch.setattr(jax_ffi, "_known_of", None)  # nothing is called that could run
    compiled = jax.jit if traced else lambda function: function

    def refused(error, match, *given, **options):
        with pytest.raises(error, match=match):
            compiled(lambda *x: flash.attention(*x, **options))(*given)

    refused(ValueError, "head_dim must be the same in q and k; got 6 and 5", q, k[..., :5], v)
    refused(ValueError, "batch must be the same in q, k and v; got 2, 1 and 2", q, k[:1], v)
    refused(ValueError, "q, k and v must all have 4 axes or all have 3", q[0], k, v)
    refused(ValueError, "q must have 4 axes", q[0, 0], k, v)
    refused(TypeError, "q, k, v must have one dtype; got float32, float16, float32", q, k.astype(jnp.float16), v)
    refused(TypeError, "q, k, v must be one of float16, .*; got int32", *(x.astype(jnp.int32) for x in (q, k, v)))
    refused(TypeError, "causal must be a bool; got 1", q, k, v, causal=1)
    refused(ValueError, r"window must be None or a pair \(left, right\); got 3", q, k, v, window=3)
    refused(TypeError, "softmax_scale must be a number; got 'x'", q, k, v, softmax_scale="x")
    refused(TypeError, "deterministic must be a bool; got None", q, k, v, deterministic=None)
    with pytest.raises(TypeError, match="softmax_scale must be a number; got .*Tracer|JitTracer"):
        jax.jit(lambda x: flash.attention(q, k, v, softmax_scale=x))(0.5)
    with pytest.raises(TypeError, match=r"^k must be a JAX or NumPy array; got list"):
        flash.attention(q, [1], v)
    leaves, ends, _ = packed()
    with pytest.raises(ValueError, match=r"cu_seqlens_k must have the shape of cu_seqlens_q, \(3,\); got \(2,\)"):
        compiled(flash.attention_varlen)(*leaves, ends[0], ends[1][:2])
    with pytest.raises(TypeError, match="max_seqlen_q must be an integer or None"):
        flash.attention_varlen(*leaves, *ends, max_seqlen_q=1.5)


def test_errors_of_caches():
    q, k_cache, v_cache = tensors(seqlen_q=1, head_dim_v=6)
    new = k_cache[:, :1], v_cache[:, :1]
    with pytest.raises(ValueError, match="cache_seqlens must be 0 to 7, the keys that the cache can hold of a request; got 8"):
        flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=8)
    with pytest.raises(ValueError, match="cache_seqlens must be given where k and v are appended"):
        flash.attention_with_kvcache(q, k_cache, v_cache, k=new[0], v=new[1])
    with pytest.raises(ValueError, match="k and v are appended together: k was given, v was not"):
        flash.attention_with_kvcache(q, k_cache, v_cache, k=new[0], cache_seqlens=1)
    with pytest.raises(TypeError, match="cache_seqlens must be an integer, an array or None; got 1.5"):
        flash.attention_with_kvcache(q, k_cache, v_cache, cache_seqlens=1.5)
    with pytest.raises(ValueError, match="num_splits must be 0"):
        flash.attention_with_kvcache(q, k_cache, v_cache, num_splits=-1)
    with pytest.raises(NotImplementedError, match="attention_with_kvcache has no gradient"):
        jax.grad(lambda q: flash.attention_with_kvcache(q, k_cache, v_cache).sum())(q)


def test_no_second_derivatives_and_none_of_forward_mode():
    leaves = tensors()
    with pytest.raises(NotImplementedError, match="cuflash.jax has no second derivatives"):
        jax.grad(lambda q: jax.grad(lambda q: flash.attention(q, *leaves[1:]).sum())(q).sum())(leaves[0])
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(flash.attention, leaves, leaves)


def test_errors_when_a_call_runs():
    """What lengths say is read on the CPU."""
    leaves, (ends_q, ends_k), _ = packed()
    function = jax.jit(flash.attention_varlen)
    with pytest.raises(jax.errors.JaxRuntimeError, match="cuflash: ValueError: cu_seqlens_q must not decrease; got 4 and then 3"):
        jax.block_until_ready(function(*leaves, jnp.asarray([0, 4, 3], jnp.int32), ends_k))
    jax.block_until_ready(function(*leaves, ends_q, ends_k))  # and the next call is as any other


def test_symbolic_shapes_are_refused():
    from jax import export

    shape = export.symbolic_shape("b, 5, 4, 6")
    q = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(NotImplementedError, match="q has a symbolic shape"):
        export.export(jax.jit(lambda q: flash.attention(q, q, q)))(q)


def test_exported_programs():
    pytest.importorskip("flatbuffers", reason="JAX needs flatbuffers to serialize programs")
    from jax import export

    leaves = tensors()
    safe = [export.DisabledSafetyCheck.custom_call(jax_ffi.TARGET)]
    exported = export.export(jax.jit(lambda *x: flash.attention(*x, causal=True)), disabled_checks=safe)(*leaves)
    again = export.deserialize(exported.serialize())
    equal(again.call(*leaves), flash.attention(*leaves, causal=True))


# ------------------------------------------------------------------------------------------------------------
# Lowered for CUDA


def lowered(function, *given):
    return jax.jit(function).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


def texts(lowered_text):
    """The attributes of the calls, decoded."""
    marker = 'call = "'
    found = [part.split('"}')[0] for part in lowered_text.split(marker)[1:]]
    return [json.loads(part.replace("\\22", '"')) for part in found]


def test_lowered_for_cuda():
    shapes = (8, 4096, 16, 64), (8, 4096, 8, 64), (8, 4096, 8, 64)
    leaves = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    text = lowered(lambda *x: flash.attention(*x, causal=True), *leaves)
    (call,) = texts(text)
    operation, operands, options, tier, given, results, scratch = call
    assert (operation, operands, tier) == ("attention", ["q", "k", "v"], None)
    assert dict(options) == {"causal": True, "window": [None, None], "softmax_scale": 0.125, "softcap": 0.0, "return_lse": False}
    assert given == [[name, "bfloat16", list(x.shape)] for name, x in zip("qkv", leaves)]
    assert results == [["out", "bfloat16", list(shapes[0])]]
    assert scratch > 0 and f"tensor<{scratch}xui8>" in text  # the list of tiles of a mask on Hopper
    known = jax_ffi._Known(
        jax_ffi.encode(jax_ffi.Call(operation, tuple(operands), tuple(options), tier), given, results, scratch).encode()
    )
    assert known.num_operands == 3 and known.num_results == 2 and known.memory == 4
    assert "backend_config" in text and "cuflash_attention" in text


def test_lowered_for_cuda_with_gradients_and_caches():
    leaves = tensors("float32")
    forward, backward = texts(lowered(jax.grad(lambda *x: flash.attention(*x).sum()), *leaves))
    assert backward[0] == "attention_backward" and backward[1] == ["q", "k", "v", "out", "lse", "dout"]
    assert [name for name, _, _ in backward[5]] == ["dq", "dk", "dv"]
    assert forward[6] == 0 and backward[6] >= 4 * 2 * 4 * 5 * 2
    call = decoding("float32", [5, 0], head_dim=8, new=1)
    text = lowered(
        lambda q, k_cache, v_cache, named: flash.attention_with_kvcache(q, k_cache, v_cache, **named),
        call.q,
        call.k_cache,
        call.v_cache,
        call.named(),
    )
    (call,) = texts(text)
    assert [name for name, _, _ in call[5]] == ["out", "k_cache", "v_cache"]
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 1" in text
    assert "output_operand_alias<output_tuple_indices = [2], operand_index = 2" in text


def test_scratch_is_the_most_of_any_gpu_and_alignment():
    call = jax_ffi.Call("attention_with_kvcache", ("q", "k_cache", "v_cache"), (("causal", True), ("num_splits", 0)), None)
    given = [
        jax_ffi.Array(name, "bfloat16", shape)
        for name, shape in zip(call.operands, ((2, 1, 8, 64), (2, 500, 2, 64), (2, 500, 2, 64)))
    ]
    from cuflash import config, launch

    most = 0
    for device in config.DEVICES.values():
        for offset in (0, 2):
            stated, _ = jax_ffi.state(call, given, [offset + (place << 40) for place in (1, 2, 3)])
            most = max(most, launch.scratch_places(stated, config.choose(stated, device))[1])
    assert jax_ffi.scratch_bytes(call, given) == most > 0


def test_forced_tiers_are_part_of_the_call():
    from cuflash import config

    leaves = tensors("bfloat16", head_dim=64)
    with config.force_tier("simt"):
        (call,) = texts(lowered(flash.attention, *leaves))
    assert call[3] == "simt"


def test_a_forced_tier_that_takes_the_arrays_only_if_aligned(monkeypatch):
    from cuflash import config

    monkeypatch.setattr(jax_ffi, "_devices", lambda: (config.DEVICES["sm_90"],))
    with config.force_tier("sm90"):
        assert texts(lowered(flash.attention, *tensors("bfloat16", head_dim=64, head_dim_v=64)))[0][3] == "sm90"
        with pytest.raises(NotImplementedError, match="tier sm90"):
            lowered(flash.attention, *tensors("float32", head_dim=64, head_dim_v=64))


def test_addresses_reach_the_launch_in_their_places():
    """What a prepared launch is called with, of every operation: as the functions that launch for CuPy would."""
    from cuflash import config, launch

    leaves, ends, used = packed("bfloat16")
    call = decoding("bfloat16", [5, 0], head_dim=8, new=1)
    found = texts(lowered(jax.grad(lambda *x: flash.attention(*x, causal=True).sum()), *tensors("bfloat16")))
    found += texts(lowered(jax.grad(lambda *x: flash.attention_varlen(*x, *ends, return_lse=True, **used)[0].sum()), *leaves))
    found += texts(
        lowered(
            lambda x, named: flash.attention_with_kvcache(*x, return_lse=True, **named),
            (call.q, call.k_cache, call.v_cache),
            call.named(),
        )
    )
    assert {text[0] for text in found} == set(jax_ffi.OPERATIONS)
    for text in found:
        known = jax_ffi._Known(json.dumps(text).encode())
        stated, _ = known.described()
        offsets, num_bytes = launch.scratch_places(stated, config.choose(stated, config.DEVICES["sm_90"]))
        assert num_bytes <= known.scratch
        passed = []
        prepared = launch.Prepared.__new__(launch.Prepared)  # one that needs no GPU
        vars(prepared).update(
            problem=stated,
            scratch_bytes=num_bytes,
            scratch_offsets=offsets,
            device_id=0,
            written_shapes=[()] * len(known.operation.written),
            lse_shape=(),
            makers=(),
            make_lse=None,
            launch=lambda *arguments, to=passed: to.append(arguments),
        )
        ready = jax_ffi._Ready(known, prepared)
        pointers = [0x7F0000000000 + 4096 * place for place in range(len(known.buffers))] + [0]
        by_name = dict(zip((x.name for x in reversed(known.buffers)), reversed(pointers[:-1])))
        for _ in range(2):
            ready(9, list(pointers))
        assert passed[0] == passed[1] and passed[0][0] == 9
        rest = list(passed[0][1:])
        if known.call.operation == "attention_with_kvcache":
            assert rest.pop(0) == 0  # the length is read from the array
            names = ["q", "k_cache", "v_cache", "out", "lse", "k", "v", "cache_seqlens", "cache_batch_idx", "block_table"]
            names += ["partial_out", "partial_lse"]
        else:
            names = [*launch._FORWARD_POINTERS, *launch._BACKWARD_POINTERS]
        scratch = by_name.get("workspace", 0)
        at = by_name | {name: scratch + offset for name, offset in offsets.items()}
        assert rest == [at.get(name, 0) for name in names[: len(rest)]], known.call
        assert len(rest) in (5, 10, len(names))


def test_options_of_numpy_types():
    """They go into the text of a call as Python's own."""
    q, k, v = tensors()
    options = {"causal": np.True_, "window": (np.int64(3), None), "deterministic": np.True_}
    equal(
        jax.grad(lambda x: flash.attention(x, k, v, **options).sum())(q),
        jax.grad(lambda x: flash.attention(x, k, v, causal=True, window=(3, None), deterministic=True).sum())(q),
    )
    call = decoding("float32", [5, 0], head_dim=8)
    given, named = (call.q, call.k_cache, call.v_cache), call.named()
    equal(
        flash.attention_with_kvcache(*given, **named, num_splits=np.int32(2), return_lse=np.True_, softcap=np.float32(5)),
        flash.attention_with_kvcache(*given, **named, num_splits=2, return_lse=True, softcap=5.0),
    )


def test_a_launch_is_prepared_for_each_alignment_of_each_buffer(monkeypatch):
    """One for inputs that are aligned to 8 bytes and a result to 16 must not serve a call of which it is the other way round."""
    known = jax_ffi._Known(json.dumps(texts(lowered(flash.attention, *tensors("bfloat16")))[0]).encode())
    passed, made = [], []
    monkeypatch.setattr(jax_ffi, "_get_device", lambda: 0)
    monkeypatch.setattr(jax_ffi, "_stream_of", lambda *_: 7)
    monkeypatch.setattr(known, "pointers", lambda address, *_: list(address), raising=False)

    def prepare(device_id, stream, pointers):
        made.append(pointers)
        return ready

    def ready(stream, pointers):
        passed.append((stream, pointers))

    ready.launch, ready.stream_args, ready.stream_address = True, None, 0
    monkeypatch.setattr(known, "prepare", prepare, raising=False)
    aligned, first, last = [4096, 8192, 12288, 16384, 0], [4104, 8192, 12288, 16384, 0], [4096, 8192, 12288, 16392, 0]
    for pointers in (aligned, first, last, first, [8192 + x for x in aligned]):
        known.launch(pointers, 0, 0, 0, 0)
    assert made == [aligned, first, last] and len(passed) == 5


# ------------------------------------------------------------------------------------------------------------
# The C interface


class Xla:
    """Frames as XLA makes them, and its functions for errors. None is ever freed, as XLA's table of functions is not."""

    all = []

    def __init__(self, *, extension=0, **sizes):
        self.messages, self.keep = [], []
        self.all.append(self)

        def create(address):
            self.messages.append(ctypes.c_char_p.from_address(address + 16).value.decode())
            return 77

        self.create = jax_ffi._Handler(create)
        sizes = {"frame": 168, "args": 40, "rets": 40, "attrs": 48, "api": 88, "major": 0} | sizes
        self.api = self.words(
            11, sizes["api"], 0, 24, 0, sizes["major"] + (9 << 32), 0, ctypes.cast(self.create, ctypes.c_void_p).value
        )
        text = b"[]"
        span = self.words(2, ctypes.addressof(self.hold(ctypes.create_string_buffer(text))), len(text))
        attributes = self.words(1, span)
        self.frame = self.words(
            22,
            sizes["frame"],
            extension,
            self.api,
            0,
            3,
            sizes["args"],
            0,
            0,
            0,
            0,
            sizes["rets"],
            0,
            0,
            0,
            0,
            sizes["attrs"],
            0,
            1,
            0,
            0,
            attributes,
        )

    def hold(self, x):
        self.keep.append(x)
        return x

    def words(self, count, *values):
        return ctypes.addressof(self.hold((ctypes.c_uint64 * count)(*values)))


@pytest.mark.parametrize(
    "what, name", [("frame", "CallFrame"), ("args", "Args"), ("rets", "Rets"), ("attrs", "Attrs"), ("api", "Api")]
)
def test_other_structures_are_refused(what, name):
    for handler in ("cpu", "gpu", "gpu instantiate"):
        xla = Xla(**{what: 32})
        assert jax_ffi.HANDLERS[handler](xla.frame) == 77
        assert (
            f"cuflash: RuntimeError: XLA's foreign function interface has changed: XLA_FFI_{name} has 32 bytes" in xla.messages[0]
        )


@pytest.mark.parametrize("major", [0, 1])
def test_metadata(major):
    xla = Xla(major=major)
    metadata = (ctypes.c_uint64 * 6)(48, 24, 0, 0, 0, 0)
    extension = (ctypes.c_uint64 * 4)(32, 1, 0, ctypes.addressof(metadata))
    ctypes.c_uint64.from_address(xla.frame + 8).value = ctypes.addressof(extension)
    result = jax_ffi.HANDLERS["gpu"](xla.frame)
    if major:
        assert result == 77 and "has version 1.9, cuflash knows 0: use a newer cuflash" in xla.messages[0]
    else:
        assert result is None and list(metadata)[3:5] == [9 << 32, 1]  # version 0.9, command-buffer compatible


def test_buffers_that_are_not_those_of_the_text_are_refused():
    """As where something between tracing and running changed a shape."""
    known = jax_ffi._Known(
        jax_ffi.encode(
            jax_ffi.Call("attention", ("q", "k", "v"), (), None),
            [("q", "float32", (1, 2, 1, 4)), ("k", "float32", (1, 2, 1, 4)), ("v", "float32", (1, 2, 1, 4))],
            [("out", "float32", (1, 2, 1, 4))],
            0,
        ).encode()
    )
    with pytest.raises(RuntimeError, match="XLA calls attention with 0 operands and 0 results; it was traced with 3 and 1"):
        known.check(Xla().frame)


def test_sizes_are_those_of_the_header():
    """jaxlib ships it."""
    import jaxlib

    text = (Path(jaxlib.__file__).parent / "include/xla/ffi/api/c_api.h").read_text()
    frame = text[text.index("struct XLA_FFI_CallFrame {") :].split("}")[0]
    order = [line.split(";")[0].split()[-1].lstrip("*") for line in frame.splitlines() if ";" in line]
    assert order == ["struct_size", "extension_start", "api", "ctx", "stage", "args", "rets", "attrs", "future"]
    api = text[text.index("struct XLA_FFI_Api {") :].split("};")[0]
    functions = [line.split("(")[1].split(")")[0] for line in api.splitlines() if "STRUCT_FIELD(" in line]
    assert functions[:5] == [
        "XLA_FFI_Error_Create",
        "XLA_FFI_Error_GetDetails",
        "XLA_FFI_Error_Destroy",
        "XLA_FFI_Handler_Register",
        "XLA_FFI_Stream_Get",
    ]
    assert "#define XLA_FFI_API_MAJOR 0" in text
    for name, code in jax_ffi._DTYPES.items():
        short = {"int": "S", "uint": "U", "float": "F", "bfloat": "BF"}[name.rstrip("0123456789")] + name.lstrip(
            "abcdefghijklmnopqrstuvwxyz"
        )
        assert f"XLA_FFI_DataType_{short} = {code}," in text


# ------------------------------------------------------------------------------------------------------------
# Processes


def run(code, *, timeout=120, **environment):
    root = str(Path(cuflash.__file__).parents[1])
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu"} | environment,
    )


@pytest.mark.parametrize("dropped", [True, False])
def test_a_process_ends_with_work_outstanding(dropped):
    code = f"""
import jax, jax.numpy as jnp, cuflash.jax
q = jnp.ones((1, 300, 4, 32))
def many(q):
    for _ in range(10):
        q = cuflash.jax.attention(q, q, q)
    return q
function = jax.jit(many)
x = [function(q + i) for i in range(20)]
if {dropped}:
    del x
print("left")
"""
    result = run(code)
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\n", "")


def test_without_jax_and_with_an_old_one():
    result = run("import sys; sys.modules['jax'] = None; import cuflash; import cuflash.jax")
    assert "ImportError: cuflash.jax needs JAX, which is not installed: pip install" in result.stderr
    old = "type('jax', (), {'__version__': '0.10.2', '__version_info__': (0, 10, 2)})"
    result = run(f"import sys; sys.modules['jax'] = {old}; import cuflash.jax")
    assert "ImportError: cuflash.jax needs JAX 0.11 or newer; got 0.10.2" in result.stderr


def test_what_the_benchmark_calls():
    from bench import jax_overhead

    q = jnp.ones(jax_overhead.TINY.shapes[0], jax_overhead.TINY.dtype)
    found = jax_overhead.programs(jax)
    assert {count for _, count in found} == set(jax_overhead.COUNTS)
    out, three, gradients = (found[key](q, q, q) for key in (("cuflash", 1), ("cuflash", 4), ("cuflash, gradient", 1)))
    assert out.shape == three.shape == q.shape and len(gradients) == 3


def test_what_the_benchmark_makes_of_rounds(monkeypatch):
    from bench import jax_overhead

    times = {1: iter([10.0, 40.0, 12.0, 12.0, 12.0]), 16: iter([160.0, 190.0, 312.0, 192.0, 192.0])}
    found = {("cuflash", 1): lambda *x: 1, ("cuflash", 16): lambda *x: 16, ("jax.nn, cudnn", 1): lambda *x: 1 / 0}
    monkeypatch.setattr(jax_overhead, "programs", lambda jax: found)

    def host_time(call, calls, synchronise):
        last = call.__defaults__[1]
        call()
        assert calls == 20
        return {"median_us": next(times[last[0]])}

    monkeypatch.setattr(jax_overhead, "host_time", host_time)
    said = []
    results = jax_overhead.measure(100, said.append)
    assert results["jax.nn, cudnn"] == {"failed": "division by zero"}
    assert results["cuflash"]["median_us"] == 12 and results["cuflash, 16 calls"]["us_a_call_more"] == 12
    assert results["cuflash, 16 calls"]["rounds_us_a_call_more"] == [10, 10, 20, 12, 12]
    assert "12.00 us a call more   (10.00 to 20.00): ok, at most 15 asked" in said[2]
