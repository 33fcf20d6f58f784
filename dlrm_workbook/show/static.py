"""A figure without a browser: an SVG image of it, and its numbers in words.

GitHub, nbviewer, ``jupyter nbconvert`` and mail do not run plotly.js. A notebook therefore stores
each figure as an image too: the same bars, lines, boxes, colours, patterns, labels and units, drawn
here for the kinds of traces that our figures have. Styles are attributes of each mark and nothing
has an identifier, since viewers strip style sheets and put several images into one page.
"""

from __future__ import annotations

import itertools
import math
import re
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape, unescape
from typing import Any

import numpy as np

from dlrm_workbook.ground.units import digits, percent

WIDTH = 900
"""Width of an image, in pixels."""

TEXT, GRID, PAPER = "#1f2328", "#dcdcd6", "#ffffff"
"""Colours of text, of axes and grids, and of the background. It is white in dark surroundings too:
an image cannot know where it is shown."""

HATCH = "rgba(255, 255, 255, 0.75)"
SIZE = 12.5
"""Height of letters, in pixels."""

LINE_HEIGHT = 1.3
"""Distance of lines of text, in heights of letters."""

FAMILY = "system-ui, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
MOST_SAID = 12
"""Values that a description names; of more it gives the count."""

Rows = list[tuple[str, bool]]
"""Lines of a text, and whether each is bold."""


def _values(array: Any) -> list[Any]:
    """An array of a figure's JSON as a list; plotly packs numbers as base64."""
    if isinstance(array, Mapping):
        numbers = np.frombuffer(b64decode(array["bdata"]), np.dtype(array["dtype"]))
        if "shape" in array:
            shape = [int(size) for size in str(array["shape"]).split(",")]
            numbers = numbers.reshape(shape)
        return list(numbers.tolist())
    if array is None:
        return []
    return array.tolist() if isinstance(array, np.ndarray) else list(array)


def _each(value: Any, count: int, default: Any = None) -> list[Any]:
    """One value for each mark: plotly takes a scalar for all."""
    if value is None:
        return [default] * count
    if isinstance(value, str | int | float):
        return [value] * count
    values = _values(value)
    return values + [default] * (count - len(values))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _numbers(values: Iterable[Any]) -> list[float]:
    return [float(value) for value in values if _is_number(value)]


# Text: plotly's subset of HTML in lines, and how wide it is.

_NARROW, _WIDE = set("iljtfrI.,:;'|!()[] /"), set("mwMW@%—…→")


def _width(text: str, size: float = SIZE, bold: bool = False) -> float:
    """Width of a line in pixels in DejaVu Sans; most other fonts are narrower."""
    units = sum(
        0.36 if c in _NARROW else 0.95 if c in _WIDE else 0.7 if c.isupper() else 0.615
        for c in text
    )
    return units * size * (1.1 if bold else 1.0)


def _lines(text: Any) -> Rows:
    rows = []
    for line in re.split(r"<br\s*/?>", str(text)):
        plain = unescape(re.sub(r"<[^>]*>", "", line))
        rows.append((plain, "<b>" in line))
    return rows


def _plain(text: Any) -> str:
    return " ".join(" ".join(line for line, _ in _lines(text)).split())


def _size(text: Any, size: float = SIZE) -> tuple[float, float]:
    """Width and height of a text of several lines, in pixels."""
    rows = _lines(text)
    return max(_width(line, size, bold) for line, bold in rows), len(rows) * size * LINE_HEIGHT


# Marks.


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


