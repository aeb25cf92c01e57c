"""attention, attention_varlen: check the arrays, choose a kernel, launch it. And what all such calls have in common."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from . import arrays, config, cpu, launch, problem
from .jit import check_driver, import_cupy
from .launch import Prepared

_MAX_PREPARED = 4096        # prepared calls a thread keeps: a few KiB each


class _Prepared(threading.local):
    """Prepared calls by what they depend on. One set a thread: a launch writes its pointers into its own record."""

    def __init__(self):
        self.calls = {}


_prepared = _Prepared()


def attention(q, k, v, *, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False, out=None):
    """Exact attention, softmax(softmax_scale * q k^T) v, without ever storing the score matrix.

    FlashAttention (Dao et al. 2022, Algorithm 1; Dao 2023) over tiles of keys.

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

    Memory: out, lse if asked for, and no scratch but 16 bytes, with a mask on Hopper. On the CPU tiles of a fixed size, and K
    and V of one head in the type of the sums. The gradients: attention_backward, attention_vjp.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it, says what came and what is allowed.
        NotImplementedError: the tier forced by CUFLASH_TIER lacks a feature, or a torch tensor requires a gradient.
        RuntimeError: CuPy, NVRTC or the driver is missing or too old, or a first call comes during stream capture.
    """
    # perform() written out: of three arrays the key is made in half the time.
    # Options are part of the key with their types: 1 equals True and 1.0, and must still be refused where they are not meant.
    door = arrays.door_of(q)
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
        given, options = (q, k, v, out), (causal, window, softmax_scale, softcap, return_lse)
        if not door.launches(q):
            return perform(_ATTENTION, given, options)
        call = _prepare(_ATTENTION, door, given, options, key)
        if key is None:
            pointers = [door.ptr(x) for x in (q, k, v)]
    elif out is not None and call.may_overlap((*pointers, door.ptr(out))):
        # Which memory out lies in is the one thing that two calls of one key can differ in.
        _check_overlaps(_ATTENTION, call, (q, k, v, out), (*pointers, door.ptr(out)))
    if not _is_current(door, call.device_id):
        with door.on_device(call.device_id):
            return _run(door, call, q, pointers, out)
    return _run(door, call, q, pointers, out)


def _run(door, call: Prepared, q, pointers, out):
    if out is None:
        out = call.makers[0]()
    lse = call.make_lse and call.make_lse()
    if call.scratch_bytes:
        stream = door.stream(call.device_id)
        tiles, held = door.scratch(call.scratch_bytes, q, stream)
        call.launch(stream, *pointers, door.ptr(out), 0 if lse is None else door.ptr(lse), 0, 0, 0, 0, tiles)
    elif call.launch is not None:
        call.launch(door.stream(call.device_id), *pointers, door.ptr(out), 0 if lse is None else door.ptr(lse))
    return out if lse is None else (out, lse)


def attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q=None, max_seqlen_k=None, seqused_q=None,
                     seqused_k=None, causal=False, window=None, softmax_scale=None, softcap=0.0, return_lse=False, out=None,
                     validate=False):
    """Exact attention of sequences of different lengths, packed one after the other: each as in `attention`, by itself.

    Args:
        q: (total_q, heads_q, head_dim), the queries of all sequences; kinds of arrays, dtypes and strides as in `attention`.
        k: (total_k, heads_k, head_dim).
        v: (total_k, heads_k, head_dim_v).
        cu_seqlens_q: (num_sequences + 1,) int32 or int64, contiguous, on the device of q: sequence i has rows
            ``cu_seqlens_q[i]`` to ``cu_seqlens_q[i + 1]`` of q. It starts at 0 and never decreases; sequences may be empty.
            Rows behind its last element, which no sequence covers, come back as zeros.
        cu_seqlens_k: (num_sequences + 1,), the same of k and v.
        max_seqlen_q, max_seqlen_k: the longest sequences, or None. Accepted as hints, and not used: they never change a result.
        seqused_q, seqused_k: None or (num_sequences,) int32 or int64: how many of a sequence's rows take part, from its first
            on. Masks count from the last of those. The other rows of q come back as zeros, those of k and v have no influence.
        causal, window, softmax_scale, softcap: as in `attention`, inside each sequence with its own lengths.
        return_lse: also return the natural logarithm of the sum of exponentials of each row's logits.
        out: array to write the result into, as in `attention`.
        validate: read the lengths and raise if they do not describe the arrays. On a GPU they are copied to the host for
            it, which waits for all that is queued. On the CPU they are always read.

    Returns:
        out, (total_q, heads_q, head_dim_v); with ``return_lse`` (out, lse), lse (heads_q, total_q) float32 (float64 for
        float64 inputs). A query that sees no key, and a row that takes no part, has out 0 and lse -inf.

    On a GPU nothing is copied to the host and nothing waits: shapes, dtypes and devices are checked, and what lengths say is
    cut to what exists, so that wrong ones give wrong results but never lead outside of the arrays. Tiles are shared out on the
    device, the most work first. A CUDA graph captures the call once one such call has been made, and takes whatever stands in
    the same arrays of lengths when it is replayed. A sequence gets the bits that it gets alone in `attention` from tiles of the
    same size; sequences that are short in the mean run on tiles of their own, which round otherwise.

    Memory: out, lse if asked for, and scratch of about ``32 * (total_q / tile + num_sequences) + 4 * max(total_q, total_k) /
    tile`` bytes, tile being 8 to 128 rows, for the list of tiles.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `attention`.
    """
    problem.check_hint("max_seqlen_q", max_seqlen_q)
    problem.check_hint("max_seqlen_k", max_seqlen_k)
    return perform(_VARLEN, (q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, out),
                   (causal, window, softmax_scale, softcap, return_lse), validate)


def _run_varlen(door, call: Prepared, given, pointers, number):
    q, out = given[0], given[-1]
    if out is None:
        out = call.makers[0]()
    lse = call.make_lse and call.make_lse()
    if call.launch is not None:
        stream = door.stream(call.device_id)
        tiles, held = door.scratch(call.scratch_bytes, q, stream)
        call.launch(stream, *pointers[:3], door.ptr(out), 0 if lse is None else door.ptr(lse), *pointers[3:7], tiles)
    return out if lse is None else (out, lse)


# --------------------------------------------------------------------------------------------------- what all calls share

class Operation(NamedTuple):
    """A public function: its arrays, and what becomes of them."""

    name: str
    arrays: tuple[str, ...]     # in the order in which they are given, q first, then those whose kind must be that of q
    options: tuple[str, ...]    # in the order in which they are given; the first two are causal and window
    optional: tuple[str, ...]   # of the arrays, those that are None where not given
    written: tuple[str, ...]    # of these, what the function returns; allocated where not given
    check: Callable             # views and options by name -> problem
    run: Callable               # (door, prepared call, arrays, pointers, number) -> what the function returns, on a GPU
    compute: Callable           # (problem, NumPy arrays by name, those to write included) -> lse or None, on the CPU
    lengths: tuple[str, ...] = ()               # of the arrays, those whose contents are checked where that is asked for
    check_lengths: Callable | None = None       # (problem, NumPy arrays by name), on the host
    number: str = ""            # the array for which a number may stand: data of a call, not of what is prepared
    starts: Callable | None = None              # (pointers) -> which arrays begin at one address, where that matters
    only_mutable: tuple[str, ...] = ()          # of the arrays, those for frameworks only whose arrays change, besides `written`
    prepared: type[Prepared] = Prepared


def _check_varlen(stated: problem.Problem, x: dict[str, np.ndarray | None]) -> None:
    problem.check_lengths({"q": stated.seqlen_q, "k": stated.seqlen_k}, {side: x[f"cu_seqlens_{side}"] for side in "qk"},
                          {side: x[f"seqused_{side}"] for side in "qk"})


OPTIONS = ("causal", "window", "softmax_scale", "softcap")
FORWARD_OPTIONS = (*OPTIONS, "return_lse")
_ATTENTION = Operation(
    "attention", ("q", "k", "v", "out"), FORWARD_OPTIONS, ("out",), ("out",), problem.check_attention,
    lambda door, call, given, pointers, number: _run(door, call, given[0], pointers[:3], given[3]),
    lambda stated, x: cpu.attention(stated, x["q"], x["k"], x["v"], x["out"]))

LENGTHS = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
OF_PACKED = {"lengths": LENGTHS, "check_lengths": _check_varlen}
_VARLEN = Operation(
    "attention_varlen", ("q", "k", "v", *LENGTHS, "out"), FORWARD_OPTIONS, ("seqused_q", "seqused_k", "out"), ("out",),
    problem.check_attention_varlen, _run_varlen,
    lambda stated, x: cpu.attention_varlen(stated, x["q"], x["k"], x["v"], *(x[name] for name in LENGTHS), x["out"]), **OF_PACKED)


def perform(operation: Operation, given: tuple, options: tuple, validate: bool = False, number=None):
    """What a public function does: with arrays on a GPU a prepared launch, on the CPU NumPy.

    ``number`` stands for the array ``operation.number``, which then is None in ``given``.
    """
    if validate is not False:
        problem.check_flag("validate", validate)
    door = arrays.door_of(given[0], operation.arrays[0])
    key, pointers = door.key_of_all(given)
    if key is not None:         # with the types of options: see attention()
        window = options[1] if options else None
        key = (operation.name, key, options, tuple(map(type, options)),
               tuple(map(type, window)) if type(window) is tuple else None, operation.starts and operation.starts(pointers),
               config.forced_tier())
    try:
        call = _prepared.calls.get(key)
    except TypeError:
        key = call = None
    if call is None and not door.launches(given[0]):
        if door.on_cpu(given[0]):
            return _on_cpu(operation, door, given, options, number)
        return _through_cupy(operation, door, given, options, validate, number)
    if validate:
        _validate(operation, door, given, options, number)
    if call is None:
        call = _prepare(operation, door, given, options, key, number)
        if key is None:
            pointers = [0 if x is None else door.ptr(x) for x in given]
    elif call.writes_given and call.may_overlap(pointers):
        _check_overlaps(operation, call, given, pointers)
    if not _is_current(door, call.device_id):
        with door.on_device(call.device_id):
            return operation.run(door, call, given, pointers, number)
    return operation.run(door, call, given, pointers, number)


def scratch_bytes(operation: Operation, given: tuple, options: tuple, number=None) -> int:
    """What a call of ``perform`` takes besides its results; 0 on the CPU. Nothing is compiled."""
    door = arrays.door_of(given[0])
    on_cpu = door.on_cpu(given[0])
    if isinstance(door, arrays.DlpackDoor) and not on_cpu:
        given = _to_cupy(operation, door, given)
    stated, views = _check(operation, door, given, options, number)
    if on_cpu or stated.is_empty:
        return 0
    check_driver()
    device = launch.device_of(int(views["q"].device.removeprefix("cuda:")))
    return launch.scratch_places(stated, config.choose(stated, device, config.forced_tier()))[1]


def _current_device() -> int:
    """Replaced by CuPy's own on the first call."""
    global _current_device
    _current_device = import_cupy().cuda.runtime.getDevice
    return _current_device()


