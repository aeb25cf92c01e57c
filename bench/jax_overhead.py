"""What a call of cuflash.jax costs on the host, beside jax.nn.dot_product_attention, as programs of one call and of several.

    python -m bench.jax_overhead --json bench/results/jax_overhead_h200.json
    python -m bench.jax_overhead --json bench/results/jax_overhead_h200.json --no-command-buffers

On a tiny problem, so that the GPU is never behind. A program of 16 calls minus one of a call, a fifteenth of it, is what a
call more costs. All programs take turns in five rounds, as hosts drift within seconds. XLA records calls in a row into a
CUDA graph and replays it while memory stays where it is: without that (``--no-command-buffers``) each is made by the host.
A record grows: it has both.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from pathlib import Path

import click

from . import record
from .overhead import TINY, host_time

TARGET_US = 15.0  # of a call more in a program
COUNTS = 1, 4, 16
ROUNDS = 5


def programs(jax) -> dict:
    """(name, number of calls) -> (program, how it is called)."""
    import cuflash.jax

    attentions = {
        "cuflash": cuflash.jax.attention,
        "cuflash, causal": functools.partial(cuflash.jax.attention, causal=True),
        "jax.nn, xla": jax.nn.dot_product_attention,
        "jax.nn, cudnn": functools.partial(jax.nn.dot_product_attention, implementation="cudnn"),
    }

    def chain(attention, count):
        def run(q, k, v):
            for _ in range(count):
                q = attention(q, k, v)
            return q

        return jax.jit(run)

    def gradient(attention):
        return jax.jit(jax.grad(lambda *x: attention(*x).astype("float32").sum(), (0, 1, 2)))

    found = {("q + k", 1): jax.jit(lambda q, k, v: q + k)}
    for name, attention in attentions.items():
        found |= {(name, count): chain(attention, count) for count in COUNTS}
        found |= {(f"{name}, gradient", 1): gradient(attention)}
    return found | {("cuflash, not compiled", 1): cuflash.jax.attention}


def measure(calls: int, say) -> dict:
    import jax
    import numpy as np

    rng = np.random.default_rng(0)
    given = [jax.numpy.asarray(rng.standard_normal(shape), TINY.dtype) for shape in TINY.shapes]
    runs, results = {}, {}
    for (name, count), program in programs(jax).items():
        last = []

        def call(program=program, last=last):
            last[:] = [program(*given)]

        def wait(last=last):
            jax.block_until_ready(last)

        entry = f"{name}, {count} calls" if count > 1 else name
        try:
            call()
            wait()
        except Exception as error:
            results[entry] = {"failed": " ".join(str(error).split())[:200]}
        else:
            runs[entry], results[entry] = (call, wait), {"rounds_us": []}
    for _ in range(ROUNDS):
        for entry, run in runs.items():
            results[entry]["rounds_us"].append(host_time(run[0], calls // ROUNDS, run[1])["median_us"])
    for entry, result in results.items():
        if "failed" in result:
            say(f"{entry:32} FAILED: {result['failed']}")
            continue
        result["median_us"] = statistics.median(result["rounds_us"])
        say(f"{entry:32} {result['median_us']:8.2f} us   (rounds {min(result['rounds_us'])} to {max(result['rounds_us'])})")
        name = entry.removesuffix(f", {COUNTS[-1]} calls")
        if name != entry and name in runs:
            pairs = zip(result["rounds_us"], results[name]["rounds_us"])
            more = [(many - one) / (COUNTS[-1] - 1) for many, one in pairs]
            result |= {"us_a_call_more": round(statistics.median(more), 2), "rounds_us_a_call_more": [round(x, 2) for x in more]}
            verdict = f": {'ok' if statistics.median(more) <= TARGET_US else 'OVER'}, at most {TARGET_US:.0f} asked"
            say(
                f"{'':32} {statistics.median(more):8.2f} us a call more   ({min(more):.2f} to {max(more):.2f})"
                + verdict * name.startswith("cuflash")
            )
    return results


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--calls", type=click.IntRange(ROUNDS), default=1000, show_default=True, help="Timed calls of each, in all rounds.")
@click.option("--command-buffers/--no-command-buffers", default=True, help="Whether XLA records calls into graphs.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), help="Where the record goes, or grows.")
def main(calls, command_buffers, path):
    """Measure what a call costs in a program of JAX."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if not command_buffers:  # read when JAX makes its backend
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_gpu_enable_command_buffer=".strip()
    try:
        import jax

        device = jax.devices("gpu")[0]
    except (ImportError, RuntimeError) as error:
        raise click.UsageError(f"JAX with a GPU is needed: {error}") from None
    result = {
        "kind": "jax_overhead",
        "environment": record.environment(device.local_hardware_id) | {"jax": jax.__version__},
        "problem": TINY.name,
        "targets": {"call_more_us": TARGET_US},
    }
    click.echo(f"{record.headline(result['environment'])}; jax {jax.__version__}")
    if path and path.exists():
        old = json.loads(path.read_text())
        if old["environment"]["kernels_digest"] == result["environment"]["kernels_digest"]:
            result = old | result
    done = {"date": result["environment"]["date"], "calls": measure(calls, click.echo)}
    result["graphs" if command_buffers else "no_graphs"] = done
    if path:
        record.write(path, result)
        click.echo(f"record: {path}")


if __name__ == "__main__":
    main()
