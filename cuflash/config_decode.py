"""Few queries on a cache of keys and values: which tier takes a problem, and with which tiles."""

from __future__ import annotations

from typing import NamedTuple

from .arrays import ITEMSIZE
from .config_base import (
    BLOCK_RESERVED_SMEM,
    Config,
    Device,
    Kernel,
    no_tensor_cores,
    no_tile,
    not_16_bit,
    not_hopper,
    round_up,
    shared_constants,
    vec_bytes,
)
from .problem import MAX_CACHE_HEAD_DIMS, MAX_HEAD_DIM, MAX_SEQLEN, DecodeProblem


def _shared_constants(problem: DecodeProblem, item_cost: int) -> dict[str, int]:
    """``item_cost``: tiles that take as long as all that a block does for an item but its tiles. Shares count it."""
    return {**shared_constants(problem), "PAGED": int(problem.paged), "APPENDS": int(problem.seqlen_new > 0),
            "FIXED_SPLITS": int(problem.num_splits > 0), "V_IS_K": int(problem.v_is_k), "ITEM_COST": item_cost}


def _max_blocks_reason(max_blocks: int, device: Device) -> str:
    a_multiprocessor = -(-max_blocks // device.num_sms)
    if max_blocks % device.num_sms:
        return f"max_blocks = {max_blocks}  # of {device.num_sms} multiprocessors: requests of one length have whole shares"
    return (f"max_blocks = {max_blocks}  # {a_multiprocessor} a multiprocessor, which "
            + ("keep the cache on its way together" if a_multiprocessor > 1 else "keeps enough of the cache on its way"))


# --------------------------------------------------------------------------------------------------------------- sm80

class _Sm80Warps(NamedTuple):
    mtiles: int             # of 16 query rows each, of a warp
    warps_m: int            # that part the rows of an item
    warps_n: int            # groups of them, that part the keys of a tile
    group_keys: int         # keys of a tile that a group has for itself
    keeps_q: bool = False   # Q stays in registers
    merge_cols: int = 32    # columns of O that the groups join at a time, in the memory of Q or little more

    @property
    def block_m(self) -> int:
        return 16 * self.mtiles * self.warps_m

    def fewer(self) -> _Sm80Warps:
        """With half of the keys of a tile: in groups of as many as a product takes at least, which need fewer registers, and
        then in fewer groups.
        """
        if self.group_keys > 16:
            return self._replace(group_keys=self.group_keys // 2)
        return self._replace(warps_n=self.warps_n // 2)


# By query rows of an item, up to so many, and by the wider of the two padded head dims; where shared memory is short a tile has
# fewer keys, and then an item fewer rows. Two mtiles read K and V from shared memory once for 32 rows; with wider heads their O
# would take all registers of a warp, so that warps part the rows. Q is kept where it and O leave registers to spare. With 32
# keys a group waits half as often, where their scores have registers.
_SM80_WARPS = (
    (16, {64: _Sm80Warps(1, 1, 8, 32, True), 128: _Sm80Warps(1, 1, 8, 16, True), 256: _Sm80Warps(1, 1, 8, 16)}),
    (32, {64: _Sm80Warps(2, 1, 8, 32), 128: _Sm80Warps(2, 1, 8, 16), 256: _Sm80Warps(1, 2, 4, 16)}),
    (MAX_SEQLEN, {64: _Sm80Warps(2, 2, 4, 32), 128: _Sm80Warps(2, 2, 4, 32, merge_cols=16), 256: _Sm80Warps(1, 4, 2, 16)}),
)
_SM80_STAGES = 2, 6                 # at least: one lands while one is used; at most: what a multiprocessor needs on its way
_SM80_MERGE_PAD = 8                 # columns: against bank conflicts
_SM80_ITEMS = 72                    # bytes of DecodeItems of kernels/attn/decode.cuh
_SM80_ITEM_COST = 128 * 1024        # bytes of keys and values that come in while Q of an item is fetched and it is written


class _Sm80Tile(NamedTuple):
    warps: _Sm80Warps
    stages: int
    smem: int

    @property
    def block_n(self) -> int:
        return self.warps.group_keys * self.warps.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps.warps_m * self.warps.warps_n


def _sm80_smem(head_dim: int, head_dim_v: int, tile: _Sm80Tile, paged: bool) -> int:
    """Bytes of SharedStorage of kernels/decode_sm80.cu: K and V of the stages; Q, or O of the groups; the max and the sum of
    their rows; items of the block, two in turns, and of each warp; pages.
    """
    block_m, groups = tile.warps.block_m, tile.warps.warps_n
    stages = 2 * tile.stages * tile.block_n * (head_dim + head_dim_v)
    queries, joined = 2 * block_m * head_dim, 4 * groups * block_m * (tile.warps.merge_cols + _SM80_MERGE_PAD)
    items, pages = _SM80_ITEMS * (2 + tile.threads // 32), 4 * tile.stages * tile.threads if paged else 4
    return round_up(stages + max(queries, joined) + 8 * groups * block_m + items + pages, 128)


def _sm80_tile(problem: DecodeProblem, device: Device) -> _Sm80Tile | None:
    """As many rows as the problem has, as many keys and then as many stages as fit; None if nothing does."""
    head_dim, head_dim_v = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    wanted = next(place for place, (rows, *_) in enumerate(_SM80_WARPS) if problem.rows <= rows)
    fewest, most = _SM80_STAGES
    for _, by_width in reversed(_SM80_WARPS[:wanted + 1]):
        warps = next(warps for limit, warps in by_width.items() if max(head_dim, head_dim_v) <= limit)
        while warps.warps_n:
            for stages in range(most, fewest - 1, -1):
                tile = _Sm80Tile(warps, stages, 0)
                smem = _sm80_smem(head_dim, head_dim_v, tile, problem.paged)
                if smem <= device.smem_optin:
                    return tile._replace(smem=smem)
            warps = warps.fewer()
    return None


def _refuse_sm80(problem: DecodeProblem, device: Device) -> str | None:
    if (reason := not_16_bit(problem) or no_tensor_cores(problem, device)) is not None:
        return reason
    if max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM:
        return f"O of head_dim above {MAX_HEAD_DIM} takes more registers than a warp has"
    if _sm80_tile(problem, device) is None:
        return no_tile(problem, device)
    return None


def _sm80(problem: DecodeProblem, device: Device, refused) -> Config:
    tile = _sm80_tile(problem, device)
    warps = tile.warps
    head_dim, head_dim_v = round_up(problem.head_dim, 32), round_up(problem.head_dim_v, 32)
    item_cost = min(4, max(1, round(_SM80_ITEM_COST / (2 * tile.block_n * (head_dim + head_dim_v)))))
    constants = {
        **_shared_constants(problem, item_cost),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "WHOLE_HEADS": int((problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)),
        "BLOCK_M": warps.block_m, "BLOCK_N": tile.block_n, "MTILES": warps.mtiles, "WARPS_M": warps.warps_m,
        "WARPS_N": warps.warps_n, "GROUP_KEYS": warps.group_keys, "KEEPS_Q": int(warps.keeps_q), "STAGES": tile.stages,
        "MERGE_COLS": warps.merge_cols, "SMEM_BYTES": tile.smem, "VEC_BYTES": problem.alignment,
        "OUT_VEC_BYTES": problem.out_alignment,
    }
    vec = ("16-byte copies" if problem.alignment == 16 else
           f"an address or stride is no multiple of 16 bytes: copies are {16 // problem.alignment} times as many")
    reasons = (
        f"block_m = {warps.block_m}, mtiles = {warps.mtiles}, warps_m = {warps.warps_m}, keeps_q = {int(warps.keeps_q)}  # "
        f"{problem.rows} query rows read a key head; the more of them in an item, the less often is the cache read",
        f"block_n = {tile.block_n}, warps_n = {warps.warps_n}, group_keys = {warps.group_keys}  # each group of warps waits "
        "for its own keys and for nobody else",
        f"stages = {tile.stages}  # as many key tiles on their way as fit, up to {_SM80_STAGES[1]}",
        f"merge_cols = {warps.merge_cols}  # columns of O that the groups of warps join at a time",
        f"item_cost = {item_cost}  # tiles that an item counts for in the share of a block, beside those that it has",
        f"smem_bytes = {tile.smem}  # a block a multiprocessor, the limit of one is {device.smem_optin}",
        f"head_dim = {head_dim}, head_dim_v = {head_dim_v}  # {problem.head_dim} and {problem.head_dim_v} in whole groups of 32",
        f"vec_bytes = {problem.alignment}  # {vec}",
        _max_blocks_reason(device.num_sms, device),
    )
    return Config("decode_sm80", tuple(sorted(constants.items())), tile.threads, tile.smem, "sm80", warps.block_m, tile.block_n,
                  1, reasons, refused, max_blocks=device.num_sms)


# --------------------------------------------------------------------------------------------------------------- sm90

_SM90_BLOCK_M = 64                  # rows of one wgmma
_SM90_BLOCK_N = 64                  # keys: a panel of P
_SM90_THREADS = 384                 # a warpgroup that loads, two that compute
_SM90_FACTS = 1024                  # barriers and facts of rows, in whole alignments of the tiles
# Up to so many rows of a key head decode_sm80 reads the cache as fast as memory gives it; beyond, mma.sync is too slow for that.
_SM80_FAST_ROWS = 32


def _refuse_sm90(problem: DecodeProblem, device: Device) -> str | None:
    if (reason := not_16_bit(problem) or not_hopper(device)) is not None:
        return reason
    is_wide = max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM
    if is_wide and not problem.v_is_k:
        return (f"with head_dim or head_dim_v above {MAX_HEAD_DIM} values must be the first columns of the keys, "
                "v_cache = k_cache[..., :head_dim_v]")
    if is_wide and min(problem.head_dim, problem.head_dim_v) <= MAX_HEAD_DIM:
        return (f"made for head_dim and head_dim_v both above {MAX_HEAD_DIM} or both not; got {problem.head_dim} and "
                f"{problem.head_dim_v}")
    if problem.alignment < 16:
        return "addresses and strides of q, the caches, k and v must be multiples of 16 bytes"
    if not is_wide and problem.rows <= _SM80_FAST_ROWS:
        return (f"made for more than {_SM80_FAST_ROWS} query rows a key head, up to which sm80 is as fast as memory; got "
                f"{problem.rows}")
    if (_latent_smem() > device.smem_optin) if is_wide else (_rows_tile(problem, device) is None):
        return no_tile(problem, device)
    return None


def _sm90(problem: DecodeProblem, device: Device, refused) -> Config:
    is_wide = max(problem.head_dim, problem.head_dim_v) > MAX_HEAD_DIM
    return (_latent_sm90 if is_wide else _rows_sm90)(problem, device, refused)


def _sm90_constants(problem: DecodeProblem, head_dim: int, head_dim_v: int, smem: int) -> dict[str, int]:
    return {
        **_shared_constants(problem, 0),
        "HEAD_DIM": head_dim, "HEAD_DIM_V": head_dim_v,
        "WHOLE_HEADS": int((problem.head_dim, problem.head_dim_v) == (head_dim, head_dim_v)),
        "BLOCK_M": _SM90_BLOCK_M, "BLOCK_N": _SM90_BLOCK_N, "SMEM_BYTES": smem, "VEC_BYTES": 16,
        "OUT_VEC_BYTES": vec_bytes(problem.out_alignment, problem.dtype, problem.head_dim_v),
    }


def _sm90_config(kernel: str, constants: dict[str, int], device: Device, max_blocks: int, reasons, refused) -> Config:
    smem = constants["SMEM_BYTES"]
    reasons = (
        *reasons,
        f"smem_bytes = {smem}  # a block a multiprocessor, the limit of one is {device.smem_optin}",
        f"out_vec_bytes = {constants['OUT_VEC_BYTES']}  # divides every address and every row of out",
        _max_blocks_reason(max_blocks, device),
    )
    return Config(kernel, tuple(sorted(constants.items())), _SM90_THREADS, smem, "sm90", _SM90_BLOCK_M, _SM90_BLOCK_N, 1,
                  reasons, refused, max_blocks=max_blocks)


_LATENT_HEAD_DIM, _LATENT_HEAD_DIM_V = MAX_CACHE_HEAD_DIMS
_LATENT_STAGES = 2                  # with Q and P they take all shared memory but 3 KiB
_LATENT_FACTS = 3072                # barriers and facts of rows, in whole alignments of the tiles


def _latent_smem() -> int:
    """Bytes of SharedStorage of kernels/decode_sm90.cu: keys, which hold the values, Q, P, barriers and facts of rows."""
    keys = _LATENT_STAGES * _SM90_BLOCK_N * _LATENT_HEAD_DIM
    return 2 * (keys + _SM90_BLOCK_M * _LATENT_HEAD_DIM + _SM90_BLOCK_M * _SM90_BLOCK_N) + _LATENT_FACTS


def _latent_tma(problem: DecodeProblem) -> tuple[bool, str]:
    """Whether whole key tiles come by TMA, and why."""
    if not problem.tma:
        return False, "strides of the cache are negative, or 1 TiB or more: keys are copied row by row"
    if problem.page_size % _SM90_BLOCK_N:
        return False, f"a page of {problem.page_size} keys does not hold whole tiles: keys are copied row by row"
    return True, "key tiles lie in one piece"


def _latent_blocks(problem: DecodeProblem, device: Device) -> int:
    """As many blocks as there are multiprocessors, or up to 1/24 fewer if requests of one length then have whole shares: fewer
    parts are to be written, and joined.
    """
    items = problem.batch * -(-problem.rows // _SM90_BLOCK_M) * problem.heads_k
    fewest = device.num_sms - device.num_sms // 24
    return next((blocks for blocks in range(device.num_sms, fewest - 1, -1)
                 if items and (blocks % items == 0 or items % blocks == 0)), device.num_sms)


def _latent_sm90(problem: DecodeProblem, device: Device, refused) -> Config:
    by_tma, why = _latent_tma(problem)
    reasons = (
        f"block_m = {_SM90_BLOCK_M}  # rows of one wgmma; {problem.rows} query rows read a key head",
        f"block_n = {_SM90_BLOCK_N}  # keys, whose first columns are the values: {_LATENT_STAGES} stages, Q and P fill "
        "the memory",
        f"head_dim = {_LATENT_HEAD_DIM}, head_dim_v = {_LATENT_HEAD_DIM_V}  # {problem.head_dim} and {problem.head_dim_v}, "
        "padded; each of two warpgroups has half of the columns of O",
        f"tma = {int(by_tma)}  # {why}",
    )
    constants = _sm90_constants(problem, _LATENT_HEAD_DIM, _LATENT_HEAD_DIM_V, _latent_smem()) | {"TMA": int(by_tma)}
    return _sm90_config("decode_sm90", constants, device, _latent_blocks(problem, device), reasons, refused)


_ROWS_STAGES = (6, 4, 2)            # as many as fit; each warpgroup that computes has half of them
_ROWS_JOIN_COLUMNS = 64             # of O, that one warpgroup hands to the other at a time
_ROWS_REGISTERS_OF_Q_AND_O = 96     # of a thread: with S and P they leave the others enough


class _RowsTile(NamedTuple):
    head_dim: int
    head_dim_v: int
    keeps_q: bool           # Q stays in registers
    stages: int
    smem: int


def _rows_tile(problem: DecodeProblem, device: Device) -> _RowsTile | None:
    """The tile of decode_rows_sm90; None if none fits."""
    head_dim, head_dim_v = round_up(problem.head_dim, 64), round_up(problem.head_dim_v, 64)
    # More than 32 registers of Q make some variants of NVRTC 12.9 serialise their products (C7520).
    keeps_q = head_dim <= 128 and head_dim // 4 + head_dim_v // 2 <= _ROWS_REGISTERS_OF_Q_AND_O
    for stages in _ROWS_STAGES:
        # SharedStorage of kernels/decode_rows_sm90.cu: K and V of the stages, Q; columns of O; barriers and facts of rows.
        tiles = 2 * (stages * _SM90_BLOCK_N * (head_dim + head_dim_v) + _SM90_BLOCK_M * head_dim)
        smem = tiles + 4 * _SM90_BLOCK_M * _ROWS_JOIN_COLUMNS + _SM90_FACTS
        if smem <= device.smem_optin:
            return _RowsTile(head_dim, head_dim_v, keeps_q, stages, smem)
    return None


def _rows_sm90(problem: DecodeProblem, device: Device, refused) -> Config:
    tile = _rows_tile(problem, device)
    constants = _sm90_constants(problem, tile.head_dim, tile.head_dim_v, tile.smem)
    constants |= {"STAGES": tile.stages, "KEEPS_Q": int(tile.keeps_q)}
    kept = "they leave registers for it" if tile.keeps_q else "they leave no registers for it"
    reasons = (
        f"block_m = {_SM90_BLOCK_M}  # rows of one wgmma; {problem.rows} query rows read a key head",
        f"block_n = {_SM90_BLOCK_N}  # keys of a tile; two warpgroups take the tiles in turns",
        f"stages = {tile.stages}  # as many key tiles on their way as fit, up to {_ROWS_STAGES[0]}; half for each warpgroup",
        f"keeps_q = {int(tile.keeps_q)}  # Q in registers spares shared memory its reads; beside O, {kept}",
        f"head_dim = {tile.head_dim}, head_dim_v = {tile.head_dim_v}  # {problem.head_dim} and {problem.head_dim_v} in whole "
        "groups of 64",
    )
    return _sm90_config("decode_rows_sm90", constants, device, device.num_sms, reasons, refused)


# --------------------------------------------------------------------------------------------------------------- simt

_SIMT_HEAD_DIMS_V = (32, 64, 128, 256, 384, 512)        # few, since each is a kernel; lanes share their columns evenly
_SIMT_WARPS = 4
_SIMT_LANES_M = 4                   # of a warp, along keys
_SIMT_READ = 128                    # bytes of a key that the other 8 lanes read at once
_SIMT_O_COLUMNS = 64 * 32           # numbers of O of an item in 64 registers of each lane; as many go to the sum over a tile
_SIMT_Q_BYTES = 12 * 1024
_SIMT_CHUNK_BYTES = 4096            # of a warp
_SIMT_WARP_BYTES = 8192             # of its chunks that are on their way


class _SimtTile(NamedTuple):
    head_dim: int
    head_dim_v: int
    block_m: int
    keys: int               # of a lane
    chunk_k: int            # columns of K in a buffer
    chunk_v: int            # keys of V in a buffer
    stages: int             # buffers of a warp
    blocks: int             # that share a multiprocessor
    smem: int

    @property
    def block_n(self) -> int:
        return _SIMT_WARPS * _SIMT_LANES_M * self.keys


def _simt_tile(problem: DecodeProblem, device: Device) -> _SimtTile:
    itemsize, words = ITEMSIZE[problem.dtype], 2 if problem.dtype == "float64" else 1
    head_dim = round_up(problem.head_dim, _SIMT_READ // itemsize)
    head_dim_v = next(size for size in _SIMT_HEAD_DIMS_V if size >= problem.head_dim_v)
    keys = 4 // words                   # 16 bytes of S in a lane for each row
    warp_keys = _SIMT_LANES_M * keys
    most = next(rows for rows in (8, 4, 2, 1) if rows * head_dim_v * words <= _SIMT_O_COLUMNS
                and rows * head_dim * 4 * words <= _SIMT_Q_BYTES)
    block_m = min(most, 1 << (max(problem.rows, 1) - 1).bit_length())
    chunk_k = next(cols for cols in (512, 256, 128, 64, 32, 16) if head_dim % cols == 0 and cols * itemsize % _SIMT_READ == 0
                   and warp_keys * cols * itemsize <= _SIMT_CHUNK_BYTES)
    chunk_v = next(rows for rows in (16, 8, 4, 2, 1) if rows <= warp_keys and rows * head_dim_v * itemsize <= _SIMT_CHUNK_BYTES)
    buffer = max(warp_keys * chunk_k, chunk_v * head_dim_v) * itemsize
    stages = min(max(_SIMT_WARP_BYTES // buffer, 2), 4)
    # Q; of each warp its buffers, in which O stands at the end, P, and three numbers of each row.
    of_warp = max(stages * buffer, 4 * words * block_m * head_dim_v) + 4 * words * block_m * (warp_keys + 3)
    smem = 4 * words * block_m * head_dim + _SIMT_WARPS * of_warp
    # With more blocks some kernels spill.
    is_wide = words == 2 or block_m * head_dim_v > 32 * 32 or block_m == 8 and itemsize == 2
    blocks = 2 if is_wide else 4 if block_m <= 2 and block_m * head_dim_v <= 16 * 32 else 3
    blocks = min(blocks, max(1, (device.smem_optin + BLOCK_RESERVED_SMEM) // (smem + BLOCK_RESERVED_SMEM)))
    return _SimtTile(head_dim, head_dim_v, block_m, keys, chunk_k, chunk_v, stages, blocks, smem)


def _refuse_simt(problem: DecodeProblem, device: Device) -> str | None:
    if _simt_tile(problem, device).smem > device.smem_optin:
        return f"no tile fits into {device.smem_optin} bytes of shared memory; 48 KiB always do"
    return None


def _simt(problem: DecodeProblem, device: Device, refused) -> Config:
    tile = _simt_tile(problem, device)
    vec = vec_bytes(problem.alignment, problem.dtype, problem.head_dim, problem.head_dim_v)
    out_vec = vec_bytes(problem.out_alignment, problem.dtype, problem.head_dim_v)
    max_blocks = device.num_sms * tile.blocks
    constants = {
        **_shared_constants(problem, 0),
        "HEAD_DIM": tile.head_dim, "HEAD_DIM_V": tile.head_dim_v, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "WARPS": _SIMT_WARPS, "KEYS": tile.keys, "CHUNK_K": tile.chunk_k, "CHUNK_V": tile.chunk_v, "STAGES": tile.stages,
        "SMEM_BYTES": tile.smem, "MIN_BLOCKS": tile.blocks, "VEC_BYTES": vec, "OUT_VEC_BYTES": out_vec,
    }
    reasons = (
        f"block_m = {tile.block_m}  # {problem.rows} query rows read a key head; O of more of them than 8, or in all than 64 "
        "registers of a lane, would spill",
        f"block_n = {tile.block_n}, warps = {_SIMT_WARPS}, keys = {tile.keys}  # each warp goes over its own keys alone, "
        f"{tile.keys} for each of {_SIMT_LANES_M} lanes",
        f"chunk_k = {tile.chunk_k}, chunk_v = {tile.chunk_v}, stages = {tile.stages}  # columns of K and keys of V in a buffer, "
        "and the buffers of a warp",
        f"smem_bytes = {tile.smem}  # {tile.blocks} block{'s' * (tile.blocks > 1)} a multiprocessor, the limit of one is "
        f"{device.smem_optin}",
        f"head_dim = {tile.head_dim}, head_dim_v = {tile.head_dim_v}  # {problem.head_dim} and {problem.head_dim_v}, padded",
        f"vec_bytes = {vec}, out_vec_bytes = {out_vec}  # divide every address and every row",
        _max_blocks_reason(max_blocks, device),
    )
    return Config("decode_simt", tuple(sorted(constants.items())), 32 * _SIMT_WARPS, tile.smem, "simt", tile.block_m,
                  tile.block_n, 1, reasons, refused, max_blocks=max_blocks)


# ------------------------------------------------------------------------------------------------------------------ behind

_COMBINE_THREADS = 256
_WIDE_COMBINE_BLOCKS = 2            # of each border between two shares: all of them are on the GPU at once


def around(problem: DecodeProblem, config: Config) -> tuple[Kernel, ...]:
    """The kernel of ``config`` and, unless every item is one part, the one that joins them: the launches of a call, in their
    order.
    """
    if problem.num_splits == 1:
        return (config,)
    names = ("DTYPE", "MASK_LEFT", "MASK_RIGHT", "VARLEN", "PAGED", "APPENDS", "FIXED_SPLITS", "V_IS_K", "BLOCK_M", "BLOCK_N",
             "HEAD_DIM_V", "ITEM_COST")
    constants = dict(config.constants)
    combine = {name: constants[name] for name in names}
    combine |= {"THREADS": _COMBINE_THREADS, "OUT_VEC_BYTES": vec_bytes(problem.out_alignment, problem.dtype, problem.head_dim_v)}
    kernel = "decode_combine"
    if config.kernel == "decode_sm90":
        kernel, combine["BLOCKS"] = "decode_combine_wide", _WIDE_COMBINE_BLOCKS
    return config, Kernel(kernel, tuple(sorted(combine.items())), _COMBINE_THREADS, 0)


REFUSALS = {"sm90": _refuse_sm90, "sm80": _refuse_sm80, "simt": _refuse_simt}
BUILDERS = {"sm90": _sm90, "sm80": _sm80, "simt": _simt}
