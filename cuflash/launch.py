"""From a problem and its arrays to launches: the params record, the grids, scratch, and what a repeated call reuses."""

from __future__ import annotations

import ctypes
import functools
import struct

import numpy as np

from . import jit, tma
from .arrays import ITEMSIZE, View
from .config import Config, Device, Kernel, choose, kernels_of, tiled
from .config_base import DQ_GROUP, LIST_HEADER, LISTED_WORDS, panel_of, round_up
from .driver import EarlyLaunch
from .memory import byte_extent, contiguous_strides
from .problem import (
    BackwardProblem,
    DecodeProblem,
    Problem,
    check_workspace_size,
    pairs_to_keep_apart,
)

_FORWARD_POINTERS = ("q", "k", "v", "out", "lse", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "tiles")
_FORWARD_STRIDES = ("q", "k", "v", "out")
_BACKWARD_POINTERS = ("dout", "dlse", "dq", "dk", "dv", "rows", "dq_sum", "turns")
_BACKWARD_STRIDES = ("dout", "dq", "dk", "dv")
_DECODE_POINTERS = ("k_new", "v_new", "cache_seqlens", "cache_batch_idx", "block_table", "partial_out", "partial_lse")
_DECODE_STRIDES = ("k_new", "v_new")
_DECODE_SIZES = ("num_slots", "page_size", "seqlen_new", "fixed_seqlen", "num_splits", "num_row_tiles", "num_blocks",
                 "decode_int64_lengths")
_TENSOR_MAPS = ("q", "k", "v", "dout")      # a forward has the first three
_SIZES = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v")


def _fields(names, *of_each) -> list[tuple]:
    return [(name, *of_each) for name in names]


# FwdParams and BwdParams of kernels/attn/params.cuh and DecodeParams of kernels/attn/decode.cuh, field by field; the kernels
# check sizes and offsets when they are compiled.
FWD_PARAMS = np.dtype(
    _fields(_FORWARD_POINTERS, np.uint64) + _fields((f"{name}_strides" for name in _FORWARD_STRIDES), np.int64, 3)
    + _fields(("scale_log2", "tanh_scale", "cap_log2"), np.float64)
    + _fields((*_SIZES, "window_left", "window_right", "num_tiles", "num_short_tiles", "heads_in_group", "int64_lengths"),
              np.int32), align=True)
BWD_PARAMS = np.dtype(
    [(name, FWD_PARAMS[name]) for name in FWD_PARAMS.names]
    + _fields(_BACKWARD_POINTERS, np.uint64) + _fields((f"{name}_strides" for name in _BACKWARD_STRIDES), np.int64, 3)
    + [("softmax_scale", np.float64), ("num_query_tiles", np.int32)], align=True)
DECODE_PARAMS = np.dtype(
    [(name, FWD_PARAMS[name]) for name in FWD_PARAMS.names]
    + _fields(_DECODE_POINTERS, np.uint64) + _fields((f"{name}_strides" for name in _DECODE_STRIDES), np.int64, 3)
    + [("block_table_stride", np.int64)] + _fields(_DECODE_SIZES, np.int32), align=True)

_FIXED_SEQLEN_OFFSET = DECODE_PARAMS.fields["fixed_seqlen"][1]
_LOG2_E = 1.4426950408889634
TENSOR_MAPS_OFFSET = round_up(FWD_PARAMS.itemsize, 64)      # they follow FwdParams in TmaParams of fwd_sm90
BWD_TENSOR_MAPS_OFFSET = round_up(BWD_PARAMS.itemsize, 64)  # and BwdParams in that of bwd_sm90
DECODE_TENSOR_MAPS_OFFSET = round_up(DECODE_PARAMS.itemsize, 64)        # and DecodeParams in TmaDecodeParams of decode_sm90
_TOLD_PARTS_BYTES = 40              # of a block, behind the lse of parts: kernels/attn/parts_told.cuh
MAX_GRID = 2**31 - 1
MAX_THREADS = 2**32 - 1024           # that count themselves in 32 bits


