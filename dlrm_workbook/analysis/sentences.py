"""The one way from a sentence to Markdown.

Findings, cautions, reasons and titles are plain sentences, and the names inside them are those
of whatever program was measured. The only markup of a sentence is ``code`` between single
backticks; everything else must read as it is written, whatever a name looks like.
"""

from __future__ import annotations

import re
from collections.abc import Callable

_CODE = re.compile(r"(?<![`\\])`[^`\n]+`(?!`)")
_HTML = r"<(?=[A-Za-z/!?])"
_LINK = r"\](?=[(\[:])|(?<=[A-Za-z]):(?=//)|(?<=www)\."
"""Links, and addresses that become such: they would take a backtick behind them for their own."""

_MARKUP = re.compile(
    rf"[\\`*$]|{_HTML}|{_LINK}|&(?=[#A-Za-z])|~(?=~)|(?<=~)~|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])"
)
_BLOCK = re.compile(r"[>\[]|#(?=[# ])|[-+=:](?=[-+=: ]|$)|(?<=\d)[.)](?= |$)")
"""What at the beginning of a line makes it a quotation, heading, list item or definition."""
_NOT_OURS = re.compile(rf"`|{_HTML}|{_LINK}|~(?=~)|(?<=~)~")
FENCE = "```"


def in_markdown(sentence: object) -> str:
    """The Markdown that reads as the sentence does: one line, with only its code as markup.

    Characters that Markdown or HTML would read as markup become numeric entities, which no
    reader of Markdown takes for markup again. Spaces and line breaks become single spaces.
    """
    line = " ".join(str(sentence).split())
    text = _outside_code(line, lambda words: _MARKUP.sub(_entity, words))
    begins = _BLOCK.match(text) or re.match(rf"\d{{1,9}}({_BLOCK.pattern})", text)
    if begins is None:
        return text
    return text[: begins.end() - 1] + f"&#{ord(text[begins.end() - 1])};" + text[begins.end() :]


def without_html(markdown: str) -> str:
    """Markdown in which nothing is HTML or a link: the workbook's own texts have neither.

    Code stays as it is. Whatever does not belong to a pair of single backticks in one line, or
    to a fence of three that is a line of its own, is no code: so every reader of Markdown finds
    the code where this function does.
    """
    lines, fenced = [], False
    for line in markdown.splitlines():
        if line == FENCE:
            fenced = not fenced
        elif fenced:
            line = line.replace(FENCE, "'''")
        else:
            line = _outside_code(line, lambda words: _NOT_OURS.sub(_entity, words))
        lines.append(line)
    return "\n".join([*lines, FENCE] if fenced else lines)


def _outside_code(line: str, change: Callable[[str], str]) -> str:
    """A line with its text changed and its code as it is, but for what a table would cut."""
    pieces, at = [], 0
    for code in _CODE.finditer(line):
        inside = re.sub(_HTML, _entity, code[0]) if "|" in code[0] else code[0]
        pieces += [change(line[at : code.start()]), inside]
        at = code.end()
    return "".join([*pieces, change(line[at:])])


def _entity(character: re.Match[str]) -> str:
    return f"&#{ord(character[0])};"
