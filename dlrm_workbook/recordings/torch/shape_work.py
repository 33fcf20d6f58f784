"""Operations and bytes of operators, from the shapes and types of their inputs.

A trace recorded with ``record_shapes`` says what each operator was given, newer ones also the
values of numbers and lists (``Concrete Inputs``) and the strides. Where those define the work,
it is counted here; each tensor is read or written once.

========================  =====================  ==================================================
operators                 operations             bytes
========================  =====================  ==================================================
products (m, k) (k, n)    2 m n k, m n to add    both operands and the result
convolutions              2 for each weight of   input, weights, output; backward: the gradient
                          each output's filter   and what its mask asks for
attention                 2 products (backward   queries, keys, values and the result; backward:
                          5), half if causal     those, the result, and four gradients
pooled lookups            N d (2 N d weighted)   N rows, N indices, B offsets, B rows written
sparse gradient, added    2 N d                  N rows of the gradient, N indices, N rows of the
                                                 table read and written
dense gradient of rows    N d                    gradient, N indices, a gradient for the whole table
elementwise               not counted            operands as stored, and the broadcast result
copies, cat, fills        not counted            read once (not for fills), written once
norms, softmax            not counted            operands and results, statistics of a row
reductions, sort, scans   not counted            operand (and result, where its size is known)
index_select, gather      not counted            indices, and the rows asked for, twice
index                     not counted            the elements asked for, twice
========================  =====================  ==================================================

``shape_work.csv`` says which formula is each operator's and how its bytes are counted; the
definitions are those of torch's operators (``native_functions.yaml``). An output whose shape
depends on values that the trace does not have is taken from the operator's backward twin, whose
input is the gradient of that output. What still is not known has no work: cat and
foreach operators of which no twin tells the type, FBGEMM's lookups (widths of rows are values),
causal attention's operations. Where an operand is expanded and the trace has no strides, its
bytes are too many.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from dlrm_workbook.ground.arrays import Bools, Floats, Ints, Names
from dlrm_workbook.ground.tables import rows_of
from dlrm_workbook.recordings.profile import inclusive_from_exclusive, nearest

ElementType = tuple[str, int]
"""Name of a type and bytes of an element."""

_NAMES_OF_TYPES: dict[ElementType, str] = {
    ("fp32", 4): "float, Float",
    ("fp64", 8): "double, Double",
    ("fp16", 2): "c10::Half, Half",
    ("bf16", 2): "c10::BFloat16, BFloat16",
    ("fp8", 1): "c10::Float8_e4m3fn, c10::Float8_e5m2, c10::Float8_e4m3fnuz, c10::Float8_e5m2fnuz",
    ("int8", 1): "signed char",
    ("uint8", 1): "unsigned char",
    ("int16", 2): "short, short int",
    ("int32", 4): "int",
    ("int64", 8): "long, long int",
    ("bool", 1): "bool",
}
TYPES = {name: kind for kind, names in _NAMES_OF_TYPES.items() for name in names.split(", ")}
"""Types of tensors as a trace writes them: to the name of their precision, and bytes."""

ELEMENT_BYTES = dict(TYPES.values()) | {"tf32": 4}
"""Precision to bytes of a number."""

UNKNOWN_PRECISION = "unknown"
"""The precision of operands whose types the trace does not have."""

OPERATIONS = "operations:"
"""What metrics of operations begin with; the precision of the operands follows."""

OPERAND_BYTES = "operand_bytes"

NOTE, NOTES = "calls:", ("dilated", "strided")
"""What metrics begin with that count an operator's calls: those whose filter has gaps, and those
that read operands of one shape in different orders, or with gaps."""

NOT_DOUBLE = "not float64"
"""Note of calls whose types are recorded, floating ones and none of them float64."""

EACH_ONCE, AT_LEAST, ASKED_FOR = "each once", "at least", "asked for"
"""What counted bytes are: of every tensor, of some of them, of rows that may repeat."""

Shape = list[int]
Amounts = tuple[float, list[tuple[int | ElementType, int]]]
"""Operations, and (input whose type counts, or type; elements) of everything read and written."""

_INTEGERS = {"int8", "uint8", "int16", "int32", "int64", "bool"}


@dataclass(frozen=True)
class Call:
    """What a trace says of an operator's inputs; a list of tensors is a list of shapes."""

    shapes: list[Any]
    types: list[str]
    values: list[Any] = field(default_factory=list)
    """Concrete inputs as text: ``'[1, 1]'``, ``'False'``, ``''`` for tensors."""
    strides: list[Any] = field(default_factory=list)
    output: Shape | None = None
    output_kind: ElementType | None = None
    """Shape of the result, where the backward twin gives it."""
    above: list[Any] = field(default_factory=list)
    """Shapes of the inputs of the operator that called this one."""
    below: list[Any] = field(default_factory=list)
    """Shapes of the inputs of ``aten::to``, where this one calls it."""

    @property
    def has_sparse(self) -> bool:
        """Whether an input is a sparse tensor: it has a shape and, where others have, no strides.

        Its shape is that of the dense one, so it does not tell how many elements there are.
        """
        strided = [
            bool(strides)
            for shape, strides in zip(self.shapes, self.strides, strict=False)
            if _is_shape(shape)
        ]
        return any(strided) and not all(strided)

    def kind(self, place: int) -> ElementType | None:
        """Type of a tensor; None for what is no tensor or has none."""
        return TYPES.get(self.types[place]) if place < len(self.types) else None

    def size(self, place: int) -> int:
        """Elements of a tensor."""
        return math.prod(self.shapes[place])

    def stored(self, place: int) -> int:
        """Elements of a tensor in memory: along an expanded dimension there is one."""
        shape = self.shapes[place]
        strides = self.strides[place] if place < len(self.strides) else []
        if len(strides) != len(shape):
            return math.prod(shape)
        return math.prod(n for n, stride in zip(shape, strides, strict=True) if stride)

    def value(self, place: int) -> Any:
        """A number, flag or list of numbers; None where the trace has none."""
        text = self.values[place] if place < len(self.values) else ""
        try:
            return json.loads(str(text).lower().replace("(", "[").replace(")", "]"))
        except ValueError:
            return None

    def numbers(self, place: int, count: int) -> list[int] | None:
        """A list of ``count`` integers; None where the trace has none."""
        listed = self.value(place)
        if not isinstance(listed, list) or len(listed) != count:
            return None
        return listed if all(type(number) is int for number in listed) else None