class _Canvas:
    """Elements of an SVG image, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def path(self, commands: str, **look: Any) -> None:
        if commands:
            self._add("path", {"d": commands, **look})

    def line(self, points: Iterable[tuple[float, float]], **look: Any) -> None:
        look = {"fill": "none", "stroke-width": 1, **look}
        texts = [(_short(x), _short(y)) for x, y in points]
        commands = [f"M{x} {y}" for x, y in texts[:1]]
        for (left, top), (x, y) in itertools.pairwise(texts):
            commands.append(f"V{y}" if x == left else f"H{x}" if y == top else f"L{x} {y}")
        self.path("".join(commands), **look)

    def _add(self, tag: str, look: Mapping[str, Any], content: str = "") -> None:
        attributes = "".join(
            f' {name}="{f"{v:.4g}" if isinstance(v, float) else escape(str(v))}"'
            for name, v in look.items()
            if v is not None
        )
        end = f">{escape(content)}</{tag}>" if content else "/>"
        self.elements.append(f"<{tag}{attributes}{end}")

    def text(
        self,
        x: float,
        y: float,
        text: Any,
        *,
        anchor: str = "start",
        vertical: float = 0.5,
        size: float = SIZE,
        **look: Any,
    ) -> None:
        """Write lines; ``vertical`` is where ``y`` is in their height: 0 top, 1 bottom."""
        rows = _lines(text)
        step = size * LINE_HEIGHT
        top = y - vertical * step * len(rows)
        look = {
            "font-size": None if size == SIZE else f"{size:g}",
            "text-anchor": None if anchor == "start" else anchor,
            **look,
        }
        for number, (line, bold) in enumerate(rows):
            if line.strip():
                base = top + step * number + 0.5 * step + 0.36 * size
                place = {"x": _short(x), "y": _short(base)}
                weight = {"font-weight": 600 if bold else None}
                self._add("text", {**place, **look, **weight}, line)


def _rectangle(left: float, top: float, right: float, bottom: float) -> str:
    return f"M{_short(left)} {_short(top)}H{_short(right)}V{_short(bottom)}H{_short(left)}Z"


def _touches(box: Sequence[float], other: Sequence[float]) -> bool:
    """Whether a rectangle begins where one in its row ends, or less than half a pixel later."""
    return box[1] == other[1] and box[3] == other[3] and abs(other[0] - box[2]) < 0.5


def _hatch(left: float, top: float, right: float, bottom: float, shape: str) -> str:
    """Slanted lines over a rectangle: ``/``, or both ways for ``x``."""
    commands = []
    step = 7.0 * math.sqrt(2)
    if shape in "/x":
        for k in range(math.ceil((left + top) / step), math.floor((right + bottom) / step) + 1):
            x0, x1 = max(left, k * step - bottom), min(right, k * step - top)
            commands += [(x0, k * step - x0, x1, k * step - x1)] if x1 > x0 else []
    if shape in "\\x":
        for k in range(math.ceil((left - bottom) / step), math.floor((right - top) / step) + 1):
            x0, x1 = max(left, k * step + top), min(right, k * step + bottom)
            commands += [(x0, x0 - k * step, x1, x1 - k * step)] if x1 > x0 else []
    return "".join(f"M{_short(a)} {_short(b)}L{_short(c)} {_short(d)}" for a, b, c, d in commands)


def _symbol(x: float, y: float, size: float, symbol: str) -> str:
    r = size / 2
    if symbol.startswith("square"):
        return _rectangle(x - 0.89 * r, y - 0.89 * r, x + 0.89 * r, y + 0.89 * r)
    corners = {
        "diamond": [(0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)],
        "triangle-up": [(0, -1.15), (1.15, 0.65), (-1.15, 0.65)],
    }.get(symbol.removesuffix("-open"))
    if corners:
        points = "L".join(f"{_short(x + r * a)} {_short(y + r * b)}" for a, b in corners)
        return f"M{points}Z"
    symbol = symbol.removesuffix("-open")
    if symbol == "x":
        return (
            f"M{_short(x - r)} {_short(y - r)}l{_short(size)} {_short(size)}"
            f"m0 {_short(-size)}l{_short(-size)} {_short(size)}"
        )
    if symbol == "line-ns":
        return f"M{_short(x)} {_short(y - r * 1.4)}v{_short(size * 1.4)}"
    return f"M{_short(x - r)} {_short(y)}a{_short(r)} {_short(r)} 0 1 0 {_short(size)} 0a" + (
        f"{_short(r)} {_short(r)} 0 1 0 {_short(-size)} 0Z"
    )


_DASHES = {"dash": "9 5", "dot": "2 3", "dashdot": "9 4 2 4", "longdash": "14 6"}


Rectangle = tuple[float, float, float, float]
"""Left, top, right and bottom."""

# Axes.


@dataclass
class _Axis:
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
        title = self.given.get("title") or {}
        return str(title.get("text") or "") if isinstance(title, Mapping) else str(title)

    @property
    def hidden(self) -> bool:
        return self.given.get("visible") is False

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
        """Widen the range, or learn categories."""
        for value in values:
            if isinstance(value, str):
                self.is_category = True
                if value not in self.categories:
                    self.categories.append(value)
            elif _is_number(value):
                self.data.append(float(value))

    def settle(self) -> None:
        """Choose the range once all data are known."""
        if self.is_category:
            order = [str(v) for v in _values(self.given.get("categoryarray"))]
            self.categories = order or self.categories
            self.low, self.high = -0.5, len(self.categories) - 0.5
        elif (span := _values(self.given.get("range"))) and all(map(_is_number, span)):
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
            marks = _values(self.given.get("tickvals"))
            texts = [str(t) for t in _values(self.given.get("ticktext"))] or list(
                map(digits, marks)
            )
            return list(zip(marks, texts, strict=False))
        if self.is_category:
            every = max(1, math.ceil(len(self.categories) / (self.given.get("nticks") or 60)))
            return [(name, name) for name in self.categories[::every]]
        low, high = sorted((self.low, self.high))
        if self.is_log:
            powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
            steps = (1,) if len(powers) > 2 else (1, 2, 5)
            marks = [
                s * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for s in steps
            ]
            return [(m, f"{m:,g}") for m in marks if low <= math.log10(m) <= high]
        width = 75 if self.is_x else 42
        count = max(2, min(int(self.given.get("nticks") or 9), int(room / width)))
        step = self.given.get("dtick") or _round_step((high - low) / count)
        marks = [
            k * step
            for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        ]
        return [(mark, self._label(mark, step)) for mark in marks]

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


# Bars, once for all their kinds.


@dataclass(frozen=True)
class _BarLook:
    """How a bar is painted: one value of each property that plotly takes for one bar or all."""

    colour: Any
    opacity: float
    edge: Any
    edge_width: float
    pattern: str
    ink: str

    @property
    def paint(self) -> tuple[tuple[str, Any], ...]:
        """Attributes of its rectangle; bars that have the same are drawn as one path."""
        edge = {"stroke": self.edge, "stroke-width": float(self.edge_width)}
        return tuple(
            {**_fill(self.colour, self.opacity), **(edge if self.edge_width else {})}.items()
        )


def _bar_looks(trace: Mapping[str, Any], count: int) -> list[_BarLook]:
    """Looks of the first bars of a trace."""
    marker = trace.get("marker") or {}
    line, pattern = marker.get("line") or {}, marker.get("pattern") or {}
    columns = (
        _each(marker.get("color"), count, "#888888"),
        _each(marker.get("opacity"), count, 1.0),
        _each(line.get("color"), count),
        _each(line.get("width"), count, 0),
        _each(pattern.get("shape"), count, ""),
        _each(pattern.get("fgcolor"), count, HATCH),
    )
    return list(itertools.starmap(_BarLook, zip(*columns, strict=True)))


@dataclass
class _Bar:
    """A bar in its axes' units."""

    trace: Mapping[str, Any]
    look: _BarLook
    place: Any
    offset: float
    width: float
    start: float
    end: float
    error: tuple[float, float]
    text: str
    ink: str


