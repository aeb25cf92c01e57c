"""The peers' own test suites on cuflash, sampled, from copies of theirs that are no part of this project.

    git clone https://github.com/Dao-AILab/flash-attention
    git clone --depth 1 --branch v2.11.0 https://github.com/pytorch/pytorch
    python -m tests.peer_suites.run --flash-attention flash-attention --torch pytorch \\
        --json bench/results/peer_suites_h200.json

Names under which the suites import their own packages are those of the folder shims, which calls cuflash. Needs PyTorch, einops
and pytest; GPU memory for the references too, about 5 GiB a worker.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import click

from bench import record
from bench.run import DeviceType, device_or_fail

from .suites import SUITES

ROOT = Path(__file__).parents[2]
SHIMS = Path(__file__).parent / "shims"


def run_suite(suite, checkout: Path, count: int, workers: int, seconds: int, limit: int, capability: str | None) -> dict:
    """What came of the cases of one suite. ``capability`` None: on the CPU."""
    with tempfile.TemporaryDirectory(prefix="cuflash-peers-") as folder:
        on_cpu = capability is None
        settings = {"suite": suite.name, "count": count, "report": folder, "seconds": seconds, "cpu": on_cpu}
        settings |= {"workers": workers if suite.forks else 1, "share": None}
        settings["capability"] = [9, 0] if on_cpu else [int(part) for part in capability.split(".")]
        # FlashAttention 3's suite imports helpers that lie beside it, its folder being a package; ours come first.
        paths = [str(SHIMS), str(ROOT), os.environ.get("PYTHONPATH"), str(suite.file(checkout).resolve().parent)]
        environment = os.environ | suite.environment
        environment |= {
            "CUFLASH_PEER_CHECKOUT": str(checkout.resolve()),
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whether there is a GPU is found out without using it
            "OMP_NUM_THREADS": "1",  # there is a process a core
        }
        command = [
            *(sys.executable, "-m", "pytest", "-p", "tests.peer_suites.plugin", "-c", os.devnull, "--noconftest"),
            *("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:benchmark", "-p", "no:hypothesispytest"),
            *("-q", "--tb=short", "--no-header", "--disable-warnings", "--capture=no"),
            *("--rootdir", str(suite.file(checkout).parent), str(suite.file(checkout))),
        ]
        started = time.time()
        shares = [None] if suite.forks else [[number, workers] for number in range(workers)]

        def run(share):
            one = environment | {"CUFLASH_PEER_SUITE": json.dumps(settings | {"share": share})}
            printed, code = _run(command, one, limit)
            if share and code not in (0, 1, None):
                (Path(folder) / f"died-{share[0]}.json").write_text(json.dumps({"code": code}))
            return f"pytest ended with {code}: {printed[-3000:]}"

        with concurrent.futures.ThreadPoolExecutor(len(shares)) as pool:
            endings = list(pool.map(run, shares))
        return summary(suite.name, Path(folder), started, limit, endings[0])


def summary(name: str, folder: Path, started: float, limit: int, ending: str) -> dict:
    """What the processes of a run have left in their folder."""
    if not (folder / "counts.json").exists():
        raise click.ClickException(f"{name}: no case was found: {ending}")
    counts = json.loads((folder / "counts.json").read_text())
    total, chosen = counts.pop("cases", 0), counts.pop("chosen")
    cases = {}
    for path in folder.glob("cases-*.json"):
        cases |= json.loads(path.read_text())
    died = len(list(folder.glob("died-*.json")))
    failed = [{"case": name, "error": one["why"]} for name, one in cases.items() if one["outcome"] == "failed"]
    unfinished = [name for name, one in cases.items() if one["outcome"] == "unfinished"]
    if died:
        failed += [{"case": name, "error": "the process died"} for name in unfinished]
    if rest := chosen - len(cases) + (0 if died else len(unfinished)):
        failed.append({"case": f"{rest} cases", "error": f"not run within {limit} s, or {ending}"})

    def reasons(outcome):
        return dict(Counter(one["why"] for one in cases.values() if one["outcome"] == outcome))

    slowest = sorted(cases.items(), key=lambda case: -case[1]["seconds"])[:10]
    return {
        "cases": total,
        "run": len(cases) - len(unfinished),
        "passed": sum(one["outcome"] == "passed" for one in cases.values()),
        "failed": failed,
        "skipped": reasons("skipped"),
        "left_out": reasons("left_out"),
        "left_out_by_name": {key.removeprefix("left out: "): number for key, number in counts.items()},
        "without_memory_at_first": sum("tried_again" in one for one in cases.values()),
        "seconds": round(time.time() - started, 1),
        "seconds_to_first_case": round(min((one["began"] for one in cases.values()), default=time.time()) - started, 1),
        "seconds_of_cases": round(sum(one["seconds"] for one in cases.values()), 1),
        "slowest": {name: round(one["seconds"], 2) for name, one in slowest},
    }


def _run(command: list[str], environment: dict, limit: int) -> tuple[str, int]:
    """(what it printed, its exit code). It and all that it started are ended after ``limit`` seconds: None as its code."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return f"{process.communicate()[0]}\nended after {limit} s", None
    return printed, process.returncode