def params_constants() -> dict[str, int]:
    """The -D macros in which a kernel checks that its params are FWD_PARAMS, BWD_PARAMS or DECODE_PARAMS."""
    offsets = {f"OFFSET_{name}": offset for record in (BWD_PARAMS, DECODE_PARAMS)
               for name, (_, offset) in record.fields.items()}
    return {**offsets, "FWD_PARAMS_BYTES": FWD_PARAMS.itemsize, "BWD_PARAMS_BYTES": BWD_PARAMS.itemsize,
            "DECODE_PARAMS_BYTES": DECODE_PARAMS.itemsize, "TENSOR_MAPS_OFFSET": TENSOR_MAPS_OFFSET,
            "BWD_TENSOR_MAPS_OFFSET": BWD_TENSOR_MAPS_OFFSET, "DECODE_TENSOR_MAPS_OFFSET": DECODE_TENSOR_MAPS_OFFSET}


def kernel_constants(kernel: Kernel) -> dict[str, int]:
    """All constants that a kernel is compiled with."""
    return {**dict(kernel.constants), **params_constants()}


def arch_of(kernel: Kernel, arch: str) -> str:
    """The ``-arch`` of a kernel on a GPU whose other kernels are compiled for ``arch``."""
    return arch + "a" * kernel.is_accelerated


# ---------------------------------------------------------------------------------------------------------- tiles, grids

def _num_pieces(problem: Problem, rows: int, size: int) -> int:
    """Pieces of ``size`` rows that one head has, each sequence beginning with one. Packed: the most that there can be.

    Those are what the rows fill, and for each sequence one that it begins and does not fill; the rows that no sequence
    covers are one more.
    """
    return rows // size + problem.batch + 1 if problem.varlen else -(-rows // size)


def num_tiles(problem: Problem, config: Config) -> int:
    """Tiles of one head: of queries, backward of keys. Of a decoding: of the query rows of a key head.

    Of a packed backward whose dq has a kernel of its own the most of either: its two lists have one place.
    """
    tiles = _num_pieces(problem, *tiled(problem, config))
    return max(tiles, num_dq_tiles(problem, config)) if config.dq_block_m and problem.varlen else tiles


def num_dq_tiles(problem: BackwardProblem, config: Config) -> int:
    """Tiles of queries of one head in a kernel of dq."""
    return _num_pieces(problem, problem.seqlen_q, config.dq_block_m)


def num_query_tiles(problem: BackwardProblem, config: Config) -> int:
    """Tiles of queries of one head in a backward."""
    return _num_pieces(problem, problem.seqlen_q, config.block_m)


def num_dq_groups(problem: BackwardProblem) -> int:
    """Groups of rows of one head in dq_sum (kernels/attn/gradient.cuh)."""
    return _num_pieces(problem, problem.seqlen_q, DQ_GROUP)


