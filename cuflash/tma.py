"""Tensor maps: what Hopper's tensor memory accelerator is told of an array (CUDA driver API, "Tensor Map Object Management").

"""

from __future__ import annotations

import ctypes

from .arrays import ITEMSIZE, View
from .driver import library as _driver

MAP_BYTES = 128
_DATA_TYPES = {"float16": 6, "bfloat16": 9}     # CUtensorMapDataType
_SWIZZLES = {32: 1, 64: 2, 128: 3}              # CUtensorMapSwizzle by the bytes that it spans
_PROMOTIONS = {128: 2, 256: 3}                  # CUtensorMapL2promotion by the bytes that the L2 cache asks memory for at a time


def encode(address: int, view: View, panel: int, rows: int, promoted: int = 256) -> None:
    """Write the map of a (batch, seqlen, heads, head_dim) array to ``address``, a multiple of 64.

    A load takes ``rows`` rows of one head and ``panel`` of its columns, swizzled over a row of the panel; what lies outside
    of the array is 0. Memory is read by ``promoted`` bytes. Raises RuntimeError if the driver refuses.
    """
    itemsize = ITEMSIZE[view.dtype]
    batch, seqlen, heads, head_dim = view.shape
    sizes = (head_dim, seqlen, heads, batch)
    # The stride of an axis of one is read too, and may be anything in the view.
    strides = [stride * itemsize if size > 1 else 0
               for size, stride in zip(sizes[1:], (view.strides[1], view.strides[2], view.strides[0]))]
    status = _driver().cuTensorMapEncodeTiled(
        ctypes.c_void_p(address), _DATA_TYPES[view.dtype], 4, ctypes.c_void_p(view.ptr),
        (ctypes.c_uint64 * 4)(*(max(1, size) for size in sizes)), (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(panel, rows, 1, 1), (ctypes.c_uint32 * 4)(1, 1, 1, 1), 0, _SWIZZLES[panel * itemsize],
        _PROMOTIONS[promoted], 0)
    if status:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status} for shape {view.shape}, strides {view.strides} "
                           f"elements, address {view.ptr:#x}")


def replace_address(address: int, pointer: int) -> None:
    """Let the map at ``address`` be of the array at ``pointer``."""
    status = _driver().cuTensorMapReplaceAddress(address, pointer)
    if status:
        raise RuntimeError(f"cuTensorMapReplaceAddress failed with {status} for address {pointer:#x}")
