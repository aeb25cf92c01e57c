"""Which kernel computes a problem on a device, and with which tiles: a pure function, no CUDA, no CuPy.

Every tile number stands with its reason in config_forward.py, config_backward.py and config_decode.py; ``cuflash explain``
prints them.
"""

from __future__ import annotations

import contextlib
import os

from . import config_backward, config_decode, config_forward
from .config_base import DEVICES, LIST_HEADER, LISTED_WORDS, Config, Device, Kernel
from .problem import BackwardProblem, DecodeProblem, Problem

__all__ = ["DEVICES", "TIERS", "Config", "Device", "Kernel", "choose", "force_tier", "forced_tier",
           "kernels_of", "refusal", "tiled"]

TIERS = ("sm90", "sm80", "simt")    # best first


def choose(problem: Problem, device: Device, tier: str | None = None) -> Config:
    """The config of the best tier that takes the problem, a forward, a backward or a decoding, or of ``tier``.

    Raises ValueError for an unknown tier and NotImplementedError, with the reason, if the forced tier or every
    tier refuses the problem.
    """
    if tier is not None and tier not in TIERS:
        raise ValueError(f"tier must be one of {', '.join(TIERS)}; got {tier!r}")
    refused = []
    for candidate in TIERS if tier is None else (tier,):
        reason = refusal(candidate, problem, device)
        if reason is None:
            return _rules(problem).BUILDERS[candidate](problem, device, tuple(refused))
        refused.append((candidate, reason))
    raise NotImplementedError("; ".join(f"tier {name}: {reason}" for name, reason in refused))


def refusal(tier: str, problem: Problem, device: Device) -> str | None:
    """Why the tier does not take the problem on the device; None if it does. The dispatcher and `cuflash info` ask here."""
    return _rules(problem).REFUSALS[tier](problem, device)


def _rules(problem: Problem):
    if isinstance(problem, DecodeProblem):
        return config_decode
    return config_backward if isinstance(problem, BackwardProblem) else config_forward


def kernels_of(problem: Problem, config: Config) -> tuple[Kernel, ...]:
    """All kernels of a call, in the order of their launches; ``config`` is the one that was chosen."""
    kernels = _rules(problem).around(problem, config)
    if not problem.varlen:
        return kernels
    lists = _varlen_tiles(config, isinstance(problem, BackwardProblem), tiled(problem, config)[1])
    if not config.dq_block_m:
        return lists, *kernels
    *others, dq = kernels       # its list takes the place of the other
    return lists, *others, _varlen_tiles(config, False, config.dq_block_m), dq


def tiled(problem: Problem, config: Config) -> tuple[int, int]:
    """(rows, rows of a tile) of the side whose tiles the blocks of ``config`` take: queries, backward keys.

    Of a decoding these are the query rows of a key head.
    """
    if isinstance(problem, BackwardProblem):
        return problem.seqlen_k, config.block_n
    if isinstance(problem, DecodeProblem):
        return problem.rows, config.block_m
    return problem.seqlen_q, config.block_m


def _varlen_tiles(config: Config, of_keys: bool, rows: int) -> Kernel:
    """Lists the tiles of ``rows`` queries, or keys, that blocks take whose kernel has the masks of ``config``."""
    constants = dict(config.constants)
    threads = 512
    own = {"TILE": rows, "SIDE": int(of_keys), "THREADS": threads, "LIST_HEADER": LIST_HEADER, "LISTED_WORDS": LISTED_WORDS}
    shared = {name: constants[name] for name in ("MASK_LEFT", "MASK_RIGHT", "VARLEN")}
    return Kernel("varlen_tiles", tuple(sorted((own | shared).items())), threads, 0)


_forced: str | None = os.environ.get("CUFLASH_TIER") or None


def forced_tier() -> str | None:
    """The tier forced by ``CUFLASH_TIER`` (read once, at import) or by ``force_tier``."""
    return _forced


@contextlib.contextmanager
def force_tier(tier: str | None):
    """Force a tier for the calls inside the block, in every thread."""
    global _forced
    before, _forced = _forced, tier
    try:
        yield
    finally:
        _forced = before
