"""What a call costs on the host, and what the first calls of a process cost.

    python -m bench.overhead --json bench/results/overhead_h200.json

Repeated calls: the host's clock around single calls on a tiny problem, so that the GPU is never behind, all in
turns in five rounds; the median of thousands. First calls: new processes, once with an empty folder of compiled
kernels and once with a full one; what the import of CuPy and the CUDA context take is not counted.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import click

import cuflash

from . import peers, record
from .cases import Case, make_arrays, packed
from .decode import DecodeCase
from .run import DeviceType, device_or_fail
from .timing import shared_stream

# What is asked of cuflash: microseconds of a repeated call, and of one on a cache; seconds of a first use, milliseconds
# from a full folder.
TARGET_CALL_US, TARGET_DECODE_US, TARGET_FIRST_S, TARGET_WARM_MS = 25.0, 30.0, 5.0, 50.0

ROUNDS = 5
CALLS_IN_A_ROW = 16
ROW = f"cuflash.torch.attention, {CALLS_IN_A_ROW} in a row"
SDPA = "torch SDPA"  # whichever backend PyTorch takes
BLOCK = "block of a transformer, {}"  # with the attention of one of these
ADDITION = "torch addition"  # what entering compiled code costs, whatever is in it
# By how many microseconds a call may take longer than another.
TARGETS_BESIDE_US = {
    "cuflash.torch.attention": ("attention, cupy", 5.0),
    "cuflash.torch.attention_varlen": ("attention_varlen, cupy", 5.0),
    "cuflash.torch.attention_with_kvcache": ("attention_with_kvcache, cupy", 5.0),
    "cuflash.torch.attention, compiled": ("cuflash.torch.attention", 0.0),
    f"{ROW}, compiled": (ROW, 0.0),
    f"{ROW}, compiled, CUDA graphs": (ROW, 0.0),
    f"{BLOCK.format('cuflash')}, compiled": (f"{BLOCK.format('SDPA')}, compiled", 0.0),
}

TINY = Case("overhead", "bfloat16", 1, 64, 64, 8, 8, 64, 64)
TINY_PACKED = packed("overhead", "bfloat16", (16, 0, 33, 15), 8, 64)
TINY_DECODE = DecodeCase("overhead", "bfloat16", 4, 1, 64, 8, 2, 64, 64, causal=True)
TINY_PAGED = replace(TINY_DECODE, page_size=16, appended=1)


def host_time(call, calls: int, synchronise) -> dict:
    """Microseconds of host time a call."""
    warm_up(call, synchronise)
    return figures(sample(call, calls, synchronise))


def warm_up(call, synchronise) -> None:
    for _ in range(200):
        call()
    synchronise()


def sample(call, calls: int, synchronise, every: int = 100) -> list[int]:
    """Nanoseconds of each call; the queue is emptied after so many calls, so that it never fills."""
    clock, nanoseconds = time.perf_counter_ns, []
    for number in range(calls):
        start = clock()
        call()
        nanoseconds.append(clock() - start)
        if number % every == every - 1:
            synchronise()
    return nanoseconds


def figures(nanoseconds: list[int]) -> dict:
    """Of all samples of one call."""
    nanoseconds = sorted(nanoseconds)
    return {
        "median_us": round(statistics.median(nanoseconds) / 1000, 2),
        "min_us": round(nanoseconds[0] / 1000, 2),
        "p10_us": round(nanoseconds[len(nanoseconds) // 10] / 1000, 2),
        "p90_us": round(nanoseconds[len(nanoseconds) * 9 // 10] / 1000, 2),
        "calls": len(nanoseconds),
    }


def subjects(torch) -> dict:
    """Name -> function that returns the callable. ``torch`` is the module or None."""
    attention = cuflash.attention
    import cupy

    def with_options(framework, **options):
        arrays = make_arrays(TINY, framework)
        return lambda: attention(arrays.q, arrays.k, arrays.v, **options)

    def into_out(framework):
        arrays = make_arrays(TINY, framework)
        out = make_arrays(TINY, framework).q
        return lambda: attention(arrays.q, arrays.k, arrays.v, out=out)

    def decode_into_out(framework):
        """Nothing is allocated."""
        arrays, spare = make_arrays(TINY_DECODE, framework), make_arrays(TINY_DECODE, framework)
        options = {**arrays.given, "out": spare.q}
        size = cuflash.kvcache_workspace_bytes(arrays.q, arrays.k, arrays.v, **arrays.given)
        xp = torch if framework == "torch" else cupy
        options["workspace"] = xp.empty(size, dtype=xp.uint8, **({"device": "cuda"} if xp is torch else {}))
        return lambda: cuflash.attention_with_kvcache(arrays.q, arrays.k, arrays.v, **options)

    def contender(name, case, framework, **changes):
        case = replace(case, **changes)
        return peers.make(name, case, make_arrays(case, framework))

    def numpy_call():
        arrays = make_arrays(TINY, "numpy")
        return lambda: attention(arrays.q, arrays.k, arrays.v)

    def raw_kernel():
        kernel = cupy.RawKernel('extern "C" __global__ void nothing(float* x) {}', "nothing")
        arguments = (cupy.empty(1, cupy.float32),)
        return lambda: kernel((1,), (32,), arguments)

    def cupy_empty():
        shape = TINY.shapes[0]
        return lambda: cupy.empty(shape, cupy.float16)

    found = {}
    for framework in ("cupy", "torch") if torch else ("cupy",):
        found |= {
            f"attention, {framework}": lambda f=framework: with_options(f),
            f"attention, {framework}, causal": lambda f=framework: with_options(f, causal=True),
            f"attention, {framework}, return_lse": lambda f=framework: with_options(f, return_lse=True),
            f"attention, {framework}, out=": lambda f=framework: into_out(f),
            f"attention, {framework}, window": lambda f=framework: with_options(f, window=(32, 0)),
            f"attention_varlen, {framework}": lambda f=framework: contender("cuflash", TINY_PACKED, f),
            f"attention_with_kvcache, {framework}": lambda f=framework: contender("cuflash", TINY_DECODE, f),
            f"attention_with_kvcache, {framework}, pages, k, v": lambda f=framework: contender("cuflash", TINY_PAGED, f),
            f"attention_with_kvcache, {framework}, out=, workspace=": lambda f=framework: decode_into_out(f),
        }
        for name, case in (("attention_backward", TINY), ("attention_varlen_backward", TINY_PACKED)):
            for variant, end in (("cuflash", ""), ("cuflash-deterministic", ", deterministic")):
                found[f"{name}, {framework}{end}"] = functools.partial(contender, variant, case, framework, backward=True)
    found |= {
        "RawKernel launch": raw_kernel,
        "cupy.empty": cupy_empty,
        "attention, numpy (computes)": numpy_call,
    }
    if torch is None:
        return found

    def sdpa():
        arrays = make_arrays(TINY, "torch")
        q, k, v = (x.transpose(1, 2) for x in (arrays.q, arrays.k, arrays.v))
        function = torch.nn.functional.scaled_dot_product_attention
        return lambda: function(q, k, v)

    def sdpa_step():
        arrays = make_arrays(TINY, "torch")
        leaves = [x.transpose(1, 2).requires_grad_() for x in (arrays.q, arrays.k, arrays.v)]
        dout = torch.randn_like(leaves[0])
        return lambda: torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*leaves), leaves, dout)

    def torch_empty():
        q = make_arrays(TINY, "torch").q
        shape, dtype, device = q.shape, q.dtype, q.device
        return lambda: torch.empty(shape, dtype=dtype, device=device)

    found |= of_cuflash_torch(torch)
    return found | {
        "torch SDPA flash": sdpa,
        "torch SDPA, forward and backward": sdpa_step,
        "torch flash backward, operator": lambda: contender("sdpa_flash", TINY, "torch", backward=True),
        "torch flash varlen, operator": lambda: contender("sdpa_flash", TINY_PACKED, "torch"),
        "torch.empty": torch_empty,
        "FA3, torch": lambda: contender("fa3", TINY, "torch"),
        "FA3 varlen, torch": lambda: contender("fa3", TINY_PACKED, "torch"),
        "FA3 with_kvcache, torch": lambda: contender("fa3", TINY_DECODE, "torch"),
        "FA3 with_kvcache, torch, pages, k, v": lambda: contender("fa3", TINY_PAGED, "torch"),
    }


def of_cuflash_torch(torch) -> dict:
    """As subjects, of what models call: without gradients, recording them, and compiled, one call, several in a row, and beside
    the rest of a transformer's block; the same of PyTorch's own attention; and one addition, which anything compiled costs."""
    import cuflash.torch as flash

    def plain(function, case, wants_grad=False):
        arrays = make_arrays(case, "torch")
        given = [x.requires_grad_(wants_grad) for x in (arrays.q, arrays.k, arrays.v)]
        ends = () if arrays.starts is None else (arrays.starts, arrays.starts)
        return lambda: function(*given, *ends)

    def step():
        arrays = make_arrays(TINY, "torch")
        leaves = [x.requires_grad_() for x in (arrays.q, arrays.k, arrays.v)]
        dout = torch.randn_like(arrays.q)
        return lambda: torch.autograd.grad(flash.attention(*leaves), leaves, dout)

    def on_cache():
        arrays = make_arrays(TINY_DECODE, "torch")
        return lambda: flash.attention_with_kvcache(arrays.q, arrays.k, arrays.v, **arrays.given)

    def block_by(attend):
        """A norm, projections to q, k and v, attention, and the projection of its results, of 64 tokens."""
        q = make_arrays(TINY, "torch").q
        width = TINY.heads_q * TINY.head_dim
        like = {"dtype": q.dtype, "device": q.device}
        norm = torch.nn.LayerNorm(width, **like).requires_grad_(False)
        into, onto = (torch.nn.Linear(width, n * width, bias=False, **like).requires_grad_(False) for n in (3, 1))
        x = q.flatten(2)

        def run(x):
            q, k, v = into(norm(x)).unflatten(-1, (3, TINY.heads_q, TINY.head_dim)).unbind(2)
            return x + onto(attend(q, k, v).flatten(2))

        return run, (x,)

    def one_of(attend):
        arrays = make_arrays(TINY, "torch")
        return attend, (arrays.q, arrays.k, arrays.v)

    def row_of(attend):
        def run(q, k, v):
            for _ in range(CALLS_IN_A_ROW):
                q = attend(q, k, v)
            return q

        return run, one_of(attend)[1]

    def called(make, attend, **options):
        run, given = make(attend)
        run = torch.compile(run, fullgraph=True, **options) if options else run
        return lambda: run(*given)

    def sdpa(q, k, v):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)

    found = {
        "cuflash.torch.attention": lambda: plain(flash.attention, TINY),
        "cuflash.torch.attention_varlen": lambda: plain(flash.attention_varlen, TINY_PACKED),
        "cuflash.torch.attention_with_kvcache": on_cache,
        "cuflash.torch.attention, recorded": lambda: plain(flash.attention, TINY, wants_grad=True),
        "cuflash.torch.attention, forward and backward": step,
    }
    default, graphs = {"mode": "default"}, {"mode": "reduce-overhead"}
    for name, make, attend in (
        ("cuflash.torch.attention", one_of, flash.attention),
        (ROW, row_of, flash.attention),
        (BLOCK.format("cuflash"), block_by, flash.attention),
        (ADDITION, one_of, lambda q, k, v: q + k),
        (SDPA, one_of, sdpa),
        (f"{SDPA}, {CALLS_IN_A_ROW} in a row", row_of, sdpa),
        (BLOCK.format("SDPA"), block_by, sdpa),
    ):
        variants = {"": {}, ", compiled": default} | ({} if make is one_of else {", compiled, CUDA graphs": graphs})
        for end, options in variants.items():
            found.setdefault(name + end, functools.partial(called, make, attend, **options))
    return found


def repeated_calls(device_id: int, calls: int, say, rows: str = "") -> dict:
    """Host times of all subjects in whose names ``rows`` is found. One that fails has its reason. They are measured in turns,
    since a host gets faster and slower by itself."""
    torch = _torch()
    chosen = {name: prepare for name, prepare in subjects(torch).items() if re.search(rows, name)}
    results, ready, samples = dict.fromkeys(chosen), {}, {name: [] for name in chosen}
    with shared_stream(device_id, torch) as stream:
        for turn in range(1 + ROUNDS):
            for name, prepare in chosen.items():
                if results[name]:
                    continue
                try:
                    with _backend_of(name):
                        if turn == 0:
                            ready[name] = prepare()
                            warm_up(ready[name], stream.synchronize)
                            continue
                        few = (calls if "numpy" not in name else min(calls, 300)) // ROUNDS
                        every = 20 if "in a row" in name else 50  # of launches a thousand fit into the queue
                        samples[name] += sample(ready[name], few, stream.synchronize, every)
                except peers.Unavailable as error:
                    results[name] = {"unavailable": str(error)}
                except Exception as error:
                    results[name] = {"failed": peers.one_line(error)}
    results = {name: results[name] or figures(samples[name]) for name in chosen}
    for name, result in results.items():
        say(_line(name, result, results))
    return results


def _backend_of(name: str):
    """Where a backend is asked for it is chosen outside: choosing it takes longer than the call."""
    if name != "torch SDPA flash":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    return sdpa_kernel(SDPBackend.FLASH_ATTENTION)


def _torch():
    try:
        import torch

        return torch if torch.cuda.is_available() else None
    except Exception:
        return None


def _line(name: str, result: dict, beside: dict | None = None) -> str:
    """``beside``: the results that there are, of which some are asked for by the difference to another."""
    if "median_us" not in result:
        return f"{name:60} {result.get('unavailable') or 'FAILED: ' + result['failed']}"
    verdict, targets = "", {"attention": TARGET_CALL_US, "attention_with_kvcache": TARGET_DECODE_US}
    target = targets.get(name.partition(",")[0])
    if target and "numpy" not in name:  # of the others nothing is asked
        verdict = f"   {'ok' if result['median_us'] <= target else 'OVER'}: at most {target:.0f} asked"
    other, more = TARGETS_BESIDE_US.get(name, (None, 0.0))
    if other in (beside or {}) and "median_us" in beside[other]:
        target = beside[other]["median_us"] + more
        verdict = (
            f"   {'ok' if result['median_us'] <= target else 'OVER'}: at most {target:.2f} asked, that of {other} + {more:.0f}"
        )
    return f"{name:60} {result['median_us']:8.2f} us   (10% {result['p10_us']:.2f}, 90% {result['p90_us']:.2f}){verdict}"


# ------------------------------------------------------------------------------------------------------------
# First calls

# dtype, head_dim, causal: tensor cores at the head_dims of the suites, and plain FMA.
VARIANTS = (
    ("bfloat16", 64, False),
    ("bfloat16", 128, True),
    ("bfloat16", 256, False),
    ("float32", 128, True),
    ("float64", 64, False),
)

# Runs in a process of its own. Imports, context and the copy of the inputs come first and are timed apart.
_CHILD = """
import json, sys, time
clock = time.perf_counter
start = clock()
import numpy, cupy, ml_dtypes
report = {"import_cupy_s": clock() - start}
start = clock()
import cuflash
from cuflash import jit
report["import_cuflash_s"] = clock() - start
device_id, variants = json.loads(sys.argv[1])
cupy.cuda.Device(device_id).use()
start = clock()
cupy.empty(1, numpy.uint8)
cupy.cuda.runtime.deviceSynchronize()
report["context_s"] = clock() - start

