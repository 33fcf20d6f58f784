"""Images of figures that need no browser, and their numbers in words."""

import json
import re
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbconvert import HTMLExporter
from nbformat import v4

from dlrm_workbook.show import static, theme, words

NAME = "{http://www.w3.org/2000/svg}"


def drawn(figure: go.Figure) -> ET.Element:
    return ET.fromstring(static.image(json.loads(figure.to_json())))


def said(figure: go.Figure) -> str:
    return words.description(json.loads(figure.to_json()))


def texts(image: ET.Element) -> list[str]:
    return [str(mark.text) for mark in image.iter(f"{NAME}text")]


def boxes(image: ET.Element, fill: str) -> list[tuple[float, float, float, float]]:
    """Left, top, right and bottom of the rectangles of one colour."""
    number = r"(-?[\d.]+)"
    shape = re.compile(rf"M{number} {number}H{number}V{number}H{number}Z")
    return [
        (float(m[1]), float(m[2]), float(m[3]), float(m[4]))
        for mark in image.iter(f"{NAME}path")
        if mark.get("fill") == fill
        for m in shape.finditer(str(mark.get("d")))
    ]


def ranked(count: int = 3) -> go.Figure:
    values = [300.0, 100.0, 50.0][:count]
    names = ["data forward", "embedding backward", "loss <update>"][:count]
    parts = [("data", "forward"), ("embedding", "backward"), ("loss", "update")][:count]
    values_text = [f"{value:.0f} ms" for value in values]
    look = theme.markers(parts)
    return theme.ranked_bars("Time by part", "ms", names, values, values_text, values_text, look)


def test_bars_are_as_long_as_their_values_and_keep_colours_labels_and_units() -> None:
    image = drawn(ranked())
    ((left, _, right, _),) = boxes(image, theme.COLOURS["data"])
    ((other_left, top, other_right, bottom),) = boxes(image, theme.COLOURS["embedding"])
    assert left == other_left
    assert (other_right - left) / (right - left) == pytest.approx(1 / 3, abs=0.01)
    assert bottom > top
    shown = texts(image)
    assert {"Time by part", "data forward", "embedding backward", "300 ms", "ms"} <= set(shown)
    strokes = [mark for mark in image.iter(f"{NAME}path") if mark.get("stroke") == "#FFFFFF"]
    assert len(strokes) == 1, "backward is striped, update crossed, forward plain"


def test_pale_bars_have_the_full_colour_as_outline() -> None:
    figure = theme.ranked_bars(
        "t", "ms", ["a"], [2.0], ["2 ms"], ["2 ms"], theme.markers([("loss", "forward")], [True])
    )
    image, colour = drawn(figure), theme.COLOURS["loss"]
    (mark,) = [m for m in image.iter(f"{NAME}path") if m.get("stroke") == colour]
    assert mark.get("fill") == colour and mark.get("fill-opacity") == "0.25"


def test_based_bars_stand_where_their_values_say() -> None:
    spans = pd.DataFrame({"lane": ["l", "l"], "label": ["p", "q"], "start_ms": [0.0, 6.0]}).assign(
        duration_ms=[2.0, 4.0], spans=1
    )
    target = theme.figure("t", 200)
    theme.add_spans(target, spans, {"l": 0}, "n", {"color": "#778899"})
    (a, b) = boxes(drawn(target), "#778899")[:2]
    unit = (a[2] - a[0]) / 2
    assert (b[0] - a[0], b[2] - b[0]) == pytest.approx((6 * unit, 4 * unit), abs=0.3)


def test_lines_points_errors_and_logarithmic_axes() -> None:
    figure = theme.figure("t", 300)
    theme.add_points(figure, [1, 10, 100], [5, 6, 7], "n", "h", **theme.line_look("#123456"))
    figure.update_xaxes(**theme.log_axis([1, 10, 100]))
    image = drawn(figure)
    (line,) = [m for m in image.iter(f"{NAME}path") if m.get("stroke") == "#123456"]
    xs = [float(x) for x in re.findall(r"[ML](-?[\d.]+) ", str(line.get("d")))]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)
    assert {"1", "10", "100"} <= set(texts(image))


