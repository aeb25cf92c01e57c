"""The benchmarks without a GPU: what is counted, timed, compared, written; the whole path on NumPy arrays."""

import contextlib
import ctypes
import importlib
import json
import math
import statistics
import subprocess
import sys
import types
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

from cuflash import config, jit, launch, oracle
from cuflash.cli import main as cuflash_main

REPO = Path(jit.__file__).resolve().parent.parent

command = importlib.import_module("cuflash.cli.bench")
cases, memory, overhead, peers, record, run, timing = (
    command.library(name) for name in ("cases", "memory", "overhead", "peers", "record", "run", "timing")
)


def tiny(**changes):
    sizes = {
        "suite": "test",
        "dtype": "float32",
        "batch": 1,
        "seqlen_q": 24,
        "seqlen_k": 24,
        "heads_q": 2,
        "heads_k": 2,
        "head_dim": 16,
        "head_dim_v": 16,
    }
    return cases.Case(**{**sizes, **changes})


# ------------------------------------------------------------------------------------------------------------
# Cases


def test_flops_and_bytes_by_hand():
    (case,) = cases.suite("forward", head_dims=[128], seqlens=[16384], causal=False)
    assert (case.batch, case.heads_q) == (1, 16)
    assert case.flops == 4 * 16 * 16384**2 * 128 == 2199023255552
    assert case.bytes == 4 * 16384 * 2048 * 2
    (causal,) = cases.suite("forward", head_dims=[128], seqlens=[16384], causal=True)
    assert causal.flops * 2 == case.flops
    # 2 queries of 3 see keys 0 to 1 and 0 to 2; products of 4 and of 8.
    assert tiny(
        seqlen_q=2, seqlen_k=3, causal=True, heads_q=1, heads_k=1, head_dim=4, head_dim_v=8
    ).flops == 2 * 5 * (4 + 8)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(3, 0), (2, 5), (None, 1), (0, None), (40, 40)])
@pytest.mark.parametrize("seqlens", [(7, 7), (5, 9), (9, 4)])
def test_pairs_of_a_window_are_those_of_the_oracle(causal, window, seqlens):
    case = tiny(seqlen_q=seqlens[0], seqlen_k=seqlens[1], causal=causal, window=window)
    assert case.pairs == oracle.visible(*seqlens, causal, window).sum()


@pytest.mark.parametrize("name", cases.SUITES)
def test_suites(name):
    table = cases.suite(name)
    assert table and len({case.name for case in table}) == len(table) == len({case.seed for case in table})
    assert all(case.heads_q % case.heads_k == 0 and case.flops > 0 for case in table)
    assert {case.causal for case in table} == {False, True}
    assert {case.head_dim for case in cases.suite(name, head_dims=[32])} == {32}
    assert all(case.graph == (name == "small") for case in table)


def test_forward_is_16k_tokens_of_hidden_size_2048():
    table = cases.suite("forward")
    assert len(table) == 3 * 6 * 2
    assert all(case.batch * case.seqlen_q == 16384 and case.heads_q * case.head_dim == 2048 for case in table)
    assert {case.dtype for case in cases.suite("forward", dtype="float16")} == {"float16"}
    with pytest.raises(
        ValueError, match="dtype of suite forward must be one of bfloat16, float16; got 'float32'"
    ):
        cases.suite("forward", dtype="float32")
    with pytest.raises(ValueError, match="suite must be one of forward"):
        cases.suite("backward")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True},
        {"window": (5, 2), "seqlen_q": 17},
        {"dtype": "float16"},
        {"heads_q": 6, "causal": True, "seqlen_k": 40},
        {"dtype": "bfloat16"},
        {"dtype": "float64", "seqlen_q": 40, "causal": True},
    ],
)
def test_the_truth_of_some_rows_is_that_of_the_oracle(changes):
    case = tiny(**changes)
    arrays = cases.make_arrays(case, "numpy")
    exact, _ = oracle.attention(arrays.q, arrays.k, arrays.v, **case.options)
    truth = cases.Truth(case, arrays)
    assert truth.error(exact) < 1e-12
    wrong = exact.copy()
    wrong[-1, -1, -1] += 1e-3
    assert truth.error(wrong) == pytest.approx(1e-3)
    wrong[0, 0, 0] = np.nan
    assert math.isnan(truth.error(wrong))