Formula = functools.partial[Amounts | None]
"""Takes a :class:`Call`; its arguments are those of the operator's row in ``shape_work.csv``."""


# ---- products, convolutions, attention, lookups -----------------------------------------


def _is_shape(given: Any) -> bool:
    """Whether this is the shape of one tensor of at least one dimension."""
    return bool(given) and isinstance(given, list) and all(type(size) is int for size in given)


def _product(call: Call, first: int = 0, vector: bool = False) -> Amounts | None:
    """The matrices, or a matrix and a vector, from input ``first`` on; 1: input 0 is added."""
    a, b = call.shapes[first : first + 2]
    if vector and len(b) != 1:
        return None
    return _multiplied(a, [*b, 1] if vector else b, first, call.shapes[0] if first else None)


def _multiplied(a: Shape, b: Shape, first: int, added: Shape | None = None) -> Amounts | None:
    """``a`` (..., m, k) by ``b`` (..., k, n); they are inputs ``first`` and ``first + 1``."""
    if len(a) != len(b) or len(a) not in (2, 3) or a[-1] != b[-2] or a[:-2] != b[:-2]:
        return None
    result = math.prod(a[:-1]) * b[-1]
    operations = 2.0 * result * a[-1]
    moved: list[tuple[int | ElementType, int]]
    moved = [(first, math.prod(a)), (first + 1, math.prod(b)), (first, result)]
    if added is not None:
        operations += result
        moved.append((0, math.prod(added)))
    return operations, moved


def _pooled(call: Call) -> Amounts | None:
    table, indices, offsets, *others = call.shapes
    if len(table) != 2 or len(indices) != 1 or len(offsets) != 1:
        return None
    width, rows, bags = table[1], indices[0], offsets[0]
    weights = others[3][0] if len(others) > 3 and len(others[3]) == 1 else 0
    moved = [(0, rows * width), (1, rows), (2, bags), (0, bags * width), (0, weights)]
    return (2.0 if weights else 1.0) * rows * width, [*moved]


def _rows_gradient(call: Call, indices: int, rows: int) -> Amounts | None:
    """Adds a gradient for each index to the row of a table's dense gradient, which is made here;
    ``indices`` and ``rows`` are the places of the indices and of the number of rows."""
    count, height = call.size(indices), call.value(rows)
    if type(height) is not int or height < 1 or not call.shapes[0]:
        return None
    width = call.shapes[0][-1]
    return float(count) * width, [(0, call.stored(0)), (indices, count), (0, height * width)]


def _sparse_added(call: Call) -> Amounts | None:
    """``add_(table, sparse gradient)``: its values have the shape that ``to`` is given inside."""
    table, values = call.shapes[0], call.below[0] if call.below else []
    if len(table) != 2 or len(values) != 2 or values[1] != table[1]:
        return None
    if len(call.shapes) > 3 and call.shapes[3] != table:
        return None  # the sum is a table of its own
    count = math.prod(values)
    return 2.0 * count, [*((0, count) for _ in range(3)), (TYPES["long int"], values[0])]


