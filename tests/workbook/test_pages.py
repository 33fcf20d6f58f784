"""Pages: self-contained, complete, and made of nothing that a browser would load."""

import base64
import hashlib
import json
import os
import re
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import tinycss2
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nbformat.v4 import new_markdown_cell, new_notebook, new_output
from sample_notebooks import PARAMETERS, PAYLOADS, cell, shown, write_page

from dlrm_core.base.errors import InputError
from dlrm_workbook import explain
from dlrm_workbook.ground.units import value_text
from dlrm_workbook.runner.html_clean import (
    ATTRIBUTES,
    CSS_PROPERTIES,
    TAGS,
    clean_html,
    look_sheet,
    styles_moved,
)
from dlrm_workbook.runner.pages import BRIEF, FIGURE, WIDGET, WIDGET_STATE, render_html, run_facts
from dlrm_workbook.runner.parameters import (
    assigned_values,
    parameter_tables,
    read_notebook,
    write_notebook,
)
from dlrm_workbook.runner.templating import hash_source
from dlrm_workbook.samples import SAMPLE
from dlrm_workbook.show.tables import Cells, Quality, TextTable, bundle

PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR4nGP4"
    "z8BQDwAEgAF/pooBPQAAAABJRU5ErkJggg=="
)


def figure(**data) -> dict:
    return {FIGURE: {"data": [{"type": "bar", "y": [1, 2], **data}], "layout": {}}}


def page(folder: Path, *cells, **more) -> str:
    return write_page(folder, *cells, **more).read_text()


def body(text: str) -> str:
    """A page without plotly.js, which would drown every search."""
    return re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)


def body_of(folder: Path, *cells, **more) -> str:
    return body(page(folder, *cells, **more))


def test_plotly_is_inside_once_where_there_are_figures_and_nothing_is_loaded(tmp_path) -> None:
    text = page(tmp_path, cell(shown(figure())), cell(shown(figure()), shown(figure())))
    assert text.count("plotly.js v") == 1
    assert text.count('class="plot"') == 3
    tags = re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", body(text) + "<script>")
    assert {tag for tag in tags if "src=" in tag or "href=" in tag} == {
        '<link rel="icon" href="data:,">'
    }
    for name in ("require.js", "MathJax", "jquery", "googleapis", "@import"):
        assert name not in body(text)
    assert "plotlyServerURL" not in body(text)
    assert len(page(tmp_path, "# Only words")) < 40_000


def test_figure_data_cannot_end_its_script_and_has_no_nan(tmp_path: Path) -> None:
    mime = figure(name="</script><script>alert(1)</script>", x=[1.0, float("nan")])
    text = body_of(tmp_path, cell(shown(mime)))
    (stored,) = re.findall(r'<script type="application/json">(.*?)</script>', text, re.DOTALL)
    data = json.loads(stored)["data"][0]
    assert data["name"] == "</script><script>alert(1)</script>"
    assert data["x"] == [1.0, None]


def test_markdown_title_contents_and_tables(tmp_path: Path) -> None:
    text = body_of(
        tmp_path,
        "# The title\n\n**bold** and `code`",
        "## Part\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n- item",
        "## Part\n\n```python\nx = 1\n```",
    )
    assert "<title>The title</title>" in text
    assert text.count("The title") == 2, "in the head and as the one h1"
    for part in ("<strong>bold</strong>", "<code>code</code>", "<td>1</td>", "<li>item</li>"):
        assert part in text
    assert 'id="part"' in text and 'id="part-2"' in text
    assert '<a href="#part-2">Part</a>' in text


def test_tables_keep_their_content_and_lose_their_scripts(tmp_path: Path) -> None:
    html = (
        "<div><style scoped>.dataframe {}</style><table border='1' class='dataframe'>"
        "<tr><td onclick='steal()'>4 &lt; 5</td></tr></table><script>bad()</script></div></div>"
    )
    text = body_of(tmp_path, cell(shown({"text/html": html, "text/plain": "t"})))
    row = "<tbody><tr><td>4 &lt; 5</td></tr></tbody>"
    assert f'<table border="1" class="dataframe">{row}</table>' in text
    assert "bad()" not in text and "steal" not in text and "scoped" not in text


