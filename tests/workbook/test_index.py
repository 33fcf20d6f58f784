"""The list of all runs, ``verdict.md``, and how pages of one chain find each other."""

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import mistune
import pytest
from browser import open_page
from hypothesis import given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_markdown_cell, new_notebook
from sample_notebooks import PAYLOADS, cell, shown

from dlrm_workbook.runner.index import write_index
from dlrm_workbook.runner.summary import (
    as_markdown,
    markdown_table,
    plain_text,
    shortened,
    summarise,
    verdict_markdown,
)
from dlrm_workbook.show.tables import Cells, Quality, TextTable
from tests.conftest import Chain


def make_run(root: Path, name: str, day: str = "2026-11-22", **record: object) -> Path:
    folder = root / day / name
    folder.mkdir(parents=True)
    notebook = name.split("-")[1]
    fields = {"notebook": notebook, "preset": "quick", "status": "finished", "seconds": 12.5}
    (folder / "run.json").write_text(json.dumps(fields | record))
    (folder / f"{notebook}.html").touch()
    (folder / f"{notebook}.ipynb").touch()
    return folder


class _Rows(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "a":
            self.links.append(dict(attrs)["href"])

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] = (self.rows[-1][-1] + data).strip()


def listed(root: Path) -> _Rows:
    reader = _Rows()
    reader.feed(write_index(root).read_text().partition("<main")[2].partition("</tbody>")[0])
    return reader


def test_the_list_names_all_runs_newest_first_and_links_to_what_is_there(tmp_path: Path) -> None:
    make_run(tmp_path, "120000-train-quick", day="2026-11-21", status="failed", error="It <b>broke")
    folder = make_run(tmp_path, "080000-profile-quick", headline="Data takes 48% of the step.")
    (folder / "profile.html").unlink()
    (folder / "verdict.md").touch()
    make_run(tmp_path, "090000-bottlenecks-a b", status="running", seconds=None)
    found = listed(tmp_path)
    times = [row[0] for row in found.rows[1:]]
    assert times == ["2026-11-22 09:00:00", "2026-11-22 08:00:00", "2026-11-21 12:00:00"]
    said = "Data takes 48% of the step."
    assert found.rows[2][1:6] == ["profile", "quick", "finished", said, "12.5 s"]
    assert found.rows[3][4] == "It <b>broke", "escaped"
    assert found.links[:3] == [
        f"2026-11-22/090000-bottlenecks-a%20b/{file}"
        for file in ("bottlenecks.html", "bottlenecks.ipynb", "run.json")
    ]
    assert "2026-11-22/080000-profile-quick/profile.html" not in found.links
    assert "2026-11-22/080000-profile-quick/verdict.md" in found.links


def test_the_list_leaves_out_what_is_no_run(tmp_path: Path) -> None:
    make_run(tmp_path, "120000-train-quick")
    for name, text in {
        "half": '{"notebook": "tra',
        "list": "[1]",
        "empty": "",
        "deep": "[" * 100_000,
        "binary": "\udc80",
    }.items():
        folder = tmp_path / "2026-11-22" / name
        folder.mkdir()
        (folder / "run.json").write_text(text, errors="surrogateescape")
    (tmp_path / "2026-11-22" / "foreign").mkdir()
    (tmp_path / "2026-11-22" / "file").touch()
    make_run(tmp_path, "120000-train-quick", day="examples")
    odd = make_run(
        tmp_path, "130000-train-quick", seconds=1e400, quality={"level": []}, headline={"a": 1}
    )
    (odd / "run.json").chmod(0o644)
    assert [row[0][-8:] for row in listed(tmp_path).rows[1:]] == ["13:00:00", "12:00:00"]
    assert (
        "6 folders without a readable run.json are left out"
        in (tmp_path / "index.html").read_text()
    )
    assert "No run yet" in write_index(tmp_path / "2026-11-22" / "foreign").read_text()


def test_a_thousand_runs_are_listed_quickly(tmp_path: Path) -> None:
    parameters = {"model": {"table_rows": [1_000_000] * 100}}
    for number in range(1000):
        clock = f"{number // 3600:02}{number // 60 % 60:02}{number % 60:02}"
        make_run(tmp_path, f"{clock}-train-quick", parameters=parameters)
    begun = time.process_time()
    assert len(listed(tmp_path).rows) == 1001
    assert time.process_time() - begun < 30  # loose: the machine may be slow
    assert (tmp_path / "index.html").read_text().count("<tr hidden>") == 950


@pytest.mark.browser
def test_the_list_is_sorted_and_filtered_in_a_browser(tmp_path: Path) -> None:
    for number in range(12):
        name, preset = f"1200{number:02}-train-quick", f"quick{number}"
        make_run(tmp_path, name, preset=preset, seconds=100.0 - number)
    url = write_index(tmp_path).as_uri()
    for width in (1400, 420):
        with open_page(url, viewport={"width": width, "height": 900}) as (page, seen):
            wide = page.evaluate("document.documentElement.scrollWidth")
            assert wide == width, f"{wide} px of {width}"
            page.get_by_role("button", name="took").click()
            page.get_by_role("button", name="took").click()
            first = page.locator("tbody tr").first
            assert "1 min 29 s" in first.inner_text()
            page.get_by_label("Show only rows").fill("quick11")
            assert page.locator("tbody tr >> visible=true").count() == 1
            assert seen.console_errors == []


