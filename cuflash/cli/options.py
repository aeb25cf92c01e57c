"""Options that several commands share, and their types."""

from __future__ import annotations

import json
import math
import re

import click

from ..config import DEVICES


class Arch(click.ParamType):
    """An architecture of config.DEVICES. A suffix names instructions, not a GPU: sm_90a is sm_90."""

    name = "arch"

    def convert(self, value, param, ctx):
        match = re.fullmatch(r"sm_(\d+)[af]?", str(value))
        arch = f"sm_{match[1]}" if match else None
        if arch not in DEVICES:
            self.fail(f"{value!r} is not one of {', '.join(DEVICES)}", param, ctx)
        return arch


class DeviceChoice(click.ParamType):
    """A GPU by its index, or "cpu"."""

    name = "gpu"

    def convert(self, value, param, ctx):
        if value == "cpu" or isinstance(value, int):
            return value
        if not re.fullmatch(r"\d+", value):
            self.fail(f"{value!r} is neither the index of a GPU nor 'cpu'", param, ctx)
        return int(value)


class Window(click.ParamType):
    """Two sides, "128,0"; "none" (or -1) leaves a side open."""

    name = "left,right"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        sides = [side.strip().lower() for side in value.split(",")]
        if len(sides) != 2 or not all(re.fullmatch(r"none|-?\d+", side) for side in sides):
            self.fail(f"{value!r} is not LEFT,RIGHT: two integers, or none for an open side", param, ctx)
        return tuple(None if side == "none" else int(side) for side in sides)


class HeadDim(click.ParamType):
    """A head_dim, "128", or one of q and k with another of v, "192/128"; converted to a pair."""

    name = "head-dim"

    def convert(self, value, param, ctx):
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d+)(?:/(\d+))?", str(value))
        if not match:
            self.fail(f"{value!r} is neither a head_dim (128) nor two (192/128)", param, ctx)
        return int(match[1]), int(match[2] or match[1])


json_option = click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=False),
    is_flag=False,
    flag_value="-",
    metavar="[FILE]",
    help="Write a record as JSON to FILE; to standard output if FILE is - or left out.",
)


def to_stdout(json_file) -> bool:
    """Whether the record goes to standard output, which then must hold nothing else."""
    return json_file is not None and json_file.name == "<stdout>"


def write_json(record: dict, json_file) -> None:
    json_file.write(json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    json_file.flush()


def _plain(value):
    # JSON has neither nan nor infinity: such an error is null, and its row says why.
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def size(num_bytes: int) -> str:
    """ "227 KiB", "1.4 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= factor:
            return (
                f"{num_bytes / factor:.3g} {unit}"
                if num_bytes < 1000 * factor
                else f"{num_bytes // factor} {unit}"
            )
    return f"{num_bytes} bytes"


def one_line(error: BaseException) -> str:
    """An error as one line; of a compiler's log its first error, behind the start of what was compiled."""
    first, *rest = str(error).strip().split("\n")
    fault = next((line.strip() for line in rest if "error" in line), "")
    if fault:
        return f"{first[:80]}{'...' * (len(first) > 80)}: {fault}"
    return first or type(error).__name__

device_option = click.option(
    "--device",
    type=DeviceChoice(),
    help="Index of the GPU, or cpu for the NumPy path. The first GPU by default.",
)
