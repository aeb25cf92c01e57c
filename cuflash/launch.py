"""From a problem and its arrays to a launch: the params record, the grid, and what a repeated call reuses."""

from __future__ import annotations

import ctypes
import functools
import math
import struct

import numpy as np

from . import jit
from .arrays import View
from .config import Config, Device, choose
from .problem import Problem, byte_extent

_STRIDES = [(f"{name}_strides", np.int64, 3) for name in ("q", "k", "v", "out")]
_INTS = ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v", "window_left", "window_right",
         "num_m_blocks", "num_short_blocks", "heads_in_group")

# FwdParams of kernels/attn/params.cuh, field by field; the kernels check size and offsets when they are compiled.
FWD_PARAMS = np.dtype(
    [(name, np.uint64) for name in ("q", "k", "v", "out", "lse")] + _STRIDES
    + [(name, np.float64) for name in ("scale_log2", "tanh_scale", "cap_log2")]
    + [(name, np.int32) for name in _INTS], align=True)

_LOG2_E = 1.4426950408889634
MAX_GRID = 2**31 - 1


def params_constants() -> dict[str, int]:
    """The -D macros in which a kernel checks that its FwdParams is FWD_PARAMS."""
    offsets = {f"OFFSET_{name}": offset for name, (_, offset) in FWD_PARAMS.fields.items()}
    return {**offsets, "PARAMS_BYTES": FWD_PARAMS.itemsize}


def kernel_constants(config: Config) -> dict[str, int]:
    """All constants that a config's kernel is compiled with."""
    return {**dict(config.constants), **params_constants()}


def forward_params(problem: Problem, config: Config, q: View, k: View, v: View, out_strides) -> np.ndarray:
    """The params record of a forward, its pointers still null."""
    record = np.zeros((), FWD_PARAMS)
    for name, strides in (("q", q.strides), ("k", k.strides), ("v", v.strides), ("out", out_strides)):
        record[f"{name}_strides"] = strides[:3]
    record["scale_log2"] = problem.softmax_scale * _LOG2_E
    if problem.softcap:
        record["tanh_scale"] = problem.softmax_scale / problem.softcap
        record["cap_log2"] = problem.softcap * _LOG2_E
    for name in ("batch", "seqlen_q", "seqlen_k", "heads_q", "heads_k", "head_dim", "head_dim_v"):
        record[name] = getattr(problem, name)
    record["window_left"] = problem.window_left or 0
    record["window_right"] = problem.window_right or 0
    record["num_m_blocks"] = num_m_blocks(problem, config)
    # Under a right mask a later query tile sees more keys. Without one all are as long.
    record["num_short_blocks"] = num_m_blocks(problem, config) // 2 if problem.window_right is not None else 0
    record["heads_in_group"] = config.heads_in_group
    return record


def num_m_blocks(problem: Problem, config: Config) -> int:
    return -(-problem.seqlen_q // config.block_m)


def grid_of(problem: Problem, config: Config) -> int:
    """Thread blocks of a forward. Raises ValueError past what one launch holds."""
    grid = num_m_blocks(problem, config) * problem.batch * problem.heads_q
    if grid > MAX_GRID:
        raise ValueError(f"batch * heads * query tiles must be at most {MAX_GRID}; got {problem.batch} * {problem.heads_q} * "
                         f"{num_m_blocks(problem, config)}: split the batch")
    return grid


class Launch:
    """A kernel with everything but pointers and stream filled in. One thread at a time: a call writes into its params."""

    def __init__(self, config: Config, loaded, grid: int, params: np.ndarray):
        from cupy_backends.cuda.api.driver import launchKernel
        self._config, self._loaded, self._grid = config, loaded, grid       # `loaded` keeps the module alive
        self._params = ctypes.create_string_buffer(params.tobytes(), params.nbytes)
        self._argv = (ctypes.c_void_p * 1)(ctypes.addressof(self._params))
        self._pack = struct.Struct("=5Q").pack_into
        self._launch = launchKernel
        self._args = loaded.function, grid, 1, 1, config.threads, 1, 1, config.smem_bytes
        self._argv_address = ctypes.addressof(self._argv)

    def __call__(self, stream: int, *pointers: int) -> None:
        self._pack(self._params, 0, *pointers)
        try:
            self._launch(*self._args, stream, self._argv_address, 0)
        except Exception as error:
            config = self._config
            raise RuntimeError(
                f"launch of {config.kernel} failed: {error}; grid {self._grid}, {config.threads} threads, {config.smem_bytes} "
                f"bytes of shared memory, {self._loaded.registers} registers a thread") from error


class Forward:
    """A forward prepared for given shapes, strides, dtypes, alignment, options and device."""

    def __init__(self, problem: Problem, views: tuple[View, View, View], out: View | None, device_id: int, stream: int,
                 tier: str | None):
        self.problem, self.device_id = problem, device_id
        q, k, v = views
        shape = (problem.batch, problem.seqlen_q, problem.heads_q, problem.head_dim_v)
        lse_shape = (problem.batch, problem.heads_q, problem.seqlen_q)
        self.out_shape, self.lse_shape = (shape[1:], lse_shape[1:]) if q.was_3d else (shape, lse_shape)
        self._extents = [byte_extent(view) for view in (*views, out) if view is not None]
        self.launch = None
        if problem.is_empty:
            return
        device = device_of(device_id)
        config = choose(problem, device, tier)
        strides = out.strides if out is not None else contiguous_strides(shape)
        loaded = jit.load(config.kernel, kernel_constants(config), jit.arch_for(device.compute_capability), device_id,
                          config.smem_bytes, stream=stream)
        self.launch = Launch(config, loaded, grid_of(problem, config), forward_params(problem, config, q, k, v, strides))

    def may_overlap(self, pointers, out: int) -> bool:
        """Whether the addresses that out spans and those of an input meet; check_overlap then tells if they share any."""
        *inputs, (out_first, out_end) = self._extents
        return any(pointer + first < out + out_end and out + out_first < pointer + end
                   for pointer, (first, end) in zip(pointers, inputs))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1:]) for axis in range(len(shape)))


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
