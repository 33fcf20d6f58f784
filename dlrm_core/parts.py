"""The parts of a DLRM training step, and the names under which profilers see them.

Everything that measures or explains speaks of these: a component (which part of
the model or of the loop) and a phase (what is being done with it). The workload
runs each pair inside one Python function called ``component_phase`` (what
HPCToolkit's ``-a python`` shows) and one profiler range called
``dlrm::component::phase`` (what torch.profiler shows), so that both engines
attribute time by the same names. Likewise an iteration runs inside a function called
``dlrm_iteration`` and a range called ``dlrm::iteration``. No name depends on the file
that the code lies in, so files can move and recordings can still be read.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

COMPONENTS = (
    "data",
    "transfer",
    "bottom_mlp",
    "embedding",
    "interaction",
    "top_mlp",
    "loss",
    "optimizer",
    "communication",
    "other",
)
"""In the order in which a step meets them; figures and tables keep this order."""

PHASES = ("forward", "backward", "update")

SPAN_PREFIX = "dlrm::"
ITERATION_SPAN = "dlrm::iteration"
"""Range around one whole iteration, data included. Its children are the parts."""

ITERATION_FUNCTION = "dlrm_iteration"
"""Python function around one whole iteration, for profilers that see only functions."""

P = ParamSpec("P")
R = TypeVar("R")

SpanRow = tuple[str, int, int]
"""Name of a range, its start and its end in nanoseconds since the epoch."""

_log: list[SpanRow] | None = None

Around = Callable[[str, str], contextlib.AbstractContextManager[None]]
"""Opened around a part's function, inside its range, with component and phase."""

_around: Around | None = None


@contextlib.contextmanager
def log_spans() -> Iterator[list[SpanRow]]:
    """Log the ranges of the host by the system clock while the context is open.

    A sampling profiler stamps its samples with the same clock, so a sample
    belongs to the range that is open at its time: parts are told apart without
    Python frames in the call paths, which cost up to 20 times (HPCToolkit's
    ``-a python`` runs a hook at every Python call) and lose the samples that
    fall into the hook.
    """
    global _log
    before, _log = _log, []
    try:
        yield _log
    finally:
        _log = before


class span:
    """A range that torch.profiler records, and that ``log_spans`` logs.

    A step has 16; open or not, they cost it time that belongs to no part: with
    ``record_function`` 7 microseconds each in a tight loop, several times that in a step
    with cold caches, this way a fifth. torch writes such a range as an operator; the
    reader of traces knows ours by their prefix.
    """

    __slots__ = ("_name", "_range", "_rows", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._rows = _log
        if self._rows is not None:
            self._start = time.time_ns()
        self._range = _range_of()(self._name)
        self._range.__enter__()

    def __exit__(self, *error: object) -> None:
        self._range.__exit__(*error)
        if self._rows is not None:
            self._rows.append((self._name, self._start, time.time_ns()))


@functools.cache
def _range_of() -> Callable[[str], Any]:
    """torch's range that costs least; imported here, since analyses need only the names."""
    import torch

    # the C++ one that torch.compile's own code opens; where it is gone, the public one
    fast = getattr(torch._C._profiler, "_RecordFunctionFast", None)
    return fast or torch.profiler.record_function


@contextlib.contextmanager
def capturing(around: Around) -> Iterator[None]:
    """Open ``around`` around every part's work meanwhile: how a step is captured piece by piece."""
    global _around
    before, _around = _around, around
    try:
        yield
    finally:
        _around = before


def span_name(component: str, phase: str) -> str:
    """Name of the profiler range of a part: ``dlrm::component::phase``."""
    return f"{SPAN_PREFIX}{component}::{phase}"


def function_name(component: str, phase: str) -> str:
    """Name of the Python function of a part: ``component_phase``."""
    return f"{component}_{phase}"


def part_label(component: str, phase: str = "") -> str:
    """A part as a reader calls it: ``top MLP backward``."""
    return f"{component.replace('_mlp', ' MLP')} {phase}".strip()


def parse_span(name: str) -> tuple[str, str] | None:
    """(component, phase) of a range or function name, or None if it names no part."""
    if name.startswith(SPAN_PREFIX):
        component, _, phase = name[len(SPAN_PREFIX) :].partition("::")
    else:
        component, _, phase = name.rpartition("_")
    if component in COMPONENTS and phase in PHASES:
        return component, phase
    return None


def iteration(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate the function that runs one whole iteration, whatever it is called."""

    # profilers show this name, which is ITERATION_FUNCTION
    @functools.wraps(function)
    def dlrm_iteration(*args: P.args, **kwargs: P.kwargs) -> R:
        with span(ITERATION_SPAN):
            return function(*args, **kwargs)

    return dlrm_iteration


def run_part(component: str, phase: str, work: Callable[[], R]) -> R:
    """Do some work as ``phase`` of ``component``, in a function and a range of its name."""
    return _runner(component, phase)(work)


@functools.cache
def _runner(component: str, phase: str) -> Callable[[Callable[[], Any]], Any]:
    def run(work: Callable[[], Any]) -> Any:
        return work()

    name = function_name(component, phase)
    # profilers show the name that the code itself has
    run.__code__ = run.__code__.replace(co_name=name, co_qualname=name)
    run.__name__ = run.__qualname__ = name
    return part(component, phase)(run)


def part(component: str, phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the function that does ``phase`` of ``component``.

    Raises ValueError if it is not called ``component_phase``; HPCToolkit would then attribute its
    time to nothing.
    """
    if component not in COMPONENTS or phase not in PHASES:
        raise ValueError(f"no such part: {component} {phase}")
    name = span_name(component, phase)

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        if function.__name__ != function_name(component, phase):
            raise ValueError(
                f"{function.__name__} must be called {function_name(component, phase)}"
            )

        @functools.wraps(function)
        def in_span(*args: P.args, **kwargs: P.kwargs) -> R:
            with span(name):
                if _around is None:
                    return function(*args, **kwargs)
                with _around(component, phase):
                    return function(*args, **kwargs)

        return in_span

    return decorate