def _is_current(door, device_id: int) -> bool:
    return _current_device() == device_id and (door.current_device is None or door.current_device() == device_id)


def _views(operation: Operation, given: tuple) -> dict[str, arrays.View | None]:
    """The views of all arrays, each through the door of its own framework, so that a mix is named and refused."""
    return {name: None if x is None and name in operation.optional else arrays.door_of(x, name).view(x)
            for name, x in zip(operation.arrays, given)}


def _check(operation: Operation, door, given: tuple, options: tuple, number=None):
    """(the problem, the views of all arrays by name)."""
    views = _views(operation, given)
    options = dict(zip(operation.options, options))
    stated = operation.check(**(views if number is None else views | {operation.number: number}), **options)
    if isinstance(door, arrays.TorchDoor):
        door.refuse_grad(operation.name, dict(zip(operation.arrays, given)))
    return stated, views


def _check_overlaps(operation: Operation, call: Prepared, given: tuple, pointers) -> None:
    """Of a call that is prepared: which memory arrays lie in is the one thing that two calls of one key can differ in."""
    views = {name: view for name, view in _views(operation, given).items() if view is not None}
    for name, other in problem.pairs_to_keep_apart(call.problem, operation.written, views):
        problem.check_overlap(name, views[name], {other: views[other]})
    call.are_apart(pointers)


