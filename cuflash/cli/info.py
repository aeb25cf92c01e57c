"""``cuflash info``: what is installed here, and which tier takes what on this GPU."""

from __future__ import annotations

import dataclasses
import itertools

import click

from .. import config, jit
from ..arrays import ITEMSIZE
from ..problem import DTYPES, MAX_CACHE_HEAD_DIMS, MAX_HEAD_DIM, Problem
from . import builds, environment
from .options import Arch, json_option, size, to_stdout, write_json

# What a call may ask for besides its dtype and head_dim, as changes to the plainest problem.
_FEATURES_OF_ALL = {
    "plain": {},
    "causal": {"window_right": 0},
    "window": {"window_left": 128, "window_right": 0},
    "softcap": {"softcap": 30.0},
    "GQA": {"heads_k": 2},
    "any stride": {"alignment": None},  # None: that of one element, where all others have 16 bytes
    "v of 256": {"head_dim_v": MAX_HEAD_DIM},
    "varlen": {"varlen": True},
}
FEATURES = {
    "forward": {**_FEATURES_OF_ALL, "lse": {"return_lse": True}},
    "backward": {**_FEATURES_OF_ALL, "dlse": {"has_dlse": True}, "deterministic": {"deterministic": True}},
    "decode": {
        **{name: changes for name, changes in _FEATURES_OF_ALL.items() if name not in ("v of 256", "varlen")},
        "pages": {"paged": True, "page_size": 16},
        "append": {"seqlen_new": 1},
        "splits": {"num_splits": 4},
        "64 queries": {"seqlen_q": 64},
        "latent": {"v_is_k": True},
    },
}

_HEADERS = "none needed: the kernels include no header of CUDA's"


@click.command()
@click.option(
    "--device", type=click.IntRange(0), help="Index of the GPU whose support to show. The first by default."
)
@click.option("--arch", type=Arch(), help="Show the support of this architecture (sm_86), present or not.")
@json_option
def info(device, arch, json_file):
    """Show what is installed, and which tier takes what."""
    if arch and device is not None:
        raise click.UsageError(
            "--arch names a GPU that need not be here, --device one that is: give one of them"
        )
    found = environment.find_gpus()
    gpu = environment.pick_gpu(found, device)
    record = {
        **environment.software(),
        **_nvrtc(),
        **_storage(),
        "gpus": [environment.hardware(i) for i in range(found.count)],
        "no_gpu": found.reason or None,
        "support_of": None,
        "support": None,
    }
    shown = config.DEVICES[arch] if arch else environment.device_of(gpu) if gpu is not None else None
    if shown:
        record["support_of"] = (
            f"{shown.name}, compute capability {environment.dotted(shown.compute_capability)}"
        )
        record["support"] = support(shown)
    if json_file:
        write_json(record, json_file)
    if not to_stdout(json_file):
        click.echo(_text(record))


def support(device: config.Device) -> list[dict]:
    """Which tier takes which dtype, head_dim and feature, from the predicate that every call goes through.

    Of arrays whose rows start at multiples of 16 bytes, as those of any head_dim may, but for "any stride". Every head_dim is
    asked for, that of v being the same, or in a cache up to 512;
    {"call": "forward", "backward" or "decode", "dtype", "head_dim": [first, last], "tiers": {feature: tier or None}} for each
    run of them with the same answers.
    """
    table = []
    for call, dtype in itertools.product(FEATURES, DTYPES):
        answers = (
            (head_dim, _tiers(call, dtype, head_dim, device))
            for head_dim in range(1, (MAX_CACHE_HEAD_DIMS[0] if call == "decode" else MAX_HEAD_DIM) + 1)
        )
        for tiers, run in itertools.groupby(answers, key=lambda answer: answer[1]):
            run = [head_dim for head_dim, _ in run]
            table.append({"call": call, "dtype": dtype, "head_dim": [run[0], run[-1]], "tiers": tiers})
    return table


