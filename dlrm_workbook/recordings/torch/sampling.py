"""Which Python lines a thread runs, sampled by another thread of its process.

Every few milliseconds the stack of the watched thread is read. That costs it two changes of the
interpreter's lock each time and nothing at its calls, so a loop of many small calls is not
slowed down more than others, as it is by a hook at every call. A loop that never lets go of the
lock is asked to after the interpreter's switch interval, which is short meanwhile, and waited for
without the slack that Linux gives timers: the lock is let go of where an operator is called, and
the longer it is waited for, the more samples fall there (of rows that are taken from a table and
made tensors the taking had 4 % of the samples and 45 % of the time). Samples are not quite evenly
spaced: each stands for the time around it.

Needs Python alone: programs that are measured have what they have.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import linecache
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from itertools import accumulate, chain, repeat, starmap, takewhile
from operator import attrgetter, methodcaller, truth
from statistics import median
from types import CodeType
from typing import Any

INTERVALS_S = (0.0005, 0.002)
"""Least and most seconds between two samples."""

MOST_SHARE = 0.05
"""Share of the time that sampling may compute: samples of many threads are taken less often."""

SWITCH_S = 1e-5
"""Seconds after which a thread that computes is asked for the interpreter's lock."""

_SET_TIMER_SLACK = 29
"""``PR_SET_TIMERSLACK`` of linux/prctl.h: nanoseconds by which a thread may be woken late."""

SAMPLES = 100
"""Wanted in an iteration, within those limits."""

MOST_SOURCE = 400_000
"""Characters of source text that a recording keeps."""

_LIBRARY = re.compile(
    r"/(?:site|dist)-packages/|/lib/python3\.\d+/|/dlrm_(?:workbook|kernels|ranks|studies)/|"
    r"/dlrm_core/parts\.py$|"
    r"^<(?!string>|stdin>|ipython-|cell)"
)
"""Files that are no code of the user's: libraries, and what measures."""

_PACKAGES = sys.stdlib_module_names | {
    *("torch", "torchvision", "torchaudio", "torchrec", "fbgemm_gpu", "triton", "apex", "ignite"),
    *("numpy", "pandas", "scipy", "sklearn", "pyarrow", "PIL", "tqdm", "wandb", "tensorboard"),
    *("transformers", "datasets", "accelerate", "peft", "deepspeed", "megatron", "fairscale"),
    *("lightning", "pytorch_lightning", "hydra", "IPython", "ipykernel", "traitlets", "tornado"),
}
"""Libraries, of which torch.profiler writes the paths without the folder that they lie in."""


@functools.cache
def is_user_code(file: str, function: str) -> bool:
    """Whether a function is the user's own: in no library, not Python's, not what measures it.

    Code without a file (``exec``, ``python -c``, a notebook's cell) is the user's, except for the
    methods that Python writes itself, such as the ``__init__`` of a dataclass.
    """
    generated = file == "<string>" and function.rpartition(".")[2].startswith("__")
    is_library = _LIBRARY.search(file) or re.split(r"[/\\.]", file)[0] in _PACKAGES
    return not is_library and not generated


def sources(codes: Iterable[CodeType]) -> list[tuple[str, int, str]]:
    """Source text of the user's functions as (file, first line, text), :data:`MOST_SOURCE` in all.

    Of the code of a file it is the whole file.
    """
    texts: dict[tuple[str, int], str] = {}
    left = MOST_SOURCE
    for code in codes:
        file, first = code.co_filename, code.co_firstlineno
        key = (file, 1 if code.co_name == "<module>" else first)
        if key in texts or not is_user_code(file, code.co_qualname):
            continue
        rows = linecache.getlines(file)
        if key[1] > 1:
            # a file that was changed meanwhile may end in the middle of anything
            with contextlib.suppress(Exception):
                rows = inspect.getblock(rows[first - 1 :])
        text = "".join(rows)
        if text and len(text) <= left:
            left -= len(text)
            texts[key] = text
    return [(*key, text) for key, text in texts.items()]


class _Soon(contextlib.ContextDecorator):
    """Python's lock soon after a thread asks for it, as long as anyone wants that."""

    def __init__(self) -> None:
        self._wanted, self._usual_s = 0, 0.0

    def __enter__(self) -> None:
        if not self._wanted:
            self._usual_s = sys.getswitchinterval()
            sys.setswitchinterval(min(self._usual_s, SWITCH_S))
        self._wanted += 1

    def __exit__(self, *error: object) -> None:
        self._wanted -= 1
        if not self._wanted:
            sys.setswitchinterval(self._usual_s)


SOON = _Soon()

_PLACE = attrgetter("f_code", "f_lasti")

Stack = tuple[int, ...]
"""Innermost first, two numbers a frame: the ``id`` of what is run, and the place in its
instructions. Code itself is slow to hash, and its lines are slow to look up, for long functions a
tenth of a millisecond; the watched thread waits meanwhile."""


