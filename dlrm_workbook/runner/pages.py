"""Renders an executed notebook as one self-contained HTML page.

The page loads nothing: plotly.js is inside it (once), so are style sheet and
images, and a content security policy makes the browser refuse anything else; of
scripts it lets only those run whose hashes it names, which are the page's own.
Figures are stored in the notebook as data (``application/vnd.plotly.v1+json``)
and drawn by the page's own script, which fits them to the window and to the
light or dark colours of the reader's system. What stands where is
:mod:`dlrm_workbook.runner.sections`'s to say.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import os
import re
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import mistune
from markupsafe import Markup, escape
from nbconvert.filters import ansi2html
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat.v4 import new_markdown_cell
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

from dlrm_core.base.errors import InputError
from dlrm_core.base.files import open_binary, plain, write_text
from dlrm_workbook.ground.units import duration
from dlrm_workbook.runner.html_clean import (
    ImageResolver,
    clean_html,
    image_address,
    look_sheet,
    styles_moved,
)
from dlrm_workbook.runner.parameters import (
    UNKNOWN_FILE,
    assigned_values,
    explained_options,
    parameter_tables,
    read_notebook,
)
from dlrm_workbook.runner.sections import Cell, Heading, Output, apart, arrange
from dlrm_workbook.runner.templating import filled, template_text
from dlrm_workbook.show.tables import EMPTY, QUALITY_LEVELS, Quality
from dlrm_workbook.show.theme import plotly_js


def image_html(kind: str, data: str, words: str = "Image made by the cell above") -> Markup:
    if kind == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    address = f"data:{kind};base64,{''.join(data.split())}"
    return Markup('<img src="{}" alt="{}">').format(address, words)


def highlighted(source: str, language: str) -> Markup:
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return escape(source)
    return Markup(highlight(source, lexer, HtmlFormatter(nowrap=True)).rstrip("\n"))


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


FIGURE = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"
IMAGES = ("image/svg+xml", "image/png", "image/jpeg", "image/gif", "image/webp")
COMPILED_TRACES = {"parcoords", "scattergl", "scatterpolargl", "splom"}
"""Traces for which plotly.js compiles WebGL code from strings, so that the page must allow it."""
PLOTLY_SHEET = re.compile(r"""\.id="[0-9a-f]{64}",\w+\.textContent='([^'\\]*)'""")
"""A style sheet within plotly.js, which it adds to a page as it is: that of its maps."""
MOST_IMAGE = 32 << 20
"""Bytes of the largest image beside a notebook that its page embeds."""
REASON = re.compile(r"\*?Not measured\b")
"""How a sentence begins that stands in place of a figure or table."""
INDEX = "../../index.html"
"""Address of the list of all runs as seen from a page, if there is one."""
STOPPED = "The run ended before this."
BRIEF = ("parameters", "started", "notebook took", "recorded on", "machine")
"""Facts of a run that every reader sees in the masthead; the others stand at the page's end."""
NOTABLE_SECONDS = 0.1  # cells that took less do not say how long


def render_html(
    ipynb: str | os.PathLike[str],
    html: str | os.PathLike[str],
    run: Mapping[str, Any] | None = None,
    *,
    short: bool = False,
) -> Path:
    """Write the page of a notebook, whole or partial.

    Args:
        ipynb: an executed notebook.
        html: where to write; replaced as a whole, never left half written.
        run: what is known of the run (the content of run.json).
        short: leave the cells out, and say that the notebook has them.

    Raises:
        InputError: ``ipynb`` cannot be read as a notebook.
    """
    ipynb, html = Path(ipynb), Path(html)
    nb = read_notebook(ipynb)
    if short:
        title = next((cell for cell in nb.cells if cell.cell_type == "markdown"), None)
        note = f"What was computed is in the notebook, `{ipynb.name}`; this page leaves it out."
        nb.cells = [*([title] if title else []), new_markdown_cell(note)]
    CoalesceStreamsPreprocessor().preprocess(nb, {})
    page = _Page(nb, ipynb.parent, shlex.join(explained_options(run, html.parent) if run else []))
    # papermill's banner points at a prompt number; the page has one of its own
    cells = (cell for cell in nb.cells if not _tagged(cell, "papermill-error-cell-tag"))
    plan = arrange(shown for cell in apart(cells) if (shown := page.cell(cell)) is not None)
    values = page_values(page, run or {}, ipynb.stem, html.parent)
    write_text(html, filled("page.html.j2", plan=plan, page=values))
    return html