spent = {}
def timed(name):
    inner = getattr(jit, name)
    def outer(*arguments, **options):
        start = clock()
        try:
            return inner(*arguments, **options)
        finally:
            spent[name] = spent.get(name, 0.0) + clock() - start
    setattr(jit, name, outer)
for name in ("nvrtc_version", "build", "load"):
    timed(name)

def call(dtype, head_dim, causal, seqlen):
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    rng = numpy.random.default_rng(seqlen)
    def normal():
        return rng.standard_normal((1, seqlen, 8, head_dim), numpy.float32).astype(kind)
    q, k, v = (cupy.asarray(normal()) for _ in range(3))
    stream = cupy.cuda.get_current_stream()
    stream.synchronize()
    spent.clear()
    compiled = jit.compile_count()
    start = clock()
    out = cuflash.attention(q, k, v, causal=causal)
    host = clock() - start
    stream.synchronize()
    whole = clock() - start
    return {"call_s": whole, "host_s": host, "compiles": jit.compile_count() - compiled,
            **{name + "_s": seconds for name, seconds in spent.items()}}

report["variants"] = []
for dtype, head_dim, causal in variants:
    entry = {"dtype": dtype, "head_dim": head_dim, "causal": causal}
    try:
        entry["first"] = call(dtype, head_dim, causal, 64)
        entry["again"] = call(dtype, head_dim, causal, 64)
        entry["new_shape"] = call(dtype, head_dim, causal, 96)
    except Exception as error:
        entry["failed"] = " ".join(str(error).split())[:300]
    report["variants"].append(entry)