@pytest.mark.notebook
def test_pages_of_a_chain_link_to_each_other_and_to_the_list(quick_chain: Chain) -> None:
    links = {}
    for name in ("train", "profile", "bottlenecks"):
        (page,) = quick_chain.root.glob(f"*/*-{name}-*/{name}.html")
        masthead = page.read_text().partition("<body>")[2].partition("</header>")[0]
        links[name] = re.findall(r'<a href="(\.\.[^"]*)">(.*?)</a>', masthead)
        for address, _ in links[name]:
            assert (page.parent / address).is_file(), f"{name} links to {address}"
        assert (page.parent / "verdict.md").read_text().startswith("# ")
    assert [text for _, text in links["train"]] == ["profile", "bottlenecks", "all runs"]
    assert [text for _, text in links["bottlenecks"]] == ["train", "profile", "all runs"]


def notebook(*outputs: tuple[str, dict], title: str = "# Title\n\n## Part") -> Any:
    cells = [cell(shown(data), tags=[tag]) for tag, data in outputs]
    return new_notebook(cells=[new_markdown_cell(title), *cells])


def test_verdict_holds_headline_quality_tables_and_machine() -> None:
    findings = Cells("finding", ["a|b `c` <i>", "d"])
    table = TextTable([findings, Cells("step (ms)", ["1,234.5", "–"], words=False)])
    summary = summarise(
        notebook(
            ("headline", {"text/markdown": "**Data takes 48%.** Start with `-p a=<b>`."}),
            ("quality", Quality("green", "Quiet machine.")._repr_mimebundle_()),
            ("summary", {"text/html": table._repr_html_()}),
            ("none", {"text/html": table._repr_html_()}),
        )
    )
    text = verdict_markdown(
        summary, {"parameters": {"title": "A [run]"}}, [("took", "5 s")], ["n.html"]
    )
    assert text.splitlines()[0] == r"# Title: A \[run\]"
    assert "**Data takes 48%.** Start with `-p a=<b>`." in text
    assert "**Reliable.** Quiet machine." in text
    assert text.count("## Part") == 1
    assert "| --- | ---: |\n" + r"| a\|b \`c\` \<i\> | 1,234.5 |" + "\n| d | – |" in text
    assert "| took | 5 s |" in text and "[n.html](n.html)" in text
    assert summary.fields() == {
        "headline": "Data takes 48%. Start with -p a=<b>.",
        "quality": {"level": "green", "sentence": "Quiet machine."},
    }
    unfinished = verdict_markdown(
        summarise(notebook()), {"status": "failed", "error": "it*"}, [], []
    )
    assert r"**This run is not complete (failed).** it\*" in unfinished
    assert summarise(notebook()).fields() == {}


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab_*`~[]()<>!|#$&\\ \n-.1@:/", max_size=30))
def test_names_are_read_in_a_table_as_they_are(name: str) -> None:
    html = str(
        mistune.create_markdown(plugins=["table", "strikethrough"])(
            markdown_table([["h", "i"], ["x", name]])
        )
    )
    cells = re.findall(r"<td[^>]*>(.*?)</td>", html, re.DOTALL)
    reader = _Rows()
    reader.feed(f"<tr><td>{cells[1]}</td></tr>")
    assert reader.rows == [[" ".join(name.split())]] and "<" not in cells[1]


@pytest.mark.parametrize("payload", PAYLOADS)
def test_verdict_passes_no_html_on(payload: str) -> None:
    summary = summarise(notebook(("headline", {"text/markdown": payload}), title=f"# {payload}"))
    text = verdict_markdown(summary, {"parameters": {"title": payload}}, [("c", payload)], [])
    rendered = str(mistune.create_markdown(escape=False, plugins=["table"])(text))
    tags = set(re.findall(r"<\s*/?([a-zA-Z][a-zA-Z0-9]*)", rendered))
    allowed = "h1 h2 p table thead tbody tr th td em strong code pre"
    assert tags <= set(allowed.split())


def test_a_headline_is_cut_at_a_sentence() -> None:
    assert shortened("One. Two three four.", 100) == "One. Two three four."
    assert shortened("One two three. Four five six seven.", 20) == "One two three."
    assert shortened("One two. All together: three.", 27) == "One two. All together: …"
    assert shortened("One two three four five", 12) == "One two …"
    assert plain_text("**a** `b` _c_\n\nd &amp; e") == "a b c d & e"
    assert as_markdown("embedding_bag _x") == r"embedding_bag \_x"
