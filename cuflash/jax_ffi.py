"""XLA's foreign function interface in ctypes: what XLA calls when a compiled program comes to an attention.

XLA hands over a frame: buffers, attributes, the stream (xla/ffi/api/c_api.h, which ships in jaxlib/include). The one attribute
is a text that says all of a call that is known when it is traced, so that programs out of a cache or of another process mean the
same; what is made of it is kept by the text. Then only addresses are read: on a GPU they go into a prepared launch, on the CPU
they become NumPy arrays.

XLA also calls from threads of its own. Python would make a state for each call and drop it after, which takes longer than all
else here: the first call in a thread keeps it. A prepared launch, which writes its pointers into its own record, is taken from
a list and put back.
"""

from __future__ import annotations

import ctypes
import functools
import json
import math
import operator
import struct
import threading
import time
from typing import NamedTuple

import numpy as np

from . import arrays, config, launch, problem
from .arrays import ITEMSIZE, View
from .attention import _ATTENTION, _VARLEN
from .decode import _DECODE
from .grad import _BACKWARD, _VARLEN_BACKWARD
from .jit import arch_for, check_driver, import_cupy, load
from .memory import contiguous_strides

TARGET = "cuflash_attention"
OPERATIONS = {operation.name: operation for operation in (_ATTENTION, _VARLEN, _DECODE, _BACKWARD, _VARLEN_BACKWARD)}


class Call(NamedTuple):
    """What is known of a call when it is traced, without shapes. Hashable: it is a parameter of the JAX primitive."""

    operation: str
    operands: tuple[str, ...]               # the arrays that are given, in the order of the operation
    options: tuple[tuple[str, object], ...]
    tier: str | None                        # forced when it was traced

    @property
    def appends(self) -> bool:
        """Whether the caches are changed: they are results then, in the memory of the operands."""
        return self.operation == "attention_with_kvcache" and "k" in self.operands