def page_values(page: _Page, run: Mapping[str, Any], name: str, place: Path) -> dict[str, Any]:
    """What the template shows around the cells; it links to what lies in ``place`` and beside."""
    scripts = [template_text("page.js"), template_text("tables.js")]
    style, looks = template_text("page.css"), look_sheet(page.looks)
    sheets = [style, looks]
    if page.figures:
        scripts += [plotly_js(), template_text("charts.js")]
        # one of plotly.js's style elements begins empty: no policy restricts rules added later
        sheets += ["", *PLOTLY_SHEET.findall(plotly_js())]
    facts = run_facts(run)
    files = (f"{name}.ipynb", f"{name}.json", "verdict.md", "run.json", "tables/")
    return {
        "title": page.title or name,
        "figures": page.figures,
        "style": Markup(style),
        "looks": Markup(looks),
        "sheets": sheets,
        "scripts": [Markup(script) for script in scripts],
        "webgl": page.webgl,
        "status": run.get("status", ""),
        "error": run.get("error", ""),
        "brief": [(fact, value) for fact, value in facts if fact in BRIEF],
        "facts": [(fact, value) for fact, value in facts if fact not in BRIEF],
        "chain": chain_links(run, name, place),
        "index": INDEX if (place / INDEX).is_file() else "",
        "files": [file for file in files if (place / file).exists()],
        "levels": QUALITY_LEVELS,
    }


def chain_links(run: Mapping[str, Any], name: str, place: Path) -> list[tuple[str, str]]:
    """Notebooks that ran together in order, each with its page's address; of this one none."""
    chain = run.get("chain") or {}
    pages = {other: f"{folder}/{other}.html" for other, folder in chain.items()}
    there = {other: page for other, page in pages.items() if (place / page).is_file()}
    return [(other, there.get(other, "")) for other in chain if other == name or other in there]


