"""The numbers of a figure in words: the text that stands for its picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dlrm_workbook.ground.units import digits, percent
from dlrm_workbook.show.axes import (
    Axis,
    each_of,
    is_drawable,
    is_number,
    numbers_of,
    values_of,
)
from dlrm_workbook.show.static import plain_text

MOST_SAID = 12
"""Values that a description names; of more it gives the count."""


def description(spec: Mapping[str, Any]) -> str:
    """Title and numbers of a figure in words, for readers who do not see it.

    Args:
        spec: a figure's JSON, as for :func:`image`.

    Returns:
        Plain text. Of more values than :data:`MOST_SAID` it names the first ones and a count.
    """
    layout = spec.get("layout", {})
    title = layout.get("title") or {}
    sentences = [plain_text((title.get("text") or "") if isinstance(title, Mapping) else title)]
    notes = _notes(layout)
    traces = [t for t in spec.get("data", []) if t.get("visible") in (None, True)]
    bars = [
        t for t in traces if t["type"] == "bar" and any(is_drawable(v) for v in values_of(t["x"]))
    ]
    if bars:
        sentences.append(_said_of_bars(bars, layout, notes))
    points = [
        words for t in traces if t["type"] == "scatter" for words in _said_of_points(t, layout)
    ]
    sentences.append(_listed(points))
    for trace in traces:
        said_of = {"icicle": _said_of_boxes, "waterfall": _said_of_steps}.get(trace["type"])
        sentences.append(said_of(trace, layout) if said_of else "")
    for name in ("xaxis", "yaxis"):
        axis = Axis(name, layout.get(name) or {})
        if axis.title and not axis.hidden:
            sentences.append(f"{'Across' if name == 'xaxis' else 'Up'}: {plain_text(axis.title)}")
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - MOST_SAID
    return "; ".join(items[:MOST_SAID]) + (f"; and {rest:,} more" if rest > 0 else "")


def _notes(layout: Mapping[str, Any], across: bool = False) -> dict[float, str]:
    """The texts that a figure has at the end of its rows; ``across``: above groups of rows."""
    return {
        float(note["y"]): plain_text(note["text"])
        for note in layout.get("annotations") or []
        if is_number(note.get("y"))
        and note.get("yref") in (None, "y")
        and (note.get("xref") == "paper") is across
    }


def _row_names(layout: Mapping[str, Any], letter: str) -> dict[Any, str]:
    axis = layout.get(f"{letter}axis") or {}
    texts = map(plain_text, values_of(axis.get("ticktext")))
    return dict(zip(values_of(axis.get("tickvals")), texts, strict=False))


def _said_of_bars(
    traces: Sequence[Mapping[str, Any]], layout: Mapping[str, Any], notes: Mapping[float, str]
) -> str:
    flat = traces[0].get("orientation") == "h"
    along, across = ("x", "y") if flat else ("y", "x")
    names = _row_names(layout, across)
    if any(trace.get("base") is not None for trace in traces):
        sums: dict[str, list[float]] = {}
        for trace in traces:
            sums.setdefault(str(trace.get("name", "")), []).extend(
                numbers_of(values_of(trace[along]))
            )
        return _listed(
            [f"{plain_text(n)} {digits(sum(v))} in {len(v):,} spans" for n, v in sums.items()]
        )
    rows: dict[Any, list[str]] = {}
    # a text behind the bars says what all of them mean
    traces = [t for t in traces if t.get("textposition") == "outside" and t.get("text")] or traces
    for trace in traces:
        places, lengths = values_of(trace[across]), values_of(trace[along])
        texts = each_of(trace.get("text"), len(lengths), "")
        outside = trace.get("textposition") == "outside"
        for place, length, text in zip(places, lengths, texts, strict=True):
            value = (
                plain_text(text)
                if outside and text
                else digits(length)
                if is_number(length)
                else ""
            )
            words = rows.setdefault(place, [])
            if value and length:
                named = plain_text(trace.get("name") or "")
                words.append(named if value in named else f"{named} {value}".strip())
    if not flat:
        return _listed([_spread(trace, along, layout) for trace in traces])
    items: list[str] = []
    headings = _notes(layout, across=True)
    for place, words in rows.items():
        total = notes.get(place, "") if is_number(place) else ""
        name = names.get(place, place if isinstance(place, str) else "")
        # of rows with a total only the first one is described part by part
        parts = ", ".join(words) if not total else f"({', '.join(words)})" if not items else ""
        # the heading of a group stands before its first row
        above = [at for at in headings if is_number(place) and at < place]
        heading = f"{headings.pop(max(above))}:" if above else ""
        items.append(" ".join(filter(None, [heading, name, total, parts])))
    return _listed(items)


def _spread(trace: Mapping[str, Any], letter: str, layout: Mapping[str, Any]) -> str:
    """Name of a trace and what its values are like."""
    values, name = numbers_of(values_of(trace.get(letter))), plain_text(trace.get("name") or "")
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
    xs, ys = values_of(trace.get("x")), values_of(trace.get("y"))
    if trace.get("hoverinfo") == "skip" or not any(map(is_drawable, xs)):
        return []
    if trace.get("hoverinfo") == "name":
        return [plain_text(trace.get("name") or "")]
    texts = _values_of_text(trace)
    axis = layout.get(f"yaxis{str(trace.get('yaxis') or '')[1:]}") or {}
    low, high = axis.get("range") or (0, 1)
    is_row = bool(axis.get("ticktext")) and low > high  # the height of a point is no value then
    if texts and (is_row or len(ys) <= MOST_SAID):
        # the name and the first value; the rest is in the table
        return [plain_text(", ".join(str(text).split("<br>")[:2])) for text in texts]
    return [_panel(trace, layout) + _spread(trace, "x" if is_row else "y", layout)]


def _panel(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    """The heading of the panel that a trace is in, if there are several."""
    if "xaxis2" not in layout:
        return ""
    number = int(str(trace.get("xaxis") or "x")[1:] or 1)
    # plotly puts the headings of panels before all other annotations
    notes = layout.get("annotations") or []
    return f"{plain_text(notes[number - 1]['text'])}: " if number <= len(notes) else ""


def _values_of_text(trace: Mapping[str, Any]) -> list[Any]:
    texts = trace.get("hovertext")
    return (
        []
        if texts is None or isinstance(texts, str)
        else [text for text in values_of(texts) if text]
    )


def _said_of_boxes(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    values = values_of(trace["values"])
    boxes = sorted(zip(values, values_of(trace["labels"]), strict=True), key=lambda box: -box[0])
    whole = boxes[0][0] if boxes else 0.0
    return _listed([f"{name} {digits(v)} ms ({percent(v / whole)})" for v, name in boxes if whole])


def _said_of_steps(trace: Mapping[str, Any], layout: Mapping[str, Any]) -> str:
    flat = trace.get("orientation") == "h"
    names = _row_names(layout, "y" if flat else "x")
    texts = each_of(trace.get("text"), len(values_of(trace["measure"])), "")
    places = values_of(trace["y" if flat else "x"])
    return _listed(
        [f"{names.get(p, p)} {plain_text(text)}" for p, text in zip(places, texts, strict=True)]
    )
