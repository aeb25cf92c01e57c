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
    "fa3": "FA3",
    "fa4": "FA4",
    "flashinfer": "FlashInfer",
    "cuflash-deterministic": "deterministic",
    "cuflash-dense": "dense",
}


def _lines(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _speed(entry: dict, wall: bool) -> str:
    if not wall:
        return f"{entry['tflops']:.{0 if entry['tflops'] >= 100 else 1}f}"
    queued = entry.get("queued", {}).get("median_s")
    return f"{entry['median_s'] * 1e3:.3f}" + (f" / {queued * 1e3:.3f}" if queued else "")


def speed_table(record: dict, keep) -> list[str]:
    """One row a case: TFLOP/s (ms a call one at a time / queued, where the host counts) of all who were measured, and
    in brackets the speed of cuflash over them.
    """
    cases = [one for one in record["cases"] if keep(one["name"])]
    main, *others = record["contenders"]
    others = [name for name in others if any("median_s" in one["results"].get(name, {}) for one in cases)]
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
        rows.append(cells)
    return _lines(["case", main, *(TITLES.get(name, name) for name in others)], rows)


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


def markdown(record: dict, keep=lambda name: True) -> list[str]:
    """All tables of a record. Raises ValueError if it is of a kind that has none."""
    if record["kind"] == "bench":
        return speed_table(record, keep)
    if record["kind"] == "memory":
        lines = ["Forward:", "", *memory_table(record["table"], keep)]
        if "backward_table" in record:
            lines += ["", "Backward (memory of forward and backward):", "", *memory_table(record["backward_table"], keep)]
        return lines
    raise ValueError(f"a record of kind {record['kind']} has no table")


def source(path: str, record: dict) -> str:
    """Where the figures are from."""
    environment = record["environment"]
    device = environment.get("gpu") or environment.get("cpu")
    driver = f", driver {environment['driver']}" if environment.get("driver") else ""
    return f"{path}: {device}{driver}, kernels {environment['kernels_digest']}, {environment['date'][:10]}"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("paths", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--seqlen", "seqlens", type=int, multiple=True, help="Only these. Repeat for several.")
@click.option("--causal/--full", default=None, help="Only with, or only without a causal mask.")
def main(paths, seqlens, causal):
    """Print the tables of records."""

    def keep(name):
        words = name.split()
        return (not seqlens or any(f"s{seqlen}" in words for seqlen in seqlens)) and causal in (None, "causal" in words)

    for path in paths:
        record = json.loads(Path(path).read_text())
        try:
            lines = markdown(record, keep)
        except (KeyError, ValueError) as error:
            raise click.ClickException(f"{path}: {error}") from None
        click.echo("\n".join([source(path, record), "", *lines, ""]))


if __name__ == "__main__":
    main()
