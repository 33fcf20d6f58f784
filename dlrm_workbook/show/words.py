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
    is_shown,
    letters_of,
    numbers_of,
    part_of,
    values_of,
)
from dlrm_workbook.show.static import plain_text

MOST_SAID = 12
"""Values that a description names; of more it gives the count."""

Trace = Mapping[str, Any]
Layout = Mapping[str, Any]


def description(spec: Mapping[str, Any]) -> str:
    """Title and numbers of a figure's JSON in plain text, for readers who do not see it; of more
    values than :data:`MOST_SAID` the first ones and a count."""
    layout, traces = spec.get("layout", {}), spec.get("data", [])
    sentences = [plain_text(part_of(layout, "title.text", ""))]
    bars = [t for t in traces if is_shown(t, "bar") and any(map(is_drawable, values_of(t["x"])))]
    if bars:
        sentences.append(_said_of_bars(bars, layout))
    points = [t for t in traces if is_shown(t, "scatter")]
    sentences.append(_listed([words for t in points for words in _said_of_points(t, layout)]))
    sentences += [_said_of_boxes(t) for t in traces if is_shown(t, "icicle")]
    for name, direction in (("xaxis", "Across"), ("yaxis", "Up")):
        axis = Axis(name, layout.get(name) or {})
        if axis.title and not axis.hidden:
            sentences.append(f"{direction}: {plain_text(axis.title)}")
    return " ".join(f"{sentence.rstrip('.')}." for sentence in sentences if sentence)


def _listed(items: Sequence[str]) -> str:
    rest = len(items) - MOST_SAID
    return "; ".join(items[:MOST_SAID]) + (f"; and {rest:,} more" if rest > 0 else "")


def _notes(layout: Layout, across: bool = False) -> dict[float, str]:
    """The texts that a figure has at the end of its rows; ``across``: above groups of rows."""
    return {
        float(note["y"]): plain_text(note["text"])
        for note in layout.get("annotations") or []
        if is_number(note.get("y"))
        and note.get("yref") in (None, "y")
        and (note.get("xref") == "paper") is across
    }


def _row_names(layout: Layout, letter: str) -> dict[Any, str]:
    axis = layout.get(f"{letter}axis") or {}
    texts = map(plain_text, values_of(axis.get("ticktext")))
    return dict(zip(values_of(axis.get("tickvals")), texts, strict=False))


def _said_of_bars(traces: Sequence[Trace], layout: Layout) -> str:
    along, across = letters_of(traces[0])
    if any(trace.get("base") is not None and not trace.get("text") for trace in traces):
        spans: dict[str, list[float]] = {}
        for trace in traces:
            lengths = numbers_of(values_of(trace[along]))
            spans.setdefault(plain_text(trace.get("name", "")), []).extend(lengths)
        return _listed(
            [f"{n} {digits(sum(times))} in {len(times):,} spans" for n, times in spans.items()]
        )
    # a text behind the bars says what all of them mean
    traces = [t for t in traces if t.get("textposition") == "outside" and t.get("text")] or traces
    names = _row_names(layout, across)
    if along == "y" and not names:
        return _listed([_spread(trace, along, layout) for trace in traces])
    notes, headings = _notes(layout), _notes(layout, across=True)
    items: list[str] = []
    for place, words in _words_of_rows(traces).items():
        total = notes.get(place, "") if is_number(place) else ""
        name = names.get(place, place if isinstance(place, str) else "")
        # of rows with a total only the first one is described part by part
        parts = ", ".join(words) if not total else f"({', '.join(words)})" if not items else ""
        # the heading of a group stands before its first row
        above = [at for at in headings if is_number(place) and at < place]
        heading = f"{headings.pop(max(above))}:" if above else ""
        items.append(" ".join(filter(None, [heading, name, total, parts])))
    return _listed(items)


def _words_of_rows(traces: Sequence[Trace]) -> dict[Any, list[str]]:
    """Place of each row of bars to the words for its bars."""
    rows: dict[Any, list[str]] = {}
    for trace in traces:
        lengths, places = (values_of(trace[letter]) for letter in letters_of(trace))
        texts = each_of(trace, "text", len(lengths), "")
        named = plain_text(trace.get("name") or "")
        for place, length, text in zip(places, lengths, texts, strict=True):
            value = digits(length) if is_number(length) else ""
            if trace.get("textposition") == "outside" and text:
                value = plain_text(text)
            words = rows.setdefault(place, [])
            if value and length:
                words.append(named if value in named else f"{named} {value}".strip())
    return rows


def _axis_of(trace: Trace, letter: str, layout: Layout) -> Mapping[str, Any]:
    number = str(trace.get(f"{letter}axis") or "")[1:]
    return layout.get(f"{letter}axis{number}") or {}


def _spread(trace: Trace, letter: str, layout: Layout) -> str:
    """Name of a trace and what its values are like."""
    values, name = numbers_of(values_of(trace.get(letter))), plain_text(trace.get("name") or "")
    form = str(_axis_of(trace, letter, layout).get("tickformat", ""))
    text_of = percent if form.endswith("%") else digits
    if not values:
        return name
    if len(values) == 1:
        return f"{name} {text_of(values[0])}"
    return (
        f"{name} {text_of(values[0])} first, {text_of(values[-1])} last, between "
        f"{text_of(min(values))} and {text_of(max(values))} at {len(values):,} points"
    )


def _said_of_points(trace: Trace, layout: Layout) -> list[str]:
    xs, ys = values_of(trace.get("x")), values_of(trace.get("y"))
    if trace.get("hoverinfo") == "skip" or not any(map(is_drawable, xs)):
        return []
    if trace.get("hoverinfo") == "name":
        return [plain_text(trace.get("name") or "")]
    texts = trace.get("hovertext")
    texts = [] if isinstance(texts, str) else list(filter(None, values_of(texts)))
    axis = _axis_of(trace, "y", layout)
    low, high = axis.get("range") or (0, 1)
    is_row = bool(axis.get("ticktext")) and low > high  # the height of a point is no value then
    if texts and (is_row or len(ys) <= MOST_SAID):
        # the name and the first value; the rest is in the table
        return [plain_text(", ".join(str(text).split("<br>")[:2])) for text in texts]
    return [_panel(trace, layout) + _spread(trace, "x" if is_row else "y", layout)]


def _panel(trace: Trace, layout: Layout) -> str:
    """The heading of the panel that a trace is in, if there are several."""
    if "xaxis2" not in layout:
        return ""
    number = int(str(trace.get("xaxis") or "x")[1:] or 1)
    # plotly puts the headings of panels before all other annotations
    notes = layout.get("annotations") or []
    return f"{plain_text(notes[number - 1]['text'])}: " if number <= len(notes) else ""


def _said_of_boxes(trace: Trace) -> str:
    values = values_of(trace["values"])
    boxes = sorted(zip(values, values_of(trace["labels"]), strict=True), key=lambda box: -box[0])
    whole = boxes[0][0] if boxes else 0.0
    return _listed([f"{name} {digits(v)} ms ({percent(v / whole)})" for v, name in boxes if whole])
