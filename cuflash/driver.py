"""Functions of the CUDA driver for which CuPy has none, through ctypes."""

from __future__ import annotations

import ctypes
import functools
import os


@functools.cache
def library():
    """The driver's library."""
    name = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
    driver = ctypes.CDLL(name)
    driver.cuTensorMapReplaceAddress = ctypes.PyDLL(name).cuTensorMapReplaceAddress     # quick: to let go of the GIL takes longer
    driver.cuTensorMapReplaceAddress.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    driver.cuLaunchKernelEx.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return driver


class _Attribute(ctypes.Structure):     # CUlaunchAttribute
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _LaunchConfig(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem_bytes", ctypes.c_uint),
                ("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint)]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class EarlyLaunch:
    """A launch of one kernel, which may start while the kernel before it in the stream ends, and waits for that end itself by
    griddepcontrol.wait (CUDA: programmatic dependent launch, from compute capability 9.0 on). It is made with the first of the
    arguments of CuPy's launchKernel and called with the others, by one thread at a time.
    """

    def __init__(self, function, grid_x, grid_y, grid_z, block_x, block_y, block_z, smem_bytes):
        self._function = function
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, 0, 1)
        self._config = _LaunchConfig((grid_x, grid_y, grid_z), (block_x, block_y, block_z), smem_bytes,
                                     attributes=ctypes.pointer(self._attribute), num_attributes=1)
        self._address = ctypes.addressof(self._config)
        self._launch = library().cuLaunchKernelEx
        self._stream = None

    def __call__(self, stream, argv, extra) -> None:
        if stream != self._stream:      # to write into a ctypes structure takes as long as all else here
            self._config.stream = self._stream = stream
        status = self._launch(self._address, self._function, argv, extra or None)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx failed with {status}")
