"""The DataFrame that a notebook holds, formatted: few digits, numbers to the right, words left.

``show(frame)`` picks a label and a format for each column by its name: the registry
:data:`COLUMNS` knows names that need words of their own, and the last word of every other name is
its unit (``idle_ms``, ``gap_us``, ``table_bytes``, ``idle_share``). What was measured in no row is
left out; what was not in one is a dash. The HTML has no style sheet and no identifiers, as
pandas' Styler makes them, since neither passes GitHub's or our own filter of pages.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from dlrm_core.base.files import write_text
from dlrm_core.base.text import format_bytes
from dlrm_core.parts import part_label
from dlrm_workbook.analysis.lines import place
from dlrm_workbook.analysis.sentences import in_markdown, without_html
from dlrm_workbook.ground.units import (
    NOT_MEASURED,
    NOTHING,
    at_most,
    digits,
    duration,
    from_to,
    known_or,
    milliseconds,
    percent,
    ratio,
    signed_digits,
    signed_percent,
    speedup,
    value_text,
    whole,
    yes_or_no,
)
from dlrm_workbook.show.theme import (
    ROW,
    colour_of,
    markers,
    plotly_text,
    ranked_bars,
    rows_of,
    short_name,
    wrapped,
)

EMPTY = '<p class="absent">Nothing to list.</p>'
"""A table without rows; pages leave it out where a sentence before says why."""

FIRST, KEPT, BESIDE = 20, 200, 30
"""Rows of a table that a reader sees at first, rows that it holds, and rows that it holds where a
file beside the notebook has all."""

IN_TEXT = 10
"""Rows of a table for viewers that show plain text only, where nobody asks for another number."""

WRAPS = re.compile(r"[\s/–-]")
"""Browsers end a line at these characters, within a number's text."""

SENTENCE = 60
"""Characters from which on a cell's text is read as a sentence."""

INDENT = "\u2007\u2007"
"""Figure spaces: HTML would drop ordinary ones, and break lines after others."""

Texts = tuple[list[str], bool]
"""Texts of a column, and whether they are words."""

Formatter = Callable[..., Texts]
"""Writes one column from one or several of the frame."""


@dataclass(frozen=True)
class Column:
    """How a column of a DataFrame is shown.

    Attributes:
        label: its title; left out, its name in words.
        format: a key of :data:`FORMATS` or such a function; left out, by the name's last word
            or the values.
        needs: columns it is made of, where it is made of others.
        unit: behind the label, in brackets; left out, the format's.
    """

    label: str = ""
    format: str | Formatter = ""
    needs: tuple[str, ...] = ()
    unit: str = ""


Columns = Sequence[str] | Mapping[str, str | Column]
"""Those of a table: their names in order, perhaps with looks."""

COLUMNS_FILE = Path(__file__).parent / "columns.md"
"""Describes the columns of all tables; its last section is :data:`COLUMNS`."""


def _titled() -> dict[str, Column]:
    section = COLUMNS_FILE.read_text(encoding="utf-8").partition("# How tables show them")[2]
    columns = {}
    for row in re.findall(r"^\| `(.*) \|$", section, re.MULTILINE):
        name, label, format, unit, needs = (cell.strip("` ") for cell in row.split(" |"))
        columns[name] = Column(label, format, tuple(needs.split()), unit)
    return columns


COLUMNS = _titled()
"""What a column's name does not say by itself."""


UNITS_OF_FRAMES = {"exclusive": "unit", "inclusive": "unit", "launches": "per"}
"""Columns whose unit is an attribute of their frame."""

HIDDEN = {"context", "id", "kind", "parent", "profile"}
"""Columns that tie frames together: shown only where they are asked for."""

SUFFIXES = {
    "ms": ("number", "ms"),
    "us": ("number", "µs"),
    "s": ("number", "s"),
    "mb": ("number", "MB"),
    "bytes": ("bytes", ""),
    "share": ("share", ""),
}
"""Last word of a column's name to its format and unit."""


