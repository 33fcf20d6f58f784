"""Text of others: what cannot be seen is written as Python writes it."""

import io

import pytest

from dlrm_core.base.text import shown_on, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("std::vector<int>::at", "std::vector<int>::at"),
        ("größer 大 שלום 👩‍💻 a b", "größer 大 שלום 👩‍💻 a b"),
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[2J\x9b\r\0\x7f", r"\x1b[2J\x9b\r\x00\x7f"),
        ("\u202etxt.exe\u2066", r"\u202etxt.exe\u2066"),
        ("\ud83d", r"\ud83d"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert visible(shown) == shown


class _Tty(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_a_line_that_is_written_anew_keeps_its_returns() -> None:
    held = io.BytesIO()
    stream = shown_on(_Tty(held, encoding="ascii", errors="strict"))
    assert shown_on(stream) is stream, "once is enough"
    for text in ("\r10%\x1b", "\r", "\r   \r", "a\rb\n"):
        stream.write(text)
    stream.flush()
    assert held.getvalue() == b"\r10%\\x1b\r\r   \ra\\rb\n"
    assert stream.isatty() and stream.encoding == "ascii"


def test_a_pipe_gets_the_text_as_it_is() -> None:
    held = io.BytesIO()
    stream = shown_on(io.TextIOWrapper(held, encoding="utf-8", errors="strict"))
    stream.write("\x1b[1m ü \udcff")
    stream.flush()
    assert held.getvalue() == b"\x1b[1m \xc3\xbc \\udcff"
