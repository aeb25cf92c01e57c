"""Where arrays lie in memory, by their views: strides, alignment, overlap. Nothing is read through them."""

from __future__ import annotations

import math

import numpy as np

from .arrays import ITEMSIZE, View


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides in elements of a row-major array."""
    return tuple(math.prod(shape[axis + 1:]) for axis in range(len(shape)))


def alignment(view: View) -> int:
    """Largest power of two up to 16 bytes that divides the base pointer and the strides of axes longer than 1."""
    bits = view.ptr | 16
    for size, stride in zip(view.shape[:3], view.strides[:3]):
        if size > 1:
            bits |= stride * ITEMSIZE[view.dtype]
    return bits & -bits


MAX_TMA_STRIDE = 2**40              # bytes


def tma_addressable(view: View) -> bool:
    """Whether a tensor map (tma.py) can describe the array."""
    strides = [stride * ITEMSIZE[view.dtype] for size, stride in zip(view.shape[:3], view.strides[:3]) if size > 1]
    return alignment(view) == 16 and all(0 <= stride < MAX_TMA_STRIDE for stride in strides)


def byte_extent(view: View) -> tuple[int, int]:
    """First and past-the-last byte that a view reaches, counted from its pointer."""
    if 0 in view.shape:
        return 0, 0
    itemsize = ITEMSIZE[view.dtype]
    reach = [(size - 1) * stride * itemsize for size, stride in zip(view.shape, view.strides)]
    return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + itemsize


class _Addresses:
    """The addresses of a view as NumPy sees arrays; nothing is ever read through it."""

    def __init__(self, view: View):
        itemsize = ITEMSIZE[view.dtype]
        self.__array_interface__ = {
            "version": 3, "typestr": f"|V{itemsize}", "shape": view.shape, "data": (view.ptr, True),
            "strides": tuple(stride * itemsize for stride in view.strides)}


def share_memory(a: View, b: View) -> bool:
    """Whether the views have an element in common."""
    if 0 in a.shape or 0 in b.shape:
        return False
    a, b = np.asarray(_Addresses(a)), np.asarray(_Addresses(b))
    try:
        return np.shares_memory(a, b, max_work=10_000)
    except np.exceptions.TooHardError:      # interleaved beyond what can be decided quickly
        return np.may_share_memory(a, b)


def overlaps_itself(view: View) -> bool:
    """True unless sorting the axes by stride shows that each one steps over everything inside it."""
    if 0 in view.shape:
        return False
    inner = 1
    for stride, size in sorted((abs(stride), size) for size, stride in zip(view.shape, view.strides) if size > 1):
        if stride < inner:
            return True
        inner = stride * (size - 1) + inner
    return False