def show(
    frame: pd.DataFrame | None,
    columns: str | Columns | None = None,
    *,
    most: int = FIRST,
    instead: Text | None = None,
    whole: Path | None = None,
    caption: str = "",
) -> TextTable | Text:
    """The frame as a table; in its place ``instead`` or the reason, if there is none or no rows.

    Args:
        frame: its ``attrs["not_measured"]`` says why it is empty, ``attrs["unit"]`` the unit of
            numbers whose columns name none.
        columns: a table of :data:`TABLES`; or names of those to show, in order, as far as the
            frame has them; a mapping gives some another label or look. Left out: all but
            :data:`HIDDEN`, those that belong together (``component`` and ``phase``, ``low_ms``
            and ``high_ms``) as one.
        most: rows that are shown at first, of up to :data:`KEPT`.
        whole: file that the whole frame is written to as CSV, where it has more rows than
            :data:`BESIDE`, which the table then holds.
        caption: its name above it.

    Raises:
        InputError: ``whole`` cannot be written.
    """
    if frame is None or frame.empty:
        reason = _reason(frame)
        return instead or (absent(reason) if reason else TextTable([]))
    listed = TABLES[columns] if isinstance(columns, str) else columns
    chosen = _default_columns(frame) if listed is None else listed
    rows = frame.head(BESIDE if whole else KEPT)
    shown: list[Cells] = []
    for name in chosen:
        look = _look_of(name, frame, chosen[name] if isinstance(chosen, Mapping) else "")
        needed = look.needs or (name,)
        if not set(needed) <= set(rows):
            continue
        sources = [rows[of] for of in needed]
        formatter = FORMATS[look.format] if isinstance(look.format, str) else look.format
        texts, words = formatter(*sources)
        says_nothing = all(text in ("", NOTHING) for text in texts)
        says_nothing |= name == "part" and bool(rows["component"].eq("other").all())
        says_nothing |= name == "thread" and rows["thread"].nunique() == 1
        if says_nothing and shown:
            continue
        unit = look.unit or str(frame.attrs.get(UNITS_OF_FRAMES.get(name, ""), ""))
        title = f"{look.label} ({unit})" if unit else look.label
        of_parts = rows["component"].tolist() if name == "part" else []
        colours = [colour_of(part) for part in of_parts]
        shown.append(Cells(title, texts, words, colours, *_exact(name, sources, texts)))
    file = whole if len(frame) > len(rows) else None
    if file is not None:
        _write_csv(file, frame)
    return TextTable(shown, most=most, total=len(frame), file=file, caption=caption)


def _write_csv(path: Path, frame: pd.DataFrame) -> None:
    """Write a frame as CSV, without its index.

    Text that a spreadsheet would take for a formula gets an apostrophe before it.
    """
    formula = re.compile(r"[=+@\t-]")

    def harmless(value: Any) -> Any:
        return f"'{value}" if isinstance(value, str) and formula.match(value) else value

    write_text(path, frame.map(harmless).to_csv(index=False))


def _exact(name: str, sources: Sequence[pd.Series], texts: Sequence[str]) -> tuple[str, list[str]]:
    """Names and values of the frame behind a column, separated by commas where they are several.

    An empty value is one that the text says already.
    """
    if all(source.dtype.kind in "iuf" for source in sources):
        names = ",".join(str(source.name) for source in sources)
        rows = zip(*sources, strict=True)
        values = [",".join("" if _missing(v) else _number(v) for v in row) for row in rows]
    else:
        names = name
        is_text = len(sources) == 1 and all(isinstance(value, str) for value in sources[0])
        values = list(sources[0]) if is_text else [""] * len(texts)
        # folders are of the machine that recorded, and no reader's: what is shown is copied
        values = ["" if value.startswith("/") else value for value in values]
    pairs = zip(values, texts, strict=True)
    return names, ["" if value == text else value for value, text in pairs]


def _number(number: Any) -> str:
    """A number to seven digits, a whole one to its last."""
    return str(int(number)) if math.isfinite(number) and number % 1 == 0 else f"{number:.7g}"


