"""``cuflash explain``: which kernel computes a problem, with which tiles, why, and what it takes."""

from __future__ import annotations

import dataclasses

import click

from .. import config, jit
from ..launch import scratch_of, steps_of
from ..problem import DTYPES, Problem
from . import builds, environment
from .options import Arch, Window, json_option, one_line, size, to_stdout, write_json


@click.command()
@click.option("--seqlen-q", type=click.IntRange(0), default=4096, show_default=True)
@click.option("--seqlen-k", type=click.IntRange(0), help="That of q by default.")
@click.option("--heads", type=click.IntRange(1), default=16, show_default=True, help="Query heads.")
@click.option("--heads-k", type=click.IntRange(1), help="Key heads; as many as query heads by default.")
@click.option("--batch", type=click.IntRange(0), default=1, show_default=True)
@click.option("--head-dim", type=int, default=128, show_default=True)
@click.option("--head-dim-v", type=int, help="That of q and k by default.")
@click.option("--dtype", type=click.Choice(DTYPES), default="bfloat16", show_default=True)
@click.option("--causal/--no-causal", default=None, help="Off by default, but for --decode.")
@click.option(
    "--window",
    type=Window(),
    help="Keys seen left and right of the diagonal; none for an open side: 128,none.",
)
@click.option("--softcap", type=float, default=0.0, help="0, the default, is off.")
@click.option("--scale", type=float, help="softmax_scale; head_dim ** -0.5 by default.")
@click.option("--backward", is_flag=True, help="Explain the gradients.")
@click.option("--varlen", is_flag=True, help="Explain as many packed sequences as the batch has.")
@click.option("--deterministic", is_flag=True, help="With --backward: deterministic gradients.")
@click.option("--decode", is_flag=True, help="Explain attention_with_kvcache: --seqlen-k keys at most of each request.")
@click.option("--page-size", type=click.IntRange(0), default=0, help="With --decode: keys of a page; 0, the default: no pages.")
@click.option("--append", type=click.IntRange(0), default=0, help="With --decode: new tokens of each request.")
@click.option("--num-splits", type=click.IntRange(0), default=0, help="With --decode: parts of each request; 0: chosen.")
@click.option("--latent", is_flag=True, help="With --decode: the values are the first columns of the keys.")
@click.option(
    "--arch",
    type=Arch(),
    help="Explain for this architecture, present or not (sm_90), instead of a GPU here.",
)
@click.option("--device", type=click.IntRange(0), help="Index of the GPU. The first by default.")
@click.option("--tier", type=click.Choice(config.TIERS), help="Force a tier, as CUFLASH_TIER does.")
@json_option
def explain(
    seqlen_q,
    seqlen_k,
    heads,
    heads_k,
    batch,
    head_dim,
    head_dim_v,
    dtype,
    causal,
    window,
    softcap,
    scale,
    backward,
    varlen,
    deterministic,
    decode,
    page_size,
    append,
    num_splits,
    latent,
    arch,
    device,
    tier,
    json_file,
):
    """Say which kernel computes a problem, and why.

    The arrays are taken to be row-major.
    """
    if deterministic and not backward:
        raise click.UsageError("--deterministic is about gradients: give --backward too")
    if decode and (backward or varlen):
        raise click.UsageError("--decode has neither gradients nor packed sequences: leave out --backward and --varlen")
    if not decode and (page_size or append or num_splits or latent):
        raise click.UsageError("--page-size, --append, --num-splits and --latent are about a cache: give --decode too")
    target = _device(arch, device)
    sizes = {
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_q if seqlen_k is None else seqlen_k,
        "heads_q": heads,
        "heads_k": heads if heads_k is None else heads_k,
        "head_dim": head_dim,
        "head_dim_v": head_dim if head_dim_v is None else head_dim_v,
    }
    try:
        options = {"causal": decode if causal is None else causal, "window": window, "softcap": softcap, "softmax_scale": scale}
        if backward:
            options |= {"backward": True, "deterministic": deterministic}
        if decode:
            options |= {"page_size": page_size, "append": append, "num_splits": num_splits, "latent": latent}
            problem = builds.cached_problem(dtype, **sizes, **options)
        else:
            problem = builds.packed_problem(dtype, **sizes, varlen=varlen, **options)
        forced = tier or config.forced_tier()
        chosen = config.choose(problem, target, forced)
        steps = [] if problem.is_empty else steps_of(problem, chosen)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise click.ClickException(one_line(error)) from None

    grids = {kernel.kernel: grid for kernel, grid in steps}
    record = {
        "call": "backward" if backward else "decode" if decode else "forward",
        "problem": dataclasses.asdict(problem),
        "device": {
            "name": target.name,
            "compute_capability": environment.dotted(target.compute_capability),
            "num_sms": target.num_sms,
            "smem_optin": target.smem_optin,
            "l2_bytes": target.l2_bytes,
        },
        "kernel": chosen.kernel,
        "tier": chosen.tier,
        "reasons": chosen.reasons,
        "grid": grids.get(chosen.kernel, 0),
        "threads": chosen.threads,
        "smem_bytes": chosen.smem_bytes,
        "constants": dict(chosen.constants),
        "launches": [
            {
                "kernel": kernel.kernel,
                "grid": grid,
                "threads": kernel.threads,
                "constants": dict(kernel.constants),
            }
            for kernel, grid in steps
        ],
        "scratch_bytes": scratch_of(problem, chosen) if steps else {},
        **_built(chosen, target),
        "others": _others(chosen.tier, forced, problem, target),
    }
    if json_file:
        write_json(record, json_file)
    if not to_stdout(json_file):
        click.echo(_text(record))