class Array(NamedTuple):
    """A buffer, as far as it is known when it is traced."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def views_of(buffers, pointers=None, device: str = "jax") -> dict[str, View]:
    """Row-major views by name. Without pointers, at addresses that are aligned and apart."""
    views = {}
    for place, (name, dtype, shape) in enumerate(buffers):
        was_3d = len(shape) == 3
        shape = (1,) * was_3d + tuple(shape)
        pointer = (place + 1) << 48 if pointers is None else pointers[place]
        views[name] = View(shape, contiguous_strides(shape), dtype, device, pointer, "jax", was_3d)
    return views


def state(call: Call, buffers, pointers=None, device: str = "jax") -> tuple[problem.Problem, dict[str, View | None]]:
    """(the checked problem, the views by the names of the operation's arrays)."""
    operation = OPERATIONS[call.operation]
    views = views_of(buffers, pointers, device)
    by_name = {name: views.get(name) for name in operation.arrays}
    return operation.check(**by_name, **dict(call.options)), by_name


def results_of(call: Call, operands) -> list[Array]:
    """The results of a call, in their order."""
    stated, views = state(call, operands)
    shapes, first = stated.result_shapes, int(views["q"].was_3d)
    results = [Array(name, stated.dtype, shapes[name][first:]) for name in OPERATIONS[call.operation].written]
    if dict(call.options).get("return_lse"):
        results.append(Array("lse", stated.lse_dtype, shapes["lse"][first:]))
    if call.appends:
        results += [operand for operand in operands if operand.name in ("k_cache", "v_cache")]
    return results


def scratch_bytes(call: Call, operands) -> int:
    """What a call takes on whichever GPU of this process it runs, or of those that there are where there is none."""
    most = 0
    devices = _devices()
    for aligned in (True, False):       # XLA aligns its own buffers, what it is given may be aligned to elements only
        stated, _ = state(call, operands, [(place << 48) + (0 if aligned else ITEMSIZE[operand.dtype])
                                           for place, operand in enumerate(operands, 1)])
        if stated.is_empty:
            continue
        for device in devices:
            try:
                most = max(most, launch.scratch_places(stated, config.choose(stated, device, call.tier))[1])
            except NotImplementedError:     # a call there is refused, and takes nothing
                if aligned and len(devices) == 1:
                    raise
    return most


@functools.cache
def _devices() -> tuple:
    try:
        cupy = import_cupy()
        check_driver()
        count = cupy.cuda.runtime.getDeviceCount()
        return tuple({launch.device_of(index) for index in range(count)})
    except RuntimeError:        # lowered for a GPU elsewhere
        return tuple(config.DEVICES.values())


def encode(call: Call, operands, results, num_bytes: int) -> str:
    """The attribute of a call."""
    return json.dumps([*call, operands, results, num_bytes], separators=(",", ":"))


# ------------------------------------------------------------------------------------------------------------- C structures

# All memory, by words and by bytes: reading through it takes a fraction of what ctypes takes.
_words = memoryview((ctypes.c_uint64 * (1 << 58)).from_address(0)).cast("B").cast("Q")
_bytes = _words.cast("B")

# Words of XLA_FFI_CallFrame. Of a group, of operands, results or attributes: size, extension, number, types, array (attributes:
# names, array).
_EXTENSION, _API, _ARGS, _RETS, _ATTRS, _FRAME_WORDS = 1, 2, 5, 10, 15, 21
_FRAME_BYTES, _GROUP_BYTES, _ATTRS_BYTES, _BUFFER_BYTES, _API_BYTES, _METADATA_BYTES = 168, 40, 48, 48, 88, 36
_VERSION, _ERROR_CREATE, _ERROR_DETAILS, _ERROR_DESTROY, _STREAM_GET = 4, 6, 7, 8, 10       # words of XLA_FFI_Api
_METADATA_EXTENSION, _COMMAND_BUFFER_COMPATIBLE = 1, 1
_DTYPES = {"int32": 4, "int64": 5, "uint8": 6, "float16": 10, "float32": 11, "float64": 12, "bfloat16": 16}
_INVALID_ARGUMENT, _UNIMPLEMENTED, _INTERNAL = 3, 12, 13
_INT32 = 2**32 - 1

# What every call reads. Of a frame: extension, API, context, and the arrays of operands, of results and of attributes. Of a
# string: address and length. Of a buffer, by the word where it begins: size, extension, dtype, data.
_read_frame = struct.Struct("=8x3Q40xQ32xQ40xQ").unpack_from
_read_string = struct.Struct("=2Q").unpack_from
_data_of = _words[3:]


class _ErrorArgs(ctypes.Structure):     # XLA_FFI_Error_Create_Args
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _DetailsArgs(ctypes.Structure):   # XLA_FFI_Error_GetDetails_Args
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("error", ctypes.c_void_p),
                ("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _DestroyArgs(ctypes.Structure):   # XLA_FFI_Error_Destroy_Args
    _fields_ = [("size", ctypes.c_size_t), ("extension", ctypes.c_void_p), ("error", ctypes.c_void_p)]


_StreamArgs = ctypes.c_uint64 * 4       # XLA_FFI_Stream_Get_Args: size, extension, context, stream
_Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)     # quick functions of XLA, called with the GIL held


def _function(api: int, word: int):
    return _Function(_words[(api >> 3) + word])


def _words_of_frame(address: int) -> memoryview:
    return _words[address >> 3:(address >> 3) + _FRAME_WORDS]


def _expect(what: str, got: int, size: int, exact: bool = False) -> None:
    if got < size or exact and got != size:
        raise RuntimeError(f"XLA's foreign function interface has changed: {what} has {got} bytes, {size} are known to cuflash; "
                           "use a jax that this cuflash was made for, or a newer cuflash")


def _check_frame(frame: memoryview) -> None:
    _expect("XLA_FFI_CallFrame", frame[0], _FRAME_BYTES)
    _expect("XLA_FFI_Args", frame[_ARGS], _GROUP_BYTES, exact=True)         # what lies behind it depends on it
    _expect("XLA_FFI_Rets", frame[_RETS], _GROUP_BYTES, exact=True)
    _expect("XLA_FFI_Attrs", frame[_ATTRS], _ATTRS_BYTES)
    _expect("XLA_FFI_Api", _words[frame[_API] >> 3], _API_BYTES)


def _fail(api: int, error: BaseException) -> int:
    """An XLA_FFI_Error with the words of a Python exception."""
    code = (_INVALID_ARGUMENT if isinstance(error, (ValueError, TypeError)) else
            _UNIMPLEMENTED if isinstance(error, NotImplementedError) else _INTERNAL)
    args = _ErrorArgs(28, None, f"cuflash: {type(error).__name__}: {error}".encode(), code)     # lives until XLA has read it
    return _function(api, _ERROR_CREATE)(ctypes.addressof(args))


def _raise_xla(api: int, error: int) -> None:
    args = _DetailsArgs(36, None, error)
    _function(api, _ERROR_DETAILS)(ctypes.addressof(args))
    message = (args.message or b"").decode(errors="replace")
    destroy = _DestroyArgs(24, None, error)
    _function(api, _ERROR_DESTROY)(ctypes.addressof(destroy))
    raise RuntimeError(f"XLA gives no stream: {message}")


def _answer_metadata(frame: memoryview) -> None:
    """XLA asks what the handler is, once, when it is registered."""
    extension, api = frame[_EXTENSION] >> 3, frame[_API] >> 3
    _expect("XLA_FFI_Api", _words[api], _API_BYTES)
    while extension:                    # size, type, next, metadata
        if _words[extension + 1] & _INT32 == _METADATA_EXTENSION:
            metadata = _words[extension + 3]
            _expect("XLA_FFI_Metadata", _words[metadata >> 3], _METADATA_BYTES)
            major, minor = _words[api + _VERSION] & _INT32, _words[api + _VERSION] >> 32
            if major:
                raise RuntimeError(f"XLA's foreign function interface has version {major}.{minor}, cuflash knows 0: use a "
                                   "newer cuflash")
            # size, version (size, extension, major and minor), traits. Sizes are checked, so any version of that major.
            (ctypes.c_int * 2).from_address(metadata + 24)[:] = 0, minor
            ctypes.c_uint32.from_address(metadata + 32).value = _COMMAND_BUFFER_COMPATIBLE
        extension = _words[extension + 2] >> 3


# -------------------------------------------------------------------------------------------------------------------- calls

class _Door:
    """What the functions that launch ask of a framework, to learn which address they pass where: arrays are addresses."""

    def __init__(self, lse: int, memory: int):
        self._lse, self._memory = lse, memory

    def maker(self, shape, dtype, like):
        return lambda: self._lse        # the one result that is not given

    def ptr(self, x):
        return x

    def stream(self, device_id):
        return 0

    def scratch(self, num_bytes, like, stream):
        return self._memory, None


class _Ready:
    """A prepared launch, used by one call at a time.

    ``values`` takes the arguments of the launch out of the addresses of all buffers with ``more`` appended: of its pairs the
    number, or if it is an offset into the scratch, the address there.
    """

    def __init__(self, known: _Known, prepared: launch.Prepared):
        self.launch, self.more, self.scratch = prepared.launch, [], known.memory
        self.stream_args = _StreamArgs(32, 0, 0, 0)
        self.stream_address = ctypes.addressof(self.stream_args)
        if prepared.launch is None:
            return
        count, unit = len(known.buffers) + 1, 1 << 44
        places = [(place + 1) * unit for place in range(count - 1)] + [0]
        arguments = []
        prepared.launch = lambda stream, *passed: arguments.extend(passed)
        door, given = _Door(places[known.lse], places[known.memory]), operator.itemgetter(*known.places)(places)
        prepared.make_with(door, None)
        known.operation.run(door, prepared, given, given, None)
        values = []
        for argument in arguments:
            place, rest = divmod(argument, unit)
            if not rest:                # of a null too
                values.append(place - 1 if place else count - 1)
            else:
                values.append(count + len(self.more))
                self.more.append((rest, bool(place)))
        self.values = operator.itemgetter(*values)

    def __call__(self, stream: int, pointers: list[int]) -> None:
        if self.more:
            scratch = pointers[self.scratch]
            pointers += [scratch + number if is_offset else number for number, is_offset in self.more]
        self.launch(stream, *self.values(pointers))


class _Known:
    """A call by its text."""

    def __init__(self, text: bytes):
        name, operands, options, tier, given, results, self.scratch = json.loads(text)
        options = tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in options)
        self.call = Call(name, tuple(operands), options, tier)
        self.operation = OPERATIONS[name]
        self.buffers = [Array(name, dtype, tuple(shape)) for name, dtype, shape in (*given, *results)]
        if self.scratch:
            self.buffers.append(Array("workspace", "uint8", (self.scratch,)))
        self.num_operands, self.num_results = len(given), len(self.buffers) - len(given)
        self.read_operands, self.read_results = (struct.Struct(f"={count}Q").unpack_from
                                                 for count in (self.num_operands, self.num_results))
        places = {}
        for place, array in enumerate(self.buffers):
            places.setdefault(array.name, place)        # of a cache the operand; its result is in the same memory
        null = len(self.buffers)                        # the address that follows those of the buffers
        self.places = [places.get(array, null) for array in self.operation.arrays]
        self.lse, self.memory = places.get("lse", null), places.get("workspace", null)
        self.same = [(places[array.name], place) for place, array in enumerate(self.buffers) if places[array.name] != place]
        self.stated = sorted({places[array] for array in self.operation.arrays if array in places and array != "workspace"})
        self.ready: dict[tuple, list[_Ready]] = {}          # by device and alignment
        self.checked = False

    def described(self, pointers=None, device="jax"):
        """The problem and its views, of the arrays of the operation, results that it writes included."""
        if pointers is not None:
            pointers = [pointers[place] for place in self.stated]
            names = [self.buffers[place].name for place in self.stated]
            if "v_cache" in names and pointers[names.index("v_cache")] == pointers[names.index("k_cache")]:
                # One array given twice is two to whoever traced the call.
                pointers[names.index("v_cache")] += 1 << 48
        return state(self.call, [self.buffers[place] for place in self.stated], pointers, device)

    def check(self, address: int) -> None:
        """Raise unless the buffers of the frame there are those of which the text tells."""
        frame = _words_of_frame(address)
        _check_frame(frame)
        if frame[_ARGS + 2] != self.num_operands or frame[_RETS + 2] != self.num_results:
            raise RuntimeError(f"XLA calls {self.call.operation} with {frame[_ARGS + 2]} operands and {frame[_RETS + 2]} "
                               f"results; it was traced with {self.num_operands} and {self.num_results}")
        for array, buffer in zip(self.buffers, self._addresses(frame[_ARGS + 4], frame[_RETS + 4])):
            size, _, dtype, _, rank, dims = _words[buffer >> 3:(buffer >> 3) + 6]
            _expect("XLA_FFI_Buffer", size, _BUFFER_BYTES)
            shape, dtype = tuple(_words[dims >> 3:(dims >> 3) + rank]), dtype & _INT32
            if shape != array.shape or dtype != _DTYPES[array.dtype]:
                raise RuntimeError(f"XLA calls {self.call.operation} with {array.name} of shape {shape} and type {dtype}; it "
                                   f"was traced with {array.shape} and {array.dtype}")
        self.checked = True

    def _addresses(self, operands: int, results: int) -> tuple[int, ...]:
        """Where the buffers are described, operands and then results."""
        return self.read_operands(_bytes, operands) + self.read_results(_bytes, results)

    def pointers(self, address: int, operands: int, results: int) -> list[int]:
        """The addresses of all buffers, and a null. Of the frame: its address, and those of its two arrays."""
        if not self.checked:
            self.check(address)
        data_of = _data_of
        found = [data_of[buffer >> 3] for buffer in self._addresses(operands, results)]
        for one, other in self.same:
            if found[one] != found[other]:
                raise RuntimeError(f"XLA did not give the result {self.buffers[one].name} the memory of the operand")
        found.append(0)
        return found

    # ------------------------------------------------------------------------------------------------------------------- GPU

    def load(self, device_id: int) -> None:
        """Compile and load the kernels: nothing can be while a stream is captured, as XLA does with calls in a row."""
        stated, _ = self.described()
        if stated.is_empty:
            return
        device = launch.device_of(device_id)
        chosen = config.choose(stated, device, self.call.tier)
        arch = arch_for(device.compute_capability)
        for kernel, _ in launch.steps_of(stated, chosen):
            load(kernel.kernel, launch.kernel_constants(kernel), launch.arch_of(kernel, arch), device_id, kernel.smem_bytes)

    def prepare(self, device_id: int, stream: int, pointers) -> _Ready:
        stated, views = self.described(pointers, f"cuda:{device_id}")
        prepared = self.operation.prepared(stated, views, self.operation.written, device_id, stream, self.call.tier)
        if prepared.scratch_bytes > self.scratch:
            raise RuntimeError(f"{self.call.operation} needs {prepared.scratch_bytes} bytes of scratch on GPU {device_id}, and "
                               f"was compiled by JAX with {self.scratch}: compile it in a process that has this GPU")
        return _Ready(self, prepared)

    def launch(self, address: int, api: int, context: int, operands: int, results: int) -> None:
        pointers = self.pointers(address, operands, results)
        bits = 0
        for pointer in pointers:
            bits |= pointer
        # Mostly all are aligned to 16 bytes. Where not, it matters which: kernels are chosen by that of inputs and of results.
        key = _get_device(), bits & 15 and tuple([pointer & 15 for pointer in pointers])
        waiting = self.ready.get(key)
        if waiting is None:
            waiting = self.ready.setdefault(key, [])
        try:
            ready = waiting.pop()
        except IndexError:
            ready = self.prepare(key[0], _stream_of(api, context, _StreamArgs(32, 0, 0, 0)), pointers)
        if ready.launch is not None:
            ready(_stream_of(api, context, ready.stream_args, ready.stream_address), pointers)
        waiting.append(ready)

    # ------------------------------------------------------------------------------------------------------------------- CPU

    def compute(self, address: int, operands: int, results: int) -> None:
        pointers = self.pointers(address, operands, results)
        stated, _ = self.described()
        x = dict.fromkeys(self.operation.arrays)
        for array, pointer in reversed(list(zip(self.buffers, pointers))):      # the operands last: see places
            x[array.name] = _numpy(array, pointer)
        if self.operation.check_lengths:
            self.operation.check_lengths(stated, x)
        lse = self.operation.compute(stated, x)
        if lse is not None:
            x["lse"][...] = lse


