"""Run a suite: every contender on every case, checked, then timed in turns; a table, and a JSON record.

For example ``python -m bench.run --suite forward --peers sdpa_flash,fa3 --json bench/results/forward.json``.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import click

import cuflash
from cuflash import config, jit, launch, problem
from cuflash.arrays import View
from cuflash.memory import contiguous_strides

from . import cases as cases_module
from . import decode, peers, record
from .cases import Arrays, Case, asked, largest_difference, largest_relative_difference, make_arrays, to_host, truth_of
from .decode import DecodeCase
from .timing import CudaTimer, Timing, WallTimer, captured, measure, shared_stream

CALLS_A_GRAPH = 20
CALLS_A_QUEUE = 50


class Bench:
    """A device, contenders and how long to measure; ``run`` takes cases and gives their record."""

    def __init__(
        self,
        names,
        *,
        device_id: int | None,
        framework: str | None = None,
        quick: bool = False,
        min_seconds: float = 0.06,
        flush: bool = True,
        limit_seconds: float | None = None,
        timer=None,
        say=click.echo,
    ):
        self.names = list(dict.fromkeys(names))
        self.main = self.names[0]
        self.device_id, self.framework, self.quick = device_id, framework, quick
        self.min_seconds, self.flush, self.limit_seconds = min_seconds, flush, limit_seconds
        self.timer, self.say = timer, say
        self.told: set[tuple[str, str]] = set()

    def run(self, cases: list[Case], *, suite: str, path: str | None = None) -> dict:
        """Measure the cases. With ``path`` the record is written after each of them, so that none is lost."""
        started = time.monotonic()
        torch, compilers = None, []
        if self.device_id is None:
            self.framework = "numpy"
        else:
            compilers = compile_ahead(cases, self.names, self.device_id)
            torch = self._torch()  # seconds, while the kernels compile
            wait_for(compilers)
        environment = record.environment(self.device_id)
        result = {
            "kind": "bench",
            "suite": suite,
            "environment": environment,
            "arrays": self.framework,
            "contenders": self.names,
            "settings": {
                "quick": self.quick,
                "min_seconds": self.min_seconds,
                "flush": self.flush,
                "lengths_seed": cases_module.LENGTHS_SEED,
            },
            "complete": False,
            "cases": [],
        }
        self.say(record.headline(environment))
        if torch is not None:
            self.say(f"torch {torch.__version__}, cuDNN {environment['cudnn']}")
        figure = "TB/s of keys and values" if any(isinstance(case, DecodeCase) for case in cases) else "TFLOP/s"
        self.say(f"{figure} on {self.framework} arrays; in brackets the speed of {self.main} over that of a peer")
        if any(case.clocked for case in cases):
            self.say(f"and in a second line us a call by the host's clock: one at a time / in a queue of {CALLS_A_QUEUE}")
        if any(case.wall for case in cases):
            self.say(f"or, where the host counts, us a call: one at a time / in a queue of {CALLS_A_QUEUE}")
        names = []
        for name in self.names:
            reason = peers.missing(name)
            if reason is None:
                names.append(name)
            else:
                self._tell(name, reason)
                result.setdefault("left_out", {})[name] = reason
        self.say("".join([f"{'':42}", *(f"{name:>23}" for name in names)]))
        if self.device_id is None:
            self._run(cases, names, result, path, started)
        else:
            with shared_stream(self.device_id, torch):
                self._run(cases, names, result, path, started)
        result["seconds"] = round(time.monotonic() - started, 1)
        self._summary(result)
        if path:
            record.write(path, result)
            self.say(f"record: {path}")
        return result

    def _torch(self):
        if self.framework is None:
            wanted = [
                name for name in self.names if peers.needs_torch([name]) and peers.missing(name) is None
            ]
            self.framework = "torch" if wanted else "cupy"
        if self.framework == "cupy":
            return None
        try:
            import torch

            if not torch.cuda.is_available():
                raise RuntimeError("torch sees no GPU")
            return torch
        except Exception as error:
            self._tell("torch", peers.one_line(error))
            self.framework = "cupy"
            return None

    def _run(self, cases, names, result, path, started):
        for case in cases:
            if self.limit_seconds is not None and time.monotonic() - started > self.limit_seconds:
                left = len(cases) - len(result["cases"])
                self.say(f"stopped after {self.limit_seconds:.0f} s: {left} cases are left")
                return
            one = self._case(case, names, result["environment"])
            result["cases"].append(one)
            self.say(self._row(case, names, one))
            for name, contender in one["results"].items():
                if "median_s" not in contender:
                    self._tell(name, contender.get("unavailable") or f"FAILED: {contender['failed']}")
            if path:
                record.write(path, result)
            if one.get("aborted"):
                self.say("the CUDA context is lost: nothing more can be measured in this process")
                return
        result["complete"] = True

    def _case(self, case: Case, names, environment) -> dict:
        one = {
            "name": case.name,
            "dtype": case.dtype,
            "shapes": case.shapes,
            **case.facts,
            "options": case.options,
            "backward": case.backward,
            "flops": case.flops,
            "bytes": case.bytes,
            "results": {},
        }
        timer = self._timer(case)
        calls, single_calls = self._prepare(case, names, one, timer)
        if one.get("aborted"):
            return one
        settings = self._settings(case)
        for name, timing in measure(calls, timer, **settings).items():
            entry = one["results"][name]
            if isinstance(timing, Timing):
                problem = peers.problem_of(name, case)
                entry |= timing.record() | self._rates(problem, timing, environment)
                if peers.is_cuflash(name):
                    entry["config"] = self._config(problem, name)
            else:
                entry["failed"] = peers.one_line(timing)
                one["aborted"] = one.get("aborted", False) or not timer.alive()
        if case.wall and not one.get("aborted"):
            self._clock(single_calls, one, "queued", CALLS_A_QUEUE, settings)
        if case.clocked and not one.get("aborted"):
            clocked = {name: call for name, call in single_calls.items() if peers.is_clocked(name)}
            self._clock(clocked, one, "single", 1, settings)
            self._clock(clocked, one, "queued", CALLS_A_QUEUE, settings | {"min_runs": 3})
            clocked.clear()
        self._compare(case, one)
        calls.clear()  # with what they hold
        single_calls.clear()
        self._release()
        return one

    def _prepare(self, case: Case, names, one: dict, timer) -> tuple[dict, dict]:
        """What is timed of each contender, and a single call of it; ``one`` gets what was found when they were checked."""
        calls, single_calls, data, references = {}, {}, {}, {}
        one["results"] = {name: {} for name in names}

        def attempt(name, step) -> None:
            entry = one["results"][name]
            if "failed" in entry or "unavailable" in entry:
                return
            try:
                step(name, entry)
            except peers.Unavailable as error:
                entry["unavailable"] = str(error)
            except Exception as error:
                entry["failed"] = peers.one_line(error)
                if not timer.alive():
                    one["aborted"] = True
                    for other in one["results"].values():
                        if not {"failed", "unavailable"} & set(other):
                            other["failed"] = f"not timed: {name} has lost the CUDA context"

        def make_data(name, entry) -> None:
            problem = peers.problem_of(name, case)
            if problem not in data:
                data[problem] = _Data(problem, self.framework, references, self._caches(problem))
            if problem is not case:
                entry["problem"] = {
                    "name": problem.name,
                    "shapes": problem.shapes,
                    "flops": problem.flops,
                    **problem.facts,
                }

        def check(name, entry) -> None:
            problem = peers.problem_of(name, case)
            call = peers.make(name, problem, data[problem].arrays)
            self._check(name, call, data[problem], entry)
            if "failed" not in entry:
                single_calls[name] = call

        def capture(name, entry) -> None:
            if name in single_calls:
                entry["mode"], calls[name] = self._timed_as(single_calls[name], case)

        # Nothing is made once a graph is captured: a replay writes wherever it wrote then.
        for step in (make_data, check, capture):
            for name in names:
                attempt(name, step)
        return calls, {name: call for name, call in single_calls.items() if name in calls}

    def _settings(self, case: Case) -> dict:
        """How long a contender is measured."""
        settings = {"min_seconds": self.min_seconds}
        if isinstance(case, DecodeCase):  # a run is a millisecond or more, and all that is asked of a GPU is its memory
            settings = {"min_runs": 6, "min_seconds": self.min_seconds / 2}
        if self.quick:
            settings = {"min_runs": 5, "min_seconds": self.min_seconds / 4, "rounds": 1}
        return settings

    def _caches(self, case: Case) -> int:
        """The places that hold the inputs of a case, for calls to take in turns."""
        if not isinstance(case, DecodeCase) or self.device_id is None or self.timer is not None or not self.flush:
            return 1
        runtime = jit.import_cupy().cuda.runtime
        return case.caches(runtime.getDeviceProperties(self.device_id)["l2CacheSize"])

    def _calls_a_graph(self, case: Case) -> int:
        return case.calls_a_graph(self._caches(case)) if isinstance(case, DecodeCase) else CALLS_A_GRAPH

    def _timer(self, case: Case):
        if self.timer is not None:
            return self.timer
        if self.device_id is None:
            return WallTimer()
        timer = CudaTimer(
            cold=self.flush and not case.graph,
            monitor=record.monitor(self.device_id),
            calls_a_run=self._calls_a_graph(case) if case.graph else 1,
        )
        return self._wall_timer(1, timer.alive) if case.wall else timer

    def _wall_timer(self, calls_a_run: int, alive=lambda: True):
        if self.device_id is None:
            return WallTimer(calls_a_run=calls_a_run)
        return WallTimer(jit.import_cupy().cuda.get_current_stream().synchronize, calls_a_run, alive)

    def _clock(self, calls, one, key: str, calls_a_run: int, settings):
        """The calls by the host's clock, a wait after each; or queued, with one wait for many: what a loop sees whose
        results are not needed at once.
        """
        timed = {name: call for name, call in calls.items() if "median_s" in one["results"][name]}
        timer = self.timer or self._wall_timer(calls_a_run)
        for name, timing in measure(timed, timer, **settings).items():
            entry = one["results"][name]
            if isinstance(timing, Timing):
                entry[key] = {"calls": calls_a_run, **timing.record()}
            else:
                entry[key] = {"failed": peers.one_line(timing)}

    def _check(self, name, call, data, entry):
        """One call, its result against the truth and against cuflash's, which the first of them leaves in ``data``."""
        case = data.case
        tolerance = case.tolerance
        _poison(case, data.arrays)
        result = call()
        entry["max_error"] = float(f"{data.truth.error(result):.3g}")
        if not entry["max_error"] <= tolerance:
            far = f"{entry['max_error']} of a row's size" if case.by_row else entry["max_error"]
            entry["failed"] = f"wrong result: off by {far} from float64"
            return
        if isinstance(case, DecodeCase):
            result = to_host(result)  # few rows, and not all of one library
        reference = data.references.get(case.answer)
        if reference is None:
            if peers.is_cuflash(name):
                data.references[case.answer] = result
            return
        if case.by_row:
            results = (result, reference) if case.backward else ((result,), (reference,))
            difference = max(map(largest_relative_difference, *results))
        else:
            difference = largest_difference(result, reference)
        entry["max_difference"] = float(f"{difference:.3g}")
        if not entry["max_difference"] <= 2 * tolerance:
            entry["failed"] = f"wrong result: off by {entry['max_difference']} from {self.main}"

    def _timed_as(self, call, case: Case):
        """(what is timed, the callable for it)."""
        if self.device_id is None or self.timer is not None:
            return "calls", call
        if case.wall:
            return "calls, the host's time included, L2 warm", call
        if not case.graph:
            return ("calls, L2 flushed" if self.flush else "calls, L2 warm"), call
        count, caches = self._calls_a_graph(case), self._caches(case)
        where = f"{caches} caches in turn" if caches > 1 else "one cache" if isinstance(case, DecodeCase) else "L2 warm"
        try:
            graph = captured(call, self.framework, count)
            graph()
            return f"graph of {count} calls, {where}", graph
        except Exception as error:

            def repeated():
                for _ in range(count):
                    call()

            call()  # raises if it was not only the capture that failed
            return f"{count} calls in a row, {where}; no graph: {peers.one_line(error)}", repeated

    def _rates(self, case: Case, timing: Timing, environment) -> dict:
        tflops = case.flops / timing.median * 1e-12
        limit = record.limit_of(environment, case.dtype)
        return {
            "tflops": float(f"{tflops:.5g}"),
            "gb_per_s": float(f"{case.bytes / timing.median * 1e-9:.4g}"),
            "share_of_limit": limit and round(tflops / limit, 4),
            "limit_tflops": limit and round(limit, 1),
            **case.rates(timing.median),
        }

    def _config(self, case: Case, name: str) -> dict | None:
        """The kernel that cuflash chose, for the record."""
        if self.device_id is None:
            return None
        try:
            _, chosen = choice_of(case, name, self.device_id)
            built = jit.build(chosen.kernel, launch.kernel_constants(chosen), _arch(chosen, self.device_id))
            return {
                "kernel": chosen.kernel,
                "block_m": chosen.block_m,
                "block_n": chosen.block_n,
                "threads": chosen.threads,
                "smem_bytes": chosen.smem_bytes,
                "registers": built.registers,
                "spill_bytes": built.spill_bytes,
            }
        except Exception as error:
            return {"unknown": peers.one_line(error)}

    def _compare(self, case: Case, one: dict) -> None:
        """Speeds: seconds for the same work. Contenders whose problem is another one are compared by their rates."""
        timed = {name: entry for name, entry in one["results"].items() if "median_s" in entry}
        if self.main not in timed:
            return
        mine = timed[self.main]
        one["speed_over"] = {}
        for name, entry in timed.items():
            if name == self.main:
                continue
            work = case.work / peers.problem_of(name, case).work
            rounds = zip(entry["round_medians_s"], mine["round_medians_s"], strict=False)
            by_round = sorted(work * theirs / ours for theirs, ours in rounds)
            one["speed_over"][name] = {
                "ratio": round(work * entry["median_s"] / mine["median_s"], 4),
                "lowest_round": round(by_round[0], 4),
                "highest_round": round(by_round[-1], 4),
            }
            for clock in ("single", "queued") if case.clocked else ():
                theirs, ours = (it.get(clock, {}).get("median_s") for it in (entry, mine))
                if theirs and ours:
                    one["speed_over"][name][clock] = round(work * theirs / ours, 4)
        rivals = {name: entry["median_s"] for name, entry in timed.items() if not peers.is_cuflash(name)}
        if rivals:
            one["best_peer"] = best = min(rivals, key=rivals.get)
            one["speed_over_best_peer"] = one["speed_over"][best]["ratio"]
        one["asked"] = []
        for target in asked(case):
            name = target.contender
            if name and peers.is_cuflash(name):
                name = peers.own_name(name, peers.tier_of(self.main))
            verdict = target.judge(mine, one["speed_over"].get(name))
            if verdict is not None:
                one["asked"].append(verdict)

    def _release(self) -> None:
        """Score matrices of one case must not be in the way of the next."""
        if self.device_id is not None:
            jit.import_cupy().get_default_memory_pool().free_all_blocks()
            if self.framework == "torch":
                sys.modules["torch"].cuda.empty_cache()

    def _row(self, case: Case, names, one) -> str:
        cells = [f"{case.name:42}"]
        for name in names:
            entry = one["results"].get(name, {})
            if "median_s" not in entry:
                cells.append(f"{'-' if 'unavailable' in entry else 'FAILED':>23}")
                continue
            text = _figures(entry.get("tb_per_s", entry["tflops"]))
            if case.wall:
                queued = entry.get("queued", {}).get("median_s")
                text = f"{entry['median_s'] * 1e6:.0f}/{f'{queued * 1e6:.0f}' if queued else '-'}"
            if name == self.main:
                spread = (entry["p90_s"] - entry["p10_s"]) / 2 / entry["median_s"]
                text += f" ±{spread:.1%}"
            elif "speed_over" in one:
                text += f" ({one['speed_over'][name]['ratio']:.2f}x)"
            cells.append(f"{text:>23}")
        missed = [f"{it['what']} {it['value']:.3g}, asked {it['asked']:.3g}" for it in one.get("asked", ()) if not it["ok"]]
        line = "".join(cells) + (f"   MISSED: {'; '.join(missed)}" if missed else "")
        if not case.clocked:
            return line
        clocked = (_clocked(one["results"].get(name, {}), one.get("speed_over", {}).get(name, {})) for name in names)
        return line + "\n" + "".join([f"{'':42}", *(f"{text:>23}" for text in clocked)]).rstrip()

    def _tell(self, name: str, reason: str) -> None:
        """Each reason once: most hold for many cases."""
        if (name, reason) not in self.told:
            self.told.add((name, reason))
            self.say(f"  {name}: {reason}")

    def _summary(self, result: dict) -> None:
        for name in self.names:
            ratios = [
                one["speed_over"][name]["ratio"]
                for one in result["cases"]
                if name in one.get("speed_over", {})
            ]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                self.say(
                    f"{self.main} over {name}: {mean:.2f}x in the mean, {min(ratios):.2f}x to "
                    f"{max(ratios):.2f}x, {len(ratios)} cases"
                )
        verdicts = [verdict["ok"] for one in result["cases"] for verdict in one.get("asked", ())]
        if verdicts:
            self.say(f"targets: {sum(verdicts)} of {len(verdicts)} reached")


