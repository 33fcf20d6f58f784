"""Pages and notebooks as a reader meets them: in a browser, with the network off."""

import io
import json
import math
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from browser import (
    DRAWN,
    check_page,
    jupyter_lab,
    open_folds,
    open_page,
    require_browser,
    wait_for_marks,
)
from nbformat.v4 import new_markdown_cell
from sample_notebooks import PAYLOADS, REPORT, cell, shown, write_notebook, write_page

from dlrm_core.base.errors import InputError
from dlrm_workbook.analysis.findings.finding import Finding
from dlrm_workbook.ground.runs import NOTEBOOKS, RunFolder, latest_run
from dlrm_workbook.runner.pages import FIGURE, render_html
from dlrm_workbook.runner.run import CHAIN, run_notebooks
from dlrm_workbook.show import static, theme
from dlrm_workbook.show.profile import findings_text
from dlrm_workbook.show.tables import Cells, Text, TextTable, bundle, show
from tests.conftest import Chain

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.usefixtures("browser")]

FIGURES = 3  # in REPORT
NUMBER = r"(-?[\d.]+)"
RECTANGLE = rf"M{NUMBER} {NUMBER}H{NUMBER}V{NUMBER}H{NUMBER}Z"
OURS = {path.stem for path in NOTEBOOKS.glob("*.ipynb")}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of a notebook with three figures, of which one is drawn by WebGL."""
    require_browser()
    folder = tmp_path_factory.mktemp("report")
    write_notebook(folder / "notebooks" / "report.ipynb", REPORT)
    (folder / "p.yaml").write_text("title: A test\n")
    return run_notebooks(
        ["report"], folder / "p.yaml", output_root=folder / "out", notebooks=folder / "notebooks"
    )


def test_page_draws_every_figure_and_asks_for_nothing(report: RunFolder) -> None:
    check_page(report.html, figures=FIGURES)


def test_on_a_phone_figures_fit_the_window(report: RunFolder) -> None:
    with open_page(report.html.as_uri(), viewport={"width": 420, "height": 900}) as (page, _):
        page.wait_for_selector(".xtick text")
        assert page.evaluate("document.documentElement.scrollWidth") == 420
        widths = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.offsetWidth)")
        assert len(widths) == FIGURES and max(widths) <= 420


def test_colours_follow_the_reader(report: RunFolder) -> None:
    url = report.html.as_uri()
    with open_page(url, color_scheme="light") as (page, _):
        background = "() => getComputedStyle(document.body).backgroundColor"
        text = "() => getComputedStyle(document.querySelector('.xtick text')).fill"
        page.wait_for_selector(".xtick text")
        light = page.evaluate(background), page.evaluate(text)
        page.emulate_media(color_scheme="dark")
        page.wait_for_timeout(800)
        dark = page.evaluate(background), page.evaluate(text)
        assert light[0] != dark[0]
        assert light[1] != dark[1], "the axes' text must stay readable"
        assert all(page.evaluate(DRAWN))


def test_code_is_hidden_until_asked_for_by_the_keyboard(report: RunFolder) -> None:
    with open_page(report.html.as_uri()) as (page, _):
        code = page.locator("main .code pre >> visible=true")
        assert code.count() == 0 and "count is 3" not in page.inner_text("main")
        page.locator("#show-code").focus()
        page.keyboard.press("Space")
        assert code.count() >= page.locator("main .cell").count() > 5
        assert "count is 3" in page.inner_text("main")
        page.reload()
        assert code.count() == 0, "remembered in the page only"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with a table of 57 rows, and in a closed section one of two and a figure."""
    folder = tmp_path_factory.mktemp("tables")
    many = pd.DataFrame(
        {
            "name": ["\n=2+2", *(f"call {number}, {number % 3}" for number in range(56))],
            "time_ms": [math.nan, *(number * 0.12345678 for number in range(56))],
            "calls": range(1000, 1057),
            "component": ["embedding"] * 57,
        }
    )
    few = pd.DataFrame({"low_ms": [1.25, 12.5], "high_ms": [2.5, 13.123456]})
    bars = {FIGURE: json.loads(go.Figure(go.Bar(x=[1, 2], y=[3, 4])).to_json())}
    return write_page(
        folder,
        "# Tables\n\n## Many",
        cell(shown(bundle(show(many)))),
        new_markdown_cell("## Few", metadata={"tags": ["details"]}),
        cell(shown(bars)),
        cell(shown(bundle(show(few)))),
    )


