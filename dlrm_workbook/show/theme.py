"""The look of every figure: one colour a component, one pattern a phase.

Backgrounds are transparent and text is a grey that reads on white and on black, so a
figure fits JupyterLab's themes; the HTML page puts its own text colour in its place.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import textwrap
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import write_text
from dlrm_core.parts import COMPONENTS, PHASES, parse_span, part_label
from dlrm_workbook.analysis.findings.where import FRAME
from dlrm_workbook.ground.marks import GROUP_PREFIX
from dlrm_workbook.show.static import WIDTH, image, text_on
from dlrm_workbook.show.words import description

FIGURE_TYPE = "application/vnd.plotly.v1+json"
DATA_RENDERER = "plotly_mimetype"
"""What plotly calls storing a figure as data in the notebook."""

COLOURS = {
    "data": "#CC8307",
    "transfer": "#9B9249",
    "bottom_mlp": "#868AE6",
    "embedding": "#1BA675",
    "interaction": "#BA7AA5",
    "top_mlp": "#2467A6",
    "loss": "#92553E",
    "optimizer": "#AA4508",
    "communication": "#8355E5",
    "other": "#636565",
}
"""Component to colour. Any two stay apart (CIE76 distance 20 or more) for readers with
protanopia, deuteranopia or tritanopia (simulated after Machado et al. 2009)."""

MODULE_COLOURS = (
    *("#2467A6", "#1BA675", "#BA7AA5", "#868AE6"),
    *("#3D9DB8", "#B0B436", "#7A3E9D", "#D9748F"),
)
"""Parts that modules of another program name take these in turn, in the order in which a
page first draws them."""

_given: dict[str, str] = {}


def colour_of(component: str) -> str:
    """The colour of a part: one of :data:`COLOURS`, or one that it keeps in this process, which
    no other part has as long as there are enough."""
    if component not in _given:
        used = Counter(_given.values())
        least_used = min(MODULE_COLOURS, key=lambda colour: used[colour])
        _given[component] = COLOURS.get(component, least_used)
    return _given[component]


def components_of(held: Iterable[str], *apart: str) -> list[str]:
    """The parts that figures draw, in the order of a step: ours, then those of a table that
    modules name; ``apart`` is what it holds beside parts."""
    drawn = [name for name in dict.fromkeys(held) if name not in apart]
    own = [name for name in COMPONENTS if name in drawn]
    return own + [name for name in drawn if name not in own]


PATTERNS = {"forward": "", "backward": "/", "update": "x"}
"""Phase to the pattern over the component's colour."""

COMPUTE_COLOUR = "#6F8FAF"
"""All that is not data, where the parts are not told apart."""

INK = "#767B82"
"""Contrast 4.2 or more to white and to JupyterLab's dark background."""

SLOWER, SAME, FASTER = "#C8402F", "#8A8F96", "#2F74B5"
"""Ends and middle of the scale of differences; apart for readers with colour deficiencies."""

PREDICTED_COLOUR = "#8D5FC0"
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
        # plotly.js would write dark grey on the trace's colour, at a contrast of about 3
        "hoverlabel": {
            "align": "left",
            "namelength": -1,
            "bgcolor": "#ffffff",
            "bordercolor": INK,
            "font": {"color": "#1f2328"},
        },
        # and light grey buttons on grey, since the paper has no colour of its own
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": INK, "activecolor": FASTER},
        "legend": {"traceorder": "normal"},
    }
)

CONFIG: dict[str, Any] = {
    "displaylogo": False,
    "plotlyServerURL": "",
    "showSendToCloud": False,
    "modeBarButtonsToRemove": ["sendChartToCloud", "select2d", "lasso2d"],
}
"""How plotly.js shows a figure: without a button that sends its data anywhere."""


