"""CuPy's streams, threads and CUDA graphs; a kernel that is not loaded yet when a capture has begun."""

import subprocess
import sys
import threading

import numpy as np
import pytest
from support import (
    MARKS,
    PLAIN,
    TAKES,
    TIERS,
    Placed,
    assert_right,
    assert_same,
    backend_named,
    compute,
    fresh_process_state,
    inputs,
    on_tiers,
    spin,
)

import cuflash
from cuflash import config, jit

pytestmark = pytest.mark.gpu



def arrays_of(backend, host):
    return [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in host]


def fetch(cupy, *arrays, stream=None):
    if stream is not None:
        stream.synchronize()
    return [x.get() for x in arrays]


# ------------------------------------------------------------------------------------------------------------
# Streams


@TIERS
def test_work_waits_for_the_current_stream_and_for_no_other(cupy, tier):
    """q is written by the caller's stream, late: on any other stream the kernel would read NaN."""
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=130)
    expected = compute(backend, *host, causal=True)
    staged, k, v = arrays_of(backend, host)
    q = cupy.empty(staged.shape, staged.dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        q.data.memset(0xFF, q.nbytes)
        cupy.cuda.Device().synchronize()
        with config.force_tier(tier), stream:
            spin(2)
            q.data.copy_from_device_async(staged.data, q.nbytes)
            result, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
            q.data.memset_async(0xFF, q.nbytes)  # nor may it start later
        assert_same(backend, fetch(cupy, result, lse, stream=stream), expected, "on a side stream")


@TIERS
def test_the_call_does_not_wait(cupy, tier):
    """It returns while the stream is still busy with what came before."""
    backend = backend_named(tier)
    q, k, v = arrays_of(backend, inputs("float16", seqlen_q=130))
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier(tier), stream:
        cuflash.attention(q, k, v)
        for _ in range(5):  # a process that is put aside for long proves nothing
            stream.synchronize()
            spin(100)
            cuflash.attention(q, k, v)
            if not stream.done:
                break
        else:
            pytest.fail("the stream was idle after every call")
    stream.synchronize()


@TIERS
def test_two_streams_at_once(cupy, tier):
    backend = backend_named(tier)
    hosts = [inputs("float16", seqlen_q=130, seed=1), inputs("float16", seqlen_q=257, head_dim=128, seed=2)]
    options = [dict(causal=True), dict(window=(50, 3))]
    expected = [compute(backend, *host, **option) for host, option in zip(hosts, options, strict=True)]
    arrays = [arrays_of(backend, host) for host in hosts]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = [[], []]
    with config.force_tier(tier):
        for _ in range(20):
            for i in range(2):
                with streams[i]:
                    results[i].append(cuflash.attention(*arrays[i], return_lse=True, **options[i]))
    for i in range(2):
        for result in results[i]:
            assert_same(backend, fetch(cupy, *result, stream=streams[i]), expected[i], f"stream {i}")


@TIERS
def test_memory_that_is_given_up_is_not_reused_too_early(cupy, tier):
    """Inputs and results die while the kernel is still queued: their next use must come behind it."""
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=130)
    expected = compute(backend, *host)
    stream = cupy.cuda.Stream(non_blocking=True)
    kept = arrays_of(backend, host)
    results = []
    with config.force_tier(tier), stream:
        for _ in range(10):
            spin(0.5)
            copies = []
            for x in kept:
                y = cupy.empty(x.shape, x.dtype)
                y.data.copy_from_device_async(x.data, x.nbytes)
                copies.append(y)
            results.append(cuflash.attention(*copies, return_lse=True))
            cuflash.attention(*copies)
            del copies
            for x in kept:
                y = cupy.empty(x.shape, x.dtype)
                y.data.memset_async(0xFF, y.nbytes)
    for result in results:
        assert_same(backend, fetch(cupy, *result, stream=stream), expected, "after reuse")


# ------------------------------------------------------------------------------------------------------------
# Threads


def run_threads(count, work):
    """work(i) in `count` threads that start together; the first error, if any, is raised."""
    barrier, errors = threading.Barrier(count), []

    def body(i):
        try:
            barrier.wait(60)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    if errors:
        raise errors[0]


