"""merge_attention: attention to all keys, from the results of attention to parts of them."""

from __future__ import annotations

import threading

import numpy as np

from . import arrays, jit, problem
from .config_base import DTYPE_CODES, Kernel, vec_bytes
from .launch import Launch, device_of, kernel_constants
from .memory import byte_extent, contiguous_strides
from .problem import MAX_PARTS, MergeProblem

# MergeParams of kernels/merge.cu, field by field; the kernel checks size and offsets when it is compiled.
MERGE_PARAMS = np.dtype(
    [("outs", np.uint64, MAX_PARTS), ("lses", np.uint64, MAX_PARTS), ("out", np.uint64), ("lse", np.uint64),
     ("outs_strides", np.int64, (MAX_PARTS, 3)), ("out_strides", np.int64, 3)]
    + [(name, np.int32) for name in ("batch", "seqlen", "heads", "head_dim_v", "num_parts")], align=True)
_THREADS = 256              # a warp a row: blocks of any size are as good, these fill a multiprocessor
_MAX_PREPARED = 1024        # prepared calls a thread keeps: a few KiB each


class _Calls(threading.local):
    """Prepared calls by what they depend on. One set a thread: a launch writes its pointers into its own record."""

    def __init__(self):
        self.prepared = {}


_calls = _Calls()


def merge_attention(outs, lses, *, out=None):
    """Attention to all keys, from the results of attention to parts of them that have no key in common.

    Each part weighs ``exp(lse - logsumexp(lses))``, row by row: exact, as softmax is a sum over keys.

    Args:
        outs: list or tuple of 1 to 32 arrays (batch, seqlen, heads, head_dim_v), alike in shape, dtype, framework and device,
            each what `attention` or `attention_with_kvcache` returned for the same queries and other keys. head_dim_v is 1 to
            512; any strides with a last one of 1. With 3 axes they are a batch of one, or packed sequences.
        lses: as many arrays, the lse of each: (batch, heads, seqlen), without the first axis if outs have 3, float32 (float64 for
            float64), contiguous.
        out: array to write the result into: of the shape and dtype of each of outs, last stride 1, sharing no memory with the
            others. Not for JAX, whose arrays are immutable.

    Returns:
        (out, lse), like each of outs and of lses: of attention to the keys of all parts. Where the lse of a part is -inf it has
        no influence, whatever its out holds; where all are, out is 0 and lse -inf.

    On a GPU the work is queued on the framework's current stream as in `attention`, and a CUDA graph can capture it once one such
    call has been made. Sums are float32 (float64 for float64), in the order of the parts. There is no scratch on a GPU.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what came and what is allowed.
        NotImplementedError, RuntimeError: as `attention`.
    """
    problem.check_parts(outs, lses)
    door = arrays.door_of(outs[0], "outs[0]")
    given = (*outs, *lses, out)
    on_cpu = door.on_cpu(outs[0])
    if isinstance(door, arrays.DlpackDoor):
        if out is not None:
            raise TypeError(f"out is not supported for {door.framework} arrays; got {type(out).__name__}")
        if not on_cpu:
            return _through_cupy(door, outs, lses)
    if on_cpu:
        return _on_cpu(door, outs, lses, out)
    key, pointers = door.key_of_all(given)
    call = _calls.prepared.get(key)
    if call is None:
        call = _prepare(door, given, key)
        if key is None:
            pointers = [0 if x is None else door.ptr(x) for x in given]
    elif out is not None and call.may_overlap(pointers):
        views = _views(given)
        problem.check_overlap("out", views.pop("out"), views)
    with jit.import_cupy().cuda.Device(call.device_id):
        return call(door, outs[0], out, pointers)


def _views(given) -> dict[str, arrays.View | None]:
    """The views of all arrays by name, each through the door of its own framework, so that a mix is named and refused."""
    count = len(given) // 2
    names = (*(f"outs[{i}]" for i in range(count)), *(f"lses[{i}]" for i in range(count)), "out")
    return {name: None if x is None and name == "out" else arrays.door_of(x, name).view(x) for name, x in zip(names, given)}