@given(st.lists(st.lists(st.floats(0.05, 10.0), min_size=1, max_size=4), min_size=1, max_size=5))
def test_every_box_of_a_call_tree_is_as_wide_as_its_value(calls: list[list[float]]) -> None:
    """Callees of 17 % were drawn at 7.4 %, since the rest of the width shrank with each of them."""
    rows = [("r", "", sum(map(sum, calls)))]
    for number, times in enumerate(calls):
        rows.append((f"{number}", "r", sum(times)))
        rows += [(f"{number}.{place}", f"{number}", ms) for place, ms in enumerate(times)]
    tree = pd.DataFrame(rows, columns=["id", "parent", "ms"])
    tree["label"] = ""
    colours = [f"#{0x101010 + place:06x}" for place in range(len(tree))]
    image = drawn(theme.icicle("t", 300, tree, "ms", colours, [[""]] * len(tree), "h"))
    (whole,) = boxes(image, colours[0])
    pixels = (whole[2] - whole[0]) / tree["ms"].iloc[0]
    for ms, colour in zip(tree["ms"], colours, strict=True):
        for left, _, right, _ in boxes(image, colour):  # none narrower than a third of a pixel
            assert right - left == pytest.approx(pixels * ms, abs=0.3)


def test_names_are_escaped_and_no_style_or_identifier_is_needed() -> None:
    figure = ranked()
    figure.update_layout(title="<script>alert(1)</script> & more")
    image = static.image(json.loads(figure.to_json()))
    assert "<script" not in image and "<style" not in image and " id=" not in image
    assert "loss &lt;update&gt;" in image or "loss" in image
    ET.fromstring(image)


def test_descriptions_state_the_numbers() -> None:
    assert said(ranked(2)) == (
        "Time by part. data forward 300 ms; embedding backward 100 ms. Across: ms."
    )
    table = pd.DataFrame({"a": [1.0] * 20}, index=[f"row {n}" for n in range(20)])
    words = said(theme.stacked_bars("Many", table, {"a": ("alpha", "#112233")}, "ms"))
    assert "row 0 alpha 1.00" in words and "and 8 more" in words


def test_descriptions_state_headings_of_rows_and_panels() -> None:
    figure = theme.figure("Times", 200)
    places, groups = theme.in_groups(["one thread", "one thread", "two threads"])
    theme.add_bars(figure, [3.0, 4.0, 2.0], places, "", "#1BA876", "")
    theme.add_ends(figure, [3.0, 4.0, 2.0], places, ["3 ms", "4 ms", "2 ms"])
    theme.label_rows(figure, ["theirs", "ours", "ours"], places)
    theme.add_headings(figure, groups)
    text = said(figure)
    assert "one thread: theirs 3 ms" in text and "; ours 4 ms; two threads: ours 2 ms." in text
    goals = theme.figure("Goals", 200)
    theme.add_points(goals, [0.8, 0.75], [0, 1], "goal", "%{x}")
    theme.label_rows(goals, ["dense", "embedding"])
    assert "goal 0.800 first, 0.750 last" in said(goals)
    grid, cells = theme.panels("Growth", ["batch", "tables"], 2, legend=True)
    for cell, times in zip(cells, ([1.0, 2.0], [3.0, 5.0]), strict=True):
        theme.add_points(grid, [1, 2], times, "ours", "", at=cell)
    assert "batch: ours 1.00 first, 2.00 last" in said(grid)
    assert "tables: ours 3.00 first, 5.00 last" in said(grid)


def test_a_notebook_stores_data_image_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    monkeypatch.delenv("PLOTLY_RENDERER", raising=False)
    ranked()._ipython_display_()
    (bundle,) = shown
    spec = bundle[theme.FIGURE_TYPE]
    assert spec["layout"]["meta"]["description"] == bundle["text/plain"]
    assert spec["config"]["showSendToCloud"] is False and not spec["config"]["plotlyServerURL"]
    assert len(bundle["image/svg+xml"]) < 20_000


def test_stock_nbconvert_shows_the_image() -> None:
    output = v4.new_output("display_data", ranked().bundle())
    nb = v4.new_notebook(cells=[v4.new_code_cell("x", outputs=[output])])
    html, _ = HTMLExporter().from_notebook_node(nb)
    assert "data:image/svg+xml;base64," in html
    # older viewers put the image itself into the page, through a filter
    html, _ = HTMLExporter(skip_svg_encoding=True).from_notebook_node(nb)
    assert html.count(f'fill="{theme.COLOURS["data"]}"') == 1


def test_many_spans_stay_small() -> None:
    starts = np.arange(4000) * 2.0
    spans = pd.DataFrame({"lane": "l", "label": "p", "start_ms": starts, "duration_ms": 1.0})
    target = theme.figure("t", 200)
    theme.add_spans(target, spans.assign(spans=1), {"l": 0}, "n", {"color": "#778899"})
    assert len(static.image(json.loads(target.to_json()))) < 120_000