def _figures(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.1f}"


def _clocked(entry: dict, over: dict) -> str:
    """Microseconds of a call, one at a time and in a queue, and in brackets the speed over it."""
    seconds = [entry.get(clock, {}).get("median_s") for clock in ("single", "queued")]
    if None in seconds:
        return ""
    ratios = [f"{over[clock]:.2f}" for clock in ("single", "queued") if clock in over]
    return "/".join(f"{second * 1e6:.1f}" for second in seconds) + (f" ({'/'.join(ratios)}x)" if ratios else "")


class _Data:
    """Arrays of a problem, the truth of some rows, and ``references``: the first right result of cuflash by the answer of
    the case.
    """

    def __init__(self, case: Case, framework: str, references: dict, caches: int = 1):
        self.case, self.references = case, references
        try:
            self.arrays = make_arrays(case, framework)
            self.truth = truth_of(case, self.arrays)
            if caches > 1:
                self.arrays = decode.in_turns(case, self.arrays, caches)
        except Exception as error:
            raise RuntimeError(f"no data: {peers.one_line(error)}") from error


def _poison(case: Case, arrays: Arrays) -> None:
    """Fill what the next results are likely to be allocated in with NaN: a peer's correct ones may still
    stand there.
    """
    if arrays.framework == "torch":
        torch = sys.modules["torch"]
        held = [
            torch.full(shape, math.nan, dtype=arrays.q.dtype, device=arrays.q.device) for shape in case.result_shapes
        ]
    elif arrays.framework == "cupy":
        held = [jit.import_cupy().empty(shape, arrays.q.dtype) for shape in case.result_shapes]
        for poison in held:
            poison.data.memset_async(0xFF, poison.nbytes)  # NaN in every format
    else:
        held = []
    if isinstance(case, DecodeCase):
        arrays.unappend()
    held.clear()  # not before all are filled: they would share memory