def _default_columns(frame: pd.DataFrame) -> list[str]:
    names = [str(name) for name in frame.columns]
    for joined in ("part", "measure", "operator", "range", "predicted", "bound"):
        first, *others = COLUMNS[joined].needs
        if {first, *others} <= set(names):
            names[names.index(first)] = joined
            names = [name for name in names if name not in others]
    return [name for name in names if name not in HIDDEN]


def _look_of(name: str, frame: pd.DataFrame, given: str | Column) -> Column:
    """Label, format and unit of a column: what was given, else by its name, else by its values."""
    look = given if isinstance(given, Column) else COLUMNS.get(name, Column())
    if name in frame and look.needs and look is not given:
        look = Column()
    if isinstance(given, str) and given:
        look = replace(look, label=given)
    start, _, last = name.rpartition("_")
    format, unit = ("", "") if name.endswith("_per_s") else SUFFIXES.get(last, ("", ""))
    words = start if start and (unit or last == "bytes") else name
    if name.startswith("share_"):
        format = "share"
    if not format and name in frame:
        kind = frame[name].dtype.kind
        format = "judged" if kind == "b" else "count" if kind in "iuf" else "text"
    capitals = {"cpu": "CPU", "gpu": "GPU"}
    label = " ".join(capitals.get(word, word) for word in words.split("_"))
    return Column(look.label or label, look.format or format, look.needs, look.unit or unit)


# The formats.


def each_row(text: Callable[..., str], words: bool = False) -> Formatter:
    """The format that writes each row's cell from its values, one or several."""

    def format(*columns: pd.Series) -> Texts:
        return [text(*values) for values in zip(*columns, strict=True)], words

    return format


def _each(text: Callable[[Any], str], words: bool = False, absent: str = NOTHING) -> Formatter:
    """The format of a single column, whose empty values read ``absent``."""
    return each_row(lambda value: absent if _missing(value) else text(value), words)


def _range(text: Callable[[float], str]) -> Formatter:
    return each_row(lambda low, high: NOTHING if low == high else from_to(low, high, text))


def _missing(value: Any) -> bool:
    return value in (None, "", {}) or (isinstance(value, float) and math.isnan(value))


def function_name(name: str, limit: int = 60) -> str:
    """A function in a few characters; C++'s unnamed namespaces say nothing."""
    return short_name(name.replace("(anonymous namespace)::", ""), limit)


def operator_name(name: str, kind: str, limit: int = 60) -> str:
    """Outside all operators it is the part's own Python code."""
    return "Python" if kind == "annotation" else short_name(name, limit)


def _call(level: int, folded: int, name: str, is_hot: bool) -> str:
    """Indented; with how many links of a chain are left out before it, and the hot path marked."""
    links = f"… {folded} call{'s' * (folded > 1)} … " if folded else ""
    return INDENT * level + ("▸ " if is_hot else "") + links + function_name(name)


