"""A figure without a browser: an SVG image of it.

GitHub, nbviewer, ``jupyter nbconvert`` and mail do not run plotly.js. A notebook therefore stores
each figure as an image too: the same bars, lines, boxes, colours, patterns, labels and units, drawn
here for the kinds of traces that our figures have. Styles are attributes of each mark and nothing
has an identifier, since viewers strip style sheets and put several images into one page.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import Any, NamedTuple

from dlrm_workbook.show.axes import (
    Axis,
    Rectangle,
    each_of,
    is_drawable,
    is_number,
    is_shown,
    letters_of,
    part_of,
    values_of,
)

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

Point = tuple[float, float]
Trace = Mapping[str, Any]


# Text: plotly's subset of HTML in lines, and how wide it is.

_NARROW, _WIDE = set("iljtfrI.,:;'|!()[] /"), set("mwMW@%—…→")


def _width(text: str, size: float, bold: bool) -> float:
    """Width of a line in pixels in DejaVu Sans; most other fonts are narrower."""
    units = sum(
        0.36 if c in _NARROW else 0.95 if c in _WIDE else 0.7 if c.isupper() else 0.615
        for c in text
    )
    return units * size * (1.1 if bold else 1.0)


def _lines(text: Any) -> list[tuple[str, bool]]:
    """Lines of a text, and whether each is bold."""
    lines = re.split(r"<br\s*/?>", str(text))
    return [(unescape(re.sub(r"<[^>]*>", "", line)), "<b>" in line) for line in lines]


def plain_text(text: Any) -> str:
    return " ".join(" ".join(line for line, _ in _lines(text)).split())


def _size(text: Any, size: float = SIZE) -> tuple[float, float]:
    """Width and height of a text of several lines, in pixels."""
    rows = _lines(text)
    return max(_width(line, size, bold) for line, bold in rows), len(rows) * size * LINE_HEIGHT


def _largest(texts: Iterable[Any]) -> tuple[float, float]:
    """Width and height that the largest of some texts take."""
    sizes = [(0.0, 0.0), *map(_size, texts)]
    return max(width for width, _ in sizes), max(height for _, height in sizes)


# Marks.


def _short(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")


class Canvas:
    """Elements of an SVG image, in the order in which they are drawn."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def add(self, tag: str, content: str = "", **look: Any) -> None:
        """Add an element; ``_`` in the name of an attribute stands for ``-``, None for nothing."""
        attributes = "".join(
            f' {name.replace("_", "-")}="{f"{v:.4g}" if isinstance(v, float) else escape(str(v))}"'
            for name, v in look.items()
            if v is not None
        )
        end = f">{escape(content)}</{tag}>" if content else "/>"
        self.elements.append(f"<{tag}{attributes}{end}")

    def path(self, commands: Iterable[str], **look: Any) -> None:
        if joined := "".join(commands):
            self.add("path", d=joined, **look)

    def line(self, points: Iterable[Point], **look: Any) -> None:
        texts = [(_short(x), _short(y)) for x, y in points]
        commands = [f"M{x} {y}" for x, y in texts[:1]]
        for (left, top), (x, y) in itertools.pairwise(texts):
            commands.append(f"V{y}" if x == left else f"H{x}" if y == top else f"L{x} {y}")
        self.path(commands, **{"fill": "none", "stroke_width": 1, **look})

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
            "font_size": None if size == SIZE else f"{size:g}",
            "text_anchor": None if anchor == "start" else anchor,
            **look,
        }
        for number, (line, bold) in enumerate(rows):
            if line.strip():
                base = top + step * number + 0.5 * step + 0.36 * size
                weight = 600 if bold else None
                self.add("text", line, x=_short(x), y=_short(base), **look, font_weight=weight)


def _rectangle(left: float, top: float, right: float, bottom: float) -> str:
    return f"M{_short(left)} {_short(top)}H{_short(right)}V{_short(bottom)}H{_short(left)}Z"