print("REPORT " + json.dumps(report))
"""


def child(folder: str, device_id: int, variants, timeout: float = 240) -> dict:
    """The report of a new process whose compiled kernels are in ``folder``; else {"failed": why}."""
    root = str(Path(cuflash.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, json.dumps([device_id, list(variants)])],
            text=True,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": path, "CUFLASH_CACHE_DIR": folder},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {timeout:.0f} s"}
    for line in done.stdout.splitlines():
        if line.startswith("REPORT "):
            return json.loads(line.removeprefix("REPORT "))
    return {"failed": peers.one_line(done.stderr[-600:] or f"exit status {done.returncode}", 600)}


def first_calls(device_id: int, say, variants=VARIANTS) -> dict:
    """Reports of three processes: nothing compiled, all compiled, and all compiled once more."""
    results = {}
    with tempfile.TemporaryDirectory(prefix="cuflash-overhead-") as folder:
        for name in ("empty folder", "full folder", "full folder again"):
            results[name] = report = child(folder, device_id, variants)
            if "failed" in report:
                say(f"{name}: FAILED: {report['failed']}")
                continue
            say(
                f"{name}: import CuPy {report['import_cupy_s']:.2f} s, import cuflash "
                f"{report['import_cuflash_s'] * 1000:.1f} ms, CUDA context {report['context_s']:.2f} s; then"
            )
            for entry in report["variants"]:
                say("  " + _first_line(entry))
    return results


def _first_line(entry: dict) -> str:
    name = f"{entry['dtype']} d{entry['head_dim']} {'causal' if entry['causal'] else 'full'}"
    if "failed" in entry:
        return f"{name:24} FAILED: {entry['failed']}"
    first = entry["first"]
    seconds, compiled = first["call_s"], first["compiles"] > 0
    ok = seconds <= TARGET_FIRST_S if compiled else seconds * 1000 <= TARGET_WARM_MS
    asked = f"{TARGET_FIRST_S:.0f} s" if compiled else f"{TARGET_WARM_MS:.0f} ms"
    parts = ", ".join(
        f"{part} {first.get(key, 0) * 1000:.1f}"
        for part, key in (("NVRTC library", "nvrtc_version_s"), ("build", "build_s"), ("load", "load_s"))
    )
    new_shape, again = (entry[call]["host_s"] * 1e6 for call in ("new_shape", "again"))
    return (
        f"{name:24} first call {seconds * 1000:8.1f} ms ({parts}; {first['compiles']} compiled)   "
        f"{'ok' if ok else 'OVER'}: at most {asked} asked; new shape {new_shape:.0f} us, again {again:.0f} us"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--calls", type=click.IntRange(100), default=2000, show_default=True, help="Timed calls of each kind.")
@click.option("--only", type=click.Choice(["calls", "first"]), help="Only repeated calls, or only first calls.")
@click.option("--rows", default="", help="A regular expression: repeated calls in whose names it is found, by default all.")
@click.option("--device", type=DeviceType(), default="0", show_default=True, help="Index of a GPU.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the record goes.")
def main(calls, only, rows, device, path):
    """Measure the host's cost of a call, and of first calls."""
    device_id = device_or_fail(device)
    if device_id is None:
        raise click.UsageError("--device must be a GPU: nothing is launched on a CPU")
    try:
        re.compile(rows)
    except re.error as error:
        raise click.BadParameter(f"{rows!r} is no regular expression: {error}", param_hint="--rows") from error
    result = {
        "kind": "overhead",
        "environment": record.environment(device_id),
        "problem": TINY.name,
        "targets": {
            "call_us": TARGET_CALL_US,
            "decode_us": TARGET_DECODE_US,
            "beside_us": TARGETS_BESIDE_US,
            "first_use_s": TARGET_FIRST_S,
            "full_folder_ms": TARGET_WARM_MS,
        },
    }
    click.echo(record.headline(result["environment"]))
    if only != "first":
        result["calls"] = repeated_calls(device_id, calls, click.echo, rows)
    if only != "calls":
        result["first_calls"] = first_calls(device_id, click.echo)
    result["environment"] = record.environment(device_id)  # now with torch's cuDNN
    if path:
        record.write(path, result)
        click.echo(f"record: {path}")


if __name__ == "__main__":
    main()