class Figure(go.Figure):
    """A figure that a notebook stores as data, as an image and in words.

    plotly's own way to say so imports nbformat and its JSON schemas, which takes longer
    than drawing all figures of a page.
    """

    def bundle(self) -> dict[str, Any]:
        """What a notebook stores, by MIME type: plotly's JSON with the description of its numbers
        in ``layout.meta``, an SVG image for viewers without plotly.js, and the description."""
        spec = _compact(json.loads(self.to_json()))
        words = description(spec)
        spec["layout"]["meta"] = {**(spec["layout"].get("meta") or {}), "description": words}
        spec["config"] = CONFIG
        return {FIGURE_TYPE: spec, "image/svg+xml": image(spec), "text/plain": words}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it as the file's ending says: ``.svg``, ``.html`` or ``.png``.

        An ``.svg`` is the image that a notebook stores, with real text in the reader's fonts and a
        unit on each axis; an ``.html`` the whole interactive figure.

        Raises:
            InputError: another ending, a folder that is not there, or ``.png`` without kaleido.
        """
        path = Path(path)
        kind = path.suffix.lower()
        if kind == ".svg":
            write_text(path, image(json.loads(self.to_json())))
        elif kind == ".html":
            write_text(path, self.to_html(include_plotlyjs=True))
        elif kind == ".png":
            try:
                self.write_image(path, width=WIDTH, scale=2)
            except (ValueError, RuntimeError, ImportError) as error:
                reason = " ".join(str(error).strip().splitlines()[:1]) or "which failed"
                raise InputError(
                    f"{path}: a .png is drawn by kaleido ({reason}); an .svg needs nothing, and is "
                    "sharp at every size"
                ) from None
        else:
            raise InputError(f"{path}: expected a file that ends in .svg, .png or .html")
        return path

    def _ipython_display_(self) -> None:
        if os.environ.get("PLOTLY_RENDERER", DATA_RENDERER) != DATA_RENDERER:
            super()._ipython_display_()
            return
        from IPython.display import display

        display(self.bundle(), raw=True)


def _compact(value: Any) -> Any:
    """Plotly's JSON with numbers to seven digits, more than a pixel or a hover text shows."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, list):
        return [_compact(item) for item in value]
    if isinstance(value, dict):
        if value.get("dtype") == "f8":
            numbers = np.frombuffer(b64decode(value["bdata"])).astype(np.float32)
            return {**value, "dtype": "f4", "bdata": b64encode(numbers.tobytes()).decode()}
        return {name: _compact(item) for name, item in value.items()}
    return value


LETTER, PLOT_WIDTH = 6.6, 520.0
"""Mean width of a letter of a label, and that of a plot in a narrow window, in pixels."""

KEY_WIDTH, LEGEND_WIDTH, LEGEND_LINE = 50, 620, 20
"""Width of what stands beside a name in a legend, width of all, and height of a line, in pixels."""


def figure(title: str, height: int, *, legend: bool = False) -> Figure:
    """An empty figure in the common look; a legend goes below the plot."""
    result = Figure()
    result.update_layout(template=TEMPLATE, title={"text": title}, height=height, showlegend=legend)
    if legend:
        below = {"y": 0, "yref": "container", "yanchor": "bottom"}
        result.update_layout(legend={"orientation": "h", "x": 0, "xanchor": "left", **below})
    return result