def test_data_is_normal_repeats_and_differs_by_case():
    case = tiny(seqlen_q=512)
    one, again = (cases.make_arrays(case, "numpy") for _ in range(2))
    assert (one.q == again.q).all() and abs(one.q.std() - 1) < 0.1
    assert (one.q[:, :24] != cases.make_arrays(tiny(causal=True), "numpy").q).any()


def test_largest_difference():
    a = np.zeros((2, 3), np.float32)
    b = a.copy()
    b[1, 2] = -0.5
    assert cases.largest_difference(a, b) == 0.5
    b[0, 0] = np.nan
    assert math.isnan(cases.largest_difference(a, b))


# ------------------------------------------------------------------------------------------------------------
# Timing


class FakeTimer:
    """Each call takes what the callable returns, and 100 times as long the first time in a block."""

    def __init__(self):
        self.order = []

    def block(self, call, runs):
        self.order.append((call, runs))
        seconds = call()
        return [seconds * 100] * (runs > 1) + [seconds] * (runs - 1 if runs > 1 else 1), {
            "nvml_sm_clock_mhz": 1700
        }

    def alive(self):
        return True


def test_contenders_take_turns_and_first_calls_do_not_count():
    timer, fast, slow = FakeTimer(), lambda: 1e-3, lambda: 1e-2
    results = timing.measure({"fast": fast, "slow": slow}, timer, min_runs=10, min_seconds=0.06, rounds=3)
    assert results["fast"].median == 1e-3 and len(results["fast"].seconds) == 60
    assert results["slow"].median == 1e-2 and len(results["slow"].seconds) == 12  # 10, in three equal rounds
    blocks = [call for call, _ in timer.order[4:]]
    assert blocks == [fast, slow, slow, fast, fast, slow]
    assert results["fast"].spread == 0 and results["fast"].record()["nvml_sm_clock_mhz"] == 1700


def test_a_slow_contender_is_called_once():
    timer = FakeTimer()
    results = timing.measure({"slow": lambda: 3.0}, timer)
    assert results["slow"].seconds == [3.0] and len(timer.order) == 1


def test_a_contender_that_raises_leaves_and_the_others_stay():
    calls = iter([1e-3] * 4)

    def breaks():
        try:
            return next(calls)
        except StopIteration:
            raise RuntimeError("out of luck") from None

    results = timing.measure({"breaks": breaks, "works": lambda: 1e-3, "never": lambda: 1 / 0}, FakeTimer())
    assert str(results["breaks"]) == "out of luck" and isinstance(results["never"], ZeroDivisionError)
    assert results["works"].median == 1e-3


def test_figures_of_a_timing():
    seconds = [float(number) for number in range(1, 102)]
    figures = timing.Timing(
        (tuple(seconds[:50]), tuple(seconds[50:])), ({"power_w": 100.04}, {"power_w": 300.0})
    ).record()
    assert figures["median_s"] == statistics.median(seconds) == 51
    assert (figures["min_s"], figures["p10_s"], figures["p90_s"], figures["runs"]) == (1, 11, 91, 101)
    assert (
        figures["round_medians_s"] == [25.5, 76]
        and figures["power_w"] == 200
        and figures["nvml_sm_clock_mhz"] is None
    )


def test_no_management_library_means_no_readings(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(timing.ctypes, "CDLL", missing)
    nvml = timing.Nvml("0000:01:00.0")
    assert nvml.read() == {} and nvml.driver() is None


class FakeCupy(types.ModuleType):
    """As much of CuPy as a timer uses: a clock that each call moves on by a millisecond."""

    def __init__(self):
        super().__init__("cupy")
        self.now, self.flushed, self.uint8 = 0.0, 0, np.uint8
        fake = self

        class Event:
            def record(self, stream):
                self.at = fake.now

        class Buffer:
            nbytes = 64

            @property
            def data(self):
                return self

            def memset_async(self, value, size, stream):
                fake.flushed += size
                fake.now += 50

        self.empty = lambda size, dtype: Buffer()
        stream = types.SimpleNamespace(synchronize=lambda: None)
        runtime = types.SimpleNamespace(
            getDevice=lambda: 0, getDeviceProperties=lambda device: {"l2CacheSize": 8}
        )
        self.cuda = types.SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: stream,
            runtime=runtime,
            get_elapsed_time=lambda start, end: end.at - start.at,
        )

    def work(self):
        self.now += 1


