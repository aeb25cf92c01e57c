"""Arrays of any framework in and out: pointer, shape, strides, dtype, device, stream.

A door is the way in and out for one framework. It never imports it: an array of a framework is there only if the caller
imported it. Arrays on the CPU go to NumPy; JAX and other DLPack arrays on a GPU go through CuPy; CuPy and PyTorch are
read by their own attributes, since a DLPack exchange costs more than a launch.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import sys
import threading
import weakref
from typing import NamedTuple

import numpy as np

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1}


class View(NamedTuple):
    """An array as (batch, seqlen, heads, head_dim); a 3-D one gets a batch axis of 1."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]        # in elements
    dtype: str
    device: str                     # "cpu" or "cuda:<index>"
    ptr: int
    framework: str                  # "numpy", "cupy", "torch", "jax" or "dlpack"
    was_3d: bool = False
    readonly: bool = False


def _view(shape, strides, dtype, device, ptr, framework, readonly=False) -> View:
    was_3d = len(shape) == 3
    axis = (1,) * was_3d
    return View((*axis, *shape), (*axis, *strides), dtype, device, ptr, framework, was_3d, readonly)


def _from_bytes(strides, itemsize: int) -> tuple[int, ...]:
    # A view into records can have strides that are no whole number of elements; no kernel can read those.
    if any(stride % itemsize for stride in strides):
        raise ValueError(f"strides must be whole elements of {itemsize} bytes; got {tuple(strides)} bytes")
    return tuple(stride // itemsize for stride in strides)


@functools.cache
def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a cuflash dtype name; bfloat16 is that of ml_dtypes."""
    if name == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


class _Door:
    """What doors have in common: calls of most are not kept under a key."""

    current_device = None       # what the framework itself takes for the current device, if it is not always CUDA's

    def launches(self, x) -> bool:
        """Whether x is on a GPU and its memory is read directly."""
        return False

    def key(self, q, k, v, out):
        """What a prepared launch depends on, and the pointers it takes; (None, ()) if the arrays are not all alike, or not on a
        GPU whose memory is read directly.

        Written out for the call that is made most often: key_of_all takes twice as long.
        """
        return None, ()

    def key_of_all(self, arrays):
        """As key, of any number of arrays, the pointers in a list; None for one that is not given, whose pointer is then null."""
        return None, ()


class NumpyDoor(_Door):
    framework = "numpy"

    def on_cpu(self, x) -> bool:
        return True

    def view(self, x) -> View:
        return _view(x.shape, _from_bytes(x.strides, x.itemsize), x.dtype.name, "cpu", x.ctypes.data, "numpy",
                     readonly=not x.flags.writeable)

    def to_numpy(self, x) -> np.ndarray:
        return x

    def from_numpy(self, x: np.ndarray, like):
        return x

    def unexpanded(self, x):
        """x, or a copy where its last axis is expanded (stride 0), as the gradient of a sum is."""
        return np.ascontiguousarray(x) if x.ndim and x.strides[-1] == 0 and x.shape[-1] > 1 else x


class CupyDoor(_Door):
    framework = "cupy"

    def __init__(self):
        import cupy
        self._ndarray, self._alloc, self._current_stream = cupy.ndarray, cupy.cuda.alloc, cupy.cuda.get_current_stream
        self._is_capturing = cupy.cuda.runtime.streamIsCapturing

    def on_cpu(self, x) -> bool:
        return False

    def launches(self, x) -> bool:
        return True

    def view(self, x) -> View:
        return _view(x.shape, _from_bytes(x.strides, x.itemsize), x.dtype.name, f"cuda:{x.device.id}", x.data.ptr, "cupy")

    def key(self, q, k, v, out):
        if not type(q) is type(k) is type(v) or out is not None and type(out) is not type(q):
            return None, ()
        q_data, k_data, v_data = q.data, k.data, v.data
        pointers = q_data.ptr, k_data.ptr, v_data.ptr
        key = (q.shape, q.strides, q.dtype, q_data.device_id, k.shape, k.strides, k.dtype, k_data.device_id,
               v.shape, v.strides, v.dtype, v_data.device_id, (pointers[0] | pointers[1] | pointers[2]) & 15)
        if out is not None:
            key += (out.shape, out.strides, out.dtype, out.data.device_id, out.data.ptr & 15)
        return key, pointers

    def key_of_all(self, arrays):
        kind, key, pointers = type(arrays[0]), [], []
        for x in arrays:
            if x is None:
                key.append(None)
                pointers.append(0)
                continue
            if type(x) is not kind:
                return None, ()
            data = x.data
            pointer = data.ptr
            key += x.shape, x.strides, x.dtype, data.device_id, pointer & 15
            pointers.append(pointer)
        return tuple(key), pointers

    def ptr(self, x) -> int:
        return x.data.ptr

    def maker(self, shape, dtype: str, like):
        """A function that makes a row-major array of any contents, of the kind of ``like``, on the current device."""
        return functools.partial(self._ndarray, shape, numpy_dtype(dtype))

    def scratch(self, num_bytes: int, like, stream: int):
        """(address, what to keep until the launch is queued) of memory for one call, of any contents."""
        memory = _GraphMemory(num_bytes, stream) if self._is_capturing(stream) else self._alloc(num_bytes)
        return memory.ptr, memory

    def on_device(self, device_id: int):
        """A context in which a device is current."""
        import cupy
        return cupy.cuda.Device(device_id)

    def to_host(self, x) -> np.ndarray:
        return x.get()

    def unexpanded(self, x):
        """As NumpyDoor.unexpanded; the copy is scratch."""
        if not x.ndim or not x.size or x.strides[-1] or x.shape[-1] <= 1:
            return x
        import cupy
        device_id, num_bytes = x.device.id, x.nbytes
        with cupy.cuda.Device(device_id):
            address, held = self.scratch(num_bytes, x, self.stream(device_id))
            memory = cupy.cuda.UnownedMemory(address, num_bytes, held, device_id)
            copy = cupy.ndarray(x.shape, x.dtype, memptr=cupy.cuda.MemoryPointer(memory, 0))
            copy[...] = x
        return copy

    def stream(self, device_id: int) -> int:
        return self._current_stream().ptr


class _GraphMemory:
    """Scratch of a call that is being captured, allocated and freed by the graph itself. CuPy's pool would give its memory
    to others, while every replay still writes to it."""

    def __init__(self, num_bytes: int, stream: int):
        import cupy
        self.ptr = cupy.cuda.runtime.mallocAsync(num_bytes, stream)
        weakref.finalize(self, cupy.cuda.runtime.freeAsync, self.ptr, stream)


class TorchDoor(_Door):
    framework = "torch"

    def __init__(self):
        torch = sys.modules["torch"]
        self._dtypes = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
        self._byte = torch.uint8
        self._grad_enabled = torch.is_grad_enabled
        self._plain = torch.Tensor, torch.nn.Parameter
        # What code that torch.compile generates allocates with, on the current device: in half of torch.empty's time.
        guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self._empty_strided = getattr(guards, "_empty_strided_cuda", None)
        if torch.version.cuda:
            self.stream = torch._C._cuda_getCurrentRawStream
            self.current_device = torch._C._cuda_getDevice

    def on_cpu(self, x) -> bool:
        return x.device.type == "cpu"

    def launches(self, x) -> bool:
        return not self.on_cpu(x)

    def view(self, x) -> View:
        device = x.device
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"tensors must be on the CPU or a CUDA device; got one on {device}")
        if x.layout is not sys.modules["torch"].strided:
            raise TypeError(f"tensors must be dense (torch.strided); got layout {x.layout}")
        if x.is_neg():          # as the imaginary part of a conjugate is: the memory holds the values negated
            raise ValueError("tensors must hold their own values; got one with the negative bit (is_neg()): pass x.resolve_neg()")
        name = "cpu" if device.type == "cpu" else f"cuda:{device.index}"
        return _view(x.shape, x.stride(), str(x.dtype).removeprefix("torch."), name, x.data_ptr(), "torch")

    def key(self, q, k, v, out):
        kind = type(q)
        if type(k) is not kind or type(v) is not kind or out is not None and type(out) is not kind:
            return None, ()
        if q.is_neg() or k.is_neg() or v.is_neg():
            return None, ()
        if self._grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
            return None, ()
        try:
            pointers = q_pointer, k_pointer, v_pointer = q.data_ptr(), k.data_ptr(), v.data_ptr()
            key = (kind, q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.device,
                   v.shape, v.stride(), v.dtype, v.device, (q_pointer | k_pointer | v_pointer) & 15)
            if out is not None:
                if out.requires_grad and self._grad_enabled() or out.is_neg():
                    return None, ()
                key += (out.shape, out.stride(), out.dtype, out.device, out.data_ptr() & 15)
        except (RuntimeError, TypeError):       # a tensor without memory or strides, which view() names
            return None, ()
        return key, pointers

    def key_of_all(self, arrays):
        kind, pointers, grad_enabled = type(arrays[0]), [], self._grad_enabled()
        key = [kind]
        try:
            for x in arrays:
                if x is None:
                    key.append(None)
                    pointers.append(0)
                    continue
                if type(x) is not kind or grad_enabled and x.requires_grad or x.is_neg():
                    return None, ()
                pointer = x.data_ptr()
                key += x.shape, x.stride(), x.dtype, x.device, pointer & 15
                pointers.append(pointer)
        except (RuntimeError, TypeError):
            return None, ()
        return tuple(key), pointers

    def refuse_grad(self, function: str, tensors: dict) -> None:
        wanting = [name for name, x in tensors.items() if getattr(x, "requires_grad", False)]
        if self._grad_enabled() and wanting:
            raise NotImplementedError(
                f"{', '.join(wanting)} require a gradient, which cuflash.{function} does not record: cuflash.torch.attention, "
                "attention_varlen and merge_attention do; call this one under torch.no_grad() or on x.detach()")

    def ptr(self, x) -> int:
        return x.data_ptr()

    def maker(self, shape, dtype: str, like):
        """As CupyDoor.maker."""
        kind = type(like)
        if self._empty_strided and like.is_cuda and kind in self._plain:
            strides = tuple(math.prod(shape[axis + 1:]) for axis in range(len(shape)))
            return functools.partial(self._empty_strided, shape, strides, self._dtypes[dtype])
        empty = functools.partial(sys.modules["torch"].empty, shape, dtype=self._dtypes[dtype], device=like.device)
        return empty if kind in self._plain else lambda: empty().as_subclass(kind)

    def scratch(self, num_bytes: int, like, stream: int):
        """As CupyDoor.scratch. While PyTorch captures, its allocator gives memory of the graph's own pool."""
        if self._empty_strided:
            memory = self._empty_strided((num_bytes,), (1,), self._byte)
        else:
            memory = like.new_empty(num_bytes, dtype=self._byte)
        return memory.data_ptr(), memory

    @contextlib.contextmanager
    def on_device(self, device_id: int):
        """As CupyDoor.on_device. PyTorch puts off the change to a device of which it knows no context."""
        import cupy
        with sys.modules["torch"].cuda.device(device_id), cupy.cuda.Device(device_id):
            yield

    def to_host(self, x) -> np.ndarray:
        return x.cpu().numpy()

    def is_strided(self, x) -> bool:
        return x.layout is sys.modules["torch"].strided and not x.is_nested

    def unexpanded(self, x):
        """As NumpyDoor.unexpanded."""
        return x.contiguous() if x.ndim and x.stride(-1) == 0 and x.shape[-1] > 1 else x

    def to_numpy(self, x) -> np.ndarray:
        x = x.detach()
        if str(x.dtype) == "torch.bfloat16":        # torch and NumPy share no bfloat16, but its bits
            return x.view(sys.modules["torch"].int16).numpy().view(numpy_dtype("bfloat16"))
        return x.numpy()

    def from_numpy(self, x: np.ndarray, like):
        torch = sys.modules["torch"]
        if x.dtype.name == "bfloat16":
            return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(x)


class DlpackDoor(_Door):
    """Arrays that are read through DLPack: JAX's, and whatever else has ``__dlpack__``."""

    def __init__(self, framework: str):
        self.framework = framework
        self._lock = threading.Lock()           # two threads must not each drop the one of which the other has seen the end
        self._busy = collections.deque()        # (event, arrays): the owner must not reuse memory that a kernel still reads

    def on_cpu(self, x) -> bool:
        return x.__dlpack_device__()[0] == 1    # kDLCPU

    def view(self, x) -> View:
        if self.on_cpu(x):
            return _shared(NumpyDoor).view(self.to_numpy(x))._replace(framework=self.framework)
        # For messages about a mix of arrays: memory on a GPU is reached by to_cupy.
        shape = tuple(getattr(x, "shape", ()))
        device = f"cuda:{x.__dlpack_device__()[1]}"
        return _view(shape, (0,) * len(shape), str(getattr(x, "dtype", "unknown")), device, 0, self.framework)

    def to_numpy(self, x) -> np.ndarray:
        return np.asarray(x) if self.framework == "jax" else np.from_dlpack(x)

    def from_numpy(self, x: np.ndarray, like):
        return sys.modules["jax"].device_put(x, like.device) if self.framework == "jax" else x

    def to_cupy(self, x):
        from .jit import import_cupy
        kind, index = x.__dlpack_device__()
        if kind not in (2, 13):                 # kDLCUDA, kDLCUDAManaged
            raise ValueError(f"arrays must be on the CPU or a CUDA device; got DLPack device type {kind}")
        cupy = import_cupy()
        with cupy.cuda.Device(index):
            return cupy.from_dlpack(x)

    def unexpanded(self, x):
        return x                                # JAX has no such arrays; others are seen by CuPy or NumPy

    def from_cupy(self, x):
        return sys.modules["jax"].dlpack.from_dlpack(x) if self.framework == "jax" else x

    def keep_until_done(self, *arrays) -> None:
        """Hold the arrays until all that is queued on CuPy's current stream has run, without waiting for it."""
        import cupy
        busy = self._busy
        with self._lock:
            while busy and busy[0][0].done:
                busy.popleft()
        stream = cupy.cuda.get_current_stream()
        if not cupy.cuda.runtime.streamIsCapturing(stream.ptr):
            busy.append((stream.record(), arrays))


_doors: dict[type, object] = {}


def door_of(x, name: str = "q"):
    """The door of an array's framework. Raises TypeError for what is no array."""
    door = _doors.get(type(x))
    if door is None:
        door = _doors[type(x)] = _find_door(x, name)
    return door


def _find_door(x, name: str):
    if isinstance(x, np.ndarray):
        return _shared(NumpyDoor)
    for framework, array_type in (("cupy", "ndarray"), ("torch", "Tensor")):
        module = sys.modules.get(framework)
        if module is not None and isinstance(x, getattr(module, array_type)):
            return _shared(CupyDoor if framework == "cupy" else TorchDoor)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.Array):
        if isinstance(x, jax.core.Tracer):
            raise NotImplementedError(
                f"{name} is traced by JAX: this function takes concrete arrays; cuflash.jax has those for jit, grad and vmap")
        return _shared(DlpackDoor, "jax")
    if hasattr(x, "__dlpack__"):
        return _shared(DlpackDoor, "dlpack")
    raise TypeError(f"{name} must be a CuPy, PyTorch, JAX or NumPy array, or have __dlpack__; got {type(x).__name__}")


def _shared(kind, *args):
    """One door a framework, whatever the types of its arrays."""
    for door in _doors.values():
        if type(door) is kind and door.framework == (args[0] if args else kind.framework):
            return door
    return kind(*args)
