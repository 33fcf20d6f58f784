"""What a run found in a few lines: ``verdict.md``, and the headline of run.json and of the list.

A notebook says by tags of its cells what belongs there: ``headline`` (Markdown), ``quality``
(:class:`dlrm_workbook.show.tables.Quality`) and ``summary`` (small tables).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import unescape
from typing import Any

import mistune

from dlrm_workbook.analysis.sentences import without_html
from dlrm_workbook.runner.sections import apart
from dlrm_workbook.show.tables import QUALITY_LEVELS, Quality

MOST_ROWS = 40  # of a table in verdict.md: every part in every phase
LONGEST = 300  # characters of a headline in run.json


@dataclass
class Summary:
    """What the tagged cells of a notebook say.

    Attributes:
        title: the notebook's first heading.
        headline: Markdown; empty without a tagged cell.
        level, sentence: of the quality line; empty without one.
        tables: heading of the section and rows of text, the first with the column titles.
    """

    title: str = ""
    headline: str = ""
    level: str = ""
    sentence: str = ""
    tables: list[tuple[str, list[list[str]]]] = field(default_factory=list)

    def fields(self) -> dict[str, Any]:
        """What run.json says of it; nothing where no cell is tagged."""
        fields: dict[str, Any] = {}
        if self.headline:
            fields["headline"] = shortened(plain_text(self.headline), LONGEST)
        if self.level:
            fields["quality"] = {"level": self.level, "sentence": self.sentence}
        return fields


def summarise(nb: Any) -> Summary:
    summary = Summary()
    section = ""
    headlines = []
    for cell in apart(nb.cells):
        if cell.cell_type == "markdown":
            headings = re.findall(r"^(#{1,6})\s+(.*?)\s*#*$", cell.source, re.MULTILINE)
            section = headings[-1][1] if headings else section
            if headings and not summary.title:
                summary.title = headings[0][1]
            continue
        tags = cell.metadata.get("tags", [])
        for data in (output.get("data", {}) for output in cell.get("outputs", [])):
            if "headline" in tags and "text/markdown" in data:
                headlines.append(data["text/markdown"].strip())
            if "quality" in tags and Quality.MIME in data:
                said = data[Quality.MIME]
                if said.get("level") in QUALITY_LEVELS:
                    summary.level, summary.sentence = said["level"], str(said.get("sentence", ""))
            if "summary" in tags and "<table" in data.get("text/html", ""):
                rows = table_rows(data["text/html"])
                name = re.search(r"<caption>(.*?)</caption>", data["text/html"])
                if len(rows) > 1:
                    summary.tables.append((unescape(name[1]) if name else section, rows))
    summary.headline = "\n\n".join(filter(None, headlines))
    return summary


def verdict_markdown(
    summary: Summary, run: Mapping[str, Any], facts: Iterable[tuple[str, str]], files: Sequence[str]
) -> str:
    """The text of ``verdict.md``, for a pull request, a chat or an agent.

    Args:
        run: content of run.json.
        facts: name and value of what is said of the run and its machine.
        files: names of what lies beside it, for links.
    """
    title = str((run.get("parameters") or {}).get("title") or "")
    heading = as_markdown(": ".join(part for part in (summary.title, title) if part) or "Run")
    parts = [f"# {heading}"]
    if run.get("status") not in (None, "finished"):
        parts.append(f"**This run is not complete ({as_markdown(str(run['status']))}).** "
                     f"{as_markdown(str(run.get('error', '')))}".strip())  # fmt: skip
    if summary.headline:
        parts.append(without_html(summary.headline))
    if summary.level:
        parts.append(f"**{QUALITY_LEVELS[summary.level]}.** {without_html(summary.sentence)}")
    for section, (titles, *rows) in summary.tables:
        parts += [f"## {without_html(section)}", markdown_table([titles, *rows[:MOST_ROWS]])]
        if len(rows) > MOST_ROWS:
            parts.append(f"The first {MOST_ROWS} of {len(rows):,} rows.")
    parts += ["## Run", markdown_table([["what", "value"], *map(list, facts)])]
    if files:
        parts.append(" · ".join(f"[{as_markdown(name)}]({name})" for name in files))
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A table of GitHub's Markdown; the first row is its head, columns of numbers stand right."""
    titles, *body = rows

    def is_number(at: int) -> bool:
        cells = [row[at] for row in body if at < len(row) and row[at] not in ("", "–")]
        return bool(cells) and all(re.match(r"[<+−-]?\d", cell) for cell in cells)

    marks = ["---:" if is_number(at) else "---" for at in range(len(titles))]
    lines = [[as_markdown(cell) for cell in row] for row in rows]
    lines.insert(1, marks)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def as_markdown(text: str) -> str:
    """Text that Markdown shows as it is, in one line."""
    text = re.sub(r"([\\`*\[\]<>|~$&#!])", r"\\\1", " ".join(text.split()))
    # within a word an underscore is one
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\\_", text)


def plain_text(markdown: str) -> str:
    """Markdown without its marks, in one line."""
    html = str(mistune.html(without_html(markdown)))
    apart = re.sub(r"<(?:/?(?:p|li|ul|ol|h\d|tr|td|th)|br)\b[^>]*>", " ", html)
    return " ".join(unescape(re.sub(r"<[^>]*>", "", apart)).split())


def shortened(text: str, longest: int) -> str:
    """The text up to a sentence's or word's end."""
    if len(text) <= longest:
        return text
    cut = text[:longest]
    end = cut.rfind(". ")
    return cut[: end + 1] if end > longest // 2 else cut.rsplit(" ", 1)[0] + " …"


def table_rows(html: str) -> list[list[str]]:
    """Texts of the first table's head and body, row by row, as we and pandas write tables."""
    table = re.split(r"</tbody>|</table>", html, maxsplit=1)[0]
    rows = re.findall(r"<tr\b[^>]*>(.*?)(?=<tr\b|</thead>|$)", table, re.DOTALL)
    cells = (re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", row, re.DOTALL) for row in rows)
    # code in a cell stands between backticks, as it did in the frame
    coded = ([re.sub(r"</?code>", "`", cell) for cell in row] for row in cells)
    texts = [[unescape(re.sub(r"<[^>]*>", "", cell)) for cell in row] for row in coded]
    return [[text.replace("■", "").strip("\n") for text in row] for row in texts if row]