def _prepare(operation: Operation, door, given: tuple, options: tuple, key, number=None) -> Prepared:
    """The call prepared, and kept under ``key`` unless that is None."""
    stated, views = _check(operation, door, given, options, number)
    cupy = import_cupy()
    check_driver()
    device_id = int(views[operation.arrays[0]].device.removeprefix("cuda:"))
    with cupy.cuda.Device(device_id):
        cupy.cuda.runtime.setDevice(device_id)      # makes the device's context current in a thread that has none
        call = operation.prepared(stated, views, operation.written, device_id, door.stream(device_id), config.forced_tier())
    call.make_with(door, given[0])
    if key is not None:
        if len(_prepared.calls) >= _MAX_PREPARED:
            _prepared.calls.clear()
        _prepared.calls[key] = call
    return call


def _validate(operation: Operation, door, given: tuple, options: tuple, number) -> None:
    """Check what the lengths say, on the host."""
    stated, views = _check(operation, door, given, options, number)
    cupy = import_cupy()
    check_driver()
    device_id = int(views["q"].device.removeprefix("cuda:"))
    with cupy.cuda.Device(device_id):
        if cupy.cuda.runtime.streamIsCapturing(door.stream(device_id)):
            raise RuntimeError("validate=True copies the lengths to the host, which nothing can while a stream is captured: "
                               "validate before the capture")
        x = {name: x if x is None else door.to_host(x) for name, x in zip(operation.arrays, given) if name in operation.lengths}
        operation.check_lengths(stated, x if number is None else x | {operation.number: number})


