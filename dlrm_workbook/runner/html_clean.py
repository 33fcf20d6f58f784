"""Makes a fragment of HTML safe to put into a page that must work without a network.

Fragments come from markdown cells and from outputs (pandas tables, reprs), and the
names inside them from whatever program was measured: nobody vouches for them. bleach
parses a fragment as browsers do; what leaves this module is made of the elements,
attributes and CSS properties listed here and of nothing else. Links stay, since
following one is the reader's decision.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from html import unescape
from typing import Any

from bleach.css_sanitizer import CSSSanitizer
from bleach.html5lib_shim import HTML_TAGS, Filter
from bleach.sanitizer import Cleaner

HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
# none begins a text that is not HTML (as style does) or a part with rules of its own (svg, math):
# browsers read what is written here as it was meant
TAGS = HEADINGS | {
    *("a", "abbr", "b", "blockquote", "br", "caption", "code", "col", "colgroup", "dd", "del"),
    *("details", "div", "dl", "dt", "em", "hr", "i", "img", "ins", "kbd", "li", "mark", "ol", "p"),
    *("pre", "q", "s", "samp", "section", "small", "span", "strong", "sub", "summary", "sup"),
    *("table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var", "wbr"),
}
# the text of other elements stays, but of these it is no text for a reader
DROPPED_WITH_CONTENT = {
    *("applet", "audio", "frameset", "iframe", "math", "noembed", "noframes", "noscript"),
    *("object", "script", "style", "svg", "template", "title", "video"),
}
_CELL = ["align", "colspan", "rowspan", "scope", "valign"]
ATTRIBUTES = {
    "*": ["class", "style", "title"],
    # what the contents and footnotes lead to
    **{tag: ["id"] for tag in HEADINGS | {"li", "p", "section", "sup"}},
    "a": ["href", "id"],
    "col": ["span"],
    "colgroup": ["span"],
    "details": ["open"],
    "img": ["alt", "height", "src", "width"],
    # only read by the filter: a task's box
    "input": ["checked", "type"],
    "ol": ["start"],
    "table": ["border"],
    "td": [*_CELL, "data-value"],
    "th": [*_CELL, "data-column"],
    "tr": ["hidden"],
}
# none can load anything, and none can move an element over what is around it
CSS_PROPERTIES = {
    *("background-color", "border-collapse", "color", "font-family", "font-size", "font-style"),
    *("font-weight", "height", "max-width", "min-width", "overflow-wrap", "padding-left"),
    *("text-align", "text-decoration", "vertical-align", "white-space", "width", "word-break"),
}
# the filter restricts them further, to links and to images each
SCHEMES = {"attachment", "data", "http", "https", "mailto"}
LINK = re.compile(r"https?://|mailto:|#|[\w./%+-]*(?:[?#]|$)", re.IGNORECASE)
"""How an address that may be followed begins; a relative one has no colon in its path."""

ImageResolver = Callable[[str], str | None]


def clean_html(fragment: str, resolve_image: ImageResolver = lambda source: None) -> str:
    """The fragment without scripts, styles, event handlers and what would be loaded.

    What looks like a tag but is none of HTML's (``vector<int>``) stays as text.

    Args:
        fragment: HTML.
        resolve_image: gives a ``data:`` address for an image's source, or None; an
            image that cannot be embedded is replaced by its description.
    """
    cleaner = Cleaner(
        # bleach parses all of HTML, so that it is read as browsers do; the filter lists what stays
        tags=HTML_TAGS | {"math", "svg"},
        attributes=ATTRIBUTES,
        protocols=SCHEMES,
        css_sanitizer=CSSSanitizer(CSS_PROPERTIES, allowed_svg_properties=()),
        filters=[partial(_AllowedOnly, resolve_image=resolve_image)],
    )
    return str(cleaner.clean(fragment))


class _AllowedOnly(Filter):
    """Lets through the elements of TAGS and text; embeds images, draws the boxes of tasks."""

    def __init__(self, source: Any, resolve_image: ImageResolver) -> None:
        super().__init__(source)
        self._resolve_image = resolve_image

    def __iter__(self) -> Iterator[dict[str, Any]]:
        dropped = 0  # open elements that go with their content
        for token in super().__iter__():
            kind, name = token["type"], token.get("name")
            if name in DROPPED_WITH_CONTENT:
                dropped += {"StartTag": 1, "EndTag": -1}.get(kind, 0)
            elif dropped:
                continue
            elif kind in ("Characters", "SpaceCharacters", "Entity"):
                yield token
            elif name == "input":
                yield from self._task(token)
            elif name == "img":
                yield from self._image(token)
            elif kind in ("StartTag", "EmptyTag", "EndTag") and name in TAGS:
                address = (None, "href")
                if address in token.get("data", {}) and not LINK.match(token["data"][address]):
                    del token["data"][address]
                yield token

    def _task(self, token: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if token["data"].get((None, "type")) == "checkbox":
            box = "☑ " if (None, "checked") in token["data"] else "☐ "
            yield {"type": "Characters", "data": box}

    def _image(self, token: dict[str, Any]) -> Iterator[dict[str, Any]]:
        source = unescape(token["data"].get((None, "src"), ""))
        data = source if source.startswith("data:image/") else self._resolve_image(source)
        if data is not None and data.startswith("data:image/"):
            token["data"][None, "src"] = data
            yield token
            return
        words = unescape(token["data"].get((None, "alt"), "")) or source.rsplit("/", 1)[-1]
        span = {"name": "span", "namespace": token["namespace"]}
        yield {"type": "StartTag", **span, "data": {(None, "class"): "absent"}}
        yield {"type": "Characters", "data": f"[image: {words}]"}
        yield {"type": "EndTag", **span}
