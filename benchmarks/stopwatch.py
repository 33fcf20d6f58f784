"""A stopwatch for programs that run in turns: each trains a few steps while the others stand still.

Runs one after the other differ by tenths on a shared machine, since it is slower at one time than
at another. Here all programs are alive at once, stopped by signals but for the one whose turn it
is, so that every pair of turns has the same weather.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import psutil

WARM_UP = 10
"""Steps of each program before the first turn."""

LIMIT_S = 300.0
"""Within so many seconds a program must have made the steps of a turn."""

HOOK = """
import os
if "STOPWATCH" in os.environ and os.environ.get("RANK", "0") == "0":
    import struct, time
    from torch.optim.optimizer import register_optimizer_step_post_hook

    file, first = os.open(os.environ["STOPWATCH"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), []

    def note(optimizer, args, kwargs):
        first.append(optimizer) if not first else None
        if optimizer is first[0]:
            os.write(file, struct.pack("d", time.perf_counter()))

    register_optimizer_step_post_hook(note)
"""
"""A ``sitecustomize.py`` that notes the end of each step of the first optimizer that steps."""


class Stopped:
    """A program that stands still but in its turns.

    Args:
        words: its command, run in ``folder`` with ``variables`` set.
    """

    def __init__(self, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        self._place = tempfile.TemporaryDirectory()
        place = Path(self._place.name)
        (place / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
        self._times, self._printed = place / "times", place / "printed"
        self._times.touch()
        added = {"STOPWATCH": str(self._times), "PYTHONPATH": str(place), **variables}
        with self._printed.open("wb") as printed:
            self._process = psutil.Popen(
                words,
                cwd=folder,
                env={**os.environ, **added},
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=printed,
            )

    def __enter__(self) -> Stopped:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._place.cleanup()

    def turn(self, steps: int) -> float:
        """Milliseconds of a mean step of so many, after the one that was under way."""
        began = len(self._noted())
        self._signal(signal.SIGCONT)
        until = time.monotonic() + LIMIT_S
        while len(self._noted()) < began + steps + 1:
            if self._process.poll() is not None or time.monotonic() > until:
                printed = self._printed.read_text(errors="replace")[-2000:]
                raise SystemExit(f"the program made no {steps} steps: {printed}")
            time.sleep(0.02)
        self._signal(signal.SIGSTOP)
        times = self._noted()[began : began + steps + 1]
        return 1e3 * (times[-1] - times[0]) / steps

    def _noted(self) -> tuple[float, ...]:
        data = self._times.read_bytes()
        return struct.unpack(f"{len(data) // 8}d", data[: len(data) // 8 * 8])

    def _signal(self, number: signal.Signals) -> None:
        """To the program and to all that it started: workers and ranks have groups of their own."""
        with suppress(psutil.NoSuchProcess):
            for one in [*self._process.children(recursive=True), self._process]:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(number)


Program = tuple[Sequence[str], Path, Mapping[str, str]]
"""A command, the folder to run it in, and variables to set."""


def in_turns(programs: Sequence[Program], turns: int, steps: int) -> list[list[float]]:
    """Milliseconds of a mean step (programs, turns), first one and then the other first."""
    with ExitStack() as stack:
        held = []
        for program in programs:
            held.append(stack.enter_context(Stopped(*program)))
            held[-1].turn(WARM_UP)
        times: list[list[float]] = [[] for _ in held]
        for number in range(turns):
            order = range(len(held)) if number % 2 else reversed(range(len(held)))
            for which in order:
                times[which].append(held[which].turn(steps))
    return times
