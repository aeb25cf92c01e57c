"""attention: check the arrays, choose a kernel, launch it."""

from __future__ import annotations

import threading

import numpy as np

from . import arrays, config, cpu, problem
from .jit import check_driver, import_cupy
from .launch import Forward

_MAX_PREPARED = 4096        # prepared calls a thread keeps: a few KiB each


class _Prepared(threading.local):
    """Prepared calls by what they depend on. One set a thread: a launch writes its pointers into its own record."""

    def __init__(self):
        self.calls = {}


_prepared = _Prepared()


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False, out=None):
    """Exact attention, softmax(softmax_scale * q k^T) v, without ever storing the score matrix.

    FlashAttention (Dao et al. 2022, Algorithm 1; Dao 2023) over tiles of keys, forward only.

    Args:
        q: (batch, seqlen_q, heads_q, head_dim), float16, bfloat16, float32 or float64; CuPy, PyTorch, JAX (concrete) or
            NumPy, or any array with ``__dlpack__``. A 3-D q, k, v is a batch of one. Any strides with a last one of 1, 0
            and negative ones included: a transposed (batch, heads, seqlen, head_dim) or expanded view needs no copy.
        k: (batch, seqlen_k, heads_k, head_dim); heads_q is a multiple of heads_k, and query head h reads key head
            ``h // (heads_q // heads_k)``.
        v: (batch, seqlen_k, heads_k, head_dim_v). head_dim and head_dim_v are 1 to 256 each.
        causal: key j is visible to query i iff ``j <= i + seqlen_k - seqlen_q`` (aligned bottom-right).
        window: None or (left, right): key j is visible iff ``-left <= j - (i + seqlen_k - seqlen_q) <= right``; None or
            -1 on a side is unbounded. With ``causal``, both hold.
        softmax_scale: any finite float; ``head_dim ** -0.5`` by default.
        softcap: logits become ``softcap * tanh(softmax_scale * q k^T / softcap)``; 0 is off.
        return_lse: also return the natural logarithm of the sum of exponentials of each row's logits.
        out: array to write the result into: of the result's shape, dtype, framework and device, last stride 1, sharing no
            memory with the inputs. Not for JAX, whose arrays are immutable.

    Returns:
        out, (batch, seqlen_q, heads_q, head_dim_v), in q's dtype and framework, on its device; with ``return_lse``
        (out, lse), lse (batch, heads_q, seqlen_q) float32 (float64 for float64 inputs). A query that sees no key has
        out 0 and lse -inf. Keys and values that are masked have no influence, NaN and Inf included.

    On a GPU the work is queued on the framework's current stream; nothing waits, and a CUDA graph can capture it once one
    such call has been made. Sums are float32 (float64 for float64); float32 is never rounded to TF32.

    Memory: out, lse if asked for, and no scratch at all. On the CPU tiles of a fixed size, and K and V of
    one head in the type of the sums.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what came and what is allowed.
        NotImplementedError: the tier forced by CUFLASH_TIER lacks a feature, or a torch tensor requires a gradient.
        RuntimeError: CuPy, NVRTC or the driver is missing or too old, or a first call comes during stream capture.
    """
    door = arrays.door_of(q)
    if door.on_cpu(q):
        return _on_cpu(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out)
    if isinstance(door, arrays.DlpackDoor):
        return _through_cupy(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out)

    # Options are part of the key with their types: 1 equals True and 1.0, and must still be refused where they are not meant.
    sides = tuple(map(type, window)) if type(window) is tuple else None
    key, pointers = door.key(q, k, v, out)
    if key is not None:
        key = (key, causal, type(causal), window, sides, softmax_scale, type(softmax_scale), softcap, type(softcap), return_lse,
               config.forced_tier())
    try:
        call = _prepared.calls.get(key)
    except TypeError:           # an option that cannot be hashed: a list as window, or what is refused below
        key = call = None
    if call is None:
        call = _prepare(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out)
        if key is None:
            pointers = [door.ptr(x) for x in (q, k, v)]
        else:
            if len(_prepared.calls) >= _MAX_PREPARED:
                _prepared.calls.clear()
            _prepared.calls[key] = call
    elif out is not None and call.may_overlap(pointers, door.ptr(out)):
        # Which memory out lies in is the one thing that two calls of one key can differ in.
        problem.check_overlap(door.view(out), {"q": door.view(q), "k": door.view(k), "v": door.view(v)})
    if _current_device() != call.device_id:
        import cupy
        with cupy.cuda.Device(call.device_id):
            return _run(door, call, q, pointers, out)
    return _run(door, call, q, pointers, out)


