"""Which Python lines a thread runs, sampled by another thread of its process.

Every few milliseconds the stack of the watched thread is read. That costs it two changes of the
interpreter's lock each time and nothing at its calls, so a loop of many small calls is not
slowed down more than others, as it is by a hook at every call. A loop that never lets go of the
lock is asked to after the interpreter's switch interval, which is set to that of the samples
meanwhile. Samples are not quite evenly spaced: each stands for the time around it.

Needs Python alone: programs that are measured have what they have.
"""

from __future__ import annotations

import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any

INTERVALS_S = (0.0005, 0.002)
"""Least and most seconds between two samples."""

SAMPLES = 100
"""Wanted in an iteration, within those limits."""

Stack = tuple[int, ...]
"""Innermost first, two numbers a frame: the ``id`` of what is run, and the place in its
instructions. Code itself is slow to hash, and its lines are slow to look up, for long functions a
tenth of a millisecond; the watched thread waits meanwhile."""


class StackSampler:
    """Samples the Python stack of one thread between :meth:`start` and :meth:`stop`.

    Args:
        thread: whose stack is read, as ``threading.get_ident()`` names it.
        iteration_s: how long an iteration takes, about; None where that is not known.
    """

    def __init__(self, thread: int, iteration_s: float | None = None) -> None:
        self._watched = thread
        least, most = INTERVALS_S
        self.interval_s = min(max((iteration_s or 0.0) / SAMPLES, least), most)
        self._samples: list[tuple[int, int]] = []
        self._stacks: dict[Stack, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrm stack sampler", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._usual_s = sys.getswitchinterval()
        sys.setswitchinterval(min(self._usual_s, self.interval_s))
        self._thread.start()

    def stop(self) -> None:
        """Take no more samples."""
        self._over.set()
        self._thread.join()
        sys.setswitchinterval(self._usual_s)

    def document(self) -> dict[str, Any]:
        """Everything sampled, as JSON holds it.

        ``frames`` are (file, first line of the function, function, line), ``stacks`` numbers of
        frames, outermost first, and ``samples`` (nanoseconds of ``time.perf_counter_ns``, stack).
        """
        frames: dict[tuple[int, int], int] = {}
        lines = {number: _lines(code) for number, code in self._codes.items()}
        stacks = [
            [
                frames.setdefault((number, lines[number].get(place, 0)), len(frames))
                for number, place in reversed(list(zip(stack[::2], stack[1::2], strict=True)))
            ]
            for stack in self._stacks
        ]
        return {
            "interval_ms": 1e3 * self.interval_s,
            "frames": [
                (code.co_filename, code.co_firstlineno, code.co_qualname, line)
                for code, line in ((self._codes[number], line) for number, line in frames)
            ],
            "stacks": stacks,
            "samples": self._samples,
        }

    def _run(self) -> None:
        while not self._over.wait(self.interval_s):
            frame = sys._current_frames().get(self._watched)
            now = time.perf_counter_ns()
            if frame is None:
                return  # the thread has ended
            stack = self._stack(frame)
            del frame  # would keep alive what its function holds
            self._samples.append((now, self._stacks.setdefault(stack, len(self._stacks))))

    def _stack(self, frame: FrameType | None) -> Stack:
        rows: list[int] = []
        while frame is not None:
            code = frame.f_code
            self._codes.setdefault(id(code), code)
            rows += (id(code), frame.f_lasti)
            frame = frame.f_back
        return tuple(rows)


def _lines(code: CodeType) -> dict[int, int]:
    """The line of each place in the instructions of a function, its first where none is known."""
    first = code.co_firstlineno
    return {
        place: line or first
        for begin, end, line in code.co_lines()
        for place in range(begin, end, 2)
    }