def _hatch(left: float, top: float, right: float, bottom: float, shape: str) -> str:
    """Slanted lines over a rectangle: ``/``, or both ways for ``x``."""
    step = 7.0 * math.sqrt(2)
    ends = []
    for k in range(math.ceil((left + top) / step), math.floor((right + bottom) / step) + 1):
        x0, x1 = max(left, k * step - bottom), min(right, k * step - top)
        ends += [(x0, k * step - x0, x1, k * step - x1)] if x1 > x0 else []
    if shape == "x":
        for k in range(math.ceil((left - bottom) / step), math.floor((right - top) / step) + 1):
            x0, x1 = max(left, k * step + top), min(right, k * step + bottom)
            ends += [(x0, x0 - k * step, x1, x1 - k * step)] if x1 > x0 else []
    return "".join(f"M{_short(a)} {_short(b)}L{_short(c)} {_short(d)}" for a, b, c, d in ends)


_SHAPES = {
    "square": "M-.89 -.89H.89V.89H-.89Z",
    "diamond": "M0 -1.3L1.3 0L0 1.3L-1.3 0Z",
    "triangle-up": "M0 -1.15L1.15 .65L-1.15 .65Z",
    "x": "M-1 -1L1 1M1 -1L-1 1",
    "line-ns": "M0 -1.4V1.4",
}
"""Symbols of radius 1; any other is a circle."""


def _symbol(x: float, y: float, size: float, symbol: str) -> str:
    r, shape = size / 2, _SHAPES.get(symbol.removesuffix("-open"))
    if shape is None:
        arc = f"a{_short(r)} {_short(r)} 0 1 0"
        return f"M{_short(x - r)} {_short(y)}{arc} {_short(size)} 0{arc} {_short(-size)} 0Z"
    places = {"H": (x,), "V": (y,), "M": (x, y), "L": (x, y), "Z": ()}
    commands = []
    for command, ends in re.findall(r"([MLHVZ])([^MLHVZ]*)", shape):
        numbers = zip(places[command], map(float, ends.split()), strict=True)
        commands.append(command + " ".join(_short(at + r * end) for at, end in numbers))
    return "".join(commands)


_DASHES = {"dash": "9 5", "dot": "2 3", "dashdot": "9 4 2 4", "longdash": "14 6"}


def _fill(colour: Any, opacity: float = 1.0) -> dict[str, Any]:
    """A fill as attributes that every viewer knows: no ``rgba``."""
    match = re.fullmatch(r"rgba\((\d+), ?(\d+), ?(\d+), ?([\d.]+)\)", str(colour))
    if match:
        colour = "#" + "".join(f"{int(part):02X}" for part in match.groups()[:3])
        opacity *= float(match[4])
    return {"fill": str(colour), "fill_opacity": None if opacity >= 1 else round(opacity, 3)}


def _stroke(colour: Any, width: float) -> dict[str, Any]:
    ink = _fill(colour)
    return {"stroke": ink["fill"], "stroke_opacity": ink["fill_opacity"], "stroke_width": width}


def _line_look(line: Mapping[str, Any], width: float) -> dict[str, Any]:
    """Attributes of a line as a trace or a shape has it; ``width`` where it has none."""
    stroke = _stroke(line.get("color", TEXT), float(line.get("width", width)))
    return {**stroke, "stroke_dasharray": _DASHES.get(line.get("dash", ""))}


# Bars, once for all their kinds.


class _BarLook(NamedTuple):
    """How a bar is painted; bars of one ``paint``, their attributes, are drawn as one path."""

    paint: tuple[tuple[str, Any], ...]
    pattern: str
    hatch: Any
    ink: str
    """Colour of a text in the bar."""


def _bar_looks(trace: Trace, count: int) -> list[_BarLook]:
    columns = (
        each_of(trace, "marker.color", count, "#888888"),
        each_of(trace, "marker.opacity", count, 1.0),
        each_of(trace, "marker.line.color", count),
        each_of(trace, "marker.line.width", count, 0),
        each_of(trace, "marker.pattern.shape", count, ""),
        each_of(trace, "marker.pattern.fgcolor", count, HATCH),
        each_of(trace, "textfont.color", count),
    )
    looks = []
    for colour, opacity, edge, width, pattern, hatch, ink in zip(*columns, strict=True):
        paint = _fill(colour, opacity)
        if width:
            paint |= {"stroke": edge, "stroke_width": float(width)}
        looks.append(_BarLook(tuple(paint.items()), pattern, hatch, ink or _ink(str(colour))))
    return looks