def _refuse_changed(operation: Operation, door, given: tuple) -> None:
    """Raise if an array is given to be written, or one with which others are, of a framework whose arrays are not."""
    for name, x in zip(operation.arrays, given):
        if name in (*operation.written, *operation.only_mutable) and x is not None:
            raise TypeError(f"{name} is not supported for {door.framework} arrays; got {type(x).__name__}")


def _on_cpu(operation: Operation, door, given: tuple, options: tuple, number):
    if isinstance(door, arrays.DlpackDoor):
        _refuse_changed(operation, door, given)
    stated, views = _check(operation, door, given, options, number)
    x = {name: x if x is None else door.to_numpy(x) for name, x in zip(operation.arrays, given)}
    if number is not None:
        x[operation.number] = number
    if operation.check_lengths:
        operation.check_lengths(stated, x)
    had_batch_axis = not views[operation.arrays[0]].was_3d
    shapes = stated.result_shapes
    for name in operation.written:
        if x[name] is None:
            x[name] = np.empty(shapes[name] if had_batch_axis else shapes[name][1:], arrays.numpy_dtype(stated.dtype))
    lse = operation.compute(stated, x if had_batch_axis or stated.varlen else {
        name: tensor if tensor is None else tensor[None] for name, tensor in x.items()})
    results = [door.from_numpy(x[name], given[0]) if tensor is None else tensor
               for name, tensor in zip(operation.arrays, given) if name in operation.written]
    if stated.return_lse:
        results.append(door.from_numpy(lse if had_batch_axis or stated.varlen else lse[0], given[0]))
    return results[0] if len(results) == 1 else tuple(results)


def _through_cupy(operation: Operation, door, given: tuple, options: tuple, validate: bool, number):
    given_to_cupy = _to_cupy(operation, door, given)
    with import_cupy().cuda.Device(given[0].__dlpack_device__()[1]):
        result = perform(operation, given_to_cupy, options, validate, number)
        door.keep_until_done(*given)
        return tuple(map(door.from_cupy, result)) if isinstance(result, tuple) else door.from_cupy(result)


def _to_cupy(operation: Operation, door, given: tuple) -> tuple:
    """The arrays of a call, on a GPU and read through DLPack, as CuPy's."""
    _refuse_changed(operation, door, given)
    views = {name: view for name, view in _views(operation, given).items() if view is not None}
    first = operation.arrays[0]
    problem.check_place({name: views[name] for name in operation.arrays[:3] if name in views})
    for name, view in views.items():
        problem.check_beside(name, view, views[first], first)
    with import_cupy().cuda.Device(given[0].__dlpack_device__()[1]):
        return tuple(x if x is None else door.to_cupy(x) for x in given)