def _stack(traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any]) -> list[_Bar]:
    """Begin and end of each bar of a plot."""
    bars = [t for t in traces if t["type"] == "bar" and t.get("visible") in (None, True)]
    mode, gap = layout.get("barmode", "group"), float(layout.get("bargap", 0.28))
    letters = [("x", "y") if t.get("orientation") == "h" else ("y", "x") for t in bars]
    places = [_values(t.get(aside)) for t, (_, aside) in zip(bars, letters, strict=True)]
    numbers = sorted({float(p) for bar_places in places for p in bar_places if _is_number(p)})
    between = min((b - a for a, b in itertools.pairwise(numbers)), default=1.0)
    drawn = [
        t
        for t, bar_places in zip(bars, places, strict=True)
        if any(p is not None for p in bar_places)
    ]
    share = 1.0 / max(len(drawn), 1) if mode == "group" else 1.0
    reached: dict[tuple[Any, bool], float] = {}
    result = []
    for trace, (along, _), bar_places in zip(bars, letters, places, strict=True):
        lengths = _values(trace.get(along))
        number = drawn.index(trace) if trace in drawn else 0
        middle = between * (1 - gap) * ((number + 0.5) * share - 0.5) if mode == "group" else 0.0
        count = len(lengths)
        looks = _bar_looks(trace, count)
        inks = _each((trace.get("textfont") or {}).get("color"), count)
        columns = (
            _each(trace.get("base"), count),
            _each(trace.get("width"), count, between * (1 - gap) * share),
            _each(trace.get("offset"), count),
            looks,
            _errors(trace.get(f"error_{along}"), count),
            _each(trace.get("text"), count, ""),
            [ink or _ink(str(look.colour)) for ink, look in zip(inks, looks, strict=True)],
        )
        for place, length, base, width, offset, look, *rest in zip(
            bar_places, lengths, *columns, strict=False
        ):
            if place is None or not _is_number(length):
                continue
            centre = middle if offset is None else offset + width / 2
            start = base if base is not None else 0.0
            if mode in ("stack", "relative") and base is None:
                start = reached.get((place, length < 0), 0.0)
                reached[place, length < 0] = start + length
            result.append(_Bar(trace, look, place, centre, width, start, start + length, *rest))
    return result