def choice_of(case: Case, name: str, device_id: int) -> tuple[problem.Problem, config.Config]:
    """The problem that a case states, and what cuflash, by its contender's name, chooses for it. Raises
    NotImplementedError if it refuses.
    """

    addresses = itertools.count(2**40, 2**40)  # no two arrays share memory

    def view(shape, dtype=case.dtype):
        # As arrays.View has them: three axes get a batch of one in front.
        whole = (1, *shape) if len(shape) == 3 else shape
        strides, address = contiguous_strides(whole), next(addresses)
        return View(whole, strides, dtype, f"cuda:{device_id}", address, "cupy", was_3d=len(shape) == 3)

    qkv, starts, options = [view(shape) for shape in case.shapes], (), dict(case.options)
    if case.lengths:
        starts = (view((case.batch + 1,), "int32"),) * 2
    device, tier = launch.device_of(device_id), peers.tier_of(name) or config.forced_tier()
    if isinstance(case, DecodeCase):
        q, k, v = qkv
        if case.v_is_k:
            v = k._replace(shape=v.shape)
        given = {name: view(shape, dtype) for name, (shape, dtype) in case.given_shapes.items()}
        if case.v_is_k and case.appended:
            given["v"] = given["k"]._replace(shape=given["v"].shape)
        stated = problem.check_attention_with_kvcache(q, k, v, **given, **options)
        return stated, config.choose(stated, device, tier)
    if not case.backward:
        check = problem.check_attention_varlen if case.lengths else problem.check_attention
        stated = check(*qkv, *starts, **options)
        return stated, config.choose(stated, device, tier)
    check = problem.check_attention_varlen_backward if case.lengths else problem.check_attention_backward
    rows = (case.heads_q, sum(case.lengths)) if case.lengths else (case.batch, case.heads_q, case.seqlen_q)
    out, lse = view(case.out_shape), view(rows, problem.lse_dtype(case.dtype))
    deterministic = name.startswith("cuflash-deterministic")
    stated = check(out, *qkv, out, lse, *starts, deterministic=deterministic, **options)
    return stated, config.choose(stated, device, tier)


