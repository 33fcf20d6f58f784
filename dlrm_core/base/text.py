"""Text of others, shown so that it can neither steer a terminal nor read otherwise than it is."""

from __future__ import annotations

import io
import re
from typing import Any, TextIO

_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # steer terminals
    "\u202a-\u202e\u2066-\u2069"  # turn the direction of what follows
    "\ud800-\udfff]"  # have no UTF-8
)


def visible(text: str) -> str:
    """Return the text with what cannot be seen as Python writes it: ``\\x1b``, ``\\u202e``.

    Tabs and line breaks stay.
    """
    return text if text.isprintable() else _UNSEEN.sub(lambda odd: repr(odd[0])[1:-1], text)


class _Terminal:
    """A terminal on which only visible text is written; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text; a line that is written anew begins, and may end, with a return."""
        inner = text.strip("\r")
        before, _, after = text.partition(inner) if inner else (text, "", "")
        return self._stream.write(before + visible(inner) + after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def shown_on(stream: TextIO) -> Any:
    """Return what a command writes to instead of one of its own streams.

    On a terminal control characters in names of files and recordings are shown, not obeyed. Into
    a file or pipe a text goes as it is; what the encoding lacks is written as Python writes it.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # a notebook's, a test's, or one that is written already as it must be
    if stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")
    return _Terminal(stream) if stream.isatty() else stream


def counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def format_bytes(count: float) -> str:
    """Bytes with a binary unit: ``1.50 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"
