"""Tensor maps: which arrays they can describe, and what the driver is told of one. With a driver that is made up: no GPU."""

import ctypes
import functools
import inspect
import os
import re
from typing import NamedTuple

import pytest

from cuflash import launch, tma
from cuflash.arrays import View
from cuflash.memory import contiguous_strides, tma_addressable

TIB = 2**40


class Map(NamedTuple):
    """What cuTensorMapEncodeTiled was given, with ctypes' arrays as tuples."""

    place: int  # of the map
    dtype: int
    pointer: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    interleave: int
    swizzle: int
    promotion: int
    fill: int


def layout_of(kernel: str):
    """The params record that a kernel is launched with."""
    call = kernel.partition("_")[0]
    return {"bwd": launch.BWD_PARAMS, "decode": launch.DECODE_PARAMS}.get(call, launch.FWD_PARAMS)


class MadeUpDriver:
    """Keeps what it is called with, in ``encoded`` and in ``replaced`` (place, pointer), and returns ``status``.

    A map of its has its array's pointer in the first 8 bytes, and elsewhere what only encoding writes.
    """

    def __init__(self):
        self.encoded, self.replaced, self.status = [], [], 0

    def cuTensorMapEncodeTiled(self, place, dtype, rank, pointer, sizes, strides, box, element_strides, *modes):
        for values, length, size in ((sizes, 4, 8), (strides, 3, 8), (box, 4, 4), (element_strides, 4, 4)):
            assert len(values) == length and ctypes.sizeof(values) == length * size, "the widths of the C function"
        assert rank == 4 and place.value % 64 == 0
        arrays = (tuple(values) for values in (sizes, strides, box, element_strides))
        self.encoded.append(Map(place.value, dtype, pointer.value or 0, *arrays, *modes))
        ctypes.memset(place.value, len(self.encoded), tma.MAP_BYTES)
        self._write(place.value, pointer.value or 0)
        return self.status

    def cuTensorMapReplaceAddress(self, place, pointer):
        self.replaced.append((place, pointer))
        self._write(place, pointer)
        return self.status

    def _write(self, place, pointer):
        ctypes.c_uint64.from_address(place).value = pointer


def pointers_of(maps: bytes) -> list[int]:
    """Of the arrays of maps that MadeUpDriver wrote, one behind the other; 0 where there is none."""
    return [int.from_bytes(maps[i : i + 8], "little") for i in range(0, len(maps), tma.MAP_BYTES)]


@pytest.fixture
def driver(monkeypatch):
    made = MadeUpDriver()
    monkeypatch.setattr(tma, "_driver", lambda: made)
    return made


@pytest.fixture
def place():
    """Where a map may stand."""
    memory = ctypes.create_string_buffer(tma.MAP_BYTES + 64)
    yield ctypes.addressof(memory) + -ctypes.addressof(memory) % 64
    del memory


def view(shape, strides=None, dtype="float16", ptr=1 << 20) -> View:
    return View(shape, contiguous_strides(shape) if strides is None else strides, dtype, "cuda:0", ptr, "cupy")


# ------------------------------------------------------------------------------------------------------------
# Which arrays


SHAPE = (2, 100, 4, 64)