def _numpy(array: Array, pointer: int) -> np.ndarray:
    dtype = arrays.numpy_dtype(array.dtype)
    count = math.prod(array.shape) * ITEMSIZE[array.dtype]
    if count == 0:
        return np.empty(array.shape, dtype)
    return np.frombuffer((ctypes.c_uint8 * count).from_address(pointer), np.uint8).view(dtype).reshape(array.shape)


def _get_device() -> int:
    """The current one. Replaced on the first call by CuPy's own, or by 0 where there is no other."""
    global _get_device
    runtime = import_cupy().cuda.runtime
    _get_device = runtime.getDevice if runtime.getDeviceCount() > 1 else int
    return _get_device()


def _stream_of(api: int, context: int, args, address: int | None = None) -> int:
    """``args``: _StreamArgs of one's own; ``address``: theirs, if it is known."""
    args[2] = context
    error = _get_stream[api](ctypes.addressof(args) if address is None else address)
    if error:
        _raise_xla(api, error)
    return args[3]


# ----------------------------------------------------------------------------------------------------------------- handlers

PLATFORMS: set[str] = set()     # for which calls have been compiled
_active: set[int] = set()       # threads that compute on the CPU
_get_stream: dict[int, object] = {}     # by the table of functions of an XLA whose frames are as expected: one of them
_known: dict[bytes, _Known] = {}
_lock = threading.Lock()