def _as_bars(trace: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A waterfall as bars from one level to the next, and the lines between them as shapes."""
    along, aside = ("x", "y") if trace.get("orientation") == "h" else ("y", "x")
    places = _values(trace[aside])
    level, steps, lines = 0.0, [], []
    for value, measure in zip(_values(trace[along]), _values(trace["measure"]), strict=True):
        start = level if measure == "relative" else 0.0
        level = start + value
        kind = "increasing" if value >= 0 else "decreasing"
        kind = kind if measure == "relative" else "totals"
        steps.append(
            (start, value, ((trace.get(kind) or {}).get("marker") or {}).get("color", TEXT))
        )
    starts, lengths, colours = zip(*steps, strict=True)
    for (before, place), start in zip(itertools.pairwise(places), starts[1:], strict=True):
        ends = {f"{along}0": start, f"{along}1": start}
        ends |= {f"{aside}0": before + 0.36, f"{aside}1": place - 0.36}
        refs = {f"{letter}ref": trace.get(f"{letter}axis", letter) for letter in "xy"}
        lines.append({**ends, **refs, "line": {"color": GRID}})
    bars = {"type": "bar", "base": starts, along: lengths, "marker": {"color": colours}}
    return {**trace, **bars}, lines


def _fill(colour: Any, opacity: float = 1.0) -> dict[str, Any]:
    """A fill as attributes that every viewer knows: no ``rgba``."""
    match = re.fullmatch(r"rgba\((\d+), ?(\d+), ?(\d+), ?([\d.]+)\)", str(colour))
    if match:
        red, green, blue = (int(match[n]) for n in (1, 2, 3))
        colour, opacity = f"#{red:02X}{green:02X}{blue:02X}", opacity * float(match[4])
    return {"fill": str(colour), "fill-opacity": None if opacity >= 1 else round(opacity, 3)}


def _stroke(colour: Any) -> dict[str, Any]:
    """Lines of a pattern."""
    ink = _fill(colour)
    stroke = {"stroke": ink["fill"], "stroke-opacity": ink["fill-opacity"]}
    return {"fill": "none", **stroke, "stroke-width": 1.5}


def _line_look(line: Mapping[str, Any], width: float) -> dict[str, Any]:
    """Attributes of a line as a trace or a shape has it; ``width`` where it has none."""
    return {
        "stroke": line.get("color", TEXT),
        "stroke-width": float(line.get("width", width)),
        "stroke-dasharray": _DASHES.get(line.get("dash", "")),
    }


def _mix(scale: Sequence[Sequence[Any]], share: float) -> str:
    """A colour of plotly's colour scale."""
    share = min(max(share, 0.0), 1.0)
    for (low, first), (high, second) in itertools.pairwise(scale):
        if share <= high:
            part = (share - low) / ((high - low) or 1.0)
            ends = ([int(c[at : at + 2], 16) for at in (1, 3, 5)] for c in (first, second))
            return "#" + "".join(
                f"{round(a + part * (b - a)):02X}" for a, b in zip(*ends, strict=True)
            )
    return str(scale[-1][1])


class _Image:
    """A figure's JSON, drawn."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.layout: Mapping[str, Any] = spec.get("layout", {})
        self.traces: list[Mapping[str, Any]] = []
        self.shapes: list[Mapping[str, Any]] = list(self.layout.get("shapes") or [])
        for trace in spec.get("data", []):
            if trace["type"] == "waterfall":
                trace, lines = _as_bars(trace)
                self.shapes += lines
            self.traces.append(trace)
        self.canvas = _Canvas()
        self.height = float(self.layout.get("height") or 450)
        self.axes: dict[str, _Axis] = {}
        self.plots: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
        for trace in self.traces:
            if trace["type"] != "icicle":
                key = str(trace.get("xaxis", "x")), str(trace.get("yaxis", "y"))
                self.plots.setdefault(key, []).append(trace)
        self.bars = {key: _stack(traces, self.layout) for key, traces in self.plots.items()}

    def svg(self) -> str:
        self._learn()
        self._place()
        self._title()
        draws = {"scatter": self._points, "heatmap": self._heatmap}
        for (x, y), traces in self.plots.items():
            across, up = self._axis(x), self._axis(y)
            self._grid(across, up)
            self._bars(across, up, self.bars[x, y])
            for trace in traces:
                if trace["type"] in draws and trace.get("visible") in (None, True):
                    draws[trace["type"]](trace, across, up)
        for trace in self.traces:
            if trace["type"] == "icicle":
                self._icicle(trace)
        self._shapes()
        self._legend()
        self._annotations()
        height = _short(self.height)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
            f'viewBox="0 0 {WIDTH} {height}" font-family="{FAMILY}" font-size="{SIZE}" '
            f'fill="{TEXT}"><path d="{_rectangle(0, 0, WIDTH, self.height)}" fill="{PAPER}"/>'
            + "".join(self.canvas.elements)
            + "</svg>"
        )

    # What the axes show.

    def _axis(self, name: str) -> _Axis:
        """``x``, ``y2``: the axis, made when it is first asked for."""
        if name not in self.axes:
            given = self.layout.get(f"{name[0]}axis{name[1:]}") or {}
            self.axes[name] = _Axis(name, given)
        return self.axes[name]

    def _learn(self) -> None:
        for (x, y), traces in self.plots.items():
            across, up = self._axis(x), self._axis(y)
            for bar in self.bars[x, y]:
                values, places = _along(bar.trace, across, up)
                values.from_zero = values.from_zero or bar.trace.get("base") is None
                values.take([bar.start, bar.end] if not values.is_log else [bar.end])
                if isinstance(bar.place, str):
                    places.take([bar.place])
                elif places.given.get("type") == "category":
                    places.take([f"{bar.place:g}"])
                else:
                    places.take(bar.place + bar.offset + side * bar.width / 2 for side in (-1, 1))
            for trace in traces:
                if trace["type"] not in ("scatter", "heatmap"):
                    continue
                for axis, letter in ((across, "x"), (up, "y")):
                    held = _values(trace.get(letter))
                    axis.take(held)
                    errors = _errors(trace.get(f"error_{letter}"), len(held))
                    for value, (down, rise) in zip(held, errors, strict=True):
                        if _is_number(value):
                            axis.take((value - down, value + rise))
        for axis in self.axes.values():
            axis.settle()
        for axis in list(self.axes.values()):
            if axis.given.get("matches"):
                other = self._axis(str(axis.given["matches"]))
                lows, highs = (axis.low, other.low), (axis.high, other.high)
                axis.low = other.low = min(lows)
                axis.high = other.high = max(highs)

    def _place(self) -> None:
        """Room for labels around the plots, and each axis its stretch of pixels."""
        margin = self.layout.get("margin") or {}
        self.entries = self._legend_entries()
        left, below = 16.0, 8.0
        for axis in self.axes.values():
            if axis.hidden:
                continue
            texts = [text for _, text in axis.ticks(600)]
            if not axis.is_x and float((axis.given.get("domain") or [0, 1])[0]) >= 0:
                wide = max((_size(text)[0] for text in texts), default=0.0)
                left = max(left, wide + 14 + (24 if axis.title else 0))
            elif axis.is_x:
                high = max((_size(text)[1] for text in texts), default=0.0)
                below = max(below, high + 8 + (_size(axis.title)[1] + 6 if axis.title else 0))
        self.left, self.right = min(left, 0.45 * WIDTH), WIDTH - 24.0
        if any(_scale_of(trace) for trace in self.traces):
            self.right -= 90
        self.top = float(margin.get("t") or 48)
        self.bottom = self.height - below - self._legend_height() - 6
        self.bottom = max(self.bottom, self.top + 40)
        for axis in self.axes.values():
            low, high = axis.given.get("domain") or [0, 1]
            if axis.is_x:
                width = self.right - self.left
                axis.start, axis.end = self.left + low * width, self.left + high * width
            else:
                height = self.bottom - self.top
                axis.start, axis.end = self.bottom - low * height, self.bottom - high * height

    def _title(self) -> None:
        title = self.layout.get("title") or {}
        text = title.get("text") if isinstance(title, Mapping) else title
        if text:
            self.canvas.text(4, 22, f"<b>{text}</b>", size=15)

    def _grid(self, across: _Axis, up: _Axis) -> None:
        for axis, other in ((across, up), (up, across)):
            if axis.hidden:
                continue
            first, last = sorted((axis.start, axis.end))
            low, high = sorted((other.start, other.end))

            def line(place: float, colour: str, axis: _Axis, ends: tuple[float, float]) -> None:
                self.canvas.line([axis.point(place, end) for end in ends], stroke=colour)

            ticks = axis.ticks(last - first)
            for value, text in ticks:
                place = axis.at(value)
                if not first - 0.5 <= place <= last + 0.5:
                    continue
                if axis.given.get("showgrid") is not False and not axis.is_category:
                    line(place, GRID, axis, (low, high))
                if not axis.is_x:
                    self.canvas.text(low - 8, place, text, anchor="end")
                elif self._is_lowest(axis):
                    self.canvas.text(place, high + 5, text, anchor="middle", vertical=0)
            middle = (first + last) / 2
            if axis.title and axis.is_x:
                tall = max((_size(text)[1] for _, text in axis.ticks(600)), default=0.0)
                self.canvas.text(middle, high + 10 + tall, axis.title, anchor="middle", vertical=0)
            elif axis.title:
                turn = f"rotate(-90 14 {_short(middle)})"
                self.canvas.text(14.0, middle, axis.title, anchor="middle", transform=turn)
            inside = axis.low < 0 < axis.high if axis.is_x else axis.low <= 0 <= axis.high
            plain = not axis.is_log and not axis.is_category
            if inside and plain and axis.given.get("zeroline") is not False:
                line(axis.at(0.0), axis.given.get("zerolinecolor", GRID), axis, (low, high))

    def _is_lowest(self, axis: _Axis) -> bool:
        """Whether no axis below this one has the same labels."""
        return not any(
            other.is_x
            and other is not axis
            and other.given.get("showticklabels") is not False
            and other.given.get("matches") == axis.name
            and other.start == axis.start
            for other in self.axes.values()
        )

    # Marks of traces.

    def _bars(self, across: _Axis, up: _Axis, bars: Sequence[_Bar]) -> None:
        boxes = [self._bar_box(bar, *_along(bar.trace, across, up)) for bar in bars]
        filled: dict[tuple[tuple[str, Any], ...], list[Rectangle]] = {}
        hatched: dict[str, list[str]] = {}
        for bar, box in zip(bars, boxes, strict=True):
            same = filled.setdefault(bar.look.paint, [])
            if bar.trace.get("base") is not None and same and _touches(same[-1], box):
                same[-1] = (*same[-1][:2], max(same[-1][2], box[2]), same[-1][3])
            else:
                same.append(box)
            if bar.look.pattern and box[2] - box[0] > 3:
                hatched.setdefault(bar.look.ink, []).append(_hatch(*box, bar.look.pattern))
        for paint, same in filled.items():
            self.canvas.path("".join(_rectangle(*box) for box in same), **dict(paint))
        for ink, commands in hatched.items():
            self.canvas.path("".join(commands), **_stroke(ink))
        for bar, box in zip(bars, boxes, strict=True):
            values, _ = _along(bar.trace, across, up)
            middle = (box[1] + box[3]) / 2 if values.is_x else (box[0] + box[2]) / 2
            given = bar.trace.get(f"error_{values.name[0]}") or {}
            low, high = bar.error
            error = (min(low, bar.end) if bar.end > 0 else low, high)  # no bar is shorter than 0
            self._whisker(values, bar.end, middle, error, given)
            if bar.text:
                self._bar_text(bar, box, values.is_x)

    def _bar_box(self, bar: _Bar, values: _Axis, places: _Axis) -> Rectangle:
        """The rectangle of a bar, within the plot."""
        if places.is_category:
            step = (places.end - places.start) / len(places.categories)
            middle = places.at(bar.place) + bar.offset * step
            low, high = (middle + side * bar.width / 2 * abs(step) for side in (-1, 1))
        else:
            ends = (bar.place + bar.offset + side * bar.width / 2 for side in (-1, 1))
            low, high = sorted(map(places.at, ends))
        start = values.at(bar.start) if not values.is_log or bar.start > 0 else values.start
        first, last = sorted((start, values.at(bar.end)))
        nearest, furthest = sorted((values.start, values.end))
        return values.box(max(first, nearest), min(max(last, first + 0.4), furthest), low, high)

    def _bar_text(self, bar: _Bar, box: Rectangle, flat: bool) -> None:
        left, top, right, bottom = box
        middle, centre = (left + right) / 2, (top + bottom) / 2
        if bar.trace.get("textposition") == "inside":
            width, height = _size(bar.text)
            if width <= right - left and height <= bottom - top:
                self.canvas.text(middle, centre, bar.text, anchor="middle", fill=bar.ink)
        elif flat and bar.end >= bar.start:
            self.canvas.text(right + 5, centre, bar.text)
        elif flat:
            self.canvas.text(left - 5, centre, bar.text, anchor="end")
        else:
            self.canvas.text(middle, top - 4, bar.text, anchor="middle", vertical=1)

    def _whisker(
        self,
        axis: _Axis,
        value: float,
        aside: float,
        error: tuple[float, float],
        given: Mapping[str, Any],
    ) -> None:
        """An error bar along an axis; nothing where both its lengths are 0."""
        low, high = error
        if not low and not high:
            return
        ends = [axis.at(value - low) if not axis.is_log or value > low else axis.start]
        ends.append(axis.at(value + high))
        cap = float(given.get("width", 4))
        look = _line_look({"color": TEXT, **given, "width": given.get("thickness", 2)}, 2)
        self.canvas.line([axis.point(end, aside) for end in ends], **look)
        for end in ends:
            self.canvas.line([axis.point(end, aside - cap), axis.point(end, aside + cap)], **look)

    def _points(self, trace: Mapping[str, Any], across: _Axis, up: _Axis) -> None:
        xs, ys = _values(trace.get("x")), _values(trace.get("y"))
        points = [
            (across.at(x), up.at(y)) if x is not None and _drawable(y) and _drawable(x) else None
            for x, y in zip(xs, ys, strict=False)
        ]
        mode, look, count = trace.get("mode", "lines"), trace.get("marker") or {}, len(points)
        if "lines" in mode:
            self._line(trace, [point for point in points if point], up.at(0.0))
        for axis, values in ((across, xs), (up, ys)):
            given = trace.get(f"error_{axis.name[0]}") or {}
            for value, point, error in zip(values, points, _errors(given, count), strict=False):
                if point:
                    self._whisker(axis, value, point[1 if axis.is_x else 0], error, given)
        if "markers" in mode:
            self._markers(points, look)
        if "text" in mode:
            texts = _each(trace.get("text"), count, "")
            places = _each(trace.get("textposition"), count, "top center")
            reach = [float(size or 6) / 2 + 4 for size in _each(look.get("size"), count, 6)]
            for point, text, place, far in zip(points, texts, places, reach, strict=True):
                if point and text:
                    self._point_text(point, text, str(place), far)

    def _line(
        self, trace: Mapping[str, Any], points: Sequence[tuple[float, float]], floor: float
    ) -> None:
        """The line of a trace through points, and the area down to ``floor`` where it has one."""
        line = trace.get("line") or {}
        if line.get("shape") == "hv" and points:
            following = [*points[1:], points[-1]]
            pairs = zip(points, following, strict=True)
            points = [corner for (a, b), (c, _) in pairs for corner in ((a, b), (c, b))]
        drawn = _thinned(list(points))
        if drawn and trace.get("fill") == "tozeroy":
            ring = [(drawn[0][0], floor), *drawn, (drawn[-1][0], floor)]
            self.canvas.line(ring, **_fill(line.get("color", TEXT), 0.4), stroke="none")
        if len(drawn) > 1:
            self.canvas.line(drawn, **_line_look(line, 2))

    def _markers(
        self, points: Sequence[tuple[float, float] | None], look: Mapping[str, Any]
    ) -> None:
        count = len(points)
        sizes, colours = _each(look.get("size"), count, 6), _each(look.get("color"), count, TEXT)
        symbols = _each(look.get("symbol"), count, "circle")
        line = look.get("line") or {}
        edge, width = line.get("color"), float(_each(line.get("width"), 1, 0)[0] or 0)
        joined: dict[tuple[Any, ...], list[str]] = {}
        for point, size, colour, symbol in zip(points, sizes, colours, symbols, strict=True):
            if point:
                hollow = symbol.endswith("-open") or symbol in ("x", "line-ns")
                joined.setdefault((colour, hollow), []).append(_symbol(*point, float(size), symbol))
        for (colour, hollow), commands in joined.items():
            if not isinstance(colour, str):
                continue
            if hollow:
                paint = {"fill": "none", "stroke": colour, "stroke-width": max(width, 2.0)}
            else:
                paint = _fill(colour, float(look.get("opacity", 1) or 1))
                paint |= {"stroke": "#ffffff", "stroke-width": width} if edge and width else {}
            self.canvas.path("".join(commands), **paint)

    def _point_text(self, point: tuple[float, float], text: str, place: str, far: float) -> None:
        x, y = point
        side = -1 if "left" in place else 1 if "right" in place else 0
        rise = -1 if "top" in place else 1 if "bottom" in place else 0
        x += side * (far if not rise else 2)
        anchor = {-1: "end", 0: "middle", 1: "start"}[side]
        self.canvas.text(
            x, y + rise * far, text, anchor=anchor, vertical={-1: 1, 0: 0.5, 1: 0}[rise]
        )

    def _heatmap(self, trace: Mapping[str, Any], across: _Axis, up: _Axis) -> None:
        rows = _values(trace["z"])
        low, high = float(trace["zmin"]), float(trace["zmax"])
        scale = [list(stop) for stop in trace["colorscale"]]
        wide = (across.end - across.start) / max(len(across.categories), 1)
        tall = (up.end - up.start) / max(len(up.categories), 1)
        for y, row in zip(_values(trace["y"]), rows, strict=True):
            for x, value in zip(_values(trace["x"]), row, strict=True):
                if _is_number(value):
                    middle, centre = across.at(x), up.at(y)
                    box = _rectangle(
                        middle - wide / 2, centre - tall / 2, middle + wide / 2, centre + tall / 2
                    )
                    self.canvas.path(box, fill=_mix(scale, (value - low) / ((high - low) or 1)))

    # Boxes of a call tree.

    def _icicle(self, trace: Mapping[str, Any]) -> None:
        names, above = _values(trace["ids"]), _values(trace["parents"])
        values = dict(zip(names, map(float, _values(trace["values"])), strict=True))
        count = len(names)
        colours = dict(zip(names, _each((trace["marker"] or {}).get("colors"), count), strict=True))
        texts = dict(zip(names, _each(trace.get("text"), count, ""), strict=True))
        inks = _each((trace.get("textfont") or {}).get("color"), count, TEXT)
        ink = dict(zip(names, inks, strict=True))
        below: dict[str, list[str]] = {}
        for name, parent in zip(names, above, strict=True):
            below.setdefault(parent, []).append(name)
        roots = below.get("", [])
        whole = sum(values[name] for name in roots) or 1.0
        domain = ((trace.get("domain") or {}).get("x")) or [0, 1]
        left, right = 16 + domain[0] * (WIDTH - 32), 16 + domain[1] * (WIDTH - 32)
        boxes = list(_dice(roots, below, values, left, right, 0, int(trace.get("maxdepth") or 7)))
        levels = max((level for *_, level in boxes), default=0) + 1
        top = float((self.layout.get("margin") or {}).get("t") or 48)
        tall = (self.height - top - 16) / levels
        filled: dict[str, list[str]] = {}
        for name, low, high, level in boxes:
            box = _rectangle(low, top + tall * level, high, top + tall * (level + 1))
            if high - low >= 0.3:
                filled.setdefault(colours[name], []).append(box)
        edge = {"stroke": "#808080", "stroke-width": 0.7}
        for colour, boxes_of_colour in filled.items():
            self.canvas.path("".join(boxes_of_colour), **_fill(colour), **edge)
        for name, low, high, level in boxes:
            with_share = f"{texts[name]}<br>{values[name] / whole:.0%}"
            for text in (with_share, texts[name]):
                width, height = _size(text, 11.5)
                if width < high - low - 4 and height < tall - 2:
                    at = ((low + high) / 2, top + tall * (level + 0.5))
                    self.canvas.text(*at, text, anchor="middle", size=11.5, fill=ink[name])
                    break

    # What stands over and beside the plots.

    def _where(self, ref: str | None, letter: str, value: Any) -> float:
        """A place on an axis, its domain or the whole drawing, in pixels."""
        ref = ref or letter
        if ref == "paper":
            low, high = (self.left, self.right) if letter == "x" else (self.bottom, self.top)
            return low + float(value) * (high - low)
        axis = self._axis(ref.removesuffix(" domain"))
        if ref.endswith(" domain"):
            return axis.start + float(value) * (axis.end - axis.start)
        return axis.at(value)

    def _shapes(self) -> None:
        for shape in self.shapes:
            ends = [
                tuple(
                    self._where(shape.get(f"{letter}ref"), letter, shape[f"{letter}{end}"])
                    for letter in "xy"
                )
                for end in (0, 1)
            ]
            self.canvas.line([(x, y) for x, y in ends], **_line_look(shape.get("line") or {}, 1))

    def _annotations(self) -> None:
        for note in self.layout.get("annotations") or []:
            at = []
            for letter in "xy":
                ref = note.get(f"{letter}ref") or letter
                value = note.get(letter)
                if ref == "paper" or ref.endswith(" domain") or isinstance(value, str):
                    at.append(self._where(ref, letter, value))
                else:
                    # plotly wants the exponent here
                    at.append(self._axis(ref).at(value, exponent=True))
            x = at[0] + float(note.get("xshift") or 0)
            y = at[1] - float(note.get("yshift") or 0)
            anchors = {"left": "start", "right": "end", "center": "middle"}
            font = note.get("font") or {}
            self.canvas.text(
                x,
                y,
                note.get("text", ""),
                anchor=anchors.get(note.get("xanchor", "center"), "middle"),
                vertical={"top": 0.0, "bottom": 1.0}.get(note.get("yanchor", ""), 0.5),
                size=float(font.get("size") or SIZE),
                fill=font.get("color"),
            )

    def _legend_entries(self) -> list[tuple[str, Mapping[str, Any] | None]]:
        """Name and trace of each entry; a heading has no trace."""
        if not self.layout.get("showlegend"):
            return []
        shown = [
            t
            for t in self.traces
            if t.get("showlegend") is not False
            and t.get("name")
            and t.get("visible") in (None, True)
        ]
        shown.sort(key=lambda t: float(t.get("legendrank", 1000)))
        if "reversed" in str((self.layout.get("legend") or {}).get("traceorder", "")):
            shown.reverse()
        entries: list[tuple[str, Mapping[str, Any] | None]] = []
        headings = set()
        for trace in shown:
            heading = (trace.get("legendgrouptitle") or {}).get("text")
            if heading and heading not in headings:
                headings.add(heading)
                entries.append((f"<b>{heading}</b>", None))
            entries.append((str(trace["name"]), trace))
        return entries

    def _legend_flow(self) -> Iterator[tuple[float, int, str, Mapping[str, Any] | None]]:
        """Left edge and row of each entry."""
        x, row = 16.0, 0
        for name, trace in self.entries:
            wide = _size(name)[0] + (38 if trace is not None else 14)
            if x > 16 and x + wide > WIDTH - 16:
                x, row = 16.0, row + 1
            yield x, row, name, trace
            x += wide + 6

    def _legend_height(self) -> float:
        rows = [row for _, row, _, _ in self._legend_flow()]
        return 20.0 * (rows[-1] + 1) + 6 if rows else 0.0

    def _legend(self) -> None:
        top = self.height - self._legend_height()
        for x, row, name, trace in self._legend_flow():
            y = top + 20 * row + 10
            if trace is None:
                self.canvas.text(x, y, name)
                continue
            if trace["type"] == "bar":
                box = (x, y - 6, x + 20, y + 6)
                (look,) = _bar_looks(trace, 1)
                self.canvas.path(_rectangle(*box), **dict(look.paint))
                if look.pattern:
                    self.canvas.path(_hatch(*box, look.pattern), **_stroke(look.ink))
            else:
                mode, marker = trace.get("mode", "lines"), trace.get("marker") or {}
                if "lines" in mode:
                    line = _line_look(trace.get("line") or {}, 2)
                    self.canvas.line([(x, y), (x + 24, y)], **line)
                if "markers" in mode:
                    first = {key: _each(marker.get(key), 1)[0] for key in ("color", "symbol")}
                    size = min(float(_each(marker.get("size"), 1, 8)[0]), 11.0)
                    first = {key: value for key, value in first.items() if value}
                    self._markers([(x + 12, y)], {**marker, **first, "size": size})
            self.canvas.text(x + 30, y, name)


def _along(trace: Mapping[str, Any], across: _Axis, up: _Axis) -> tuple[_Axis, _Axis]:
    """The axis along which the bars of a trace are long, and the one of their places."""
    return (across, up) if trace.get("orientation") == "h" else (up, across)


def _drawable(value: Any) -> bool:
    return isinstance(value, str) or _is_number(value)


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Keep of a column of pixels the first point, the ends and the last, on whole pixels."""
    if len(points) <= 2 * WIDTH:
        return points
    columns: dict[float, list[float]] = {}
    for x, y in points:
        columns.setdefault(float(round(x)), []).append(float(round(y)))
    kept = []
    for x, heights in columns.items():
        first = heights.index(min(heights)) < heights.index(max(heights))
        ends = (min(heights), max(heights)) if first else (max(heights), min(heights))
        kept += [(x, y) for y, _ in itertools.groupby((heights[0], *ends, heights[-1]))]
    return kept


def _errors(given: Mapping[str, Any] | None, count: int) -> list[tuple[float, float]]:
    """How far each error bar reaches down and up."""
    if not given:
        return [(0.0, 0.0)] * count
    up = _each(given.get("array"), count, 0.0)
    down = up if given.get("arrayminus") is None else _each(given.get("arrayminus"), count, 0.0)
    return [(float(a or 0), float(b or 0)) for a, b in zip(down, up, strict=True)]


def _dice(
    names: Sequence[str],
    below: Mapping[str, Sequence[str]],
    values: Mapping[str, float],
    left: float,
    right: float,
    level: int,
    deepest: int,
) -> Iterator[tuple[str, float, float, int]]:
    """Name, left, right and level of each box; the widest first, as plotly does."""
    whole = sum(values[name] for name in names)
    whole = max(whole, values.get("", 0.0))
    if not whole or level >= deepest:
        return
    scale = (right - left) / whole
    for name in sorted(names, key=lambda one: -values[one]):
        width = scale * values[name]
        yield name, left, left + width, level
        inner = below.get(name, [])
        used = sum(values[one] for one in inner) / values[name] if values[name] else 0.0
        yield from _dice(
            inner, below, values, left, left + width * min(used, 1.0), level + 1, deepest
        )
        left += width


def _scale_of(trace: Mapping[str, Any]) -> bool:
    return trace["type"] == "heatmap" or bool((trace.get("marker") or {}).get("showscale"))


def _ink(colour: str) -> str:
    return text_on(colour) if re.fullmatch(r"#[0-9A-Fa-f]{6}", colour) else TEXT


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb`` (WCAG relative luminance)."""
    # both contrasts are equal at sqrt(1.05 * 0.05) - 0.05
    return "#000000" if luminance(colour) > 0.179 else "#ffffff"


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` by WCAG 2, from 0 (black) to 1 (white)."""
    linear = []
    for start in (1, 3, 5):
        value = int(colour[start : start + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def image(spec: Mapping[str, Any]) -> str:
    """The figure as SVG, :data:`WIDTH` pixels wide, with a white background.

    Args:
        spec: a figure's JSON with bars, points and lines, waterfalls, icicles and heat maps, also
            in panels. Traces of other kinds are left out.
    """
    return _Image(spec).svg()


# The same in words.


def description(spec: Mapping[str, Any]) -> str:
    """Title and numbers of a figure in words, for readers who do not see it.

    Args:
        spec: a figure's JSON, as for :func:`image`.

    Returns:
        Plain text. Of more values than :data:`MOST_SAID` it names the first ones and a count.
    """
    layout = spec.get("layout", {})
    title = layout.get("title") or {}
    sentences = [_plain((title.get("text") or "") if isinstance(title, Mapping) else title)]
    notes = _notes(layout)
    traces = [t for t in spec.get("data", []) if t.get("visible") in (None, True)]
    bars = [t for t in traces if t["type"] == "bar" and any(_drawable(v) for v in _values(t["x"]))]
    if bars:
        sentences.append(_said_of_bars(bars, layout, notes))
    points = [
        words for t in traces if t["type"] == "scatter" for words in _said_of_points(t, layout)
    ]
    sentences.append(_listed(points))
    for trace in traces:
        sentences.append(
            {
                "icicle": _said_of_boxes,
                "waterfall": _said_of_steps,
                "heatmap": _said_of_cells,
            }.get(trace["type"], lambda *_: "")(trace, layout)
        )
    for name in ("xaxis", "yaxis"):
        axis = _Axis(name, layout.get(name) or {})
        if axis.title and not axis.hidden:
            sentences.append(f"{'Across' if name == 'xaxis' else 'Up'}: {_plain(axis.title)}")
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - MOST_SAID
    return "; ".join(items[:MOST_SAID]) + (f"; and {rest:,} more" if rest > 0 else "")


def _notes(layout: Mapping[str, Any], across: bool = False) -> dict[float, str]:
    """The texts that a figure has at the end of its rows; ``across``: above groups of rows."""
    return {
        float(note["y"]): _plain(note["text"])
        for note in layout.get("annotations") or []
        if _is_number(note.get("y"))
        and note.get("yref") in (None, "y")
        and (note.get("xref") == "paper") is across
    }


def _row_names(layout: Mapping[str, Any], letter: str) -> dict[Any, str]:
    axis = layout.get(f"{letter}axis") or {}
    texts = map(_plain, _values(axis.get("ticktext")))
    return dict(zip(_values(axis.get("tickvals")), texts, strict=False))


def _said_of_bars(
    traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], notes: Mapping[float, str]
) -> str:
    flat = traces[0].get("orientation") == "h"
    along, across = ("x", "y") if flat else ("y", "x")
    names = _row_names(layout, across)
    if any(trace.get("base") is not None for trace in traces):
        sums: dict[str, list[float]] = {}
        for trace in traces:
            sums.setdefault(str(trace.get("name", "")), []).extend(_numbers(_values(trace[along])))
        return _listed(
            [f"{_plain(n)} {digits(sum(v))} in {len(v):,} spans" for n, v in sums.items()]
        )
    rows: dict[Any, list[str]] = {}
    # a text behind the bars says what all of them mean
    traces = [t for t in traces if t.get("textposition") == "outside" and t.get("text")] or traces
    for trace in traces:
        places, lengths = _values(trace[across]), _values(trace[along])
        texts = _each(trace.get("text"), len(lengths), "")
        outside = trace.get("textposition") == "outside"
        for place, length, text in zip(places, lengths, texts, strict=True):
            value = (
                _plain(text) if outside and text else digits(length) if _is_number(length) else ""
            )
            words = rows.setdefault(place, [])
            if value and length:
                named = _plain(trace.get("name") or "")
                words.append(named if value in named else f"{named} {value}".strip())
    if not flat:
        return _listed([_spread(trace, along, layout) for trace in traces])
    items: list[str] = []
    headings = _notes(layout, across=True)
    for place, words in rows.items():
        total = notes.get(place, "") if _is_number(place) else ""
        name = names.get(place, place if isinstance(place, str) else "")
        # of rows with a total only the first one is described part by part
        parts = ", ".join(words) if not total else f"({', '.join(words)})" if not items else ""
        # the heading of a group stands before its first row
        above = [at for at in headings if _is_number(place) and at < place]
        heading = f"{headings.pop(max(above))}:" if above else ""
        items.append(" ".join(filter(None, [heading, name, total, parts])))
    return _listed(items)


def _spread(trace: Mapping[str, Any], letter: str, layout: Mapping[str, Any]) -> str:
    """Name of a trace and what its values are like."""
    values, name = _numbers(_values(trace.get(letter))), _plain(trace.get("name") or "")
    axis = layout.get(f"{letter}axis{str(trace.get(f'{letter}axis') or '')[1:]}") or {}
    text_of = percent if str(axis.get("tickformat", "")).endswith("%") else digits
    if not values:
        return name
    if len(values) == 1:
        return f"{name} {text_of(values[0])}"
    return (
        f"{name} {text_of(values[0])} first, {text_of(values[-1])} last, between "
        f"{text_of(min(values))} and {text_of(max(values))} at {len(values):,} points"
    )


def _said_of_points(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> list[str]:
    xs, ys = _values(trace.get("x")), _values(trace.get("y"))
    if trace.get("hoverinfo") == "skip" or not any(map(_drawable, xs)):
        return []
    if trace.get("hoverinfo") == "name":
        return [_plain(trace.get("name") or "")]
    texts = _values_of_text(trace)
    axis = layout.get(f"yaxis{str(trace.get('yaxis') or '')[1:]}") or {}
    low, high = axis.get("range") or (0, 1)
    is_row = bool(axis.get("ticktext")) and low > high  # the height of a point is no value then
    if texts and (is_row or len(ys) <= MOST_SAID):
        # the name and the first value; the rest is in the table
        return [_plain(", ".join(str(text).split("<br>")[:2])) for text in texts]
    return [_panel(trace, layout) + _spread(trace, "x" if is_row else "y", layout)]


def _panel(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    """The heading of the panel that a trace is in, if there are several."""
    if "xaxis2" not in layout:
        return ""
    number = int(str(trace.get("xaxis") or "x")[1:] or 1)
    # plotly puts the headings of panels before all other annotations
    notes = layout.get("annotations") or []
    return f"{_plain(notes[number - 1]['text'])}: " if number <= len(notes) else ""


def _values_of_text(trace: Mapping[str, Any]) -> list[Any]:
    texts = trace.get("hovertext")
    return (
        [] if texts is None or isinstance(texts, str) else [text for text in _values(texts) if text]
    )


def _said_of_boxes(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    values = _values(trace["values"])
    boxes = sorted(zip(values, _values(trace["labels"]), strict=True), key=lambda box: -box[0])
    whole = boxes[0][0] if boxes else 0.0
    return _listed([f"{name} {digits(v)} ms ({percent(v / whole)})" for v, name in boxes if whole])


def _said_of_steps(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    flat = trace.get("orientation") == "h"
    names = _row_names(layout, "y" if flat else "x")
    texts = _each(trace.get("text"), len(_values(trace["measure"])), "")
    places = _values(trace["y" if flat else "x"])
    return _listed(
        [f"{names.get(p, p)} {_plain(text)}" for p, text in zip(places, texts, strict=True)]
    )


def _said_of_cells(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    cells = [
        (value, f"{y}, {x}: {digits(value)}")
        for y, row in zip(_values(trace["y"]), _values(trace["z"]), strict=True)
        for x, value in zip(_values(trace["x"]), row, strict=True)
        if _is_number(value)
    ]
    cells.sort(key=lambda cell: -abs(cell[0]))
    return _listed([text for _, text in cells])