def _run(door, call: Forward, q, pointers, out):
    device_id = call.device_id
    dtype = call.problem.dtype
    if out is None:
        out = door.empty(call.out_shape, dtype, q)
    if not call.problem.return_lse:
        if call.launch is not None:
            call.launch(door.stream(device_id), *pointers, door.ptr(out), 0)
        return out
    lse = door.empty(call.lse_shape, call.problem.lse_dtype, q)
    if call.launch is not None:
        call.launch(door.stream(device_id), *pointers, door.ptr(out), door.ptr(lse))
    return out, lse


def _current_device() -> int:
    """Replaced by CuPy's own on the first call."""
    global _current_device
    _current_device = import_cupy().cuda.runtime.getDevice
    return _current_device()


def _views(q, k, v, out) -> dict[str, arrays.View]:
    """The views of all arrays, each through the door of its own framework, so that a mix is named and refused."""
    named = {"q": q, "k": k, "v": v} | ({} if out is None else {"out": out})
    return {name: arrays.door_of(x, name).view(x) for name, x in named.items()}


def _check(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out):
    views = _views(q, k, v, out)
    stated = problem.check_attention(
        views["q"], views["k"], views["v"], causal=causal, window=window, softmax_scale=softmax_scale, softcap=softcap,
        return_lse=return_lse, out=views.get("out"))
    if isinstance(door, arrays.TorchDoor):
        door.refuse_grad(q=q, k=k, v=v)
    return stated, views


def _prepare(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out) -> Forward:
    stated, views = _check(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out)
    cupy = import_cupy()
    check_driver()
    device_id = int(views["q"].device.removeprefix("cuda:"))
    with cupy.cuda.Device(device_id):
        cupy.cuda.runtime.setDevice(device_id)      # makes the device's context current in a thread that has none
        return Forward(stated, (views["q"], views["k"], views["v"]), views.get("out"), device_id, door.stream(device_id),
                       config.forced_tier())


def _on_cpu(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out):
    if out is not None and isinstance(door, arrays.DlpackDoor):
        raise TypeError(f"out is not supported for {door.framework} arrays; got {type(out).__name__}")
    stated, views = _check(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out)
    tensors = [x if x is None else door.to_numpy(x) for x in (q, k, v, out)]
    if views["q"].was_3d:
        tensors = [x if x is None else x[None] for x in tensors]
    numpy_q, numpy_k, numpy_v, result = tensors
    if result is None:
        result = np.empty((stated.batch, stated.seqlen_q, stated.heads_q, stated.head_dim_v), arrays.numpy_dtype(stated.dtype))
    lse = cpu.attention(stated, numpy_q, numpy_k, numpy_v, result)
    if views["q"].was_3d:
        result, lse = result[0], lse if lse is None else lse[0]
    if out is None:
        out = door.from_numpy(result, q)
    return (out, door.from_numpy(lse, q)) if return_lse else out


def _through_cupy(door, q, k, v, causal, window, softmax_scale, softcap, return_lse, out):
    if out is not None:
        raise TypeError(f"out is not supported for {door.framework} arrays; got {type(out).__name__}")
    problem.check_kind(_views(q, k, v, out))
    with import_cupy().cuda.Device(q.__dlpack_device__()[1]):
        result = attention(door.to_cupy(q), door.to_cupy(k), door.to_cupy(v), causal=causal, window=window,
                           softmax_scale=softmax_scale, softcap=softcap, return_lse=return_lse)
        door.keep_until_done(q, k, v)
        return tuple(map(door.from_cupy, result)) if return_lse else door.from_cupy(result)