ROWS = "() => [...document.querySelector('tbody').rows].filter(r => r.offsetHeight)"


def test_a_table_is_sorted_filtered_and_shown_whole(tables: Path) -> None:
    with open_page(tables.as_uri()) as (page, seen):
        texts = ROWS + ".map(r => r.innerText.split('\\t'))"
        assert len(page.evaluate(texts)) == 20
        head = page.get_by_role("button", name="time (ms)")
        head.focus()
        page.keyboard.press("Enter")
        assert page.locator("th[aria-sort=descending]").inner_text().startswith("time (ms)")
        shown = page.evaluate(texts)
        assert shown[0][0] == "call 55, 1" and shown[0][1] == "6.790"
        head.click()
        shown = page.evaluate(texts)
        assert shown[0][0] == "call 0, 0" and shown[11][1] == "1.358", "by number, not by text"
        head.click()
        assert page.locator("th[aria-sort]").count() == 0
        assert page.evaluate(texts)[0][0] == "=2+2", "as it was"
        page.get_by_label("Show only rows with this text").fill("CALL 5")
        assert len(page.evaluate(texts)) == 7, "5, and 50 to 55"
        page.get_by_label("Show only rows with this text").fill("")
        page.get_by_role("button", name="Show all 57 rows").click()
        assert len(page.evaluate(texts)) == 57
        assert seen.console_errors == []


def test_a_table_is_copied_with_its_exact_values(tables: Path) -> None:
    fallback = "() => { navigator.clipboard.writeText = () => Promise.reject(new Error('no')); }"
    with open_page(tables.as_uri(), permissions=["clipboard-read", "clipboard-write"]) as (page, _):
        page.get_by_role("button", name="Copy as CSV").first.click()
        page.get_by_role("button", name="Copied").wait_for()
        text = page.evaluate("() => navigator.clipboard.readText()")
        frame = pd.read_csv(io.StringIO(text))
        assert list(frame) == ["name", "time_ms", "calls", "component"] and len(frame) == 57
        assert set(frame["component"]) == {"embedding"}, "without the mark in its colour"
        assert frame["time_ms"].iloc[7] == float(f"{6 * 0.12345678:.7g}"), "to seven digits"
        assert math.isnan(frame["time_ms"].iloc[0]), "not measured"
        assert frame["calls"].iloc[-1] == 1056
        assert frame["name"].iloc[0] == "'=2+2", "no formula"
        page.evaluate(fallback)
        open_folds(page)
        page.get_by_role("button", name="Copy as CSV").last.click()
        page.get_by_role("button", name="Press Ctrl+C").wait_for()
        selected = page.evaluate("() => document.querySelector('.csv').value")
        assert selected == "low_ms,high_ms\n1.25,2.5\n12.5,13.12346\n"


def test_links_open_closed_sections(tables: Path) -> None:
    with open_page(tables.as_uri()) as (page, _):
        assert page.locator(".js-plotly-plot").count() == 0
        page.get_by_role("link", name="Few").click()
        wait_for_marks(page, 1)
        assert page.locator("details.section[open]").count() == 1
    with open_page(f"{tables.as_uri()}#few", tables.as_uri()) as (page, _):
        wait_for_marks(page, 1)


TWIN = """plot => {
  const ends = box => [box.left, box.top, box.right, box.bottom];
  const box = element => ends(element.getBoundingClientRect());
  const all = names => [...plot.querySelectorAll(names)];
  const words = ".annotation-text, .legendtext, .bartext, .gtitle, .xtitle, .ytitle, .slicetext";
  return {
    marks: all(".barlayer .point path, .icicle path.surface").map(box),
    texts: all(words).map(e => e.textContent.replace(/\\s/g, "")),
  };
}"""
"""Boxes and texts of what plotly.js drew."""