@TIERS
def test_ten_threads_make_the_first_call(cupy, monkeypatch, tmp_path, tier):
    """Of two kernels, five threads each: every kernel is compiled once, every result is right."""
    dtypes = ("float16", "float32" if tier == "simt" else "bfloat16")
    hosts = [inputs(dtype, seqlen_q=100, head_dim=32, seed=i) for i, dtype in enumerate(dtypes)]
    calls = [arrays_of(backend_named(tier), host) for host in hosts]
    results = {}
    monkeypatch.setenv("CUFLASH_CACHE_DIR", str(tmp_path))

    def work(thread):
        results[thread] = cuflash.attention(*calls[thread % 2], causal=True, return_lse=True)

    before = jit.compile_count()
    with fresh_process_state(monkeypatch), config.force_tier(tier):
        run_threads(10, work)
    assert jit.compile_count() - before == 2
    cupy.cuda.Device().synchronize()
    assert len(results) == 10
    for thread, result in results.items():
        assert_right(*(x.get() for x in result), *hosts[thread % 2], causal=True)


@TIERS
def test_threads_with_a_stream_each(cupy, tier):
    """Shapes of their own, on streams of their own, again and again."""
    hosts = [inputs("float16", seqlen_q=60 + 30 * i, seed=i) for i in range(6)]
    backend = backend_named(tier)
    expected = [compute(backend, *host, causal=True) for host in hosts]
    arrays = [arrays_of(backend, host) for host in hosts]
    cupy.cuda.Device().synchronize()

    def work(i):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for _ in range(30):
                result = cuflash.attention(*arrays[i], causal=True, return_lse=True)
                assert_same(backend, fetch(cupy, *result, stream=stream), expected[i], f"thread {i}")

    with config.force_tier(tier):
        run_threads(len(hosts), work)


FIRST_CALL = """
import threading
import numpy as np
import cupy, cuflash
from cuflash import oracle

rng = np.random.default_rng(0)
dtypes = [np.float16] * 3 + [np.float32] * 3
host = [rng.standard_normal((1, 90, 2, 64)).astype(dtype) for dtype in dtypes]
arrays = [cupy.asarray(x) for x in host]
barrier, results = threading.Barrier(10), [None] * 10

def work(i):
    barrier.wait()
    three = arrays[:3] if i % 2 else arrays[3:]
    results[i] = cuflash.attention(*three, return_lse=True)

threads = [threading.Thread(target=work, args=(i,)) for i in range(10)]
[t.start() for t in threads]
[t.join() for t in threads]
for i in range(10):
    judgement = oracle.judge(*(x.get() for x in results[i]), *(host[:3] if i % 2 else host[3:]))
    assert judgement.ok, judgement.why
print("ok")
"""


def test_ten_threads_in_a_new_process(cupy, tmp_path):
    """The very first calls of a process: imports, contexts and compiles race too."""
    import os

    done = subprocess.run(
        [sys.executable, "-c", FIRST_CALL],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=jit.kernels_dir().parent,
        env={**os.environ, "CUFLASH_CACHE_DIR": str(tmp_path)},
    )
    assert done.stdout.strip() == "ok", f"exit status {done.returncode}: {done.stderr}"


# ------------------------------------------------------------------------------------------------------------
# Graphs