def run_facts(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what a reader wants to know of a run before its numbers."""
    versions, recording = run.get("versions") or {}, run.get("recording")
    facts = [("parameters", str(run.get("preset", "")))]
    if run.get("started"):
        started = datetime.fromisoformat(run["started"])
        facts.append(("started", f"{started:%Y-%m-%d %H:%M:%S %Z}".strip()))
    if run.get("seconds"):
        facts.append(("notebook took", duration(run["seconds"])))
    if recording is not None:  # made elsewhere, maybe: this machine only analysed it
        told = machine_text(recording.get("machine") or {}, str(recording.get("device") or ""))
        facts.append(("recorded on", told or "a machine that the recording does not name"))
    here = "machine" if recording is None else "analysed on"
    facts.append((here, machine_text(run.get("machine") or {})))
    software = [f"{n} {versions[n]}" for n in ("torch", "numpy", "python") if n in versions]
    facts.append(("software", ", ".join(software)))
    facts.append(("commit", str(versions.get("commit", ""))))
    facts.append(("command", str(run.get("command", ""))))
    return [(name, value) for name, value in facts if value]


def machine_text(machine: Mapping[str, Any], device: str = "") -> str:
    """A machine in a few words: its GPUs, or the ``device`` that was used, and its processor."""
    words = [str(gpu) for gpu in machine.get("gpus") or []]
    if device and device not in words and not (device == "cpu" and machine.get("cpu")):
        words.insert(0, device)
    if machine.get("cpu"):
        sizes = [(machine.get("usable_cores"), "cores"), (machine.get("memory_gib"), "GiB")]
        words += [str(machine["cpu"]), *(f"{size} {unit}" for size, unit in sizes if size)]
    return ", ".join(words)


class _Page:
    """Turns cells into what the template shows; numbers figures and headings on the way."""

    def __init__(self, nb: Any, folder: Path, options: str = "") -> None:
        self.title = ""
        self._options = options or UNKNOWN_FILE
        """Options of the parameters that the page is about, for the commands that it names."""
        self.figures = 0
        self.webgl = False
        """Whether a figure has one of the compiled traces."""
        self.looks: dict[str, int] = {}
        """Number of each style that the page's elements have."""
        self._folder = folder
        self._anchors: set[str] = set()
        self._headings: list[Heading] = []
        """Headings of the cell in hand."""
        self._absent: set[str] = set()
        """Reasons for missing figures that the section in hand has given."""
        self._explained = False
        """Whether the cell before is a sentence in a figure's place: of that figure's table too."""
        widgets = nb.metadata.get("widgets", {}).get(WIDGET_STATE, {})
        self._widgets: Mapping[str, Any] = widgets.get("state", {})
        self._defaults: dict[str, Any] = {}
        self._injected = any(_tagged(cell, "injected-parameters") for cell in nb.cells)

    def cell(self, cell: Any) -> Cell | None:
        """The cell for the template, or None where there is nothing to show."""
        self._headings = []
        if cell.cell_type == "markdown":
            self._absent.clear()
            self._explained = False
            titled = bool(self.title)
            html = self._markdown(cell.source, cell.get("attachments", {}))
            kind = "markdown" if titled or not self.title else "intro"
            rendered = Cell(kind, html=html)
        elif cell.cell_type == "raw":
            rendered = Cell("markdown", html=Markup("<pre>{}</pre>").format(cell.source))
        elif not (cell.source.strip() or cell.outputs) or self._says_again(cell.outputs):
            return None
        else:
            self._explained = _lone_text(cell.outputs) is not None
            rendered = self._code_cell(cell)
        rendered.headings = self._headings
        rendered.tags = frozenset(cell.metadata.get("tags", []))
        return rendered

    def _says_again(self, outputs: list[Any]) -> bool:
        """Whether a cell only repeats what its section said already: why there is no figure."""
        if self._explained and [one.get("data", {}).get("text/html") for one in outputs] == [EMPTY]:
            return True
        text = _lone_text(outputs)
        if text is None or not REASON.match(text):
            return False
        again = text in self._absent
        self._absent.add(text)
        return again

    def _code_cell(self, cell: Any) -> Cell:
        rendered = Cell("code", code=highlighted(cell.source, "python"))
        state = cell.metadata.get("papermill", {})
        seconds = state.get("duration") or 0.0
        rendered.took = duration(seconds) if seconds >= NOTABLE_SECONDS else ""
        rendered.failed = any(output.output_type == "error" for output in cell.outputs)
        if _tagged(cell, "parameters"):
            self._defaults = assigned_values(cell.source)
            if not self._injected:
                rendered.parameters = parameter_tables(self._defaults, {})
        elif _tagged(cell, "injected-parameters"):
            rendered.parameters = parameter_tables(assigned_values(cell.source), self._defaults)
        elif state.get("status") == "pending":
            rendered.reason = Markup(escape(STOPPED))
        rendered.outputs = [shown for o in cell.outputs if (shown := self._output(o))]
        rendered.blank = bool(cell.outputs) and not rendered.outputs
        tabs = [output.get("metadata", {}).get("tab", "") for output in cell.outputs]
        tables = [output.is_table for output in rendered.outputs]
        if len(tables) > 1 and len(tables) == len(tabs) and all(tables) and all(tabs):
            rendered.tabs = tabs
        text = _lone_text(cell.outputs)
        if text is not None and REASON.match(text):
            rendered.reason = _reason(rendered.outputs[0].html)
        return rendered

    def _output(self, output: Any) -> Output | None:
        if output.output_type == "stream":
            return self._text(output.text, "stderr" if output.name == "stderr" else "printed")
        if output.output_type == "error":
            trace = self._safe(str(ansi2html("\n".join(output.traceback))), self._local_image)
            summary = Markup("<strong>{}</strong>: {}").format(output.ename, output.evalue)
            return Output("error", Markup("<p>{}</p><pre>{}</pre>").format(summary, trace))
        data = output.get("data", {})
        if FIGURE in data:
            return self._figure(data[FIGURE], data.get("image/svg+xml", ""))
        if WIDGET in data:
            words = self._widget_text(data[WIDGET].get("model_id", ""))
            return self._text(words or data.get("text/plain", ""), "progress")
        if Quality.MIME in data:
            return self._quality(data[Quality.MIME])
        if "text/html" in data:
            html = data["text/html"].replace(UNKNOWN_FILE, str(escape(self._options)))
            return Output("html", self._safe(html, self._local_image))
        if "text/markdown" in data:
            text = data["text/markdown"].replace(UNKNOWN_FILE, self._options)
            return Output("words", self._markdown(text, {})) if text.strip() else None
        for kind in IMAGES:
            if kind in data:
                return Output("image", image_html(kind, data[kind]))
        return self._text(data.get("text/plain", ""), "text")

    def _text(self, text: str, kind: str) -> Output | None:
        """Text as it is, in the colours of a terminal; None where it is blank."""
        if not text.strip():
            return None
        text = text.strip("\n")
        html = Markup("<pre>{}</pre>").format(self._safe(str(ansi2html(text)), self._local_image))
        return Output(kind, html, lines=text.count("\n") + 1)

    def _figure(self, figure: Mapping[str, Any], svg: str) -> Output:
        self.figures += 1
        traces = {trace.get("type") for trace in figure.get("data", [])}
        self.webgl = self.webgl or not traces.isdisjoint(COMPILED_TRACES)
        layout = figure.get("layout", {})
        title = layout.get("title", "")
        title = title.get("text", "") if isinstance(title, Mapping) else title
        plain = re.sub(r"<[^>]*>", " ", str(title or "")).strip()
        kept = {key: figure[key] for key in ("data", "layout", "frames") if key in figure}
        meta = layout.get("meta")
        said = meta.get("description", "") if isinstance(meta, Mapping) else ""
        label = str(said or unescape(plain) or f"Figure {self.figures}")
        return Output(
            "figure",
            Markup(script_json(kept)),
            anchor=f"figure-{self.figures}",
            label=label,
            image=image_html("image/svg+xml", svg, label) if svg else Markup(""),
            title=unescape(plain) or f"Figure {self.figures}",
        )

    def _quality(self, said: Mapping[str, Any]) -> Output | None:
        level = said.get("level")
        words = self._markdown(str(said.get("sentence", "")), {})
        return Output("quality", words, label=level) if level in QUALITY_LEVELS else None

    def _widget_text(self, model: str) -> str:
        """What a widget says, as text: tqdm's bar is boxes around pieces of HTML."""
        state = self._widgets.get(model.removeprefix("IPY_MODEL_"), {}).get("state", {})
        pieces = [self._widget_text(child) for child in state.get("children", [])]
        value = state.get("value")
        if isinstance(value, str):
            pieces.append(unescape(re.sub(r"<[^>]*>", "", value)).strip())
        return " ".join(piece for piece in pieces if piece)

    def _markdown(self, source: str, attachments: Mapping[str, Mapping[str, str]]) -> Markup:
        def image(address: str) -> str | None:
            if address.startswith("attachment:"):
                for kind, data in attachments.get(address[len("attachment:") :], {}).items():
                    return f"data:{kind};base64,{data}"
            return self._local_image(address)

        render = mistune.create_markdown(
            renderer=_MarkdownRenderer(self._heading, image),
            plugins=["table", "strikethrough", "task_lists", "footnotes", "def_list"],
        )
        return self._safe(str(render(source)), image)

    def _safe(self, fragment: str, image: ImageResolver) -> Markup:
        return Markup(styles_moved(clean_html(fragment, image), self.looks))

    def _heading(self, level: int, html: str) -> str:
        """Anchor of a heading; the first of level 1 is the page's title and not repeated."""
        plain = unescape(re.sub(r"<[^>]*>", "", html)).strip()
        if level == 1 and not self.title:
            self.title = plain
            return ""
        stem = re.sub(r"[^a-z0-9]+", "-", plain.lower()).strip("-") or "section"
        anchor, number = stem, 2
        while anchor in self._anchors:
            anchor, number = f"{stem}-{number}", number + 1
        self._anchors.add(anchor)
        if level in (1, 2, 3):
            self._headings.append(Heading(level, plain, anchor))
        return anchor

    def _local_image(self, address: str) -> str | None:
        """A file in the notebook's folder as a data: address; None for anything else.

        Pages are mailed around, so an address that leads out of the folder, through a link too,
        brings nothing of this machine onto the page.
        """
        try:
            kind = mimetypes.guess_type(address)[0] or ""
            path = Path(os.path.realpath(self._folder / unquote(address)))
            inside = path.is_relative_to(os.path.realpath(self._folder))
            if not (inside and kind.startswith("image/")):
                return None
            with open_binary(path) as file:
                content = file.read(MOST_IMAGE + 1)
        except (InputError, OSError, ValueError):
            return None
        if not 0 < len(content) <= MOST_IMAGE:
            return None
        return f"data:{kind};base64,{base64.b64encode(content).decode()}"


class _MarkdownRenderer(mistune.HTMLRenderer):
    """Markdown to HTML with anchors, embedded images, highlighted code, tables that can scroll."""

    def __init__(self, anchor_of: Callable[[int, str], str], resolve: ImageResolver) -> None:
        super().__init__(escape=False)
        self._anchor_of = anchor_of
        self._resolve = resolve

    def heading(self, text: str, level: int, **attrs: Any) -> str:
        anchor = self._anchor_of(level, text)
        if not anchor:
            return ""
        # the page's own title is the only h1
        level = max(level, 2)
        return f'<h{level} id="{anchor}">{text}</h{level}>\n'

    def image(self, text: str, url: str, title: str | None = None) -> str:
        words = unescape(re.sub(r"<[^>]*>", "", text)).strip()
        address = image_address(url, self._resolve)
        if address is None:
            words = words or url.rsplit("/", 1)[-1]
            return Markup('<span class="absent">[image: {}]</span>').format(words)
        return Markup('<img src="{}" alt="{}">').format(address, words)

    def task_list_item(self, text: str, checked: bool = False) -> str:
        return f"<li>{'☑' if checked else '☐'} {text}</li>\n"

    def block_code(self, code: str, info: str | None = None) -> str:
        language = (info or "").split(None, 1)[0] if info else "text"
        return f"<pre><code>{highlighted(code, language)}</code></pre>\n"

    def table(self, text: str) -> str:
        return f'<div class="scroll"><table>{text}</table></div>\n'


def _reason(html: str) -> Markup:
    """What a sentence says behind ``Not measured``."""
    inner = re.sub(r"^\s*<p>(?:<em>)?|(?:</em>)?</p>\s*$", "", str(html))
    reason = re.sub(r"^Not measured:\s*", "", inner)
    return Markup(reason[:1].upper() + reason[1:])


def _lone_text(outputs: list[Any]) -> str | None:
    """The sentence that is all a cell shows; None if it shows anything else."""
    texts = [output.get("data", {}).get("text/markdown") for output in outputs]
    return str(texts[0]) if len(texts) == 1 and texts[0] is not None else None


def _tagged(cell: Any, tag: str) -> bool:
    return tag in cell.metadata.get("tags", [])
