"""The look of every figure: one colour a component, one pattern a phase.

Backgrounds are transparent and text is a grey that reads on white and on black, so a
figure fits JupyterLab's themes; the HTML page puts its own text colour in its place.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dlrm_core.parts import COMPONENTS, PHASES, parse_span, part_label

FIGURE_TYPE = "application/vnd.plotly.v1+json"
DATA_RENDERER = "plotly_mimetype"
"""What plotly calls storing a figure as data in the notebook."""

COLOURS = {
    "data": "#E0A809",
    "transfer": "#B5A34E",
    "bottom_mlp": "#4BBAFF",
    "embedding": "#0C9E6D",
    "interaction": "#AB6C97",
    "top_mlp": "#065E9F",
    "loss": "#7F412D",
    "optimizer": "#A63F06",
    "communication": "#6743CC",
    "other": "#BCBCBB",
}
"""Component to colour. Any two stay apart (CIE76 distance 20 or more) for readers with
protanopia, deuteranopia or tritanopia (simulated after Machado et al. 2009)."""

PATTERNS = {"forward": "", "backward": "/", "update": "x"}
"""Phase to the pattern over the component's colour."""

COMPUTE = "#6F8FAF"
"""All that is not data, where the parts are not told apart."""

INK = "#767B82"
"""Contrast 4.2 or more to white and to JupyterLab's dark background."""

SLOWER, SAME, FASTER = "#C8402F", "#A9ADB3", "#2F74B5"
"""Ends and middle of the scale of differences; apart for readers with colour deficiencies."""

PREDICTED = "#8D5FC0"
"""What was foretold, beside what was measured."""

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x")
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
"""Lines of one figure take them in turn, so that they are apart without colours."""

ROW = 26
"""Height of a horizontal bar and its gap, in pixels."""

GRID = "rgba(128, 134, 142, 0.28)"

_AXIS = {
    "gridcolor": GRID,
    "linecolor": GRID,
    "zerolinecolor": GRID,
    "automargin": True,
    "title": {"standoff": 10, "font": {"size": 13}},
    "separatethousands": True,
    "exponentformat": "none",
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"size": 13, "color": INK},
        "title": {"font": {"size": 15}, "x": 0, "xanchor": "left", "pad": {"l": 2}},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 56, "r": 24, "t": 48, "b": 48},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "bargap": 0.28,
        "colorway": list(COLOURS.values()),
        "hoverlabel": {"align": "left", "namelength": -1},
        "legend": {"traceorder": "normal"},
    }
)


class Figure(go.Figure):
    """A figure that a notebook stores as data, without what other renderers need.

    plotly's own way to say so imports nbformat and its JSON schemas, which takes longer
    than drawing all figures of a page.
    """

    def _ipython_display_(self) -> None:
        if os.environ.get("PLOTLY_RENDERER") != DATA_RENDERER:
            super()._ipython_display_()
            return
        from IPython.display import display

        display({FIGURE_TYPE: json.loads(self.to_json())}, raw=True)


def figure(title: str, height: int, *, legend: bool = False) -> Figure:
    """An empty figure in the common look; a legend goes below the plot."""
    result = Figure()
    result.update_layout(template=TEMPLATE, title={"text": title}, height=height, showlegend=legend)
    if legend:
        result.update_layout(
            legend={
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "y": 0,
                "yref": "container",
                "yanchor": "bottom",
            }
        )
    return result


def marker(component: str, phase: str = "") -> dict[str, Any]:
    """Marker of a part's bars: the component's colour, the phase's pattern."""
    look = markers([(component, phase)])
    look["color"] = look["color"][0]
    look["pattern"]["shape"] = look["pattern"]["shape"][0]
    return look


def markers(parts: Sequence[tuple[str, str]], pale: Sequence[bool] = ()) -> dict[str, Any]:
    """Markers of bars of several parts, (component, phase) each; pale where so asked."""
    return {
        "color": [COLOURS.get(component, COLOURS["other"]) for component, _ in parts],
        "opacity": [0.45 if is_pale else 1.0 for is_pale in pale] if any(pale) else 1.0,
        "line": {"width": 0},
        "pattern": {
            "shape": [PATTERNS.get(phase, "") for _, phase in parts],
            "fillmode": "overlay",
            "fgcolor": "rgba(255, 255, 255, 0.75)",
            "size": 7,
            "solidity": 0.22,
        },
    }


def rows_of(table: pd.DataFrame) -> list[Any]:
    """The rows as named tuples."""
    return list(table.itertuples(index=False))


def difference_colour(share: float) -> str:
    """Between :data:`FASTER` (−1), :data:`SAME` (0) and :data:`SLOWER` (1); beyond them, those."""
    end, mixed = SLOWER if share > 0 else FASTER, min(abs(share), 1.0)
    parts = (
        round(int(SAME[at : at + 2], 16) * (1 - mixed) + int(end[at : at + 2], 16) * mixed)
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02X}" for part in parts)


def text_on(colour: str) -> str:
    """Black or white, whichever reads better on ``#rrggbb`` (WCAG relative luminance)."""
    linear = []
    for start in (1, 3, 5):
        value = int(colour[start : start + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # both contrasts are equal at sqrt(1.05 * 0.05) - 0.05
    return "#000000" if luminance > 0.179 else "#ffffff"


def step_order(component: str, phase: str = "") -> tuple[int, int]:
    """Sort key: where in a step a part comes."""
    row = COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS)
    return row, PHASES.index(phase) if phase in PHASES else len(PHASES)


def add_phase_key(target: go.Figure, phases: list[str]) -> None:
    """Legend entries that say which pattern is which phase."""
    for phase in sorted(set(phases) & set(PHASES), key=PHASES.index):
        look = marker("other", phase)
        look["color"] = INK
        target.add_trace(
            go.Bar(x=[None], y=[None], name=phase, marker=look, hoverinfo="skip", orientation="h")
        )


def short_name(name: str, limit: int) -> str:
    """A span, operator or kernel in a few characters: ``top MLP backward``, ``addmm``."""
    part = parse_span(name) if name.startswith("dlrm::") else None
    if part is not None:
        return part_label(*part)
    text = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("void ")
    text = text.split("(", 1)[0] if not text.startswith("(") else text
    text = text.split("<", 1)[0] if not text.startswith("<") else text
    text = text.rsplit("::", 1)[-1] or name
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plotly_js() -> str:
    """plotly.js as the text of a script element."""
    # inside a script element only this could end it early
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def escaped(text: str) -> str:
    return text.replace("<", "&lt;")


def wrapped(text: str, width: int = 80) -> str:
    """Long names broken into lines for a hover label."""
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    shown = pieces[:4] + (["…"] if len(pieces) > 4 else [])
    return "<br>".join(shown)


WATERFALL: dict[str, Any] = {
    "textposition": "outside",
    "cliponaxis": False,
    "connector": {"line": {"color": GRID, "width": 1}},
    "increasing": {"marker": {"color": SLOWER}},
    "decreasing": {"marker": {"color": FASTER}},
    "totals": {"marker": {"color": INK}},
    "hovertemplate": "%{text}<extra></extra>",
}
"""The look of steps from one time to another."""
