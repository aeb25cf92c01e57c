"""``cuflash bench``: how fast attention is here, beside the peers that are installed."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import click

from ..config import TIERS
from ..problem import DTYPES, MAX_HEAD_DIM
from . import environment
from .options import device_option, json_option, to_stdout, write_json

# Of 16-bit and of wider dtypes. Those that lack a case say so.
_PEERS = ("sdpa_flash", "sdpa_cudnn", "fa3", "fa4")
_PEERS_DECODE = ("fa3", "sdpa_flash", "sdpa_cudnn")
_PEERS_WIDE = ("sdpa_efficient", "sdpa_math")
_PEERS_CPU = ("unfused",)


def library(name: str):
    """A module of the benchmarks: `cuflash.bench` of a wheel, the top-level folder `bench` of a checkout."""
    package = "cuflash.bench"
    if package not in sys.modules and importlib.util.find_spec(package) is None:
        # Loaded from its path and under the name it has in a wheel: `bench` could be anyone's.
        folder = Path(__file__).resolve().parents[2] / "bench"
        spec = importlib.util.spec_from_file_location(
            package, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if not (folder / "run.py").is_file():
            raise click.ClickException(
                f"the benchmarks of cuflash are missing: no {folder}; reinstall cuflash"
            )
        module = sys.modules[package] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{package}.{name}")


@click.command()
@click.option(
    "--head-dim",
    "head_dims",
    type=click.IntRange(1, MAX_HEAD_DIM),
    multiple=True,
    help="May be repeated. Default: 64, 128.",
)
@click.option("--seqlen", "seqlens", type=click.IntRange(1), multiple=True, help="May be repeated.")
@click.option("--causal/--full", default=None, help="Only with, or only without a causal mask.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    help="Default: bfloat16; float16 before compute capability 8.0; float32 on a CPU.",
)
@click.option(
    "--tokens", type=click.IntRange(1), help="batch * seqlen. Default: 16384, decoding 262144; 2048 on a CPU."
)
@click.option("--hidden", type=click.IntRange(1), help="heads * head_dim. Default: 2048, decoding 4096; 512 on a CPU.")
@click.option("--backward", is_flag=True, help="The gradients of q, k and v instead.")
@click.option("--varlen", is_flag=True, help="Packed sequences, of lengths drawn from 1 to seqlen.")
@click.option("--decode", is_flag=True, help="One query each on a cache of seqlen keys: TB/s of keys and values.")
@click.option("--tier", type=click.Choice(TIERS), help="Force a tier.")
@click.option(
    "--peers",
    "peer_names",
    metavar="NAMES",
    help="Comma-separated, none or all. Default: the fast ones installed.",
)
@device_option
@click.option("--quick", is_flag=True, help="Fewer runs.")
@json_option
def bench(
    head_dims,
    seqlens,
    causal,
    dtype,
    tokens,
    hidden,
    backward,
    varlen,
    decode,
    tier,
    peer_names,
    device,
    quick,
    json_file,
):
    """Measure the speed of attention on this machine, beside the peers that are installed.

    On its GPU, or without one on the NumPy path. Each row is one problem: TFLOP/s of cuflash with its spread,
    then of each peer, with the speed of cuflash over it; with --decode also microseconds of a call, alone and in a
    queue. All of them compute on the same arrays, in turns, and are checked first.
    """
    if decode and (backward or varlen):
        raise click.UsageError(f"--decode goes without --{'backward' if backward else 'varlen'}")
    run, cases, peers = library("run"), library("cases"), library("peers")
    found = environment.find_gpus()
    gpu = None if device == "cpu" else environment.pick_gpu(found, device)
    if gpu is None:
        if tier:
            raise click.UsageError(
                f"--tier {tier} needs a GPU; there is none: {found.reason or 'the CPU was asked for'}"
            )
        dtype, usual, usual_seqlens = dtype or "float32", _PEERS_CPU, (512, 2048)
        tokens, hidden = tokens or 2048, hidden or 512
    else:
        old = environment.device_of(gpu).compute_capability < (8, 0)
        dtype, usual_seqlens = dtype or ("float16" if old else "bfloat16"), (1024, 4096, 16384)
        usual = _PEERS_DECODE if decode else _PEERS
        usual = usual if dtype in ("float16", "bfloat16") else _PEERS_WIDE
        usual = [name for name in usual if peers.missing(name) is None]
        tokens, hidden = tokens or (262144 if decode else 16384), hidden or (4096 if decode else 2048)
    names = run.contenders(tier, peer_names, usual)
    table = cases.table(
        dtype=dtype,
        head_dims=head_dims or (64, 128),
        seqlens=seqlens or usual_seqlens,
        causal=causal,
        tokens=tokens,
        hidden=hidden,
        backward=backward,
        varlen=varlen,
        decode=decode,
    )
    report = to_stdout(json_file)  # then all that is for people goes to standard error
    measuring = run.Bench(names, device_id=gpu, quick=quick, say=lambda line: click.echo(line, err=report))
    result = measuring.run(table, suite="table")
    if json_file is not None:
        write_json(result, json_file)
    raise SystemExit(run.exit_status(result, measuring.main))