def add_legend_lines(target: go.Figure) -> None:
    """Make a figure higher by the lines of its legend below the first: names that one line does
    not hold stand in columns, each as wide as the widest."""
    names = [trace.name or "" for trace in target.data if trace.showlegend is not False]
    widths = [KEY_WIDTH + LETTER * len(name) for name in names]
    if sum(widths) > LEGEND_WIDTH:
        lines = math.ceil(len(names) / max(1, LEGEND_WIDTH // max(widths)))
        target.update_layout(height=target.layout.height + LEGEND_LINE * (lines - 1))


def marker(component: str, phase: str = "") -> dict[str, Any]:
    """Marker of a part's bars: the component's colour, the phase's pattern."""
    look = markers([(component, phase)])
    pattern = look["pattern"] | {"shape": PATTERNS.get(phase, ""), "bgcolor": None}
    return look | {"color": colour_of(component), "pattern": pattern}


def markers(parts: Sequence[tuple[str, str]], pale: Sequence[bool] = ()) -> dict[str, Any]:
    """Markers of bars of several parts, (component, phase) each; pale, with an outline that can
    be seen, where so asked."""
    colours = [colour_of(component) for component, _ in parts]
    white = "rgba(255, 255, 255, 0.75)"
    line: dict[str, Any] = {"width": 0}
    hatch: str | list[str] = white
    filled = colours
    if any(pale):
        filled = [paled(c) if p else c for c, p in zip(colours, pale, strict=True)]
        line = {"width": [OUTLINE if p else 0 for p in pale], "color": colours}
        hatch = [c if p else white for c, p in zip(colours, pale, strict=True)]
    pattern: dict[str, Any] = {"shape": [PATTERNS.get(phase, "") for _, phase in parts]}
    # each bar is filled with its own colour; with a single one here, plotly warns of no list
    pattern |= {"fillmode": "overlay", "bgcolor": (colours or [INK])[0], "fgcolor": hatch}
    pattern |= {"size": 7, "solidity": 0.22}
    return {"color": filled, "line": line, "pattern": pattern}


OUTLINE = 1.5
"""Width of a pale bar's outline, in pixels."""


def paled(colour: str) -> str:
    """``#rrggbb`` as the fill of a pale bar, whose outline keeps the full colour."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return f"rgba({red}, {green}, {blue}, 0.25)"


def rows_of(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples(index=False))


def difference_colour(share: float) -> str:
    """Between :data:`FASTER` (−1), :data:`SAME` (0) and :data:`SLOWER` (1); beyond them, those."""
    end, mixed = SLOWER if share > 0 else FASTER, min(abs(share), 1.0)
    parts = (
        round(int(SAME[at : at + 2], 16) * (1 - mixed) + int(end[at : at + 2], 16) * mixed)
        for at in (1, 3, 5)
    )
    return "#" + "".join(f"{part:02X}" for part in parts)


def step_order(component: str, phase: str = "") -> tuple[int, int]:
    """Sort key: where in a step a part comes."""
    row = COMPONENTS.index(component) if component in COMPONENTS else len(COMPONENTS)
    return row, PHASES.index(phase) if phase in PHASES else len(PHASES)


def add_phase_key(target: go.Figure, phases: list[str]) -> None:
    """Legend entries that say which pattern is which phase."""
    for phase in sorted(set(phases) & set(PHASES), key=PHASES.index):
        look = marker("other", phase) | {"color": INK}
        target.add_bar(
            x=[None], y=[None], name=phase, marker=look, hoverinfo="skip", orientation="h"
        )


def short_name(name: str, limit: int) -> str:
    """A span, operator or kernel in a few characters: ``top MLP backward``, ``addmm``."""
    part = parse_span(name) if name.startswith("dlrm::") else None
    if part is not None:
        return part_label(*part)
    if frame := FRAME.match(name):
        name = text = f"{frame['function']} ({Path(frame['file']).name}:{frame['line']})"
        return text if len(text) <= limit else text[: limit - 1] + "…"
    text = name.removeprefix("autograd::engine::evaluate_function: ").removeprefix("void ")
    text = text.removeprefix(GROUP_PREFIX)
    text = text.split("(", 1)[0] if not text.startswith("(") else text
    text = text.split("<", 1)[0] if not text.startswith("<") else text
    text = text.rsplit("::", 1)[-1] or name
    return text if len(text) <= limit else text[: limit - 1] + "…"


def plotly_js() -> str:
    """plotly.js as the text of a script element."""
    # inside a script element only this could end it early
    return str(get_plotlyjs()).replace("</script", "<\\/script")


def plotly_text(text: str) -> str:
    """A name as plotly.js draws it: neither tags nor entities in it are read."""
    return text.replace("&", "&amp;").replace("<", "&lt;")


def wrapped(text: str, width: int = 80, most: int = 4) -> str:
    """Long names broken into lines, at most so many, for a hover label."""
    pieces = [text[start : start + width] for start in range(0, len(text), width)]
    shown = pieces[:most] + (["…"] if len(pieces) > most else [])
    return "<br>".join(shown)


# Axes: labelled rows, rows in groups, round numbers on a logarithmic scale.

BarEnds = Sequence[float] | pd.Series


def lines_of(text: str, width: int) -> str:
    """A label broken into lines between words; a longer word keeps a line of its own."""
    pieces = textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    return "<br>".join(plotly_text(piece) for piece in pieces)


def label_rows(
    target: go.Figure,
    labels: Sequence[str],
    places: Sequence[float] | None = None,
    *,
    above: float = 0.6,
) -> None:
    """Label rows from the top down; two may have one label, so places are numbers.

    Args:
        places: of the rows, downwards; 0, 1, ... where they are not given.
        above: room over the first row, in rows.
    """
    at = list(range(len(labels))) if places is None else list(places)
    target.update_yaxes(
        tickmode="array",
        tickvals=at,
        ticktext=list(labels),
        range=[max(at, default=0.0) + 0.6, -above],
        ticklabelstandoff=6,
        showgrid=False,
        zeroline=False,
    )


def add_bars(
    target: go.Figure,
    x: BarEnds,
    y: Sequence[Any] | pd.Series,
    name: str,
    look: str | dict[str, Any],
    hover: str | Sequence[str],
    *,
    flat: bool = True,
    inside: Sequence[str] = (),
    **more: Any,
) -> None:
    """Bars of one name and look, to be stacked or grouped with others.

    Args:
        look: a colour, or a whole marker of plotly's.
        hover: plotly's template, or a text for each bar.
        flat: horizontal bars, whose length is ``x``; else upright ones.
        inside: a text at the beginning of each bar; of bars of one colour.
        more: properties of plotly's trace.
    """
    marker = {"color": look, "line": {"width": 0}} if isinstance(look, str) else look
    if any(inside):
        more |= {"text": inside, "textposition": "inside", "insidetextanchor": "start"}
        # plotly.js would write dark grey or white, at a contrast of about 3
        more |= {"textangle": 0, "textfont": {"color": text_on(str(marker["color"]))}}
    more |= {"orientation": "h" if flat else "v", "marker": marker, **_hover(hover)}
    target.add_bar(x=x, y=y, name=name, **more)


def _hover(hover: str | Sequence[str]) -> dict[str, Any]:
    """Properties of a trace for a template of plotly's, or for a text of each mark."""
    if isinstance(hover, str):
        return {"hovertemplate": f"{hover}<extra></extra>"}
    return {"hovertext": list(hover), "hovertemplate": "%{hovertext}<extra></extra>"}


def add_points(
    target: go.Figure,
    x: Any,
    y: Any,
    name: str,
    hover: str | Sequence[str],
    *,
    at: Mapping[str, int] = MappingProxyType({}),
    **more: Any,
) -> None:
    """Points as :func:`add_bars` adds bars; with a ``mode`` of plotly's, a line.

    ``at`` is ``row`` and ``col`` of a figure of :func:`panels`.
    """
    target.add_scatter(x=x, y=y, name=name, **{"mode": "markers", **_hover(hover), **at, **more})


def add_steps(
    target: go.Figure,
    levels: Sequence[float],
    texts: Sequence[str],
    hover: Sequence[str],
    *,
    flat: bool = True,
) -> None:
    """A bar up to the first of some times, one from each to the next, and one up to the last, each
    with its text behind it; of these, as of ``hover``, there is one more than of the times."""
    steps = [after - before for before, after in itertools.pairwise(levels)]
    lengths, places = [*levels[:1], *steps, *levels[-1:]], list(range(len(levels) + 1))
    x, y = (lengths, places) if flat else (places, lengths)
    colours = [INK, *(FASTER if step < 0 else SLOWER for step in steps), INK]
    look: dict[str, Any] = {"color": colours, "line": {"width": 0}}
    more: dict[str, Any] = {"base": [0.0, *levels[:-1], 0.0], "text": texts, "showlegend": False}
    more |= {"textposition": "outside", "cliponaxis": False}
    add_bars(target, x, y, "", look, hover, flat=flat, **more)
    along, aside = ("x", "y") if flat else ("y", "x")
    for place, level in enumerate(levels):
        ends = {f"{along}0": level, f"{along}1": level}
        ends |= {f"{aside}0": place + 0.36, f"{aside}1": place + 0.64}
        target.add_shape(type="line", line={"color": GRID, "width": 1}, **ends)


def line_look(colour: str, number: int = 0, width: float = 2) -> dict[str, Any]:
    """A line with points for :func:`add_points`; ``number`` sets lines apart without colours."""
    return {
        "mode": "lines+markers",
        "line": {"color": colour, "width": width, "dash": DASHES[number % len(DASHES)]},
        "marker": {"color": colour, "size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
    }


def panels(
    title: str, names: Sequence[str], columns: int, *, legend: bool
) -> tuple[Figure, list[dict[str, int]]]:
    """An empty figure of small panels with these headings, at most so many beside each other, and
    ``row`` and ``col`` of each panel."""
    columns = min(columns, max(len(names), 1))
    rows = max(math.ceil(len(names) / columns), 1)
    result = figure(title, 145 + 260 * rows, legend=legend)
    result.set_subplots(
        rows,
        columns,
        subplot_titles=[f"<b>{name}</b>" for name in names],
        horizontal_spacing=0.1,
        vertical_spacing=0.18 / max(rows - 1, 1) if rows > 1 else 0.1,
    )
    result.update_layout(margin={"t": 80, "b": 95 if legend else 60})
    places = (divmod(number, columns) for number in range(len(names)))
    return result, [{"row": row + 1, "col": column + 1} for row, column in places]


def stacked_bars(
    title: str,
    table: pd.DataFrame,
    looks: Mapping[str, tuple[str, str]],
    unit: str,
    *,
    shares: bool = False,
    texts: bool = False,
) -> Figure:
    """A stacked bar for each row of a table, labelled by its index, a colour for each column.

    Args:
        table: values of ``unit``.
        looks: column to its name in the legend and its colour, in the order of the stack;
            columns that the table lacks are left out.
        shares: draw each row as shares of its sum.
        texts: write the shares into the bars, which ``shares`` does too.
    """
    result = figure(title, 160 + 36 * max(len(table), 3), legend=True)
    sums = table.sum(axis=1)
    for column, (name, colour) in looks.items():
        if column not in table.columns:
            continue
        values = table[column]
        parts = values / sums
        add_bars(
            result,
            parts if shares else values,
            list(range(len(table))),
            name,
            colour,
            f"%{{customdata[1]}}{name}: %{{customdata[0]:,.3g}} {unit}, %{{customdata[2]:.1%}}",
            customdata=[
                (value, f"{plotly_text(str(row))}<br>" if str(row) else "", part)
                for row, value, part in zip(table.index, values, parts, strict=True)
            ],
            inside=[f"{part:.0%}" if (shares or texts) and part >= 0.06 else "" for part in parts],
        )
    result.update_layout(barmode="stack", bargap=0.22)
    if shares:
        result.update_xaxes(tickformat=".0%", range=[0, 1])
    label_rows(result, [lines_of(str(label), 40) for label in table.index])
    return result


def stacked_iterations(
    title: str, table: pd.DataFrame, key: str, value: str, looks: Mapping[str, tuple[str, str, str]]
) -> Figure:
    """An upright bar for each iteration, stacked of milliseconds.

    Args:
        table: ``iteration``, and the columns ``key`` and ``value``.
        looks: content of ``key`` to its name in the legend, its colour and what it means, in the
            order of the stack; what the table lacks is left out.
    """
    result = figure(title, 430, legend=True)
    for kind, (name, colour, meaning) in looks.items():
        rows = table[table[key] == kind]
        if len(rows):
            hover = f"iteration %{{x}}: {name} %{{y:,.3f}} ms" + f"<br>{meaning}" * bool(meaning)
            add_bars(result, rows["iteration"], rows[value], name, colour, hover, flat=False)
    result.update_layout(barmode="stack", bargap=0.15)
    result.update_xaxes(title="iteration")
    result.update_yaxes(title="ms")
    return result


SPAN_GAP = 0.33
"""Share of a lane's height that its bars leave free."""


def add_spans(
    target: go.Figure,
    spans: pd.DataFrame,
    rows: Mapping[str, int],
    name: str,
    look: str | dict[str, Any],
    **more: Any,
) -> None:
    """Stretches of time as bars in the row of their lane, as :func:`label_rows` labels it.

    Args:
        spans: ``lane``, ``label``, ``start_ms``, ``duration_ms``, ``spans`` (how many were joined).
    """
    labels = [wrapped(plotly_text(label)) for label in spans["label"]]
    # one text for all spans, since thousands of the same one make a large notebook
    is_one = len(set(labels)) == 1
    text: dict[str, Any] = {"meta": labels[:1]} if is_one else {"hovertext": labels}
    # of a bar with a base, plotly's x is where the bar ends; a row of several spans is as long as
    # all of them, which no single one was
    hover = (
        f"%{{y}}<br>%{{{'meta[0]' if is_one else 'hovertext'}}}"
        "<br>from about %{base:,.3f} ms: %{customdata[1]:,.3f} ms"
        "<br>the sum of spans: %{customdata[0]:,}"
    )
    text["customdata"] = spans[["spans", "duration_ms"]].to_numpy(float)
    # plotly would make the bars of a trace as high as its lanes are far apart
    more = {"base": spans["start_ms"], "width": 1 - SPAN_GAP, **text, **more}
    lanes = spans["lane"].map(rows)
    add_bars(target, spans["duration_ms"], lanes, plotly_text(name), look, hover, **more)


def add_part_spans(
    target: go.Figure, spans: pd.DataFrame, rows: Mapping[str, int], rest: str = part_label("other")
) -> None:
    """Spans of the model's parts in the parts' colours and patterns, with the key of the phases.

    Args:
        spans, rows: as for :func:`add_spans`; the spans with ``component`` and ``phase``.
        rest: what lies in no part, in the legend.
    """
    parts = {(str(c), str(p)): table for (c, p), table in spans.groupby(["component", "phase"])}
    drawn: set[str] = set()
    for component, phase in sorted(parts, key=lambda part: step_order(*part)):
        name = rest if component == "other" else part_label(component)
        once = {"legendgroup": component, "showlegend": component not in drawn}
        add_spans(target, parts[component, phase], rows, name, marker(component, phase), **once)
        drawn.add(component)
    add_phase_key(target, spans["phase"].tolist())


def ranked_bars(
    title: str,
    unit: str,
    labels: Sequence[str],
    values: Sequence[float],
    texts: Sequence[str],
    hover: Sequence[str],
    marker: dict[str, Any],
    row: int = ROW,
) -> go.Figure:
    """Horizontal bars, the first on top, each with its label before and its value behind it."""
    result = figure(title, 110 + row * max(len(labels), 3))
    behind: dict[str, Any] = {"text": list(texts), "textposition": "outside", "cliponaxis": False}
    add_bars(result, list(values), list(range(len(labels))), "", marker, hover, **behind)
    result.update_xaxes(title=unit, range=with_room(values, texts))
    label_rows(result, labels)
    return result


TREE_NAME = 34
"""Letters of a call's name in a box of :func:`icicle`."""


def icicle(
    title: str,
    height: int,
    tree: pd.DataFrame,
    value: str,
    colours: Sequence[str],
    notes: Sequence[Sequence[Any]],
    hover: str,
    **more: Any,
) -> go.Figure:
    """A call tree, callers above callees, as wide as their time; a click zooms.

    Args:
        tree: ``id``, ``parent``, ``label`` and the column ``value``; parents come first.
        colours: one for each row.
        notes: plotly's ``customdata``, which ``hover``, its template, shows.
    """
    widths = dict(zip(tree["id"], tree[value].astype(np.float32), strict=True))
    children: dict[str, float] = {}
    # plotly draws nothing of a parent that is smaller, by a rounding error, than its children
    for row in rows_of(tree)[::-1]:
        least = children.get(row.id, 0.0)
        if float(widths[row.id]) < least:
            widths[row.id] = np.nextafter(np.float32(least), np.float32(np.inf))
        children[row.parent] = children.get(row.parent, 0.0) + float(widths[row.id])
    labels = [plotly_text(short_name(label, TREE_NAME)) for label in tree["label"]]
    edge = {"width": 0.7, "color": "rgba(128, 128, 128, 0.7)"}
    result = figure(title, height)
    result.add_icicle(
        ids=tree["id"],
        parents=tree["parent"],
        labels=labels,
        # the name of a part on two lines fits into narrower boxes
        text=["<br>".join(label.rsplit(" ", 1)) for label in labels],
        values=np.array([widths[name] for name in tree["id"]], np.float32),
        branchvalues="total",
        customdata=notes,
        marker={"colors": colours, "line": edge},
        leaf={"opacity": 1},
        textfont={"color": [text_on(colour) for colour in colours]},
        tiling={"orientation": "v"},
        maxdepth=7,
        texttemplate="%{text}<br>%{percentRoot:.2~p}",
        pathbar={"visible": True, "side": "top"},
        **_hover(hover),
        **more,
    )
    # no axis on the left; of a box that was clicked, the path stands between title and tree
    room = {"l": 4, "r": 4, "t": 70}
    result.update_layout(uniformtext={"minsize": 10, "mode": "hide"}, margin=room)
    return result


def in_groups(headings: Iterable[str]) -> tuple[list[float], list[tuple[float, str]]]:
    """Places of rows, of each of which the group's heading is given, and of the headings above
    their groups, whose rows follow each other."""
    places: list[float] = []
    groups: list[tuple[float, str]] = []
    for heading in headings:
        if not groups or heading != groups[-1][1]:
            groups.append((float(len(places) + len(groups)), heading))
        places.append(float(len(places) + len(groups)))
    return places, groups


def add_headings(target: go.Figure, groups: Iterable[tuple[float, str]]) -> None:
    """Headings of :func:`in_groups`, at the left end of the plot."""
    for place, text in groups:
        target.add_annotation(
            x=0, xref="paper", y=place, text=f"<b>{text}</b>", showarrow=False, xanchor="left"
        )


def with_room(ends: Iterable[float], texts: Iterable[str]) -> list[float]:
    """The axis from 0 on which each text fits behind its end; a long one has less than half."""
    letters = (len(re.sub("<[^>]*>", "", text)) + 2 for text in texts)
    room = (max(0.55, 1 - LETTER * count / PLOT_WIDTH) for count in letters)
    reach = (end / share for end, share in zip(ends, room, strict=True) if end == end)
    return [0.0, max(reach, default=0.0) or 1.0]


def add_ends(
    target: go.Figure,
    ends: BarEnds,
    places: Sequence[float] | Sequence[str],
    texts: Sequence[str],
    log: bool = False,
) -> None:
    """A text behind the end of each bar or range, to the left of one below 0, which it does not
    cover; on a logarithmic axis (``log``) plotly wants an annotation's exponent."""
    for end, place, text in zip(ends, places, texts, strict=True):
        x, (side, shift) = math.log10(end) if log else end, ("left", 10)
        if end < 0:
            side, shift = "right", -10
        look = {"showarrow": False, "xanchor": side, "xshift": shift}
        target.add_annotation(x=x, y=place, text=text, **look)


def mark_one(
    target: go.Figure, at: float = 1.0, groups: Sequence[tuple[float, str]] = (), last: float = 0.0
) -> None:
    """A dotted line where nothing is gained or lost, or at another value that others meet.

    Args:
        groups: headings of :func:`in_groups`, which the line does not cross.
        last: place of the last row, where there are groups.
    """
    look = {"color": INK, "width": 1, "dash": "dot"}
    if not groups:
        target.add_vline(x=at, line=look)
        return
    starts = [place for place, _ in groups]
    for start, end in zip(starts, [*starts[1:], last + 1.0], strict=True):
        target.add_shape(
            type="line", x0=at, x1=at, y0=start + 0.45, y1=end - 0.45, line=look, layer="above"
        )


def error_bars(
    low: BarEnds, mid: BarEnds, high: BarEnds, colour: str = INK, thickness: float = 1.5
) -> dict[str, Any]:
    """``error_x`` or ``error_y`` from ``low`` to ``high``; no bar where an end is not known."""
    lengths = np.subtract(high, mid), np.subtract(mid, low)
    beyond, short = (np.nan_to_num(ends, posinf=0.0, neginf=0.0).tolist() for ends in lengths)
    look = {"color": colour, "thickness": thickness, "width": 4}
    return {"type": "data", "symmetric": False, "array": beyond, "arrayminus": short, **look}


def log_axis(
    marks: Sequence[float], text: Callable[[float], str] = "{:,g}".format
) -> dict[str, Any]:
    """A logarithmic axis with these marks, for ``update_xaxes`` or ``update_yaxes``."""
    return {
        "type": "log",
        "tickmode": "array",
        "tickvals": list(marks),
        "ticktext": [text(mark) for mark in marks],
    }


def log_ticks(values: Sequence[float]) -> list[float]:
    """Two to six round numbers over the range of positive values; 1 where there are none."""
    if not len(values):
        return [1.0]
    low, high = min(values), max(values)
    first, last = math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1
    marks: list[float] = []
    for steps in ((1, 10), (1, 3, 10), (1, 2, 5, 10), (1, 1.5, 2, 3, 4, 5, 7, 10)):
        every = {round(step * 10.0**power, 12) for power in range(first, last) for step in steps}
        marks = sorted(mark for mark in every if 0.8 * low <= mark <= 1.25 * high)
        if len(marks) >= 3:
            return marks
    return marks if len(marks) >= 2 else sorted({float(f"{low:.2g}"), float(f"{high:.2g}")})
