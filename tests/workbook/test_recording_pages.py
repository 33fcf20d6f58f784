"""Pages of real recordings of GPUs, of both engines, as a reader meets them in a browser."""

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import nbformat
import pytest
from browser import PHONE, check_drawn, open_page, require_browser
from recordings import SEVERAL, TRACES, recording
from test_notebooks import run_cells

from dlrm_core.base.files import read_json
from dlrm_workbook import cli
from dlrm_workbook.ground.machine import REPOSITORY
from dlrm_workbook.ground.runs import RunFolder
from dlrm_workbook.ground.units import at_most, ratio
from dlrm_workbook.runner.pages import FIGURE
from dlrm_workbook.runner.summary import table_rows
from dlrm_workbook.show.tables import bundle
from tests.conftest import Chain

pytestmark = [pytest.mark.browser, pytest.mark.notebook, pytest.mark.usefixtures("browser")]

SCREEN = {"width": 1440, "height": 900}
EXPERIMENT = (
    "dlrm_s_pytorch.py --mini-batch-size=2048 --num-batches=100 --arch-mlp-bot=512-512-64 "
    "--arch-mlp-top=1024-1024-1024-1 --arch-sparse-feature-size=64 --data-generation=random"
)
PAGES = {"experiment": "dlrm-h100-pc.d", "several ranks": SEVERAL}


@pytest.fixture(scope="module", params=PAGES, ids=list(PAGES))
def explained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(name, run folder of the page that explains the recording)."""
    require_browser()
    given = ["run", "bottlenecks", "-p", f"profile_run={recording(PAGES[request.param])}"]
    if request.param == "experiment":
        given += ["--like", EXPERIMENT, "-p", "profiling.device_name=H100-SXM"]
    out = tmp_path_factory.mktemp("pages")
    assert cli.main([*given, "--output-root", str(out)]) == 0
    folder = next(out.glob("*/*-bottlenecks-*"))
    return request.param, RunFolder(folder, read_json(folder / "run.json"))


HOVERS = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.filter(trace => trace.type === 'bar' && trace.base !== undefined)
        .map(trace => trace.hovertemplate || ''))"""


def test_pages_draw_and_say_what_the_recording_holds(explained: tuple[str, RunFolder]) -> None:
    name, folder = explained
    url = folder.html.as_uri()
    with open_page(url, **PHONE) as (page, seen):
        check_drawn(page, seen)
    with open_page(url, viewport={"width": 1200, "height": 900}) as (page, seen):
        # folded code is not seen
        text = " ".join(str(page.evaluate("document.body.innerText")).split())
        # drawn once more, for another width and the other colours
        check_drawn(page, seen)
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
        # by the model that its command names, which the recording does not
        assert "at rates of the GPU's data sheet" in document["headline"]
        assert any("serialised" in caution for caution in document["cautions"])
        assert "copies" not in {finding["id"] for finding in document["findings"]}


STATED = re.compile(r"(?:^|; |\. )([^;()]+?) ([\d,.]+) ms \((<?[\d.]+%)\)")
"""What a figure's description states of a name: its time and the share that this is."""


def statements(ipynb: Path) -> dict[tuple[str, float], set[str]]:
    """Name and time in ms, to three digits, to the shares that a page's figures and tables state
    of them."""
    found: dict[tuple[str, float], set[str]] = {}

    def state(name: str, time: str, share: str) -> None:
        # of fewer digits a time may stand for several
        if len(re.sub(r"^[0.]+|\D", "", time)) >= 3 and share.endswith("%"):
            key = name.strip(), float(f"{float(time.replace(',', '')):.3g}")
            found.setdefault(key, set()).add(share)

    for cell in nbformat.read(ipynb, as_version=4).cells:
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if FIGURE in data:
                for statement in STATED.findall(str(data["text/plain"])):
                    state(*statement)
            elif "<table" in data.get("text/html", ""):
                titles, *rows = table_rows(data["text/html"])
                times = [at for at, title in enumerate(titles) if title.endswith("(ms)")]
                for row in rows:
                    for at in times:  # a share that says of what, as "of GPU time", is another
                        if titles[at + 1 : at + 2] == ["share"]:
                            state(row[0], row[at], row[at + 1])
    return found


