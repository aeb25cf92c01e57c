"""Kernels compiled ahead, many at a time, and the progress bar of whatever takes long."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import click

from .. import jit
from ..arrays import View
from ..config import Config, Kernel, kernels_of
from ..launch import arch_of, kernel_constants
from ..memory import contiguous_strides
from ..merge import kernel_of as merge_kernel_of
from ..problem import (
    DecodeProblem,
    MergeProblem,
    Problem,
    check_attention,
    check_attention_backward,
    check_attention_varlen,
    check_attention_varlen_backward,
    check_attention_with_kvcache,
    lse_dtype,
)


class Variant(NamedTuple):
    """What jit.build takes."""

    kernel: str
    constants: tuple[tuple[str, int], ...]
    arch: str


def variant_of(kernel: Kernel, arch: str) -> Variant:
    return Variant(kernel.kernel, tuple(sorted(kernel_constants(kernel).items())), arch_of(kernel, arch))


def variants_of(problem: Problem, config: Config, arch: str) -> list[Variant]:
    """All kernels of a call; ``config`` is the one chosen for it."""
    return [variant_of(kernel, arch) for kernel in kernels_of(problem, config)]


def merge_variant(problem: MergeProblem, arch: str) -> Variant:
    return variant_of(merge_kernel_of(problem), arch)


def packed_problem(
    dtype: str,
    *,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    batch: int = 1,
    heads_q: int = 16,
    heads_k: int = 16,
    backward: bool = False,
    varlen: bool = False,
    **options,
) -> Problem:
    """The problem that row-major arrays state, without the arrays. Raises what check_attention and its like raise.

    ``varlen``: ``batch`` sequences of these lengths, packed.
    """

    def view(*shape, dtype=dtype):
        return View(
            shape, contiguous_strides(shape), dtype, "cuda:0", 0, "cupy", was_3d=varlen and len(shape) == 4
        )

    rows = (1, batch) if varlen else (batch, 1)  # what the sequences of a batch multiply
    q = view(rows[0], rows[1] * seqlen_q, heads_q, head_dim)
    k = view(rows[0], rows[1] * seqlen_k, heads_k, head_dim)
    v = view(*k.shape[:3], head_dim_v)
    lengths = (view(batch + 1, dtype="int32"),) * 2 if varlen else ()
    if not backward:
        return (check_attention_varlen if varlen else check_attention)(q, k, v, *lengths, **options)
    out, lse = view(*q.shape[:3], head_dim_v), (heads_q, q.shape[1])
    lse = view(*lse if varlen else (batch, *lse), dtype=lse_dtype(dtype))
    check = check_attention_varlen_backward if varlen else check_attention_backward
    return check(out, q, k, v, out, lse, *lengths, **options)


def cached_problem(
    dtype: str,
    *,
    seqlen_q: int,
    seqlen_k: int,
    head_dim: int,
    head_dim_v: int,
    batch: int = 1,
    heads_q: int = 16,
    heads_k: int = 16,
    page_size: int = 0,
    append: int = 0,
    latent: bool = False,
    **options,
) -> DecodeProblem:
    """As packed_problem, of attention_with_kvcache: ``seqlen_k`` keys at most of each request, ``append`` of them new.

    ``page_size``: of pages, as many as hold them; 0: rows of each request. ``latent``: the values are the first columns of the
    keys.
    """

    def view(*shape, place, dtype=dtype):
        return View(shape, contiguous_strides(shape), dtype, "cuda:0", place << 50, "cupy")     # apart from all others

    pages = -(-seqlen_k // page_size) if page_size else 0
    rows = (batch * pages, page_size) if page_size else (batch, seqlen_k)
    views = {"q": view(batch, seqlen_q, heads_q, head_dim, place=1), "cache_seqlens": view(batch, dtype="int32", place=2)}
    for keys, values, lead, place in (("k_cache", "v_cache", rows, 4), ("k", "v", (batch, append), 6)):
        if keys == "k" and not append:
            continue
        views[keys] = view(*lead, heads_k, head_dim, place=place)
        shape = (*lead, heads_k, head_dim_v)
        views[values] = views[keys]._replace(shape=shape) if latent else view(*shape, place=place + 1)
    if page_size:
        views["block_table"] = view(batch, pages, dtype="int32", place=3)
    return check_attention_with_kvcache(**views, **options)


def num_jobs() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def build_all(variants: Iterable[Variant], cache_dir: Path | None = None, jobs: int | None = None):
    """{variant: jit.Built, or the RuntimeError that it ended in}.

    NVRTC compiles in ``jobs`` threads, by default as many as there are cores. Raises NvrtcMissing at once: no
    other variant would fare better.
    """
    done = {}
    variants = list(dict.fromkeys(variants))
    jit.nvrtc_version()
    with progress(len(variants), "compiling") as bar, ThreadPoolExecutor(jobs or num_jobs()) as pool:
        futures = {pool.submit(jit.build, *variant, cache_dir=cache_dir): variant for variant in variants}
        try:
            for future in as_completed(futures):
                try:
                    done[futures[future]] = future.result()
                except jit.NvrtcMissing:
                    raise
                except RuntimeError as error:
                    done[futures[future]] = error
                bar.update(1)
        except BaseException:  # Ctrl-C among them: do not compile the rest first
            pool.shutdown(cancel_futures=True)
            raise
    return {variant: done[variant] for variant in variants}


@contextlib.contextmanager
def progress(length: int, label: str, **options):
    """click's progress bar on standard error; nothing at all where that is no terminal."""
    file = sys.stderr if sys.stderr.isatty() else io.StringIO()
    with click.progressbar(length=length, label=label, file=file, **options) as bar:
        yield bar


def print_above_bar(text: str, err: bool) -> None:
    """Print a line while a bar is shown; its next update draws it again below."""
    if sys.stderr.isatty():
        click.echo("\r\033[K", nl=False, err=True)
    click.echo(text, err=err)
