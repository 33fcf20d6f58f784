"""The place of each cell of a notebook on its page: answer first, evidence, details folded.

A cell that shows several views of a report stands there as one cell for each (:func:`apart`). The
masthead takes the cells tagged ``headline`` and ``quality`` and the run's parameters. The
others stay in order, in sections that begin with a heading. Code and short prints are hidden until
the reader asks for them; a table behind its figure is folded; a section tagged ``details`` starts
closed; and a section in which nothing was measured goes to a list at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

NO_MARKUP = Markup("")
SHORT_PRINT = 3  # lines of printed text that are hidden with the code
MEASURED = "how-it-was-measured"
"""How the anchor begins of the section that ends with what was not measured."""
HEADING = re.compile(r'\s*<h(\d) id="([^"]*)">(.*?)</h\1>', re.DOTALL)


@dataclass(frozen=True)
class Heading:
    level: int
    text: str
    anchor: str


@dataclass
class Output:
    """One output of a cell: a figure's data, or HTML of some kind.

    Attributes:
        kind: ``figure``, ``html``, ``words``, ``image``, ``text``, ``printed``, ``stderr``,
            ``progress``, ``quality`` or ``error``.
        html: what is shown; of a figure its data as JSON.
        label: of a figure the text in its place, of a quality line its level.
        title: of a figure.
        image: of a figure what browsers show that run no scripts.
        lines: of text.
    """

    kind: str
    html: Markup = NO_MARKUP
    anchor: str = ""
    label: str = ""
    title: str = ""
    image: Markup = NO_MARKUP
    lines: int = 0

    @property
    def hidden(self) -> bool:
        """Whether only a reader who wants to see the code sees it."""
        short = self.kind == "printed" and self.lines <= SHORT_PRINT
        return short or self.kind == "progress"

    @property
    def folded(self) -> str:
        """The line behind which it is folded; empty where it is not."""
        kinds = {"printed": "Printed text", "stderr": "Messages"}
        lines = "1 line" if self.lines == 1 else f"{self.lines} lines"
        return f"{kinds[self.kind]}, {lines}" if self.kind in kinds else ""

    @property
    def is_table(self) -> bool:
        return self.kind == "html" and "<table" in self.html

    @property
    def caption(self) -> str:
        """Name of a table; empty where it has none."""
        name = re.search(r"<caption\b[^>]*>(.*?)</caption>", self.html, re.DOTALL)
        return str(Markup(name[1]).striptags()) if name else ""

    @property
    def columns(self) -> str:
        titles = re.findall(r"<th\b[^>]*>(.*?)</th>", self.html.partition("</thead>")[0], re.DOTALL)
        return " · ".join(Markup(title).striptags() for title in titles if title)


@dataclass
class Cell:
    """A cell as the template wants it.

    Attributes:
        kind: ``code``, ``markdown``, or ``intro``, the one that holds the page's title.
        html: of a markdown cell.
        reason: why it shows nothing, where a sentence says so in its figure's place.
        fold: the line behind which its outputs are folded; empty where they are not.
        blank: whether it ran and has nothing to show, nor a reason.
        tabs: of a cell with several tables of which one shows at a time, their titles.
    """

    kind: str
    html: Markup = NO_MARKUP
    code: Markup = NO_MARKUP
    took: str = ""
    failed: bool = False
    reason: Markup = NO_MARKUP
    fold: str = ""
    blank: bool = False
    tabs: list[str] = field(default_factory=list)
    tags: frozenset[str] = frozenset()
    headings: list[Heading] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    parameters: list[tuple[str, list[dict[str, Any]]]] = field(default_factory=list)

    @property
    def seen(self) -> list[Output]:
        """The outputs that do not hide with the code; all of a cell that failed."""
        return [output for output in self.outputs if self.failed or not output.hidden]

    @property
    def columns(self) -> str:
        """Titles of its first table's columns."""
        if self.tabs:
            return ""
        return next((output.columns for output in self.seen if output.is_table), "")

    def starts(self) -> re.Match[str] | None:
        """The heading with which a markdown cell begins."""
        return HEADING.match(self.html) if self.kind == "markdown" else None


@dataclass
class Section:
    """Cells below a heading; the first section of a page may have none.

    Attributes:
        level: of the heading, 0 without one.
        title: the heading's HTML.
        closed: whether it is folded until the reader opens it.
        parts: cells and sections of lower headings, in order.
    """

    level: int = 0
    title: Markup = NO_MARKUP
    anchor: str = ""
    closed: bool = False
    parts: list[Cell | Section] = field(default_factory=list)

    def sections(self) -> Iterator[Section]:
        for part in self.parts:
            if isinstance(part, Section):
                yield part
                yield from part.sections()

    def cells(self) -> Iterator[Cell]:
        for part in self.parts:
            if isinstance(part, Section):
                yield from part.cells()
            else:
                yield part

    @property
    def blank(self) -> bool:
        """Whether its cells ran and have nothing to show."""
        code = [cell for cell in self.cells() if cell.kind == "code"]
        return bool(code) and all(cell.blank for cell in code)

    def reasons(self) -> list[Markup]:
        """Why there is nothing in it; empty where something is."""
        code = [cell for cell in self.cells() if cell.kind == "code"]
        reasons = [cell.reason for cell in code if cell.seen or cell.reason]
        return list(dict.fromkeys(reasons)) if all(reasons) else []