@pytest.mark.parametrize("cold", [True, False])
def test_events_enclose_the_call_and_not_the_flush(monkeypatch, cold):
    cupy = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monitor = types.SimpleNamespace(read=lambda: {"power_w": 1.0})
    seconds, reading = timing.CudaTimer(cold=cold, monitor=monitor, calls_a_run=4).block(cupy.work, 3)
    assert seconds == pytest.approx([0.25e-3] * 3) and reading == {"power_w": 1.0}
    assert cupy.flushed == (3 * 64 if cold else 0)


# ------------------------------------------------------------------------------------------------------------
# Contenders


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": True, "dtype": "float16"},
        {"heads_q": 4, "window": (7, 0)},
        {"dtype": "bfloat16"},
        {"dtype": "float64", "batch": 2, "seqlen_k": 40, "causal": True},
    ],
)
def test_contenders_agree_on_the_cpu(changes):
    case = tiny(**changes)
    arrays = cases.make_arrays(case, "numpy")
    truth = cases.Truth(case, arrays)
    for name in ("cuflash", "unfused"):
        out = peers.make(name, case, arrays)()
        assert (
            out.shape == (case.batch, case.seqlen_q, case.heads_q, case.head_dim_v)
            and out.dtype == arrays.q.dtype
        )
        assert truth.error(out) <= cases.TOLERANCE[case.dtype] / 4


class FakeCublas:
    """gemmStridedBatchedEx by NumPy, on host memory: column-major, as cuBLAS documents it."""

    def gemmStridedBatchedEx(
        self,
        handle,
        trans_a,
        trans_b,
        m,
        n,
        k,
        alpha,
        a,
        a_type,
        lda,
        stride_a,
        b,
        b_type,
        ldb,
        stride_b,
        beta,
        c,
        c_type,
        ldc,
        stride_c,
        count,
        compute,
        algorithm,
    ):
        assert handle == 7 and trans_b == 0 and {a_type, b_type, c_type} == {1} and compute == 70

        def read(pointer, *shape, strides=None):
            size = 1 + sum((length - 1) * step for length, step in zip(shape, strides, strict=True))
            buffer = np.ctypeslib.as_array(ctypes.cast(pointer, ctypes.POINTER(ctypes.c_double)), (size,))
            return np.lib.stride_tricks.as_strided(buffer, shape, [8 * step for step in strides])

        scale, keep = read(alpha, 1, strides=[1])[0], read(beta, 1, strides=[1])[0]
        assert keep == 0
        for number in range(count):
            left = read(a + 8 * number * stride_a, *((k, m) if trans_a else (m, k)), strides=(1, lda))
            right = read(b + 8 * number * stride_b, k, n, strides=(1, ldb))
            read(c + 8 * number * stride_c, m, n, strides=(1, ldc))[...] = (
                scale * (left.T if trans_a else left) @ right
            )