@pytest.mark.parametrize(
    "array, expected",
    [
        (view(SHAPE), True),
        (view(SHAPE, dtype="bfloat16", ptr=16), True),
        (view(SHAPE, (25600, 64, 6400, 1)), True),  # heads outside
        (view(SHAPE, (0, 64, 0, 1)), True),  # expanded
        (view(SHAPE, (0, 0, 0, 1)), True),
        (view(SHAPE, ptr=(1 << 20) + 8), False),
        (view(SHAPE, ptr=(1 << 20) + 2), False),
        (view(SHAPE, (26000, 260, 65, 1)), False),  # rows that start anywhere
        (view(SHAPE, (26000, 260, 68, 1)), False),  # at multiples of 8 bytes
        (view(SHAPE, (25600, -256, 64, 1)), False),
        (view(SHAPE, (-25600, 256, 64, 1)), False),
        (view(SHAPE, (25600, 256, -64, 1)), False),
        (view(SHAPE, (TIB // 2, 256, 64, 1)), False),  # of 2 bytes
        (view(SHAPE, (TIB // 2 - 8, 256, 64, 1)), True),
        (view(SHAPE, (25600, TIB // 2, 64, 1)), False),
        (view(SHAPE, (25600, 256, TIB, 1)), False),
        # What an axis of one steps over is no matter.
        (view((1, 100, 4, 64), (-1, 256, 64, 1)), True),
        (view((1, 100, 1, 64), (3 * TIB, 64, 7, 1)), True),
        (view((2, 1, 4, 64), (25600, -TIB, 64, 1)), True),
        (view((1, 1, 1, 64), (-1, 3, TIB, 1)), True),
        # And so is the length of a row, as far as its start is a multiple of 16 bytes.
        (view((2, 100, 4, 20), (12800, 128, 24, 1)), True),
        (view((2, 100, 4, 20)), False),
        (view((2, 0, 4, 64)), True),
        (view((2, 0, 4, 64), ptr=0), True),
    ],
    ids=lambda value: f"{value.shape} {value.strides} {value.ptr:#x}" if isinstance(value, View) else str(value),
)
def test_what_a_tensor_map_can_describe(array, expected):
    assert tma_addressable(array) is expected


# ------------------------------------------------------------------------------------------------------------
# What the driver is told


def test_a_map_of_an_array(driver, place):
    tma.encode(place, view((2, 100, 4, 80), ptr=0x7000_0000_0010), 64, 128)
    # Rows, heads and batch behind the columns; sizes in elements, strides in bytes.
    assert driver.encoded == [
        Map(place, 6, 0x7000_0000_0010, (80, 100, 4, 2), (640, 160, 64000), (64, 128, 1, 1), (1,) * 4, 0, 3, 3, 0)
    ]


def test_a_map_of_bfloat16_in_narrow_panels(driver, place):
    tma.encode(place, view((1, 7, 2, 96), dtype="bfloat16"), 32, 64)
    (made,) = driver.encoded
    assert (made.dtype, made.swizzle) == (9, 2), "a row of the panel has 64 bytes"
    assert made.box == (32, 64, 1, 1) and made.sizes == (96, 7, 2, 1)


def test_a_map_by_which_less_is_read_ahead(driver, place):
    tma.encode(place, view((1, 7, 2, 96)), 64, 64, 128)
    (made,) = driver.encoded
    assert made.promotion == 2


@pytest.mark.parametrize(
    "shape, strides, expected",
    [
        ((2, 100, 4, 64), (25600, 64, 6400, 1), (128, 12800, 51200)),  # heads outside
        ((2, 100, 4, 64), (0, 64, 0, 1), (128, 0, 0)),
        ((2, 100, 4, 64), (TIB // 2 - 8, 256, 64, 1), (512, 128, TIB - 16)),
        # An axis of one: what the view says there may be anything, and the driver would refuse it.
        ((1, 100, 4, 64), (-1, 256, 64, 1), (512, 128, 0)),
        ((1, 1, 1, 64), (-1, 3, TIB, 1), (0, 0, 0)),
        ((2, 1, 4, 64), (256, 7, 64, 1), (0, 128, 512)),
    ],
)
def test_strides_of_a_map(driver, place, shape, strides, expected):
    array = view(shape, strides)
    assert tma_addressable(array)
    tma.encode(place, array, 64, 64)
    (made,) = driver.encoded
    assert made.strides == expected and made.sizes == (64, shape[1], shape[2], shape[0])
    assert all(stride % 16 == 0 and 0 <= stride < TIB for stride in made.strides)


def test_a_map_of_no_rows_has_one(driver, place):
    """The driver refuses a size of 0; the kernel loads nothing through such a map."""
    tma.encode(place, view((2, 0, 4, 64)), 64, 128)
    (made,) = driver.encoded
    assert made.sizes == (64, 1, 4, 2) and all(stride % 16 == 0 for stride in made.strides)


def test_another_address(driver, place):
    tma.encode(place, view(SHAPE, ptr=1 << 20), 64, 64)
    tma.replace_address(place, 1 << 47)
    assert driver.replaced == [(place, 1 << 47)] and len(driver.encoded) == 1
    assert pointers_of(ctypes.string_at(place, tma.MAP_BYTES)) == [1 << 47]


def test_what_the_driver_refuses_is_named(driver, place):
    driver.status = 801
    array = view(SHAPE, (25600, 256, 64, 1), ptr=0x123450)
    message = (
        "cuTensorMapEncodeTiled failed with 801 for shape (2, 100, 4, 64), strides (25600, 256, 64, 1) elements, "
        "address 0x123450"
    )
    with pytest.raises(RuntimeError, match=re.escape(message)):
        tma.encode(place, array, 64, 64)
    with pytest.raises(RuntimeError, match="cuTensorMapReplaceAddress failed with 801 for address 0xabc0"):
        tma.replace_address(place, 0xABC0)


def test_the_driver_is_loaded_when_a_map_is_made(monkeypatch):
    """Once, by the name that its package has, and with 64-bit pointers: a plain int would be cut to 32 bits."""
    loaded = []

    class Library:
        def __init__(self, name):
            loaded.append(name)
            for function in ("cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress", "cuLaunchKernelEx"):
                setattr(self, function, lambda *arguments: 0)

    monkeypatch.setattr(tma.ctypes, "CDLL", Library)
    monkeypatch.setattr(tma.ctypes, "PyDLL", Library)  # for what is called with the GIL held
    monkeypatch.setattr(tma, "_driver", functools.cache(inspect.unwrap(tma._driver)))
    assert tma._driver() is tma._driver() and loaded == ["nvcuda.dll" if os.name == "nt" else "libcuda.so.1"] * 2
    assert tma._driver().cuTensorMapReplaceAddress.argtypes == (ctypes.c_void_p, ctypes.c_void_p)
    assert tma._driver().cuLaunchKernelEx.argtypes == (ctypes.c_void_p,) * 4