def test_progress_bars_become_text(tmp_path: Path) -> None:
    def model(**state):
        return {"model_name": "m", "state": state}

    state = {
        "top": model(children=["IPY_MODEL_a", "IPY_MODEL_b", "IPY_MODEL_c"]),
        "a": model(value="steps: 100%"),
        "b": model(value=5.0),
        "c": model(value=" 5/5 [00:01&lt;00:00]"),
    }
    stream = new_output("stream", name="stderr", text="10%|█ |\r 50%|█ |\r100%|██| 2/2\n")
    text = body_of(
        tmp_path,
        cell(shown({WIDGET: {"model_id": "top"}, "text/plain": "0%"})),
        cell(stream),
        metadata={"widgets": {WIDGET_STATE: {"state": state}}},
    )
    assert "steps: 100% 5/5 [00:01&lt;00:00]" in text
    assert "100%|██| 2/2" in text and "50%|" not in text


def test_errors_colours_images_and_streams(tmp_path: Path) -> None:
    error = new_output(
        "error", ename="ValueError", evalue="a < b", traceback=["\x1b[31mred\x1b[0m"]
    )
    hatchet = "  <three>\x1b[38;5;196m42\x1b[0m"  # of 256 colours, which have no class
    lines = ("one ", "<two>\n", hatchet)
    streams = [new_output("stream", name="stdout", text=text) for text in lines]
    text = body_of(tmp_path, cell(*streams), cell(error), cell(shown({"image/png": PIXEL})), cell())
    coloured = re.search(r'one &lt;two&gt;\n  &lt;three&gt;<span data-look="(\d+)">42<', text)
    assert coloured and f'[data-look="{coloured[1]}"]{{color:rgb(255, 0, 0) !important}}' in text
    assert ' style="' not in text, "the policy would stop it"
    assert "<strong>ValueError</strong>: a &lt; b" in text
    assert '<span class="ansi-red-fg">red</span>' in text
    assert f"data:image/png;base64,{PIXEL}" in text
    assert 'id="failed"' in text


def test_parameters_are_a_table_that_marks_what_was_changed(tmp_path: Path) -> None:
    injected = (
        "# Parameters\ntitle = 'A <run>'\nmodel = {'tables': 8, 'table_rows': [1000000]}\ncount = 7"
    )
    text = body_of(
        tmp_path,
        cell(source=PARAMETERS, tags=["parameters"]),
        cell(source=injected, tags=["injected-parameters"]),
    )
    assert text.count('class="parameters"') == 1
    row = r'<tr class="changed"[^>]*><th scope="row">count</th><td>7</td></tr>'
    assert re.search(row, text)
    assert "<td>A &lt;run&gt;</td>" in text
    assert "<td>1,000,000</td>" in text
    alone = body_of(tmp_path, cell(source=PARAMETERS, tags=["parameters"]))
    assert '<th scope="row">count</th><td>3</td>' in alone


def test_outcome_of_the_run_is_told(tmp_path: Path) -> None:
    run = {
        "status": "failed",
        "error": "n.ipynb: it broke",
        "preset": "quick",
        "started": "2026-11-20T17:45:01+01:00",
        "seconds": 245.2,
        "machine": {"cpu": "A CPU", "usable_cores": 2, "memory_gib": 8.0, "gpus": ["H200"]},
        "versions": {"torch": "2.13.0", "python": "3.11.7", "commit": "abc"},
        "command": "dlrm run n",
    }
    text = body_of(tmp_path, "# T", run=run)
    for part in ("not complete", "it broke", "quick", "4 min 05 s", "A CPU, 2 cores", "H200"):
        assert part in text
    finished = body_of(tmp_path, "# T", run=run | {"status": "finished"})
    assert "not complete" not in finished


def test_not_a_notebook_is_bad_input(tmp_path: Path) -> None:
    (tmp_path / "n.ipynb").write_text("{}")
    with pytest.raises(InputError, match="is not a notebook"):
        render_html(tmp_path / "n.ipynb", tmp_path / "n.html")
    assert not (tmp_path / "n.html").exists()