def _device(arch: str | None, index: int | None) -> config.Device:
    if arch:
        if index is not None:
            raise click.UsageError(
                "--arch names a GPU that need not be here, --device one that is: give one of them"
            )
        return config.DEVICES[arch]
    found = environment.find_gpus()
    gpu = environment.pick_gpu(found, index)
    if gpu is None:
        raise click.UsageError(f"name a GPU with --arch, as in --arch sm_90; none is here: {found.reason}")
    return environment.device_of(gpu)


def _built(chosen: config.Config, target: config.Device) -> dict:
    """What the compiler says. The choice needs none: without one these are None, and ``not_built`` why."""
    try:
        arch = jit.arch_for(target.compute_capability)
    except RuntimeError as error:  # no NVRTC, or one that does not know the GPU any more
        return _not_built(None, one_line(error))
    variant = builds.variant_of(chosen, arch)
    try:
        built = jit.build(*variant)
    except jit.NvrtcMissing as error:
        return _not_built(variant.arch, one_line(error))
    except RuntimeError as error:
        raise click.ClickException(one_line(error)) from None
    if arch.startswith("compute_"):
        return _not_built(
            variant.arch,
            f"NVRTC {environment.dotted(jit.nvrtc_version())} does not know this GPU: its driver compiles",
        )
    return {
        "arch": variant.arch,
        "registers": built.registers,
        "spill_bytes": built.spill_bytes,
        "static_smem": built.static_smem,
        "not_built": None,
    }


def _not_built(arch: str | None, why: str) -> dict:
    return {"arch": arch, "registers": None, "spill_bytes": None, "static_smem": None, "not_built": why}


def _others(tier: str, forced: str | None, problem: Problem, target: config.Device) -> dict[str, str]:
    """Tier -> why it was not chosen."""
    others = {}
    for other in config.TIERS:
        if other != tier:
            taken = f"takes it too; {tier} was forced" if forced else f"takes it too; {tier} comes first"
            others[other] = config.refusal(other, problem, target) or taken
    return others


def _text(record: dict) -> str:
    problem, device = record["problem"], record["device"]
    lines = [
        (
            "problem",
            (
                "{dtype}, " + _sizes(problem) + ", heads {heads_q} / {heads_k}, "
                "head_dim {head_dim} / {head_dim_v}, softmax_scale {softmax_scale:.4g}"
            ).format(**problem)
            + _options(problem),
        ),
        (
            "device",
            f"{device['name']}, compute capability {device['compute_capability']}, "
            f"{device['num_sms']} multiprocessors, "
            f"{size(device['smem_optin'])} of shared memory a block, {size(device['l2_bytes'])} of L2",
        ),
        ("kernel", f"{record['kernel']}, tier {record['tier']}, {record['call']}"),
        *(("because" if number == 0 else "", reason) for number, reason in enumerate(record["reasons"])),
    ]
    if record["not_built"]:
        lines.append(("registers", f"unknown: {record['not_built']}"))
    else:
        spills = f"{record['spill_bytes']} bytes of spills" if record["spill_bytes"] else "no spills"
        lines.append(
            ("registers", f"{record['registers']} a thread, {spills}, compiled for {record['arch']}")
        )
    lines += [
        (
            "shared",
            f"{record['smem_bytes']} bytes a block"
            + (f" and {record['static_smem']} static" if record["static_smem"] else ""),
        ),
        ("grid", f"{record['grid']} blocks of {record['threads']} threads"),
        *_launches(record),
        ("constants", " ".join(f"{name}={value}" for name, value in record["constants"].items())),
        *(
            ("others" if number == 0 else "", f"{tier}: {why}")
            for number, (tier, why) in enumerate(record["others"].items())
        ),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in lines)


def _launches(record: dict) -> list[tuple[str, str]]:
    """What is launched besides the kernel, and the scratch of the call; nothing for a plain forward."""
    lines = []
    if len(record["launches"]) > 1:
        steps = (f"{step['kernel']} ({step['grid']} x {step['threads']})" for step in record["launches"])
        lines.append(("launches", ", ".join(steps)))
    if record["scratch_bytes"]:
        arrays = (f"{name} {size(num_bytes)}" for name, num_bytes in record["scratch_bytes"].items())
        lines.append(("scratch", ", ".join(arrays)))
    return lines


def _sizes(problem: dict) -> str:
    if problem["varlen"]:
        return "{batch} sequences of {seqlen_q} x {seqlen_k} rows in all"
    if "page_size" in problem:
        return "{batch} requests of {seqlen_q} queries and up to {seqlen_k} keys" + " in pages of {page_size}" * problem["paged"]
    return "batch {batch}, seqlen {seqlen_q} x {seqlen_k}"


def _options(problem: dict) -> str:
    left, right = problem["window_left"], problem["window_right"]
    text = ""
    if (left, right) == (None, 0):
        text += ", causal"
    elif (left, right) != (None, None):
        text += f", window {left},{right}"
    text += f", softcap {problem['softcap']:g}" if problem["softcap"] else ""
    text += ", deterministic" if problem.get("deterministic") else ""
    text += f", {problem['seqlen_new']} appended" if problem.get("seqlen_new") else ""
    text += f", {problem['num_splits']} splits" if problem.get("num_splits") else ""
    return text + (", values in the keys" if problem.get("v_is_k") else "")
