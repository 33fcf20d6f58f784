"""Sentences with names of others in them, as Markdown reads them."""

import re
from html import unescape

import mistune
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sample_notebooks import PAYLOADS

from dlrm_workbook.analysis.sentences import in_markdown
from dlrm_workbook.show.tables import FORMATS, Text

PLUGINS = ["table", "strikethrough", "task_lists", "footnotes", "def_list", "url"]
render = mistune.create_markdown(escape=False, plugins=PLUGINS)
OURS = re.compile(
    r"</?(?:p|em|strong|code|pre|ol|ul|li|h\d|hr|br|blockquote|table|thead|tbody|tr|t[hd]|del|dl|"
    r'd[td]|input class="task-list-item-checkbox" type="checkbox" disabled(?: checked)?|'
    r'li class="task-list-item"|t[hd] style="text-align:\w+"|a href="https?://[^"<>]*"|/?a)\s*/?>'
)


@pytest.mark.parametrize(
    "name",
    [
        "std::vector<int>::at(unsigned long)",
        "a *x* _b_ __init__ top_mlp ~~d~~ [c](d) ![e](f) [g][h] [i]: j",
        "operator&&(a &lt; b) & AT&T; $x$ and $y$",
        "\\*a\\* \\` ` `` <b>",
        "1. one",
        "- two",
        "# three",
        "> four",
        "[ ] five",
        "---",
        ": six",
        *PAYLOADS,
    ],
)
def test_a_name_reads_as_it_is_written(name: str) -> None:
    for sentence in (name, f"Kernel {name} is slow."):
        html = str(render(Text(f"- {in_markdown(sentence)}").markdown))
        assert set(re.findall(r"</?(\w+)", html)) <= {"ul", "li", "code", "a"}
        # backticks in pairs are a sentence's own markup
        text = unescape(re.sub(r"<[^>]*>", "", html)).strip().replace("`", "")
        assert text == " ".join(sentence.split()).replace("`", "")


def test_code_between_backticks_stays_code() -> None:
    text = Text(f"**{in_markdown('Set `a<b> *c*` in x<y>')}**")
    assert render(text.markdown) == (
        "<p><strong>Set <code>a&lt;b&gt; *c*</code> in x&lt;y&gt;</strong></p>\n"
    )


PIECES = st.sampled_from(
    [
        *("`", "``", "```", "\\", "\n", "\n\n", "    ", "~~~", "|", "|-|", "- ", "> ", "# ", "1. "),
        *("<img src=x onerror=y>", "<script>", "</code>", "<!-- ", "-->", "<https://a'b>", "&lt;"),
        *("[a](javascript:x)", "[a]", "[a]: javascript:x", "[^1]", "[^1]: b", "a", " ", "*", "_"),
    ]
)


@settings(max_examples=1500, deadline=None)
@example("<https://a'b>`<img src=x onerror=y>")
@given(st.lists(PIECES, max_size=14).map("".join))
def test_no_text_becomes_html_or_a_link(text: str) -> None:
    for markdown in (text, f"- {text}\n- {text}", f"| {text} | b |\n|---|---|\n| {text} | c |"):
        for made in (Text(markdown).markdown, f"**{in_markdown(markdown)}** {in_markdown(text)}"):
            html = str(render(made))
            assert "<" not in OURS.sub("", html), (made, html)
            assert not re.search(r'=\s*"\s*javascript', html)


def test_a_bound_that_says_nothing_is_not_printed() -> None:
    bounds = [1.004, 1.043, 1.6, 553.0]
    said, _ = FORMATS["gain"](pd.Series([{"low": 1.0, "mid": 1.0, "high": at} for at in bounds]))
    assert list(said) == ["next to none", "at most 1.04x", "at most 1.6x", "not bounded"]