def test_a_page_states_one_share_of_one_time(explained: tuple[str, RunFolder]) -> None:
    """A chart said 21.5 % and its table 17.9 % of the same 2.01 ms."""
    found = statements(explained[1].ipynb)
    assert len(found) >= 5
    assert {key: shares for key, shares in found.items() if len(shares) > 1} == {}
    document = json.loads((explained[1].path / "bottlenecks.json").read_text())
    text = explained[1].ipynb.read_text()
    for finding in document["findings"]:
        gain = finding["predicted_speedup"]
        is_bound = gain and gain["low"] <= 1 < 1.005 < gain["high"] < 100
        if is_bound and not finding.get("timed_speedup"):
            bound = at_most(gain["high"])
            wrong = {f"At most {ratio(gain['high'], figures=n)} faster" for n in (2, 3)}
            assert bound in text and not any(
                words in text for words in wrong - {f"{bound.capitalize()} faster"}
            )


SMALL = 700_000
"""Bytes of a notebook that GitHub and nbviewer still show."""


def test_notebooks_of_recordings_stay_small(explained: tuple[str, RunFolder]) -> None:
    assert explained[1].ipynb.stat().st_size <= SMALL


@pytest.mark.parametrize("name", [*TRACES.values(), "dlrm-h100-host.d"])
def test_notebooks_of_other_recordings_stay_small(name: str, tmp_path: Path) -> None:
    place = str(recording(name))
    shown = run_cells("bottlenecks", profile_run=place, output_folder=str(tmp_path))
    stored = json.dumps([bundle(output) for output in shown])
    assert len(stored.encode()) <= SMALL
    for said in re.findall(r"The whole table is in ([\w/.]+csv)", stored):
        assert (tmp_path / said).is_file()


FIRST_SCREEN = "(place) => place.getBoundingClientRect().bottom <= innerHeight"


def check_ten_answers(folder: Path) -> None:
    """Assert that the page answers the questions of docs/pages.md where it says so."""
    document = json.loads((folder / "bottlenecks.json").read_text())
    headline = re.sub(r"[*`\s]+", " ", document["headline"]).strip()
    first, last = document["findings"][0], document["stages"][-1]["name"]
    with open_page((folder / "bottlenecks.html").as_uri(), viewport=SCREEN) as (page, _):
        answer = page.locator(".masthead .headline")
        text = re.sub(r"\s+", " ", answer.inner_text())
        assert text.startswith(headline.partition(". ")[0]), "what limits, by how much"
        bars = json.dumps(page.evaluate("document.querySelector('.headline .plot').data"))
        if first["change"]:
            options = " ".join(f"-p {name}={value}" for name, value in first["change"].items())
            assert answer.locator("code").first.inner_text() == options, "what first"
            together = document["together"]
            if together and together["changes"] > 1:
                assert f"{ratio(together['speedup']['mid'], figures=2)} faster" in text, "together"
            assert "Hardware limit" in text and last in bars, "what is the limit"
        for place in (".masthead .headline", ".masthead .quality", "#files"):
            assert page.locator(place).evaluate(FIRST_SCREEN), f"{place} is on the first screen"
        assert page.locator(".quality.green, .quality.amber, .quality.red").count() == 1
        links = page.locator("#files a").evaluate_all("all => all.map(one => one.href)")
        assert {link.rpartition("/")[2] for link in links} >= {"bottlenecks.json", "verdict.md"}
        assert all(Path(unquote(urlsplit(link).path)).exists() for link in links)
        assert page.locator(".tools button", has_text="Copy as CSV").count() > 0
        advice = page.locator("section", has=page.locator("> #what-to-change"))
        assert "Evidence." in advice.inner_text()
        commands = advice.locator("code").all_inner_texts()
        assert any(command.startswith("dlrm run compare ") for command in commands)
        assert "-f FILE" not in " ".join(commands)
        absent = page.locator("#not-measured-in-this-run")
        assert absent.count() == 1
        assert absent.evaluate("e => e.closest('section').querySelector('h2').id").startswith(
            "how-it-was-measured"
        )
        entries = page.locator(".left-out dd").all_inner_texts()
        assert entries and all(len(entry) > 15 for entry in entries)


def test_ten_questions_are_answered_where_the_guide_says(explained: tuple[str, RunFolder]) -> None:
    check_ten_answers(explained[1].path)


def test_ten_questions_of_our_own_training_are_answered_there_too(quick_chain: Chain) -> None:
    check_ten_answers(quick_chain.last)


def test_the_tracked_notebook_of_the_experiment_is_of_no_one_machine() -> None:
    file = REPOSITORY / "outputs" / "examples" / "experiment.ipynb"
    text = file.read_text(encoding="utf-8")
    assert "351" in text and "idle 99.8%" in text
    assert not re.search(r"(?<![\w.])/(work|home|root|tmp)/", text), "a path of one machine"