def _linear(call: Call) -> Amounts | None:
    """(..., k) by the transpose of (n, k)."""
    a, weight, *others = call.shapes
    if len(a) < 1 or len(weight) != 2:
        return None
    bias = others[0] if others and others[0] else None
    amounts = _multiplied([math.prod(a[:-1]), a[-1]], weight[::-1], 0, bias)
    if amounts and bias:
        amounts[1][-1] = (2, math.prod(bias))
    return amounts


def _filtered(output: Shape, weight: Shape) -> float | None:
    """Operations of a convolution: each output (B, out, ...) takes 2 a weight of its filter."""
    if len(output) != len(weight) or len(weight) < 3 or output[1] != weight[0]:
        return None
    return 2.0 * math.prod(output) * math.prod(weight[1:])


def _convolution(
    call: Call,
    stride: int,
    padding: int,
    dilation: int,
    transposed: int | bool = False,
    groups: int = 99,
) -> Amounts | None:
    """A convolution ``(input, weight, ...)`` with the other arguments at these places.
    ``transposed``: whether it is; or the place of the flag. The added size of its result stands
    behind the flag, or behind the padding."""
    given, weight = call.shapes[0], call.shapes[1]
    turned = transposed if isinstance(transposed, bool) else call.value(transposed)
    around = len(weight) - 2
    lists = [call.numbers(place, around) for place in (padding, stride, dilation)]
    output = call.output
    if all(lists) and isinstance(turned, bool) and len(given) == len(weight) > 2:
        added = (padding if isinstance(transposed, bool) else transposed) + 1
        more = (turned and call.numbers(added, around)) or [0] * around
        channels = weight[1] * (call.value(groups) or 0) if turned else weight[0]
        output = [given[0], channels]
        for n, k, p, s, d, o in zip(
            given[2:], weight[2:], *(one or [] for one in lists), more, strict=True
        ):
            if s < 1:
                return None
            reach = d * (k - 1) + 1
            output.append(
                (n - 1) * s - 2 * p + reach + o if turned else (n + 2 * p - reach) // s + 1
            )
    if output is None or min(output, default=0) < 1 or given[:1] != output[:1]:
        return None
    operations = _filtered(given if turned else output, weight)
    if operations is None:
        return None
    return operations, [(0, call.stored(0)), (1, call.size(1)), (0, math.prod(output))]


def _convolution_backward(call: Call) -> Amounts | None:
    """``convolution_backward(gradient, input, weight, ...)``; its mask says which are wanted."""
    gradient, given, weight = call.shapes[:3]
    transposed, mask = call.value(7), call.value(10)
    if not isinstance(transposed, bool) or not (isinstance(mask, list) and len(mask) == 3):
        return None
    operations = _filtered(given if transposed else gradient, weight)
    if operations is None:
        return None
    # each of the two gradients reads the other operand and is as large as its own
    wanted = bool(mask[0]) + bool(mask[1])
    moved = wanted * [(2, call.size(2)), (1, call.size(1))]
    return wanted * operations, [(0, call.stored(0)), *moved]


def _cudnn_backward(call: Call, wanted: int) -> Amounts | None:
    """``cudnn_convolution_backward_input(sizes, gradient, weight, ...)`` and ``..._weight(sizes,
    gradient, input, ...)``, until torch 1.10: the gradient of input 0 or 2 of the operator above.
    """
    given = call.above[wanted] if len(call.above) > wanted else []
    operations = _filtered(call.shapes[1], call.shapes[2] if wanted == 0 else given)
    if operations is None or len(given) != len(call.shapes[2]):
        return None
    return operations, [(1, call.stored(1)), (2, call.stored(2)), (2, math.prod(given))]


def _grouped(call: Call) -> Amounts | None:
    """``_grouped_mm(a, b, offsets)``: each row of ``a`` (m, k) by one matrix of ``b`` (e, k, n)."""
    a, b = call.shapes[:2]
    if len(a) == len(b) == 3:
        return _multiplied(a, b, 0)
    if len(a) != 2 or len(b) != 3 or a[1] != b[1]:
        return None
    result = a[0] * b[2]
    wide = TYPES["c10::BFloat16"] if (call.kind(0) or ("", 0))[1] == 1 else 0
    return 2.0 * result * a[1], [(0, call.size(0)), (1, call.size(1)), (wide, result)]


def _scaled(call: Call) -> Amounts | None:
    """``_scaled_mm(a, b, ...)`` of bytes: its result is taken to be of two bytes a number."""
    amounts = _product(call)
    if amounts:
        amounts[1][-1] = (TYPES["c10::BFloat16"], amounts[1][-1][1])
    return amounts