def test_the_static_image_shows_what_its_interactive_twin_does(tmp_path: Path) -> None:
    """Each bar and box is as wide and high, and the texts are there, in both."""
    looks = {"a": ("first", "#112233"), "b": ("second", "#445566")}
    table = pd.DataFrame({"a": [1.0, 3.0], "b": [3.0, 2.5]}, index=["x", "y"])
    tree = pd.DataFrame({"id": ["0", "1", "2", "3"], "parent": ["", "0", "0", "1"]})
    tree = tree.assign(label=["step", "forward", "backward", "bag"], ms=[8.0, 3.0, 4.0, 2.0])
    tints = ["#101010", "#202020", "#303030", "#404040"]
    part = theme.markers([("data", "forward"), ("loss", "update")])
    steps = theme.figure("Steps", 300)
    theme.add_steps(steps, [10, 6], ["10 ms", "−4 ms", "6 ms"], "abc", flat=False)
    figures = [
        theme.ranked_bars(
            "Parts", "ms", ["d", "l"], [300.0, 90.0], ["300 ms", "90 ms"], "ab", part
        ),
        theme.stacked_bars("Shares", table, looks, "ms", texts=True),
        theme.icicle("Tree", 300, tree, "ms", tints, [[""]] * 4, "h"),
        steps,
    ]
    html = write_page(tmp_path, *(cell(shown(figure.bundle())) for figure in figures))
    with open_page(html.as_uri()) as (page, _):
        wait_for_marks(page, len(figures))
        twins = [plot.evaluate(TWIN) for plot in page.locator(".js-plotly-plot").all()]
    for figure, twin in zip(figures, twins, strict=True):
        image = static.image(json.loads(figure.to_json()))
        drawn = [[float(end) for end in m] for m in re.findall(RECTANGLE, image)[1:]]
        sizes = []
        for boxes in (drawn, twin["marks"]):
            # what the legend shows is no mark
            boxes = [b for b in boxes if b[2] - b[0] != 20 and b[2] > b[0]]
            sides = np.array([[b[2] - b[0], b[3] - b[1]] for b in boxes])
            shares = sides / sides.max(axis=0)
            sizes.append(shares[np.lexsort((shares[:, 1], shares[:, 0].round(1)))])
        assert sizes[0] == pytest.approx(sizes[1], abs=0.02)
        words = re.sub(r"\s|<[^>]*>", "", image)
        assert [text for text in twin["texts"] if text and text not in words] == []
        assert f'height="{figure.layout.height}"' in image
        for ending in (".svg", ".html"):
            kept = figure.save(tmp_path / f"figure{ending}").read_text()
            assert kept == image if ending == ".svg" else "Plotly.newPlot" in kept
    with pytest.raises(InputError, match=r"ends in \.svg, \.png or \.html"):
        figures[0].save(tmp_path / "figure.gif")


def test_a_print_is_short_and_whole(tmp_path: Path) -> None:
    """The static images and what is open, on few sheets, with nothing beyond their edge."""
    example = NOTEBOOKS.parent / "outputs" / "examples" / "bottlenecks-seed.ipynb"
    html = render_html(example, tmp_path / "page.html")
    paper = {"width": 703, "height": 1032}  # A4 within its margins
    with open_page(html.as_uri(), viewport=paper) as (page, _):
        pages = page.pdf(prefer_css_page_size=True).count(b"/Type /Page\n")
        assert 3 <= pages <= 8
        page.emulate_media(media="print")
        assert page.locator("figure .still img:visible").count() >= 4
        assert page.locator(".plot:visible, details:not([open], .facts):visible").count() == 0
        beyond = "e => e.getBoundingClientRect().right > innerWidth + 1"
        assert not page.locator("td, th, img").evaluate_all(f"all => all.some({beyond})")


