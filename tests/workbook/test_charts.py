"""Charts of a page in use: hovering, zooming, searching, narrow windows, the keyboard."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from browser import GROWN, open_page, require_browser, wait_for_marks
from sample_notebooks import cell, shown, write_page

from dlrm_workbook.show import bottlenecks as figures
from dlrm_workbook.show import theme
from dlrm_workbook.show.theme import Figure, markers, ranked_bars

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("browser")]

# Texts of a plot that leave it, and pairs that cover each other.
CLASHES = """
(plot) => {
  const frame = plot.getBoundingClientRect();
  const shown = [...plot.querySelectorAll("text")].filter((text) =>
    text.textContent.trim() && text.getBoundingClientRect().width > 0
    && getComputedStyle(text).visibility !== "hidden" && !text.closest(".hoverlayer, .icicle"));
  const boxes = shown.map((text) => text.getBoundingClientRect());
  const said = (at) => shown[at].textContent;
  const found = [];
  boxes.forEach((a, at) => {
    if (a.left < frame.left - 1 || a.right > frame.right + 1
        || a.top < frame.top - 1 || a.bottom > frame.bottom + 1) found.push(["outside", said(at)]);
    for (let other = at + 1; other < boxes.length; other += 1) {
      const b = boxes[other];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 3) found.push(["over", said(at), said(other)]);
    }
  });
  return found;
}
"""
MARKS = "document.querySelectorAll('.plot')[0].querySelectorAll('.barlayer .point path').length"
DURATIONS = (12.5, 7.25, 30.0)


def until(page: Any, condition: str) -> None:
    """Wait for a condition; playwright's own way compiles it, which the page's policy forbids."""
    for _ in range(50):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(100)
    raise AssertionError(f"never true: {condition}")


def timeline() -> Figure:
    spans = pd.DataFrame(
        {
            "iteration": 0,
            "lane": "main thread",
            "label": ["data", "embedding forward", "top MLP backward"],
            "component": ["data", "embedding", "top_mlp"],
            "phase": ["forward", "forward", "backward"],
            "start_ms": [0.0, 20.0, 40.0],
            "duration_ms": DURATIONS,
            "spans": 1,
        }
    )
    detail = spans.assign(label=["aten::a", "aten::embedding_bag", "aten::mm"])
    return figures.iteration_timeline(spans, detail)


def bars() -> Figure:
    names = ["a rather long name of a kernel, with more behind it", "embedding backward", "loss"]
    texts = ["300 ms  (60.0%), 12,345 launches", "150 ms  (30.0%)", "50.0 ms  (10.0%)"]
    look = markers([("data", "forward"), ("embedding", "backward"), ("loss", "forward")])
    title = "Time of everything that was measured, by part and by phase, in the order of size"
    unit = "ms in a mean iteration (share of the time of all that was measured)"
    return ranked_bars(title, unit, names, [300.0, 150.0, 50.0], texts, texts, look)


def tree() -> Figure:
    table = pd.DataFrame(
        {
            "id": ["0", "1", "2", "3"],
            "parent": ["", "0", "0", "1"],
            "label": ["dlrm::iteration", "aten::addmm", "aten::embedding_bag", "aten::addmm_inner"],
            "shapes": "",
            "component": ["other", "top_mlp", "embedding", "top_mlp"],
            "phase": ["", "forward", "forward", "forward"],
            "value_ms": [10.0, 6.0, 3.0, 2.0],
            "self_ms": [1.0, 4.0, 3.0, 2.0],
            "through": [[], [], ["aten::bag_out"], []],
        }
    )
    return figures.call_tree_icicle(table)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    require_browser()
    cells = [cell(shown(figure.bundle())) for figure in (timeline(), bars(), tree())]
    return write_page(tmp_path_factory.mktemp("charts"), "# Charts", *cells).as_uri()


def test_hovering_a_span_says_how_long_it_is(address: str) -> None:
    with open_page(address) as (page, _):
        wait_for_marks(page, 3)
        plot = page.locator(".plot").first
        for number, (duration, start) in enumerate(zip(DURATIONS, (0, 20, 40), strict=True)):
            box = plot.locator(".barlayer .point path").nth(number).bounding_box()
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
            label = plot.locator(".hoverlayer .hovertext")
            label.get_by_text(f": {duration:,.3f} ms").wait_for()
            said = label.text_content()
            assert f"from about {start:,.3f} ms" in said and "iteration 0" in said
            assert ("data", "embedding forward", "top MLP backward")[number] in said


def test_operators_appear_when_the_reader_zooms_in(address: str) -> None:
    with open_page(address) as (page, _):
        wait_for_marks(page, 3)
        plot = page.locator(".plot").first
        count = plot.locator(".barlayer .point path").count()
        zoom = "Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [18, 30]})"
        page.evaluate(zoom)
        until(page, f"{MARKS} > {count}")
        page.evaluate("Plotly.relayout(document.querySelector('.plot'), {'xaxis.range': [0, 70]})")
        until(page, f"{MARKS} === {count}")


@pytest.mark.parametrize("width", [420, 1100, 1440])
def test_labels_stay_inside_and_apart_and_drawing_moves_nothing_below(
    address: str, width: int
) -> None:
    with open_page(address, viewport={"width": width, "height": 900}) as (page, _):
        wait_for_marks(page, 3)
        page.wait_for_timeout(500)
        assert len(page.evaluate("window.reserved")) == 3 and page.evaluate(GROWN) == []
        for plot in page.locator(".plot").all():
            assert plot.evaluate(CLASHES) == []


def test_an_address_within_the_page_is_where_the_reader_lands(address: str) -> None:
    with open_page(address, viewport={"width": 420, "height": 500}) as (page, _):
        page.evaluate("location.hash = 'figure-2'")
        page.context.unroute_all()
        page.reload()
        wait_for_marks(page, 3)
        page.wait_for_timeout(300)
        top = "document.getElementById('figure-2').getBoundingClientRect().top"
        assert abs(page.evaluate(top)) < 60


def test_a_window_made_narrow_puts_labels_above_the_bars(address: str) -> None:
    with open_page(address, viewport={"width": 1400, "height": 900}) as (page, _):
        wait_for_marks(page, 3)
        plot = page.locator(".plot").nth(1)
        assert plot.locator(".ytick text").count() == 3
        page.set_viewport_size({"width": 420, "height": 900})
        until(
            page,
            "document.querySelectorAll('.plot')[1].querySelectorAll('.ytick text').length === 0",
        )
        label = plot.get_by_text("embedding backward").bounding_box()
        bar = plot.locator(".barlayer .point path").nth(1).bounding_box()
        assert label["y"] + label["height"] <= bar["y"] + 2
        assert abs(label["x"] - bar["x"]) < 8


def test_an_upright_axis_keeps_its_marks_in_a_narrow_window(tmp_path: Path) -> None:
    figure = theme.figure("Growth", 300)
    theme.add_points(figure, [1, 10], [1, 100], "n", "h", **theme.line_look("#2467A6"))
    figure.update_yaxes(**theme.log_axis([1, 10, 100]))
    html = write_page(tmp_path, cell(shown(figure.bundle())))
    narrow = {"width": 420, "height": 900}
    with open_page(html.as_uri(), viewport=narrow) as (page, _):
        wait_for_marks(page, 1)
        assert page.locator(".ytick text").count() == 3


def test_a_call_tree_can_be_searched_and_left_again(address: str) -> None:
    with open_page(address) as (page, seen):
        wait_for_marks(page, 3)
        plot = page.locator(".plot").nth(2)
        field = page.get_by_label("Find in the call tree")
        field.focus()
        page.keyboard.type("addmm")
        # the inner one is in the time of the outer one
        page.get_by_text("2 boxes, 60.0% of the time").wait_for()
        page.keyboard.press("Enter")
        level = "document.querySelectorAll('.plot')[2].data[0].level"
        until(page, f"{level} === '1'")
        page.get_by_role("button", name="Whole tree").click()
        until(page, f"{level} == null")
        page.wait_for_timeout(900)
        assert plot.locator(".slice").count() == 4
        assert field.input_value() == "" and seen.console_errors == []


def test_without_scripts_the_page_shows_the_images(address: str) -> None:
    with open_page(address, java_script_enabled=False) as (page, _):
        images = page.locator("figure img")
        assert images.count() == 3
        assert all(image.bounding_box()["height"] > 100 for image in images.all())
        assert "embedding backward 150 ms (30.0%)" in images.nth(1).get_attribute("alt")


def test_no_button_sends_data_away_and_the_chart_is_reached_by_keyboard(address: str) -> None:
    with open_page(address) as (page, seen):
        wait_for_marks(page, 3)
        titles = page.evaluate(
            "[...document.querySelectorAll('.modebar-btn')].map((b) => b.dataset.title || b.title)"
        )
        assert titles and not [t for t in titles if "cloud" in t.lower() or "studio" in t.lower()]
        assert page.locator(".modebar a[href], .plotlyjsicon").count() == 0
        page.keyboard.press("Tab")
        reached = []
        for _ in range(20):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.getAttribute('aria-label')"))
        said = [text for text in reached if text]
        assert any("embedding backward 150 ms (30.0%)" in text for text in said)
        assert seen.console_errors == []
