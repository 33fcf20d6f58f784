"""What each line of the user's code computes in one iteration: how often, in which type, and
whether for gradients.

A dispatch mode of torch sees every operator of the thread that trains, outside the backward pass,
with its operands. It looks at one iteration that is not measured, for :data:`MOST_S` in all, and
hands every call on as it came: whatever fails in it leaves the program as it is.
"""

from __future__ import annotations

import contextlib
import math
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dlrm_workbook.recordings.torch.places import line_of, user_frames

MOST_S = 1.0
"""Seconds of the thread after which nothing more is looked at; those of other work do not count."""

SMALL_ELEMENTS = 40_000
"""An operator whose operands and results have fewer elements takes about as long as calling it."""

MOST_ELEMENTS = 250_000
"""The first elements of an operand of which the zeros are counted: every n-th would miss or meet a
column as the width has it."""

MOST_LINES, MOST_PRODUCTS = 2000, 200
"""Lines and products that are kept."""

_PRODUCT = re.compile(r"aten\.(mm|addmm|bmm|baddbmm)\b")

_ARITHMETIC = re.compile(r"aten\.(mm|addmm|bmm|baddbmm|convolution|mkldnn_rnn_layer)\b")
"""Operators that take most of a step, or could."""

_VIEW = re.compile(
    r"aten\.(t|transpose|view|_unsafe_view|_reshape_alias|expand|select|slice|permute|squeeze|"
    r"unsqueeze|detach|alias|as_strided|split|split_with_sizes|unbind|empty\w*|new_empty\w*)\b"
)
"""Operators that compute nothing."""

SAMPLED = 64
"""Numbers of a result that are compared before it is said to be that of an earlier operator."""

_LOOKUP = re.compile(r"aten\.(_?embedding|index|gather|take|fbgemm)")
_RANDOM = re.compile(r"dropout|rand|bernoulli|normal|uniform|multinomial|exponential|poisson|empty")