@pytest.mark.parametrize("heads_k", [4, 2, 1])
def test_products_of_unfused_attention_on_a_gpu(heads_k):
    """The pointers, strides and order of operands that cuBLAS is given, on NumPy arrays that look like
    CuPy's.
    """
    case = tiny(
        dtype="float64", batch=2, seqlen_q=5, seqlen_k=7, heads_q=4, heads_k=heads_k, head_dim=3, head_dim_v=6
    )
    arrays = cases.make_arrays(case, "numpy")
    cupy = types.SimpleNamespace(
        cuda=types.SimpleNamespace(Device=lambda: types.SimpleNamespace(cublas_handle=7))
    )

    def like_cupy(x):
        return types.SimpleNamespace(
            data=types.SimpleNamespace(ptr=x.ctypes.data), strides=x.strides, array=x
        )

    scores, out = np.full((2, 4, 5, 7), np.nan), np.full((2, 5, 4, 6), np.nan)
    q, k, v, s, o = map(like_cupy, (arrays.q, arrays.k, arrays.v, scores, out))
    peers._batched_product(cupy, FakeCublas(), case, q, k, s, alpha=0.5, to_scores=True)
    k_all, v_all = (np.repeat(x, 4 // heads_k, axis=2) for x in (arrays.k, arrays.v))
    np.testing.assert_allclose(scores, 0.5 * np.einsum("bihd,bjhd->bhij", arrays.q, k_all))
    peers._batched_product(cupy, FakeCublas(), case, s, v, o, alpha=1.0, to_scores=False)
    np.testing.assert_allclose(out, np.einsum("bhij,bjhd->bihd", scores, v_all))


@pytest.fixture
def nothing_installed(monkeypatch):
    """No peer can be imported, whatever this machine has."""
    real = importlib.util.find_spec
    absent = ("torch", "fa3_fwd_interface", "flash_attn_interface", "flash_attn", "flashinfer")
    monkeypatch.setattr(
        peers.importlib.util,
        "find_spec",
        lambda name, *rest: None if name.split(".")[0] in absent else real(name, *rest),
    )
    for name in list(sys.modules):
        if name.split(".")[0] in absent:
            monkeypatch.delitem(sys.modules, name)


def test_a_peer_that_is_not_installed_gives_the_reason(nothing_installed):
    for name in ("sdpa_flash", "fa3", "fa4", "flashinfer"):
        assert peers.missing(name).startswith("not installed (no module ")
    assert peers.missing("cuflash") is None and peers.missing("unfused") is None


def test_a_peer_that_does_not_take_the_arrays_gives_the_reason():
    case = tiny()
    arrays = cases.make_arrays(case, "numpy")
    for name in ("sdpa_flash", "sdpa_math", "fa3", "fa4", "flashinfer"):
        with pytest.raises(peers.Unavailable, match="takes torch tensors, not numpy arrays"):
            peers.make(name, case, arrays)
    with pytest.raises(peers.Unavailable, match="tiers are for GPUs"):
        peers.make("cuflash/simt", case, arrays)


def test_a_module_whose_import_breaks_is_unavailable(monkeypatch, tmp_path):
    (tmp_path / "broken_peer.py").write_text("raise SyntaxError('built for\\nanother version')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(peers.Unavailable, match="cannot import broken_peer: built for another version"):
        peers._module("broken_peer")


def test_sides_of_a_window_as_peers_want_them():
    assert peers._sides(tiny(window=(3, None)), -1) == (3, -1)
    assert peers._sides(tiny(window=(3, 5), causal=True), -1) == (3, 0)
    assert peers._sides(tiny(), None) == (None, None)


# ------------------------------------------------------------------------------------------------------------
# Runs and records


def bench_of(names, timer=None, **settings):
    lines = []
    return run.Bench(names, device_id=None, timer=timer, say=lines.append, **settings), lines


@pytest.fixture
def contenders(monkeypatch):
    """Contenders of the test's own: right ones, wrong ones, and two that do not get that far."""

    def right(case, arrays):
        exact, _ = oracle.attention(arrays.q, arrays.k, arrays.v, **case.options)
        return lambda: exact.astype(arrays.q.dtype)

    def wrong(case, arrays):
        return lambda: right(case, arrays)() + np.float32(0.5)

    def refuses(case, arrays):
        raise peers.Unavailable("has no such case")

    def breaks(case, arrays):
        raise RuntimeError("a long\nstory")

    def subtly_wrong(case, arrays):
        out = right(case, arrays)()
        out[0, :, 1] = 0  # in a head that the truth has no rows of
        return lambda: out

    table = {
        "cuflash": right,
        "good": right,
        "wrong": wrong,
        "refuses": refuses,
        "breaks": breaks,
        "subtle": subtly_wrong,
    }
    monkeypatch.setattr(peers, "CONTENDERS", table)
    return table


class NamedTimer:
    """Seconds by order of the contenders, whatever they do."""

    def __init__(self, *seconds):
        self.seconds, self.calls = seconds, []

    def block(self, call, runs):
        if call not in self.calls:
            self.calls.append(call)
        return [self.seconds[self.calls.index(call)]] * runs, {}

    def alive(self):
        return True


def test_a_record_holds_results_reasons_and_ratios(contenders, tmp_path):
    case = tiny(heads_q=3, heads_k=3)
    bench, lines = bench_of(
        ["cuflash", "good", "wrong", "refuses", "breaks", "subtle"], NamedTimer(1e-3, 2e-3)
    )
    path = tmp_path / "deep" / "record.json"
    bench.run([case], suite="test", path=str(path))
    written = json.loads(path.read_text())
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    assert (
        written["complete"]
        and written["suite"] == "test"
        and written["environment"]["kernels_digest"] == jit.digest()
    )
    assert written["environment"]["date"].startswith("20") and written["environment"]["device"] == "cpu"
    (one,) = written["cases"]
    assert one["flops"] == case.flops and one["shapes"] == [list(shape) for shape in case.shapes]
    results = one["results"]
    assert results["cuflash"]["median_s"] == 1e-3 and results["cuflash"]["tflops"] == pytest.approx(
        case.flops * 1e-9, rel=1e-4
    )
    assert results["cuflash"]["runs"] == 60 and results["cuflash"]["share_of_limit"] is None
    assert results["wrong"]["failed"].startswith("wrong result: off by 0.5 from float64")
    assert "from cuflash" in results["subtle"]["failed"]
    assert results["refuses"] == {"unavailable": "has no such case"} and results["breaks"] == {
        "failed": "a long story"
    }
    assert one["speed_over"] == {"good": {"ratio": 2.0, "lowest_round": 2.0, "highest_round": 2.0}}
    assert one["best_peer"] == "good" and one["speed_over_best_peer"] == 2.0
    text = "\n".join(lines)
    assert "(2.00x)" in text and text.count("has no such case") == 1 and "FAILED: a long story" in text
    assert lines[0].startswith("no GPU used") and "cuflash over good: 2.00x in the mean" in text
    assert run.exit_status(written, "cuflash") == 0 and run.exit_status(written, "wrong") == 1


def test_a_run_can_be_cut_short_and_keeps_what_it_has(contenders, tmp_path):
    bench, lines = bench_of(["cuflash"], FakeTimerForever(), limit_seconds=0)
    result = bench.run([tiny(), tiny(causal=True)], suite="test", path=str(tmp_path / "r.json"))
    assert result["cases"] == [] and not result["complete"] and "2 cases are left" in "\n".join(lines)
    assert run.exit_status(result, "cuflash") == 1


class FakeTimerForever(NamedTimer):
    def __init__(self):
        super().__init__(1e-3)


def test_a_lost_context_ends_the_run(contenders, tmp_path):
    class Dead(NamedTimer):
        def alive(self):
            return False

    bench, lines = bench_of(["cuflash", "breaks", "good"], Dead(1e-3))
    result = bench.run([tiny(), tiny(causal=True)], suite="test", path=str(tmp_path / "r.json"))
    assert len(result["cases"]) == 1 and result["cases"][0]["aborted"] and not result["complete"]
    assert "the CUDA context is lost" in "\n".join(lines)


def test_the_whole_path_on_the_cpu(tmp_path):
    bench, lines = bench_of(["cuflash", "unfused"], quick=True, min_seconds=0.004)
    table = cases.table(dtype="float32", head_dims=[16], seqlens=[32, 64], tokens=64, hidden=32)
    result = bench.run(table, suite="table", path=str(tmp_path / "r.json"))
    assert result["complete"] and len(result["cases"]) == 4
    for one in result["cases"]:
        assert all(entry["median_s"] > 0 and entry["max_error"] < 1e-4 for entry in one["results"].values())
        assert one["best_peer"] == "unfused"


def test_the_limit_of_a_gpu():
    assert record.limit_tflops("float32", (9, 0), 132, 1980) == pytest.approx(
        66.9, abs=0.1
    )  # an H200: 67 TFLOP/s
    assert record.limit_tflops("bfloat16", (8, 0), 108, 1410) == pytest.approx(312, abs=1)  # an A100: 312
    assert record.limit_tflops("float64", (8, 0), 108, 1410) == pytest.approx(9.7, abs=0.1)
    assert record.limit_tflops("bfloat16", (99, 0), 1, 1) is None


def test_what_cuflash_compiles_is_known_ahead(monkeypatch):
    device = config.DEVICES["sm_90"]
    monkeypatch.setattr(launch, "device_of", lambda index: device)
    monkeypatch.setattr(jit, "arch_for", lambda capability: "sm_90")
    started = []
    monkeypatch.setattr(
        run.subprocess, "Popen", lambda arguments, **rest: started.append(json.loads(arguments[3]))
    )
    table = cases.suite("forward", head_dims=[64, 128], seqlens=[2048, 16384])
    run.compile_ahead(table, ["cuflash", "unfused"], 0, jobs=3)
    variants = [variant for work in started for variant in work]
    assert len(started) == 3 and len(variants) == 4 and {variant[0] for variant in variants} == {"fwd_sm80"}
    chosen = run.config_of(table[0], None, 0)
    assert [
        chosen.kernel,
        [list(pair) for pair in launch.kernel_constants(chosen).items()],
        "sm_90",
    ] in variants
    assert not run.compile_ahead(
        table[:1], ["cuflash"], 0
    )  # one variant compiles just as well when it is called


# ------------------------------------------------------------------------------------------------------------
# Memory and overhead


def test_expected_memory_is_the_outputs():
    case = tiny(
        dtype="bfloat16", seqlen_q=65536, seqlen_k=65536, heads_q=1, heads_k=1, head_dim=64, head_dim_v=64
    )
    assert memory.expected_bytes(case, False) == 65536 * 64 * 2
    assert memory.expected_bytes(case, True) == 65536 * 64 * 2 + 65536 * 4
    assert memory.expected_bytes(tiny(seqlen_q=1), True) == 512 + 512  # whole units of the pool


def test_memory_on_the_cpu(tmp_path):
    path = tmp_path / "memory.json"
    done = CliRunner().invoke(memory.main, ["--device", "cpu", "--seqlen", "64", "--json", str(path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(path.read_text())["table"]
    assert [row["case"].split()[-1] for row in rows] == ["full", "causal"]
    for row in rows:
        scores = 8 * 64 * 64 * 4
        assert row["results"]["unfused"]["peak_bytes"] > scores and row["results"]["cuflash"]["median_s"] > 0
    assert done.output.count("x") >= 4


def test_traced_memory_sees_what_numpy_takes():
    assert 8 * 2**20 <= memory.traced_growth(lambda: np.ones(2**20)) < 8.1 * 2**20


def test_host_time_leaves_waiting_out():
    waits = []
    figures = overhead.host_time(lambda: None, 1000, lambda: waits.append(0))
    assert (
        figures["calls"] == 1000
        and len(waits) == 11
        and 0 <= figures["min_us"] <= figures["median_us"] <= figures["p90_us"]
    )


def test_lines_of_overhead():
    figures = {"median_us": 30.0, "p10_us": 29.0, "p90_us": 31.0}
    assert "OVER: at most 25 asked" in overhead._line("attention, cupy", figures)
    assert "asked" not in overhead._line("cupy.empty", figures)
    assert "FAILED: why" in overhead._line("attention, cupy", {"failed": "why"})
    call = {"call_s": 0.04, "host_s": 0.0, "compiles": 0}
    entry = {
        "dtype": "float32",
        "head_dim": 64,
        "causal": True,
        "first": call,
        "again": call,
        "new_shape": call,
    }
    assert "ok: at most 50 ms asked" in overhead._first_line(entry)
    entry["first"] = {**call, "compiles": 1, "call_s": 6.0}
    assert "OVER: at most 5 s asked" in overhead._first_line(entry)


def test_a_child_that_fails_gives_its_reason(monkeypatch, tmp_path):
    report = overhead.child(
        str(tmp_path), 0, overhead.VARIANTS[:1]
    )  # without a GPU, or with one: no exception
    assert "failed" in report or report["variants"]
    monkeypatch.setattr(overhead, "_CHILD", "import sys; sys.exit('no such thing')")
    assert overhead.child(str(tmp_path), 0, []) == {"failed": "no such thing"}


def test_the_child_reports_first_calls(monkeypatch, tmp_path):
    """The program of the child with NumPy in CuPy's place: what it times is there under the names that are
    read.
    """
    fake = """
import numpy
def asarray(x): return x
def empty(*a): return None
class _Stream:
    def synchronize(self): pass
class cuda:
    class Device:
        def __init__(self, index): pass
        def use(self): pass
    class runtime:
        deviceSynchronize = staticmethod(lambda: None)
    get_current_stream = staticmethod(lambda: _Stream())
"""
    (tmp_path / "cupy.py").write_text(fake)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(
        overhead, "_CHILD", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + overhead._CHILD
    )
    report = overhead.child(str(tmp_path), 0, [("bfloat16", 16, True), ("float99", 16, True)])
    first, second = report["variants"]
    assert (
        first["first"]["call_s"] > 0
        and first["first"]["compiles"] == 0
        and {"again", "new_shape"} <= set(first)
    )
    assert (
        "failed" in second
        and "first call" in overhead._first_line(first)
        and "FAILED" in overhead._first_line(second)
    )


# ------------------------------------------------------------------------------------------------------------
# Command lines


@pytest.mark.parametrize("program", [run, overhead, memory])
def test_help(program):
    done = CliRunner().invoke(program.main, ["--help"])
    assert done.exit_code == 0 and "--json" in done.output and "--device" in done.output


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--suite", "backward"], "'backward' is not one of 'forward'"),
        (
            ["--suite", "float32", "--dtype", "float16"],
            "dtype of suite float32 must be one of float32; got 'float16'",
        ),
        (["--peers", "sdpa_flash,fa9", "--device", "cpu"], "'fa9' is not one of cuflash"),
        (["--device", "tpu"], "'tpu' is neither the index of a GPU nor cpu"),
        (["--head-dim", "257"], "257 is not in the range 1<=x<=256"),
        (["--tier", "sm70"], "'sm70' is not one of"),
    ],
)
def test_bad_arguments(arguments, message):
    done = CliRunner().invoke(run.main, arguments)
    assert done.exit_code == 2 and message in done.output


def test_without_a_gpu_a_gpu_is_refused(monkeypatch):
    def none():
        raise RuntimeError("no NVIDIA driver was found")

    monkeypatch.setattr(jit, "check_driver", none)
    for program in (run, overhead, memory):
        done = CliRunner().invoke(program.main, [])
        assert done.exit_code == 1 and "no GPU can be used: no NVIDIA driver was found" in done.output
    assert CliRunner().invoke(overhead.main, ["--device", "cpu"]).exit_code == 2


def test_names_of_contenders():
    assert run.parse_names(None, ("fa3",)) == ["fa3"] and run.parse_names("none", ("fa3",)) == []
    assert run.parse_names("fa4, sdpa_math") == ["fa4", "sdpa_math"] and "unfused" in run.parse_names("all")
    with pytest.raises(click.BadParameter, match="'x' is not one of"):
        run.parse_names("x")
    assert all(set(names) <= set(peers.CONTENDERS) for names in peers.USUAL.values()) and set(
        peers.USUAL
    ) == set(cases.SUITES)


SMALL_TABLE = ["--head-dim", "16", "--seqlen", "32", "--tokens", "64", "--hidden", "32", "--quick"]


def test_cuflash_bench_on_the_cpu(tmp_path):
    path = tmp_path / "bench.json"
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("no GPU used") and "d16 s32 b2 h2 causal" in done.output
    assert len(json.loads(path.read_text())["cases"]) == 2


def test_the_record_alone_on_standard_output():
    done = CliRunner().invoke(command.bench, ["--device", "cpu", *SMALL_TABLE, "--full", "--json", "-"])
    assert done.exit_code == 0 and len(json.loads(done.stdout)["cases"]) == 1 and "d16 s32" in done.stderr


def test_cuflash_bench_refuses_a_tier_on_the_cpu():
    done = CliRunner().invoke(command.bench, ["--device", "cpu", "--tier", "simt"])
    assert done.exit_code == 2 and "--tier simt needs a GPU" in done.output


def test_bench_is_a_command_of_cuflash():
    assert "bench" in cuflash_main.commands


def test_a_checkout_runs_it_as_a_package_too():
    done = subprocess.run(
        [sys.executable, "-m", "bench.run", "--device", "cpu", "--help"],
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "python -m bench.run" in done.stdout


def test_the_library_is_found_without_a_checkout_or_missing(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.startswith("cuflash.bench")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(command, "__file__", str(tmp_path / "a" / "b" / "bench.py"))
    if importlib.util.find_spec("cuflash.bench") is None:
        with pytest.raises(click.ClickException, match="the benchmarks of cuflash are missing"):
            command.library("run")
    with contextlib.suppress(click.ClickException):
        command.library("cases")
