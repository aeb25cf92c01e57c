"""Gradients on a GPU beyond their values: the same bits run to run, streams, CUDA graphs, memory, long sequences."""

import threading

import numpy as np
import pytest
from support import (
    PLAIN,
    TIERS,
    Gradients,
    Lengths,
    Placed,
    assert_right_gradients,
    assert_right_varlen,
    assert_same,
    backend_named,
    backward,
    compute,
    compute_varlen,
    dlse_of,
    dout_of,
    fresh_process_state,
    inputs,
    on_pairs,
    packed_inputs,
    spin,
)

import cuflash
from cuflash import config, oracle

pytestmark = pytest.mark.gpu



def placed(backend, *host):
    return [Placed(backend, PLAIN, x.shape, x.dtype, x).array for x in host]


def fetch(*arrays, stream=None):
    if stream is not None:
        stream.synchronize()
    return [x.get() for x in arrays]


def operands(backend, dtype, lengths=None, **sizes):
    """(dout, q, k, v, out, lse) on the host, of a causal call; packed if there are lengths."""
    if lengths is None:
        q, k, v = inputs(dtype, **sizes)
        state = compute(backend, q, k, v, causal=True)
    else:
        q, k, v = packed_inputs(dtype, lengths, **sizes)
        state = compute_varlen(backend, q, k, v, lengths, causal=True)
    return dout_of(q, v), q, k, v, *state


# ------------------------------------------------------------------------------------------------------------
# The same bits run to run


def assert_repeats(cupy, call, runs, exact):
    """`call` returns the three gradients. Other blocks come and go on another stream all the while."""
    rng = np.random.default_rng(runs)
    noise = cupy.cuda.Stream(non_blocking=True)
    first = None
    for _ in range(runs):
        with noise:
            for _ in range(3):
                spin(float(rng.uniform(0.01, 0.2)), int(rng.integers(1, 400)))
        result = [x.get().tobytes() for x in call()]
        first = first or result
        for name, x, y in zip(Gradients._fields, result, first, strict=True):
            assert name not in exact or x == y, f"{name} differs from run to run"


@on_pairs("simt-float16", "simt-float32", "simt-float64", "sm80-float16", "sm80-bfloat16", "sm90-float16")
@pytest.mark.parametrize("heads", [(8, 2), (6, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(100, 30))], ids=str)
def test_thirty_runs(cupy, backend, dtype, heads, options):
    """All gradients with deterministic=True, dk and dv without."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=513, heads_q=heads[0], heads_k=heads[1])
    out, lse = compute(backend, q, k, v, **options)
    arrays = placed(backend, dout_of(q, v), q, k, v, out, lse)
    with config.force_tier(backend.tier):
        for deterministic, exact in ((True, Gradients._fields), (False, ("dk", "dv"))):
            assert_repeats(
                cupy,
                lambda deterministic=deterministic: cuflash.attention_backward(
                    *arrays, deterministic=deterministic, **options
                ),
                30,
                exact,
            )


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("seqlens", [(2048, 2048), (700, 3000), (3000, 700)], ids=str)
def test_fifty_runs_of_longer_sequences(cupy, backend, dtype, seqlens):
    sizes = dict(batch=1, seqlen_q=seqlens[0], seqlen_k=seqlens[1], heads_q=8, heads_k=2)
    dout, q, k, v, out, lse = operands(backend, dtype, **sizes)
    arrays = placed(backend, dout, q, k, v, out, lse)
    with config.force_tier(backend.tier):
        assert_repeats(
            cupy,
            lambda: cuflash.attention_backward(*arrays, causal=True, deterministic=True),
            50,
            Gradients._fields,
        )


@on_pairs("simt-float32", "sm80-float16", "sm80-bfloat16", "sm90-float16")
def test_thirty_runs_of_packed_sequences(cupy, backend, dtype):
    """The order of tiles in the list of a packed batch is not the same each time; the gradients are."""
    lengths = Lengths((513, 1, 0, 64, 200, 65, 33, 300), (513, 70, 9, 64, 400, 1, 33, 0))
    dout, q, k, v, out, lse = operands(backend, dtype, lengths, heads_q=8, heads_k=2)
    arrays = placed(backend, dout, q, k, v, out, lse, *lengths.arrays()[0])
    with config.force_tier(backend.tier):
        for deterministic, exact in ((True, Gradients._fields), (False, ("dk", "dv"))):
            assert_repeats(
                cupy,
                lambda deterministic=deterministic: cuflash.attention_varlen_backward(
                    *arrays, causal=True, deterministic=deterministic
                ),
                30,
                exact,
            )


@on_pairs("sm90-float16", "sm90-bfloat16")
@pytest.mark.parametrize("options", [{}, dict(causal=True), dict(window=(33, 0))], ids=str)
def test_it_does_not_matter_which_block_takes_a_tile(cupy, backend, dtype, options):
    """More key tiles than blocks, some of which no query sees; then each sequence alone, fewer than blocks."""
    q, k, v = inputs(dtype, batch=6, seqlen_q=300, seqlen_k=1000, heads_q=16, heads_k=8)
    host = (dout_of(q, v), q, k, v, *compute(backend, q, k, v, **options))
    for deterministic, exact in ((True, Gradients._fields), (False, ("dk", "dv"))):
        how = dict(options, deterministic=deterministic)
        with config.force_tier(backend.tier):
            together = fetch(*cuflash.attention_backward(*placed(backend, *host), **how))
            for i in range(6):
                arrays = placed(backend, *(np.ascontiguousarray(x[i : i + 1]) for x in host))
                alone = fetch(*cuflash.attention_backward(*arrays, **how))
                for name, x, y in zip(Gradients._fields, together, alone, strict=True):
                    assert name not in exact or x[i : i + 1].tobytes() == y.tobytes(), f"{name} of sequence {i}"


@TIERS
def test_two_deterministic_calls_at_once(cupy, tier):
    """On two streams, each longer than the chip holds blocks: neither waits for a block of the other's forever."""
    backend = backend_named(tier)
    arrays = placed(backend, *operands(backend, "float16", batch=2, seqlen_q=2048, heads_q=8, heads_k=8))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results = []
    with config.force_tier(tier):
        for _ in range(5):
            for stream in streams:
                with stream:
                    results.append(cuflash.attention_backward(*arrays, causal=True, deterministic=True))
    for stream in streams:
        stream.synchronize()
    expected = [x.get().tobytes() for x in results[0]]
    for result in results[1:]:
        assert [x.get().tobytes() for x in result] == expected


