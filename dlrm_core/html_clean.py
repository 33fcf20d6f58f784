"""Makes a fragment of HTML safe to put into a page that must work without a network.

Fragments come from markdown cells and from outputs (pandas tables, reprs). Scripts
and whatever a browser would load from elsewhere are taken out; links stay, since
following one is the reader's decision. Tags are balanced, so that a fragment
cannot break the page around it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from html.parser import HTMLParser

DROPPED_WITH_CONTENT = {
    "script",
    "iframe",
    "object",
    "applet",
    "noscript",
    "template",
    "title",
    "audio",
    "video",
    "frameset",
}
DROPPED_TAGS = {"link", "meta", "base", "html", "head", "body", "form", "embed", "frame", "source"}
VOID = {"area", "br", "col", "hr", "img", "input", "track", "wbr"}
LOADING_ATTRIBUTES = {"src", "href", "xlink:href", "background", "poster", "data", "action"}
REMOTE_CSS = re.compile(
    r"@import|url\(\s*['\"]?(?!['\"]?\s*(?:data:|#))|expression\(", re.IGNORECASE
)

ImageResolver = Callable[[str], str | None]


def clean_html(fragment: str, resolve_image: ImageResolver = lambda source: None) -> str:
    """The fragment without scripts, event handlers and anything loaded from elsewhere.

    Args:
        fragment: HTML.
        resolve_image: gives a ``data:`` address for an image's source, or None; an
            image that cannot be embedded is replaced by its description.
    """
    cleaner = _Cleaner(resolve_image)
    cleaner.feed(fragment)
    cleaner.close()
    return cleaner.result()


class _Cleaner(HTMLParser):
    def __init__(self, resolve_image: ImageResolver) -> None:
        super().__init__(convert_charrefs=False)
        self._resolve_image = resolve_image
        self._parts: list[str] = []
        self._open: list[str] = []
        self._dropping: list[str] = []

    def result(self) -> str:
        return "".join(self._parts) + "".join(f"</{tag}>" for tag in reversed(self._open))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._dropping or tag in DROPPED_WITH_CONTENT:
            # nested elements of the same name must not end the dropping early
            if not self._dropping or tag == self._dropping[-1]:
                self._dropping.append(tag)
            return
        if tag in DROPPED_TAGS:
            return
        # pandas puts a scoped style before each table; the page has its own
        if tag == "style" and any(name == "scoped" for name, _ in attrs):
            self._dropping.append(tag)
            return
        if tag == "img":
            self._image(dict(attrs))
            return
        kept = "".join(self._attribute(tag, name, value or "") for name, value in attrs)
        self._parts.append(f"<{tag}{kept}>")
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in DROPPED_WITH_CONTENT:
            return
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if self._dropping:
            if tag == self._dropping[-1]:
                self._dropping.pop()
            return
        if tag in self._open:
            while True:
                last = self._open.pop()
                self._parts.append(f"</{last}>")
                if last == tag:
                    break

    def handle_data(self, data: str) -> None:
        if self._dropping:
            return
        if self._open and self._open[-1] == "style":
            self._parts.append("" if REMOTE_CSS.search(data) else data)
        else:
            self._parts.append(data.replace("<", "&lt;"))

    def handle_entityref(self, name: str) -> None:
        if not self._dropping:
            self._parts.append(f"&{name};")

    def handle_charref(self, name: str) -> None:
        if not self._dropping:
            self._parts.append(f"&#{name};")

    def _image(self, attributes: dict[str, str | None]) -> None:
        source = attributes.get("src") or ""
        words = attributes.get("alt") or ""
        data = source if source.startswith("data:image/") else self._resolve_image(source)
        if data is None:
            described = words or source.rsplit("/", 1)[-1]
            self._parts.append(f'<span class="absent">[image: {escape(described)}]</span>')
        else:
            self._parts.append(f'<img src="{escape(data)}" alt="{escape(words)}">')

    @staticmethod
    def _attribute(tag: str, name: str, value: str) -> str:
        if name.startswith("on") or name in {"srcset", "srcdoc", "ping", "formaction"}:
            return ""
        if name == "style" and REMOTE_CSS.search(value):
            return ""
        if name in LOADING_ATTRIBUTES:
            address = re.sub(r"[\x00-\x20]", "", value).lower()
            if tag == "a" and name == "href":
                harmless = not address.startswith(("javascript:", "vbscript:", "data:"))
            else:
                harmless = address.startswith(("#", "data:image/"))
            if not harmless:
                return ""
        return f' {name}="{escape(value)}"'
