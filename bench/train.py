"""A few hundred training steps of a small GPT on the text of Python's standard library, with attention by whom one likes.

    python -m bench.train --seqlen 1024 --steps 200 --json bench/results/train_h200.json
    python -m bench.train --seqlen 8192 --steps 50 --json bench/results/train_h200.json
    python -m bench.train --framework jax --seqlen 1024 --steps 50 --json bench/results/train_h200.json
    python -m bench.table bench/results/train_h200.json

All who compute attention get the same weights and batches. The first one trains once more, from other weights: two curves
of losses are taken to be equal if they are no further apart than those two. A record grows: a run replaces the one of the
same framework, length, backend and seed.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import sysconfig
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np

from . import peers, record
from .run import DeviceType, device_or_fail

BACKENDS = {
    "torch": ("cuflash", "sdpa_flash", "sdpa_cudnn", "unfused"),
    "jax": ("cuflash", "xla", "cudnn"),
}
# What the others' losses are compared with: the first that is there, and if it has fewer steps the first that has all.
REFERENCES = ("unfused", "xla", "sdpa_flash", "cudnn")
SMOOTHED = 10  # steps in a mean of losses
WARM_UP = 3  # steps before the ones that are timed: kernels are compiled, memory is asked for


@dataclass(frozen=True)
class Setting:
    """Of a model and its training. Tokens are bytes."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    seqlen: int = 1024
    tokens: int = 16384  # a step
    steps: int = 200
    learning_rate: float = 6e-4
    warm_up_steps: int = 20
    betas: tuple = (0.9, 0.95)
    weight_decay: float = 0.1
    clip: float = 1.0  # of the norm of all gradients
    seed: int = 0

    vocabulary = 256

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.seqlen)

    @property
    def parameters(self) -> int:
        return self.hidden * (self.vocabulary + self.seqlen + 1 + self.layers * (12 * self.hidden + 2))

    def rate(self, step: int) -> float:
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up_steps)


@functools.cache
def text() -> np.ndarray:
    """The modules of the standard library, one after the other, without their tests and what is installed beside them."""
    root = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
    paths = [path for path in sorted(root.rglob("*.py")) if not left_out & set(path.relative_to(root).parts)]
    return np.frombuffer(b"".join(path.read_bytes() for path in paths), np.uint8)


def batches(setting: Setting) -> np.ndarray:
    """(steps, batch, seqlen + 1) bytes. Of the seed that weights start from they do not know."""
    data, length = text(), setting.seqlen + 1
    starts = np.random.default_rng(1).integers(0, len(data) - length, (setting.steps, setting.batch))
    return data[starts[..., None] + np.arange(length)]


def initial_weights(setting: Setting) -> dict[str, np.ndarray]:
    """float32; those of a block for all layers at once. Not to be written into: the next backend gets the same arrays."""
    return _weights(setting.seed, setting.seqlen, setting.hidden, setting.layers, setting.vocabulary)


@functools.lru_cache(1)
def _weights(seed: int, seqlen: int, hidden: int, layers: int, vocabulary: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=0.02):
        return (scale * rng.standard_normal(shape, np.float32)).astype(np.float32)

    into_residual = 0.02 / (2 * layers) ** 0.5
    return {
        "embedding": normal(vocabulary, hidden),
        "positions": normal(seqlen, hidden),
        "last_norm": np.ones(hidden, np.float32),
        "norm1": np.ones((layers, hidden), np.float32),
        "norm2": np.ones((layers, hidden), np.float32),
        "qkv": normal(layers, hidden, 3 * hidden),
        "project": normal(layers, hidden, hidden, scale=into_residual),
        "up": normal(layers, hidden, 4 * hidden),
        "down": normal(layers, 4 * hidden, hidden, scale=into_residual),
    }


# ----------------------------------------------------------------------------------------------------------------------
# What comes of it


def train(framework: str, backend: str, setting: Setting, device_id: int | None) -> dict:
    """A run: its losses, the median time of a step, tokens a second and peak memory; ``failed`` if it did not get so far."""
    run = {"framework": framework, "backend": backend, "seqlen": setting.seqlen, "seed": setting.seed, "steps": setting.steps}
    try:
        if framework == "torch":
            from .train_torch import losses_of
        else:
            from .train_jax import losses_of
        losses, seconds, peak = losses_of(backend, setting, device_id)
    except Exception as error:  # out of memory and backends that are not there included
        return run | {"failed": peers.one_line(error)}
    step = statistics.median(seconds[WARM_UP:] or seconds)
    return run | {
        "losses": [round(float(loss), 5) for loss in losses],
        "median_step_s": step,
        "tokens_per_s": round(setting.batch * setting.seqlen / step),
        "peak_bytes": peak,
    }


def smoothed(losses) -> np.ndarray:
    width = min(SMOOTHED, len(losses))
    return np.convolve(losses, np.full(width, 1 / width), "valid")


def difference(one: dict, other: dict) -> float:
    """Mean distance of two smoothed curves, as far as both go."""
    steps = min(len(one["losses"]), len(other["losses"]))
    return float(np.abs(smoothed(one["losses"][:steps]) - smoothed(other["losses"][:steps])).mean())


