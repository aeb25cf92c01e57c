"""From a call to a launch on a GPU: the tier that runs, failures, keys, devices, the warm path."""

import dataclasses
import importlib
import os
import subprocess
import sys

import numpy as np
import pytest
from support import (
    MARKS,
    PLAIN,
    TIERS,
    Layout,
    Placed,
    assert_right,
    assert_same,
    backend_named,
    check,
    compute,
    fresh_process_state,
    inputs,
    on_tiers,
)

import cuflash
from cuflash import config, jit, launch

pytestmark = pytest.mark.gpu


def arrays_of(backend, host):
    return [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in host]


def kernels_loaded() -> set[str]:
    return {key[0] for key in jit._loaded}


# ------------------------------------------------------------------------------------------------------------
# Which kernel runs


@TIERS
def test_a_forced_tier_is_the_one_that_runs(monkeypatch, tier):
    backend = backend_named(tier)
    with fresh_process_state(monkeypatch):
        check(backend, *inputs("float16", seqlen_q=40))
        assert kernels_loaded() == {f"fwd_{tier}"}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_best_tier_runs_by_itself(monkeypatch, dtype):
    capability = launch.device_of(0).compute_capability
    if capability < (8, 0):
        pytest.skip("tensor cores for all 16-bit dtypes need compute capability 8.0")
    is_16_bit = dtype in ("float16", "bfloat16")
    kernel = "fwd_simt" if not is_16_bit else "fwd_sm90" if capability == (9, 0) else "fwd_sm80"
    host = inputs(dtype, seqlen_q=40)
    with fresh_process_state(monkeypatch), config.force_tier(None):
        result, lse = cuflash.attention(*arrays_of(backend_named("simt"), host), return_lse=True)
        assert kernels_loaded() == {kernel}
    assert_right(result.get(), lse.get(), *host)


