"""Live progress: one bar for everything that takes a while, in a terminal or a notebook."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

TOLD_TO = "DLRM_PROGRESS_FILE"
"""Environment variable with the file that bars write their state to instead of being drawn."""

TELL_SECONDS = 0.2
"""Least time between two writes of that file."""


class _Told:
    """A bar that is not drawn here: the calls of tqdm's that :class:`Bar` makes.

    Another process draws it by the file ``path``; without one nobody does. The file holds one JSON
    object: ``what``, ``unit``, ``done``, ``total`` (or null), ``text``, and ``began`` (seconds
    since the epoch) with ``first``, the count at that time. It is removed when the bar ends.
    """

    def __init__(
        self, path: str | None, what: str, unit: str, total: int | None, done: int
    ) -> None:
        self.n, self.total = done, total
        self._path, self._told = Path(path) if path else None, 0.0
        self._state: dict[str, Any] = {"what": what, "unit": unit, "total": total, "text": ""}
        self._state |= {"began": time.time(), "first": done}
        self.refresh()

    def set_postfix_str(self, text: str, refresh: bool = True) -> None:
        self._state["text"] = text

    def set_description_str(self, what: str, refresh: bool = True) -> None:
        if what != self._state["what"]:
            self._state["what"], self._told = what, 0.0

    def update(self, count: int) -> None:
        self.n += count
        self.refresh()

    def refresh(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._told < TELL_SECONDS:
            return
        self._told = now
        part = self._path.with_suffix(".part")
        with suppress(OSError):  # whoever watches may have gone: the work goes on
            part.write_text(json.dumps(self._state | {"done": self.n}), encoding="utf-8")
            part.replace(self._path)

    def close(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


class Bar:
    """tqdm's bar, for a ``with``; nothing to see where it is not shown or tqdm is not installed.

    Under ``dlrm run`` it is not drawn: its state goes to the file that :data:`TOLD_TO` names.
    Called with a text, it counts one more and shows the text.

    Args:
        what: is going on.
        unit: what is counted; ``total`` of them, unless nobody knows, and ``done`` before.
        counts: whether a text stands for something that ended.
        looks: further settings of tqdm's.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        total: int | None = None,
        *,
        shown: bool = True,
        done: int = 0,
        counts: Callable[[str], bool] = lambda text: True,
        **looks: Any,
    ) -> None:
        self._counts = counts
        path = os.environ.get(TOLD_TO) if shown else None
        self._bar: Any = _Told(path, what, unit, total, done)
        if path or not shown:
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:  # a bare GPU node
            print("no progress bar: tqdm is not installed", file=sys.stderr)
        else:
            self._bar = tqdm(total=total, initial=done, unit=unit, desc=what, **looks)

    def __call__(self, text: str) -> None:
        """Say what ended, or what is going on."""
        self.say(text)
        self.add(1 if self._counts(text) else 0)

    def say(self, text: str) -> None:
        """Show a text behind the bar, at the next chance."""
        self._bar.set_postfix_str(text, refresh=False)

    def add(self, count: int = 1) -> None:
        self._bar.update(count)

    def show(self, count: int | None, text: str, what: str | None = None) -> None:
        """Show at once that ``count`` are done (None: as before), a text, and what is going on."""
        if count is not None:
            self._bar.n = min(count, self._bar.total or count)
        self._bar.set_postfix_str(text, refresh=False)
        if what is not None:
            self._bar.set_description_str(what, refresh=False)
        self._bar.refresh()

    def fill(self, missing: int | None = None) -> None:
        """Show all as done; only where at most ``missing`` are not, if that is given."""
        total = self._bar.total
        if total and (missing is None or self._bar.n >= total - missing):
            self._bar.n = total

    def close(self) -> None:
        """End the bar, which stays as it is."""
        self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
