"""``cuflash warmup``: compile ahead, for GPUs that are here or not."""

from __future__ import annotations

import itertools
import tempfile
import time
from pathlib import Path

import click

from .. import config, jit
from ..problem import DTYPES, MAX_HEAD_DIM, MergeProblem
from . import builds, environment
from .options import Arch, HeadDim, one_line, size

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (128, 128)},
    "causal-window": {"window": (128, 0)},
}


@click.command()
@click.option(
    "--arch",
    "archs",
    multiple=True,
    type=Arch(),
    help="GPU to compile for (sm_90), present or not; may be repeated. Those here by default.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for the kernels; use it with CUFLASH_CACHE_DIR. The cache by default.",
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(DTYPES),
    help="May be repeated.",
    default=("float16", "bfloat16", "float32"),
    show_default=True,
)
@click.option(
    "--head-dim",
    "head_dims",
    multiple=True,
    type=HeadDim(),
    default=("64", "96", "128", "256"),
    show_default=True,
    help="One head_dim (128), or that of q and k and that of v (192/128); may be repeated.",
)
@click.option(
    "--mask",
    "masks",
    multiple=True,
    type=click.Choice(list(MASKS)),
    default=("full", "causal"),
    show_default=True,
    help="May be repeated.",
)
@click.option("--softcap", is_flag=True, help="Also the variants with a softcap.")
@click.option("--backward", is_flag=True, help="Also the kernels of the gradients.")
@click.option("--varlen", is_flag=True, help="Also the kernels for packed sequences.")
@click.option("--deterministic", is_flag=True, help="With --backward, also those of deterministic gradients.")
@click.option(
    "--decode",
    is_flag=True,
    help="Also those of a query a request on a cache: in rows and in pages, with new keys and without; of 4 heads a key head. "
    "And that of merge_attention.",
)
@click.option(
    "--jobs", type=click.IntRange(1), help="Compiles at a time; as many as there are cores by default."
)
def warmup(archs, output, dtypes, head_dims, masks, softcap, backward, varlen, deterministic, decode, jobs):
    """Compile the usual kernels ahead; no GPU is needed.

    All combinations of the options are compiled, for arrays whose rows start at multiples of 16 bytes, each
    for the tier that a call would take. Copy the folder of --output into an image and set CUFLASH_CACHE_DIR
    to it: a first call then compiles nothing, if NVRTC and cuflash are of the same version there.
    """
    start = time.perf_counter()
    if deterministic and not backward:
        raise click.UsageError("--deterministic is about gradients: give --backward too")
    calls = [{}]
    if backward:
        calls.append({"backward": True})
    if deterministic:
        calls.append({"backward": True, "deterministic": True})
    if varlen:
        calls += [{**call, "varlen": True} for call in calls]
    if decode:
        calls += [
            {"decode": True, "page_size": page_size, "append": append} for page_size in (0, 16) for append in (0, 1)
        ]
    variants = []
    for device in _devices(archs):
        arch = environment.arch_for(device)
        for dtype, dims, mask, cap, call in itertools.product(
            dtypes, head_dims, masks, (0.0, 30.0) if softcap else (0.0,), calls
        ):
            # Heads wider than other calls take are those of latent attention.
            if not decode or call.get("decode") or max(dims) <= MAX_HEAD_DIM:
                variants += _variants(device, arch, dtype, *dims, softcap=cap, **MASKS[mask], **call)
    folder = _writable(output or jit.cache_dir())
    try:
        built = builds.build_all(variants, cache_dir=folder, jobs=jobs)
    except jit.NvrtcMissing as error:
        raise click.ClickException(one_line(error)) from None
    for result in built.values():
        if isinstance(result, RuntimeError):
            raise click.ClickException(one_line(result))
        if result.path is None:
            raise click.ClickException(f"{folder} could not take all kernels")
    fresh = sum(not result.from_cache for result in built.values())
    num_bytes = sum(len(result.cubin) for result in built.values())
    click.echo(
        f"{len(built)} kernels in {folder}: {fresh} compiled, {len(built) - fresh} already there; "
        f"{time.perf_counter() - start:.1f} s, {size(num_bytes)}"
    )


def _devices(archs) -> list[config.Device]:
    if archs:
        return [config.DEVICES[arch] for arch in dict.fromkeys(archs)]
    found = environment.find_gpus()
    if not found.count:
        raise click.UsageError(f"name GPUs with --arch, as in --arch sm_90; none is here: {found.reason}")
    return list(dict.fromkeys(environment.device_of(gpu) for gpu in range(found.count)))


def _variants(
    device: config.Device, arch: str, dtype: str, head_dim: int, head_dim_v: int, decode: bool = False, **options
) -> list[builds.Variant]:
    sizes = {"head_dim": head_dim, "head_dim_v": head_dim_v}
    lengths = [(1, 4096)]
    if options.get("varlen"):
        lengths.append((32, 128))  # many short sequences may have tiles of their own
    try:
        variants = []
        for batch, seqlen in lengths:
            if decode:
                is_latent = max(head_dim, head_dim_v) > MAX_HEAD_DIM
                heads = {"heads_q": 128, "heads_k": 1} if is_latent else {"heads_q": 16, "heads_k": 4}
                asked = {"causal": False, "latent": is_latent} | options
                problem = builds.cached_problem(dtype, seqlen_q=1, seqlen_k=seqlen, **sizes, **heads, **asked)
            else:
                problem = builds.packed_problem(dtype, batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, **sizes, **options)
            variants += builds.variants_of(problem, config.choose(problem, device, config.forced_tier()), arch)
        if decode:
            merged = MergeProblem(dtype, batch=1, seqlen=1, heads=1, head_dim_v=head_dim_v, num_parts=2)
            variants.append(builds.merge_variant(merged, arch))
        return list(dict.fromkeys(variants))
    except (ValueError, NotImplementedError) as error:
        raise click.ClickException(one_line(error)) from None


def _writable(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise click.ClickException(f"{folder} cannot be written: {error.strerror}") from None
    return folder
