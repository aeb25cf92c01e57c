"""The calls in code that Inductor generates, past PyTorch's dispatcher, which takes longer than a launch.

`register` gives Inductor lowerings of the operators in cuflash.torch. They let it write ``cuflash_1a2b(q, k, v, out=buf0)`` where
it would write ``torch.ops.cuflash.attention.default(q, k, v, ...)``; cuflash_1a2b is a `Site`, which knows what the compiler
knows. That takes names of Inductor that PyTorch does not promise to keep: where they are missing, and for what a lowering does
not take, the operator is called as before.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import operator
import threading
from typing import NamedTuple

from . import arrays, config
from .attention import _ATTENTION, _VARLEN, Operation, _check_overlaps, _is_current, _prepare, _prepared, perform
from .decode import _DECODE
from .grad import _BACKWARD, _VARLEN_BACKWARD

_OUT, _NONE = -2, -1        # places of what no operator takes: see Site


class _Operator(NamedTuple):
    """What a lowering knows of one, by the places of its arguments."""

    operation: Operation
    arrays: tuple[int, ...]     # the arrays of the operation, in its order
    rows: tuple[int, ...]       # those that are copied if their last axis is not contiguous
    whole: tuple[int, ...]      # those that are copied if they are not row-major
    first_option: int           # behind the tensors, and of a cache behind a number of keys

    @property
    def has_number(self) -> bool:
        return bool(self.operation.number)

    @property
    def num_tensors(self) -> int:
        return self.first_option - self.has_number


_CACHED = _Operator(_DECODE, (0, 1, 2, 3, 4, 7, 5, 6, _NONE, _OUT), (0, 3, 4), (), 9)
_GRADIENTS = (_NONE,) * 3
_OPERATORS = {
    "attention": _Operator(_ATTENTION, (0, 1, 2, _OUT), (0, 1, 2), (), 3),
    "attention_varlen": _Operator(_VARLEN, (0, 1, 2, 3, 4, 5, 6, _OUT), (0, 1, 2), (), 7),
    "attention_backward": _Operator(_BACKWARD, (4, 5, 6, 2, 3, 0, 1, *_GRADIENTS), (0, 4, 5, 6), (1, 2, 3), 7),
    "attention_varlen_backward": _Operator(_VARLEN_BACKWARD, (4, 5, 6, 2, 3, 7, 8, 9, 10, 0, 1, *_GRADIENTS), (0, 4, 5, 6),
                                           (1, 2, 3), 11),
    "attention_with_kvcache": _CACHED,
    "attention_with_kvcache_append": _CACHED,
}


class Site:
    """A place in generated code where an operation is called.

    Code that Inductor keeps on disk names this class and its arguments, which so are the same in every version.

    Args:
        name: of the operator.
        options: those of the operation, in its order.
        layout: shapes, strides, dtypes and devices of the tensors, to which generated code holds them; names stand for numbers
            that only a call has. It tells the places of a module apart.
    """

    def __init__(self, name: str, options: tuple, layout: tuple):
        self._operation, self._options = _OPERATORS[name].operation, options
        self._arrays = operator.itemgetter(*_OPERATORS[name].arrays)
        self._writes_caches = name == "attention_with_kvcache_append"

    def __call__(self, *tensors, sizes=(), number=None, out=None):
        """The results of the operator.

        Args:
            tensors: those of the operator, in its order.
            sizes: values of what has a name in the layout.
            number: of keys, where it stands for a tensor.
            out: where the first result is to be written; the operator then has no other.
        """
        operation = self._operation
        given = self._arrays((*tensors, out, None))
        pointers = [0 if x is None else x.data_ptr() for x in given]
        unaligned = functools.reduce(operator.or_, pointers) & 15
        key = (self, config.forced_tier(), unaligned and tuple(pointer & 15 for pointer in pointers),
               operation.starts and operation.starts(pointers), sizes)
        door = arrays.door_of(given[0])
        call = _prepared.calls.get(key)
        if call is None:
            if not door.launches(given[0]):
                return self._in_tuple(perform(operation, given, self._options, number=number))
            call = _prepare(operation, door, given, self._options, key, number)
        elif self._writes_caches and call.may_overlap(pointers):
            _check_overlaps(operation, call, given, pointers)
        if not _is_current(door, call.device_id):
            with door.on_device(call.device_id):
                return self._in_tuple(operation.run(door, call, given, pointers, number))
        return self._in_tuple(operation.run(door, call, given, pointers, number))

    def _in_tuple(self, result):
        return result if type(result) is tuple else (result, None)


# ---------------------------------------------------------------------------------------------------------------- Inductor

_lock = threading.Lock()
_was_tried = False


def register() -> None:
    """Give Inductor the lowerings, once, if it is as they need it."""
    global _was_tried
    with _lock:
        if _was_tried:
            return
        _was_tried = True
        try:
            _register()
        except (ImportError, AttributeError, TypeError) as error:
            logging.getLogger(__name__).info("compiled code calls the operators of cuflash: %s", error)


def _options(name: str, args, return_lse: bool) -> tuple | None:
    """Those of the operation among an operator's arguments, of the types that the operator would make of them; None if one is not
    known."""
    causal, left, right, softmax_scale, softcap, *last = args[_OPERATORS[name].first_option:]
    known = (causal, left, right, 0 if softmax_scale is None else softmax_scale, softcap, *last)
    if not all(type(x) in (bool, int, float) and math.isfinite(x) for x in known):
        return None
    scale = None if softmax_scale is None else float(softmax_scale)
    options = (bool(causal), (left, right), scale, float(softcap))
    if name.endswith("backward"):
        return (*options, *map(bool, last))
    return (*options, return_lse, *last[:1]) if _OPERATORS[name].has_number else (*options, return_lse)


def _layout(tensors) -> tuple[tuple, list]:
    """(layout of a Site, the symbols that its names stand for)."""
    layout, symbols = [], set()
    for x in tensors:
        numbers = [] if x is None else [*x.get_size(), *x.get_stride()]
        for number in numbers:
            symbols |= getattr(number, "free_symbols", set())
        known = (str(number) if getattr(number, "free_symbols", None) else int(number) for number in numbers)
        layout.append(x and (*known, str(x.get_dtype()), str(x.get_device())))
    return tuple(layout), sorted(symbols, key=str)


def _register() -> None:
    import torch
    from torch._inductor import ir, lowering
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen
    from torch._inductor.virtualized import V
    from torch._library.utils import get_layout_constraint_tag
    if "add_import_once" not in PythonWrapperCodegen.__init__.__code__.co_names:
        raise AttributeError("the generated module takes no lines of others")
    realize, contiguous = ir.ExternKernel.realize_input, ir.FlexibleLayout.contiguous_strides

    def define(wrapper, name: str, args, return_lse: bool) -> str:
        """The name of the Site for an operator's arguments, made where the generated module begins."""
        while hasattr(wrapper, "parent_wrapper"):       # of a part of the graph
            wrapper = wrapper.parent_wrapper
        layout, _ = _layout(args[:_OPERATORS[name].num_tensors])
        made = f"Site({name!r}, {_options(name, args, return_lse)}, {layout})"
        site = f"cuflash_{hashlib.sha256(made.encode()).hexdigest()[:12]}"
        wrapper.add_import_once("from cuflash import torch_inductor as cuflash_inductor")
        wrapper.add_import_once(f"{site} = cuflash_inductor.{made}")
        return site

    def sizes_of(tensors) -> list[str]:
        _, symbols = _layout(tensors)
        return [f"sizes=({''.join(f'{symbol}, ' for symbol in symbols)})"] if symbols else []

    class Into(ir.ExternKernelOut):
        """A call for one result, in memory that generated code allocates, and reuses."""

        def __init__(self, layout, op, name: str, args):
            count = _OPERATORS[name].num_tensors
            self.call = name, [x if x is None else realize(x) for x in args[:count]], args[count:]
            super().__init__(layout, [x for x in self.call[1] if x is not None], op_overload=op)

        def codegen(self, wrapper):
            name, tensors, rest = self.call
            self.python_kernel_name = define(wrapper, name, (*tensors, *rest), return_lse=False)
            super().codegen(wrapper)

        def codegen_args(self):
            tensors, written = self.call[1], iter(super().codegen_args())
            return ["None" if x is None else next(written) for x in tensors] + sizes_of(tensors)

    class Returned(ir.FallbackKernel):
        """A call that returns its results."""

        def codegen(self, wrapper):
            name, args = self.op_overload._opname, self.arguments()
            self.python_kernel_name = define(wrapper, name, args, not _OPERATORS[name].has_number or args[-1])
            super().codegen(wrapper)

        def codegen_args(self):
            of = _OPERATORS[self.op_overload._opname]
            written = super().codegen_args()[:of.first_option]
            number = [f"number={written.pop()}"] if of.has_number else []
            return [*written, *number, *sizes_of(self.arguments()[:of.num_tensors])]

        def arguments(self):
            args, _ = self.unflatten_args(self.inputs, self.constant_args)
            return args

    def equal(x, y) -> bool:
        return V.graph.sizevars.statically_known_equals(x, y)

    def is_row_major(x) -> bool:
        sizes, strides = x.get_size(), x.get_stride()
        return all(equal(size, 1) or equal(*pair) for size, *pair in zip(sizes, strides, contiguous(sizes)))

    def lowered(name: str, op, args) -> tuple | None:
        """The results, or None where only the operator knows what to do."""
        of, node = _OPERATORS[name], V.graph.current_node
        if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False) or _options(name, args, False) is None:
            return None
        # What the operator would copy, or resolve.
        if any(x is not None and x.meta["val"].is_neg() for x in node.args[:of.num_tensors]):
            return None
        if not (all(args[i] is None or equal(args[i].get_stride()[-1], 1) for i in of.rows)
                and all(args[i] is None or is_row_major(args[i]) for i in of.whole)):
            return None
        taken = {user: user.args[1] if user.target is operator.getitem else None for user in node.users}
        used = {index for user, index in taken.items() if user.users}
        has_number = of.has_number and args[of.num_tensors] is not None
        if used == {0} and _OUT in of.arrays and not has_number and not op._schema.is_mutable:
            q, v = args[0], args[2]
            size = [*q.get_size()[:-1], v.get_size()[-1]]
            layout = ir.FixedLayout(q.get_device(), q.get_dtype(), size, contiguous(size))
            return ir.TensorBox.create(Into(layout, op, name, args)), None
        if of.has_number and not args[-1] and not used <= {0}:
            return None         # the empty lse is wanted
        results = Returned.create(op, *args)
        for x in results:
            x.skip_size_stride_alignment_checks = True      # they are as register_fake has them
        return tuple(map(ir.TensorBox.create, results))

    def lower(name: str, op, fallback, *args, **kwargs):
        results = None
        if not kwargs:
            try:
                results = lowered(name, op, args)
            except (AttributeError, KeyError, NotImplementedError, TypeError, ValueError) as error:
                logging.getLogger(__name__).info("compiled code calls %s: %s", op, error)
        return fallback(*args, **kwargs) if results is None else results

    for name in _OPERATORS:
        op = getattr(torch.ops.cuflash, name).default
        fallback = lowering.fallback_handler(op, add_to_fallback_set=False)
        # As an operator gets them that has no lowering.
        lowering.add_needs_realized_inputs(op)
        lowering.add_layout_constraint(op, lowering.tag_to_layout_constraint(get_layout_constraint_tag(op)))
        lowering.register_lowering(op, type_promotion_kind=None)(functools.partial(lower, name, op, fallback))