@dataclass
class _Bar:
    """A bar in its axes' units."""

    trace: Trace
    place: Any
    offset: float
    width: float
    start: float
    end: float
    look: _BarLook
    error: tuple[float, float]
    text: str


def _stack(traces: Sequence[Trace], layout: Mapping[str, Any]) -> list[_Bar]:
    placed = [(t, values_of(t.get(letters_of(t)[1]))) for t in traces if is_shown(t, "bar")]
    placed = [(trace, at) for trace, at in placed if any(place is not None for place in at)]
    mode, gap = layout.get("barmode", "group"), float(layout.get("bargap", 0.28))
    numbers = sorted({float(p) for _, at in placed for p in at if is_number(p)})
    between = min((b - a for a, b in itertools.pairwise(numbers)), default=1.0)
    share = 1.0 / max(len(placed), 1) if mode == "group" else 1.0
    reached: dict[tuple[Any, bool], float] = {}
    bars = []
    for number, (trace, places) in enumerate(placed):
        along, _ = letters_of(trace)
        lengths = values_of(trace.get(along))
        count = len(lengths)
        middle = between * (1 - gap) * ((number + 0.5) * share - 0.5) if mode == "group" else 0.0
        columns = (
            each_of(trace, "base", count),
            each_of(trace, "width", count, between * (1 - gap) * share),
            each_of(trace, "offset", count),
            _bar_looks(trace, count),
            _errors(trace, along, count),
            each_of(trace, "text", count, ""),
        )
        for place, length, start, width, offset, *rest in zip(
            places, lengths, *columns, strict=False
        ):
            if place is None or not is_number(length):
                continue
            centre = middle if offset is None else offset + width / 2
            if start is None and mode in ("stack", "relative"):
                start = reached.get((place, length < 0), 0.0)
                reached[place, length < 0] = start + length
            start = start or 0.0
            bars.append(_Bar(trace, place, centre, width, start, start + length, *rest))
    return bars