def _attention(
    call: Call, causal: int, heads_first: bool = False, first: int = 0, lengths: int = 99
) -> Amounts | None:
    """Attention of queries, keys and values from input ``first`` on: two products, backward five.

    Args:
        causal: place of the flag, or of the kind of mask (0 for none).
        heads_first: whether they are (B, H, S, d), else (B, S, H, d).
        first: 1 of a backward, whose gradient stands first.
        lengths: place of the lengths of packed sequences, of which nothing is known.

    A causal mask leaves out half of the products where queries and keys are as many; else it is
    not known how many, and only bytes count.
    """
    q, k, v = call.shapes[first : first + 3]
    masked = call.value(causal)
    if call.kind(lengths) or not all(len(one) == 4 for one in (q, k, v)):
        return None
    if not isinstance(masked, bool | int) or q[0] != k[0]:
        return None
    heads, queries, keys = (q[1], q[2], k[2]) if heads_first else (q[2], q[1], k[1])
    pairs = float(q[0] * heads * queries * keys)
    if masked:
        pairs *= (keys + 1) / (2 * keys) if queries == keys else 0.0
    result = math.prod(q[:3]) * v[3]
    operations = 2.0 * pairs * (q[3] + v[3])
    given = [(first + place, call.stored(first + place)) for place in range(3)]
    if not first:
        return operations, [*given, (0, result)]
    # the products of the forward again, and three more for the gradients
    return 2.5 * operations, [*2 * given, (first, 2 * result)]


# ---- what moves bytes -------------------------------------------------------------------


def _broadcast(shapes: list[Shape]) -> Shape | None:
    """The shape that operands of an elementwise operator have together."""
    try:
        return list(np.broadcast_shapes(*(tuple(shape) for shape in shapes)))
    except ValueError:
        return None


def _promoted(call: Call, operands: list[int], keeps_integers: bool) -> ElementType | None:
    """The type of an elementwise result by torch's promotion, where types alone tell it."""
    every = [(call.kind(i), bool(call.shapes[i])) for i in operands]
    kinds = [kind for kind, dimensions in every if kind and dimensions]
    kinds = kinds or [kind for kind, _ in every if kind]
    floating = [kind for kind in kinds if kind[0] not in _INTEGERS]
    if not floating:
        scalars = any(kind and kind[0] not in _INTEGERS for kind, _ in every)
        if scalars or not keeps_integers:
            return None
    widest = sorted(set(floating or kinds), key=lambda kind: kind[1])
    alike = len(widest) > 1 and widest[-1][1] == widest[-2][1]
    return None if alike else widest[-1]


def _elementwise(
    call: Call, count: int, integers: bool = False, result: str = ""
) -> Amounts | None:
    """The first ``count`` inputs are operands, a tensor behind them is the result.

    Args:
        integers: whether integers give integers, if no operand is a Python number.
        result: the type of the result, ``first`` for that of the first operand, "" for what
            promotion makes of the operands'; ``operand`` where the first operand is the result.
    """
    places = range(min(count, len(call.shapes)))
    operands = [i for i in places if call.kind(i)]
    if not operands or any(call.shapes[i] and not call.kind(i) for i in places):
        return None
    shape = _broadcast([call.shapes[i] for i in operands])
    read = [(i, call.stored(i)) for i in operands]
    if result == "operand":
        fits = operands[0] == 0 and shape == call.shapes[0]
        return (0.0, [*read, read[0]]) if fits else None
    keeps = integers and len(operands) == count
    kind: int | ElementType | None = TYPES.get(result) or (
        operands[0] if result == "first" else _promoted(call, operands, keeps)
    )
    for place in range(count, len(call.shapes)):
        if call.kind(place) and call.shapes[place] == shape:
            kind = place
    if kind is None or shape is None:
        return None
    return 0.0, [*read, (kind, math.prod(shape))]


def _copied(call: Call) -> Amounts | None:
    """``copy_(into, from)``."""
    if _broadcast([call.shapes[0], call.shapes[1]]) != call.shapes[0]:
        return None
    return 0.0, [(1, call.stored(1)), (0, call.stored(0))]


def _joined(call: Call) -> Amounts | None:
    """``cat`` and ``stack``: shapes of the list, or the result's; the type is the result's."""
    kind, listed = call.output_kind, call.shapes[0]
    if kind is None:
        return None
    if listed and all(isinstance(shape, list) for shape in listed):
        read = sum(math.prod(shape) for shape in listed)
    elif call.output is not None:
        read = math.prod(call.output)
    else:
        return None
    return 0.0, [(kind, read), (kind, read)]


