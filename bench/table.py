"""Records as Markdown: the tables for a README, so that no figure is copied by hand.

    python -m bench.table bench/results/backward_h200.json bench/results/memory_h200.json --seqlen 2048
"""

from __future__ import annotations

import json
from pathlib import Path

import click

TITLES = {
    "sdpa_flash": "FA2 (torch)",
    "sdpa_cudnn": "cuDNN (torch)",
    "sdpa_efficient": "efficient (torch)",
    "sdpa_math": "math (torch)",
    "xla": "unfused (XLA)",
    "cudnn": "cuDNN (JAX)",
    "fa3": "FA3",
    "fa3_jax": "FA3 (JAX)",
    "fa4": "FA4",
    "flashinfer": "FlashInfer",
    "cuflash-deterministic": "deterministic",
    "cuflash-dense": "dense",
    "cuflash-mha": "as many key heads",
    "cuflash-causal": "without a window",
    "cuflash-bfloat16": "bfloat16",
    "cuflash-cupy": "through CuPy",
    "cuflash-contiguous": "contiguous",
    "cuflash-one-query": "one query",
    "cuflash-no-append": "nothing appended",
    "cuflash-uniform": "uniform",
}


def _lines(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _speed(entry: dict, wall: bool) -> str:
    if "tb_per_s" in entry:
        return f"{entry['tb_per_s']:.2f}"
    if not wall:
        return f"{entry['tflops']:.{0 if entry['tflops'] >= 100 else 1}f}"
    queued = entry.get("queued", {}).get("median_s")
    return f"{entry['median_s'] * 1e3:.3f}" + (f" / {queued * 1e3:.3f}" if queued else "")


def speed_table(record: dict, keep) -> list[str]:
    """One row a case: TFLOP/s (ms a call one at a time / queued, where the host counts) of all who were measured, and
    in brackets the speed of cuflash over them. Of decoding TB/s of keys and values; the share of the bound where one is
    asked for.
    """
    cases, main, others = _measured(record, keep)
    decodes = any("kv_bytes" in one for one in cases)
    bound = any(verdict["what"] == "share_of_bound" for one in cases for verdict in one.get("asked", ()))
    rows = []
    for one in cases:
        wall = any("queued" in entry for entry in one["results"].values())
        cells = [one["name"]]
        for name in (main, *others):
            entry = one["results"].get(name, {})
            over = one.get("speed_over", {}).get(name)
            cells.append(
                "" if "median_s" not in entry else _speed(entry, wall) + (f" ({over['ratio']:.2f}x)" if over else "")
            )
        if bound:
            entry = one["results"].get(main, {})
            cells.append(f"{entry['share_of_bound']:.0%} of {one['bound']['by']}" if "share_of_bound" in entry else "")
        rows.append(cells)
    heads = ["TB/s of keys and values" if decodes else "case", main, *(TITLES.get(name, name) for name in others)]
    return _lines(heads + ["of the bound"] * bound, rows)


def clock_table(record: dict, keep) -> list[str]:
    """One row a case of decoding that was timed by the host's clock too: microseconds of a call, one at a time / in a
    queue, and in brackets the speed of cuflash over both. No line if there is none.
    """
    cases, main, others = _measured(record, keep, "single")
    rows = []
    for one in cases:
        cells = [one["name"]]
        for name in (main, *others):
            times = [one["results"].get(name, {}).get(clock, {}).get("median_s") for clock in ("single", "queued")]
            over = one.get("speed_over", {}).get(name, {})
            ratios = [f"{over[clock]:.2f}x" for clock in ("single", "queued") if clock in over]
            text = " / ".join("" if seconds is None else f"{seconds * 1e6:.1f}" for seconds in times)
            cells.append("" if times == [None, None] else text + (f" ({' / '.join(ratios)})" if ratios else ""))
        rows.append(cells)
    heads = ["us a call, alone / queued", main, *(TITLES.get(name, name) for name in others)]
    return _lines(heads, rows) if rows else []


def _measured(record: dict, keep, clock: str = "median_s") -> tuple[list[dict], str, list[str]]:
    """(cases that are kept and in which someone has this figure, the first contender, the others that have it)."""
    main, *others = record["contenders"]
    cases = [one for one in record["cases"] if keep(one["name"])]
    if clock != "median_s":
        cases = [one for one in cases if any(clock in entry for entry in one["results"].values())]
    return cases, main, [name for name in others if any(clock in one["results"].get(name, {}) for one in cases)]


def memory_table(rows: list[dict], keep) -> list[str]:
    """Time and peak memory of cuflash and of unfused attention, by sequence length."""

    def of(row, name, key, factor):
        value = row["results"][name].get(key)
        return "" if value is None else f"{value * factor:.{3 if value * factor < 10 else 1}f}"

    def times(row, key):
        return f"{row[key]:.1f}x" if key in row else ""

    heads = ["seqlen", "cuflash, ms", "unfused, ms", "speed", "cuflash, MiB", "unfused, MiB", "memory"]
    cells = [
        [
            f"{row['seqlen']}{' causal' if 'causal' in row['case'] else ''}",
            of(row, "cuflash", "median_s", 1e3),
            of(row, "unfused", "median_s", 1e3),
            times(row, "speed_over_unfused"),
            of(row, "cuflash", "peak_bytes", 2**-20),
            of(row, "unfused", "peak_bytes", 2**-20),
            times(row, "memory_of_unfused"),
        ]
        for row in rows
        if keep(row["case"])
    ]
    return _lines(heads, cells)


def train_tables(record: dict) -> list[str]:
    """Training of each framework and length: tokens a second, a step, peak memory, and how far losses are from a reference's."""
    lines = []
    for framework, seqlen in dict.fromkeys((run["framework"], run["seqlen"]) for run in record["runs"]):
        here = [run for run in record["runs"] if (run["framework"], run["seqlen"]) == (framework, seqlen)]
        seed = min(run["seed"] for run in here)
        agreements = [one for one in record["agreements"] if (one["framework"], one["seqlen"]) == (framework, seqlen)]
        rows = []
        for run in here:
            if run["seed"] != seed:
                continue
            name = TITLES.get(run["backend"], run["backend"])
            if "failed" in run:
                rows.append([name, run["failed"], "", "", ""])
                continue
            apart = "; ".join(
                f"{one['mean_difference']:.4f} from {TITLES.get(one['reference'], one['reference'])}, {one['steps']} steps"
                for one in agreements
                if one["backend"] == run["backend"]
            )
            step, memory = f"{run['median_step_s'] * 1e3:.1f}", f"{run['peak_bytes'] / 2**30:.1f}"
            rows.append([name, f"{run['tokens_per_s'] / 1e3:.0f}k", step, memory, apart])
        spread = f", of two seeds {agreements[0]['spread_of_seeds']:.4f}" if agreements else ""
        heads = [f"{framework}, seqlen {seqlen}", "tokens/s", "ms a step", "GiB", f"losses apart{spread}"]
        lines += ["", *_lines(heads, rows)] if lines else _lines(heads, rows)
    return lines


def suites_table(record: dict) -> list[str]:
    """The peers' suites: what came of their cases."""
    rows = []
    for name, suite in record["suites"].items():
        counts = [suite["passed"], len(suite["failed"]), *(sum(suite[key].values()) for key in ("skipped", "left_out"))]
        rows.append([f"{name}: {suite['of']}", str(suite["run"]), *map(str, counts), str(suite["cases"])])
    return _lines(["suite", "run", "passed", "failed", "skipped by itself", "left out by cuflash", "of"], rows)


def markdown(record: dict, keep=lambda name: True) -> list[str]:
    """All tables of a record. Raises ValueError if it is of a kind that has none."""
    if record["kind"] == "bench":
        lines, by_the_clock = speed_table(record, keep), clock_table(record, keep)
        return [*lines, "", *by_the_clock] if by_the_clock else lines
    if record["kind"] == "memory":
        lines = ["Forward:", "", *memory_table(record["table"], keep)]
        if "backward_table" in record:
            lines += ["", "Backward (memory of forward and backward):", "", *memory_table(record["backward_table"], keep)]
        return lines
    if record["kind"] == "train":
        return train_tables(record)
    if record["kind"] == "peer_suites":
        return suites_table(record)
    raise ValueError(f"a record of kind {record['kind']} has no table")


def source(path: str, record: dict) -> str:
    """Where the figures are from."""
    environment = record["environment"]
    device = environment.get("gpu") or environment.get("cpu")
    driver = f", driver {environment['driver']}" if environment.get("driver") else ""
    return f"{path}: {device}{driver}, kernels {environment['kernels_digest']}, {environment['date'][:10]}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--seqlen", "seqlens", type=int, multiple=True, help="Only these, of queries or keys. Repeat for several.")
@click.option("--causal/--full", default=None, help="Only with, or only without a causal mask.")
def main(paths, seqlens, causal):
    """Print the tables of records."""

    def keep(name):
        words = name.split()
        lengths = [word[1:].split("/") for word in words if word.startswith("s")]  # of queries, and of keys where they differ
        has_length = not seqlens or any(str(seqlen) in length for seqlen in seqlens for length in lengths)
        return has_length and causal in (None, "causal" in words)

    for path in paths:
        record = json.loads(Path(path).read_text())
        try:
            lines = markdown(record, keep)
        except (KeyError, ValueError) as error:
            raise click.ClickException(f"{path}: {error}") from None
        click.echo("\n".join([source(path, record), "", *lines, ""]))


if __name__ == "__main__":
    main()
