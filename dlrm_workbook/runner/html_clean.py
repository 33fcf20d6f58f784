"""Makes a fragment of HTML safe to put into a page that must work without a network.

Fragments come from Markdown cells and from outputs (pandas tables, reprs), and the names inside
them from whatever program was measured: nobody vouches for them. nh3 (the ammonia library) parses
a fragment as browsers do and writes it anew; what leaves this module is made of the elements,
attributes and CSS properties listed here and of nothing else. Links stay, since following one is
the reader's decision.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape

import nh3

HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
# none begins a text that is not HTML (as style does) or a part with rules of its own (svg, math):
# browsers read what is written here as it was meant
TAGS = HEADINGS | {
    *("a", "abbr", "b", "blockquote", "br", "caption", "code", "col", "colgroup", "dd", "del"),
    *("details", "div", "dl", "dt", "em", "hr", "i", "img", "ins", "kbd", "li", "mark", "ol", "p"),
    *("pre", "q", "s", "samp", "section", "small", "span", "strong", "sub", "summary", "sup"),
    *("table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul", "var", "wbr"),
}
DROPPED_WITH_CONTENT = {
    *("applet", "audio", "frameset", "iframe", "math", "noembed", "noframes", "noscript"),
    *("object", "script", "style", "svg", "template", "title", "video"),
}
"""Elements whose content is no text for a reader."""
DROPPED = {
    *("address", "area", "article", "aside", "base", "bdi", "bdo", "big", "body", "button"),
    *("canvas", "center", "cite", "data", "datalist", "dfn", "dialog", "embed", "fieldset"),
    *("figcaption", "figure", "font", "footer", "form", "frame", "head", "header", "html", "image"),
    *("input", "label", "legend", "link", "main", "map", "marquee", "meta", "meter", "nav"),
    *("optgroup", "option", "output", "param", "plaintext", "picture", "progress", "rp", "rt"),
    *("ruby", "select", "source", "strike", "textarea", "time", "track", "tt", "xmp"),
}
"""Elements that go while their text stays; what is in no list is no element, but text."""
_CELL = {"align", "colspan", "rowspan", "scope", "valign"}
ATTRIBUTES = {
    "*": {"class", "style", "title"},
    # what the contents and footnotes lead to
    **{tag: {"id"} for tag in HEADINGS | {"li", "p", "section", "sup"}},
    "a": {"href", "id"},
    "col": {"span"},
    "colgroup": {"span"},
    "details": {"open"},
    "img": {"alt", "height", "src", "width"},
    "ol": {"start"},
    "table": {"border"},
    "td": _CELL | {"data-value"},
    "th": _CELL | {"data-column"},
    "tr": {"hidden"},
}
# none can load anything, and none can move an element over what is around it
CSS_PROPERTIES = {
    *("background-color", "border-collapse", "color", "font-family", "font-size", "font-style"),
    *("font-weight", "height", "max-width", "min-width", "overflow-wrap", "padding-left"),
    *("text-align", "text-decoration", "vertical-align", "white-space", "width", "word-break"),
}
SCHEMES = {"data", "http", "https", "mailto"}
"""Schemes that an address may have; LINK and the resolver of images allow fewer to each."""
LINK = re.compile(r"https?://|mailto:|#|[\w./%+-]*(?:[?#]|$)", re.IGNORECASE)
"""How an address that may be followed begins; a relative one has no colon in its path."""
_BRACKET = re.compile(r"<(?=/?([a-z][^\s/<>]*))", re.IGNORECASE)
"""What begins a tag, whatever its name."""

_TAG = re.compile(r'<[a-z][a-z0-9]*(?: [a-z-]+="[^"]*")+>')
"""Matches the start tag of an element with attributes as nh3 writes it."""
_STYLE = re.compile(r' style="([^"]*)"')
# no quotes, brackets left open, comments or escapes: a value cannot end the rule it stands in
_DECLARATION = re.compile(r"[a-z-]+:(?:[\w#%.,+\s-]|\([\w#%.,+\s-]*\))+")

ImageResolver = Callable[[str], str | None]


def clean_html(fragment: str, resolve_image: ImageResolver = lambda source: None) -> str:
    """Return the fragment without scripts, styles, event handlers and what would be loaded.

    What looks like a tag but is none of HTML's (``vector<int>``) stays as text.

    Args:
        resolve_image: gives a ``data:`` address for an image's source, or None; an image that
            cannot be embedded loses its source, so that a browser shows its description.
    """

    def value_of(tag: str, attribute: str, value: str) -> str | None:
        if attribute == "href" and not LINK.match(value):
            return None
        if attribute == "src":
            return image_address(value, resolve_image)
        return value

    return nh3.clean(
        _BRACKET.sub(_text_unless_known, fragment),
        tags=TAGS,
        clean_content_tags=DROPPED_WITH_CONTENT,
        attributes=ATTRIBUTES,
        attribute_filter=value_of,
        filter_style_properties=CSS_PROPERTIES,
        url_schemes=SCHEMES,
        link_rel=None,
    )


def styles_moved(html: str, looks: dict[str, int]) -> str:
    """Return the fragment with numbers in ``data-look`` instead of its style attributes.

    A page that lets no style attribute apply shows them by the rules of :func:`look_sheet`.

    Args:
        html: what :func:`clean_html` returned.
        looks: number of each style; new ones are added.
    """

    def moved(style: re.Match[str]) -> str:
        parts = (part.strip() for part in unescape(style[1]).split(";"))
        look = ";".join(part for part in parts if _DECLARATION.fullmatch(part))
        return f' data-look="{looks.setdefault(look, len(looks))}"' if look else ""

    return _TAG.sub(lambda tag: _STYLE.sub(moved, tag[0]), html)


def look_sheet(looks: dict[str, int]) -> str:
    """Return the style sheet for what :func:`styles_moved` numbered; it wins as attributes do."""
    return "".join(
        f'[data-look="{number}"]{{{look.replace(";", " !important;")} !important}}\n'
        for look, number in looks.items()
    )


def image_address(source: str, resolve_image: ImageResolver) -> str | None:
    """Return the ``data:`` address of an image, or None where it cannot be embedded."""
    data = source if source.startswith("data:image/") else resolve_image(source)
    return data if data is not None and data.startswith("data:image/") else None


def _text_unless_known(begin: re.Match[str]) -> str:
    known = TAGS | DROPPED_WITH_CONTENT | DROPPED
    return "<" if begin[1].lower() in known else "&lt;"