def test_images_beside_the_notebook_are_embedded_and_others_described(tmp_path: Path) -> None:
    (tmp_path / "near.svg").write_text("<svg/>")
    source = "![near](near.svg) ![far](https://example.org/far.png) ![gone](gone.png)"
    text = body_of(tmp_path, new_markdown_cell(source))
    assert text.count("data:image/svg+xml;base64,") == 1
    assert "[image: far]" in text and "[image: gone]" in text
    assert "example.org" not in text


def test_no_image_brings_a_file_from_outside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(b"secret")
    folder = tmp_path / "run"
    (folder / "in side").mkdir(parents=True)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "loop.png").symlink_to("loop.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "in side" / "ä.png").write_bytes(b"near")
    os.mkfifo(folder / "pipe.png")
    near = ["in%20side/ä.png", "in%20side/../in%20side/%C3%A4.png"]
    far = ["../secret.png", "%2e%2e/secret.png", "link.png", "loop.png", "zero.png", "pipe.png"]
    far += ["a\0.png", "in%20side", str(tmp_path / "secret.png"), f"file://{tmp_path}/secret.png"]
    for write in ("![words]({})".format, '<img src="{}" alt="words">'.format):
        for address in near + far:
            text = body_of(folder, new_markdown_cell(write(address)))
            data = re.findall(r'src="data:image/png;base64,(.*?)"', text)
            assert [base64.b64decode(one) for one in data] == [b"near"] * (address in near), address
            assert "words" in text


class _Allowed(HTMLParser):
    """Checks that a fragment closes what it opens and is made of what the cleaner lists."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        assert tag in TAGS
        for name, value in attrs:
            assert name in ATTRIBUTES["*"] | ATTRIBUTES.get(tag, set())
            if name == "src":
                assert value.startswith("data:image/")
            elif name == "href":
                assert re.match(r"https?://|mailto:|#|[^:]*$", value)
            elif name == "style":
                declared = {part.split(":")[0].strip() for part in value.split(";")}
                assert declared <= CSS_PROPERTIES | {""}
        if tag not in {"br", "img", "hr", "col", "wbr"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_decl(self, decl):
        raise AssertionError(decl)

    handle_comment = handle_pi = unknown_decl = handle_decl


def check_cleaned(cleaned: str) -> None:
    # once more too: HTML knows trees (a link in a link) that are read otherwise than written
    for text in (cleaned, clean_html(cleaned)):
        checker = _Allowed()
        checker.feed(text)
        checker.close()
        assert checker.open == []


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_payload_passes(payload: str) -> None:
    check_cleaned(clean_html(payload))
    # what is left open does not take the page around it along
    check_cleaned(clean_html(f"<table><tr><td>{payload}</td></tr></table>"))


def test_no_listed_element_is_read_by_rules_of_its_own() -> None:
    foreign = {"svg", "math", "select", "template", "form", "frameset", "object"}
    raw = {"script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes"}
    assert not TAGS & (foreign | raw | {"noscript", "plaintext"})


@pytest.mark.parametrize(
    "kept",
    [
        '<h2 id="part">Part</h2>',
        '<details class="more" open=""><summary>words</summary>text</details>',
        '<table class="dataframe"><thead><tr><th style="text-align:left">a</th></tr></thead>'
        '<tbody><tr><td style="text-align:right;white-space:nowrap" colspan="2">1</td></tr>'
        "</tbody></table>",
        '<div style="width:40%;background-color:#0b5cad"></div>',
        f'<img src="data:image/png;base64,{PIXEL}" alt="a &amp; b">',
        '<a href="https://example.org/?a=1&amp;b=2">far</a> <a href="#part">near</a>',
        '<sup class="footnote-ref" id="fnref-1"><a href="#fn-1">1</a></sup>',
        "a &lt; b &amp;&nbsp;↩",
    ],
)
def test_what_pages_are_made_of_stays(kept: str) -> None:
    assert clean_html(kept) == kept


def test_names_with_angle_brackets_stay_and_fields_go(tmp_path: Path) -> None:
    assert clean_html("std::vector<int>") == "std::vector&lt;int&gt;"
    assert clean_html("a<b-c>d</b-c> <0> </1>") == "a&lt;b-c&gt;d&lt;/b-c&gt; &lt;0&gt; "
    assert clean_html("<textarea><b>a</b></textarea><input name=password>") == (
        "&lt;b&gt;a&lt;/b&gt;"
    )
    assert clean_html("a<svg><style><img src=x onerror=b></style></svg>") == "a<img>"
    text = body_of(tmp_path, "- [x] done\n- [ ] open")
    assert "<li>☑ done</li>" in text and "<li>☐ open</li>" in text


def test_policy_names_the_scripts_of_the_page_and_no_others(tmp_path: Path) -> None:
    def policy_and_scripts(*cells) -> tuple[str, list[str]]:
        text = page(tmp_path, *cells)
        policy = re.findall(r"script-src ([^;]*);", text)[0]
        return policy, re.findall(r"<script>(.*?)</script>", text, re.DOTALL)

    for cells, count in ((["# T"], 2), ([cell(shown(figure()))], 4)):
        policy, scripts = policy_and_scripts(*cells)
        digests = [hashlib.sha256(script.encode()).digest() for script in scripts]
        hashes = [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]
        assert len(scripts) == count and policy == " ".join(hashes)
    for cells in (["# T"], [cell(shown(figure()))]):
        text = page(tmp_path, *cells)
        style = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
        sheets = re.findall(r"style-src ([^;]*);", text)[0].split(" ")
        assert "unsafe-inline" not in text.partition("</head>")[0]
        assert sheets[:2] == [f"'{hash_source(sheet)}'" for sheet in style]
        # that of plotly.js's maps too, and the empty one that it fills
        assert len(sheets) == (4 if "plotly" in text else 2)
    compiled, _ = policy_and_scripts(cell(shown(figure(type="scattergl"))))
    assert compiled.endswith(" 'unsafe-eval'") and "unsafe-inline" not in compiled


def test_styles_of_tables_become_a_sheet_of_the_page(tmp_path: Path) -> None:
    table = (
        '<p>style="color:red"</p><table title="a style=b"><tr><td style="text-align: right">1</td>'
        '<td style="text-align:right">2</td><td style="width:40%;color:rgb(1, 2, 3)">3</td></tr>'
    )
    text = page(tmp_path, cell(new_output("display_data", {"text/html": table})))
    assert re.findall(r"<td[^>]*>", text.partition("<main")[2]) == [
        *2 * ['<td data-look="0">'],
        '<td data-look="1">',
    ]
    assert '<p>style="color:red"</p>' in text and 'title="a style=b"' in text
    assert (
        '<style>[data-look="0"]{text-align:right !important}\n'
        '[data-look="1"]{width:40% !important;color:rgb(1, 2, 3) !important}\n</style>'
    ) in text


@given(st.lists(st.tuples(st.sampled_from(sorted(CSS_PROPERTIES)), st.text()), max_size=4))
@example([("color", "red}body{display:none")])
@example([("color", "red</style><script>x()</script>")])
@example([("font-family", "'a"), ("width", "calc(1px")])
@example([("color", "r/*"), ("width", "\\7d")])
def test_no_style_ends_the_rule_that_it_becomes(styles: list[tuple[str, str]]) -> None:
    look = escape(";".join(f"{name}:{value}" for name, value in styles), quote=True)
    looks: dict[str, int] = {}
    moved = styles_moved(clean_html(f'<p style="{look}">a</p>'), looks)
    assert moved == ('<p data-look="0">a</p>' if looks else "<p>a</p>")
    rules = [
        rule for rule in tinycss2.parse_stylesheet(look_sheet(looks)) if rule.type != "whitespace"
    ]
    assert [rule.type for rule in rules] == ["qualified-rule"] * len(looks)
    for rule in rules:
        declared = tinycss2.parse_blocks_contents(rule.content, skip_whitespace=True)
        assert all(one.type == "declaration" and one.important for one in declared)
        assert {one.lower_name for one in declared} <= CSS_PROPERTIES


PIECES = [
    *("<b>", "</b>", "<p>", "</p>", "<table>", "</table>", "<td x=1>", "</td>", "<br/>", "&lt;"),
    *("<script src=//x.org/a.js>", "</script>", "<img src=http://x.org/a.png>", "<svg/>"),
    *("<iframe src=x>", "</iframe>", "<a href=javascript:x onclick=y>", "</a>", "text", "<", ">"),
    *("<style>a{background:url(http://x)}", "</style>", "<!-- c -->", "<link href=x>", '"', "&"),
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12))
def test_cleaned_html_is_balanced_and_harmless(pieces: list[str]) -> None:
    cleaned = clean_html("".join(pieces))
    check_cleaned(cleaned)
    assert "x.org" not in cleaned and "javascript:" not in cleaned


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        ("", "–"),
        (True, "true"),
        (1_000_000, "1,000,000"),
        ([512, 512, 64], "512-512-64"),
        ([1_000_000] * 8, "8 × 1,000,000"),
        ([1.0, 2.5], "1.0, 2.5"),
        ([], ""),
        ("sgd", "sgd"),
    ],
)
def test_value_text(value: object, text: str) -> None:
    assert value_text(value) == text


def test_parameter_cells_are_read_without_running_them() -> None:
    values = assigned_values("import os\na: int = 1\nb = {'c': [1]}\nd = os.sep\ne: str\n")
    assert values == {"a": 1, "b": {"c": [1]}, "d": "os.sep"}
    assert assigned_values("not python (") == {}
    sections = parameter_tables({"model": {"tables": 8}, "x": 1}, {"model": {"tables": 4}})
    assert [name for name, _ in sections] == ["run", "model"]
    assert sections[1][1][0]["changed"] and "tables" in sections[1][1][0]["meaning"]


def test_an_empty_table_adds_nothing_to_the_reason_before_it(tmp_path: Path) -> None:
    empty = {"text/html": TextTable([Cells("part", [])])._repr_html_()}
    why = {"text/markdown": "*Not measured: no iterations.*"}
    text = body_of(
        tmp_path,
        "## Iterations",
        cell(shown(why)),
        cell(shown(empty)),
        "## Passes",
        cell(shown(empty)),
    )
    assert text.count("No iterations") == 1
    assert text.count("Nothing to list") == 1, "only where nothing else says so"


def test_of_what_a_line_overwrote_only_the_last_is_shown(tmp_path: Path) -> None:
    pieces = [new_output("stream", name="stdout", text=text) for text in ("a\rb", "\nc\rd\n")]
    text = page(tmp_path, cell(*pieces))
    assert re.findall("<pre>(.*?)</pre>", text, re.DOTALL)[-1] == "b\nd"


GPU = {"text/markdown": "*Not measured: the run used no GPU.*"}
NUMBERS = {"text/html": TextTable([Cells("part", ["a"]), Cells("time (ms)", ["1"])])._repr_html_()}


def words(text: str) -> str:
    """What a reader reads of a page's main part, with code hidden."""
    main = body(text).partition("<main")[2].partition("</main>")[0]
    main = re.sub(r'<div class="code">.*?</div>\s', "", main, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", main).split())


def test_views_of_one_cell_stand_as_cells_of_their_own(tmp_path: Path) -> None:
    report = explain(SAMPLE)
    names = ("headline", "calls", "callers", "kernels")
    tagged = [pair for name in names for pair in report.show(name).tagged]
    outputs = [new_output("display_data", bundle(one), metadata=tags) for one, tags in tagged]
    blank = cell(new_output("display_data", {"text/markdown": ""}))
    text = page(tmp_path, cell(*outputs), "## Nothing", blank)
    assert "Data generation" in text.partition("<main")[0], "in the masthead"
    assert re.findall(r"<label for=\"tabs[^>]*>(.*?)</label>", text) == ["Top-down", "Bottom-up"]
    assert "Not measured: the run used no GPU" in words(text) and ">Nothing<" not in body(text)


def test_a_section_says_once_why_it_has_no_figures(tmp_path: Path) -> None:
    other = {"text/markdown": "*Not measured: no samples.*"}
    text = page(
        tmp_path,
        "## Kernels",
        cell(shown(GPU)),
        cell(shown(GPU)),
        cell(shown(other)),
        cell(shown(NUMBERS)),
    )
    assert words(text).count("the run used no GPU") == words(text).count("no samples") == 1


def test_sections_without_data_are_one_list_at_the_end(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        "## Kernels\n\nAbout kernels.",
        cell(shown(GPU)),
        cell(shown({"text/markdown": ""})),
        "## Time\n\nAbout time.",
        cell(shown(NUMBERS)),
        "### Copies",
        cell(shown(GPU)),
        "## Glossary",
    )
    assert words(text).endswith(
        "Glossary Not measured in this run Kernels · Copies The run used no GPU."
    )
    assert "About kernels" not in text and "About time" in text
    contents = re.findall(r'<li class="level-\d"><a href="#([^"]*)"', text)
    assert contents == ["time", "glossary", "not-measured-in-this-run"]


def test_headline_and_quality_stand_in_the_masthead_and_nowhere_else(tmp_path: Path) -> None:
    quality = Quality("amber", "Another program used `0.2` cores.")._repr_mimebundle_()
    text = body_of(
        tmp_path,
        "# Title\n\nWhat this is.",
        "## Verdict",
        cell(shown({"text/markdown": "**Data** limits."}), shown(figure()), tags=["headline"]),
        cell(shown(quality), tags=["quality"]),
        cell(shown({Quality.MIME: {"level": "<b>", "sentence": "forged"}}), tags=["quality"]),
    )
    masthead, _, rest = text.partition("</header>")
    order = [
        "Title",
        "What this is",
        "<strong>Data</strong> limits",
        'class="plot"',
        "Use with care",
    ]
    places = [masthead.index(part) for part in order]
    assert places == sorted(places)
    assert 'class="quality amber"' in masthead and "<code>0.2</code> cores" in masthead
    assert "limits" not in rest and "0.2" not in rest and "forged" not in text
    with pytest.raises(ValueError, match="'blue', expected one of green"):
        Quality("blue", "")


def folds(text: str) -> list[str]:
    return [
        re.sub(r"<[^>]*>", "", line).strip()
        for line in re.findall(r'<details class="fold"><summary>(.*?)</summary>', text, re.DOTALL)
    ]


def test_what_repeats_a_figure_or_is_a_detail_is_folded(tmp_path: Path) -> None:
    titled = {FIGURE: {"data": [], "layout": {"title": {"text": "Times of <b>parts</b>"}}}}
    text = page(
        tmp_path,
        "## A",
        cell(shown(NUMBERS)),
        cell(shown(figure())),
        cell(source="x = 1"),
        cell(shown(NUMBERS)),
        cell(shown(figure())),
        cell(shown(NUMBERS), tags=["open"]),
        cell(shown(figure())),
        "## B",
        cell(shown(NUMBERS)),
        cell(shown(titled), tags=["detail"]),
        cell(shown({"text/markdown": "words"}), tags=["detail"]),
    )
    assert folds(text) == ["Figure 1 part · time (ms)", "Times of  parts", "Details"]


def test_a_section_can_start_closed(tmp_path: Path) -> None:
    text = page(
        tmp_path,
        new_markdown_cell("## More\n\nwords", metadata={"tags": ["details"]}),
        "### Within",
        "## After",
    )
    closed = re.findall(r'<details class="section">(.*?)</details>', text, re.DOTALL)
    assert len(closed) == 1
    assert 'id="more"' in closed[0] and 'id="within"' in closed[0] and "After" not in closed[0]


def test_code_and_short_prints_hide_together_but_not_of_a_failure(tmp_path: Path) -> None:
    def printed(lines: int) -> dict:
        text = "".join(f"line {number} of {lines}\n" for number in range(lines))
        return new_output("stream", name="stdout", text=text)

    warning = new_output("stream", name="stderr", text="a warning\n")
    error = new_output("error", ename="E", evalue="v", traceback=["t"])
    text = page(tmp_path, cell(printed(2)), cell(printed(9)), cell(warning))
    assert "of 2" not in words(text) and folds(text) == [
        "Printed text, 9 lines",
        "Messages, 1 line",
    ]
    assert "of 2" in words(page(tmp_path, cell(printed(2), error)))


def test_cells_that_a_stopped_run_left_are_not_taken_for_measured(tmp_path: Path) -> None:
    pending = {"papermill": {"status": "pending"}}
    text = page(tmp_path, "## Later", cell(**pending), run={"status": "failed"})
    assert "Later The run ended before this." in words(text)


def test_a_page_links_to_the_runs_of_its_chain_that_are_there(tmp_path: Path) -> None:
    here = tmp_path / "2026-11-22" / "120002-n-quick"
    here.mkdir(parents=True)
    for name in ("train", "profile"):
        (here.parent / f"1-{name}").mkdir()
    (here.parent / "1-train" / "train.html").touch()
    (tmp_path / "index.html").touch()
    chain = {"train": "../1-train", "profile": "../1-profile", "n": "."}
    masthead = body_of(here, "# N", run={"chain": chain}).partition("<main")[0]
    links = re.findall(r'<a href="(\.\.[^"]*)">(.*?)</a>', masthead)
    assert links == [("../1-train/train.html", "train"), ("../../index.html", "all runs")]
    assert '<span aria-current="page">n</span>' in masthead


def test_commands_name_the_parameters_of_what_the_page_is_about(tmp_path: Path) -> None:
    said = "Not measured: `dlrm run profile -f FILE -p profiling.probes=true` measures it"
    table = "<table><tbody><tr><td>dlrm run all -f FILE</td></tr></tbody></table>"
    cells = [cell(shown({"text/markdown": said})), cell(shown({"text/html": table}))]
    own, explained = tmp_path / "own", tmp_path / "explained"
    for folder, command in ((own, "mine.yaml"), (explained, "'a <b>.yaml' -p model.tables=3")):
        folder.mkdir()
        run = {"command": f"dlrm run all -f {command}", "notebook": "n", "parameters": {}}
        (folder / "run.json").write_text(json.dumps(run))
    text = body_of(own, *cells, run=run)
    assert text.count("-f mine.yaml") == 2 and "FILE" not in text
    assert "dlrm run profile -f mine.yaml -p profiling.probes=true" in text
    text = body_of(own, *cells, run={"parameters": {"profile_run": str(explained)}})
    assert (
        text.count("-f &#39;a &lt;b&gt;.yaml&#39; -p model.tables=3")
        + text.count("-f 'a &lt;b&gt;.yaml' -p model.tables=3")
        == 2
    )
    # the sample, and a recording that anybody made
    for unknown in ("", str(tmp_path / "trace.json.gz")):
        run = {"parameters": {"profile_run": unknown}}
        assert body_of(own, *cells, run=run).count("-f FILE") == 2


def test_an_executed_notebook_is_written_with_a_figure_in_a_line(tmp_path: Path) -> None:
    numbers = [index / 7 for index in range(500)]
    mime = {
        **figure(x=numbers, name='\u00e9 "0" \\'),
        "text/plain": "a\nb",
        "image/svg+xml": "<svg/>",
    }
    nb = new_notebook(cells=[new_markdown_cell("# T\n\nWords"), cell(shown(mime), shown(mime))])
    nbformat.write(nb, tmp_path / "plain.ipynb")
    write_notebook(nb, tmp_path / "n.ipynb")
    assert read_notebook(tmp_path / "n.ipynb") == read_notebook(tmp_path / "plain.ipynb")
    lines = (tmp_path / "n.ipynb").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 80 and sum(FIGURE in line for line in lines) == 2
    assert (tmp_path / "n.ipynb").stat().st_size < 0.7 * (tmp_path / "plain.ipynb").stat().st_size


def test_the_masthead_names_the_machine_of_the_recording() -> None:
    here = {"cpu": "AMD EPYC", "usable_cores": 2, "memory_gib": 16}
    run = {"preset": "trace", "machine": here, "recording": {"device": "Tesla T4", "machine": {}}}
    facts = dict(run_facts(run))
    assert facts["recorded on"] == "Tesla T4" and "machine" not in facts
    assert facts["analysed on"] == "AMD EPYC, 2 cores, 16 GiB" and "analysed on" not in BRIEF
    assert "does not name" in dict(run_facts(run | {"recording": {}}))["recorded on"]
    own = dict(run_facts({"machine": here}))
    assert own["machine"] == facts["analysed on"] and "recorded on" not in own
