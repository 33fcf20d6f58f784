"""One line that says how far ``dlrm run`` is: ``[2/3 profile] timing alternatives 7 of 24 ...``.

A terminal shows one line, written anew every second and cut to its width at the end, never at
the head. Anything else (a log, CI) gets a plain line whenever something else begins, and one
every :data:`PLAIN_SECONDS` while it goes on. What a cell is busy with comes from the bar that it
holds (:class:`dlrm_workbook.ground.bar.Bar`), which writes its state to a file of ours.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from dlrm_workbook.ground.bar import TOLD_TO

PLAIN_SECONDS = 30.0
"""Time between two lines about one thing where nobody watches a terminal."""

PLAIN_COLUMNS = 80
"""A line of a log has so many letters: nobody can make it wider."""

SECTION_SECONDS = 1.0
"""A section that took less is not named: it may have had nothing to do."""

LEAST_SECONDS = 3.0
LEAST_COUNT = 2
"""No time left is guessed before so long, and before so many are done."""


def columns(to: TextIO) -> int:
    """Count the letters that a line may have there: by the terminal's width, or a log's."""
    return shutil.get_terminal_size().columns if to.isatty() else PLAIN_COLUMNS


class ProgressLine:
    """A line that says what is going on, for whoever waits at a terminal or reads a log.

    Args:
        head: what stands first, such as ``2/3 profile``.
        to: where lines go; a terminal's line is written anew.
    """

    def __init__(self, head: str, to: TextIO | None = None) -> None:
        self._to = sys.stderr if to is None else to
        self._live = self._to.isatty()
        self._head = f"[{head}] "
        self._sections = [("", time.time())]
        self._file = Path(os.devnull)
        self._said = ""
        self._due = 0.0
        self._shown = 0
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """What a process must have in its environment for its bars to show up here, while it is
        :meth:`ticking`."""
        return {TOLD_TO: str(self._file)}

    @contextmanager
    def ticking(self) -> Iterator[ProgressLine]:
        """While the block runs the line follows what goes on; then it is taken away."""
        done = threading.Event()

        def tick() -> None:
            while not done.wait(1.0):
                self.show()

        thread = threading.Thread(target=tick, daemon=True)
        with tempfile.TemporaryDirectory(prefix="dlrm-progress-") as folder:
            self._file = Path(folder) / "bar.json"
            thread.start()
            try:
                yield self
            finally:
                done.set()
                thread.join()
                self._clear()

    def section(self, heading: str) -> None:
        """Note under which heading of the notebook the cells are that run now; the line names it
        once they have taken :data:`SECTION_SECONDS`."""
        self._sections = [self._section(time.time()), (heading, time.time())]
        if not self._said:
            self.show()

    def _section(self, now: float) -> tuple[str, float]:
        """The heading that the line names, and since when."""
        first, last = self._sections[0], self._sections[-1]
        return last if not first[0] or now - last[1] >= SECTION_SECONDS else first

    def show(self) -> None:
        """Write what goes on now, as far as it is news."""
        width = columns(self._to) - 1
        what, line = self._line(self._state(), time.time(), width)
        with self._lock:
            if self._live:
                self._to.write("\r" + line.ljust(self._shown))
                self._shown = len(line)
            elif what and (what != self._said or time.monotonic() >= self._due):
                self._to.write(line + "\n")
                self._said, self._due = what, time.monotonic() + PLAIN_SECONDS
            self._to.flush()

    def _state(self) -> dict[str, Any] | None:
        """What the bar says that a cell holds, if it holds one."""
        with suppress(OSError, ValueError):
            state = json.loads(self._file.read_text(encoding="utf-8"))
            if isinstance(state, dict) and isinstance(state.get("what"), str):
                return state
        return None

    def _line(self, state: dict[str, Any] | None, now: float, width: int) -> tuple[str, str]:
        """What goes on, and the line with all that is known of it, in so many columns."""
        if state is None:
            section, begun = self._section(now)
            state = {"what": section, "began": begun}
        what, done, total = state["what"], state.get("done"), state.get("total")
        counted = f" {done:,} of {total:,}" if total and done is not None else ""
        elapsed = now - state["began"]
        clock = f", {_clock(elapsed)}" if elapsed >= LEAST_SECONDS else ""
        first, last = self._head + what + counted, clock + _left(state, elapsed)
        text = state.get("text") or ""
        room = width - len(first) - len(last) - len(" ()")
        if len(text) > room:
            # after a whole statement where one fits, so that no unit is cut from its number
            end = text.rfind(", ", 0, max(room - len("…"), 0)) + len(", ")
            end = end if end >= len(", x") else room - len("…")
            text = text[:end] + "…" if room > len("x…") else ""
        line = first + (f" ({text})" if text else "") + last
        return what, line if len(line) <= width else line[: width - 1] + "…"

    def _clear(self) -> None:
        if self._live:
            self._to.write("\r" + " " * self._shown + "\r")
            self._to.flush()


def _left(state: dict[str, Any], elapsed_s: float) -> str:
    """``, about 1 min left`` of what is counted, once a guess has something to rest on."""
    total, done = state.get("total"), state.get("done") or 0
    since = done - (state.get("first") or 0)
    if not total or since < LEAST_COUNT or elapsed_s < LEAST_SECONDS or done >= total:
        return ""
    left = elapsed_s / since * (total - done)
    return (
        f", about {left / 60:.0f} min left" if left >= 90 else f", about {max(left, 1):.0f} s left"
    )


def _clock(seconds: float) -> str:
    """``0:42``, ``12:05``, ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