class _Thread(threading.local):
    is_kept = False


_thread = _Thread()
_keep_state = ctypes.pythonapi.PyGILState_Ensure        # without its counterpart, until the process ends


def _known_of(address: int, api: int, attributes: int, platform: str) -> _Known:
    if api not in _get_stream:
        _check_frame(_words_of_frame(address))
        _get_stream[api] = _function(api, _STREAM_GET)
    start, length = _read_string(_bytes, _words[attributes >> 3])       # the first attribute and the only one
    text = _bytes[start:start + length].tobytes()
    known = _known.get(text)
    if known is None:
        with _lock:
            known = _known.get(text)
            if known is None:
                PLATFORMS.add(platform)
                known = _known[text] = _Known(text)
    return known


def _handler(handle):
    """The C function of a handler. Whatever goes wrong becomes an error of XLA."""
    def call(address):
        extension, api, context, operands, results, attributes = _read_frame(_bytes, address)
        try:
            if not _thread.is_kept:
                _keep_state()
                _thread.is_kept = True
            if extension:
                _answer_metadata(_words_of_frame(address))
            else:
                handle(address, api, context, operands, results, attributes)
        except BaseException as error:
            return _fail(api, error)
        return None
    return _Handler(call)


def _execute_gpu(address, api, context, operands, results, attributes) -> None:
    _known_of(address, api, attributes, "gpu").launch(address, api, context, operands, results)


