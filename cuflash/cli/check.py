"""``cuflash check``: every case, dtype and tier against the float64 oracle, on a GPU or the NumPy path."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from typing import NamedTuple

import click

from .. import config, jit
from ..problem import DTYPES
from . import builds, environment, trial
from .case import Case
from .cases import CASES
from .options import device_option, json_option, one_line, to_stdout, write_json


class Job(NamedTuple):
    case: Case
    dtype: str
    tier: str


@click.command()
@click.option(
    "--quick",
    is_flag=True,
    help="Only the cases that find most: a few seconds once the kernels are compiled.",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    type=click.Choice(config.TIERS),
    help="Only this tier; may be repeated. All that take a case by default.",
)
@click.option(
    "--dtype", "dtypes", multiple=True, type=click.Choice(DTYPES), help="Only this dtype; may be repeated."
)
@click.option(
    "--case",
    "words",
    multiple=True,
    metavar="TEXT",
    help="Only cases with TEXT in their name; may be repeated.",
)
@device_option
@json_option
@click.pass_context
def check(ctx, quick, tiers, dtypes, words, device, json_file):
    """Prove that attention, its gradients and decoding are right on this machine.

    On its GPU, or without one on the NumPy path: the first line says which. Each case is computed in each
    dtype on each tier that takes it, and held against float64: its largest and RMS error must keep to the
    budget, twice the error of unfused attention in the same dtype plus what one rounding may cost. Results
    hold NaN before the call and lie between guard bytes, inputs lie between NaN, a second run must give the
    same bits (of dq where the case is deterministic), and so must packed arrays where the layout is another.
    A cache must hold afterwards what it held, and what was appended; what is unused of it is NaN.
    Of three gradients a line shows the one that is nearest to its budget.

    The exit status is 0 only if every case holds.
    """
    start = time.perf_counter()
    gpu, reason = _gpu(device)
    if gpu is None and tiers:
        raise click.UsageError(f"--tier {tiers[0]} needs a GPU; there is none: {reason}")
    if gpu is not None:
        environment.arch_for(environment.device_of(gpu))  # ends here where NVRTC is missing or too new
    record = environment.record(gpu)
    headline = f"no GPU: {reason}; checking the NumPy path" if gpu is None else environment.headline(record)
    err = to_stdout(json_file)  # then all that is for people goes to standard error
    click.echo(headline, err=err)

    cases, dtypes, tiers = _cases(quick, words), dtypes or DTYPES, tiers or config.TIERS
    jobs = _plan(cases, dtypes, tiers, gpu)
    if not jobs:
        raise click.ClickException(f"no case is left: {_why_none(cases, dtypes, tiers, gpu)}")
    rows = _run(jobs, gpu, err)
    failed = [row for row in rows if not row.ok]
    seconds = round(time.perf_counter() - start, 2)
    click.echo("\n" + _summary(rows, failed, seconds), err=err)
    if json_file:
        counts = {"checks": len(rows), "failed": len(failed), "seconds": seconds, "quick": quick}
        result = {
            "environment": record,
            "summary": {"ok": not failed, **counts},
            "rows": [dataclasses.asdict(row) for row in rows],
        }
        write_json(result, json_file)
    ctx.exit(1 if failed else 0)


def _cases(quick: bool, words) -> list[Case]:
    cases = [case for case in CASES if case.quick or not quick]
    return [case for case in cases if not words or any(word in case.name for word in words)]


def _gpu(choice: int | str | None) -> tuple[int | None, str]:
    """(index, "") of the GPU to check, or (None, why none)."""
    if choice == "cpu":
        return None, "--device cpu leaves it out"
    found = environment.find_gpus()
    if found.unusable and choice is None:  # what holds on the CPU says nothing of a GPU that is there
        raise click.ClickException(f"{found.reason}; or check the NumPy path with --device cpu")
    return environment.pick_gpu(found, choice), found.reason


def _plan(cases, dtypes, tiers, gpu: int | None) -> list[Job]:
    """The jobs in the order of their rows: a tier that refuses a case has none for it."""
    if gpu is None:
        return [Job(case, dtype, "cpu") for case in cases for dtype in dtypes]
    device = environment.device_of(gpu)
    return [
        Job(case, dtype, tier)
        for case in cases
        for dtype in dtypes
        for tier in tiers
        if all(config.refusal(tier, problem, device) is None for problem in case.problems(dtype))
    ]


def _why_none(cases, dtypes, tiers, gpu: int | None) -> str:
    """Each reason once: they are those of many cases."""
    if not cases:
        return "no name has the text of --case"
    device = environment.device_of(gpu)
    reasons = (
        f"tier {tier}: {reason}"
        for tier, case, dtype in itertools.product(tiers, cases, dtypes)
        for problem in case.problems(dtype)
        if (reason := config.refusal(tier, problem, device)) is not None
    )
    return "; ".join(dict.fromkeys(reasons))


def _run(jobs: list[Job], gpu: int | None, err: bool) -> list[trial.Row]:
    rows = []
    with contextlib.nullcontext() if gpu is None else jit.import_cupy().cuda.Device(gpu):
        if gpu is not None:
            _compile(jobs, environment.device_of(gpu))
        click.echo("\n" + _HEADER, err=err)
        with builds.progress(len(jobs), "checking ") as bar:
            for job in jobs:
                rows.append(trial.run(*job, gpu))
                builds.print_above_bar(_line(rows[-1]), err)
                bar.update(1)
    return rows


def _compile(jobs: list[Job], device: config.Device) -> None:
    """Compile all variants at once, on all cores. One that does not compile fails again, in its row."""
    arch, variants = environment.arch_for(device), []
    for case, dtype, tier in jobs:
        for version in (case, case.packed_twin()) if case.has_packed_twin else (case,):
            for problem in version.problems(dtype):
                if not problem.is_empty:
                    variants += builds.variants_of(problem, config.choose(problem, device, tier), arch)
    try:
        builds.build_all(variants)
    except jit.NvrtcMissing as error:
        raise click.ClickException(one_line(error)) from None


# --------------------------------------------------------------------------------------------------- table

_NAME = max(len(case.name) for case in CASES)
_THREE = f"{'ours':>7} {'unfused':>7} {'budget':>7}"
_HEADER = (
    f"{'':<{_NAME}} {'':<8} {'':<4} {'':<3}  {'largest error':^23}  {'RMS error':^23}  {'lse':>7}\n"
    f"{'case':<{_NAME}} {'dtype':<8} tier of   {_THREE}  {_THREE}  {'error':>7}"
)


def _line(row: trial.Row) -> str:
    largest = _figures(row.max_err, row.ref_max_err, row.max_budget)
    rms = _figures(row.rms_err, row.ref_rms_err, row.rms_budget)
    verdict = "ok" if row.ok else f"FAIL: {row.why}"
    name = f"{row.case:<{_NAME}} {row.dtype:<8} {row.tier:<4} {row.of:<3}"
    return f"{name}  {largest}  {rms}  {_figures(row.lse_err)}  {verdict}"


def _figures(*values: float | None) -> str:
    return " ".join(f"{'-' if value is None else format(value, '.1e'):>7}" for value in values)


def _summary(rows: list[trial.Row], failed: list[trial.Row], seconds: float) -> str:
    cases, dtypes = len({row.case for row in rows}), len({row.dtype for row in rows})
    tiers = ", ".join(dict.fromkeys(row.tier for row in rows))
    what = f"{cases} case{'s' * (cases > 1)}, {dtypes} dtype{'s' * (dtypes > 1)}, {tiers}; {seconds:.1f} s"
    if not failed:
        return f"all {len(rows)} checks hold ({what})"
    faults = [f"  {row.case}, {row.dtype}, {row.tier}: {row.why}" for row in failed]
    return "\n".join([f"{len(failed)} of {len(rows)} checks FAILED ({what}):", *faults])