def _check(door, given) -> tuple[MergeProblem, dict[str, arrays.View | None]]:
    views = _views(given)
    stated = problem.check_merge(views, len(given) // 2)
    if isinstance(door, arrays.TorchDoor):
        door.refuse_grad("merge_attention", dict(zip(views, given)))
    return stated, views


# ------------------------------------------------------------------------------------------------------------------- GPU

def kernel_of(stated: MergeProblem) -> Kernel:
    """The kernel that joins the parts of a problem."""
    row = stated.head_dim_v * arrays.ITEMSIZE[stated.dtype]
    widest = vec_bytes(stated.alignment, stated.dtype, stated.head_dim_v)
    # Of short rows each lane takes less, so that all of a warp have some.
    vec = next((size for size in (2, 4, 8) if arrays.ITEMSIZE[stated.dtype] <= size <= widest and 32 * size >= row), widest)
    constants = {
        "DTYPE": DTYPE_CODES[stated.dtype], "VEC_BYTES": vec, "THREADS": _THREADS, "MAX_PARTS": MAX_PARTS,
        **{f"MERGE_OFFSET_{name}": offset for name, (_, offset) in MERGE_PARAMS.fields.items()},
        "MERGE_PARAMS_BYTES": MERGE_PARAMS.itemsize,
    }
    return Kernel("merge", tuple(sorted(constants.items())), _THREADS, 0)


def params_of(stated: MergeProblem, views: dict[str, arrays.View | None]) -> np.ndarray:
    """The params record of a call, its pointers still null."""
    record = np.zeros((), MERGE_PARAMS)
    for i in range(stated.num_parts):
        record["outs_strides"][i] = views[f"outs[{i}]"].strides[:3]
    out = views["out"]
    record["out_strides"] = (contiguous_strides(views["outs[0]"].shape) if out is None else out.strides)[:3]
    for name in ("batch", "seqlen", "heads", "head_dim_v", "num_parts"):
        record[name] = getattr(stated, name)
    return record


class _Prepared:
    """A call prepared for given shapes, strides, dtypes, alignment and device."""

    def __init__(self, stated: MergeProblem, views: dict[str, arrays.View | None], device_id: int, stream: int):
        self.problem, self.device_id = stated, device_id
        self.out_shape = views["outs[0]"].shape[views["outs[0]"].was_3d:]
        self.lse_shape = (stated.batch, stated.heads, stated.seqlen)[views["outs[0]"].was_3d:]
        self._extents = [(0, 0) if view is None else byte_extent(view) for view in views.values()]
        self._launch, self._nulls = None, (0,) * (MAX_PARTS - stated.num_parts)
        if stated.is_empty:
            return
        kernel, device = kernel_of(stated), device_of(device_id)
        loaded = jit.load(kernel.kernel, kernel_constants(kernel), jit.arch_for(device.compute_capability), device_id,
                          stream=stream)
        blocks = -(-stated.batch * stated.seqlen * stated.heads * 32 // kernel.threads)
        self._launch = Launch([(kernel, blocks)], [loaded], params_of(stated, views), 2 * MAX_PARTS + 2)

    def may_overlap(self, pointers) -> bool:
        """Whether the addresses that out spans meet those of another array; check_overlap tells if they share any."""
        *spans, (first, end) = ((pointer + low, pointer + high) for pointer, (low, high) in zip(pointers, self._extents))
        return any(first < other_end and other_first < end for other_first, other_end in spans)

    def __call__(self, door, like, out, pointers):
        if out is None:
            out = door.empty(self.out_shape, self.problem.dtype, like)
        lse = door.empty(self.lse_shape, self.problem.lse_dtype, like)
        if self._launch is not None:
            count = self.problem.num_parts
            self._launch(door.stream(self.device_id), *pointers[:count], *self._nulls, *pointers[count:2 * count], *self._nulls,
                         door.ptr(out), door.ptr(lse))
        return out, lse


def _prepare(door, given, key) -> _Prepared:
    """The call prepared, and kept under ``key`` unless that is None."""
    stated, views = _check(door, given)
    cupy = jit.import_cupy()
    jit.check_driver()
    device_id = int(views["outs[0]"].device.removeprefix("cuda:"))
    with cupy.cuda.Device(device_id):
        cupy.cuda.runtime.setDevice(device_id)      # makes the device's context current in a thread that has none
        call = _Prepared(stated, views, device_id, door.stream(device_id))
    if key is not None:
        if len(_calls.prepared) >= _MAX_PREPARED:
            _calls.prepared.clear()
        _calls.prepared[key] = call
    return call


def _through_cupy(door, outs, lses):
    views = {name: view for name, view in _views((*outs, *lses, None)).items() if view is not None}
    problem.check_place(views)
    with jit.import_cupy().cuda.Device(outs[0].__dlpack_device__()[1]):
        result = merge_attention(*([door.to_cupy(x) for x in group] for group in (outs, lses)))
        door.keep_until_done(*outs, *lses)
        return tuple(map(door.from_cupy, result))


# ------------------------------------------------------------------------------------------------------------------- CPU

def _on_cpu(door, outs, lses, out):
    stated, views = _check(door, (*outs, *lses, out))
    is_batch = not views["outs[0]"].was_3d
    shape = views["outs[0]"].shape
    target = np.empty(shape if is_batch else shape[1:], arrays.numpy_dtype(stated.dtype)) if out is None else door.to_numpy(out)
    of_parts = [[door.to_numpy(x) for x in group] for group in (outs, lses)]
    if is_batch:
        lse = _merge(stated, *of_parts, target)
    else:
        lse = _merge(stated, *([x[None] for x in group] for group in of_parts), target[None])[0]
    return door.from_numpy(target, outs[0]) if out is None else out, door.from_numpy(lse, outs[0])


def _merge(stated: MergeProblem, outs: list[np.ndarray], lses: list[np.ndarray], out: np.ndarray) -> np.ndarray:
    """Writes ``out`` and returns lse. Scratch: what the outs of one of the batch take in the type of the sums, three times."""
    number = np.dtype(stated.lse_dtype).type
    with np.errstate(all="ignore"):         # inf and nan are results here, not accidents
        lses = np.stack(lses)
        most = lses.max(axis=0)
        weights = np.exp(lses - np.where(most == -np.inf, number(0), most))
        total = weights.sum(axis=0)
        lse = most + np.log(total)
        weights = np.where(lses == -np.inf, number(0), weights / np.where(total == 0, number(1), total))
        for b in range(stated.batch):
            joined = np.zeros(out.shape[1:], number)
            for x, of_part, weight in zip(outs, lses[:, b], weights[:, b]):
                saw_keys = (of_part != -np.inf).T[..., None]
                joined += np.where(saw_keys, x[b].astype(number) * weight.T[..., None], number(0))
            out[b] = joined
    return lse
