"""The model as a drawing: figure 1 of the DLRM paper (arXiv:1906.00091), from the parameters.

An SVG image of boxes and lines: what goes in at the bottom, the click probability on top. Every
text is escaped; there are no scripts, links or fonts in it.
"""

from __future__ import annotations

from html import escape
from typing import Any

import pandas as pd

from dlrm_workbook.ground.units import digits
from dlrm_workbook.show.static import Canvas
from dlrm_workbook.show.theme import COLOURS, rows_of, short_name

WIDTH, MARGIN, BOX, GAP = 860, 16, 38, 12
"""Pixels: of the image, around it, a box's height, and between two boxes."""

INPUT, INK = "#8A8F96", "#22262B"

LETTER = 6.3
"""Pixels that a letter of 12 px takes at most, on average."""


def count_text(value: float, unit: str = "") -> str:
    """A count with a prefix: ``9.02 G``; ``unit`` follows."""
    for size, prefix in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= size:
            return f"{digits(value / size)}{prefix}{unit}"
    return f"{value:,.0f}{' ' if unit else ''}{unit}"


class Drawing:
    """An SVG image with the words that say the same, one line per box."""

    def __init__(self, svg: str, words: str) -> None:
        self.svg, self.words = svg, words

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.words}


def model_drawing(boxes: pd.DataFrame, title: str) -> Drawing:
    """The model, its shapes, weights and arithmetic.

    Args:
        boxes: ``component``, ``name``, ``shape``, ``weights``, ``flops`` (of one iteration; NaN
            where there are none), in the order of :func:`dlrm_workbook.analysis.training.boxes`.
        title: anybody's words.
    """
    columns = {name: rows_of(boxes[boxes["component"] == name]) for name in boxes["component"]}
    left = [columns["data"][0], *columns["bottom_mlp"]]
    right = [columns["data"][1], *columns["embedding"]]
    top = [*columns["interaction"], *columns["top_mlp"]]
    step, half = BOX + GAP, (WIDTH - 2 * MARGIN - 2 * GAP) // 2
    height = 2 * MARGIN + 24 + step * (len(top) + max(len(left), len(right)))
    floor = height - MARGIN
    canvas = Canvas()
    canvas.add("rect", width=WIDTH, height=height, fill="#FFFFFF")
    _text(canvas, MARGIN, MARGIN + 12, short_name(title, 100), font_size=14, font_weight="bold")
    ceiling = floor - step * max(len(left), len(right))
    middle = MARGIN + half // 2
    for level, box in enumerate(left):
        y = floor - BOX - step * level
        _box(canvas, MARGIN, y, half, box)
        _line(canvas, middle, y, middle, ceiling if box is left[-1] else y - GAP)
    x, end = WIDTH - MARGIN - half, WIDTH - MARGIN
    _box(canvas, x, floor - BOX, half, right[0])
    # tables do not follow each other: indices reach each on its left, vectors leave on its right
    for level, box in enumerate(right[1:], 1):
        y = floor - BOX - step * level
        _box(canvas, x + 2 * GAP, y, half - 4 * GAP, box)
        across = y + BOX // 2
        _line(canvas, x + GAP, across, x + 2 * GAP, across)
        _line(canvas, end - 2 * GAP, across, end - GAP, across)
    highest, lowest = floor - BOX // 2 - step * (len(right) - 1), floor - BOX // 2 - step
    _line(canvas, x + GAP, floor - BOX, x + GAP, highest)
    _line(canvas, end - GAP, lowest, end - GAP, ceiling)
    for level, box in enumerate(top):
        width = WIDTH - 2 * MARGIN if level == 0 else half
        y = ceiling - BOX - step * level
        _box(canvas, (WIDTH - width) // 2, y, width, box)
        if level + 1 < len(top):
            _line(canvas, WIDTH // 2, y, WIDTH // 2, y - GAP)
    words = "\n".join(f"{box.name}: {_said(box)}" for box in (*left, *right, *top))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">'
        f"<title>{escape(title)}</title>{''.join(canvas.elements)}</svg>"
    )
    return Drawing(svg, f"{title}\n{words}")


def _said(box: Any) -> str:
    said = [box.shape]
    if box.weights > 0:
        said.append(f"{count_text(box.weights)} weights")
    if box.flops > 0:
        said.append(count_text(box.flops, "FLOP"))
    return ", ".join(filter(None, said))


def _box(canvas: Canvas, x: int, y: int, width: int, box: Any) -> None:
    colour = INPUT if box.component == "data" else COLOURS[box.component]
    look: dict[str, Any] = {"rx": 4, "fill": colour, "fill_opacity": 0.16, "stroke": colour}
    canvas.add("rect", x=x, y=y, width=width, height=BOX, **look)
    room, middle = int((width - 12) / LETTER), {"font_size": 12, "text_anchor": "middle"}
    name, said = short_name(box.name, room), short_name(_said(box), room)
    _text(canvas, x + width // 2, y + 15, name, font_weight="bold", **middle)
    _text(canvas, x + width // 2, y + 30, said, **middle)


def _text(canvas: Canvas, x: int, y: int, text: str, **look: Any) -> None:
    canvas.add("text", text, x=x, y=y, fill=INK, **look)


def _line(canvas: Canvas, x1: int, y1: int, x2: int, y2: int) -> None:
    canvas.add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=INK)
