"""Time: CUDA events on one stream that CuPy and PyTorch share; on the CPU the wall clock.

A timer runs blocks of calls and returns seconds a call. ``measure`` lets contenders take turns, so that
clock, power and temperature are the same for all of them, and keeps every sample.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Timing:
    """Samples of one contender: seconds a call by round, and what the GPU reported meanwhile.

    ``nvml_sm_clock_mhz`` is NVML's reading, which is not the true clock on every GPU: under tensor core load
    an H200 reports 1.10 times what its own cycle counter says. Compare it between contenders, don't compute
    with it.
    """

    rounds: tuple[tuple[float, ...], ...]
    readings: tuple[dict, ...] = ()

    @property
    def seconds(self) -> list[float]:
        return sorted(second for one in self.rounds for second in one)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def quantile(self, q: float) -> float:
        """The sample at or just below that part of the sorted samples."""
        seconds = self.seconds
        return seconds[min(len(seconds) - 1, int(q * len(seconds)))]

    @property
    def spread(self) -> float:
        """Half of what lies between the 10th and 90th percentile, over the median."""
        return (self.quantile(0.9) - self.quantile(0.1)) / 2 / self.median

    def record(self) -> dict:
        """For JSON: seconds, rounded to what an event can tell."""

        def rounded(x):
            return float(f"{x:.6g}")

        clocks = [reading["nvml_sm_clock_mhz"] for reading in self.readings if "nvml_sm_clock_mhz" in reading]
        powers = [reading["power_w"] for reading in self.readings if "power_w" in reading]
        return {
            "median_s": rounded(self.median),
            "min_s": rounded(self.seconds[0]),
            "p10_s": rounded(self.quantile(0.1)),
            "p90_s": rounded(self.quantile(0.9)),
            "runs": len(self.seconds),
            "round_medians_s": [rounded(statistics.median(one)) for one in self.rounds],
            "nvml_sm_clock_mhz": statistics.median(clocks) if clocks else None,
            "power_w": round(statistics.median(powers), 1) if powers else None,
        }


def order_of_round(count: int, turn: int) -> list[int]:
    """The order of ``count`` contenders in round ``turn``.

    Each comes once. What ran before a contender leaves it a hot or a cool chip, and so a clock: over ``count`` rounds, twice
    as many if it is odd, each contender follows each other equally often, and has each place equally often (Williams 1949).
    """
    steps = (step for pair in zip(range(count), range(count - 1, -1, -1)) for step in pair)  # 0, n - 1, 1, n - 2, ...
    order = [(step + turn) % count for _, step in zip(range(count), steps)]
    return order[::-1] if count % 2 and turn // count % 2 else order


def balanced_rounds(count: int) -> int:
    """The fewest rounds, four at least, over which ``order_of_round`` favours none of ``count`` contenders."""
    once = count if count % 2 == 0 else 2 * count
    return once * max(1, math.ceil(4 / once))


def measure(
    calls: dict[str, Callable],
    timer,
    *,
    min_runs: int = 10,
    min_seconds: float = 0.06,
    max_seconds: float = 1.0,
    rounds: int | None = None,
) -> dict[str, Timing | Exception]:
    """Time contenders in turns. Each has been called before: whatever compiles has compiled.

    A run is all calls that the timer makes at once. Each contender gets as many as fill ``min_seconds``, at least
    ``min_runs``, but no more than fill ``max_seconds`` (and one a round in any case), in ``rounds`` rounds (None:
    ``balanced_rounds``), each in an order of its own (``order_of_round``); the first of a round is not counted. One whose
    single run takes longer than ``max_seconds`` gets just that. One that raises gets its exception as result and takes
    part no more.
    """
    calls_a_run, rounds = getattr(timer, "calls_a_run", 1), rounds or balanced_rounds(len(calls))
    results: dict[str, Timing | Exception] = {}
    runs: dict[str, int] = {}
    samples = {name: [] for name in calls}
    readings = {name: [] for name in calls}
    for name, call in calls.items():
        try:
            seconds, reading = timer.block(call, 1)
            if seconds[0] * calls_a_run > max_seconds:
                results[name] = Timing((tuple(seconds),), (reading,))
                continue
            estimate = max(1e-7, min(timer.block(call, 2)[0])) * calls_a_run
        except Exception as error:
            results[name] = error
            continue
        wanted = min(500, max(min_runs, math.ceil(min_seconds / estimate)))
        runs[name] = math.ceil(max(1, min(wanted, max_seconds / estimate)) / rounds)
    for turn in range(rounds):
        names = [name for name in calls if name not in results]
        for name in (names[i] for i in order_of_round(len(names), turn)):
            try:
                seconds, reading = timer.block(calls[name], runs[name] + 1)
            except Exception as error:
                results[name] = error
                continue
            samples[name].append(tuple(seconds[1:]))
            readings[name].append(reading)
    for name in calls:
        if name not in results:
            results[name] = Timing(
                tuple(samples[name]), tuple(reading for reading in readings[name] if reading)
            )
    return results


class WallTimer:
    """Wall clock: for arrays on the CPU; with ``synchronise``, which waits for the GPU, for calls whose time on the
    host counts too. A run is ``calls_a_run`` calls, and the wait for all of them.
    """

    def __init__(self, synchronise: Callable = lambda: None, calls_a_run: int = 1, alive: Callable = lambda: True):
        self.synchronise, self.calls_a_run, self.alive = synchronise, calls_a_run, alive

    def block(self, call: Callable, runs: int) -> tuple[list[float], dict]:
        """(seconds a call of each run, {})."""
        seconds = []
        self.synchronise()
        for _ in range(runs):
            start = time.perf_counter()
            for _ in range(self.calls_a_run):
                call()
            self.synchronise()
            seconds.append((time.perf_counter() - start) / self.calls_a_run)
        return seconds, {}


@dataclass
class CudaTimer:
    """CUDA events around each call, on CuPy's current stream, all queued before the first is waited for.

    Before each call a buffer of four times the L2 cache is written (``cold``): inputs come from device
    memory, and the host is ahead of the GPU, so that what the host takes to launch does not count. Without it
    the inputs are in L2 where they fit, and short kernels are to be timed as graphs (``captured``).
    """

    cold: bool = True
    monitor: Nvml | None = None
    calls_a_run: int = 1
    _buffer: object = field(default=None, repr=False)

    def block(self, call: Callable, runs: int) -> tuple[list[float], dict]:
        """(seconds of each run, what the GPU reported while they ran)."""
        import cupy

        stream = cupy.cuda.get_current_stream()
        if self.cold and self._buffer is None:
            l2_bytes = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["l2CacheSize"]
            self._buffer = cupy.empty(max(4 * l2_bytes, 2**24), cupy.uint8)
        events = [(cupy.cuda.Event(), cupy.cuda.Event()) for _ in range(runs)]
        for start, end in events:
            if self.cold:
                self._buffer.data.memset_async(0, self._buffer.nbytes, stream)
            start.record(stream)
            call()
            end.record(stream)
        reading = self.monitor.read() if self.monitor else {}  # while the GPU still works on what is queued
        stream.synchronize()
        return [cupy.cuda.get_elapsed_time(*pair) * 1e-3 / self.calls_a_run for pair in events], reading

    def alive(self) -> bool:
        """False once a kernel has made the CUDA context unusable: nothing more can be measured in this
        process.
        """
        import cupy

        try:
            cupy.cuda.runtime.deviceSynchronize()
            return True
        except Exception:
            return False


def captured(call: Callable, framework: str, calls: int) -> Callable:
    """A CUDA graph of ``calls`` calls, as a callable that launches it on the current stream.

    ``framework`` ("torch" or "cupy") is that of the arrays: each captures with its own allocator. The stream
    must not be the default one, and the call must have run before.
    """
    import cupy

    # What CuPy allocates meanwhile stays the graph's, as it does in PyTorch: a replay writes there.
    pool = cupy.cuda.MemoryPool()
    with cupy.cuda.using_allocator(pool.malloc):
        call()
        if framework == "torch":
            replay = _captured_by_torch(call, calls)
        else:
            stream = cupy.cuda.get_current_stream()
            stream.begin_capture()
            try:
                for _ in range(calls):
                    call()
            finally:
                graph = stream.end_capture()
            replay = functools.partial(graph.launch, stream)
    return _Graph(replay, pool)


def _captured_by_torch(call: Callable, calls: int) -> Callable:
    graph = sys.modules["torch"].cuda.CUDAGraph()
    # Relaxed: CuPy's pool, which torch knows nothing of, may have to allocate.
    graph.capture_begin(capture_error_mode="relaxed")
    try:
        for _ in range(calls):
            call()
    finally:
        graph.capture_end()
    return graph.replay


@dataclass
class _Graph:
    """Calls of it launch a graph. It holds the memory that the graph writes."""

    replay: Callable
    pool: object

    def __call__(self) -> None:
        self.replay()


@contextlib.contextmanager
def shared_stream(device_id: int, torch=None):
    """A new stream that is the current one of CuPy and, if the module is given, of PyTorch."""
    from cuflash.jit import import_cupy

    cupy = import_cupy()
    with cupy.cuda.Device(device_id):
        stream = cupy.cuda.Stream(non_blocking=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(stream)
            if torch is not None:
                stack.enter_context(torch.cuda.device(device_id))
                stack.enter_context(
                    torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr, device=device_id))
                )
            try:
                yield stream
            finally:
                with contextlib.suppress(Exception):  # a broken context has been reported where it broke
                    stream.synchronize()


class Nvml:
    """Clock, power and driver of one GPU, read through NVIDIA's management library where there is one."""

    def __init__(self, pci_bus_id: str):
        self._library = self._handle = None
        for name in ("libnvidia-ml.so.1", "nvml.dll"):
            try:
                library = ctypes.CDLL(name)
                handle = ctypes.c_void_p()
                if not library.nvmlInit_v2() and not library.nvmlDeviceGetHandleByPciBusId_v2(
                    ctypes.c_char_p(pci_bus_id.encode()), ctypes.byref(handle)
                ):
                    self._library, self._handle = library, handle
                    return
            except (OSError, AttributeError):
                continue

    def _number(self, function: str, *arguments) -> int | None:
        value = ctypes.c_uint()
        if self._library is None or getattr(self._library, function)(
            self._handle, *arguments, ctypes.byref(value)
        ):
            return None
        return value.value

    def read(self) -> dict:
        """{"nvml_sm_clock_mhz": MHz, "power_w": watts}, without what cannot be read."""
        clock = self._number("nvmlDeviceGetClockInfo", ctypes.c_int(1))  # NVML_CLOCK_SM
        power = self._number("nvmlDeviceGetPowerUsage")  # milliwatts
        reading = {}
        if clock is not None:
            reading["nvml_sm_clock_mhz"] = clock
        if power is not None:
            reading["power_w"] = power / 1000
        return reading

    def driver(self) -> str | None:
        """The driver's version, as "580.159.04"."""
        text = ctypes.create_string_buffer(96)
        if self._library is None or self._library.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
            return None
        return text.value.decode()