@dataclass
class PagePlan:
    """What the template shows, from the top down.

    Attributes:
        intro: text of the cell with the title.
        absent: reason to the titles of the sections that are left out for it.
        measured: the section that says how the run was measured, and so what was not.
    """

    intro: Markup
    headline: list[Output]
    quality: list[Output]
    parameters: list[tuple[str, list[dict[str, Any]]]]
    body: Section
    contents: list[Heading]
    absent: dict[Markup, list[Markup]]
    measured: Section | None
    failed: bool
    has_code: bool


def apart(cells: Iterable[Any]) -> Iterator[Any]:
    """Cells of a notebook, those that show several views of a report in one piece for each.

    The tags of a view are in its output's metadata, and count as the cell's. Tables that share a
    place stay together.
    """
    for cell in cells:
        pieces: list[list[Any]] = []
        tab = ""
        for output in cell.get("outputs", []):
            tagged = output.get("metadata", {})
            before, tab = tab, tagged.get("tab", "")
            if not pieces or ("tags" in tagged and not (before and tab)):
                pieces.append([])
            pieces[-1].append(output)
        if len(pieces) <= 1 and not any("metadata" in one for piece in pieces for one in piece):
            yield cell
            continue
        for number, piece in enumerate(pieces):
            copy = cell.copy()
            tagged = piece[0].get("metadata", {})
            copy.metadata = cell.metadata.copy()
            copy.metadata["tags"] = [*cell.metadata.get("tags", []), *tagged.get("tags", [])]
            copy.outputs = piece
            if number:
                copy.source = ""
                copy.metadata.pop("papermill", None)
            yield copy


def arrange(cells: Iterable[Cell]) -> PagePlan:
    cells = list(cells)
    intro = _cut_intro(cells)
    masthead: dict[str, list[Output]] = {"headline": [], "quality": []}
    for cell in cells:
        for place in masthead.keys() & cell.tags:
            if not cell.failed:
                masthead[place] += cell.seen
                cell.outputs = [output for output in cell.outputs if output.hidden]
                cell.headings = []
    body = _sections(cells)
    _fold(body)
    absent: dict[Markup, list[Markup]] = {}
    _leave_out(body, absent)
    code = [cell for cell in body.cells() if cell.kind == "code"]
    return PagePlan(
        intro=intro,
        headline=masthead["headline"],
        quality=masthead["quality"],
        parameters=next((cell.parameters for cell in reversed(cells) if cell.parameters), []),
        body=body,
        contents=[heading for cell in body.cells() for heading in cell.headings],
        absent=absent,
        measured=next((part for part in body.sections() if part.anchor.startswith(MEASURED)), None),
        failed=any(cell.failed for cell in code),
        has_code=bool(code),
    )


def _cut_intro(cells: list[Cell]) -> Markup:
    """The text between the page's title and the next heading, taken out of its cell."""
    cell = next((cell for cell in cells if cell.kind == "intro"), None)
    if cell is None:
        return NO_MARKUP
    heading = HEADING.search(cell.html)
    end = heading.start() if heading else len(cell.html)
    intro, cell.html = Markup(cell.html[:end].strip()), Markup(cell.html[end:])
    cell.kind = "markdown"
    return intro


def _sections(cells: Iterable[Cell]) -> Section:
    """The cells by the headings that markdown cells begin with."""
    body = Section()
    path = [body]
    for cell in cells:
        start = cell.starts()
        if start:
            level = int(start[1])
            while path[-1].level >= level:
                path.pop()
            section = Section(level, Markup(start[3]), start[2], "details" in cell.tags)
            path[-1].parts.append(section)
            path.append(section)
            cell.html = Markup(cell.html[start.end() :].strip())
        path[-1].parts.append(cell)
    return body


def _fold(section: Section) -> None:
    """Fold what is tagged, and tables that stand right behind a figure of their section."""
    behind = ""  # title of the figure that the next table stands behind
    for part in section.parts:
        if isinstance(part, Section):
            _fold(part)
            behind = ""
            continue
        shown = part.seen
        if part.kind == "markdown":
            behind = ""
        if not shown or part.failed:
            continue
        tables = all(output.is_table for output in shown)
        figure = next((output for output in shown if output.kind == "figure"), None)
        if (tables and behind and "open" not in part.tags) or "detail" in part.tags:
            table = next((output.caption for output in shown if output.is_table), "")
            part.fold = figure.title if figure else table or (behind if tables else "") or "Details"
        behind = figure.title if figure else behind * tables


def _leave_out(section: Section, absent: dict[Markup, list[Markup]]) -> None:
    """Take out the sections in which nothing was measured, and note them by their reasons."""
    kept: list[Cell | Section] = []
    for part in section.parts:
        if isinstance(part, Section):
            reasons = part.reasons()
            for reason in reasons:
                absent.setdefault(reason, []).append(part.title)
            if reasons or part.blank:
                continue
            _leave_out(part, absent)
        kept.append(part)
    section.parts = kept
