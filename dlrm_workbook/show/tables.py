"""What notebooks show as tables and sentences: cells with few digits, numbers to the right.

What was not measured says so, what does not apply is a dash.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import pandas as pd

from dlrm_core.units import NOT_MEASURED, NOTHING

EMPTY = '<p class="absent">Nothing to list.</p>'
"""A table without rows; pages leave it out where a sentence before says why."""

_PLAIN = r"<?[-+−]?[\d,]*\.?\d+(e[-+]?\d+)?"
_NUMBER = re.compile(rf"{_PLAIN}( to {_PLAIN})?( ?(%|×|x|ms|s|B|[KMGT]iB))?( \(.*\))?")


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


def aligned(*columns: Sequence[float] | pd.Series) -> list[list[str]]:
    """Several columns of one quantity with the same decimals."""
    cells = column([value for values in columns for value in values])
    starts = itertools.accumulate((len(values) for values in columns), initial=0)
    return [cells[start : start + len(values)] for start, values in zip(starts, columns)]  # noqa: B905


def signed(values: Sequence[float]) -> list[str]:
    """Differences of one column: a sign, and as many decimals as the largest needs."""
    return with_signs(values, column([abs(value) for value in values]))


def with_signs(values: Iterable[float], cells: Sequence[str]) -> list[str]:
    """The cells of differences with their signs; what rounds to nothing has none."""
    # "<0.01" with a sign would say two things
    cells = [cell if not cell.startswith("<") else cell[1:-1] + "0" for cell in cells]
    return [
        cell if not math.isfinite(value) or _is_zero(cell) else ("+" if value > 0 else "−") + cell
        for value, cell in zip(values, cells, strict=True)
    ]


def _is_zero(cell: str) -> bool:
    return cell.strip("0.") == ""


class Table:
    """Rows of text, shown by notebooks as a table; numbers to the right, words to the left."""

    def __init__(self, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        self.columns = list(columns)
        self.rows = [list(row) for row in rows]

    @classmethod
    def of(cls, columns: Mapping[str, Iterable[str]]) -> Table:
        """A table from its columns, all of one length, by their titles."""
        return cls(list(columns), zip(*columns.values(), strict=True))

    def _repr_html_(self) -> str:
        if not self.rows:
            return EMPTY
        words = [not _are_numbers(cells) for cells in zip(*self.rows, strict=True)]

        def line(cells: Sequence[str], tag: str) -> str:
            shown = (
                f'<{tag} style="{_look(cell, left, tag)}">{escape(cell)}</{tag}>'
                for cell, left in zip(cells, words, strict=True)
            )
            return f"<tr>{''.join(shown)}</tr>"

        body = "\n".join(line(row, "td") for row in self.rows)
        return (
            f'<table class="dataframe">\n<thead>{line(self.columns, "th")}</thead>\n'
            f"<tbody>\n{body}\n</tbody>\n</table>"
        )

    def __repr__(self) -> str:
        return pd.DataFrame(self.rows, columns=self.columns).to_string(index=False)


class Text:
    """Markdown, shown by notebooks as such."""

    def __init__(self, markdown: str) -> None:
        self.markdown = markdown

    def _repr_markdown_(self) -> str:
        return self.markdown

    def __repr__(self) -> str:
        return self.markdown


def shown_if(there: object, draw: Callable[[Any], Any], data: Any, reason: str) -> Any:
    """What ``draw`` makes of the data where it is there; else the reason in its place."""
    return draw(data) if there and data is not None else Text(f"*{reason}*")


def _look(cell: str, is_words: bool, tag: str) -> str:
    """Words to the left; numbers to the right and in one line, but for a long one's bracket."""
    if is_words:
        return "text-align: left"
    whole = tag == "td" and "(" not in cell
    return "text-align: right" + ("; white-space: nowrap" if whole else "")


def _are_numbers(cells: Sequence[str]) -> bool:
    known = [cell for cell in cells if cell not in ("", NOTHING, NOT_MEASURED)]
    return bool(known) and all(_NUMBER.fullmatch(cell) for cell in known)