def test_policy_of_the_page_stops_what_a_notebook_smuggles_in(tmp_path: Path) -> None:
    smuggled = (
        '<script src="https://example.org/x.js"></script>'
        '<p onclick="x()" style="background:url(//example.org/b.png)">kept</p>'
    )
    image = '<img src="https://example.org/a.png" alt="a"> words'
    html = write_page(tmp_path, image, cell(shown({"text/html": smuggled})))
    check_page(html, figures=0)
    with open_page(html.as_uri()) as (page, seen):
        page.evaluate("fetch('https://example.org/').catch(() => 0)")
        page.wait_for_timeout(300)
        assert seen.leaving(html.as_uri()) == []
        assert "kept" in page.inner_text("main")


def test_no_name_of_a_recording_runs_as_a_script(tmp_path: Path) -> None:
    statement = "document.body.dataset.ran=1"
    name = " ".join(payload.replace("RUN", statement) for payload in PAYLOADS)
    finding = Finding(
        id="f",
        title=f"A title {name}",
        component="embedding",
        share_of_step=0.5,
        evidence=f"Evidence of {name}",
        advice=f"In `libfoo {name}.so`: {name}",
    )
    nodes = TextTable([Cells("function", [name]), Cells("module", [f"lib{name}.so"])])
    bars = go.Figure(go.Bar(x=[f"f {name}", "g"], y=[3, 9], name=name, hovertext=[name, name]))
    bars.update_layout(title=name, xaxis_title=name, showlegend=True)
    table = pd.DataFrame({"function": [name]}).to_html(escape=False)
    outputs = [
        {"text/markdown": Text(f"**{name}**")._repr_markdown_()},
        {"text/markdown": findings_text([finding])._repr_markdown_()},
        {"text/html": nodes._repr_html_()},
        {"text/html": table},
        {FIGURE: json.loads(bars.to_json())},
        {"text/plain": name},
    ]
    error = nbformat.v4.new_output("error", ename=name, evalue=name, traceback=[name])
    html = write_page(
        tmp_path,
        f"# A page of {name}\n\n## A part {name}",
        cell(source=f"title = {name!r}", tags=["parameters"]),
        *(cell(shown(mime)) for mime in outputs),
        cell(error),
        run={"status": "failed", "error": name, "preset": name, "command": name},
    )
    check_page(html, figures=1)
    with open_page(html.as_uri()) as (page, seen):
        wait_for_marks(page, 1)
        page.locator(".nsewdrag").first.hover(force=True)  # names of any length lie over it
        for link in page.locator("main a, .plot a").all():
            assert "javascript" not in (link.get_attribute("href") or "")
        page.wait_for_timeout(500)
        assert page.evaluate("document.body.dataset.ran") is None
        assert seen.console_errors == [], "nothing even tried, so the policy had nothing to stop"
        # and the policy alone holds too
        page.evaluate(
            f"document.querySelector('main').innerHTML = '<img src=x onerror=' + '{statement}>'"
        )
        page.wait_for_timeout(500)
        assert page.evaluate("document.body.dataset.ran") is None
        assert "Content Security Policy" in " ".join(seen.console_errors)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """A JupyterLab: address, token, and its root folder."""
    with jupyter_lab(tmp_path_factory.mktemp("lab")) as served:
        yield served


def notebook_url(lab: tuple[str, str, Path], name: str) -> str:
    """The address at which the lab opens a notebook, in a workspace without tabs of other tests."""
    address, token, _ = lab
    return f"{address}/lab/workspaces/{Path(name).stem}/tree/{name}?token={token}"


@contextmanager
def run_all_cells(lab: tuple[str, str, Path], name: str, timeout_s: float) -> Iterator[Any]:
    """Open a notebook of the lab's root folder, Run All, and wait until every cell has run."""
    address, _, _ = lab
    # tall enough for all cells at once: JupyterLab draws outputs as they come into view
    window = {"width": 1400, "height": 9000}
    with open_page(notebook_url(lab, name), address, viewport=window) as (page, seen):
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        # what is sent to a kernel that is still starting may be lost
        page.get_by_text("| Idle").wait_for(timeout=60_000)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        # the prompt of a cell that has run is a number; [ ] is not begun, [*] is going on
        page.wait_for_function(
            "() => [...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')]"
            ".every((prompt) => /[0-9]/.test(prompt.textContent))",
            timeout=timeout_s * 1000,
            # at each frame, playwright's own choice, it took 0.11 of a core, now 0.04
            polling=500,
        )
        yield page
        failures = page.locator(".jp-OutputArea-output[data-mime-type*='error']").all_inner_texts()
        assert failures == []
        assert seen.leaving(address, address.replace("http", "ws")) == []