def _setting(value: Any) -> str:
    """A parameter's value, or several by their names."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {content}" for name, content in value.items())
    return value_text(value)


def _base(path: object) -> str:
    return str(path).rpartition("/")[2]


def _shapes(text: str) -> str:
    """Shapes without those of scalars: ``2048×64, 3 of 64×64``; ``*`` is any."""
    shapes = (sizes.replace(", ", "×") for sizes in re.findall(r"\[([\d*, ]+)\]", text))
    groups = ((shape, len(list(same))) for shape, same in itertools.groupby(shapes))
    return ", ".join(shape if count == 1 else f"{count} of {shape}" for shape, count in groups)


def _settings(change: str | Mapping[str, Any]) -> str:
    if isinstance(change, str):
        return change
    return ", ".join(f"{name}: {value}" for name, value in change.items())


def measure_text(value: Any, unit: str = "") -> str:
    """A value with its unit: ``measure(0.5, "share")`` is ``50.0%``; words as they are."""
    if _missing(value):
        return NOT_MEASURED
    if isinstance(value, str):
        return value
    texts: dict[str, Callable[[Any], str]] = {
        **{"ms": milliseconds, "s": duration, "bytes": format_bytes},
        **{"share": percent, "": value_text},
    }
    return texts[unit](value) if unit in texts else f"{digits(value)} {unit}"


NO_GAIN = 1.005
"""A bound below this speed-up would read 1.00x."""

MOST_BOUND = 100.0
"""Speed-up above which an upper bound says nothing: a step that does next to nothing else."""


def _gain(gain: Mapping[str, float]) -> str:
    """A predicted speed-up with its range, or its bound where nothing more is known."""
    if not gain:
        return NOTHING
    low, mid, high = (gain[name] for name in ("low", "mid", "high"))
    if high < NO_GAIN:
        return "next to none"
    if low <= 1.0:
        return at_most(high) if high <= MOST_BOUND else "not bounded"
    return speedup(mid, low, high, figures=2)


QUALITY_LEVELS = {"green": "Reliable", "amber": "Use with care", "red": "Unreliable"}
"""Level of a :class:`Quality` to the words that stand before its sentence."""

FORMATS: dict[str, Formatter] = {
    "auc": _each("{:.5f}".format),
    "base": _each(_base, words=True),
    "bytes": _each(format_bytes),
    "bound": each_row(lambda limit, ceiling: limit or ceiling or NOTHING, words=True),
    "call": each_row(_call, words=True),
    "caller": each_row(
        lambda depth, name: INDENT * depth + ("← " if depth else "") + function_name(name),
        words=True,
    ),
    "component": _each(part_label, words=True),
    "difference": each_row(
        lambda value: known_or(value, lambda size: f"{size:.0e}" if size else "0", NOT_MEASURED)
    ),
    # the last two callers of the last function of a path
    "callers": _each(
        lambda path: " › ".join(short_name(name, 26) for name in path[-3:-1]) or NOTHING, words=True
    ),
    "count": _each(lambda value: known_or(value, whole if value % 1 == 0 else digits)),
    "digits": _each(digits),
    "function": _each(lambda name: name if name.startswith("(") else function_name(name), True),
    "gain": _each(_gain),
    "giga": lambda values: (column(values / 1e9), False),
    "judged": _each(yes_or_no, words=True),
    "line": _each(lambda line: str(line) if line else NOTHING),
    "loss": _each("{:.6f}".format),
    "measure": each_row(measure_text, words=True),
    "measured": _each(digits, absent=NOT_MEASURED),
    "nonzero": _each(lambda value: digits(value) if value else NOTHING),
    "number": lambda values: (column(values), False),
    "operator": each_row(operator_name, words=True),
    "part": each_row(part_label, words=True),
    "part_or_none": each_row(
        lambda part, phase: part_label(part, phase) if part else NOTHING, words=True
    ),
    "place": each_row(
        lambda file, line: place(file, line) if file else "in no line of the program", words=True
    ),
    "known_ratio": _each(ratio, absent=NOT_MEASURED),
    "level": each_row(lambda level: QUALITY_LEVELS.get(level, NOTHING)),
    "library": each_row(lambda module, file: _base(module or file) or NOTHING, words=True),
    "quality": _each("{:.6f}".format),
    "range": _range(digits),
    "rank": _each(lambda rank: str(rank) if rank >= 0 else NOTHING),
    "ratio": _each(ratio),
    "settings": _each(_settings, words=True),
    "shapes": _each(_shapes, words=True),
    "share": _each(percent),
    "share_range": _range(percent),
    "some": _each(lambda share: percent(share) if share < 1.0 else NOTHING),
    "signed": lambda values: (signed(values), False),
    "signed_digits": each_row(lambda ms: known_or(ms, signed_digits)),
    "signed_range": _range(signed_digits),
    "signed_share": _each(signed_percent),
    "gain_range": each_row(
        lambda mid, low, high: known_or(mid, lambda _: speedup(mid, low, high, figures=2))
    ),
    "speedup": each_row(lambda mid, low, high: known_or(mid, lambda _: speedup(mid, low, high))),
    "text": _each(str, words=True),
    "value": _each(_setting, words=True),
    "where": _each(lambda value: {"device": "GPU", "host": "CPU"}.get(value, value), True),
}
"""Name of a format to the function that writes a column."""


def columns_of(
    file: Path, owner: str = "", formats: Mapping[str, Formatter] | None = None
) -> dict[str, dict[str, str | Column]]:
    """Each table of a file to its columns in order, as :func:`show` takes them.

    Args:
        file: CSV with ``table``, ``column``, ``label``, ``format``, ``needs``, ``unit``.
        owner: whose rows count, by the file's first column, where several share it.
        formats: of the owner alone, by their name in the file; any other name there is one of
            :data:`FORMATS`.
    """
    tables: dict[str, dict[str, str | Column]] = {}
    rows = pd.read_csv(file, dtype=str, keep_default_na=False)
    for row in rows_of(rows[rows.iloc[:, 0].eq(owner)] if owner else rows):
        format = (formats or {}).get(row.format, row.format)
        look = Column(row.label, format, tuple(row.needs.split()), row.unit)
        tables.setdefault(row.table, {})[row.column] = look if row.format else row.label
    return tables


TABLES = columns_of(COLUMNS_FILE.with_suffix(".csv"))
"""Tables whose columns, or titles of them, differ from what :data:`COLUMNS` says of their names."""


def column(values: Iterable[float]) -> list[str]:
    """Numbers of one column with the same decimals, so that they can be compared at sight.

    As many decimals as give the largest three digits or more; what is there but rounds
    to nothing is ``<0.1``, what is not a number a dash.
    """
    numbers = [float(value) for value in values]
    largest = max((abs(n) for n in numbers if math.isfinite(n)), default=0.0)
    decimals = 1 if largest >= 99.95 else 2 if largest >= 9.995 else 3
    least = 10.0**-decimals

    def cell(number: float) -> str:
        if not math.isfinite(number):
            return NOTHING
        return f"<{least:g}" if 0 < number < least / 2 else f"{number:,.{decimals}f}"

    return [cell(number) for number in numbers]


def signed(values: Sequence[float] | pd.Series) -> list[str]:
    """Differences of one column: a sign, and as many decimals as the largest needs."""
    cells = []
    for value, cell in zip(values, column(abs(value) for value in values), strict=True):
        # "<0.01" with a sign would say two things
        text = cell[1:-1] + "0" if cell.startswith("<") else cell
        is_zero = text.strip("0.") == ""
        sign = "" if is_zero or not math.isfinite(value) else "+" if value > 0 else "−"
        cells.append(sign + text)
    return cells


@dataclass(frozen=True)
class Cells:
    """A column of a table as it is shown.

    Attributes:
        title: may name a unit.
        texts: one a row.
        words: whether they are words, which stand to the left; numbers stand to the right.
        colours: of a mark before each text; may be empty.
        source: names of the frame's columns behind it, and ``exact`` their values in each row
            (empty where the text says it all), for a page that sorts and copies.
    """

    title: str
    texts: Sequence[str]
    words: bool = True
    colours: Sequence[str] = ()
    source: str = ""
    exact: Sequence[str] = ()

    def head(self) -> str:
        # wide enough to be read, even where others are cut off
        is_long = any(len(text) > SENTENCE for text in self.texts)
        look = _style(LEFT * self.words) + ' class="sentences"' * is_long
        source = f' data-column="{escape(self.source)}"' if self.source else ""
        return f"<th{look}{source}>{escape(self.title)}</th>"

    def cell(self, row: int) -> str:
        text = self.texts[row]
        # every viewer of notebooks sets tables to the right by itself
        wraps = bool(WRAPS.search(text.strip(NOTHING)))
        look = _style(LEFT if self.words else "white-space: nowrap" * wraps)
        exact = self.exact[row] if self.exact else ""
        value = f' data-value="{escape(exact)}"' if exact else ""
        mark = f'<span style="color: {self.colours[row]}">■</span>&nbsp;' if self.colours else ""
        html = re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
        return f"<td{look}{value}>{mark}{html}</td>"


LEFT = "text-align: left"


def _style(look: str) -> str:
    return f' style="{look}"' if look else ""


class TextTable:
    """Rows of text, shown by notebooks as a table.

    Args:
        most: rows shown at first; pages show the others when they are asked to.
        total: rows that there are, where the cells are only of the first of them.
        file: where all rows are, in the folder of such files in the run's.
        caption: its name above it; may be empty.
    """

    def __init__(
        self,
        cells: Sequence[Cells],
        *,
        most: int = FIRST,
        total: int = 0,
        file: Path | None = None,
        caption: str = "",
    ) -> None:
        self.columns = [column.title for column in cells]
        self.rows = [list(row) for row in zip(*(column.texts for column in cells), strict=True)]
        self.caption = caption
        self._cells, self._file = cells, file
        self._total = max(total, len(self.rows))
        # a few rows more are no reason to hide them
        self._most = most if self._total > most + 5 else self._total

    def _repr_html_(self) -> str:
        if not self.rows:
            return EMPTY
        heads = "".join(column.head() for column in self._cells)
        rows = (
            f"<tr{' hidden' * (row >= self._most)}>"
            f"{''.join(column.cell(row) for column in self._cells)}</tr>"
            for row in range(len(self.rows))
        )
        body = "\n".join(rows)
        words = escape(self._rest())
        foot = f'\n<tfoot><tr><td colspan="{len(self.columns)}">{words}</td></tr></tfoot>'
        foot = foot if words else ""
        caption = f"<caption>{escape(self.caption)}</caption>\n" if self.caption else ""
        return (
            f'<table class="dataframe">\n{caption}<thead><tr>{heads}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody>{foot}\n</table>"
        )

    def _rest(self) -> str:
        """What stands below the rows that are shown at first; empty where these are all.

        It is true too where a viewer of notebooks takes ``hidden`` away and shows more of them.
        """
        kept, total = len(self.rows), self._total
        if total <= self._most:
            return ""
        left_out = "" if kept == total else f", of which the first {kept:,} are kept here"
        text = f"{total:,} rows{left_out}"
        if kept > self._most:
            text += f"; those beyond the first {self._most} are hidden at first"
        if self._file is None:
            return text
        place = f"{self._file.parent.name}/{self._file.name}"
        return f"{text}. The whole table is in {place} of the run's folder."

    def __repr__(self) -> str:
        first = self.rows[: IN_TEXT if self._most == FIRST else self._most]
        text = pd.DataFrame(first, columns=self.columns).to_string(index=False)
        return f"{text}\n{self._rest()}".strip()


class Text:
    """Markdown, shown by notebooks as such, in which nothing is HTML or a link.

    Sentences that hold names of others are given as :func:`in_markdown` makes them.
    """

    def __init__(self, markdown: str) -> None:
        self.markdown = without_html(markdown)

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.markdown


@dataclass(frozen=True)
class Quality:
    """What the figures of a page are good for; pages show it as one line below the headline.

    Attributes:
        level: a key of :data:`QUALITY_LEVELS`.
        sentence: Markdown without headings that says why, and what the figures can be used for.
    """

    level: str
    sentence: str

    MIME: ClassVar[str] = "application/vnd.dlrm.quality+json"

    def __post_init__(self) -> None:
        if self.level not in QUALITY_LEVELS:
            raise ValueError(
                f"level is {self.level!r}, expected one of {', '.join(QUALITY_LEVELS)}"
            )
        object.__setattr__(self, "sentence", without_html(self.sentence))

    def _repr_mimebundle_(self, **_: object) -> dict[str, Any]:
        text = f"**{QUALITY_LEVELS[self.level]}.** {self.sentence}"
        data = {"level": self.level, "sentence": self.sentence}
        return {self.MIME: data, "text/markdown": text, "text/plain": text}


def table_bars(
    table: pd.DataFrame,
    title: str,
    unit: str,
    value: str,
    label: Callable[[Any], str],
    *,
    share: str = "share",
    text: Callable[[float], str] = milliseconds,
    columns: str | Columns | None = None,
    marker: dict[str, Any] | None = None,
    row: int = ROW,
) -> Any:
    """A bar for each row, the first on top; its hover text lists the cells of the shown table.

    Args:
        table: ``component`` and ``phase`` give a bar its look, unless ``marker`` does.
        unit: of the axis.
        value: the column that bars are as long as; NaN has no length.
        label: what stands before the bar of a row.
        share: column of the share (0 to 1) that stands behind it, where there is one.
        text: writes the value that stands behind it.
        columns: those that a hover text lists, as :func:`show` takes them.
    """
    rows, formatted = rows_of(table), show(table, columns)
    titles, cells = ([], []) if isinstance(formatted, Text) else (formatted.columns, formatted.rows)
    hovers = []
    for line in cells:
        known = [pair for pair in zip(titles, line, strict=True) if pair[1] != NOTHING]
        hovers.append("<br>".join(f"{head}: {wrapped(plotly_text(cell))}" for head, cell in known))
    return ranked_bars(
        title,
        unit,
        [label(one) for one in rows],
        table[value].fillna(0.0).tolist(),
        [
            known_or(getattr(one, value), text)
            + (f"  ({known_or(getattr(one, share), percent)})" if share in table else "")
            for one in rows
        ],
        hovers,
        marker or markers([(one.component, one.phase) for one in rows]),
        row,
    )


class Shown:
    """What a cell shows: outputs one below the other, each with the tags of its view.

    What is None, or has nothing to show, is left out, and no sentence stands there twice.

    Attributes:
        tagged: figures, tables and texts, each with the metadata of its output.
    """

    def __init__(self, outputs: Iterable[tuple[Any, dict[str, Any]]]) -> None:
        shown = [(output, tags) for output, tags in outputs if not _says_nothing(output)]
        self.tagged = list(
            {getattr(each[0], "markdown", id(each[0])): each for each in shown}.values()
        )

    @property
    def outputs(self) -> list[Any]:
        return [output for output, _ in self.tagged]

    def __repr__(self) -> str:
        return "\n\n".join(map(repr, self.outputs))

    def _ipython_display_(self) -> None:
        from IPython.display import publish_display_data

        # a section in which nothing shows is left out of a page
        for output, metadata in self.tagged or [(Text(""), {})]:
            publish_display_data(bundle(output), metadata)


def below(*outputs: Any) -> Shown:
    tagged: list[tuple[Any, dict[str, Any]]] = []
    for output in outputs:
        tagged += output.tagged if isinstance(output, Shown) else [(output, {"tags": []})]
    return Shown(tagged)


def _says_nothing(output: Any) -> bool:
    held = getattr(output, "markdown", getattr(output, "rows", output))
    return output is None or (isinstance(output, Text | TextTable) and not held)


def bundle(output: Any) -> dict[str, Any]:
    """What a notebook stores of an output, by MIME type."""
    for name in ("bundle", "_repr_mimebundle_"):
        if hasattr(output, name):
            return dict(getattr(output, name)())
    data = {"text/plain": repr(output)}
    for kind, name in (("text/html", "_repr_html_"), ("text/markdown", "_repr_markdown_")):
        if hasattr(output, name):
            data[kind] = getattr(output, name)()
    return data


def listed(sentences: Iterable[str]) -> Text:
    return Text("\n".join(f"- {in_markdown(sentence)}" for sentence in sentences))


def _reason(frame: object) -> str:
    return str(getattr(frame, "attrs", {}).get("not_measured", ""))


def absent(reason: str) -> Text:
    """The sentence in the place of a table or figure that has nothing to show."""
    return Text(
        f"*Not measured: {in_markdown(reason)}.*" if reason else "*There is nothing to show.*"
    )


def draw(figure: Callable[[Any], Any], data: Any, instead: str | None = None) -> Any:
    """What ``figure`` makes of the data; where there is none (None, or no rows), the sentence
    ``instead`` (nothing if it is empty), or the reason that a frame holds."""
    if data is not None and (not isinstance(data, Sized) or len(data)):
        return figure(data)
    if instead is None:
        return absent(_reason(data))
    return Text(f"*{in_markdown(instead)}*" if instead else "")