class _Image:
    def __init__(self, spec: Mapping[str, Any]) -> None:
        self.layout: Mapping[str, Any] = spec.get("layout", {})
        self.traces: list[Trace] = spec.get("data", [])
        self.canvas = Canvas()
        self.height = float(self.layout.get("height") or 450)
        self.top = float(part_of(self.layout, "margin.t") or 48)
        self.axes: dict[str, Axis] = {}
        self.plots: dict[tuple[str, str], list[Trace]] = {}
        for trace in self.traces:
            if trace["type"] != "icicle":
                key = str(trace.get("xaxis", "x")), str(trace.get("yaxis", "y"))
                self.plots.setdefault(key, []).append(trace)
        self.bars = {key: _stack(traces, self.layout) for key, traces in self.plots.items()}

    def svg(self) -> str:
        self._learn()
        self._place()
        if title := part_of(self.layout, "title.text"):
            self.canvas.text(4, 22, f"<b>{title}</b>", size=15)
        for (x, y), traces in self.plots.items():
            across, up = self._axis(x), self._axis(y)
            self._grid(across, up)
            self._bars(across, up, self.bars[x, y])
            for trace in traces:
                if is_shown(trace, "scatter"):
                    self._points(trace, across, up)
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

    def _axis(self, name: str) -> Axis:
        """``x``, ``y2``: the axis, made when it is first asked for."""
        if name not in self.axes:
            given = self.layout.get(f"{name[0]}axis{name[1:]}") or {}
            self.axes[name] = Axis(name, given)
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
            for trace, axis in itertools.product(traces, (across, up)):
                if trace["type"] == "scatter":
                    held = values_of(trace.get(axis.name[0]))
                    axis.take(held)
                    errors = _errors(trace, axis.name[0], len(held))
                    for value, (down, rise) in zip(held, errors, strict=True):
                        if is_number(value):
                            axis.take((value - down, value + rise))
        for axis in self.axes.values():
            axis.settle()
        for axis in list(self.axes.values()):
            if axis.given.get("matches"):
                other = self._axis(str(axis.given["matches"]))
                axis.low = other.low = min(axis.low, other.low)
                axis.high = other.high = max(axis.high, other.high)

    def _place(self) -> None:
        """Room for labels around the plots, and each axis its stretch of pixels."""
        self.entries = self._legend_entries()
        left, below = 16.0, 8.0
        for axis in self.axes.values():
            if axis.hidden:
                continue
            wide, high = _largest(text for _, text in axis.ticks(600))
            if axis.is_x:
                below = max(below, high + 8 + (_size(axis.title)[1] + 6 if axis.title else 0))
            elif axis.domain[0] >= 0:
                left = max(left, wide + 14 + (24 if axis.title else 0))
        self.left, self.right = min(left, 0.45 * WIDTH), WIDTH - 24.0
        legend = 20.0 * (self.entries[-1][1] + 1) + 6 if self.entries else 0.0
        self.legend_top = self.height - legend
        self.bottom = max(self.legend_top - below - 6, self.top + 40)
        for axis in self.axes.values():
            start, end = (self.left, self.right) if axis.is_x else (self.bottom, self.top)
            axis.start, axis.end = (start + share * (end - start) for share in axis.domain)

    def _grid(self, across: Axis, up: Axis) -> None:
        for axis, other in ((across, up), (up, across)):
            if not axis.hidden:
                self._axis_marks(axis, *sorted((other.start, other.end)))

    def _axis_marks(self, axis: Axis, low: float, high: float) -> None:
        """Grid, labels, title and zero of an axis, whose lines go from ``low`` to ``high``."""
        first, last = sorted((axis.start, axis.end))

        def line(place: float, colour: str) -> None:
            self.canvas.line([axis.point(place, end) for end in (low, high)], stroke=colour)

        for value, text in axis.ticks(last - first):
            place = axis.at(value)
            if not first - 0.5 <= place <= last + 0.5:
                continue
            if axis.given.get("showgrid") is not False and not axis.is_category:
                line(place, GRID)
            if not axis.is_x:
                self.canvas.text(low - 8, place, text, anchor="end")
            elif self._is_lowest(axis):
                self.canvas.text(place, high + 5, text, anchor="middle", vertical=0)
        middle = (first + last) / 2
        if axis.title and axis.is_x:
            _, tall = _largest(text for _, text in axis.ticks(600))
            self.canvas.text(middle, high + 10 + tall, axis.title, anchor="middle", vertical=0)
        elif axis.title:
            turn = f"rotate(-90 14 {_short(middle)})"
            self.canvas.text(14.0, middle, axis.title, anchor="middle", transform=turn)
        inside = axis.low < 0 < axis.high if axis.is_x else axis.low <= 0 <= axis.high
        plain = not axis.is_log and not axis.is_category
        if inside and plain and axis.given.get("zeroline") is not False:
            line(axis.at(0.0), axis.given.get("zerolinecolor", GRID))

    def _is_lowest(self, axis: Axis) -> bool:
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

    def _bars(self, across: Axis, up: Axis, bars: Sequence[_Bar]) -> None:
        boxes = [self._bar_box(bar, *_along(bar.trace, across, up)) for bar in bars]
        filled: dict[tuple[tuple[str, Any], ...], list[Rectangle]] = {}
        hatched: dict[str, list[str]] = {}
        for bar, box in zip(bars, boxes, strict=True):
            same = filled.setdefault(bar.look.paint, [])
            # one that begins where one in its row ends, or less than half a pixel later, extends it
            in_row = bool(same) and same[-1][1::2] == box[1::2]
            if in_row and bar.trace.get("base") is not None and abs(box[0] - same[-1][2]) < 0.5:
                same[-1] = (*same[-1][:2], max(same[-1][2], box[2]), same[-1][3])
            else:
                same.append(box)
            if bar.look.pattern and box[2] - box[0] > 3:
                hatched.setdefault(bar.look.hatch, []).append(_hatch(*box, bar.look.pattern))
        for paint, same in filled.items():
            self.canvas.path((_rectangle(*box) for box in same), **dict(paint))
        for ink, commands in hatched.items():
            self.canvas.path(commands, fill="none", **_stroke(ink, 1.5))
        for bar, box in zip(bars, boxes, strict=True):
            values, _ = _along(bar.trace, across, up)
            middle = (box[1] + box[3]) / 2 if values.is_x else (box[0] + box[2]) / 2
            low, high = bar.error
            error = (min(low, bar.end) if bar.end > 0 else low, high)  # no bar is shorter than 0
            self._whisker(bar.trace, values, bar.end, middle, error)
            if bar.text:
                self._bar_text(bar, box, values.is_x)

    def _bar_box(self, bar: _Bar, values: Axis, places: Axis) -> Rectangle:
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
                self.canvas.text(middle, centre, bar.text, anchor="middle", fill=bar.look.ink)
        elif flat and bar.end >= bar.start:
            self.canvas.text(right + 5, centre, bar.text)
        elif flat:
            self.canvas.text(left - 5, centre, bar.text, anchor="end")
        else:
            self.canvas.text(middle, top - 4, bar.text, anchor="middle", vertical=1)

    def _whisker(
        self, trace: Trace, axis: Axis, value: float, aside: float, error: tuple[float, float]
    ) -> None:
        """An error bar of a trace along an axis; nothing where both its lengths are 0."""
        low, high = error
        if not low and not high:
            return
        given = trace[f"error_{axis.name[0]}"]
        ends = [axis.at(value - low) if not axis.is_log or value > low else axis.start]
        ends.append(axis.at(value + high))
        cap = float(given.get("width", 4))
        look = _line_look({"color": TEXT, **given, "width": given.get("thickness", 2)}, 2)
        self.canvas.line([axis.point(end, aside) for end in ends], **look)
        for end in ends:
            self.canvas.line([axis.point(end, aside - cap), axis.point(end, aside + cap)], **look)

    def _points(self, trace: Trace, across: Axis, up: Axis) -> None:
        xs, ys = values_of(trace.get("x")), values_of(trace.get("y"))
        points = [
            (across.at(x), up.at(y)) if is_drawable(x) and is_drawable(y) else None
            for x, y in zip(xs, ys, strict=False)
        ]
        mode, count = trace.get("mode", "lines"), len(points)
        if "lines" in mode:
            self._line(trace, [point for point in points if point], up.at(0.0))
        for axis, values in ((across, xs), (up, ys)):
            errors = _errors(trace, axis.name[0], count)
            for value, point, error in zip(values, points, errors, strict=False):
                if point:
                    self._whisker(trace, axis, value, point[1 if axis.is_x else 0], error)
        if "markers" in mode:
            self._markers(trace, points)
        if "text" in mode:
            texts = each_of(trace, "text", count, "")
            places = each_of(trace, "textposition", count, "top center")
            sizes = each_of(trace, "marker.size", count, 6)
            for point, text, place, size in zip(points, texts, places, sizes, strict=True):
                if point and text:
                    self._point_text(point, text, str(place), float(size or 6) / 2 + 4)

    def _line(self, trace: Trace, points: Sequence[Point], floor: float) -> None:
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

    def _markers(self, trace: Trace, points: Sequence[Point | None]) -> None:
        count = len(points)
        columns = (
            each_of(trace, "marker.size", count, 6),
            each_of(trace, "marker.color", count, TEXT),
            each_of(trace, "marker.symbol", count, "circle"),
        )
        has_edge = part_of(trace, "marker.line.color") is not None
        width = float(each_of(trace, "marker.line.width", 1, 0)[0] or 0)
        joined: dict[tuple[Any, bool], list[str]] = {}
        for point, size, colour, symbol in zip(points, *columns, strict=True):
            if point:
                hollow = symbol.endswith("-open") or symbol in ("x", "line-ns")
                joined.setdefault((colour, hollow), []).append(_symbol(*point, float(size), symbol))
        for (colour, hollow), commands in joined.items():
            if not isinstance(colour, str):
                continue
            if hollow:
                paint = {"fill": "none", "stroke": colour, "stroke_width": max(width, 2.0)}
            else:
                paint = _fill(colour, float(part_of(trace, "marker.opacity") or 1))
                paint |= {"stroke": "#ffffff", "stroke_width": width} if has_edge and width else {}
            self.canvas.path(commands, **paint)

    def _point_text(self, point: Point, text: str, place: str, far: float) -> None:
        x, y = point
        side = -1 if "left" in place else 1 if "right" in place else 0
        rise = -1 if "top" in place else 1 if "bottom" in place else 0
        x += side * (far if not rise else 2)
        anchor = {-1: "end", 0: "middle", 1: "start"}[side]
        self.canvas.text(x, y + rise * far, text, anchor=anchor, vertical=(1 - rise) / 2)

    # Boxes of a call tree.

    def _icicle(self, trace: Trace) -> None:
        names, above = values_of(trace["ids"]), values_of(trace["parents"])
        count, times = len(names), list(map(float, values_of(trace["values"])))
        left, right = (16 + end * (WIDTH - 32) for end in part_of(trace, "domain.x", (0, 1)))
        whole = sum(t for t, parent in zip(times, above, strict=True) if not parent) or 1.0
        scale, deepest = (right - left) / whole, int(trace.get("maxdepth") or 7)
        # the widest callee first, as plotly does; a caller is at least as wide and comes before it
        free, level = {"": left}, {"": -1}
        boxes: dict[int, tuple[float, float, int]] = {}
        for row in sorted(range(count), key=lambda row: -times[row]):
            name, parent = names[row], above[row]
            if level.get(parent, deepest) < deepest - 1:
                level[name], free[name] = level[parent] + 1, free[parent]
                free[parent] += scale * times[row]
                boxes[row] = free[name], free[parent], level[name]
        tall = (self.height - self.top - 16) / (max(level.values()) + 1 or 1)
        filled: dict[str, list[str]] = {}
        colours = each_of(trace, "marker.colors", count)
        for row, (low, high, deep) in boxes.items():
            box = _rectangle(low, self.top + tall * deep, high, self.top + tall * (deep + 1))
            if high - low >= 0.3:
                filled.setdefault(colours[row], []).append(box)
        for colour, commands in filled.items():
            self.canvas.path(commands, **_fill(colour), stroke="#808080", stroke_width=0.7)
        texts = each_of(trace, "text", count, "")
        inks = each_of(trace, "textfont.color", count, TEXT)
        for row, (low, high, deep) in boxes.items():
            for text in (f"{texts[row]}<br>{times[row] / whole:.0%}", texts[row]):
                width, height = _size(text, 11.5)
                if width < high - low - 4 and height < tall - 2:
                    at = ((low + high) / 2, self.top + tall * (deep + 0.5))
                    self.canvas.text(*at, text, anchor="middle", size=11.5, fill=inks[row])
                    break

    # What stands over and beside the plots.

    def _where(self, ref: str | None, letter: str, value: Any, *, exponent: bool = False) -> float:
        """A place on an axis, its domain or the whole drawing, in pixels."""
        ref = ref or letter
        if ref == "paper":
            low, high = (self.left, self.right) if letter == "x" else (self.bottom, self.top)
            return low + float(value) * (high - low)
        axis = self._axis(ref.removesuffix(" domain"))
        if ref.endswith(" domain"):
            return axis.start + float(value) * (axis.end - axis.start)
        return axis.at(value, exponent=exponent)

    def _shapes(self) -> None:
        for shape in self.layout.get("shapes") or []:
            x0, y0, x1, y1 = (
                self._where(shape.get(f"{letter}ref"), letter, shape[f"{letter}{end}"])
                for end in (0, 1)
                for letter in "xy"
            )
            self.canvas.line([(x0, y0), (x1, y1)], **_line_look(shape.get("line") or {}, 1))

    def _annotations(self) -> None:
        anchors = {"left": "start", "right": "end", "center": "middle"}
        for note in self.layout.get("annotations") or []:
            # plotly wants the exponent here
            x, y = (
                self._where(note.get(f"{letter}ref"), letter, note.get(letter), exponent=True)
                for letter in "xy"
            )
            self.canvas.text(
                x + float(note.get("xshift") or 0),
                y - float(note.get("yshift") or 0),
                note.get("text", ""),
                anchor=anchors.get(note.get("xanchor", "center"), "middle"),
                vertical={"top": 0.0, "bottom": 1.0}.get(note.get("yanchor", ""), 0.5),
                size=float(part_of(note, "font.size") or SIZE),
                fill=part_of(note, "font.color"),
            )

    def _legend_entries(self) -> list[tuple[float, int, str, Trace | None]]:
        """Left edge, row, name and trace of each entry; a heading has no trace."""
        if not self.layout.get("showlegend"):
            return []
        shown = [
            t
            for t in self.traces
            if t.get("showlegend") is not False and t.get("name") and is_shown(t, t["type"])
        ]
        shown.sort(key=lambda t: float(t.get("legendrank", 1000)))
        if "reversed" in part_of(self.layout, "legend.traceorder", ""):
            shown.reverse()
        named: list[tuple[str, Trace | None]] = []
        for trace in shown:
            heading = part_of(trace, "legendgrouptitle.text")
            if heading and (f"<b>{heading}</b>", None) not in named:
                named.append((f"<b>{heading}</b>", None))
            named.append((str(trace["name"]), trace))
        entries = []
        x, row = 16.0, 0
        for name, entry in named:
            wide = _size(name)[0] + (38 if entry is not None else 14)
            if x > 16 and x + wide > WIDTH - 16:
                x, row = 16.0, row + 1
            entries.append((x, row, name, entry))
            x += wide + 6
        return entries

    def _legend(self) -> None:
        for x, row, name, trace in self.entries:
            y = self.legend_top + 20 * row + 10
            if trace is None:
                self.canvas.text(x, y, name)
                continue
            if trace["type"] == "bar":
                box = (x, y - 6, x + 20, y + 6)
                (look,) = _bar_looks(trace, 1)
                self.canvas.path([_rectangle(*box)], **dict(look.paint))
                if look.pattern:
                    hatch = [_hatch(*box, look.pattern)]
                    self.canvas.path(hatch, fill="none", **_stroke(look.hatch, 1.5))
            else:
                self._legend_points(trace, x, y)
            self.canvas.text(x + 30, y, name)

    def _legend_points(self, trace: Trace, x: float, y: float) -> None:
        mode = trace.get("mode", "lines")
        if "lines" in mode:
            line = _line_look(trace.get("line") or {}, 2)
            self.canvas.line([(x, y), (x + 24, y)], **line)
        if "markers" in mode:
            first = {key: each_of(trace, f"marker.{key}", 1)[0] for key in ("color", "symbol")}
            first["size"] = min(float(each_of(trace, "marker.size", 1, 8)[0]), 11.0)
            self._markers({"marker": {**(trace.get("marker") or {}), **first}}, [(x + 12, y)])