class StackSampler:
    """Samples Python stacks between :meth:`start` and :meth:`stop`. ``thread`` is the one whose
    stack is read, as ``threading.get_ident()`` names it, ``iteration_s`` how long an iteration
    takes, about (None where that is not known); ``others`` reads the stacks of all other threads
    too."""

    def __init__(
        self, thread: int, iteration_s: float | None = None, *, others: bool = False
    ) -> None:
        self._watched, self._reads_others = thread, others
        least, most = INTERVALS_S
        self.interval_s = min(max((iteration_s or 0.0) / SAMPLES, least), most)
        self._samples: list[tuple[int, int]] = []
        self._others: list[tuple[int, int, int, int]] = []
        self._threads: dict[int, tuple[str, int | None]] = {}
        """Name of each other thread, and the clock that says how long it has run."""
        self._stacks: dict[Stack, int] = {}
        self._codes: dict[int, CodeType] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dlrm stack sampler", daemon=True)

    def start(self) -> None:
        SOON.__enter__()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        SOON.__exit__()

    def document(self) -> dict[str, Any]:
        """Everything sampled, as JSON holds it.

        ``frames`` are (file, first line of the function, function, line), ``stacks`` numbers of
        frames, outermost first, and ``samples`` (nanoseconds of ``time.perf_counter_ns``, stack).
        ``others`` are samples of other threads: (nanoseconds, thread, stack, nanoseconds that the
        thread has computed so far or -1), ``threads`` their names.
        """
        frames: dict[tuple[str, int, str, int], int] = {}
        lines = {number: _lines(code) for number, code in self._codes.items()}

        def number_of(number: int, place: int) -> int:
            code, line = self._codes[number], lines[number].get(place, 0)
            frame = (code.co_filename, code.co_firstlineno, code.co_qualname, line)
            return frames.setdefault(frame, len(frames))

        stacks = [
            [
                number_of(*frame)
                for frame in reversed(list(zip(stack[::2], stack[1::2], strict=True)))
            ]
            for stack in self._stacks
        ]
        return {
            "interval_ms": 1e3 * self.interval_s,
            "frames": list(frames),
            "stacks": stacks,
            "samples": self._samples,
            "threads": {number: name for number, (name, _) in self._threads.items()},
            "others": self._others,
        }

    def codes(self) -> list[CodeType]:
        """The functions sampled."""
        return list(self._codes.values())

    def _run(self) -> None:
        costs_s = deque([0.0], 9)  # their median: one that is interrupted would end the samples
        with contextlib.suppress(AttributeError):  # Linux has it; 50 microseconds are usual
            ctypes.CDLL(None).prctl(_SET_TIMER_SLACK, 1)
        while not self._over.wait(max(self.interval_s, median(costs_s) / MOST_SHARE)):
            began = time.thread_time()
            now, *stack = _read(self._watched)
            if not stack:
                return  # the thread has ended
            self._samples.append((now, self._number(stack)))
            for thread in sys._current_frames() if self._reads_others else ():
                if thread not in (self._watched, threading.get_ident()):
                    now, *stack = _read(thread)
                    row = (now, thread, self._number(stack), self._computed_ns(thread))
                    self._others += [row] if stack else []
            costs_s.append(time.thread_time() - began)

    def _number(self, frames: list[tuple[CodeType, int]]) -> int:
        stack: list[int] = []
        for code, place in frames:
            self._codes.setdefault(id(code), code)
            stack += (id(code), place)
        return self._stacks.setdefault(tuple(stack), len(self._stacks))

    def _computed_ns(self, thread: int) -> int:
        """Nanoseconds that a thread has been on a core; -1 where the system does not say."""
        if thread not in self._threads:
            alive = {one.ident: one for one in threading.enumerate()}
            known = alive.get(thread)
            # CPUCLOCK_PERTHREAD_MASK and CPUCLOCK_SCHED of Linux's posix-timers.h: asking keeps
            # Python's lock, reading a file of /proc lets go of it
            clock = ~known.native_id << 3 | 6 if known and known.native_id else None
            self._threads[thread] = (known.name if known else f"thread {thread}", clock)
        clock = self._threads[thread][1]
        try:
            return -1 if clock is None else time.clock_gettime_ns(clock)
        except OSError:
            return -1  # it has just ended, or the system has no such clock


def _read(thread: int) -> list[Any]:
    """The nanoseconds of ``time.perf_counter_ns`` and then (code, place) of each frame of a
    thread, innermost first; no frames where it has ended.

    Iterators of C run here in one call, between two instructions of Python, so that the lock is
    not let go of: else the thread goes on while its frames are read, and an outer one has the
    line of a later moment.
    """
    stacks = starmap(sys._current_frames, [()])
    innermost = map(methodcaller("get", thread), stacks)
    frames = takewhile(truth, accumulate(chain(innermost, repeat("f_back")), getattr))
    return list(chain(starmap(time.perf_counter_ns, [()]), map(_PLACE, frames)))


def _lines(code: CodeType) -> dict[int, int]:
    """The line of each place in the instructions of a function, its first where none is known."""
    first = code.co_firstlineno
    return {
        place: line or first
        for begin, end, line in code.co_lines()
        for place in range(begin, end, 2)
    }
