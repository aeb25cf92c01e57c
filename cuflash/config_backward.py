"""The backward: which tier takes a problem, and with which tiles; and the kernels before and behind it."""

from __future__ import annotations

from typing import NamedTuple

from .arrays import ITEMSIZE
from .config_base import (
    BLOCK_RESERVED_SMEM,
    DQ_GROUP,
    SIMT_HEAD_DIMS,
    Config,
    Device,
    Kernel,
    heads_in_wave,
    no_tile,
    not_16_bit,
    not_by_tma,
    not_hopper,
    round_up,
    shared_constants,
    vec_bytes,
)
from .problem import BackwardProblem


def _shared_constants(problem: BackwardProblem) -> dict[str, int]:
    return {**shared_constants(problem), "DETERMINISTIC": int(problem.deterministic), "DQ_GROUP": DQ_GROUP}


def _key_head_bytes(problem: BackwardProblem, head_dim: int) -> int:
    """Of q, dout and dq_sum that go with a key head; ``head_dim`` is that of dq_sum, 0: there is none."""
    itemsize = ITEMSIZE[problem.dtype]
    row_bytes = (problem.head_dim + problem.head_dim_v) * itemsize + head_dim * max(4, itemsize)
    return problem.heads_q // problem.heads_k * problem.seqlen_q * row_bytes


