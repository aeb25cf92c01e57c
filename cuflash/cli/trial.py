"""One case in one dtype on one tier: arrays placed as the case says, attention called, all of it checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import cuflash

from .. import config
from ..arrays import numpy_dtype
from .cases import LAYOUTS, Case
from .options import one_line

GUARD = 512  # bytes before and after an array; a multiple of every alignment
NAN_BYTE = 0xFF  # four or eight, or two, of them are NaN in every dtype
OTHER_BYTE = 0x5A  # and of these a finite number


class Placed:
    """An array in memory of its own, laid out as asked, known bytes all around; on the host without ``gpu``.

    Only plain copies touch the GPU: the memory is put together on the host and read back whole.
    """

    def __init__(
        self, shape, dtype: str, layout: str, gpu: int | None, fill: int, values: np.ndarray | None = None
    ):
        self._shape, self._dtype = shape, numpy_dtype(dtype)
        itemsize = self._dtype.itemsize
        strides, first = LAYOUTS[layout](shape)
        end = (
            first + sum(max(0, stride * (size - 1)) for size, stride in zip(shape, strides, strict=True)) + 1
        )
        self._strides = tuple(stride * itemsize for stride in strides)
        self._start = GUARD + first * itemsize
        self._before = np.full(2 * GUARD + end * itemsize, fill, np.uint8)
        if values is not None:
            self._values(self._before)[...] = values
        if gpu is None:
            self._memory = self._before.copy()
            self.array = self._values(self._memory)
        else:
            import cupy

            self._memory = cupy.empty(self._before.shape, np.uint8)
            self._memory.set(self._before)
            self.array = cupy.ndarray(
                self._shape, self._dtype, self._memory.data + self._start, self._strides
            )

    def _values(self, memory: np.ndarray) -> np.ndarray:
        return np.ndarray(self._shape, self._dtype, memory, self._start, self._strides)

    def read(self) -> tuple[np.ndarray, bool]:
        """The values now, packed, and whether every byte around them is what it was."""
        now = to_host(self._memory)
        values = self._values(now).copy(order="C")
        expected = self._before.copy()
        self._values(expected)[...] = values
        return values, np.array_equal(expected, now)

    def is_unchanged(self) -> bool:
        return np.array_equal(self._before, to_host(self._memory))


def to_host(x) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


@dataclass
class Row:
    """What came of a trial: ``ok``, ``why`` not, and the figures of oracle.Judgement, if it got so far."""

    case: str
    dtype: str
    tier: str
    ok: bool = False
    why: str = ""
    max_err: float | None = None
    ref_max_err: float | None = None
    max_budget: float | None = None
    rms_err: float | None = None
    ref_rms_err: float | None = None
    rms_budget: float | None = None
    scaled_err: float | None = None
    ref_scaled_err: float | None = None
    scaled_budget: float | None = None
    lse_err: float | None = None
    lse_budget: float | None = None


def run(case: Case, dtype: str, tier: str, gpu: int | None) -> Row:
    """Try a case on a tier ("cpu" without a GPU). Whatever goes wrong is in the row."""
    row = Row(case.name, dtype, tier)
    try:
        with config.force_tier(None if gpu is None else tier):
            faults = _try(case, dtype, gpu, row)
    except Exception as error:  # of any kind: a crash of one row must not cost the others
        faults = [f"{type(error).__name__}: {one_line(error)}"]
    row.ok, row.why = not faults, "; ".join(faults)
    return row


def _try(case: Case, dtype: str, gpu: int | None, row: Row) -> list[str]:
    from .. import oracle  # here, since SciPy takes longer to import than `cuflash --help` to run

    q, k, v = case.draw(dtype)
    out, lse, faults = _attend(case, (q, k, v), dtype, gpu, NAN_BYTE)
    judgement = oracle.judge(out, lse, q, k, v, **case.options)
    for name in vars(judgement).keys() & vars(row).keys() - {"ok", "why"}:
        setattr(row, name, getattr(judgement, name))
    if not judgement.ok:
        faults.append(judgement.why)

    again, lse_again, more = _attend(case, (q, k, v), dtype, gpu, OTHER_BYTE)
    faults += [fault for fault in more if fault not in faults]
    faults += _differences("a second run", out, again, lse, lse_again)
    if case.has_packed_twin:
        inputs = [Placed(x.shape, dtype, "packed", gpu, NAN_BYTE, x).array for x in (q, k, v)]
        faults += _differences("packed arrays", out, to_host(cuflash.attention(*inputs, **case.options)))
    return faults


def _attend(case: Case, arrays, dtype: str, gpu: int | None, fill: int):
    """(out, lse, faults) of the arrays laid out as the case says, with ``out`` full of ``fill`` before."""
    q, k, v = inputs = [
        Placed(x.shape, dtype, case.layouts[name], gpu, NAN_BYTE, x)
        for name, x in zip("qkv", arrays, strict=True)
    ]
    placed = Placed(case.shapes["out"], dtype, case.out_layout, gpu, fill)
    _, lse = cuflash.attention(q.array, k.array, v.array, out=placed.array, return_lse=True, **case.options)
    out, intact = placed.read()
    faults = [] if intact else ["memory around out was written"]
    faults += [f"{name} was written" for name, x in zip("qkv", inputs, strict=True) if not x.is_unchanged()]
    return out, to_host(lse), faults


def _differences(what: str, out, other, lse=None, other_lse=None) -> list[str]:
    """A line for each of out and lse that is not the same in every bit."""
    faults = []
    for name, first, second in (("out", out, other), ("lse", lse, other_lse)):
        if first is not None and (count := _num_different(first, second)):
            faults.append(f"{name} of {what} differs in {count} of {first.size} elements")
    return faults


def _num_different(first: np.ndarray, second: np.ndarray) -> int:
    if first.size == 0:
        return 0
    first, second = (np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1) for x in (first, second))
    return int((first != second).any(axis=1).sum())
