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
from ..config import Config
from ..launch import contiguous_strides, kernel_constants
from ..problem import Problem, check_attention


class Variant(NamedTuple):
    """What jit.build takes."""

    kernel: str
    constants: tuple[tuple[str, int], ...]
    arch: str


def variant_of(config: Config, arch: str) -> Variant:
    return Variant(config.kernel, tuple(sorted(kernel_constants(config).items())), arch)


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
    **options,
) -> Problem:
    """The problem that row-major arrays state, without the arrays. Raises what check_attention raises."""
    q, k, v = (
        View(shape, contiguous_strides(shape), dtype, "cuda:0", 0, "cupy")
        for shape in (
            (batch, seqlen_q, heads_q, head_dim),
            (batch, seqlen_k, heads_k, head_dim),
            (batch, seqlen_k, heads_k, head_dim_v),
        )
    )
    return check_attention(q, k, v, **options)


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