@on_tiers("sm80", "sm90")
def test_tiers_agree(tier):
    for dtype in ("float16", "bfloat16"):
        host = inputs(dtype, seqlen_q=300)
        simt, other = (compute(backend_named(name), *host, causal=True) for name in ("simt", tier))
        np.testing.assert_allclose(simt[1], other[1], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(simt[0].astype(np.float64), other[0].astype(np.float64), atol=0.03)


ENVIRONMENT = """
import cupy, cuflash
from cuflash import jit
x = cupy.zeros((1, 40, 2, 64), {dtype!r})
cuflash.attention(x, x, x)
print(sorted(key[0] for key in jit._loaded))
"""


def with_tier(value, dtype):
    environment = {**os.environ, "CUFLASH_TIER": value}
    done = subprocess.run(
        [sys.executable, "-c", ENVIRONMENT.format(dtype=dtype)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jit.kernels_dir().parent,
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_the_environment_forces_a_tier():
    assert with_tier("simt", "float16") == "['fwd_simt']"
    assert with_tier("sm80", "float32").startswith(
        "NotImplementedError: tier sm80: tensor cores take float16 and bfloat16"
    )
    assert with_tier("sm90x", "float16") == "ValueError: tier must be one of sm90, sm80, simt; got 'sm90x'"
    if launch.device_of(0).compute_capability == (9, 0):
        assert with_tier("sm90", "float16") == "['fwd_sm90']"
        assert with_tier("sm90", "float32").startswith("NotImplementedError: tier sm90: tensor cores take float16")
    else:
        assert with_tier("sm90", "float16").startswith("NotImplementedError: tier sm90: needs compute capability 9.0")


@pytest.mark.parametrize("tier", ["sm80", "sm90"])
def test_a_forced_tier_that_refuses_says_so_each_time(tier):
    arrays = arrays_of(backend_named("simt"), inputs("float32", seqlen_q=40))
    for _ in range(2):
        with (
            config.force_tier(tier),
            pytest.raises(NotImplementedError, match=f"tier {tier}: tensor cores take"),
        ):
            cuflash.attention(*arrays)
    with config.force_tier("simt"):
        cuflash.attention(*arrays)


@pytest.mark.parametrize("kib", [48, 64, 99, 163])
@pytest.mark.parametrize("tier, dtype", [("simt", "float32"), ("simt", "float64"), ("sm80", "float16")])
def test_tiles_of_a_gpu_with_less_shared_memory(monkeypatch, tier, dtype, kib):
    """The configs of smaller GPUs run on this one."""
    device = dataclasses.replace(launch.device_of(0), smem_optin=kib * 1024)
    with fresh_process_state(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(launch, "device_of", lambda device_id: device)
        for head_dim in (64, 128, 256):
            if config.refusal(tier, stated(dtype, head_dim), device):
                continue
            assert config.choose(stated(dtype, head_dim), device, tier).smem_bytes <= kib * 1024
            host = inputs(dtype, batch=1, seqlen_q=150, heads_q=2, heads_k=1, head_dim=head_dim)
            check(backend_named(tier), *host, causal=True)


def stated(dtype, head_dim):
    from cuflash.problem import Problem

    return Problem(
        dtype=dtype,
        batch=1,
        seqlen_q=150,
        seqlen_k=150,
        heads_q=2,
        heads_k=1,
        head_dim=head_dim,
        head_dim_v=head_dim,
        softmax_scale=head_dim**-0.5,
        window_right=0,
    )


# ------------------------------------------------------------------------------------------------------------
# Failures


def changed_config(patch, **changes):
    choose = config.choose
    patch.setattr(launch, "choose", lambda *arguments: dataclasses.replace(choose(*arguments), **changes))


@TIERS
def test_too_much_shared_memory_is_said_with_numbers(monkeypatch, tier):
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=40)
    arrays = arrays_of(backend, host)
    limit = launch.device_of(0).smem_optin
    with fresh_process_state(monkeypatch), config.force_tier(tier):
        with monkeypatch.context() as patch:
            changed_config(patch, smem_bytes=limit + 4096)
            with pytest.raises(RuntimeError) as raised:
                cuflash.attention(*arrays)
        message = str(raised.value)
        for part in (
            f"fwd_{tier} for sm_",
            "HEAD_DIM=64",
            f"{limit + 4096} bytes of dynamic",
            f"at most {limit} bytes",
        ):
            assert part in message, message
        check(backend, *host)  # the context is as good as before


@TIERS
def test_a_launch_that_fails_is_said_with_numbers(monkeypatch, tier):
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=40)
    arrays = arrays_of(backend, host)
    with fresh_process_state(monkeypatch), config.force_tier(tier):
        with monkeypatch.context() as patch:
            changed_config(patch, threads=2048)
            for _ in range(2):  # prepared by the first; the second must fail as well
                with pytest.raises(
                    RuntimeError,
                    match=rf"launch of fwd_{tier} failed: .*INVALID.*grid \d+, 2048 threads, \d+ bytes of "
                    r"shared memory, \d+ registers a thread",
                ):
                    cuflash.attention(*arrays)
        with fresh_process_state(monkeypatch):
            check(backend, *host)


def test_a_kernel_that_does_not_compile_is_said_with_its_variant(monkeypatch):
    backend = backend_named("simt")
    arrays = arrays_of(backend, inputs("float16", seqlen_q=40))
    with fresh_process_state(monkeypatch), config.force_tier("simt"), monkeypatch.context() as patch:
        patch.setattr(launch, "params_constants", lambda: {})
        with pytest.raises(RuntimeError, match="(?s)cannot compile fwd_simt for sm_.*OFFSET_q"):
            cuflash.attention(*arrays)


def test_a_driver_too_old_is_said(monkeypatch):
    import cupy

    arrays = arrays_of(backend_named("simt"), inputs("float16", seqlen_q=40))
    with fresh_process_state(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: 11080)
        with pytest.raises(
            RuntimeError,
            match="the NVIDIA driver is too old: it supports CUDA 11.8, CuPy .* needs CUDA 1[23]",
        ):
            cuflash.attention(*arrays)


# ------------------------------------------------------------------------------------------------------------
# The prepared call


def test_a_repeated_call_reads_neither_disk_nor_config(monkeypatch):
    backend = backend_named("simt")
    arrays = arrays_of(backend, inputs("float16", seqlen_q=40))
    expected = cuflash.attention(*arrays, causal=True).get()
    with monkeypatch.context() as patch:
        for module, name in ((launch, "choose"), (jit, "load"), (jit, "build"), (jit, "closure")):
            patch.setattr(module, name, None)
        assert (cuflash.attention(*arrays, causal=True).get() == expected).all()
        with pytest.raises(TypeError):  # and another call does need them
            cuflash.attention(*arrays, window=(17, 3))


def test_what_is_refused_is_refused_after_a_call_that_was_not():
    """Values that are equal as keys but of a wrong type: 1 is no bool, 1.0 no window, True no cap."""
    arrays = arrays_of(backend_named("simt"), inputs("float16", seqlen_q=40))
    cuflash.attention(*arrays, causal=True, window=(1, 1), softcap=1.0, softmax_scale=1.0)
    for wrong in (
        dict(causal=1),
        dict(window=(1.0, 1)),
        dict(window=(True, 1)),
        dict(softcap=True),
        dict(softmax_scale=True),
    ):
        options = dict(causal=True, window=(1, 1), softcap=1.0, softmax_scale=1.0) | wrong
        with pytest.raises(TypeError, match=f"{next(iter(wrong))} .*must be"):
            cuflash.attention(*arrays, **options)


def test_a_window_may_be_any_pair_of_integers():
    """As on the CPU path: what cannot be part of a key is an argument all the same."""
    backend = backend_named("simt")
    host = inputs("float16", seqlen_q=40)
    expected = check(backend, *host, window=(3, 0))
    for window in ([3, 0], np.array([3, 0]), (np.int64(3), np.int32(0)), [3, np.int8(0)]):
        for _ in range(2):
            assert_same(backend, compute(backend, *host, window=window), expected, repr(window))


@pytest.mark.parametrize(
    "tier, bases", [("sm80", (0, 2, 16, 8, 0)), pytest.param("sm90", (0, 16, 48, 0), marks=MARKS["sm90"])]
)
def test_same_shape_elsewhere_in_memory(tier, bases):
    """A prepared call takes other addresses, and other alignments are other calls."""
    backend = backend_named(tier)
    for seed in range(3):
        host = inputs("float16", seqlen_q=50, seed=seed)
        for base in bases:
            check(backend, *host, Layout(base=base), causal=True)


def test_more_calls_than_are_kept(monkeypatch):
    attention = importlib.import_module("cuflash.attention")
    backend = backend_named("simt")
    arrays = arrays_of(backend, inputs("float16", seqlen_q=40))
    with fresh_process_state(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(attention, "_MAX_PREPARED", 8)
        results = [cuflash.attention(*arrays, softmax_scale=0.1 + 0.01 * (i % 20)).get() for i in range(60)]
        assert len(attention._prepared.calls) <= 8
    for i in range(40):
        assert (results[i] == results[i + 20]).all()


FIRST_CALL = """
import time
import cupy, cuflash
from cuflash import jit
x = cupy.zeros((1, 40, 2, 64), "float16")
cupy.cuda.Device().synchronize()
start = time.perf_counter()
cuflash.attention(x, x, x, causal=True)
print(jit.compile_count(), time.perf_counter() - start)
"""


def test_a_second_process_finds_its_kernel_on_disk(tmp_path):
    """It compiles nothing and starts at once; how fast, bench/ measures on a machine that is idle."""
    runs = []
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", FIRST_CALL],
            env={**os.environ, "CUFLASH_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=300,
            cwd=jit.kernels_dir().parent,
        )
        assert done.returncode == 0, done.stderr
        compiles, seconds = done.stdout.split()
        runs.append((int(compiles), float(seconds)))
    assert [compiles for compiles, _ in runs] == [1, 0, 0]
    assert runs[0][1] < 10 and min(seconds for _, seconds in runs[1:]) < 0.5, runs


# ------------------------------------------------------------------------------------------------------------
# Devices


def test_kernels_are_kept_by_device(monkeypatch):
    """The same variant on device 1 is another one: what is loaded on device 0 is no answer."""
    arrays = arrays_of(backend_named("simt"), inputs("float16", seqlen_q=40))
    with fresh_process_state(monkeypatch), config.force_tier("simt"):
        cuflash.attention(*arrays)
        ((kernel, constants, arch, device_id),) = jit._loaded
        assert device_id == 0
        asked = []
        with monkeypatch.context() as patch:
            patch.setattr(
                jit,
                "_load",
                lambda *arguments: asked.append(arguments[3]) or jit._loaded[kernel, constants, arch, 0],
            )
            jit.load(kernel, constants, arch, 1)
        assert asked == [1]


def test_a_second_gpu():
    """Inputs on GPU 1 while GPU 0 is current, and the other way round; what is current stays current."""
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    host = inputs("float16", seqlen_q=100)
    on_gpu = {}
    for device in (1, 0):
        with cupy.cuda.Device(device):
            on_gpu[device] = [cupy.asarray(x) for x in host]
            cupy.cuda.Device(device).synchronize()
    results = {}
    for current in (0, 1):
        for device in (1, 0):
            with cupy.cuda.Device(current):
                out, lse = cuflash.attention(*on_gpu[device], causal=True, return_lse=True)
                assert cupy.cuda.runtime.getDevice() == current
            assert out.device.id == lse.device.id == device
            with cupy.cuda.Device(device):
                cupy.cuda.Device(device).synchronize()
                results[current, device] = out.get(), lse.get()
    for result in results.values():
        assert_right(*result, *host, causal=True)
        assert_same(backend_named("sm80"), result, results[0, 0], "another GPU")
    with pytest.raises(ValueError, match="q, k, v must be on one device; got cuda:0, cuda:1, cuda:0"):
        cuflash.attention(on_gpu[0][0], on_gpu[1][1], on_gpu[0][2])
    with cupy.cuda.Device(1):
        out = cupy.empty_like(on_gpu[1][0])
    with pytest.raises(ValueError, match="out must be on the device of q, cuda:0; got cuda:1"):
        cuflash.attention(*on_gpu[0], out=out)


def test_cpu_and_gpu_arrays_do_not_mix():
    host = inputs("float16", seqlen_q=40)
    q, k, v = arrays_of(backend_named("simt"), host)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got numpy, cupy, cupy"):
        cuflash.attention(host[0], k, v)
    with pytest.raises(TypeError, match="q, k, v must come from one framework; got cupy, cupy, numpy"):
        cuflash.attention(q, k, host[2])
    with pytest.raises(TypeError, match="out must come from the framework of q, cupy; got numpy"):
        cuflash.attention(q, k, v, out=np.empty_like(host[0]))