def _execute_cpu(address, api, context, operands, results, attributes) -> None:
    thread = threading.get_ident()
    _active.add(thread)
    try:
        _known_of(address, api, attributes, "cpu").compute(address, operands, results)
    finally:
        _active.discard(thread)


def _instantiate_gpu(address, api, context, operands, results, attributes) -> None:
    known = _known_of(address, api, attributes, "gpu")
    check_driver()
    for device_id in _gpus_of_jax():
        known.load(device_id)


def _gpus_of_jax() -> list[int]:
    import jax
    return sorted(device.local_hardware_id for device in jax.local_devices(backend="gpu"))


HANDLERS = {name: _handler(function) for name, function in (
    ("cpu", _execute_cpu), ("gpu", _execute_gpu), ("gpu instantiate", _instantiate_gpu))}


def wait_until_quiet() -> None:
    """Return when no call has been computed on the CPU for a while."""
    quiet = 0
    while quiet < 5:
        time.sleep(0.004)
        quiet = 0 if _active else quiet + 1


def register() -> None:
    """Make the handlers known to XLA."""
    import jax

    def capsule(name):
        return jax.ffi.pycapsule(ctypes.cast(HANDLERS[name], ctypes.c_void_p).value)

    jax.ffi.register_ffi_target(TARGET, capsule("cpu"), platform="cpu")
    jax.ffi.register_ffi_target(TARGET, {"instantiate": capsule("gpu instantiate"), "execute": capsule("gpu")}, platform="CUDA")