def grid_of(problem: Problem, config: Config) -> int:
    """Thread blocks of the kernel with the tiles. Raises ValueError past what one launch holds."""
    is_backward, is_decode = isinstance(problem, BackwardProblem), isinstance(problem, DecodeProblem)
    heads, side = problem.heads_k if is_backward or is_decode else problem.heads_q, "key" if is_backward else "query"
    tiles = num_tiles(problem, config)
    grid = tiles * problem.batch_axis * heads
    if grid > MAX_GRID:         # in blocks that take many tiles too: they count them in as many bits
        raise ValueError(f"batch * heads * {side} tiles must be at most {MAX_GRID}; got {problem.batch_axis} * {heads} * "
                         f"{tiles}: split the batch")
    if is_decode:
        key_tiles = -(-problem.seqlen_k // config.block_n) + 1 + dict(config.constants)["ITEM_COST"]     # with an item's cost
        limit = MAX_GRID - config.max_blocks            # a block counts on to what would be its next
        for what, count in (("key tiles", key_tiles), ("num_splits", problem.num_splits)):
            if grid * count > limit:
                raise ValueError(f"batch * heads of k_cache * query tiles * {what} must be at most {limit}; got "
                                 f"{problem.batch} * {heads} * {tiles} * {count}: split the batch")
        # Blocks share the keys of an item, or append where there is none.
        return min(grid * problem.num_splits, config.max_blocks) or config.max_blocks
    return min(grid, config.max_blocks or grid)


def dq_grid_of(problem: BackwardProblem, config: Config) -> int:
    """Thread blocks of a kernel of dq."""
    tiles = num_dq_tiles(problem, config)
    grid = tiles * problem.batch_axis * problem.heads_q
    if grid > MAX_GRID:
        raise ValueError(f"batch * heads * query tiles must be at most {MAX_GRID}; got {problem.batch_axis} * "
                         f"{problem.heads_q} * {tiles}: split the batch")
    return min(grid, config.max_blocks) * (problem.seqlen_q > 0)


def num_items(problem: DecodeProblem, config: Config) -> int:
    """Tiles of query rows of all requests and key heads."""
    return problem.batch * num_tiles(problem, config) * problem.heads_k


def steps_of(problem: Problem, config: Config) -> list[tuple[Kernel, int]]:
    """The kernels of a call, in the order of their launches, with the thread blocks of each; none without work."""
    grid, is_backward = grid_of(problem, config), isinstance(problem, BackwardProblem)
    steps = []
    for kernel in kernels_of(problem, config):
        if kernel.kernel == "bwd_delta":
            blocks = _blocks_of_rows(problem, kernel)
            if problem.deterministic or config.counts_tiles:
                blocks = max(1, blocks)         # it also sets the turns to 0, even those of no row
        elif kernel.kernel == "bwd_cast":
            warps = problem.batch_axis * problem.heads_q * num_dq_groups(problem) * (dict(kernel.constants)["HEAD_DIM"] // 32)
            blocks = -(-warps * 32 // kernel.threads) * (problem.seqlen_q > 0)
        elif kernel.kernel == "bwd_dq_sm90":
            blocks = dq_grid_of(problem, config)
        elif kernel.kernel in ("decode_combine", "decode_combine_wide"):        # for each item or border between two blocks
            items = num_items(problem, config)
            blocks = items if problem.num_splits else (grid - 1) * (items > 0)
            blocks *= dict(kernel.constants).get("BLOCKS", 1)
        else:
            has_tiles = not is_backward or problem.seqlen_k * problem.heads_k > 0
            if config.dq_block_m:
                # The kernel of the keys also sets the counter of that of dq to 0, and the lists are of both.
                has_tiles, grid = has_tiles or problem.seqlen_q > 0, max(1, grid)
            blocks = (1 if kernel.kernel == "varlen_tiles" else grid) * has_tiles
        if blocks:
            steps.append((kernel, blocks))
    return steps


def _blocks_of_rows(problem: BackwardProblem, kernel: Kernel) -> int:
    """Thread blocks of a kernel of which LANES threads take a row of a query head."""
    threads = problem.batch_axis * problem.seqlen_q * problem.heads_q * dict(kernel.constants)["LANES"]
    if threads > MAX_THREADS:
        raise ValueError(f"batch * heads * seqlen of q must be at most {MAX_THREADS // dict(kernel.constants)['LANES']}; got "
                         f"{problem.batch_axis} * {problem.heads_q} * {problem.seqlen_q}: split the batch")
    return -(-threads // kernel.threads)


def scratch_of(problem: Problem, config: Config) -> dict[str, int]:
    """Bytes of each scratch array of a call, in the order of the params."""
    sizes = {}
    if problem.varlen:
        levels = max(problem.seqlen_q, problem.seqlen_k) // tiled(problem, config)[1] + 2
        sizes["tiles"] = 4 * (LIST_HEADER + LISTED_WORDS * num_tiles(problem, config) + levels)
    elif config.counts_tiles and not isinstance(problem, BackwardProblem):
        sizes["tiles"] = 4 * LIST_HEADER
    if isinstance(problem, DecodeProblem) and problem.num_splits != 1:
        items = num_items(problem, config)
        slots = items * problem.num_splits if problem.num_splits else 2 * grid_of(problem, config) * (items > 0)
        rows = ITEMSIZE[problem.lse_dtype] * slots * config.block_m
        sizes["partial_out"], sizes["partial_lse"] = rows * dict(config.constants)["HEAD_DIM_V"], rows
        if config.kernel == "decode_sm90" and not problem.num_splits:
            sizes["partial_lse"] += _TOLD_PARTS_BYTES * grid_of(problem, config)
    if isinstance(problem, BackwardProblem):
        real, heads = ITEMSIZE[problem.lse_dtype], problem.batch_axis * problem.heads_q
        sizes["rows"] = 2 * real * heads * problem.seqlen_q
        if config.dq_block_m:
            sizes["turns"] = 4 * 2      # the counters of two kernels
            return sizes
        sizes["dq_sum"] = dict(config.constants)["HEAD_DIM"] * real * heads * DQ_GROUP * num_dq_groups(problem)
        if problem.deterministic or config.counts_tiles:
            turns = problem.batch_axis * problem.heads_q * num_query_tiles(problem, config) if problem.deterministic else 0
            sizes["turns"] = 4 * (1 + turns)
    return sizes


def scratch_places(problem: Problem, config: Config) -> tuple[dict[str, int], int]:
    """Where each scratch array begins in the one allocation of a call, and the bytes of that."""
    offsets, end = {}, 0
    for name, num_bytes in scratch_of(problem, config).items():
        offsets[name] = end
        end += round_up(max(1, num_bytes), 256)
    return offsets, end


def strides_of(problem: Problem, views: dict[str, View | None]) -> dict[str, tuple[int, ...]]:
    """The strides that the params record of a call has, in elements, by their names there. Results that are not given are
    row-major; other arrays that are not given have none.
    """
    if isinstance(problem, DecodeProblem):
        names = {"q": "q", "k": "k_cache", "v": "v_cache", "out": "out", "k_new": "k", "v_new": "v", "block_table": "block_table"}
    else:
        is_backward = isinstance(problem, BackwardProblem)
        names = {name: name for name in (*_FORWARD_STRIDES, *(_BACKWARD_STRIDES if is_backward else ()))}
    shapes, strides = problem.result_shapes, {}
    for name, view_name in names.items():
        view = views[view_name]
        if view is not None:
            strides[name] = view.strides
        elif view_name in shapes:
            strides[name] = contiguous_strides(shapes[view_name])
    return strides


# --------------------------------------------------------------------------------------------------------------- params

def params_of(problem: Problem, config: Config, strides: dict[str, tuple[int, ...]]) -> np.ndarray:
    """The params record of a call, its pointers still null. ``strides`` of each array with 4 axes, in elements.

    Of a decoding k and v are the caches; ``block_table`` has 2 axes.
    """
    is_backward, is_decode = isinstance(problem, BackwardProblem), isinstance(problem, DecodeProblem)
    record = np.zeros((), BWD_PARAMS if is_backward else DECODE_PARAMS if is_decode else FWD_PARAMS)
    for name, values in strides.items():
        if name == "block_table":
            record["block_table_stride"] = values[0]
        else:
            record[f"{name}_strides"] = values[:3]
    record["scale_log2"] = problem.softmax_scale * _LOG2_E
    if problem.softcap:
        record["tanh_scale"] = problem.softmax_scale / problem.softcap
        record["cap_log2"] = problem.softcap * _LOG2_E
    for name in _SIZES:
        record[name] = getattr(problem, name)
    record["window_left"] = problem.window_left or 0
    record["window_right"] = problem.window_right or 0
    tiles = record["num_tiles"] = num_tiles(problem, config)
    # Under a right mask a later query tile sees more keys, and an earlier key tile is seen by more queries. Without one all are
    # as long. Of a packed batch varlen_tiles counts them, if there are to be any.
    short_last = config.short_tiles_last and (problem.window_right is not None or problem.varlen)
    record["num_short_tiles"] = tiles // 2 if short_last else 0
    record["heads_in_group"] = config.heads_in_group
    record["int64_lengths"] = problem.int64_lengths
    if is_backward:
        record["softmax_scale"] = problem.softmax_scale
        record["num_query_tiles"] = num_query_tiles(problem, config)
    if is_decode:
        for name in ("num_slots", "page_size", "seqlen_new", "num_splits", "decode_int64_lengths"):
            record[name] = getattr(problem, name)
        record["num_row_tiles"] = tiles
        record["num_blocks"] = grid_of(problem, config)
    return record


_FORWARD_PROMOTED = 128     # bytes; 256 are slower by up to 3% where sequences are short: docs/fwd_sm90.md


def boxes_of(config: Config) -> dict[str, tuple[int, ...]]:
    """(columns, rows) of what one copy takes of each array that has a tensor map, in the order of the maps; what else
    `tma.encode` takes behind them.
    """
    constants = dict(config.constants)
    if config.kernel == "bwd_dkv_sm90":                 # bwd_dq_sm90 has the same
        return dict.fromkeys(_TENSOR_MAPS, (panel_of(constants["HEAD_DIM"]), config.block_m))
    if config.kernel == "bwd_sm90":
        panel = panel_of(constants["HEAD_DIM"])
        return {"q": (panel, config.block_m), "k": (constants["K_PANEL"], config.block_n), "v": (panel, config.block_n),
                "dout": (panel, config.block_m)}
    if config.kernel == "decode_sm90":
        return {"k": (panel_of(constants["HEAD_DIM"]), config.block_n)} if constants["TMA"] else {}
    panel, panel_v = panel_of(constants["HEAD_DIM"]), panel_of(constants["HEAD_DIM_V"])
    boxes = {"q": (panel, 64), "k": (panel, config.block_n), "v": (panel_v, config.block_n)}
    return {name: (*box, _FORWARD_PROMOTED) for name, box in boxes.items()}


# -------------------------------------------------------------------------------------------------------------- launches

class Launch:
    """Kernels that run one after the other, with everything but pointers and stream filled in.

    All of them take the same params. One thread at a time: a call writes into them. ``num_pointers`` are passed to a call,
    in the order of the params.
    """

    def __init__(self, steps: list[tuple[Kernel, int]], loaded: list, params: np.ndarray, num_pointers: int,
                 early: bool = False):
        """``early``: the device lets kernels start early that can."""
        from cupy_backends.cuda.api.driver import launchKernel
        self._steps, self._loaded = steps, loaded       # `loaded` keeps the modules alive
        with_maps = BWD_TENSOR_MAPS_OFFSET + len(_TENSOR_MAPS) * tma.MAP_BYTES
        memory = ctypes.create_string_buffer(max(params.nbytes, with_maps) + 64)
        start = -ctypes.addressof(memory) % 64          # tensor maps want it
        self._params = (ctypes.c_char * (len(memory) - start)).from_buffer(memory, start)
        self._params[:params.nbytes] = params.tobytes()
        self._argv = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._write = self._writer(num_pointers, 0)
        self._launches = []
        for (kernel, grid), variant in zip(steps, loaded):
            args = (variant.function, grid, 1, 1, kernel.threads, 1, 1, kernel.smem_bytes)
            is_early = early and kernel.starts_early
            self._launches.append(EarlyLaunch(*args) if is_early else functools.partial(launchKernel, *args))
        self._argv_address = ctypes.addressof(self._argv)

    def _writer(self, num_pointers: int, offset: int):
        """A function that writes so many pointers into the params."""
        return functools.partial(struct.Struct(f"={num_pointers}Q").pack_into, self._params, offset)

    def __call__(self, stream: int, *pointers: int) -> None:
        self._write(*pointers)
        self._start(stream)

    def _start(self, stream: int) -> None:
        """Launch with the params as they are."""
        argv = self._argv_address
        try:
            for launch in self._launches:
                launch(stream, argv, 0)
        except Exception as error:
            step = self._launches.index(launch)
            kernel, grid = self._steps[step]
            raise RuntimeError(
                f"launch of {kernel.kernel} failed: {error}; grid {grid}, {kernel.threads} threads, {kernel.smem_bytes} "
                f"bytes of shared memory, {self._loaded[step].registers} registers a thread") from error


class TensorMaps:
    """Maps that follow the pointers of a call. ``boxes``: of each array that has one (boxes_of); ``address``: of the first."""

    def __init__(self, address: int, views: dict[str, View], boxes: dict[str, tuple[int, ...]]):
        pointers = (*_FORWARD_POINTERS, *_BACKWARD_POINTERS)
        # (address, place among the pointers, pointer) of each
        self._maps = [[address + i * tma.MAP_BYTES, pointers.index(name), views[name].ptr] for i, name in enumerate(boxes)]
        for (place, _, _), name in zip(self._maps, boxes, strict=True):
            tma.encode(place, views[name], *boxes[name])

    def follow(self, pointers: tuple[int, ...]) -> None:
        """Let each be of the array at the pointer that a call has for it."""
        for made in self._maps:
            address, index, pointer = made
            if pointers[index] != pointer:
                tma.replace_address(address, pointers[index])
                made[2] = pointers[index]


class TmaLaunch(Launch):
    """As Launch, with tensor maps behind the params. ``counts``: tiles are counted from 0 in the list's header."""

    def __init__(self, steps, loaded, params, num_pointers: int, views: dict[str, View], boxes: dict[str, tuple[int, ...]],
                 counts: bool):
        super().__init__(steps, loaded, params, num_pointers)
        from cupy_backends.cuda.api.runtime import memsetAsync
        self._memset = memsetAsync if counts else None
        self._maps = TensorMaps(ctypes.addressof(self._params) + TENSOR_MAPS_OFFSET, views, boxes)

    def __call__(self, stream: int, *pointers: int) -> None:
        self._maps.follow(pointers)
        if self._memset:
            self._memset(pointers[-1], 0, 4 * LIST_HEADER, stream)
        self._write(*pointers)
        self._start(stream)


class BackwardLaunch(Launch):
    """As Launch; the pointers are those of a forward and then the backward's own. ``boxes``: of the arrays that have tensor
    maps, behind the params.
    """

    def __init__(self, steps, loaded, params, views: dict[str, View], boxes: dict[str, tuple[int, ...]], early: bool):
        super().__init__(steps, loaded, params, len(_FORWARD_POINTERS), early)
        self._write_own = self._writer(len(_BACKWARD_POINTERS), FWD_PARAMS.itemsize)
        self._maps = TensorMaps(ctypes.addressof(self._params) + BWD_TENSOR_MAPS_OFFSET, views, boxes) if boxes else None

    def __call__(self, stream: int, *pointers: int) -> None:
        if self._maps:
            self._maps.follow(pointers)
        first = len(_FORWARD_POINTERS)
        self._write_own(*pointers[first:])
        self._write(*pointers[:first])
        self._start(stream)


class DecodeLaunch(Launch):
    """As Launch; the pointers are the first five of a forward, k and v being the caches, and then a decoding's own. ``boxes``: of
    the cache if it has a tensor map, behind the params.
    """

    def __init__(self, steps, loaded, params, views: dict[str, View], boxes: dict[str, tuple[int, ...]], early: bool):
        super().__init__(steps, loaded, params, 5, early)
        self._write_own = self._writer(len(_DECODE_POINTERS), FWD_PARAMS.itemsize)
        self._write_length = functools.partial(struct.Struct("=i").pack_into, self._params, _FIXED_SEQLEN_OFFSET)
        caches = {"k": views["k_cache"]}
        self._maps = TensorMaps(ctypes.addressof(self._params) + DECODE_TENSOR_MAPS_OFFSET, caches, boxes) if boxes else None

    def __call__(self, stream: int, fixed_seqlen: int, q: int, k: int, v: int, out: int, lse: int, *own: int) -> None:
        """``fixed_seqlen``: read where there is no cache_seqlens; it may change from call to call."""
        if self._maps:
            self._maps.follow((q, k))
        self._write_length(fixed_seqlen)
        self._write_own(*own)
        self._write(q, k, v, out, lse)
        self._start(stream)


class Prepared:
    """A call prepared for given shapes, strides, dtypes, alignment, options and device.

    ``views``: all arrays of the call by name, in the order in which their pointers come, None for one that is not given.
    ``results``: those that the call returns. ``launch`` is None if there is nothing to write.
    """

    def __init__(self, problem: Problem, views: dict[str, View | None], results: tuple[str, ...], device_id: int, stream: int,
                 tier: str | None):
        self.problem, self.device_id = problem, device_id
        batch_axis = slice(1 if next(iter(views.values())).was_3d else 0, None)
        shapes = problem.result_shapes
        self.written_shapes = [shapes[name][batch_axis] for name in results]
        self.lse_shape = shapes["lse"][batch_axis]
        self.makers, self.make_lse = (), None       # what makes results that are not given, and lse: see make_with
        self._pairs = _spans_to_keep_apart(problem, views, results)
        self.writes_given = bool(self._pairs)       # whether an array is written that the caller gave
        self._apart, self._seen_apart = set(), set()
        self.launch, self.scratch_bytes, self.scratch_offsets = None, 0, {}
        if not problem.is_empty:
            self._prepare_launch(views, stream, tier)

    def make_with(self, door, like) -> None:
        """Let the door make the results of calls, in order, as arrays like this one."""
        self.makers = [door.maker(shape, self.problem.dtype, like) for shape in self.written_shapes]
        if self.problem.return_lse:
            self.make_lse = door.maker(self.lse_shape, self.problem.lse_dtype, like)

    def _prepare_launch(self, views, stream, tier) -> None:
        problem, device = self.problem, device_of(self.device_id)
        config = choose(problem, device, tier)
        self.scratch_offsets, self.scratch_bytes = scratch_places(problem, config)
        check_workspace_size(views.get("workspace"), self.scratch_bytes)
        arch, steps = jit.arch_for(device.compute_capability), steps_of(problem, config)
        params = params_of(problem, config, strides_of(problem, views))
        loaded = [jit.load(kernel.kernel, kernel_constants(kernel), arch_of(kernel, arch), self.device_id, kernel.smem_bytes,
                           stream=stream) for kernel, _ in steps]
        num_pointers = len(_FORWARD_POINTERS) if "tiles" in self.scratch_offsets else 5
        if isinstance(problem, BackwardProblem):
            boxes = boxes_of(config) if config.tier == "sm90" else {}
            self.launch = BackwardLaunch(steps, loaded, params, views, boxes, device.compute_capability >= (9, 0))
        elif isinstance(problem, DecodeProblem):
            boxes = boxes_of(config) if config.kernel == "decode_sm90" else {}
            self.launch = DecodeLaunch(steps, loaded, params, views, boxes, device.compute_capability >= (9, 0))
        elif config.tier == "sm90":
            self.launch = TmaLaunch(steps, loaded, params, num_pointers, views, boxes_of(config),
                                    config.counts_tiles and not problem.varlen)
        else:
            self.launch = Launch(steps, loaded, params, num_pointers)

    def may_overlap(self, pointers) -> bool:
        """Whether the addresses that a written array spans meet those of another; check_overlap tells if they share any."""
        pointers = tuple(pointers)
        if pointers in self._apart:     # where they lay before, which most calls repeat
            return False
        for i, j, low, high in self._pairs:
            distance = pointers[j] - pointers[i]
            if low < distance < high and (i, j, distance) not in self._seen_apart:
                return True
        if len(self._apart) > 256:
            self._apart.clear()
        self._apart.add(pointers)
        return False

    def are_apart(self, pointers) -> None:
        """Note that arrays at these addresses share no element, as those of a call that lie in one buffer always do."""
        if len(self._seen_apart) > 64:
            self._seen_apart.clear()
        self._seen_apart.update((i, j, pointers[j] - pointers[i]) for i, j, low, high in self._pairs
                                if low < pointers[j] - pointers[i] < high)


def _spans_to_keep_apart(problem: Problem, views: dict[str, View | None], results) -> list[tuple[int, int, int, int]]:
    """(i, j, low, high) of each pair of given arrays of which one is written: the addresses that they span meet where
    ``low < pointer of j - pointer of i < high``.
    """
    places = {name: place for place, name in enumerate(views)}
    extents = {name: byte_extent(view) for name, view in views.items() if view is not None and 0 not in view.shape}
    return [(places[name], places[other], extents[name][0] - extents[other][1], extents[name][1] - extents[other][0])
            for name, other in pairs_to_keep_apart(problem, results, extents)]


@functools.cache
def device_of(device_id: int) -> Device:
    """What config.choose needs to know of a GPU, read once."""
    cupy = jit.import_cupy()
    properties = cupy.cuda.runtime.getDeviceProperties(device_id)
    return Device(
        compute_capability=(properties["major"], properties["minor"]),
        smem_optin=cupy.cuda.Device(device_id).attributes["MaxSharedMemoryPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"], num_sms=properties["multiProcessorCount"],
        name=properties["name"].decode())
