"""Memory and time of attention with and without the score matrix, by sequence length.

    python -m bench.memory --json bench/results/memory_h200.json

Peak memory is what CuPy's pool grows by over a call, all of its free memory given back before; on the CPU
what tracemalloc, which NumPy reports to, sees at most. The inputs are not counted; the output is. Of a backward the
time is its own, and the memory that of forward and backward together: what the one keeps for the other is the point.
"""

from __future__ import annotations

import contextlib
import math
import tracemalloc
from dataclasses import replace

import click

import cuflash
from cuflash import jit
from cuflash.problem import ITEMSIZE

from . import peers, record
from .cases import TOLERANCE, Case, Truth, make_arrays
from .run import DeviceType, choice_of, device_or_fail
from .timing import CudaTimer, Timing, WallTimer, measure, shared_stream

_POOL_UNIT = 512  # CuPy's pool gives out whole units
_DEVICE_UNIT = 2**21  # and the driver nothing smaller

SEQLENS = (1024, 2048, 4096, 8192, 16384)


def table_case(seqlen: int, causal: bool = False, dtype: str = "float16", backward: bool = False) -> Case:
    return Case("memory", dtype, 1, seqlen, seqlen, 8, 8, 64, 64, causal, backward=backward)


def _units(count: int, itemsize: int) -> int:
    return -(-count * itemsize // _POOL_UNIT) * _POOL_UNIT


def expected_bytes(case: Case, return_lse: bool) -> int:
    """What a forward of cuflash may take: out, and lse if asked for, in units of the pool."""
    out = _units(math.prod(case.out_shape), ITEMSIZE[case.dtype])
    lse = _units(math.prod(case.out_shape[:-1]), _sum_size(case))
    return out + lse if return_lse else out


def expected_backward_bytes(case: Case, block_m: int | None) -> int:
    """What a backward of cuflash may take by its docstring: dq, dk and dv, and as scratch the sum of dq, two numbers for
    each row, a counter, and if it is deterministic, with query tiles of ``block_m``, whose turn it is at each of them.
    """
    heads = case.batch * case.heads_q
    gradients = sum(_units(math.prod(shape), ITEMSIZE[case.dtype]) for shape in case.shapes)
    group = 32 if max(case.head_dim, case.head_dim_v) <= 128 else 64
    padded_head_dim = -(-case.head_dim // group) * group
    padded_seqlen_q = -(-case.seqlen_q // 16) * 16
    scratch = (_units(heads * padded_seqlen_q * padded_head_dim, _sum_size(case))
               + _units(2 * heads * case.seqlen_q, _sum_size(case)))
    turns = 0 if block_m is None else heads * -(-case.seqlen_q // block_m)
    return gradients + scratch + _units(1 + turns, 4)


def _sum_size(case: Case) -> int:
    """Bytes of a number that is a sum."""
    return 8 if case.dtype == "float64" else 4


def pool_growth(call) -> int:
    """Bytes that CuPy's pool grows by over a call that has been made before."""
    cupy = jit.import_cupy()
    pool, stream = cupy.get_default_memory_pool(), cupy.cuda.get_current_stream()
    call()  # loads, compiles, makes handles and workspaces
    stream.synchronize()
    pool.free_all_blocks()
    before = pool.total_bytes()
    result = call()
    stream.synchronize()
    growth = pool.total_bytes() - before
    del result
    return growth


def device_growth(call) -> int:
    """Bytes of device memory that a call takes, in the pool or not, once the pool has what it needs."""
    cupy = jit.import_cupy()
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    del result
    before = cupy.cuda.runtime.memGetInfo()[0]
    result = call()
    cupy.cuda.runtime.deviceSynchronize()
    growth = before - cupy.cuda.runtime.memGetInfo()[0]
    del result
    return growth


def traced_growth(call) -> int:
    """Bytes of NumPy arrays that a call takes at most."""
    call()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        result = call()
        peak = tracemalloc.get_traced_memory()[1] - before
        del result
        return peak
    finally:
        tracemalloc.stop()


def outputs_only(case: Case, device_id: int, say) -> list[dict]:
    """cuflash alone: what a call takes against what it says it takes, in the pool and outside. A forward with lse and
    without; a backward as it is and deterministic.
    """
    jit.import_cupy().get_default_memory_pool().free_all_blocks()
    arrays = make_arrays(case, "cupy")
    return [_checked(case, arrays, device_id, variant, say) for variant in (False, True)]


def _checked(case: Case, arrays, device_id: int, variant: bool, say) -> dict:
    what = "return_lse" if not case.backward else "deterministic"
    row = {"case": case.name, "dtype": case.dtype, what: variant, "scores_bytes": _scores(case)}
    try:
        if case.backward:
            name = "cuflash-deterministic" if variant else "cuflash"
            _, chosen = choice_of(case, name, device_id)
            row["expected_bytes"] = expected_backward_bytes(case, chosen.block_m if variant else None)
            call = peers.make(name, case, arrays)
        else:
            row["expected_bytes"] = expected_bytes(case, variant)

            def call():
                return cuflash.attention(arrays.q, arrays.k, arrays.v, return_lse=variant, **case.options)

        row |= {"pool_growth_bytes": pool_growth(call), "device_growth_bytes": device_growth(call)}
        row["ok"] = row["pool_growth_bytes"] <= row["expected_bytes"] and row["device_growth_bytes"] < _DEVICE_UNIT
        say(
            f"{case.name} {case.dtype}{f', {what}' if variant else ''}: the pool grows by "
            f"{_mib(row['pool_growth_bytes'])}, expected {_mib(row['expected_bytes'])}; outside the "
            f"pool {_mib(row['device_growth_bytes'])}; scores would be {_mib(row['scores_bytes'])}   "
            f"{'ok' if row['ok'] else 'OVER'}"
        )
    except Exception as error:
        row |= {"failed": peers.one_line(error), "ok": False}
        say(f"{case.name}: FAILED: {row['failed']}")
    return row


def _scores(case: Case) -> int:
    return case.batch * case.heads_q * case.seqlen_q * case.seqlen_k * ITEMSIZE[case.dtype]


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"


def _whole(name: str, case: Case, arrays):
    """What the memory is measured of: the call itself, or with a backward all from q, k, v and dout to the gradients."""
    if not case.backward:
        return peers.make(name, case, arrays)
    if name != "unfused" or arrays.framework == "numpy":
        return lambda: peers.make(name, case, arrays)()
    unfused = peers.Unfused(case, arrays)  # the mask is an input

    def step():
        unfused.forward()
        gradients = unfused.backward()
        unfused.free()
        return gradients

    return step


def compare(case: Case, framework: str, timer, growth) -> dict:
    """Median seconds and peak bytes of cuflash and of unfused attention on a case."""
    row = {"case": case.name, "seqlen": case.seqlen_q, "dtype": case.dtype, "backward": case.backward, "results": {}}
    arrays = make_arrays(case, framework)
    truth = Truth(case, arrays)
    calls = {}
    for name in ("cuflash", "unfused"):
        entry = row["results"][name] = {}
        try:
            peak = growth(_whole(name, case, arrays))
            call = peers.make(name, case, arrays)
            error = truth.error(call())
            if not error <= TOLERANCE[case.dtype]:
                raise RuntimeError(f"wrong result: off by {error:.3g} from float64")
            entry |= {"max_error": float(f"{error:.3g}"), "peak_bytes": peak}
            calls[name] = call
        except Exception as error:  # Unavailable and out of memory included
            entry["failed"] = peers.one_line(error)
    for name, timing in measure(calls, timer).items():
        row["results"][name] |= (
            timing.record() if isinstance(timing, Timing) else {"failed": peers.one_line(timing)}
        )
    ours, theirs = row["results"]["cuflash"], row["results"]["unfused"]
    if "median_s" in ours and "median_s" in theirs:
        row["speed_over_unfused"] = round(theirs["median_s"] / ours["median_s"], 3)
        row["memory_of_unfused"] = round(theirs["peak_bytes"] / max(1, ours["peak_bytes"]), 2)
    return row


HEADER = (
    f"{'seqlen':>18}{'cuflash ms':>14}{'unfused ms':>14}{'speed':>9}{'cuflash MiB':>14}{'unfused MiB':>14}"
    f"{'memory':>10}"
)


def table_line(row: dict) -> str:
    """A row of the table that every article shows."""
    ours, theirs = row["results"]["cuflash"], row["results"]["unfused"]

    def cell(entry, key, factor, width):
        return f"{entry[key] * factor:{width}.3f}" if key in entry else f"{'-':>{width}}"

    speed, memory = row.get("speed_over_unfused"), row.get("memory_of_unfused")
    line = f"{row['seqlen']:>10}{' causal' if 'causal' in row['case'] else ' full':>8}"
    line += cell(ours, "median_s", 1e3, 14) + cell(theirs, "median_s", 1e3, 14)
    line += f"{speed:8.2f}x" if speed else f"{'-':>9}"
    line += cell(ours, "peak_bytes", 2**-20, 14) + cell(theirs, "peak_bytes", 2**-20, 14)
    line += f"{memory:9.1f}x" if memory else f"{'-':>10}"
    for name, entry in (("cuflash", ours), ("unfused", theirs)):
        if "failed" in entry:
            line += f"  {name}: {entry['failed']}"
    return line


def compare_all(seqlens, device_id: int | None, dtype: str, backward: bool, say) -> list[dict]:
    """The table for all sequence lengths, full and causal."""
    rows = []
    say(f"\n{'backward; memory of forward and backward' if backward else 'forward'}, {dtype}")
    say(HEADER)
    for seqlen in seqlens:
        for causal in (False, True):
            case = table_case(seqlen, causal, dtype, backward)
            if device_id is None:
                row = compare(case, "numpy", WallTimer(), traced_growth)
            else:
                jit.import_cupy().get_default_memory_pool().free_all_blocks()
                row = compare(case, "cupy", CudaTimer(monitor=record.monitor(device_id)), pool_growth)
            rows.append(row)
            say(table_line(row))
    return rows


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--seqlen", "seqlens", type=click.IntRange(1), multiple=True, help="Repeat for several.")
@click.option(
    "--long",
    "long_seqlen",
    type=click.IntRange(1),
    default=65536,
    show_default=True,
    help="Of the call whose memory is compared with its outputs.",
)
@click.option("--device", type=DeviceType(), default="0", show_default=True, help="Index of a GPU, or cpu.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the record goes.")
def main(seqlens, long_seqlen, device, path):
    """Measure peak memory and time of cuflash and of unfused attention, forward and backward."""
    device_id = device_or_fail(device)
    result = {"kind": "memory", "environment": record.environment(device_id), "long_seqlen": long_seqlen}
    click.echo(record.headline(result["environment"]))
    ok = True
    with contextlib.nullcontext() if device_id is None else shared_stream(device_id):
        if device_id is not None:
            forwards = (
                Case("memory", "bfloat16", 1, long_seqlen, long_seqlen, 1, 1, 64, 64),
                Case("memory", "float32", 2, 1000, 1000, 3, 3, 80, 80, causal=True),
            )
            result["outputs_only"] = [
                row
                for case in (*forwards, *(replace(case, backward=True) for case in forwards))
                for row in outputs_only(case, device_id, click.echo)
            ]
            ok = all(row["ok"] for row in result["outputs_only"])
        for key, backward in (("table", False), ("backward_table", True)):
            result[key] = compare_all(
                seqlens or (SEQLENS if device_id is not None else SEQLENS[:4]),
                device_id,
                "float32" if device_id is None else "float16",
                backward,
                click.echo,
            )
    if path:
        record.write(path, result)
        click.echo(f"record: {path}")
    rows = result["table"] + result["backward_table"]
    raise SystemExit(0 if ok and all("median_s" in row["results"]["cuflash"] for row in rows) else 1)


if __name__ == "__main__":
    main()