def _arch(kernel: config.Kernel, device_id: int) -> str:
    return launch.arch_of(kernel, jit.arch_for(launch.device_of(device_id).compute_capability))


_COMPILE = """
import json, sys
from cuflash import jit
for kernel, constants, arch in json.loads(sys.argv[1]):
    try:
        jit.build(kernel, [tuple(pair) for pair in constants], arch)
    except Exception:
        pass        # the call that needs it says why
"""


def _variants(case: Case, name: str, device_id: int) -> list[tuple[str, tuple, str]]:
    """(kernel, constants, arch) of all kernels of the call, and of the forward that a backward needs first."""
    found = []
    with contextlib.suppress(Exception):  # what is refused is reported where it is called
        computed = peers.problem_of(name, case)
        for wanted in dict.fromkeys((computed, replace(computed, backward=False, step=False))):
            for kernel in config.kernels_of(*choice_of(wanted, name, device_id)):
                constants = tuple(launch.kernel_constants(kernel).items())
                found.append((kernel.kernel, constants, _arch(kernel, device_id)))
    return found


def compile_ahead(cases, names, device_id: int, jobs: int | None = None) -> list[subprocess.Popen]:
    """Start processes that compile all variants into the disk cache: NVRTC compiles one at a time in a
    process.
    """
    variants = dict.fromkeys(
        variant
        for case in cases
        for name in filter(peers.is_cuflash, names)
        for variant in _variants(case, name, device_id)
    )
    jobs = min(jobs or os.cpu_count() or 1, 8, len(variants))
    if jobs < 2:
        return []
    root = str(Path(cuflash.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    work = list(variants)
    return [
        subprocess.Popen(
            [sys.executable, "-c", _COMPILE, json.dumps(work[first::jobs])],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for first in range(jobs)
    ]


def wait_for(processes: list[subprocess.Popen], seconds: float = 240) -> None:
    """Until they end or time is up: what they have not compiled is compiled when it is called."""
    end = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(max(0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


# ------------------------------------------------------------------------------------------------------------
# Command line


class DeviceType(click.ParamType):
    """The index of a GPU, or "cpu"."""

    name = "device"

    def convert(self, value, param, ctx):
        if value is None or isinstance(value, int):
            return value
        if value == "cpu":
            return value
        if value.isdecimal():
            return int(value)
        self.fail(f"{value!r} is neither the index of a GPU nor cpu", param, ctx)


def device_or_fail(device) -> int | None:
    """The index of a GPU that is there; None for "cpu". Raises click.ClickException for one that is not."""
    if device == "cpu":
        return None
    try:
        jit.check_driver()
        count = jit.import_cupy().cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise click.ClickException(
            f"no GPU can be used: {peers.one_line(error, 400)}; --device cpu measures NumPy"
        ) from None
    if device >= count:
        raise click.ClickException(f"there is no GPU {device}: {count} found")
    return device


def parse_names(text: str | None, default=()) -> list[str]:
    """Contenders from "a,b"; "none" and "all" are words for the obvious."""
    if text is None:
        return list(default)
    if text == "all":
        return [name for name in peers.CONTENDERS if not peers.is_cuflash(name)]
    names = [name.strip() for name in text.split(",") if name.strip() and name.strip() != "none"]
    for name in names:
        if name not in peers.CONTENDERS:
            raise click.BadParameter(
                f"{name!r} is not one of {', '.join(peers.CONTENDERS)}", param_hint="--peers"
            )
    return names


def contenders(tier: str | None, peer_names: str | None, usual) -> list[str]:
    """cuflash, and who is named, else who is usual; contenders of cuflash all on the tier, if there is one."""
    names = ["cuflash", *parse_names(peer_names, usual)]
    return [peers.own_name(name, tier) if peers.is_cuflash(name) and "/" not in name else name for name in names]


def exit_status(result: dict, main: str) -> int:
    """1 if cuflash itself failed or the run broke off: a peer that fails is the peer's matter."""
    failed = any("median_s" not in one["results"].get(main, {}) for one in result["cases"])
    return int(failed or not result["cases"] or any(one.get("aborted") for one in result["cases"]))


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--suite", type=click.Choice(cases_module.SUITES), default="forward", show_default=True)
@click.option(
    "--head-dim",
    "head_dims",
    type=click.IntRange(1, problem.MAX_HEAD_DIM),
    multiple=True,
    help="Repeat for several.",
)
@click.option("--seqlen", "seqlens", type=click.IntRange(1), multiple=True, help="Repeat for several.")
@click.option("--causal/--full", default=None, help="Only with, or only without a causal mask.")
@click.option("--backward/--forward", default=None, help="Only one half of a suite that has both.")
@click.option("--dtype", type=click.Choice(problem.DTYPES), help="Instead of the suite's own.")
@click.option("--tier", type=click.Choice(config.TIERS), help="Force a tier of cuflash.")
@click.option(
    "--peers",
    "peer_names",
    metavar="NAMES",
    help=f"Comma-separated, none or all: {', '.join(peers.CONTENDERS)}.",
)
@click.option("--device", type=DeviceType(), default="0", show_default=True, help="Index of a GPU, or cpu.")
@click.option(
    "--arrays", "framework", type=click.Choice(["torch", "cupy"]), help="Default: torch if a peer needs it."
)
@click.option("--quick", is_flag=True, help="Fewer runs, one round.")
@click.option(
    "--min-ms",
    type=click.FloatRange(0.1),
    default=60.0,
    show_default=True,
    help="Of runs for each contender and case.",
)
@click.option(
    "--flush/--no-flush", default=True, show_default=True, help="Write four times the L2 before each run."
)
@click.option("--limit", type=click.FloatRange(1), help="Start no case after so many seconds.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the record goes.")
def main(
    suite,
    head_dims,
    seqlens,
    causal,
    backward,
    dtype,
    tier,
    peer_names,
    device,
    framework,
    quick,
    min_ms,
    flush,
    limit,
    path,
):
    """Measure a suite of attentions beside the peers that are installed."""
    try:
        cases = cases_module.suite(suite, dtype=dtype, head_dims=head_dims, seqlens=seqlens, causal=causal)
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if backward is not None:
        cases = [case for case in cases if case.backward == backward]
    bench = Bench(
        contenders(tier, peer_names, peers.USUAL[suite]),
        device_id=device_or_fail(device),
        framework=framework,
        quick=quick,
        min_seconds=min_ms / 1000,
        flush=flush,
        limit_seconds=limit,
    )
    result = bench.run(cases, suite=suite, path=path)
    raise SystemExit(exit_status(result, bench.main))


if __name__ == "__main__":
    main()