def version_of(checkout: Path) -> str | None:
    """The commit of a checkout, if it is one or a file COMMIT says so."""
    named = checkout / "COMMIT" if checkout.is_dir() else checkout.with_name("COMMIT")
    if named.is_file():
        return named.read_text().strip()
    folder = checkout if checkout.is_dir() else checkout.parent
    found = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def line_of(name: str, result: dict) -> str:
    skipped, left_out = sum(result["skipped"].values()), sum(result["left_out"].values())
    return (
        f"{name}: {result['passed']} passed, {len(result['failed'])} failed, {skipped} skipped by the suite, {left_out} left "
        f"out, of {result['run']} run of {result['cases']}; {result['seconds']} s, {result['seconds_to_first_case']} to the first"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--flash-attention", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A checkout of it.")
@click.option("--torch", type=click.Path(exists=True, path_type=Path), help="A checkout of PyTorch, or its test_transformers.py.")
@click.option("--suite", "names", type=click.Choice(list(SUITES)), multiple=True, help="Only this one. Repeat for several.")
@click.option("--fraction", type=click.FloatRange(0, 1, min_open=True), default=1.0, show_default=True, help="Of each sample.")
@click.option("--workers", type=click.IntRange(1), help="Processes a suite; none is said: as suits the suite.")
@click.option("--seconds", type=click.IntRange(1), default=60, show_default=True, help="What a case may take.")
@click.option("--limit", type=click.IntRange(1), default=1800, show_default=True, help="Seconds that a suite may take.")
@click.option("--device", type=DeviceType(), default="0", show_default=True, help="0, or cpu for a rehearsal without a GPU.")
@click.option("--json", "path", type=click.Path(dir_okay=False), help="Where the record goes.")
def main(flash_attention, torch, names, fraction, workers, seconds, limit, device, path):
    """Run sampled test suites of FlashAttention 2, 3 and 4 and of PyTorch on cuflash."""
    checkouts = {"flash_attention": flash_attention, "torch": torch}
    wanted = [SUITES[name] for name in names or SUITES if checkouts[SUITES[name].checkout] or names]
    if not wanted:
        raise click.UsageError("none of --flash-attention and --torch is given: nothing to run")
    if missing := [suite.checkout.replace("_", "-") for suite in wanted if not checkouts[suite.checkout]]:
        raise click.UsageError(f"--{missing[0]} must be given")
    device_id = device_or_fail(device)
    result = {"kind": "peer_suites", "environment": record.environment(device_id), "fraction": fraction, "suites": {}}
    click.echo(record.headline(result["environment"]))

    capability = result["environment"].get("compute_capability")

    def outcome(suite):
        checkout = checkouts[suite.checkout]
        count = suite.count if fraction == 1 else max(1, round(suite.count * fraction))
        one = run_suite(suite, checkout, count, workers or suite.workers, seconds, limit, capability)
        return suite.name, {"of": suite.path, "commit": version_of(checkout)} | one

    # Beside one another: each spends seconds on imports, and there is a kernel to compile for every other case.
    without = None
    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as pool:
        for future in [pool.submit(outcome, suite) for suite in wanted]:
            try:
                name, one = future.result()
            except click.ClickException as error:  # what the others found is kept
                without = error
                continue
            result["suites"][name] = one
            click.echo(line_of(name, one))
            for failure in one["failed"]:
                click.echo(f"  FAILED {failure['case']}: {failure['error']}")
    if path and result["suites"]:
        record.write(path, result)
    if without:
        raise without
    raise SystemExit(1 if any(one["failed"] for one in result["suites"].values()) else 0)


if __name__ == "__main__":
    main()