# ------------------------------------------------------------------------------------------------------------
# Streams and threads


@TIERS
@pytest.mark.parametrize("deterministic", [False, True])
def test_work_waits_for_the_current_stream_and_for_no_other(cupy, tier, deterministic):
    """dout is written by the caller's stream, late: on any other stream the kernels would read NaN."""
    backend = backend_named(tier)
    dout, q, k, v, out, lse = operands(backend, "float16", seqlen_q=130)
    how = dict(causal=True, deterministic=deterministic)
    expected = backward(backend, dout, q, k, v, **how)
    staged, *others = placed(backend, dout, q, k, v, out, lse)
    late = cupy.empty(staged.shape, staged.dtype)
    stream = cupy.cuda.Stream(non_blocking=True)
    exact = Gradients._fields if deterministic else ("dk", "dv")
    for _ in range(10):
        late.data.memset(0xFF, late.nbytes)
        cupy.cuda.Device().synchronize()
        with config.force_tier(tier), stream:
            spin(2)
            late.data.copy_from_device_async(staged.data, late.nbytes)
            result = cuflash.attention_backward(late, *others, **how)
            late.data.memset_async(0xFF, late.nbytes)  # nor may it start later
        assert_same(backend, Gradients(*fetch(*result, stream=stream)), expected, "on a side stream", exact)


@TIERS
def test_the_call_does_not_wait(cupy, tier):
    """Dense and packed: it returns while the stream is still busy with what came before."""
    backend = backend_named(tier)
    lengths = Lengths((100, 30))
    dense = placed(backend, *operands(backend, "float16", seqlen_q=130))
    packed = placed(backend, *operands(backend, "float16", lengths), *lengths.arrays()[0])
    stream = cupy.cuda.Stream(non_blocking=True)
    calls = (
        lambda: cuflash.attention_backward(*dense, causal=True),
        lambda: cuflash.attention_varlen_backward(*packed, causal=True, deterministic=True),
        lambda: cuflash.attention_varlen(*packed[1:4], *packed[6:], causal=True),
    )
    with config.force_tier(tier), stream:
        for call in calls:
            call()
            for _ in range(5):  # a process that is put aside for long proves nothing
                stream.synchronize()
                spin(100)
                call()
                if not stream.done:
                    break
            else:
                pytest.fail("the stream was idle after every call")
    stream.synchronize()


