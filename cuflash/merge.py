"""merge_attention: attention to all keys, from the results of attention to parts of them."""

from __future__ import annotations

import functools

import numpy as np

from . import arrays, jit, launch, problem
from .attention import Operation, perform
from .config_base import DTYPE_CODES, Kernel, vec_bytes
from .memory import contiguous_strides
from .problem import MAX_PARTS, MergeProblem

# MergeParams of kernels/merge.cu, field by field; the kernel checks size and offsets when it is compiled.
MERGE_PARAMS = np.dtype(
    [("outs", np.uint64, MAX_PARTS), ("lses", np.uint64, MAX_PARTS), ("out", np.uint64), ("lse", np.uint64),
     ("outs_strides", np.int64, (MAX_PARTS, 3)), ("out_strides", np.int64, 3)]
    + [(name, np.int32) for name in ("batch", "seqlen", "heads", "head_dim_v", "num_parts")], align=True)
_THREADS = 256              # a warp a row: blocks of any size are as good, these fill a multiprocessor


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
    return perform(_operation(len(outs)), (*outs, *lses, out), ())


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


class _Prepared(launch.Prepared):
    def _prepare_launch(self, views, stream, tier) -> None:
        stated, device = self.problem, launch.device_of(self.device_id)
        kernel = kernel_of(stated)
        loaded = jit.load(kernel.kernel, launch.kernel_constants(kernel), jit.arch_for(device.compute_capability), self.device_id,
                          stream=stream)
        blocks = -(-stated.batch * stated.seqlen * stated.heads * 32 // kernel.threads)
        self.launch = launch.Launch([(kernel, blocks)], [loaded], params_of(stated, views), 2 * MAX_PARTS + 2)


def _run(door, call: _Prepared, given, pointers, number):
    count, out = call.problem.num_parts, given[-1]
    if out is None:
        out = call.makers[0]()
    lse = call.make_lse()
    if call.launch is not None:
        nulls = (0,) * (MAX_PARTS - count)
        call.launch(door.stream(call.device_id), *pointers[:count], *nulls, *pointers[count:2 * count], *nulls, door.ptr(out),
                    door.ptr(lse))
    return out, lse


@functools.cache
def _operation(count: int) -> Operation:
    """Of so many parts."""
    outs, lses = ([f"{name}[{i}]" for i in range(count)] for name in ("outs", "lses"))
    return Operation(
        "merge_attention", (*outs, *lses, "out"), (), ("out",), ("out",), lambda **views: problem.check_merge(views, count), _run,
        lambda stated, x: _merge(stated, [x[name] for name in outs], [x[name] for name in lses], x["out"]), prepared=_Prepared)


# ------------------------------------------------------------------------------------------------------------------- CPU

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
