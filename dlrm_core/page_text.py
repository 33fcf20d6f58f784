"""What a page is made of, piece by piece: texts, images, code and data as safe HTML."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape
from nbconvert.filters import ansi2html
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]

NOTHING = Markup("")


def duration(seconds: float) -> str:
    """A span of time as a person says it: 0.42 s, 12.3 s, 4 min 05 s."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


@dataclass
class Output:
    """One output of a cell: a figure's data, or HTML of some kind."""

    kind: str
    html: Markup = NOTHING
    anchor: str = ""
    label: str = ""
    height: int = 0


def after_carriage_returns(text: str) -> str:
    """Text as a terminal would leave it: of what a line overwrote, only the last."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        written = [piece for piece in line.split("\r") if piece.strip()]
        lines.append(written[-1] if written else "")
    return "\n".join(lines)


def text_output(text: str, kind: str) -> Output | None:
    if not text.strip():
        return None
    return Output(kind, Markup("<pre>{}</pre>").format(Markup(ansi2html(text.strip("\n")))))


def image_html(kind: str, data: str) -> Markup:
    if kind == "image/svg+xml":
        data = base64.b64encode(data.encode()).decode()
    address = f"data:{kind};base64,{''.join(data.split())}"
    return Markup('<img src="{}" alt="Image made by the cell above">').format(address)


def highlighted(source: str, language: str) -> Markup:
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        return escape(source)
    return Markup(highlight(source, lexer, HtmlFormatter(nowrap=True)).rstrip("\n"))


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """The value with NaN and infinities as null: JSON has no others, and plotly.js draws gaps."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