def test_executed_notebook_shows_charts_in_jupyterlab_without_trust(lab, report) -> None:
    address, _, root = lab
    (root / "done.ipynb").write_bytes(report.ipynb.read_bytes())
    window = {"width": 1400, "height": 5000}
    with open_page(notebook_url(lab, "done.ipynb"), address, viewport=window) as (page, _):
        # the first page of the lab, which is slow to start
        page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=60_000)
        wait_for_marks(page, FIGURES, 60.0)


@pytest.fixture(scope="module")
def our_runs(quick_chain: Chain, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Output root of our own with a finished run of each of our notebooks, of quick.yaml."""
    require_browser()
    return Path(shutil.copytree(quick_chain.root, tmp_path_factory.mktemp("ours") / "outputs"))


@pytest.mark.parametrize("name", [name for name in CHAIN if name in OURS])
def test_our_pages_draw_every_figure_and_ask_for_nothing(our_runs: Path, name: str) -> None:
    folder = latest_run(our_runs, name)
    assert folder is not None
    html = folder / f"{name}.html"
    assert html.read_text(encoding="utf-8").count('class="plot"') > 0
    assert (folder / f"{name}.ipynb").stat().st_size < 2_000_000
    check_page(html)


@pytest.mark.parametrize("name", [name for name in CHAIN if name in OURS])
def test_our_notebooks_run_in_jupyterlab(lab, quick_chain, our_runs, name) -> None:
    done = latest_run(our_runs, name)
    assert done is not None
    # with the cell that papermill put in: the quick parameters instead of the experiment's
    nb = nbformat.read(done / f"{name}.ipynb", as_version=4)
    for ours in nb.cells:
        if ours.cell_type == "code":
            ours.outputs, ours.execution_count = [], None
            # how a profile is made is no matter of the browser
            source = ours.source.replace('"probes": True', '"probes": False')
            ours.source = source.replace(str(quick_chain.root), str(our_runs))
    nb.metadata.pop("widgets", None)
    nbformat.write(nb, lab[2] / f"{name}.ipynb")
    figures = (done / f"{name}.html").read_text(encoding="utf-8").count('class="plot"')
    with run_all_cells(lab, f"{name}.ipynb", 240) as page:
        wait_for_marks(page, figures)


def test_explore_redraws_for_a_changed_input_in_jupyterlab(lab, tmp_path) -> None:
    nb = nbformat.read(NOTEBOOKS / "explore.ipynb", as_version=4)
    # nothing was measured there, so it opens the sample
    (parameters,) = (c for c in nb.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source += f"\noutput_root = {str(tmp_path)!r}"
    nbformat.write(nb, lab[2] / "explore.ipynb")
    with run_all_cells(lab, "explore.ipynb", 120) as page:
        wait_for_marks(page, 4)
        titles = page.locator(".gtitle")
        assert titles.filter(has_text="cpu_time_ms within embedding").count() == 1
        assert titles.filter(has_text="cpu_time_ms within data").count() == 1
        # by mouse: the lists at the end
        lists = page.locator(".widget-dropdown select")
        lists.nth(1).select_option(label="top_mlp")
        titles.filter(has_text="cpu_time_ms within top MLP").last.wait_for()
        lists.nth(2).select_option(label="calls")
        titles.filter(has_text="calls within top MLP").last.wait_for()
        # by hand: another value in the parameters, and all cells once more
        page.locator(".jp-CodeCell .cm-line", has_text="part: str").get_by_text(
            "embedding", exact=False
        ).last.dblclick()
        page.keyboard.type("interaction")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        titles.filter(has_text="cpu_time_ms within interaction").last.wait_for(timeout=60_000)
        wait_for_marks(page, 4)