@pytest.mark.parametrize(
    "tier, dtype", [pytest.param(tier, dtype, marks=MARKS[tier]) for tier in MARKS for dtype in TAKES[tier]]
)
def test_graph(cupy, tier, dtype):
    """Captured once, replayed with other values in the same memory."""
    backend = backend_named(tier)
    sizes = dict(seqlen_q=130, seqlen_k=200)
    arrays = arrays_of(backend, inputs(dtype, **sizes))
    given = cupy.empty(arrays[0].shape, arrays[0].dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier(tier), stream:
        cuflash.attention(*arrays, causal=True, return_lse=True)
        cuflash.attention(*arrays, causal=True, out=given)
        stream.begin_capture()
        out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)
        cuflash.attention(*arrays, causal=True, out=given)
        graph = stream.end_capture()
    for seed in range(3):
        host = inputs(dtype, **sizes, seed=20 + seed)
        for x, y in zip(arrays, host, strict=True):
            x.data.copy_from_host(y.ctypes.data, y.nbytes)
        for x in (out, lse, given):
            x.data.memset(0xFF, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        result = fetch(cupy, out, lse, given, stream=stream)
        expected = compute(backend, *host, causal=True)
        assert_same(backend, result[:2], expected, "replay")
        assert_same(backend, (result[2], result[1]), expected, "replay into out")


@on_tiers("sm80", "sm90")
def test_two_graphs_of_two_kernels_interleave(cupy, tier):
    stream = cupy.cuda.Stream(non_blocking=True)
    made = []
    for name, seqlen in (("simt", 70), (tier, 200)):
        backend = backend_named(name)
        host = inputs("float16", seqlen_q=seqlen)
        arrays = arrays_of(backend, host)
        with config.force_tier(name), stream:
            cuflash.attention(*arrays, causal=True, return_lse=True)
            stream.begin_capture()
            result = cuflash.attention(*arrays, causal=True, return_lse=True)
            made.append((backend, stream.end_capture(), arrays, result, compute(backend, *host, causal=True)))
    for _ in range(3):
        for _, _, _, result, _ in made:
            for x in result:
                x.data.memset(0xFF, x.nbytes)
        cupy.cuda.Device().synchronize()
        for _, graph, *_ in made:
            graph.launch(stream=stream)
        for backend, _, _, result, expected in made:
            assert_same(backend, fetch(cupy, *result, stream=stream), expected, backend.name)


@TIERS
@pytest.mark.parametrize("mode", ["Relaxed", "ThreadLocal", "Global"])
def test_a_cold_kernel_under_capture_is_refused_and_leaves_no_trace(cupy, monkeypatch, tier, mode):
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=100)
    arrays = arrays_of(backend, host)
    stream = cupy.cuda.Stream(non_blocking=True)
    with fresh_process_state(monkeypatch), config.force_tier(tier), stream:
        stream.begin_capture(getattr(cupy.cuda.runtime, f"streamCaptureMode{mode}"))
        try:
            with pytest.raises(
                RuntimeError, match=rf"fwd_{tier} .*make one such call before the capture.*cuflash warmup"
            ):
                cuflash.attention(*arrays, causal=True)
            assert cupy.cuda.runtime.streamIsCapturing(stream.ptr)
        finally:
            stream.end_capture()
        out, lse = cuflash.attention(*arrays, causal=True, return_lse=True)  # loads, now that it may
        assert_right(*fetch(cupy, out, lse, stream=stream), *host, causal=True)
        stream.begin_capture()
        captured = cuflash.attention(*arrays, causal=True)
        graph = stream.end_capture()
        graph.launch(stream=stream)
        assert_same(
            backend, (fetch(cupy, captured, stream=stream)[0],) * 2, (out.get(),) * 2, "captured after all"
        )


def test_a_cold_kernel_under_pytorch_capture(cupy, monkeypatch):
    torch = pytest.importorskip("torch", reason="no PyTorch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no CUDA GPU")
    q, k, v = (torch.from_numpy(x).cuda() for x in inputs("float16", seqlen_q=100))
    torch.cuda.synchronize()
    with fresh_process_state(monkeypatch):
        with pytest.raises(RuntimeError, match="make one such call before the capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                cuflash.attention(q, k, v)
        expected = cuflash.attention(q, k, v)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = cuflash.attention(q, k, v)
        captured.zero_()
        graph.replay()
        assert torch.equal(captured, expected)


@on_tiers("sm80", "sm90")
def test_capture_on_another_stream_does_not_disturb(cupy, tier):
    """A warm call on a stream of its own, while another stream captures."""
    backend = backend_named(tier)
    host = inputs("float16", seqlen_q=100)
    arrays = arrays_of(backend, host)
    capturing, working = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    with config.force_tier(tier):
        with working:
            expected = cuflash.attention(*arrays, causal=True, return_lse=True)
        working.synchronize()
        with capturing:
            capturing.begin_capture()
            captured = cuflash.attention(*arrays, causal=True, return_lse=True)
        with working:
            result = cuflash.attention(*arrays, causal=True, return_lse=True)
        with capturing:
            graph = capturing.end_capture()
        graph.launch(stream=capturing)
    expected = fetch(cupy, *expected, stream=working)
    assert_same(backend, fetch(cupy, *result, stream=working), expected, "beside a capture")
    assert_same(backend, fetch(cupy, *captured, stream=capturing), expected, "captured")
    np.testing.assert_array_equal(expected[0].shape, host[0].shape)
