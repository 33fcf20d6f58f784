"""The line that says how far ``dlrm run`` is: on a terminal, in a log, with and without a count."""

import io
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from dlrm_workbook.ground.bar import TOLD_TO
from dlrm_workbook.runner import progress
from dlrm_workbook.runner.engine import heading
from dlrm_workbook.runner.progress import ProgressLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(line: ProgressLine, **state: object) -> None:
    usual = {"unit": "", "total": None, "done": 0, "text": "", "first": 0, "began": time.time()}
    Path(line.environment[TOLD_TO]).write_text(json.dumps(usual | state))


def test_a_log_gets_a_line_when_something_else_begins_and_none_while_nothing_is_new() -> None:
    log = io.StringIO()
    with ProgressLine("2/3 profile", log).ticking() as line:
        line.section("Measuring")
        line.show()
        line.show()
        told(line, what="timing alternatives", done=7, total=24, text="embedding_backend=fused")
        line.show()
        told(line, what="timing alternatives", done=8, total=24)
        line.show()
    assert log.getvalue().splitlines() == [
        "[2/3 profile] Measuring",
        "[2/3 profile] timing alternatives 7 of 24 (embedding_backend=fused)",
    ]


def test_what_goes_on_for_long_is_said_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    log = io.StringIO()
    with ProgressLine("train", log).ticking() as line:
        for done in (1, 2):
            told(line, what="training", done=done, total=9)
            line.show()
    assert "training 1 of 9" in log.getvalue() and "training 2 of 9" in log.getvalue()


def test_the_time_left_is_that_of_what_is_counted_since_it_began(monkeypatch) -> None:
    log, now = io.StringIO(), time.time()
    clocks = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr(progress, "time", clocks)
    with ProgressLine("train", log).ticking() as line:
        # a resumed run: 80 were done before, 10 since took 20 s, 10 are left
        told(line, what="training", done=90, total=100, first=80, began=now - 20)
        line.show()
    assert log.getvalue() == "[train] training 90 of 100, 0:20, about 20 s left\n"


@pytest.mark.parametrize("columns", [80, 40])
def test_a_terminal_shows_one_line_that_keeps_its_head(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    screen = Terminal()
    with ProgressLine("2/3 profile", screen).ticking() as line:
        words = "embedding_backend=fused, embedding_update=race_free, threads=2"
        told(line, what="timing alternatives", done=7, total=24, text=words)
        line.show()
        shown = screen.getvalue().split("\r")[-1]
        assert len(shown) < columns
        assert shown.startswith("[2/3 profile] timing alternatives 7") and "…" in shown
        assert columns < 80 or "(embedding_backend=fused, …)" in shown
        told(line, what="short")
        line.show()
        assert screen.getvalue().split("\r")[-1] == "[2/3 profile] short".ljust(len(shown))
    assert screen.getvalue().endswith("\r") and "\n" not in screen.getvalue()


@pytest.mark.parametrize("columns", range(20, 100))
def test_a_line_is_never_wider_than_its_terminal(columns, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ("790.3 ms each, 2,591 samples/s, loss 0.08", "oneword" * 20, ", ", ""):
        screen = Terminal()
        with ProgressLine("train", screen).ticking() as line:
            told(line, what="training", done=7, total=24, text=words)
            line.show()
            shown = screen.getvalue().split("\r")[-1]
        assert len(shown) < columns and "()" not in shown
        assert columns < 45 or "790.3 ms" in shown or "790" not in shown


def test_a_paragraph_is_under_the_heading_before_it() -> None:
    assert heading("## What runs\ntext") == "What runs"
    assert heading("One batch: the dense features.") == ""


def test_a_bar_that_is_half_written_is_no_bar() -> None:
    log = io.StringIO()
    with ProgressLine("train", log).ticking() as line:
        line.section("Loss")
        Path(line.environment[TOLD_TO]).write_text('{"what": ')
        line.show()
    assert log.getvalue() == "[train] Loss\n"