def _tiers(call: str, dtype: str, head_dim: int, device: config.Device) -> dict[str, str | None]:
    sizes = {"seqlen_k": 4096, "head_dim": head_dim, "head_dim_v": min(head_dim, MAX_CACHE_HEAD_DIMS[1])}
    if call == "decode":
        plain = builds.cached_problem(dtype, seqlen_q=1, **sizes)
    else:
        plain = builds.packed_problem(dtype, seqlen_q=4096, **sizes, backward=call == "backward")
    plain = dataclasses.replace(plain, alignment=16, out_alignment=16, tma=True)
    tiers = {}
    for feature, changes in FEATURES[call].items():
        if "alignment" in changes:
            itemsize = ITEMSIZE[dtype]
            changes = {"alignment": itemsize, "out_alignment": itemsize, "tma": False}
        tiers[feature] = _first_tier(dataclasses.replace(plain, **changes), device)
    return tiers


def _first_tier(problem: Problem, device: config.Device) -> str | None:
    return next((tier for tier in config.TIERS if config.refusal(tier, problem, device) is None), None)


def _nvrtc() -> dict:
    try:
        return {"nvrtc_location": jit.nvrtc_location(), "nvrtc_archs": jit.supported_archs()}
    except jit.NvrtcMissing:
        return {"nvrtc_location": None, "nvrtc_archs": None}


def _storage() -> dict:
    folder, files, num_bytes = jit.cache_info()
    return {
        "kernels_folder": str(jit.kernels_dir()),
        "cache": str(folder),
        "cache_files": files,
        "cache_bytes": num_bytes,
        "forced_tier": config.forced_tier(),
        "headers": _HEADERS,
    }


def _text(record: dict) -> str:
    lines = [("cuflash", "{cuflash}, Python {python}, NumPy {numpy}".format(**record))]
    for gpu in record["gpus"]:
        lines.append(
            (
                f"GPU {gpu['gpu_index']}",
                (
                    f"{gpu['gpu']}, compute capability {gpu['compute_capability']}, "
                    f"{gpu['num_sms']} multiprocessors, {size(gpu['memory_bytes'])}, "
                    f"{size(gpu['smem_optin'])} of shared memory a block, {size(gpu['l2_bytes'])} of L2"
                ),
            )
        )
    if record["gpus"]:
        lines.append(("driver", f"{gpu['driver'] or 'of unknown version'} (CUDA {gpu['cuda']})"))
    else:
        lines.append(("GPU", f"none: {record['no_gpu']}"))
    if record["cupy"]:
        lines.append(("CuPy", "{cupy} (CUDA {cuda_runtime})".format(**record)))
    if record["nvrtc"]:
        lines.append(("NVRTC", f"{record['nvrtc']}, {record['nvrtc_location'] or 'path unknown'}"))
    else:
        lines.append(("NVRTC", f"none: {record['nvrtc_missing']}"))
    lines += [
        ("headers", record["headers"]),
        ("kernels", "{kernels}, {kernels_folder}".format(**record)),
        ("cache", f"{record['cache']}, {record['cache_files']} files, {size(record['cache_bytes'])}"),
    ]
    if record["forced_tier"]:
        lines.append(("tier", f"{record['forced_tier']}, forced by CUFLASH_TIER"))
    text = "\n".join(f"{name:<8} {value}" for name, value in lines)
    return f"{text}\n\n{_support_text(record)}"


def _support_text(record: dict) -> str:
    cpu = f"NumPy arrays: {', '.join(DTYPES)}, head_dim 1 to {MAX_HEAD_DIM}, every option, on the CPU"
    if not record["support"]:
        return f"{cpu}\nwhat a GPU would take: cuflash info --arch sm_90"
    lines = [f"tiers on {record['support_of']}; rows start at multiples of 16 bytes, but for any stride"]
    for call, features in FEATURES.items():
        widths = [max(len(feature), 4) for feature in features]
        lines.append(_row(call, "head_dim", features, widths))
        for row in record["support"]:
            if row["call"] == call:
                first, last = row["head_dim"]
                lines.append(_row(row["dtype"], f"{first}-{last}", row["tiers"].values(), widths))
    return "\n".join([*lines, cpu])


def _row(name: str, head_dim: str, cells, widths) -> str:
    cells = "  ".join(f"{cell or '-':<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:<8} {head_dim:<8}  {cells}".rstrip()
