"""Pages of real recordings of GPUs, of both engines, as a reader meets them in a browser."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from browser import check_page, open_page, require_browser
from recordings import SEVERAL, recording

from dlrm_workbook.machine import REPOSITORY
from dlrm_workbook.runner.run import run_notebooks
from dlrm_workbook.runs import RunFolder

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.usefixtures("browser")]

PAGES = {
    "experiment": "dlrm-h100-pc.d",
    "several ranks": SEVERAL,
}


@pytest.fixture(scope="module", params=PAGES, ids=list(PAGES))
def explained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, run folder of the page that explains the recording)."""
    require_browser()
    given = f"profile_run={recording(PAGES[request.param])}"
    out = tmp_path_factory.mktemp("pages")
    return request.param, run_notebooks(["bottlenecks"], None, [given], out)


HOVERS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.filter(trace => trace.type === 'bar' && trace.base !== undefined)
        .map(trace => trace.hovertemplate || ''))"""


def test_pages_draw_and_say_what_the_recording_holds(explained: tuple[str, RunFolder]) -> None:
    name, folder = explained
    check_page(folder.html)
    with open_page(folder.html.as_uri(), viewport={"width": 1200, "height": 900}) as (page, _):
        # folded code is not seen
        text = " ".join(str(page.evaluate("document.body.innerText")).split())
        # timelines are in sections that start closed, and drawn when opened
        page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
        page.wait_for_function(f"({HOVERS})().length > 0")
        hovers = page.evaluate(HOVERS)
    # with a base, x is where a bar ends
    assert hovers and all("%{x" not in hover for hover in hovers), hovers
    document = json.loads((folder.path / "bottlenecks.json").read_text())
    assert re.sub(r"[*`]", "", document["headline"]).split(".")[0] in text
    assert not re.search(r"\b(nan|inf|None)\b", text), "a figure that is none is shown"
    for finding in document["findings"]:
        assert 0 <= finding["share_of_step"] <= 1
        most = 1 / max(1 - finding["share_of_step"], 1e-9)
        promised = finding["predicted_speedup"]["high"]
        assert promised <= most * 1.001, f"{name}: {finding['title']} promises too much"
    assert sum(row["share"] for row in document["attribution"]) == pytest.approx(1)
    assert document["coverage"] >= 0.95
    if name == "experiment":
        assert document["findings"][0]["share_of_step"] == pytest.approx(0.998, abs=0.001)
        assert "idle 99.8%" in document["headline"]
        assert any("serialised" in caution for caution in document["cautions"])
        assert "copies" not in {finding["id"] for finding in document["findings"]}


def test_the_tracked_page_of_the_experiment_opens_anywhere() -> None:
    require_browser()
    page = REPOSITORY / "outputs" / "examples" / "experiment.html"
    check_page(page)
    for file in (page, page.with_suffix(".ipynb")):
        text = file.read_text(encoding="utf-8")
        assert "351" in text and "idle 99.8%" in text
        assert not re.search(r"(?<![\w.])/(work|home|root|tmp)/", text), "a path of one machine"