def _heads_in_group(problem: BackwardProblem, device: Device, head_dim: int, few: int = 0) -> tuple[int, str]:
    """How many (batch, key head) pairs run together so that their arrays (`_key_head_bytes`) stay in half of the L2 cache.
    ``few``: at least so many, also where key tiles wait; 0: all where they do.
    """
    all_heads = max(1, problem.batch_axis * problem.heads_k)
    if problem.deterministic and not few:
        return all_heads, (f"heads_in_group = {all_heads}  # all: the key tiles of a head wait for each other, those of others "
                           "go on")
    per_key_head = _key_head_bytes(problem, head_dim)
    heads = min(max(1, few, device.l2_bytes // 2 // max(1, per_key_head)), all_heads)
    what = "q, dout and dq_sum" if head_dim else "q and dout"
    return heads, (f"heads_in_group = {heads}  # {what} that go with a key head take {per_key_head / 2**20:.1f} MiB, "
                   f"half of the L2 is {device.l2_bytes / 2**21:.0f}" + (f", but at least {few} heads" if few > 1 else ""))


# --------------------------------------------------------------------------------------------------------------- sm90

class _Sm90Tile(NamedTuple):
    block_m: int
    k_panel: int            # columns of a panel of K: a warpgroup's half of dq begins with one
    v_slots: int = 2        # of the tiles of the launch that have one for their V: all, or one for all
    stages_dq: bool = False     # dq is added in bulk, from shared memory
    stages: int = 2         # of Q and dO
    k_slots: int = 2        # as v_slots


_SM90_BLOCK_N = 128         # two warpgroups own 64 keys each
_SM90_DS_STAGES = 2
# By the padded head dim, the wider of the two.
_SM90_TILES = {64: _Sm90Tile(128, 64), 96: _Sm90Tile(64, 16), 128: _Sm90Tile(64, 64)}
# Of 128, where key tiles do not wait for each other; larger ones, whose dq has no room there, by the mask and from how many
# queries on: of them, and of key tiles that do wait.
_SM90_STAGED = _Sm90Tile(64, 64, v_slots=1, stages_dq=True)
_SM90_80_ROWS = _Sm90Tile(80, 64, v_slots=1)
_SM90_LONG = {"none": (_SM90_80_ROWS, 2048), "right": (_SM90_80_ROWS._replace(stages=3, k_slots=1), 8192)}
_SM90_WAITING = {"none": (_SM90_80_ROWS, 0), "left": (_SM90_80_ROWS, 1024), "right": (_SM90_80_ROWS, 1024)}
_SM90_SLOTS = 2             # of tiles of the launch
# (batch, key head) pairs that run together at least: of grouped heads, which have the query tiles of several, and others; where
# key tiles of a head wait for each other (deterministic), by the padded head dim, and where they begin with the last query tile
# under a right mask; of wide heads; of packed batches, whose heads have the tiles of all sequences. Measured on the H200:
# docs/bwd_sm90.md.
_SM90_FEW_HEADS = {"grouped": 4, "single": 8}
_SM90_FEW_WAITING_HEADS = {64: 8, 96: 16, 128: 16}
_SM90_FEW_DESCENDING_HEADS = 64
_SM90_FEW_ASCENDING_HEADS = 2
_WIDE_FEW_HEADS = 8
_PACKED_FEW_HEADS = 2
_SM90_LISTED = 112          # Tile of kernels/bwd_sm90.cu


def _sm90_head_dim(problem: BackwardProblem) -> int:
    widest = max(problem.head_dim, problem.head_dim_v)
    return next(size for size in (*_SM90_TILES, *_WIDE_STAGES_V) if size >= widest)


def _sm90_tile(problem: BackwardProblem) -> _Sm90Tile:
    head_dim = _sm90_head_dim(problem)
    if head_dim < 128:
        return _SM90_TILES[head_dim]
    mask = "left" if problem.window_left is not None else "none" if problem.window_right is None else "right"
    tile, seqlen_q = (_SM90_WAITING if problem.deterministic else _SM90_LONG).get(mask, (None, 0))
    if tile and not problem.varlen and problem.seqlen_q >= seqlen_q:
        return tile
    return _SM90_TILES[head_dim] if problem.deterministic else _SM90_STAGED


def _ascending_heads(problem: BackwardProblem, device: Device) -> int:
    """How many (batch, key head) pairs run together where key tiles that wait for each other under a right mask begin each with
    a query tile of its own: their q, dout and dq_sum stay in two thirds of the L2 cache. 0: they begin with the last one.
    """
    if not problem.deterministic or problem.varlen or problem.window_right is None:
        return 0
    heads = device.l2_bytes * 2 // 3 // max(1, _key_head_bytes(problem, _sm90_head_dim(problem)))
    return 2 ** (heads.bit_length() - 1) if heads >= _SM90_FEW_ASCENDING_HEADS else 0


def _refuse_sm90(problem: BackwardProblem, device: Device) -> str | None:
    if (reason := not_16_bit(problem) or not_hopper(device)) is not None:
        return reason
    if (reason := not_by_tma(problem, "q, k, v and dout")) is not None:
        return reason
    if _sm90_smem(problem) > device.smem_optin:
        return no_tile(problem, device)
    return None


def _is_wide(problem: BackwardProblem) -> bool:
    """Whether dk and dv take two warpgroups' registers, so that dq has a kernel of its own."""
    return _sm90_head_dim(problem) > max(_SM90_TILES)


def _sm90_smem(problem: BackwardProblem) -> int:
    """Bytes of SharedStorage of kernels/bwd_sm90.cu: K and V, Q and dO, dS; dq; lse and delta of rows; whether keys are
    finite; tiles of the launch; barriers. Of wide heads that of the larger of two kernels."""
    if _is_wide(problem):
        return max(_wide_smem(_sm90_head_dim(problem)))
    head_dim, block_n, ds_stages, slots = _sm90_head_dim(problem), _SM90_BLOCK_N, _SM90_DS_STAGES, _SM90_SLOTS
    tile = _sm90_tile(problem)
    block_m, stages = tile.block_m, tile.stages
    arrays = 2 * (head_dim * ((tile.k_slots + tile.v_slots) * block_n + 2 * stages * block_m) + ds_stages * block_m * block_n)
    arrays += 4 * block_m * head_dim if tile.stages_dq else 16
    facts = 8 * stages * block_m + 4 * tile.k_slots * block_n + slots * _SM90_LISTED
    turns = 16 * (4 if problem.deterministic else 1)
    return round_up(arrays + facts + turns + 8 * (3 * slots + 3 * stages + 4 * ds_stages + 3), 1024)


def _sm90(problem: BackwardProblem, device: Device, refused) -> Config:
    if _is_wide(problem):
        return _wide(problem, device, refused)
    head_dim, smem = _sm90_head_dim(problem), _sm90_smem(problem)
    tile, block_n, ascending = _sm90_tile(problem), _SM90_BLOCK_N, _ascending_heads(problem, device)
    if problem.varlen:
        heads, heads_why = _heads_in_group(problem, device, head_dim, few=_PACKED_FEW_HEADS)
    else:
        tiles, all_heads = -(-problem.seqlen_k // block_n), max(1, problem.batch * problem.heads_k)
        if ascending:
            heads = min(ascending, all_heads)
            heads_why = f"heads_in_group = {heads}  # their q, dout and dq_sum stay in two thirds of the L2 cache"
        elif problem.deterministic and problem.window_right is not None:
            heads, heads_why = heads_in_wave(device, tiles, _SM90_FEW_DESCENDING_HEADS, all_heads)
        elif problem.deterministic:
            few = _SM90_FEW_WAITING_HEADS[head_dim]
            heads, heads_why = heads_in_wave(device, tiles, few, all_heads, tiles_each=2, power_of_two=True)
        else:
            few = _SM90_FEW_HEADS["grouped" if problem.heads_q > problem.heads_k else "single"]
            heads, heads_why = heads_in_wave(device, tiles, few, all_heads, tiles_each=2, power_of_two=True)
    constants = {
        **_shared_constants(problem),
        "HEAD_DIM": head_dim, "WHOLE_HEADS": int(problem.head_dim == problem.head_dim_v == head_dim),
        "BLOCK_M": tile.block_m, "BLOCK_N": block_n, "STAGES": tile.stages, "K_PANEL": tile.k_panel,
        "K_SLOTS": tile.k_slots, "V_SLOTS": tile.v_slots, "STAGES_DQ": int(tile.stages_dq),
        "ASCENDS": int(ascending > 0),
        "SMEM_BYTES": smem, "OUT_VEC_BYTES": problem.out_alignment,
    }
    reasons = (
        f"block_n = {block_n}  # two warpgroups own 64 keys each: a thread keeps {head_dim} numbers of dk and dv in registers",
        f"block_m = {tile.block_m}  # S and dP of a thread take {tile.block_m} registers more; dq is halved by " +
        ("rows" if tile.block_m == 128 else "columns"),
        f"stages = {tile.stages}  # " + ("the next query tile is" if tile.stages == 2 else "the next two query tiles are") +
        " copied while this one is used, as is the next key tile" + ("" if tile.v_slots == 2 else ", but for its V" if
                                                                     tile.k_slots == 2 else ": its V and K as they are free"),
        f"stages_dq = {int(tile.stages_dq)}  # dq is added " +
        ("in bulk, from shared memory, which leaves no place for V of the next key tile" if tile.stages_dq else "from registers"),
        f"smem_bytes = {smem}  # a block a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}  # the wider of {problem.head_dim} and {problem.head_dim_v}; the copies pad with zeros",
        f"max_blocks = {device.num_sms}  # a block stays on its multiprocessor and takes one key tile after the other, the next "
        "one by a counter",
        f"ascends = {int(ascending > 0)}  # " +
        ("the last key tile of a head comes first, and its visits begin with the first query tile that sees the keys" if ascending
         else "the first key tile of a head comes first, and its visits begin with the last query tile"),
        heads_why,
    )
    return Config("bwd_sm90", tuple(sorted(constants.items())), 384, smem, "sm90", tile.block_m, block_n, heads, reasons, refused,
                  max_blocks=device.num_sms, counts_tiles=True, short_tiles_last=False)


# Wide heads: dk and dv in one kernel, dq in another, of tiles of 64 rows.

_WIDE_ROWS, _WIDE_DQ_ROWS = 64, 128
_WIDE_STAGES_V = {192: 2, 256: 1}       # of V in bwd_dq_sm90, by the padded head dim: as many as fit
_WIDE_LISTED, _WIDE_DQ_LISTED = 88, 72  # Tile of kernels/bwd_dkv_sm90.cu and of bwd_dq_sm90.cu


def _wide_smem(head_dim: int) -> tuple[int, int]:
    """Bytes of SharedStorage of kernels/bwd_dkv_sm90.cu: K, V, two stages of Q and dO, results of 8 warps, P; lse and delta of
    rows; barriers; tiles of the launch. And of bwd_dq_sm90.cu: Q and dO of two warpgroups, two stages of K, V; whether keys are
    finite; barriers; tiles."""
    operand, stages, slots, stages_v = 2 * _WIDE_ROWS * head_dim, 2, 2, _WIDE_STAGES_V[head_dim]
    dkv = ((2 + 2 * stages) * operand + 8 * 2048 + 2 * _WIDE_ROWS**2 + 8 * stages * _WIDE_ROWS + 8 * (2 * slots + 6 * stages + 7)
           + slots * _WIDE_LISTED)
    dq = ((4 + stages + stages_v) * operand + 4 * stages * _WIDE_ROWS + 8 * (2 * slots + 9 + 3 * stages + 2 * stages_v)
          + slots * _WIDE_DQ_LISTED)
    return round_up(dkv, 1024), round_up(dq, 1024)


def _wide_constants(problem: BackwardProblem) -> dict[str, int]:
    head_dim = _sm90_head_dim(problem)
    return {
        **shared_constants(problem), "DQ_GROUP": DQ_GROUP,
        "HEAD_DIM": head_dim, "WHOLE_HEADS": int(problem.head_dim == problem.head_dim_v == head_dim),
        "OUT_VEC_BYTES": problem.out_alignment,
    }


def _wide(problem: BackwardProblem, device: Device, refused) -> Config:
    head_dim = _sm90_head_dim(problem)
    smem, dq_smem = _wide_smem(head_dim)
    if problem.varlen:
        heads, heads_why = _heads_in_group(problem, device, 0, few=_PACKED_FEW_HEADS)
    else:
        tiles, all_heads = -(-problem.seqlen_k // _WIDE_ROWS), max(1, problem.batch * problem.heads_k)
        heads, heads_why = heads_in_wave(device, tiles, _WIDE_FEW_HEADS, all_heads)
    constants = {**_wide_constants(problem), "SMEM_BYTES": smem}
    reasons = (
        f"block_n = {_WIDE_ROWS}  # dk of 64 keys fills the registers of a warpgroup, dv of another; dq has a kernel of its own: "
        "seven products instead of five, and nothing is summed in memory",
        f"block_m = {_WIDE_ROWS}  # two stages of Q and dO take {2 * 2 * 2 * _WIDE_ROWS * head_dim // 1024} KiB",
        f"dq_block_m = {_WIDE_DQ_ROWS}  # of bwd_dq_sm90: two warpgroups own 64 rows each; key tiles of 64",
        f"smem_bytes = {smem}  # and {dq_smem} of bwd_dq_sm90; a block a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}  # the wider of {problem.head_dim} and {problem.head_dim_v}; the copies pad with zeros",
        f"max_blocks = {device.num_sms}  # a block stays on its multiprocessor and takes one tile after the other, the next one "
        "by a counter",
        heads_why,
    )
    return Config("bwd_dkv_sm90", tuple(sorted(constants.items())), 384, smem, "sm90", _WIDE_ROWS, _WIDE_ROWS, heads, reasons,
                  refused, max_blocks=device.num_sms, counts_tiles=True, dq_block_m=_WIDE_DQ_ROWS, short_tiles_last=False)


def _wide_dq(problem: BackwardProblem) -> Kernel:
    head_dim = _sm90_head_dim(problem)
    smem = _wide_smem(head_dim)[1]
    constants = {**_wide_constants(problem), "STAGES_V": _WIDE_STAGES_V[head_dim], "SMEM_BYTES": smem}
    return Kernel("bwd_dq_sm90", tuple(sorted(constants.items())), 384, smem)


# --------------------------------------------------------------------------------------------------------------- sm80

def _refuse_sm80(problem: BackwardProblem, device: Device) -> str | None:
    if (reason := not_16_bit(problem)) is not None:
        return reason
    if device.compute_capability < (8, 0):
        return "the backward needs compute capability 8.0 or newer (cp.async; mma.sync with bfloat16)"
    if _sm80_tile(problem, device) is None:
        return no_tile(problem, device)
    return None


# (block_m, block_n, warps, group, stages, ds_stages, blocks) by the wider of the two padded head dims: the first that fits.
# With two stages of Q and dO, and of dS, a tile meets one barrier; on a GPU with less shared memory the second of dS goes first.
_SM80_TILES = (
    (64, ((64, 128, 4, 1, 2, 2, 2), (64, 128, 4, 1, 1, 1, 2), (64, 128, 8, 2, 2, 1, 1)),
     "a warp keeps dK and dV of 32 keys; two blocks hide each other's softmax"),
    (128, ((64, 128, 8, 2, 2, 2, 1), (64, 128, 8, 2, 2, 1, 1), (64, 64, 8, 4, 1, 1, 1)),
     "two warps share the columns of dK and dV of 32 keys, which would take all registers of one"),
    (256, ((64, 64, 8, 4, 2, 2, 1), (64, 64, 8, 4, 1, 1, 1), (32, 32, 4, 2, 1, 1, 1)),
     "four warps share the columns of dK and dV of 32 keys"),
)
_SM80_BLOCK_WORK = 128              # BlockWork of kernels/bwd_sm80.cu, padded to the alignment of the tiles


def _sm80_tile(problem: BackwardProblem, device: Device):
    """(block_m, block_n, warps, group, stages, ds_stages, blocks, padded head_dim and head_dim_v, smem_bytes, reason), or None if
    nothing fits."""
    widest = max(problem.head_dim, problem.head_dim_v)
    tiles, reason = next((tiles, reason) for limit, tiles, reason in _SM80_TILES if widest <= limit)
    for block_m, block_n, warps, group, stages, ds_stages, blocks in tiles:
        # The warps of a group share the columns of dK and dV by 16.
        head_dim, head_dim_v = (round_up(size, max(32, 16 * group)) for size in (problem.head_dim, problem.head_dim_v))
        # K and V, Q and dO; dS, and P where warps share it; lse and delta of rows; whether keys are finite.
        smem = (2 * ((block_n + stages * block_m) * (head_dim + head_dim_v) + (ds_stages + (group > 1)) * block_n * block_m)
                + 8 * stages * block_m + 4 * block_n + _SM80_BLOCK_WORK)
        if blocks * (smem + BLOCK_RESERVED_SMEM) <= device.smem_optin + BLOCK_RESERVED_SMEM:
            return block_m, block_n, warps, group, stages, ds_stages, blocks, head_dim, head_dim_v, smem, reason
    return None


def _sm80(problem: BackwardProblem, device: Device, refused) -> Config:
    (block_m, block_n, warps, group, stages, ds_stages, blocks, head_dim, head_dim_v, smem,
     why) = _sm80_tile(problem, device)
    heads, heads_why = _heads_in_group(problem, device, head_dim)
    constants = {
        **_shared_constants(problem),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "WHOLE_HEADS": int((problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)),
        "BLOCK_M": block_m, "BLOCK_N": block_n, "WARPS": warps, "GROUP": group, "STAGES": stages, "DS_STAGES": ds_stages,
        "SMEM_BYTES": smem, "MIN_BLOCKS": blocks, "VEC_BYTES": problem.alignment, "OUT_VEC_BYTES": problem.out_alignment,
    }
    vec = ("16-byte copies" if problem.alignment == 16 else
           f"an address or stride of q, k, v, out or dout is no multiple of 16 bytes: copies are {16 // problem.alignment} times "
           "as many")
    reasons = (
        f"block_n = {block_n}, warps = {warps}, group = {group}  # {why}",
        f"block_m = {block_m}, stages = {stages}  # " +
        ("the next query tile is copied while this one is used" if stages == 2 else
         "a second buffer of Q and dO does not fit"),
        f"ds_stages = {ds_stages}  # " + ("dq of a tile is computed one tile later, without a barrier of its own"
                                          if ds_stages == 2 else "dq of a tile is computed at once: a second dS does not fit"),
        f"smem_bytes = {smem}  # {blocks} block{'s' * (blocks > 1)} a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v}, padded so that the "
        "warps of a group share the columns evenly",
        f"vec_bytes = {problem.alignment}  # {vec}",
        heads_why,
    )
    return Config("bwd_sm80", tuple(sorted(constants.items())), warps * 32, smem, "sm80", block_m, block_n, heads, reasons,
                  refused)


# --------------------------------------------------------------------------------------------------------------- simt

# (block_m, block_n, warps, chunk_d, chunk_m, chunk_q, blocks), by words of a number (1: float32, 2: float64) and the wider of the
# padded head dims; blocks that share a multiprocessor by their registers. Preferred first: more rows read K and V less often. On
# a GPU with less shared memory the first that gives a multiprocessor most warps.
_SIMT_TILES = {
    (1, 64): ((64, 64, 4, 32, 32, 64, 3), (32, 64, 4, 32, 32, 32, 3)),
    (1, 128): ((64, 64, 4, 32, 32, 64, 2), (32, 64, 4, 32, 16, 32, 2)),
    (1, 256): ((128, 64, 8, 32, 32, 64, 1), (64, 64, 8, 32, 16, 64, 1), (64, 32, 4, 32, 8, 32, 2)),
    (2, 64): ((64, 64, 4, 16, 16, 32, 2), (32, 64, 4, 16, 16, 32, 2), (32, 32, 4, 16, 16, 32, 2)),
    (2, 128): ((64, 64, 8, 16, 16, 32, 1), (32, 64, 8, 16, 8, 32, 1), (32, 32, 4, 16, 8, 32, 2)),
    (2, 256): ((64, 32, 8, 16, 8, 32, 1), (32, 32, 8, 16, 4, 32, 1)),
}
_SIMT_BLOCK_WORK = 112              # BlockWork and ticket of kernels/bwd_simt.cu


class _SimtTile(NamedTuple):
    block_m: int
    block_n: int
    warps: int
    chunk_d: int            # columns of Q and K, or of dO and V, in a buffer
    chunk_m: int            # rows of Q or dO in a buffer
    chunk_q: int            # columns of K in a buffer, for as many of dQ
    blocks: int             # that share a multiprocessor
    smem: int


def _simt_sizes(problem: BackwardProblem) -> tuple[int, int, int]:
    """Words of a number in the kernel, padded head_dim, padded head_dim_v."""
    head_dim, head_dim_v = (next(size for size in SIMT_HEAD_DIMS if size >= wanted)
                            for wanted in (problem.head_dim, problem.head_dim_v))
    return 2 if problem.dtype == "float64" else 1, head_dim, head_dim_v


def _simt_tile(words: int, head_dim: int, head_dim_v: int, smem_optin: int) -> _SimtTile | None:
    widest, fitting = max(head_dim, head_dim_v), []
    limit = next(limit for limit in (64, 128, 256) if widest <= limit)
    for block_m, block_n, warps, chunk_d, chunk_m, chunk_q, blocks in _SIMT_TILES[words, limit]:
        chunk_q = chunk_q if head_dim % chunk_q == 0 else 32
        # Two buffers, P and dS, two facts of each row.
        buffer = max((block_m + block_n) * (chunk_d + 4 // words), chunk_m * widest, block_n * chunk_q)
        smem = 4 * words * (2 * buffer + 2 * block_m * (block_n + 8) + 2 * block_m) + _SIMT_BLOCK_WORK
        if smem <= smem_optin:
            blocks = min(blocks, (smem_optin + BLOCK_RESERVED_SMEM) // (smem + BLOCK_RESERVED_SMEM))
            fitting.append(_SimtTile(block_m, block_n, warps, chunk_d, chunk_m, chunk_q, blocks, smem))
    return max(fitting, key=lambda tile: min(8, tile.warps * tile.blocks), default=None)


def _refuse_simt(problem: BackwardProblem, device: Device) -> str | None:
    if _simt_tile(*_simt_sizes(problem), device.smem_optin) is None:
        return f"no tile fits into {device.smem_optin} bytes of shared memory; 48 KiB always do"
    return None


def _simt(problem: BackwardProblem, device: Device, refused) -> Config:
    words, head_dim, head_dim_v = _simt_sizes(problem)
    tile = _simt_tile(words, head_dim, head_dim_v, device.smem_optin)
    threads = tile.warps * 32
    heads, heads_why = _heads_in_group(problem, device, head_dim)
    vec = vec_bytes(problem.alignment, problem.dtype, problem.head_dim, problem.head_dim_v)
    out_vec = min(vec_bytes(problem.out_alignment, problem.dtype, problem.head_dim, problem.head_dim_v),
                  4 // words * ITEMSIZE[problem.dtype])
    constants = {
        **_shared_constants(problem),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "WARPS": tile.warps,
        "CHUNK_D": tile.chunk_d, "CHUNK_M": tile.chunk_m, "CHUNK_Q": tile.chunk_q, "SMEM_BYTES": tile.smem,
        "MIN_BLOCKS": tile.blocks, "VEC_BYTES": vec, "OUT_VEC_BYTES": out_vec,
    }
    reasons = (
        f"block_n = {tile.block_n}, warps = {tile.warps}  # a lane keeps {tile.block_n * head_dim // threads} numbers of dK and "
        f"{tile.block_n * head_dim_v // threads} of dV in registers",
        f"block_m = {tile.block_m}  # K and V are read once for so many query rows",
        f"chunk_d = {tile.chunk_d}, chunk_m = {tile.chunk_m}, chunk_q = {tile.chunk_q}  # columns and rows in a buffer; P and dS "
        "take the rest",
        f"smem_bytes = {tile.smem}  # {tile.blocks} block{'s' * (tile.blocks > 1)} a multiprocessor, the limit of one is "
        f"{device.smem_optin}",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v}, padded",
        f"vec_bytes = {vec}, out_vec_bytes = {out_vec}  # divide every address and every row",
        heads_why,
    )
    return Config("bwd_simt", tuple(sorted(constants.items())), threads, tile.smem, "simt", tile.block_m, tile.block_n, heads,
                  reasons, refused)


# ------------------------------------------------------------------------------------------------------ before and behind

def around(problem: BackwardProblem, config: Config) -> tuple[Kernel, ...]:
    """bwd_delta, the kernel of ``config`` and bwd_cast, or that of dq: the launches of a backward, in their order."""
    constants = dict(config.constants)
    threads = 256
    shared = {name: constants[name] for name in ("DTYPE", "HEAD_DIM", "VARLEN", "DQ_GROUP")} | {"THREADS": threads}
    if config.dq_block_m:
        shared["HEAD_DIM"] = 0          # there is no dq_sum
    delta_vec = vec_bytes(problem.alignment, problem.dtype, problem.head_dim_v)
    # As many lanes take a row, up to a warp, as it has parts of 16 bytes.
    lanes = min(32, 1 << (-(-problem.head_dim_v * ITEMSIZE[problem.dtype] // 16) - 1).bit_length())
    turns = int(problem.deterministic and not config.dq_block_m)
    cast = {**shared, "TRANSPOSED": int(config.kernel == "bwd_sm90" and config.block_m == 80),
            "OUT_VEC_BYTES": problem.out_alignment}
    delta = {**shared, "DETERMINISTIC": turns, "COUNTS_TILES": int(config.counts_tiles),
             "VEC_BYTES": delta_vec, "LANES": lanes}
    return (
        Kernel("bwd_delta", tuple(sorted(delta.items())), threads, 0),
        config,
        _wide_dq(problem) if config.dq_block_m else
        Kernel("bwd_cast", tuple(sorted(cast.items())), threads, 0))


REFUSALS = {"sm90": _refuse_sm90, "sm80": _refuse_sm80, "simt": _refuse_simt}
BUILDERS = {"sm90": _sm90, "sm80": _sm80, "simt": _simt}
