"""Live progress: one bar for everything that takes a while, in a terminal or a notebook."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


class Bar:
    """tqdm's bar, for a ``with``; nothing to see where it is not shown or tqdm is not installed.

    Called with a text, it counts one more and shows the text.

    Args:
        what: is going on.
        unit: what is counted.
        total: how many there will be; None: nobody knows.
        shown: whether there is anything to show.
        done: how many were done before.
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
        self._bar: Any = None
        if not shown:
            return
        try:
            from tqdm.auto import tqdm
        except ImportError:  # a bare GPU node
            print("no progress bar: tqdm is not installed", file=sys.stderr)
            return
        self._bar = tqdm(total=total, initial=done, unit=unit, desc=what, **looks)

    def __call__(self, text: str) -> None:
        """Say what ended, or what is going on."""
        self.say(text)
        self.add(1 if self._counts(text) else 0)

    def say(self, text: str) -> None:
        """Show a text behind the bar, at the next chance."""
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)

    def add(self, count: int = 1) -> None:
        """Count so many more."""
        if self._bar is not None:
            self._bar.update(count)

    def show(self, count: int | None, text: str, what: str | None = None) -> None:
        """Show at once that ``count`` are done (None: as before), a text, and what is going on."""
        if self._bar is None:
            return
        if count is not None:
            self._bar.n = min(count, self._bar.total or count)
        self._bar.set_postfix_str(text, refresh=False)
        if what is not None:
            self._bar.set_description_str(what, refresh=False)
        self._bar.refresh()

    def fill(self, missing: int | None = None) -> None:
        """Show all as done; only where at most ``missing`` are not, if that is given."""
        bar = self._bar
        if bar is not None and bar.total and (missing is None or bar.n >= bar.total - missing):
            bar.n = bar.total

    def close(self) -> None:
        """End the bar, which stays as it is."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