@TIERS
def test_memory_that_is_given_up_is_not_reused_too_early(cupy, tier):
    """Scratch of a call is that of the next while the first is still queued."""
    backend = backend_named(tier)
    dout, q, k, v, out, lse = operands(backend, "float16", seqlen_q=130)
    expected = backward(backend, dout, q, k, v, causal=True, deterministic=True)
    arrays = placed(backend, dout, q, k, v, out, lse)
    stream, results = cupy.cuda.Stream(non_blocking=True), []
    with config.force_tier(tier), stream:
        for _ in range(10):
            spin(0.5)
            results.append(cuflash.attention_backward(*arrays, causal=True, deterministic=True))
            cuflash.attention_backward(*arrays)
            for size in (1 << 12, 1 << 16, 1 << 20):
                x = cupy.empty(size, np.uint8)
                x.data.memset_async(0xFF, size)
    for result in results:
        assert_same(backend, Gradients(*fetch(*result, stream=stream)), expected, "after reuse")


@TIERS
def test_threads_with_a_stream_each(cupy, tier):
    """Packed batches of their own, on streams of their own, again and again."""
    backend = backend_named(tier)
    all_lengths = [Lengths((60 + 10 * i, 1, 0, 40)) for i in range(4)]
    hosts = [operands(backend, "float16", lengths) for lengths in all_lengths]
    expected = [
        backward(backend, *host[:4], lengths=lengths, causal=True, deterministic=True)
        for host, lengths in zip(hosts, all_lengths, strict=True)
    ]
    arrays = [
        placed(backend, *host, *lengths.arrays()[0]) for host, lengths in zip(hosts, all_lengths, strict=True)
    ]
    cupy.cuda.Device().synchronize()
    errors = []

    def work(i):
        try:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                for _ in range(20):
                    result = cuflash.attention_varlen_backward(*arrays[i], causal=True, deterministic=True)
                    assert_same(backend, Gradients(*fetch(*result, stream=stream)), expected[i], f"thread {i}")
        except BaseException as error:
            errors.append(error)

    with config.force_tier(tier):
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(hosts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    if errors:
        raise errors[0]


# ------------------------------------------------------------------------------------------------------------
# CUDA graphs. A capture also shows that nothing waits and that nothing is copied to the host.


def overwrite(array, values):
    values = np.ascontiguousarray(values)
    assert array.nbytes == values.nbytes
    array.data.copy_from_host(values.ctypes.data, values.nbytes)


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("deterministic", [False, True])
def test_graph(cupy, backend, dtype, deterministic):
    """Forward and backward captured once, replayed with other values in the same memory."""
    sizes = dict(seqlen_q=130, seqlen_k=200)
    how = dict(causal=True, deterministic=deterministic)
    q, k, v = inputs(dtype, **sizes)
    dout, q, k, v = arrays = placed(backend, dout_of(q, v), q, k, v)
    given = [cupy.empty(x.shape, x.dtype) for x in (q, k, v)]
    stream = cupy.cuda.Stream(non_blocking=True)

    def call():
        out, lse = cuflash.attention(q, k, v, causal=True, return_lse=True)
        returned = cuflash.attention_backward(dout, q, k, v, out, lse, **how)
        into = dict(zip(Gradients._fields, given, strict=True))
        cuflash.attention_backward(dout, q, k, v, out, lse, **into, **how)
        return out, lse, *returned

    with config.force_tier(backend.tier), stream:
        call()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
    for seed in range(3):
        host = inputs(dtype, **sizes, seed=20 + seed)
        host = (dout_of(host[0], host[2], seed), *host)
        for x, y in zip(arrays, host, strict=True):
            overwrite(x, y)
        for x in (*results, *given):
            x.data.memset(0xFF, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        gradients = Gradients(*fetch(*results[2:], stream=stream))
        into = Gradients(*fetch(*given))
        expected = backward(backend, *host, **how)
        exact = Gradients._fields if deterministic else ("dk", "dv")
        assert_same(backend, gradients, expected, "replay", exact)
        assert_same(backend, into, expected, "replay into arrays of ours", exact)
        assert_right_gradients(gradients, *host, causal=True)


# As many sequences, in the same 300 rows of q and 400 of k.
REPLAYS = (
    Lengths((100, 100, 50, 50), (100, 100, 100, 100)),
    Lengths((300, 0, 0, 0), (0, 0, 0, 400)),
    Lengths((0, 0, 0, 300), (0, 0, 0, 400)),
    Lengths((1, 200, 5, 0), (1, 300, 7, 9), spare_q=94, spare_k=83),
    Lengths((0, 0, 0, 0), spare_q=300, spare_k=400),
    Lengths((300, 0, 0, 0), (400, 0, 0, 0), (65, 0, 0, 0), (129, 0, 0, 0)),
    Lengths((75, 75, 75, 75), (100, 100, 100, 100), (33, 75, 0, 1), (65, 100, 100, 0)),
)


@on_pairs("simt-float32", "sm80-float16", "sm80-bfloat16", "sm90-float16")
@pytest.mark.parametrize("length_dtype", ["int32", "int64"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_graph_with_new_lengths(cupy, backend, dtype, length_dtype, deterministic):
    """Packed, forward and backward captured once, replayed with other lengths in the same arrays."""
    first = REPLAYS[0]
    dout, q, k, v = arrays = placed(backend, *operands(backend, dtype, first)[:4])

    def all_lengths(lengths):
        """Also where none say how many rows are used, so that all replays are one call."""
        ends, used = lengths.arrays()
        used = [used.get(f"seqused_{side}", np.diff(ends[i])) for i, side in enumerate("qk")]
        return [x.astype(length_dtype) for x in (*ends, *used)]

    cu_q, cu_k, used_q, used_k = places = placed(backend, *all_lengths(first))
    named = dict(seqused_q=used_q, seqused_k=used_k, causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)

    def call():
        out, lse = cuflash.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True, **named)
        return out, lse, *cuflash.attention_varlen_backward(
            dout, q, k, v, out, lse, cu_q, cu_k, deterministic=deterministic, **named
        )

    with config.force_tier(backend.tier), stream:
        call()
        stream.begin_capture()
        results = call()
        graph = stream.end_capture()
    for seed, lengths in enumerate((*REPLAYS, first)):
        host = packed_inputs(dtype, lengths, seed=30 + seed)
        host = (dout_of(host[0], host[2], seed), *host)
        for x, y in zip((*arrays, *places), (*host, *all_lengths(lengths)), strict=True):
            overwrite(x, y)
        for x in results:
            x.data.memset(0xFF, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        out, lse, *gradients = fetch(*results, stream=stream)
        assert_right_varlen(out, lse, *host[1:], lengths, causal=True)
        assert_right_gradients(Gradients(*gradients), *host, lengths=lengths, causal=True)
        eager = backward(backend, *host, lengths=lengths, causal=True, deterministic=deterministic)
        exact = Gradients._fields if deterministic else ("dk", "dv")
        assert_same(backend, Gradients(*gradients), eager, str(lengths), exact)


@TIERS
def test_scratch_of_a_graph_is_its_own(cupy, tier):
    """What the pool hands out after the capture may be overwritten between replays, and by none of them."""
    backend = backend_named(tier)
    host = operands(backend, "float16", seqlen_q=130)
    arrays = placed(backend, *host)
    expected = backward(backend, *host[:4], causal=True, deterministic=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with config.force_tier(tier), stream:
        cuflash.attention_backward(*arrays, causal=True, deterministic=True)
        stream.synchronize()  # its scratch may then be used on any stream
        stream.begin_capture()
        results = cuflash.attention_backward(*arrays, causal=True, deterministic=True)
        graph = stream.end_capture()
        taken = [cupy.empty(size, np.uint8) for size in (1 << 10, 1 << 13, 1 << 16, 1 << 18, 1 << 20) for _ in range(4)]
    for _ in range(3):
        for x in taken:
            x.data.memset(0x5A, x.nbytes)
        cupy.cuda.Device().synchronize()
        graph.launch(stream=stream)
        assert_same(backend, Gradients(*fetch(*results, stream=stream)), expected, "replay")
        assert all((x.get() == 0x5A).all() for x in taken)


@TIERS
def test_a_cold_kernel_under_capture_is_refused(cupy, monkeypatch, tier):
    backend = backend_named(tier)
    host = operands(backend, "float16", seqlen_q=100)
    arrays = placed(backend, *host)
    expected = backward(backend, *host[:4], causal=True)
    stream = cupy.cuda.Stream(non_blocking=True)
    with fresh_process_state(monkeypatch), config.force_tier(tier), stream:
        stream.begin_capture()
        try:
            with pytest.raises(RuntimeError, match="make one such call before the capture.*cuflash warmup"):
                cuflash.attention_backward(*arrays, causal=True)
            assert cupy.cuda.runtime.streamIsCapturing(stream.ptr)
        finally:
            stream.end_capture()
        result = cuflash.attention_backward(*arrays, causal=True)  # loads, now that it may
        gradients = Gradients(*fetch(*result, stream=stream))
    assert_same(backend, gradients, expected, "after all", exact=("dk", "dv"))


# ------------------------------------------------------------------------------------------------------------
# Memory


def round_up(size: int) -> int:
    return -(-size // 512) * 512  # what CuPy's pool hands out


def scratch_of_rows(rows, padded_rows, heads, head_dim, real):
    """What the documentation states: dq while it is summed, and two numbers of each row and head."""
    return real * heads * (padded_rows * head_dim + rows * 2)


@on_pairs("simt-float32", "simt-float64", "sm80-float16", "sm90-float16")
@pytest.mark.parametrize("seqlen", [1000, 16384])
def test_the_pool_grows_by_gradients_and_scratch_only(cupy, backend, dtype, seqlen):
    """Also where the scores alone would take one GiB."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=seqlen, heads_q=2, heads_k=1)
    dout, (out, lse) = dout_of(q, v), compute(backend, q, k, v, causal=True)
    arrays = placed(backend, dout, q, k, v, out, lse)
    real = lse.itemsize
    for deterministic in (False, True):
        pool = cupy.cuda.MemoryPool()  # what it ever held is the peak, for it gives nothing back
        with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
            result = cuflash.attention_backward(*arrays, causal=True, deterministic=deterministic)
        gradients = sum(round_up(x.nbytes) for x in result)
        scratch = pool.total_bytes() - gradients
        least = scratch_of_rows(seqlen, -(-seqlen // 16) * 16, 2, 64, real)
        turns = 4 * 2 * (seqlen // 16 + 2)  # a number for each tile of queries, none of less than 16
        assert least <= scratch <= least + deterministic * turns + 4 * 512
        assert pool.used_bytes() == gradients
        del result


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
def test_the_pool_grows_no_more_for_packed_sequences(cupy, backend, dtype):
    lengths = Lengths((500, 0, 1500, 1, 70), spare_q=100)
    dout, q, k, v, out, lse = operands(backend, dtype, lengths, heads_q=2, heads_k=1)
    arrays = placed(backend, dout, q, k, v, out, lse, *lengths.arrays()[0])
    rows = len(q)
    tiles = 32 * (rows // 16 + 8)  # eight numbers for each tile
    pool = cupy.cuda.MemoryPool()
    with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
        forward = cuflash.attention_varlen(*arrays[1:4], *arrays[6:], causal=True, return_lse=True)
    grown = pool.total_bytes() - sum(round_up(x.nbytes) for x in forward)
    assert 0 <= grown <= tiles + 4 * 512
    pool = cupy.cuda.MemoryPool()
    with config.force_tier(backend.tier), cupy.cuda.using_allocator(pool.malloc):
        result = cuflash.attention_varlen_backward(*arrays, causal=True, deterministic=True)
    scratch = pool.total_bytes() - sum(round_up(x.nbytes) for x in result)
    least = scratch_of_rows(rows, (rows // 16 + 5 + 1) * 16, 2, 64, lse.itemsize)
    assert least <= scratch <= least + tiles + 4 * 2 * (rows // 16 + 8) + 6 * 512


@TIERS
def test_gradients_are_not_allocated_where_they_are_given(cupy, tier):
    backend = backend_named(tier)
    host = operands(backend, "float16", seqlen_q=130)
    arrays = placed(backend, *host)
    given = dict(zip(Gradients._fields, placed(backend, *(np.zeros_like(x) for x in host[1:4])), strict=True))
    sizes = []

    def counted(size):
        sizes.append(size)
        return cupy.get_default_memory_pool().malloc(size)

    with config.force_tier(tier), cupy.cuda.using_allocator(counted):
        result = cuflash.attention_backward(*arrays, causal=True, **given)
        mine = sum(sizes)
        del sizes[:]
        cuflash.attention_backward(*arrays, causal=True)
    assert all(x is y for x, y in zip(result, given.values(), strict=True))
    assert sum(sizes) - mine == sum(x.nbytes for x in given.values())


@TIERS
def test_repeated_calls_leave_nothing_behind(cupy, tier):
    """Hundreds of calls of ten shapes: as many bytes in use after the last as after the first round."""
    backend = backend_named(tier)
    sets = []
    for n in range(20, 30):
        lengths = Lengths((n, 0, 7))
        dense = placed(backend, *operands(backend, "float16", seqlen_q=n))
        packed = placed(backend, *operands(backend, "float16", lengths), *lengths.arrays()[0])
        sets.append((dense, packed))
    pool = cupy.cuda.MemoryPool()

    def calls():
        for dense, packed in sets:
            cuflash.attention_backward(*dense, causal=True)
            cuflash.attention_backward(*dense, causal=True, deterministic=True)
            cuflash.attention_varlen_backward(*packed, causal=True)
            cuflash.attention_varlen(*packed[1:4], *packed[6:], causal=True)

    with config.force_tier(tier), cupy.cuda.using_allocator(pool.malloc):
        calls()
        total = pool.total_bytes()
        for _ in range(30):
            calls()
        assert (pool.used_bytes(), pool.total_bytes()) == (0, total)


# ------------------------------------------------------------------------------------------------------------
# Long sequences


@on_pairs("simt-float32", "sm80-float16", "sm80-bfloat16", "sm90-float16")
@pytest.mark.parametrize("seqlen", [2049, 4092])
@pytest.mark.parametrize("deterministic", [False, True])
def test_the_end_of_a_long_sequence(backend, dtype, seqlen, deterministic):
    """Causal: the last keys are seen by the last queries alone, so that both ends can be judged by themselves."""
    q, k, v = inputs(dtype, batch=1, seqlen_q=seqlen, heads_q=4, heads_k=2)
    dout, dlse = dout_of(q, v), dlse_of(q)
    gradients = backward(backend, dout, q, k, v, dlse=dlse, causal=True, deterministic=deterministic)
    last = slice(seqlen - 70, seqlen)
    part = dout[:, last], q[:, last], k, v
    of_lse = dlse[..., last]
    dk, dv = (x.astype(q.dtype) for x in oracle.attention_backward(*part, dlse=of_lse, causal=True)[1:])
    dk[:, last], dv[:, last] = gradients.dk[:, last], gradients.dv[:, last]
    assert_right_gradients(Gradients(gradients.dq[:, last], dk, dv), *part, dlse=of_lse, causal=True)
    # Rows in the middle: their dq does not depend on later ones.
    for stop in (70, 1500):
        rows = slice(stop - 70, stop)
        part = dout[:, rows], q[:, rows], k[:, :stop], v[:, :stop]
        of_lse = dlse[..., rows]
        others = (x.astype(q.dtype) for x in oracle.attention_backward(*part, dlse=of_lse, causal=True)[1:])
        assert_right_gradients(Gradients(gradients.dq[:, rows], *others), *part, dlse=of_lse, causal=True)


@on_pairs("simt-float32", "sm80-float16", "sm90-float16")
def test_a_skewed_batch(backend, dtype):
    """One long sequence among short ones, each as if it were alone."""
    rng = np.random.default_rng(5)
    lengths = Lengths((2500, *map(int, rng.integers(16, 300, 12))))
    q, k, v = packed_inputs(dtype, lengths, heads_q=2, heads_k=1)
    dout = dout_of(q, v)
    gradients = backward(backend, dout, q, k, v, lengths=lengths, causal=True, deterministic=True)
    for rows in lengths.slots("q"):
        alone = backward(backend, *(x[None, rows] for x in (dout, q, k, v)), causal=True, deterministic=True)
        assert_same(
            backend, Gradients(*(x[rows] for x in gradients)), Gradients(*(x[0] for x in alone)), f"rows {rows}"
        )
    short = lengths.slots("q")[1]
    part = [x[None, short] for x in (dout, q, k, v)]
    assert_right_gradients(Gradients(*(x[None, short] for x in gradients)), *part, causal=True)