def _moved(call: Call, places: list[int], written: int | None = None, also: str = "") -> Amounts:
    """Reads the inputs at ``places`` and writes as much as the input ``written`` has, and ``also``
    a second result of that type."""
    # what is optional may be missing, the first may not
    there = [i for i in places if i < len(call.shapes) and (i == places[0] or call.kind(i))]
    moved: list[tuple[int | ElementType, int]] = [(i, call.stored(i)) for i in there]
    if written is not None:
        kinds: list[int | ElementType] = [written, *([TYPES[also]] if also else [])]
        moved += [(kind, call.size(written)) for kind in kinds]
    return 0.0, moved


def _softmax(call: Call) -> Amounts | None:
    """``_softmax(input, dim, half_to_float)``: the flag only tells of half precision."""
    kind, wide = call.kind(0), call.value(2)
    if kind is None or (kind[1] == 2 and not isinstance(wide, bool)):
        return None
    result: int | ElementType = TYPES["float"] if kind[1] == 2 and wide else 0
    return 0.0, [(0, call.stored(0)), (result, call.size(0))]


def _layer_norm(call: Call) -> Amounts | None:
    """``native_layer_norm(input, sizes, weight, bias, eps)`` with a mean and deviation a row."""
    count, weight = call.size(0), call.size(2)
    rows = count // weight if call.kind(2) and weight else 0
    parameters = [(i, call.stored(i)) for i in (2, 3) if call.kind(i)]
    return 0.0, [(0, call.stored(0)), *parameters, (0, count), (TYPES["float"], 2 * rows)]


def _layer_norm_backward(call: Call) -> Amounts | None:
    """``native_layer_norm_backward(gradient, input, sizes, mean, deviation, weight, bias)``."""
    parameters = [(i, call.stored(i)) for i in (5, 6) if call.kind(i)]
    given = [(i, call.stored(i)) for i in (0, 1, 3, 4)]
    return 0.0, [*given, *parameters[:1], (1, call.size(1)), *parameters]