def agreements(runs: list[dict]) -> list[dict]:
    """Of each framework and length: how far each backend's losses are from a reference's, and the two of one backend that
    started from different weights from each other. ``ok``: no further.
    """
    result = []
    done = [run for run in runs if "losses" in run]
    for framework, seqlen in sorted({(run["framework"], run["seqlen"]) for run in done}):
        here = [run for run in done if (run["framework"], run["seqlen"]) == (framework, seqlen)]
        seed = min(run["seed"] for run in here)
        first = {run["backend"]: run for run in here if run["seed"] == seed}
        pairs = [(first[run["backend"]], run) for run in here if run["seed"] != seed and run["backend"] in first]
        references = [name for name in REFERENCES if name in first]
        if not pairs or not references:
            continue
        spread = difference(*pairs[0])
        for name, run in first.items():
            if name == references[0]:
                continue
            others = [first[other] for other in references if other != name]
            longer = [other for other in others[1:] if others[0]["steps"] < run["steps"] <= other["steps"]]
            for other in others[:1] + longer[:1]:
                steps = min(run["steps"], other["steps"])
                apart = difference(run, other)
                result.append(
                    {
                        "framework": framework,
                        "seqlen": seqlen,
                        "backend": name,
                        "reference": other["backend"],
                        "steps": steps,
                        "mean_difference": round(apart, 6),
                        "spread_of_seeds": round(spread, 6),
                        "last_losses": [round(float(smoothed(one["losses"][:steps])[-1]), 4) for one in (run, other)],
                        "ok": apart <= spread,
                    }
                )
    return result


def merged(old: list[dict], new: list[dict]) -> list[dict]:
    """All runs, new ones in the place of old ones of the same."""

    def key(run):
        return run["framework"], run["seqlen"], run["backend"], run["seed"]

    return list(({key(run): run for run in old} | {key(run): run for run in new}).values())


def line_of(run: dict) -> str:
    head = f"{run['framework']} {run['seqlen']} {run['backend']}, seed {run['seed']}, {run['steps']} steps: "
    if "failed" in run:
        return head + f"FAILED: {run['failed']}"
    return head + (
        f"{run['tokens_per_s'] / 1e3:.1f}k tokens/s, {run['median_step_s'] * 1e3:.2f} ms a step, "
        f"{run['peak_bytes'] / 2**30:.2f} GiB, loss {run['losses'][0]:.3f} to {smoothed(run['losses'])[-1]:.3f}"
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--framework", type=click.Choice(list(BACKENDS)), default="torch", show_default=True)
@click.option("--backends", help="Who computes attention, separated by commas; none is said: all of the framework.")
@click.option("--seqlen", type=click.IntRange(2), default=1024, show_default=True)
@click.option("--steps", type=click.IntRange(2), default=200, show_default=True)
@click.option("--unfused-steps", type=click.IntRange(2), help="Of those without fused attention, if fewer.")
@click.option("--layers", type=click.IntRange(1), default=12, show_default=True)
@click.option("--hidden", type=click.IntRange(8), default=768, show_default=True)
@click.option("--heads", type=click.IntRange(1), default=12, show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=16384, show_default=True, help="In a step.")
@click.option("--spread/--no-spread", default=True, show_default=True, help="Train the first backend from other weights too.")
@click.option("--device", type=DeviceType(), default="0", show_default=True, help="Index of a GPU, or cpu (float32).")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the record goes, or grows.")
def main(framework, backends, seqlen, steps, unfused_steps, layers, hidden, heads, tokens, spread, device, path):
    """Train a small GPT with attention by cuflash and by others."""
    device_id = device_or_fail(device)
    names = backends.split(",") if backends else list(BACKENDS[framework])
    if unknown := set(names) - set(BACKENDS[framework]):
        raise click.UsageError(f"--backends must be of {', '.join(BACKENDS[framework])}; got {', '.join(sorted(unknown))}")
    if hidden % heads:
        raise click.UsageError(f"--hidden must be a multiple of --heads; got {hidden} and {heads}")
    if framework == "jax":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # CuPy and others need memory too
    setting = Setting(layers, hidden, heads, seqlen, tokens, steps)
    result = {"kind": "train", "environment": record.environment(device_id)}
    click.echo(record.headline(result["environment"]))
    more = {"parameters": setting.parameters, "xla_flags": os.environ.get("XLA_FLAGS"), "version": version(framework)}
    result["settings"] = {f"{framework} {seqlen}": asdict(setting) | more}
    runs = []
    if path and path.exists():
        old = json.loads(path.read_text())
        if old["environment"]["kernels_digest"] != result["environment"]["kernels_digest"]:
            raise click.ClickException(f"{path} is of other kernels: runs of both cannot be in one record")
        runs, result["settings"] = old["runs"], old["settings"] | result["settings"]
    plan = [(name, setting) for name in names]
    if spread:
        plan.append((names[0], replace(setting, seed=setting.seed + 1)))
    for name, one in plan:
        if name in ("unfused", "xla") and unfused_steps:
            one = replace(one, steps=min(steps, unfused_steps))
        run = train(framework, name, one, device_id)
        click.echo(line_of(run))
        runs = merged(runs, [run])
        result |= {"runs": runs, "agreements": agreements(runs)}
        if path:
            record.write(path, result)
    here = [one for one in result["agreements"] if (one["framework"], one["seqlen"]) == (framework, seqlen)]
    for one in here:
        click.echo(
            f"{one['backend']} and {one['reference']}: losses {one['mean_difference']:.4f} apart in the mean over "
            f"{one['steps']} steps, two seeds {one['spread_of_seeds']:.4f}   {'ok' if one['ok'] else 'FURTHER'}"
        )
    if path:
        click.echo(f"record: {path}")
    done = {run["backend"] for run in runs if "losses" in run}
    raise SystemExit(0 if all(one["ok"] for one in here) and names[0] in done else 1)


if __name__ == "__main__":
    main()
