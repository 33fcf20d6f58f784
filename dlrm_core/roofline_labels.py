"""Where a part's name fits beside its marker in the roofline: boxes in pixels, no overlaps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from dlrm_core.figure_theme import (
    part_label,
)

LABELLED_SHARE = 0.02
"""Parts that hold less of the step have no label in the chart, only hover text."""


HEIGHT = 560
"""Pixels."""


WIDTH = 900
"""What a notebook gives a figure, in pixels; for placing labels only."""


LETTER = 6.6
"""Mean width of a letter of a label, in pixels."""


Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels from the plot's lower left corner."""


@dataclass(frozen=True)
class Frame:
    """What the axes show, in log10, and where a point is in pixels."""

    left: float
    right: float
    bottom: float
    top: float

    @classmethod
    def around(
        cls, points: pd.DataFrame, roofs: Mapping[str, float], slopes: Mapping[str, float]
    ) -> Frame:
        x = list(points["intensity_flop_per_byte"]) or [1.0]
        if roofs and slopes:
            # where the slowest slope meets the highest roof
            x.append(max(roofs.values()) / min(slopes.values()))
        y = [*points["gflops"], *roofs.values()] or [1.0]
        left, right = math.log10(min(x)) - 0.35, math.log10(max(x)) + 0.5
        return cls(left, right, math.log10(min(y)) - 0.35, math.log10(max(y)) + 0.35)

    @property
    def width(self) -> float:
        """Of the plot, in pixels."""
        return WIDTH - 230

    def pixels(self, x: float, y: float) -> tuple[float, float]:
        across = (x - self.left) / (self.right - self.left) * self.width
        up = (y - self.bottom) / (self.top - self.bottom) * (HEIGHT - 110)
        return across, up


_PLACES = {
    "middle right": (1.0, 0.0),
    "middle left": (-1.0, 0.0),
    "bottom center": (0.0, -1.0),
    "top center": (0.0, 1.0),
    "bottom right": (1.0, -1.0),
    "bottom left": (-1.0, -1.0),
    "top right": (1.0, 1.0),
    "top left": (-1.0, 1.0),
}


def label_place(row: Any, share: float, total_ms: float, frame: Frame, taken: list[Box]) -> str:
    """Where a point's label is free of other labels and points; '' for none."""
    if share < LABELLED_SHARE:
        return ""
    own = marker_box(row, total_ms, frame)
    centre = ((own[0] + own[2]) / 2, (own[1] + own[3]) / 2)
    wide = LETTER * len(part_label(row.component, row.phase))
    for place, (across, up) in _PLACES.items():
        box = label_box(centre, own, wide, across, up)
        # a marker on this one cannot be avoided
        free = not any(overlap(box, other) for other in taken if not within(own, other))
        if box[2] < frame.width and free:
            taken.append(box)
            return place
    return ""


def within(a: Box, b: Box) -> bool:
    """Whether the middle of either lies in the other."""
    boxes = ((a, b), (b, a))
    return any(
        outer[0] <= (inner[0] + inner[2]) / 2 <= outer[2]
        and outer[1] <= (inner[1] + inner[3]) / 2 <= outer[3]
        for outer, inner in boxes
    )


def marker_radius(time_ms: float, total_ms: float) -> float:
    """Of a marker, in pixels: its area is as its share of the step."""
    share = max(time_ms / total_ms, 0.0) if total_ms > 0 else 0.0
    return max(4.5, 31 * math.sqrt(share))


def marker_box(row: Any, total_ms: float, frame: Frame) -> Box:
    x, y = frame.pixels(math.log10(row.intensity_flop_per_byte), math.log10(row.gflops))
    radius = marker_radius(row.time_ms, total_ms)
    return x - radius, y - radius, x + radius, y + radius


def label_box(centre: tuple[float, float], own: Box, wide: float, across: float, up: float) -> Box:
    x, y = centre
    radius = (own[2] - own[0]) / 2
    middle = x + across * (radius + 4 + wide / 2), y + up * (radius + 11)
    return middle[0] - wide / 2, middle[1] - 8, middle[0] + wide / 2, middle[1] + 8


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