def _selected(call: Call) -> Amounts | None:
    """``index_select(input, dim, index)``."""
    given, axis = call.shapes[0], call.value(1)
    axis = 0 if len(given) == 1 else axis
    if type(axis) is not int or not -len(given) <= axis < len(given) or not given[axis]:
        return None
    return _asked_for(call, 2, call.size(0) // given[axis] * call.size(2))


def _asked_for(call: Call, index: int, values: int) -> Amounts:
    """Reads indices, and the values of the first input that they ask for, which are written."""
    return 0.0, [(index, call.size(index)), (0, values), (0, values)]


def _indexed(call: Call) -> Amounts | None:
    """``index(input, lists of indices)``: as many elements as the result has."""
    count = math.prod(call.output) if call.output else 0
    return (0.0, [(0, count), (0, count)]) if count else None


def _index_added(call: Call) -> Amounts | None:
    """``index_add_(input, dim, index, source)``."""
    count = call.size(3)
    return 0.0, [(2, call.size(2)), (3, count), (0, count), (0, count)]


# ---- operators --------------------------------------------------------------------------

_ROWS = rows_of(__file__, "shape_work.csv")


def _operators(formula: str) -> set[str]:
    """The operators that a formula is of."""
    rows = (row for row in _ROWS if row["formula"] == formula)
    return {name for row in rows for name in row["operators"].split(", ")}


def _formulas(named: Mapping[str, Callable[..., Amounts | None]]) -> dict[str, Formula]:
    formulas: dict[str, Formula] = {}
    for row in _ROWS:
        if row["formula"] in named:
            pairs = (argument.split("=") for argument in row["arguments"].split())
            arguments = {name: _argument(text) for name, text in pairs}
            formula = functools.partial(named[row["formula"]], **arguments)
            formulas |= dict.fromkeys(row["operators"].split(", "), formula)
    return formulas


def _argument(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


PRODUCTS = _formulas(
    {
        "product": _product,
        "linear": _linear,
        "pooled": _pooled,
        "rows_gradient": _rows_gradient,
        "scaled": _scaled,
        "grouped": _grouped,
        "convolution": _convolution,
        "attention": _attention,
        "convolution_backward": _convolution_backward,
        "cudnn_backward_input": functools.partial(_cudnn_backward, wanted=0),
        "cudnn_backward_weight": functools.partial(_cudnn_backward, wanted=2),
    }
)
"""Operators of which operations are counted. Of nested ones the innermost counts."""

TRAFFIC = _formulas(
    {
        "elementwise": _elementwise,
        "copied": _copied,
        "joined": _joined,
        "moved": _moved,
        "softmax": _softmax,
        "layer_norm": _layer_norm,
        "layer_norm_backward": _layer_norm_backward,
        # embedding(table, indices), gather(input, dim, index)
        "embedding": lambda call: _asked_for(call, 1, call.size(1) * math.prod(call.shapes[0][1:])),
        "selected": _selected,
        "gathered": lambda call: _asked_for(call, 2, call.size(2)),
        "indexed": _indexed,
        "index_added": _index_added,
    }
)
"""Operators of which bytes alone are counted. One that calls another of either table has none."""

FORMULAS = PRODUCTS | TRAFFIC

CONVOLUTIONS, ATTENTION = _operators("convolution"), _operators("attention")
DILATIONS = {name: PRODUCTS[name].keywords["dilation"] for name in CONVOLUTIONS}
DILATIONS["aten::convolution_backward"] = 6
"""Operators to the place of the dilation among their inputs."""

NO_WORK = frozenset(name.removeprefix("aten::") for name in _operators("nothing"))
"""Operators of ``aten`` that move no data unless they call others: views, and unfilled tensors."""

_REDUCTIONS = [name for name, formula in TRAFFIC.items() if formula is TRAFFIC["aten::sum"]]
_COUNTED = {name: row["bytes"] for row in _ROWS for name in row["operators"].split(", ")}


def bytes_are(name: str) -> str:
    """The way in which an operator's bytes are counted.

    :data:`EACH_ONCE`, :data:`AT_LEAST` where it may read more than is counted,
    :data:`ASKED_FOR` where a row may be asked for twice and then come from a cache.
    """
    return _COUNTED.get(name) or EACH_ONCE


# ---- calls of a trace -------------------------------------------------------------------

_VALUES = CONVOLUTIONS | ATTENTION | _operators("convolution_backward")
_VALUES |= _operators("softmax") | _operators("selected") | _operators("rows_gradient")
"""Operators whose work depends on numbers among their inputs."""

_TWINS = {
    "aten::cat": re.compile("CatBackward|StackBackward"),
    "aten::_cat": re.compile("CatBackward|StackBackward"),
    "aten::stack": re.compile("StackBackward"),
    # begun by the library that ran the forward
    **dict.fromkeys(CONVOLUTIONS, re.compile("(Cudnn|Miopen|Slow|Thnn)?ConvolutionBackward")),
    "aten::index": re.compile("IndexBackward"),
}
"""Operators whose result is known by their backward node, whose input is its gradient."""

_CALLED_WITH = ("aten::cudnn_convolution_backward_input", "aten::cudnn_convolution_backward_weight")
"""Operators of which a size stands in the inputs of the operator that calls them."""

_CALLS_TO = ("aten::add", "aten::add_")
"""Operators that give the values of a sparse operand to ``aten::to``."""


def values_text(name: str, args: Mapping[str, Any]) -> str:
    """What an operator's work takes beside shapes and types, of the arguments of its event: JSON of
    the concrete inputs and the strides, each empty where it does not matter (numbers differ from
    call to call, and strides only of expanded and of sparse tensors, which have none); "" without
    either."""
    if name not in FORMULAS:
        return ""
    values = args.get("Concrete Inputs") if name in _VALUES else None
    strides, shapes = args.get("Input Strides"), args.get("Input Dims")
    if isinstance(strides, list):
        expanded = any(isinstance(one, list) and 0 in one for one in strides)
        expanded |= name in TRAFFIC and _strided(shapes, strides)
        sparse = isinstance(shapes, list) and any(
            one == [] and _is_shape(shape) for one, shape in zip(strides, shapes, strict=False)
        )
    if not isinstance(strides, list) or not (expanded or sparse):
        strides = None
    return json.dumps([values or [], strides or []]) if values or strides else ""


def _strided(shapes: Any, strides: Any) -> bool:
    """Whether operands of two or more dimensions have gaps, or two of one shape another order."""
    orders: dict[str, str] = {}
    for shape, steps in zip(shapes, strides, strict=False) if isinstance(shapes, list) else ():
        if not (_is_shape(shape) and _is_shape(steps) and len(shape) == len(steps)):
            continue
        pairs = [(size, step) for size, step in zip(shape, steps, strict=True) if size > 1 and step]
        if sum((size - 1) * step for size, step in pairs) + 1 > math.prod(shape) > 1:
            return True
        places = sorted(range(len(pairs)), key=lambda place: -pairs[place][1])
        if orders.setdefault(str(shape), str(places)) != str(places):
            return True
    return False


def notes_of_call(name: str, shapes: str, values: str) -> set[str]:
    """Which of :data:`NOTES` are true of a call; arguments as for :func:`work_of_call`."""
    try:
        numbers, strides = json.loads(values) if values else ([], [])
        call = Call(json.loads(shapes), [], numbers, strides)
        if name in TRAFFIC and _strided(call.shapes, strides):
            return {"strided"}
        steps = call.value(DILATIONS[name]) if name in DILATIONS else None
    except (ValueError, TypeError, RecursionError):
        return set()
    return {"dilated"} if isinstance(steps, list) and max(steps, default=1) > 1 else set()


def _sizes(given: Any) -> Any:
    """Shapes as lists of integers; ValueError where one is something else, or negative."""
    if isinstance(given, list):
        return [_sizes(one) for one in given]
    if type(given) is not int or given < 0:
        raise ValueError(f"{given!r} is no size")
    return given


def work_of_call(
    name: str,
    shapes: str,
    types: str,
    values: str = "",
    output: str = "",
    above: str = "",
    below: str = "",
) -> tuple[float, float, str] | None:
    """(operations, bytes, precision) of one call, None where its inputs do not tell.

    Args:
        shapes, types: as a trace has them: ``[[64, 32], [32, 8]]``, ``['float', 'float']``.
        values: what :func:`values_text` gives.
        output: shapes and types of the inputs of its backward node, a line each.
        above: shapes of the operator that calls it.
        below: shapes of the ``aten::to`` that it calls.

    Of an operator with a sparse input nothing is known, unless it adds it to a table.
    Of operators in :data:`PRODUCTS` bytes are NaN, and the precision
    :data:`UNKNOWN_PRECISION`, where types are missing; operands of two precisions have none
    either. Of those in :data:`TRAFFIC` operations are 0 and the precision is "".
    """
    formula = FORMULAS.get(name)
    if formula is None:
        return None
    named = re.findall(r"'([^']*)'", types)
    try:
        result, _, kinds = output.partition("\n")
        twin = _sizes(json.loads(result))[0] if result else None
        numbers, strides = json.loads(values) if values else ([], [])
        call = Call(
            _sizes(json.loads(shapes)),
            named,
            numbers,
            strides,
            twin,
            TYPES.get((re.findall(r"'([^']*)'", kinds) or [""])[0]),
            _sizes(json.loads(above)) if above else [],
            _sizes(json.loads(below)) if below else [],
        )
        amounts = _sparse_added(call) if call.has_sparse else formula(call)
    except (ValueError, TypeError, IndexError, RecursionError):
        return None
    if amounts is None:
        return None
    operations, moved = amounts
    moved = [(what, count) for what, count in moved if count]
    types_moved = [call.kind(what) if isinstance(what, int) else what for what, _ in moved]
    if not types_moved or any(kind is None for kind in types_moved):
        return (operations, math.nan, UNKNOWN_PRECISION) if name in PRODUCTS else None
    size = sum(kind[1] * count for kind, (_, count) in zip(types_moved, moved, strict=True) if kind)
    if not operations:
        return 0.0, float(size), ""
    read = [call.kind(what) for what, _ in moved if isinstance(what, int)]
    operands = {kind[0] for kind in read if kind}
    operands = operands - _INTEGERS or operands
    return operations, float(size), operands.pop() if len(operands) == 1 else UNKNOWN_PRECISION


def _twins(host: pd.DataFrame, rows: Ints) -> Names:
    """Shapes and types (k,) of the inputs of the backward nodes of the calls in ``rows``.

    A call and its node have one sequence number, which the call may have from an operator above
    it. Two calls or two nodes of one number tell nothing ("").
    """
    texts = np.full(len(rows), "", dtype=object)
    if "sequence" not in host or "forward_thread" not in host:
        return texts
    names = host["name"].to_numpy()[rows]
    numbered = nearest(host["parent"].to_numpy(), host["sequence"].ge(0).to_numpy())[rows]
    backward = host[host["forward_thread"].gt(0)]
    for operator, pattern in _TWINS.items():
        places = np.flatnonzero((names == operator) & (numbered >= 0))
        if not len(places):
            continue
        calls = host.iloc[numbered[places]][["line", "sequence"]].assign(place=places)
        calls = calls.drop_duplicates(["line", "sequence"], keep=False)
        alike = [name for name in backward["name"].unique() if pattern.match(name)]
        nodes = backward[backward["name"].isin(alike)].drop_duplicates("sequence", keep=False)
        nodes = nodes[["sequence", "shapes", "types"]]
        twins = calls.merge(nodes[nodes["shapes"].ne("")], on="sequence").astype(object)
        texts[twins["place"].astype(int)] = twins["shapes"] + "\n" + twins["types"]
    return texts


def _shapes_below(host: pd.DataFrame, rows: Ints) -> Names:
    """Shapes (k,) of the inputs of the first ``aten::to`` that each of the calls in ``rows`` makes,
    of calls with a sparse operand; "" for others."""
    texts = np.full(len(rows), "", dtype=object)
    if "values" not in host:
        return texts
    names, values = host["name"].to_numpy()[rows], host["values"].to_numpy()[rows]
    calls = rows[np.isin(names, _CALLS_TO) & (values != "")]
    inner = host[host["name"].eq("aten::to") & host["parent"].isin(calls)]
    first = inner.drop_duplicates("parent").set_index("parent")["shapes"]
    has_inner = np.isin(rows, first.index)
    texts[has_inner] = first.reindex(rows[has_inner])
    return texts


def shape_metrics(host: pd.DataFrame, count: int) -> dict[str, Floats]:
    """Metrics of each context (count,), of those that occur: see :func:`shape_meaning`. A context
    of which one call tells no bytes has none. The spans of ``host`` have name, shapes, types,
    parent (row, −1 for none), context, and where the trace has them values, sequence,
    forward_thread, line."""
    names, parent = host["name"], host["parent"].to_numpy()
    shown = host["shapes"].ne("").to_numpy()
    products = names.isin(list(PRODUCTS)).to_numpy() & shown
    traffic = names.isin(list(TRAFFIC)).to_numpy() & shown
    if not (products.any() or traffic.any()):
        return {}
    # what a reduction fills with zeros first, and a number made a tensor, are no work of their own
    scalar = names.eq("aten::copy_").to_numpy() & host["shapes"].str.startswith("[[],").to_numpy()
    filled = names.isin(["aten::fill_", "aten::zero_"]).to_numpy()
    reductions = names.isin(_REDUCTIONS).to_numpy() & shown
    traffic &= ~((scalar & _below(parent, traffic)) | (filled & _below(parent, reductions)))
    # the innermost product counts; of what moves bytes, what calls no other and no product calls
    wanted = products & (inclusive_from_exclusive(parent, products.astype(float)) == 1)
    inner = inclusive_from_exclusive(parent, (products | traffic).astype(float)) == 1
    wanted |= traffic & inner & ~_below(parent, products)
    rows = np.flatnonzero(wanted)
    calls = host.iloc[rows]
    above = np.full(len(rows), "", dtype=object)
    called = calls["name"].isin(_CALLED_WITH).to_numpy() & (parent[rows] >= 0)
    above[called] = host["shapes"].to_numpy()[parent[rows[called]]]
    values = calls["values"] if "values" in calls else np.full(len(rows), "", dtype=object)
    columns: list[Any] = [calls["name"], calls["shapes"], calls["types"], values]
    columns += [_twins(host, rows), above, _shapes_below(host, rows)]
    kind, kinds = pd.factorize(pd.MultiIndex.from_arrays(list(map(np.asarray, columns))))
    works = [work_of_call(*map(str, key)) or (np.nan, np.nan, "") for key in kinds]
    noted = [notes_of_call(str(key[0]), str(key[1]), str(key[3])) for key in kinds]
    operations, size = (np.array([work[i] for work in works])[kind] for i in (0, 1))
    precision = np.array([work[2] for work in works], dtype=object)[kind]
    context = calls["context"].to_numpy()

    def added(chosen: Bools, amounts: Floats) -> Floats:
        return np.bincount(context[chosen], amounts[chosen], count).astype(np.float64)

    metrics: dict[str, Floats] = {}
    for note in NOTES:
        true = np.array([note in notes for notes in noted], dtype=bool)[kind]
        if true.any():
            metrics[NOTE + note] = added(true, np.ones(len(rows)))
    for name in sorted(set(precision) - {""}):
        metrics[OPERATIONS + name] = added(precision == name, operations)
    if np.isfinite(size).any():
        metrics[OPERAND_BYTES] = np.nan_to_num(added(np.ones(len(rows), dtype=bool), size))
    unclear = np.unique(context[np.isnan(operations)])
    for column in metrics.values():
        column[unclear] = 0.0
    types = host["types"].str
    other = types.contains(r"'(?:c10::)?(?:[Ff]loat|Half|BFloat)") & ~types.contains("ouble'")
    metrics[NOTE + NOT_DOUBLE] = np.bincount(host["context"], other, count).astype(float)
    return metrics


def _below(parent: Ints, marked: Bools) -> Bools:
    """Whether (n,) a span lies below a marked one."""
    return np.append(nearest(parent, marked), -1)[parent] >= 0


def shape_meaning(metric: str) -> tuple[str, str]:
    """(unit, meaning) of a metric that :func:`shape_metrics` gives."""
    if metric == OPERAND_BYTES:
        return "B", "bytes that operators read and write, by their inputs' shapes"
    if metric.startswith(NOTE):
        return (
            "",
            f"calls whose inputs are {metric.removeprefix(NOTE)}, by shapes, strides and types",
        )
    kind = metric.removeprefix(OPERATIONS)
    return "", f"operations of products, lookups and their updates, by shapes; operands {kind}"
