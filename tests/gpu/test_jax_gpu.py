"""cuflash.jax on a GPU: the bits of the plain functions, however they are reached, and what XLA does around them."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from support import (
    Gradients,
    Lengths,
    assert_right,
    assert_right_gradients,
    assert_right_kvcache,
    assert_right_varlen,
    decoding,
    dlse_of,
    dout_of,
    inputs,
    packed_inputs,
)

import cuflash
from cuflash import config

jax = pytest.importorskip("jax", reason="no JAX")
if jax.__version_info__ < (0, 11):
    pytest.skip("JAX is too old", allow_module_level=True)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import cuflash.jax as flash  # noqa: E402
from cuflash import jax_ffi  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("frameworks"), pytest.mark.usefixtures("jax_gpu")]
DTYPES = ["float16", "bfloat16", "float32"]


def on_gpu(*host):
    return [jax.device_put(x, jax.devices("gpu")[0]) for x in host]


def equal(got, expected):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x, np.float64), np.asarray(y, np.float64))


def by_cupy(function, *host, **options):
    """What a function of the package returns for arrays of CuPy, on the host."""
    import cupy

    given = [cupy.asarray(x) for x in host]
    return [x.get() for x in function(*given, **options)]


# ------------------------------------------------------------------------------------------------------------
# What is computed


@pytest.mark.parametrize("dtype", [*DTYPES, "float64"])
def test_bits_are_those_of_the_plain_functions(dtype):
    host = inputs(dtype, seqlen_k=200)
    options = {"causal": True, "window": (100, None), "softcap": 5.0}
    dout, dlse = dout_of(host[0], host[2]), dlse_of(host[0])
    with jax.enable_x64(True):
        leaves = on_gpu(*host)
        state = by_cupy(cuflash.attention, *host, return_lse=True, **options)
        expected = by_cupy(
            lambda *x: cuflash.attention_backward(*x[:6], dlse=x[6], deterministic=True, **options), dout, *host, *state, dlse
        )
        results, pull = jax.vjp(lambda *x: flash.attention(*x, return_lse=True, deterministic=True, **options), *leaves)
        equal((results, pull(tuple(on_gpu(dout, dlse)))), (state, expected))
        together = jax.jit(
            lambda *x: jax.vjp(lambda *y: flash.attention(*y, return_lse=True, deterministic=True, **options), *x[:3])[1](x[3:])
        )
        equal(together(*leaves, *on_gpu(dout, dlse)), expected)
        equal(flash.attention(*leaves, **options), state[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_against_the_oracle(dtype):
    host = inputs(dtype, seqlen_q=100)
    dout = dout_of(host[0], host[2])

    @jax.jit
    def both(dout, *leaves):
        out, pull, lse = jax.vjp(lambda *x: flash.attention(*x, causal=True, return_lse=True), *leaves, has_aux=True)
        return out, lse, pull(dout)

    out, lse, gradients = both(*on_gpu(dout, *host))
    assert_right(np.asarray(out), np.asarray(lse), *host, causal=True)
    assert_right_gradients(Gradients(*map(np.asarray, gradients)), dout, *host, causal=True)


@pytest.mark.parametrize("tier", config.TIERS)
def test_forced_tiers(tier):
    if tier == "sm90" and jax.devices("gpu")[0].compute_capability != "9.0":
        pytest.skip("not on this GPU")
    host = inputs("bfloat16", seqlen_q=100)
    with config.force_tier(tier):
        out, lse = flash.attention(*on_gpu(*host), return_lse=True)
        known = [x for x in jax_ffi._known.values() if x.call.tier == tier and x.call.operation == "attention"]
    assert known and known[-1].ready
    assert_right(np.asarray(out), np.asarray(lse), *host)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_sequences(dtype):
    lengths = Lengths((0, 40, 7, 90), (20, 60, 7, 0), used_k=(10, 60, 0, 0), spare_q=5)
    host = packed_inputs(dtype, lengths)
    ends, used = lengths.arrays()
    leaves, ends, used = on_gpu(*host), on_gpu(*ends), {name: jax.device_put(x) for name, x in used.items()}
    dout = np.nan_to_num(dout_of(host[0], host[2]))

    @jax.jit
    def both(dout, leaves, ends, used):
        out, pull, lse = jax.vjp(
            lambda *x: flash.attention_varlen(*x, *ends, causal=True, return_lse=True, **used), *leaves, has_aux=True
        )
        return out, lse, pull(dout)

    out, lse, gradients = both(*on_gpu(dout), leaves, ends, used)
    assert_right_varlen(np.asarray(out), np.asarray(lse), *host, lengths, causal=True)
    assert_right_gradients(Gradients(*map(np.asarray, gradients)), dout, *host, lengths=lengths, causal=True)
    # The same program with other lengths.
    other = Lengths((30, 40, 7, 60), (20, 60, 7, 0), used_k=(20, 50, 3, 0), spare_q=5)
    host = packed_inputs(dtype, other)
    ends, used = other.arrays()
    out, lse, _ = both(*on_gpu(dout), on_gpu(*host), on_gpu(*ends), {name: jax.device_put(x) for name, x in used.items()})
    assert_right_varlen(np.asarray(out), np.asarray(lse), *host, other, causal=True)


@pytest.mark.parametrize("kind", [{}, {"by_index": True}, {"page_size": 16}, {"new": 2}, {"new": 1, "page_size": 16}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_caches(dtype, kind):
    call = decoding(dtype, [5, 0, 300, 77], **kind)
    q, *caches = on_gpu(call.q, call.k_cache, call.v_cache)
    named = {name: jax.device_put(x) for name, x in call.named().items()}
    results = jax.jit(lambda *x: flash.attention_with_kvcache(*x[:3], return_lse=True, **x[3]))(q, *caches, named)
    assert_right_kvcache(*map(np.asarray, results[:2]), call, causal=True)
    equal(results[2:], call.after() if "new" in kind else ())
    equal(caches, (call.k_cache, call.v_cache))


def test_donated_caches_are_changed_in_place():
    call = decoding("bfloat16", [5, 0, 30], new=1)
    q, k_cache, v_cache, k, v, lengths = on_gpu(call.q, call.k_cache, call.v_cache, call.k, call.v, call.cache_seqlens)
    where = k_cache.unsafe_buffer_pointer(), v_cache.unsafe_buffer_pointer()
    step = jax.jit(
        lambda q, k_cache, v_cache, k, v, n: flash.attention_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=n),
        donate_argnums=(1, 2),
    )
    out, *after = step(q, k_cache, v_cache, k, v, lengths)
    equal(after, call.after())
    assert tuple(x.unsafe_buffer_pointer() for x in after) == where and k_cache.is_deleted()


def test_one_array_as_both_caches():
    q, k, _ = on_gpu(*inputs("bfloat16", seqlen_q=1, seqlen_k=200))
    out = jax.jit(flash.attention_with_kvcache)(q, k, k)
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(flash.attention(q, k, k), np.float32), atol=0.02)


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"seqlen_q": 0}, {"seqlen_k": 0}], ids=str)
def test_empty(sizes):
    leaves = on_gpu(*inputs("bfloat16", **{"seqlen_q": 20, "seqlen_k": 30} | sizes))
    out, lse = flash.attention(*leaves, return_lse=True)
    assert not np.asarray(out, np.float32).any() and np.all(np.asarray(lse) == -np.inf)
    assert not any(np.asarray(x, np.float32).any() for x in jax.grad(lambda *x: flash.attention(*x).sum(), (0, 1, 2))(*leaves))


# ------------------------------------------------------------------------------------------------------------
# Under JAX's transformations, and XLA's


def test_vmap_and_shard_map():
    host = inputs("bfloat16", batch=4)
    leaves = on_gpu(*host)
    expected = flash.attention(*leaves, causal=True)
    in_parts = [x.reshape(2, 2, *x.shape[1:]) for x in leaves]
    got = jax.jit(jax.vmap(lambda *x: flash.attention(*x, causal=True)))(*in_parts)
    equal(got.reshape(expected.shape), expected)
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices("gpu")[:1], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda *x: flash.attention(*x, causal=True), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
    equal(jax.jit(mapped)(*leaves), expected)
    dq, dk, dv = jax.jit(jax.grad(lambda *x: mapped(*x).astype(jnp.float32).sum(), (0, 1, 2)))(*leaves)
    wanted = jax.grad(lambda *x: flash.attention(*x, causal=True).astype(jnp.float32).sum(), (0, 1, 2))(*leaves)
    equal((dk, dv), wanted[1:])
    np.testing.assert_allclose(np.asarray(dq, np.float32), np.asarray(wanted[0], np.float32), atol=0.02)


def chain(q, k, v):
    """Calls in a row, as XLA records them into a CUDA graph."""
    for i in range(6):
        q = flash.attention(q + i, k, v, causal=True)
    return q


def test_command_buffers():
    """One program many times, with inputs that change, and in memory that does."""
    q, k, v = on_gpu(*inputs("bfloat16", seqlen_q=64, heads_q=4, heads_k=4))
    program, one = jax.jit(chain), jax.jit(lambda x, i: flash.attention(x + i, k, v, causal=True))
    kept = []
    for number in range(60):
        x = q * (1 + number / 16)
        got = program(x, k, v)
        kept += [got] * (number % 3 == 0) + [jnp.zeros(1000 * number)] * (number % 7 == 0)
        if number % 5 == 0:
            expected = x
            for i in range(6):
                expected = one(expected, jnp.bfloat16(i))
            np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(expected, np.float32), atol=0.03)
    # The same arrays again and again: nothing moves, and what is recorded is replayed.
    x = program(q, k, v)
    for _ in range(30):
        again = program(q, k, v)
    equal(again, x)


def test_gradients_in_a_scan():
    q, k, v = on_gpu(*inputs("bfloat16", seqlen_q=64, heads_q=4, heads_k=4))

    @jax.jit
    def train(q, k, v):
        def step(leaves, _):
            gradients = jax.grad(
                lambda *x: flash.attention(*x, causal=True, deterministic=True).astype(jnp.float32).sum(), (0, 1, 2)
            )(*leaves)
            return tuple((x - 0.5 * g).astype(x.dtype) for x, g in zip(leaves, gradients)), None

        return jax.lax.scan(step, (q, k, v), None, length=8)[0]

    first = train(q, k, v)
    for _ in range(10):
        equal(train(q, k, v), first)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in first)


def test_threads():
    """One program from several threads: a prepared launch is in the hands of one call at a time."""
    q, k, v = on_gpu(*inputs("bfloat16", seqlen_q=64))
    program = jax.jit(lambda *x: flash.attention(*x, window=(20, 3)))
    given = [q * (1 + i / 4) for i in range(6)]
    expected, wrong = [np.asarray(program(x, k, v), np.float32) for x in given], []

    def work(i):
        for _ in range(50):
            if not np.array_equal(np.asarray(program(given[i], k, v), np.float32), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_beside_cupy_on_streams_of_its_own(cupy):
    host = inputs("bfloat16", seqlen_q=64)
    leaves, given = on_gpu(*host), [cupy.asarray(x) for x in host]
    expected = flash.attention(*leaves)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            one, other = flash.attention(*leaves), cuflash.attention(*given)
        stream.synchronize()
    equal((one, other.get()), (expected, expected))


# ------------------------------------------------------------------------------------------------------------
# Errors, and the end


def test_scratch_that_is_too_small_is_refused(monkeypatch):
    leaves = on_gpu(*inputs("bfloat16", seqlen_q=70, seqlen_k=71))
    monkeypatch.setattr(jax_ffi, "scratch_bytes", lambda call, given: 0)
    with pytest.raises(
        jax.errors.JaxRuntimeError, match="cuflash: RuntimeError: attention_backward needs .* bytes of scratch on GPU 0"
    ):
        jax.block_until_ready(jax.jit(jax.grad(lambda *x: flash.attention(*x).astype(jnp.float32).sum()))(*leaves))


def test_what_goes_wrong_in_a_launch_is_raised(monkeypatch):
    leaves = on_gpu(*inputs("bfloat16", seqlen_q=60))
    program = jax.jit(flash.attention)
    expected = program(*leaves)

    def fails(self, stream, pointers):
        raise OSError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr(jax_ffi._Ready, "__call__", fails)
        with pytest.raises(jax.errors.JaxRuntimeError, match="cuflash: OSError: no such thing"):
            jax.block_until_ready(program(*leaves))
    equal(program(*leaves), expected)


@pytest.mark.parametrize("dropped", [True, False])
def test_a_process_ends_with_work_outstanding(dropped):
    """And its first call ever is of a program that XLA records."""
    code = f"""
import jax, jax.numpy as jnp, cuflash.jax
q = jnp.ones((1, 4096, 8, 64), jnp.bfloat16)
def chain(q):
    for i in range(8):
        q = cuflash.jax.attention(q + i, q, q)
    return q
program = jax.jit(chain)
x = [program(q + i) for i in range(50)]
if {dropped}:
    del x
print("left")
"""
    root = str(Path(cuflash.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=environment)
    assert (result.returncode, result.stdout) == (0, "left\n"), result.stderr