class _Values:
    """Numbers values as a compiler does (value numbering): equal operators on equal operands give
    one value, whatever memory holds it.

    Memory may change behind torch's back (through NumPy or ``.data``), and an operator may draw
    random numbers: only what looks like the earlier result is it.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._results: dict[Any, list[tuple[int, Any]]] = {}
        """Operator and operands to the number and the look of each result."""
        self._storages: dict[int, StorageWeakRef] = {}
        """Held, so that no other storage gets the address of one that is gone."""

    def repeats(self, function: Any, args: Any, kwargs: Any, results: list[torch.Tensor]) -> bool:
        """Whether an operator that ran just now computed values that were computed before."""
        changes = function._schema.is_mutable or _RANDOM.search(str(function))
        if changes or any(one.device.type != "cpu" for one in results):
            return False
        key = (function, self._key(args), self._key(kwargs))
        looks = list(map(_look_of, results))
        before = self._results.get(key, [])
        if not before or [look for _, look in before] != looks:
            numbers = [self.number(one) for one in results]
            self._results[key] = list(zip(numbers, looks, strict=True))
            return False
        for one, (number, _) in zip(results, before, strict=True):
            self._numbers[self._identity(one)] = number
        return True

    def _key(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.number(value), torch.Tensor
        if isinstance(value, (tuple, list)):
            return tuple(map(self._key, value))
        if isinstance(value, dict):
            return tuple((name, self._key(one)) for name, one in value.items())
        return type(value), value

    def number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's value."""
        return self._numbers.setdefault(self._identity(tensor), len(self._numbers))

    def _identity(self, tensor: torch.Tensor) -> Any:
        """What differs of any two tensors that may hold different numbers."""
        place = (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        return self.storage(tensor), tensor._version, place

    def storage(self, tensor: torch.Tensor) -> int:
        """What tells the memory of a tensor from all other that there was since."""
        storage = StorageWeakRef(tensor.untyped_storage())
        return self._storages.setdefault(storage.cdata, storage).cdata


def _look_of(result: torch.Tensor) -> Any:
    """Some numbers from all over a tensor, or their sum where they do not lie one after another."""
    if not result.is_contiguous():
        return result.sum().item()
    flat = result.detach().view(-1)
    return flat[:: max(1, len(flat) // SAMPLED)].tolist()


@dataclass
class _Unlearned:
    """What an operator computed without gradients, from others of those, and whether ``weights``
    of a model took part, or what learns. Once what learns is computed from it, it is ``wanted``."""

    places: list[tuple[CodeType, int]]
    elements: int
    sources: list[_Unlearned]
    weights: bool
    wanted: bool = False


class SeenOperators(TorchDispatchMode):
    """Looks at what this thread computes, from :meth:`start` to :meth:`stop`. Operands have names
    by the ``parameters`` of the models; ``tables`` are names and weights of embedding tables."""

    def __init__(
        self,
        parameters: Iterable[tuple[str, torch.Tensor]],
        tables: Iterable[tuple[str, torch.Tensor]] = (),
    ) -> None:
        super().__init__()
        self._weights = {_address(weight): name for name, weight in parameters}
        self._weights.pop(0, None)
        counted = dict.fromkeys(("lookups", "whole", "scored"), 0)
        self._tables: dict[int, dict[str, Any]] = {
            _address(table): {"name": name, "rows": len(table), **counted} for name, table in tables
        }
        self._tables.pop(0, None)
        self._values = _Values()
        self._unlearned: dict[int, _Unlearned] = {}
        """Storage to what it holds that was computed without gradients."""
        self._derived: dict[int, dict[str, Any]] = {}
        """Storage of what has as many rows and numbers as the table that it is computed from."""
        self._weighted: dict[tuple[CodeType, int], dict[str, int]] = {}
        """Line to the numbers computed with each weight, and with any (under "")."""
        self._passing: set[str] = set()
        """Weights whose input learns too: half of their backward pass is for that."""
        self._thread, self._spent_s, self._left_out = threading.get_ident(), 0.0, 0
        self._lines: dict[tuple[CodeType, int], tuple[int, ...]] = {}
        self._products: dict[tuple[CodeType, int, Any], dict[str, Any]] = {}
        self._subnormal: dict[tuple[CodeType, int, str], tuple[int, float]] = {}
        """Line and operator to its calls and the largest share of subnormal numbers in an operand
        of those looked at."""
        self.padded: dict[tuple[int, ...], float] = {}
        """Shape of rows that a table was asked for to the share of padding among them."""
        self._runs = False

    def start(self) -> None:
        self.__enter__()
        self._runs = True

    def stop(self) -> None:
        """Look no more, unless the program put a mode of its own over this one."""
        if self._runs and _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
        self._runs = False

    @contextlib.contextmanager
    def blind(self) -> Iterator[None]:
        """What runs in the block is not the program's."""
        looked, self._runs = self._runs, False
        try:
            yield
        finally:
            self._runs = looked

    def document(
        self, untrained: Collection[str] = (), zero: Collection[str] = ()
    ) -> dict[str, Any]:
        """Everything seen, as JSON holds it.

        ``operators`` have ``file``, ``line`` and ``function``, and of what runs below the line,
        backward pass apart, ``calls`` of operators that compute, ``small`` (of them),
        ``elements`` of their results, how many of these are ``double``, come
        ``without_gradients`` (but from a network that what learns takes them from), or were
        computed ``again`` from the same operands; ``moved`` (elements of each one's largest operand
        or result) and how many of these are of a ``whole`` embedding table; ``padded`` are those of
        ``elements`` that stand for padding; ``own_calls`` and so on are of what it calls itself. Of
        the numbers that it computes with ``weights``, ``untrained`` and ``zero`` are those of the
        weights so named, of the former half where the input learns too. ``products`` have ``name``
        (of the weight, or of the function), ``calls``, ``rows``, ``inputs``, ``outputs`` and
        ``zeros`` (share of the elements of the operand that has most, in the call that has fewest),
        and the place.
        ``subnormal`` have ``name`` of an operator, ``share`` of subnormal numbers in the operand
        that has most, and the place.
        ``whole_tables`` have ``name``, ``rows``, ``lookups`` and
        in how many calls they are ``whole``; those of which all rows are scored are none.
        ``seconds`` were spent looking, ``left_out`` calls not seen.
        """
        return {
            "operators": [
                {
                    **line_of(*place),
                    **dict(zip(_COUNTS, counts, strict=True)),
                    "weights": (of := self._weighted.get(place, {})).get("", 0),
                    "untrained": sum(
                        of.get(name, 0) / (1 + (name in self._passing)) for name in untrained
                    ),
                    "zero": sum(of.get(name, 0) for name in zero),
                }
                for place, counts in self._lines.items()
            ],
            "products": [
                {**product, **line_of(code, line)}
                for (code, line, _), product in self._products.items()
            ],
            "subnormal": [
                {"name": name, "share": share, **line_of(code, line)}
                for (code, line, name), (_, share) in self._subnormal.items()
                if share
            ],
            "whole_tables": [
                one for one in self._tables.values() if one["whole"] and not one["scored"]
            ],
            "seconds": self._spent_s,
            "left_out": self._left_out,
        }

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # lines of the backward pass are those that built it
        forward = self._runs and torch._C._current_graph_task_id() == -1
        if forward and threading.get_ident() == self._thread:
            began = time.thread_time()
            if self._spent_s > MOST_S:
                self._left_out += 1
                return result
            try:
                self._look(function, args, kwargs or {}, result)
            except Exception:  # what is trained is worth more than what is seen of it
                self._left_out += 1
            self._spent_s += time.thread_time() - began
        return result

    def _look(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = str(function)
        operands = [one for one in _flat(args) if isinstance(one, torch.Tensor)]
        results = [one for one in _flat([result]) if isinstance(one, torch.Tensor)]
        again, whole = False, 0
        with contextlib.suppress(RuntimeError, TypeError, ValueError):  # of sparse operands
            # what has no operands is made to be filled
            again = self._values.repeats(function, args, kwargs, results) and bool(operands)
            whole = self._of_tables(name, operands, results)
        places = [] if _VIEW.match(name) else self._places()
        if not places or not results:
            return
        elements = sum(one.numel() for one in results)
        small = elements + sum(one.numel() for one in operands) < SMALL_ELEMENTS
        double = elements if results[0].dtype == torch.float64 else 0
        learns = any(one.requires_grad for one in operands)
        learns = learns if torch.is_grad_enabled() else _within_function()
        moved = max(one.numel() for one in (*operands, *results))
        gradients = 0 if learns else elements
        pads = sum(map(self._padded, results)) if self.padded else 0
        counts = (1, int(small), elements, double, gradients, again * elements, moved, whole, pads)
        for place in dict.fromkeys(places):
            if place not in self._lines and len(self._lines) >= MOST_LINES:
                continue
            own = counts if place == places[0] else (0,) * len(counts)
            self._count(place, (*counts, *own))
        with contextlib.suppress(RuntimeError, TypeError, ValueError):
            self._follow(operands, results, learns, places, elements)
        named = [self._weights.get(_address(one)) for one in operands] if learns else []
        if weight := next(filter(None, named), ""):
            inputs = [one for one, weight_of in zip(operands, named, strict=True) if not weight_of]
            of = self._weighted.setdefault(places[0], {"": 0})
            of[""] += elements
            of[weight] = of.get(weight, 0) + elements
            if any(one.requires_grad for one in inputs):
                self._passing.add(weight)
        if _ARITHMETIC.match(name) and operands[0].device.type == "cpu":
            self._count_subnormal((*places[0], name.split(".")[1]), operands)
        if _PRODUCT.match(name) and not captures():
            self._multiply(places[0], operands[-2:])

    def _padded(self, result: torch.Tensor) -> int:
        """Numbers that stand for padding, of a result with a number for each row asked for."""
        shares = [
            share
            for shape, share in self.padded.items()
            if result.shape[:1] == (math.prod(shape),)
            or (result.ndim > len(shape) and not Counter(shape) - Counter(result.shape))
        ]
        return round(max(shares, default=0.0) * result.numel())

    def _count(self, place: tuple[CodeType, int], counts: tuple[int, ...]) -> None:
        before = self._lines.get(place, (0,) * len(_COUNTS))
        self._lines[place] = tuple(map(sum, zip(before, counts, strict=True)))

    def _follow(
        self, operands: Any, results: Any, learns: bool, places: Any, elements: int
    ) -> None:
        """Count a network without gradients, such as a teacher, as learning if its results are
        wanted by what learns: they are no waste."""
        below = [self._unlearned.get(self._values.storage(one)) for one in operands]
        sources = [one for one in below if one is not None]
        if not learns:
            # what is computed from what learns differs in each step, and cannot be kept
            weights = any(_address(one) in self._weights or one.requires_grad for one in operands)
            weights = weights or any(one.weights for one in sources)
            unlearned = _Unlearned(places, elements, sources, weights)
            self._unlearned |= {self._values.storage(one): unlearned for one in results}
            return
        while sources:
            one = sources.pop()
            if one.wanted:
                continue
            one.wanted = True
            sources += one.sources
            for place in set(one.places).intersection(self._lines if one.weights else ()):
                less = [name == "without_gradients" for name in COUNTS]
                innermost = [here and place == one.places[0] for here in less]
                self._count(place, tuple(-one.elements * here for here in (*less, *innermost)))

    def _of_tables(self, name: str, operands: Any, results: Any) -> int:
        """Numbers of a table with all of which an operator computes; 0 of none."""
        most = 0
        for one in operands:
            storage = self._values.storage(one)
            table = self._tables.get(_address(one)) or self._derived.get(storage)
            if table is None:
                continue
            if _PRODUCT.match(name):  # all rows are scored: all are needed
                table["scored"] += 1
            elif one.ndim < 2 or len(one) != table["rows"]:
                continue
            elif _LOOKUP.match(name):
                table["lookups"] += operands[1].numel() if len(operands) > 1 else 0
            elif torch.is_grad_enabled():
                most, table["whole"] = max(most, one.numel()), table["whole"] + 1
                same = [each for each in results if each.shape == one.shape]
                self._derived |= {self._values.storage(each): table for each in same}
        return most

    def _multiply(self, place: tuple[CodeType, int], operands: list[torch.Tensor]) -> None:
        left, right = operands
        names = [self._weights.get(_address(one)) for one in operands]
        key = (*place, (*right.shape[-2:], *names))
        product = self._products.get(key)
        if product is None and len(self._products) >= MOST_PRODUCTS:
            return
        calls = product["calls"] + 1 if product is not None else 1
        if product is not None and calls & (calls - 1):  # looked at again less and less often
            product["calls"] = calls
            return
        asked = [one for one, name in zip(operands, names, strict=True) if name is None]
        zeros = []
        for one in asked or operands:
            chosen = one.detach().reshape(-1)[:MOST_ELEMENTS]
            zeros.append(1.0 - float(torch.count_nonzero(chosen)) / max(chosen.numel(), 1))
        if product is not None:
            # a state that begins with zeros has none later
            product["calls"], product["zeros"] = calls, min(product["zeros"], max(zeros))
            return
        inputs, outputs = right.shape[-2:]
        self._products[key] = {
            "name": (names[1] or names[0] or place[0].co_qualname).removesuffix(".weight"),
            "rows": left.numel() // max(int(inputs), 1),
            **{"inputs": int(inputs), "outputs": int(outputs), "zeros": max(zeros), "calls": 1},
        }

    def _count_subnormal(
        self, key: tuple[CodeType, int, str], operands: list[torch.Tensor]
    ) -> None:
        calls, most = self._subnormal.get(key, (0, 0.0))
        if not calls & (calls + 1):  # looked at less and less often
            for one in operands:
                if one.dtype in (torch.float32, torch.float64):
                    size = one.detach().reshape(-1)[:MOST_ELEMENTS].abs()
                    tiny = (size < torch.finfo(one.dtype).tiny) & (size > 0)
                    most = max(most, float(tiny.sum()) / max(len(size), 1))
        self._subnormal[key] = calls + 1, most

    def _places(self) -> list[tuple[CodeType, int]]:
        """(function, line) of the frames of the user's that run, innermost first."""
        return [(one.f_code, one.f_lineno or 0) for one in user_frames(sys._getframe(3))]


COUNTS = (
    *("calls", "small", "elements", "double", "without_gradients", "again", "moved", "whole"),
    "padded",
)
_COUNTS = (*COUNTS, *(f"own_{name}" for name in COUNTS))


def _within_function() -> bool:
    """Whether a ``torch.autograd.Function`` that has a backward pass is in its forward one, where
    torch records no gradients of what it calls."""
    inner = sys._getframe(1)
    while (frame := inner.f_back) is not None:
        code = frame.f_code
        if code.co_name == "apply" and code.co_filename.endswith("torch/autograd/function.py"):
            first = [inner.f_locals.get(name) for name in inner.f_code.co_varnames[:1]]
            return all(getattr(context, "next_functions", True) for context in first)
        inner = frame
    return False


def captures() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may be read."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _address(tensor: torch.Tensor) -> int:
    """The address at which the numbers of a dense tensor begin; 0 for others."""
    if tensor.layout != torch.strided:
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of one that holds no numbers
        return 0


def _flat(values: Any) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value