def _along(trace: Trace, across: Axis, up: Axis) -> tuple[Axis, Axis]:
    """The axes of :func:`~dlrm_workbook.show.axes.letters_of`."""
    return (across, up) if letters_of(trace) == ("x", "y") else (up, across)


def _thinned(points: list[Point]) -> list[Point]:
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


def _errors(trace: Trace, letter: str, count: int) -> list[tuple[float, float]]:
    """How far each error bar along an axis reaches down and up."""
    up = f"error_{letter}.array"
    down = f"error_{letter}.arrayminus"
    down = up if part_of(trace, down) is None else down
    lengths = (each_of(trace, path, count, 0.0) for path in (down, up))
    return [(float(low or 0), float(high or 0)) for low, high in zip(*lengths, strict=True)]


def _ink(colour: str) -> str:
    return text_on(colour) if re.fullmatch(r"#[0-9A-Fa-f]{6}", colour) else TEXT


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb`` (WCAG relative luminance)."""
    linear = []
    for start in (1, 3, 5):
        value = int(colour[start : start + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # both contrasts are equal at sqrt(1.05 * 0.05) - 0.05
    return "#000000" if luminance > 0.179 else "#ffffff"


def image(spec: Mapping[str, Any]) -> str:
    """The figure as SVG, :data:`WIDTH` pixels wide, with a white background.

    Args:
        spec: a figure's JSON with bars, points, lines and icicles, also in panels. Traces of
            other kinds are left out.
    """
    return _Image(spec).svg()
