"""One case in one dtype on one tier: arrays placed as the case says, attention called, all of it checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import cuflash

from .. import config
from ..arrays import numpy_dtype
from .case import Case, dtype_of, place_in
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
        strides, first = place_in(layout, shape)
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
    """What came of a trial: ``ok``, ``why`` not, and the figures of an oracle's judgement, if it got so far.

    They are those of the result ``of``: out, or the gradient that is nearest to its budget.
    """

    case: str
    dtype: str
    tier: str
    ok: bool = False
    why: str = ""
    of: str = ""
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
    arrays = case.draw(dtype)
    results, faults = _compute(case, arrays, dtype, gpu, NAN_BYTE)
    faults += _judge(case, arrays, results, row)
    again, more = _compute(case, arrays, dtype, gpu, OTHER_BYTE)
    faults += [fault for fault in more if fault not in faults]
    faults += _differences("a second run", results, again, case.repeatable)
    if case.has_packed_twin:
        packed, _ = _compute(case.packed_twin(), arrays, dtype, gpu, None)
        faults += _differences("packed arrays", results, packed, case.repeatable)
    return faults


def _judge(case: Case, arrays: dict, results: dict, row: Row) -> list[str]:
    """Hold the results against the oracle; the figures go into the row."""
    from .. import oracle  # here, since SciPy takes longer to import than `cuflash --help` to run

    if case.backward:
        judge = oracle.judge_backward if case.lengths is None else oracle.judge_varlen_backward
    elif case.cache is not None:
        judge = oracle.judge_with_kvcache
    else:
        judge = oracle.judge if case.lengths is None else oracle.judge_varlen
    inputs = {**arrays, **case.integers(), **case.options}
    judgement = judge(**{name: x for name, x in results.items() if name not in case.in_place}, **inputs)
    faults = [] if judgement.ok else [judgement.why]
    if case.in_place:
        *_, k_cache, v_cache = oracle.attention_with_kvcache(**inputs)
        for name, expected in (("k_cache", k_cache), ("v_cache", v_cache)):
            if count := _num_different(results[name], expected):
                faults.append(f"{name} afterwards is wrong in {count} of {expected.size} elements")
    row.of, figures = "out", judgement
    if case.backward:
        row.of = max(case.written, key=lambda name: _nearness(getattr(judgement, name)))
        figures = getattr(judgement, row.of)
    for name in vars(figures).keys() & vars(row).keys() - {"ok", "why"}:
        setattr(row, name, getattr(figures, name))
    return faults


def _nearness(judgement) -> tuple[bool, float]:
    """How close a gradient comes to what is not ok."""
    budget = judgement.max_budget
    return not judgement.ok, judgement.max_err / budget if budget else float(judgement.max_err > 0)


def _compute(case: Case, arrays: dict, dtype: str, gpu: int | None, fill: int | None) -> tuple[dict, list[str]]:
    """(results by name, faults) of the arrays laid out as the case says.

    Those to write into are full of ``fill`` before; with None there are none, and a forward is not asked for lse.
    """
    placed = {
        name: Placed(x.shape, dtype_of(name, dtype), case.layouts[name], gpu, NAN_BYTE, x)
        for name, x in arrays.items()
        if name not in case.views
    }
    integers = {
        name: Placed(x.shape, x.dtype.name, "packed", gpu, NAN_BYTE, x) for name, x in case.integers().items()
    }
    targets = {}
    if fill is not None:
        targets = {
            name: Placed(case.shapes[name], dtype, case.layouts[name], gpu, fill) for name in case.written
        }
    call = _backward if case.backward else _forward
    given, *others = ({name: x.array for name, x in group.items()} for group in (placed, integers, targets))
    given |= {name: given[of][..., : case.head_dim_v] for name, of in case.views.items()}
    results = call(case, given, *others)

    faults = []
    for name, target in targets.items():
        results[name], intact = target.read()
        faults += [] if intact else [f"memory around {name} was written"]
    for name in case.in_place:
        of = case.views.get(name)
        values, intact = placed[of or name].read()
        results[name] = values[..., : case.head_dim_v] if of else values
        faults += [] if intact else [f"memory around {name} was written"]
    inputs = {name: x for name, x in {**placed, **integers}.items() if name not in case.in_place}
    faults += [f"{name} was written" for name, x in inputs.items() if not x.is_unchanged()]
    return {name: to_host(x) for name, x in results.items()}, faults


def _forward(case: Case, arrays: dict, integers: dict, targets: dict) -> dict:
    if case.cache is not None:
        attend = cuflash.attention_with_kvcache
    else:
        attend = cuflash.attention if case.lengths is None else cuflash.attention_varlen
    if not targets:
        return {"out": attend(**arrays, **integers, **case.called_with)}
    out, lse = attend(**arrays, **integers, **targets, return_lse=True, **case.called_with)
    return {"out": out, "lse": lse}


def _backward(case: Case, arrays: dict, integers: dict, targets: dict) -> dict:
    attend = cuflash.attention if case.lengths is None else cuflash.attention_varlen
    differentiate = cuflash.attention_backward if case.lengths is None else cuflash.attention_varlen_backward
    operands = {name: arrays[name] for name in "qkv"}
    out, lse = attend(**operands, **integers, return_lse=True, **case.options)
    gradients = differentiate(
        **arrays, out=out, lse=lse, **integers, **targets, deterministic=case.deterministic, **case.options
    )
    return dict(zip(case.written, gradients, strict=True))


def _differences(what: str, results: dict, others: dict, names) -> list[str]:
    """A line for each of the named results that is not the same in every bit."""
    faults = []
    for name in names:
        if name in others and (count := _num_different(results[name], others[name])):
            faults.append(f"{name} of {what} differs in {count} of {results[name].size} elements")
    return faults


def _num_different(first: np.ndarray, second: np.ndarray) -> int:
    if first.size == 0:
        return 0
    first, second = (np.ascontiguousarray(x).view(np.uint8).reshape(x.size, -1) for x in (first, second))
    return int((first != second).any(axis=1).sum())
