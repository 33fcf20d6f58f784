"""Observers of trainings that tests watch."""

from collections.abc import Callable
from typing import Any

from dlrm_core.run.reports import Line, Observer


class Calling(Observer):
    """Calls ``line`` with each line, and ``iteration`` with the iterations done."""

    def __init__(
        self,
        line: Callable[[Line], Any] = lambda line: None,
        iteration: Callable[[int], Any] = lambda done: None,
    ) -> None:
        self._line, self._iteration = line, iteration

    def line(self, line: Line) -> None:
        self._line(line)

    def iteration(self, done: int) -> None:
        self._iteration(done)
