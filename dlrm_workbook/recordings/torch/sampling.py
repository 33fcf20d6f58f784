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

Stack = tuple[tuple[CodeType, int], ...]
"""Innermost first: what is run, and its current line."""


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
        frames: dict[tuple[CodeType, int], int] = {}
        stacks = [
            [frames.setdefault(frame, len(frames)) for frame in reversed(stack)]
            for stack in self._stacks
        ]
        return {
            "interval_ms": 1e3 * self.interval_s,
            "frames": [
                (code.co_filename, code.co_firstlineno, code.co_qualname, line)
                for code, line in frames
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
            stack = _stack(frame)
            del frame  # would keep alive what its function holds
            self._samples.append((now, self._stacks.setdefault(stack, len(self._stacks))))


def _stack(frame: FrameType | None) -> Stack:
    rows = []
    while frame is not None:
        rows.append((frame.f_code, frame.f_lineno or frame.f_code.co_firstlineno))
        frame = frame.f_back
    return tuple(rows)
