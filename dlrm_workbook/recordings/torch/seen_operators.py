"""What each line of the user's code computes in one iteration: how often, in which type, and
whether for gradients.

A dispatch mode of torch sees every operator of the thread that trains, outside the backward pass,
with its operands. It looks at one iteration that is not measured, for :data:`MOST_S` in all, and
hands every call on as it came: whatever fails in it leaves the program as it is.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from dlrm_workbook.recordings.torch.sampling import is_user_code

MOST_S = 0.4
"""Seconds after which nothing more is looked at."""

SMALL_ELEMENTS = 40_000
"""An operator whose operands and results have fewer elements takes about as long as calling it."""

MOST_ELEMENTS = 250_000
"""The first elements of an operand of which the zeros are counted: every n-th would miss or meet a
column as the width has it."""

MOST_LINES, MOST_PRODUCTS = 2000, 200
"""Lines and products that are kept."""

_PRODUCT = re.compile(r"aten\.(mm|addmm|bmm|baddbmm)\b")

_VIEW = re.compile(
    r"aten\.(t|transpose|view|_unsafe_view|_reshape_alias|expand|select|slice|permute|squeeze|"
    r"unsqueeze|detach|alias|as_strided|split|split_with_sizes|unbind|empty\w*|new_empty\w*)\b"
)
"""Operators that compute nothing."""


class SeenOperators(TorchDispatchMode):
    """Looks at what this thread computes, from :meth:`start` to :meth:`stop`.

    Args:
        parameters: names and parameters of the models, so that operands have names.
    """

    def __init__(self, parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__()
        self._weights = {_address(weight): name for name, weight in parameters}
        self._weights.pop(0, None)
        self._thread, self._spent_s, self._left_out = threading.get_ident(), 0.0, 0
        self._user: dict[CodeType, bool] = {}
        self._lines: dict[tuple[CodeType, int], list[int]] = {}
        self._products: dict[tuple[CodeType, int, Any], dict[str, Any]] = {}
        self._runs = False

    def start(self) -> None:
        """Look from now on."""
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

    def document(self) -> dict[str, Any]:
        """Everything seen, as JSON holds it.

        ``operators`` have ``file``, ``line`` and ``function``, and of what runs below the line,
        backward pass apart, ``calls`` of operators that compute, ``small`` (of them),
        ``elements`` of their results, how many of these are ``double`` and how many come
        ``without_gradients``; ``own_calls``, ``own_small``, ``own_elements`` and ``own_double`` are
        of what it calls itself. ``products`` have ``name`` (of the weight, or of the function),
        ``calls``, ``rows``, ``inputs``, ``outputs`` and ``zeros`` (share of the elements of the
        operand that has most, in the call that has fewest), and the place. ``seconds`` were spent
        looking, ``left_out`` calls not seen.
        """
        return {
            "operators": [
                {**_place(code, line), **dict(zip(_COUNTS, counts, strict=True))}
                for (code, line), counts in self._lines.items()
            ],
            "products": [
                {**product, **_place(code, line)}
                for (code, line, _), product in self._products.items()
            ],
            "seconds": self._spent_s,
            "left_out": self._left_out,
        }

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._runs and threading.get_ident() == self._thread:
            began = time.perf_counter()
            if self._spent_s > MOST_S:
                self._left_out += 1
                return result
            try:
                self._look(str(function), args, result)
            except Exception:  # what is trained is worth more than what is seen of it
                self._left_out += 1
            self._spent_s += time.perf_counter() - began
        return result

    def _look(self, name: str, args: Any, result: Any) -> None:
        if torch._C._current_graph_task_id() != -1 or _VIEW.match(name):
            return  # backward, whose lines are those that built it
        operands = [one for one in _flat(args) if isinstance(one, torch.Tensor)]
        results = [one for one in _flat([result]) if isinstance(one, torch.Tensor)]
        places = self._places()
        if not places or not results:
            return
        elements = sum(one.numel() for one in results)
        small = elements + sum(one.numel() for one in operands) < SMALL_ELEMENTS
        double = elements if results[0].dtype == torch.float64 else 0
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
        counts = (1, int(small), elements, double, 0 if learns else elements)
        for place in dict.fromkeys(places):
            held = self._lines.get(place)
            if held is None:
                if len(self._lines) >= MOST_LINES:
                    continue
                held = self._lines[place] = [0] * len(_COUNTS)
            own = counts[:4] if place == places[0] else (0, 0, 0, 0)
            for at, more in enumerate((*counts, *own)):
                held[at] += more
        if _PRODUCT.match(name) and not captures():
            self._multiply(places[0], operands[-2:])

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

    def _places(self) -> list[tuple[CodeType, int]]:
        """(function, line) of the frames of the user's that run, innermost first."""
        places: list[tuple[CodeType, int]] = []
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            code = frame.f_code
            known = self._user.get(code)
            if known is None:
                known = self._user[code] = is_user_code(code.co_filename, code.co_name)
            if known:
                places.append((code, frame.f_lineno or 0))
            frame = frame.f_back
        return places


_COUNTS = (
    *("calls", "small", "elements", "double", "without_gradients"),
    *("own_calls", "own_small", "own_elements", "own_double"),
)


def _place(code: CodeType, line: int) -> dict[str, Any]:
    return {"file": code.co_filename, "line": line, "function": code.co_qualname}


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
