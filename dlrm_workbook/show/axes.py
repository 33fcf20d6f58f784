"""What a figure's JSON holds, and where its axes put that, in pixels."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dlrm_workbook.ground.units import digits

Rectangle = tuple[float, float, float, float]
"""Left, top, right and bottom."""


def values_of(array: Any) -> list[Any]:
    """An array of a figure's JSON as a list; plotly packs numbers as base64."""
    if isinstance(array, Mapping):
        numbers = np.frombuffer(b64decode(array["bdata"]), np.dtype(array["dtype"]))
        return list(numbers.tolist())
    if array is None:
        return []
    return array.tolist() if isinstance(array, np.ndarray) else list(array)


def part_of(spec: Any, path: str, default: Any = None) -> Any:
    """What a figure's JSON has at a path of names, such as ``marker.line.color``."""
    for name in path.split("."):
        spec = spec.get(name) if isinstance(spec, Mapping) else None
    return default if spec is None else spec


def each_of(trace: Mapping[str, Any], path: str, count: int, default: Any = None) -> list[Any]:
    """A property of a trace for each of its marks: plotly takes a scalar for all."""
    value = part_of(trace, path)
    if value is None or isinstance(value, str | int | float):
        return [default if value is None else value] * count
    values = values_of(value)
    return values + [default] * (count - len(values))


def is_shown(trace: Mapping[str, Any], kind: str) -> bool:
    """Whether a trace is of a kind, and no reader must ask for it."""
    return trace["type"] == kind and trace.get("visible") in (None, True)


def letters_of(trace: Mapping[str, Any]) -> tuple[str, str]:
    """The axis along which the bars of a trace are long, and the one of their places."""
    return ("x", "y") if trace.get("orientation") == "h" else ("y", "x")


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def numbers_of(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if is_number(value)]


def is_drawable(value: Any) -> bool:
    return isinstance(value, str) or is_number(value)


@dataclass
class Axis:
    """One axis of a plot: what it shows, and where that is in pixels."""

    name: str
    given: Mapping[str, Any]
    data: list[float] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)
    is_category: bool = False
    from_zero: bool = False
    low: float = 0.0
    high: float = 1.0
    start: float = 0.0
    end: float = 1.0

    @property
    def is_log(self) -> bool:
        return self.given.get("type") == "log"

    @property
    def title(self) -> str:
        return str(part_of(self.given, "title.text", ""))

    @property
    def hidden(self) -> bool:
        return self.given.get("visible") is False

    @property
    def domain(self) -> tuple[float, float]:
        """The stretch of the drawing that it has, as shares of it."""
        low, high = self.given.get("domain") or (0.0, 1.0)
        return float(low), float(high)

    @property
    def is_x(self) -> bool:
        return self.name[0] == "x"

    def point(self, along: float, aside: float) -> tuple[float, float]:
        """The point at two places in pixels, along this axis and along the other one."""
        return (along, aside) if self.is_x else (aside, along)

    def box(self, first: float, last: float, low: float, high: float) -> Rectangle:
        """The rectangle from ``first`` to ``last`` along this axis."""
        return (*self.point(first, low), *self.point(last, high))

    def take(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, str):
                self.is_category = True
                if value not in self.categories:
                    self.categories.append(value)
            elif is_number(value):
                self.data.append(float(value))

    def settle(self) -> None:
        """Choose the range once all data are known."""
        if self.is_category:
            order = [str(v) for v in values_of(self.given.get("categoryarray"))]
            self.categories = order or self.categories
            self.low, self.high = -0.5, len(self.categories) - 0.5
        elif (span := values_of(self.given.get("range"))) and all(map(is_number, span)):
            self.low, self.high = float(span[0]), float(span[1])
        else:
            data = [math.log10(v) for v in self.data if v > 0] if self.is_log else list(self.data)
            if (self.from_zero or self.given.get("rangemode") == "tozero") and not self.is_log:
                data.append(0.0)
            low, high = min(data, default=0.0), max(data, default=1.0)
            room = 0.05 * (high - low) or 0.5 * abs(high) or 0.5
            self.low = low if low == 0 and not self.is_log else low - room
            self.high = high if high == 0 and not self.is_log else high + room
        if self.given.get("autorange") == "reversed":
            self.low, self.high = self.high, self.low

    def at(self, value: Any, *, exponent: bool = False) -> float:
        """Place of a value, in pixels; ``exponent``: it is one already, as in annotations."""
        if isinstance(value, str):
            value = self.categories.index(value) if value in self.categories else 0.0
        elif self.is_category and f"{value:g}" in self.categories:
            value = self.categories.index(f"{value:g}")
        elif self.is_log and not exponent:
            value = math.log10(value) if value > 0 else self.low
        share = (float(value) - self.low) / ((self.high - self.low) or 1.0)
        return self.start + share * (self.end - self.start)

    def ticks(self, room: float) -> list[tuple[Any, str]]:
        """Values and labels, as many as fit into ``room`` pixels."""
        if self.given.get("showticklabels") is False:
            return []
        if self.given.get("tickvals") is not None:
            marks = values_of(self.given["tickvals"])
            texts = list(map(str, values_of(self.given.get("ticktext")))) or map(digits, marks)
            return list(zip(marks, texts, strict=False))
        if self.is_category:
            every = max(1, math.ceil(len(self.categories) / (self.given.get("nticks") or 60)))
            return [(name, name) for name in self.categories[::every]]
        low, high = sorted((self.low, self.high))
        if self.is_log:
            inside = math.floor(high + 1e-9) - math.ceil(low - 1e-9) + 1
            steps = (1,) if inside > 2 else (1, 2, 5)
            powers = range(math.floor(low), math.ceil(high) + 1)
            marks = [step * 10.0**power for power in powers for step in steps]
            return [(m, f"{m:,g}") for m in marks if low <= math.log10(m) <= high]
        width = 75 if self.is_x else 42
        count = max(2, min(int(self.given.get("nticks") or 9), int(room / width)))
        step = self.given.get("dtick") or _round_step((high - low) / count)
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        return [(k * step, self._label(k * step, step)) for k in range(first, last + 1)]

    def _label(self, mark: float, step: float) -> str:
        form = str(self.given.get("tickformat") or "")
        if form.endswith("%"):
            return f"{mark:{form}}"
        places = max(0, -math.floor(math.log10(step) + 1e-9))
        if re.fullmatch(r"\.\df", form):
            places = int(form[1])
        return f"{mark + 0.0:,.{places}f}"


def _round_step(step: float) -> float:
    if step <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(step))
    return next(s * power for s in (1, 2, 5, 10) if s * power >= step * 0.999)
