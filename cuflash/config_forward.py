"""The forward: which tier takes a problem, and with which tiles."""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

from .arrays import ITEMSIZE
from .config_base import (
    BLOCK_RESERVED_SMEM,
    SIMT_HEAD_DIMS,
    Config,
    Device,
    Kernel,
    heads_in_wave,
    no_tensor_cores,
    no_tile,
    not_16_bit,
    not_by_tma,
    not_hopper,
    round_up,
    shared_constants,
    vec_bytes,
)
from .problem import Problem


def _heads_in_group(problem: Problem, device: Device) -> tuple[int, str]:
    """How many (batch, query head) pairs run together so that their K and V stay in half of the L2 cache."""
    group = problem.heads_q // problem.heads_k
    per_key_head = problem.seqlen_k * (problem.head_dim + problem.head_dim_v) * ITEMSIZE[problem.dtype]
    key_heads = max(1, device.l2_bytes // 2 // max(1, per_key_head))
    heads = min(key_heads * group, problem.batch_axis * problem.heads_q)
    return heads, (f"heads_in_group = {heads}  # K and V of a head take {per_key_head / 2**20:.1f} MiB, "
                   f"half of the L2 is {device.l2_bytes / 2**21:.0f}")


# --------------------------------------------------------------------------------------------------------------- simt

# By words of a number: registers (of 255) that tiles may take. Measured over all of them: above, the compiler spills;
# exp2 and tanh of float64 need some for themselves.
_SIMT_REGISTERS = {1: 204, 2: 178}
_SIMT_CHUNK_COST = 50       # instructions of a thread for a chunk, and for each load of one; for an element of S
_SIMT_LOAD_COST = 4
_SIMT_SOFTMAX_COST = 7
_SIMT_ENDS = 8192           # keys: a tile of as many rows and keys would take twice as long
_SIMT_ALONE = 0.98          # speed of a block that waits at its barriers with no other on the multiprocessor (H200: 0.975 to 1)


class _SimtTile(NamedTuple):
    rows: int               # query rows of a lane; a warp has 4 lanes along them
    keys: int               # keys of a lane; a warp has 8 lanes along them
    warps: int
    group: int              # warps that share query rows, each with its part of the keys and of the columns of O
    chunk_k: int            # columns of K in a buffer
    chunk_v: int            # keys of V in a buffer
    smem: int
    blocks: int             # that share a multiprocessor
    registers: int          # that the tiles take in a lane
    traffic: float          # cycles of the shared-memory pipe for each cycle of multiply-adds
    speed: float            # share of the multiply-add rate to expect

    @property
    def block_m(self) -> int:
        return self.warps // self.group * 4 * self.rows

    @property
    def block_n(self) -> int:
        return self.group * 8 * self.keys


def _simt_row_vec(words: int, rows: int) -> int:
    """Rows of Q or P that a lane reads at once (kRowVec): whole 16 bytes, or else 2 or 1."""
    return next(vec for vec in (4 // words, 2, 1) if rows % vec == 0)


def _simt_pressure(words: int, rows: int, keys: int, cols: int) -> int:
    """Registers of a lane for O, row sums and the larger of the two products: its sums, its operands."""
    multiply_qk = rows * keys * words + keys * 4 + rows * words
    multiply_pv = rows * cols * words + cols * words + rows * words
    return rows * cols * words + 2 * rows * words + max(multiply_qk, multiply_pv)


def _simt_smem(words: int, head_dim: int, head_dim_v: int, rows: int, keys: int, warps: int, group: int, chunk_k: int,
               chunk_v: int) -> int:
    """Bytes of SharedStorage: Q, two buffers, P with the barriers of the buffers, a number for each row of each warp."""
    block_n, groups = group * 8 * keys, warps // group
    buffer = max(block_n * (chunk_k + 4 // words), chunk_v * head_dim_v)
    return 4 * words * (groups * 4 * rows * head_dim + 2 * buffer
                        + groups * block_n * (4 * rows + 2 * _simt_row_vec(words, rows)) + warps * 4 * rows)


def _simt_speed(words: int, head_dim: int, head_dim_v: int, rows: int, keys: int, warps: int, group: int, chunk_k: int,
                chunk_v: int) -> tuple[float, float]:
    """(cycles of the shared-memory pipe, share of multiply-adds in the cycles that issue) for each cycle of multiply-adds.

    A read of 16 bytes takes two cycles, as neighbouring lanes share addresses, and one of 8 bytes takes one. A
    multiprocessor does 128 multiply-adds a cycle in float32 and 64 in float64 where it is fast, and issues from 4 warps.
    """
    vec, row_vec = 4 // words, _simt_row_vec(words, rows)
    block_n, cols = group * 8 * keys, head_dim_v // group // 8
    multiply_adds = words * rows * (keys * head_dim + cols * block_n)                          # cycles of a warp for a tile
    wide_reads = keys * head_dim // vec + cols * block_n // vec
    row_reads = (head_dim + block_n) * rows // row_vec
    chunks, loads = head_dim // chunk_k + block_n // chunk_v, block_n * (head_dim + head_dim_v) // vec // (32 * warps)
    others = (wide_reads + row_reads + _SIMT_CHUNK_COST * chunks + _SIMT_LOAD_COST * loads
              + _SIMT_SOFTMAX_COST * words * rows * keys)
    traffic = 4 * (2 * wide_reads + max(1, row_vec * words // 2) * row_reads) / multiply_adds
    return traffic, multiply_adds / (multiply_adds + others)


@functools.cache
def _simt_tile(words: int, head_dim: int, head_dim_v: int, smem_optin: int) -> _SimtTile | None:
    """The tile expected to be fastest. ``words``: registers of a number, 1 for float32 and 2 for float64.

    A warp of w on a multiprocessor finds 1 of w + 1 cycles not used by the others; shared memory is a second limit. The
    larger a tile, the longer its warps wait for each other at the ends of the keys that their rows see.
    """
    vec = 4 // words
    best = None
    for rows, keys, warps, group in itertools.product((8, 6, 4, 3, 2), (8, 6, 4, 2), (4, 8, 2, 1), (1, 2, 4)):
        if warps % group or head_dim_v % (group * 8 * vec):
            continue
        if _simt_pressure(words, rows, keys, head_dim_v // group // 8) > _SIMT_REGISTERS[words]:
            continue
        for chunk_k, chunk_v in itertools.product((64, 32, 16, 8), (64, 32, 16, 8, 4)):
            # A row of a chunk of K is at most one element a thread.
            if head_dim % chunk_k or group * 8 * keys % chunk_v or chunk_k > 32 * warps:
                continue
            tile = _simt_made(words, head_dim, head_dim_v, smem_optin, rows, keys, warps, group, chunk_k, chunk_v)
            if tile and (best is None or (round(tile.speed, 3), -tile.traffic) > (round(best.speed, 3), -best.traffic)):
                best = tile
    return best


def _simt_made(words: int, head_dim: int, head_dim_v: int, smem_optin: int, *sizes: int) -> _SimtTile | None:
    """The tile of these ``sizes``: the first six numbers of _SimtTile. None if it does not fit."""
    rows, keys, warps, group, _, _ = sizes
    smem = _simt_smem(words, head_dim, head_dim_v, *sizes)
    if smem > smem_optin:
        return None
    blocks = min(8 // warps, (smem_optin + BLOCK_RESERVED_SMEM) // (smem + BLOCK_RESERVED_SMEM))
    traffic, issue = _simt_speed(words, head_dim, head_dim_v, *sizes)
    ends = _SIMT_ENDS / (_SIMT_ENDS + warps // group * 4 * rows + group * 8 * keys)
    speed = (1 - 1 / (warps * blocks + 1)) * min(issue, 1 / traffic) * ends * (_SIMT_ALONE if blocks == 1 else 1)
    return _SimtTile(*sizes, smem, blocks, _simt_pressure(words, rows, keys, head_dim_v // group // 8), traffic, speed)


# (rows, keys, warps, group, chunk_k, chunk_v) by dtype, head_dim and head_dim_v: a block of 8 warps alone on a multiprocessor
# in place of two of 4. It copies half as much and meets at half as many chunks: docs/fwd_simt.md.
_SIMT_LARGE_TILES = {("float32", 128, 128): (8, 8, 8, 2, 64, 64)}


def _simt_tile_of(problem: Problem, device: Device) -> _SimtTile | None:
    sizes = words, head_dim, head_dim_v = _simt_sizes(problem)
    tile = _simt_tile(*sizes, device.smem_optin)
    large = _SIMT_LARGE_TILES.get((problem.dtype, head_dim, head_dim_v))
    if large is None or problem.varlen or (made := _simt_made(*sizes, device.smem_optin, *large)) is None:
        return tile
    few, many = (problem.batch_axis * problem.heads_q * -(-problem.seqlen_q // one.block_m) for one in (made, tile))
    # Tiles fill the multiprocessors in rounds. A small one with a multiprocessor of its own takes less than a round; under a
    # mask tiles take different times, and a few large ones do not end level.
    if many <= device.num_sms or _is_masked(problem) and few < 4 * device.num_sms:
        return tile
    return made if -(-few // device.num_sms) <= -(-many // (device.num_sms * tile.blocks)) else tile


def _simt_sizes(problem: Problem) -> tuple[int, int, int]:
    """Words of a number in the kernel, padded head_dim, padded head_dim_v."""
    return (2 if problem.dtype == "float64" else 1, round_up(problem.head_dim, 32),
            next(size for size in SIMT_HEAD_DIMS if size >= problem.head_dim_v))


def _refuse_simt(problem: Problem, device: Device) -> str | None:
    if _simt_tile(*_simt_sizes(problem), device.smem_optin) is None:
        return f"no tile fits into {device.smem_optin} bytes of shared memory; 48 KiB always do"
    return None


def _simt(problem: Problem, device: Device, refused) -> Config:
    words, head_dim, head_dim_v = _simt_sizes(problem)
    tile = _simt_tile_of(problem, device)
    vec = vec_bytes(problem.alignment, problem.dtype, problem.head_dim, problem.head_dim_v)
    out_vec = min(vec_bytes(problem.out_alignment, problem.dtype, problem.head_dim_v),
                  4 // words * ITEMSIZE[problem.dtype])
    heads, heads_why = _heads_in_group(problem, device)
    constants = {
        **shared_constants(problem),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "WARPS": tile.warps, "GROUP": tile.group, "CHUNK_K": tile.chunk_k, "CHUNK_V": tile.chunk_v,
        "SMEM_BYTES": tile.smem, "MIN_BLOCKS": tile.blocks, "VEC_BYTES": vec, "OUT_VEC_BYTES": out_vec,
    }
    reasons = (
        f"block_m = {tile.block_m}, warps = {tile.warps}, group = {tile.group}  # the warps of a group share rows; with "
        f"{tile.rows} rows, {tile.keys} keys and {head_dim_v // tile.group // 8} columns of O a lane its tiles take "
        f"{tile.registers} registers, above {_SIMT_REGISTERS[words]} the compiler spills",
        f"block_n = {tile.block_n}  # {tile.keys} keys for each of 8 lanes and each warp of a group; reads of shared memory "
        f"take {tile.traffic:.2f} of the time of the multiply-adds",
        f"chunk_k = {tile.chunk_k}, chunk_v = {tile.chunk_v}  # columns of K and keys of V in a buffer",
        f"smem_bytes = {tile.smem}  # {tile.blocks} block{'s' * (tile.blocks > 1)} a multiprocessor, the limit of one is "
        f"{device.smem_optin}; up to {tile.speed:.0%} of the multiply-add rate to expect",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v}, padded",
        f"vec_bytes = {vec}, out_vec_bytes = {out_vec}  # divide every address and every row",
        heads_why,
    )
    return Config("fwd_simt", tuple(sorted(constants.items())), tile.warps * 32, tile.smem, "simt", tile.block_m, tile.block_n,
                  heads, reasons, refused)


# --------------------------------------------------------------------------------------------------------------- sm80

def _refuse_sm80(problem: Problem, device: Device) -> str | None:
    if (reason := not_16_bit(problem) or no_tensor_cores(problem, device)) is not None:
        return reason
    if _sm80_tile(problem, device) is None:
        return no_tile(problem, device)
    return None


# (block_m, warps, group, block_n, stages) by the wider of the two padded head dims: preferred first. Measured on the H200; on
# a GPU with less shared memory the first that gives a multiprocessor most warps.
_SM80_TILES = (
    (64, ((128, 4, 1, 128, 2), (128, 4, 1, 64, 2), (128, 4, 1, 64, 1), (64, 4, 1, 64, 1))),
    (128, ((128, 4, 1, 64, 2), (128, 4, 1, 32, 2), (128, 4, 1, 32, 1), (64, 4, 1, 32, 1))),
    (256, ((64, 4, 2, 64, 1), (64, 4, 1, 64, 1), (64, 4, 1, 32, 2), (64, 4, 1, 32, 1), (32, 2, 1, 32, 1))),
)
# For packed sequences that are short in the mean, as far as their number tells: less of a tile lies past their ends, and four
# blocks hide each other's start. Measured on the H200 with 128 sequences of 1 to 255 rows.
_SM80_SHORT_TILE = (64, 4, 1, 64, 2)
_SHORT_ROWS = 256
_SM80_REASONS = {                   # by query rows and warps that share them
    (32, 1): "32 query rows a warp halve the shared-memory reads of K and V; more keys for S would spill",
    (32, 2): "two warps share 32 query rows, which halves the reads of V and most of those of K; each has half of the keys of S "
             "and half of the columns of O, which for 32 rows would take all registers of one",
    (16, 1): "16 query rows a warp: 32 would take more shared memory than fits or, at a long head_dim, all registers",
}
_SM80_BLOCK_WORK = 128              # BlockWork of kernels/fwd_sm80.cu, padded to the alignment of the tiles


def _sm80_tile(problem: Problem, device: Device):
    """(block_m, warps, group, block_n, stages, smem_bytes, blocks on a multiprocessor), or None if nothing fits."""
    head_dim, head_dim_v = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    widest = max(head_dim, head_dim_v)
    fitting = []
    tiles = next(tiles for limit, tiles in _SM80_TILES if widest <= limit)
    if problem.varlen and widest <= 64 and problem.seqlen_q < _SHORT_ROWS * problem.batch:
        tiles = (_SM80_SHORT_TILE, *tiles)
    for block_m, warps, group, block_n, stages in tiles:
        # Rows that are an odd number of 64-byte groups are copied 4 lanes a group: a pass covers more rows.
        if block_n % (warps * 32 // (4 if head_dim % 64 or head_dim_v % 64 else 8)):
            continue
        smem = 2 * (block_m * widest + stages * block_n * (head_dim + head_dim_v)) + _SM80_BLOCK_WORK
        if group > 1:
            smem += 2 * block_m * block_n + 4 * block_m * group         # P, and a number for each row of each warp
        if smem <= device.smem_optin:
            blocks = min(8 // warps, (device.smem_optin + BLOCK_RESERVED_SMEM) // (smem + BLOCK_RESERVED_SMEM))
            fitting.append((block_m, warps, group, block_n, stages, smem, blocks))
    return max(fitting, key=lambda tile: tile[1] * tile[6], default=None)       # the first of those with most warps


def _sm80(problem: Problem, device: Device, refused) -> Config:
    block_m, warps, group, block_n, stages, smem, blocks = _sm80_tile(problem, device)
    heads, heads_why = _heads_in_group(problem, device)
    head_dim, head_dim_v = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    constants = {
        **shared_constants(problem),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "WHOLE_HEADS": int((problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "WARPS": warps, "GROUP": group, "STAGES": stages,
        "SMEM_BYTES": smem, "MIN_BLOCKS": blocks, "VEC_BYTES": problem.alignment, "OUT_VEC_BYTES": problem.out_alignment,
    }
    vec = ("16-byte copies" if problem.alignment == 16 else
           f"an address or stride of q, k or v is no multiple of 16 bytes: copies are {16 // problem.alignment} times as many")
    reasons = (
        f"block_m = {block_m}, warps = {warps}, group = {group}, block_n = {block_n}  # "
        + _SM80_REASONS[block_m // warps * group, group],
        f"stages = {stages}  # " + ("the next key tile is copied while this one is used" if stages == 2 else
                                    "K and V take turns: a second buffer of each would cost keys a tile or the second block"),
        f"smem_bytes = {smem}  # {blocks} block{'s' * (blocks > 1)} a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v} in whole groups of 32",
        f"vec_bytes = {problem.alignment}  # {vec}",
        heads_why,
    )
    return Config("fwd_sm80", tuple(sorted(constants.items())), warps * 32, smem, "sm80", block_m, block_n, heads, reasons,
                  refused)


# --------------------------------------------------------------------------------------------------------------- sm90

_SM90_HEAD_DIMS = (64, 96, 128, 192, 256)
_SM90_STAGES = (2, 3)
_SM90_WINDOW_STAGES = (2, 3, 4, 5)      # of three consumers: the last begins, and ends, two key tiles or so before the first


class _Sm90Tile(NamedTuple):
    consumers: int          # warpgroups, of 64 query rows each
    block_n: int
    turns: bool             # consumers start their products in turns

    @property
    def block_m(self) -> int:
        return self.consumers * 64


# By the two padded head dims, else by the wider of them. Measured on the H200: docs/fwd_sm90.md.
_SM90_TILES = {64: _Sm90Tile(3, 128, True), 96: _Sm90Tile(3, 96, False), 128: _Sm90Tile(3, 80, True), 192: _Sm90Tile(2, 96, True),
               (192, 128): _Sm90Tile(2, 96, False), 256: _Sm90Tile(2, 80, True)}
# Those for sequences of few rows in the mean, and up to how many, without and with a mask: less of a tile lies past the ends of
# sequences, or is masked.
_SM90_SHORT_TILES = {128: (_Sm90Tile(2, 128, True), 1024, 1024), 256: (_Sm90Tile(2, 64, True), 512, 1 << 31)}
# Those of narrow windows where sequences are not short, and up to how many keys a row sees beside its own: less of a key tile is
# masked at the two ends.
_SM90_WINDOW_TILES = {64: (_Sm90Tile(3, 64, False), 256), 128: (_Sm90Tile(3, 64, False), 1024)}
_SM90_SOFTCAP_TILE = _Sm90Tile(3, 96, True)     # of head_dim 64: with 128 keys the registers of tanh spill


def _sm90_sizes(problem: Problem) -> tuple[int, int]:
    """head_dim and head_dim_v, padded."""
    return tuple(next(size for size in _SM90_HEAD_DIMS if size >= own) for own in (problem.head_dim, problem.head_dim_v))


def _refuse_sm90(problem: Problem, device: Device) -> str | None:
    if (reason := not_16_bit(problem) or not_hopper(device) or not_by_tma(problem, "q, k and v")) is not None:
        return reason
    if _sm90_smem(problem, min(_SM90_STAGES)) > device.smem_optin:
        return no_tile(problem, device)
    return None


_SM90_FEW_HEADS = 16        # (batch, query head) pairs that run together at least. Measured on the H200: docs/fwd_sm90.md


def _is_masked(problem: Problem) -> bool:
    return problem.window_left is not None or problem.window_right is not None


def _sm90_tile(problem: Problem) -> _Sm90Tile:
    sizes = _sm90_sizes(problem)
    if problem.softcap and max(sizes) == 64:
        return _SM90_SOFTCAP_TILE
    name = sizes if sizes in _SM90_TILES else max(sizes)
    if name in _SM90_SHORT_TILES:
        tile, *rows = _SM90_SHORT_TILES[name]
        if problem.seqlen_q <= rows[_is_masked(problem)] * (problem.batch if problem.varlen else 1):
            return tile
    if name in _SM90_WINDOW_TILES and None not in (problem.window_left, problem.window_right):
        tile, keys = _SM90_WINDOW_TILES[name]
        if problem.window_left + problem.window_right <= keys:
            return tile
    return _SM90_TILES[name]


def _sm90_smem(problem: Problem, stages: int) -> int:
    """Bytes of SharedStorage of kernels/fwd_sm90.cu: Q, K and V, barriers, tiles of the launch."""
    (head_dim, head_dim_v), tile = _sm90_sizes(problem), _sm90_tile(problem)
    arrays = 2 * (tile.block_m * head_dim + stages * tile.block_n * (head_dim + head_dim_v))
    barriers = round_up(8 * (2 * tile.consumers + 4 * stages + 2 * 2 + 1), 16)
    return round_up(arrays + barriers + 2 * round_up(78 + 16 * tile.consumers, 16), 1024)


def _sm90(problem: Problem, device: Device, refused) -> Config:
    head_dim, head_dim_v = _sm90_sizes(problem)
    tile = _sm90_tile(problem)
    if problem.varlen:          # tiles of one length come from many sequences: few heads keep those that share keys together
        heads, heads_why = _heads_in_group(problem, device)
    else:
        tiles, all_heads = -(-problem.seqlen_q // tile.block_m), problem.batch * problem.heads_q
        group = problem.heads_q // problem.heads_k
        tiles -= tiles // 2 * (problem.window_right is not None)        # the shorter half fills in behind the longer one
        heads, heads_why = heads_in_wave(device, tiles, _SM90_FEW_HEADS, all_heads, together=group,
                                         power_of_two=problem.window_right is not None)
    # Where each block has one tile at most, the counter and setting it to 0 (3 us) are for nothing.
    blocks = -(-problem.seqlen_q // tile.block_m) * problem.batch_axis * problem.heads_q
    counts_tiles = problem.varlen or _is_masked(problem) and blocks > device.num_sms
    stages = _SM90_WINDOW_STAGES if problem.window_left is not None and tile.consumers == 3 else _SM90_STAGES
    stages = max(n for n in stages if _sm90_smem(problem, n) <= device.smem_optin)
    smem = _sm90_smem(problem, stages)
    constants = {
        **shared_constants(problem),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "WHOLE_HEADS": int(problem.head_dim_v == head_dim_v),
        "CONSUMERS": tile.consumers, "BLOCK_N": tile.block_n, "STAGES": stages, "TURNS": int(tile.turns),
        "SMEM_BYTES": smem, "OUT_VEC_BYTES": problem.out_alignment,
    }
    reasons = (
        f"block_m = {tile.block_m}, block_n = {tile.block_n}  # {tile.consumers} warpgroups of 64 query rows: S, P and O of a "
        "thread take all registers but a few",
        f"turns = {int(tile.turns)}  # " + ("the softmax of one warpgroup runs beside the products of another" if tile.turns else
                                          "warpgroups start their products when they can: turns were slower here"),
        f"stages = {stages}  # K and V of " + ("the next key tile" if stages == 2 else f"the next {stages - 1} key tiles") +
        " are copied while this one is used",
        f"smem_bytes = {smem}  # a block a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v}; the copies pad with "
        "zeros",
        f"max_blocks = {device.num_sms}  # a block stays on its multiprocessor and takes one tile after the other"
        + (", the next one by a counter, as they take different time" if counts_tiles else ""),
        heads_why,
    )
    return Config("fwd_sm90", tuple(sorted(constants.items())), (tile.consumers + 1) * 128, smem, "sm90", tile.block_m,
                  tile.block_n, heads, reasons, refused, max_blocks=device.num_sms, counts_tiles=counts_tiles,
                  short_tiles_last=problem.varlen)


def around(problem: Problem, config: Config) -> tuple[Kernel, ...]:
    """The launches of a forward: the kernel of ``config``."""
    return (config,)


REFUSALS = {"sm90": _refuse_sm90, "sm80": _refuse_sm80, "simt": _refuse_simt}
BUILDERS = {"sm90": _sm90, "sm80": _sm80, "simt": _simt}
